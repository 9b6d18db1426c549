"""Two engines, two policies: the gap for each token, trl's importance weights, and the guard that names the cause."""

import importlib.metadata
import inspect
import itertools
import logging
import math
import os
import types

import pytest
import torch
from engine import Engine
from packaging.version import Version
from small import lora_config, said
from steps import online_dpo

from failurelab import guards, mismatch
from failurelab_course.experiments import models, trainers, vllm_stand_in

TRL = Version(importlib.metadata.version("trl"))
own_engine = pytest.mark.skipif(Version("1.16") > TRL, reason="no weights as of today, or no rollout_func")


def batch(rows=5, tokens=7, seed=0):
    """Log-probabilities of a policy and of an engine that differs, and a mask with an end in each row."""
    draw = torch.Generator().manual_seed(seed)
    policy = -torch.rand(rows, tokens, generator=draw)
    engine = policy + torch.randn(rows, tokens, generator=draw)
    lengths = torch.randint(1, tokens + 1, (rows, 1), generator=draw)
    return policy, engine, (torch.arange(tokens) < lengths).long()


def of_trl(policy, engine, mask, **options):
    """Run trl's own lines on these log-probabilities: those between two comments of its method, and nothing else.

    They stand under `if self.use_vllm`, in the middle of a method of 500 lines that generates; so they are cut out.
    """
    from trl import GRPOTrainer

    lines = inspect.getsource(GRPOTrainer._generate_and_score_completions).splitlines()
    first = next(n for n, line in enumerate(lines) if "Compute the importance sampling ratio when using vLLM" in line)
    last = next(
        n for n, line in enumerate(lines) if "Compute the per-token log probabilities for the reference" in line
    )
    assert lines[first + 1].strip() == "if self.use_vllm and self.vllm_importance_sampling_correction:"
    source = inspect.cleandoc("\n" + "\n".join(lines[first:last]))
    self = types.SimpleNamespace(
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        **{f"vllm_importance_sampling_{name}": value for name, value in options.items()},
    )
    names = {"self": self, "torch": torch, "math": math, "completion_mask": mask, "tool_mask": None}
    exec(source, names | {"old_per_token_logps": policy, "sampling_per_token_logps": engine}, scope := {})
    return scope["vllm_importance_sampling_ratio"]


@own_engine
def test_the_weights_are_those_of_trl():
    """The formula is trl's own, for every mode; a NaN of the engine counts as agreement there. So are the defaults."""
    from trl import GRPOConfig

    policy, engine, mask = batch()
    engine[1, 0] = math.nan
    for mode, (cap, floor) in itertools.product(mismatch.MODES, [(3.0, None), (1.5, 0.5), (None, 0.7)]):
        ours = mismatch.importance_weights(policy, engine, mask, mode, cap, floor)
        theirs = of_trl(policy, engine, mask, mode=mode, clip_max=cap, clip_min=floor)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    given = inspect.signature(mismatch.importance_weights).parameters
    for ours, theirs in {"mode": "mode", "cap": "clip_max", "floor": "clip_min"}.items():
        field = GRPOConfig.__dataclass_fields__[f"vllm_importance_sampling_{theirs}"]
        assert given[ours].default == field.default


def test_the_effective_sample_size_is_the_share_that_the_weights_leave():
    assert mismatch.effective_sample_size(torch.ones(8)) == 1.0
    assert mismatch.effective_sample_size(torch.tensor([1.0, 0, 0, 0])) == 0.25
    assert mismatch.effective_sample_size(torch.zeros(4)) == mismatch.effective_sample_size(torch.ones(0)) == 0.0
    assert mismatch.effective_sample_size(torch.tensor([1e30, 1e30, 0, 0])) == 0.5  # their squares are no floats


def test_a_gap_counts_only_the_tokens_of_the_mask():
    policy, engine, mask = batch()
    engine = torch.where(mask.bool(), engine, 1e6)
    gap = mismatch.compare(policy, engine, mask)
    difference = (policy - engine)[mask.bool()]
    assert gap.largest == pytest.approx(float(difference.abs().max()))
    assert gap.mean == pytest.approx(float(difference.abs().mean()))
    same = mismatch.compare(policy, policy, mask)
    assert (same.mean, same.masked, same.effective) == (0.0, 0.0, 1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda policy, engine, mask: (policy, None, mask), "gives no log-probabilities"),
        (lambda policy, engine, mask: (policy, engine[:, 1:], mask), r"the engine's \(5, 6\)"),
        (lambda policy, engine, mask: (policy, engine / 0, mask), "are no finite numbers"),
        (lambda policy, engine, mask: (policy, engine, mask * 0), "no token of the batch counts"),
    ],
)
def test_an_answer_that_cannot_be_compared_is_one_line(change, message):
    with pytest.raises(mismatch.EngineAnswerError, match=message) as error:
        mismatch.compare(*change(*batch()))
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="'mean' is none of: sequence_mask"):
        mismatch.importance_weights(*batch(), mode="mean")


