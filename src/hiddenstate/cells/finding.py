"""Finding the recurrent layers of a model that knows nothing of this library."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import NotRecurrent
from .adapter import Adapter, arguments
from .custom import CellAdapter, SequenceAdapter, is_cell
from .layer import Layer, Layers
from .probing import starts_by_number
from .torch_layers import FusedAdapter, TorchCellAdapter

if TYPE_CHECKING:
    from .behavior import Found

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
# By name: quantization takes long to import, and where it was not, there is nothing of it.
_QUANTIZED: dict[str, Adapter] = {"LSTM": _known[nn.LSTM], "GRU": _known[nn.GRU]}
# What is wrapped around users' models, and where the model is in it. By name: to import them all takes long.
_WRAPPERS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OptimizedModule": "_orig_mod",
}


def layers(model: nn.Module, *inputs: Any, exclude: Iterable[str] = (), **kwargs: Any) -> Layers:
    """Return every recurrent layer of `model`, however deep, each once.

    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LSTM(4, 8, num_layers=2))
    >>> print(layers(model))
    name  kind  state     layers  directions  input
    1     lstm  h 8, c 8  2       1           4

    Without inputs, types, registrations and names tell. With them one call, `model(*inputs, **kwargs)`, is watched, and
    recurrence is found by what it does, whatever it looks like; the model comes back as it was:

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
        inputs: What it is called with.
        exclude: Names of layers that are left out, and paths of modules in which nothing is looked for.
        kwargs: What it is called with by name.
    """
    model, left_out = unwrap(model), tuple([exclude] if isinstance(exclude, str) else exclude)
    by_type = [layer for layer in _walk(model, "", set()) if not _left_out(layer.name, left_out)]
    if not inputs and not kwargs:
        return Layers(by_type)
    from .behavior import find  # much code, which few need at once

    known = [layer for layer in _walk(model, "", set(), guess=False) if not _left_out(layer.name, left_out)]
    found = find(model, inputs, kwargs, exclude=left_out, known=[layer.module for layer in known])
    return _together(model, by_type, known, found, left_out)


def layers_in(
    model: nn.Module,
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    run: Callable[[], Any],
    before: Layers | None = None,
) -> tuple[Any, Layers]:
    """Let a call of the model go on by `run`; return what it gives, and the layers that types and this call tell of."""
    from .behavior import find_in

    by_type, known = list(_walk(model, "", set())), list(_walk(model, "", set(), guess=False))
    modules, earlier = [layer.module for layer in known], before.seen if before is not None else None
    result, found = find_in(model, inputs, run, known=modules, before=earlier)
    return result, _together(model, by_type, known, found, ())


def ambiguous(model: nn.Module) -> bool:
    """Say whether a module that only bears the names of a cell holds others that are known: which it is, calls tell."""
    heard = {layer.module for layer in _walk(model, "", set())}
    return any(layer.module not in heard for layer in _walk(model, "", set(), guess=False))


def _together(
    model: nn.Module, by_type: list[Layer], known: list[Layer], found: Found, left_out: tuple[str, ...]
) -> Layers:
    from .seen import seen_layers

    together = seen_layers(model, by_type, known, found)
    return Layers((layer for layer in together if not _left_out(layer.name, left_out)), together.seen)


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
    """Return the user's own model inside what torch.compile, DDP, FSDP and checkpointing wrap around it."""
    while (held := _WRAPPERS.get(type(model).__name__)) and isinstance(inner := model._modules.get(held), nn.Module):
        model = inner
    return model


def holders(model: nn.Module, found: Iterable[Layer]) -> list[nn.Module]:
    """Return the modules of a model through which its layers are reached, the model itself first."""
    inside = {layer.module for layer in found}
    known: dict[nn.Module, bool] = {}

    def holds(module: nn.Module) -> bool:
        if module in inside:
            return True
        if module not in known:
            known[module] = False  # also ends the search where modules hold each other
            known[module] = any([holds(child) for child in module._modules.values() if child is not None])
        return known[module]

    holds(model)
    return [module for module, there in known.items() if there]


def has_own_code(model: nn.Module) -> bool:
    """Say whether a model holds code of the user's own outside layers that are known: there anything may recur."""
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
    if adapter is not None:
        yield Layer(name, module, adapter)
        return  # what a cell is made of is its own business
    for child_name, child in module._modules.items():
        if child is not None:
            yield from _walk(unwrap(child), f"{name}.{child_name}" if name else child_name, seen, guess=guess)


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


def _is_own_cell(module: nn.Module) -> bool:
    if not is_cell(module):
        return False
    inside = [child for child in module.modules() if child is not module]
    if any(getattr(_adapter_of(child), "fused", False) for child in inside):
        return False  # it runs whole sequences: a model, and the layer in it is what counts
    # A decoder with a GRUCell in it also has a hidden_size and takes a hidden state: there the inner cell counts.
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
