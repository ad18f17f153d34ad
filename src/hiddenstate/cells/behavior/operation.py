"""Operations and module calls as a trace records them, and sets of operations by their names."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .memory import Value
from .places import Scope, line_at

# Operations that give Python or numpy a number from a tensor's content.
ESCAPES = {"item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "__complex__", "__array__"}
ESCAPES |= {"equal", "allclose", "is_nonzero", "__contains__"}


class Op:
    """One operation."""

    __slots__ = ("args", "call", "cast", "func", "grad", "ins", "kwargs", "name", "offset", "outs", "reads", "scope")

    def __init__(self, func: Any, name: str, called: tuple[Any, Any], place: tuple[Scope, int, int]) -> None:
        """Note an operation with its arguments; `place` is its scope, instruction, and module call."""
        self.func: Callable[..., Any] = func
        self.name = name
        self.args: tuple[Any, ...] = called[0]
        self.kwargs: Mapping[str, Any] = called[1]
        self.scope, self.offset, self.call = place
        self.ins: list[Value] = []
        self.reads: list[tuple[Tensor, Value]] = []  # each operand with its value
        self.outs: list[Value] = []
        self.cast = _autocast() if torch._C._is_any_autocast_enabled() else ()
        self.grad = torch.is_grad_enabled()

    @property
    def escapes(self) -> bool:
        """Whether it passes a number to Python."""
        return self.name in ESCAPES

    @property
    def where(self) -> str:
        """File and line, in the user's code."""
        return line_at(self.scope, self.offset)


@dataclass(slots=True, eq=False, repr=False)
class ModuleCall:
    """One call of a module."""

    number: int
    module: nn.Module
    path: str
    parent: int
    start: int
    end: int = -1
    known: bool = False
    site: tuple[str, int] = ("", 0)  # file and line of the caller
    args: list[tuple[tuple[Any, ...], Value]] = field(default_factory=list)
    results: list[tuple[tuple[Any, ...], Value]] = field(default_factory=list)
    given: Any = None  # arguments and result as they were, to keep their nesting
    returned: Any = None


def _autocast() -> tuple[tuple[str, torch.dtype], ...]:
    """Return the kinds of device with autocast on, each with the dtype."""
    kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind))


def _named(names: str) -> set[str]:
    return set(names.split())


# Operations that only move numbers: views, copies, parts, and parts put together.
MOVES = _named(
    """
    __getitem__ unbind chunk split split_with_sizes tensor_split select narrow view reshape transpose permute t
    T mT H squeeze unsqueeze flatten unflatten expand expand_as repeat repeat_interleave tile contiguous clone
    detach detach_ to float double half bfloat16 type_as cpu cuda stack cat concat concatenate hstack vstack
    index_select gather alias copy_ __setitem__ data movedim swapaxes swapdims take_along_dim flip roll view_as
    reshape_as broadcast_to requires_grad_ ravel squeeze_ unsqueeze_ __iter__ module_call real imag view_as_real
    view_as_complex type
    """
)

# Operations by which a mask mixes two values; whether they did is checked on the numbers.
BLENDS = _named(
    """
    where mul add sub rsub lerp masked_fill masked_fill_ mul_ add_ sub_ addcmul masked_scatter masked_scatter_
    index_copy index_copy_ index_put index_put_ scatter scatter_ __iadd__ __imul__ __mul__ __add__ __rsub__
    __sub__ __radd__ __rmul__ multiply
    """
)

# Operations that collect sums, lists and extremes.
COLLECTS = _named(
    """
    add add_ __add__ __iadd__ __radd__ sub sub_ __sub__ __isub__ cat concat concatenate stack hstack vstack
    __setitem__ index_add index_add_ scatter_add scatter_add_ index_put index_put_ index_copy_ copy_ maximum
    minimum max min logaddexp logical_or logical_and __or__ __ior__ __and__ __iand__ bitwise_or bitwise_and
    scatter_ scatter alias masked_scatter masked_scatter_ baddbmm
    """
)

GROWS = {"cat", "concat", "concatenate", "hstack", "vstack", "stack", "pad", "_pad"}

# Operations that draw random numbers: a replay uses the numbers drawn.
DRAWS = _named(
    """
    rand randn randint rand_like randn_like randint_like randperm normal normal_ uniform_ bernoulli bernoulli_
    multinomial poisson exponential_ geometric_ cauchy_ log_normal_ random_ dropout dropout1d dropout2d
    dropout3d alpha_dropout feature_alpha_dropout dropout_ gumbel_softmax rrelu rrelu_ feature_dropout
    """
)

# Operations that draw random numbers only in some modes.
MAY_DRAW = {"multi_head_attention_forward", "scaled_dot_product_attention", "rnn_tanh", "rnn_relu", "lstm", "gru"}

# Operations that return uninitialized memory.
UNWRITTEN = {"empty", "empty_like", "new_empty", "empty_strided"}

