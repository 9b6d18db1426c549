"""Judges of reference and updates: broken, healthy and odd, with real trainers and models."""

import types
from copy import deepcopy

import pytest
import small
import torch
import transformers
from packaging.version import Version

from failurelab_preflight import repairs
from failurelab_preflight.finding import Verdict
from failurelab_preflight.judges.logits import LogitsJudge
from failurelab_preflight.judges.optimizer import judge_optimizer
from failurelab_preflight.judges.reference import judge_reference
from failurelab_preflight.judges.replaced_adapter import judge_replaced_adapter
from failurelab_preflight.judges.rows import prompt_ids
from failurelab_preflight.judges.updates import judge_updates
from failurelab_preflight.stage import rewards, trainers
from failurelab_preflight.training import Load, Training

FOUND, HELD, NOTED = Verdict.FOUND, Verdict.HELD, Verdict.NOTED
NOT_CHECKED, NOT_APPLICABLE = Verdict.NOT_CHECKED, Verdict.NOT_APPLICABLE


@pytest.fixture
def grpo(tokenizer):
    sizes = {"beta": 0.04, "per_device_train_batch_size": 4, "num_generations": 2}
    return lambda model, more=(): small.grpo(model, tokenizer, ["1+1=", "2+2="] * 4, more=more, **sizes)


def training(trainer, **options):
    args = getattr(trainer, "args", None)
    arguments = dict(args.to_dict()) if hasattr(args, "to_dict") else {}
    return Training(trainer=trainer, arguments=arguments | options.pop("arguments", {}), **options)


def one(answers):
    (answer,) = answers
    return answer


def wrapped(model, std):
    return small.stir(small.lora(model), "lora_B", std)


def added(model, std):
    return small.stir(small.added(model), "lora_B", std)


@pytest.mark.parametrize("std", [0.0, 0.5])
@pytest.mark.parametrize("adapt", [wrapped, added])
def test_a_reference_that_is_the_policy_without_its_adapter(adapt, std, grpo, model):
    """A new adapter is zero, and the reference is the policy; of a trained one the reference knows nothing, unless it
    was copied (0.14), or has an adapter of its own (today, of a wrapped policy).
    """
    trainer = grpo(adapt(model, std))
    if adapt is wrapped:
        lacks = trainer.ref_model is None and "ref" not in trainer.model.peft_config
    else:  # releases that load the reference by name have the base model
        lacks = not getattr(trainer.ref_model, "peft_config", None)
    assert one(judge_reference(training(trainer))).verdict is (FOUND if std and lacks else HELD)


@pytest.mark.parametrize(("refer", "kind"), [(deepcopy, HELD), (lambda policy: policy, FOUND)])
def test_a_reference_that_is_a_copy_or_the_policy_itself(refer, kind, grpo, model):
    """A copy carries the forward that today's trl puts on the policy: asked by that, it would be the policy."""
    trainer = grpo(model)
    trainer.ref_model = refer(trainer.model).eval()
    assert one(judge_reference(training(trainer))).verdict is kind


def named(name, seed=0, rows=None):
    made = small.qwen2(seed)
    made.config._name_or_path = name
    return made if rows is None else made.resize_token_embeddings(rows) and made


@pytest.mark.parametrize(
    ("policy", "reference", "more", "kind"),
    [
        (lambda: named("sft"), lambda: named("base", 1), {}, FOUND),
        (lambda: named("base"), lambda: named("saved"), {"small": False}, HELD),  # of a folder with the same weights
        (lambda: named("same"), lambda: named("same", 1), {}, NOT_CHECKED),  # built small, by different loads
        (lambda: named("same"), lambda: named("same", 1), {"small": False}, FOUND),
        (lambda: named("same").bfloat16(), lambda: named("same"), {"small": False}, HELD),  # another dtype alone
        (lambda: named("same", rows=40), lambda: named("same"), {}, HELD),  # tokens that were added
        (lambda: named("same"), lambda: named("same"), {"arguments": {"beta": 0.0}}, None),
        (lambda: named("same"), lambda: None, {"arguments": {"sync_ref_model": True, "beta": 0.04}}, FOUND),
        (lambda: named("same"), torch.nn.Module, {}, NOT_CHECKED),  # without any tensor of the policy's name
    ],
)
def test_references_that_are_compared(policy, reference, more, kind):
    trainer = types.SimpleNamespace(model=policy(), ref_model=reference())
    verdicts = [answer.verdict for answer in judge_reference(training(trainer, **more))]
    assert verdicts == [kind] * (kind is not None)


