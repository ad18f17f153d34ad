"""Marks: rows that start anew or end within one call of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..cells import Call, Layer
from ..errors import BadInput, CarryError, StateMismatch
from ..state import State, ends
from ..unrolling import Recurrent, unroll
from .given import no_beginning
from .kept import fitting
from .ways import CallWay


@dataclass(frozen=True, slots=True, eq=False)
class Marks:
    """Where rows start anew and where they end in the next call of the model."""

    starts: Tensor | None  # (batch, time) bool on the CPU; a start at the first step is handled before the call
    lengths: Tensor | None  # (batch,) int64 on the CPU

    @property
    def within(self) -> bool:
        """Whether rows start anew in mid-sequence."""
        return self.starts is not None and bool(self.starts[:, 1:].any())

    def check_unheard(self, names: Sequence[str]) -> None:
        """Raise for marks on single steps if the model keeps a state itself, since its steps are not heard."""
        if names and (self.within or (self.lengths is not None and len(set(self.lengths.tolist())) > 1)):
            raise CarryError(
                f"carry.mark was told where rows start or end, but {names[0]!r} is kept by the model itself, and its "
                f"steps are not heard. Cut the input where rows start or end, and reset them in between."
            )

    def piece(self, layer: Layer, rows: int, begin: int, steps: int) -> Marks:
        """Return the marks for `steps` steps from `begin` on, as one layer sees them."""
        given = len(self.starts) if self.starts is not None else len(self.lengths) if self.lengths is not None else rows
        if given != rows:
            turned = self.starts is not None and self.starts.shape == (steps, rows) and not layer.spec.batch_first
            hint = "Time comes first in it: model(chunk.x.transpose(0, 1)). " if turned else ""
            raise StateMismatch(
                f"carry.mark was told of {given} rows, but the layer {layer.name!r} is called with {rows} rows. {hint}"
                f"Marks speak of rows that all layers share: where one runs others, as words within sentences, carry a "
                f"layer by itself, hs.Carry(model.layer)."
            )
        if self.starts is not None and begin + steps > self.starts.shape[1]:
            raise StateMismatch(
                f"carry.mark was told of {self.starts.shape[1]} steps, but the layer {layer.name!r} is at step "
                f"{begin + steps}. The marks speak of the steps that the recurrent layers see."
            )
        starts = None if self.starts is None else self.starts[:, begin : begin + steps]
        lengths = None if self.lengths is None else (self.lengths - begin).clamp(0, steps)
        return Marks(starts, lengths)

    def check_taken(self, layer: Layer, steps: int) -> None:
        """Raise if a layer took another number of steps than the marks describe."""
        longest = 0 if self.lengths is None or not len(self.lengths) else int(self.lengths.max())
        told = longest if self.starts is None else self.starts.shape[1]
        if max(told, longest) > steps:
            raise CarryError(
                f"carry.mark was told of {max(told, longest)} steps, but the layer {layer.name!r} took {steps}. "
                f"The marks speak of the steps that the recurrent layers see."
            )


@dataclass(slots=True)
class RunningCall:
    """One call of the model while it runs; nothing is kept unless it succeeds."""

    marks: Marks | None = None
    grad: bool = True  # whether gradients were on when it began
    arguments: Any = ()
    way: CallWay | None = None  # the way that the call takes through the model
    staged: dict[str, State] = field(default_factory=dict)
    handed: set[str] = field(default_factory=set)  # layers that were called without a state
    steps: dict[str, int] = field(default_factory=dict)  # how many steps each layer has taken
    unsettled: dict[str, Call] = field(default_factory=dict)  # each layer's last call, if its state is not staged yet
    ended: dict[str, Any] = field(default_factory=dict)  # each layer's last native end state
    begins: dict[str, State] = field(default_factory=dict)  # the model's own start of each layer, if it made one
    replaced: set[str] = field(default_factory=set)  # layers that got the carried state instead of the model's own


def read_marks(starts: Any, lengths: Any) -> Marks:
    """Return the user's marks after checking them."""
    if starts is not None:
        starts = torch.as_tensor(starts).detach().cpu()
        if starts.dtype != torch.bool or starts.dim() != 2:
            raise BadInput(
                f"starts are {starts.dtype} of shape {tuple(starts.shape)}, but a bool tensor (batch, time) is needed, "
                f"True where a row starts anew before that step."
            )
    if lengths is not None:
        lengths = torch.as_tensor(lengths).detach().cpu()
        if lengths.dtype == torch.bool or lengths.is_floating_point() or lengths.dim() != 1:
            raise BadInput(
                f"lengths are {lengths.dtype} of shape {tuple(lengths.shape)}, but one whole number for each row is "
                f"needed."
            )
        lengths = lengths.long()
        if len(lengths) and int(lengths.min()) < 0:
            raise BadInput(f"a row has {int(lengths.min())} steps, but 0 or more are needed; 0 lets its state wait.")
    if starts is not None and lengths is not None and len(starts) != len(lengths):
        raise BadInput(f"starts speak of {len(starts)} rows, but lengths of {len(lengths)}.")
    return Marks(starts, lengths)


