"""AsyncGRPOTrainer.compute_loss divides by the tokens of each micro-batch (trl 1.16.0; #7206, #7249)."""

import collections
from types import SimpleNamespace

import torch
from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer

LENGTHS = [7, 1, 4, 2, 6, 3, 5, 7]  # tokens of eight completions
generator = torch.Generator().manual_seed(0)
old = -3 * torch.rand(sum(LENGTHS), generator=generator, dtype=torch.float64)
new = old + 0.3 * torch.randn(sum(LENGTHS), generator=generator, dtype=torch.float64)
row = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
worth = torch.randn(len(LENGTHS), generator=generator, dtype=torch.float64)[row]


def make_trainer(micros):
    trainer = object.__new__(AsyncGRPOTrainer)
    trainer.epsilon_low, trainer.epsilon_high, trainer.aux_loss_enabled = 0.2, 0.28, False
    trainer.accelerator = SimpleNamespace(num_processes=1, reduce=lambda values, reduction: values, gather=lambda v: v)
    trainer.current_gradient_accumulation_steps = micros
    trainer._metrics = {"train": collections.defaultdict(list)}
    for name in ("forward_tokens", "trained_tokens", "seq_len_weighted", "samples", "forward_s"):
        setattr(trainer, f"_step_{name}", 0.0)
    return trainer


def gradient(micros):
    """Return the gradient by the log-probabilities of one step: the same completions in so many micro-batches."""
    scores, trainer = new.clone().requires_grad_(), make_trainer(micros)
    for rows in torch.arange(len(LENGTHS)).chunk(micros):
        here = torch.isin(row, rows)
        places = torch.arange(int(here.sum()))[None]
        inputs = dict.fromkeys(("input_ids", "position_ids", "shift_labels", "token_index", "tree_kv_index"), places)
        inputs |= dict.fromkeys(("tree_cu_seqlens_q", "tree_cu_seqlens_k", "tree_max_seqlens"), torch.zeros(1, 2))
        inputs |= {"attention_mask": torch.ones_like(places), "segment_id": (row[here] - rows[0])[None]}
        inputs |= {"old_log_probs": old[here][None], "advantages": worth[here][None]}
        inputs |= {"global_n_tokens": here.sum()[None]}  # what the collator gives: of this micro-batch, on all ranks
        inputs |= dict.fromkeys(("global_n_forward_tokens", "mean_seq_len"), torch.ones(1))
        outputs = SimpleNamespace(log_probs=scores[here], entropy=torch.zeros(int(here.sum())))
        trainer.compute_loss(lambda **_: outputs, inputs).backward()  # noqa: B023
    return scores.grad


whole = gradient(1)
for micros in (1, 2, 4, 8):
    cut = gradient(micros)
    cosine = torch.cosine_similarity(cut, whole, dim=0)
    of_short = (cut[row == 1].norm() / whole[row == 1].norm()).item()
    print(f"{micros} micro-batches: cosine {cosine:.4f}, size {cut.norm() / whole.norm():.4f}, "
          f"gradient of the completion with one token times {of_short:.2f}")  # fmt: skip
