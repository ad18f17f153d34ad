"""What a sequence starts from: zeros, a learned state, noise, or the result of a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor, nn

from ..cells import Layer, layers
from ..errors import BadInput, NotRecurrent, StateMismatch
from ..state import State


class Learned(nn.Module):
    """An initial state with trainable parameters: one row, from which every sequence starts.

    Give its parameters to the optimizer like any others:

    >>> model = torch.nn.GRU(3, 4)
    >>> learned = Learned(model)
    >>> learned(2)
    State(h (1, 2, 4) float32; batch of 2)
    >>> optimizer = torch.optim.Adam([*model.parameters(), *learned.parameters()])
    """

    def __init__(self, model: nn.Module, *, std: float = 0.0) -> None:
        """Make one parameter for each part of each layer's state, with noise around the layer's own initial state."""
        super().__init__()
        self.rows = nn.ParameterDict()
        self._axes: dict[str, int] = {}
        for layer in needed_layers(model):
            with torch.no_grad():
                state = layer.initial(1)
            for part, axis in state.batch_axis.items():
                name = layer.part(part)
                row = state[part].detach().select(axis, 0).clone()
                self._axes[name] = axis
                if row.is_floating_point():
                    row = nn.Parameter(row + std * torch.randn_like(row) if std else row)
                self.rows[_key(name)] = row

    def forward(self, batch: int) -> State:
        """Return the initial state for `batch` rows, with gradient."""
        parts = {name: _rows(self.rows[_key(name)], axis, batch) for name, axis in self._axes.items()}
        return State(parts, self._axes)

    def extra_repr(self) -> str:
        """Return the names of the parts."""
        return ", ".join(self._axes)


class Noise:
    """An initial state drawn anew for every sequence: normal noise of standard deviation `std` around the layer's own.

    >>> Noise(0.1)
    Noise(std=0.1)
    """

    def __init__(self, std: float) -> None:
        """Set the standard deviation."""
        if not std >= 0:
            raise BadInput(f"the noise has a standard deviation of {std!r}, but it must be 0 or more.")
        self.std = std

    def __repr__(self) -> str:
        """Return the call that makes it."""
        return f"Noise(std={self.std})"

    def around(self, state: State) -> State:
        """Return `state` with noise added to its floating parts."""
        return state.map(lambda part: part + self.std * torch.randn_like(part) if part.is_floating_point() else part)


Init: TypeAlias = "str | Learned | Noise | Callable[[int], State]"


class Start:
    """Gives each layer its initial state; a state for the whole model is made once per call of the model."""

    def __init__(self, init: Init, found: list[Layer]) -> None:
        """Check the user's `init`."""
        if init != "zeros" and not callable(init) and not isinstance(init, Noise):
            raise BadInput(
                f"init is {init if isinstance(init, str) else type(init).__name__!r}, but it is 'zeros', an "
                f"hs.Learned(model), an hs.Noise(std), or a function from the number of rows to a State. "
                f"What the next call alone starts from is set: carry.state = (h, c)."
            )
        self._init = init
        self._layers = found
        self._made: dict[int, State] = {}  # rows -> the whole model's state

    @property
    def init(self) -> Init:
        """The user's `init`."""
        return self._init

    @property
    def is_zeros(self) -> bool:
        """Whether each layer starts by itself."""
        return self._init == "zeros"

    def forget(self) -> None:
        """Make the state anew at the next call: parameters may have changed, and a graph can be used only once."""
        self._made.clear()

    def of(self, layer: Layer, batch: int) -> State:
        """Return the initial state of one layer."""
        if isinstance(self._init, Noise):
            return self._init.around(layer.initial(batch))
        if not callable(self._init):
            return layer.initial(batch)
        if batch not in self._made:
            self._made[batch] = self._checked(self._init(batch), batch)
        return part_of(self._made[batch], layer, self._layers)

    def _checked(self, state: State, batch: int) -> State:
        if not isinstance(state, State):
            raise StateMismatch(
                f"init returned {type(state).__name__}, but a State is needed: State({{'h': h}}, batch_axis=1)."
            )
        if state.batch != batch:
            raise StateMismatch(f"init({batch}) returned a state of {state.batch} rows, but {batch} are needed.")
        return state


def part_of(state: State, layer: Layer, found: list[Layer]) -> State:
    """Return one layer's state from that of the whole model; in a model of one layer, the name may be left out."""
    prefix = f"{layer.name}." if layer.name else ""
    parts = {name.removeprefix(prefix): name for name in state if name.startswith(prefix)}
    if not parts and len(found) == 1:
        parts = {name: name for name in state}
    if not parts:
        raise StateMismatch(
            f"the state has the parts {', '.join(state)}, but none for the layer {layer.name!r}: "
            f"parts of the whole model are named {layer.part('h')!r} and so on."
        )
    return State(
        {own: state[name] for own, name in parts.items()}, {own: state.batch_axis[n] for own, n in parts.items()}
    )


def needed_layers(model: nn.Module) -> list[Layer]:
    """Return the recurrent layers that are found by type; raise if there are none."""
    found = layers(model)
    if not found:
        raise not_recurrent(model)
    return found


def not_recurrent(model: nn.Module) -> NotRecurrent:
    """Return the error for a model in which nothing recurs."""
    return NotRecurrent(
        f"{type(model).__name__} has no recurrent layer that is known: no nn.RNN, nn.LSTM or nn.GRU, none of "
        f"torch's cells, no module with forward(x, state) and initial_state(batch) or hidden_size, and nothing that "
        f"was seen to recur in a call. hs.register(Type) teaches a new kind; hs.layers(model, *inputs).explain() says "
        f"what was looked at."
    )


def _key(name: str) -> str:
    return name.replace(".", "/")  # parameters may not have dots in their names


def _rows(row: Tensor, axis: int, batch: int) -> Tensor:
    shape = list(row.shape)
    shape.insert(axis, batch)
    return row.unsqueeze(axis).expand(shape)
