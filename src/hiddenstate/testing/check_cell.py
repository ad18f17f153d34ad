"""The laws of a cell, which unrolling, carrying and serving rely on."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..cells import Layer, as_layer, flatten, invented_inputs, untouched
from ..errors import BadInput, LawBroken, NotRecurrent, StateMismatch
from ..state import State
from ..unrolling import unroll
from .law import Laws, difference, enforce

_ROWS, _STEPS = 3, 5


@dataclass(frozen=True, slots=True, eq=False)
class CellUnderTest:
    """A cell, and a sequence to run it on."""

    layer: Layer
    x: Tensor  # (batch, time, ...)

    def run(self, x: Tensor, state: State | None = None, **options: Any) -> tuple[Tensor, State]:
        """Return the outputs and the final state of the plain loop."""
        return unroll(self.layer.module, x, state, time_axis=1, engine="loop", **options)


def check_cell(cell: nn.Module, x: Tensor | None = None) -> None:
    """Raise `LawBroken`, an `AssertionError`, if `cell` breaks a law that the library relies on.

    >>> check_cell(nn.GRUCell(3, 4))
    >>> class Mixing(nn.GRUCell):
    ...     def forward(self, x, h):
    ...         return super().forward(x, h - h.mean(0))
    >>> check_cell(Mixing(3, 4))
    Traceback (most recent call last):
    hiddenstate.errors.LawBroken: Mixing breaks a law: a row does not depend on other rows. ...

    The cell runs in evaluation mode and without gradients, and comes back unchanged.

    Args:
        cell: A module of one step: `(x, state) -> (output, state)`, or `-> state`.
        x: Sequences for it, `(batch, time, ...)` with at least two rows and two steps. None: made up from its sizes.
    """
    name = type(cell).__name__
    if x is not None and (x.dim() < 2 or min(x.shape[:2]) < 2):
        raise BadInput(f"x has shape {tuple(x.shape)}, but (batch, time, ...) with 2 rows and 2 steps is needed.")
    with untouched(cell), torch.no_grad():
        cell.eval()
        enforce(LAWS, _prepared(cell, x), name)


def _prepared(cell: nn.Module, x: Tensor | None) -> CellUnderTest:
    """Return the cell with `x`, or with the first made-up sequence that it accepts."""
    name, failed = type(cell).__name__, None
    with suppress(NotRecurrent, StateMismatch):  # reported below
        as_layer(cell)  # learns the size of the state, which helps to make up inputs
    for sequence in [x] if x is not None else invented_inputs(cell, _ROWS, _STEPS):
        try:
            layer = as_layer(cell, sequence[:, 0])
            native = layer.to_native(layer.initial(len(sequence)))
        except (NotRecurrent, StateMismatch) as error:
            raise LawBroken(f"{name} breaks a law: it can be told what its state is. {error}") from error
        if layer.fused:
            raise LawBroken(
                f"{name} breaks a law: a cell takes one step. It runs whole sequences, as nn.LSTM does: teach it with "
                f"an adapter, and use check_adapter."
            )
        try:
            layer.call(sequence[:, 0], native)
        except Exception as error:  # another made-up input may work
            failed = failed or error
        else:
            return CellUnderTest(layer, sequence)
    if x is None:
        raise BadInput(f"no input could be made up for {name}: give one, check_cell(cell, x).") from failed
    raise LawBroken(
        f"{name} breaks a law: it takes a step of x from its own first state. {type(failed).__name__}: {failed}"
    ) from failed


def _first_state_has_rows(trial: CellUnderTest) -> str | None:
    for rows in (1, 4):
        found = trial.layer.initial(rows)
        if found.batch != rows:
            return f"It was asked for {rows} rows and made {found.batch}: {found}."
    return None


def _state_keeps_its_form(trial: CellUnderTest) -> str | None:
    before = trial.layer.to_native(trial.layer.initial(len(trial.x)))
    _, native = trial.layer.call(trial.x[:, 0], before)
    here, there = flatten(before), flatten(native)
    if here[1] != there[1]:
        return f"It was given {here[1]!r} and returned {there[1]!r}."
    for name, part in here[0].items():
        after = there[0][name]
        if (part.shape, part.dtype, part.device) != (after.shape, after.dtype, after.device):
            return f"Part {name!r} was {_shown(part)} and is {_shown(after)} after a step."
    return None


def _output_has_rows(trial: CellUnderTest) -> str | None:
    trial.run(trial.x)  # raises if an output is wrong
    return None


def _state_is_not_written_into(trial: CellUnderTest) -> str | None:
    state, x = trial.layer.initial(len(trial.x)), trial.x[:, 0].clone()
    state = State({name: part.clone() for name, part in state.items()}, state.batch_axis)
    before = {name: part.clone() for name, part in _named(x, state).items()}
    trial.layer.call(x, trial.layer.to_native(state))
    for name, after in _named(x, state).items():
        if not torch.equal(before[name], after):
            return f"{name.replace('the output', 'the input').capitalize()} is another after the step."
    return None


def _nothing_is_kept(trial: CellUnderTest) -> str | None:
    if seen := difference(_named(*trial.run(trial.x)), _named(*trial.run(trial.x))):
        return (
            f"The same sequence from the same state, run twice: {seen} Often a state is kept in an attribute, or noise "
            f"is added in evaluation too."
        )
    return None


def _rows_are_apart(trial: CellUnderTest) -> str | None:
    out, state = trial.run(trial.x)
    for row in range(len(trial.x)):
        alone = trial.run(trial.x[row : row + 1])
        if seen := difference(_named(out[row : row + 1], state.select([row])), _named(*alone)):
            return f"Row {row} among {len(trial.x)} rows, and alone: {seen}"
    return None


def _cuts_change_nothing(trial: CellUnderTest) -> str | None:
    whole = trial.run(trial.x)
    for cut in range(1, trial.x.shape[1]):
        head, middle = trial.run(trial.x[:, :cut])
        trial.run(trial.x.flip(1))  # if the cell hides a state, this changes it
        tail, final = trial.run(trial.x[:, cut:], middle)
        if seen := difference(_named(*whole), _named(torch.cat([head, tail], dim=1), final)):
            return f"Cut after step {cut} of {trial.x.shape[1]}: {seen}"
    return None


def _padding_never_counts(trial: CellUnderTest) -> str | None:
    lengths = [1 + row % trial.x.shape[1] for row in range(len(trial.x))]
    padded = trial.x.clone()
    for row, length in enumerate(lengths):
        padded[row, length:] = float("nan") if padded.is_floating_point() else padded[row, 0]
    out, state = trial.run(padded, lengths=lengths)
    for row, length in enumerate(lengths):
        alone = trial.run(trial.x[row : row + 1, :length])
        if seen := difference(_named(out[row : row + 1, :length], state.select([row])), _named(*alone)):
            return f"Row {row}, of {length} steps: {seen}"
    return None


def _resets_start_anew(trial: CellUnderTest) -> str | None:
    at = trial.x.shape[1] // 2
    resets = torch.zeros(trial.x.shape[:2], dtype=torch.bool)
    resets[:, at] = True
    out, state = trial.run(trial.x, resets=resets)
    seen = difference(_named(out[:, at:], state), _named(*trial.run(trial.x[:, at:])))
    return None if seen is None else f"A reset before step {at}, and a sequence that begins there: {seen}"


def _named(out: Tensor, state: State) -> dict[str, Tensor]:
    return {"the output": out, **{f"part {name!r} of the state": part for name, part in state.items()}}


def _shown(part: Tensor) -> str:
    return f"{tuple(part.shape)} {part.dtype} on {part.device}"


LAWS: Laws[CellUnderTest] = {
    "its first state has as many rows as were asked for": _first_state_has_rows,
    "the state after a step has the form, shapes and dtypes of the one before": _state_keeps_its_form,
    "its output is a tensor (batch, ...)": _output_has_rows,
    "a step does not write into what it is given": _state_is_not_written_into,
    "what it gives depends on input and state alone": _nothing_is_kept,
    "a row does not depend on other rows": _rows_are_apart,
    "a sequence may be cut anywhere, with the state handed on and others run in between": _cuts_change_nothing,
    "padding never counts": _padding_never_counts,
    "a row that is reset is as one that begins": _resets_start_anew,
}