def gradient_of(temperature=1.0, entropy=0.0, kl=0.0, pairs=False, dtype=torch.float32, spread=4.0, seed=0):
    """Return logits and their gradient under a loss: policy gradient or pairs, with other terms beside."""
    draw = torch.Generator().manual_seed(seed)
    logits = (spread * torch.randn(4, 12, 40, generator=draw)).to(dtype).requires_grad_()
    logps = (logits.float() / temperature).log_softmax(-1)
    ids = torch.multinomial(logps.detach().exp().flatten(0, 1), 1, generator=draw).view(4, 12, 1)
    scores = logps.gather(-1, ids)[..., 0]
    if pairs:
        loss = -torch.nn.functional.logsigmoid(0.1 * (scores[:2] - scores[2:]).sum(-1)).mean()
    else:
        loss = -(scores * torch.randn(4, 1, generator=draw)).mean()
    away = 0.5 * torch.rand(scores.shape, generator=draw) + scores.detach() - scores
    loss = loss + kl * (away.exp() - away - 1).mean() + entropy * (logps.exp() * logps).sum(-1).mean()
    loss.backward()
    return logits, logits.grad


@pytest.mark.parametrize("temperature", [0.6, 1.4])
@pytest.mark.parametrize("more", [{"kl": 0.1}, {"pairs": True}, {"dtype": torch.bfloat16}, {"spread": 0.1}], ids=str)
def test_the_temperature_of_the_scores_is_in_the_gradient(temperature, more):
    logits, gradient = gradient_of(temperature, **more)
    read = mismatch.scoring_temperature(logits, gradient)
    assert read == pytest.approx(temperature, rel=5e-3 if "dtype" in more else 1e-3)
    assert mismatch.scoring_temperature(logits, torch.zeros_like(gradient)) is None
    # A model of bfloat16 before any training: logits are all alike, and rounding decides the slope.
    assert mismatch.scoring_temperature(*gradient_of(temperature, dtype=torch.bfloat16, spread=1e-3)) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("entropy", [0.2, 0.05, 0.005])
def test_a_gradient_that_is_not_of_scores_alone_says_nothing_of_a_temperature(entropy, dtype):
    """An entropy bonus bends the line: 0.95 or 1.12 was read where tokens were scored at 1, and called F15."""
    for seed in range(5):
        read = mismatch.scoring_temperature(*gradient_of(0.9, entropy, dtype=dtype, seed=seed))
        assert read is None or read == pytest.approx(0.9, rel=0.02)
    assert entropy != 0.05 or read is None


def run(steps=4, rate=2e-3, peft_config=None, guard=None, **wrong):
    model, tokenizer = models.load("tiny")
    engine = Engine(model, tokenizer, **wrong)
    rows = models.rows().select(range(150, 214))
    options = {"peft_config": peft_config} if peft_config else {}
    trainer = trainers.grpo(
        model, tokenizer, steps=steps, prompts_per_step=8, num_generations=4, rows=rows, learning_rate=rate, **options
    )
    trainer.rollout_func = engine
    watch = guards.EngineMismatchGuard(trainer, **guard or {})
    trainer.add_callback(watch)
    with said() as messages:
        trainer.train()
    assert trainer.rollout_func is engine and "_generate_and_score_completions" not in vars(trainer)
    return watch, messages


@own_engine
@pytest.mark.parametrize(
    ("wrong", "cause"),
    [
        ({}, ""),
        ({"dtype": torch.bfloat16}, ""),  # short completions: rounding is no matter yet
        ({"stale": True}, "stale"),
        ({"temperature": 0.6}, "temperature"),
        ({"shift": 1}, "tokens"),
    ],
    ids=["healthy", "bfloat16", "never synced", "temperature", "shifted"],
)
def test_the_guard_names_the_cause(wrong, cause, caplog):
    with caplog.at_level(logging.INFO, logger="failurelab.guards"):
        watch, messages = run(**wrong)
    assert watch.report.looks_like == cause and len(messages) == bool(cause)
    if cause:
        assert guards.mismatch.NEXT[cause] in messages[0]
        assert watch.report.undone[cause] < watch.report.gaps[-1][1].mean / 3
    else:
        assert "compared 4 batches" in caplog.text


@own_engine
@pytest.mark.parametrize(("stale", "told"), [(True, True), (False, False)])
def test_an_adapter_moves_the_policy_too_slowly_for_the_bound(stale, told):
    """Below the bound the growth of the gap tells, for weights of before training take it away."""
    watch, messages = run(steps=8, rate=6e-4, peft_config=lora_config(), stale=stale)
    assert watch.report.gaps[-1][1].mean < mismatch.LARGEST_MEAN
    assert watch.report.looks_like == ("stale" if told else "")
    assert len(messages) == told and all("adapters merged" in message for message in messages)


