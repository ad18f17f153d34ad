"""The cheap checks, while a model trains: numbers at every n-th step, findings as they begin and end."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import nn

from ..cells import Call, Listener, OuterCall, Proceed, Succession, is_sharded, layers, listen, unwrap, warn
from ..errors import BadInput, HiddenStateWarning
from .episodes import Episode, Episodes
from .graphs import GraphWatch
from .judging import judged
from .look import Look, no_call_seen, nothing_seen
from .loop_watch import LoopWatch
from .report import Finding
from .reset_watch import ResetWatch
from .samples import SampleClock
from .thresholds import Thresholds
from .training_watch import (
    OptimizerWatch,
    UpdateWatch,
    ValidationWatch,
    at_each_update,
    begins_anew,
    graph_grows,
    has_gradients,
    is_finite,
    not_handed_on,
)
from .writers import MonitorWriter

_APART = (
    "HS101",
    "HS103",
    "HS203",
    "HS206",
    "HS208",
    "HS210",
    "HS504",
    "HS505",
)  # told by several calls, or by the optimizer alone


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
            such as an encoder and then a decoder, they are one training call until one of them is called again. Loops
            in code of its own are looked at too; what recurs and cannot be is a warning that names it.
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
        self._writers = list(writers)
        self._looked_at_steps: list[int] = []
        self._numbers: list[dict[str, float]] = []  # of each look
        self._episodes = Episodes(self._writers, on_finding)
        self._step = -1  # of the last training call
        self._entries: set[nn.Module] = set()  # what was called from outside in it
        self._within = False  # a training call is running
        self._look: Look | None = None
        self._graphs: GraphWatch | None = None  # from a look on, until the calls after the next backward were seen
        self._tested = False  # whether the training call before this one began after that backward
        self._shared = 0  # nodes of calls whose backward pass had run, met in them
        self._successions: dict[nn.Module, Succession] = {}
        self._whole: dict[nn.Module, torch.Size] = {}  # layers that run whole sequences of their own, and their input
        self._last_calls: dict[nn.Module, Call | None] = {}  # of each layer in this call; None where it had several
        self._updates, self._validation, self._resets = UpdateWatch(), ValidationWatch(), ResetWatch()
        self._evaluating = False  # a call in eval mode is running
        self._updated = 0  # steps of the optimizer
        self._layers = list(layers(self._model))
        self._heard: set[nn.Module] = set()  # layers that were called in training
        self._loops, self._samples = LoopWatch(self._model), SampleClock()
        self._silent: dict[str, None] = {}  # layers that get gradients, and were never called
        self._missing = [layer.name or "model" for layer in self._layers]  # of which no look has seen anything
        self._told: set[str] = set()  # what was said not to be looked at
        self._handles: list[Any] = [listen(self._model, self._layers, self)]
        self._handles += self._loops.beside(self._model, self._layers, lambda: None if self._within else self._look)
        if optimizer is not None:
            self._handles.append(at_each_update(optimizer, self._before_update))
        self._optimized = None if optimizer is None else OptimizerWatch(self._model, optimizer)
        self._check_optimizer()

    @property
    def step(self) -> int:
        """How many training calls have been seen."""
        return self._step + 1

    @property
    def model(self) -> nn.Module:
        """The model that it watches."""
        return self._model

    @property
    def history(self) -> dict[str, np.ndarray[Any, Any]]:
        """Every number at every look as an array, `"step"` among them; NaN where a look has no such number."""
        names = list(dict.fromkeys(name for row in self._numbers for name in row))
        found = {name: np.array([row.get(name, np.nan) for row in self._numbers]) for name in names}
        return {"step": np.array(self._looked_at_steps, dtype=np.int64), **found}

    @property
    def findings(self) -> list[Episode]:
        """Everything found so far, in the order in which it began."""
        return list(self._episodes)

    @property
    def unseen(self) -> list[str]:
        """What recurs in the model, or may, and is not looked at: nothing found there means nothing."""
        return [*self._loops.unseen, *(f"{label}, which gets gradients and was never called" for label in self._silent)]

    def flush(self) -> None:
        """Bring the last look to its end, without waiting for the next call."""
        look, self._look = self._look, None
        if look is None:
            return
        look.measured = self._samples.taken(look.samples) if look.sampled else {}
        numbers, found = judged(look, self._limits)
        self._missing = [name for name in self._missing if name not in look.outputs]
        self._looked_at_steps.append(look.step)
        self._numbers.append(numbers)
        for writer in self._writers:
            writer.write(look.step, numbers)
        # What several calls tell, or the optimizer alone, or a sample that this look has not taken, it has not judged.
        self._episodes.settle(
            look.step,
            found,
            lambda finding: finding.code not in _APART and ("gates" not in finding.numbers or look.sampled),
        )

    def report(self, path: str | PathLike[str] = "monitor.html") -> Path:
        """Write one page about the run so far, as `hs.report(monitor, path=path)` does, and return its path."""
        # Pages stand on a floor above: the roof, which knows all floors, is asked when somebody wants one.
        return Path(sys.modules[__name__.partition(".")[0]].report(self, path=path))

    def close(self) -> None:
        """Bring the last look to its end, listen no longer, and close the writers."""
        self.flush()
        self._see_update()
        for module in self._successions:
            self._see_handing_on(module, over=True)
        self._warn_unseen()
        for handle in self._handles:
            handle.remove()
        if self._handles and sys.exc_info()[0] is None and (missed := self._missed()):
            warnings.warn(f"hs.Monitor({type(self._model).__name__}) {missed}", HiddenStateWarning, stacklevel=2)
        self._handles = []
        for writer in self._writers:
            writer.close()
        self._writers.clear()

    def _missed(self) -> str:
        """Say that nothing at all was looked at, "" where something was."""
        if self._step < 0:
            return f"saw {no_call_seen(self._updated)}"
        ended = any(row["graph"] for row in self._numbers)  # no call that raised
        if ended and 0 < len(self._missing) == len(self._layers) and not self._loops.seen and not self._silent:
            return f"saw {nothing_seen(self._missing)}"
        if self._heard or self._loops.seen or self.unseen:
            return ""
        return (
            f"heard no recurrent layer in {self.step} training calls, and saw nothing recur in them: no state was "
            f"looked at. hs.layers(model, *inputs).explain() says more."
        )

    def __enter__(self) -> Monitor:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def __str__(self) -> str:
        """Return one line for each finding, with how it is known and what to do."""
        lines = [f"{self.step} training calls, {len(self._looked_at_steps)} looks, {len(self.findings)} findings"]
        lines += [nothing_seen(self._missing)] if self._missing and self._looked_at_steps else []
        for episode in self.findings:
            _, *why = str(episode.finding).split("\n")
            lines += [str(episode), *why]
        return "\n".join([*lines, *(f"not looked at: {each}" for each in self.unseen)])

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
        if self._look is not None:
            run = self._loops.around(entry, run, self._look)
        try:
            result = run()
        except BaseException:
            self._last_calls = {}
            raise
        finally:
            self._within = False
        if self._look is not None:
            self._look.end(result)
            self._hear_cells()
        if self._graphs is not None:
            self._follow(entry, result)
        self._end_calls()
        return result

    def _hear_cells(self) -> None:
        """Listen from now on to modules that a watched call has shown to be cells."""
        new = [cell for cell in self._loops.cells if cell.module not in {layer.module for layer in self._layers}]
        if new:
            self._layers += new
            self._heard |= {cell.module for cell in new}
            before, self._handles[0] = self._handles[0], listen(self._model, self._layers, self)
            before.remove()
        self._warn_unseen()

    def _warn_unseen(self) -> None:
        """Say by name what recurs and is not looked at."""
        new = [each for each in self.unseen if each not in self._told]
        self._told.update(new)
        if new and sys.exc_info()[0] is None:
            warn(
                f"hs.Monitor({type(self._model).__name__}) does not look at: {'; '.join(new)}. That nothing is found "
                f"there means nothing. hs.layers(model, *inputs).explain() says more.",
                HiddenStateWarning,
            )

    def _follow(self, entry: OuterCall, result: Any) -> None:
        """See whether the graph of a call reaches into what a backward pass has gone through."""
        assert self._graphs is not None
        shared = self._graphs.call((entry.args, entry.kwargs), result)
        if shared and not self._shared and not self._episodes.lasts("HS203"):
            self._episodes.begin(graph_grows(shared, self._model, self._layers), self._step)
        self._shared = max(self._shared, shared)

    def _end_calls(self) -> None:
        """Remember what each layer ended in, and tell where states are not handed on from outside."""
        for module, call in self._last_calls.items():
            succession = self._successions.get(module)
            if succession is None:
                continue
            if call is None:
                self._successions[module] = Succession()
                continue
            succession.ended(call, self._step)
            self._see_handing_on(module, over=False)
        self._last_calls = {}

    def _see_handing_on(self, module: nn.Module, *, over: bool) -> None:
        """Tell where the states of a layer are not handed on; `over`: no call comes that may yet do so."""
        name = next((layer.name for layer in self._layers if layer.module is module), "")
        finding = not_handed_on(name or "model", self._successions[module], over=over)
        if finding is not None:
            self._episodes.begin(finding, max(0, self._step), anew=True)  # with the number of calls so far

    def layer_call(self, call: Call, proceed: Proceed) -> Call:
        """Look at a layer where it is its turn, and else see that what it gives is finite."""
        if self._evaluating:
            done = proceed(call)
            self._validation.evaluated(done)
            self._see_resets(done)
            return done
        if not self._within:
            return proceed(call)
        module = call.layer.module
        first = module not in self._last_calls
        if first:
            self._heard.add(module)
            if self._validation.waits(call):
                self._begin_or_end("HS208", self._validation.trained(call), call.layer.name or "model")
            self._see_start(call)
        done = self._looked_at(call, proceed)
        self._last_calls[module] = done if first else None
        self._see_resets(done)
        return done

    def _see_resets(self, call: Call) -> None:
        """Once for each look, see whether a state begins anew at the same steps in a rollout and in training."""
        if self._resets.waits and (seen := self._resets.see(call)) is not None:
            self._begin_or_end("HS210", seen[1], seen[0])

    def _see_start(self, call: Call) -> None:
        """See what a layer is handed; one that never was handed anything, and runs whole sequences, begins anew."""
        module, shape = call.layer.module, getattr(call.args[0], "shape", None) if len(call.args) == 1 else None
        if shape is not None and not call.kwargs and self._whole.get(module) == shape:
            return  # as the call before: asking what it was handed, and how many steps it makes, takes time
        if module in self._successions or not begins_anew(call):
            self._successions.setdefault(module, Succession()).goes_on(call, self._step)
        elif shape is not None:
            self._whole[module] = shape

    def _looked_at(self, call: Call, proceed: Proceed) -> Call:
        if self._look is not None:
            done = proceed(self._look.enter(call))
            self._look.leave(done)
            return done
        done = proceed(call)
        if not is_finite(done.result) and not self._episodes.lasts("HS401"):
            # Out of turn: a NaN spreads to all weights within one update, and then its origin is lost.
            self._look = Look(self._step)
            self._look.leave(done)
        return done

    def recompute(self, call: Call, proceed: Proceed) -> Call:
        """Be told of gradients that come back to a call which had no graph when it was looked at."""
        return proceed(call if self._look is None else self._look.again(call))

    def _begin_or_end(self, code: str, finding: Finding | None, where: str | None = None) -> None:
        """Begin what no look judges, where it is new, or end it."""
        if finding is not None:
            self._episodes.begin(finding, self._step)
        else:
            self._episodes.end(code, self._step, where)

    def _see_update(self) -> None:
        """See what became of the gradients that the last update used, where they were looked at."""
        if self._updates.waits:
            self._begin_or_end("HS505", self._updates.after())

    def _begin(self) -> None:
        self.flush()
        self._see_update()
        self._step += 1
        self._entries = set()
        if self._graphs is not None and self._graphs.spent and self._tested:
            self._conclude()
        self._tested = self._graphs is not None and self._graphs.spent
        if self._step % self._every == 0:
            self._check_optimizer()  # again: a Carry may have been opened since
            sharded = any(map(is_sharded, self._model.modules()))  # their weights are there during a call alone
            self._resets.again()
            self._look = Look(self._step, sampled=not sharded and self._samples.due())
            self._graphs = self._graphs or GraphWatch()

    def _conclude(self) -> None:
        """End what was found of graphs where the calls since the last backward pass share no node with those before."""
        if not self._shared:
            self._episodes.end("HS203", self._step)
        self._graphs, self._shared = None, 0

    def _before_update(self) -> None:
        self._updated += 1
        if self._look is not None:
            self._look.update(self._model)
            self._updates.before(self._model)
            silent = [layer for layer in self._layers if layer.module not in self._heard]
            self._silent.update({layer.label: None for layer in silent if has_gradients(layer.module)})
            self._warn_unseen()

    def _check_optimizer(self) -> None:
        """Begin and end what is told by the optimizer's groups, as they are now."""
        found = [] if self._optimized is None else list(self._optimized.found())
        self._episodes.settle(max(0, self._step), found, lambda finding: finding.code in OptimizerWatch.codes)
