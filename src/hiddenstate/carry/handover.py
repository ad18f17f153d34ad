"""Hands each layer of a model the state it goes on from, and keeps the one it ends in."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..cells import (
    Call,
    Entry,
    Handle,
    Layer,
    Layers,
    Listener,
    Proceed,
    Rank,
    ambiguous,
    foreseen,
    has_own_code,
    listen,
    may_be_recomputed,
    warn,
    watched,
    when_reached,
)
from ..errors import CarryError, CarryWarning, StateMismatch
from ..state import State, tensors
from .choice import Choice
from .initial import Start, not_recurrent
from .kept import Kept, fitting
from .marks import Marks, run_marked
from .replays import Replays

_LOOKS = 3  # calls that are watched at most, where they are too short to tell what recurs


@dataclass(slots=True)
class _ModelCall:
    """One call of the model while it runs: nothing is kept before it has ended well."""

    marks: Marks | None = None
    grad: bool = True  # whether it began with gradients on
    arguments: Any = ()
    staged: dict[str, State] = field(default_factory=dict)
    handed: set[str] = field(default_factory=set)  # layers that were called without a state
    steps: dict[str, int] = field(default_factory=dict)  # how many steps each layer has taken


class HandOver(Listener):
    """Listens to one model for a Carry: states go in before each call of a layer, and come out after it."""

    rank = Rank.CARRY

    def __init__(self, model: nn.Module, found: list[Layer], start: Start, *, strict: bool, detach: bool) -> None:
        """Prepare to listen to `model`, whose recurrent layers are `found`."""
        self.kept = Kept()
        self.marks: Marks | None = None  # for the next call
        self.detach, self.strict = detach, strict
        self._model, self._layers, self._start = model, found, start
        self._call = _ModelCall()
        self._replays = Replays()
        self._told: set[str] = set()  # layers of which a lost state was reported
        self._silent: set[str] | None = {layer.name for layer in found}  # never called so far; None: it was reported
        self._within = False  # a layer is being run piece by piece on our behalf
        # How many calls may still be watched for what else recurs in the model: a short one may not tell.
        self._looks = _LOOKS if has_own_code(model) else 0
        self.more: list[Handle] = []  # what was begun after that

    @property
    def unexamined(self) -> bool:
        """Whether a call may still show more that recurs."""
        return self._looks > 0

    @contextmanager
    def with_graph(self) -> Iterator[None]:
        """Inside, what is kept holds on to its graph."""
        outer, self.detach = self.detach, False
        try:
            yield
        finally:
            self.detach = outer

    def model_call(self, entry: Entry, run: Callable[[], Any]) -> Any:
        """Keep what the layers end in, if the call ends well."""
        _refuse_export()
        if self._looks and entry.module is self._model:
            run = self._watched(entry, run)
        call = self._call = _ModelCall(self.marks, torch.is_grad_enabled(), (entry.args, entry.kwargs))
        try:
            result = run()
        finally:
            self._start.forget()
        if call.marks is not None:
            self.marks = None
            for layer in self._layers:
                if layer.name in call.staged:
                    call.marks.check_taken(layer, call.steps[layer.name])
        names = {layer.name for layer in self._layers}
        self.kept.advance({name: state for name, state in call.staged.items() if name in names})
        self._report_silent(entry.module)
        return result

    def layer_call(self, call: Call, proceed: Proceed) -> Call:
        """Hand over, run, and note what to keep."""
        layer, model_call = call.layer, self._call
        if self._within or layer not in self._layers:
            return proceed(call)
        given = call.given_native
        rows, batched = layer.rows(call.args, call.kwargs)
        state = self._carried(call, rows) if given is None else self._heed(call)
        model_call.steps.setdefault(layer.name, 0)
        if model_call.marks is not None:
            done = self._marked(call, proceed, state)
        else:
            done = proceed(call if state is None or given is not None else call.handed(state, batched=batched))
        self._keep(done, rows)
        return done

    def _watched(self, entry: Entry, run: Callable[[], Any]) -> Callable[[], Any]:
        """Watch a call for what recurs in it beside the layers that types tell of, before it or while it is made.

        Where that very call needs to know, a call of our own goes ahead.
        """
        foresee = self.marks is not None or not self._start.is_zeros or self.kept.states or ambiguous(self._model)
        if not foresee:
            return partial(watched, entry, run, self._examine)
        with torch.no_grad():
            found = foreseen(entry)
        if found is not None:
            self._examine(found)
        return run

    def _examine(self, found: Layers) -> None:
        """Carry what a call has shown to recur, or say that we do not."""
        self._looks = 0 if found.decided else self._looks - 1
        if not found and not found.doubts() and found.decided:
            raise not_recurrent(self._model)
        choice = Choice.of(found, self._layers, final=not self._looks or not (found.seen and found.seen.later))
        new = choice.new
        self._layers[:] = [*choice.stays, *new]
        names = {layer.name for layer in self._layers}
        self._silent = None if self._silent is None else (self._silent & names) | {layer.name for layer in new}
        if new:
            self.more.append(listen(self._model, new, self))
        self.more += when_reached(self._model, found, self._on_reached)
        for layer in new:
            self._begin_with(layer, found.live(layer))
        self._tell("not carried: ", choice.left)
        self._tell("carried, but pieces do not give what the whole gives: ", choice.uneven)

    def _tell(self, what: str, things: list[str]) -> None:
        new = [each for each in things if each not in self._told]
        self._told.update(new)
        if new:
            warn(f"{what}{'; '.join(new)}. hs.layers(model, *inputs).explain() says more.", CarryWarning)

    def _on_reached(self, name: str) -> None:
        """Say that a call goes where none went that was watched, and watch the next one."""
        if not self._looks and name not in self._told:
            self._looks = 1
            self._told.add(name)
            warn(
                f"not carried: what {name!r} may keep, which no call reached before; the next call is watched for it.",
                CarryWarning,
            )

    def _begin_with(self, layer: Layer, values: Mapping[str, list[Tensor]]) -> None:
        """Keep what a cell ended in that was not heard in its first call, only seen."""
        last = {name: found[-1] for name, found in values.items() if found}
        if len(last) == len(layer.spec.parts):
            state = _in_full_precision(layer.to_state(last), layer)
            self._call.staged[layer.name] = state.detach() if self.detach else state
            self._call.steps[layer.name] = len(next(iter(values.values())))

    def recompute(self, call: Call, proceed: Proceed) -> Call:
        """Hand over what this very call was handed when it first ran."""
        if self._within or call.given_native is not None:
            return proceed(call)
        state = self._replays.state_for(call)
        return proceed(call if state is None else call.handed(state))

    def _carried(self, call: Call, rows: int) -> State | None:
        layer, model_call = call.layer, self._call
        if layer.name in model_call.handed:
            if layer.seen is not None:
                return None  # it was handed something else than when it was seen: what that is, only the model knows
            raise CarryError(
                f"the layer {layer.name!r} is called twice in one call of the model, both times without a state, so "
                f"it is unclear which call should go on from which. Hand the state over in the model's forward "
                f"(`out, state = layer(x, state)`), or carry the two uses as two layers."
            )
        model_call.handed.add(layer.name)
        state = self._next(layer, rows)
        if may_be_recomputed(grad_before=model_call.grad):
            self._replays.note(call, state)
        return state

    def _heed(self, call: Call) -> State | None:
        """Take a state that the model itself hands over, and say so where it throws a carried one away."""
        layer, model_call = call.layer, self._call
        kept = self.kept.states.get(layer.name)
        lost = kept is not None and layer.name not in model_call.steps and layer.name not in self._told
        if not lost and model_call.marks is None:
            return None
        state = call.given
        assert state is not None
        if lost and kept is not None and not _all_zero(kept) and not self._from_the_caller(call):
            self._told.add(layer.name)
            made = "of zeros" if _all_zero(state) else "that is not the carried one"
            warn(
                f"the layer {layer.name!r} is handed a state {made} by the model itself, so the carried state is not "
                f"used. Let the model pass no state (None) where it makes one now.",
                CarryWarning,
            )
        return state

    def _from_the_caller(self, call: Call) -> bool:
        """Say whether the state that a layer is handed came with the call of the model: then its caller knows best."""
        own = {tensor.untyped_storage().data_ptr() for tensor in tensors(self._call.arguments).values()}
        given = tensors(call.given_native).values()
        return any(part.untyped_storage().data_ptr() in own for part in given)

    def _marked(self, call: Call, proceed: Proceed, state: State | None) -> Call:
        layer, marks, rows = call.layer, self._call.marks, call.rows
        assert marks is not None
        state = self._start.of(layer, rows) if state is None else state
        begin = self._call.steps[layer.name]
        if not layer.fused:
            starts = marks.piece(layer, rows, begin, 1).starts
            if starts is not None and begin > 0 and bool(starts.any()):
                anew = starts[:, 0].nonzero()[:, 0].tolist()
                state = state.put(anew, fitting(self._start.of(layer, rows), state).select(anew))
            self._call.staged.setdefault(layer.name, state)
            return proceed(call.handed(state))
        if not isinstance(call.input, Tensor) or not call.batched:
            seen = "sequence without rows" if isinstance(call.input, Tensor) else "packed sequence, which has its own"
            raise CarryError(
                f"carry.mark was told where rows start or end, but the layer {layer.name!r} is called with a {seen}"
                f"{'' if isinstance(call.input, Tensor) else ' lengths'}."
            )
        own = marks.piece(layer, rows, begin, call.steps)
        if begin == 0 and own.starts is not None:  # of the first step the carried state knows already
            own = Marks(own.starts.index_fill(1, torch.tensor([0]), False), own.lengths)
        self._within = True
        try:
            return run_marked(call, state, own, lambda batch: self._start.of(layer, batch))
        finally:
            self._within = False

    def _keep(self, call: Call, rows: int) -> None:
        layer, model_call = call.layer, self._call
        state = _in_full_precision(layer.to_state(call.state_native, batch=rows), layer)
        marks = model_call.marks
        if marks is not None and marks.lengths is not None and not layer.fused:
            alive = (marks.lengths > model_call.steps[layer.name]).nonzero()[:, 0].tolist()
            state = fitting(model_call.staged[layer.name], state).put(alive, state.select(alive))
        model_call.staged[layer.name] = state.detach() if self.detach else state
        model_call.steps[layer.name] += 1 if marks is None else call.steps

    def _next(self, layer: Layer, rows: int) -> State | None:
        kept = self.kept.states.get(layer.name)
        if kept is None:
            # A layer that makes its own first state is left alone; it may know better than zeros.
            return None if self._start.is_zeros and _starts_itself(layer) else self._start.of(layer, rows)
        fewer = self._fewer(layer, kept, rows)
        if any(tensor.requires_grad and _graph_is_freed(tensor) for tensor in kept.values()):
            raise CarryError(
                f"the carried state of {layer.label!r} still holds the graph of an earlier batch, and a backward "
                f"pass has used that graph up: the next one would fail. Keep detach=True, the default, "
                f"or cut it after each backward: carry.state = carry.state.detach()."
            )
        state = self.kept.current(layer, self._start)
        assert state is not None
        if fewer:
            state = state.select(slice(0, rows))
        if not torch.is_inference_mode_enabled() and any(part.is_inference() for part in state.values()):
            state = state.clone()  # autograd refuses tensors that were made in inference mode
        return self._reverse_anew(layer, state)

    def _fewer(self, layer: Layer, kept: State, rows: int) -> bool:
        """Say whether only the first rows go on; refuse other numbers of rows than are carried."""
        batch = kept.batch
        if rows == batch or (not self.strict and rows < batch):
            return rows < batch
        way_out = (
            "The last batch of an epoch is often smaller: use drop_last=True, or Carry(model, rows='first')."
            if rows < batch
            else "Another set of sequences begins with carry.reset()."
        )
        carried = f"the carried state of {layer.label!r} has {batch}"
        raise StateMismatch(f"the input has {rows} rows, but {carried}. {way_out}")

    def _reverse_anew(self, layer: Layer, state: State) -> State:
        if not both_ways(layer):
            return state
        initial = fitting(self._start.of(layer, state.batch), state)
        odd = torch.arange(1, 2 * layer.spec.layers, 2, device=state.device)
        return State(
            {name: tensor.index_copy(0, odd, initial[name].index_select(0, odd)) for name, tensor in state.items()},
            state.batch_axis,
        )

    def _report_silent(self, entry: nn.Module) -> None:
        """Say once which layers the first call of the whole model did not reach."""
        if self._silent is None:
            return
        self._silent -= self._call.steps.keys()
        if self._silent and entry is self._model:
            names = ", ".join(repr(name) for name in sorted(self._silent))
            warn(
                f"{names} {'was' if len(self._silent) == 1 else 'were'} found in the model, but not called in its "
                f"first call, so nothing is carried there. Usually this call takes another way through the model; "
                f"a layer whose weights are used without calling it is not heard.",
                CarryWarning,
            )
        if not self._silent or entry is self._model:
            self._silent = None


def both_ways(layer: Layer) -> bool:
    """Say whether a layer also runs backwards."""
    return layer.fused and layer.spec.bidirectional


def _refuse_export() -> None:
    if torch.compiler.is_exporting():
        raise CarryError(
            "torch.export would bake the state that is carried just now into the exported program. "
            "Close the Carry first: hs.Carry.of(model).close()."
        )


def _all_zero(state: State) -> bool:
    return all(not bool(tensor.detach().any()) for tensor in state.values())


def _starts_itself(layer: Layer) -> bool:
    if layer.seen is not None:
        return True
    second = list(inspect.signature(type(layer.module).forward).parameters.values())[2:3]
    return bool(second) and second[0].default is None


def _in_full_precision(state: State, layer: Layer) -> State:
    # Autocast leaves half-precision states behind, which the layer would refuse when autocast is off.
    if not torch.is_autocast_enabled(next(iter(state.values())).device.type):
        return state
    weight = next((p for p in layer.module.parameters() if p.is_floating_point()), None)
    if weight is None or weight.dtype not in (torch.float32, torch.float64):
        return state
    return state.map(lambda part: part.to(weight.dtype) if part.dtype in (torch.float16, torch.bfloat16) else part)


def _graph_is_freed(tensor: Tensor) -> bool:
    """Say whether the graph behind `tensor` was used up by a backward pass."""
    nodes = [tensor.grad_fn]
    for _ in range(64):  # the first nodes that saved anything decide; deeper ones need not be asked
        if not nodes:
            return False
        node = nodes.pop(0)
        if node is None:
            continue
        for name in dir(node):
            if name.startswith("_saved_"):
                try:
                    getattr(node, name)
                except RuntimeError as error:
                    return "second time" in str(error)  # torch has no other word for it
        nodes.extend(inner for inner, _ in node.next_functions)
    return False
