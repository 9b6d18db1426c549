"""Judges of reference and updates: broken, healthy and odd, with real trainers and models."""

import collections
import dataclasses
import functools
import importlib.metadata
import types
from copy import deepcopy

import accelerate
import datasets
import pytest
import small
import torch
import transformers
import trl
from packaging.version import Version

from failurelab.preflight import repairs
from failurelab.preflight.answer import Verdict
from failurelab.preflight.judges import plan
from failurelab.preflight.judges.first_rewards import judge_first_rewards
from failurelab.preflight.judges.optimizer import OptimizerJudge
from failurelab.preflight.judges.reference import judge_reference
from failurelab.preflight.judges.replaced_adapter import judge_replaced_adapter
from failurelab.preflight.judges.rows import prompt_ids
from failurelab.preflight.judges.states import judge_saved, judge_states
from failurelab.preflight.judges.updates import judge_updates
from failurelab.preflight.script_text import Text
from failurelab.preflight.stage import cuts, rewards, states, trainers
from failurelab.preflight.training import Load, Source, Training
from failurelab.rewards.table import Line, RewardTable


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
    model.add_adapter(small.lora_config())
    return small.stir(model, "lora_B", std)


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


@pytest.mark.parametrize(
    ("beta", "adapt", "own", "kind"),
    [
        (0.04, None, False, Verdict.FOUND),
        (0.0, None, False, None),
        (0.04, small.lora, False, Verdict.HELD),  # the policy without its adapter is the reference
        (0.04, None, True, Verdict.NOT_CHECKED),
    ],
    ids=["dropped", "no penalty", "LoRA", "own step"],
)
def test_a_reference_that_the_script_drops(beta, adapt, own, kind, grpo, model):
    """`self.ref_model = None` saves memory, and then the step asks the policy for an adapter to switch off."""
    trainer = grpo(adapt(model) if adapt else model, beta=beta)
    trainer.ref_model = None
    trainer.__class__ = ScoresItself if own else type(trainer)
    if beta == 0 and Version(trl.__version__) < Version("0.16"):
        kind = Verdict.FOUND  # it asks for the reference all the same
    answers = list(judge_reference(training(trainer, source=Source(__file__, ""))))
    assert [answer.verdict for answer in answers] == ([kind] if kind else [])
    if kind is Verdict.FOUND:
        assert answers[0].ends and "ref_model" in answers[0].evidence
        text = "class Mine(T):\n    def __init__(self):\n        self.x = 1\n        self.ref_model = None\n"
        script = repairs.EditableScript({__file__: Text(__file__, text)}.get)
        undone = {__file__: text.replace("        self.ref_model = None\n", "")}
        assert answers[0].undo.change(script).files == undone


@pytest.mark.parametrize(
    ("rename", "again", "kind", "said"),
    [
        (lambda name: name.replace(".default.", "."), False, Verdict.FOUND, "set_peft_model_state_dict"),
        (lambda name: f"module.{name}", False, Verdict.FOUND, "without 'module.'"),
        (lambda name: f"module.{name}", True, Verdict.HELD, ""),  # the script has looked, and loads by other names
        (lambda name: name, False, Verdict.HELD, ""),
        (lambda name: f"{name[::-1]}", False, Verdict.SUSPECTED, "strict=True"),
    ],
)
def test_weights_of_which_the_model_takes_none(rename, again, kind, said, model):
    """An adapter's names lacked its name, and the run began from a fresh one: nothing was said."""
    adapted = small.lora(model)
    weights = {name: tensor for name, tensor in adapted.state_dict().items() if "lora_" in name}
    own = types.SimpleNamespace(holds=lambda file: file == __file__, asks=lambda through: True)
    loads = []
    with states.noted(loads, own):
        adapted.load_state_dict({rename(name): tensor for name, tensor in weights.items()}, strict=False)
        if again:
            adapted.load_state_dict(weights, strict=False)
        adapted.load_state_dict(adapted.state_dict())  # what is strict raises by itself
    (answer,) = judge_states(Training(types.SimpleNamespace(model=adapted), {}, states=loads))
    assert answer.verdict is kind and said in answer.repair
    assert bool(answer.tried) is (kind is Verdict.FOUND)
    other = torch.nn.Linear(1, 1)  # such as a model of the script's that the trainer does not have
    assert not list(judge_states(Training(types.SimpleNamespace(model=other), {}, states=loads)))


