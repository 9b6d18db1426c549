"""Preflight beside its judges: what is cut and what is kept as asked, whose rank is seen, repairs as diffs, answers."""

import contextlib
import copy
import io
import itertools
import json
import os
import pathlib
import re
import sys
import types

import datasets
import peft
import pytest
import small
import torch
import transformers
import trl
from packaging.version import Version
from small import qwen2

from failurelab import failures, updates
from failurelab.gradients import GradientReport
from failurelab.simulate.no_gpu import Mapped
from failurelab_course.experiments import models
from failurelab_preflight import cli, launcher_line, launcher_options, notebook, run, script_text
from failurelab_preflight.answer import Answer, Changed, Differences, Effect, Setting
from failurelab_preflight.finding import CUT, RELEASE, SCRIPT, Change, Finding, Location, Quantity, Verdict
from failurelab_preflight.judges import four_bit_placement, gradients, rollouts
from failurelab_preflight.judges.updates import policy_load
from failurelab_preflight.report import terminal
from failurelab_preflight.reward_table import Line, RewardTable
from failurelab_preflight.script_error import describe_error
from failurelab_preflight.session import TimeIsOver
from failurelab_preflight.stage import callbacks, cuts, gpus, own_code, processes, ranks, saving
from failurelab_preflight.stage import models as small_models
from failurelab_preflight.training import Load, Source, Training


def config(**more):
    return transformers.Qwen2Config(
        **{"vocab_size": 3000, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24}
        | {"num_attention_heads": 14, "num_key_value_heads": 2, "max_window_layers": 24}
        | more
    )


def test_a_model_is_cut_in_width_and_depth_and_keeps_class_and_vocabulary():
    """Policy and reference are loaded from one name: they must be the same model, or KL would start above 0."""
    model, again = (small_models.build(transformers.Qwen2ForCausalLM, config()) for _ in range(2))
    assert type(model) is transformers.Qwen2ForCausalLM
    assert model.config.vocab_size == 3000 and model.config.num_hidden_layers == 2 and model.config.hidden_size == 64
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters()))


def test_a_random_model_draws_no_image():
    """More ids of images than there are images end a forward pass in an error that is none of the script's."""
    model = small_models.build(transformers.Qwen2ForCausalLM, config(vocab_size=16))
    model.config.image_token_id, model.config.vision_start_token_id = 5, 6
    torch.nn.init.zeros_(model.lm_head.weight)  # all tokens are as likely
    ids = torch.ones(4, 2, dtype=torch.long)

    def drawn():
        torch.manual_seed(0)
        new = model.generate(input_ids=ids, attention_mask=ids, do_sample=True, max_new_tokens=30, eos_token_id=None)
        return set(new[:, 2:].flatten().tolist())

    with small_models._text_drawn_alone():
        assert len(drawn() - {5, 6}) == len(drawn()) > 9
    assert {5, 6} <= drawn()


def test_a_configuration_that_cannot_be_narrow_keeps_its_width():
    class Wide(transformers.Qwen2ForCausalLM):
        def __init__(self, config):
            if config.hidden_size < 128:
                raise ValueError("too narrow")
            super().__init__(config)

    model = small_models.build(Wide, config(hidden_size=128, num_attention_heads=4, intermediate_size=256))
    assert model.config.hidden_size == 128 and model.config.num_hidden_layers == 2


def built_small(loads=None, adapters=None, mapped=None, by_trainer=False):
    lists = [[] if each is None else each for each in (loads, adapters)]
    return small_models.built_small(*lists, lambda: by_trainer, False, lambda: False, mapped or Mapped())


@pytest.fixture
def checkpoint(tmp_path):
    """A folder with a configuration alone: its weights are not there."""
    folder = tmp_path / "Qwen2-0.5B"
    config(torch_dtype="bfloat16").save_pretrained(folder)
    return str(folder)


def test_loading_needs_no_weights_and_tells_what_the_real_load_gives(checkpoint):
    """The dtype of the real load differs by transformers' release; four bits need no bitsandbytes."""
    loads = []
    with built_small(loads):
        model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, torch_dtype=torch.bfloat16)
        four = transformers.AutoModelForCausalLM.from_pretrained(
            checkpoint, quantization_config=transformers.BitsAndBytesConfig(load_in_4bit=True), device_map={"": 0}
        )
    assert loads[0].dtype == "bfloat16" and [load.bits for load in loads] == [0, 4]
    assert loads[0].config.num_hidden_layers == 24 and loads[0].small
    assert model.dtype == torch.float32 and model.name_or_path == checkpoint
    assert loads[1].device_map == {"": 0} and four.is_loaded_in_4bit
    assert not four.model.layers[0].mlp.up_proj.weight.requires_grad and four.model.norm.weight.requires_grad
    with pytest.raises(OSError):
        transformers.AutoModelForCausalLM.from_pretrained(checkpoint)  # as it was before


@pytest.mark.parametrize(
    ("cast", "dtype"),
    [
        (lambda model: model.to(torch.float32), "float32"),
        (lambda model: torch.nn.ModuleDict({"module": model}).float(), "float32"),
        (lambda model: updates.to_float32(model), "float32"),
        (lambda model: model.lm_head.float(), "bfloat16"),
        (lambda model: model.to("cpu"), "bfloat16"),
    ],
)
def test_a_cast_to_float32_after_the_load_is_seen(checkpoint, cast, dtype):
    """The cut model is in float32 all along, so the cast changes nothing in it; the real one is trained in float32."""
    loads = []
    with built_small(loads):
        models = [transformers.AutoModelForCausalLM.from_pretrained(checkpoint, torch_dtype="auto") for _ in range(2)]
        cast(models[1])
    assert [load.dtype for load in loads] == ["bfloat16", dtype]
    for model, load in zip(models, loads):
        assert policy_load(Training(types.SimpleNamespace(model=model), {}, loads=loads)) is load


def test_a_checkpoint_is_one_model_whatever_loads_it(checkpoint):
    """A trainer loads a reference by the model's own class: a policy of an Auto class must not be another model."""
    with built_small():
        kinds = (transformers.AutoModelForCausalLM, transformers.Qwen2ForCausalLM)
        policy, reference = (kind.from_pretrained(checkpoint) for kind in kinds)
        judge = transformers.AutoModelForSequenceClassification.from_pretrained(checkpoint)
    assert all(torch.equal(a, b) for a, b in zip(policy.parameters(), reference.parameters()))
    assert getattr(judge, "generation_config", None) is None and judge.config.num_hidden_layers == 2


def test_a_policy_with_its_own_weights_has_those_of_its_reference():
    """A model that is small enough keeps its weights: rounded to bfloat16 in the policy alone, they were another's."""
    path = str(models.path("tiny"))
    kind, loads = transformers.AutoModelForCausalLM, []
    with built_small(loads):
        policy = kind.from_pretrained(path, **{small_models.dtype_argument(): torch.bfloat16})
        reference = kind.from_pretrained(path, **{small_models.dtype_argument(): policy.dtype})
    assert loads[0].dtype == "bfloat16" and not loads[0].small
    assert all(torch.equal(a, b) for a, b in zip(policy.parameters(), reference.parameters()))


def test_a_load_that_asks_what_the_checkpoint_lacks_is_told(checkpoint):
    """A model that is made here lacks nothing."""
    with built_small():
        model, told = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, output_loading_info=True)
    assert isinstance(model, transformers.Qwen2ForCausalLM) and not any(told.values())
    assert {"missing_keys", "unexpected_keys", "mismatched_keys"} <= set(told)


def test_a_probe_leaves_layers_of_bitsandbytes_in_their_mode():
    """In eval mode they may pack their weights for good, and the training after it would end in an error."""
    modes = []
    layer = type("Linear4bit", (torch.nn.Linear,), {"__module__": "bitsandbytes.nn"})
    model = qwen2().train()
    model.lm_head = layer(model.config.hidden_size, model.config.vocab_size, bias=False)
    model.lm_head.register_forward_hook(lambda module, *_: modes.append((module.training, model.model.training)))
    small_models.probe(model)
    assert modes == [(True, False)] and model.model.training


