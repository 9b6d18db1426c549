"""The kind `trainer`: a script whose `build_trainer(model_path, output_dir)` returns a Trainer, which is trained here.

Measured are the gradients between the backward pass and the optimizer step, the completions that the trainer generates
(scored here, whatever the script's own reward function says), and the accuracy of the trained weights in a clean copy
of the model.
"""

import re
import types
from collections.abc import Callable
from typing import Any

import torch
import transformers

from failurelab import handles
from failurelab._unwrap import unwrap
from failurelab_course.experiments import models
from failurelab_course.labs.checker.base import Refused, Run
from failurelab_course.labs.checker.judge import JudgeError

# Of one completion: the step it was generated for, its prompt, 1.0 if it is right, else 0.0; whether it goes on after
# its end
Score = tuple[int, str, float, bool]


def measure(script: types.ModuleType, run: Run) -> None:
    """Build the script's trainer, train it, and fill in `run.metrics`."""
    run.stage = "build"
    trainer = built(script, run)
    run.stage = "train"
    train(trainer, run)
    run.stage = "measure"
    after(trainer, run)


def built(script: types.ModuleType, run: Run) -> transformers.Trainer:
    """Return the trainer that the script builds.

    Raises:
        Refused: it is another kind of trainer, was trained before, or its model is not the one that was given, or not
            on the device that the check is about.
    """
    build = run.function(script, "build_trainer(model_path, output_dir)")
    trainer = build(str(run.model_path), str(run.output_dir))
    names = [base.__name__ for base in type(trainer).__mro__]
    if not isinstance(trainer, transformers.Trainer) or run.trainer_class not in names:
        raise Refused(f"build_trainer returned a {type(trainer).__name__}, the lab is about {run.trainer_class}")
    if trainer.state.global_step:
        raise Refused(f"the trainer has done {trainer.state.global_step} steps before it was handed over")
    if not is_as_given(trainer.model, run.start):
        raise Refused("the trainer's model is not the one in model_path: its weights differ before training")
    run.must_be_there("the trainer's model", trainer.model.parameters())
    return trainer


def is_as_given(model: torch.nn.Module, start: dict[str, torch.Tensor]) -> bool:
    """Whether a model's weights are those of `start`, in their dtype; adapters rename the layers that they wrap.

    A script may have loaded them in 16 bits and cast them afterwards.
    """
    weights = {name: tensor for name, tensor in unwrap(model).state_dict().items() if name in start}
    return bool(weights) and any(
        all(
            tensor.shape == start[name].shape and torch.equal(tensor.cpu(), start[name].to(loaded).to(tensor.dtype))
            for name, tensor in weights.items()
        )
        for loaded in (torch.float32, torch.bfloat16, torch.float16)
    )


