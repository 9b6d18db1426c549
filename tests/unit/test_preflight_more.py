"""Judges of reference and updates: broken, healthy and odd, with real trainers and models."""

import types
from copy import deepcopy

import datasets
import pytest
import small
import torch
import transformers
import trl
from packaging.version import Version

from failurelab import handles
from failurelab_preflight import repairs
from failurelab_preflight.finding import Verdict
from failurelab_preflight.judges.lengths import judge_dataset
from failurelab_preflight.judges.logits import LogitsJudge
from failurelab_preflight.judges.optimizer import judge_optimizer
from failurelab_preflight.judges.reference import judge_reference
from failurelab_preflight.judges.replaced_adapter import judge_replaced_adapter
from failurelab_preflight.judges.rows import prompt_ids
from failurelab_preflight.judges.updates import judge_updates
from failurelab_preflight.stage import cuts, rewards, trainers
from failurelab_preflight.training import Load, Training


@pytest.fixture
def grpo(tokenizer, tmp_path):

    def make(model, more=(), **options):
        config = {"beta": 0.04, "per_device_train_batch_size": 4, "num_generations": 2, "report_to": []} | options
        args = trl.GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **config)
        rows = datasets.Dataset.from_dict({"prompt": ["1+1=", "2+2="] * 4, "answer": ["2", "4"] * 4})
        return trl.GRPOTrainer(
            model=model,
            reward_funcs=small.alternate,
            args=args,
            train_dataset=rows,
            processing_class=tokenizer,
            **dict(more),
        )

    return make


def training(trainer, **options):
    args = getattr(trainer, "args", None)
    arguments = dict(args.to_dict()) if hasattr(args, "to_dict") else {}
    return Training(trainer=trainer, arguments=arguments | options.pop("arguments", {}), **options)


def one(answers):
    (answer,) = answers
    return answer


def test_a_policy_that_was_changed_after_its_load(grpo, model):
    """As by a merged adapter. Releases that copy the policy keep the change; those that load by name lose it."""
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.mul_(1.5)
    trainer = grpo(model)
    kept = torch.equal(
        trainer.ref_model.model.layers[0].self_attn.q_proj.weight, model.model.layers[0].self_attn.q_proj.weight
    )
    answer = one(judge_reference(training(trainer)))
    assert answer.verdict is (Verdict.HELD if kept else Verdict.FOUND) and answer.failure == "F19"


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
    assert one(judge_reference(training(trainer))).verdict is (Verdict.FOUND if std and lacks else Verdict.HELD)


@pytest.mark.parametrize(("refer", "kind"), [(deepcopy, Verdict.HELD), (lambda policy: policy, Verdict.FOUND)])
def test_a_reference_that_is_a_copy_or_the_policy_itself(refer, kind, grpo, model):
    """A copy carries the forward that today's trl puts on the policy: asked by that, it would be the policy."""
    trainer = grpo(model)
    trainer.ref_model = refer(trainer.model).eval()
    assert one(judge_reference(training(trainer))).verdict is kind


class ScoresItself(trl.GRPOTrainer):
    """It may have a reference of its own."""


for _name in ("compute_loss", "_prepare_inputs", "_generate_and_score_completions"):
    setattr(ScoresItself, _name, lambda self, *args, **kwargs: None)


def run_of(adapters, **more):
    def initialize(original, trainer, args, options):
        original(trainer, *args, **options)

    return types.SimpleNamespace(making=0, training=False, real=False, adapters=adapters, initialize=initialize, **more)


@pytest.mark.parametrize(
    ("adapt", "again", "kind"),
    [
        (lambda model: added(model, 0.5), True, Verdict.FOUND),
        (lambda model: added(model, 0.5), False, Verdict.HELD),
        (lambda model: wrapped(model, 0.5), False, Verdict.HELD),
        (lambda model: added(model, 1e-5), True, Verdict.NOT_CHECKED),
        (lambda model: added(model, 0.0), True, Verdict.NOT_APPLICABLE),
        (lambda model: model, True, Verdict.NOT_APPLICABLE),
    ],
)
def test_an_adapter_that_the_script_has_trained_itself(adapt, again, kind, grpo, model):
    """It is in no folder: the model that the trainer is given tells of it, and what is left of it afterwards."""
    adapters = []
    with trainers.watched(run_of(adapters)):
        trainer = grpo(adapt(model), more={"peft_config": small.lora_config()} if again else ())
    answer = one(judge_replaced_adapter(training(trainer, adapters=adapters)))
    assert answer.verdict is kind


