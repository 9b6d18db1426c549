"""Preflight beside releases: names that are not there, a library's functions that are replaced, overrides."""

import contextlib
import functools
import sys
import types

import pytest
import torch
import trl
from packaging.version import Version

from failurelab.failures import names
from failurelab.preflight import repairs
from failurelab.preflight.answer import COMMAND_LINE, Answer, Change, Finding, Verdict
from failurelab.preflight.judges import releases, replaced
from failurelab.preflight.script_text import Text
from failurelab.preflight.stage.releases import LeftOut
from failurelab.preflight.training import Training
from failurelab.preflight.trials import STILL, Rounds

TODAY = Version(trl.__version__) >= Version("1")


def of_this_file(file):
    return file == __file__


def at_the_call(text):
    """Return what places a call in a text; a script has the last one of it."""
    script = Text("train.py", text)
    given = repairs.EditableScript(lambda file: script if file == "train.py" else None)
    given.calls = lambda kind, index=-1: iter([(script, script.tree.body[-1].value)])
    return given


def edited(repair, text):
    change = repair.change(at_the_call(text))
    return change and change.files["train.py"]


@pytest.mark.parametrize(
    ("error", "new"),
    [
        ("TrainingArguments.__init__() got an unexpected keyword argument 'evaluation_strategy'", "eval_strategy"),
        ("GRPOTrainer.__init__() got an unexpected keyword argument 'tokenizer'", "processing_class"),
        ("GRPOConfig.__init__() got an unexpected keyword argument 'use_liger_loss'", "use_liger_kernel"),
        ("GRPOConfig.__init__() got an unexpected keyword argument 'max_prompt_length'", ""),
        ("cannot import name 'PPOTrainer' from 'trl' (x)", "trl.experimental.ppo.PPOTrainer"),
        ("cannot import name 'AdamW' from 'transformers' (x)", "torch.optim.AdamW"),
        ("No module named 'numpy'", ""),
    ],
)
def test_what_takes_the_place_of_a_name(error, new):
    assert names.replacement(error) == new


@pytest.mark.skipif(not TODAY, reason="these keywords are there in older releases")
def test_arguments_without_what_their_class_does_not_take(tmp_path):
    """Removed, renamed and mistyped at once: all else is as it was given, and each is told with its release."""
    left_out = LeftOut()
    with left_out.arguments():
        made = trl.GRPOConfig(
            str(tmp_path), bf16=False, max_prompt_length=9, evaluation_strategy="no", beta=0.5, max_completion_lenght=3
        )
        with pytest.raises(TypeError, match="not_of_this"):
            raise TypeError("got an unexpected keyword argument 'not_of_this'")
    assert made.beta == 0.5 and str(made.eval_strategy.value) == "no"
    (told,) = releases.of_keywords(left_out, went_on=True)
    assert told.part == "GRPOConfig" and told.tried and "went with trl 0.28.0" in told.evidence
    assert "eval_strategy in the place of evaluation_strategy" in told.repair
    assert made.max_completion_length == 3 and "without max_prompt_length" in told.evidence
    with pytest.raises(TypeError, match="max_prompt_length"):
        trl.GRPOConfig(str(tmp_path), bf16=False, max_prompt_length=9)
    text = (
        "args = 1\nGRPOConfig('o', max_prompt_length=9, evaluation_strategy='no', beta=0.5, max_completion_lenght=3)\n"
    )
    assert (
        edited(told.undo, text) == "args = 1\nGRPOConfig('o', eval_strategy='no', beta=0.5, max_completion_length=3)\n"
    )


@pytest.mark.skipif(not TODAY, reason="these keys are there in older releases")
def test_keys_that_trl_drops_from_a_file_are_told(tmp_path):
    """`trl grpo --config` trains without a key that it does not know, and says nothing; its launch reads others."""
    file = tmp_path / "grpo.yaml"
    file.write_text("learning_rat: 1.0\nmax_prompt_length: 9\nnum_processes: 2\nbeta: 0.5\nof_another_tool: 1\n")
    left_out = LeftOut()
    with left_out.arguments():
        parser = trl.TrlParser((trl.GRPOConfig,))
        words = ["--config", str(file), "--output_dir", str(tmp_path), "--bf16", "false"]
        (made, _) = parser.parse_args_and_config(words, return_remaining_strings=True)
    assert made.beta == 0.5 and not left_out.of
    told = {finding.part: finding.evidence for finding in releases.of_files(left_out)}
    assert set(told) == {"learning_rat", "max_prompt_length"}
    assert "`learning_rate`" in told["learning_rat"] and "0.28.0" in told["max_prompt_length"]


