"""Loops in a forward: the carried state replaces the value that they start from."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from ..cells import Begun, Layer, Layers, OuterCall, watched_from
from ..errors import CarryError, StateMismatch
from ..state import State

if TYPE_CHECKING:
    from ..cells import LoopStart, OwnStart, Part

GoingOn: TypeAlias = "tuple[State, Tensor | None]"  # the kept state, and which rows start anew
Hand: TypeAlias = "Callable[[Layer, int], GoingOn | None]"  # for a number of rows; 0: as many as are kept


@dataclass(frozen=True, slots=True, eq=False)
class Looped:
    """A call whose loops continued from the kept states."""

    result: Any
    made: Mapping[str, Mapping[str, list[Tensor]]]  # by layer and part: the value after each turn
    found: Layers


@dataclass(slots=True, eq=False)
class Loops:
    """The loops of a model that continue from the carried state instead of their own start."""

    model: nn.Module
    layers: dict[str, Layer] = field(default_factory=dict)
    own: dict[str, State] = field(default_factory=dict)  # the model's own start of each loop in its last call
    _starts: dict[str, LoopStart] = field(default_factory=dict)
    _seen: dict[bool, Layers] = field(default_factory=dict)  # what a call has shown, by whether the model was training

    def __bool__(self) -> bool:
        """Say whether there are any."""
        return bool(self.layers)

    def take(self, found: Layers, chosen: list[Layer]) -> None:
        """Carry these loops from now on, as a watched call has shown them."""
        seen = found.seen
        self.layers = {layer.name: layer for layer in chosen}
        self._starts = {layer.name: seen.starts[layer.seen] for layer in chosen if seen is not None and layer.seen}
        self._seen = {self.model.training: found.settled()}

    def run(self, entry: OuterCall, run: Callable[[], Any], hand: Hand, kept: Container[str], *, anew: bool) -> Looped:
        """Run the rest of a call; its loops begin with what `hand` returns, and those in `kept` must do so.

        With `anew`, the whole call is watched again.
        """
        whose = {start: layer for name, layer in self.layers.items() for start in self._starts[name].parts}
        handed: dict[Layer, GoingOn | None] = {}

        def put(start: OwnStart, own: Tensor) -> Tensor | None:
            layer, part = whose[start], _part(whose[start], start.part)
            if layer not in handed:
                handed[layer] = hand(layer, _rows(own, part))
            given = handed[layer]
            return None if given is None else mixed(given[0][part.name], own, part.batch_axis, given[1])

        before = None if anew else self._seen.get(self.model.training)
        begun = watched_from(entry, run, starts=whose, put=put, before=before)
        for layer in self.layers.values():
            if layer.name in kept and layer not in handed:
                raise _another_way(layer)  # nothing in the call read the start of this loop
        made = {layer.name: self._made(layer, begun, handed.get(layer)) for layer in self.layers.values()}
        self._seen[self.model.training] = begun.found.settled()
        return Looped(begun.result, made, begun.found)

    def _made(self, layer: Layer, begun: Begun, handed: GoingOn | None) -> dict[str, list[Tensor]]:
        """Return the values that a loop made in a call, if it ran as it did when it was first seen."""
        assert layer.seen is not None
        starts, found = self._starts[layer.name].parts, begun.found
        now = next((each for each in found if each.name == layer.name), None)
        live = dict(found.live(now)) if now is not None else {}
        if not live and all(start in begun.ends for start in starts):  # too few turns for the trace to find the loop
            live = {start.part: [begun.ends[start]] for start in starts}
        lost = [start for start in starts if start not in begun.own or (handed and start not in begun.replaced)]
        live = {start.part: live[start.part] for start in starts if start.part in live}
        if lost or len(live) < len(starts) or not all(live.values()):
            raise _another_way(layer) if lost or not found.undecided() else _too_short(layer)
        if found.seen is not None and now is not None and now.seen is not None and now.seen in found.seen.starts:
            _check_same(layer, starts, found.seen.starts[now.seen].parts)
        last = layer.to_state({part: values[-1] for part, values in live.items()})
        if handed is not None and handed[0].batch != last.batch:
            raise StateMismatch(
                f"the carried state of {layer.label!r} has {handed[0].batch} rows, but this call ended in {last.batch}."
            )
        self.own[layer.name] = _own_state({start.part: begun.own[start] for start in starts}, last)
        return live


def _another_way(layer: Layer) -> CarryError:
    assert layer.seen is not None
    return CarryError(
        f"this call took another way through the model than the ones before: {layer.label!r}, the loop at "
        f"{layer.seen.line}, did not start where it did then, or was not seen whole, so its state is not known."
    )


def _too_short(layer: Layer) -> CarryError:
    assert layer.seen is not None
    return CarryError(
        f"this call is too short to show what {layer.label!r}, the loop at {layer.seen.line}, ends in: not all of it "
        f"is made at one place of the code. Give it three steps or more."
    )


def _check_same(layer: Layer, learned: tuple[OwnStart, ...], now: tuple[OwnStart, ...]) -> None:
    """Raise if a loop starts at another place in the code than when it was first seen."""
    theirs = {start.part: start for start in now}
    for start in learned:
        other = theirs.get(start.part)
        if other is None or (other.site, other.number, other.label) != (start.site, start.number, start.label):
            assert layer.seen is not None
            raise CarryError(
                f"this call made the start of {start.part!r} elsewhere than the ones before ({layer.label!r}, the loop "
                f"at {layer.seen.line}), so another tensor may have been replaced. The states of before are kept."
            )


def _part(layer: Layer, name: str) -> Part:
    assert layer.seen is not None
    return next(part for part in layer.seen.parts if part.name == name)


def _rows(own: Tensor, part: Part) -> int:
    """Return the number of rows of a start; 0 if all rows share it."""
    axis = part.batch_axis
    return 0 if axis is None or own.dim() != len(part.shape) or own.shape[axis] == 1 else own.shape[axis]


_HALF = (torch.float16, torch.bfloat16)


def mixed(kept: Tensor, own: Tensor, axis: int | None, anew: Tensor | None) -> Tensor:
    """Return the kept value, with the model's own start in the rows that begin anew."""
    if kept.dtype in _HALF and own.dtype not in _HALF and not torch.is_autocast_enabled(kept.device.type):
        kept = kept.to(own.dtype)  # autocast may have changed its dtype
    if anew is None or axis is None:
        return kept
    shape = [1] * kept.dim()
    shape[axis] = len(anew)
    return torch.where(anew.to(kept.device).reshape(shape), own.to(kept.dtype), kept)


def _own_state(own: Mapping[str, Tensor], last: State) -> State:
    """Return the model's own start as a state with as many rows as the call."""
    with torch.no_grad():
        parts = {name: tensor.detach().to(last[name].dtype).expand_as(last[name]) for name, tensor in own.items()}
    return State(parts, last.batch_axis)
