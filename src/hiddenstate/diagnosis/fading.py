"""How fast a gradient fades on its way back through time."""

from torch import Tensor

FADING = 0.2  # per step: below what a fresh network of any kind does


def per_step(sizes: Tensor) -> float:
    """Return the factor of one step in `sizes (time,)`, from the earliest step that float precision can still hold."""
    last = float(sizes[-1])
    held = (sizes > 1e-30).nonzero().flatten()
    begin = int(held[0]) if len(held) else len(sizes) - 1
    steps = len(sizes) - 1 - begin
    return (float(sizes[begin]) / last) ** (1 / steps) if steps > 0 and last > 0 else 0.0
