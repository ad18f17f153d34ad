"""The law of carried state: a sequence fed in two pieces, with the state handed over, equals the whole."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from ..cells import (
    Call,
    InputAxes,
    Layer,
    Listener,
    Proceed,
    StartedModel,
    as_layer,
    input_axes,
    is_step,
    layers,
    listen,
    started,
    untouched,
    unwrap_to_call,
)
from ..errors import BadInput, CarryWarning, StateMismatch
from ..state import tensors
from ..unrolling import unroll
from .carry import Carry
from .pieces import difference, distance, tolerance_of


@dataclass(frozen=True, slots=True)
class Split:
    """Whether two pieces equal the whole: truthy when they do."""

    ok: bool
    error: float  # the largest difference found in the model's output
    tolerance: float
    at: int  # the cut at which it was found
    where: str  # the layer that breaks the law, "" where none does
    why: str
    layers: Mapping[str, float] = field(default_factory=dict)  # layer -> largest difference in its output
    axes: InputAxes | None = None  # where time and rows are in the input

    def __bool__(self) -> bool:
        """Say whether the law holds."""
        return self.ok

    def __str__(self) -> str:
        """Return the verdict in a sentence or two."""
        numbers = f"largest difference {self.error:.2g}, tolerance {self.tolerance:.2g}"
        numbers += f"; {self.axes.noted}" if self.axes is not None and self.axes.noted else ""
        if self.ok:
            return f"Two pieces equal the whole ({numbers})."
        return f"Two pieces cut at step {self.at} differ from the whole ({numbers}). {self.why}"


def check_split(
    model: nn.Module,
    x: Tensor,
    at: int | None = None,
    *,
    time_axis: int | None = None,
    batch_axis: int | None = None,
) -> Split:
    """Say whether feeding `x` in two pieces, with the state handed over, equals feeding it whole.

    Without `at`, a cut after the first step, one in the middle and one before the last step are tried. The model is run
    in eval mode and comes back as it was. Which axis is time is deduced from `batch_first` of the layers and from how
    the model takes `x`; the result's `axes` say what was found. A state that its forward insists on is handed in.

    >>> bool(check_split(torch.nn.LSTM(3, 4, batch_first=True), torch.randn(2, 8, 3)))
    True
    >>> print(check_split(torch.nn.GRU(3, 4, batch_first=True, bidirectional=True), torch.randn(2, 8, 3)).where)
    the model itself
    """
    inner = unwrap_to_call(model)
    step = is_step(inner)
    call = None if step else started(inner, x)
    axes = input_axes(inner, x, time_axis=time_axis, batch_axis=batch_axis, call=call)
    if call is not None and not call.goes_on():
        raise BadInput(
            f"{type(inner).__name__}.forward insists on a state, and takes neither None nor the states of its layers, "
            f"so a second piece cannot go on from the first. Let it take None, and pass that on to its layer."
        )
    with ExitStack() as stack:
        stack.enter_context(untouched(inner))
        stack.enter_context(torch.no_grad())
        inner.eval()
        if call is None:
            runner, x, axis = _cell_runner(as_layer(inner, axes.rows_first(x)[:, 0])), axes.rows_first(x), 1
        else:
            runner, axis = stack.enter_context(_runner(call)), axes.time
        whole = runner(x)
        found = [_compare(runner, whole, x, cut, axis) for cut in _cuts(x.shape[axis], at)]
    return replace(max(found, key=lambda split: (not split.ok, split.error / split.tolerance)), axes=axes)


@dataclass(slots=True)
class _SplitRun:
    """What one run of the model gave, and the calls that its layers had in it."""

    output: list[Tensor]
    calls: dict[str, list[Call]]  # layer -> its calls
    found: list[Layer]


class _Calls(Listener):
    """Notes every call of every layer."""

    def __init__(self) -> None:
        self.of: dict[str, list[Call]] = {}

    def layer_call(self, call: Call, proceed: Proceed) -> Call:
        done = proceed(call)
        self.of.setdefault(call.layer.name, []).append(done)
        return done


@contextmanager
def _runner(call: StartedModel) -> Iterator[Callable[..., _SplitRun]]:
    """Give a function that runs the model on one piece, going on where the last one ended unless told to start anew."""
    model = call.model
    found = layers(model)
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore", CarryWarning)
        attached = Carry.of(model)
        carry = attached or stack.enter_context(Carry(model))
        stack.enter_context(carry.fresh())
        calls = _Calls()
        stack.callback(listen(model, found, calls).remove)

        def go(piece: Tensor, *, on: bool = False) -> _SplitRun:
            if not on:
                carry.reset()
            calls.of = {}
            states = carry.snapshot().states if on and call.hands_over else None
            output = list(tensors(call(piece, states)).values())
            return _SplitRun(output, calls.of, found)

        yield go


def _cell_runner(layer: Layer) -> Callable[..., _SplitRun]:
    state = None

    def go(piece: Tensor, *, on: bool = False) -> _SplitRun:
        nonlocal state
        output, state = unroll(layer.module, piece, state if on else None, time_axis=1)
        return _SplitRun([output], {}, [])

    return go


def _compare(runner: Callable[..., _SplitRun], whole: _SplitRun, x: Tensor, cut: int, axis: int) -> Split:
    steps = x.shape[axis]
    first = runner(x.narrow(axis, 0, cut))
    _check_rows(whole, first, cut)
    second = runner(x.narrow(axis, cut, steps - cut), on=True)
    outputs = zip(whole.output, first.output, second.output, strict=False)
    errors = [difference(*three) for three in outputs]
    tolerance = tolerance_of(whole.output)
    error = max([e for e in errors if e is not None], default=0.0)
    each = {layer: _layer_differences((whole, first, second), layer) for layer in whole.found}
    by_name = {layer.label: outputs for layer, (_, outputs) in each.items() if outputs is not None}
    if error <= tolerance:
        return Split(True, error, tolerance, cut, "", "", by_name)
    unheard = [layer.label for layer in whole.found if not whole.calls.get(layer.name)]
    return Split(False, error, tolerance, cut, *_culprit(each, tolerance, unheard), by_name)


def _check_rows(whole: _SplitRun, first: _SplitRun, cut: int) -> None:
    """Refuse a layer whose rows are steps of the input: pieces of it have other rows, and no state goes over."""
    for name, calls in whole.calls.items():
        rows = [call.rows for call in (calls[0], *first.calls.get(name, [])[:1])]
        if rows[0] != rows[-1]:
            raise StateMismatch(
                f"the layer {name!r} runs {rows[0]} rows for the whole input and {rows[-1]} for its first {cut} steps: "
                f"steps lie among its rows, as words within sentences do, so its state cannot go from one piece to the "
                f"next. Carry and check the layers after it by themselves."
            )


def _culprit(
    each: Mapping[Layer, tuple[float | None, float | None]], tolerance: float, unheard: Sequence[str]
) -> tuple[str, str]:
    for layer, (inputs, outputs) in each.items():
        name = layer.label
        if inputs is not None and inputs > tolerance:
            return f"before {name}", (
                f"The input of {name!r} differs already, by {inputs:.2g}: something before it mixes steps "
                f"(a convolution, attention or normalization over time), and that is not carried."
            )
        if outputs is not None and outputs > tolerance:
            return name, f"The layer {name!r} breaks the law, by {outputs:.2g}: {_reason(layer)}"
    if unheard:
        return unheard[0], (
            f"The layer {unheard[0]!r} was found, but not called. Where it is run past itself, by its weights or by "
            f"`nn.LSTM.forward(layer, x)`, nothing of it is heard, nor carried: call it, layer(x). Where it has no "
            f"part in this call, what follows the other layers mixes steps (attention or pooling over time)."
        )
    return "after the layers", (
        "Every recurrent layer keeps the law, so what follows them mixes steps (attention or pooling over time), "
        "or takes the last step of a piece for the last of the whole."
    )


def _reason(layer: Layer) -> str:
    if layer.fused and layer.spec.bidirectional:
        return "it runs in both directions, and its reverse direction begins at the end of each piece."
    return (
        "the state it ends in is not the one it goes on from. Usually the model hands it a state of its own, such as "
        "zeros made in forward: let it pass no state where it makes one now."
    )


def _layer_differences(runs: tuple[_SplitRun, ...], layer: Layer) -> tuple[float | None, float | None]:
    """Return how far a layer's inputs and outputs in the two pieces are from those in the whole."""
    whole, first, second = (run.calls.get(layer.name, []) for run in runs)
    if not whole or not first or not second:
        return None, None
    inputs = [_along_time([call.x for call in calls]) for calls in (whole, [*first, *second])]
    outputs = [_along_time([call.output for call in calls]) for calls in (whole, [*first, *second])]
    return _gap(inputs), _gap(outputs)


def _along_time(pieces: list[Tensor]) -> Tensor | None:
    """Join what several calls saw, `(batch, time, ...)`; None where they were not of one kind."""
    same = {(piece.shape[0], piece.shape[2:]) for piece in pieces}
    return torch.cat(pieces, dim=1) if len(same) == 1 else None


def _gap(pair: list[Tensor | None]) -> float | None:
    whole, pieces = pair
    return None if whole is None or pieces is None or whole.shape != pieces.shape else distance(pieces, whole)


def _cuts(steps: int, at: int | None) -> list[int]:
    if steps < 2:
        raise BadInput(f"x has {steps} step, but two pieces need 2 steps or more.")
    if at is None:
        return sorted({1, steps // 2, steps - 1})
    if not 0 < at < steps:
        raise BadInput(f"the cut is at {at}, but with {steps} steps it must be between 1 and {steps - 1}.")
    return [at]
