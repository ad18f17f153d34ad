"""Recording loops, iterations and attributes: recurrence without a module as its step, as a watched call shows it."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from torch import Tensor

from ..cells import Layer, Layers
from .recording import Options
from .runs import RecordedRun
from .step_buffer import Placed, StepBuffer

if TYPE_CHECKING:
    from ..cells import Part

_LOOPS = ("loop", "layer", "iteration", "attribute")
_ENOUGH = 3  # repetitions in one call; an attribute with fewer was seen to recur from call to call


def is_loop(layer: Layer) -> bool:
    """Say whether a layer repeats something within a call, so that watching one call shows its steps."""
    return layer.seen is not None and layer.kind in _LOOPS and layer.seen.steps >= _ENOUGH


def keeps_state(layer: Layer) -> bool:
    """Say whether a module keeps a state in an attribute from call to call."""
    return layer.seen is not None and layer.kind == "attribute" and layer.seen.steps < _ENOUGH


def not_shown(found: Layers, wanted: list[Layer]) -> list[str]:
    """Return what a recording of the wanted layers will not contain, in words for a warning."""
    said = [
        f"the rows of {', '.join(parts)} in {layer.label}, which could not be told and are shown as one"
        for layer in wanted
        if (parts := _without_rows(layer))
    ]
    caches = [layer for layer in found if layer.kind == "cache"]
    return said + [f"{', '.join(layer.spec.parts)} in {layer.label}, a cache, which grows" for layer in caches]


def shown_otherwise(found: Layers, wanted: list[Layer], called: list[Layer]) -> list[str]:
    """Return what a recording will contain in a form that one might not expect, in words for a warning."""
    changed = {cut.module: cut for cut in (found.seen.cuts if found.seen is not None else ()) if cut.changed}
    said = [
        f"{layer.label} as it gives its state, not as the model hands it on ({changed[layer.name].line})"
        for layer in called
        if layer.name in changed
    ]
    return said + [
        f"{part.name} of {layer.label} with its rows along axis {part.batch_axis}, by their number alone"
        for layer in wanted
        for part in _parts(layer)
        if part.counted
    ]


def _without_rows(layer: Layer) -> list[str]:
    """Return the parts of a loop or cell whose batch axis could not be found."""
    found = _parts(layer) if is_loop(layer) or layer.kind == "cell" else ()
    return [part.name for part in found if part.batch_axis is None and len(part.shape) > 1]


def runs_of(found: Layers, unheard: list[Layer], options: Options) -> list[RecordedRun | None]:
    """Return a run for each loop and iteration that was seen in a call, and for the cells in `unheard`."""
    return [
        _run(layer, found.live(layer), starts_of(layer), options)
        for layer in found
        if is_loop(layer) or layer in unheard
    ]


def starts_of(layer: Layer) -> dict[str, Tensor]:
    """Return the value of each part before the watched call, as far as there was one."""
    return {part.name: part.initial for part in _parts(layer) if part.initial is not None}


def attribute_values(layer: Layer) -> dict[str, Tensor]:
    """Return the present state in a module's attributes by the names of its parts: `hidden[0]`, `memory`."""
    found = {}
    for part in _parts(layer):
        name, *steps = re.split(r"[\[\]]+", part.name.rstrip("]"))
        held = [each for each in vars(layer.module).values() if isinstance(each, dict) and name in each]
        value = getattr(layer.module, name, held[0][name] if held else None)
        for step in steps:
            with suppress(Exception):  # the attribute does not exist before the first call
                value = value[ast.literal_eval(step)]  # type: ignore[index]
        if isinstance(value, Tensor) and value.numel():
            found[part.name] = value.detach()
    return found


def attribute_run(layer: Layer, before: dict[str, Tensor], options: Options) -> RecordedRun | None:
    """Return one call of a module that keeps its state in attributes, as a run of one step; None if it kept none."""
    after = attribute_values(layer)
    if not after:
        return None
    return _run(layer, {name: [value] for name, value in after.items()}, before, options)


def run_before(layer: Layer, options: Options) -> RecordedRun | None:
    """Return the call before the watched one as a run of one step: its state is what the watched call began from."""
    return _run(layer, {name: [value] for name, value in starts_of(layer).items()}, {}, options)


def _run(
    layer: Layer, values: Mapping[str, list[Tensor]], starts: Mapping[str, Tensor], options: Options
) -> RecordedRun | None:
    """Return the values after each repetition as a run."""
    parts = [part for part in _parts(layer) if values.get(part.name)]
    if not parts:
        return None
    parts.sort(key=lambda part: not part.dtype.is_floating_point)  # prefer a floating-point part as h
    first = {part.name: Placed(values[part.name][0], part.batch_axis) for part in parts}
    rows = max(part.rows for part in first.values())
    fits = all(name in starts and starts[name].shape == part.tensor.shape for name, part in first.items())
    placed = {part.name: _placed(starts[part.name].detach(), part.batch_axis, rows) for part in parts if fits}
    steps = StepBuffer(
        options, rows, {name: options.cast(part.flat(part.tensor)).clone() for name, part in placed.items()}
    )
    for turn in range(len(values[parts[0].name])):
        steps.add({part.name: _placed(values[part.name][turn], part.batch_axis, rows) for part in parts}, {})
    return RecordedRun(layer.tracks[0], layer.kind, options, steps.row_lengths(), steps.initial, steps, thinned=True)


def _placed(value: Tensor, axis: int | None, rows: int) -> Placed:
    """Return a value with its batch axis; a value that all rows share is repeated for each."""
    return Placed(value, axis) if axis is not None else Placed(value.unsqueeze(0).expand(rows, *value.shape), 0)


def _parts(layer: Layer) -> tuple[Part, ...]:
    return layer.seen.parts if layer.seen is not None else ()
