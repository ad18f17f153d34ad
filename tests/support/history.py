"""Whether what callers saw of sessions can be explained: linearizability against a plain replay in torch.

A history is what was asked, when, and what was answered. It is explained by an order of all that was asked, in keeping
with time (what had ended before another began comes first), in which sessions that are run one operation at a time, by
torch alone, give every answer that was given. What failed in a way that leaves open whether it took place may stand
there or not; where it may yet take place, as when a connection broke, anywhere after its beginning.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.support.models import Deep

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
UNKNOWN: Any = "unknown"  # in place of an outcome: it may have taken place
_COPY = "\0copy"  # in place of a session: what the store's copy has of the family
_MOST = 100_000  # steps of a search, after which it is given up


@dataclass(eq=False)
class Action:
    """What a caller asks."""

    kind: str  # open, push, reset, close, fork, info, export or import; copy or set back, of the whole store
    session: str
    x: Tensor | None = None  # (steps, feature)
    seq: int | None = None
    target: str = ""  # of a fork
    exported: tuple[int, int, Tensor] | None = None  # what an import puts there: inputs and steps so far, the state

    def __str__(self) -> str:
        number = {"push": f" #{self.seq or 'next'}", "fork": f" to {self.target}"}.get(self.kind, "")
        return f"{self.kind} {self.session}{number}"


@dataclass(eq=False)
class Event:
    """An action with what came of it; `ended` is infinite where it may yet take place."""

    action: Action
    began: float
    ended: float = math.inf
    outcome: Any = UNKNOWN  # until it is known

    def __str__(self) -> str:
        return f"{self.began:.4f}-{self.ended:.4f} {self.action}: {self.outcome}"


class Sequential(NamedTuple):
    """A session as it is after some operations."""

    seq: int = 0
    steps: int = 0
    node: int = 0  # its state, as a number of `Replay`
    answers: tuple[tuple[int, int], ...] = ()  # kept ones: number of the input, and of the answer in `Replay`


Family = tuple[tuple[str, Sequential], ...]  # sessions by name, in order: forks lie within a family


class Replay:
    """States and outputs of `Deep`, by torch alone, each computed once: a state is a number, 0 is the initial one."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self._model = Deep().eval()
        self._states: list[Any] = [(None, None)]
        self._flat: list[Tensor] = [self._flattened(*self._run((None, None), torch.zeros(1, 3))[1]) * 0]
        self._outputs: dict[int, Tensor] = {}
        self._next: dict[tuple[int, int], int] = {}
        self._held: list[Tensor] = []  # inputs, so that no two ever have the same id

    def step(self, node: int, x: Tensor) -> int:
        """Return the state after `x`, which is also the number of the output to it."""
        key = (node, id(x))
        if key not in self._next:
            self._held.append(x)
            output, state = self._run(self._states[node], x)
            self._next[key] = after = len(self._states)
            self._states.append(state)
            self._flat.append(self._flattened(*state))
            self._outputs[after] = output
        return self._next[key]

    def state_given(self, flat: Tensor) -> int:
        """Return the number of a state that was exported."""
        for node, known in enumerate(self._flat):
            if torch.allclose(known, flat, **CLOSE):
                return node
        raise AssertionError("an exported state is none that the inputs lead to")

    def output(self, node: int) -> Tensor:
        return self._outputs[node]

    def flat(self, node: int) -> Tensor:
        return self._flat[node]

    def _run(self, state: Any, x: Tensor) -> tuple[Tensor, Any]:
        model, (lstm, gru) = self._model, state
        with torch.no_grad():
            y, lstm = model.encoder["lstm"](model.embed(x.unsqueeze(0)), lstm)
            y, gru = model.gru(y, gru)
            return model.head(y)[0], (lstm, gru)

    @staticmethod
    def _flattened(lstm: tuple[Tensor, Tensor], gru: Tensor) -> Tensor:
        return torch.cat([part.flatten() for part in (*lstm, gru)])


