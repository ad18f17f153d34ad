"""Helpers for all pictures: an `ax` to draw into, colors that color-blind people can tell apart, tidy axes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..errors import MissingExtra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

# Okabe and Ito's palette, which can be told apart with every common kind of color blindness. Black and yellow are left
# out, since they vanish on dark and on light paper.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
STYLES = ("-", "--", "-.", ":")
MARKERS = ("o", "^", "s", "D", "v", "P", "X")
DIVERGING = "RdBu_r"  # blue below zero, red above: safe without green
SEQUENTIAL = "cividis"  # designed to look the same with and without color blindness
TIME = "viridis"
_COUNTED = ("step", "unit", "row", "lag", "exponent", "head")  # the first word of labels of axes with whole numbers
MUTED = "#767676"  # the lightest gray that is still readable on white


def new_ax(ax: Axes | None, *, size: tuple[float, float] = (7.0, 4.0), depth: bool = False) -> Axes:
    """Return `ax`, or one in a new figure of this size."""
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
    """Label the axes, and hide the lines that carry no information."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    for axis, label in ((ax.xaxis, x), (ax.yaxis, y)):
        count_whole(axis, label)
    if title:
        ax.set_title(plain(title), loc="left", fontsize="medium")


def count_whole(axis: Axis, label: str) -> None:
    """Put ticks at whole numbers only, if the axis counts things: there is no step 2.5."""
    if label.split(" ", 1)[0].rstrip(":,") in _COUNTED and axis.get_scale() == "linear":
        from matplotlib.ticker import MaxNLocator

        axis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))


def color_bar(ax: Axes, drawn: Any, label: str) -> None:
    """Put a slim color bar beside `ax`."""
    figure = ax.get_figure()
    assert figure is not None
    deep = getattr(ax, "name", "") == "3d"  # its labels stand where a bar would
    bar = figure.colorbar(drawn, ax=ax, pad=0.12 if deep else 0.02, fraction=0.05, aspect=30)
    bar.set_label(plain(label))
    count_whole(bar.ax.yaxis, label)
    bar.outline.set_visible(False)


def label_steps(set_ticks: Callable[..., Any], labels: list[str], *, most: int = 48, room: int = 60) -> None:
    """Write `labels` under their steps, or every nth of many. If they need more `room` in letters, turn them."""
    every = -(-len(labels) // most)
    longest = min(24, max(map(len, labels), default=0))
    turned = {"rotation": 90} if longest > 2 and (longest + 1) * len(labels[::every]) > room else {}
    texts = [plain(short(label, 24)) for label in labels[::every]]
    set_ticks(range(0, len(labels), every), texts, fontsize="small", **turned)


def short(text: str, most: int) -> str:
    """Return at most `most` letters of a text, so that it leaves room for the picture."""
    return text if len(text) <= most else text[: most - 1].rstrip() + "…"


def plain(text: str) -> str:
    """Return `text` escaped for matplotlib, which would otherwise read a formula between dollar signs."""
    return text.replace("$", r"\$")
