"""Spectra of the dynamics: eigenvalues around the unit circle, or Lyapunov exponents around zero."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import BadInput
from .canvas import COLORS, MUTED, new_ax, tidy
from .picture_data import picked

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ..measure import Lyapunov

_DOTS = 20_000
_MATRICES = 64  # the eigenvalues of more matrices would add ink, but no information


def spectrum(result: Any, ax: Axes | None = None) -> Axes:
    """Draw eigenvalues around the unit circle, or Lyapunov exponents around zero, and return the `ax`.

    Args:
        result: What `measure.jacobians`, `measure.fixed_points` or `measure.lyapunov` returned, or complex eigenvalues.
        ax: Where to draw; by default in a new figure.

    >>> hs.plot.spectrum(torch.linalg.eigvals(torch.randn(20, 20) / 20**0.5)).get_xlabel()
    'real part'
    """
    from ..measure import Lyapunov

    if isinstance(result, Lyapunov):
        return _exponents(result.exponents.detach().double().cpu(), result, ax)
    values, note = eigenvalues(result)
    return _circle(values, note, ax)


def eigenvalues(result: Any) -> tuple[Tensor, str]:
    """Return the eigenvalues in a result, (n,) complex, with a note if some are left out."""
    from ..measure import FixedPoints, Jacobians

    note = ""
    if isinstance(result, Jacobians):
        # Not result.eigenvalues: those of all rows and steps may take minutes, and a picture needs only some.
        kept = picked(result.values.detach()[result.valid], _MATRICES, what="steps")
        found: Any = torch.linalg.eigvals(kept.values.float().cpu())
        note = kept.note
    else:
        found = result.eigenvalues if isinstance(result, FixedPoints) else result
    if not isinstance(found, Tensor):
        raise BadInput(
            f"drawn is a result of measure.jacobians, lyapunov or fixed_points, or a tensor of eigenvalues, "
            f"but this is {type(result).__name__}."
        )
    flat = found.detach().cpu().flatten()
    flat = flat if flat.is_complex() else flat.to(torch.complex64)
    flat = flat[flat.isfinite()]
    if len(flat) > _DOTS:
        kept = picked(flat, _DOTS, what="eigenvalues")
        flat, note = kept.values, "; ".join(text for text in (note, kept.note) if text)
    return flat, note


def _circle(values: Tensor, note: str, ax: Axes | None) -> Axes:
    ax = new_ax(ax, size=(5.0, 5.0))
    turn = torch.linspace(0, 2 * torch.pi, 361)
    ax.plot(turn.cos().numpy(), turn.sin().numpy(), color=MUTED, linewidth=1)
    outside = values.abs() > 1
    alpha = 1.0 if len(values) <= 200 else 0.35
    for mask, color, marker in ((~outside, COLORS[0], "o"), (outside, COLORS[1], "^")):
        x, y = values[mask].real.numpy(), values[mask].imag.numpy()
        if len(x):
            ax.scatter(x, y, s=18, color=color, marker=marker, alpha=alpha, linewidths=0)
    ax.set_aspect("equal")
    radius = float(values.abs().max()) if len(values) else 0.0
    verdict = f"largest modulus {radius:.3g}"
    if bool(outside.any()):
        verdict += f"; {int(outside.sum()):,} of {len(values):,} outside (▲)"
    tidy(ax, x="real part", y="imaginary part", title=f"{verdict}; {note}" if note else verdict)
    return ax


def _exponents(values: Tensor, result: Lyapunov, ax: Axes | None) -> Axes:
    ax = new_ax(ax)
    places = torch.arange(1, len(values) + 1).numpy()
    up = values > 0
    ax.axhline(0, color=MUTED, linewidth=1)
    if len(values) <= 64:
        ax.vlines(places, 0, values.numpy(), color=[COLORS[1] if sign else COLORS[0] for sign in up.tolist()])
    for mask, color, marker in ((~up, COLORS[0], "o"), (up, COLORS[1], "^")):
        if bool(mask.any()):
            ax.plot(places[mask.numpy()], values[mask].numpy(), marker, color=color, markersize=4)
    said = f"largest exponent {float(values[0]):.3g}" if len(values) else "no exponents"
    said += f"; dimension {result.dimension:.3g}" if math.isfinite(result.dimension) else ""
    tidy(ax, x="exponent", y="growth per step (natural log)", title=said)
    return ax
