"""Penalties on every recurrent layer of a model, added to any training loop by one line."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any
from weakref import WeakMethod, finalize

import torch
from torch import Tensor, nn

from ..errors import BadInput, HiddenStateWarning, NotRecurrent
from ..recording import Handle, Hook, layers
from .masking import Lengths
from .runs import Run, joined, read_run
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
    functions of these names give them for the layer's output (of a stack its last layer's, of a cell its state h, the
    steps joined). A layer that ran several times pays the mean of its runs. Runs are noted in training, while gradients
    are on, and forgotten when asked for: ask once, before `backward`. In evaluation the cost is zero.

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
        """Hook into every recurrent layer of `model`."""
        given = {"activity": activity, "temporal": temporal, "norm_stabilizer": norm_stabilizer}
        self.coefficients = {name: value for name, value in given.items() if _coefficient(name, value)}
        if not self.coefficients:
            raise BadInput("every coefficient is zero, so nothing would be added: Penalty(model, activity=1e-4).")
        self._model = model
        self._layers = layers(model)
        if not self._layers:
            raise NotRecurrent(f"{type(model).__name__} has no recurrent layer to watch. hs.layers(model) lists them.")
        self._runs: list[Run] = []
        self._call = 0  # the number of the model call that is under way, or was last
        self._depth = 0  # model calls within model calls
        self._handles = self._hook()
        finalize(self, _remove, self._handles).atexit = False  # who forgets to close it leaves no hook behind either

    def __call__(self, lengths: Lengths | None = None) -> Tensor:
        """Return the cost of all runs since it was last asked, a scalar with gradient.

        Padded sequences have `lengths (batch,)`, which the layers were not told of; packed ones need none.
        """
        if not self._handles:
            raise BadInput("this Penalty was closed and watches nothing any more. Make a new one: Penalty(model, ...).")
        runs, self._runs = self._runs, []
        if not runs:
            return self._nothing()
        total = runs[0].steps[0].new_zeros((), dtype=torch.float32)
        for layer in dict.fromkeys(run.layer for run in runs):
            own = [run for run in runs if run.layer == layer]
            for run in own:
                total = total + self._cost(*joined(run, lengths)) / len(own)
        return total

    def close(self) -> None:
        """Take the hooks off the model; safe to repeat."""
        _remove(self._handles)
        self._runs = []

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
        return f"Penalty({terms}; {len(self._layers)} layers{'' if self._handles else ', closed'})"

    def _hook(self) -> list[Handle]:
        handles = []
        if all(layer.module is not self._model for layer in self._layers):
            handles.append(Hook(_weakly(self._begin)).before(self._model))
            handles.append(Hook(_weakly(self._end)).after(self._model, always=True))
        for number, layer in enumerate(self._layers):
            handles.append(Hook(_weakly(self._note, number)).after(layer.module))
        return handles

    def _begin(self, *_: Any) -> None:
        self._depth += 1
        if self._depth == 1:
            self._call += 1

    def _end(self, *_: Any) -> None:
        self._depth -= 1

    def _note(self, number: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if not (self._model.training and torch.is_grad_enabled()) or _in_backward():
            return
        layer = self._layers[number]
        if layer.fused and not self._depth:
            self._call += 1  # the layer is called from outside the model: a call of its own
        run = read_run(layer, (args, kwargs), result, self._call)
        if not run.steps[0].requires_grad:
            return
        before = next((old for old in reversed(self._runs) if old.layer == run.layer), None)
        if before is None or not before.goes_on_with(run):
            self._runs.append(run)
            run.steps[0].register_hook(_Spent(_weakly(self._forget, run.call)))  # type: ignore[no-untyped-call]
            self._forget_old()
        else:
            before.steps.append(run.steps[0])

    def _forget(self, call: int) -> None:
        self._runs = [run for run in self._runs if run.call != call]

    def _forget_old(self) -> None:
        if self._runs[0].call <= self._call - _CALLS_KEPT:
            self._forget(self._runs[0].call)
            warnings.warn(
                f"the model ran more than {_CALLS_KEPT} times in training and this Penalty was not asked: the oldest "
                f"run is forgotten. Add penalty() to each loss, or close it, or run under torch.no_grad().",
                HiddenStateWarning,
                stacklevel=2,
            )

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
                "there is no run to pay for: the model was not called since the last time, or its loss went backward "
                "already. Ask once for each step: loss = criterion(model(x), y) + penalty(); loss.backward()."
            )
        return torch.zeros((), device=next((p.device for p in self._model.parameters()), None))


def _weakly(method: Callable[..., None], *first: Any) -> Callable[..., None]:
    """Return a function that calls a method as long as its Penalty is there."""
    reference = WeakMethod(method)

    def call(*args: Any) -> None:
        found = reference()
        if found is not None:
            found(*first, *args)

    return call


class _Spent(Hook):
    """Calls its function when a gradient comes by that leaves no graph behind it."""

    def __call__(self, *_: Any) -> None:
        if not torch.is_grad_enabled():  # a gradient of a gradient is yet to come otherwise, and the graph stays
            super().__call__()


def _in_backward() -> bool:
    # Where activations are checkpointed, layers run once more within backward.
    return bool(torch._C._current_graph_task_id() != -1)


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()


def _coefficient(name: str, value: float) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise BadInput(f"{name} is a coefficient from 0, but this is {value!r}.")
    return value > 0