def test_what_a_script_saves_is_loaded_from_that_folder(checkpoint, trained, tmp_path):
    """Nothing is written there; a load knows the whole model (merged and saved, say), tokens and adapter."""
    loads, adapters, target = [], [], tmp_path / "start"
    with saving.elsewhere(tmp_path / "output", loads), built_small(loads, adapters):
        auto = transformers.AutoModelForCausalLM
        model = auto.from_pretrained(checkpoint, torch_dtype=torch.float16)
        trained[1].save_pretrained(save_directory=target)
        model.save_pretrained(target)
        again = auto.from_pretrained(target, torch_dtype="auto")
        tokenizer = transformers.AutoTokenizer.from_pretrained(target)
        one = peft.LoraConfig(r=3, target_modules=["q_proj"])
        peft.get_peft_model(again, one, adapter_name="mine").save_pretrained(target)
        loaded = peft.PeftModel.from_pretrained(auto.from_pretrained(checkpoint), target / "mine", is_trainable=True)
    assert not target.exists() and type(again) is type(model)
    assert loads[1].config.num_hidden_layers == 24 and loads[1].dtype == "float16"
    assert tokenizer.get_vocab() == trained[1].get_vocab()
    assert loaded.peft_config["default"].r == 3 and adapters[0].name == str(target / "mine")
    for load in (transformers.AutoConfig, transformers.AutoTokenizer, peft.PeftConfig):
        with pytest.raises((OSError, ValueError)):
            load.from_pretrained(target)  # as it was before


def test_a_small_model_is_saved_with_its_weights(trained, tmp_path):
    """A model that is not cut: what the script has made of it is what it loads again."""
    loads = []
    with saving.elsewhere(tmp_path / "output", loads), built_small(loads):
        auto = transformers.AutoModelForCausalLM
        model = auto.from_pretrained(trained[0].name_or_path or trained[0].config._name_or_path)
        with torch.no_grad():
            model.model.norm.weight.mul_(2)
        model.save_pretrained(tmp_path / "again")
        again = auto.from_pretrained(tmp_path / "again")
    assert torch.equal(model.model.norm.weight, again.model.norm.weight) and not loads[-1].small
    assert not (tmp_path / "again").exists() and again.name_or_path == str(tmp_path / "again")


def test_weights_of_the_whole_model_for_a_cut_one(checkpoint):
    """It gets other ones, the same for the same weights; a name that the whole one has not is an error as before."""
    whole = {"model.embed_tokens.weight": torch.ones(3000, 896), "model.layers.20.mlp.up_proj.weight": torch.ones(1, 1)}
    mapped, auto = Mapped(), transformers.AutoModelForCausalLM
    with built_small(mapped=mapped):
        first, second, other, model = (auto.from_pretrained(checkpoint) for _ in range(4))
        names = [first.load_state_dict(whole, strict=False), second.load_state_dict(whole, strict=False)]
        other.load_state_dict({name: 2 * weight for name, weight in whole.items()}, strict=False)
        with pytest.raises(RuntimeError, match="Missing key"):
            model.load_state_dict(whole)
        with pytest.raises(RuntimeError, match="typo"):
            model.load_state_dict(whole | {"model.typo": torch.ones(1)})
        own = auto.from_pretrained(checkpoint).state_dict()
        with pytest.raises(RuntimeError, match="size mismatch"):  # a vocabulary that was resized
            model.load_state_dict(own | {"lm_head.weight": torch.ones(3001, 64)})
        model.load_state_dict(own)
    weights = [each.model.layers[1].mlp.up_proj.weight for each in (first, second, other, model)]
    assert torch.equal(weights[0], weights[1]) and torch.equal(weights[3], own["model.layers.1.mlp.up_proj.weight"])
    assert not torch.equal(weights[0], weights[2]) and not torch.equal(weights[0], weights[3])
    assert not names[0].unexpected_keys and "model.embed_tokens.weight" not in names[0].missing_keys
    assert mapped.texts == ["load_state_dict, 2 tensors of the whole model's sizes -> random ones"]


def test_arguments_are_cut_where_their_trainer_is_made_and_known_as_asked(tmp_path):
    """Nothing is saved or reported, also where the script's folder is named; what it sets later counts as asked."""
    made = cuts.CutArguments(3, str(tmp_path))
    with made.cut():
        arguments = transformers.TrainingArguments(
            "the_script_s_own", per_device_train_batch_size=64, save_strategy="steps", num_train_epochs=7
        )
        assert arguments.output_dir == str(tmp_path) and arguments.per_device_train_batch_size == 64
        arguments.num_train_epochs, arguments.output_dir = 5, "another_one"
        made.settle(arguments)
    assert arguments.output_dir == str(tmp_path) and arguments.max_steps == 3
    assert arguments.save_strategy.value == "no" and arguments.per_device_train_batch_size == 2
    asked = made.uncut(arguments)
    assert asked["per_device_train_batch_size"] == 64 and asked["output_dir"] == "another_one"
    assert asked["num_train_epochs"] == 5 and asked["save_strategy"] == "steps"
    assert "per_device_train_batch_size 64 -> 2" in made.cuts(arguments)
    arguments.per_device_train_batch_size = 16
    assert made.uncut(arguments)["per_device_train_batch_size"] == 16
    again = transformers.TrainingArguments("out", save_strategy="steps")
    assert again.max_steps == -1  # nothing is left of the cut
    for other in (types.SimpleNamespace(lr=1), "train.yaml", None):  # as what a trainer of one's own calls args
        made.settle(other)
        assert made.uncut(other) == {}
    at_once = cuts.CutArguments(3, str(tmp_path), by_trainer=lambda: True)
    with at_once.cut():
        own = trl.GRPOConfig("out", use_cpu=True)
    assert own.max_steps == 3 and at_once.uncut(own)["max_steps"] == -1


class Rows(list):
    """A dataset, as far as it is chosen from."""

    def select(self, indices):
        return Rows(self[index] for index in indices)


def test_the_script_s_arguments_are_its_own_until_a_trainer_is_made(tmp_path):
    """A config made of one that is cut already had the cut numbers as its own: F22 was named, and did harm."""
    made = cuts.CutArguments(3, str(tmp_path))
    with made.cut():
        first = trl.GRPOConfig("out", per_device_train_batch_size=6, num_generations=6, logging_steps=10, use_cpu=True)
        given, second = first.to_dict(), copy.deepcopy(first)
        third = trl.GRPOConfig("out", use_cpu=True, **{name: given[name] for name in ("num_generations", *_EACH)})
        passes = getattr(first, "steps_per_generation", 1), getattr(first, "generation_batch_size", 6)
        assert passes == (1, 6) and first.max_steps == -1
        for each in (first, second, third):
            made.settle(each)
            asked = made.uncut(each)
            assert (asked["per_device_train_batch_size"], asked["num_generations"]) == (6, 6)
            assert each.per_device_train_batch_size <= 4 and each.max_steps == 3
            assert asked["max_completion_length"] > each.max_completion_length
            assert each.per_device_train_batch_size % each.num_generations == 0 or cuts.counts_prompts()


_EACH = ("per_device_train_batch_size",)


def test_what_a_script_sets_later_is_asked_for_and_cut(tmp_path):
    """A value equal to the cut one was not seen, a batch was cut by its first numbers, and 500 steps were run."""
    made = cuts.CutArguments(3, str(tmp_path))
    with made.cut():
        late = trl.GRPOConfig("out", per_device_train_batch_size=16, num_generations=8, use_cpu=True)
        late.num_generations = late.per_device_train_batch_size = 4
        late.max_steps, late.max_completion_length, late.save_strategy = 500, 8, "epoch"
        made.settle(late)
    assert late.max_steps == 3 and late.num_generations == 4
    asked = made.uncut(late)
    assert (asked["per_device_train_batch_size"], asked["num_generations"]) == (4, 4)
    assert (asked["max_steps"], asked["max_completion_length"], asked["save_strategy"]) == (500, 8, "epoch")
    assert not [cut for cut in made.cuts(late) if cut.startswith(("num_generations", "max_completion_length"))]


