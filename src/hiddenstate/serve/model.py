"""A model as the engine calls it: pieces of many sessions in, their outputs and new states out."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from ..carry import Carry
from ..cells import layers, unwrap
from ..errors import BadInput, CarryWarning, ModelFailed, NotServable
from ..state import Format, State
from .fingerprint import fingerprint
from .inputs import Output
from .laws import check_rows, check_split_law, lengths_may_differ
from .trial import find_layout, output_of
from .wire import named_tensors, to_raw


class Served:
    """An unmodified model in eval mode, with its states handed in and out through a Carry.

    It refuses a model of which a session fed in pieces would not equal one call, or whose rows influence each other.
    """

    def __init__(self, model: nn.Module, *, example: Tensor | None = None, init: Any = "zeros") -> None:
        """Learn the model's layout, hold it to the laws, and attach to it."""
        self.model = unwrap(model)
        self._call = model
        self._layers = layers(model)
        if not self._layers:
            raise NotServable(f"{type(self.model).__name__} has no recurrent layer, so there is no state to keep.")
        self.layout = find_layout(self.model, example)
        check_split_law(self.model, self.layout)
        self.fingerprint = fingerprint(model)
        # Torch's own layers leave the state that they are given alone, and give back another.
        self.tidy = all(type(layer.module) in (nn.RNN, nn.LSTM, nn.GRU) for layer in self._layers)
        self._names = {layer.name: {part: layer.part(part) for part in layer.spec.parts} for layer in self._layers}
        # The parts one of which holds a NaN if any does: of these layers, a NaN in the cell is one in the output too.
        names = [(part, name) for parts in self._names.values() for part, name in parts.items()]
        self.telling = frozenset(name for part, name in names if part == "h" or not self.tidy)
        self._modes = [(module, module.training) for module in self.model.modules()]
        with warnings.catch_warnings():
            warnings.simplefilter("error", CarryWarning)
            try:
                self._carry = Carry(model, init=init)
                self.model.eval()
                self.format = Format(check_rows(self))
                self.ragged = lengths_may_differ(self)
            except BaseException as error:
                self.close()
                if isinstance(error, CarryWarning):
                    raise NotServable(f"{type(self.model).__name__} cannot be served: {error}") from error
                raise

    def close(self) -> None:
        """Give the model back as it was: no hook, every module in its own mode."""
        if hasattr(self, "_carry"):
            self._carry.close()
        for module, training in self._modes:
            module.training = training

    def read(self, x: Any) -> tuple[Tensor, bool]:
        """Return a piece `(steps, ...)` and whether it was given as one bare step."""
        if not isinstance(x, Tensor):
            try:
                x = torch.as_tensor(x)
            except (TypeError, ValueError, RuntimeError, OverflowError) as error:
                raise BadInput(f"x is {type(x).__name__} and cannot be made a tensor: {error}") from None
        shape = self.layout.step_shape
        alone = x.shape == shape
        if not alone and (x.dim() != len(shape) + 1 or x.shape[1:] != shape or not len(x)):
            raise BadInput(
                f"x has shape {tuple(x.shape)}, but one step of this model has {shape}, and a piece has steps in front "
                f"of that, one or more. A session is one row: there is no batch axis."
            )
        x = self._cast(x)
        return (x.unsqueeze(0) if alone else x), alone

    def read_rows(self, xs: Tensor) -> tuple[Tensor, bool]:
        """Return pieces `(row, steps, ...)` of one row or more, and whether they were given as bare steps."""
        shape = self.layout.step_shape
        alone = xs.shape[1:] == shape
        if not alone and (xs.dim() != len(shape) + 2 or xs.shape[2:] != shape or not xs.shape[1]):
            self.read(xs[0])  # says what is wrong
        xs = self._cast(xs)
        return (xs.unsqueeze(1) if alone else xs), alone

    def _cast(self, x: Tensor) -> Tensor:
        wanted = self.layout.dtype
        if x.dtype == wanted:
            return x.detach()
        if x.is_complex() or (x.is_floating_point() and not wanted.is_floating_point):
            raise BadInput(f"x is {x.dtype}, but this model takes {wanted}, and a cast would lose what is in it.")
        return x.detach().to(wanted)

    def run(
        self, x: Tensor, state: State | None, steps: Sequence[int] | None = None
    ) -> tuple[list[Tensor | None], State]:
        """Return the outputs, each `(row, step, ...)` or `(row, ...)`, and each row's state after its own last step.

        `x` is `(row, step, ...)`; where `steps` are told for each row, outputs beyond a row's own mean nothing. Without
        a `state` all rows start anew.
        """
        x = x.to(self.layout.device)
        lengths = None if steps is None else torch.tensor(steps)
        with torch.no_grad():
            if self.layout.steps_axis is None:
                return self._stepwise(x, torch.full((len(x),), x.shape[1]) if lengths is None else lengths, state)
            return self._whole(x, lengths, state)

    def has_steps(self, place: int) -> bool:
        """Say whether the output at `place` has one entry for each step."""
        leaf = self.layout.leaves[place]
        return self.layout.steps_axis is None or (leaf is not None and leaf.steps is not None)

    @property
    def every_step(self) -> bool:
        """Whether all outputs have one entry for each step, so that several pieces may be run as one."""
        return all(self.has_steps(place) for place, leaf in enumerate(self.layout.leaves) if leaf is not None)

    def initial(self) -> State:
        """Return the state of one session that starts anew, as far as it shows from outside."""
        with torch.no_grad():
            return self._join({}, 1)

    def output(self, made: Output, device: torch.device) -> Any:
        """Return one row's output, in tensors of its own, nested as the model nests it."""
        return self.rebuild([None if leaf is None else _own(leaf[made.row], device) for leaf in made.leaves])

    def raw(self, made: Output) -> bytes | None:
        """Return the bare bytes of one row's output, None where it is not one tensor."""
        leaf = made.leaves[0]
        if leaf is None or not self.layout.tree.is_leaf():
            return None
        return to_raw(leaf[made.row]) if made.blobs is None else made.blobs.bare()[made.row]

    def rebuild(self, leaves: Sequence[Tensor | None]) -> Any:
        """Return an output nested as the model nests it."""
        tree = self.layout.tree
        return leaves[0] if tree.is_leaf() else _pytree.tree_unflatten(list(leaves), tree)

    def described(self) -> list[dict[str, Any]]:
        """Return name, dtype and shape of each tensor that a piece is answered with; -1 stands for its steps."""
        stand_ins = [None if leaf is None else torch.empty(0) for leaf in self.layout.leaves]
        names = {id(tensor): name for name, tensor in named_tensors(self.rebuild(stand_ins)).items()}
        return [
            {
                "name": names[id(stand_in)],
                "dtype": str(leaf.dtype).removeprefix("torch."),
                "shape": [*([-1] if self.has_steps(place) else []), *leaf.shape],
            }
            for place, (leaf, stand_in) in enumerate(zip(self.layout.leaves, stand_ins, strict=True))
            if leaf is not None
        ]

    def _whole(self, x: Tensor, lengths: Tensor | None, state: State | None) -> tuple[list[Tensor | None], State]:
        self._carry.exchange({} if state is None else self._part(state))
        if lengths is not None:
            self._carry.mark(lengths=lengths)
        output = output_of(self._call, self._layers, self.layout.input(x))
        after = self._carry.exchange({})
        return self._ordered(output, (x.shape[0], x.shape[1])), self._join(after, x.shape[0])

    def _stepwise(self, x: Tensor, ends: Tensor, state: State | None) -> tuple[list[Tensor | None], State]:
        rows, outputs = len(ends), []
        for step in range(x.shape[1]):
            going = (ends > step).nonzero()[:, 0]
            before = state if state is None or len(going) == rows else state.select(going)
            leaves, after = self._whole(x[going, step : step + 1], None, before)
            state = after if state is None or len(going) == rows else state.put(going, after)
            outputs.append([_spread(leaf, going, rows) for leaf in leaves])
        assert state is not None
        columns = [[leaf for leaf in column if leaf is not None] for column in zip(*outputs, strict=True)]
        return [torch.stack(column, dim=1) if column else None for column in columns], state

    def _ordered(self, output: Any, sizes: tuple[int, int]) -> list[Tensor | None]:
        layout = self.layout
        if type(output) is Tensor and layout.tree.is_leaf():
            leaves, tree = [output], layout.tree
        else:
            leaves, tree = _pytree.tree_flatten(output)
        if tree is not layout.tree and tree != layout.tree and str(tree) != str(layout.tree):
            raise ModelFailed(
                "the model's output is nested otherwise than it was at start, so it cannot be told apart."
            )
        return [
            None if how is None else how.ordered(leaf, sizes, rows_first=layout.rows_axis == 0)
            for how, leaf in zip(layout.leaves, leaves, strict=True)
        ]

    def _part(self, state: State) -> dict[str, State]:
        axes = state.batch_axis
        return {
            layer: State({part: state[n] for part, n in names.items()}, {part: axes[n] for part, n in names.items()})
            for layer, names in self._names.items()
        }

    def _join(self, states: Mapping[str, State], rows: int) -> State:
        parts, axes = {}, {}
        for layer in self._layers:
            # A layer that no call has used yet is where it would start.
            own = states.get(layer.name) or layer.initial(rows).detach()
            for part, tensor in own.items():
                parts[layer.part(part)] = tensor
                axes[layer.part(part)] = own.batch_axis[part]
        return State(parts, axes)


def _own(row: Tensor, device: torch.device) -> Tensor:
    return row.clone() if row.device == device else row.to(device)


def _spread(leaf: Tensor | None, rows: Tensor, total: int) -> Tensor | None:
    if leaf is None or len(rows) == total:
        return leaf
    return leaf.new_zeros(total, *leaf.shape[1:]).index_copy(0, rows.to(leaf.device), leaf)
