"""Penalties on every recurrent layer of a model, added to any training loop in one line."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any
from weakref import finalize

import torch
from torch import Tensor, nn

from ..cells import (
    Call,
    Handle,
    Layer,
    Listener,
    OpenRun,
    OuterCall,
    Proceed,
    Succession,
    layers,
    listen,
    state_first,
    unwrap,
)
from ..errors import BadInput, HiddenStateWarning, NotRecurrent
from ..state import tensors
from .terms import Lengths, activity, norm_stabilizer, temporal

_TERMS: dict[str, Callable[[Tensor, Tensor | None], Tensor]] = {
    "activity": activity,
    "temporal": temporal,
    "norm_stabilizer": norm_stabilizer,
}
_CALLS_KEPT = 16  # model calls whose graphs are kept until the penalty is called


class Penalty:
    """Watches the recurrent layers of an unmodified model; calling it returns the penalty for their last runs.

    The penalty is a sum over layers of coefficient times term. The terms are `activity`, `temporal` and
    `norm_stabilizer`, which the functions of these names compute from the layer's output (the last layer's output of a
    stack, the state h of a cell). Calls that pass the state on, in the model or in a loop of your own, are one run; a
    layer with several runs pays their mean. Runs are noted in training with gradients on, and forgotten when the
    penalty is called: call it once, before `backward`. In evaluation, the penalty is zero.

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
            raise state_first(self._model) or NotRecurrent(
                f"{type(model).__name__} has no recurrent layer or cell to watch. A loop that is written out in a "
                f"forward is recorded: with hs.record(model, graph=True) as rec, and then "
                f"regularize.temporal(rec[track]) of each track in rec."
            )
        self._told: set[Layer] = set()  # layers for which a warning about single steps was given
        self._listener = _RunListener(self._model)
        handle = listen(model, self._layers, self._listener)
        self._end = finalize(self, _end, handle, self._listener)  # stops listening even if nobody calls close()
        self._end.atexit = False

    def __call__(self, lengths: Lengths | None = None) -> Tensor:
        """Return the penalty for all runs since the last call, as a scalar with gradient.

        Pass `lengths (batch,)` for padded sequences whose layers did not get their lengths; packed ones need none.
        """
        if not self._end.alive:
            raise BadInput("this Penalty was closed and watches nothing any more. Make a new one: Penalty(model, ...).")
        runs = self._listener.pop_all()
        if not runs:
            return self._nothing()
        counts = Counter(run.layer for run in runs)
        self._tell_single_steps(runs, counts)
        costs = [self._cost(*_states_of(run, lengths)) / counts[run.layer] for run in runs]
        return sum(costs[1:], costs[0])

    def close(self) -> None:
        """Leave the model unchanged and stop listening; may be repeated."""
        self._end()

    def __enter__(self) -> Penalty:
        """Return itself; the context closes it at the end."""
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
            if longest > 1 or name == "activity":  # a run of one step has no changes
                total = total + coefficient * _TERMS[name](h, lengths)
        return total

    def _tell_single_steps(self, runs: list[LayerRun], counts: Counter[Layer]) -> None:
        """Warn if changes between steps have a coefficient, but a layer only made runs of one step."""
        pairwise = [name for name in self.coefficients if name != "activity"]
        longer = {run.layer for run in runs if len(run.calls) > 1 or run.calls[0].steps > 1}
        single = [layer for layer, count in counts.items() if count > 1 and layer not in longer | self._told]
        for layer in single if pairwise else []:
            self._told.add(layer)
            warnings.warn(
                f"{layer.label} made {counts[layer]} runs of one step each, so {' and '.join(pairwise)} cost nothing "
                f"there: no call was handed the state in which the one before ended. Hand it on, as in "
                f"out, h = layer(x, h), or use regularize.{pairwise[0]} on the stacked states.",
                HiddenStateWarning,
                stacklevel=3,
            )

    def _nothing(self) -> Tensor:
        if self._model.training and torch.is_grad_enabled():
            raise BadInput(
                "there is no run to pay for: the model was not called since the last time, its layers ran without "
                "gradients (torch.no_grad(), a checkpoint with use_reentrant=True), or its loss went backward already. "
                "Ask once for each step: loss = criterion(model(x), y) + penalty(); loss.backward()."
            )
        return torch.zeros((), device=next((p.device for p in self._model.parameters()), None))


@dataclass(slots=True, eq=False)
class LayerRun:
    """One run of a layer, with its graph: a call, and the calls that continued from its end state."""

    model_call: int  # the number of the model call that it belongs to, or was last continued in
    calls: list[Call]
    of: OpenRun  # the run in the layer's succession of calls
    watched: bool = False  # whether a hook reports when its graph is used up
    key: object = field(default_factory=object)  # identifies it to hooks: a hook with a reference would keep its graph

    @property
    def layer(self) -> Layer:
        """The layer that made this run."""
        return self.calls[0].layer

    @property
    def has_graph(self) -> bool:
        """Whether a gradient can be taken back through it."""
        return any(map(_has_graph, self.calls))

    def takes(self, call: Call) -> bool:
        """Say whether `call` can continue this run: rows may have ended, but not been added."""
        last = self.calls[-1]
        return call.rows <= last.rows and last.lengths is None and call.lengths is None