@pytest.mark.skipif(cuts.counts_prompts(), reason="this release does not divide a batch of the launch")
def test_a_batch_is_divided_by_the_processes_of_the_launch(tmp_path):
    """One process has two of them: what the launch has is divided, and cut for those that run."""
    for launch, device in ((4, 2), (4, 1)):
        made = cuts.CutArguments(3, str(tmp_path), processes=cuts.Processes(launch, 2))
        asked = {"per_device_train_batch_size": device, "num_generations": 8, "use_cpu": True}
        with made.cut(), contextlib.ExitStack() as stack:
            if device == 1 and "generation_batch_size" in trl.GRPOConfig.__dataclass_fields__:
                stack.enter_context(pytest.raises(ValueError, match="num_generations"))
            made.settle(trl.GRPOConfig("out", bf16=False, **asked))


OWN_CALLBACKS = """
class Fails:
    def on_step_end(self, args, state, control, **more):
        self.called = True
        [][-1]

class Misspelt:
    def on_step_end(self, args, state, control, **more):
        nme

class Stops:
    def on_step_end(self, args, state, control, **more):
        control.should_training_stop = True

class Well:
    def on_step_end(self, args, state, control, **more):
        return "well"

class Own:
    def log(self, logs, *args, **more):
        return logs["kl"]
"""


def test_callbacks_that_raise_or_end_the_training_do_not_end_the_judgement(tmp_path):
    """Arguments and numbers of the cut are others than the script's: an error ended the first step, or a stop did."""
    path, names = tmp_path / "train.py", {}
    path.write_text(OWN_CALLBACKS)
    exec(compile(OWN_CALLBACKS, str(path), "exec"), names)
    own = [names[name]() for name in ("Fails", "Misspelt", "Stops", "Well")]
    trainer, control = names["Own"](), types.SimpleNamespace(should_training_stop=False)
    trainer.state = types.SimpleNamespace(global_step=1)
    trainer.callback_handler = types.SimpleNamespace(callbacks=own)
    with callbacks.errors_noted(trainer, own_code.OwnCode(str(path))) as found:
        for _ in range(2):
            given = [each.on_step_end(None, trainer.state, control, model=1) for each in own]
            assert given == [control, control, None, "well"] and not control.should_training_stop
        assert trainer.log({"loss": 1.0}) is None and trainer.log({"kl": 2.0}) == 2.0
    assert [(each.part, each.verdict) for each in found] == [
        ("Fails.on_step_end", Verdict.NOT_CHECKED), ("Misspelt.on_step_end", Verdict.SUSPECTED),
        ("Stops.on_step_end", Verdict.NOT_CHECKED), ("Own.log", Verdict.NOT_CHECKED),
    ]  # fmt: skip
    assert "line 5" in found[0].why and str(found[1].place) == "train.py, line 9"
    assert vars(own[0]) == {"called": True} and "log" not in vars(trainer)


DEMANDS = """
import torch
{demand}
count = torch.cuda.device_count()
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU answers for itself")
@pytest.mark.parametrize(
    "demand", ["assert torch.cuda.is_available()", "n = torch.cuda.device_count()\nif n < 1: raise SystemExit('no')"]
)
def test_a_demand_for_a_gpu_is_known_and_got_past(demand, tmp_path):
    """It ended with status 3; told of a GPU, the script alone sees it."""
    script = tmp_path / "train.py"
    own, text, names = own_code.OwnCode(script), DEMANDS.format(demand=demand), {}
    script.write_text(text)
    told = gpus.Told(own)
    with told.answering(), pytest.raises((AssertionError, SystemExit)) as raised:
        exec(compile(text, str(script), "exec"), names)
    assert told.is_demanded(raised.value) and not told.is_demanded(KeyError("another"))
    with gpus.Told(own, 2).answering():
        exec(compile(text, str(script), "exec"), names)
        assert not torch.cuda.is_available()  # for another's code
        exec(compile("def cut():\n    return torch.cuda.is_available()", gpus.__file__, "exec"), names)
        exec(compile("cuts = cut()", str(script), "exec"), names)
        assert names["cuts"] is False  # an argument that needs a GPU is cut all the same
    assert names["count"] == 2 and torch.cuda.device_count() == 0


def judged_by(run_once):
    """Return the answer of a session whose run is given."""
    session = types.SimpleNamespace(whole=0, gpus=0, count=1, say=print, line="")
    session.run, answer = lambda change: run_once(session), Answer()
    cli._judge(answer, session, pathlib.Path("train.py"), None)
    return answer


@pytest.mark.parametrize(("effects", "heals"), [([], True), ([], False), ([Effect("writes", "there.txt")], True)])
@pytest.mark.parametrize(
    ("given", "wants", "note"),
    [
        ("gpus", {"demands_gpu": True}, "demands a GPU"),
        # "num_generations is 4" was said to who had written 32, which the class of the script wants.
        ("whole", {"refuses_cut": ["num_generations 32 -> 4"]}, "as given"),
    ],
)
def test_a_script_that_wants_a_gpu_or_its_own_numbers_is_run_once_more(given, wants, note, effects, heals):
    """Where it has done nothing yet that another run would do again."""
    seen = []

    def run_once(session):
        seen.append(bool(getattr(session, given)))
        ends = {"error": "ended", **wants} if not (seen[-1] and heals) else {}
        return Answer(effects=effects, **ends)

    answer, healed = judged_by(run_once), heals and not effects
    assert seen == [False, True][: 1 + (not effects)] and bool(answer.error) is not healed
    assert ("--try" in answer.error) is bool(effects) or given == "whole"
    assert any(note in each for each in answer.notes) is healed


@pytest.mark.skipif(Version(trl.__version__) < Version("0.16"), reason="a round of generation is another one")
def test_numbers_that_stay_as_they_were_given(tmp_path):
    asked = {"per_device_train_batch_size": 16, "num_generations": 16, "gradient_accumulation_steps": 4}
    for whole, length in ((False, 8), (True, 64)):
        made = cuts.CutArguments(3, str(tmp_path), whole=whole)
        with made.cut():
            args = trl.GRPOConfig(str(tmp_path), max_completion_length=64, max_steps=100, **asked)
            made.settle(args)
        assert args.max_steps == 3 and args.max_completion_length == length
        assert all(getattr(args, name) == value for name, value in asked.items()) is whole
        assert bool(made.cut_numbers(args)) is not whole


def test_what_is_known_when_the_time_is_over_is_told(tmp_path):
    """The line of the time limit was all, and status 3, whatever the judges had found before the training."""
    report = run.Reporter(tmp_path / "report", tmp_path / "progress")
    report.answers += [Finding("F2", "e", "r"), Finding.held("F5", "e", "c")]
    report.say("training 3 steps")
    known = Answer.from_json(json.loads((tmp_path / "report.known").read_text()))

    def run_once(session):
        raise TimeIsOver("train.py was ended after 60 seconds", known)

    answer = judged_by(run_once)
    assert [each.key for each in answer.suspected] == ["F2"] and "time" in answer.suspected[0].why
    assert [each.key for each in answer.held] == ["F5"] and "60 seconds" in answer.error and answer.exit_status == 1


@pytest.mark.parametrize(
    ("options", "drawn"),
    [
        ("max_new_tokens=30, min_new_tokens=30", cuts.NEW_TOKENS),
        ("max_length=40, min_length=40", cuts.NEW_TOKENS),
        ("generation_config=transformers.GenerationConfig(max_new_tokens=30, min_new_tokens=30)", cuts.NEW_TOKENS),
        ("max_new_tokens=5, min_new_tokens=5", 5),
    ],
)
@pytest.mark.parametrize("adapted", [False, True])
def test_the_script_s_own_draws_are_cut_like_the_trainer_s(options, drawn, adapted, tmp_path):
    """A rollout function drew all 4,096 tokens of its max_new_tokens, and the time limit ended the run."""
    script = tmp_path / "train.py"
    text = f"drawn = model.generate(input_ids=ids, do_sample=True, pad_token_id=0, {options})"
    model, ids = qwen2(), torch.ones(1, 3, dtype=torch.long)
    model = small.lora(model) if adapted else model
    with cuts.cut_generation(own_code.OwnCode(script)) as said:
        names = {"model": model, "ids": ids, "transformers": transformers}
        exec(compile(text, str(script), "exec"), names)
        assert names["drawn"].shape[1] - 3 == drawn and bool(said) is (drawn > 5)
        library = {"model": model, "ids": ids, "transformers": transformers}
        exec(compile(text, trl.__file__, "exec"), library)
    asked = 37 if "max_length" in options else 5 if drawn == 5 else 30
    assert library["drawn"].shape[1] - 3 == asked


def test_rows_that_are_trained_on_differ_in_length():
    """Garbage rollouts of transformers 4.48 need a padded batch: rows of one length would hide them."""
    chosen = cuts.choose_short(Rows("x" * (1 + index % 9) for index in range(100)), 4)
    assert len(chosen) == 4 and len({len(row) for row in chosen}) == 4
    assert max(map(len, chosen)) <= 5
    halves = cuts.choose_short(Rows({"prompt": "x" * (1 + index % 2 * (2 + index % 7))} for index in range(100)), 6)
    late = cuts.choose_short(Rows({"prompt": "x" * (1 + (index > 300) * (index % 5))} for index in range(600)), 4)
    assert len({len(row["prompt"]) for row in late}) > 1  # the first 256 have one length
    assert len({len(row["prompt"]) for row in halves}) == 6  # half of them have one length: longer ones too
    few = cuts.choose_short(Rows({"prompt": "x" * (4 + (index > 90) + (index > 95))} for index in range(100)), 8)
    assert sorted(len(row["prompt"]) for row in few) == [4, 4, 4, 5, 5, 5, 6, 6]  # of each as many
    ids = torch.arange(1, 201)[None].repeat(2, 1)
    labels = torch.where((ids > 150) & (ids <= 160), ids, -100)  # a long batch keeps the positions of its answers
    batch = cuts.cut_batches(lambda: {"input_ids": ids, "labels": labels})()
    assert batch["input_ids"].shape == (2, cuts.WINDOW) and (batch["labels"] != -100).sum() == 20


SCRIPT_OF_RANKS = """
import torch
from accelerate import Accelerator, PartialState
early = torch.cuda.current_device()
state, accelerator = PartialState(), Accelerator()
device, own = torch.cuda.current_device(), (str(state.device), str(accelerator.device))
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU answers for itself")
def test_a_script_sees_the_device_of_its_rank_and_libraries_the_one_that_is_here(monkeypatch, tmp_path):
    """`{"": PartialState().device}` and `{"": 0}` are one map on rank 0; on another rank they differ."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    (tmp_path / ".git").mkdir()
    monkeypatch.chdir(tmp_path)  # where a relative path such as `<frozen os>` would be the project's own
    script = tmp_path / "train.py"
    script.write_text(SCRIPT_OF_RANKS)
    seen = {}
    launched = ranks.Launched(1, 2, str(tmp_path))
    assert launched.too_early()
    with launched.as_launched(own_code.OwnCode(script)):
        exec(compile(script.read_text(), str(script), "exec"), seen)
        from accelerate.state import PartialState

        assert PartialState().device.type == "cpu" and not launched.too_early()
    assert (seen["early"], seen["device"], seen["own"]) == (0, 1, ("cuda:1", "cuda:1"))
    assert str(PartialState().device) == "cpu"


LIBRARY = """
import subprocess
import sys
from accelerate import PartialState