@own_engine
def test_it_stops_before_anything_is_trained_and_says_what_it_cannot_compare():
    with pytest.raises(guards.GuardTripped, match="It looks like temperature") as stopped:
        run(temperature=0.5, guard={"action": "stop"})
    assert stopped.value.report.gaps[0][0] == 0
    watch, messages = run(steps=2, silent=True)
    assert len(messages) == 1 and "could not check: the engine gives no log-probabilities" in messages[0]
    assert watch.report.looks_like == "" and not watch.report.gaps


def test_scores_at_another_temperature_than_the_tokens(tmp_path):
    """Releases 0.14 and 0.15 draw at 0.9 and score at 1. Today's never shows its logits, and has no such fault."""
    affected = Version("0.16") > TRL
    model, tokenizer = models.load("tiny")
    trainer = trainers.grpo(model, tokenizer, steps=1, prompts_per_step=8, temperature=0.7, output_dir=str(tmp_path))
    guard = guards.EngineMismatchGuard(trainer)
    trainer.add_callback(guard)
    with said() as messages:
        trainer.train()
    assert guard.report.looks_like == ("temperature" if affected else "")
    assert len(messages) == affected and all("drawn at temperature 0.7 and scored at 1.00" in each for each in messages)


class Scoring(torch.nn.Module):
    """Gives logits, as a model does; the rest of a trainer beside."""

    def __init__(self, args):
        super().__init__()
        torch.manual_seed(0)
        self.logits, self.args, self.model = torch.nn.Parameter(4 * torch.randn(4, 6, 40)), args, self

    def forward(self, fused=False):
        if fused:
            return types.SimpleNamespace(log_probs=(self.logits / 0.7).log_softmax(-1)[..., 3], logits=None)
        return types.SimpleNamespace(logits=self.logits * 1)


@pytest.mark.parametrize(
    ("temperature", "entropy", "loss_type", "kinds"),
    [
        (0.9, 0.0, "dapo", ["found"]),
        (1.0, 0.05, "dapo", []),
        (0.9, 0.05, "dapo", ["not checked"]),
        (0.9, 0.0, "sigmoid", []),  # Online DPO
    ],
)
def test_scores_at_temperature_1_are_told_where_they_are_wrong(temperature, entropy, loss_type, kinds):
    """Online DPO scores at 1 by its definition; under an entropy bonus the temperature cannot be read."""
    args, notices = types.SimpleNamespace(temperature=temperature, loss_type=loss_type), []
    trainer = Scoring(args)
    guard = guards.EngineMismatchGuard(trainer, notices.append)
    guard.on_train_begin(args, None, None, model=trainer)
    for _ in range(3):
        logps = trainer().logits.log_softmax(-1)
        loss = -(logps[..., 3] * torch.tensor([[1.0], [-2.0], [0.5], [1.0]])).mean()
        (loss + entropy * (logps.exp() * logps).sum(-1).mean()).backward()
        guard.on_pre_optimizer_step(args, None, None)
    guard.on_train_end(args, None, None)
    assert [notice.kind for notice in notices] == kinds
    assert all(notice.failures == ("F15",) for notice in notices if notice.kind == "found")


@pytest.mark.parametrize("first", [True, False])
def test_logits_of_another_pass_are_not_those_of_the_scores(first):
    """A loss on examples beside GRPO's, whose own scores come from a head without logits (trl 1.15 and later)."""
    args, notices = types.SimpleNamespace(temperature=0.7, loss_type="dapo"), []
    trainer = Scoring(args)
    guard = guards.EngineMismatchGuard(trainer, notices.append)
    guard.on_train_begin(args, None, None, model=trainer)
    for fused in (first, not first):
        output = trainer(fused)
        scores = output.log_probs if fused else output.logits.log_softmax(-1)[..., 3]
        (-scores.mean()).backward()
    guard.on_pre_optimizer_step(args, None, None)
    guard.on_train_end(args, None, None)
    assert notices == []


def test_online_dpo_is_not_accused(tmp_path):
    """It draws at 0.9 and scores at 1, in each release."""
    trainer = online_dpo(*models.load("tiny"), tmp_path, max_steps=2, temperature=0.7)
    trainer.add_callback(guard := guards.EngineMismatchGuard(trainer, "stop"))
    trainer.train()
    assert trainer.state.global_step == 2 and guard.report.looks_like == ""


def log(*gaps):
    """A log as trl writes it: the figure is in some rows, beside others."""
    return [{"step": step, "reward": 0.1, mismatch.LOGGED: gap} for step, gap in enumerate(gaps, 1)] + [{"step": 99}]