def test_an_adapter_whose_training_is_left_out_is_not_zero(model, tmp_path):
    """What comes after that training would find a trained one."""
    with trainers.watched(run_of([], train=lambda original, trainer: "left out")):
        first = transformers.Trainer(
            small.lora(model), transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
        )
        assert first.train() == "left out"
    assert all(weight.any() for name, weight in model.named_parameters() if "lora_B" in name)


def test_references_that_are_compared(grpo, model):
    """Another checkpoint is told; tokens that were added and another dtype make no other model."""

    def judged(reference, policy, **options):
        return list(judge_reference(training(types.SimpleNamespace(model=policy, ref_model=reference), **options)))

    policy, reference = small.qwen2(), small.qwen2(seed=1)
    policy.config._name_or_path, reference.config._name_or_path = "sft", "base"
    assert "the policy is sft and its reference is base" in one(judged(reference, policy)).evidence
    reference.config._name_or_path = "sft"  # built small, by different loads: nothing can be told
    assert one(judged(reference, policy)).verdict is Verdict.NOT_CHECKED
    reference = small.qwen2()
    assert one(judged(reference, small.qwen2().bfloat16(), small=False)).verdict is Verdict.HELD
    policy = small.qwen2()
    policy.resize_token_embeddings(40)
    policy.config._name_or_path = reference.config._name_or_path = "same"
    assert one(judged(reference, policy)).verdict is Verdict.HELD
    assert judged(None, policy, arguments={"beta": 0.0}) == []  # without a penalty none is needed
    trainer = grpo(model)
    trainer.ref_model = None
    answer = one(judge_reference(training(trainer, arguments={"sync_ref_model": True, "beta": 0.04})))
    assert answer.verdict is Verdict.FOUND and "no reference model" in answer.evidence


def updates(
    dtype, rate, model=None, *, name="Qwen/Qwen2-0.5B", by_trainer=False, cut=True, optim="adamw_torch", init="", **more
):
    model = model or small.qwen2()
    load = Load(name, {}, model.config, by_trainer=by_trainer, dtype=dtype, small=cut)
    arguments = {"learning_rate": rate, "optim": optim, "model_init_kwargs": init}
    return one(judge_updates(training(types.SimpleNamespace(model=model), arguments=arguments, loads=[load], **more)))


@pytest.mark.parametrize(
    ("dtype", "rate", "more", "kind"),
    [
        ("bfloat16", 1e-6, {}, Verdict.FOUND),
        ("float32", 1e-6, {}, Verdict.HELD),
        ("float32", 1e-3, {}, Verdict.HELD),
        ("bfloat16", 1e-3, {}, Verdict.HELD),
        ("bfloat16", 1e-6, {"zero_stage": 2}, Verdict.NOT_APPLICABLE),
        ("bfloat16", 1e-6, {"lacks": "zero3.json"}, Verdict.NOT_CHECKED),  # with ZeRO nothing is lost
        ("bfloat16", 1e-6, {"optim": "adafactor"}, Verdict.NOT_CHECKED),
    ],
)
def test_steps_that_are_rounded_away(dtype, rate, more, kind):
    answer = updates(dtype, rate, **more)
    assert answer.verdict is kind and answer.failure == "F9"
    if answer.verdict is Verdict.FOUND:
        assert "initializer_range" in answer.evidence
    assert more.get("lacks", "") in answer.why


@pytest.mark.parametrize(
    ("dtype", "rate", "optim"),
    [
        ("bfloat16", 5e-6, "adamw_torch"),
        ("bfloat16", 2e-5, "adamw_torch"),  # trl's own default for supervised fine-tuning
        ("float16", 1e-6, "adamw_torch_fused"),  # eight times finer neighbours: lost on most elements, not on all
    ],
)
def test_a_run_that_rounding_slows_is_noted_and_not_accused(dtype, rate, optim):
    """A plain SFT script in bfloat16 at trl's default rate was SUSPECTED of F9. Such runs learn."""
    answer = updates(dtype, rate, optim=optim)
    assert answer.verdict is Verdict.NOTED and answer.harm == "slows" and "float32" in answer.repair


