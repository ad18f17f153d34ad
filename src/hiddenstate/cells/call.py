"""One call of a recurrent layer, as a value that everybody reads alike."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from ..state import State
from .adapter import first_input

if TYPE_CHECKING:
    from .layer import Layer


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
        lengths = (torch.arange(int(x.batch_sizes[0])) < x.batch_sizes.unsqueeze(1)).sum(0)
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
