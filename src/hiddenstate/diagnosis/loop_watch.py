"""Watching recurrence in the user's own code for a Monitor: loops, cells to listen to, and what is not seen."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from ..cells import Arguments, Handle, Layer, Layers, OuterCall, around, has_own_code, recomputing, watched
from .look import Look

_ENOUGH = 3  # repetitions in one call, and calls that are watched at most where they are too short to tell
_LOOPS = ("loop", "layer", "attribute")  # an iteration settles, on purpose


class LoopWatch:
    """Watches the calls that are looked at, where code of the user's own may hold a recurrence that nobody hears."""

    def __init__(self, model: nn.Module) -> None:
        """Begin with no call."""
        self._names = {module: name for name, module in model.named_modules()}
        self._found: dict[nn.Module, Layers] = {}  # by module that was called from outside
        self._looks: dict[nn.Module, int] = {}
        self.cells: list[Layer] = []  # modules that were seen to be cells, to be heard from now on
        self.seen = False  # whether a loop was looked at
        self.unseen: dict[str, None] = {}  # what recurs, or may, and is not looked at

    def beside(self, model: nn.Module, found: list[Layer], look: Callable[[], Look | None]) -> list[Handle]:
        """Watch the parts of a model without a layer, too, that may be called by themselves, at the look under way."""
        heard = {layer.module for layer in found}
        parts = [part for part in model.children() if has_own_code(part) and not heard & set(part.modules())]
        return [around(part, partial(self._part, part, look)) for part in parts]

    def _part(
        self,
        part: nn.Module,
        look: Callable[[], Look | None],
        arguments: Arguments,
        run: Callable[[Arguments], Any],
    ) -> Any:
        now = look()
        if now is None or not part.training or recomputing():
            return run(arguments)
        return self.around(OuterCall(part, *arguments), lambda: run(arguments), now)()

    def around(self, entry: OuterCall, run: Callable[[], Any], look: Look) -> Callable[[], Any]:
        """Return the rest of a call, watched where something in it may be seen by no other means."""
        module = entry.module
        found, looks = self._found.get(module), self._looks.get(module, 0)
        decided = found is not None and (found.decided or looks >= _ENOUGH)
        if not has_own_code(module) or (decided and found is not None and not any(map(_is_loop, found))):
            return run
        self._looks[module] = looks + 1
        return partial(watched, entry, run, partial(self._see, module, look), before=found if decided else None)

    def _see(self, module: nn.Module, look: Look, found: Layers) -> None:
        """Hand the loops of a call to the look at it, and note what it cannot show."""
        where = self._names.get(module, "")
        for layer in found:
            name = ".".join(filter(None, (where, layer.name)))
            if layer.seen is None or layer.kind == "iteration":
                continue
            if layer.kind == "cell":
                if layer.module not in [cell.module for cell in self.cells]:
                    self.cells.append(layer)
            elif not _is_loop(layer):
                if layer.kind == "attribute" and any(_heard_within(other, layer) for other in found):
                    continue  # kept for a layer that is handed it, and is heard
                self.unseen[f"{', '.join(layer.spec.parts)}, kept from call to call ({layer.kind} {name})"] = None
            elif look.loop(name, layer, found.live(layer)):
                self.seen = True
            else:
                self.unseen[f"{name}, whose rows could not be told"] = None
        self.unseen.update(dict.fromkeys(found.doubts(heard=True)))
        self._found[module] = found.settled()


def _heard_within(other: Layer, layer: Layer) -> bool:
    inside = other.module is not layer.module and any(module is other.module for module in layer.module.modules())
    return inside and (other.seen is None or other.kind == "cell")


def _is_loop(layer: Layer) -> bool:
    return layer.seen is not None and layer.kind in _LOOPS and layer.seen.steps >= _ENOUGH
