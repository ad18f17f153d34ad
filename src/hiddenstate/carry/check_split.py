"""The law of carried state: a sequence fed in two pieces, with the state handed over, equals the whole."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..cells import Call, Layer, Listener, Proceed, as_layer, layers, listen, untouched, unwrap
from ..errors import BadInput, CarryWarning
from ..state import tensors
from ..unrolling import unroll
from .carry import Carry


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

    def __bool__(self) -> bool:
        """Say whether the law holds."""
        return self.ok

    def __str__(self) -> str:
        """Return the verdict in a sentence or two."""
        numbers = f"largest difference {self.error:.2g}, tolerance {self.tolerance:.2g}"
        if self.ok:
            return f"Two pieces equal the whole ({numbers})."
        return f"Two pieces cut at step {self.at} differ from the whole ({numbers}). {self.why}"


def check_split(model: nn.Module, x: Tensor, at: int | None = None, *, time_axis: int | None = None) -> Split:
    """Say whether feeding `x` in two pieces, with the state handed over, equals feeding it whole.

    Without `at`, a cut after the first step, one in the middle and one before the last step are tried. The model is run
    in eval mode and comes back as it was.

    >>> bool(check_split(torch.nn.LSTM(3, 4, batch_first=True), torch.randn(2, 8, 3)))
    True
    >>> print(check_split(torch.nn.GRU(3, 4, batch_first=True, bidirectional=True), torch.randn(2, 8, 3)).where)
    the model itself
    """
    inner = unwrap(model)
    with ExitStack() as stack:
        stack.enter_context(untouched(inner))
        stack.enter_context(torch.no_grad())
        inner.eval()
        runner = stack.enter_context(_runner(inner))
        whole = runner(x)
        axis = _time_axis(whole, x) if time_axis is None else time_axis
        steps = x.shape[axis]
        found = [_compare(runner, whole, x, cut, axis) for cut in _cuts(steps, at)]
    return max(found, key=lambda split: (not split.ok, split.error / split.tolerance))


@dataclass(slots=True)
class _Run:
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
def _runner(model: nn.Module) -> Iterator[Callable[..., _Run]]:
    """Give a function that runs the model on one piece, going on where the last one ended unless told to start anew."""
    found = layers(model)
    if _is_step(model, found):
        yield _cell_runner(as_layer(model))
        return
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore", CarryWarning)
        attached = Carry.of(model)
        carry = attached or stack.enter_context(Carry(model))
        stack.enter_context(carry.fresh())
        calls = _Calls()
        stack.callback(listen(model, found, calls).remove)

        def go(piece: Tensor, *, on: bool = False) -> _Run:
            if not on:
                carry.reset()
            calls.of = {}
            output = list(tensors(model(piece)).values())
            return _Run(output, calls.of, found)

        yield go


def _is_step(model: nn.Module, found: list[Layer]) -> bool:
    """Say whether the model itself is a cell of one step: one that is known, or that insists on its state."""
    if len(found) == 1 and found[0].module is model:
        return not found[0].fused
    parameters = list(inspect.signature(model.forward).parameters.values())
    return len(parameters) == 2 and all(parameter.default is parameter.empty for parameter in parameters)


def _cell_runner(layer: Layer) -> Callable[..., _Run]:
    state = None

    def go(piece: Tensor, *, on: bool = False) -> _Run:
        nonlocal state
        output, state = unroll(layer.module, piece, state if on else None)
        return _Run([output], {}, [layer])

    return go


def _compare(runner: Callable[..., _Run], whole: _Run, x: Tensor, cut: int, axis: int) -> Split:
    steps = x.shape[axis]
    first = runner(x.narrow(axis, 0, cut))
    second = runner(x.narrow(axis, cut, steps - cut), on=True)
    outputs = zip(whole.output, first.output, second.output, strict=False)
    errors = [_difference(*three) for three in outputs]
    tolerance = _tolerance(whole.output)
    error = max([e for e in errors if e is not None], default=0.0)
    each = {layer: _layer_differences((whole, first, second), layer) for layer in whole.found}
    by_name = {layer.label: outputs for layer, (_, outputs) in each.items() if outputs is not None}
    if error <= tolerance:
        return Split(True, error, tolerance, cut, "", "", by_name)
    return Split(False, error, tolerance, cut, *_culprit(each, tolerance), by_name)


def _culprit(each: Mapping[Layer, tuple[float | None, float | None]], tolerance: float) -> tuple[str, str]:
    for layer, (inputs, outputs) in each.items():
        name = layer.label
        if inputs is not None and inputs > tolerance:
            return f"before {name}", (
                f"The input of {name!r} differs already, by {inputs:.2g}: something before it mixes steps "
                f"(a convolution, attention or normalization over time), and that is not carried."
            )
        if outputs is not None and outputs > tolerance:
            return name, f"The layer {name!r} breaks the law, by {outputs:.2g}: {_reason(layer)}"
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


def _layer_differences(runs: tuple[_Run, ...], layer: Layer) -> tuple[float | None, float | None]:
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
    return None if whole is None or pieces is None or whole.shape != pieces.shape else _distance(pieces, whole)


def _difference(whole: Tensor, first: Tensor, second: Tensor) -> float | None:
    """Compare along the axis that was cut; where there is none, what the second piece ends in with the whole."""
    for axis in range(whole.dim()):
        if first.dim() == second.dim() == whole.dim():
            sizes = [t.shape[axis] for t in (first, second)]
            rest = [tuple(t.shape[:axis] + t.shape[axis + 1 :]) for t in (whole, first, second)]
            if sum(sizes) == whole.shape[axis] and rest[0] == rest[1] == rest[2]:
                return _distance(torch.cat([first, second], dim=axis), whole)
    return _distance(second, whole) if second.shape == whole.shape else None


def _distance(a: Tensor, b: Tensor) -> float:
    if not a.numel():
        return 0.0
    if not (a.is_floating_point() or a.is_complex()):
        return float((a != b).any())
    gap = (a - b).abs()
    return float("inf") if bool(gap.isnan().any()) else float(gap.max())


def _tolerance(outputs: list[Tensor]) -> float:
    floating = [out for out in outputs if out.is_floating_point()]
    if not floating:
        return 0.5
    eps = max(torch.finfo(out.dtype).eps for out in floating)
    scale = max([1.0, *(float(out.abs().max()) for out in floating if out.numel())])
    return scale * (1e3 * eps if eps < 1e-4 else 8 * eps)


def _time_axis(whole: _Run, x: Tensor) -> int:
    """Find which axis of `x` the layers took for time; batch-first where it cannot be told."""
    for layer in whole.found:
        calls = whole.calls.get(layer.name, [])
        if not calls:
            continue
        batch_first = not layer.fused or (layer.spec.batch_first and calls[0].batched)
        steps = sum(call.steps for call in calls)
        fits = [axis for axis in (1, 0) if x.dim() > axis and x.shape[axis] == steps]
        if len(fits) == 1:
            return fits[0]
        if fits:
            return 1 if batch_first else 0
    return 1 if x.dim() > 1 else 0


def _cuts(steps: int, at: int | None) -> list[int]:
    if steps < 2:
        raise BadInput(f"x has {steps} step, but two pieces need 2 steps or more.")
    if at is None:
        return sorted({1, steps // 2, steps - 1})
    if not 0 < at < steps:
        raise BadInput(f"the cut is at {at}, but with {steps} steps it must be between 1 and {steps - 1}.")
    return [at]