def test_an_error_from_inside_a_call_is_the_script_s():
    def inner(made, **kwargs):
        return dict(made, **kwargs)(y=1)

    def outer(made, x=0):
        inner(made, x=x)
        raise TypeError("f() got an unexpected keyword argument 'x'")

    left_out = LeftOut()
    with pytest.raises(TypeError):
        left_out.call("trainer", outer, object(), (), {"x": 1})
    assert not left_out.of


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("f(a=1, b=2, c=3)", "f(a=1)"),
        ("f(b=2, c=3)", "f()"),
        ("f(b=2, a=1, c=3, d=4)", "f(a=1, d=4)"),
        ("f(\n    a=1,\n    b=2,\n    c=3,\n)", "f(\n    a=1,\n)"),
    ],
)
def test_keywords_that_stand_beside_each_other_are_left_out_together(given, wanted):
    assert edited(repairs.Keywords("arguments", {"b": None, "c": None}), given) == wanted


@pytest.mark.parametrize(
    ("text", "module", "wanted"),
    [
        ("from trl import A\n", None, "pass\n"),
        ("from trl import A\n", "trl.x", "from trl.x import A\n"),
        ("from trl import A, B\n", None, "from trl import B\n"),
        ("from trl import B, A as C\n", "trl.x", "from trl.x import A as C\nfrom trl import B\n"),
        ("from trl import (\n    B,\n    A,\n)\n", None, "from trl import (\n    B,\n    )\n"),
        ("import trl\n", None, None),
    ],
)
def test_an_import_is_taken_out_or_comes_from_elsewhere(text, module, wanted):
    assert edited(repairs.Import("train.py", "A", module), text) == wanted


def test_settings_that_no_release_here_takes_are_taken_out():
    yaml = "learning_rate: 1e-6\nmax_prompt_length: 9  # short\nlist:\n  - a\n  - b\nbeta: 0.1\n"
    line = "--config x.yaml --max_prompt_length 9 --beta 0.1"
    given = repairs.EditableScript(lambda file: None, settings={"/x.yaml": yaml, COMMAND_LINE: line})
    files = repairs.WithoutSettings(("max_prompt_length", "list")).change(given).files
    assert files["/x.yaml"] == "learning_rate: 1e-6\nbeta: 0.1\n"
    assert files[COMMAND_LINE] == "--config x.yaml --beta 0.1"


def compute_loss(self, model, inputs):
    return 0


@pytest.mark.skipif(not TODAY, reason="what is installed decides what is said")
def test_an_error_about_a_name_says_which_release_and_has_an_edit():
    (told,) = releases.of_error(ImportError("cannot import name 'OnlineDPOTrainer' from 'trl' (x)"), of_this_file)
    assert told.part == "OnlineDPOTrainer" and "went with trl 0.29.0" in told.evidence
    kept, taken_out = told.undo
    assert kept.module == "trl.experimental.online_dpo" and taken_out.module is None
    for said in (
        "Some keys are not used by the HfArgumentParser: ['max_prompt_length']",
        "Some specified arguments are not used by the HfArgumentParser: ['--max_prompt_length', '9']",
        "Unknown arguments from config file: ['--max_prompt_length', '9']. Please remove them",
    ):
        (told,) = releases.of_error(ValueError(said), of_this_file)
        assert told.undo == repairs.WithoutSettings(("max_prompt_length",)) and "0.28.0" in told.evidence
        assert "`9`" not in told.evidence
    try:
        compute_loss(None, None, None, num_items_in_batch=3)
    except TypeError as error:
        error.args = (f"Mine.{error}",)
        (told,) = releases.of_error(error, of_this_file)
    assert told.undo == repairs.AnyKeywords(compute_loss, positional=True) or told.undo.function is compute_loss
    assert not list(releases.of_error(ValueError("another one"), of_this_file))


def test_two_libraries_that_do_not_fit_are_told_by_the_releases_that_do(monkeypatch):
    """The script has no part in it: transformers calls what trl has overridden."""
    monkeypatch.setattr(releases, "installed", lambda: {"trl": "0.14.0", "transformers": "4.52.4"})
    said = "OnlineDPOTrainer._maybe_log_save_evaluate() got an unexpected keyword argument 'learning_rate'"
    (told,) = releases.of_error(TypeError(said), of_this_file)
    assert told.undo is None and told.repair == "Install trl 0.16.1 or later, or transformers before 4.51.0."


