"""The same small training run in any release of TRL, so that two eras differ by their code and not by their defaults.

Between trl 0.14.0 and 1.16.0 the defaults of GRPO changed nearly all: accumulated steps, beta, temperature, the loss,
gradient checkpointing, bf16; and `per_device_train_batch_size` counted prompts in 0.14.0 but counts completions since
0.15.0. One and the same script did eight times the work, or optimised something else. So every option that matters
is spelled out here, in the words of the release at hand.

    trainer = grpo(*models.load(), steps=200)
    trainer.train()
    rewards(trainer)

Upstream: https://github.com/huggingface/trl/pull/2776 (batch size counts completions, 0.15.0).
"""

import dataclasses
import importlib.metadata
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers

from failurelab_course.experiments import models, observe

# Options that a release may not have yet, or no longer, and the value it works by then. To ask for another value where
# the option is unknown is an error; to ask for this one is not.
IMPLIED: dict[str, Any] = {
    "loss_type": "grpo",  # each completion's tokens averaged first, then the completions; no other before 0.16
    "scale_rewards": True,  # advantages divided by the group's standard deviation
    "num_iterations": 1,  # every completion is used for one optimizer step
    "steps_per_generation": 1,
    "epsilon": 0.2,  # clips nothing while num_iterations is 1
    "mask_truncated_completions": False,
    "use_bias_correction_kl": False,
    "importance_sampling_level": "token",
    "top_entropy_quantile": 1.0,
    "top_k": 50,  # transformers' own default for sampling, which 0.14 and 0.15 leave as it is
    "top_p": 1.0,
    "max_prompt_length": None,  # prompts are no longer cut in 1.x
    "disable_dropout": False,
    "gradient_checkpointing_kwargs": None,
}


# What transformers 5.23 calls the options that other releases, and this course, call by the older name.
_RENAMED = {
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
}
_LARGE = 10_000_000  # parameters


class OptionError(ValueError):
    """This release of TRL does not know an option, and would not do what it asks for."""


def grpo(
    model: transformers.PreTrainedModel | str,
    tokenizer: transformers.PreTrainedTokenizerBase,
    *,
    steps: int,
    seed: int = 0,
    peft_config: Any = None,
    prompts_per_step: int = 16,
    num_generations: int = 8,
    learning_rate: float | None = None,
    beta: float = 0.0,
    output_dir: str | None = None,
    callbacks: Sequence[transformers.TrainerCallback] = (),
    rows: Any = None,
    reward: Callable[..., list[float]] | None = None,
    **config: Any,
) -> Any:
    """Return a GRPOTrainer that has not started; per optimizer step it does the same work in every release.

    One step samples `prompts_per_step * num_generations` completions, at temperature 1, and optimises the original
    GRPO loss on all of them at once, at a constant learning rate, in float32, without gradient checkpointing. It trains
    where the model is, prints nothing, saves nothing, and is seeded anew when training begins.

    trl 0.14.0 computes the KL term even for a `beta` of 0. What it logs as `kl` can then reach millions in a run that
    is well: nothing holds the policy near the reference model, and the term has no weight in the loss.

    Args:
        model: the policy, or a folder, which TRL then loads itself; `learning_rate` is to be given then.
        tokenizer: pads on the left.
        steps: optimizer steps.
        seed: of sampling, of the order of prompts, and of an adapter's first weights.
        peft_config: makes TRL wrap the model, such as a `peft.LoraConfig`.
        prompts_per_step: prompts for each optimizer step, on one process.
        num_generations: completions for each prompt.
        learning_rate: constant; by default what `rate` makes of 4e-4 for this model.
        beta: weight of the KL term.
        output_dir: by default a temporary folder, removed with the trainer.
        callbacks: more TrainerCallbacks.
        rows: a dataset with the columns `prompt` and what the reward needs; by default the sums, in the form of
            `models.form_for`.
        reward: the reward function; by default `models.reward`.
        config: further options of GRPOConfig, or others than the above; `gradient_checkpointing` and
            `gradient_checkpointing_kwargs` may be given by these names in every release.

    Raises:
        OptionError: this release does not know an option of `config`, and does not work by that value anyway.
    """
    from trl import GRPOConfig, GRPOTrainer

    batch = prompts_per_step if _counts_prompts(GRPOTrainer) else prompts_per_step * num_generations
    options = _common(model, steps, seed, rate(model, 4e-4) if learning_rate is None else learning_rate) | {
        "per_device_train_batch_size": batch,
        "num_generations": num_generations,
        "max_completion_length": 4,
        "beta": beta,
        **IMPLIED,
        **config,
    }
    return _make_trainer(
        GRPOTrainer,
        GRPOConfig,
        options,
        output_dir,
        tokenizer,
        rows,
        model=model,
        reward_funcs=reward or models.reward,
        peft_config=peft_config,
        callbacks=[_Seeded(seed), *callbacks],
    )


