"""Checks of the arguments of `unroll`: sequences, first states, lengths and resets, before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from .._torch_names import lookup
from ..cells import Layer, flatten
from ..errors import BadInput, StateMismatch
from ..state import State, check_shapes

_is_batched = lookup("torch._C._functorch.is_batchedtensor")
Lengths: TypeAlias = "Tensor | Sequence[int] | np.ndarray[Any, Any]"


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """What is to be run: sequences, the state before them, where each ends and where it starts anew."""

    x: Tensor  # (batch, time, ...)
    state: State | None = None  # None: the layer's own initial state
    lengths: Tensor | None = None  # (batch,) int64 on the CPU; None where every row has all steps
    resets: Tensor | None = None  # (batch, time) bool on the CPU; None where no row starts anew
    initial: Callable[[int], State] | None = None  # what a row that starts anew starts from; None: the layer's own

    @property
    def plain(self) -> bool:
        """Whether all rows have all steps, without a new start."""
        return self.lengths is None and self.resets is None


def read_x(x: Any, layer: Layer) -> Tensor:
    """Return x where it is (batch, time, ...)."""
    if isinstance(x, PackedSequence):
        raise BadInput(
            "x is a PackedSequence, but a padded tensor (batch, time, feature) is needed. "
            "x, lengths = pad_packed_sequence(x, batch_first=True) gives it, for unroll(..., lengths=lengths)."
        )
    if not isinstance(x, Tensor):
        raise BadInput(f"x is {type(x).__name__}, but a tensor (batch, time, feature) is needed.")
    tokens = not (x.is_floating_point() or x.is_complex())
    if x.dim() < (2 if tokens and not isinstance(layer.module, nn.RNNBase) else 3):
        raise BadInput(
            f"x has shape {tuple(x.shape)}, but (batch, time, feature) is needed. A single sequence (time, feature) "
            f"becomes a batch of one with x.unsqueeze(0); a single feature gets its axis with x.unsqueeze(-1)."
        )
    if x.shape[1] == 0:
        raise BadInput(f"x has shape {tuple(x.shape)}: there is no step to run. Time is axis 1, whatever batch_first.")
    return x


def read_lengths(lengths: Lengths | None, x: Tensor) -> Tensor | None:
    """Return lengths as int64 on the CPU, or None where every row has all steps."""
    if lengths is None:
        return None
    batch, steps = x.shape[:2]
    given = lengths if isinstance(lengths, Tensor) else torch.as_tensor(lengths, device="cpu")
    _refuse_many(given, "lengths")
    given = given.long() if given.numel() == 0 else given  # an empty list has no dtype of its own
    if given.dtype == torch.bool or given.is_floating_point() or given.is_complex():
        raise BadInput(
            f"lengths are {given.dtype}, but whole numbers of steps are needed. "
            f"A mask (batch, time) becomes lengths with mask.sum(1); a float tensor with lengths.long()."
        )
    if given.shape != (batch,):
        raise BadInput(
            f"lengths have shape {tuple(given.shape)}, but x has {batch} rows: one length for each row is needed, "
            f"shape ({batch},)."
        )
    given = given.detach().to("cpu", torch.int64)
    for row, length in enumerate(given.tolist()):
        if length < 0:
            raise BadInput(f"row {row} has length {length}, but 0 or more is needed; with 0 steps a row waits.")
        if length > steps:
            raise BadInput(
                f"row {row} has length {length}, but x has {steps} steps. "
                f"Often lengths were counted before x was cut, or time is not axis 1 of x {tuple(x.shape)}."
            )
    return None if batch == 0 or int(given.min()) == steps else given


def read_resets(resets: Any, x: Tensor) -> Tensor | None:
    """Return resets as a bool tensor on the CPU, or None where no row starts anew."""
    if resets is None:
        return None
    given = resets if isinstance(resets, Tensor) else torch.as_tensor(resets, device="cpu")
    _refuse_many(given, "resets")
    if given.dtype != torch.bool:
        raise BadInput(
            f"resets are {given.dtype}, but a bool tensor (batch, time) is needed, True where a row starts anew "
            f"before that step. Zeros and ones become one with resets.bool()."
        )
    if given.shape != x.shape[:2]:
        turned = " They look like (time, batch): use resets.T." if given.shape == x.shape[:2][::-1] else ""
        raise BadInput(
            f"resets have shape {tuple(given.shape)}, but x is {tuple(x.shape)}: one True or False for each row and "
            f"step is needed, shape {tuple(x.shape[:2])}.{turned}"
        )
    given = given.detach().to("cpu")
    return given if bool(given.any()) else None


def _refuse_many(given: Tensor, what: str) -> None:
    """Refuse what differs along an axis that torch.func.vmap has taken away."""
    if _is_batched is not None and _is_batched(given):
        raise BadInput(
            f"{what} differ along the axis of a torch.func.vmap, but they say how many steps are run, which is one "
            f"answer for all. Join that axis with the rows, x.flatten(0, 1), or give all the same {what} with "
            f"in_dims=None."
        )


def refuse_both_ways(resets: Tensor | None, directions: int) -> None:
    """Refuse resets in a layer that also runs backwards."""
    if resets is not None and directions == 2:
        raise BadInput(
            "resets are given to a bidirectional layer, in which every output has seen the whole row: a new start in "
            "the middle has no meaning there. Cut the rows into sequences of their own, or use one direction."
        )


def read_state(state: Any, layer: Layer, x: Tensor) -> State | None:
    """Return a given first state as a State that fits the rows of x."""
    if state is None:
        return None
    if isinstance(layer.module, nn.RNNBase | nn.RNNCellBase) or layer.kind == "recurrent":
        check_shapes(state if isinstance(state, State) else flatten(state)[0], layer.initial(x.shape[0]))
    given: State = state if isinstance(state, State) else layer.to_state(state, batch=x.shape[0])
    if given.batch != x.shape[0]:
        raise StateMismatch(
            f"x has {x.shape[0]} rows, but the state has {given.batch}. The last batch of an epoch is often smaller: "
            f"go on with the rows that remain, state.select(slice(0, {x.shape[0]})), or start without a state."
        )
    layer.to_native(given)  # refuses parts and sizes that are not the layer's
    return given


def read(layer: Layer, x: Any, state: Any, *, lengths: Lengths | None, resets: Any) -> Task:
    """Return the checked task."""
    x = read_x(x, layer)
    checked = read_resets(resets, x)
    if checked is not None and layer.fused:
        refuse_both_ways(checked, layer.spec.directions)
    task = Task(x, read_state(state, layer, x), read_lengths(lengths, x), checked)
    # Of users' own cells nobody knows which dtypes they bear: those are judged when a step fails.
    if task.state is not None and isinstance(layer.module, nn.RNNBase | nn.RNNCellBase):
        check_like(task.state, layer)
    return task


def check_like(state: State, layer: Layer) -> None:
    """Refuse a state of another dtype or device than the layer's own."""
    expected = layer.initial(1)
    if torch.is_autocast_enabled(expected.device.type):
        return  # states may come in either precision there
    for name, part in state.items():
        if part.dtype != expected[name].dtype:
            raise StateMismatch(
                f"part {name!r} of the state is {part.dtype}, but {type(layer.module).__name__} works in "
                f"{expected[name].dtype}. Often it was made under autocast: state.to({expected[name].dtype})."
            )
        if part.device != expected[name].device:
            raise StateMismatch(
                f"part {name!r} of the state is on {part.device}, but {type(layer.module).__name__} is on "
                f"{expected[name].device}. Move it with state.to({str(expected[name].device)!r})."
            )
