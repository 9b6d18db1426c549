"""The libraries' own words: names that are not there, arguments that are refused, functions that are replaced."""

import functools
import sys
import types

import pytest
import transformers
import trl
from packaging.version import Version

from failurelab_preflight.answer import Answer
from failurelab_preflight.finding import Change, Finding, Verdict
from failurelab_preflight.judges import releases, replaced
from failurelab_preflight.stage import cuts, own_code
from failurelab_preflight.stage.callbacks import errors_noted
from failurelab_preflight.stage.releases import LeftOut
from failurelab_preflight.trials import STILL, Rounds

TODAY = Version(trl.__version__) >= Version("1")


def of_this_file(file):
    return file == __file__


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


def compute_loss(self, model, inputs):
    return 0


@pytest.mark.skipif(not TODAY, reason="what is installed decides what is said")
def test_an_error_about_a_name_says_which_release_and_what_to_write():
    (told,) = releases.of_error(ImportError("cannot import name 'OnlineDPOTrainer' from 'trl' (x)"), of_this_file)
    assert told.part == "OnlineDPOTrainer" and "went with trl 0.29.0" in told.evidence
    assert told.repair == "Write from trl.experimental.online_dpo import OnlineDPOTrainer."
    for said in (
        "Some keys are not used by the HfArgumentParser: ['max_prompt_length']",
        "Some specified arguments are not used by the HfArgumentParser: ['--max_prompt_length', '9']",
        "Unknown arguments from config file: ['--max_prompt_length', '9']. Please remove them",
    ):
        (told,) = releases.of_error(ValueError(said), of_this_file)
        assert told.repair == "Take max_prompt_length out." and "0.28.0" in told.evidence
        assert "`9`" not in told.evidence
    try:
        compute_loss(None, None, None, num_items_in_batch=3)
    except TypeError as error:
        error.args = (f"Mine.{error}",)
        (told,) = releases.of_error(error, lambda file: False)  # as a library calls it
    assert "**kwargs" in told.repair
    assert not list(releases.of_error(ValueError("another one"), of_this_file))


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


BEST = {"load_best_model_at_end": True, "save_strategy": "steps"}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (BEST, True),
        ({"dataloader_prefetch_factor": 2}, True),
        ({**BEST, "eval_strategy": "steps", "eval_steps": 500}, False),
        ({"dataloader_prefetch_factor": 2, "dataloader_num_workers": 1}, False),
    ],
)
def test_arguments_that_transformers_compares_are_compared_as_given(tmp_path, given, says):
    """They were cut before transformers saw them: what it refuses was trained for three steps, and nothing was said."""
    findings = []
    with cuts.CutArguments(3, str(tmp_path)).cut():
        try:
            trl.GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, **given)
        except ValueError as error:
            findings += releases.refused(error)
    assert [finding.part for finding in findings] == ["arguments"] * says
    assert not list(releases.refused(ValueError("another one")))


@pytest.mark.parametrize(("asked", "raises"), [({}, True), ({"eval_strategy": "steps", **BEST}, False)])
def test_a_callback_of_a_library_reads_arguments_as_given(tmp_path, asked, raises):
    """`EarlyStoppingCallback` asserts what is cut: it stood under NOT CHECKED, with the fault and without it."""
    cutting = cuts.CutArguments(3, str(tmp_path))
    with cutting.cut():
        arguments = trl.GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to=[], **asked)
        cutting.settle(arguments)
    stopping = transformers.EarlyStoppingCallback(3)
    handler = types.SimpleNamespace(callbacks=[stopping])
    trainer = types.SimpleNamespace(args=arguments, callback_handler=handler, state=transformers.TrainerState())
    control, own = transformers.TrainerControl(), own_code.OwnCode(tmp_path / "train.py")
    with errors_noted(trainer, own, [stopping], cutting.uncut(arguments)) as findings:
        stopping.on_train_begin(arguments, trainer.state, control)
    assert [finding.verdict for finding in findings] == [Verdict.SUSPECTED] * raises


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
    text = "def f(x):\n    return x\nclass K:\n    def m(self):\n        return 1\n    def n(self):\n        return 2\n"
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
