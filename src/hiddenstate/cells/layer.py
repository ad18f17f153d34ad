"""A recurrent layer: how its kind is called (`Adapter`), its place in a model (`Layer`), one call of it (`Call`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from ..errors import HiddenStateError, NotRecurrent, StateMismatch
from ..state import State
from .native import Native
from .signature import arguments, first_input, give_state, given_state, state_argument

if TYPE_CHECKING:
    from .behavior import Recurrence


@dataclass(frozen=True, slots=True)
class Spec:
    """The shape of a layer's state: its parts, their sizes, and the numbers of layers and directions."""

    parts: tuple[str, ...]
    sizes: Mapping[str, int] = field(default_factory=dict)  # part -> units
    layers: int = 1
    directions: int = 1
    projection: int = 0  # units of h if the layer projects it to fewer than c has, else 0
    input_size: int | None = None
    batch_first: bool = True

    @property
    def bidirectional(self) -> bool:
        """Whether the layer also runs backwards."""
        return self.directions == 2


class Adapter(ABC):
    """How one kind of recurrent module is called, and what its state looks like.

    Subclass this and call `hiddenstate.register(Type, adapter)`. An adapter keeps no state of its own: each method gets
    the module as an argument.
    """

    kind: str = "cell"
    fused: bool = False  # one call runs all steps of a sequence, rather than one step
    steps_first: bool = False  # whether outputs of many steps lie in memory step by step, rather than row by row
    state_name: str | None = None  # the name of the state argument, if it is the same in all modules of the kind
    recurrence: Recurrence | None = None  # what a watched call showed, if the kind is not known by its type

    @abstractmethod
    def spec(self, module: nn.Module) -> Spec:
        """Return the parts and sizes of the state."""

    @abstractmethod
    def initial(self, module: nn.Module, batch: int) -> State:
        """Return the state that a sequence starts from."""

    @abstractmethod
    def to_state(self, module: nn.Module, native: Native, *, batch: int | None = None) -> State:
        """Name the parts of a native state. `batch` is the number of rows of its call, if known."""

    @abstractmethod
    def to_native(self, module: nn.Module, state: State, *, batched: bool = True) -> Native:
        """Return the state in the form that the module takes; if the call is not batched, without a batch axis."""

    @abstractmethod
    def split(self, module: nn.Module, result: Any) -> tuple[Any, Native]:
        """Split what a call returned into its output and its native state."""

    def join(self, module: nn.Module, output: Any, native: Native) -> Any:
        """Return what a call with this output and native state would return: the inverse of `split`.

        Only fused layers are run in pieces, so only their results have to be joined.
        """
        return output, native

    def rows(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, bool]:
        """Return the number of rows of a call, and whether its input has a batch axis."""
        x = first_input(module, args, kwargs)
        if isinstance(x, PackedSequence):
            return int(x.batch_sizes[0]), True
        if not x.dim():
            return 1, False
        return x.shape[1 if self.fused and not self.spec(module).batch_first else 0], True

    def given(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Native | None:
        """Return the native state among a call's arguments, or None."""
        return given_state(module, (args, kwargs), self.state_name)

    def give(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], native: Native
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the call's arguments with this native state among them."""
        return give_state(module, (args, kwargs), native, self.state_name)


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """A recurrent module in a model: its name there, the module, and the adapter for its kind."""

    name: str  # the path of the module in the model, "" if the model itself is the layer
    module: nn.Module
    adapter: Adapter
    iterates: bool = False  # a cell that a watched call stepped for something else than time

    @property
    def kind(self) -> str:
        """The kind of layer: `lstm`, `gru_cell`, `cell` and so on."""
        return "iteration" if self.iterates else self.adapter.kind

    @property
    def label(self) -> str:
        """The layer's name in a sentence."""
        return self.name or "the model itself"

    @property
    def seen(self) -> Recurrence | None:
        """What a watched call showed, if the layer is not known by its type."""
        return self.adapter.recurrence

    @property
    def fused(self) -> bool:
        """Whether one call runs a whole sequence, rather than one step."""
        return self.adapter.fused

    @property
    def spec(self) -> Spec:
        """The parts of the state, their sizes, and the numbers of layers and directions."""
        return self.adapter.spec(self.module)

    @property
    def tracks(self) -> tuple[str, ...]:
        """One name for each layer and direction, in the style of torch's own weights."""
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
        """Return a State in the form that the module takes."""
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
        """Return the number of rows of a call, and whether its input has a batch axis."""
        return self.adapter.rows(self.module, args, kwargs)

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Native | None:
        """Return the native state among a call's arguments, or None."""
        return self.adapter.given(self.module, args, kwargs)

    def give(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], native: Native
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the call's arguments with this native state among them."""
        try:
            return self.adapter.give(self.module, args, kwargs, native)
        except NotRecurrent as error:
            raise self._naming(error) from None

    @property
    def starts_itself(self) -> bool:
        """Whether the module may be called without a state, and then makes its own."""
        taken = state_argument(type(self.module), self.adapter.state_name)
        return self.seen is not None or (taken is not None and taken.optional)

    def call(self, x: Any, native: Native | None = None, **options: Any) -> tuple[Any, Native]:
        """Call the module with an input and a native state; return its output and the native state it ends in."""
        # If there is no state, leave the argument out: a hook on the layer may want to supply one.
        args, kwargs = ((x,), options) if native is None else self.give((x,), options, native)
        return self.split(self.module(*args, **kwargs))

    def takes_state_second(self, x: Any, native: Native) -> bool:
        """Say whether the module takes its state as the second positional argument: `module(x, native)`."""
        args, kwargs = self.give((x,), {}, native)
        values = (*args, *kwargs.values())
        in_order = all(name in arguments(type(self.module))[1:2] for name in kwargs)
        return len(values) == 2 and values[1] is native and in_order

    def part(self, name: str) -> str:
        """Return the name that one of the parts has in a State of the whole model."""
        return f"{self.name}.{name}" if self.name else name

    def unnamed(self, error: Exception) -> BaseException:
        """Return an error without this layer's name in front, for a sentence that names the layer already."""
        plain = error.__context__
        return plain if isinstance(plain, HiddenStateError) and str(self._naming(plain)) == str(error) else error

    def _naming(self, error: HiddenStateError) -> HiddenStateError:
        return type(error)(f"at the layer {self.name!r}: {error}") if self.name else error


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One call of a recurrent layer: its arguments and its result, in one layout whatever the layer's own is.

    The arguments and the result are stored unchanged; the properties below read from them when asked.

    >>> gru = torch.nn.GRU(3, 4)
    >>> call = Call(hs.layers(gru)[0], (), {"hx": torch.zeros(1, 2, 4), "input": torch.randn(5, 2, 3)})
    >>> tuple(call.x.shape), call.steps, call.given
    ((2, 5, 3), 5, State(h (1, 2, 4) float32; batch of 2))
    """

    layer: Layer
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    result: Any = None  # what the layer returned; None before it has

    @property
    def input(self) -> Tensor | PackedSequence:
        """The sequence or step that the layer was given, unchanged."""
        return first_input(self.layer.module, self.args, self.kwargs)

    @property
    def rows(self) -> int:
        """The number of sequences in the call."""
        return self.layer.rows(self.args, self.kwargs)[0]

    @property
    def batched(self) -> bool:
        """Whether the input has a batch axis."""
        return self.layer.rows(self.args, self.kwargs)[1]

    @property
    def x(self) -> Tensor:
        """The input as `(batch, time, ...)`. A step has a time of 1; a packed sequence is padded with zeros."""
        return self._rows_first(self.input)

    @property
    def steps(self) -> int:
        """The number of steps in the call."""
        if not self.layer.fused:
            return 1
        x = self.input
        if isinstance(x, PackedSequence):
            return len(x.batch_sizes)
        return int(x.shape[1 if self.batched and self.layer.spec.batch_first else 0])

    @property
    def lengths(self) -> Tensor | None:
        """The number of steps of each row, `(batch,)`, on the CPU; None unless the input was packed."""
        x = self.input
        if not isinstance(x, PackedSequence):
            return None
        lengths = (torch.arange(int(x.batch_sizes[0]), device="cpu") < x.batch_sizes.unsqueeze(1)).sum(0)
        return lengths if x.unsorted_indices is None else lengths[x.unsorted_indices.cpu()]

    @property
    def given_native(self) -> Any:
        """The state that the layer was given, in its own form, or None."""
        return self.layer.given(self.args, self.kwargs)

    @property
    def given(self) -> State | None:
        """The state that the layer was given, or None."""
        native = self.given_native
        return None if native is None else self.layer.to_state(native, batch=self.rows)

    @property
    def output_native(self) -> Any:
        """The output as the layer returned it."""
        return self.layer.split(self.result)[0]

    @property
    def output(self) -> Tensor:
        """The output as `(batch, time, ...)`, laid out as `x` is."""
        return self._rows_first(self.output_native)

    @property
    def state_native(self) -> Any:
        """The state that the call ended in, in the layer's own form."""
        return self.layer.split(self.result)[1]

    @property
    def state(self) -> State:
        """The state that the call ended in."""
        return self.layer.to_state(self.state_native, batch=self.rows)

    def handed(self, state: State, *, batched: bool | None = None) -> Call:
        """Return this call with `state` among its arguments; pass `batched` if it is known already."""
        native = self.layer.to_native(state, batched=self.batched if batched is None else batched)
        return Call(self.layer, *self.layer.give(self.args, self.kwargs, native))

    def fed(self, x: Tensor | PackedSequence) -> Call:
        """Return this call with another input, which has the layout of the present one."""
        if self.args:
            return Call(self.layer, (x, *self.args[1:]), self.kwargs)
        name = next(name for name, value in self.kwargs.items() if value is self.input)
        return Call(self.layer, (), {**self.kwargs, name: x})

    def returned(self, result: Any) -> Call:
        """Return this call with its result."""
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
