"""The weight of a whole sequence: log-ratios that add up token by token, and what is left of a batch."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from failurelab_course.notebook import display

LENGTHS = [4, 8, 16, 32, 64, 128, 256]
MIDDLE = "#0072B2"


def walks(axes: Any, log_ratios: torch.Tensor, title: str) -> None:
    """Draw the sum of each completion's log-ratios, token by token, in the band that the derivation gives.

    Args:
        axes: matplotlib's.
        log_ratios: of policy and engine, (completions, tokens), in nats.
        title: such as the engine's format.
    """
    sums = log_ratios.cumsum(-1)  # (completions, tokens)
    places = torch.arange(1, sums.shape[1] + 1)
    variance = places * log_ratios.square().mean()
    middle, wide = -variance / 2, 2 * variance.sqrt()
    axes.plot(places, sums.T, color="0.55", linewidth=0.6, linestyle="-")
    axes.plot(places, middle, color=MIDDLE, linestyle="-", label="−Tσ²/2")
    axes.plot(places, middle + wide, color=MIDDLE, linestyle="--", label="−Tσ²/2 ± 2σ√T")
    axes.plot(places, middle - wide, color=MIDDLE, linestyle="--")
    axes.set(xlabel="tokens T", ylabel="log of the weight", title=title, ylim=(-12, 8))
    axes.legend(loc="lower left", fontsize=9)


def shares(axes: Any, ratios: Mapping[str, torch.Tensor], size: Callable[[torch.Tensor], float]) -> None:
    """Draw which share of a batch its weights leave, by length: measured as marks, and the derived curve.

    Args:
        axes: matplotlib's.
        ratios: by engine, log-ratios (completions, tokens).
        size: gives the effective size of a batch.
    """
    for place, (name, log_ratios) in enumerate(ratios.items()):
        color, mark = f"C{place}", "os^D"[place]
        places = torch.arange(1, LENGTHS[-1] + 1)
        axes.plot(places, (-log_ratios.square().mean() * places).exp(), color=color, linestyle="-", linewidth=1.5)
        values = [size(log_ratios[:, :tokens]) / len(log_ratios) for tokens in LENGTHS]
        axes.plot(LENGTHS, values, mark, color=color, linestyle="none", label=name)
    axes.plot([], [], color="0.3", linestyle="-", linewidth=1.5, label="exp(−Tσ²)")
    axes.set(xlabel="tokens T", ylabel="share of the batch", ylim=(0, 1.05), title="what is left")
    axes.legend(loc=(0.42, 0.42), fontsize=9)


def show(ratios: Mapping[str, torch.Tensor], size: Callable[[torch.Tensor], float], alt: str) -> None:
    """Show the walks of the last engine, and the shares of all."""
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4))
    walks(left, list(ratios.values())[-1], "log-ratios, added up")
    shares(right, ratios, size)
    display.show(figure, alt)
