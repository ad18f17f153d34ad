"""What the hooks do: hand each layer the state it goes on from, and keep the one it ends in."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..cells import Handle, Layer
from ..errors import CarryError, CarryWarning, StateMismatch
from ..state import State
from .hooks import after, before, graph_is_freed, in_backward
from .initial import Start
from .keeping import Kept, fitting
from .marking import Marks, run_marked


@dataclass(slots=True)
class Call:
    """One call of the model while it runs: nothing is kept before it has ended well."""

    marks: Marks | None = None
    staged: dict[str, State] = field(default_factory=dict)
    handed: set[str] = field(default_factory=set)  # layers that were called without a state
    steps: dict[str, int] = field(default_factory=dict)  # how many steps each layer has taken
    ended_well: bool = False


class Handing:
    """The hooks on one model, and what they keep."""

    def __init__(self, model: nn.Module, found: list[Layer], start: Start) -> None:
        """Prepare to attach to `model`, whose recurrent layers are `found`."""
        self.kept = Kept()
        self.marks: Marks | None = None  # for the next call
        self.detach = True
        self.strict = True
        self._model, self._layers, self._start = model, found, start
        self._calls: list[Call] = []  # of the model, innermost last
        self._lone = Call()  # of a layer that is called by itself
        self._handed_last: dict[str, State | None] = {}
        self._told: set[str] = set()  # layers of which a lost state was reported
        self._forwards: dict[str, Any] = {}  # what stood in place of ours while marks are pending
        self._plans: dict[str, tuple[Tensor, State, Marks]] = {}
        self._within = False  # a layer is being run by unroll on our behalf

    def attach(self) -> list[Handle]:
        """Put the hooks on."""
        handles = []
        for layer in self._layers:
            handles.append(before(layer.module, lambda args, kw, layer=layer: self._hand(layer, args, kw)))
            handles.append(after(layer.module, lambda args, kw, out, layer=layer: self._keep(layer, args, kw, out)))
        if self._model is not self._layers[0].module:
            handles.append(before(self._model, lambda args, kw: self._begin()))
            handles.append(after(self._model, lambda args, kw, out: self._end_well()))
            handles.append(after(self._model, lambda args, kw, out: self._end(), always=True))
        return handles

    @contextmanager
    def with_graph(self) -> Iterator[None]:
        """Inside, what is kept holds on to its graph."""
        outer, self.detach = self.detach, False
        try:
            yield
        finally:
            self.detach = outer

    def _begin(self) -> None:
        self._calls.append(Call(self.marks))

    def _end_well(self) -> None:
        if self._calls:
            self._calls[-1].ended_well = True

    def _end(self) -> None:
        if self._calls:
            self._finish(self._calls.pop())

    def _finish(self, call: Call) -> None:
        self._start.forget()
        if not call.ended_well:
            return
        if call.marks is not None:
            self.mark(None)
            for layer in self._layers:
                if layer.name in call.staged:
                    call.marks.check_taken(layer, call.steps[layer.name])
        self.kept.advance(call.staged)

    def _hand(self, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._within:
            return None
        given = layer.given(args, kwargs)
        if in_backward():
            again = self._handed_last.get(layer.name) if given is None else None
            return None if again is None else self._give(layer, args, kwargs, again)
        if not self._calls:
            self._lone = Call(self.marks)
        call = self._calls[-1] if self._calls else self._lone
        rows, _ = layer.rows(args, kwargs)
        state = self._carried(layer, call, rows) if given is None else self._heed(layer, call, given, rows)
        call.steps.setdefault(layer.name, 0)
        if call.marks is None:
            return None if state is None or given is not None else self._give(layer, args, kwargs, state)
        return self._hand_marked(layer, call, args, kwargs, state)

    def _carried(self, layer: Layer, call: Call, rows: int) -> State | None:
        if layer.name in call.handed:
            raise CarryError(
                f"the layer {layer.name!r} is called twice in one call of the model, both times without a state, so "
                f"it is unclear which call should go on from which. Hand the state over in the model's forward "
                f"(`out, state = layer(x, state)`), or carry the two uses as two layers."
            )
        call.handed.add(layer.name)
        state = self._next(layer, rows)
        self._handed_last[layer.name] = state
        return state

    def _heed(self, layer: Layer, call: Call, given: Any, rows: int) -> State | None:
        """Take a state that the model itself hands over, and say so where it throws a carried one away."""
        kept = self.kept.states.get(layer.name)
        lost = kept is not None and layer.name not in call.steps and layer.name not in self._told
        if not lost and call.marks is None:
            return None
        state = layer.to_state(given, batch=rows)
        if lost and kept is not None and _all_zero(state) and not _all_zero(kept):
            self._told.add(layer.name)
            warnings.warn(
                f"the layer {layer.name!r} is handed a state of zeros by the model itself, so the carried state is not "
                f"used. Let the model pass no state (None) where it makes zeros now.",
                CarryWarning,
                stacklevel=2,
            )
        return state

    def _hand_marked(
        self, layer: Layer, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], state: State | None
    ) -> Any:
        assert call.marks is not None
        rows, batched = layer.rows(args, kwargs)
        state = self._start.of(layer, rows) if state is None else state
        begin = call.steps[layer.name]
        if not layer.fused:
            starts = call.marks.piece(layer, rows, begin, 1).starts
            if starts is not None and begin > 0 and bool(starts.any()):
                anew = starts[:, 0].nonzero()[:, 0].tolist()
                state = state.put(anew, fitting(self._start.of(layer, rows), state).select(anew))
            call.staged.setdefault(layer.name, state)
            return self._give(layer, args, kwargs, state)
        x = args[0] if args else next(iter(kwargs.values()))
        if not isinstance(x, Tensor) or not batched:
            raise CarryError(
                f"carry.mark was told where rows start or end, but the layer {layer.name!r} is called with a "
                f"{'sequence without rows' if isinstance(x, Tensor) else 'packed sequence, which has its own lengths'}."
            )
        steps = x.shape[1 if layer.spec.batch_first else 0]
        marks = call.marks.piece(layer, rows, begin, steps)
        if begin == 0 and marks.starts is not None:
            marks = Marks(marks.starts.index_fill(1, torch.tensor([0]), False), marks.lengths)
        self._plans[layer.name] = (x, state, marks)  # a hook comes too late to replace forward; see mark
        return None

    def mark(self, marks: Marks | None) -> None:
        """Let the next call run by these marks: until then the fused layers' forward is ours."""
        self.marks = marks
        for layer in self._layers:
            own = layer.module.__dict__
            if layer.fused and marks is not None and layer.name not in self._forwards:
                self._forwards[layer.name] = own.get("forward")
                own["forward"] = self._marked_forward(layer, layer.module.forward)
            elif marks is None and layer.name in self._forwards:
                del own["forward"]
                if (before := self._forwards.pop(layer.name)) is not None:
                    own["forward"] = before

    def _marked_forward(self, layer: Layer, real: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            plan = None if self._within else self._plans.pop(layer.name, None)
            if plan is None:
                return real(*args, **kwargs)
            self._within = True
            try:
                return run_marked(layer, *plan, lambda batch: self._start.of(layer, batch))
            finally:
                self._within = False

        return forward

    def _keep(self, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if self._within or in_backward():
            return
        call = self._calls[-1] if self._calls else self._lone
        state = layer.to_state(layer.split(result)[1], batch=layer.rows(args, kwargs)[0])
        state = _in_full_precision(state, layer)
        if call.marks is not None and not layer.fused and call.marks.lengths is not None:
            alive = (call.marks.lengths > call.steps[layer.name]).nonzero()[:, 0].tolist()
            state = fitting(call.staged[layer.name], state).put(alive, state.select(alive))
        call.staged[layer.name] = state.detach() if self.detach else state
        call.steps[layer.name] += _steps(layer, args, kwargs) if call.marks is not None else 1
        if not self._calls:
            call.ended_well = True
            self._finish(call)

    def _next(self, layer: Layer, rows: int) -> State | None:
        kept = self.kept.states.get(layer.name)
        if kept is None:
            # A layer that makes its own first state is left alone; it may know better than zeros.
            return None if self._start.is_zeros and _starts_itself(layer) else self._start.of(layer, rows)
        self._check_rows(layer, kept, rows)
        if any(tensor.requires_grad and graph_is_freed(tensor) for tensor in kept.values()):
            raise CarryError(
                f"the carried state of {layer.name or 'the model'!r} still holds the graph of an earlier batch, and a "
                f"backward pass has used that graph up: the next one would fail. Keep detach=True, the default, "
                f"or cut it after each backward: carry.state = carry.state.detach()."
            )
        state = self.kept.current(layer, self._start)
        assert state is not None
        if rows < state.batch:
            state = state.select(slice(0, rows))
        if not torch.is_inference_mode_enabled() and any(part.is_inference() for part in state.values()):
            state = state.clone()  # autograd refuses tensors that were made in inference mode
        return self._reverse_anew(layer, state)

    def _check_rows(self, layer: Layer, kept: State, rows: int) -> None:
        if rows == kept.batch or (not self.strict and rows < kept.batch):
            return
        way_out = (
            "The last batch of an epoch is often smaller: use drop_last=True, or Carry(model, rows='first')."
            if rows < kept.batch
            else "Another set of sequences begins with carry.reset()."
        )
        name = layer.name or "the model"
        raise StateMismatch(f"the input has {rows} rows, but the carried state of {name!r} has {kept.batch}. {way_out}")

    def _reverse_anew(self, layer: Layer, state: State) -> State:
        if not both_ways(layer):
            return state
        initial = fitting(self._start.of(layer, state.batch), state)
        odd = torch.arange(1, 2 * layer.spec.layers, 2, device=state.device)
        return State(
            {name: tensor.index_copy(0, odd, initial[name].index_select(0, odd)) for name, tensor in state.items()},
            state.batch_axis,
        )

    def _give(self, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any], state: State) -> Any:
        return layer.give(args, kwargs, layer.to_native(state, batched=layer.rows(args, kwargs)[1]))


def both_ways(layer: Layer) -> bool:
    """Say whether a layer also runs backwards."""
    return layer.fused and layer.spec.bidirectional


def _all_zero(state: State) -> bool:
    return all(not bool(tensor.detach().any()) for tensor in state.values())


def _starts_itself(layer: Layer) -> bool:
    second = list(inspect.signature(type(layer.module).forward).parameters.values())[2:3]
    return bool(second) and second[0].default is None


def _steps(layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    if not layer.fused:
        return 1
    x: Tensor = args[0] if args else next(iter(kwargs.values()))
    return x.shape[1 if layer.spec.batch_first else 0]


def _in_full_precision(state: State, layer: Layer) -> State:
    # Autocast leaves half-precision states behind, which the layer would refuse when autocast is off.
    if not torch.is_autocast_enabled(next(iter(state.values())).device.type):
        return state
    weight = next((p for p in layer.module.parameters() if p.is_floating_point()), None)
    if weight is None or weight.dtype not in (torch.float32, torch.float64):
        return state
    return state.map(lambda part: part.to(weight.dtype) if part.dtype in (torch.float16, torch.bfloat16) else part)