SAVES = """
model = load()
trainer = Trainer(model=model, peft_config=config)
trainer.train()
{}
"""


@pytest.mark.parametrize(
    ("after", "told"),
    [
        ("trainer.model.merge_and_unload()\ntrainer.save_model('out')", 5),
        ("model.save_pretrained('out')", 5),
        ("trainer.model.save_pretrained('out')", 0),
        ("merged = trainer.model.merge_and_unload()\nmerged.save_pretrained('out')", 0),
        ("model = trainer.model.merge_and_unload()\nmodel.save_pretrained('out')", 0),
    ],
)
def test_weights_that_are_saved_and_are_not_the_trained_ones(after, told, model):
    """What comes after train() is not run, and nothing was said of it."""
    trainer = types.SimpleNamespace(model=small.lora(model))
    judged = Training(trainer, {}, source=Source("train.py", SAVES.format(after), 4), keywords={"model": model})
    found = list(judge_saved(judged))
    assert [each.place.line for each in found] == [told] * bool(told)
    judged.keywords["model"] = trainer.model  # wrapped by the script: then it saves an adapter
    assert len(list(judge_saved(judged))) == ("merge" in after and bool(told))


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


def test_references_that_are_compared(grpo, model, monkeypatch):
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
    for version, ends in (("0.27.2", False), ("0.28.0", True)):
        monkeypatch.setattr(importlib.metadata, "version", lambda name, version=version: version)
        answer = one(judge_reference(training(trainer, arguments={"sync_ref_model": True, "beta": 0.04})))
        assert answer.ends == ends and ("NotImplementedError" in answer.evidence) == ends


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
        ("float32", 1e-3, {}, Verdict.NOT_APPLICABLE),
        ("bfloat16", 5e-6, {}, Verdict.SUSPECTED),
        ("bfloat16", 1e-3, {}, Verdict.HELD),
        # eight times finer neighbours near 0.02: lost on most, and on not all
        ("float16", 1e-6, {"optim": "adamw_torch_fused"}, Verdict.SUSPECTED),
        ("float16", 1e-6, {}, Verdict.FOUND),  # Adam's epsilon is 0 in it, and a small gradient is divided by 0
        ("bfloat16", 1e-6, {"zero_stage": 2}, Verdict.NOT_APPLICABLE),
        ("bfloat16", 1e-6, {"optim": "adafactor"}, Verdict.NOT_CHECKED),
    ],
)
def test_steps_that_are_rounded_away(dtype, rate, more, kind):
    answer = updates(dtype, rate, **more)
    assert answer.verdict is kind and answer.failure == "F9"
    if answer.verdict in (Verdict.FOUND, Verdict.SUSPECTED):
        assert "initializer_range" in answer.evidence or "inf of a weight" in answer.evidence


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


@pytest.mark.parametrize(
    ("dtype", "rate", "more", "kind"),
    [
        ("bfloat16", 1e-6, {}, Verdict.SUSPECTED),
        ("bfloat16", 1e-3, {}, Verdict.HELD),
        ("float32", 1e-6, {}, Verdict.NOT_APPLICABLE),
        ("bfloat16", 1e-6, {"zero_stage": 2}, Verdict.NOT_APPLICABLE),
    ],
)
def test_full_copies_beside_an_adapter_keep_the_dtype_of_the_base(dtype, rate, more, kind):
    answer = updates(dtype, rate, small.lora(small.qwen2(), modules_to_save=["lm_head"]), **more)
    assert answer.verdict is kind
    assert kind is Verdict.NOT_APPLICABLE or "modules_to_save trains 1 tensor(s)" in answer.evidence


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
        (small.moving(small.master), 1e-6, Verdict.NOT_APPLICABLE),
    ],
)
def test_an_optimizer_of_the_script_s_own_is_tried(optimizer, rate, kind):
    """Its own rate counts, which a schedule may hold down at first, and whether it keeps what bfloat16 loses."""
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


