"""AsyncGRPOTrainer's step beside the textbook, on a CPU: its engine and its attention kernel are stood in for.

Simulated: the completions are drawn by the policy itself, and the kernel is written in plain torch here.
"""

import queue
import types
from unittest import mock

import datasets
import peft
import pytest
import torch
from steps import SHORT, compare, step_guard, train_with_and_without
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from failurelab_course.experiments import models

PROMPTS = ["3+4=", "12+9=", "7+8=", "15+17="] * 4


def attend(query, key, value, queries, keys, *_, softmax_scale, **__):
    """Return what each segment of queries reads: the last of them all of its keys, (tokens, heads, width)."""
    parts = []
    for start, end, first, last in zip(queries, queries[1:], keys, keys[1:]):
        own = [each.transpose(0, 1)[None] for each in (query[start:end], key[first:last], value[first:last])]
        rows, columns = int(end - start), int(last - first)
        mask = torch.ones(rows, columns, dtype=torch.bool, device=query.device).tril(columns - rows)
        read = torch.nn.functional.scaled_dot_product_attention(
            *own, attn_mask=mask, scale=softmax_scale, enable_gqa=True
        )
        parts.append(read[0].transpose(0, 1))
    return torch.cat(parts)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(packing, "_flash_attn", lambda: types.SimpleNamespace(flash_attn_varlen_func=attend))
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: 1.0)


class Engine:
    """The worker and the transfer of weights: four completions of each prompt, drawn hot, so that lengths differ."""

    def __init__(self):
        self.rollout_buffer, self.metrics_queue = queue.Queue(), queue.Queue()

    def start(self):
        model, tokenizer = self.trainer.accelerator.unwrap_model(self.trainer.model), self.trainer.processing_class
        model.set_attn_implementation("sdpa")
        hot = {"do_sample": True, "temperature": 4.0, "max_new_tokens": 12, "num_return_sequences": 4}
        for number, prompt in enumerate(PROMPTS):
            asked = tokenizer(prompt, return_tensors="pt")
            start = asked["input_ids"].shape[1]
            for place, ids in enumerate(model.generate(**asked, **hot, pad_token_id=tokenizer.pad_token_id)):
                completion = ids[start:].tolist()
                ends = [*completion, tokenizer.eos_token_id].index(tokenizer.eos_token_id) + 1
                ids = ids[: start + ends]
                with torch.no_grad():
                    words = model(ids[None]).logits[0].log_softmax(-1)
                old = torch.zeros(len(ids))
                old[1:] = words[:-1].gather(-1, ids[1:, None])[:, 0]
                mask = (torch.arange(len(ids)) >= start).long()
                worth = (7 * place + number) % 5 - 2.0
                self.rollout_buffer.put(RolloutSample([], [], ids, mask, old, worth, 0, number, {"reward": worth}))
        model.set_attn_implementation(packing.TREE_ATTENTION)

    def check_health(self, stale_after_s):
        raise RuntimeError("more is asked for than was drawn")

    def nothing(self, *_):
        return None

    stop = update_model_version = init_weight_transfer = pause = send_weights = resume = destroy = nothing


def make(folder, kind=AsyncGRPOTrainer, micros=4, **more):
    engine, path = Engine(), str(models.path("tiny"))
    own = {"per_device_train_batch_size": 16 // micros, "gradient_accumulation_steps": micros, "num_generations": 4}
    own |= {"token_budget": 0, "learning_rate": 1e-3, "model_init_kwargs": {"dtype": "float32"}}
    arguments = AsyncGRPOConfig(str(folder), **SHORT | own)
    torch.manual_seed(0)
    engine.trainer = kind(
        model=path, args=arguments, train_dataset=datasets.Dataset.from_dict({"prompt": PROMPTS}),
        reward_funcs=lambda completions, **_: [0.0] * len(completions), rollout_worker=engine, weight_transfer=engine,
        **more,
    )  # fmt: skip
    return engine.trainer


class OfTheStep(AsyncGRPOTrainer):
    """Each micro-batch divided by the tokens of the whole step."""

    def get_batch_samples(self, *args, **options):
        batches, count = super().get_batch_samples(*args, **options)
        total = sum(int((each["token_index"] >= 0).sum()) for each in batches)
        for each in batches:
            each["global_n_tokens"] = torch.full_like(each["global_n_tokens"], total / len(batches))
        return batches, count


def changed(change):
    """Return a trainer whose loss is given other micro-batches."""

    class Changed(OfTheStep):
        def compute_loss(self, model, inputs, *args, **options):
            return super().compute_loss(model, inputs | change(inputs), *args, **options)

    return Changed


CASES = {
    "as trl does it": (AsyncGRPOTrainer, 4, {}, "FOUND", None),  # TRL #7206, #7249
    "one micro-batch": (AsyncGRPOTrainer, 1, {}, "HELD", None),
    "by the step's tokens": (OfTheStep, 4, {}, "HELD", None),
    "an adapter": (OfTheStep, 4, {"peft_config": peft.LoraConfig(r=4, target_modules=["q_proj"])}, "HELD", None),
    "wrong sign": (changed(lambda inputs: {"advantages": -inputs["advantages"]}), 1, {}, "FOUND", "opposite sign"),
    "a place earlier": (changed(lambda inputs: {"position_ids": inputs["position_ids"] // 2}), 1, {}, "FOUND", ...),
}


@pytest.mark.parametrize("case", CASES)
def test_the_step_of_a_queue_is_compared(case, tmp_path):
    kind, micros, more, verdict, named = CASES[case]
    report = compare(make(tmp_path, kind, micros, **more))
    assert report.verdict == verdict and named in (..., report.named), report.reason
    assert any("believed" in line for line in report.not_shown)


@pytest.mark.parametrize(("several", "verdict"), [(False, "HELD"), (True, "NOT CHECKED")])
def test_the_run_is_the_same_and_of_several_processes_nothing_is_said(several, verdict, tmp_path, monkeypatch):
    """Each has its own part of the queue, and the rows of the others would be missing."""
    monkeypatch.setattr("failurelab.textbook.queued.several", lambda: several)
    guard, same = train_with_and_without(lambda _: make(tmp_path, micros=1), None, step_guard())
    assert same and guard.report.verdict == verdict and (guard.report.apart is None) == several


def test_what_the_packing_does_is_not_taken_over(tmp_path):
    """The kernel lets tokens read those of another completion: the rows that the textbook unpacks do not."""
    with mock.patch.object(packing, "_flash_attn") as kernel:
        kernel.return_value.flash_attn_varlen_func = lambda query, key, value, queries, keys, *rest, **options: attend(
            query, key, value, queries, keys.clone().index_fill_(0, torch.tensor([1]), int(keys[2])), **options
        )
        assert compare(make(tmp_path, OfTheStep)).verdict == "FOUND"