class _RunListener(Listener):
    """Notes the runs of a model's layers in training until they are asked for."""

    title = "hs.regularize.Penalty"

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._runs: list[LayerRun] = []
        self._number = 0  # of the present or last model call
        self._training = False  # whether that call began in training with gradients on
        self._unpaid: set[Layer] = set()  # layers whose last runs had no graph
        self._successions: dict[nn.Module, Succession] = {}

    def model_call(self, entry: OuterCall, run: Callable[[], Any]) -> Any:
        self._number += 1
        self._training = self._model.training and torch.is_grad_enabled()
        return run()

    def layer_call(self, call: Call, proceed: Proceed) -> Call:
        succession = self._successions.setdefault(call.layer.module, Succession())
        run = succession.run_of(call, self._number) if self._training else None
        done = proceed(call)
        # Gradients are off inside a reentrant checkpoint; its result gets a graph afterwards.
        if run is not None and (not torch.is_grad_enabled() or _has_graph(done)):
            self._note(done, run)
            succession.ended(done, self._number, run)
        return done

    def recompute(self, call: Call, proceed: Proceed) -> Call:
        # A backward pass uses up the graph of a reentrant checkpoint, whose runs were never asked for.
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

    def pop_all(self) -> list[LayerRun]:
        """Return the runs that have a graph, and forget all runs."""
        runs, self._runs = self._runs, []
        self._unpaid |= {run.layer for run in runs if not run.has_graph}
        return [run for run in runs if run.has_graph]

    def forget(self, model_call: int | None = None) -> None:
        """Forget the runs of one model call, or all."""
        self._runs = [run for run in self._runs if model_call not in (None, run.model_call)]

    def _note(self, call: Call, of: OpenRun) -> None:
        last = next((run for run in reversed(self._runs) if run.of is of), None)
        if last is not None and last.takes(call):
            last.calls.append(call)
            last.model_call = self._number
            return
        run = LayerRun(self._number, [call], of)
        self._runs.append(run)
        for tensor in tensors(call.result).values():
            if tensor.requires_grad:
                run.watched = True
                tensor.register_hook(partial(self._spent, run.key))  # type: ignore[no-untyped-call]
        self._forget_old()

    def _spent(self, key: object, gradient: Tensor) -> None:
        if not torch.is_grad_enabled():  # otherwise a second derivative will follow, and the graph is kept
            for model_call in {run.model_call for run in self._runs if run.key is key}:
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


def _end(handle: Handle, listener: _RunListener) -> None:
    handle.remove()
    listener.forget()


def _coefficient(name: str, value: float) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise BadInput(f"{name} is a coefficient from 0, but this is {value!r}.")
    return value > 0


def _has_graph(call: Call) -> bool:
    """Say whether a gradient can be taken back through a call."""
    return any(tensor.requires_grad for tensor in tensors(call.result).values())


def _states_of(run: LayerRun, lengths: Lengths | None) -> tuple[Tensor, Tensor | None]:
    """Return the states of a run, (batch, time, unit), and the lengths of its rows if they differ."""
    h, known = _joined([_states(call) for call in run.calls])
    packed = run.calls[0].lengths
    if packed is not None:
        return h, packed.to(h.device)
    if lengths is None or known is not None:
        return h, known
    given = torch.as_tensor(lengths, device=h.device)
    if given.shape != h.shape[:1]:
        raise BadInput(
            f"lengths have shape {tuple(given.shape)}, but layer {run.layer.label} ran {h.shape[0]} rows. "
            f"Where layers run different batches, use regularize.activity and its like on each output."
        )
    return h, given


def _states(call: Call) -> Tensor:
    if call.layer.fused:
        return call.output
    state = call.state
    name = "h" if "h" in state else next(iter(state))
    return state[name].movedim(state.batch_axis[name], 0).flatten(1).unsqueeze(1)


def _joined(pieces: list[Tensor]) -> tuple[Tensor, Tensor | None]:
    rows = len(pieces[0])
    if len(pieces[-1]) == rows:
        return (torch.cat(pieces, dim=1) if len(pieces) > 1 else pieces[0]), None
    # Some rows have ended: the remaining ones are the first.
    padded = [torch.cat([piece, piece.new_zeros(rows - len(piece), *piece.shape[1:])]) for piece in pieces]
    lengths = torch.zeros(rows, dtype=torch.int64)
    for piece in pieces:
        lengths[: len(piece)] += piece.shape[1]
    return torch.cat(padded, dim=1), lengths.to(pieces[0].device)
