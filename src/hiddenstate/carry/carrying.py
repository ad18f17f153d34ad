"""Carrying the state of an unmodified model from one batch to the next."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..cells import Layer, unwrap
from ..errors import BadInput, CarryError, CarryWarning, StateMismatch
from ..state import Rows, State
from .hooks import after, before, graph_is_freed, in_backward
from .initial import Init, Start, needed_layers
from .keeping import Kept, fitting, join, part


@dataclass(slots=True)
class _Call:
    """One call of the model while it runs: nothing is kept before it has ended well."""

    staged: dict[str, State] = field(default_factory=dict)
    handed: set[str] = field(default_factory=set)  # layers that were called without a state
    entered: set[str] = field(default_factory=set)
    ended_well: bool = False


class Carry:
    """Hands every recurrent layer of a model the state its last call ended in.

    The model stays as it is. A layer called without a state gets the carried one; what it returns is kept.

    >>> model = torch.nn.LSTM(3, 4, batch_first=True)
    >>> x = torch.randn(2, 10, 3)
    >>> whole, _ = model(x)
    >>> with Carry(model):
    ...     first, _ = model(x[:, :6])
    ...     second, _ = model(x[:, 6:])
    >>> torch.allclose(torch.cat([first, second], dim=1), whole, atol=1e-6)
    True
    """

    def __init__(self, model: nn.Module, init: Init = "zeros", rows: str = "strict", detach: bool = True) -> None:
        """Attach to `model`; see the documentation of the part for `init` and `rows`."""
        if rows not in ("strict", "first"):
            raise BadInput(f"rows is {rows!r}, but it is 'strict' (another batch size is an error) or 'first'.")
        if isinstance(model, nn.DataParallel):
            raise CarryError(
                "nn.DataParallel copies the model for every call, so a state kept by one copy is lost to the next. "
                "Use DistributedDataParallel, where each process carries its own rows."
            )
        self._model = unwrap(model)
        self._layers = needed_layers(model)
        self._start = Start(init, self._layers)
        self._rows, self._detach = rows, detach
        self._kept = Kept()
        self._calls: list[_Call] = []
        self._handed_last: dict[str, State | None] = {}
        self._told: set[str] = set()  # layers of which a lost state was reported
        self._handles = self._attach()

    # What a user does with it.

    @property
    def state(self) -> State | None:
        """One State for the whole model, parts named `encoder.lstm.h`; None before the first batch."""
        states = {layer.name: self._kept.current(layer, self._start) for layer in self._layers}
        self._start.forget()
        return join(self._layers, {name: state for name, state in states.items() if state is not None})

    @state.setter
    def state(self, state: State | None) -> None:
        if state is not None and not isinstance(state, State):
            raise StateMismatch(f"carry.state takes a State or None, but this is {type(state).__name__}.")
        self._kept = Kept() if state is None else Kept(part(self._layers, state))

    def reset(self, rows: Rows | None = None) -> None:
        """Let all rows, or these (bool mask or indices), start anew at the next call."""
        if rows is None:
            self._kept = Kept()
            return
        marks = {layer.name: self._kept.mark(layer, rows) for layer in self._layers}  # all checked before any is noted
        self._kept.anew.update({name: mask for name, mask in marks.items() if mask is not None})

    @contextmanager
    def fresh(self) -> Iterator[Carry]:
        """Inside, carry a state of its own that starts fresh; afterwards the one from before is back."""
        outer, self._kept = self._kept, Kept()
        try:
            yield self
        finally:
            self._kept = outer

    def state_dict(self) -> dict[str, Any]:
        """Return all that is kept as plain tensors, for a checkpoint in mid-epoch."""
        return {
            "states": {name: dict(state.detach()) for name, state in self._kept.states.items()},
            "axes": {name: dict(state.batch_axis) for name, state in self._kept.states.items()},
            "anew": {name: mask.clone() for name, mask in self._kept.anew.items()},
        }

    def load_state_dict(self, content: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        missing = {"states", "axes", "anew"} - set(content)
        if missing:
            raise StateMismatch(f"this is no state_dict of a Carry: it lacks {', '.join(sorted(missing))}.")
        known = {layer.name: layer for layer in self._layers}
        if not set(content["states"]) <= set(known):
            raise StateMismatch(
                f"the checkpoint carries the layers {', '.join(content['states'])}, but this model has "
                f"{', '.join(known)}: it belongs to another model."
            )
        states = {name: State(parts, content["axes"][name]) for name, parts in content["states"].items()}
        for name, state in states.items():
            states[name] = state.to(_home(known[name].module))
            known[name].to_native(states[name])
        self._kept = Kept(states, {name: mask.clone() for name, mask in content["anew"].items()})

    def close(self) -> None:
        """Take every hook off the model."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for layer in self._layers:
            if _attached.get(layer.module) is self:
                del _attached[layer.module]

    @staticmethod
    def of(model: nn.Module) -> Carry | None:
        """Return the Carry that is attached to `model`, if any."""
        return next((found for layer in needed_layers(model) if (found := _attached.get(layer.module))), None)

    def __enter__(self) -> Carry:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def __repr__(self) -> str:
        """Return what is carried, and for how many rows."""
        names = ", ".join(layer.name or "the model itself" for layer in self._layers)
        batches = sorted({state.batch for state in self._kept.states.values()})
        return f"Carry({names}; {'nothing kept yet' if not batches else f'{batches[0]} rows'})"

    # What the hooks do.

    def _attach(self) -> list[Any]:
        for layer in self._layers:
            if layer.module in _attached:
                raise CarryError(
                    f"the layer {layer.name!r} is carried by another Carry already, and two would overwrite each other. "
                    f"Close it first: hs.Carry.of(model).close(), or use `with hs.Carry(model) as carry:`."
                )
        handles = []
        for layer in self._layers:
            _attached[layer.module] = self
            handles.append(before(layer.module, lambda args, kwargs, layer=layer: self._hand(layer, args, kwargs)))
            handles.append(
                after(layer.module, lambda args, kwargs, result, layer=layer: self._keep(layer, args, kwargs, result))
            )
            if layer.fused and layer.spec.bidirectional:
                self._tell(
                    f"{layer.name or 'the model itself'!r} runs in both directions: its forward direction is carried, "
                    f"its reverse direction starts anew in every batch, since it begins at the batch's end."
                )
        if self._model is not self._layers[0].module:
            handles.append(before(self._model, lambda args, kwargs: self._calls.append(_Call())))
            handles.append(after(self._model, lambda args, kwargs, result: self._end_well()))
            handles.append(after(self._model, lambda args, kwargs, result: self._end(), always=True))
        return handles

    @contextmanager
    def _with_graph(self) -> Iterator[None]:
        before, self._detach = self._detach, False
        try:
            yield
        finally:
            self._detach = before

    def _end_well(self) -> None:
        if self._calls:
            self._calls[-1].ended_well = True

    def _end(self) -> None:
        if self._calls:
            call = self._calls.pop()
            if call.ended_well:
                self._kept.advance(call.staged)
            self._start.forget()

    def _hand(self, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = layer.given(args, kwargs)
        if in_backward():
            again = self._handed_last.get(layer.name) if given is None else None
            return None if again is None else layer.give(args, kwargs, self._native(layer, again, args, kwargs))
        call = self._calls[-1] if self._calls else _Call()
        if given is not None:
            self._notice_zeros(layer, given, call)
            call.entered.add(layer.name)
            return None
        if layer.name in call.handed:
            raise CarryError(
                f"the layer {layer.name!r} is called twice in one call of the model, both times without a state, so it is "
                f"unclear which call should go on from which. Hand the state over in the model's forward "
                f"(`out, state = layer(x, state)`), or carry the two uses as two layers."
            )
        call.handed.add(layer.name)
        call.entered.add(layer.name)
        state = self._next(layer, *layer.rows(args, kwargs))
        self._handed_last[layer.name] = state
        return None if state is None else layer.give(args, kwargs, self._native(layer, state, args, kwargs))

    def _keep(self, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if in_backward():
            return
        rows, _ = layer.rows(args, kwargs)
        state = layer.to_state(layer.split(result)[1], batch=rows)
        state = _in_full_precision(state, layer)
        state = state.detach() if self._detach else state
        if self._calls:
            self._calls[-1].staged[layer.name] = state
        else:
            self._kept.advance({layer.name: state})
            self._start.forget()

    def _next(self, layer: Layer, rows: int, batched: bool) -> State | None:
        kept = self._kept.states.get(layer.name)
        if kept is None:
            # A layer that makes its own first state is left alone; it may know better than zeros.
            return None if self._start.is_zeros and _starts_itself(layer) else self._start.of(layer, rows)
        self._check_rows(layer, kept, rows)
        self._check_graph(layer, kept)
        state = self._kept.current(layer, self._start)
        assert state is not None
        if rows < state.batch:
            state = state.select(slice(0, rows))
        return self._reverse_anew(layer, state)

    def _check_rows(self, layer: Layer, kept: State, rows: int) -> None:
        if rows == kept.batch or (self._rows == "first" and rows < kept.batch):
            return
        way_out = (
            "The last batch of an epoch is often smaller: use drop_last=True, or Carry(model, rows='first')."
            if rows < kept.batch
            else "Another set of sequences begins with carry.reset()."
        )
        raise StateMismatch(
            f"the input has {rows} rows, but the carried state of {layer.name or 'the model'!r} has {kept.batch}. {way_out}"
        )

    def _check_graph(self, layer: Layer, kept: State) -> None:
        if any(tensor.requires_grad and graph_is_freed(tensor) for tensor in kept.values()):
            raise CarryError(
                f"the carried state of {layer.name or 'the model'!r} still holds the graph of an earlier batch, and a "
                f"backward pass has used that graph up: the next one would fail. Keep detach=True, the default, "
                f"or cut it after each backward: carry.state = carry.state.detach()."
            )

    def _reverse_anew(self, layer: Layer, state: State) -> State:
        if not (layer.fused and layer.spec.bidirectional):
            return state
        initial = fitting(self._start.of(layer, state.batch), state)
        odd = torch.arange(1, 2 * layer.spec.layers, 2, device=state.device)
        return State(
            {name: tensor.index_copy(0, odd, initial[name].index_select(0, odd)) for name, tensor in state.items()},
            state.batch_axis,
        )

    def _native(self, layer: Layer, state: State, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return layer.to_native(state, batched=layer.rows(args, kwargs)[1])

    def _notice_zeros(self, layer: Layer, given: Any, call: _Call) -> None:
        # Only the first call of a layer in a model call, and only once something would be lost: a look costs a sync.
        kept = self._kept.states.get(layer.name)
        if kept is None or layer.name in call.entered or layer.name in self._told:
            return
        if _all_zero(layer.to_state(given)) and not _all_zero(kept):
            self._told.add(layer.name)
            self._tell(
                f"the layer {layer.name!r} is handed a state of zeros by the model itself, so the carried state is not "
                f"used. Let the model pass no state (None) where it makes zeros now."
            )

    def _tell(self, message: str) -> None:
        warnings.warn(message, CarryWarning, stacklevel=3)


_attached: WeakKeyDictionary[nn.Module, Carry] = WeakKeyDictionary()


def _all_zero(state: State) -> bool:
    return all(not bool(tensor.detach().any()) for tensor in state.values())


def _starts_itself(layer: Layer) -> bool:
    import inspect

    second = list(inspect.signature(type(layer.module).forward).parameters.values())[2:3]
    return bool(second) and second[0].default is None


def _home(module: nn.Module) -> torch.device:
    return next((tensor.device for tensor in (*module.parameters(), *module.buffers())), torch.device("cpu"))


def _in_full_precision(state: State, layer: Layer) -> State:
    # Autocast leaves half-precision states behind, which the layer would refuse when autocast is off.
    if not torch.is_autocast_enabled(state.device.type):
        return state
    weight = next((p for p in layer.module.parameters() if p.is_floating_point()), None)
    if weight is None or weight.dtype not in (torch.float32, torch.float64):
        return state
    return state.map(lambda t: t.to(weight.dtype) if t.dtype in (torch.float16, torch.bfloat16) else t)