def ask():
    return str(PartialState().device)

def start():
    return subprocess.run([sys.executable, "-c", "pass"]).returncode
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A script beside a module of its own, and beside a library's clone that is installed in place."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    clone, installed = tmp_path / "clone", tmp_path / "installed" / "cloned-1.0.dist-info"
    for folder in (clone, installed):
        folder.mkdir(parents=True)
    (clone / "cloned.py").write_text(LIBRARY)
    (tmp_path / "beside.py").write_text(LIBRARY)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: cloned\nVersion: 1.0\n")
    url = {"url": clone.as_uri(), "dir_info": {"editable": True}}
    (installed / "direct_url.json").write_text(json.dumps(url))
    for path in (clone, tmp_path, installed.parent):
        monkeypatch.syspath_prepend(path)
    yield tmp_path / "train.py"
    for name in ("cloned", "beside"):
        sys.modules.pop(name, None)


def test_a_library_in_an_editable_clone_is_not_the_script(project):
    """It was told of cuda:1, and its own processes were stopped; what lies beside the script is its own."""
    project.write_text("import beside, cloned\n")
    own, modules = own_code.OwnCode(project), {}
    with ranks.Launched(1, 2).as_launched(own), processes.no_other_processes(own):
        exec(compile(project.read_text(), str(project), "exec"), modules)
        assert (modules["beside"].ask(), modules["cloned"].ask()) == ("cuda:1", "cpu")
        with pytest.raises(processes.Stopped, match="starts another process"):
            modules["beside"].start()
        assert modules["cloned"].start() == 0


def test_a_command_of_the_shell_is_run_and_a_training_is_not(tmp_path):
    """`os.system("mkdir -p out")` ended in an AttributeError of preflight's own, `os.system("python x.py")` too."""
    script = tmp_path / "train.py"
    script.write_text(f"import os\nassert os.system('mkdir {tmp_path}/out') == 0\nos.system('python -c pass')\n")
    with processes.no_other_processes(own_code.OwnCode(script)), pytest.raises(processes.Stopped, match="python -c"):
        exec(compile(script.read_text(), str(script), "exec"), {})
    assert (tmp_path / "out").is_dir()


def test_an_example_inside_a_library_s_clone_is_the_script_and_the_library_is_not(project):
    """trl/examples/scripts/grpo.py of a clone of trl: the project is the library's."""
    clone = project.parent / "clone"
    (clone / "pyproject.toml").touch()
    own = own_code.OwnCode(clone / "examples" / "grpo.py")
    assert own.holds(str(clone / "examples" / "helper.py")) and not own.holds(str(clone / "cloned.py"))
    for script in ("train.py", "scripts/train.py"):  # a reader's own project, installed in place
        own = own_code.OwnCode(clone / script)
        assert own.holds(str(clone / "cloned.py")) and own.may_edit(str(clone / "cloned.py"))
    (clone / "trl").mkdir()
    (clone / "trl" / "__init__.py").touch()
    assert not own_code.OwnCode(clone / "scripts" / "train.py").holds(str(clone / "cloned.py"))
    assert not own.holds(torch.__file__) and not own.holds(os.__file__) and not own.holds(run.__file__)


def training(source="", line=0, **more):
    return Training(None, {}, source=Source("train.py", source, line), **more)


@pytest.fixture
def read(monkeypatch, tmp_path):
    """Return a function that reads a line by the launchers' parsers here: a Python for each would take two seconds."""
    from accelerate.commands import launch
    from accelerate.commands.config import config_args

    def ask(launcher, words, variables, python):
        with monkeypatch.context() as here:
            for name, value in variables.items():
                here.setenv(name, value)
            here.setattr(sys, "argv", ["launcher_options.py", launcher, *words])
            for module in (launch, config_args):
                here.setattr(module, "default_config_file", str(tmp_path / "default.yaml"))
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                launcher_options.main()
            return launcher_line.answered(launcher, printed.getvalue(), "")

    monkeypatch.setattr(launcher_line, "_ask_launcher", ask)
    return lambda line: launcher_line.read_line(line.split(), sys.executable)


