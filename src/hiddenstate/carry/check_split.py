"""The law of carried state: a sequence fed in two pieces, with the state handed over, equals the whole."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ..cells import (
    Call,
    GivenCall,
    InputAxes,
    Layer,
    Listener,
    Proceed,
    StartedModel,
    as_layer,
    given_call,
    input_axes,
    is_step,
    layers,
    listen,
    started,
    untouched,
    unwrap_to_call,
)
from ..errors import BadInput, CarryWarning, HiddenStateError, StateMismatch
from ..state import State, mapped, tensors
from ..unrolling import unroll
from .carry import Carry
from .pieces import difference, distance, tolerance_of

States: TypeAlias = Mapping[str, State]  # by layer


@dataclass(frozen=True, slots=True)
class Split:
    """Whether two pieces equal the whole; true in a boolean context if they do."""

    ok: bool
    error: float  # the largest difference in the model's output
    tolerance: float
    at: int  # the cut at which it was found
    where: str  # the layer that breaks the law, "" if none does
    why: str
    layers: Mapping[str, float] = field(default_factory=dict)  # layer -> largest difference in its output
    axes: InputAxes | None = None  # which axes of the input are time and batch

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
    *inputs: Any,
    at: int | None = None,
    time_axis: int | None = None,
    batch_axis: int | None = None,
    call: Callable[..., Any] | None = None,
    **kwargs: Any,
) -> Split:
    """Say whether feeding a sequence in two pieces, with the state handed over, equals feeding it whole.

    The model is called as `model(*inputs, **kwargs)`, in eval mode, and comes back unchanged. All inputs that run along
    time are cut with the sequence, and lengths are adjusted to each piece. A state among the inputs begins the first
    piece; the second continues from the state in which that ended. If forward requires a state, it gets one. Which axis
    is time is deduced from `batch_first` of the layers and from how the model takes its input; the result's `axes` say
    what was found.

    >>> bool(check_split(torch.nn.LSTM(3, 4, batch_first=True), torch.randn(2, 8, 3)))
    True
    >>> print(check_split(torch.nn.GRU(3, 4, batch_first=True, bidirectional=True), torch.randn(2, 8, 3)).where)
    the model itself

    Args:
        model: Any model with recurrent layers, a layer, or a cell.
        inputs: What the model is called with.
        at: Where to cut; by default after the first step, in the middle and before the last step. If rows have lengths,
            cut within the shortest, so that no row ends before the cut.
        time_axis: Which axis of the sequence is time, if it should not be deduced.
        batch_axis: Which axis holds the rows.
        call: How to call the model, if not through its forward: `call=lambda model: model.act(x, state)`, or
            `call(model, *inputs)`.
        kwargs: What the model is called with by name.
    """
    options = {"at": at, "time_axis": time_axis, "batch_axis": batch_axis}
    given = given_call(check_split, model, inputs, kwargs=kwargs, call=call, options=options)
    inner, x = unwrap_to_call(given.model), given.x
    if not isinstance(x, Tensor):
        raise BadInput(
            f"a sequence is cut in two, but none of the {len(given.args)} inputs of {type(inner).__name__} is a "
            f"tensor: hs.check_split(model, x) needs one with steps."
        )
    begun = started(inner, x) if given.alone and not is_step(inner, x) else None
    axes = input_axes(inner, x, time_axis=time_axis, batch_axis=batch_axis, call=begun or given)
    if begun is not None and not begun.goes_on():
        raise BadInput(
            f"{type(inner).__name__}.forward insists on a state, and takes neither None nor the states of its layers, "
            f"so a second piece cannot go on from the first. Let it take None, and pass that on to its layer."
        )
    steps = x.shape[axes.time]
    told = given.lengths(axes)
    with ExitStack() as stack:
        stack.enter_context(untouched(inner))
        stack.enter_context(torch.no_grad())
        inner.eval()
        if given.alone and begun is None:
            runner = _cell_runner(as_layer(inner, axes.rows_first(x)[:, 0]), axes.rows_first(x))
        elif begun is not None:
            runner = stack.enter_context(_runner(inner, given.own, partial(_begun_piece, begun, x, axes.time)))
        else:
            runner = stack.enter_context(_runner(inner, given.own, partial(_given_piece, given, axes)))
        whole = runner(slice(None))
        cuts = _cuts(steps if told is None else int(told.min()), at)
        found = [_compare(runner, whole, cut) for cut in cuts]
    return replace(max(found, key=lambda split: (not split.ok, split.error / split.tolerance)), axes=axes)


@dataclass(slots=True)
class _SplitRun:
    """The result of one run of the model, and the calls of its layers in that run."""

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
def _runner(
    model: nn.Module, own: nn.Module, piece: Callable[[slice, States | None], Any]
) -> Iterator[Callable[..., _SplitRun]]:
    """Return a function that runs the model on one piece, from the start or continuing from the last run.

    `piece(steps, states)` calls the model; `states` are those that its layers continue from. `own` is the user's model.
    """
    found = layers(model)
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore", CarryWarning)
        carry = Carry.of(own) or stack.enter_context(Carry(model))
        stack.enter_context(carry.fresh())
        calls = _Calls()
        stack.callback(listen(model, found, calls).remove)

        def go(steps: slice, *, on: bool = False) -> _SplitRun:
            if not on:
                carry.reset()
            calls.of = {}
            output = list(tensors(piece(steps, carry.snapshot().states if on else None)).values())
            return _SplitRun(output, calls.of, found)

        yield go


def _begun_piece(call: StartedModel, x: Tensor, axis: int, steps: slice, states: States | None) -> Any:
    """Call a model with a piece of the sequence, and with states if its forward requires them."""
    return call(x[(slice(None),) * axis + (steps,)], states if call.hands_over else None)


def _given_piece(given: GivenCall, axes: InputAxes, steps: slice, states: States | None) -> Any:
    """Call a model with a piece of all that the user gave; its states are replaced by those to continue from."""
    args = list(given.piece(axes, steps))
    places = given.states()
    if states is not None and places:
        ended = [layer.to_native(states[layer.name]) for layer in layers(given.model) if layer.name in states]
        begun = tuple(args[place] for place in places)
        onward = _in_the_form_of(begun, ended[:1]) or _in_the_form_of(begun, ended)
        if onward is None:
            raise BadInput(
                f"the state that is handed in as {given.names[places[0]]!r} is not as those in which the layers end "
                f"({_shapes(ended) or 'none'}), but {_shapes(begun)}: a second piece cannot go on from the first. "
                f"Let the model take None for it, and leave it out."
            )
        for place, state in zip(places, onward, strict=True):
            args[place] = state
    return given.model(*args)


def _in_the_form_of(begun: tuple[Any, ...], ended: list[Any]) -> tuple[Any, ...] | None:
    """Return the end states of layers, nested as the states they began with; None if they do not match these."""
    if _shapes(begun) != _shapes(ended):
        return None
    values = iter(tensors(ended).values())
    made: tuple[Any, ...] = mapped(begun, lambda _, end: next(values) if isinstance(end, Tensor) else end)
    return made


def _shapes(native: Any) -> str:
    return " and ".join(str(tuple(part.shape)) for part in tensors(native).values())


def _cell_runner(layer: Layer, x: Tensor) -> Callable[..., _SplitRun]:
    state = None

    def go(steps: slice, *, on: bool = False) -> _SplitRun:
        nonlocal state
        output, state = unroll(layer.module, x[:, steps], state if on else None, time_axis=1)
        return _SplitRun([output], {}, [])

    return go


def _compare(runner: Callable[..., _SplitRun], whole: _SplitRun, cut: int) -> Split:
    tolerance = tolerance_of(whole.output)
    try:
        first = runner(slice(None, cut))
        _check_rows(whole, first, cut)
        second = runner(slice(cut, None), on=True)
    except HiddenStateError:
        raise
    except Exception as raised:  # the whole input ran without an error
        reason = (
            f"Cut after step {cut}, a piece raises {type(raised).__name__} ({raised}), where the whole runs: the model "
            f"takes one number of steps alone, or reads them by their number."
        )
        return Split(False, math.inf, tolerance, cut, "the model itself", reason, {})
    errors = _output_errors(whole.output, first.output, second.output)
    if whole.output and errors[0] is None:
        shapes = ", ".join(str(tuple(run.output[0].shape)) for run in (whole, first, second) if run.output)
        reason = (
            f"The outputs of the pieces cannot be put together to that of the whole (shapes {shapes}): the model drops "
            f"steps at the ends of a call, or adds some, or an axis grows with the length of the call."
        )
        return Split(False, math.inf, tolerance, cut, "after the layers", reason, {})
    error = max([e for e in errors if e is not None], default=0.0)
    each = {layer: _layer_differences((whole, first, second), layer) for layer in whole.found}
    by_name = {layer.label: outputs for layer, (_, outputs) in each.items() if outputs is not None}
    if error <= tolerance:
        return Split(True, error, tolerance, cut, "", "", by_name)
    unheard = [layer.label for layer in whole.found if not whole.calls.get(layer.name)]
    return Split(False, error, tolerance, cut, *_culprit(each, tolerance, unheard), by_name)


def _output_errors(whole: list[Tensor], first: list[Tensor], second: list[Tensor]) -> list[float | None]:
    """Return how far each output of the pieces is from that of the whole; None if they cannot be compared."""
    if len(first) + len(second) == len(whole):  # a list with one output for each step
        pairs = zip(whole, [*first, *second], strict=True)
        return [distance(a, b) if a.shape == b.shape else None for a, b in pairs]
    if len(first) == len(second) == len(whole):
        return [difference(*three) for three in zip(whole, first, second, strict=True)]
    return [None]


def _check_rows(whole: _SplitRun, first: _SplitRun, cut: int) -> None:
    """Raise if steps of the input are among a layer's rows: its pieces have other rows, and cannot share a state."""
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
    """Return how far a layer's inputs and outputs in the two pieces differ from those in the whole."""
    whole, first, second = (run.calls.get(layer.name, []) for run in runs)
    if not whole or not first or not second:
        return None, None
    inputs = [_along_time([call.x for call in calls]) for calls in (whole, [*first, *second])]
    outputs = [_along_time([call.output for call in calls]) for calls in (whole, [*first, *second])]
    return _gap(inputs), _gap(outputs)


def _along_time(pieces: list[Tensor]) -> Tensor | None:
    """Join the values of several calls, `(batch, time, ...)`, along time; None if their shapes do not allow it."""
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