# Operations that reveal nothing of a tensor's content.
PASSIVE = {"size", "dim", "stride", "is_floating_point", "numel", "type", "is_complex", "__len__", "ndimension"}
PASSIVE |= {"_set_grad_enabled", "get_default_dtype", "is_tensor", "storage_offset", "is_contiguous", "element_size"}
PASSIVE |= {"backward", "requires_grad_", "retain_grad", "register_hook", "is_inference", "has_names", "__hash__"}
PASSIVE |= {"__repr__", "__format__", "data_ptr", "untyped_storage", "get_device", "is_shared", "manual_seed"}
PASSIVE |= {"nelement"}

# Operations that take only the shape from their operand; then those that take it from their second one.
SHAPE_ONLY = {"new_zeros", "new_ones", "new_empty", "new_full", "zeros_like", "ones_like", "empty_like", "full_like"}
SHAPE_ONLY |= {"rand_like", "randn_like", "randint_like"}
SHAPE_OF = {"expand_as", "view_as", "reshape_as", "type_as"}

# Operations that move their first operand as the others say.
INDEXED = {"__getitem__", "index_select", "gather", "take_along_dim"}


def leaves(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    """Yield every tensor in a value with its place: indices, keys and fields."""
    if isinstance(value, Tensor):
        yield place, value
    elif isinstance(value, tuple | list):
        for index, inner in enumerate(value):
            if inner is not None and not isinstance(inner, int | float | str):
                yield from leaves(inner, (*place, index))
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from leaves(inner, (*place, key))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for each in dataclasses.fields(value):
            yield from leaves(getattr(value, each.name, None), (*place, each.name))
    elif isinstance(value, slice):
        yield from leaves((value.start, value.stop, value.step), place)
    elif hasattr(value, "__dict__") and type(value).__module__.split(".")[0] not in ("torch", "builtins", "numpy"):
        for key, inner in vars(value).items():
            if isinstance(inner, Tensor | tuple | list | dict):
                yield from leaves(inner, (*place, key))


def operands(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors among an operation's arguments, in order."""
    found: list[Tensor] = []
    for arg in args:
        if isinstance(arg, Tensor):
            found.append(arg)
        elif isinstance(arg, tuple | list | dict | slice):
            found += [tensor for _, tensor in leaves(arg)]
    for arg in kwargs.values():
        if isinstance(arg, Tensor):
            found.append(arg)
        elif isinstance(arg, tuple | list | dict):
            found += [tensor for _, tensor in leaves(arg)]
    return found


def replaced(value: Any, with_: Callable[[Tensor], Any]) -> Any:
    """Return an operation's argument with each tensor in it replaced."""
    if isinstance(value, Tensor):
        return with_(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(replaced(inner, with_) for inner in value))
    if isinstance(value, tuple | list):
        return type(value)(replaced(inner, with_) for inner in value)
    if isinstance(value, dict):
        return {key: replaced(inner, with_) for key, inner in value.items()}
    if isinstance(value, slice):
        return slice(*(replaced(inner, with_) for inner in (value.start, value.stop, value.step)))
    return value


# In-place operations whose result does not depend on the old content.
OVERWRITES = {
    "copy_",
    "zero_",
    "fill_",
    "normal_",
    "uniform_",
    "random_",
    "bernoulli_",
    "exponential_",
    "set_",
    "__set__",
}


_WRITERS = {"__setitem__", "__set__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__iand__"}
_WRITERS |= {"__ior__", "__ixor__", "__imod__", "__ifloordiv__"}


def in_place(name: str) -> bool:
    """Say whether an operation writes its first operand, judging by its name: `add_`, `__iadd__`, `__setitem__`."""
    return name[-1:] == "_" and (name[-2:] != "__" or name in _WRITERS)


def written_by(
    name: str, given: tuple[list[Tensor], list[int]], moved: list[Tensor], kwargs: Mapping[str, Any]
) -> list[Tensor]:
    """Return the operands that an operation wrote, one for each storage, since views change their version too."""
    out, (tensors, versions) = kwargs.get("out"), given
    if isinstance(out, Tensor):
        return [out]
    if tensors and (name == "__set__" or (versions[0] == -1 and in_place(name))):
        return [tensors[0]]  # inference tensors do not count writes: judge by the name
    found: dict[int, Tensor] = {}
    for tensor in moved:
        key = tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)
        found.setdefault(key, tensor)
    return list(found.values())


def region_of(op: Op, target: Tensor) -> Tensor:
    """Return the part of `target` that an operation wrote, if known: all of it, or a basic index."""
    if op.name != "__setitem__" or id(op.args[0]) != id(target):
        return target
    index = op.args[1] if isinstance(op.args[1], tuple) else (op.args[1],)
    if not all(i is None or i is Ellipsis or (isinstance(i, int | slice) and not isinstance(i, bool)) for i in index):
        return target
    region: Tensor = target.detach()[op.args[1]]
    rows = isinstance(index[0], slice) and index[0].start in (None, 0) and index[0].stop is not None
    if not any(isinstance(i, int) for i in index) and (rows or 4 * region.numel() >= target.numel()):
        return target  # if a large part is written, treat the whole tensor as written
    return region