STAGED = "distributed_type: DEEPSPEED\ndeepspeed_config: "
YAML = {
    "zero3": STAGED + "{zero_stage: 3}\nnum_processes: 4\n",
    "flow": "{distributed_type: DEEPSPEED, deepspeed_config: {zero_stage: 0}}\n",
    "two": "num_processes: 2\nlearning_rate: 1.0e-6\n",
    "x": "learning_rate: 1.0e-6\n",
    "sharded": "accelerate_config: zero3.yaml\n",
    "one": "distributed_type: 'NO'\nnum_processes: 1\n",
    "ds": STAGED + "{deepspeed_config_file: ds.json}\n",
    "other": STAGED + "{deepspeed_config_file: other.json}\n",  # it is not there
}
LINES = {  # and the script, how many processes are started, and the ZeRO stage
    "accelerate launch --use_deepspeed --zero_stage 3 --num_processes 8 train.py": ("train.py", 8, 3),
    "accelerate launch --config_file zero3.yaml train.py": ("train.py", 4, 3),
    "accelerate launch --cpu --config_file zero3.yaml train.py": ("train.py", 4, 0),
    "accelerate launch --use_fsdp --config_file zero3.yaml train.py": ("train.py", 4, 0),
    "accelerate launch --config_file flow.yaml --num_processes 2 t.py": ("t.py", 2, 0),
    "accelerate launch --num_processes 4 --module pkg.train --lr 1": ("pkg.train", 4, 0),
    "torchrun --standalone --nproc_per_node=2 --nnodes 3 train.py": ("train.py", 6, 0),
    "python -m torch.distributed.run --nproc-per-node 2 train.py": ("train.py", 2, 0),
    "PET_NPROC_PER_NODE=2 PET_NNODES=3 torchrun train.py": ("train.py", 6, 0),
    "CUDA_VISIBLE_DEVICES=0,1 python3 -u train.py x": ("train.py", 1, 0),
    "WORLD_SIZE=2 RANK=0 LOCAL_RANK=0 python train.py": ("train.py", 2, 0),
    "python -u -m pkg.train --lr 1": ("pkg.train", 1, 0),
    "deepspeed --include localhost:0,2,3 train.py": ("train.py", 3, 0),
    "deepspeed --num_nodes 2 --num_gpus 4 --master_port 1 train.py": ("train.py", 8, 0),
    "trl grpo --config x.yaml --num_processes 4 --lr 1": ("trl.scripts.grpo", 4, 0),
    # trl's own file of that name says eight processes
    "trl dpo --accelerate_config zero3 --lr 1": ("trl.scripts.dpo", 8, 3),
    "trl dpo --num_processes 4 --config two.yaml --accelerate_config zero3.yaml --lr 1": ("trl.scripts.dpo", 4, 3),
    "trl grpo --config sharded.yaml --lr 1": ("trl.scripts.grpo", 4, 3),
    "trl sft --use_deepspeed --zero_stage 3 --num_processes 2 --lr 1": ("trl.scripts.sft", 2, 3),
    "ACCELERATE_USE_DEEPSPEED=true ACCELERATE_DEEPSPEED_ZERO_STAGE=3 torchrun --nproc_per_node 2 t.py": ("t.py", 2, 3),
}
# With a file that `accelerate config` has written, for a training by eight processes, of such a kind.
DEFAULTS = [
    ("MULTI_GPU", "accelerate launch train.py", 8, 0),
    ("DEEPSPEED", "accelerate launch train.py", 8, 3),
    ("DEEPSPEED", "python -m accelerate.commands.launch --multi_gpu train.py", 8, 0),
    ("DEEPSPEED", "accelerate launch --config_file one.yaml train.py", 1, 0),
    ("DEEPSPEED", "accelerate launch --cpu train.py", 1, 0),
    ("DEEPSPEED", "accelerate launch --config_file ds.yaml --num_processes 2 train.py", 2, 3),
    ("DEEPSPEED", "accelerate launch --config_file other.yaml --num_processes 2 train.py", 2, 2),
    ("NO", "accelerate launch --num_processes 4 train.py", 1, 0),
]


@pytest.mark.parametrize(
    ("kind", "line", "script", "size", "stage"),
    [("", line, *told) for line, told in LINES.items()]
    + [(kind, line, "train.py", *told) for kind, line, *told in DEFAULTS],
)
def test_launchers_lines_are_read(kind, line, script, size, stage, tmp_path, monkeypatch, read):
    """The file of `accelerate config` was left out: a training by eight processes was judged as one of one."""
    monkeypatch.chdir(tmp_path)
    files = {f"{name}.yaml": text for name, text in YAML.items()}
    files["ds.json"] = json.dumps({"zero_optimization": {"stage": 3}})
    if kind:
        start = f"compute_environment: LOCAL_MACHINE\nnum_processes: 8\ndistributed_type: {kind}\n"
        files["default.yaml"] = start + "deepspeed_config: {zero_stage: 3}\n"
    for name, text in files.items():
        pathlib.Path(name).write_text(text)
    if "--accelerate_config zero3 " in line and not (pathlib.Path(trl.__file__).parent / "accelerate_configs").is_dir():
        with pytest.raises(launcher_line.LaunchError, match="zero3"):  # trl 0.14 brings none
            read(line)
        return
    if line.startswith("deepspeed"):
        pytest.importorskip("deepspeed")
    started = read(line)
    assert (started.script or started.module, started.world_size, started.zero_stage) == (script, size, stage)
    assert not started.module or started.arguments[-2:] == ("--lr", "1")
    assert dict(started.environment).get("CUDA_VISIBLE_DEVICES", "0,1") == "0,1"
    assert ("--local_rank={LOCAL_RANK}" in started.arguments) is line.startswith("deepspeed")  # which it passes on


def test_what_a_launcher_does_not_take_is_one_line(tmp_path, monkeypatch, read):
    """A launcher's own parser says why, also of a file that it reads; another launcher gets what can be done."""
    monkeypatch.chdir(tmp_path)
    texts = {"broken.yaml": "{", "list.yaml": "- 1", "below.yaml": "distributed_type: 'MULTI_CPU'\nnum_processes: -1"}
    for name, text in texts.items():
        pathlib.Path(name).write_text(text)
    lines = {
        "accelerate launch --config_file broken.yaml t.py": "broken.yaml",
        "accelerate launch --config_file below.yaml t.py": "num_processes",
        "accelerate launch --multi_gpu --num_processes 1 t.py": "at least 2 processes",
        "trl grpo --config broken.yaml": r"broken.yaml cannot be read \(it is no YAML",
        "trl grpo --config list.yaml": r"list.yaml cannot be read \(it is no YAML",
        "torchrun --nnodes x t.py": "'x' is no number",
        "WORLD_SIZE=0 python t.py": "WORLD_SIZE=0",
        "trl": "trains nothing",
        "trl chat": "trains nothing",
        "python -u": "no script",
        "bash run.sh": "bash is no launcher .*Next: the line",
        "ray job": "ray is no launcher .*Next: the line",
        "swift rlhf --rlhf_type grpo": "is no launcher .*python -m MODULE",
        "runs/grpo.yaml": r"preflight -- trl grpo --config runs/grpo\.yaml",
    }
    for line, said in lines.items():
        with pytest.raises(launcher_line.LaunchError, match=said) as error:
            read(line)
        assert "\n" not in str(error.value)
    for line in ("accelerate launch", "torchrun -m"):  # argparse ends the Python that it runs in
        with pytest.raises(SystemExit):
            read(line)


def test_a_launcher_is_asked_in_the_python_that_trains(tmp_path, monkeypatch):
    """Its own words where it does not take a line, and which is missing where none is installed."""
    monkeypatch.chdir(tmp_path)
    for python, said in ((sys.executable, "unrecognized arguments: --nproc"), (sys._base_executable, "not installed")):
        with pytest.raises(launcher_line.LaunchError, match=f"torchrun does not take this line: .*{said}"):
            launcher_line.read_line(["torchrun", "--nprocs", "2", "t.py"], python)


SHARDED = """\
distributed_type: FSDP
mixed_precision: fp8
num_processes: 8
num_machines: 2
fsdp_config: {fsdp_version: 2}
"""


def test_what_a_launch_asks_for_beside_processes_is_kept_or_told(tmp_path, monkeypatch, read):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("sharded.yaml").write_text(SHARDED)
    started = read("accelerate launch --config_file sharded.yaml t.py")
    assert started.world_size == 8
    assert all(any(word in text for text in started.left_out) for word in ("FSDP", "fp8", "2 machines"))
    started = read("trl grpo --config sharded.yaml --mixed_precision bf16 --num_processes 2 --use_fsdp")
    assert dict(started.environment) == {"ACCELERATE_MIXED_PRECISION": "bf16"} and "FSDP" in " ".join(started.left_out)