def run_of(adapters, **more):
    def initialize(original, trainer, args, options):
        original(trainer, *args, **options)

    return types.SimpleNamespace(making=0, training=False, real=False, adapters=adapters, initialize=initialize, **more)


@pytest.mark.parametrize(
    ("adapt", "again", "kind"),
    [
        (lambda model: added(model, 0.5), True, FOUND),
        (lambda model: added(model, 0.5), False, HELD),
        (lambda model: wrapped(model, 0.5), False, HELD),
        (lambda model: added(model, 1e-5), True, NOT_CHECKED),
        (lambda model: added(model, 0.0), True, NOT_APPLICABLE),
        (lambda model: model, True, NOT_APPLICABLE),
    ],
)
def test_an_adapter_that_the_script_has_trained_itself(adapt, again, kind, grpo, model):
    """It is in no folder: the model that the trainer is given tells of it, and what is left of it afterwards."""
    adapters = []
    with trainers.watched(run_of(adapters)):
        trainer = grpo(adapt(model), more={"peft_config": small.lora_config()} if again else ())
    assert one(judge_replaced_adapter(training(trainer, adapters=adapters))).verdict is kind


def test_an_adapter_whose_training_is_left_out_is_not_zero(model, tmp_path):
    """What comes after that training would find a trained one."""
    args = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    with trainers.watched(run_of([], train=lambda original, trainer: "left out")):
        assert transformers.Trainer(small.lora(model), args).train() == "left out"
    assert all(weight.any() for name, weight in model.named_parameters() if "lora_B" in name)


def updates(dtype, rate, model=None, *, name="Qwen/Qwen2-0.5B", by_trainer=False, cut=True, init="", **more):
    """Return what is said of F9; `dtype` is of the load, `optim` and `fsdp` are among the arguments."""
    model = model or small.qwen2()
    load = Load(name, {}, model.config, by_trainer=by_trainer, dtype=dtype, small=cut)
    asked = {option: more.pop(option) for option in ("optim", "fsdp") if option in more}
    arguments = {"learning_rate": rate, "optim": "adamw_torch", "model_init_kwargs": init} | asked
    return one(judge_updates(training(types.SimpleNamespace(model=model), arguments=arguments, loads=[load], **more)))


def of_kind(kind, rate):
    """Return an optimizer as trainers take it; its schedule holds its rate down at first."""
    made = kind([torch.nn.Parameter(torch.ones(3))], lr=rate)
    return made, torch.optim.lr_scheduler.LambdaLR(made, lambda step: step / 20)


def by_class(kind, rate):
    return {"keywords": {"optimizer_cls_and_kwargs": (kind, {"lr": rate})}}


def lora(dtype=torch.float32, **options):
    made = small.lora(small.qwen2(), **options)
    for parameter in made.parameters():
        parameter.data = parameter.data.to(dtype) if parameter.requires_grad else parameter.data
    return made


ADAMW, OWN = torch.optim.AdamW, small.moving(small.master)  # of the second nobody knows what it steps


