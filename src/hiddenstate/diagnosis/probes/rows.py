"""Which rows of the input each row of the output follows."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...state import tensors
from ..patient import Patient, Run, probe
from .shapes import Leaf, base, by_rows, eps, layout


@dataclass(frozen=True, slots=True)
class Influence:
    """How much the rows of one output follow rows of the input that are not theirs."""

    leaf: Leaf
    share: float  # the largest foreign change, relative to the largest change of all
    limit: float
    row: int  # the output row that changed
    others: int  # how many output rows changed without having been touched
    sources: tuple[int, ...] | None  # the one input row that each output row follows, where there is just one

    @property
    def leaks(self) -> bool:
        """Whether some row follows a row that is not its own."""
        return self.share > self.limit


def patterns(batch: int) -> Tensor:
    """Return masks of rows (patterns, batch) such that any two rows are told apart by some of them."""
    bits = max(1, (batch - 1).bit_length())
    codes = (torch.arange(batch).unsqueeze(0) >> torch.arange(bits).unsqueeze(1)) & 1
    return torch.cat([codes.bool(), ~codes.bool()])


@probe
def influences(patient: Patient) -> list[Influence]:
    """Replace rows of the input by halves, and see which rows of each output change."""
    inputs = patient.inputs
    leaves = [leaf for leaf in layout(patient).leaves if leaf.rows is not None]
    if not inputs.batched or inputs.batch < 2 or not leaves:
        return []
    before = base(patient)
    masks = patterns(inputs.batch)
    runs = [(mask, patient.run(inputs.other_rows(mask, seed=k))) for k, mask in enumerate(masks)]
    return [_best_order(leaf, before, runs, patient) for leaf in leaves]


def _best_order(leaf: Leaf, before: Run, runs: list[tuple[Tensor, Run]], patient: Patient) -> Influence:
    """Where rows and steps share one axis, take the order in which rows keep apart, if there is one."""
    orders = [leaf] if not leaf.merged else [replace(leaf, merged=order) for order in ("rows", "time")]
    return min((_influence(order, before, runs, patient) for order in orders), key=lambda found: found.share)


def _influence(leaf: Leaf, before: Run, runs: list[tuple[Tensor, Run]], patient: Patient) -> Influence:
    batch = patient.inputs.batch
    old = by_rows(before.outputs[leaf.path], leaf, batch)
    changes, masks = [], []
    for mask, run in runs:
        new = run.outputs.get(leaf.path)
        if new is None or new.shape != before.outputs[leaf.path].shape:
            continue
        changes.append(_change(old, by_rows(new, leaf, batch)))
        masks.append(mask)
    if not changes:
        return Influence(leaf, 0.0, 1.0, 0, 0, None)
    change, touched = torch.stack(changes), torch.stack(masks)  # (patterns, batch)
    largest = float(change.max())
    noise = 256 * eps(old) * float(old[old.isfinite()].abs().max()) if bool(old.isfinite().any()) else 0.0
    limit = max(noise, patient.thresholds.leak * largest)
    foreign = change.masked_fill(touched, 0)
    share = float(foreign.max()) / largest if largest > 0 else 0.0
    row = int(foreign.max(0).values.argmax())
    others = int((foreign.max(0).values > limit).sum())
    return Influence(
        leaf, share, limit / largest if largest > 0 else 1.0, row, others, _sources(change > limit, touched)
    )


def _change(old: Tensor, new: Tensor) -> Tensor:
    gap = (new.double() - old.double()).abs().cpu()
    gap = torch.where(((old == new) | ((old != old) & (new != new))).cpu(), torch.zeros_like(gap), gap)
    return gap.nan_to_num(nan=float("inf")).reshape(len(gap), -1).max(1).values.clamp(max=1e300)


def _sources(responds: Tensor, touched: Tensor) -> tuple[int, ...] | None:
    """Return the input row that each output row follows, where every output row follows exactly one."""
    found = []
    for row in range(responds.shape[1]):
        fits = (touched == responds[:, row : row + 1]).all(0).nonzero()[:, 0].tolist()
        if len(fits) != 1:
            return None
        found.append(fits[0])
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Mixing:
    """Where rows meet."""

    name: str = ""  # of the operation, "" where none was found
    line: str = ""
    of_state: bool = False  # it was applied to the final state of a layer


@probe
def mixing(patient: Patient) -> Mixing:
    """Find the first operation after which rows are no longer apart."""
    inputs = patient.inputs
    rows = torch.arange(inputs.batch) < (inputs.batch + 1) // 2
    for mask in (rows, ~rows):
        plain = patient.run(trace=True, collect=True)
        states = {id(part) for call in plain.calls for part in tensors(call.state_native).values()}
        old = plain.trace.events
        new = patient.run(inputs.other_rows(mask, seed=1), trace=True).trace.events
        for a, b in zip(old, new, strict=False):
            outs = zip(_floats(a.output), _floats(b.output), strict=False)
            if a.name != b.name:
                break
            if any(x.shape == y.shape and _mixed(x, y, mask) for x, y in outs):
                return Mixing(a.name, a.line, any(id(tensor) in states for tensor in a.inputs))
    return Mixing()


def _floats(output: object) -> list[Tensor]:
    items = output if isinstance(output, tuple | list) else [output]
    return [t.detach() for t in items if isinstance(t, Tensor) and t.is_floating_point()]


def _mixed(old: Tensor, new: Tensor, mask: Tensor) -> bool:
    batch = len(mask)
    changed = (old != new).cpu()
    if old.numel() < batch or not bool(changed.any()):
        return False
    untouched = ~mask
    for axis, size in enumerate(changed.shape):
        if size % batch:
            continue
        flat = changed.movedim(axis, 0).reshape(size, -1).any(1)
        if not bool(flat.reshape(batch, -1).any(1)[untouched].any()):
            return False
        if not bool(flat.reshape(-1, batch).any(0)[untouched].any()):
            return False
    return True
