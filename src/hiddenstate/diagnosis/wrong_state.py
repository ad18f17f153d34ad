"""Explaining a state whose shape a layer does not take: which axis is missing, extra, or of another size."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..cells import Arguments, Call, Layer, around, memory_of
from ..state import tensors
from .patient import Patient
from .rule import Symptom


def wrong_state(patient: Patient) -> Symptom | None:
    """Report the state that a layer of torch's was handed in its failing call, where its shape is the reason."""
    call, given_to_model = _failed_call(patient)
    if call is None or not isinstance(call.layer.module, nn.RNNBase | nn.RNNCellBase) or call.given_native is None:
        return None
    needed, given = _needed(call.layer, call.rows), list(tensors(call.given_native).values())
    if isinstance(call.given_native, Tensor) and len(needed) > 1:
        argument = _argument(patient, given[0], given_to_model)
        return _symptom(argument, call, given[0], needed[0], _one_for_two(needed[0]))
    for state, shape in zip(given, needed, strict=False):
        if tuple(state.shape) != shape:
            argument = _argument(patient, state, given_to_model)
            others_rows = state.dim() == len(shape) and _rows_alone(tuple(state.shape), shape)
            if others_rows and not argument:
                return None  # made in forward, with a number of rows that is written down there
            return _symptom(argument, call, state, shape, _difference(tuple(state.shape), shape, call))
    return None


def _failed_call(patient: Patient) -> tuple[Call | None, tuple[Any, ...]]:
    """Call the model once more; return the first call of a layer that raises, and what the model was called with."""
    failed: list[Call] = []
    outer: list[Any] = []

    def of_the_model(arguments: Arguments, run: Callable[[Arguments], Any]) -> Any:
        args, kwargs = arguments
        outer.extend((*args, *kwargs.values()))
        return run(arguments)

    def heard(layer: Layer, arguments: Arguments, run: Callable[[Arguments], Any]) -> Any:
        try:
            return run(arguments)
        except Exception:
            failed.append(Call(layer, *arguments))
            raise

    with patient.afresh(), ExitStack() as stack:
        for layer in patient.layers:
            stack.callback(around(layer.module, partial(heard, layer)).remove)
        stack.callback(around(patient.model, of_the_model).remove)
        with suppress(Exception):  # as it did before
            patient.call()
    return (failed[0] if failed else None), tuple(outer)


def _needed(layer: Layer, rows: int) -> list[tuple[int, ...]]:
    spec = layer.spec
    stack = (spec.layers * spec.directions,) if layer.fused else ()
    return [(*stack, rows, spec.sizes[part]) for part in spec.parts]


def _argument(patient: Patient, state: Tensor, given: tuple[Any, ...]) -> str:
    """Return what the state is called where it is an argument of the model, or a view of one."""
    for path, end in tensors(given).items():
        if path[0] and memory_of(end) is not None and memory_of(end) == memory_of(state):
            return patient.inputs.name(path) or "the state"
    return ""


def _rows_alone(seen: tuple[int, ...], needed: tuple[int, ...]) -> bool:
    return seen[:-2] == needed[:-2] and seen[-1] == needed[-1] and seen[-2] > 1


def _one_for_two(needed: tuple[int, ...]) -> tuple[str, str]:
    return (
        f"it is one tensor, and an LSTM takes a pair, (h, c), of {needed} each",
        "(h, c), or (h, torch.zeros_like(h)) where there is no c",
    )


def _difference(seen: tuple[int, ...], needed: tuple[int, ...], call: Call) -> tuple[str, str]:
    """Return what is wrong with a shape, and the code that mends it."""
    rows, units = needed[-2:]
    if not call.layer.fused:
        if len(seen) == 3 and seen[1:] == needed and seen[0] == 1:
            return "a cell is one step of one layer: it takes no axis of layers", "h[0]"
        return _by_size(seen, needed)
    stack = needed[0]
    if seen == (rows, units):
        repeated = "" if stack == 1 else f".repeat({stack}, 1, 1)"
        return "the first axis is missing, layers × directions", f"h.unsqueeze(0){repeated}"
    if seen == (stack, units):
        return "the axis of rows is missing, the second one", f"h.unsqueeze(1).repeat(1, {rows}, 1)"
    if seen == (rows, stack, units):
        return (
            "its first two axes are swapped: a state is (layers × directions, batch, unit), also with batch_first=True",
            "h.transpose(0, 1).contiguous()",
        )
    if seen == (stack, 1, units):
        return f"it has one row, and the input has {rows}", f"h.expand(-1, {rows}, -1).contiguous()"
    if seen == (rows, 1, units):
        return (
            "its first two axes are swapped: a state is (layers × directions, batch, unit), also with batch_first=True",
            f"h.transpose(0, 1).repeat({stack}, 1, 1)",
        )
    return _by_size(seen, needed)


def _by_size(seen: tuple[int, ...], needed: tuple[int, ...]) -> tuple[str, str]:
    anew = f"torch.zeros{needed}, or none at all"
    if len(seen) != len(needed):
        return f"it has {len(seen)} axes, and {len(needed)} are needed", anew
    if seen[-1] != needed[-1]:
        return f"it has {seen[-1]} units, and the layer has {needed[-1]}", anew
    if seen[:-2] != needed[:-2]:
        return f"it is of {seen[0]} layers × directions, and there are {needed[0]}", anew
    return f"it has {seen[-2]} rows, and the input has {needed[-2]}: it is a state of another batch", anew


def _symptom(argument: str, call: Call, state: Tensor, needed: tuple[int, ...], mended: tuple[str, str]) -> Symptom:
    cause, advice = mended
    return Symptom(
        "error",
        argument or f"the state that {call.layer.label} is handed",
        f"it has shape {tuple(state.shape)}, and {call.layer.label} with {call.rows} rows of input wants {needed}.",
        cause,
        advice,
        {"rows": call.rows},
        title="a state of another shape",
    )
