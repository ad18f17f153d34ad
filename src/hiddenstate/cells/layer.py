"""A recurrent layer: how its kind is called (`Adapter`), where it is in a model (`Layer`), one call of it (`Call`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from ..errors import BadInput, HiddenStateError, NotRecurrent, StateMismatch
from ..state import State
from .native import Native
from .signature import arguments, first_input, give_state, given_state, state_argument
from .snapshot import is_sharded

if TYPE_CHECKING:
    from .behavior import Recurrence


@dataclass(frozen=True, slots=True)
class Spec:
    """What a layer's state is made of."""

    parts: tuple[str, ...]
    sizes: Mapping[str, int] = field(default_factory=dict)  # part -> units
    layers: int = 1
    directions: int = 1
    projection: int = 0  # units of h where they are fewer than those of c, else 0
    input_size: int | None = None
    batch_first: bool = True

    @property
    def bidirectional(self) -> bool:
        """Whether the layer also runs backwards."""
        return self.directions == 2


class Adapter(ABC):
    """How one kind of recurrent module is called, and what its state looks like.

    Subclass it and teach it with `hiddenstate.register(Type, adapter)`. An adapter holds no state of its own:
    every method is handed the module.
    """

    kind: str = "cell"
    fused: bool = False  # one call runs all steps of a sequence, rather than one step
    state_name: str | None = None  # what all modules of the kind call the argument that takes their state
    recurrence: Recurrence | None = None  # what was seen in a watched call, where the kind is not known by its type

    @abstractmethod
    def spec(self, module: nn.Module) -> Spec:
        """Say what the state is made of."""

    @abstractmethod
    def initial(self, module: nn.Module, batch: int) -> State:
        """Return the state that a sequence starts from."""

    @abstractmethod
    def to_state(self, module: nn.Module, native: Native, *, batch: int | None = None) -> State:
        """Name the parts of a native state; `batch`, where known, tells the rows of the call it belongs to."""

    @abstractmethod
    def to_native(self, module: nn.Module, state: State, *, batched: bool = True) -> Native:
        """Return the form the module itself takes; without rows when the call is not batched."""

    @abstractmethod
    def split(self, module: nn.Module, result: Any) -> tuple[Any, Native]:
        """Split what a call returned into its output and its native state."""

    def join(self, module: nn.Module, output: Any, native: Native) -> Any:
        """Return what a call with this output and native state returns; `split` takes it apart again.

        Only sequences are put together from pieces: nobody asks it of a layer that is not fused.
        """
        return output, native

    def rows(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, bool]:
        """Return how many rows a call has, and whether it is batched at all."""
        x = first_input(module, args, kwargs)
        if isinstance(x, PackedSequence):
            return int(x.batch_sizes[0]), True
        if not x.dim():
            return 1, False
        return x.shape[1 if self.fused and not self.spec(module).batch_first else 0], True

    def given(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Native | None:
        """Return the native state a call was given, or None."""
        return given_state(module, (args, kwargs), self.state_name)

    def give(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], native: Native
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a call's arguments with this native state among them."""
        return give_state(module, (args, kwargs), native, self.state_name)


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
        """Split what a call returned into its output and its native state."""
        try:
            return self.adapter.split(self.module, result)
        except (NotRecurrent, StateMismatch) as error:
            raise self._naming(error) from None

    def join(self, output: Any, native: Native) -> Any:
        """Return what a call with this output and native state returns."""
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
        try:
            return self.adapter.give(self.module, args, kwargs, native)
        except NotRecurrent as error:
            raise self._naming(error) from None

    @property
    def starts_itself(self) -> bool:
        """Whether it may be called without a state, and then makes its own."""
        taken = state_argument(type(self.module), self.adapter.state_name)
        return self.seen is not None or (taken is not None and taken.optional)

    def call(self, x: Any, native: Native | None = None, **options: Any) -> tuple[Any, Native]:
        """Call the module with an input and a state in its own form; return its output and the state it ends in."""
        # Without a state the argument is left out: whoever hooks the layer may want to give one.
        args, kwargs = ((x,), options) if native is None else self.give((x,), options, native)
        return self.split(self.module(*args, **kwargs))

    def takes_state_second(self, x: Any, native: Native) -> bool:
        """Say whether `module(x, native)` is how it is handed a state."""
        args, kwargs = self.give((x,), {}, native)
        values = (*args, *kwargs.values())
        in_order = all(name in arguments(type(self.module))[1:2] for name in kwargs)
        return len(values) == 2 and values[1] is native and in_order

    def part(self, name: str) -> str:
        """Return the name of one of its parts in a State of the whole model."""
        return f"{self.name}.{name}" if self.name else name

    def unnamed(self, error: Exception) -> BaseException:
        """Return an error of this layer without its name, for a sentence that says it already."""
        plain = error.__context__
        return plain if isinstance(plain, HiddenStateError) and str(self._naming(plain)) == str(error) else error

    def _naming(self, error: HiddenStateError) -> HiddenStateError:
        return type(error)(f"at the layer {self.name!r}: {error}") if self.name else error


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """What went into a recurrent layer and what came out, whatever the layer's own layout and its caller's spelling.

    The arguments and the result are kept as they were; everything else is read off them when it is asked for.

    >>> gru = torch.nn.GRU(3, 4)
    >>> call = Call(hs.layers(gru)[0], (), {"hx": torch.zeros(1, 2, 4), "input": torch.randn(5, 2, 3)})
    >>> tuple(call.x.shape), call.steps, call.given
    ((2, 5, 3), 5, State(h (1, 2, 4) float32; batch of 2))
    """

    layer: Layer
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    result: Any = None  # what the layer returned; None before it did

    @property
    def input(self) -> Tensor | PackedSequence:
        """The sequence or step, as the layer was given it."""
        return first_input(self.layer.module, self.args, self.kwargs)

    @property
    def rows(self) -> int:
        """How many sequences the call runs."""
        return self.layer.rows(self.args, self.kwargs)[0]

    @property
    def batched(self) -> bool:
        """Whether its input has an axis for them."""
        return self.layer.rows(self.args, self.kwargs)[1]

    @property
    def x(self) -> Tensor:
        """The input as `(batch, time, ...)`; a step has a time of 1, a packed sequence is padded with zeros."""
        return self._rows_first(self.input)

    @property
    def steps(self) -> int:
        """How many steps the call makes."""
        if not self.layer.fused:
            return 1
        x = self.input
        if isinstance(x, PackedSequence):
            return len(x.batch_sizes)
        return int(x.shape[1 if self.batched and self.layer.spec.batch_first else 0])

    @property
    def lengths(self) -> Tensor | None:
        """The steps of each row `(batch,)`, on the CPU, where the input was packed."""
        x = self.input
        if not isinstance(x, PackedSequence):
            return None
        lengths = (torch.arange(int(x.batch_sizes[0]), device="cpu") < x.batch_sizes.unsqueeze(1)).sum(0)
        return lengths if x.unsorted_indices is None else lengths[x.unsorted_indices.cpu()]

    @property
    def given_native(self) -> Any:
        """The state it was handed in the layer's own form, or None."""
        return self.layer.given(self.args, self.kwargs)

    @property
    def given(self) -> State | None:
        """The state it was handed, or None."""
        native = self.given_native
        return None if native is None else self.layer.to_state(native, batch=self.rows)

    @property
    def output_native(self) -> Any:
        """The output as the layer returned it."""
        return self.layer.split(self.result)[0]

    @property
    def output(self) -> Tensor:
        """The output as `(batch, time, ...)`; a step has a time of 1, a packed sequence is padded with zeros."""
        return self._rows_first(self.output_native)

    @property
    def state_native(self) -> Any:
        """The state it ended in, in the layer's own form."""
        return self.layer.split(self.result)[1]

    @property
    def state(self) -> State:
        """The state it ended in."""
        return self.layer.to_state(self.state_native, batch=self.rows)

    def handed(self, state: State, *, batched: bool | None = None) -> Call:
        """Return the same call with this state among its arguments; `batched`, where that is known already."""
        native = self.layer.to_native(state, batched=self.batched if batched is None else batched)
        return Call(self.layer, *self.layer.give(self.args, self.kwargs, native))

    def fed(self, x: Tensor | PackedSequence) -> Call:
        """Return the same call with another input, in the layout of this one."""
        if self.args:
            return Call(self.layer, (x, *self.args[1:]), self.kwargs)
        name = next(name for name, value in self.kwargs.items() if value is self.input)
        return Call(self.layer, (), {**self.kwargs, name: x})

    def returned(self, result: Any) -> Call:
        """Return the same call with what came out."""
        return Call(self.layer, self.args, self.kwargs, result)

    def _rows_first(self, value: Any) -> Tensor:
        if isinstance(value, PackedSequence):
            padded: Tensor = pad_packed_sequence(value, batch_first=True)[0]
            return padded
        tensor: Tensor = value
        if not self.layer.fused:
            return (tensor if self.batched else tensor.unsqueeze(0)).unsqueeze(1)
        if not self.batched:
            return tensor.unsqueeze(0)
        return tensor if self.layer.spec.batch_first else tensor.transpose(0, 1)


def unwrap(model: nn.Module) -> nn.Module:
    """Return the user's own model inside what torch.compile, DDP, FSDP and checkpointing wrap around it."""
    return _wrapping(model)[-1]


def _wrapping(model: nn.Module) -> list[nn.Module]:
    """Return a model and what it is wrapped around, one within the other."""
    found = [model]
    while (held := _WRAPPERS.get(type(model).__name__)) and isinstance(inner := model._modules.get(held), nn.Module):
        found.append(model := inner)
    return found


def unwrap_to_call(model: nn.Module, *, weights: bool = False) -> nn.Module:
    """Return what `unwrap` does, for calls of our own; refuse a model that nobody but its wrapper may call.

    With `weights`, also one whose weights come and go with each call: they are to be read, and gradients taken to them.
    """
    *wrappers, inner = _wrapping(model)
    name = type(inner).__name__
    if any(type(each).__name__ == _FLAT for each in (*wrappers, *inner.modules())):
        raise BadInput(
            f"{name} is wrapped in {_FLAT}, or holds a module that is: its weights are there only while the wrapper is "
            f"called, and this needs calls of its own. Do it before the model is wrapped. What listens to your own "
            f"calls (hs.Carry, hs.record, hs.Monitor, hs.regularize.Penalty) works on the wrapped one."
        )
    if weights and any(map(is_sharded, inner.modules())):
        raise BadInput(
            f"{name} is sharded by fully_shard: its weights come and go with each call, so neither they nor gradients "
            f"to them can be looked at. Do this before the model is sharded. What listens to your own calls (hs.Carry, "
            f"hs.record, hs.Monitor, hs.regularize.Penalty) works on the sharded one."
        )
    return inner


_FLAT = "FullyShardedDataParallel"

# What is wrapped around users' models, and where the model is in it. By name: to import them all takes long.
_WRAPPERS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    _FLAT: "_fsdp_wrapped_module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OptimizedModule": "_orig_mod",
}


def weights_like(module: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Return where and in which dtype a module's weights are, for states that should match them."""
    for store in ("_parameters", "_buffers"):
        if (tensor := _first(module, store)) is not None:
            return tensor.device, tensor.dtype
    return torch.get_default_device(), torch.get_default_dtype()


def _first(module: nn.Module, store: str) -> Tensor | None:
    """Return the first tensor with fractions that a module holds; each step asks, and `parameters()` takes longer."""
    tensor: Tensor | None
    for tensor in getattr(module, store).values():
        if tensor is not None and (tensor.is_floating_point() or tensor.is_complex()):
            return tensor
    within = (_first(child, store) for child in module._modules.values() if child is not None)
    return next((tensor for tensor in within if tensor is not None), None)
