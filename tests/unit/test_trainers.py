"""The same small training run in every release: the same work, the same seed, the same reward, and it learns."""

import gc
import os
import tempfile
import types

import pytest
import torch
import trl
from small import lora_config

from failurelab_course.experiments import models, trainers


def trained(**options):
    trainer = trainers.grpo(*models.load(), **({"steps": 3} | options))
    trainer.train()
    return trainer


def test_a_step_does_the_same_work_in_every_release():
    """16 prompts and 8 completions of each, whatever a batch counts; one generation for each optimizer step."""
    seen = []

    def reward(prompts, completions, answer, **_):
        seen.append((len(completions), len(set(prompts)), max(map(len, completions))))
        return [0.0, 1.0] * (len(completions) // 2)

    trainer = trained(reward=reward, steps=2)
    assert trainer.state.global_step == 2
    assert [each[:2] for each in seen] == [(128, 16)] * 2 and max(each[2] for each in seen) <= 4
    seen.clear()
    trained(reward=reward, prompts_per_step=2, num_generations=4, steps=2)
    assert [each[:2] for each in seen] == [(8, 2)] * 2


def test_the_first_completions_are_the_same_in_every_era(capfd):
    """Same weights, prompts and random numbers: the first step's reward, stored once, comes again everywhere.

    Neither a line a step nor a summary is printed: a notebook's stored output must not hold timings.
    """
    assert trainers.rewards(trained(steps=1)) == pytest.approx([0.43], abs=0.02)
    assert capfd.readouterr().out == ""


def test_the_same_seed_gives_the_same_run():
    def run(seed, drawn):
        torch.manual_seed(drawn)
        trainer = trainers.grpo(*models.load(), steps=2, seed=seed, peft_config=lora_config(r=4))
        torch.rand(drawn)
        trainer.train()
        learned = [each.detach().clone() for each in trainer.model.parameters() if each.requires_grad]
        return trainers.rewards(trainer), float(sum(each.abs().sum() for each in learned))

    first = run(0, drawn=1)
    assert run(0, drawn=2) == first and len(first[0]) == 2
    assert run(1, drawn=1)[0] != first[0]


def test_every_option_is_what_it_says(monkeypatch):
    """Of the options that differ between releases, none that this one knows is left to its default.

    From trl 0.22 a plain GRPOConfig asks for bf16, and transformers 4 keeps that in the environment: it does not stay.
    """
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    trainer = trainers.grpo(*models.load(), steps=1, beta=0.04)
    assert (trainer.args.beta, trainer.args.learning_rate, trainer.args.temperature) == (0.04, 4e-4, 1.0)
    for key, value in trainers.IMPLIED.items():
        found = getattr(trainer.args, key, value)
        assert found == value or (key, found) == ("scale_rewards", "group"), key
    assert not trainer.args.bf16 and not trainer.model.is_gradient_checkpointing
    assert trainer.args.gradient_accumulation_steps == 1 and trainer.accelerator.mixed_precision == "no"
    assert os.environ.get("ACCELERATE_MIXED_PRECISION", "no") == "no"


def test_an_option_unknown_to_the_release_is_an_error(monkeypatch):
    """It would do nothing, silently; the error names option, release and era. What it does anyway may be said."""
    monkeypatch.setenv("FAILURELAB_ERA", "some-era")
    with pytest.raises(trainers.OptionError, match=r"GRPOConfig of trl \S+ \(era some-era\) has no option 'nonsense'"):
        trainers.grpo(*models.load(), steps=1, nonsense=1)
    known = {each for each in dir(trl.GRPOConfig) if not each.startswith("_")}
    for key in sorted(set(trainers.IMPLIED) - known):
        trainers.grpo(*models.load(), steps=1, **{key: trainers.IMPLIED[key]})
        with pytest.raises(trainers.OptionError, match=key):
            trainers.grpo(*models.load(), steps=1, **{key: "another"})


def test_nothing_is_left_on_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    trainer = trained(steps=1, prompts_per_step=2, num_generations=2)
    folder = trainer.args.output_dir
    assert os.path.dirname(folder) == str(tmp_path) and os.path.isdir(folder)
    del trainer
    gc.collect()
    assert not os.path.exists(folder)
    with pytest.raises(trainers.OptionError):
        trainers.grpo(*models.load(), steps=1, nonsense=1)
    assert not [each for each in tmp_path.iterdir() if each.name.startswith("failurelab-")]
    named = tmp_path / "named"
    trainers.grpo(*models.load(), steps=1, output_dir=str(named))
    gc.collect()
    assert named.is_dir()


def test_rewards_and_curve_read_the_log():
    """Rows without a reward, such as the summary at the end, do not count; a last incomplete window does."""
    history = [{"step": step, "reward": step / 10} for step in range(1, 6)] + [{"step": 5, "train_runtime": 1.0}]
    trainer = types.SimpleNamespace(state=types.SimpleNamespace(log_history=history))
    assert trainers.rewards(trainer) == [0.1, 0.2, 0.3, 0.4, 0.5]
    steps, means = trainers.curve(trainer, window=2)
    assert steps == [2, 4, 5] and means == pytest.approx([0.15, 0.35, 0.5])