@pytest.mark.parametrize(
    ("dtype", "rate", "more", "kind", "said"),
    [
        ("bfloat16", 1e-6, {}, FOUND, "initializer_range"),
        ("float32", 1e-6, {}, HELD, ""),
        ("bfloat16", 1e-3, {}, HELD, ""),
        ("bfloat16", 1e-6, {"zero_stage": 2}, NOT_APPLICABLE, ""),
        ("bfloat16", 1e-6, {"optim": "adamw_apex_fused"}, NOT_APPLICABLE, ""),
        ("bfloat16", 1e-6, {"fsdp": "full_shard"}, NOT_CHECKED, ""),
        ("bfloat16", 1e-6, {"lacks": "zero3.json"}, NOT_CHECKED, "zero3.json"),  # with ZeRO nothing is lost
        ("bfloat16", 1e-6, {"optim": "adafactor"}, NOT_CHECKED, ""),
        # Runs that rounding slows learn: a plain SFT script in bfloat16 at trl's default rate was SUSPECTED of F9.
        ("bfloat16", 5e-6, {}, NOTED, "known to learn"),
        ("float16", 1e-6, {"optim": "adamw_torch_fused"}, NOTED, ""),  # lost on most elements, not on all
        # An optimizer of the script's own is known by its class, and its own rate counts.
        ("bfloat16", 1e-4, {"keywords": {"optimizers": of_kind(ADAMW, 1e-6)}}, FOUND, "AdamW of the script"),
        ("bfloat16", 1e-4, {"keywords": {"optimizers": of_kind(ADAMW, 1e-3)}}, HELD, ""),
        ("bfloat16", 1e-4, {"keywords": {"optimizers": of_kind(OWN, 1e-6)}}, NOT_CHECKED, ""),
        ("float32", 1e-4, {"keywords": {"optimizers": of_kind(OWN, 1e-6)}}, NOT_CHECKED, ""),  # it may round by itself
        ("bfloat16", 1e-4, by_class(ADAMW, 1e-6), FOUND, ""),
        ("bfloat16", 1e-4, by_class(torch.optim.SGD, 1e-6), NOT_CHECKED, "SGD"),
        # Adapters, as trl casts those of a quantized model: a step is lost in A as it is in weights.
        ("bfloat16", 1e-6, {"model": lora}, NOT_APPLICABLE, ""),
        ("bfloat16", 1e-6, {"model": lambda: lora(torch.bfloat16)}, NOTED, "of A's numbers"),
        ("bfloat16", 1e-2, {"model": lambda: lora(torch.bfloat16)}, HELD, ""),
        # Full copies beside an adapter keep the dtype of the base.
        ("bfloat16", 1e-6, {"model": lambda: lora(modules_to_save=["lm_head"])}, NOT_CHECKED, "modules_to_save"),
    ],
)
def test_steps_that_are_rounded_away(dtype, rate, more, kind, said):
    model = more["model"]() if "model" in more else None
    answer = updates(dtype, rate, model, **{name: value for name, value in more.items() if name != "model"})
    assert answer.verdict is kind and answer.failure == "F9" and said in answer.evidence + answer.why
    if kind is NOTED:
        assert answer.harm == "slows" and "float32" in answer.repair


def test_a_load_in_16_bits_is_undone_where_it_was_made():
    """By the script, by the trainer, and by a cast after it."""
    name = "dtype" if Version(transformers.__version__) >= Version("4.56") else "torch_dtype"
    assert updates("bfloat16", 1e-6).undo == repairs.Keyword("load", name, '"float32"', index=0)
    assert updates("bfloat16", 1e-6, by_trainer=True).undo.values == {"model_init_kwargs": {name: "float32"}}
    as_text = updates("bfloat16", 1e-6, by_trainer=True, init='{"use_cache": false}').undo.values
    assert as_text == {"model_init_kwargs": {"use_cache": False, name: "float32"}}
    answer = updates("float32", 1e-6, small.qwen2().bfloat16())
    assert answer.undo.text == "{trainer}.model.float()" and "bfloat16" in answer.evidence


def test_real_weights_are_read_where_they_are_here(model):
    answer = updates("bfloat16", 1e-6, model, cut=False)
    assert answer.verdict is FOUND and "the checkpoint's elements" in answer.evidence
    stored = updates("bfloat16", 1e-6, name=model.config._name_or_path)
    assert stored.verdict is FOUND and "a sample of the checkpoint" in stored.evidence


