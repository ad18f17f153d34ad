"""Adapters for torch's own recurrent modules: `nn.RNN`, `nn.LSTM`, `nn.GRU` and their cells."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ..errors import NotRecurrent, StateMismatch
from ..state import State
from .layer import Adapter, Spec
from .native import Native
from .signature import first_input
from .weights import weights_like


class FusedAdapter(Adapter):
    """`nn.RNN`, `nn.LSTM` and `nn.GRU`: one call runs all layers, directions and steps."""

    fused, state_name = True, "hx"

    def __init__(self, kind: str) -> None:
        """Adapt layers of one kind: `"rnn"`, `"lstm"` or `"gru"`."""
        self.kind = kind

    def spec(self, module: nn.Module) -> Spec:
        """Read the spec from the module's own settings."""
        rnn = cast(nn.RNNBase, module)
        projection = getattr(rnn, "proj_size", 0)  # quantized layers have none
        visible = projection or rnn.hidden_size
        lstm = self.kind == "lstm"
        return Spec(
            parts=("h", "c") if lstm else ("h",),
            sizes={"h": visible, "c": rnn.hidden_size} if lstm else {"h": visible},
            layers=rnn.num_layers,
            directions=2 if rnn.bidirectional else 1,
            projection=projection,
            input_size=rnn.input_size,
            batch_first=rnn.batch_first,
        )

    def initial(self, module: nn.Module, batch: int) -> State:
        """Return zeros, which torch starts from."""
        spec = self.spec(module)
        device, dtype = weights_like(module)
        deep = spec.layers * spec.directions
        zeros = {part: torch.zeros(deep, batch, spec.sizes[part], device=device, dtype=dtype) for part in spec.parts}
        return State(zeros, batch_axis=1)

    def to_state(self, module: nn.Module, native: Native, *, batch: int | None = None) -> State:
        """Name h and c; a state without a batch axis becomes one of a single row."""
        parts = _named(self.kind == "lstm", native)
        state = State.alike({name: part if part.dim() > 2 else part.unsqueeze(1) for name, part in parts.items()}, 1)
        if not _as_torch_wrote_it(module):
            self._check(module, state)
            _check_rows(module, state, batch)
        return state

    def to_native(self, module: nn.Module, state: State, *, batched: bool = True) -> Native:
        """Return the tensor or the tuple (h, c) that the layer takes."""
        self._check(module, state)
        # cuDNN refuses views, such as one learned row expanded to all rows, or the first rows of a larger batch.
        whole = state if all(part.is_contiguous() for part in state.values()) else state.map(Tensor.contiguous)
        return _unnamed(self.kind == "lstm", whole, batched, axis=1)

    def split(self, module: nn.Module, result: Any) -> tuple[Any, Native]:
        """Unpack output and final state, which every fused layer returns as a pair."""
        if not (isinstance(result, tuple | list) and len(result) == 2):
            raise _without_state(module, result, "(output, state)")
        output, native = result
        if not _as_torch_wrote_it(module):
            self.to_state(module, native)  # raises if this is not a state of the layer
        return output, native

    def rows(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, bool]:
        """Count rows along the batch axis: by `batch_first`, or in a packed sequence; an unbatched input is one row."""
        x = first_input(module, args, kwargs)
        if isinstance(x, PackedSequence):
            return int(x.batch_sizes[0]), True
        if x.dim() < 3:
            return 1, False
        return x.shape[0 if cast(nn.RNNBase, module).batch_first else 1], True

    def _check(self, module: nn.Module, state: State) -> None:
        spec = self.spec(module)
        _check_parts(module, state, spec.parts)
        for part, size in spec.sizes.items():
            deep = spec.layers * spec.directions
            shape = tuple(state[part].shape)
            if state.batch_axis[part] != 1 or len(shape) != 3 or (shape[0], shape[2]) != (deep, size):
                raise StateMismatch(
                    f"part {part!r} has shape {shape} with its batch axis at {state.batch_axis[part]}, but this "
                    f"{type(module).__name__} needs ({deep}, batch, {size}): {spec.layers} layers x {spec.directions} "
                    f"directions, batch axis 1 also with batch_first=True, {size} units. "
                    f"hs.Bridge leads from a layer of another size to this one."
                )


