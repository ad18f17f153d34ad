"""The cheap checks, while a model trains: numbers at every n-th step, findings as they begin and end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import nn

from ..cells import Call, Entry, Listener, Proceed, layers, listen, unwrap
from ..errors import BadInput
from ..state import tensors
from .finding import Finding
from .look import Look, growing, judged
from .thresholds import Thresholds
from .writers import Writer

_log = logging.getLogger("hiddenstate")


@dataclass(slots=True)
class Episode:
    """A finding with the training step at which it began, and at which it was gone; None while it lasts."""

    finding: Finding
    began: int
    ended: int | None = None

    def __str__(self) -> str:
        """Return one line."""
        until = "still so" if self.ended is None else f"until step {self.ended}"
        return f"step {self.began}, {until}: {self.finding.code} {self.finding.title} ({self.finding.where})"


@dataclass(slots=True)
class _History:
    steps: list[int] = field(default_factory=list)
    rows: list[dict[str, float]] = field(default_factory=list)


class Monitor(Listener):
    """Looks at every n-th training call of a model; changes nothing, and tells what begins and ends to go wrong.

    >>> model = torch.nn.LSTM(3, 8, batch_first=True)
    >>> monitor = Monitor(model, every=2)
    >>> for _ in range(4):
    ...     model(torch.randn(4, 10, 3))[0].mean().backward()
    >>> monitor.close()
    >>> monitor.history["step"].tolist(), monitor.findings
    ([0, 2], [])

    Args:
        model: The model in training; calls in eval mode do not count. Where modules of it are called in its place,
            such as an encoder and then a decoder, they are one training call until one of them is called again.
        optimizer: Where given, gradients are measured right before its steps, and missing parameters are named.
        every: How many training calls lie between two looks.
        writers: Where numbers and findings go as well; see `hiddenstate.diagnosis.writers`.
        on_finding: Called with each Episode as it begins and as it ends.
        thresholds: Other limits, by name.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        every: int = 50,
        *,
        writers: Sequence[Writer] = (),
        on_finding: Callable[[Episode], None] | None = None,
        thresholds: Mapping[str, float] | None = None,
    ) -> None:
        """Attach to `model`; see the class for the arguments."""
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise BadInput(f"every is {every!r}, but a whole number of training calls from 1 is needed.")
        self._model = unwrap(model)
        self._every, self._limits = every, Thresholds.adjusted(thresholds)
        self._writers, self._on_finding = list(writers), on_finding
        self._history = _History()
        self._episodes: dict[tuple[str, str], Episode] = {}
        self._past: list[Episode] = []
        self._step = -1  # of the last training call
        self._entries: set[nn.Module] = set()  # what was called from outside in it
        self._within = False  # a training call is running
        self._look: Look | None = None
        self._sizes: list[tuple[int, int]] = []  # steps in time and nodes of the graph, at each look
        self._handles: list[Any] = [listen(self._model, layers(self._model), self)]
        if optimizer is not None:
            self._handles.append(optimizer.register_step_pre_hook(lambda *_: self._before_update()))
            self._check_optimizer(optimizer)

    @property
    def step(self) -> int:
        """How many training calls have been seen."""
        return self._step + 1

    @property
    def history(self) -> dict[str, np.ndarray[Any, Any]]:
        """Every number at every look as an array, `"step"` among them; NaN where a look has no such number."""
        names = list(dict.fromkeys(name for row in self._history.rows for name in row))
        found = {name: np.array([row.get(name, np.nan) for row in self._history.rows]) for name in names}
        return {"step": np.array(self._history.steps, dtype=np.int64), **found}

    @property
    def findings(self) -> list[Episode]:
        """Everything found so far, in the order in which it began."""
        return sorted([*self._past, *self._episodes.values()], key=lambda episode: episode.began)

    @property
    def _infinite(self) -> bool:
        return any(code == "HS401" for code, _ in self._episodes)

    def flush(self) -> None:
        """Bring the last look to its end, without waiting for the next call."""
        look, self._look = self._look, None
        if look is None:
            return
        numbers, found = judged(look, self._limits)
        more = growing(self._sizes, look)
        found = [*found, *([more] if more is not None else [])]
        self._history.steps.append(look.step)
        self._history.rows.append(numbers)
        for writer in self._writers:
            writer.write(look.step, numbers)
        self._settle(look.step, found)

    def close(self) -> None:
        """Bring the last look to its end, listen no longer, and close the writers."""
        self.flush()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for writer in self._writers:
            writer.close()
        self._writers = []

    def __enter__(self) -> Monitor:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def __str__(self) -> str:
        """Return one line for each finding."""
        lines = [f"{self.step} training calls, {len(self._history.steps)} looks, {len(self.findings)} findings"]
        return "\n".join([*lines, *map(str, self.findings)])

    __repr__ = __str__

    def model_call(self, entry: Entry, run: Callable[[], Any]) -> Any:
        """Count a call in training, and look at its graph where it is its turn."""
        module = entry.module
        if not module.training:
            return run()
        if module is self._model or module in self._entries or not self._entries:
            self._begin()
        self._entries.add(module)
        self._within = True
        try:
            result = run()
        finally:
            self._within = False
        if self._look is not None:
            self._look.end(result)
        return result

    def layer_call(self, call: Call, proceed: Proceed) -> Call:
        """Look at a layer where it is its turn, and else see that what it gives is finite."""
        if not self._within:
            return proceed(call)
        if self._look is not None:
            done = proceed(self._look.enter(call))
            self._look.leave(done)
            return done
        done = proceed(call)
        if not self._infinite and not _finite(done.result):
            # Out of turn: a NaN spreads to all weights within one update, and then its origin is lost.
            self._look = Look(self._step)
            self._look.leave(done)
        return done

    def recompute(self, call: Call, proceed: Proceed) -> Call:
        """Be told of gradients that come back to a call which had no graph when it was looked at."""
        return proceed(call if self._look is None else self._look.again(call))

    def _begin(self) -> None:
        self.flush()
        self._step += 1
        self._entries = set()
        if self._step % self._every == 0:
            self._look = Look(self._step)

    def _before_update(self) -> None:
        if self._look is not None:
            self._look.update(self._model)

    def _check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        missing = [n for n, p in self._model.named_parameters() if p.requires_grad and id(p) not in held]
        if missing:
            finding = Finding(
                "HS504",
                "error",
                ", ".join(missing[:3]) + (", …" if len(missing) > 3 else ""),
                f"{len(missing)} parameters that want a gradient are in no group of the optimizer (limit 0).",
                "the optimizer was made before these layers, or of an older copy of the model",
                "optimizer = torch.optim.Adam(model.parameters()), after the model is complete",
                {"missing": len(missing), "limit": 0.0},
            )
            self._start(Episode(finding, 0))

    def _settle(self, step: int, found: list[Finding]) -> None:
        """Begin what is new, end what is gone; HS504 stays, since the optimizer is looked at once."""
        now = {(finding.code, finding.where) for finding in found}
        for finding in found:
            if (finding.code, finding.where) not in self._episodes:
                self._start(Episode(finding, step))
        for key, episode in list(self._episodes.items()):
            if key not in now and key[0] != "HS504":
                episode.ended = step
                self._past.append(self._episodes.pop(key))
                self._tell(episode)

    def _start(self, episode: Episode) -> None:
        self._episodes[episode.finding.code, episode.finding.where] = episode
        _log.log(logging.INFO if episode.finding.severity == "note" else logging.WARNING, "%s", episode)
        self._tell(episode)

    def _tell(self, episode: Episode) -> None:
        for writer in self._writers:
            writer.finding(episode.began if episode.ended is None else episode.ended, episode)
        if self._on_finding is not None:
            self._on_finding(episode)


def _finite(result: Any) -> bool:
    """Say whether a layer's result is finite, judged by its final state; on a GPU asking would cost a wait."""
    state = result[1:] or result if isinstance(result, tuple | list) else result
    asked = [t.detach() for t in tensors(state).values() if t.is_floating_point() and not t.is_cuda]
    return all(bool(torch.isfinite(t.sum())) for t in asked)
