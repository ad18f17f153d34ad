"""Finding the recurrent layers of a model: by type or registration, by names and a trial, or by what a call does."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import NotRecurrent, StateMismatch
from ..state import as_preformatted
from .custom import CellAdapter, SequenceAdapter, is_cell
from .first_states import learned_of, looks_unsized, needed_arguments, units_of
from .layer import Adapter, Layer
from .signature import arguments, state_first
from .spread import GatheredCell, SpreadAdapter, is_spread, parts_of
from .torch_layers import FusedAdapter, TorchCellAdapter
from .trials import learn, starts_by_number
from .wrappers import unwrap, unwrap_to_call

if TYPE_CHECKING:
    from .behavior import Found, Unsure

_own_cells = CellAdapter()
_own_layers = SequenceAdapter(_own_cells)
_spread_cells = SpreadAdapter()
_registered: dict[type[nn.Module], Adapter] = {}
_registrations: list[type[nn.Module]] = []  # in the order in which they were made
_known: dict[type[nn.Module], Adapter] = {
    nn.RNN: FusedAdapter("rnn"),
    nn.LSTM: FusedAdapter("lstm"),
    nn.GRU: FusedAdapter("gru"),
    nn.RNNCell: TorchCellAdapter("rnn_cell"),
    nn.LSTMCell: TorchCellAdapter("lstm_cell"),
    nn.GRUCell: TorchCellAdapter("gru_cell"),
}
# Looked up by name: importing quantization is slow, and a model cannot hold its layers unless it was imported.
_QUANTIZED: dict[str, Adapter] = {"LSTM": _known[nn.LSTM], "GRU": _known[nn.GRU]}


class Layers(list[Layer]):
    """The recurrent layers of a model. Printing it shows a table."""

    def __init__(self, found: Iterable[Layer] = (), seen: Found | None = None) -> None:
        """Keep the layers, and what was seen in a watched call, if there was one."""
        super().__init__(found)
        self.seen = seen
        self.mixing: Callable[[], tuple[Unsure, ...]] | None = None  # what takes several steps beside what recurs
        self.without_cells: Callable[[], Layers] | None = None  # the same call, with all state attributed to its loops

    @property
    def decided(self) -> bool:
        """Whether the watched call had enough steps to decide; if not, a longer call may show more layers."""
        seen = self.seen
        return seen is not None and not seen.unseen and not seen.later and not seen.short

    def live(self, layer: Layer) -> Mapping[str, list[Tensor]]:
        """Return each part's value after every repetition of the watched call, with its graph."""
        return self.seen.live.get(layer.seen, {}) if self.seen is not None and layer.seen is not None else {}

    def settled(self) -> Layers:
        """Return these layers without references to the watched call."""
        return Layers(self, None if self.seen is None else replace(self.seen, live={}))

    def doubts(self, *, heard: bool = False) -> list[str]:
        """Return what the watched call left undecided, apart from the steps of known layers.

        With `heard`, attributes that hold the output of a known layer are left out too: who hears that layer has its
        state.
        """
        unsure = self.seen.unsure if self.seen is not None else ()
        return self._outside(each for each in unsure if not (heard and each.gave))

    def undecided(self, but: Container[str] = ()) -> list[str]:
        """Return possible states that the call was too short to decide on, except on the lines in `but`."""
        return self._outside(
            each for each in (self.seen.short if self.seen is not None else ()) if each.line not in but
        )

    def _outside(self, unsure: Iterable[Unsure]) -> list[str]:
        known = [layer.name for layer in self if layer.seen is None]
        return [str(each) for each in unsure if each.kept or not any(_inside(each.module, name) for name in known)]

    def explain(self) -> str:
        """Return what was found and by which evidence, what was rejected and why, and what was not examined."""
        lines = [f"{layer.label}: {layer.kind}, {_how(layer)}" for layer in self if layer.seen is None]
        if self.seen is None:
            lines.append("No call was watched: hs.layers(model, *inputs) also finds recurrence by what it does.")
            return "\n".join(lines)
        return "\n".join([*lines, self.seen.explain()])

    def __str__(self) -> str:
        """Return a table with one line per layer."""
        if not self:
            return "no recurrent layers"
        head = ("name", "kind", "state", "layers", "directions", "input")
        rows = [head, *(_row(layer) for layer in self)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        )

    __repr__ = __str__
    _repr_html_ = as_preformatted


