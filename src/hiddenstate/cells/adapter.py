"""What the library must know of a kind of recurrent module: one adapter for each."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ..errors import NotRecurrent
from ..state import State
from .native import Native

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
        """Part what a call returned into its output and its native state."""

    def join(self, module: nn.Module, output: Any, native: Native) -> Any:
        """Return what a call returns whose output and native state these are; `split` takes it apart again."""
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
        if len(args) > 1:
            return args[1]
        return kwargs.get(arguments(type(module))[1])

    def give(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], native: Native
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a call's arguments with this native state among them."""
        if len(args) > 1:
            return (args[0], native, *args[2:]), kwargs
        return args, {**kwargs, arguments(type(module))[1]: native}


def arguments(kind: type[nn.Module]) -> tuple[str, ...]:
    """Return the names of the arguments that a module's forward takes by position."""
    try:
        forward = kind.forward
    except AttributeError:  # scripted modules have none to look at
        return ()
    return _arguments(forward)


@lru_cache(maxsize=1024)
def _arguments(forward: Callable[..., Any]) -> tuple[str, ...]:
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = list(inspect.signature(forward).parameters.values())[1:]
    except (TypeError, ValueError):
        return ()
    return tuple(parameter.name for parameter in parameters if parameter.kind in by_position)


def first_input(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | PackedSequence:
    """Return the sequence or step that a call was given."""
    x = args[0] if args else kwargs.get(arguments(type(module))[0])
    if not isinstance(x, Tensor | PackedSequence):
        raise NotRecurrent(
            f"{type(module).__name__} was called with {type(x).__name__} as its first argument, "
            f"but a tensor or a PackedSequence was expected there."
        )
    return x


def weights_like(module: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Return where and in which dtype a module's weights are, for states that should match them."""
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_floating_point() or tensor.is_complex():
            return tensor.device, tensor.dtype
    return torch.get_default_device(), torch.get_default_dtype()
