"""Finding the recurrent layers of a model that knows nothing of this library."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..errors import NotRecurrent
from ..state import State
from .adapter import Adapter, Spec, arguments
from .custom import CellAdapter, SequenceAdapter, is_cell
from .native import Native
from .torch_layers import FusedAdapter, TorchCellAdapter

_own_cells = CellAdapter()
_own_layers = SequenceAdapter(_own_cells)
_registered: dict[type[nn.Module], Adapter] = {}
_known: dict[type[nn.Module], Adapter] = {
    nn.RNN: FusedAdapter("rnn"),
    nn.LSTM: FusedAdapter("lstm"),
    nn.GRU: FusedAdapter("gru"),
    nn.RNNCell: TorchCellAdapter("rnn_cell"),
    nn.LSTMCell: TorchCellAdapter("lstm_cell"),
    nn.GRUCell: TorchCellAdapter("gru_cell"),
}


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """A recurrent module found in a model: its place, its kind, and how its state is made."""

    name: str  # where it is in the model, "" where the model itself is the layer
    module: nn.Module
    adapter: Adapter

    @property
    def kind(self) -> str:
        """The kind of layer: `lstm`, `gru_cell`, `cell` and so on."""
        return self.adapter.kind

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
        return self.adapter.to_state(self.module, native, batch=batch)

    def to_native(self, state: State, *, batched: bool = True) -> Native:
        """Return a State in the module's own form."""
        return self.adapter.to_native(self.module, state, batched=batched)

    def split(self, result: Any) -> tuple[Any, Native]:
        """Part what a call returned into its output and its native state."""
        return self.adapter.split(self.module, result)

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


class Layers(list[Layer]):
    """The recurrent layers of a model; printing it is a table."""

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


def layers(model: nn.Module) -> Layers:
    """Return every recurrent layer of `model`, however deep, each once.

    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LSTM(4, 8, num_layers=2))
    >>> print(layers(model))
    name  kind  state     layers  directions  input
    1     lstm  h 8, c 8  2       1           4
    """
    model = unwrap(model)
    return Layers(_walk(model, "", set()))


def as_layer(module: nn.Module, sample: Tensor | None = None) -> Layer:
    """Return `module` itself as a layer, or say why it is none; `sample (batch, ...)` is one step of its input.

    Here a module was named as a cell by the user, so any that can be called with a state counts.
    """
    module = unwrap(module)
    adapter = _adapter_of(module)
    if adapter is None:
        if not isinstance(module, nn.Module) or len(arguments(type(module))) < 2:
            raise NotRecurrent(_not_recurrent(module))
        adapter = _own(module, sample if sample is not None and len(sample) > 0 else None)
    return Layer("", module, adapter)


def register(kind: type[nn.Module], adapter: Adapter | None = None) -> None:
    """Teach the library a type of recurrent module; without an adapter, as a cell of one step.

    The nearest registered type in a module's ancestry counts, and wins over everything known from the start.
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


def unwrap(model: nn.Module) -> nn.Module:
    """Return the user's own model inside what torch.compile, DDP and DataParallel wrap around it."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif type(model).__name__ == "OptimizedModule" and isinstance(
            inner := model._modules.get("_orig_mod"), nn.Module
        ):
            model = inner
        else:
            return model


def _walk(module: nn.Module, name: str, seen: set[nn.Module]) -> Iterator[Layer]:
    if module in seen:
        return
    seen.add(module)
    adapter = _adapter_of(module) or (_own(module) if _is_own_cell(module) else None)
    if adapter is not None:
        yield Layer(name, module, adapter)
        return  # what a cell is made of is its own business
    for child_name, child in module._modules.items():
        if child is not None:
            yield from _walk(unwrap(child), f"{name}.{child_name}" if name else child_name, seen)


def _own(module: nn.Module, sample: Tensor | None = None) -> Adapter:
    return _own_cells if _own_cells.learn(module, sample) == "step" else _own_layers


def _adapter_of(module: nn.Module) -> Adapter | None:
    for kind in type(module).__mro__:
        adapter = _registered.get(kind) or _known.get(kind)
        if adapter is not None:
            return adapter
    return None


def _is_own_cell(module: nn.Module) -> bool:
    if not is_cell(module):
        return False
    inside = [child for child in module.modules() if child is not module]
    if any(getattr(_adapter_of(child), "fused", False) for child in inside):
        return False  # it runs whole sequences: a model, and the layer in it is what counts
    # A decoder with a GRUCell in it also has a hidden_size and takes a hidden state: there the inner cell counts.
    return hasattr(module, "initial_state") or not any(_adapter_of(child) or _is_own_cell(child) for child in inside)


def _row(layer: Layer) -> tuple[str, ...]:
    spec = layer.spec
    state = ", ".join(f"{part} {spec.sizes[part]}" for part in spec.parts)
    width = str(spec.input_size) if spec.input_size is not None else "?"
    return (layer.name or "(the model)", layer.kind, state, str(spec.layers), str(spec.directions), width)


def _not_recurrent(module: object) -> str:
    found = layers(module) if isinstance(module, nn.Module) else []
    inside = f" It holds {len(found)} recurrent layers: hs.layers(model)." if found else ""
    return (
        f"{type(module).__name__} is no recurrent layer or cell: needed is an nn.RNN, nn.LSTM or nn.GRU, one of "
        f"torch's cells, or a module with forward(x, state) and initial_state(batch) or hidden_size.{inside} "
        f"hs.register({type(module).__name__}) teaches a new kind."
    )
