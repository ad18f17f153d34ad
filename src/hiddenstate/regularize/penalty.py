"""Penalties on every recurrent layer of a model, added to any training loop by one line."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any
from weakref import finalize

import torch
from torch import Tensor, nn

from ..cells import Call, Entry, Handle, Layer, Listener, Proceed, layers, listen, unwrap
from ..errors import BadInput, HiddenStateWarning, NotRecurrent
from ..state import tensors
from .masking import Lengths
from .runs import Run, has_graph, states_of
from .terms import activity, norm_stabilizer, temporal

_TERMS: dict[str, Callable[[Tensor, Tensor | None], Tensor]] = {
    "activity": activity,
    "temporal": temporal,
    "norm_stabilizer": norm_stabilizer,
}
_CALLS_KEPT = 16  # model calls whose graphs are kept while nobody asks


class Penalty:
    """Watches the recurrent layers of an unmodified model; called, it returns what their last runs cost.

    The cost is a sum over layers of coefficient times term: `activity`, `temporal`, `norm_stabilizer`, as the
    functions of these names give them for the layer's output (of a stack its last layer's, of a cell its state h).
    Calls within one call of the model that hand the state on are one run; of several runs a layer pays the mean. Runs
    are noted in training, while gradients are on, and forgotten when asked for: ask once, before `backward`. In
    evaluation the cost is zero.

    >>> model = nn.GRU(3, 4, batch_first=True)
    >>> penalty = Penalty(model, activity=2.0, temporal=1.0)
    >>> output, _ = model(torch.randn(2, 5, 3))
    >>> bool(penalty() == 2 * activity(output) + temporal(output))
    True
    >>> penalty.close()
    """

    def __init__(
        self, model: nn.Module, *, activity: float = 0.0, temporal: float = 0.0, norm_stabilizer: float = 0.0
    ) -> None:
        """Listen to every recurrent layer of `model`."""
        given = {"activity": activity, "temporal": temporal, "norm_stabilizer": norm_stabilizer}
        self.coefficients = {name: value for name, value in given.items() if _coefficient(name, value)}
        if not self.coefficients:
            raise BadInput("every coefficient is zero, so nothing would be added: Penalty(model, activity=1e-4).")
        self._model = unwrap(model)
        self._layers = layers(model)
        if not self._layers:
            raise NotRecurrent(f"{type(model).__name__} has no recurrent layer to watch. hs.layers(model) lists them.")
        self._noted = _Runs(self._model, self._layers)
        handle = listen(model, self._layers, self._noted)
        self._end = finalize(self, _end, handle, self._noted)  # who forgets to close it leaves nothing behind either
        self._end.atexit = False

    def __call__(self, lengths: Lengths | None = None) -> Tensor:
        """Return the cost of all runs since it was last asked, a scalar with gradient.

        Padded sequences have `lengths (batch,)`, which the layers were not told of; packed ones need none.
        """
        if not self._end.alive:
            raise BadInput("this Penalty was closed and watches nothing any more. Make a new one: Penalty(model, ...).")
        runs = self._noted.taken()
        if not runs:
            return self._nothing()
        counts = Counter(run.layer for run in runs)
        costs = [self._cost(*states_of(run, lengths)) / counts[run.layer] for run in runs]
        return sum(costs[1:], costs[0])

    def close(self) -> None:
        """Leave the model as it was; safe to repeat."""
        self._end()

    def __enter__(self) -> Penalty:
        """Return itself, to be closed at the end."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def __repr__(self) -> str:
        """Return coefficients and layers on one line."""
        terms = ", ".join(f"{name}={value:g}" for name, value in self.coefficients.items())
        return f"Penalty({terms}; {len(self._layers)} layers{'' if self._end.alive else ', closed'})"

    def _cost(self, h: Tensor, lengths: Tensor | None) -> Tensor:
        total = h.new_zeros((), dtype=torch.float32)
        longest = h.shape[1] if lengths is None else int(lengths.max())
        for name, coefficient in self.coefficients.items():
            if longest > 1 or name == "activity":  # a run of one step has no changes to pay for
                total = total + coefficient * _TERMS[name](h, lengths)
        return total

    def _nothing(self) -> Tensor:
        if self._model.training and torch.is_grad_enabled():
            raise BadInput(
                "there is no run to pay for: the model was not called since the last time, its layers ran without "
                "gradients (torch.no_grad(), a checkpoint with use_reentrant=True), or its loss went backward already. "
                "Ask once for each step: loss = criterion(model(x), y) + penalty(); loss.backward()."
            )
        return torch.zeros((), device=next((p.device for p in self._model.parameters()), None))


