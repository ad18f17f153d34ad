"""State that a model keeps in its own attributes from call to call: while a Carry is attached, the Carry owns it."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..cells import Layer, Layers
from ..errors import CarryError, StateMismatch
from ..state import State
from .attributes import (
    Attribute,
    Way,
    attribute_holding,
    attributes_of,
    changed_numbers,
    checkpointed,
    copied,
    holds,
    home,
    is_cut,
    is_plain,
    is_view,
    moved,
    put_back,
    set_at,
    tensors_of,
    unchanged,
    value_at,
    version_of,
    ways_in,
    zeros_for,
)
from .kept import Kept


@dataclass(slots=True, eq=False)
class AdoptedAttributes:
    """The attributes that hold a model's state: set before each call, and read after it."""

    model: nn.Module
    layers: dict[str, Layer] = field(default_factory=dict)
    # Attributes that were empty before the first call: until a second call decides, they are only put back.
    maybe: list[Attribute] = field(default_factory=list)
    feeds: dict[Attribute, set[str]] = field(default_factory=dict)  # the layers that get the value of an attribute
    from_none: set[str] = field(default_factory=set)  # layers that the model gives no state at first
    going_on: set[Attribute] = field(default_factory=set)  # attributes that a forward may continue from
    replaced: bool = False  # whether the kept values differ from those that the last call left
    _labels: dict[str, dict[str, Attribute]] = field(default_factory=dict)  # by layer and part: module, and label in it
    _homes: dict[str, dict[Attribute, None]] = field(default_factory=dict)  # by layer
    _mirrors: dict[str, dict[str, tuple[str, str]]] = field(default_factory=dict)  # by layer, part: layer, and its part
    _cut: set[tuple[str, str]] = field(default_factory=set)  # layers and parts that the model detaches
    begun_anew: dict[str, str] = field(default_factory=dict)  # supposed states that the model clears in every call
    _rerun: set[Attribute] = field(default_factory=set)  # read or made under activation checkpointing
    _put_in: dict[str, State] = field(default_factory=dict)  # by layer, the state that this call should begin with
    _first: dict[Attribute, Any] = field(default_factory=dict)  # values before any call
    _began: dict[Attribute, list[Tensor]] = field(default_factory=dict)  # values as the present call began
    _left: dict[Attribute, list[tuple[Tensor, int]]] = field(default_factory=dict)  # values that the last call left

    def look(self) -> None:
        """Remember the attributes' values before the model's first call."""
        if not self._first:
            self._first = {(module, name): copied(value) for module, name, value in attributes_of(self.model)}

    def take(self, found: Layers) -> list[Layer]:
        """Take over the attributes that a call has shown to be states, or perhaps states; return them as layers."""
        modules = dict(self.model.named_modules())
        seen = found.seen
        unread = {(modules[path], label) for path, label in (seen.cleared if seen else ()) if path in modules}
        for name in self._put_in.keys() & self._labels.keys():
            if unread.intersection(self._labels[name].values()):
                self.begun_anew[name] = _begun_anew(self.layers[name], self._labels[name])
        self.layers, self._labels = {}, {}
        for layer in found:
            labels = _labels(found, layer, modules)
            if labels and self._begins_anew(layer):
                self.begun_anew[layer.name] = _begun_anew(layer, labels)
            elif labels:
                self.layers[layer.name], self._labels[layer.name] = layer, labels
                self._cut |= {
                    (layer.name, part) for part, values in found.live(layer).items() if is_cut(values, labels[part])
                }
        maybe = [attribute_holding(modules[at], label) for at, label in (seen.maybe if seen else ()) if at in modules]
        self.maybe = list(dict.fromkeys(place for place in maybe if place is not None))
        for told, known in ((seen.going_on, self.going_on), (seen.rerun, self._rerun)) if seen is not None else ():
            held = [attribute_holding(modules[path], label) for path, label in told if path in modules]
            known.update(place for place in held if place is not None)
        self.refuse_rerun()
        return list(self.layers.values())

    def refuse_rerun(self) -> None:
        """Raise for a call with gradients if checkpointing would run it again with other attribute values."""
        places = [place for place in self._places() if place in self._rerun] if torch.is_grad_enabled() else []
        if places:
            raise checkpointed(type(places[0][0]).__name__, places[0][1])

    def _begins_anew(self, layer: Layer) -> bool:
        """Say whether the model cleared its attributes first, so that a call did not start from our state."""
        put = self._put_in.get(layer.name)
        parts = layer.seen.parts if layer.seen is not None and put is not None else ()
        starts = [(part.initial, put[part.name]) for part in parts if part.initial is not None and put is not None]
        return any(start.shape != own.shape or not torch.equal(start, own.detach().to(start)) for start, own in starts)

    def counters(self) -> list[str]:
        """Return plain numbers that calls have changed in modules that keep state: they are not put back."""
        homes = {module for module, _ in self._places()}
        return [name for module, name in changed_numbers(self._first) if module in homes]

    def counts(self) -> bool:
        """Say whether calls have changed a plain number anywhere in the model: it may know where its steps are."""
        return bool(changed_numbers(self._first))

    def before(self, kept: Kept, *, detach: bool, rows: int | None = None) -> None:
        """Set the attributes to the kept states; an attribute that was changed since the last call is left as it is.

        A method of the model's own may have changed it, or the user.
        """
        self.refuse_rerun()
        changed = {place for place, left in self._left.items() if not unchanged(tensors_of(place), left)}
        if self.replaced and kept.states:
            changed = set()  # the user has just told the carry what to continue from
        self._put_in = {}
        gone = set().union(*(self.feeds.get(place, set()) for place in changed))
        for name, layer in self.layers.items():
            places = self._places_of(name)
            if places.keys() & changed:
                gone.add(name)
            elif self.is_mirror(name) and all(of in kept.states for of, _ in self._mirrors[name].values()):
                parts = {part: kept.states[of][own] for part, (of, own) in self._mirrors[name].items()}
                self._put(layer, layer.to_state(parts))
            elif name in kept.states:
                self._put(layer, self._going_on(layer, kept))
            elif self.replaced:
                self._begin_from(kept, places, rows)
        for name in gone:
            kept.states.pop(name, None)
            kept.anew.pop(name, None)
        if self.replaced:
            self._begin_from(kept, set(self.maybe) - changed, rows)
        for module, name in self.maybe if detach else ():
            if any(tensor.requires_grad for tensor in tensors_of((module, name))):
                setattr(module, name, copied(getattr(module, name)))  # detached from the graph of the last call
        self.replaced = False
        self._began = {place: tensors_of(place) for place in self._places()}

    def after(self, kept: Kept, ended: Mapping[str, State], *, detach: bool) -> dict[str, State]:
        """Return the states that the call has left; `ended` has each layer's last state, to match them."""
        states = {}
        for name, state in ended.items():
            place = self.holding(state.values()) if name not in self.layers else None
            if place is not None:
                self.feeds.setdefault(place, set()).add(name)
        self._mirror(ended)
        kept.raw = {
            (module, name): copied(getattr(module, name, None), graph=not detach) for module, name in self.maybe
        }
        for name, layer in self.layers.items():
            ways, before = self._ways(name), kept.states.get(name)
            if len(ways) < len(layer.spec.parts):  # the model has cleared some of it
                kept.states.pop(name, None)
                continue
            if self.is_mirror(name):
                continue  # already kept as the state of a layer
            states[name] = layer.to_state({part: value_at(*way) for part, way in ways.items()})
            if before is not None and before.batch != states[name].batch:
                raise StateMismatch(
                    f"the carried state of {layer.label!r} has {before.batch} rows, but the model keeps "
                    f"{states[name].batch} after this call. Another set of sequences begins with carry.reset()."
                )
        self._began = {}
        self._left = {place: [(part, version_of(part)) for part in tensors_of(place)] for place in self._places()}
        return states

    def label(self, module: nn.Module, name: str) -> str:
        """Return the name of an attribute in a checkpoint."""
        path = next((path for path, each in self.model.named_modules() if each is module), "")
        return f"{path}.{name}" if path else name

    def content(self, kept: Kept) -> dict[str, Any]:
        """Return the state in plain containers and tensors that the model keeps itself, for a checkpoint."""
        held = dict(kept.raw)
        if not self.replaced:  # otherwise the attributes do not hold the kept state
            held |= {place: getattr(*place, None) for place in self._places() if place not in held}
        return {self.label(*place): copied(value) for place, value in held.items() if is_plain(value)}

    def put_content(self, content: Mapping[str, Any]) -> dict[Attribute, Any]:
        """Put the content of a checkpoint into the model's attributes, and return it by attribute."""
        self.look()  # a reset goes back to the values before any call
        held, modules = {}, dict(self.model.named_modules())
        for label, value in content.items():
            path, _, name = label.rpartition(".")
            if path not in modules:
                raise StateMismatch(f"the checkpoint holds {label!r}, but this model has no {path!r}: it is another's.")
            held[modules[path], name] = moved(value, home(modules[path]))
            put_back(modules[path], name, held[modules[path], name])
        return held

    def is_in(self, layer: str, content: Container[str]) -> bool:
        """Say whether a checkpoint holds all attributes that a layer of attributes lies in."""
        return all(self.label(*place) in content for place in self._places_of(layer))

    def knows(self, names: Iterable[str]) -> bool:
        """Say whether all of these attributes were seen to be states, or possible states."""
        return {self.label(*place) for place in self._places()} >= set(names)

    def unheard(self) -> list[str]:
        """Return possible states that are not the output of any layer."""
        return [name for module, name in self.maybe if not self.feeds.get((module, name))]

    def undo(self) -> None:
        """Let the next call begin where the last successful one ended, since the present one has raised."""
        self.replaced, self._left, self._began = True, {}, {}

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Forget the calls of our own that are made inside this context."""
        before = self.replaced, dict(self._left), {place: set(names) for place, names in self.feeds.items()}
        try:
            yield
        finally:
            self.replaced, self._left, self.feeds = before

    def holding(self, tensors: Iterable[Tensor]) -> Attribute | None:
        """Return the attribute in which one of these tensors lies."""
        if not self.layers and not self.maybe:
            return None
        there = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        for place in self._places():
            if any(part.untyped_storage().data_ptr() in there for part in tensors_of(place)):
                return place
        return None

    @property
    def began(self) -> bool:
        """Whether the present call began with values in these attributes."""
        return bool(self._began)

    def holds_for(self, layer: str) -> bool:
        """Say whether an attribute that is known to feed this layer had a value as the call began."""
        return any(bool(self._began.get(place)) for place, names in self.feeds.items() if layer in names)

    def handing(self, tensors: Iterable[Tensor]) -> Attribute | None:
        """Return the attribute that held one of these tensors when the call began."""
        there = {tensor.untyped_storage().data_ptr() for tensor in tensors} if self._began else set()
        for place, parts in self._began.items():
            if any(part.untyped_storage().data_ptr() in there for part in parts):
                return place
        return None

    def refuse_cut(self, *, override: bool) -> None:
        """Raise if the graph is to be kept, but the model itself detaches the state."""
        for name, layer in self.layers.items():
            assert layer.seen is not None
            lost = []
            for part, (module, way) in self._ways(name).items():
                seen = next(each for each in layer.seen.parts if each.name == part)
                replaced = (module, way[0]) in self.feeds or (override and seen.starts_only)
                lost += [part] if (seen.cut or (name, part) in self._cut) and not replaced else []
            if lost:
                raise CarryError(
                    f"{type(self.model).__name__} keeps {', '.join(lost)} ({layer.seen.line}) itself and cuts it from "
                    f"its graph, so no gradient goes from this call back into the one before, although the graph is to "
                    f"be kept (detach=False, or tbptt with k2 > k1). Leave the detach out of its forward."
                )

    def refuse_fewer(self, layer: Layer, kept: int, rows: int) -> None:
        """Raise if fewer rows come in than the model keeps: it reads all of its attribute, so none can wait."""
        if layer.name in self.layers:
            parts, who = ", ".join(layer.spec.parts), type(layer.module).__name__
            raise StateMismatch(
                f"the input has {rows} rows, but {parts}, which {who} keeps itself, has {kept}: rows='first' cannot "
                f"let the others wait there. Use drop_last=True, or carry.reset()."
            )

    def start_of(self, layer: Layer, like: State) -> State:
        """Return the values that attributes had before any call, if they had them for as many rows."""
        first = {}
        for part, (module, (name, *rest)) in self._ways(layer.name).items():
            try:
                there = value_at(self._first.get((module, name)), tuple(rest))
            except (LookupError, AttributeError, TypeError):  # there was no value of this form
                continue
            first[part] = zeros_for(there, like[part].shape, like.batch)
        if any(not isinstance(first.get(part), Tensor) or first[part].shape != like[part].shape for part in like):
            raise CarryError(
                f"single rows of {', '.join(like)}, which {type(layer.module).__name__} keeps itself, cannot start "
                f"anew: before its first call nothing was there for {like.batch} rows. carry.reset() starts all anew."
            )
        return State({name: first[name].to(part.dtype) for name, part in like.items()}, like.batch_axis)

    def _going_on(self, layer: Layer, kept: Kept) -> State:
        """Return the kept state, with the first values in the rows that start anew."""
        state, anew = kept.states[layer.name], kept.anew.pop(layer.name, None)
        fed = [self.feeds.get(place, set()) for place in self._places_of(layer.name)]
        only = layer.seen is not None and all(part.starts_only for part in layer.seen.parts)
        only = only and all(names and names <= self.from_none for names in fed)
        if anew is None or not bool(anew.any()) or only:  # the layers that read it get a start in these rows
            return state
        rows = anew.nonzero()[:, 0].tolist()
        state = kept.states[layer.name] = state.put(rows, self.start_of(layer, state).select(rows))
        return state

    def is_mirror(self, name: str) -> bool:
        """Say whether these attributes only hold the states of other layers, and only layers read them."""
        layer = self.layers[name]
        parts = layer.seen.parts if layer.seen is not None else ()
        return all(part.name in self._mirrors.get(name, {}) and part.starts_only for part in parts)

    def _mirror(self, ended: Mapping[str, State]) -> None:
        """Find which attributes hold the states of layers."""
        given = [(name, part, tensor) for name, state in ended.items() for part, tensor in state.items()]
        for name in self.layers:
            for part, way in self._ways(name).items():
                held = value_at(*way)
                same = [(of, own) for of, own, tensor in given if of not in self.layers and is_view(held, tensor)]
                if same:
                    self._mirrors.setdefault(name, {})[part] = same[0]

    def _put(self, layer: Layer, state: State) -> None:
        self._put_in[layer.name] = state
        self._make_room(layer.name, state)
        ways = self._ways(layer.name)
        missing = [part for part in state if part not in ways]
        if missing:  # it was cleared or is not set yet, and the values before any call have no place for it
            raise CarryError(
                f"{missing[0]!r}, in which {type(layer.module).__name__} keeps its state, is not there just now, so "
                f"the carried state cannot be put back. Call the model once, or start anew: carry.reset()."
            )
        for part, tensor in state.items():
            set_at(*ways[part], tensor.clone())  # the model may write into it

    def _make_room(self, name: str, state: Mapping[str, Tensor]) -> None:
        """Replace attributes that are None by empty tensors, or tuples of them, which can be set."""
        for part, (module, label) in self._labels[name].items():
            attribute, _, rest = label.partition("[")
            if part not in state or not attribute.isidentifier() or getattr(module, attribute, self) is not None:
                continue
            count = sum(other.startswith(f"{attribute}[") for _, other in self._labels[name].values())
            setattr(module, attribute, tuple([state[part]] * count) if rest else state[part])

    def _begin_from(self, kept: Kept, places: Collection[Attribute], rows: int | None) -> None:
        """Set these attributes to the kept values, or to the values before any call: zeros for as many rows."""
        for module, name in places:
            last = {way: value_at(module, way).shape for way in ways_in(module).values() if way[0] == name}
            there = kept.raw if (module, name) in kept.raw else self._first
            if (module, name) in there:
                put_back(module, name, there[module, name])
            else:
                module.__dict__.pop(name, None)
            for way in ways_in(module).values() if there is self._first else ():
                if way in last:
                    set_at(module, way, zeros_for(value_at(module, way), last[way], rows))

    def _places(self) -> list[Attribute]:
        own = [place for name in self.layers for place in self._places_of(name)]
        return list(dict.fromkeys([*own, *self.maybe]))

    def _places_of(self, layer: str) -> dict[Attribute, None]:
        """Return the attributes that a layer lies in, as of the last time it had values."""
        for module, way in self._ways(layer).values():
            self._homes.setdefault(layer, {})[module, way[0]] = None
        return self._homes.get(layer, {})

    def _ways(self, layer: str) -> dict[str, tuple[nn.Module, Way]]:
        """Return the present place of each part of a layer."""
        ways = {module: ways_in(module) for module, _ in self._labels[layer].values()}
        found = {part: (module, ways[module].get(label)) for part, (module, label) in self._labels[layer].items()}
        return {part: (module, way) for part, (module, way) in found.items() if way is not None}


def _begun_anew(of: Layer, parts: Iterable[str]) -> str:
    return f"{', '.join(parts)} of {of.label}, which the model begins anew in every call: leave that to its caller"


def _labels(found: Layers, layer: Layer, modules: Mapping[str, nn.Module]) -> dict[str, Attribute]:
    """Return the attributes in which the model keeps a layer's parts; none unless all parts are kept, with their rows.

    A loop counts as kept if its end state is in the attribute that it started from.
    """
    if layer.seen is None or not all(part.batch_axis is not None and not part.counted for part in layer.seen.parts):
        return {}
    if layer.kind == "attribute":
        return {part.name: (layer.module, part.name) for part in layer.seen.parts}
    start = found.seen.starts.get(layer.seen) if found.seen is not None else None
    labels = {}
    for part in start.parts if start is not None and layer.kind in ("loop", "layer") else ():
        last = found.live(layer).get(part.part)
        label = part.label or part.kept_in
        path = max((path for path in modules if f"{label}.".startswith(f"{path}." if path else "")), key=len)
        place = modules[path], label.removeprefix(f"{path}.")
        way = ways_in(place[0]).get(place[1]) if label else None
        if way is None or not last or not holds(value_at(place[0], way), last[-1]):
            return {}
        labels[part.part] = place
    return labels
