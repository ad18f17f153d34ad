"""The served model as the engine calls it: inputs and states of many sessions in, outputs and new states out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from ..carry import Carry
from ..cells import Layer, layers, unwrap
from ..errors import BadInput, ModelFailed
from ..state import Format, State, from_bytes
from .fingerprint import fingerprint, first_fingerprint
from .session_operations import OutputRow
from .wire import as_dtype, is_single_step, named_tensors, to_raw


@dataclass(frozen=True, slots=True)
class OutputAxes:
    """One tensor of the output: which axis is rows and which steps; one and the same where the model flattens both."""

    rows: int
    steps: int | None
    dtype: torch.dtype = torch.float32
    shape: tuple[int, ...] = ()  # of one step of one row, or of one row where there are no steps

    def ordered(self, tensor: Tensor, sizes: tuple[int, int], *, rows_first: bool) -> Tensor:
        """Return such a tensor with rows first and steps second; `sizes` is the number of each."""
        if self.steps is None:
            return tensor.movedim(self.rows, 0)
        if self.steps == self.rows:
            apart = tensor.reshape(
                *tensor.shape[: self.rows], *(sizes if rows_first else sizes[::-1]), *tensor.shape[self.rows + 1 :]
            )
            axes = (self.rows, self.rows + 1) if rows_first else (self.rows + 1, self.rows)
            return apart.movedim(axes, (0, 1))
        return tensor if (self.rows, self.steps) == (0, 1) else tensor.movedim((self.rows, self.steps), (0, 1))


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """How a model takes its input and gives its output."""

    step_shape: tuple[int, ...]  # of one step of one row
    dtype: torch.dtype
    device: torch.device
    rows_axis: int
    steps_axis: int | None  # None: each call is one step
    leaves: tuple[OutputAxes | None, ...]  # None where the output holds a None
    tree: Any  # how the output is nested
    sample: Tensor  # (steps, *step_shape)

    @property
    def width(self) -> int:
        """The bytes of one step."""
        return self.dtype.itemsize * math.prod(self.step_shape)

    def input(self, rows: Tensor) -> Tensor:
        """Return `rows (row, step, ...)` as the model takes them; where each call is one step, the first one."""
        if self.steps_axis is None:
            return rows[:, 0]
        return rows if self.rows_axis == 0 else rows.transpose(0, 1)


class ServedModel:
    """An unmodified model in eval mode, whose states are handed in and out through a Carry.

    Made by `trial.prepare`, which also sets `format` and `ragged`.
    """

    format: Format  # of the states, as bytes
    ragged = False  # rows of different lengths may go into one call

    def __init__(self, model: nn.Module, layout: ModelLayout, *, init: Any = "zeros") -> None:
        """Attach to `model`, which takes and gives tensors as `layout` says."""
        self.model = unwrap(model)
        self.layout = layout
        self.fingerprint = fingerprint(model)
        self._first_fingerprint = first_fingerprint(model)
        self._call = model
        self._layers = layers(model)
        self._root = root_layer(self.model, self._layers)
        # Torch's own layers never write into the state that they are given, and return another one.
        self.pure = all(type(layer.module) in (nn.RNN, nn.LSTM, nn.GRU) for layer in self._layers)
        self._names = {layer.name: {part: layer.part(part) for part in layer.spec.parts} for layer in self._layers}
        # The parts to search for NaN: in torch's own layers, a NaN in `c` is always one in `h` too.
        names = [(part, name) for parts in self._names.values() for part, name in parts.items()]
        self.nan_parts = frozenset(name for part, name in names if part == "h" or not self.pure)
        self._modes = [(module, module.training) for module in self.model.modules()]
        self._carry = Carry(model, init=init)
        self.model.eval()

    def owns(self, fingerprint: str) -> bool:
        """Say whether a stored state belongs to this model, be it by what the first edition knew of models."""
        return fingerprint in (self.fingerprint, self._first_fingerprint)

    def close(self) -> None:
        """Give the model back as it was: no hook, every module in its own mode."""
        self._carry.close()
        for module, training in self._modes:
            module.training = training

    def read(self, x: Any) -> tuple[Tensor, bool]:
        """Return an input, and whether it was given as one step without a time axis, rather than `(steps, ...)`."""
        if type(x) is Tensor and x.shape == self.layout.step_shape and x.dtype is self.layout.dtype:
            return (x.detach() if x.requires_grad else x), True  # as nearly all are
        if not isinstance(x, Tensor):
            try:
                x = torch.as_tensor(x)
            except (TypeError, ValueError, RuntimeError, OverflowError) as error:
                raise BadInput(f"x is {type(x).__name__} and cannot be made a tensor: {error}") from None
        single_step = is_single_step(x.shape, self.layout.step_shape)
        return as_dtype(x, self.layout.dtype), single_step

    def read_rows(self, xs: Tensor) -> tuple[Tensor, bool]:
        """Return inputs as `(row, steps, ...)`, and whether they were given as single steps without a time axis."""
        shape = self.layout.step_shape
        single_step = xs.shape[1:] == shape
        if not single_step and (xs.dim() != len(shape) + 2 or xs.shape[2:] != shape or not xs.shape[1]):
            self.read(xs[0])  # which raises
        xs = as_dtype(xs, self.layout.dtype)
        return (xs.unsqueeze(1) if single_step else xs), single_step

    def run(
        self, x: Tensor, state: State | None, steps: Sequence[int] | None = None
    ) -> tuple[list[Tensor | None], State]:
        """Return the outputs, each `(row, step, ...)` or `(row, ...)`, and each row's state after its own last step.

        `x` is `(row, step, ...)`. With `steps`, the number of steps of each row, outputs after a row's last step mean
        nothing. Without a `state` all rows start from the initial state.
        """
        x = x.to(self.layout.device)
        lengths = None if steps is None else torch.tensor(steps)
        with torch.no_grad():
            if self.layout.steps_axis is None:
                return self._stepwise(x, torch.full((len(x),), x.shape[1]) if lengths is None else lengths, state)
            return self._whole(x, lengths, state)

    def has_steps(self, place: int) -> bool:
        """Return whether the output at `place` has one entry per step."""
        leaf = self.layout.leaves[place]
        return self.layout.steps_axis is None or (leaf is not None and leaf.steps is not None)

    @property
    def every_step(self) -> bool:
        """Whether all outputs have one entry per step, so that consecutive inputs may be run as one."""
        return all(self.has_steps(place) for place, leaf in enumerate(self.layout.leaves) if leaf is not None)

    def initial(self) -> State:
        """Return the initial state of one session, as far as it can be seen from outside."""
        with torch.no_grad():
            return self._join({}, 1)

    def output(self, made: OutputRow, device: torch.device) -> Any:
        """Return one row's output, copied to `device` and nested as the model nests it."""
        return self.rebuild([None if leaf is None else _copy_to(leaf[made.row], device) for leaf in made.leaves])

    def raw(self, made: OutputRow) -> bytes | None:
        """Return the raw bytes of one row's output, None where it is not one tensor."""
        leaf = made.leaves[0]
        if leaf is None or not self.layout.tree.is_leaf():
            return None
        return to_raw(leaf[made.row]) if made.blobs is None else made.blobs.bare()[made.row]

    def stored_output(self, answer: Any) -> OutputRow:
        """Return the output that a store has kept: a file, or the raw bytes together with their format."""
        if isinstance(answer, bytes):
            state = from_bytes(answer, source="an answer that was kept")
        else:
            kind, row = answer
            state = kind.state([row])
        return OutputRow([state.get(str(place)) for place in range(len(self.layout.leaves))], 0, None)

    def rebuild(self, leaves: Sequence[Tensor | None]) -> Any:
        """Return an output nested as the model nests it."""
        tree = self.layout.tree
        return leaves[0] if tree.is_leaf() else _pytree.tree_unflatten(list(leaves), tree)

    def rebuild_all(self, columns: Sequence[Sequence[Tensor | None]]) -> Sequence[Any]:
        """Return many outputs, given as a column for each of their tensors."""
        if self.layout.tree.is_leaf():
            return columns[0]
        return [self.rebuild(leaves) for leaves in zip(*columns, strict=True)]

    def described(self) -> list[dict[str, Any]]:
        """Return name, dtype and shape of each tensor of the output; -1 stands for the number of steps."""
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
        self._carry.exchange({} if state is None else self._by_layer(state))
        if lengths is not None:
            self._carry.mark(lengths=lengths)
        output = self._call(self.layout.input(x))
        if self._root is not None:
            output = self._root.split(output)[0]
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

    def _by_layer(self, state: State) -> dict[str, State]:
        axes = state.batch_axis
        return {
            layer: State({part: state[n] for part, n in names.items()}, {part: axes[n] for part, n in names.items()})
            for layer, names in self._names.items()
        }

    def _join(self, states: Mapping[str, State], rows: int) -> State:
        parts, axes = {}, {}
        for layer in self._layers:
            # A layer that no call has used yet is in its initial state.
            own = states.get(layer.name) or layer.initial(rows).detach()
            for part, tensor in own.items():
                parts[layer.part(part)] = tensor
                axes[layer.part(part)] = own.batch_axis[part]
        return State(parts, axes)


def _copy_to(row: Tensor, device: torch.device) -> Tensor:
    return row.clone() if row.device == device else row.to(device)


def _spread(leaf: Tensor | None, rows: Tensor, total: int) -> Tensor | None:
    if leaf is None or len(rows) == total:
        return leaf
    return leaf.new_zeros(total, *leaf.shape[1:]).index_copy(0, rows.to(leaf.device), leaf)


def root_layer(model: nn.Module, found: Sequence[Layer]) -> Layer | None:
    """Return the layer that the model itself is, whose output comes with its state; None where layers are inside."""
    return found[0] if found[0].module is unwrap(model) else None
