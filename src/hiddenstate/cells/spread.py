"""Cells that take their state in several arguments: `forward(x, h, c) -> (h, c)`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..errors import NotRecurrent, StateMismatch
from ..state import State
from .first_states import call_initial_state, own_start, units_of
from .layer import Adapter, Spec
from .native import Native, flatten
from .returned import parted_of_several
from .signature import arguments, named_like_further, named_like_state
from .weights import weights_like


def is_spread(module: nn.Module, *, sized: bool = True) -> bool:
    """Say whether a module looks like a cell with several state arguments; with `sized`, it must also say its size."""
    taken = arguments(type(module))[1:]
    if len(taken) < 2 or (sized and units_of(module) is None):
        return False
    return named_like_state(taken[0]) and all(map(named_like_further, taken[1:]))


class GatheredCell(nn.Module):
    """Wraps such a cell to take its state in one argument: `forward(x, (h, c)) -> (output, (h, c))`."""

    def __init__(self, cell: nn.Module) -> None:
        """Take the cell, unchanged."""
        super().__init__()
        self.cell = cell
        self.train(cell.training)

    @property
    def hidden_size(self) -> int | None:
        """The units of each part, if known."""
        return units_of(self.cell)

    @property
    def input_size(self) -> int | None:
        """The number of input features, if the cell says so."""
        size = getattr(self.cell, "input_size", None)
        return size if isinstance(size, int) else None

    def initial_state(self, batch: int) -> tuple[Tensor, ...]:
        """Return the cell's own first state, or zeros."""
        return _initial(self.cell, batch)

    def forward(self, x: Tensor, state: tuple[Tensor, ...]) -> tuple[Any, tuple[Tensor, ...]]:
        """Return the cell's output and its next state."""
        return _split(self.cell, self.cell(x, *state))


class SpreadAdapter(Adapter):
    """The adapter of a cell that takes its state in several arguments."""

    kind = "cell"

    def spec(self, module: nn.Module) -> Spec:
        """Read the sizes from an initial state of one row."""
        with torch.no_grad():
            sizes = {name: part.numel() for name, part in self.initial(module, 1).items()}
        size = getattr(module, "input_size", None)
        return Spec(parts=tuple(sizes), sizes=sizes, input_size=size if isinstance(size, int) else None)

    def initial(self, module: nn.Module, batch: int) -> State:
        """Return the cell's own first state, or zeros."""
        return self.to_state(module, _initial(module, batch))

    def to_state(self, module: nn.Module, native: Native, *, batch: int | None = None) -> State:
        """Name the parts as the arguments are named; two parts are called h and c."""
        return State(dict(zip(parts_of(module), native, strict=True)))

    def to_native(self, module: nn.Module, state: State, *, batched: bool = True) -> Native:
        """Return the parts in the order of the arguments."""
        if set(state) != set(parts_of(module)):
            raise StateMismatch(
                f"the state has the parts {', '.join(state)}, but {type(module).__name__} needs "
                f"{', '.join(parts_of(module))}."
            )
        return tuple(state[name] for name in parts_of(module))

    def split(self, module: nn.Module, result: Any) -> tuple[Any, Native]:
        """Split the result by the number of tensors: those at the end are the next state."""
        return _split(module, result)

    def given(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Native | None:
        """Return the state parts among a call's arguments, or None."""
        named = dict(zip(arguments(type(module)), args, strict=False)) | kwargs
        parts = tuple(named.get(name) for name in arguments(type(module))[1:])
        return None if any(part is None for part in parts) else parts

    def give(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], native: Native
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the call's arguments with these parts among them."""
        first, *others = arguments(type(module))
        x = args[0] if args else kwargs[first]
        return (x, *native), {name: value for name, value in kwargs.items() if name != first and name not in others}


def parts_of(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the parts, in the order of the arguments."""
    taken = arguments(type(module))[1:]
    return ("h", "c") if len(taken) == 2 else taken


def _initial(module: nn.Module, batch: int) -> tuple[Tensor, ...]:
    if own_start(module) is not None:
        return tuple(flatten(call_initial_state(module, batch))[0].values())
    device, dtype = weights_like(module)
    return tuple(torch.zeros(batch, units_of(module) or 0, device=device, dtype=dtype) for _ in parts_of(module))


def _split(module: nn.Module, result: Any) -> tuple[Any, tuple[Tensor, ...]]:
    """Return output and next state from a result of such a cell, or raise."""
    found = parted_of_several(module, result, len(parts_of(module)))
    if found is not None:
        return found
    raise NotRecurrent(
        f"{type(module).__name__} takes its state as {', '.join(arguments(type(module))[1:])}, but returned neither as "
        f"many tensors nor an output and these: a cell returns its next state, or (output, next state)."
    )
