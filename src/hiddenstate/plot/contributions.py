"""The sizes of the input's and the memory's contribution at each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import BadInput
from .canvas import COLORS, STYLES, label_steps, new_ax, tidy
from .picture_data import of_kind, readable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ..measure import Contributions


def contributions(
    result: Contributions,
    ax: Axes | None = None,
    *,
    row: int = 0,
    gate: str | None = None,
    tokens: Sequence[str] | None = None,
) -> Axes:
    """Draw how much input and memory add to each step of one row, and return the `ax`.

    Args:
        result: What `measure.contributions` returned.
        ax: Where to draw; by default in a new figure.
        row: Which sequence of the batch.
        gate: One gate of an LSTM or GRU, instead of all together.
        tokens: One label for each step of that row.

    >>> found = hs.measure.contributions(torch.nn.GRU(3, 8, batch_first=True), torch.randn(2, 20, 3))
    >>> [line.get_label() for line in hs.plot.contributions(found, gate="update").lines]
    ['input', 'memory']
    """
    of_kind(result, "Contributions", "measure.contributions")
    if gate is not None and gate not in result.gates:
        raise BadInput(f"there is no gate {gate!r}: {', '.join(result.gates) or 'this layer has none'}.")
    found = result if gate is None else result.gates[gate]
    if not -len(found.input) <= row < len(found.input):
        raise BadInput(f"row {row} was asked for, but there are {len(found.input)} rows.")
    real = ~found.input[row].isnan().cpu()  # without its padding
    names = None if tokens is None else readable(tokens, int(real.sum()))

    ax = new_ax(ax, size=(8.0, 3.4))
    for number, (name, sizes) in enumerate((("input", found.input), ("memory", found.memory))):
        values = sizes[row].detach().cpu()[real].numpy()
        mark = "o" if len(values) <= 40 else ""
        ax.plot(values, color=COLORS[number], linestyle=STYLES[number], marker=mark, markersize=3.5, label=name)
    ax.set_ylim(bottom=0)
    share = float(found.share[row][real.to(found.share.device)].nanmean())
    what = "size in front of the activation" if found.by == "weights" else "move of the state without it"
    tidy(ax, x="step", y=what, title=f"{f'{gate}: ' if gate else ''}memory has {share:.0%}")
    ax.legend(frameon=False, fontsize="small")
    if names:
        label_steps(ax.set_xticks, names)
    return ax
