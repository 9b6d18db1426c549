"""trl (PyPI): `GRPOTrainer._compute_loss` itself, on a trainer without a model; its scores are the case's.

Imported: as it is installed. Advantages, generation and the counts of a step are the trainer's business, and are given.
"""

import collections
import inspect
from types import SimpleNamespace
from typing import Any

import torch

from failurelab.known_gradients import adapters as kit

DECLARES = kit.declare_cispo("GRPOConfig, epsilon_high: with loss_type='cispo' the epsilon_max of ScaleRL")
library = kit.Library(
    "trl", "trl.trainer.grpo_trainer", "trl.trainer.grpo_config", bare=False,
    old=(lambda library: not hasattr(library.grpo_trainer.GRPOTrainer, "_compute_loss"),
         "this release has no GRPOTrainer._compute_loss"),
)  # fmt: skip
prepare = library.prepare


def keep(values: torch.Tensor, reduction: str = "sum") -> torch.Tensor:
    """Gather and reduce: this one process says that it is one of several."""
    return values


def bare_trainer(kind: type, case: kit.LossCase, **attributes: Any) -> Any:
    """Return a trainer of this class that was not initialized, with what its loss reads."""
    trainer: Any = object.__new__(kind)
    vars(trainer).update(attributes)
    trainer.accelerator = SimpleNamespace(
        num_processes=len(case.batch.cut), device=torch.device("cpu"), sync_gradients=True, gather=keep,
        gather_for_metrics=keep, reduce=keep,
    )  # fmt: skip
    trainer.model = SimpleNamespace(training=True)
    trainer.current_gradient_accumulation_steps = len(case.batch.cut[0])
    trainer._metrics, trainer.aux_loss_enabled = {"train": collections.defaultdict(list)}, False
    return trainer


def loss(case: kit.LossCase) -> kit.Answer:
    """Call it by micro-batch."""
    kind, fields = library.grpo_trainer.GRPOTrainer, library.grpo_config.GRPOConfig.__dataclass_fields__
    options = kit.options_as_trl(case)
    options["epsilon"] = options.pop("epsilon_low")
    usual = {"loss_type": "dapo", "importance_sampling_level": "token", "use_bias_correction_kl": False}
    lost = [name for name in options if name not in fields]
    if [name for name in lost if name in usual and options[name] != usual[name]]:
        raise kit.NotOffered(f"no {', '.join(lost)}")
    micros = len(case.batch.cut[0])
    known = {name: field.default for name, field in fields.items()} | options
    args = SimpleNamespace(**known | {"steps_per_generation": micros, "gradient_accumulation_steps": micros})
    attributes = {name: value for name, value in known.items() if name in options or not hasattr(kind, name)}
    more = {"args": args, "epsilon_low": options["epsilon"], "_entropy_bonus_enabled": False}
    trainer = bare_trainer(kind, case, **attributes | more)
    has_routers = "compute_aux_loss" in inspect.signature(trainer._get_per_token_logps_and_entropies).parameters

    def micro(part: kit.Part) -> object:
        ids = torch.zeros(part.mask.shape, dtype=torch.long)
        inputs = {
            "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1] + 1, "completion_ids": ids,
            "completion_mask": part.mask, "advantages": part.advantages, "old_per_token_logps": part.old, 
            "ref_per_token_logps": part.reference, "num_items_in_batch": part.step_tokens,
        }  # fmt: skip
        scores = (part.logps, torch.zeros_like(part.logps), None)[: 3 if has_routers else 2]
        trainer._get_per_token_logps_and_entropies = lambda *given, **named: scores
        return trainer._compute_loss(trainer.model, inputs)

    return case.accumulate(micro)