def _inside(path: str, name: str) -> bool:
    return not name or path == name or path.startswith(f"{name}.")


def _how(layer: Layer) -> str:
    return "known by its type" if layer.kind not in ("cell", "layer") else "taken for one by its names and a trial"


def _row(layer: Layer) -> tuple[str, ...]:
    spec = layer.spec
    state = ", ".join(f"{part} {spec.sizes[part]}" for part in spec.parts)
    width = str(spec.input_size) if spec.input_size is not None else "?"
    return (layer.name or "(the model)", layer.kind, state, str(spec.layers), str(spec.directions), width)


def layers(model: nn.Module, *inputs: Any, exclude: Iterable[str] = (), **kwargs: Any) -> Layers:
    """Return every recurrent layer of `model`, however deeply nested, once each.

    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LSTM(4, 8, num_layers=2))
    >>> print(layers(model))
    name  kind  state     layers  directions  input
    1     lstm  h 8, c 8  2       1           4

    Without inputs, layers are found by type, registration and names. With inputs, one call `model(*inputs, **kwargs)`
    is watched, and recurrence is found by what it does, however it is written. The model comes back unchanged:

    >>> class Elman(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.mix = torch.nn.Linear(7, 4)
    ...     def forward(self, x):
    ...         h = x.new_zeros(len(x), 4)
    ...         for step in x.unbind(1):
    ...             h = torch.tanh(self.mix(torch.cat([step, h], dim=-1)))
    ...         return h
    >>> found = layers(Elman(), torch.randn(2, 9, 3))
    >>> found[0].kind, found[0].spec.parts
    ('loop', ('h',))

    Args:
        model: Any model.
        inputs: What to call the model with.
        exclude: Names of layers to leave out, and paths of modules not to look into.
        kwargs: What to call the model with by name.
    """
    model = unwrap_to_call(model) if inputs or kwargs else unwrap(model)
    left_out = tuple([exclude] if isinstance(exclude, str) else exclude)
    by_type = [layer for layer in _walk(model, "", set()) if not _left_out(layer.name, left_out)]
    if not inputs and not kwargs:
        return Layers(by_type)
    known = [layer for layer in _walk(model, "", set(), guess=False) if not _left_out(layer.name, left_out)]
    return _looked_at(model, (inputs, kwargs), by_type, known, left_out).settled()


