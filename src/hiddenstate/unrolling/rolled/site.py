"""A loop in a model: run as it is written until it is known, and by the engine where that is faster."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from ...cells import (
    Rank,
    listeners,
    may_be_recomputed,
    put_random_streams,
    random_streams,
    random_streams_kept,
    recomputing,
    unheard,
    untouched,
    watchers,
)
from ...errors import Untraceable
from ...state import ends, mapped
from ..checks import Task
from ..engines import obstacle_around, switched_off
from ..judging import agree
from ..loop import run_loop
from ..observing import must_step
from ..scheduled import read_only, ready, settle_now
from ..twins import members
from .collected import Collected
from .index import LeftAlone
from .joined import AllTurns
from .loop_code import LoopCode
from .pace import paces_of
from .plan import Given, Left, RollPlan, SeenRun, learn, results
from .source import called_modules
from .turns import TurnReader, Turns

# A turn's names are attributes of the module that it is run as, of which the user knows nothing.
_OWN, _NAME = re.compile(r"its own attribute 'own_([^']*)'"), r"'\1'"
_ANY = torch.zeros(1, 1)
_REFUSALS = 3  # after which no more is asked whether a loop can be rolled up
_LONGEST = 1_000  # runs as it is written until it is asked again whether the engine is faster
_BUILDS = 8  # schedules of one loop, from which on it is said to change too often
FEWEST = 4  # turns of a run below which it is not even looked at
_MOST = 4  # forms of one loop, from which on it is said to change too often


@dataclass(frozen=True, slots=True, eq=False)
class EngineRun:
    """What a run by the engine gave."""

    made: dict[str, Any]  # what the first turn bound and left, where it had to run as it is written
    given: Given


class LoopSite:
    """One loop of one module."""

    def __init__(self, code: LoopCode, function: FunctionType, where: str) -> None:
        """Begin with nothing known."""
        self.code, self.function, self.where = code, function, where
        self.said = "not run yet"
        self.closed = False  # whether it is left alone for good
        self._reader = TurnReader(code, function)
        self._plans: list[RollPlan] = []
        self._lock = threading.RLock()
        self._refused = 0  # runs in a row that went as written
        self._rest = self._waited = 0  # runs until it is asked again whether the engine is faster
        self._builds = 0
        self._last_called: tuple[list[tuple[nn.Module, int]], list[nn.Module]] | None = None

    def enter(self, names: dict[str, Any], over: Sequence[Any]) -> dict[str, Any] | SeenRun | None:
        """Return new values for names in place of the loop, or what is to be known when it has run, or None."""
        if self.closed or self._resting():
            return None
        try:
            _refuse_now()
            names = {**names, **{last: names[into][-1] for last, into in self.code.lasts.items() if names.get(into)}}
            turns = self._reader.read(names, over)
            if turns.count < FEWEST:
                raise Untraceable(f"it ran for fewer than {FEWEST} turns")
            _refuse_values([*turns.pieces.values(), *(names.get(name) for name in self.code.carried)])
            with self._lock:
                ran = self._run(turns, names)
            if ran is None:
                return self._seen(turns, names)
        except LeftAlone as reason:
            self._as_written(f"{reason.reason} (line {reason.line or self.code.line})")
            return None
        except Untraceable as reason:
            self.said = f"as it is written: {_OWN.sub(_NAME, reason.reason)}"
            return None
        except Exception as error:  # whatever it is, the loop itself is still there, and says it better
            self._as_written(f"{type(error).__name__}: {str(error)[:200]}")
            return None
        self._refused = self._rest = 0
        return self._hand_back(turns, names, ran)

    def leave(self, seen: SeenRun, names: dict[str, Any]) -> None:
        """Learn from a run that went as it is written."""
        try:
            with self._lock, unheard():
                names = {**names, **{last: names[into][-1] for last, into in self.code.lasts.items()}}
                self._learn(seen, names)
        except LeftAlone as reason:
            self._close(f"{reason.reason} (line {reason.line or self.code.line})")
        except Untraceable as reason:
            self._close(_OWN.sub(_NAME, reason.reason))
        except Exception as error:  # nothing that goes wrong in learning is the user's business
            self._close(f"{type(error).__name__}: {str(error)[:200]}")

    def _close(self, reason: str) -> None:
        if self._plans:
            self.said = f"as it is written: {reason}"
            self._rest_longer()
        else:
            self.closed, self.said = True, f"left alone: {reason}"

    def _as_written(self, reason: str) -> None:
        """Say why a run goes as it is written; where that comes again and again, no more is asked."""
        self._refused += 1
        self.closed = self._refused >= _REFUSALS and not self._plans
        self.said = f"left alone: {reason}"

    def _resting(self) -> bool:
        self._waited += 1
        return self._waited <= self._rest

    def _rest_longer(self) -> None:
        self._rest, self._waited = min(2 * self._rest + 1, _LONGEST), 0

    def _run(self, turns: Turns, names: dict[str, Any]) -> EngineRun | None:
        """Return what the engine makes of the turns; None where that is not known yet."""
        refusal: Untraceable | None = None
        # What turns add to in place is written at the end, when its first value may be needed for a backward pass.
        own = {name: names[name].clone() for name in self.code.added if isinstance(names.get(name), Tensor)}
        # A first turn that is run as it is written must not write into lists that the loop itself may still start from.
        names = {**names, **own, **self._copied(names)}
        for plan in self._plans:
            if not plan.fits(turns) or not all(name in names for name in plan.code.carried):
                continue
            rows = next((piece.shape[1] for piece in turns.pieces.values() if plan.form.rows), None)
            parts, first, made = plan.settled(names, rows), 0, {}
            stream = random_streams()
            try:
                self._refuse_hooks(plan, names)
                if parts is None:
                    made, first = plan.first_turn(turns, names), 1
                    parts = plan.settled(made, rows)
                given = None if parts is None else self._by_engine(plan, turns, names, parts, first)
            except Untraceable as reason:
                put_random_streams(stream)
                refusal = reason
                continue
            except BaseException:
                put_random_streams(stream)
                raise
            if given is not None:
                if plan is not self._plans[0]:
                    self._plans = [plan, *(other for other in self._plans if other is not plan)]
                return EngineRun(made, given)
            put_random_streams(stream)
        if refusal is not None:
            raise refusal
        return None

    def _by_engine(
        self, plan: RollPlan, turns: Turns, names: dict[str, Any], parts: list[Tensor], first: int
    ) -> Given | None:
        task = plan.task(turns, parts, first)
        _surround(plan, names)
        try:
            if type(task.x) not in (Tensor, nn.Parameter):
                raise Untraceable("its pieces are no plain tensors")
            found = ready(plan.layer, task)
            if not found:
                return None
            if isinstance(found, str):
                self._rest_longer()
                raise Untraceable(found)
            self.said = f"by the engine, {found.because}"
            return plan.values(*found.run())
        finally:
            plan.layer.module.forget()  # type: ignore[operator]

    def _refuse_hooks(self, plan: RollPlan, names: dict[str, Any]) -> None:
        """Refuse a run of which somebody wants to see every turn: a hook or a listener on a module that it calls."""
        for module in self._called(
            {name: names[name] for name in plan.reads if isinstance(names.get(name), nn.Module)}
        ):
            heard = [listener for listener in listeners(module) if listener.rank is not Rank.ACCELERATE]
            if heard:
                raise Untraceable(
                    f"{heard[0].title or type(heard[0]).__name__} listens to a {type(module).__name__} in it"
                )
            if must_step(module):
                raise Untraceable(f"a hook on a {type(module).__name__} wants to see every turn")

    def _called(self, modules: dict[str, nn.Module]) -> list[nn.Module]:
        """Return the modules that a turn may call: read off the source anew where one of those in reach is another."""
        inside = [member for module in modules.values() for member in members(module)]
        key = [(member, len(member.__dict__)) for member in inside]
        if self._last_called is None or self._last_called[0] != key:
            self._last_called = key, called_modules(self.code.body, modules)
        return self._last_called[1]

    def _trial(self, turns: Turns, names: dict[str, Any]) -> list[Any]:
        """Run turns by the engine, and return what the loop would have left."""
        ran = self._run(turns, names)
        if ran is None:
            raise Untraceable("the engine does not take it")
        left = self._hand_back(turns, names, ran)
        return [left, *(names[each.into] for each in self.code.collected if isinstance(names.get(each.into), list))]

    def _hand_back(self, turns: Turns, names: dict[str, Any], ran: EngineRun) -> dict[str, Any]:
        found = {**ran.given.carried, **ran.given.finals}
        for collected in self.code.collected:
            first: list[Any] = ran.made.get(collected.name, [])
            left = ran.given.left[collected.name]
            if collected.axis is None:
                _put_down(
                    collected, turns, names[collected.into], first, left, joined=collected.into in self.code.joined
                )
            else:
                before = names.get(collected.into)
                pieces = [*([] if before is None else [before]), *first, *left.items()]
                found[collected.into] = torch.cat(pieces, collected.axis)
        for name in (self.code.mutated | self.code.added) & set(ran.given.carried):
            found[name] = _written_back(names[name], found[name])
        for leaf in self.code.leaves:
            if leaf.target and leaf.target not in found:
                values = turns.counts[leaf.target] if leaf.counts else turns.pieces[leaf.target]
                found[leaf.target] = values[-1]
        return found

    def _seen(self, turns: Turns, names: dict[str, Any]) -> SeenRun:
        lengths = {c.into: len(names[c.into]) for c in self.code.collected if isinstance(names.get(c.into), list)}
        carried = set(self.code.carried) - self.code.added
        read = [*turns.pieces.values(), *(names[name] for name in (*carried, *self.code.read) if name in names)]
        tensors = [end for _, end in ends(read) if isinstance(end, Tensor)]
        versions = [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]
        kept = self._copied(names)
        kept |= {name: _copy(names[name]) for name in self.code.added if isinstance(names.get(name), Tensor)}
        return SeenRun(turns, {**names, **kept}, lengths, versions, random_streams(), self.code.line)

    def _copied(self, names: dict[str, Any]) -> dict[str, Any]:
        """Return the lists and dicts that turns write into, with what is in them now."""
        return {name: mapped(names[name], lambda _, end: end) for name in self.code.mutated if name in names}

    def _learn(self, seen: SeenRun, after: dict[str, Any]) -> None:
        learned = learn(self.code, self.function, seen, after)
        plan = next((plan for plan in self._plans if plan.form.alike(learned.form)), learned)
        if plan is learned and len(self._plans) == _MOST:
            raise LeftAlone("it takes ever other kinds of pieces", self.code.line)
        rows = next((piece.shape[1] for piece in seen.turns.pieces.values() if plan.form.rows), None)
        _surround(plan, seen.names)
        try:
            with random_streams_kept():
                if plan not in self._plans:
                    self._refuse_hooks(plan, seen.names)
                    read_only(plan.layer, plan.task(seen.turns, _leaves(plan.settled(after, rows)), 0))
                put_random_streams(seen.stream)
                parts, first, made = plan.settled(seen.names, rows), 0, {}
                if parts is None:
                    with untouched(plan.layer.module):
                        made, first = plan.first_turn(seen.turns, seen.names), 1
                        stream = random_streams()
                    put_random_streams(stream)
                    parts = plan.settled(made, rows)
                if parts is None:
                    raise LeftAlone("what crosses is of another kind after every turn", self.code.line)
                task = plan.task(seen.turns, _leaves(parts), first)
                self._prove(plan, seen, after, task, made)
                if plan not in self._plans:
                    self._plans.append(plan)
                self._builds += 1
                if self._builds > _BUILDS:
                    raise LeftAlone("what it reads changes too often from run to run", self.code.line)
                self.said = settle_now(plan.layer, task, partial(paces_of, plan, seen, self._trial))
        finally:
            plan.layer.module.forget()  # type: ignore[operator]

    def _prove(self, plan: RollPlan, seen: SeenRun, after: dict[str, Any], task: Any, made: dict[str, Any]) -> None:
        """Refuse a plan whose turns, one after the other, give other numbers than the loop gave."""
        with torch.no_grad(), untouched(plan.layer.module):
            out, state = run_loop(plan.layer, task)
        values = plan.values(out, state)
        given = {**values.carried, **values.finals}
        for collected in self.code.collected:
            given[collected.into] = [*made.get(collected.name, []), *values.left[collected.name].items()]
        for name, value in results(plan, seen, after):
            ours = [end.detach() for _, end in ends(given[name]) if isinstance(end, Tensor)]
            theirs = [end.detach() for _, end in ends(value) if isinstance(end, Tensor)]
            if len(ours) != len(theirs):
                raise LeftAlone(f"{name!r} is not what the loop left", self.code.line)
            try:
                agree(ours, theirs, 1e-3)
            except Untraceable:
                raise LeftAlone(f"run turn by turn, {name!r} is not what the loop left", self.code.line) from None


def _refuse_now() -> None:
    """Refuse a run that something else wants to see, or will run again."""
    if switched_off():
        raise Untraceable("HIDDENSTATE_ENGINE=loop")
    if watchers():
        raise Untraceable("its operations are being watched")
    if recomputing() or may_be_recomputed(grad_before=torch.is_grad_enabled()):
        raise Untraceable("activation checkpointing runs it a second time")
    obstacle = obstacle_around(None, Task(_ANY))
    if obstacle is not None:
        raise Untraceable(obstacle)


def _refuse_values(values: Sequence[Any]) -> None:
    """Refuse what turns read where it is nothing, or not in one place that was compared."""
    tensors = [end for _, end in ends(values) if isinstance(end, Tensor) and end.dim()]
    if not all(tensor.numel() for tensor in tensors):
        # On a GPU an index into nothing ends all work of the process, rather than a trial.
        raise Untraceable("it has no rows, or what its turns read has no numbers")
    devices = {tensor.device for tensor in tensors}
    other = next((device.type for device in devices if device.type not in ("cpu", "cuda")), None)
    if other is not None:
        raise Untraceable(f"on {other} nothing was compared yet")
    if len(devices) > 1:
        raise Untraceable(f"what its turns read lies on several devices, {', '.join(sorted(map(str, devices)))}")
    if "cuda" in {device.type for device in devices} and torch.cuda.is_current_stream_capturing():
        raise Untraceable("it is being recorded as a part of a CUDA graph")


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _surround(plan: RollPlan, names: dict[str, Any]) -> None:
    plan.layer.module.surround({name: names.get(name) for name in plan.reads})  # type: ignore[operator]


def _leaves(parts: list[Tensor] | None) -> list[Tensor]:
    """Return tensors like these that lead nowhere."""
    if parts is None:
        raise LeftAlone("what crosses is of another kind after every turn", 0)
    grad = torch.is_grad_enabled()
    return [part.detach().requires_grad_(part.requires_grad and grad) for part in parts]


def _written_back(container: Any, value: Any) -> Any:
    """Return the container that turns wrote into, with what is in it now."""
    if type(container) is list:
        container[:] = value
        return container
    if type(container) is dict:
        container.update(value)
        return container
    if isinstance(container, Tensor):  # that was added to, in place
        return container.copy_(value)
    return value


def _put_down(collected: Collected, turns: Turns, into: Any, first: list[Any], left: Left, *, joined: bool) -> None:
    """Put what turns left where the loop puts it; `first`, what its first turn left, where that ran by itself."""
    if collected.name in turns.written:
        if left.whole is not None:
            turns.written[collected.name].write(first, left.whole)
    elif collected.name in turns.places:
        for place, item in zip(turns.places[collected.name], [*first, *left.items()], strict=True):
            into[place] = item
    elif collected.in_front:
        into[:0] = [*first, *left.items()][::-1]
    elif joined and left.whole is not None:
        into.extend([*first, AllTurns(left.whole)])
    else:
        into.extend([*first, *left.items()])