@dataclass
class Rules:
    """What each operation does to sessions, and what it answers."""

    replay: Replay = field(default_factory=Replay)
    kept: int = 8  # answers of each session

    def apply(self, family: Family, action: Action) -> tuple[Family, Any]:
        """Return the sessions after an action, and its answer."""
        sessions = dict(family)
        if action.kind == "copy":
            sessions.pop(_COPY, None)
            sessions[_COPY] = tuple(sessions.items())
            return tuple(sorted(sessions.items())), "done"
        if action.kind == "set back":
            copy = dict(family).get(_COPY, ())  # none: it was made before these sessions began
            return tuple(sorted([*copy, *([(_COPY, copy)] if _COPY in sessions else [])])), "done"
        own = sessions.get(action.session)
        if action.kind == "open":
            if own is not None:
                return family, "exists"
            sessions[action.session] = Sequential()
        elif action.kind == "import":
            assert action.exported is not None
            seq, steps, flat = action.exported
            sessions[action.session] = Sequential(seq, steps, self.replay.state_given(flat))
        elif own is None:
            return family, "lost"
        elif action.kind == "push":
            return self._push(sessions, own, action)
        elif action.kind == "reset":
            sessions[action.session] = own._replace(node=0)
        elif action.kind == "close":
            del sessions[action.session]
        elif action.kind == "fork":
            if action.target in sessions:
                return family, "exists"
            sessions[action.target] = own._replace(answers=())
        elif action.kind == "info":
            return family, (own.seq, own.steps)
        elif action.kind == "export":
            return family, (own.seq, own.steps, self.replay.flat(own.node))
        return tuple(sorted(sessions.items())), "done"

    def _push(self, sessions: dict[str, Sequential], own: Sequential, action: Action) -> tuple[Family, Any]:
        family, x = tuple(sorted(sessions.items())), action.x
        assert x is not None
        if action.seq is not None and action.seq != own.seq + 1:
            kept = dict(own.answers).get(action.seq)
            return family, "gap" if kept is None else self.replay.output(kept)
        if bool(x.isnan().any()):
            return family, "failed"
        node, seq = self.replay.step(own.node, x), own.seq + 1
        answers = (*own.answers, (seq, node))[-self.kept :]
        sessions[action.session] = Sequential(seq, own.steps + len(x), node, answers)
        return tuple(sorted(sessions.items())), self.replay.output(node)


def explain(events: Iterable[Event], rules: Rules | None = None) -> int:
    """Find an order that explains all events of one family of sessions, and return how many states that took.

    Raises AssertionError with how far one comes where there is none, and RuntimeError where the search was given up.
    """
    rules = rules or Rules()
    history = sorted(events, key=lambda event: event.began)
    wanted = sum(1 << place for place, event in enumerate(history) if event.outcome is not UNKNOWN)
    stack: list[tuple[int, Family]] = [(0, ())]
    seen = {stack[0]}
    furthest: tuple[int, Family] = stack[0]
    while stack:
        done, family = stack.pop()
        if done & wanted == wanted:
            return len(seen)
        if (done & wanted).bit_count() > (furthest[0] & wanted).bit_count():
            furthest = done, family
        following = []
        for place in _may_be_next(history, done):
            event = history[place]
            after, answer = rules.apply(family, event.action)
            if event.outcome is UNKNOWN:
                if after == family:
                    continue  # it makes no difference whether it took place here
            elif not _same(answer, event.outcome):
                continue
            state = (done | 1 << place, after)
            if state not in seen:
                seen.add(state)
                following.append((event.ended, place, state))
        # What ended first is tried first: most often that is the order in which it was.
        stack += [state for *_, state in sorted(following, key=lambda one: one[:2], reverse=True)]
        if len(seen) > _MOST:
            told = _told(history, *furthest, rules=rules)
            raise RuntimeError(f"no explanation was found among {_MOST} orders, nor ruled out: {told}")
    raise AssertionError(_told(history, *furthest, rules=rules))


def _may_be_next(history: Sequence[Event], done: int) -> list[int]:
    """Return the places of events before which no other must come."""
    left = []
    end = math.inf
    latest = history[done.bit_length() - 1].began if done else -math.inf
    for place, event in enumerate(history):
        if event.began > end:
            break
        if not done >> place & 1:
            if event.outcome is not UNKNOWN:
                end = min(end, event.ended)
            elif event.ended < latest:
                continue  # it did not take place, since something that came after it already has
            left.append(place)
    return left


def _same(answer: Any, outcome: Any) -> bool:
    if isinstance(answer, tuple) and isinstance(outcome, tuple):
        return len(answer) == len(outcome) and all(map(_same, answer, outcome))
    if isinstance(answer, Tensor) and isinstance(outcome, Tensor):
        return answer.shape == outcome.shape and torch.allclose(answer, outcome, **CLOSE)
    return type(answer) is type(outcome) and bool(answer == outcome)


def _told(history: Sequence[Event], done: int, family: Family, *, rules: Rules) -> str:
    lines = [f"no order of {len(history)} events explains what was answered. One comes as far as:"]
    lines += [f"  {name}: input {own.seq}, {own.steps} steps" for name, own in family if name != _COPY]
    lines.append("and then, of all that may come next, nothing fits:")
    for place in _may_be_next(history, done):
        answer = rules.apply(family, history[place].action)[1]
        lines.append(f"  {history[place]}\n    would have been {answer}")
    lines.append("the last events before that:")
    lines += [f"  {event}" for place, event in enumerate(history) if done >> place & 1][-8:]
    return "\n".join(lines)