def test_a_load_in_16_bits_is_undone_where_it_was_made():
    """By the script, by the trainer, and by a cast after it."""
    name = "dtype" if Version(transformers.__version__) >= Version("4.56") else "torch_dtype"
    assert updates("bfloat16", 1e-6).undo == repairs.Keyword("load", name, '"float32"', index=0)
    assert updates("bfloat16", 1e-6, by_trainer=True).undo.values == {"model_init_kwargs": {name: "float32"}}
    as_text = updates("bfloat16", 1e-6, by_trainer=True, init='{"use_cache": false}').undo.values
    assert as_text == {"model_init_kwargs": {"use_cache": False, name: "float32"}}
    answer = updates("float32", 1e-6, small.qwen2().bfloat16())
    assert answer.undo.text == "{trainer}.model.float()" and "bfloat16" in answer.evidence


@pytest.mark.parametrize(
    ("dtype", "rate", "kind"),
    [
        (torch.float32, 1e-6, Verdict.NOT_APPLICABLE),
        (torch.bfloat16, 1e-6, Verdict.SUSPECTED),
        (torch.bfloat16, 2e-4, Verdict.NOT_CHECKED),
        (torch.bfloat16, 1e-2, Verdict.HELD),
    ],
)
def test_adapters_that_trl_casts_to_bfloat16(dtype, rate, kind):
    """Below a share of 5 % a step is lost in A as it is in weights; how much more of them slow down, a run tells."""
    wrapped = small.lora(small.qwen2())
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    answer = updates("bfloat16", rate, wrapped)
    assert answer.verdict is kind
    if kind in (Verdict.NOT_CHECKED, Verdict.SUSPECTED):
        said = f"{answer.evidence}{answer.why}{answer.repair}"
        assert "of A's numbers" in said and "to_float32" in said


@pytest.mark.parametrize(("dtype", "kind"), [("bfloat16", Verdict.NOT_CHECKED), ("float32", Verdict.NOT_APPLICABLE)])
def test_full_copies_beside_an_adapter_keep_the_dtype_of_the_base(dtype, kind):
    """They were taken for tensors of the adapter, which is trained in float32."""
    assert updates(dtype, 1e-6, small.lora(small.qwen2(), modules_to_save=["lm_head"])).verdict is kind


def test_real_weights_are_read_where_they_are_here(model):
    answer = updates("bfloat16", 1e-6, model, cut=False)
    assert answer.verdict is Verdict.FOUND and "the checkpoint's elements" in answer.evidence
    folder = model.config._name_or_path
    stored = updates("bfloat16", 1e-6, name=folder)
    assert stored.verdict is Verdict.FOUND and "a sample of the checkpoint" in stored.evidence


