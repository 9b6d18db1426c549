"""A figure with knobs: three settings beside each other where no kernel is, and in JupyterLab a slider for the rest."""

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from failurelab_course.notebook import display as notebook
from failurelab_course.notebook import predict


def knobs(
    draw: Callable[..., None],
    values: Mapping[str, Sequence[Any]],
    shown: Sequence[Mapping[str, Any]],
    alt: str,
    size: tuple[float, float] = (7.5, 2.8),
) -> None:
    """Show a figure in three settings, and where a person looks, with a slider for each knob.

    Args:
        draw: takes matplotlib axes, and a value of each knob by name; titles and labels are its own. It has to be
            quick: it draws what was measured, and trains nothing.
        values: of each knob, in order; two values make a switch.
        shown: the settings of the pictures that stand in the stored notebook.
        alt: what they show, as `notebook.show` wants it.
        size: of the three pictures together, in inches.

    Raises:
        ValueError: a setting names no knob, or lacks one.
    """
    from matplotlib import pyplot

    for setting in shown:
        if set(setting) != set(values):
            raise ValueError(f"the setting {dict(setting)} is not of the knobs {list(values)}")
    figure, axes = pyplot.subplots(1, len(shown), figsize=size, squeeze=False)
    for place, setting in zip(axes[0], shown):
        draw(place, **setting)
    notebook.show(figure, alt)
    if predict.is_interactive():
        _show_sliders(draw, values, shown[0], size)


def _show_sliders(
    draw: Callable[..., None], values: Mapping[str, Sequence[Any]], first: Mapping[str, Any], size: tuple[float, float]
) -> None:
    import ipywidgets
    from IPython.display import display

    fields = {
        name: (ipywidgets.ToggleButtons if len(choices) == 2 else ipywidgets.SelectionSlider)(
            options=[(f"{value:g}" if isinstance(value, float) else str(value), value) for value in choices],
            value=first[name],
            description=name,
        )
        for name, choices in values.items()
    }
    picture = ipywidgets.Image(format="png")

    def draw_again(_: Any = None) -> None:
        picture.value = _as_png(draw, {name: field.value for name, field in fields.items()}, size)

    for field in fields.values():
        field.observe(draw_again, names="value")
    draw_again()
    box = ipywidgets.VBox([*fields.values(), picture])
    # A front end without widgets, and the saved notebook, have the pictures above.
    display(box._repr_mimebundle_() | {"text/plain": "Run this cell to turn the knobs."}, raw=True)


def _as_png(draw: Callable[..., None], setting: Mapping[str, Any], size: tuple[float, float]) -> bytes:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(size[0] * 0.6, size[1]))
    draw(axes, **setting)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    pyplot.close(figure)
    return drawn.getvalue()