def layers_of_call(model: nn.Module, inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> Layers:
    """Return the layers that a call of our own shows, still holding on to that call."""
    model = unwrap(model)
    return _looked_at(model, inputs, list(_walk(model, "", set())), list(_walk(model, "", set(), guess=False)), ())


def _looked_at(
    model: nn.Module, inputs: tuple[Any, Any], by_type: list[Layer], known: list[Layer], left_out: tuple[str, ...]
) -> Layers:
    from .behavior import find  # imported late: it is much code, and few callers need it

    found = find(model, *inputs, exclude=left_out, known=[layer.module for layer in known])
    return _together(model, by_type, known, found, left_out)


def layers_in(
    model: nn.Module,
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    run: Callable[[], Any],
    before: Layers | None = None,
) -> tuple[Any, Layers]:
    """Run the rest of a model's call under a trace; return its result, and the layers found by type and in the call."""
    from .behavior import find_in

    by_type, known = list(_walk(model, "", set())), list(_walk(model, "", set(), guess=False))
    modules, earlier = [layer.module for layer in known], before.seen if before is not None else None
    result, found = find_in(model, inputs, run, known=modules, before=earlier)
    return result, _together(model, by_type, known, found, ())


def ambiguous(model: nn.Module) -> bool:
    """Say whether a module named like a cell holds known cells: only a call shows which of them is the cell."""
    heard = {layer.module for layer in _walk(model, "", set())}
    return any(layer.module not in heard for layer in _walk(model, "", set(), guess=False))


def _together(
    model: nn.Module, by_type: list[Layer], known: list[Layer], found: Found, left_out: tuple[str, ...]
) -> Layers:
    from .seen_layers import seen_layers

    found, others, mixing = replace(found, without_cells=None, mixing=None), found.without_cells, found.mixing
    together, seen = seen_layers(model, by_type, known, found)
    made = Layers((layer for layer in together if not _left_out(layer.name, left_out)), seen)
    made.mixing = mixing
    if others is not None:
        made.without_cells = lambda: _together(model, by_type, known, others(), left_out)
    return made


def as_layer(module: nn.Module, sample: Tensor | None = None, handed: Any = None) -> Layer:
    """Return `module` itself as a layer, or raise with the reason why it is none.

    The user named this module as a cell, so any module that can be called with a state counts. `sample (batch, ...)`
    is one step of its input, and `handed` a state that it was called with.
    """
    module = unwrap(module)
    adapter = _adapter_of(module)
    if adapter is None:
        if not isinstance(module, nn.Module) or len(arguments(type(module))) < 2:
            raise NotRecurrent(_not_recurrent(module))
        if (turned := state_first(module)) is not None:
            raise turned
        sample = sample if sample is not None and len(sample) > 0 else None
        if handed is not None and units_of(module) is None and not hasattr(module, "initial_state"):
            learn(module, sample, handed=handed)
        _learn_spread(module, sample)
        module = gathered(module)
        adapter = _own(module, sample)
    return Layer("", module, adapter)


def cell_along(model: nn.Module, x: Tensor) -> Layer | None:
    """Return a model that is itself a cell as a layer, if `x (batch, time, ...)` is a sequence to step it along."""
    inner = unwrap(model)
    if not isinstance(x, Tensor) or x.dim() <= (2 if x.is_floating_point() else 1) or not x.numel():
        return None
    found = layers(inner)
    if len(found) == 1 and found[0].module is inner:
        return None if found[0].fused else found[0]
    if len(needed_arguments(inner)) == 2 and not any(layer.fused for layer in found):
        with suppress(NotRecurrent, StateMismatch):  # a real step may work where invented ones failed
            layer = as_layer(inner, x[:, 0])
            return layer if learned_of(inner) is not None else None
    return None


def is_around_cells(module: nn.Module) -> bool:
    """Say whether a module that holds cells is a cell itself, by its sizes or by trial: it adds something to theirs."""
    if hasattr(module, "hidden_size") or hasattr(module, "initial_state") or learned_of(module) is not None:
        return True
    return looks_unsized(module) and len(needed_arguments(module)) == 2 and learn(module) is not None


def gathered(module: nn.Module) -> nn.Module:
    """Return a cell that takes its state in one argument: the module itself, or a wrapper if it takes several."""
    return GatheredCell(module) if _is_spread_cell(module) else module


def register(kind: type[nn.Module], adapter: Adapter | None = None) -> None:
    """Teach the library a type of recurrent module; without an adapter, modules of that type are cells of one step.

    For a module, the nearest registered type among its base classes counts. Registrations override built-in knowledge.
    """
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise NotRecurrent(
            f"hs.register takes a type of nn.Module, but this is {kind!r}. For one object, give its type."
        )
    if adapter is not None and not isinstance(adapter, Adapter):
        raise NotRecurrent(
            f"an adapter for {kind.__name__} is an instance of hiddenstate.cells.Adapter, but this is {adapter!r}. "
            f"For a plain cell leave it out: hs.register({kind.__name__})."
        )
    _registered[kind] = adapter or _own_cells
    _registrations.append(kind)


def registrations() -> int:
    """Return how many times a type was registered: until the next one, a module has the adapter that it had."""
    return len(_registrations)


def has_own_code(model: nn.Module) -> bool:
    """Say whether a model has code of the user's own outside known layers, so that anything may recur there."""
    model = unwrap(model)
    if _adapter_of(model) is not None:
        return False
    if isinstance(model, torch.jit.ScriptModule) or not type(model).__module__.startswith("torch."):
        return True
    return any(has_own_code(child) for child in model._modules.values() if child is not None)


def _left_out(name: str, exclude: tuple[str, ...]) -> bool:
    return any(name == each or name.startswith(f"{each}.") for each in exclude)


def _walk(module: nn.Module, name: str, seen: set[nn.Module], *, guess: bool = True) -> Iterator[Layer]:
    if module in seen:
        return
    seen.add(module)
    adapter = _adapter_of(module) or (_own(module) if guess and _is_own_cell(module) else None)
    if adapter is None and guess and not name:
        adapter = _own_by_trial(module)  # for the model itself; cells inside a model are found by watching a call
    if adapter is not None:
        yield Layer(name, module, adapter)
        return  # do not list the modules that a cell is built from
    for child_name, child in module._modules.items():
        if child is not None:
            yield from _walk(unwrap(child), f"{name}.{child_name}" if name else child_name, seen, guess=guess)


def _own_by_trial(module: nn.Module) -> Adapter | None:
    """Return the adapter of a module that is a cell without a `hidden_size` or without a single state argument."""
    if _holds_known(module) or not (
        learned_of(module) is not None or (units_of(module) is None and looks_unsized(module))
    ):
        return _spread_cells if _is_spread_cell(module) else None
    _learn_spread(module, None)
    if _is_spread_cell(module):
        return _spread_cells
    if len(needed_arguments(module)) > 2:
        return None
    return _own_cells if _own_cells.learn(module) == "step" and learned_of(module) is not None else None


def _learn_spread(module: nn.Module, sample: Tensor | None) -> None:
    """Learn the size of a cell that takes its state in several arguments and does not say its size."""
    if units_of(module) is None and is_spread(module, sized=False) and not _holds_known(module):
        learn(GatheredCell(module), sample, parts=len(parts_of(module)))


def _holds_known(module: nn.Module) -> bool:
    inside = (child for child in module.modules() if child is not module)
    return any(_adapter_of(child) or is_cell(child) or is_spread(child) for child in inside)


def _own(module: nn.Module, sample: Tensor | None = None) -> Adapter:
    return _own_cells if _own_cells.learn(module, sample) == "step" else _own_layers


def _adapter_of(module: nn.Module) -> Adapter | None:
    for kind in type(module).__mro__:
        adapter = _registered.get(kind) or _known.get(kind)
        if adapter is not None:
            return adapter
        if kind.__module__.startswith("torch.ao.nn.quantized") and kind.__name__ in _QUANTIZED:
            return _QUANTIZED[kind.__name__]
    return None


def _is_spread_cell(module: nn.Module) -> bool:
    return is_spread(module) and not _holds_known(module)


def _is_own_cell(module: nn.Module) -> bool:
    if not is_cell(module) or is_spread(module):
        return False
    inside = [child for child in module.modules() if child is not module]
    if any(getattr(_adapter_of(child), "fused", False) for child in inside):
        return False  # it runs whole sequences, so it is a model; the layer in it counts
    # A decoder that holds a GRUCell may also have a hidden_size and take a hidden state: the inner cell counts.
    if hasattr(module, "initial_state"):
        return starts_by_number(module)
    return not any(_adapter_of(child) or _is_own_cell(child) for child in inside)


def _not_recurrent(module: object) -> str:
    found = layers(module) if isinstance(module, nn.Module) else []
    inside = f" It holds {len(found)} recurrent layers: hs.layers(model)." if found else ""
    return (
        f"{type(module).__name__} is no recurrent layer or cell: needed is an nn.RNN, nn.LSTM or nn.GRU, one of "
        f"torch's cells, or a module with forward(x, state) and initial_state(batch) or hidden_size.{inside} "
        f"hs.register({type(module).__name__}) teaches a new kind."
    )