class _Runs(Listener):
    """Notes the runs of a model's layers in training, until somebody takes them."""

    def __init__(self, model: nn.Module, found: list[Layer]) -> None:
        self._model = model
        self._fused = {layer.module for layer in found if layer.fused}
        self._cells = {layer.module for layer in found if not layer.fused}
        self._runs: list[Run] = []
        self._number = 0  # of the model call that is under way, or was last
        self._training = False  # whether it began in training, with gradients on
        self._unpaid: set[Layer] = set()  # layers whose last runs had no graph

    def model_call(self, entry: Entry, run: Callable[[], Any]) -> Any:
        # Cells that are stepped from outside the model go on from call to call.
        whole = entry.module is self._model and entry.module not in self._cells
        self._number += whole or any(module in self._fused for module in entry.module.modules())
        self._training = self._model.training and torch.is_grad_enabled()
        return run()

    def layer_call(self, call: Call, proceed: Proceed) -> Call:
        done = proceed(call)
        # Inside a reentrant checkpoint gradients are off; what it returns gets its graph afterwards.
        if self._training and (not torch.is_grad_enabled() or has_graph(done)):
            self._note(done)
        return done

    def recompute(self, call: Call, proceed: Proceed) -> Call:
        # A backward pass that uses up the graph of a reentrant checkpoint: nobody has asked for its runs in time.
        self._runs = [run for run in self._runs if run.layer is not call.layer or run.watched]
        if call.layer in self._unpaid and torch.is_grad_enabled():
            self._unpaid.discard(call.layer)
            warnings.warn(
                f"the layer {call.layer.label} runs inside torch.utils.checkpoint with use_reentrant=True, which keeps "
                f"no graph of its states: they were not paid for. Use use_reentrant=False.",
                HiddenStateWarning,
                stacklevel=2,
            )
        return proceed(call)

    def taken(self) -> list[Run]:
        """Return the runs that can be paid for, and forget all."""
        runs, self._runs = self._runs, []
        self._unpaid |= {run.layer for run in runs if not run.has_graph}
        return [run for run in runs if run.has_graph]

    def forget(self, model_call: int | None = None) -> None:
        """Forget the runs of one model call, or all."""
        self._runs = [run for run in self._runs if model_call not in (None, run.model_call)]

    def _note(self, call: Call) -> None:
        last = next((run for run in reversed(self._runs) if run.layer is call.layer), None)
        if last is not None and last.model_call == self._number and last.goes_on_with(call):
            last.calls.append(call)
            return
        run = Run(self._number, [call])
        self._runs.append(run)
        for tensor in tensors(call.result).values():
            if tensor.requires_grad:
                run.watched = True
                tensor.register_hook(partial(self._spent, run.model_call))  # type: ignore[no-untyped-call]
        self._forget_old()

    def _spent(self, model_call: int, gradient: Tensor) -> None:
        if not torch.is_grad_enabled():  # a gradient of a gradient is yet to come otherwise, and the graph stays
            self.forget(model_call)

    def _forget_old(self) -> None:
        oldest = self._runs[0].model_call
        if oldest <= self._number - _CALLS_KEPT:
            self.forget(oldest)
            warnings.warn(
                f"the model ran more than {_CALLS_KEPT} times in training and this Penalty was not asked: the oldest "
                f"run is forgotten. Add penalty() to each loss, or close it, or run under torch.no_grad().",
                HiddenStateWarning,
                stacklevel=2,
            )


def _end(handle: Handle, noted: _Runs) -> None:
    handle.remove()
    noted.forget()


def _coefficient(name: str, value: float) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise BadInput(f"{name} is a coefficient from 0, but this is {value!r}.")
    return value > 0