@pytest.mark.parametrize(("whole", "kind"), [(True, HELD), (False, NOT_CHECKED)])
def test_an_optimizer_that_holds_a_part_is_a_question(whole, kind):
    """A script may train biases alone: how many matrices are held, a reader knows what to make of."""
    model = small.qwen2()
    held = [each for each in model.parameters() if whole or each.ndim < 2]
    trainer = types.SimpleNamespace(model=model, optimizer=torch.optim.AdamW(held, lr=1e-3))
    answer = one(judge_optimizer(Training(trainer, {})))
    assert answer.verdict is kind and ("0 of them matrices" in answer.why) is not whole


@pytest.mark.parametrize(("optimizer", "kind"), [(ADAMW, FOUND), (type("Masters", (ADAMW,), {}), NOT_CHECKED)])
def test_an_optimizer_of_copies_may_write_them_back(optimizer, kind):
    """A script's own, of float32 copies of bfloat16 weights, was accused; one of torch's is another model's."""
    copies = [torch.nn.Parameter(each.detach().clone()) for each in small.qwen2().parameters()]
    trainer = types.SimpleNamespace(model=small.qwen2(), optimizer=optimizer(copies, lr=1e-3))
    assert one(judge_optimizer(Training(trainer, {}))).verdict is kind


def never_right(prompts=(), completions=(), **_):
    return [0.0] * len(completions)


@pytest.mark.parametrize("called", [lambda f: f(["a", "b"], ["c", "d"]), lambda f: f(prompts=["a"], completions=["b"])])
def test_a_trainer_may_call_its_reward_functions_in_its_own_way(called):
    """By position, as trainers do that are none of trl's: the cut training ended in an error of preflight's own."""
    given = Training(types.SimpleNamespace(reward_funcs=[never_right], num_generations=2), {})
    with rewards.differing_rewards(given):
        paid = called(given.trainer.reward_funcs[0])
    assert len(paid) in (1, 2) and set(given.reward_inputs) == {"prompts", "completions"}


@pytest.mark.parametrize(("drawn", "kinds"), [("aabcdddd", 3), ("aaaabbbb", 4)], ids=["", "all_alike"])
def test_equal_completions_of_a_prompt_get_one_reward(drawn, kinds):
    """As functions pay: which of two equal ones a micro-batch trains on cannot be seen, and BNPO weighs by that.

    Not where all are alike: there would be no gradient.
    """
    given = Training(types.SimpleNamespace(reward_funcs=[never_right], num_generations=4), {})
    with rewards.differing_rewards(given):
        paid = given.trainer.reward_funcs[0](completions=list(drawn))
    assert len(set(paid[:4])) == kinds and (paid[0] == paid[1]) is (kinds == 3)


@pytest.mark.parametrize("environments", [None, {"sums": object, "games": object}])
def test_prompts_are_encoded_before_a_step_says_which_environment_they_have(environments):
    """Later releases read it from their step: to ask before ended in an error, and another release was advised."""
    trainer = types.SimpleNamespace(environment_factories=environments)

    def encode(prompts):
        assert all(kind in (environments or [None]) for kind in trainer._batch_environments)
        return [[len(prompt)] for prompt, _ in zip(prompts, trainer._batch_environments, strict=True)], None

    trainer._tokenize_prompts = encode
    assert prompt_ids(trainer, ["3+4=", "10+4="]) == [[4], [5]] and not hasattr(trainer, "_batch_environments")


@pytest.mark.parametrize(("made", "noted"), [(12, True), (5, False)], ids=["all", "last"])
def test_rows_that_a_layer_of_the_script_keeps_are_not_the_whole_sequence(made, noted):
    """A head that is cut to as many rows as the longest completion needs makes more than shorter ones ask for."""
    trainer = types.SimpleNamespace(model=torch.nn.Linear(1, 1))
    judge = LogitsJudge(Training(trainer, {}))
    given = {"input_ids": torch.zeros(2, 12, dtype=torch.long), "logits_to_keep": 3}
    judge._note_rows(trainer.model, (), given, types.SimpleNamespace(logits=torch.zeros(2, made, 7)))
    answers = list(judge.answers())
    assert not [answer for answer in answers if answer.accuses]
    assert [answer.failure for answer in answers if answer.verdict is NOTED] == ["F3a"] * noted