def scheduled(steps):
    model = small.qwen2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    return optimizer, transformers.get_linear_schedule_with_warmup(optimizer, 0, steps)


def test_planned_steps_are_those_of_the_trainer(tmp_path):
    assert plan.planned_steps(planned(tmp_path, config={"max_steps": 7})) == 7
    assert plan.planned_steps(planned(tmp_path, config={"num_train_epochs": 3})) == 96
    assert plan.planned_steps(planned(tmp_path, config={"num_train_epochs": 3}, world_size=2)) == 48


@pytest.mark.parametrize(
    ("config", "options", "words"),
    [
        ({}, {}, ""),
        ({"learning_rate": 5e-7, "lr_scheduler_type": "cosine"}, {"adapted": True}, "adapters at a learning rate"),
        ({"learning_rate": 1e-6, "max_steps": 20_000}, {"adapted": True}, ""),
        ({"learning_rate": 5e-7}, {}, ""),
        ({"learning_rate": 5e-5}, {"large": True}, "a whole model"),
        ({"learning_rate": 5e-6}, {"large": True}, ""),
        ({}, {"large": True, "own": torch.optim.AdamW}, "a whole model"),
        ({}, {"large": True, "own": torch.optim.SGD}, ""),
        ({"warmup_steps": 1000, "max_steps": 100}, {}, "never reached"),
        ({"max_steps": 100}, {"schedule": 1}, "0 for 99 of about 100 planned steps, from step 2 on"),
        ({"max_steps": 100}, {"schedule": 100}, ""),
        ({"max_steps": 100, "optim": "adafactor", "learning_rate": 1e-6}, {"adapted": True}, ""),
        ({"learning_rate": 0.0}, {}, "0 in all of about"),
        ({"learning_rate": 0.0}, {"adapted": True}, "0 in all of about"),
        ({}, {"rows": 1}, "1 row"),
    ],
)
def test_what_is_planned_is_suspected_by_the_arguments_alone(config, options, words, tmp_path):
    """With the figure that it hangs on; a small model may have any rate, and what is usual is no suspicion."""
    given = {"rows": options.get("rows", 64)}
    if options.get("adapted"):
        given["model"] = small.lora(small.qwen2())
    if options.get("large"):
        sizes = {"hidden_size": 896, "num_hidden_layers": 24, "intermediate_size": 4864, "vocab_size": 151936}
        given["loaded"] = types.SimpleNamespace(text_config=None, _name_or_path="x", **sizes)
    if "own" in options:
        given["keywords"] = {"optimizer_cls_and_kwargs": (options["own"], {"lr": 1e-3})}
    if "schedule" in options:
        given["keywords"] = {"optimizers": scheduled(options["schedule"])}
    before = given.get("keywords", {}).get("optimizers")
    answers = list(plan.judge_plan(planned(tmp_path, config=config, **given)))
    assert [answer.verdict for answer in answers] == [Verdict.SUSPECTED] * bool(words)
    assert not words or (words in answers[0].evidence and answers[0].why and answers[0].repair)
    assert before is None or before[1].last_epoch == 0  # the script's own schedule is where it was