def rate(model: Any, small: float) -> float:
    """Return the learning rate for this model where the small Qwen2 takes `small`: a hundredth for a large one.

    What teaches 0.3 million parameters within a hundred steps destroys a pretrained model. A hundredth of 4e-4 is near
    what GRPO recipes take for models of 0.5 to 7 billion; it is a beginning, not tuned.
    """
    return small if model.num_parameters() < _LARGE else small / 100


def rewards(trainer: Any) -> list[float]:
    """Return the mean reward of each logged step, in order; every step is logged unless `logging_steps` was given."""
    return [row["reward"] for row in trainer.state.log_history if "reward" in row]


def curve(trainer: Any, window: int = 10) -> tuple[list[int], list[float]]:
    """Return steps and rewards for a plot: the mean over each `window` logged steps, at the last of them."""
    logged = [(row["step"], row["reward"]) for row in trainer.state.log_history if "reward" in row]
    groups = [logged[start : start + window] for start in range(0, len(logged), window)]
    return [group[-1][0] for group in groups], [sum(reward for _, reward in group) / len(group) for group in groups]


def _counts_prompts(trainer_class: type) -> bool:
    """Whether a batch counts prompts: so before the trainer had a sampler of its own, which repeats each prompt."""
    return "_get_train_sampler" not in vars(trainer_class)


def _common(model: Any, steps: int, seed: int, learning_rate: float) -> dict[str, Any]:
    device = torch.device(getattr(model, "device", "cuda" if torch.cuda.is_available() else "cpu"))
    return {
        "max_steps": steps,
        "seed": seed,
        "data_seed": seed,
        "learning_rate": learning_rate,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "optim": "adamw_torch",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "gradient_accumulation_steps": 1,
        "temperature": 1.0,
        "gradient_checkpointing": False,
        "bf16": False,
        "fp16": False,
        "use_cpu": device.type == "cpu",
        "remove_unused_columns": False,
        "dataloader_pin_memory": False,
        "logging_steps": 1,
        "logging_first_step": False,
        "save_strategy": "no",
        "eval_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }


def _make_config(config_class: type, options: dict[str, Any], folder: str) -> Any:
    """Return the config, in the words that this release knows."""
    known = {field.name for field in dataclasses.fields(config_class) if field.init}
    renamed = {_RENAMED[key] if _RENAMED.get(key) in known else key: value for key, value in options.items()}
    for key in [key for key in renamed if key not in known]:
        value = renamed.pop(key)
        if key not in IMPLIED or value != IMPLIED[key]:
            raise OptionError(
                f"{config_class.__name__} of trl {importlib.metadata.version('trl')} (era {observe.era()}) has no "
                f"option {key!r}, so {key}={value!r} would do nothing. Next: leave it out, or use another era."
            )
    # In transformers 4 an earlier config's bf16 stays in the environment, and holds for every later one of the process.
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)
    config = config_class(output_dir=folder, **renamed)
    if config.n_gpu > 1:  # else transformers' Trainer would wrap the model in nn.DataParallel, or trl refuse
        config._n_gpu = 1
    return config


def _make_trainer(
    trainer_class: type,
    config_class: type,
    options: dict[str, Any],
    folder: str | None,
    tokenizer: transformers.PreTrainedTokenizerBase,
    rows: Any,
    **parts: Any,
) -> Any:
    """Return the trainer, which prints nothing, and whose temporary folder is removed with it."""
    temporary = None if folder else tempfile.mkdtemp(prefix="failurelab-")
    transformers.set_seed(options["seed"])  # an adapter's weights are drawn before old trainers seed
    try:
        trainer = trainer_class(
            args=_make_config(config_class, options, folder or temporary),
            processing_class=tokenizer,
            train_dataset=models.rows(form=models.form_for(tokenizer)) if rows is None else rows,
            **parts,
        )
    except BaseException:
        if temporary:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    trainer.remove_callback(transformers.PrinterCallback)
    if temporary:
        weakref.finalize(trainer, shutil.rmtree, temporary, ignore_errors=True)
    return trainer


class _Seeded(transformers.TrainerCallback):
    """Seeds when training begins, so that what was drawn since the trainer was made does not matter."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        transformers.set_seed(self.seed)
