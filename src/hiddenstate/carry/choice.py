"""Choosing which of the recurrences that a call has shown are carried, and saying why the others are not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..cells import Layer, Layers


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """What is carried after a watched call, and what to report about the rest."""

    stays: list[Layer]  # layers known before the call, and not contradicted by it
    new: list[Layer]  # cells that only the call has shown
    left: list[str]  # recurrences that are not carried, each with the reason
    uneven: list[str]  # carried ones for which pieces of the input cannot give what the whole gives
    loops: list[Layer] = field(default_factory=list)  # loops whose start is replaced by the carried state

    @classmethod
    def of(
        cls, found: Layers, before: Sequence[Layer], own: Sequence[Layer] = (), *, final: bool, override: bool = False
    ) -> Choice:
        """Choose from what a call has shown; `before` is what was carried so far, `own` what the model keeps itself.

        With `final`, no further call is watched. Otherwise nothing is reported yet about a loop that may turn out to
        continue from a state that the model keeps.
        """
        iterated = set(found.seen.iterated) if found.seen is not None else set()
        cuts = found.seen.cuts if found.seen is not None else ()
        inside = {module for layer in found if layer.fused for module in layer.module.modules()}  # internals of layers
        loops = [each for each in found if _can_be_begun(found, each) and each not in own and each.module not in inside]
        loops = loops if override else []
        # These cells can be carried if their loops' other state, and changes to their own on the way, are carried too.
        cuts = tuple(cut for cut in cuts if not (override and cut.beside))
        fed = [found.seen.starts[loop.seen].feeds for loop in loops if found.seen is not None and loop.seen is not None]
        apart = iterated.union(*fed) | {cut.module for cut in cuts if not cut.carried}
        adapters = {(layer.module, layer.adapter) for layer in found if layer.name not in apart}
        stays = [layer for layer in before if (layer.module, layer.adapter) in adapters]
        carried = {layer.module for layer in stays}
        new = [
            each for each in found if each.module not in carried and each.name not in apart and _can_be_carried(each)
        ]
        whole = {layer.module for layer in (*stays, *new) if layer.fused}
        others = [layer for layer in found if layer.seen and layer not in new and layer.module not in whole]
        others = [layer for layer in others if layer not in loops and layer not in own]
        left = [_left_out(found, layer) for layer in others if layer.kind != "iteration" and final] + found.doubts()
        named = {layer.name: layer for layer in found if not layer.seen or layer.kind == "cell"}
        left += [
            f"{named[cut.module].label}: {cut.why}"
            for cut in cuts
            if not cut.carried and cut.module in named and not (loops and cut.changed)
        ]
        if final and not stays and not new and not left and not loops and not own:
            left = [_left_out(found, layer) for layer in others] + [f"{name}, which only iterates" for name in iterated]
        kept = {layer.name for layer in (*stays, *new)}
        told = [cut for cut in cuts if cut.carried and not cut.usual and cut.module in kept]
        return cls(stays, new, left, [f"{cut.module!r}: {cut.why}" for cut in told], loops)


def _can_be_begun(found: Layers, layer: Layer) -> bool:
    """Say whether a loop can be given another start."""
    if layer.seen is None or layer.kind not in ("loop", "layer") or found.seen is None:
        return False
    axes = [(part.shape, part.batch_axis) for part in layer.seen.parts]
    rows = all(axis is not None and shape.count(shape[axis]) == 1 for shape, axis in axes)
    return (_has_rows(layer) or rows) and not found.seen.starts[layer.seen].why_not


def _has_rows(layer: Layer) -> bool:
    parts = layer.seen.parts if layer.seen is not None else ()
    return all(part.batch_axis is not None and not part.counted for part in parts)


def _can_be_carried(layer: Layer) -> bool:
    return layer.seen is None or (layer.kind == "cell" and _has_rows(layer))


def _left_out(found: Layers, layer: Layer) -> str:
    assert layer.seen is not None
    assert found.seen is not None
    start = found.seen.starts.get(layer.seen)
    parts = ", ".join(part.name for part in layer.seen.parts)
    why = {
        "attribute": "which the model keeps itself, from call to call",
        "cache": "which grows",
        "cell": "which is handed in within an object of its own" if layer.seen.hidden else "whose rows are not sure",
        "iteration": "which has no time",
    }
    loop = "whose start is the model's own: hs.Carry(model, override=True) puts the carried state there"
    if start is None or not (_has_rows(layer) or _can_be_begun(found, layer)):
        loop = "whose rows are not sure"
    elif start.why_not:
        loop = f"to which no state can be handed: {start.why_not}"
    return f"{parts} of the {layer.kind} at {layer.seen.line}, {why.get(layer.kind, loop)}"