@pytest.mark.parametrize(
    "line",
    ["nohup A=1 t.py --x", "uv run --frozen t.py --x", "A=1 srun --gpus=2 uv run t.py --x", "env A=1 time t.py --x"],
)
def test_what_starts_a_launcher_is_passed_over(line, read):
    """As lines stand in the scripts of clusters: it was said that nohup is no launcher, and nothing was judged."""
    started = read(line)
    assert (started.script, started.arguments) == ("t.py", ("--x",))
    assert dict(started.environment) == ({"A": "1"} if "A=1" in line else {})


def test_prompts_that_do_not_fit_the_model_are_not_generated_from(tokenizer):
    """Its reason was an internal error: "ValueError: prompt 1 does not fit"."""
    rows = Rows({"prompt": "1" * length} for length in (3, 40, 6))
    rows.column_names = ["prompt"]
    trainer = types.SimpleNamespace(
        model=qwen2(vocab_size=300, max_position_embeddings=16),
        processing_class=tokenizer,
        train_dataset=rows,
        args=types.SimpleNamespace(num_generations=None),
    )
    assert rollouts.prompts_of_a_batch(Training(trainer, {}), tokenizer) == ["111", "111111"]
    trainer.processing_class = None  # as of a Trainer of one's own, whose collator has it
    assert rollouts.prompts_of_a_batch(Training(trainer, {}), tokenizer) == ["111", "111111"]
    del rows[0], rows[1]  # none that fits: a script whose prompts the trainer cuts ended in an error of ours
    assert rollouts.prompts_of_a_batch(Training(trainer, {}), tokenizer) == ["1" * 40] * 2


def test_prompts_of_one_length_show_no_failure_of_padding(trained, monkeypatch):
    """A plain script with checkpointing was HELD in trl 0.15, by two prompts of one length in the cut batch.

    So it was where the dataset has one length, or the batch one prompt: right with sdpa, whatever the stack does.
    """
    model, tokenizer = trained
    rows = [{"prompt": text} for text in ("1+1=", "2+2=", "10+10=")]
    trainer = types.SimpleNamespace(model=model, train_dataset=Rows(rows[:2]), generation_config=None)
    trainer.train_dataset.column_names, trainer.processing_class = ["prompt"], tokenizer
    trainer.args = types.SimpleNamespace(num_generations=2)
    planted = {name: {"draw_gap": 2.0} for name in ("no causal mask", "predicted from the last token alone")}
    for lengths, size, verdict in ((1, 8, Verdict.NOT_CHECKED), (1, 1, Verdict.NOT_CHECKED), (2, 8, Verdict.HELD)):
        trainer.args.per_device_train_batch_size = size
        measured = {"draw_gap": 1e-7, "draw_rounding": 1e-2, "prompt_lengths": lengths, "tokens_drawn": 4}
        report = types.SimpleNamespace(error=1e-7, rounding=1e-2, figures=measured, planted=planted)
        monkeypatch.setattr(rollouts.Guarded, "report", report)
        (answer,) = rollouts.RolloutJudge(Training(trainer, {}, dataset=rows)).answers()
        assert answer.verdict is verdict, answer
    assert rollouts.prompts_of_a_batch(Training(trainer, {}, dataset=rows), tokenizer) == ["1+1=", "10+10="]


def test_what_draws_in_eval_mode_may_still_be_the_script_s(trained):
    """A rollout_func that padded prompts on the right was told that nothing goes wrong in eval mode."""
    model, tokenizer = trained
    trainer = types.SimpleNamespace(model=model, processing_class=tokenizer, train_dataset=[])
    for rollout_func, verdict in ((None, Verdict.NOT_APPLICABLE), (lambda prompts: {}, Verdict.NOT_CHECKED)):
        trainer.rollout_func = rollout_func
        judge = rollouts.RolloutJudge(Training(trainer, {}, own=lambda file: file == __file__))
        judge._generated = {False}
        (answer,) = judge.answers()
        assert answer.verdict is verdict


def test_a_tensor_that_no_forward_pass_used_is_not_held(trained, monkeypatch):
    """Of a merged adapter none was used, and F2 was held of what was trained beside it."""
    names = tuple(name for name, _ in trained[0].named_parameters())
    for unused, verdict in (((), Verdict.HELD), (names[:3], Verdict.NOT_CHECKED)):
        report = GradientReport(names, (), (), unused=unused)
        judge = gradients.GradientJudge(Training(types.SimpleNamespace(model=trained[0]), {}))
        monkeypatch.setattr(gradients.Guarded, "report", report)
        assert [each.verdict for each in judge.answers() if each.failure == "F1"] == [verdict]


@pytest.mark.parametrize(
    ("own", "asked"),
    [({}, {}), ({"top_p": 0.9}, {"top_p": 1.0}), ({"top_p": 0.001}, {"top_p": 0.999, "top_k": 0})],
)
def test_sampling_that_the_model_s_generation_config_changes_is_known(own, asked, trained):
    """Which of its options take the place of the trainer's hangs on the release: what is drawn decides."""
    model, tokenizer = copy.deepcopy(trained[0]), trained[1]
    torch.nn.init.zeros_(model.lm_head.weight[3:40])  # many tokens are as likely
    model.generation_config.update(do_sample=True, **own)
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    options = transformers.GenerationConfig(max_new_tokens=4, do_sample=True, temperature=3.0, **ends, **asked)
    trainer = types.SimpleNamespace(
        model=model, processing_class=tokenizer, add_callback=lambda guard: None, reward_funcs=[small.alternate],
        train_dataset=datasets.Dataset.from_dict({"prompt": ["1+1="]}), environment_factories=None,
        args=types.SimpleNamespace(num_generations=None),
    )  # fmt: skip
    training = Training(trainer, {"temperature": 3.0}, dataset=trainer.train_dataset)
    before = model.generation_config.to_dict()
    with rollouts.RolloutJudge(training).listening():
        ids = torch.full((16, 3), 5)
        torch.manual_seed(0)
        drawn = model.generate(input_ids=ids, attention_mask=ids, generation_config=options)[:, 3:]
    assert model.generation_config.to_dict() == before and "_prepare_generation_config" not in vars(model)
    alike = len({tuple(row) for row in drawn.tolist()}) == 1
    assert not alike or own
    assert not alike or training.model_defaults
    if own == {"top_p": 0.9} and training.model_defaults:
        assert training.model_defaults == {"top_p": (0.9, 1.0)}


def test_a_large_model_made_from_a_configuration_is_cut():
    """It was built whole, random numbers for all of it; a small one is made as it is."""
    loads = []
    with built_small(loads):
        large = transformers.AutoModelForCausalLM.from_config(config())
        few = config(hidden_size=32, intermediate_size=48, vocab_size=50, num_attention_heads=4)
        own = transformers.Qwen2ForCausalLM._from_config(few)
    assert large.config.num_hidden_layers == 2 and own.config.num_hidden_layers == 24
    (load,) = loads
    assert load.small and load.config.num_hidden_layers == 24 and "Qwen2ForCausalLM" in load.name