# TRL #5312, by its own figures: 0.017 nats after ten steps where the weights are sent, 0.81 where they are not
@pytest.mark.parametrize(
    ("rows", "cause"),
    [
        (log(*[0.012, 0.015, 0.011, 0.018, 0.017] * 2), ""),
        (log(0.012, 0.05, 0.1, 0.2, 0.35, 0.5, 0.6, 0.7, 0.77, 0.81), "stale"),
        (log(0.012, 0.81), "stale"),
        (log(0.4, 0.41, 0.39, 0.4), "unknown"),  # from the start: another temperature, other tokens
        (log(float("nan"), 0.01), ""),
    ],
    ids=["sent", "never sent", "two rows", "from the start", "nan"],
)
def test_what_a_log_says(rows, cause):
    assert mismatch.read_log(rows).looks_like == cause
    assert mismatch.read_log([{"step": 1, "reward": 0.4}]) is None  # the figure is not in it


@pytest.mark.parametrize(("rows", "told"), [(log(0.01, 0.2, 0.8), True), (log(0.01, 0.02, 0.02), False)])
def test_the_guard_reads_the_log_where_it_cannot_score(rows, told):
    """Under ZeRO-3 no policy can be scored beside the trainer; the log is all there is, and it is told once."""
    args = types.SimpleNamespace(use_vllm=True, temperature=1.0)
    model = torch.nn.Linear(1, 1)
    model.weight.ds_id = 0
    trainer = torch.nn.Module()  # a weak reference to it is kept
    trainer.args, trainer.model = args, model
    guard = guards.EngineMismatchGuard(trainer)
    with said() as messages:
        guard.on_train_begin(args, None, None, model=model)
        for end in range(1, len(rows) + 1):
            guard.on_log(args, types.SimpleNamespace(log_history=rows[:end]), None)
        guard.on_train_end(args, None, None)
    assert len(messages) == told
    if told:
        assert "It looks like stale" in messages[0] and guards.mismatch.NEXT["stale"] in messages[0]
        assert guard.report.looks_like == "stale" and guard.report.logged.last > 0.05


@own_engine
def test_the_stand_in_takes_no_port_that_a_neighbour_may_have(monkeypatch):
    """A port is chosen by trl when it makes the engine, and opened at the next trainer."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    vllm_stand_in.LLM(str(models.path("tiny")))
    assert os.environ["MASTER_PORT"] == "0"


@own_engine
@pytest.mark.parametrize("ignores", [True, False])
def test_the_stand_in_draws_to_the_limit_where_it_is_asked_to(ignores):
    engine = vllm_stand_in.LLM(str(models.path("tiny")))
    asked = vllm_stand_in.SamplingParams(max_tokens=40, ignore_eos=ignores)
    drawn = engine.generate([{"prompt_token_ids": [4, 5]}] * 8, asked)
    assert (min(len(answer.outputs[0].token_ids) for answer in drawn) == 40) is ignores


@own_engine
def test_an_engine_in_eight_bits_rounds_the_weights_that_are_sent_to_it(monkeypatch):
    """Else the next step would be one in 16 bits. Vectors, such as norms', stay as they are."""
    monkeypatch.setattr(vllm_stand_in.LLM, "eight_bits", True)
    engine = vllm_stand_in.LLM(str(models.path("tiny")))
    given = dict(models.load("tiny", dtype=torch.bfloat16)[0].named_parameters())
    engine._send(list(given.items()))
    for name, weight in engine._model.named_parameters():
        whole = len(weight.abs().unique()) > 127  # float8 has no more
        assert torch.equal(weight, given[name]) if weight.dim() == 1 else not whole, name


@own_engine
@pytest.mark.parametrize(("reloads", "held"), [(True, ["trained", "first"]), (False, ["trained", "trained"])])
def test_the_engine_says_whose_weights_it_draws_with(reloads, held, monkeypatch):
    """Step 0 draws with the first weights, which are the trained ones then; a reload brings them back in step 1."""
    monkeypatch.setattr(vllm_stand_in.LLM, "eight_bits", False)
    monkeypatch.setattr(vllm_stand_in.LLM, "reloads", False)
    vllm_stand_in.install(reloads=reloads)
    policy, tokenizer = models.load("tiny")
    trainer = trainers.grpo(
        policy, tokenizer, steps=2, prompts_per_step=2, num_generations=2, learning_rate=1e-3, use_vllm=True,
        vllm_mode="colocate", vllm_enable_sleep_mode=True, max_completion_length=3,
    )  # fmt: skip
    lines = vllm_stand_in.record_calls(trainer)
    trainer.train()
    assert [holds for _, call, holds in lines if call == "generate"] == held
    assert ("reload_weights" in {call for _, call, _ in lines}) is reloads
    assert {holds for _, call, holds in lines if call == "sleep"} == {"lost"}
