"""Which of the recurrences that a call has shown are carried, and why the others are not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..cells import Layer, Layers


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """What is carried after a call was watched, and what is said about the rest."""

    stays: list[Layer]  # known before the call, and not contradicted by it
    new: list[Layer]  # cells that only the call has shown
    left: list[str]  # what is not carried, and why
    uneven: list[str]  # what is carried, though pieces of the input cannot give what the whole gives

    @classmethod
    def of(cls, found: Layers, before: Sequence[Layer], *, final: bool) -> Choice:
        """Choose among what a call has shown; `before` is what was carried so far, `final`: no other call is watched.

        Of a loop that may yet turn out to go on from what the model keeps, nothing is said before that.
        """
        iterated = set(found.seen.iterated) if found.seen is not None else set()
        cuts = found.seen.cuts if found.seen is not None else ()
        apart = iterated | {cut.module for cut in cuts if not cut.carried}
        adapters = {(layer.module, layer.adapter) for layer in found if layer.name not in apart}
        stays = [layer for layer in before if (layer.module, layer.adapter) in adapters]
        carried = {layer.module for layer in stays}
        new = [
            each for each in found if each.module not in carried and each.name not in apart and _can_be_carried(each)
        ]
        whole = {layer.module for layer in (*stays, *new) if layer.fused}
        others = [layer for layer in found if layer.seen and layer not in new and layer.module not in whole]
        left = [_left_out(layer) for layer in others if layer.kind != "iteration" and final] + found.doubts()
        named = {layer.name: layer for layer in found if not layer.seen or layer.kind == "cell"}
        left += [f"{named[cut.module].label}: {cut.why}" for cut in cuts if not cut.carried and cut.module in named]
        if final and not stays and not new and not left:
            left = [_left_out(layer) for layer in others] + [f"{name}, which only iterates" for name in iterated]
        kept = {layer.name for layer in (*stays, *new)}
        told = [cut for cut in cuts if cut.carried and not cut.usual and cut.module in kept]
        return cls(stays, new, left, [f"{cut.module!r}: {cut.why}" for cut in told])


def _can_be_carried(layer: Layer) -> bool:
    axes = layer.seen.parts if layer.seen is not None else ()
    return layer.seen is None or (
        layer.kind == "cell" and all(p.batch_axis is not None and not p.counted for p in axes)
    )


def _left_out(layer: Layer) -> str:
    assert layer.seen is not None
    parts = ", ".join(part.name for part in layer.seen.parts)
    why = {
        "attribute": "which the model keeps itself, from call to call",
        "cache": "which grows",
        "cell": "which is handed in within an object of its own" if layer.seen.hidden else "whose rows are not sure",
        "iteration": "which has no time",
    }
    return f"{parts} of the {layer.kind} at {layer.seen.line}, {why.get(layer.kind, 'which begins anew in every call')}"
