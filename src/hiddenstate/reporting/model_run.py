"""One run of the user's model: every state and gate, and the inputs of each layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ..carry import Carry
from ..cells import (
    Call,
    Layer,
    Layers,
    Listener,
    Proceed,
    as_layer,
    cell_along,
    has_own_code,
    layers,
    listen,
    started,
    unheard,
    untouched,
    unwrap,
    unwrap_to_call,
)
from ..errors import BadInput, NotRecurrent
from ..recording import Recording, record


@dataclass(frozen=True, slots=True, eq=False)
class ModelRun:
    """The result of one call of a model: its layers, their states and gates, and the inputs of each layer."""

    layers: Layers
    recording: Recording
    inputs: dict[str, Tensor]  # layer -> its inputs, (batch, time, feature), call after call
    given: tuple[Any, ...] = ()  # the arguments of the model's call, including a state that it requires


def run_model(model: nn.Module, inputs: tuple[Any, ...]) -> ModelRun:
    """Call `model` once in eval mode and return what its layers did; the model comes back unchanged."""
    unwrap_to_call(model)
    found = layers(model)
    if not found and not has_own_code(model):
        raise NotRecurrent(_nothing(model))
    if not inputs:
        first = (
            f"the layer {found[0].name or 'itself'} and those before it want it{_wanted(found[0])}"
            if found
            else "it takes it"
        )
        raise BadInput(
            f"a report needs what the model is called with: hs.report(model, x, path=...), with x as {first}."
        )
    given = _Inputs()
    if len(inputs) == 1 and isinstance(inputs[0], Tensor):
        with suppress(BadInput):  # the call below will say what is missing
            inputs = (*inputs, *started(model, inputs[0]).beside(inputs[0]))
    with _in_eval_mode(model), unheard():
        _call(model, inputs)  # raises with an explanation if it is the model that fails
        found = layers(model, *inputs) if has_own_code(model) else found
    if not found:
        raise NotRecurrent(_nothing(model))
    with _in_eval_mode(model), record(model, gates=True) as recording:
        handle = listen(model, [layer for layer in found if layer.seen is None], given)
        try:
            _call(model, inputs)
        finally:
            handle.remove()
    for track in recording:
        recording.runs(track)  # compute all values now, while the weights have not changed
    return ModelRun(found, recording, given.along_time(), inputs)


class CellAlongTime(nn.Module):
    """Calls a cell once for each step of `x (batch, time, ...)`, and returns its outputs `(batch, time, ...)`."""

    def __init__(self, cell: nn.Module, *, time_axis: int) -> None:
        """Take the cell, unchanged; `time_axis` may be 0 or 1."""
        super().__init__()
        self.cell, self.time_axis = cell, time_axis
        self.train(cell.training)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs at all steps."""
        steps = x.unbind(self.time_axis)
        layer = as_layer(self.cell, steps[0])
        native = layer.to_native(layer.initial(len(steps[0])))
        outputs = []
        for step in steps:
            output, native = layer.call(step, native)
            outputs.append(output)
        return torch.stack(outputs, dim=self.time_axis)


def along_time(model: nn.Module, inputs: tuple[Any, ...], *, batch_axis: int) -> nn.Module:
    """Return a cell that is called with a sequence as a model that steps it; return any other model unchanged."""
    inner = unwrap(model)
    cell = cell_along(inner, inputs[0]) if len(inputs) == 1 else None
    return model if cell is None else CellAlongTime(as_layer(inner).module, time_axis=1 - batch_axis)


def _nothing(model: nn.Module) -> str:
    return (
        f"{type(model).__name__} has no recurrent layer, so there is nothing to report on: nothing was seen to recur "
        f"in a call of it. hs.layers(model, *inputs).explain() shows what was looked at; hs.register teaches others."
    )


@contextmanager
def _in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Keep a model in eval mode without gradients in this context, and restore all that a call may change."""
    inner = unwrap(model)
    carry = Carry.of(inner)
    with untouched(inner), carry.fresh() if carry is not None else nullcontext(), torch.no_grad():
        inner.eval()
        yield


def _call(model: nn.Module, inputs: tuple[Any, ...]) -> None:
    try:
        model(*inputs)
    except Exception as error:
        raise BadInput(misfit(model, inputs, f"{type(error).__name__}: {error}")) from error


def misfit(model: nn.Module, inputs: tuple[Any, ...], raised: str) -> str:
    """Return why a model cannot be called with these inputs, and the shape that its first recurrent layer needs."""
    shapes = ", ".join(describe(value) for value in inputs)
    first = next(iter(layers(model)), None)
    wanted = _wanted(first) if first is not None else ""
    hint = f" Its first recurrent layer, {first.label}, takes{wanted}." if first is not None and wanted else ""
    said = " ".join(raised.split()).rstrip(".")
    return f"{type(unwrap(model)).__name__} cannot be called with {shapes}: {said}.{hint}"


def describe(value: Any) -> str:
    """Describe an input in a few words."""
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, PackedSequence):
        return f"a PackedSequence of {int(value.batch_sizes[0])} rows"
    return type(value).__name__


def _wanted(layer: Layer) -> str:
    width = layer.spec.input_size
    if width is None:
        return ""
    if not layer.fused:
        return f" (batch, {width}) at each step"
    return f" (batch, time, {width})" if layer.spec.batch_first else f" (time, batch, {width})"


class _Inputs(Listener):
    """Keeps the inputs of each layer, call by call, as (batch, time, feature)."""

    def __init__(self) -> None:
        self.of: dict[str, list[Tensor]] = {}

    def layer_call(self, call: Call, proceed: Proceed) -> Call:
        with suppress(NotRecurrent):  # a registered kind may take other inputs than tensors
            self.of.setdefault(call.layer.name, []).append(call.x.detach().clone())
        return proceed(call)

    def along_time(self) -> dict[str, Tensor]:
        """Return each layer's inputs joined along time, up to the first call with other rows or features."""
        return {name: torch.cat(_alike(calls), dim=1) for name, calls in self.of.items() if calls}


def _alike(calls: list[Tensor]) -> list[Tensor]:
    first = calls[0]
    return list(takewhile(lambda x: (len(x), x.shape[2:]) == (len(first), first.shape[2:]), calls))