def test_a_name_is_healed_where_the_script_comes_to_its_training():
    """What does not heal is not shown as a diff: it was one that deletes a method that had nothing to do with it."""
    ended = Finding("release", "e", "r", changes=(Change({"a": "1"}),), ends=True, part="A")
    wrong = Finding("F21", "e", "r", changes=(Change({"a": "2"}),))

    def run(change):
        there = change.files.get("a")
        return Answer(findings=[ended] if there is None else [wrong], error="x" * (there is None))

    rounds = Rounds(run, run(Change()))
    rounds.try_all()
    (trial,) = rounds.named
    assert trial.finding.failure == "release" and trial.finding.tried
    (other,) = rounds.suspected()
    assert other.finding.why == STILL and other.change is None


# What the script has put in the place of a library's.


def other_softmax(logits, index):
    return logits


def twice(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


@pytest.fixture
def library(monkeypatch):
    """A module of trl's with a function and a class, and another that shows the same function once more."""
    text = (
        "def f(x):\n    return x\n\nclass K:\n    def m(self):\n        return 1\n    def n(self):\n        return 2\n"
    )
    modules = {}
    for name in ("trl.library_of_a_test", "trl.library_of_a_test.inner"):
        modules[name] = types.ModuleType(name)
        monkeypatch.setitem(sys.modules, name, modules[name])
    inner = modules["trl.library_of_a_test.inner"]
    exec(compile(text, "/site-packages/trl/inner.py", "exec"), vars(inner))
    vars(modules["trl.library_of_a_test"]).update(f=inner.f, K=inner.K)
    return types.SimpleNamespace(outer=modules["trl.library_of_a_test"], inner=inner)


def test_what_the_script_puts_on_a_module_a_class_or_an_object_is_found(library):
    """By its code, also in a decorator around the library's own; names that are shown again are no patch."""
    thing = library.inner.K()
    thing.given = other_softmax  # an attribute that its class does not have, such as a reward function
    assert not replaced.find_replaced(of_this_file, thing)
    library.outer.f = library.inner.f = other_softmax
    library.inner.K.m = twice(library.inner.K.m)
    thing.n = types.MethodType(compute_loss, thing)
    found = replaced.find_replaced(of_this_file, thing)
    at = other_softmax.__code__.co_firstlineno
    assert [each.name for each in found] == [
        "trl.library_of_a_test.inner.f", "trl.library_of_a_test.inner.K.m", "K.n",
    ]  # fmt: skip
    library.inner.__file__ = __file__  # a copy of the library in the script's own folder
    assert [each.name for each in replaced.find_replaced(of_this_file)] == ["trl.library_of_a_test.f"]
    assert str(found[0]) == f"trl.library_of_a_test.inner.f (test_preflight_releases.py, line {at})"


def test_the_statements_that_put_it_there_are_taken_out_and_no_method_is():
    text = (
        "import trl.u as u\nclass Mine(T):\n    def soft(self):\n        return 1\n\nu.soft = mine\n"
        "setattr(u, 'soft', mine)\nu.hard = mine\n"
    )
    wanted = "import trl.u as u\nclass Mine(T):\n    def soft(self):\n        return 1\n\nu.hard = mine\n"
    assert edited(replaced.WithoutPatches(("soft",), ("train.py", "gone.py")), text) == wanted


# Overrides.


class Parent:
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        inputs.get("kept from an earlier step")
        return inputs["x"].sum()


Parent.__module__, Parent.__name__ = "trl.of_a_test", "GRPOTrainer"


class HandsOn(Parent):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        extra = inputs.get("weights_of_mine")
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        return loss if extra is None else loss * extra


class Logs(Parent):
    def compute_loss(self, model, inputs):
        self.seen = inputs["x"]
        return super().compute_loss(model, inputs)


class LikeTheLibrary(Parent):
    def compute_loss(self, model, inputs):
        inputs.get("kept from an earlier step")
        return super().compute_loss(model, inputs)


class Scales(Parent):
    def compute_loss(self, model, inputs):
        return 1.0 * super().compute_loss(model, inputs)


class Changes(Parent):
    def compute_loss(self, model, inputs):
        inputs["x"] += 1
        return super().compute_loss(model, inputs)


@pytest.mark.parametrize(
    ("kind", "verdict"),
    [
        (HandsOn, Verdict.SUSPECTED),
        (LikeTheLibrary, Verdict.NOT_CHECKED),
        (Logs, Verdict.NOT_CHECKED),
        (Scales, None),
        (Changes, None),
        (Parent, None),
    ],
)
def test_an_override_whose_result_is_the_library_s(kind, verdict):
    """`inputs.get` of a key that never comes, and then `super()`: nothing was said of it."""
    trainer = kind()
    judge = replaced.OverrideJudge(Training(trainer, {}))
    with contextlib.ExitStack() as stack:
        stack.enter_context(judge.listening())
        for _ in range(3):
            trainer.compute_loss(None, inputs={"x": torch.ones(2)})
    found = list(judge.answers())
    assert [each.verdict for each in found] == [verdict] * (verdict is not None)
    if verdict is Verdict.SUSPECTED:
        assert "weights_of_mine" in found[0].evidence and found[0].place.line
    assert "compute_loss" not in vars(trainer) and trainer.compute_loss(None, {"x": torch.ones(2)}) >= 2


class Clamps(Parent):
    def compute_loss(self, model, inputs):
        return super().compute_loss(model, inputs).clamp(min=0)


class Turns(Parent):
    def compute_loss(self, model, inputs):
        loss = super().compute_loss(model, inputs)
        return -loss if loss < 0 else loss


class Adds(Parent):
    def compute_loss(self, model, inputs):
        return 0.5 * super().compute_loss(model, inputs).clamp(-10, 10) + inputs["x"].mean()


@pytest.mark.parametrize(("kind", "told"), [(Clamps, True), (Turns, True), (Adds, False), (Scales, False)])
def test_a_loss_whose_sign_an_override_takes_away(kind, told):
    """A loss of 0 in the cut step hid it: half of the later ones are below 0."""
    trainer = kind()
    judge = replaced.OverrideJudge(Training(trainer, {}))
    with judge.listening():
        trainer.compute_loss(None, inputs={"x": torch.ones(2, requires_grad=True)})
    found = [each.key for each in judge.answers() if each.accuses]
    assert found == ["F21:compute_loss:sign"] * told


class DeadParent:
    """As a library's trainer and callback are."""

    def compute_loss(self, model, inputs):
        return 0.0

    def _get_per_token_logps_and_entropies(self, model):
        return None, None


class DeadEvents:
    def on_train_begin(self, args, state, control):
        """As in transformers."""


DeadParent.__module__ = DeadEvents.__module__ = "trl.of_a_test"
DeadParent.__name__ = "GRPOTrainer"


class OldName(DeadParent):
    def _get_per_token_logps(self, model):  # of trl 0.15 to 0.19
        return super()._get_per_token_logps(model)


class Misspelt(DeadParent):
    def compute_losses(self, model, inputs):
        return 1.0


class ForBoth(DeadParent):
    def _get_per_token_logps(self, model):
        return None

    def _get_per_token_logps_and_entropies(self, model):
        return None


class Helps(DeadParent):
    def _compute_loss(self, model, inputs):  # a name of other releases, and called
        return 1.0

    def compute_loss(self, model, inputs):
        return self._compute_loss(model, inputs)

    def show_rollouts(self):  # which nothing here calls
        """Nothing of a library's."""


class Misnamed(DeadEvents):
    def on_training_begin(self, args, state, control):
        """Of no release."""


@pytest.mark.parametrize(
    ("kind", "dead"),
    [
        (OldName, "_get_per_token_logps_and_entropies"), (Misspelt, "compute_loss"), (Misnamed, "on_train_begin"),
        (ForBoth, None), (Helps, None),
    ],
)  # fmt: skip
def test_a_method_that_nothing_calls_by_its_name_is_suspected(kind, dead, monkeypatch):
    """An override of an older release's method, or a misspelt one, leaves the run as the library has it."""
    monkeypatch.setattr(replaced, "installed", lambda: {"trl": "1.16.0"})
    trainer = kind() if kind is not Misnamed else types.SimpleNamespace(
        callback_handler=types.SimpleNamespace(callbacks=[kind()])
    )  # fmt: skip
    found = list(replaced.OverrideJudge(Training(trainer, {}, own=of_this_file)).answers())
    assert [each.verdict for each in found] == [Verdict.SUSPECTED] * (dead is not None)
    assert all(dead in each.repair and each.place.line for each in found)