@pytest.mark.parametrize(
    ("optimizer", "rate", "kind"),
    [
        (torch.optim.AdamW, 1e-6, Verdict.FOUND),
        (torch.optim.AdamW, 1e-3, Verdict.HELD),
        (torch.optim.SGD, 1e-6, Verdict.NOT_CHECKED),
        (small.moving(small.master), 1e-6, Verdict.NOT_CHECKED),  # of its own: what it steps is not known
    ],
)
def test_an_optimizer_of_the_script_s_own_is_known_by_its_class(optimizer, rate, kind):
    """Its own rate counts, which a schedule may hold down at first."""
    made = optimizer([torch.nn.Parameter(torch.ones(3))], lr=rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(made, lambda step: step / 20)
    assert updates("bfloat16", 1e-4, keywords={"optimizers": (made, schedule)}).verdict is kind
    by_class = {"optimizer_cls_and_kwargs": (optimizer, {"lr": rate})}
    assert updates("bfloat16", 1e-4, keywords=by_class).verdict is kind


def planned(tmp_path, model=None, rows=64, config=None, loaded=None, **options):
    """Return what preflight sees of a GRPO script with this configuration, two prompts a step."""
    config = {"learning_rate": 1e-5, "per_device_train_batch_size": 4, "num_generations": 2} | (config or {})
    if cuts.counts_prompts():
        config["per_device_train_batch_size"] = 2
    args = trl.GRPOConfig(output_dir=str(tmp_path), report_to=[], use_cpu=True, bf16=False, **config)
    trainer = types.SimpleNamespace(model=model or small.qwen2(), args=args, reward_funcs=[small.alternate])
    arguments = dict(args.to_dict()) | {"gradient_accumulation_steps": 1}
    loads = [Load("x", {}, loaded, by_trainer=False)] if loaded else []
    dataset = datasets.Dataset.from_dict({"prompt": ["1+1="] * rows})
    return Training(trainer=trainer, arguments=arguments, dataset=dataset, loads=loads, **options)


@pytest.mark.parametrize(("rows", "noted"), [(1, True), (64, True), (0, False)])
def test_rows_that_all_have_one_prompt_are_noted(rows, noted, tmp_path):
    given = planned(tmp_path, rows=max(rows, 2))
    given.dataset = datasets.Dataset.from_dict({"prompt": ["1+1="] * rows or ["1+1=", "2+2="]})
    assert not list(judge_dataset(given))
    assert [note.partition(", ")[0] for note in given.notes] == [
        f"all {rows} rows that were read have one prompt"
    ] * noted


@pytest.mark.parametrize(("whole", "kind"), [(True, Verdict.HELD), (False, Verdict.NOT_CHECKED)])
def test_an_optimizer_that_holds_a_part_is_a_question(whole, kind):
    """A script may train biases alone: how many matrices are held, a reader knows what to make of."""
    model = small.qwen2()
    held = [each for each in model.parameters() if whole or each.ndim < 2]
    trainer = types.SimpleNamespace(model=model, optimizer=torch.optim.AdamW(held, lr=1e-3))
    answer = one(judge_optimizer(Training(trainer, {})))
    assert answer.verdict is kind and ("0 of them matrices" in answer.why) is not whole


@pytest.mark.parametrize("called", [lambda f: f(["a", "b"], ["c", "d"]), lambda f: f(prompts=["a"], completions=["b"])])
def test_a_trainer_may_call_its_reward_functions_in_its_own_way(called):
    """By position, as trainers do that are none of trl's: the cut training ended in an error of preflight's own."""

    def by_name(prompts, completions):
        return [0.0] * len(completions)

    given = Training(types.SimpleNamespace(reward_funcs=[by_name], num_generations=2), {})
    with rewards.differing_rewards(given):
        paid = called(given.trainer.reward_funcs[0])
    assert len(paid) in (1, 2) and set(given.reward_inputs) == {"prompts", "completions"}


@pytest.mark.parametrize("drawn", ["aabcdddd", "aaaabbbb"])
def test_equal_completions_of_a_prompt_get_one_reward(drawn):
    """As functions pay: which of two equal ones a micro-batch trains on cannot be seen, and BNPO weighs by that."""
    given = Training(types.SimpleNamespace(reward_funcs=[none_is_right], num_generations=4), {})
    with rewards.differing_rewards(given):
        paid = given.trainer.reward_funcs[0](completions=list(drawn))
    if drawn == "aabcdddd":
        assert paid[0] == paid[1] and len(set(paid[:4])) == 3 and len(set(paid[4:])) == 1
    else:
        assert len(set(paid)) > 2  # else there would be no gradient


@pytest.mark.parametrize("environments", [None, {"sums": object, "games": object}])
def test_prompts_are_encoded_before_a_step_says_which_environment_they_have(environments):
    """Later releases read it from their step: to ask before ended in an error, and another release was advised."""
    trainer = types.SimpleNamespace(environment_factories=environments)

    def encode(prompts):
        kinds = trainer._batch_environments
        return [
            [len(prompt)] for prompt, kind in zip(prompts, kinds, strict=True) if kind in (environments or [None])
        ], None

    trainer._tokenize_prompts = encode
    assert prompt_ids(trainer, ["3+4=", "10+4="]) == [[4], [5]] and not hasattr(trainer, "_batch_environments")


def none_is_right(completions, **_):
    return [0.0] * len(completions)


def test_what_is_frozen_stays_frozen():
    """PEFT's disable_adapter switches requires_grad on when it is left."""
    model = small.lora(small.qwen2())
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with handles.keep_requires_grad(model), model.disable_adapter():
        pass
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(("made", "noted"), [(12, True), (5, False), (3, False)], ids=["all", "last", "asked for"])
def test_rows_that_a_layer_of_the_script_keeps_are_not_the_whole_sequence(made, noted):
    """A head that is cut to as many rows as the longest completion needs makes more than shorter ones ask for."""
    trainer = types.SimpleNamespace(model=torch.nn.Linear(1, 1))
    judge = LogitsJudge(Training(trainer, {}))
    given = {"input_ids": torch.zeros(2, 12, dtype=torch.long), "logits_to_keep": 3}
    judge._note_rows(trainer.model, (), given, types.SimpleNamespace(logits=torch.zeros(2, made, 7)))
    answers = list(judge.answers())
    assert not [answer for answer in answers if answer.accuses]
    assert [answer.failure for answer in answers if answer.verdict is Verdict.NOTED] == ["F3a"] * noted
