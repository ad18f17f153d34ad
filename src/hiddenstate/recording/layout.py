"""Which axis of plain states is time, as far as their graph shows it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .._compiling import compiling
from ..errors import BadInput

# Names that torch gives to nodes of a graph. One that is called otherwise in another version shows nothing.
_KEEPS_AXES = {"Add", "Alias", "Cat", "Clone", "Div", "FusedDropout", "Gelu", "LeakyRelu", "Mul", "NativeDropout"}
_KEEPS_AXES |= {"NativeLayerNorm", "Relu", "Sigmoid", "Silu", "Slice", "Sub", "Tanh", "ToCopy"}
_KERNELS = frozenset(["CudnnRnn", "MiopenRnn", "MkldnnRnnLayer"])
_NODES = 16  # between the states and what made them
_LOOKED_AT = 256  # within one step of a loop


def refuse_time_first(h: Tensor, way_out: str = "h.transpose(0, 1)") -> None:
    """Refuse states of three axes whose graph shows that their steps lie on axis 0.

    It does where a layer with batch_first=False made them, or where a loop stacked its steps there. States without a
    graph show nothing, and are taken as (batch, time, unit).

    >>> refuse_time_first(torch.nn.GRU(3, 4, batch_first=True)(torch.randn(5, 2, 3))[0])
    >>> refuse_time_first(torch.nn.GRU(3, 4)(torch.randn(5, 2, 3))[0])
    Traceback (most recent call last):
    hiddenstate.errors.BadInput: these states (5, 2, 4) have time on axis 0, ...
    """
    if not compiling() and h.grad_fn is not None and h.dim() == 3 and _time_is_first(h):
        raise BadInput(
            f"these states {tuple(h.shape)} have time on axis 0, as a layer with batch_first=False returns them and "
            f"torch.stack(steps) makes them, but (batch, time, unit) is needed: {way_out}."
        )


def _time_is_first(h: Tensor) -> bool:
    """Say whether the graph shows that the steps lie on axis 0."""
    turned = False
    node: Any = h.grad_fn
    output = h.output_nr
    for _ in range(_NODES):
        name = "" if node is None else _name(node)
        if name == "Stack":
            return _axis(_saved(node, "dim")) == int(turned) and _follow_each_other(node.next_functions)
        if name in _KERNELS:
            # What oneDNN gives has time first in any case: its caller turns it.
            rows_first = False if name == "MkldnnRnnLayer" else _saved(node, "batch_first")
            return output == 0 and rows_first is turned
        if _swaps(node, name):
            turned = not turned
        elif name not in _KEEPS_AXES:
            return False
        # Pieces and sums have the axes of what stands first; a mask, or an input, has no graph and stands aside.
        node, output = next((one for one in node.next_functions if one[0] is not None), (None, 0))
    return False


def _swaps(node: Any, name: str) -> bool:
    """Say whether axes 0 and 1 change places."""
    if name == "Transpose":
        return {_axis(_saved(node, "dim0")), _axis(_saved(node, "dim1"))} == {0, 1}
    return name == "Permute" and [_axis(dim) for dim in _saved(node, "dims") or ()] == [1, 0, 2]


def _follow_each_other(pieces: Any) -> bool:
    """Say whether the last of some stacked tensors was made from the one before, as the steps of a loop are.

    The final states of layers lie on each other as well: between these is a whole layer.
    """
    if len(pieces) < 2 or None in (before := pieces[-2][0], last := pieces[-1][0]):
        return False
    waiting, seen = [last], {last}
    while waiting and len(seen) < _LOOKED_AT:
        node = waiting.pop(0)
        if _name(node) in _KERNELS or _name(node) == "Stack":
            continue
        inner = [one for one, _ in node.next_functions if one is not None and one not in seen]
        if before in inner:
            return True
        waiting.extend(inner)
        seen.update(inner)
    return False


def _saved(node: Any, name: str) -> Any:
    """Return what a node keeps of its call; None where this version of torch shows no such thing."""
    return getattr(node, f"_saved_{name}", None)


def _axis(saved: int | None) -> int | None:
    """Return an axis of three as a number from 0: a graph keeps negative ones as numbers close to 2⁶⁴."""
    return None if saved is None else (saved - 2**64 if saved >= 2**63 else saved) % 3


def _name(node: Any) -> str:
    """Return what a node undoes: `Stack` of StackBackward0."""
    return str(node.name()).partition("Backward")[0]
