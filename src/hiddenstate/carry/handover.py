"""Handing each layer of a model the state it continues from, and keeping the state it ends in."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..cells import Call, Handle, Layer, OuterCall, Proceed, under_checkpointing, warn
from ..errors import CarryError, CarryWarning
from ..state import State, tensors
from .attributes import checkpointed
from .carrier import Carrier, CarryOptions, refuse_export
from .examination import Examination
from .given import GivenStates, from_the_caller, not_used
from .initial import Start
from .kept import Kept, NextState, fitting, in_full_precision
from .loops import GoingOn
from .marks import Marks, RunningCall, at_lengths, one_for_all, run_marked
from .pieces import Inputs
from .replays import Replays
from .ways import line_now


class HandOver(Carrier):
    """The listener of a Carry: sets states before each call of a layer, and reads them after it."""

    def __init__(self, model: nn.Module, found: list[Layer], start: Start, options: CarryOptions) -> None:
        """Prepare to listen to `model`, whose recurrent layers are `found`."""
        self.examination = Examination(model, found, options, self)
        self.kept = Kept()
        self.marks: Marks | None = None  # for the next call
        self.detach, self._override = options.detach, options.override
        self._model, self._layers, self._start = model, found, start
        self._next = NextState(start, options.strict)
        self._call = RunningCall()
        self._replays = Replays()
        self._given = GivenStates(self.examination, self._next, options.override)
        self._lost: set[str] = set()  # layers for which the loss of a state was reported
        self.handles: list[Handle] = []
        self.closed = self.going_back = self._within = False  # within: `with_graph`; a layer that we run in pieces
        self._tried = Kept()  # the states in which our last trial call ended

    @property
    def kept(self) -> Kept:
        """The states that layers continue from."""
        return self._kept

    @kept.setter
    def kept(self, kept: Kept) -> None:
        self._kept = kept
        self.examination.adopted.replaced = True

    def model_call(self, entry: OuterCall, run: Callable[[], Any]) -> Any:
        """Run a call of the model, and keep the states its layers end in if the call succeeds."""
        refuse_export()
        if self.closed:
            self.leave()
            return run()
        if not self.examination.open:
            return self._plain_call(entry, run)
        adopted = self.examination.adopted
        adopted.look()
        way = self.examination.new_way(entry)
        run = run if way is None else partial(way.along, run)  # outside other modes, since it must not see their work
        run = self.examination.around(entry, run, ahead=self._has_to_know(), loaded=self._kept.loaded_parts)
        self.examination.check_loaded(self._kept.loaded_parts)
        self._check_rows(entry)
        went_on = self._kept.graph
        adopted.before(self._kept, detach=self.detach, rows=self.examination.rows_of((entry.args, entry.kwargs)))
        call = self._call = RunningCall(self.marks, torch.is_grad_enabled(), (entry.args, entry.kwargs), way)
        self.running = True
        try:
            result = self._begun(entry, run)
            self._stage_adopted()
            self.examination.prove(entry, call.way, call.replaced, self._kept.states)
        except BaseException:
            adopted.undo()
            raise
        finally:
            self.running = False
            self._start.forget()
        if went_on and not self.detach and torch.is_grad_enabled():
            adopted.refuse_cut(override=self._override)
        self._end(call)
        self._learn_rows(entry)
        self.examination.report_silent(entry.module, set(call.steps))
        return result

    def _plain_call(self, entry: OuterCall, run: Callable[[], Any]) -> Any:
        """Run a call in which neither loops nor attributes are carried: hearing the layers is enough."""
        way = self.examination.new_way(entry)
        call = self._call = RunningCall(self.marks, torch.is_grad_enabled(), (entry.args, entry.kwargs), way)
        try:
            result = run() if way is None else way.along(run)
        finally:
            self._start.forget()
        self._settle()
        self.examination.prove(entry, call.way, call.replaced, self._kept.states)
        self._end(call)
        return result

    def _end(self, call: RunningCall) -> None:
        """Keep what was noted during a call, if the call took the steps that the marks described."""
        if call.marks is not None:
            self.marks = None
            for layer in self._layers:
                if layer.name in call.steps and layer.name in call.staged:
                    call.marks.check_taken(layer, call.steps[layer.name])
        names = {layer.name for layer in self._layers}
        self._given.ended(call.staged, call.steps)
        self._kept.graph = call.grad and not self.detach
        self._kept.advance({name: state for name, state in call.staged.items() if name in names})

    def close(self) -> None:
        """Stop carrying. Layers that a backward pass may run again are released at the model's next call."""
        self.marks, self.closed = None, True
        if not self._replays:
            self.leave()

    def leave(self) -> None:
        """Remove everything from the model."""
        for handle in (*self.handles, *self.examination.handles):
            handle.remove()

    def _check_rows(self, entry: OuterCall) -> None:
        """Raise, before the model runs, if a call has another number of rows than loops and attributes have kept."""
        rows = self.examination.rows_of((entry.args, entry.kwargs)) if entry.module is self._model else None
        for layer in self._layers:
            seen = layer.seen is not None and layer.name in self._kept.states
            if rows is not None and seen and rows != self._kept.states[layer.name].batch:
                self._next.kept(self._kept, layer, rows)
                self.examination.adopted.refuse_fewer(layer, self._kept.states[layer.name].batch, rows)

    def _learn_rows(self, entry: OuterCall) -> None:
        batches = {self._kept.states[layer.name].batch for layer in self._layers if layer.name in self._kept.states}
        if entry.module is self._model and len(batches) == 1:
            self.examination.learn_rows((entry.args, entry.kwargs), batches.pop())

    def _has_to_know(self) -> bool:
        """Say whether a call must be known beforehand, since it starts or continues from a state of ours."""
        loaded = self._kept.loaded - {layer.name for layer in self._layers}
        return self.marks is not None or not self._start.is_zeros or bool(loaded)

    def layer_call(self, call: Call, proceed: Proceed) -> Call:
        """Hand the state over, run the call, and note the state to keep."""
        if self._within or self.closed or call.layer not in self._layers:
            return proceed(call)
        way = self._call.way
        return self._handed(call, proceed) if way is None else way.through(call, partial(self._handed, call, proceed))

    def _handed(self, call: Call, proceed: Proceed) -> Call:
        layer, model_call, given = call.layer, self._call, call.given_native
        first = layer.name not in model_call.steps
        if (
            not first
            and model_call.marks is None
            and self._given.is_last(given, model_call.ended[layer.name], grad=model_call.grad)
        ):
            done = model_call.unsettled[layer.name] = proceed(call)
            model_call.ended[layer.name] = done.state_native
            model_call.steps[layer.name] += 1
            return done
        self._settle(layer.name)
        rows, batched = layer.rows(call.args, call.kwargs)
        if given is not None and not first:
            self._given.stepped(call, self._kept, (model_call.ended[layer.name], model_call.staged.get(layer.name)))
        elif given is not None and layer.name not in self._kept.states:
            self._given.begun(call, self._kept)
        if given is None:
            state, instead = self._carried(call, rows), True
        elif self._given.is_own(call, model_call.arguments, self._kept, first=first, grad=model_call.grad):
            state, instead = self._overridden(call, rows)
        else:
            state, instead = self._heed(call), False
        if first and model_call.marks is not None and model_call.marks.within:
            begins = self._given.beginning_of(call, model_call.arguments)
            model_call.begins.update({} if begins is None else {layer.name: begins})
        model_call.steps.setdefault(layer.name, 0)
        if model_call.marks is not None:
            done = self._marked(call, proceed, state)
        else:
            done = proceed(call.handed(state, batched=batched) if instead and state is not None else call)
        self._keep(done, rows)
        return done

    def try_call(self, inputs: Inputs, *, on: bool) -> Any:
        """Make a trial call with a state apart from the user's."""
        before, (args, kwargs) = (self._kept, self._call), inputs
        self._kept = self._tried if on else Kept()
        self.examination.adopted.replaced = True
        way = self.examination.trial_way()
        self._call = RunningCall(None, False, inputs, way)
        try:
            self.examination.adopted.before(self._kept, detach=self.detach, rows=self.examination.rows_of(inputs))
            run = partial(way.along, partial(self._model.forward, *args, **kwargs))
            result = self._begun(OuterCall(self._model, args, kwargs), run, trial=True)
            self._stage_adopted()
            self._kept.advance(self._call.staged)
            self._tried = self._kept
        finally:
            self._kept, self._call = before
        return result

    def called_anew(self) -> str:
        """Return a layer that was called again in one call of the model with another state than it gave."""
        return next((layer.name for layer in self._layers if layer.name in self._given.changing), "")

    def give_up(self, layer: Layer) -> None:
        """Stop keeping the state of a layer."""
        self._call.staged.pop(layer.name, None)

    def begin_with(self, layer: Layer, values: Mapping[str, list[Tensor]]) -> None:
        """Keep the end state of a loop, or of a cell that was watched in its first call, but not heard."""
        if not all(values.get(part) for part in layer.spec.parts):
            return
        steps = len(next(iter(values.values())))
        marks = self._call.marks
        state = layer.to_state({name: found[-1] for name, found in values.items()})
        if marks is not None and marks.lengths is not None:
            first = self._kept.states.get(layer.name) or self.start_of(layer, state.batch)
            state = at_lengths(layer, values, marks.lengths, first=first)
        state = in_full_precision(state, layer)
        self._call.staged[layer.name] = state.detach() if self.detach else state
        self._call.steps[layer.name] = steps

    def _settle(self, *names: str) -> None:
        """Keep the end states of cells that have taken another step: only the last one matters."""
        for name in names or list(self._call.unsettled):
            done = self._call.unsettled.pop(name, None)
            if done is not None:
                self._call.steps[name] -= 1
                self._keep(done, done.rows)

    def _stage_adopted(self) -> None:
        self._settle()
        call, adopted = self._call, self.examination.adopted
        heard = {name: call.staged[name] for name in call.ended}
        if call.marks is not None:  # the kept states are not those that the layers returned
            heard = {each.name: each.to_state(call.ended[each.name]) for each in self._layers if each.name in heard}
        states = adopted.after(self._kept, heard, detach=self.detach)
        if call.marks is not None:
            call.marks.check_unheard([*states, *adopted.unheard()])
        for name, state in states.items():
            state = in_full_precision(state, adopted.layers[name])
            self._call.staged[name] = state.detach() if self.detach else state

    def _begun(self, entry: OuterCall, run: Callable[[], Any], *, trial: bool = False) -> Any:
        """Run a call whose loops continue from the kept states."""
        loops = self.examination.loops
        if not loops or not self._reaches_loops(entry):
            return run()
        look = self.examination.goes_on and not trial
        done = loops.run(entry, run, self._hand_loop, self._kept.states, anew=look)
        if look:
            self.examination.again(done.found)
        for name, values in done.made.items():
            self._given.check_anew(loops.layers[name], self._kept, loops.own[name])
            self.begin_with(loops.layers[name], values)
        return done.result

    def _reaches_loops(self, entry: OuterCall) -> bool:
        """Say whether a call runs the whole model; raise for marks that cannot be applied to a loop."""
        loops = list(self.examination.loops.layers.values())
        if entry.module is not self._model:
            inside = [loop.label for loop in loops if loop.module in set(entry.module.modules())]
            self.examination.tell("not carried in calls of a part of the model by itself: ", inside)
            return False
        if self.marks is not None and self.marks.within:
            raise CarryError(
                f"carry.mark was told that rows start anew in mid-sequence, but {loops[0].label!r} is a loop in a "
                f"forward, whose steps are not heard. Cut the input where rows start, and reset them in between."
            )
        return True

    def _hand_loop(self, layer: Layer, rows: int) -> GoingOn | None:
        if under_checkpointing():
            raise CarryError(
                f"{layer.label!r}, a loop in a forward, runs under activation checkpointing: what is put in its start "
                f"would not be there when the backward pass runs it once more. Let the loop run without it."
            )
        kept = self._kept.states.get(layer.name)
        if kept is None:
            return None if self._start.is_zeros else (self._start.of(layer, rows), None)
        self._given.check_unclear(layer)
        self._call.replaced.add(layer.name)
        state = self._next.kept(self._kept, layer, rows or kept.batch)
        anew = self._kept.anew.get(layer.name)
        return state, None if anew is None or not bool(anew.any()) else anew[: state.batch]

    def recompute(self, call: Call, proceed: Proceed) -> Call:
        """Hand over the state that this same call was given when it first ran."""
        held = self.examination.adopted.holding(tensors(call.given_native).values())
        if held is not None:
            raise checkpointed(repr(call.layer.label), held[1])
        if self._within or (call.given_native is not None and not self._override):
            return proceed(call)
        state = self._replays.state_for(call)
        return proceed(call if state is None else call.handed(state))

    def _carried(self, call: Call, rows: int) -> State | None:
        layer, model_call = call.layer, self._call
        if layer.name in model_call.handed:
            if layer.seen is not None:
                return None  # its state has another form than the one that was seen
            raise CarryError(
                f"the layer {layer.name!r} is called twice in one call of the model, both times without a state, so "
                f"it is unclear which call should go on from which. Hand the state over in the model's forward "
                f"(`out, state = layer(x, state)`), or carry the two uses as two layers."
            )
        model_call.handed.add(layer.name)
        state = self._next.of(self._given.kept_for(layer, self._kept), layer, rows)
        if state is None:
            self._given.started(call, by_itself=True)
        self._replays.note(call, state, grad=self._call.grad, graph=self._kept.graph)
        return state

    def _overridden(self, call: Call, rows: int) -> tuple[State | None, bool]:
        """Return the replacement for a state that the model itself passes, and whether to replace it."""
        first = call.layer.name not in self._call.steps
        state = self._given.instead(call, self._kept, rows) if first else None
        if first and state is None:
            self._given.started(call, by_itself=False)
        self._replays.note(call, state, grad=self._call.grad, graph=self._kept.graph)
        if state is None:
            return call.given, False
        if call.layer.name not in self._given.fed:
            self._call.replaced.add(call.layer.name)
        return state, True

    def _heed(self, call: Call) -> State | None:
        """Use a state that the model itself passes, and warn if that discards a carried state."""
        layer, model_call = call.layer, self._call
        kept = self._kept.states.get(layer.name)
        if kept is not None and layer.name not in model_call.steps:
            self._given.check_heeded(call, self._kept)
        lost = kept is not None and layer.name not in {*model_call.steps, *self._lost, *self._given.fed}
        if not lost and model_call.marks is None:
            return None
        state = call.given
        assert state is not None
        if lost and not from_the_caller(call, model_call.arguments) and not self._given.goes_on(layer, state, kept):
            self._lost.add(layer.name)
            said = not_used(layer, state, line_now(sys._getframe()))
            if self.going_back:  # otherwise gradients would stop at each piece
                raise CarryError(said)
            warn(said, CarryWarning)
        return state

    def _marked(self, call: Call, proceed: Proceed, state: State | None) -> Call:
        layer, marks, rows = call.layer, self._call.marks, call.rows
        assert marks is not None
        state = self._start.of(layer, rows) if state is None else state
        begin = self._call.steps[layer.name]
        if not layer.fused:
            starts = marks.piece(layer, rows, begin, 1).starts
            if starts is not None and begin > 0 and bool(starts.any()):
                anew = starts[:, 0].nonzero()[:, 0].tolist()
                first = self._call.begins.get(layer.name) or self._start.of(layer, rows)
                state = state.put(anew, fitting(first, state).select(anew))
            self._call.staged.setdefault(layer.name, state)
            return proceed(call.handed(state))
        if not isinstance(call.input, Tensor) or not call.batched:
            seen = "sequence without rows" if isinstance(call.input, Tensor) else "packed sequence, which has its own"
            raise CarryError(
                f"carry.mark was told where rows start or end, but the layer {layer.name!r} is called with a {seen}"
                f"{'' if isinstance(call.input, Tensor) else ' lengths'}."
            )
        own = marks.piece(layer, rows, begin, call.steps)
        if begin == 0 and own.starts is not None:  # the carried state accounts for the first step
            own = Marks(own.starts.index_fill(1, torch.tensor([0]), False), own.lengths)
        self._within = True
        try:
            begins = self._call.begins.get(layer.name)
            start = partial(self._start.of, layer) if begins is None else one_for_all(layer, begins)
            return run_marked(call, state, own, start)
        finally:
            self._within = False

    def _keep(self, call: Call, rows: int) -> None:
        layer, model_call = call.layer, self._call
        state = in_full_precision(layer.to_state(call.state_native, batch=rows), layer)
        marks = model_call.marks
        if marks is not None and marks.lengths is not None and not layer.fused:
            alive = (marks.lengths > model_call.steps[layer.name]).nonzero()[:, 0].tolist()
            state = fitting(model_call.staged[layer.name], state).put(alive, state.select(alive))
        model_call.ended[layer.name] = call.state_native
        model_call.staged[layer.name] = state.detach() if self.detach else state
        model_call.steps[layer.name] += 1 if marks is None else call.steps

    def start_of(self, layer: Layer, rows: int) -> State:
        """Return the start of rows that begin anew: what the model made last, or what `init` says."""
        if layer.name in self.examination.adopted.layers:
            return self.examination.adopted.start_of(layer, self._kept.states[layer.name])
        own = self.examination.loops.own.get(layer.name) or self._given.own.get(layer.name)
        return own if own is not None and own.batch == rows and self._start.is_zeros else self._start.of(layer, rows)
