"""Watching resets: whether training resets the state at the steps at which the rollout before it did."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ..cells import Call
from .report import Finding

_MOST_STEPS = 4096  # of all rows of a rollout that are kept
_SHARE = 0.01  # of all time, that following rollouts may take
_KEY = 4  # numbers by which a step is known again
_LEAST = 4  # steps that have to be found again before anything is said
_ALIKE = 1e-5  # how far what a layer is fed may be from what it was fed before, of the size of all: other kernels round


@dataclass(slots=True, eq=False)
class _StepsMade:
    """Steps that a layer has made one after the other, with a row for each sequence."""

    keys: list[Tensor] = field(default_factory=list)  # (rows, 4) of each step, by which it is known again
    anew: list[Tensor] = field(default_factory=list)  # (rows,) whether the state that entered it was all zero
    begins: list[Tensor] = field(default_factory=list)  # whether nothing was handed on to it at all
    ended: Tensor | None = None  # h behind the last step, (rows, units)

    def add(self, call: Call) -> None:
        """Note the steps of a call; only its first is handed a state from outside."""
        x, entered = call.x.detach(), _rows(call, given=True)
        rows, steps = x.shape[:2]
        nothing = torch.ones(rows, dtype=torch.bool, device=x.device)
        anew = nothing if entered is None else ~(entered != 0).any(1)
        begins = nothing.any()
        if entered is not None and self.ended is not None and self.ended.shape == entered.shape:
            begins = anew.all() | ((entered != self.ended).any(1) & ~anew).any()
        self.keys += list(_keys(x.reshape(rows, steps, -1)).unbind(1))
        self.anew += [anew, *[torch.zeros_like(anew)] * (steps - 1)]
        self.begins += [begins, *[torch.zeros_like(begins)] * (steps - 1)]
        self.ended = _rows(call, given=False)

    @property
    def full(self) -> bool:
        """Whether no more of them are to be kept."""
        return bool(self.keys) and len(self.keys) * len(self.keys[0]) >= _MOST_STEPS


def _keys(x: Tensor) -> Tensor:
    """Return a few sums of all features: (batch, time, 4)."""
    return x.double() @ _weights(x.shape[-1]).to(x.device)


@cache
def _weights(features: int) -> Tensor:
    drawn = torch.Generator().manual_seed(features)
    return torch.randn(features, _KEY, generator=drawn, dtype=torch.float64, device="cpu")


def _rows(call: Call, *, given: bool) -> Tensor | None:
    state = call.given if given else call.state
    if state is None:
        return None
    parts = [part.detach().movedim(state.batch_axis[name], 0).flatten(1) for name, part in state.items()]
    return torch.cat([part for part in parts if part.is_floating_point()], 1)


class ResetWatch:
    """Follows agents that are stepped without gradients and trained on the same steps afterwards.

    A step of the rollout is found again in training by what the layer is fed, where that is fed once only. The state
    has to begin anew at the same steps in both: a `done` of the step before or behind it, or none at all, does not.
    """

    def __init__(self) -> None:
        """Begin to wait for a rollout."""
        self.waits = True  # whether a rollout, and the training behind it, is to be followed
        self._rollouts: dict[nn.Module, _StepsMade] = {}
        self._trained: dict[nn.Module, _StepsMade] = {}
        self._began, self._spent = perf_counter(), 0.0  # seconds: of all rollouts but the first, which also loads code
        self._now, self._first = 0.0, True  # of this one

    def again(self) -> None:
        """Follow one more rollout, where they take a hundredth of all time, or less."""
        if self._spent <= _SHARE * (perf_counter() - self._began):
            self.waits = True

    def see(self, call: Call) -> tuple[str, Finding | None] | None:
        """Note a call that was made; return what was found of its layer once training is over, None until then."""
        module = call.layer.module
        if torch.is_grad_enabled() and module not in self._rollouts:
            return None
        if not isinstance(module, nn.RNNBase | nn.RNNCellBase) or isinstance(call.input, PackedSequence):
            return None
        begin = perf_counter()
        try:
            found = self._seen(call) if call.rows else None
        except Exception:  # whatever a device or a wrapped tensor cannot do, looking at it must not stop the training
            self.waits, self._rollouts, self._trained = False, {}, {}
            return None
        self._now += perf_counter() - begin
        if not self.waits:
            self._spent += 0.0 if self._first else self._now
            self._now, self._first = 0.0, False
        return found

    def _seen(self, call: Call) -> tuple[str, Finding | None] | None:
        module = call.layer.module
        if torch.is_grad_enabled():
            trained = self._trained.setdefault(module, _StepsMade())
            if not trained.full:
                trained.add(call)
            return None
        if module in self._trained:
            return self._judged(call)
        if call.steps == 1:
            rollout = self._rollouts.setdefault(module, _StepsMade())
            if rollout.keys and len(rollout.keys[0]) != call.rows:
                rollout = self._rollouts[module] = _StepsMade()
            if not rollout.full:  # its beginning is kept: training begins with that too
                rollout.add(call)
        return None

    def _judged(self, call: Call) -> tuple[str, Finding | None] | None:
        module, name = call.layer.module, call.layer.name or "model"
        seen, trained = self._rollouts.pop(module), self._trained.pop(module)
        self.waits = bool(self._rollouts)
        found = _found_again(seen, trained)
        if len(found) < _LEAST or not any(map(any, found.values())):
            return None
        return name, _told(name, found)


def _found_again(seen: _StepsMade, trained: _StepsMade) -> dict[tuple[int, int], tuple[bool, bool]]:
    """Return by step and row of the rollout whether it began anew there, and whether training does.

    Of what is found again behind its predecessor: what is fed may well be like something else by chance.
    """
    before, rows = torch.cat(seen.keys), len(seen.keys[0])
    size = float(before.abs().max()) or 1.0
    anew = torch.stack(seen.anew).tolist()
    found: dict[tuple[int, int], tuple[bool, bool]] = {}
    last: list[tuple[int, int] | None] = []
    for keys, now, begins in zip(trained.keys, trained.anew, trained.begins, strict=True):
        near = (keys.unsqueeze(1) - before).abs().amax(2) <= _ALIKE * size  # (rows, steps of the rollout)
        alone, at = (near.sum(1) == 1).tolist(), near.int().argmax(1).tolist()
        here = [divmod(place, rows) if once else None for place, once in zip(at, alone, strict=True)]
        if len(last) == len(here) and not bool(begins):
            for row, (place, behind) in enumerate(zip(here, last, strict=True)):
                if place is not None and behind == (place[0] - 1, place[1]):
                    found[place] = (anew[place[0]][place[1]], bool(now[row]))
        last = here
    return found


def _told(name: str, found: dict[tuple[int, int], tuple[bool, bool]]) -> Finding | None:
    missed = [place for place, (then, now) in found.items() if then and not now]
    added = [place for place, (then, now) in found.items() if now and not then]
    if not missed and not added:
        return None
    cause = "training and rollout are given different marks of where a sequence begins (`done`)"
    if not any(now for _, now in found.values()):
        cause = "the marks of where a sequence begins (`done`) are used in the rollout, and not in training"
    elif not any(then for then, _ in found.values()):
        cause = "the marks of where a sequence begins (`done`) are used in training, and not in the rollout"
    elif _shifted(found, added, by=1):
        cause = "training takes each mark one step too early: the `done` that a step gave was stored with that step"
    elif _shifted(found, added, by=-1):
        cause = "training takes each mark one step too late: an older `done` was stored than the one that came with obs"
    return Finding(
        "HS210",
        "warning",
        name,
        f"of {len(found)} steps that were found again in training, {len(missed)} began anew in the rollout alone, and "
        f"{len(added)} in training alone (limit 0).",
        cause,
        "dones[t] = done; action, state = agent(obs, state, done); obs, reward, done = env.step(action)  # the mark "
        "that came with obs, stored before the step, and handed to the model in both",
        {"missed": len(missed), "added": len(added), "steps": len(found), "limit": 0.0},
    )


def _shifted(found: dict[tuple[int, int], tuple[bool, bool]], added: list[tuple[int, int]], *, by: int) -> bool:
    """Whether the rollout began anew `by` steps behind each step at which training alone does."""
    beside = [found[step + by, row][0] for step, row in added if (step + by, row) in found]
    return bool(beside) and all(beside)
