"""A recurrent module found in a model, and the list of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ..errors import StateMismatch
from ..state import State
from .adapter import Adapter, Spec
from .native import Native

if TYPE_CHECKING:
    from .behavior import Found, Recurrence


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """A recurrent module found in a model: its place, its kind, and how its state is made."""

    name: str  # where it is in the model, "" where the model itself is the layer
    module: nn.Module
    adapter: Adapter
    iterates: bool = False  # a cell that was seen to be stepped without time

    @property
    def kind(self) -> str:
        """The kind of layer: `lstm`, `gru_cell`, `cell` and so on."""
        return "iteration" if self.iterates else self.adapter.kind

    @property
    def label(self) -> str:
        """Its name in a sentence."""
        return self.name or "the model itself"

    @property
    def seen(self) -> Recurrence | None:
        """What was seen in a watched call, where the layer is not known by its type."""
        return self.adapter.recurrence

    @property
    def fused(self) -> bool:
        """Whether one call runs a whole sequence, rather than one step."""
        return self.adapter.fused

    @property
    def spec(self) -> Spec:
        """What the state is made of."""
        return self.adapter.spec(self.module)

    @property
    def tracks(self) -> tuple[str, ...]:
        """One name for each layer and direction, as torch names its own weights."""
        if not self.fused:
            return (self.name or "l0",)
        prefix = f"{self.name}." if self.name else ""
        spec = self.spec
        ends = ("", "_reverse")[: spec.directions]
        return tuple(f"{prefix}l{depth}{end}" for depth in range(spec.layers) for end in ends)

    def initial(self, batch: int) -> State:
        """Return the state that `batch` sequences start from."""
        return self.adapter.initial(self.module, batch)

    def to_state(self, native: Native, *, batch: int | None = None) -> State:
        """Name the parts of a state in the module's own form."""
        try:
            return self.adapter.to_state(self.module, native, batch=batch)
        except StateMismatch as error:
            raise self._naming(error) from None

    def to_native(self, state: State, *, batched: bool = True) -> Native:
        """Return a State in the module's own form."""
        try:
            return self.adapter.to_native(self.module, state, batched=batched)
        except StateMismatch as error:
            raise self._naming(error) from None

    def split(self, result: Any) -> tuple[Any, Native]:
        """Part what a call returned into its output and its native state."""
        return self.adapter.split(self.module, result)

    def join(self, output: Any, native: Native) -> Any:
        """Return what a call returns whose output and native state these are."""
        return self.adapter.join(self.module, output, native)

    def rows(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, bool]:
        """Return how many rows a call has, and whether it is batched at all."""
        return self.adapter.rows(self.module, args, kwargs)

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Native | None:
        """Return the native state a call was given, or None."""
        return self.adapter.given(self.module, args, kwargs)

    def give(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], native: Native
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a call's arguments with this native state among them."""
        return self.adapter.give(self.module, args, kwargs, native)

    def part(self, name: str) -> str:
        """Return the name of one of its parts in a State of the whole model."""
        return f"{self.name}.{name}" if self.name else name

    def _naming(self, error: StateMismatch) -> StateMismatch:
        return StateMismatch(f"at the layer {self.name!r}: {error}") if self.name else error


class Layers(list[Layer]):
    """The recurrent layers of a model; printing it is a table."""

    def __init__(self, found: Iterable[Layer] = (), seen: Found | None = None) -> None:
        """Keep what was found, and where a call was watched, what was seen in it."""
        super().__init__(found)
        self.seen = seen

    @property
    def decided(self) -> bool:
        """Whether the call that was watched had steps enough to tell; a longer one may show more where it had not."""
        return self.seen is not None and not self.seen.unseen and not self.seen.later

    def live(self, layer: Layer) -> Mapping[str, list[Tensor]]:
        """Return what each part was after every repetition of the call that was watched, with its graph."""
        return self.seen.live.get(layer.seen, {}) if self.seen is not None and layer.seen is not None else {}

    def settled(self) -> Layers:
        """Return the same without what holds on to the call that was watched."""
        return Layers(self, None if self.seen is None else replace(self.seen, live={}))

    def doubts(self) -> list[str]:
        """Return what could not be told in the call that was watched, but for steps of a layer that is known."""
        known = [layer.name for layer in self if layer.seen is None]
        unsure = self.seen.unsure if self.seen is not None else ()
        return [str(each) for each in unsure if each.kept or not any(_inside(each.module, name) for name in known)]

    def explain(self) -> str:
        """Return what was found and by which evidence, what was not taken and why, and what was not examined."""
        lines = [f"{layer.label}: {layer.kind}, {_how(layer)}" for layer in self if layer.seen is None]
        if self.seen is None:
            lines.append("No call was watched: hs.layers(model, *inputs) also finds recurrence by what it does.")
            return "\n".join(lines)
        return "\n".join([*lines, self.seen.explain()])

    def __str__(self) -> str:
        """Return a table with one line for each layer."""
        if not self:
            return "no recurrent layers"
        head = ("name", "kind", "state", "layers", "directions", "input")
        rows = [head, *(_row(layer) for layer in self)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        )

    __repr__ = __str__


def _inside(path: str, name: str) -> bool:
    return not name or path == name or path.startswith(f"{name}.")


def _how(layer: Layer) -> str:
    return "known by its type" if layer.kind not in ("cell", "layer") else "taken for one by its names and a trial"


def _row(layer: Layer) -> tuple[str, ...]:
    spec = layer.spec
    state = ", ".join(f"{part} {spec.sizes[part]}" for part in spec.parts)
    width = str(spec.input_size) if spec.input_size is not None else "?"
    return (layer.name or "(the model)", layer.kind, state, str(spec.layers), str(spec.directions), width)
