"""Recording what recurs without a module that is the step: loops and iterations, by what a watched call saw cross."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..cells import Layer
from .steps import Placed
from .takes import Options, Take

if TYPE_CHECKING:
    from ..cells import Part

_LOOPS = ("loop", "layer", "iteration", "attribute")
_ENOUGH = 3  # repetitions in one call; an attribute with fewer was seen from call to call


def is_loop(layer: Layer) -> bool:
    """Say whether something repeats within a call, so that watching one shows its steps."""
    return layer.seen is not None and layer.kind in _LOOPS and layer.seen.steps >= _ENOUGH


def is_kept(layer: Layer) -> bool:
    """Say whether a module keeps a state from call to call, in an attribute."""
    return layer.seen is not None and layer.kind == "attribute" and layer.seen.steps < _ENOUGH


@dataclass(frozen=True, slots=True, eq=False)
class Crossed:
    """What crossed from each repetition to the next."""

    values: dict[str, Tensor]  # part -> (time, batch, unit)

    def states(self) -> dict[str, Tensor]:
        """Return each part."""
        return self.values

    @property
    def gates(self) -> dict[str, Tensor]:
        """Nothing."""
        return {}

    def grads(self) -> dict[str, Tensor]:
        """Return nothing: the call that is watched has no graph."""
        return {}

    def expects_grads(self) -> bool:
        """Say that none will come."""
        return False


def without_rows(layer: Layer) -> list[str]:
    """Return the parts of a loop or cell whose rows could not be told."""
    parts = layer.seen.parts if layer.seen is not None and (is_loop(layer) or layer.kind == "cell") else ()
    return [part.name for part in parts if part.batch_axis is None and len(part.shape) > 1]


def takes_of(found: Iterable[Layer], options: Options) -> list[Take]:
    """Return one run for each loop and iteration that was seen in a call."""
    return [_take(layer, options) for layer in found if is_loop(layer)]


def kept_values(layer: Layer) -> dict[str, Tensor]:
    """Return what a module keeps in its attributes just now, by the names of the parts: `hidden[0]`, `memory`."""
    assert layer.seen is not None
    found = {}
    for part in layer.seen.parts:
        name, *steps = re.split(r"[\[\]]+", part.name.rstrip("]"))
        held = [each for each in vars(layer.module).values() if isinstance(each, dict) and name in each]
        value = getattr(layer.module, name, held[0][name] if held else None)
        for step in steps:
            with suppress(Exception):  # not there yet, before a first call
                value = value[ast.literal_eval(step)]  # type: ignore[index]
        if isinstance(value, Tensor) and value.numel():
            found[part.name] = value.detach()
    return found


def kept_take(layer: Layer, before: dict[str, Tensor], options: Options) -> Take | None:
    """Return one call as a run of one step, of a module that keeps its state in attributes; None where it kept none."""
    after = kept_values(layer)
    if layer.seen is None or not after:
        return None
    axes = {part.name: part.batch_axis for part in layer.seen.parts}
    flat = {name: Placed(value, axes[name]).flat(value).clone() for name, value in after.items()}
    firsts = {name: Placed(value, axes[name]).flat(value).clone() for name, value in before.items()}
    rows = max(len(value) for value in flat.values())
    whole = {name: value.expand(rows, -1).unsqueeze(0) for name, value in flat.items()}
    initial = firsts if {n: v.shape for n, v in firsts.items()} == {n: v.shape for n, v in flat.items()} else {}
    return Take(layer.tracks[0], layer.kind, options, torch.ones(rows, dtype=torch.int64), initial, Crossed(whole))


def _take(layer: Layer, options: Options) -> Take:
    recurrence = layer.seen
    assert recurrence is not None
    parts = sorted(recurrence.parts, key=lambda part: not part.dtype.is_floating_point)  # real numbers make the best h
    rows = max((Placed(part.values[0], part.batch_axis).rows for part in parts), default=1)
    values = {part.name: torch.stack([_row(part, value, rows) for value in part.values]) for part in parts}
    firsts = {p.name: _row(p, p.initial, rows) for p in parts if p.initial is not None}
    lengths = torch.full((rows,), len(parts[0].values), dtype=torch.int64)
    initial = firsts if len(firsts) == len(values) else {}
    return Take(layer.tracks[0], layer.kind, options, lengths, initial, Crossed(values))


def _row(part: Part, value: Tensor, rows: int) -> Tensor:
    """Return a value as `(batch, unit)`; what all rows share is shown in each of them."""
    flat = Placed(value, part.batch_axis).flat(value)
    return flat.expand(rows, -1) if part.batch_axis is None else flat
