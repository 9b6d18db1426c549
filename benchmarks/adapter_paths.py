"""What holds on each way from a model to a trainer: plain, wrapped by trl, by hand, from a saved adapter, quantized.

A repair that works on a plain model may be lost where a trainer or PEFT wraps it. Up to PEFT 0.20, for one,
`LoraModel.forward` calls `self.model.forward(...)`, which skips the hooks of the model that it wraps.

Each question of QUESTIONS takes a function that makes the pair (the model that a script hands over, what makes the
trainer of it), asks, and returns a `Result`. Where the repair is not needed in this stack (its failure is not there)
the result says so, because then nothing was proved.

Eras: trl-0.14, trl-0.14-tf-4.52, trl-0.15, trl-0.22, today.
"""

import dataclasses
import importlib.util
import itertools
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import frames
import pandas
import recording
import torch
from torch import nn

from failurelab import gradients, logits, rollouts
from failurelab._unwrap import unwrap
from failurelab.handles import eval_mode
from failurelab_course.experiments import models, observe, trainers

PATHS = ("plain", "peft_config", "wrapped by hand", "PeftModel.from_pretrained", "quantized")
_ROWS = 3


@dataclasses.dataclass(frozen=True)
class Result:
    """What came of a question: whether the repair or measurement `holds`, and `figure`, what was measured, in words.

    It was proved if it was `needed`: without the repair, the failure is there.
    """

    holds: bool
    needed: bool
    figure: str


@dataclasses.dataclass
class Path:
    """A model as a script has it before the trainer is made, and the trainer, made when it is first asked for."""

    model: nn.Module
    tokenizer: Any
    peft_config: Any = None

    def trainer(self, **options: Any) -> Any:
        """Return a GRPOTrainer of a few completions that has not started."""
        given = {"steps": 1, "prompts_per_step": 2, "num_generations": 2, "learning_rate": 1e-3, "reward": _alternate}
        return trainers.grpo(self.model, self.tokenizer, peft_config=self.peft_config, **given | options)


def available() -> tuple[str, ...]:
    """Return the paths that this stack has: 4-bit weights on a CPU need transformers 5 and bitsandbytes."""
    import transformers

    four_bit = int(transformers.__version__.split(".")[0]) >= 5 and importlib.util.find_spec("bitsandbytes")
    return PATHS if four_bit else PATHS[:-1]


def make(name: str, folder: pathlib.Path) -> Path:
    """Return one of PATHS; `folder` is empty, for an adapter that is saved and loaded."""
    import peft

    model, tokenizer = load_four_bit() if name == "quantized" else models.load()
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    torch.manual_seed(0)
    if name == "wrapped by hand":
        model = peft.get_peft_model(model, config)
    elif name == "PeftModel.from_pretrained":
        _moved(peft.get_peft_model(model, config)).save_pretrained(folder)
        model = peft.PeftModel.from_pretrained(models.load()[0], folder, is_trainable=True)
    return Path(model, tokenizer, config if name in ("peft_config", "quantized") else None)


def load_four_bit(device: str = "cpu", **options: Any) -> tuple[nn.Module, Any]:
    """Return the small Qwen2 in nf4, computing in float32, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32, **options
    )
    given = {"quantization_config": quantization, "device_map": {"": device}, models.dtype_key(): torch.float32}
    path = models.path("tiny")
    return AutoModelForCausalLM.from_pretrained(path, **given), AutoTokenizer.from_pretrained(path, padding_side="left")


def _alternate(completions: Any, **_: Any) -> list[float]:
    return [float(index % 2) for index in range(len(completions))]


def _moved(model: nn.Module) -> nn.Module:
    """Give an adapter numbers of its own: B begins at zero, and what is wrong with it would not show."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator).to(parameter) * 0.05)
    return model


# Each question: `make` gives a fresh Path at every call.


def asks_for_rows(make: Callable[[], Path], before: bool) -> Result:
    """`logits.repair`: the trainer's model, asked by the name it does not know, returns the last rows alone."""

    def rows(model: nn.Module) -> int:
        (other,) = {"logits_to_keep", "num_logits_to_keep"} - {logits.keep_argument(model)}
        ids = torch.arange(3, 11)[None]
        with torch.no_grad(), eval_mode(model):
            return model(input_ids=ids, **{other: _ROWS}).logits.shape[1]

    without = rows(make().trainer().model)
    path = make()
    handle = logits.repair(path.model) if before else None
    model = path.trainer().model
    handle = handle or logits.repair(model)
    made = rows(model)
    handle.remove()
    return Result(made == _ROWS and rows(model) == without, without != _ROWS, f"{made} rows for {_ROWS}")


def generates(make: Callable[[], Path], before: bool) -> Result:
    """`rollouts.repair`: under checkpointing, in train mode, generation draws from the policy."""
    prompts = ["3+4=", "12+19=", "5+13="]

    def report(path: Path, repair: bool) -> rollouts.RolloutReport:
        if repair and before:
            rollouts.repair(path.model)
        model = path.trainer().model
        if repair and not before:
            rollouts.repair(model)
        gradients.enable_checkpointing(unwrap(model), {"use_reentrant": False})
        return rollouts.check(model, path.tokenizer, prompts, max_new_tokens=4)

    without, repaired = report(make(), False), report(make(), True)
    return Result(repaired.agrees, not without.agrees, f"{repaired.error:.1e} nats, without {without.error:.1e}")


