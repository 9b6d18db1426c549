"""The kind `trainer`: a script whose `build_trainer(model_path, output_dir)` returns a Trainer, which is trained here.

Measured are the gradients between the backward pass and the optimizer step, the completions that the trainer generates
(scored here, whatever the script's own reward function says), and the accuracy of the trained weights in a clean copy
of the model.
"""

import collections
import contextlib
import re
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from torch.optim.optimizer import register_optimizer_step_pre_hook

from failurelab import handles
from failurelab._unwrap import unwrap
from failurelab_course.experiments import models
from failurelab_course.labs.checker.base import CheckRun, Refused

# Of one completion: the step it was generated for, its prompt, 1.0 if it is right, else 0.0; whether it goes on after
# its end
Score = tuple[int, str, float, bool]
CLIPPED = "completions/clipped_ratio"


# A look at a trainer while it trains, which fills in the run's metrics.
Watch = Callable[[transformers.Trainer, CheckRun], contextlib.AbstractContextManager[None]]


def measure(script: types.ModuleType, run: CheckRun, watch: Watch | None = None) -> None:
    """Build the script's trainer, train it, and fill in `run.metrics`.

    Raises:
        Refused: it is another kind of trainer, was trained before, or its model is not the one that was given, or not
            on the device that the check is about.
    """
    run.stage = "build"
    trainer = build_trainer(script, run)
    if trainer.state.global_step:
        raise Refused(f"the trainer has done {trainer.state.global_step} steps before it was handed over")
    must_be_as_given(trainer.model, run)
    run.must_be_there("the trainer's model", trainer.model.parameters())
    run.stage = "train"
    with watch(trainer, run) if watch else contextlib.nullcontext():
        train(trainer, run)
    run.stage = "measure"
    after(trainer, run)


def build_trainer(script: types.ModuleType, run: CheckRun) -> transformers.Trainer:
    """Return the trainer that the script builds.

    Raises:
        Refused: it is another kind of trainer than the lab's.
    """
    build = run.function(script, "build_trainer(model_path, output_dir)")
    trainer = build(str(run.model_path), str(run.output_dir))
    names = [base.__name__ for base in type(trainer).__mro__]
    if not isinstance(trainer, transformers.Trainer) or run.trainer_class not in names:
        raise Refused(f"build_trainer returned a {type(trainer).__name__}, the lab is about {run.trainer_class}")
    return trainer


def must_be_as_given(model: torch.nn.Module, run: CheckRun) -> None:
    """Make sure that a trainer's model is the one that the script was given, in whatever dtype; adapters may be on it.

    A script may have loaded it in 16 bits and cast it afterwards.

    Raises:
        Refused: its weights are others.
    """
    start = run.start
    weights = {name: tensor.cpu() for name, tensor in unwrap(model).state_dict().items() if name in start}

    def is_loaded_as(dtype: torch.dtype) -> bool:
        return all(
            tensor.shape == start[name].shape and torch.equal(tensor, start[name].to(dtype).to(tensor.dtype))
            for name, tensor in weights.items()
        )

    if not weights or not any(map(is_loaded_as, (torch.float32, torch.bfloat16, torch.float16))):
        raise Refused("the trainer's model is not the one in model_path: its weights differ before training")


