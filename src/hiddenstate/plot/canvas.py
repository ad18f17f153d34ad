"""What all pictures share: an `ax` to draw into, colors that color-blind people can tell apart, tidy axes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..errors import MissingExtra

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette, told apart with every common kind of color blindness; black and yellow left out, since they
# vanish on dark and on light paper.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
DIVERGING = "RdBu_r"  # blue below zero, red above: safe without green
SEQUENTIAL = "cividis"  # made to look the same to all
TIME = "viridis"
MUTED = "#767676"  # the lightest gray that is still readable on white


def new_ax(ax: Axes | None, *, size: tuple[float, float] = (7.0, 4.0), depth: bool = False) -> Axes:
    """Return `ax`, or one in a new figure of that size."""
    if ax is not None:
        return ax
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise MissingExtra(
            "pictures are drawn with matplotlib, which is not installed: pip install 'hiddenstate[plot]'"
        ) from error
    figure = pyplot.figure(figsize=size, layout="constrained")
    return figure.add_subplot(projection="3d") if depth else figure.add_subplot()


def tidy(ax: Axes, *, title: str = "", x: str = "", y: str = "") -> None:
    """Label the axes and leave only the lines that carry something."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    if title:
        ax.set_title(plain(title), loc="left", fontsize="medium")


def color_bar(ax: Axes, drawn: Any, label: str) -> None:
    """Put a slim color bar beside `ax`."""
    figure = ax.get_figure()
    assert figure is not None
    deep = getattr(ax, "name", "") == "3d"  # whose labels stand where a bar would
    bar = figure.colorbar(drawn, ax=ax, pad=0.12 if deep else 0.02, fraction=0.05, aspect=30)
    bar.set_label(plain(label))
    bar.outline.set_visible(False)


def label_steps(set_ticks: Callable[..., Any], labels: list[str], *, most: int = 48) -> None:
    """Write `labels` under their steps; of many, every nth. Long ones are turned."""
    every = -(-len(labels) // most)
    turned = {"rotation": 90} if max(map(len, labels), default=0) > 2 else {}
    set_ticks(range(0, len(labels), every), [plain(label) for label in labels[::every]], fontsize="small", **turned)


def plain(text: str) -> str:
    """Return `text` so that matplotlib writes it as it is: a dollar begins no formula."""
    return text.replace("$", r"\$")