def run_marked(call: Call, state: State, marks: Marks, start: Callable[[int], State]) -> Call:
    """Run a call of a fused layer from `state`, with rows that end on the way or start anew."""
    layer, own = call.layer, {"initial": start}
    _check_alone(call)
    if isinstance(layer.module, Recurrent):
        own = {}
        if marks.starts is not None and bool(marks.starts.any()):
            _check_as_by_itself(layer, start(call.rows))
    out, last = unroll(layer.module, call.x, state, lengths=marks.lengths, resets=marks.starts, time_axis=1, **own)  # type: ignore[arg-type]
    output = out if layer.spec.batch_first else out.transpose(0, 1)
    return call.returned(layer.join(output, layer.to_native(last)))


def one_for_all(layer: Layer, first: State) -> Callable[[int], State]:
    """Return a function that makes the start of any number of rows, if all rows in `first` start alike."""
    one = first.select([0])
    if any(not torch.equal(part, one[name].expand_as(part)) for name, part in first.items()):
        raise no_beginning(layer)
    return lambda batch: one.repeat(batch)


def _check_alone(call: Call) -> None:
    """Raise for a call with more than an input and a state: run in pieces, it would lack the rest."""
    kwargs = dict(call.kwargs)
    if isinstance(call.layer.module, Recurrent):
        kwargs.pop("engine", None)  # this says how to run, not what
    known = {id(end) for _, end in ends((call.input, call.given_native))}
    others = [place for place, end in ends((call.args, kwargs)) if end is not None and id(end) not in known]
    if others:
        side, name, *_ = others[0]
        raise CarryError(
            f"carry.mark was told where rows start or end, so the layer {call.layer.name!r} is run piece by piece, but "
            f"it is also called with {f'{name}=' if side else f'argument {name}'}, and which part of that belongs to "
            f"which piece is not known. Cut the input where rows start or end, and reset them in between."
        )


def _check_as_by_itself(layer: Layer, first: State) -> None:
    """Raise for another start than the cells' own, if each of the cells starts by itself."""
    own = layer.initial(first.batch)
    if any(not torch.equal(part, own[name].to(part)) for name, part in first.items()):
        raise CarryError(
            f"rows of {layer.label!r} start anew in mid-sequence, where its cells start by themselves, and not from "
            f"what it is to start from. Cut the input where rows start, and reset them in between."
        )


def at_lengths(layer: Layer, values: Mapping[str, Sequence[Tensor]], lengths: Tensor, *, first: State) -> State:
    """Return each row of a loop's state after its own number of steps; rows with 0 steps get their row of `first`."""
    steps = {name: [*found] for name, found in values.items()}
    state = layer.to_state({name: found[-1] for name, found in steps.items()})
    for length in sorted(set(lengths.tolist())):
        rows = (lengths == length).nonzero()[:, 0].tolist()
        then = first
        if length > 0:
            then = layer.to_state({name: found[min(length, len(found)) - 1] for name, found in steps.items()})
        state = state.put(rows, fitting(then, state).select(rows))
    return state