class Kept:
    """Finds layers that get their gradient from kept activations, and not from a second forward pass.

    A flag says what was asked for. What checkpointing does is to compute a layer again when the backward pass comes to
    it, so the linear maps of each layer are listened to, whoever calls them: a layer was computed again if at least
    half of them ran inside autograd's backward pass. A layer that gets no gradient keeps nothing either.
    """

    def __init__(self, model: torch.nn.Module):
        self._again: set[torch.nn.Module] = set()
        layers = [module for module in model.modules() if type(module).__name__.endswith("DecoderLayer")]
        self._maps = {
            layer: [part for part in layer.modules() if isinstance(part, torch.nn.Linear)] for layer in layers
        }
        self._handles = [part.register_forward_pre_hook(self._note) for parts in self._maps.values() for part in parts]

    def _note(self, part: torch.nn.Module, _: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            self._again.add(part)

    def count(self) -> int:
        """Return how many layers kept activations since the last call; gradients must be there."""
        kept = [
            layer
            for layer, parts in self._maps.items()
            if 2 * len(self._again.intersection(parts)) < len(parts)
            and any(parameter.grad is not None and parameter.grad.any() for parameter in layer.parameters())
        ]
        self._again.clear()
        return len(kept)

    def remove(self) -> None:
        """Stop listening."""
        for handle in self._handles:
            handle.remove()


def trained(model: torch.nn.Module, optimizer: Any) -> list[str]:
    """Return the names of what requires grad and is held by the optimizer; without one, of what requires grad."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]} if optimizer else None
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and (held is None or id(parameter) in held)
    ]


class _Watch(transformers.TrainerCallback):
    """Looks at gradients when they are there, between the backward pass and the optimizer step."""

    def __init__(self, metrics: dict[str, Any], kept: Kept):
        self.metrics, self.kept = metrics, kept

    def on_pre_optimizer_step(self, args, state, control, model=None, optimizer=None, **_):
        names = set(trained(model, optimizer))
        trainable = [parameter for name, parameter in model.named_parameters() if name in names]
        metrics = self.metrics
        metrics["checkpointing"] = not self.kept.count() and metrics["checkpointing"] is not False
        metrics["tensors_trainable"] = len(trainable)
        metrics["tensors_frozen"] = metrics["tensors_total"] - len(trainable)
        without = sum(parameter.grad is None for parameter in trainable)
        metrics["tensors_without_gradient"] = max(without, metrics["tensors_without_gradient"] or 0)
        if state.global_step in (0, state.max_steps - 1):
            metrics["tensors_zero_gradient"] = sum(
                parameter.grad is not None and not parameter.grad.any() for parameter in trainable
            )

    def on_step_end(self, args, state, control, optimizer=None, **_):
        metrics = self.metrics
        metrics["steps_done"] = state.global_step
        optimizer = getattr(optimizer, "optimizer", optimizer)
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        metrics["learning_rate"] = max([*rates, metrics["learning_rate"] or 0.0])


class _Stop(transformers.TrainerCallback):
    """Ends training after so many steps; the schedule of learning rates stays that of the whole run."""

    def __init__(self, steps: int):
        self.steps = steps

    def on_step_end(self, args, state, control, **_):
        control.should_training_stop |= state.global_step >= self.steps


def train(trainer: transformers.Trainer, run: Run) -> None:
    """Train, and fill in what shows during training; also where training ends in an error."""
    metrics = run.metrics
    model = trainer.model
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    trainable = trained(model, trainer.optimizer)
    metrics |= {
        "tensors_total": len(before),
        "tensors_trainable": len(trainable),
        "tensors_frozen": len(before) - len(trainable),
        "steps_done": 0,
        "learning_rate": 0.0,
    }
    kept = Kept(model)
    trainer.add_callback(_Watch(metrics, kept))
    if run.stop_after:
        trainer.add_callback(_Stop(run.stop_after))
    scores: list[Score] = []
    with scored_rollouts(model, run.tokenizer, scores, lambda: trainer.state.global_step):
        try:
            trainer.train()
        finally:
            kept.remove()
            trainable = trained(model, trainer.optimizer)
            changed = [name for name, now in model.named_parameters() if name in before and _differ(before[name], now)]
            metrics["tensors_changed"] = sum(name in trainable for name in changed)
            metrics["frozen_changed"] = len(changed) - metrics["tensors_changed"]
            embeddings = unwrap(model).get_input_embeddings().weight
            metrics["embeddings_changed"] = any(dict(model.named_parameters())[name] is embeddings for name in changed)
            pairs = [(before[name], now) for name, now in model.named_parameters() if name in trainable]
            differ = sum(int((now.detach().cpu() != old.cpu()).sum()) for old, now in pairs)
            metrics["elements_changed"] = differ / max(1, sum(old.numel() for old, _ in pairs))
            metrics["weights_bits"] = 8 * max(before.values(), key=torch.Tensor.numel).dtype.itemsize
            score(scores, run, trainer.state.max_steps)
            losses = [float(row["loss"]) for row in trainer.state.log_history if "loss" in row]
            weights = all(bool(parameter.isfinite().all()) for parameter in model.parameters())
            metrics["finite"] = weights and all(loss - loss == 0 for loss in losses)
            if losses:
                last = losses[-max(1, len(losses) // 4) :]
                metrics |= {"loss_first": losses[0], "loss_last": sum(last) / len(last)}


def _differ(before: torch.Tensor, now: torch.Tensor) -> bool:
    return not torch.equal(before.cpu(), now.detach().cpu())  # a script may have moved it


def scored_rollouts(model: Any, tokenizer: Any, scores: list[Score], step: Callable[[], int]) -> handles.Handle:
    """Score every completion that the model generates, until the handle is removed.

    It stands on `generate` of the model itself, below any trainer, so that it sees what is trained on.

    Args:
        model: what is trained.
        tokenizer: of the prompts.
        scores: filled with a score for each completion.
        step: returns how many optimizer steps were done.
    """
    answers = dict(models.sums())

    def generate(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        out = method(*args, **kwargs)
        ids = kwargs.get("input_ids", args[0] if args else None)
        sequences = getattr(out, "sequences", out)
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


def score(scores: list[Score], run: Run, planned: int) -> None:
    """Work out the rewards at the start and at the end, and how far the first rollouts are below the model.

    Args:
        scores: of all completions.
        run: whose metrics are filled in.
        planned: number of steps of the whole run, which may have been stopped before.
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
    metrics["accuracy_there"] = run.judge.accuracy(prompts=prompts, draws=1)
    metrics["rollout_gap"] = metrics["accuracy_there"] - metrics["reward_first"]


def after(trainer: transformers.Trainer, run: Run) -> None:
    """Measure the trained weights in the judge's clean model: hooks, patches and modes of the trained one do not count.

    Raises:
        Refused: they are not weights of the model that was given, or left the device that the check is about.
    """
    metrics, trained = run.metrics, trainer.model
    run.must_be_there("the trained model", trained.parameters())
    # a PeftModel, or a model of transformers that an adapter was added to
    if hasattr(trained, "get_base_model") or getattr(trained, "_hf_peft_config_loaded", False):
        folder = run.output_dir / "measured-adapter"
        trained.save_pretrained(folder)
        try:
            metrics["accuracy_after"] = run.judge.accuracy(adapter=folder)
        except JudgeError as error:
            raise Refused(str(error)) from error
    else:
        metrics["accuracy_after"] = run.accuracy_of(trained.state_dict())
    metrics["accuracy_gain"] = metrics["accuracy_after"] - metrics["accuracy_before"]
