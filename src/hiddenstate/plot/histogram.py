"""The distribution of values: the activations of one layer, or of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..errors import BadInput
from ..measure import Statistics, statistics
from ..recording import Recording
from .canvas import COLORS, MUTED, STYLES, new_ax, plain, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS = 64  # more columns would show noise


def histogram(source: Any, ax: Axes | None = None, *, part: str = "h", log: bool = False) -> Axes:
    """Draw the distribution of the values of all units, one line for each track, and return the `ax`.

    Args:
        source: A recording, whose runs are taken together; a trajectory, states (batch, time, unit), or several runs of
            them; a result of `measure.statistics`; or a mapping of names to any of these.
        ax: Where to draw; by default in a new figure.
        part: `h`, `c`, another part of the state, a gate, or the gradient of a part, `grads.h`.
        log: Draw shares on a log scale, to see the tails.

    >>> hs.plot.histogram(torch.randn(4, 30, 8).tanh()).get_ylabel()
    'share of values'
    """
    several = _several(source, part)
    known = {name: one for name, one in several.items() if int(one.histogram.sum())}
    if not known:
        raise BadInput("there is no finite value to draw: hs.measure.statistics says where the first NaN or Inf is.")
    ax = new_ax(ax)
    from matplotlib.ticker import PercentFormatter

    wide = max(_width(one) for one in known.values())  # the same for all, since the shares depend on the width
    for number, (name, one) in enumerate(known.items()):
        counts, edges = _columns(one, wide)
        shares = (counts / counts.sum()).tolist()
        color = COLORS[number % len(COLORS)]
        if len(known) == 1:
            ax.stairs(shares, edges.tolist(), color=color, fill=True, alpha=0.35)
        label = plain(f"{name}: {one.near_zero:.0%} near zero") if name else ""
        ax.stairs(
            shares, edges.tolist(), color=color, linestyle=STYLES[number % len(STYLES)], linewidth=1.4, label=label
        )
    ax.axvline(0, color=MUTED, linewidth=0.6)
    if log:
        ax.set_yscale("log")
    else:
        ax.set_ylim(bottom=0)
        ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    tidy(ax, x=part, y="share of values", title=_title(known))
    if any(known):
        ax.legend(frameon=False, fontsize="small")
    return ax


def _several(source: Any, part: str) -> dict[str, Statistics]:
    if isinstance(source, Recording):
        return {track: statistics(source.runs(track), part=part) for track in source}
    if isinstance(source, Mapping):
        return {str(name): _measured(one, part) for name, one in source.items()}
    return {"": _measured(source, part)}


def _measured(source: Any, part: str) -> Statistics:
    return source if isinstance(source, Statistics) else statistics(source, part=part)


def _width(one: Statistics) -> float:
    """Return the width at which at most 64 columns show all values; a power of two, as the bins are."""
    if not bool(one.min.any()) and not bool(one.max.any()):  # all zero: the bins around zero are very narrow
        return one.small
    filled = one.histogram.nonzero().flatten()
    wide = 1
    while (int(filled[-1]) // wide) - (int(filled[0]) // wide) >= _COLUMNS:
        wide *= 2
    return wide * float(one.edges[1] - one.edges[0])


def _columns(one: Statistics, width: float) -> tuple[Tensor, Tensor]:
    """Return counts and edges in columns of this width, over the range that has values."""
    bins, edges = one.histogram, one.edges
    wide = round(width / float(edges[1] - edges[0]))
    if wide > len(bins) // 2:  # one column on each side of zero holds everything
        half = len(bins) // 2
        return bins.reshape(2, half).sum(1), edges.new_tensor([-width, 0.0, width])
    counts = bins.reshape(-1, wide).sum(1)
    filled = counts.nonzero().flatten()
    return counts[filled[0] : filled[-1] + 1], edges[::wide][filled[0] : filled[-1] + 2]


def _title(known: dict[str, Statistics]) -> str:
    bad = sum(one.nan + one.inf for one in known.values())
    said = f"{bad:,} NaN or Inf left out" if bad else ""
    if len(known) > 1:
        return said
    (one,) = known.values()
    line = f"{one.count:,} steps of {len(one.mean)} units, {one.near_zero:.1%} near zero (below {one.small:g})"
    return f"{line}; {said}" if said else line