def reaches(make: Callable[[], Path], before: bool) -> Result:
    """`gradients.require_input_grads`: every trainable tensor gets a gradient under reentrant checkpointing."""

    def reached(path: Path, repair: bool) -> tuple[int, int]:
        if path.peft_config is None and not hasattr(path.model, "peft_config"):
            path.model.get_input_embeddings().requires_grad_(False)
        if repair and before:
            gradients.require_input_grads(path.model)
        trainer = path.trainer(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True})
        if repair and not before:
            gradients.require_input_grads(trainer.model)
        with gradients.watch(trainer.model) as watched:
            try:
                trainer.train()
            except RuntimeError as error:
                if "does not require grad" not in str(error):
                    raise
        report = watched.report()
        return len(report.trainable) - len(report.without_gradient), len(report.trainable)

    (few, _), (reached_now, total) = reached(make(), False), reached(make(), True)
    return Result(reached_now == total, few < total, f"{reached_now} of {total} tensors, without {few}")


def measures(make: Callable[[], Path], before: bool) -> Result:
    """`gradients.watch` and `snapshot`: as many tensors with a gradient as change in a step, or an error that says why.

    Before the trainer is made, what PEFT is still to wrap is told as such: those tensors are not what is trained.
    """
    path = make()
    trainer = None if before else path.trainer()
    model = path.model if before else trainer.model
    watched, kept = gradients.watch(model), gradients.snapshot(model)
    trainer = trainer or path.trainer()
    trainer.train()
    watched.stop()
    try:
        report, changed = watched.report(), kept.changed(trainer.model)
    except gradients.GradientError as error:
        return Result(True, True, f"says so: {str(error).split('.')[0]}")
    moved = sum(name not in report.zero_gradient for name in report.trainable)
    return Result(report.learns and len(changed) == moved, True, f"{moved} with a gradient, {len(changed)} changed")


def scores(make: Callable[[], Path], before: bool) -> Result:
    """`logits.completion_logps`: the scores are those of the model's own logits, and so are the gradients."""
    path = make()
    model = path.model if before else path.trainer().model
    _moved(model)
    ids = path.tokenizer(["3+4=7", "8+1=9"], return_tensors="pt").input_ids

    def scored(plain: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
        model.zero_grad()
        model.train()  # in eval mode bitsandbytes packs 4-bit weights for good, and no gradient passes them
        if plain:
            rows = model(input_ids=ids, use_cache=False).logits[:, -2:-1].float().log_softmax(-1)
            got = rows.gather(-1, ids[:, -1:, None])[..., 0]
        else:
            got = logits.completion_logps(model, ids, torch.ones_like(ids), 1)
        got.sum().backward()
        return got.detach(), [p.grad.float().clone() for p in model.parameters() if p.requires_grad]

    (wanted, slopes), (got, others) = scored(True), scored(False)
    error = float((wanted - got).abs().max())
    slope = max(float((a - b).abs().max() / a.abs().max().clamp(min=1e-9)) for a, b in zip(slopes, others))
    low = any(p.requires_grad and p.itemsize < 4 for p in model.parameters())
    return Result(error < 1e-4 and slope < (0.02 if low else 1e-3), True, f"{error:.0e} nats, gradients {slope:.0e}")


def hook_runs(make: Callable[[], Path], before: bool) -> Result:
    """A forward pre-hook on the model itself, as one writes it by hand: it runs when the trainer's model is called."""
    path, calls = make(), []
    if before:
        unwrap(path.model).register_forward_pre_hook(lambda *_: calls.append(1))
    model = path.trainer().model
    if not before:
        unwrap(model).register_forward_pre_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        model(input_ids=torch.arange(3, 11)[None])
    return Result(bool(calls), True, f"{len(calls)} calls of 1")


QUESTIONS: dict[str, Callable[[Callable[[], Path], bool], Result]] = {
    "logits.repair": asks_for_rows,
    "rollouts.repair": generates,
    "gradients.require_input_grads": reaches,
    "gradients.watch, snapshot": measures,
    "logits.completion_logps": scores,
    "forward pre-hook on the model": hook_runs,
}


def table_paths(folder: pathlib.Path) -> str:
    """What holds on each way from a model to a trainer, asked before the trainer is made and after, by era."""
    runs = frames.read_runs(
        folder, "adapter_paths", r"paths: (?P<question>.+), (?P<path>[^,]+), (?P<when>before|after)"
    )
    eras = tuple(dict.fromkeys(runs["era"]))

    def cell(part: pandas.DataFrame) -> str:
        holds = part.groupby("path", sort=False)["holds"].all()
        lost = ", ".join(holds[~holds.astype(bool)].index)
        text = f"{int(holds.sum())} of {len(holds)}" + (f"; not: {lost}" if lost else "")
        return text if part["needed"].any() else f"{text} (not needed here)"

    lines = [
        [f"`{question}`" if "." in question else question, *(cell(part[part["era"] == era]) for era in eras)]
        for question, part in runs.groupby("question", sort=False)
    ]
    return frames.markdown(
        ["paths on which it holds", *frames.version_heads(runs, eras, "trl", "transformers", "peft")], lines
    )


def main() -> None:
    """Ask every question on every path, before the trainer is made and after, and record the answers."""
    recording.begin(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        folders = (pathlib.Path(folder, str(number)) for number in itertools.count())
        for path, name, before in itertools.product(available(), QUESTIONS, (True, False)):
            result = QUESTIONS[name](lambda: make(path, next(folders)), before)  # noqa: B023
            when = "before" if before else "after"
            figures = {"holds": result.holds, "needed": result.needed, "figure": result.figure}
            observe.record("ground", "measured", figures, case=f"paths: {name}, {path}, {when}", seed=0)
            print(f"{name}, {path}, {when}: {result}", flush=True)


if __name__ == "__main__":
    main()