class Kept:
    """Finds layers that get their gradient from kept activations, and not from a second forward pass.

    A flag says what was asked for. What checkpointing does is to compute a layer again when the backward pass comes to
    it, so the linear maps of each layer are listened to, whoever calls them: a layer was computed again if at least
    half of them ran inside autograd's backward pass, on at least half of the tokens that the model was trained on. A
    layer that gets no gradient keeps nothing either.
    """

    def __init__(self, model: torch.nn.Module):
        self._again, self.trained = collections.Counter[torch.nn.Module](), 0
        layers = [module for module in model.modules() if type(module).__name__.endswith("DecoderLayer")]
        self._maps = {
            layer: [part for part in layer.modules() if isinstance(part, torch.nn.Linear)] for layer in layers
        }
        self._handles = [part.register_forward_pre_hook(self._note) for parts in self._maps.values() for part in parts]

    def _note(self, part: torch.nn.Module, args: tuple[Any, ...]) -> None:
        if torch._C._current_graph_task_id() != -1:
            self._again[part] += args[0].shape[:-1].numel()

    def count(self) -> int:
        """Return how many layers kept activations since the last call; gradients must be there."""
        kept = [
            layer
            for layer, parts in self._maps.items()
            if 2 * sum(self._again[part] > self.trained // 2 for part in parts) < len(parts)
            and any(parameter.grad is not None and parameter.grad.any() for parameter in layer.parameters())
        ]
        self._again.clear()
        self.trained = 0
        return len(kept)

    def remove(self) -> None:
        """Stop listening."""
        for handle in self._handles:
            handle.remove()


class Stop(transformers.TrainerCallback):
    """Ends training after so many steps; the schedule of learning rates stays that of the whole run."""

    def __init__(self, steps: int):
        self.steps = steps

    def on_step_end(self, args, state, control, **_):
        """End training after the last of these steps."""
        control.should_training_stop |= state.global_step >= self.steps


def train(trainer: transformers.Trainer, run: CheckRun) -> None:
    """Train, and fill in what shows during training; also where training ends in an error."""
    metrics = run.metrics
    if run.stop_after:
        trainer.add_callback(Stop(run.stop_after))
    try:
        with watched(trainer.model, run, lambda: trainer.state.max_steps):
            trainer.train()
    finally:
        cut = [row[CLIPPED] for row in trainer.state.log_history if CLIPPED in row]
        metrics["clipped"] = sum(cut) / len(cut) if cut else None
        losses = [float(row["loss"]) for row in trainer.state.log_history if "loss" in row]
        metrics["finite"] = metrics["finite"] is True and all(loss - loss == 0 for loss in losses)
        if losses:
            last = losses[-max(1, len(losses) // 4) :]
            metrics |= {"loss_first": losses[0], "loss_last": sum(last) / len(last)}


@contextlib.contextmanager
def watched(model: torch.nn.Module, run: CheckRun, planned: Callable[[], int]) -> Iterator[None]:
    """Look at a model while it is trained in the block, whoever trains it, and fill in `run.metrics`.

    Torch calls a hook before each step of every optimizer of the process: gradients and rates are read there. `planned`
    returns, after the block, how many steps the whole run has, which may have been stopped before.

    Raises:
        Refused: the model left the device that the check is about.
    """
    metrics = run.metrics
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    held: set[int] = set()  # parameters of an optimizer that has made a step; until then all may be trained
    kept, scores, drawn = Kept(model), [], set[tuple[int, ...]]()
    metrics |= {"tensors_total": len(before), "steps_done": 0, "learning_rate": 0.0, "momentum": None}
    metrics |= {"rows_foreign": 0, "rows_at_once": 0}
    ends = {run.tokenizer.pad_token_id, run.tokenizer.eos_token_id}

    def trained() -> dict[str, torch.nn.Parameter]:
        parameters = {name: one for name, one in model.named_parameters() if one.requires_grad}
        now = {name: one for name, one in parameters.items() if not held or id(one) in held}
        metrics["tensors_trainable"], metrics["tensors_frozen"] = len(now), len(before) - len(now)
        return now

    def trained_on(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        if ids is None or not getattr(getattr(output, "logits", None), "requires_grad", False):
            return
        kept.trained += ids.numel()
        metrics["rows_at_once"] = max(metrics["rows_at_once"], len(ids))
        metrics["rows_foreign"] += sum(_bare(row, ends) not in drawn for row in ids.tolist())

    def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        own = {id(parameter) for parameter in model.parameters()}
        groups = [group for group in optimizer.param_groups if own & {id(parameter) for parameter in group["params"]}]
        if not groups:
            return
        held.update(id(parameter) for group in groups for parameter in group["params"])
        gradients = [parameter.grad for parameter in trained().values()]
        metrics["steps_done"] += 1
        metrics["learning_rate"] = max(metrics["learning_rate"], *(float(group["lr"]) for group in groups))
        metrics["momentum"] = min(
            0.0 if group.get("dampening") else float(group.get("momentum", 0.0)) for group in groups
        )
        metrics["checkpointing"] = not kept.count() and metrics["checkpointing"] is not False
        without = sum(gradient is None for gradient in gradients)
        metrics["tensors_without_gradient"] = max(without, metrics["tensors_without_gradient"] or 0)
        metrics["tensors_zero_gradient"] = sum(gradient is not None and not gradient.any() for gradient in gradients)

    trained()
    hook = register_optimizer_step_pre_hook(before_step)
    passes = model.register_forward_hook(trained_on, with_kwargs=True)

    def note(ids: torch.Tensor) -> None:
        drawn.update(_bare(row, ends) for row in ids.tolist())

    try:
        with scored_rollouts(model, run.tokenizer, scores, lambda: metrics["steps_done"], note):
            yield
    finally:
        for handle in (hook, passes):
            handle.remove()
        kept.remove()
        run.must_be_there("the trained model", model.parameters())
        now, trainable = dict(model.named_parameters()), trained()
        changed = {name for name in before if name in now and _differ(before[name], now[name])}
        pairs = [(before[name], one) for name, one in trainable.items() if name in before]
        differ = sum(int((one.detach().cpu() != old.cpu()).sum()) for old, one in pairs)
        embeddings = unwrap(model).get_input_embeddings().weight
        metrics |= {
            "tensors_changed": len(changed & set(trainable)),
            "frozen_changed": len(changed - set(trainable)),
            "embeddings_changed": any(now[name] is embeddings for name in changed),
            "elements_changed": differ / max(1, sum(old.numel() for old, _ in pairs)),
            "weights_bits": 8 * max(before.values(), key=torch.Tensor.numel).dtype.itemsize,
            "finite": all(bool(parameter.isfinite().all()) for parameter in now.values()),
        }
        score(scores, run, planned())


def _bare(row: list[int], ends: set[int]) -> tuple[int, ...]:
    """Return the ids of a row without the padding and ends around them."""
    places = [place for place, id in enumerate(row) if id not in ends]
    return tuple(row[places[0] : places[-1] + 1]) if places else ()


def _differ(before: torch.Tensor, now: torch.Tensor) -> bool:
    return not torch.equal(before.cpu(), now.detach().cpu())  # a script may have moved it


def scored_rollouts(
    model: Any, tokenizer: Any, scores: list[Score], step: Callable[[], int], note: Callable[[torch.Tensor], None]
) -> handles.Handle:
    """Score every completion that the model generates, until the handle is removed.

    It stands on `generate` of the model itself, below any trainer, so that it sees what is trained on. `scores` is
    filled with a score for each completion; `step` returns how many optimizer steps were done; `note` gets the ids.
    """
    answers = dict(models.sums())

    def generate(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        out = method(*args, **kwargs)
        ids = kwargs.get("input_ids", args[0] if args else None)
        sequences = getattr(out, "sequences", out)
        note(sequences)
        prompts = tokenizer.batch_decode(ids, skip_special_tokens=True)
        completions = tokenizer.batch_decode(sequences[:, ids.shape[1] :], skip_special_tokens=True)
        ends = (sequences[:, ids.shape[1] :] == tokenizer.eos_token_id).cumsum(1)
        more = (
            (ends.diff(dim=1) == 0) & (ends[:, 1:] > 0) & (sequences[:, ids.shape[1] + 1 :] != tokenizer.pad_token_id)
        )
        goes_on = more.any(1).tolist()
        samples = len(completions) // len(prompts)
        for index, completion in enumerate(completions):
            asked = re.search(r"\d+\+\d+=", prompts[index // samples])
            if asked and asked[0] in answers:
                right = models.reward([completion], [answers[asked[0]]])[0]
                scores.append((step(), asked[0], right, goes_on[index]))
        return out

    return handles.wrap_method(model, "generate", generate, "the checker's scores of rollouts")


def score(scores: list[Score], run: CheckRun, planned: int) -> None:
    """Work out the rewards at the start and at the end, and how far the first rollouts are below the model.

    `planned` is the number of steps of the whole run, which may have been stopped before.
    """
    metrics = run.metrics
    metrics["rollouts"] = len(scores)
    if not scores:
        return
    steps = max(step for step, *_ in scores) + 1
    first = [score for score in scores if score[0] < max(1, (planned if run.stop_after else steps) // 10)]
    last = [score for score in scores if score[0] >= steps - max(1, steps // 4)]
    metrics["reward_first"] = sum(right for _, _, right, _ in first) / len(first)
    metrics["reward_last"] = sum(right for _, _, right, _ in last) / len(last)
    metrics["overrun_first"] = sum(goes_on for *_, goes_on in first) / len(first)
    # On the very prompts of these rollouts: some sums are easier than others.
    answers = dict(models.sums())
    prompts = [(prompt, answers[prompt]) for _, prompt, *_ in first]
    metrics["accuracy_there"] = run.score(prompts=prompts)
    metrics["rollout_gap"] = metrics["accuracy_there"] - metrics["reward_first"]


def after(trainer: transformers.Trainer, run: CheckRun) -> None:
    """Measure the trained weights in the scorer's clean model: hooks, patches and modes of the trained do not count.

    Raises:
        Refused: they are not weights of the model that was given.
    """
    metrics, trained = run.metrics, trainer.model
    # a PeftModel, or a model of transformers that an adapter was added to
    if hasattr(trained, "get_base_model") or getattr(trained, "_hf_peft_config_loaded", False):
        folder = run.output_dir / "measured-adapter"
        trained.save_pretrained(folder)
        metrics["accuracy_after"] = run.score(adapter=folder)
    else:
        metrics["accuracy_after"] = run.accuracy_of(trained.state_dict())
    metrics["accuracy_gain"] = metrics["accuracy_after"] - metrics["accuracy_before"]
