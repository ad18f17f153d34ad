"""A map of final states, each with its name: which sequences end in similar states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import BadInput
from .canvas import COLORS, MARKERS, MUTED, new_ax, plain, short, tidy
from .picture_data import of_kind, picked

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ..measure import Comparison

_TEXTS = 60  # with more rows, names would cover the points
_GROUPS = 12  # colors and markers that can be told apart
_DOTS = 20_000  # points to draw at most
_LONGEST = 44  # letters of a name
_FONT = 8.0  # points
_COVERED = 0.1  # the share of a name that may be covered, since its size is an estimate


def compare(result: Comparison, ax: Axes | None = None, *, texts: Sequence[str] | None = None) -> Axes:
    """Draw the map of final states, each with its text beside it, and return the `ax`.

    Colors show the clusters that `measure.compare(clusters=)` found, or else labels that several rows share. Beside the
    points are `texts`, or labels if each row has its own. Texts without room are left out, which the title says; with
    more than 60 rows there are only colors.

    Args:
        result: What `measure.compare` returned, with 2 or 3 components, by PCA or t-SNE.
        ax: Where to draw, 3-D for 3 components; by default in a new figure.
        texts: What to write beside each row, if its label is a class.

    >>> found = hs.measure.compare(torch.randn(3, 7, 4), labels=["to be", "or not", "to be?"])
    >>> [text.get_text() for text in hs.plot.compare(found).texts]
    ['to be', 'or not', 'to be?']
    """
    of_kind(result, "Comparison", "measure.compare")
    rows, components = result.coordinates.shape
    if components not in (2, 3):
        raise BadInput(f"a map is drawn in 2 or 3 dimensions, but this one has {components}: components=2.")
    if texts is not None and len(texts) != rows:
        raise BadInput(f"there are {len(texts)} texts, but {rows} rows: one for each row is needed.")
    places = result.coordinates.detach().to("cpu", torch.float32)
    groups, legend = _groups(result)
    if texts is None and result.labels is not None and (result.clusters is not None or groups is None):
        texts = [str(label) for label in result.labels]

    ax = new_ax(ax, size=(7.0, 5.5), depth=components == 3)
    if (getattr(ax, "name", "") == "3d") != (components == 3):
        raise BadInput(f"{components} components need a {'3-D' if components == 3 else 'plain'} ax, which this is not.")
    notes = [_draw(ax, places, groups, legend), _says(result)]
    axis = "t-SNE" if result.method == "tsne" else "PC"
    held = ["" if share != share else f" ({share:.0%} of variance)" for share in result.explained.tolist()]
    tidy(ax, x=f"{axis} 1{held[0]}", y=f"{axis} 2{held[1]}")
    if components == 3:
        ax.set_zlabel(f"{axis} 3{held[2]}")  # type: ignore[attr-defined]
    ax.margins(0.12)
    if texts is not None and rows <= _TEXTS:
        left_out = _write(ax, places, [_short(str(text)) for text in texts])
        notes.append(f"no room for {left_out} of {rows} names" if left_out else "")
    elif texts is not None:
        notes.append(f"names of {rows:,} rows left out")
    ax.set_title("; ".join(note for note in notes if note), loc="left", fontsize="medium")
    return ax


def _groups(result: Comparison) -> tuple[Tensor | None, list[str]]:
    """Return the group of each row and the groups' names: clusters, or shared labels; None if there are none."""
    if result.clusters is not None:
        count = int(result.clusters.max()) + 1
        return result.clusters.cpu(), [f"cluster {number}" for number in range(count)]
    if result.labels is None:
        return None, []
    names = list(dict.fromkeys(str(label) for label in result.labels))
    if len(names) == len(result.labels) or len(names) > _GROUPS:
        return None, []
    return torch.tensor([names.index(str(label)) for label in result.labels]), names


def _draw(ax: Any, places: Tensor, groups: Tensor | None, names: list[str]) -> str:
    """Draw the points, each group in its color and shape; return a note on points that were left out."""
    kept = picked(places, _DOTS, what="rows")
    look = {"s": 30, "linewidths": 0.4, "edgecolors": "white", "alpha": 1.0 if len(kept.index) <= 500 else 0.5}
    if groups is None:
        ax.scatter(*kept.values.T.numpy(), color=COLORS[0], **look)
        return kept.note
    member = groups[kept.index]
    for number, name in enumerate(names):
        shown = kept.values[member == number]
        color, marker = COLORS[number % len(COLORS)], MARKERS[number % len(MARKERS)]
        label = plain(f"{_short(name)} ({int((groups == number).sum())})")
        ax.scatter(*shown.T.numpy(), color=color, marker=marker, label=label, **look)
    ax.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    return kept.note


def _says(result: Comparison) -> str:
    apart = "" if bool(result.distances.any()) else "all states are the same"
    own = "" if result.agreement is None or apart else f"{result.agreement:.0%} lie next to their own label"
    near = "in t-SNE only neighborhoods count, not distances" if result.method == "tsne" else ""
    return "; ".join(said for said in (apart, own, near) if said)


def _short(text: str) -> str:
    return short(" ".join(text.split()), _LONGEST)


def _write(ax: Any, places: Tensor, texts: list[str]) -> int:
    """Write each text beside its point if it covers no other; return how many had no room."""
    if places.shape[1] == 3:
        for place, text in zip(places.tolist(), texts, strict=True):
            ax.text(*place, plain(f"  {text}"), fontsize=_FONT, va="center")
        return 0
    ax.autoscale_view()
    figure = ax.get_figure().figure  # the outermost one, if the ax is in a subfigure
    if figure.get_layout_engine() is not None:
        figure.get_layout_engine().execute(figure)  # moves the axes to their final place, beside a legend
    scale, left_out = 72.0 / figure.dpi, 0
    points = [tuple(scale * value for value in at) for at in ax.transData.transform(places.numpy()).tolist()]
    taken = [(x - 3, y - 3, x + 3, y + 3) for x, y in points]  # the points themselves
    left, right = (scale * edge for edge in (ax.bbox.x0, ax.bbox.x1))
    for place, (x, y), text in zip(places.tolist(), points, texts, strict=True):
        wide, tall = 0.56 * _FONT * len(text), 1.15 * _FONT
        options = [(dx, dy) for dy in (0, 10, -10, 20, -20, 30, -30) for dx in (6, -6 - wide)]
        boxes = [(x + dx, y + dy - tall / 2, x + dx + wide, y + dy + tall / 2) for dx, dy in options]
        cost = [
            sum(_overlap(box, other) for other in taken)
            + wide * tall * (box[0] < left or box[2] > right)
            + abs(dy) * 0.5
            for box, (_, dy) in zip(boxes, options, strict=True)
        ]
        best = cost.index(min(cost))
        if sum(_overlap(boxes[best], other) for other in taken) > _COVERED * wide * tall:
            left_out += 1
            continue
        taken.append(boxes[best])
        dx, dy = options[best]
        side = "left" if dx > 0 else "right"
        line = {"arrowstyle": "-", "color": MUTED, "linewidth": 0.5} if dy else None
        note = ax.annotate(plain(text), place, xytext=(6 if dx > 0 else -6, dy), textcoords="offset points",
                           fontsize=_FONT, ha=side, va="center", arrowprops=line)  # fmt: skip
        note.set_in_layout(False)  # so that long names do not move the axes
    return left_out


def _overlap(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    wide = min(one[2], other[2]) - max(one[0], other[0])
    tall = min(one[3], other[3]) - max(one[1], other[1])
    return wide * tall if wide > 0 and tall > 0 else 0.0
