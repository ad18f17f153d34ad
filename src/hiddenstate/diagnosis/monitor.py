"""The cheap checks, while a model trains: numbers at every n-th step, findings as they begin and end."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import nn

from ..cells import Call, Listener, OuterCall, Proceed, Succession, layers, listen, unwrap
from ..errors import BadInput, HiddenStateWarning
from ..state import tensors
from .advice import detaching
from .graphs import GraphWatch
from .look import Look, judged, no_call_seen, nothing_seen
from .patient import held_tensors
from .report import Finding
from .thresholds import Thresholds
from .training_watch import OptimizerWatch, UpdateWatch, ValidationWatch, at_each_update
from .writers import MonitorWriter

_APART = (
    "HS101",
    "HS103",
    "HS203",
    "HS206",
    "HS208",
    "HS504",
    "HS505",
)  # told by several calls, or by the optimizer alone
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
        writers: Sequence[MonitorWriter] = (),
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
        self._graphs: GraphWatch | None = None  # from a look on, until the calls after the next backward were seen
        self._tested = False  # whether the training call before this one began after that backward
        self._shared = 0  # nodes of calls whose backward pass had run, met in them
        self._successions: dict[nn.Module, Succession] = {}
        self._last_calls: dict[nn.Module, Call | None] = {}  # of each layer in this call; None where it had several
        self._updates, self._validation = UpdateWatch(), ValidationWatch()
        self._evaluating = False  # a call in eval mode is running
        self._updated = 0  # steps of the optimizer
        self._layers = layers(self._model)
        self._silent = [layer.name or "model" for layer in self._layers]  # of which no look has seen anything
        self._handles: list[Any] = [listen(self._model, self._layers, self)]
        if optimizer is not None:
            self._handles.append(at_each_update(optimizer, self._before_update))
        self._optimized = None if optimizer is None else OptimizerWatch(self._model, optimizer)
        self._check_optimizer()

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
        self._silent = [name for name in self._silent if name not in look.outputs]
        self._history.steps.append(look.step)
        self._history.rows.append(numbers)
        for writer in self._writers:
            writer.write(look.step, numbers)
        self._settle(look.step, found)

    def close(self) -> None:
        """Bring the last look to its end, listen no longer, and close the writers."""
        self.flush()
        self._begin_once(self._updates.after())
        for handle in self._handles:
            handle.remove()
        if self._handles and sys.exc_info()[0] is None and (said := self._blind()):
            warnings.warn(f"hs.Monitor({type(self._model).__name__}) saw {said}", HiddenStateWarning, stacklevel=2)
        self._handles = []
        for writer in self._writers:
            writer.close()
        self._writers = []

    def _blind(self) -> str:
        if self._step < 0:
            return no_call_seen(self._updated)
        ended = any(row["graph"] for row in self._history.rows)  # no call that raised
        return nothing_seen(self._silent) if ended and 0 < len(self._silent) == len(self._layers) else ""

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
        lines += [nothing_seen(self._silent)] if self._silent and self._history.steps else []
        return "\n".join([*lines, *map(str, self.findings)])

    __repr__ = __str__

    def model_call(self, entry: OuterCall, run: Callable[[], Any]) -> Any:
        """Count a call in training, and look at its graph where it is its turn."""
        module = entry.module
        if not module.training:
            self._evaluating = True
            try:
                return run()
            finally:
                self._evaluating = False
        if module is self._model or module in self._entries or not self._entries:
            self._begin()
        self._entries.add(module)
        if self._look is not None:
            self._look.passing.called(entry)
        self._within = True
        try:
            result = run()
        except BaseException:
            self._last_calls = {}
            raise
        finally:
            self._within = False
        if self._look is not None:
            self._look.end(result)
        if self._graphs is not None:
            self._follow(entry, result)
        self._end_calls()
        return result

    def _follow(self, entry: OuterCall, result: Any) -> None:
        """See whether the graph of a call reaches into what a backward pass has gone through."""
        assert self._graphs is not None
        shared = self._graphs.call((entry.args, entry.kwargs), result)
        if shared and not self._shared:
            held = [name for name, tensor in held_tensors(self._model).items() if tensor.grad_fn is not None]
            finding = Finding(
                "HS203",
                "error",
                ", ".join(held) or "the state that the model is handed",
                f"the graph of this call holds {shared} nodes of calls whose backward pass has run (limit 0): the next "
                f"backward fails, or with retain_graph=True takes ever longer.",
                "a state is kept from call to call with its graph",
                detaching(held, self._layers),
                {"shared": shared, "limit": 0.0},
            )
            if not any(code == "HS203" for code, _ in self._episodes):
                self._start(Episode(finding, self._step))
        self._shared = max(self._shared, shared)

    def _end_calls(self) -> None:
        """Remember what each layer ended in, and tell where states are not handed on from outside."""
        for module, call in self._last_calls.items():
            succession = self._successions[module]
            if call is None:
                self._successions[module] = Succession()
                continue
            succession.ended(call, self._step)
            self._judge_handing_on(call.layer.name or "model", succession)
        self._last_calls = {}

    def _judge_handing_on(self, where: str, succession: Succession) -> None:
        complaint = succession.complaint()
        if complaint is None:
            return
        key = ("HS101" if complaint.mixes_rows else "HS103", where)
        finding = Finding(
            key[0],
            "warning",
            where,
            f"{complaint.seen} (limit 0).",
            complaint.cause,
            f"# {complaint.way_out}",
            {"calls": complaint.calls, "limit": 0.0},
        )
        if key in self._episodes:
            self._episodes[key].finding = finding  # with the number of calls so far
        else:
            self._start(Episode(finding, self._step))

    def layer_call(self, call: Call, proceed: Proceed) -> Call:
        """Look at a layer where it is its turn, and else see that what it gives is finite."""
        if self._evaluating:
            done = proceed(call)
            self._validation.evaluated(done)
            return done
        if not self._within:
            return proceed(call)
        module = call.layer.module
        first = module not in self._last_calls
        if first:
            self._begin_once(self._validation.trained(call))
            self._successions.setdefault(module, Succession()).goes_on(call, self._step)
        done = self._looked_at(call, proceed)
        self._last_calls[module] = done if first else None
        return done

    def _looked_at(self, call: Call, proceed: Proceed) -> Call:
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

    def _begin_once(self, finding: Finding | None) -> None:
        """Begin what no look ends, where it is new."""
        if finding is not None and (finding.code, finding.where) not in self._episodes:
            self._start(Episode(finding, max(0, self._step)))

    def _begin(self) -> None:
        self.flush()
        self._begin_once(self._updates.after())
        self._step += 1
        self._entries = set()
        if self._graphs is not None and self._graphs.spent and self._tested:
            self._conclude()
        self._tested = self._graphs is not None and self._graphs.spent
        if self._step % self._every == 0:
            self._check_optimizer()  # again: a Carry may have been opened since
            self._look = Look(self._step)
            self._graphs = self._graphs or GraphWatch()

    def _conclude(self) -> None:
        """End what was found of graphs where the calls since the last backward pass share no node with those before."""
        if not self._shared:
            for key in [key for key in self._episodes if key[0] == "HS203"]:
                self._stop(key, self._step)
        self._graphs, self._shared = None, 0

    def _before_update(self) -> None:
        self._updated += 1
        if self._look is not None:
            self._look.update(self._model)
            self._updates.before(self._model)

    def _check_optimizer(self) -> None:
        """Begin and end what is told by the optimizer's groups, as they are now."""
        found = [] if self._optimized is None else list(self._optimized.found())
        for finding in found:
            self._begin_once(finding)
        now = {(finding.code, finding.where) for finding in found}
        for key in [key for key in self._episodes if key[0] in OptimizerWatch.codes and key not in now]:
            self._stop(key, max(0, self._step))

    def _settle(self, step: int, found: list[Finding]) -> None:
        """Begin what is new, end what is gone, but for what is not judged by one look."""
        now = {(finding.code, finding.where) for finding in found}
        for finding in found:
            if (finding.code, finding.where) not in self._episodes:
                self._start(Episode(finding, step))
        for key in list(self._episodes):
            if key not in now and key[0] not in _APART:
                self._stop(key, step)

    def _stop(self, key: tuple[str, str], step: int) -> None:
        episode = self._episodes.pop(key)
        episode.ended = step
        self._past.append(episode)
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