GRADIENTS = [  # options of the loss, and whether completions with advantages below and above 0 give a gradient
    ({}, (True, True), False),
    ({"epsilon": 0.0}, (True, True), False),  # each completion is trained on once, where nothing is clipped
    ({"epsilon": 0.0, "num_iterations": 2}, (True, True), True),
    ({"epsilon": 3e-4, "num_iterations": 2}, (True, True), False),
    ({"epsilon": 0.2, "epsilon_high": 0.1}, (True, True), False),
    ({"epsilon": -0.1}, (True, False), True),
    ({"epsilon": 0.2, "epsilon_high": -0.1}, (True, False), True),
    ({"epsilon": -0.1, "epsilon_high": 0.2}, (False, True), True),
    ({"delta": 0.0}, (True, False), True),
    ({"delta": 1.5}, (True, True), False),
    ({"loss_type": "cispo", "epsilon_high": 0.0}, (False, False), True),
    ({"loss_type": "cispo", "epsilon_high": 5.0}, (True, True), False),
    ({"loss_type": "sapo", "epsilon": 0.0, "num_iterations": 2}, (True, True), False),
    ({"beta": -0.04}, (True, True), True),
    ({"num_train_epochs": 0}, (True, True), True),
    ({"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 1.0}, (), True),
    ({"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 64}, (), False),
    ({"num_train_epochs": 0, "max_steps": 5}, (True, True), False),
]


@pytest.mark.skipif(Version(trl.__version__) < Version("1.16"), reason="releases before have not all of these options")
@pytest.mark.parametrize(("options", "gradients", "told"), GRADIENTS, ids=lambda value: str(value))
def test_options_of_the_loss_that_leave_no_gradient_are_suspected(options, gradients, told, tmp_path):
    """As trl's own loss of one token says, whose probability is that at which it was drawn."""
    answers = list(plan.judge_plan(planned(tmp_path, config=options)))
    assert [answer.failure for answer in answers] == ["arguments"] * told
    assert all(answer.verdict is Verdict.SUSPECTED and answer.repair for answer in answers)
    args = trl.GRPOConfig(output_dir=str(tmp_path), report_to=[], use_cpu=True, bf16=False, **options)
    for advantage, wanted in zip((-1.0, 1.0), gradients):
        scores = torch.zeros(1, 1, requires_grad=True)
        _loss_of(args, scores, advantage).backward()
        assert bool(scores.grad.abs().sum()) is wanted


def _loss_of(args, scores, advantage):
    """Return the loss of one completion of one token by trl's own method."""
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    state = types.SimpleNamespace(global_step=0)
    trainer = types.SimpleNamespace(
        args=args, beta=0.0, epsilon_low=args.epsilon, epsilon_high=high, loss_type=args.loss_type, state=state,
        top_entropy_quantile=1.0, use_vllm=False, importance_sampling_level="token", off_policy_mask_threshold=None,
        model=types.SimpleNamespace(training=True), current_gradient_accumulation_steps=1, use_liger_kernel=False,
        _metrics={"train": collections.defaultdict(list)}, aux_loss_enabled=False, router_aux_loss_coef=0.0,
        accelerator=accelerate.Accelerator(cpu=True), _entropy_bonus_enabled=False,
        _get_per_token_logps_and_entropies=lambda *_, **__: (scores, torch.zeros(1, 1), None),
    )  # fmt: skip
    one = torch.ones(1, 1, dtype=torch.long)
    inputs = {"prompt_ids": one, "prompt_mask": one, "completion_ids": one, "completion_mask": one}
    inputs |= {"advantages": torch.tensor([advantage]), "num_items_in_batch": torch.tensor(1)}
    inputs |= {"old_per_token_logps": torch.zeros(1, 1)}
    return trl.GRPOTrainer._compute_loss(trainer, None, inputs)


@pytest.mark.parametrize(
    ("generations", "rewards", "noted"),
    [
        (2, [[0.0], [1.0]], True),
        (2, [[0.0], [0.5], [1.0]], False),
        (8, [[0.0], [1.0]], False),
        (2, [["raises"]], False),
    ],
)
def test_two_completions_and_a_reward_of_two_values(generations, rewards, noted, tmp_path):
    """Half of all groups at best give a gradient; where a model is nearly always right, or wrong, one in five."""
    given = planned(tmp_path, config={"num_generations": generations, "per_device_train_batch_size": 8})
    given.trainer.reward_weights = None
    given.rewards = RewardTable(["right"], [Line("right", "alone", "1", row) for row in rewards])
    assert not list(plan.judge_groups(given))  # nobody is accused: a run with two completions can be meant
    assert len(given.notes) == noted
    assert all("82% of the groups where 10%" in note and "50% of" in note for note in given.notes)


def test_a_dataset_without_a_length_needs_steps(tmp_path):
    """The cut run has steps of its own, and hid that transformers refuses it."""
    for steps, count in ((-1, 1), (7, 0)):
        given = planned(tmp_path, config={"max_steps": steps})
        given.dataset = given.dataset.to_iterable_dataset()
        found = [answer for answer in plan.judge_plan(given) if answer.failure == "given"]
        assert len(found) == count and all(answer.ends and answer.tried for answer in found)


@pytest.mark.skipif(Version(trl.__version__) < Version("0.15"), reason="this release syncs no reference")
def test_options_that_nothing_reads_are_noted(tmp_path):
    config = {"ref_model_sync_steps": 9, "max_steps": 5, "num_train_epochs": 7}
    given = planned(tmp_path, config=config)
    list(plan.judge_plan(given))
    (note,) = given.notes
    assert "ref_model_sync_steps (sync_ref_model is False)" in note and "num_train_epochs (max_steps is 5)" in note
    given = planned(tmp_path, config={"ref_model_sync_steps": 9, "sync_ref_model": True})
    list(plan.judge_plan(given))
    assert not given.notes


def average(start, model, decay):
    with torch.no_grad():
        for before, weight in zip(start, model.parameters()):
            weight.copy_(decay * before + (1 - decay) * weight)


def scaled(model, scale):
    for module in small.lora(model).modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scaling = dict.fromkeys(module.scaling, scale)
    return model


STEPS = {  # what a script does, what is told, and the model, the optimizer, and what is done before and after a step
    "as usual": ("", {}),
    "a rate that a callback sets to 0": ("rate", {"rate": 0.0}),
    "a rate of 0 at first alone": ("", {"rate": 0.0, "once": True}),
    "restored": ("callback:weights", {"decay": 1.0}),
    "an average that follows slowly": ("callback:weights", {"decay": 0.999}),
    "an average that follows": ("", {"decay": 0.5}),
    "a reference that takes each step": ("F19:follows", {"follows": True}),
    "SGD at a rate of AdamW's": ("rate", {"optimizer": torch.optim.SGD, "lr": 1e-6}),
    "SGD": ("", {"optimizer": torch.optim.SGD, "lr": 1e-1}),
    "an adapter that is multiplied by 0": ("F23", {"adapt": lambda model: scaled(model, 0.0)}),
    "an epsilon above the gradients": ("rate", {"optimizer": functools.partial(torch.optim.AdamW, eps=10.0)}),
    "biases alone": ("F23", {"held": lambda model: [p for p in model.parameters() if p.ndim < 2]}),
    "some matrices": ("", {"held": lambda model: list(model.model.layers[0].parameters())}),
    "an adapter": ("", {"adapt": lambda model: scaled(model, 2.0)}),
}


@pytest.mark.parametrize("name", STEPS)
def test_steps_that_do_not_move_the_weights_are_told(name, tmp_path):
    """Nothing was said: the tensors were in the optimizer, and had gradients."""
    told, how = STEPS[name]
    model = how.get("adapt", lambda model: model)(small.qwen2())
    judged = planned(tmp_path, model=model, config={"max_steps": 100})
    optimizer = how.get("optimizer", torch.optim.AdamW)(
        how.get("held", lambda model: model.parameters())(model), lr=how.get("lr", 1e-3)
    )
    judged.trainer.optimizer, judged.trainer.add_callback = optimizer, lambda callback: None
    judged.trainer.remove_callback, judged.finished = lambda callback: None, True
    judge, ids = OptimizerJudge(judged), torch.arange(1, 9)[None]
    with judge.listening():
        judge.on_train_begin(None, None, None, optimizer=optimizer)
        start = [weight.detach().clone() for weight in model.parameters()]
        for step in range(3):
            model(input_ids=ids).logits.logsumexp(-1).mean().backward()
            optimizer.param_groups[0]["lr"] = how.get("rate", 1) * how.get("lr", 1e-3)
            if how.get("once") and step:
                optimizer.param_groups[0]["lr"] = 1e-3
            optimizer.step()
            average(start, model, how.get("decay", 0.0))
            if how.get("follows"):
                judged.trainer.ref_model = deepcopy(model)
    assert [answer.key for answer in judge.answers() if answer.accuses] == [told] * bool(told)


HEIGHTS = {  # a rate, whether the model was cut, what is told (the key, and its figures), and what else is done
    "2e-2": (2e-2, False, ("rate:high", 1), {}),
    "2e-2 of a model that was cut": (2e-2, True, ("rate:high", 0), {}),
    "2e-2 behind a long warm-up": (2e-2, False, ("rate:high", 0), {"cut": 1e-4}),
    "3e-3": (3e-3, False, (), {}),
    "5e-3 of a model that was cut": (5e-3, True, (), {}),
    "SGD": (2e-2, True, (), {"optimizer": torch.optim.SGD}),
    "an adapter": (2e-2, False, (), {"adapt": small.lora}),
    "an adapter on a model that was cut": (2e-2, True, (), {"adapt": small.lora}),
    "some matrices": (2e-2, True, (), {"adapt": lambda model: frozen(model)}),
}


def frozen(model):
    for name, weight in model.named_parameters():
        weight.requires_grad = name.startswith("model.layers.0")
    return model


@pytest.mark.parametrize("name", HEIGHTS)
def test_a_rate_at_which_one_step_makes_another_policy(name, model, tmp_path):
    """A tool had left out the rate that it was given: its default was 2e-2, and nothing was said."""
    rate, cut, told, how = HEIGHTS[name]
    model = how.get("adapt", lambda model: model)(model)
    judged = planned(tmp_path, model=model, config={"max_steps": 100, "learning_rate": rate}, small=cut)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = how.get("optimizer", torch.optim.AdamW)(trained, lr=how.get("cut", rate))
    judged.trainer.optimizer, judged.trainer.add_callback = optimizer, lambda callback: None
    judged.trainer.remove_callback, judged.finished = lambda callback: None, True
    judge, ids = OptimizerJudge(judged), torch.arange(1, 9)[None]
    with judge.listening():
        judge.on_train_begin(None, None, None, optimizer=optimizer)
        for _ in range(3):
            model(input_ids=ids, labels=ids).loss.neg().backward()
            optimizer.step()
            optimizer.zero_grad()
    answers = [answer for answer in judge.answers() if answer.accuses]
    assert [(answer.key, len(answer.figures)) for answer in answers] == [told] * bool(told)


class Undecorated(trl.GRPOConfig):
    beta: float = 0.3


@dataclasses.dataclass
class WithoutType(trl.GRPOConfig):
    beta = 0.3


@dataclasses.dataclass
class Decorated(trl.GRPOConfig):
    beta: float = 0.3


@pytest.mark.parametrize(
    ("kind", "given", "told"),
    [
        (Undecorated, {}, True), (WithoutType, {}, True), (Decorated, {}, False), (Undecorated, {"beta": 0.1}, False),
        (trl.GRPOConfig, {}, False),
    ],
)  # fmt: skip
def test_a_value_in_a_class_body_that_is_no_default(kind, given, told, tmp_path):
    """The run had trl's own beta, and nothing said so."""
    args = kind(output_dir=str(tmp_path), report_to=[], use_cpu=True, bf16=False, **given)
    assert (args.beta == 0.3) is (kind is Decorated)
    judged = Training(types.SimpleNamespace(args=args), args.to_dict())
    assert [answer.part for answer in plan._not_in_force(judged)] == ["beta"] * told


@pytest.mark.parametrize("called", [lambda f: f(["a", "b"], ["c", "d"]), lambda f: f(prompts=["a"], completions=["b"])])
def test_a_trainer_may_call_its_reward_functions_in_its_own_way(called):
    """By position, as trainers do that are none of trl's: the cut training ended in an error of preflight's own."""

    def by_name(prompts, completions):
        return [0.0] * len(completions)

    given = Training(types.SimpleNamespace(reward_funcs=[by_name], num_generations=2), {})
    with rewards.differing_rewards(given):
        paid = called(given.trainer.reward_funcs[0])
    assert len(paid) in (1, 2) and given.called == {0} and set(given.reward_inputs) == {"prompts", "completions"}


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


def right_sums(completions, prompts, **_):
    return [float(completion.strip() == str(eval(prompt[:-1]))) for completion, prompt in zip(completions, prompts)]


def none_is_right(completions, **_):
    return [0.0] * len(completions)


def in_tags(completions, answer, **_):
    return [float(f"<answer>{right}</answer>" in text) for text, right in zip(completions, answer)]


@pytest.mark.parametrize(
    ("reward", "answers", "suspected"),
    [(in_tags, "right", True), (right_sums, "right", False), (in_tags, "others", False)],
)
def test_a_small_model_that_answers_in_another_form_than_is_paid(reward, answers, suspected, trained):
    """It is asked with its own weights; where it knows no answer, a form that it never writes says nothing."""
    model, tokenizer = trained
    prompts, right = ["3+4=", "5+6=", "8+9=", "12+7="], ["7", "11", "17", "19"]
    rows = {"prompt": prompts, "answer": right if answers == "right" else ["x", "y", "z", "u"]}
    trainer = types.SimpleNamespace(
        chat_template_kwargs={}, chat_template=None, reward_funcs=[reward], model=model, processing_class=tokenizer,
        reward_weights=None, args=types.SimpleNamespace(remove_unused_columns=False),
    )  # fmt: skip
    given = Training(
        trainer=trainer, arguments={"max_completion_length": 8}, dataset=datasets.Dataset.from_dict(rows), small=False
    )
    torch.manual_seed(0)
    told = [answer for answer in judge_first_rewards(given) if answer.accuses]
    assert [answer.key for answer in told] == ["F10:form"] * suspected


@pytest.mark.parametrize(
    ("reward", "real", "kind"),
    [
        (right_sums, True, Verdict.HELD),
        (none_is_right, True, Verdict.SUSPECTED),
        (right_sums, False, Verdict.NOT_CHECKED),
    ],
)
def test_the_untrained_model_is_looked_at_with_its_rewards(reward, real, kind, trained):
    """Whether answers belong to prompts no cut run can know; the real model's first completions tell."""
    model, tokenizer = trained
    rows = datasets.Dataset.from_dict({"prompt": ["3+4=", "5+6=", "8+9=", "12+7="]})
    attributes = {"reward_funcs": [reward], "model": model, "processing_class": tokenizer, "chat_template": None}
    trainer = types.SimpleNamespace(chat_template_kwargs={}, **attributes)
    given = Training(trainer=trainer, arguments={"max_completion_length": 8}, dataset=rows, real=real)
    torch.manual_seed(0)
    answer = one(judge_first_rewards(given))
    assert answer.verdict is kind and answer.failure == "first rewards"
    assert "--real-model" in answer.why if kind is Verdict.NOT_CHECKED else "16 completions" in answer.evidence