def test_a_module_is_found_where_it_would_be_run(tmp_path, monkeypatch):
    """In this folder, and where the Python finds installed ones; nothing of it is imported."""
    monkeypatch.chdir(tmp_path)
    for name in ("pkg/train.py", "pkg/__init__.py", "whole/__main__.py", "alone.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("raise RuntimeError('imported')\n")
    for module, file in (("pkg.train", "pkg/train.py"), ("whole", "whole/__main__.py"), ("alone", "alone.py")):
        assert launcher_line.find_module(module, sys.executable).samefile(tmp_path / file)
    assert launcher_line.find_module("trl.scripts.dpo", sys.executable).name == "dpo.py"
    with pytest.raises(launcher_line.LaunchError, match="finds no module"):
        launcher_line.find_module("pkg.other", sys.executable)


CELLS = [
    ("%pip install trl\nx = 7\n", ["%pip install trl"]),
    ("files = !ls\nif x:\n    !nvidia-smi\n    y = files\n", ["files = !ls", "!nvidia-smi"]),
    ("%%writefile data.py\nnot python at all\n", ["%%writefile data.py"]),
    ("%%time\nz = (x\n % 3)\n", []),
    ("text = '''\n%d of !\n'''\n", []),
    ("x?\n?x\n", ["x?", "?x"]),
    # beside a line of IPython's, what goes on is Python still
    ("!pip install 'trl\nleft = (17\n  % 10)\n%matplotlib inline\n", ["!pip install 'trl", "%matplotlib inline"]),
    ("both = '''\n!no\n% command\nor?\n'''\nright = 17 \\\n  % 5\n!ls\n", ["!ls"]),
    ("!pip install trl \\\n  peft \\\n  datasets\n", ["!pip install trl \\"]),
    ("#@title Data\n\n%%bash\necho '\n", ["%%bash"]),
    ("# how long?\n%%time\nslow = 3\n", []),
    ("%time timed = 4  # seconds\n", []),
    ("import os\n%env OF_THIS_TEST = a b\n%env OF_THIS_TEST\n", ["%env OF_THIS_TEST"]),
    ("", []),
]


def test_a_notebook_is_a_script(tmp_path, monkeypatch):
    """Its code cells as they are; what only IPython can run is a comment, and told."""
    monkeypatch.setenv("OF_THIS_TEST", "")
    cells = [{"cell_type": "markdown", "source": "# not code"}]
    cells += [{"cell_type": "code", "source": source.splitlines(keepends=True)} for source, _ in CELLS]
    path = tmp_path / "train.ipynb"
    path.write_text(json.dumps({"cells": cells}))
    text, left_out = notebook.as_script(path.read_text())
    names = {}
    exec(text, names)
    assert (names["y"], names["z"], names["text"]) == ([], 1, "\n%d of !\n")
    assert (names["left"], names["both"], names["right"]) == (7, "\n!no\n% command\nor?\n", 2)
    assert (names["slow"], names["timed"], os.environ["OF_THIS_TEST"]) == (3, 4, "a b")
    expected = [f"cell {number}: {line}" for number, (_, lines) in enumerate(CELLS, 1) for line in lines]
    assert left_out == expected and script_text.read_source(path) == text
    with pytest.raises(SyntaxError, match="no notebook"):
        notebook.as_script("{}")


def load(bits=4, **more):
    return Load("Qwen", {}, None, False, bits=bits, **more)


def judged(given):
    return next(each for each in four_bit_placement.judge_four_bit_placement(given) if each.failure == "F5")


@pytest.mark.parametrize(
    "given, world_size, found",
    [
        (load(device_map={"": 0}), 4, True),
        (load(device_map={"": 3}), 4, False),
        (load(device_map="cuda:0"), 4, True),
        (load(device_map="auto"), 4, True),
        (load(early=True), 4, True),
        (load(early=False), 4, False),
        (load(bits=0, early=True), 4, False),
        (load(device_map={"": 0}), 1, False),
    ],
)
def test_a_load_is_placed_as_the_last_rank_places_it(given, world_size, found):
    """Without a map transformers takes the current device for a quantized model: GPU 0 while no rank is known."""
    assert (judged(training(loads=[given], world_size=world_size)).verdict is Verdict.FOUND) is found


@pytest.mark.parametrize(("visible", "device", "index"), [("0,1,2,3", 1, 1), ("7", 0, 1)])
def test_a_load_where_each_process_sees_all_gpus_or_one(visible, device, index):
    """`PartialState().device` holds in both; where a rank sees one GPU, its index names one that is not there."""
    rank = ranks.Launched(1, 2, visible=visible).rank
    assert rank.device == torch.device("cuda", device)
    for place, found in ((rank.device, False), (index, device != index), (2, True)):
        answer = judged(training(loads=[load(device_map={"": place})], world_size=4, device=rank.device.index))
        assert (answer.verdict is Verdict.FOUND) is found
        assert found or "it would be GPU" in answer.control


def write_notebook(path, *sources):
    path.write_text(json.dumps({"cells": [{"cell_type": "code", "source": source} for source in sources]}))
    return path


def test_lines_of_a_notebook_are_told_by_their_cells(tmp_path):
    """Line 170 of all cells together belongs to no file that its author has."""
    path = write_notebook(tmp_path / "t.ipynb", "a = 1\nb = 2", "c = 3\n1 / 0", "trainer.train()\ntrainer.train()")
    source = Source(str(path), script_text.read_source(path))
    assert [source.at(line) for line in source.training_lines()] == ["cell 3, line 1", "cell 3, line 2"]
    assert Source("train.py", "x\n").at(1) == "line 1"
    with pytest.raises(ZeroDivisionError) as raised:
        exec(compile(source.text, str(path), "exec"), {})
    assert describe_error(raised.value, path).startswith("t.ipynb, cell 2, line 2, ended in ZeroDivisionError")


def test_a_script_s_own_error_is_one_line():
    """A gated model, and an end without an error; the others come from real scripts in tests/cli/test_preflight.py."""
    gated, ended = OSError("You are trying to access a gated repo.\nMake sure"), SystemExit(0)
    assert "\n" not in describe_error(gated, "train.py") and "does not give to this user" in describe_error(gated, "t")
    assert "ended by itself with status 0" in describe_error(ended, "train.py")


def test_the_worst_stands_first_with_where_to_read_on():
    bad = [Finding(failure, "e", "r", verdict=Verdict.NAMED) for failure in ("F3a", "F7", "F2")]
    held = [Finding.held(failure, "x", "y") for failure in ("F2", "F10", "F4", "F10")]
    both = Answer("train.py", {"trl": "0.14.0"})
    both.settle([*bad, *held, Finding.not_checked("F12", "w"), Finding.suspected("F15", "e", "w")])
    assert [found.failure for found in both.accusations] == ["F2", "F7", "F3a", "F15"]
    assert [both.named[0].notebook, both.suspected[0].notebook] == ["03_no_grad_fn", "08_step_against_textbook"]
    assert [each.failure for each in both.held] == ["F4", "F10"]
    text = terminal.text(both, everything=True)
    assert text.index("NAMED  F2") < text.index("NAMED  F3a") < text.index("NOT CHECKED") < text.index("HELD")
    pages = re.findall(r"docs/symptoms\.md#(\w+)", text)  # each is an anchor of that page
    anchors = (pathlib.Path(__file__).parents[2] / "docs" / "symptoms.md").read_text()
    assert pages == ["f2", "f7", "f3a", "f15"] and all(f'<a id="{page}"></a>' in anchors for page in pages)


ENDS, DOUBT = Finding("F2", "e", verdict=Verdict.NAMED, ends=True), Finding.suspected("F9", "e", "w")
BY_CUT = Finding.not_checked("cut", "w", ends=True, origin=CUT)


@pytest.mark.parametrize(
    ("findings", "error", "begins", "status"),
    [
        ([], "", "nothing found; 1 held in these", 0),
        ([], "train.py ended", "could not be judged", 3),
        (
            [Finding("F2", "e", verdict=Verdict.NAMED, ends=True, origin=SCRIPT)],
            "",
            "1 named (F2); the worst: F2 (bl",
            1,
        ),
        ([ENDS], "train.py ended", "1 named (F2); the worst: F2 (blocks)", 1),
        ([DOUBT], "train.py ended", "ended early", 1),  # a suspicion stood first, and the error was "too"
        ([BY_CUT], "", "could not be judged", 3),
        ([BY_CUT, DOUBT], "", "1 suspected (F9); what was cut ended the run", 1),
        ([Finding.noted("F15", "e", mild=True)], "", "nothing found; 1 held in these", 0),
    ],
)
def test_an_answer_begins_with_what_stops_the_run(findings, error, begins, status):
    """It stood behind the table, what was not checked and what held: ninety lines of a clean answer."""
    table = RewardTable(["reward_funcs[0] f"], [Line("right", "alone", "'7'", [1.0])])
    rest = [Finding.held("F10", "x", "y"), Finding.not_checked("F12", "w")]
    answer = Answer("train.py", findings=[*findings, *rest], rewards=table, error=error)
    said = terminal.text(answer).replace("\n  ", " ")
    assert said.startswith(f"train.py: {begins}") and answer.exit_status == status
    assert said.startswith(f"{terminal.verdict(answer)}\n" + f"ERROR {error}\n" * bool(error))
    assert ("NOTED  F15" in said) is bool(answer.noted)


@pytest.mark.parametrize(
    ("line", "asked", "option"),
    [
        ("sum(sampling_per_token_logps)", {"use_vllm": True}, "use_vllm"),
        ("trainer.llm.generate()", {"use_vllm": True}, "use_vllm"),
        ("trainer.llm.generate()", {}, ""),
        ("sum(rewards)", {"use_vllm": True}, ""),
        ("int('x' if trainer is None else 'llm')", {"use_vllm": True}, ""),  # a ValueError is the script's own
    ],
)
def test_an_error_for_want_of_what_is_cut_away_is_not_the_script_s(line, asked, option, tmp_path):
    """The stand-in for vLLM gives no log-probabilities: a loss of the script's own ended in a TypeError over None."""
    script = tmp_path / "train.py"
    script.write_text(line + "\n")
    names = dict.fromkeys(("trainer", "sampling_per_token_logps", "rewards"))
    with pytest.raises((TypeError, AttributeError, ValueError)) as raised:
        exec(compile(script.read_text(), str(script), "exec"), names)
    assert cuts.made_error(raised.value, asked) == option


@pytest.mark.parametrize("name", ["there.json", "gone.json", '{"a": 1}'])
def test_a_configuration_of_deepspeed_s_that_is_not_there(name, tmp_path, monkeypatch):
    """It was taken for none: F9 was accused of what ZeRO prevents."""
    monkeypatch.chdir(tmp_path)
    text = '{"zero_optimization": {"stage": 3}}'
    pathlib.Path("there.json").write_text(text)
    assert launcher_line.missing_file(name) == name * (name == "gone.json") and launcher_line.missing_file(None) == ""
    known = [json.loads(text), text, pathlib.Path("there.json"), None, "gone.json"]
    assert [launcher_line.zero_stage(each) for each in known] == [3, 3, 3, 0, 0]
    variables = ["ACCELERATE_USE_DEEPSPEED=true", f"ACCELERATE_DEEPSPEED_CONFIG_FILE={name}"]
    launch = launcher_line.read_line([*variables, "train.py"])
    assert (launch.zero_stage, launch.zero_config) == (3 if name == "there.json" else 2, name)


def test_no_heading_is_english_in_the_chinese_answer():
    """What judges have measured stays as it is; statuses and ids too."""
    bad = [Finding("F2", "e", "r", verdict=Verdict.NAMED, tried="t", place=Location("a/t.py", 3))]
    bad += [Finding("F9", "e", "r", verdict=Verdict.NAMED, place=Location("t.ipynb", 3, 2))]
    bad += [Finding.suspected(each, "e", "w", "r") for each in ("F15", *terminal._TITLES)]
    bad += [Finding.suspected("F20", "e", "w", "r", origin=RELEASE, mild=True)]
    bad += [Finding.not_checked("cut", "-", ends=True)]
    rest = [Finding.held("F10", "x", "y"), Finding.not_checked("F12", "w"), Finding.not_applicable("F5", "n")]
    lines = [Line(worth, "f", "c", [1.0]) for worth in ("right", "wrong", "other", "none")]
    table = RewardTable(["reward_funcs[0] f"], lines * 5, notes=["n"])
    more = {"cut": ["c"], "notes": ["n"], "error": "x", "rewards": table, "in_force": [Setting("one step", "-", "-")]}
    answers = [Answer("t.py", findings=[*bad, *rest], **more), Answer("t.py", findings=rest), Answer("t.py", error="x")]
    answers[0].compared = Differences("-", *[["F2"]] * 5, [Changed("", "beta", 0.0, None)])
    for answer, everything in itertools.product(answers, (False, True)):
        chinese, english = (terminal.text(answer, language, everything) for language in ("zh", "en"))
        plain = re.sub(r"notebooks/\w+\.ipynb|docs/zh/symptoms\.md#\w+|--json|--all|\bbeta\b", "", chinese)
        for finding in answer.findings:
            plain = plain.replace(terminal.title(finding.failure, "zh"), "")
        assert not set(re.findall(r"[A-Za-z]{3,}", plain)) - {"completion", "ipynb"}, plain
        assert chinese.count("\n") >= english.count("\n") - 8


def answer_with(count):
    """Return an answer with so many failures, each with more to say than five lines hold."""
    table = [Line("right", f"form {place}", "c", [float(place)]) for place in range(4)]
    figure = Quantity("tensors_without_gradient", 3, "tensors", 8)
    words = "More words, and more of these than a line holds, so that they are wrapped. " * 9
    ids = [failure.id for failure in failures.all()]
    bad = [
        Finding(each, words, words, verdict=Verdict.NAMED, diff="--- a\n" + "+line\n" * 30, figures=(figure,))
        for each in ids[:count]
    ]
    rest = [Finding.held(each, words, words) for each in ids[count:]]
    answer = Answer("train.py", rewards=RewardTable(["reward_funcs[0] f"], table), cut=["c"], notes=["n"])
    answer.in_force = [Setting(f"setting {place}", "words") for place in range(8)]
    answer.settle([*bad, *rest, Finding.not_checked("release", words)])
    return answer


@pytest.mark.parametrize(("count", "most"), [(0, 25), (1, 31), (9, 48)])
def test_the_sheet_is_short_and_cuts_no_sentence_off(count, most, monkeypatch):
    """Five lines at most for a failure, with its figure and the healthy band; --all has every word."""
    monkeypatch.setenv("COLUMNS", "100")
    answer = answer_with(count)
    sheet, whole = terminal.text(answer).splitlines(), terminal.text(answer, everything=True)
    assert len(sheet) <= most and all(len(line) <= 110 for line in sheet) and "…" not in "".join(sheet)
    bad = [place for place, line in enumerate(sheet) if line.startswith("NAMED")]
    for place in bad[:3]:
        of_it = [line for line in sheet[place + 1 : place + 7] if line.startswith("  ")]
        assert len(of_it) <= 4 and "tensors_without_gradient 3 of 8 tensors (healthy: == 0)" in of_it[0]
    assert (len(bad) == count and "+line" in whole) or not count
    assert not [failure.id for failure in failures.all() if failure.id not in "\n".join(sheet)]
    assert "".join(sheet).count("setting ") == 8


def test_an_adapter_is_built_and_what_it_says_is_kept(checkpoint, tmp_path):
    """A trained adapter's weights fit the real model alone: a cut one gets an adapter that is not zero."""
    adapter = tmp_path / "adapter"
    peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM").save_pretrained(adapter)
    adapters = []
    with built_small(adapters=adapters):
        model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
        wrapped = peft.PeftModel.from_pretrained(model, str(adapter), is_trainable=True)
    (trained,) = adapters
    assert torch.equal(small_models.probe(wrapped), trained.logits) and not torch.equal(trained.logits, trained.base)
    assert any(parameter.requires_grad for parameter in wrapped.parameters())
    small_models.probe(wrapped.train())
    assert wrapped.training


def test_what_a_trainer_is_given_is_known_by_name_through_a_subclass(tmp_path):
    """A subclass with *args and **kwargs, as people write them: the dataset is noted whole, and cut for the trainer."""
    spec = {"steps": 1, "output": str(tmp_path), "real_model": False, "world_size": 1}
    spec |= {"rank": 0, "ranks": 1, "together": "", "visible": "", "patience": 1}
    files = run.OwnFiles("train.py", Change())
    watched = run.WatchedScript(
        spec, Source("train.py", ""), run.Reporter(tmp_path / "report", tmp_path / "progress"), files
    )
    taken = {}

    def parent(self, model, args=None, train_dataset=None, **more):
        taken.update(model=model, train_dataset=train_dataset, **more)

    def subclass(self, *args, keep=True, **kwargs):
        watched.initialize(parent, self, args, kwargs)

    rows, trainer = Rows("row" for _ in range(2000)), object()
    watched.initialize(subclass, trainer, ("model", "arguments", rows), {"tokenizer": "t", "keep": False})
    assert taken["model"] == "model" and taken["tokenizer"] == "t" and len(taken["train_dataset"]) == 512
    assert watched.datasets[id(trainer)] is rows and watched.keywords[id(trainer)]["args"] == "arguments"