class TorchCellAdapter(Adapter):
    """`nn.RNNCell`, `nn.LSTMCell` and `nn.GRUCell`: one call is one step."""

    state_name = "hx"

    def __init__(self, kind: str) -> None:
        """Adapt cells of one kind: `"rnn_cell"`, `"lstm_cell"` or `"gru_cell"`."""
        self.kind = kind
        self._lstm = kind == "lstm_cell"
        self._parts = ("h", "c") if self._lstm else ("h",)

    def spec(self, module: nn.Module) -> Spec:
        """Read the spec from the cell's own settings."""
        cell = cast(nn.RNNCellBase, module)
        sizes = dict.fromkeys(self._parts, cell.hidden_size)
        return Spec(parts=self._parts, sizes=sizes, input_size=cell.input_size)

    def initial(self, module: nn.Module, batch: int) -> State:
        """Return zeros, which torch starts from."""
        size = cast(nn.RNNCellBase, module).hidden_size
        device, dtype = weights_like(module)
        return State.alike({p: torch.zeros(batch, size, device=device, dtype=dtype) for p in self._parts}, 0)

    def to_state(self, module: nn.Module, native: Native, *, batch: int | None = None) -> State:
        """Name h and c; a state without a batch axis becomes one of a single row."""
        parts = _named(self._lstm, native)
        state = State.alike({name: part if part.dim() > 1 else part.unsqueeze(0) for name, part in parts.items()}, 0)
        if not _as_torch_wrote_it(module):
            self._check(module, state)
            _check_rows(module, state, batch)
        return state

    def to_native(self, module: nn.Module, state: State, *, batched: bool = True) -> Native:
        """Return the tensor or the tuple (h, c) that the cell takes."""
        self._check(module, state)
        return _unnamed(self._lstm, state, batched, axis=0)

    def _check(self, module: nn.Module, state: State) -> None:
        _check_parts(module, state, self._parts)
        size, axes = cast(nn.RNNCellBase, module).hidden_size, state.batch_axis
        for part in self._parts:
            shape = state[part].shape
            if axes[part] != 0 or len(shape) != 2 or shape[1] != size:
                raise StateMismatch(
                    f"part {part!r} has shape {tuple(shape)} with its batch axis at {axes[part]}, "
                    f"but this {type(module).__name__} needs (batch, {size}). A fused layer's state has one axis more: "
                    f"take one of its layers, state[{part!r}][0]."
                )

    def split(self, module: nn.Module, result: Any) -> tuple[Any, Native]:
        """Use h as the output, since torch's cells return nothing but the state."""
        if not self._lstm:
            if not isinstance(result, Tensor):
                raise _without_state(module, result, "h alone")
            return result, result
        if not (isinstance(result, tuple | list) and len(result) == 2):
            raise _without_state(module, result, "(h, c)")
        return result[0], tuple(result)

    def join(self, module: nn.Module, output: Any, native: Native) -> Any:
        """Return the state alone, as torch's cells do: the output is its h."""
        return native

    def rows(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, bool]:
        """Count rows; a step with a single axis is one row without a batch axis."""
        x = cast(Tensor, first_input(module, args, kwargs))
        return (x.shape[0], True) if x.dim() > 1 else (1, False)


def _named(lstm: bool, native: Native) -> dict[str, Tensor]:
    if lstm:
        if not (isinstance(native, tuple | list) and len(native) == 2 and all(isinstance(p, Tensor) for p in native)):
            raise StateMismatch(f"an LSTM's state is a tuple (h, c) of two tensors, but this is {_seen(native)}.")
        return {"h": native[0], "c": native[1]}
    if not isinstance(native, Tensor):
        raise StateMismatch(
            f"the state of an RNN or a GRU is one tensor, but this is {_seen(native)}. Only an LSTM has a cell state c."
        )
    return {"h": native}


def _unnamed(lstm: bool, state: State, batched: bool, *, axis: int) -> Native:
    if not batched:
        if state.batch != 1:
            raise StateMismatch(
                f"the input has no batch axis, so it is one row, but the state has {state.batch} rows. "
                f"Give the input a batch axis, or the state one row: state.select([0])."
            )
        parts = {name: part.squeeze(axis) for name, part in state.items()}
        return (parts["h"], parts["c"]) if lstm else parts["h"]
    return (state["h"], state["c"]) if lstm else state["h"]


def _check_parts(module: nn.Module, state: State, parts: tuple[str, ...]) -> None:
    if not isinstance(state, State):
        raise NotRecurrent(f"a State is needed, but this is {type(state).__name__}. Layer.to_state makes one.")
    if state.keys() != set(parts):
        raise StateMismatch(
            f"the state has the parts {', '.join(state)}, but {type(module).__name__} needs {', '.join(parts)}. "
            f"hs.Bridge leads from one kind of layer to another."
        )


def _as_torch_wrote_it(module: nn.Module) -> bool:
    """Say whether a module takes and returns what its kind does; a subclass with its own forward may not."""
    return (getattr(type(module).forward, "__module__", None) or "").startswith("torch.")


def _check_rows(module: nn.Module, state: State, rows: int | None) -> None:
    if rows is not None and state.batch != rows:
        raise StateMismatch(
            f"{type(module).__name__} was called with {rows} rows, as its batch_first and the shape of its input say, "
            f"but its state has {state.batch}. Its own forward takes another layout than torch's: let it take that of "
            f"{type(module).__mro__[1].__name__}, or say how it is called with hs.register."
        )


def _without_state(module: nn.Module, result: Any, needed: str) -> NotRecurrent:
    return NotRecurrent(
        f"{type(module).__name__} returned {_seen(result)}, but layers of its kind return {needed}, and the state it "
        f"ended in is read from there. Let its own forward return what super().forward gives, and its caller take "
        f"the part that is wanted."
    )


def _seen(native: Any) -> str:
    if isinstance(native, tuple | list):
        return f"a {type(native).__name__} of {len(native)}"
    return type(native).__name__
