"""The graph through a model's parts, traced with hooks: where the gradient gets through, and where its edge is cut."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from failurelab_course.notebook import display as notebook

THROUGH, CUT, IDLE = "#0072B2", "#a3260d", "#888888"
Trace = Sequence[tuple[str, int, int, bool]]
PARTS = ("embed_tokens", "layers.0", "layers.1", ".norm", "lm_head")  # of two layers, named as in Llama and Qwen


def trace(model: Any, run: Callable[[], Any]) -> Trace:
    """Return what hooks see in a model of two layers while a pass runs; works in an era's kernel too.

    The hooks look at what goes *into* a part: inside of a reentrant checkpoint no tensor has a graph.

    Args:
        model: a causal language model of transformers, also within a PeftModel.
        run: runs the model with labels, forward, and backward if its loss has a graph.
    """
    parts = {name.rpartition("model.")[2]: part for name, part in model.named_modules() if name.endswith(PARTS)}
    graph: dict[str, bool] = {}

    def note(name: str, tensor: Any) -> None:
        graph[name] = tensor.requires_grad

    hooks = [
        part.register_forward_pre_hook(lambda _, inputs, name=name: note(name, inputs[0]))
        for name, part in parts.items()
    ]
    hooks.append(model.register_forward_hook(lambda _, inputs, output: note("loss", output.loss)))
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    rows = []
    for name, after in zip(graph, list(graph.values())[1:]):  # in the order of the pass; the last is the loss
        tensors = [tensor for tensor in parts[name].parameters() if tensor.requires_grad]
        rows.append((name, sum(tensor.grad is not None for tensor in tensors), len(tensors), after))
    return rows


def trace_trainer(trainer: Any) -> Trace:
    """Return `trace` of a trainer's model in train mode, checkpointed as `train()` does it, for one short text."""
    model, args = trainer.model.train(), trainer.args
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable(args.gradient_checkpointing_kwargs)
    model.zero_grad()
    ids = trainer.processing_class("3+4=7", return_tensors="pt").to(model.device)

    def run() -> None:
        loss = model(**ids, labels=ids["input_ids"]).loss
        if loss.requires_grad:
            loss.backward()

    return trace(model, run)


def chains(traces: Mapping[str, Trace], alt: str) -> None:
    """Show traces of one model below each other, the way of the gradient as arrows from the loss to the left.

    Args:
        traces: by title the model's parts in forward order. Of each its name, how many of its tensors got a gradient,
            how many are trainable, and whether its output has a graph: whether it requires a gradient.
        alt: what the figure shows, as `notebook.show` wants it.
    """
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(traces), figsize=(8.5, 1.75 * len(traces)), squeeze=False)
    for place, (title, trace) in zip(axes[:, 0], traces.items()):
        _draw(place, trace)
        place.set_title(title, fontsize=11)
    notebook.show(figure, alt)


def _draw(axes: Any, trace: Trace) -> None:
    axes.set(xlim=(-0.55, len(trace) + 0.45), ylim=(-0.95, 0.75))
    axes.axis("off")
    below = 0  # trainable tensors that only a graph through here can reach
    for place, (name, reached, trainable, has_graph) in enumerate(trace):
        below += trainable
        color = IDLE if not trainable else THROUGH if reached == trainable else CUT
        _write(axes, place, name, color)
        counted = f"{'✓' if reached == trainable else '✗'} {reached} of {trainable}" if trainable else "frozen"
        axes.text(place, -0.55, counted, ha="center", va="center", fontsize=9.5, color=color, fontweight="bold")
        style = ("-", THROUGH) if has_graph else (":", CUT if below else IDLE)
        axes.annotate(
            "",
            xy=(place + 0.36, 0),
            xytext=(place + 0.68, 0),
            arrowprops={"arrowstyle": "-|>" if has_graph else "-", "linestyle": style[0], "color": style[1], "lw": 1.8},
        )
        if not has_graph and below:
            axes.text(place + 0.52, 0, "✗", ha="center", va="center", fontsize=13, color=CUT, fontweight="bold")
            axes.text(place + 0.52, 0.45, "no graph", ha="center", va="center", fontsize=8.5, color=CUT)
    _write(axes, len(trace), "loss", THROUGH if trace[-1][3] else CUT)


def _write(axes: Any, place: int, name: str, color: str) -> None:
    box = {"boxstyle": "round,pad=0.35", "facecolor": "#f4f6f8", "edgecolor": color, "linewidth": 1.6}
    axes.text(place, 0, name, ha="center", va="center", fontsize=9.5, bbox=box)
