"""The evidence of a step whose completions come from a queue: trl's AsyncGRPOTrainer, where another process draws them.

What was drawn, by which probability, and the advantage of each completion are what the queue gave, and are believed.
The trainer packs completions with the same beginning into one row, in which a token that several share stands once;
here each is unpacked into a row of its own, and is read by itself: what the packing did shows in the gradient.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from failurelab._unwrap import unwrap
from failurelab.textbook.ranks import several
from failurelab.textbook.recorder import Evidence, Recorder
from failurelab.textbook.rows import Row

BELIEVED = "draws, probabilities and advantages: another process makes them, and the queue's are believed"


class QueueRecorder(Recorder):
    """Listens to the micro-batches that AsyncGRPOTrainer's loss is given, and to the gradient before it is clipped."""

    def attach(self) -> None:
        """Begin to listen."""
        self.detach()
        self._forget()
        self._rows: list[Row] = []
        self.wrap(self.trainer, "compute_loss", self._note_micro)
        self.wrap(self.trainer.accelerator, "clip_grad_norm_", self._clip)

    def _note_micro(self, method: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            self._safely(self._unpack, inputs)
            self._micros += 1
        return method(model, inputs, *args, **kwargs)

    def _unpack(self, inputs: dict[str, torch.Tensor]) -> None:
        """Add a row for each completion of a packed micro-batch, whose tensors are (1, tokens)."""
        ids, labels = inputs["input_ids"][0].tolist(), inputs["shift_labels"][0].tolist()
        paths = inputs["tree_kv_index"][0].tolist()  # of each segment: all places that its tokens read, its own last
        starts, ends = (inputs[f"tree_cu_seqlens_{name}"][0].tolist() for name in "qk")
        chosen = inputs["token_index"][0] >= 0
        of_row = inputs["segment_id"][0][chosen]
        for number in of_row.unique().tolist():
            own = [inputs[name][0][chosen][of_row == number] for name in ("token_index", "old_log_probs", "advantages")]
            before = own[0].tolist()  # the place that each trained token is predicted at
            segment = next(place for place, start in enumerate(starts) if start <= before[-1] < starts[place + 1])
            path = paths[ends[segment] : ends[segment + 1]]
            path = path[: path.index(before[-1]) + 1]
            tokens = [ids[place] for place in path] + [labels[before[-1]]]
            trained = [path.index(place) + 1 for place in before]
            first = trained[0]
            old = own[1].new_zeros(len(tokens) - first)
            old[[place - first for place in trained]] = own[1]
            given = frozenset(range(len(old))) - {place - first for place in trained}
            more: Any = {"group": len(self._rows), "micro": self._micros, "given": given, "padded": (first, len(old))}
            told = tuple(tokens[:first]), tuple(tokens[first:]), True, (float(own[2][0]),)
            self._rows.append(Row(*told, **more, old_logps=old))

    def _evidence(self) -> Evidence:
        gradient = self._gradient or self._own_gradient()
        problems = list(self.problems) + ["no completion of the queue was trained on"] * (not self._rows)
        problems += ["several processes, which each unpack their own part of the queue"] * several()
        wrong = self._compare_given(self._gradient) if self._gradient else []
        told: Any = {"believed": [BELIEVED], "ranks": self.ranks, "within": self._plain_attention}
        return Evidence(self._rows, gradient, problems, wrong, **told)

    def next_step(self) -> None:
        """Forget this step."""
        self._forget_step()
        self._rows = []

    @contextlib.contextmanager
    def _plain_attention(self) -> Iterator[None]:
        """Within the block the model attends as usual: the trainer's own kernel takes packed rows alone."""
        model: Any = unwrap(self.trainer.model)
        kind = model.config._attn_implementation
        model.set_attn_implementation("sdpa")
        try:
            yield
        finally:
            model.set_attn_implementation(kind)


def recorder_of(trainer: Any, wanted: Callable[[int], bool]) -> Recorder:
    """Return the recorder for a trainer's steps, of which `wanted` says whether each is to be compared."""
    return (QueueRecorder if hasattr(trainer, "rollout_queue") else Recorder)(trainer, wanted)
