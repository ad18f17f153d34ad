"""Which rows of the input each row of the output follows."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...cells import Layer
from ...state import tensors
from ..difference import change, eps
from ..outcome import Outcome
from ..patient import Patient, PatientProbe
from .calls import FewerRows, PlainCall
from .layout import OutputLayout, OutputTensor, by_rows


@dataclass(frozen=True, slots=True)
class Influence:
    """How much the rows of one output follow rows of the input that are not theirs."""

    leaf: OutputTensor
    share: float  # the largest foreign change, relative to the largest change of all
    limit: float
    row: int  # the output row that changed
    others: int  # how many output rows changed without having been touched
    sources: tuple[int, ...] | None  # the one input row that each output row follows, where there is just one

    @property
    def leaks(self) -> bool:
        """Whether some row follows a row that is not its own."""
        return self.share > self.limit

    @property
    def permuted(self) -> bool:
        """Whether every row is whole, though in another place."""
        found = self.sources
        return found is not None and sorted(found) == list(range(len(found))) and list(found) != sorted(found)


def patterns(batch: int) -> Tensor:
    """Return masks of rows (patterns, batch) such that any two rows are told apart by some of them."""
    bits = max(1, (batch - 1).bit_length())
    codes = (torch.arange(batch).unsqueeze(0) >> torch.arange(bits).unsqueeze(1)) & 1
    return torch.cat([codes.bool(), ~codes.bool()])


class RowInfluences(tuple[Influence, ...], PatientProbe):
    """For each output that has rows, how much they follow rows of the input that are not theirs."""

    @classmethod
    def measure(cls, patient: Patient) -> RowInfluences:
        """Replace rows of the input by halves, and see which rows of each output change."""
        inputs = patient.inputs
        leaves = [leaf for leaf in patient[OutputLayout].leaves if leaf.rows is not None]
        if not inputs.batched or inputs.batch < 2 or not leaves:
            return cls()
        before = patient[PlainCall]
        masks = patterns(inputs.batch)
        runs = [(mask, patient.run(inputs.other_rows(mask, seed=k))) for k, mask in enumerate(masks)]
        return cls(_best_order(leaf, before, runs, patient) for leaf in leaves)


def _best_order(leaf: OutputTensor, before: Outcome, runs: list[tuple[Tensor, Outcome]], patient: Patient) -> Influence:
    """Where rows and steps share one axis, take the order in which rows keep apart, if there is one."""
    orders = [leaf] if not leaf.merged else [replace(leaf, merged=order) for order in ("rows", "time")]
    return min((_influence(order, before, runs, patient) for order in orders), key=lambda found: found.share)


def _influence(leaf: OutputTensor, before: Outcome, runs: list[tuple[Tensor, Outcome]], patient: Patient) -> Influence:
    batch = patient.inputs.batch
    old = by_rows(before.outputs[leaf.path], leaf, batch)
    changes, masks = [], []
    for mask, run in runs:
        new = run.outputs.get(leaf.path)
        if new is None or new.shape != before.outputs[leaf.path].shape:
            continue
        moved = change(old, by_rows(new, leaf, batch)).reshape(batch, -1)
        changes.append(moved.max(1).values.clamp(max=1e300))
        masks.append(mask)
    if not changes:
        return Influence(leaf, 0.0, 1.0, 0, 0, None)
    changed, touched = torch.stack(changes), torch.stack(masks)  # (patterns, batch)
    largest = float(changed.max())
    noise = 256 * eps(old) * float(old[old.isfinite()].abs().max()) if bool(old.isfinite().any()) else 0.0
    limit = max(noise, patient.thresholds.leak * largest)
    foreign = changed.masked_fill(touched, 0)
    share = float(foreign.max()) / largest if largest > 0 else 0.0
    row = int(foreign.max(0).values.argmax())
    others = int((foreign.max(0).values > limit).sum())
    return Influence(
        leaf, share, limit / largest if largest > 0 else 1.0, row, others, _sources(changed > limit, touched)
    )


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
class RowMixing(PatientProbe):
    """The first operation after which rows are no longer apart."""

    name: str = ""  # of the operation, "" where none was found
    line: str = ""
    of_state: bool = False  # it was applied to the final state of a layer

    @property
    def reshapes(self) -> bool:
        """Whether rows were joined with steps by another shape."""
        return self.name in ("view", "reshape", "flatten", "unflatten", "view_as")

    @property
    def softmax(self) -> bool:
        """Whether it is a softmax over the rows."""
        return self.name in ("softmax", "log_softmax")

    @property
    def where(self) -> str:
        """The line, or where that is unknown what stands in its place."""
        return self.line or (self.name if self.reshapes or self.softmax else "the model")

    @classmethod
    def measure(cls, patient: Patient) -> RowMixing:
        """Replace half of the rows, and compare all operations with those of the plain call."""
        inputs = patient.inputs
        rows = torch.arange(inputs.batch) < (inputs.batch + 1) // 2
        for mask in (rows, ~rows):
            plain = patient.run(trace=True, collect=True)
            states = {id(part) for call in plain.calls for part in tensors(call.state_native).values()}
            replaced = patient.run(inputs.other_rows(mask, seed=1), trace=True)
            for a, b in zip(plain.trace, replaced.trace, strict=False):
                if a.name != b.name:
                    break
                outs = zip(_floats(a.outputs), _floats(b.outputs), strict=False)
                if any(x.shape == y.shape and _mixed(x, y, mask) for x, y in outs):
                    return cls(a.name, a.line, any(id(tensor) in states for tensor in a.inputs))
        return cls()


def _floats(found: list[Tensor]) -> list[Tensor]:
    return [t.detach() for t in found if t.is_floating_point()]


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


@dataclass(frozen=True, slots=True, eq=False)
class MisreadLayer(PatientProbe):
    """The first layer that takes the rows of the input for steps."""

    layer: Layer | None  # None where no layer does

    @classmethod
    def measure(cls, patient: Patient) -> MisreadLayer:
        """See which layer makes a step less, and as many rows as before, when a row is left out."""
        calls, fewer = patient[PlainCall].calls, patient[FewerRows].outcome
        for layer in dict.fromkeys(call.layer for call in calls if call.layer.fused):
            before, after = calls.of(layer)[0], fewer.calls.of(layer)[:1] if fewer is not None else []
            if after and after[0].steps == before.steps - 1 and after[0].rows == before.rows:
                return cls(layer)
        return cls(None)


@dataclass(frozen=True, slots=True)
class RowlessOutput(PatientProbe):
    """An output that has no axis for the rows of the batch."""

    evidence: str  # what shows it, "" where all is well

    @classmethod
    def measure(cls, patient: Patient) -> RowlessOutput:
        """Look for an axis that has one entry for each row."""
        layout, inputs = patient[OutputLayout], patient.inputs
        if not inputs.batched or inputs.batch < 2 or not layout.leaves:
            return cls("")
        plain, fewer = patient[PlainCall], patient[FewerRows].outcome
        if fewer is None or any(leaf.rows is not None or leaf.pairs for leaf in layout.leaves):
            return cls("")
        shared = [path for path in plain.outputs if path in fewer.outputs]
        if any(fewer.outputs[path].shape != plain.outputs[path].shape for path in shared):
            return cls("")  # it grows with the batch in some way of its own
        if _one_sequence(patient):
            return cls("")
        return cls(
            f"the output has shape {layout.leaves[0].shape} with {inputs.batch} rows of input and the same with "
            f"{inputs.batch - 1}: no axis of it has one entry for each row (needed: 1)."
        )


def _one_sequence(patient: Patient) -> bool:
    """Whether a two-axis input reached every layer as one sequence without a batch."""
    calls = patient[PlainCall].calls
    return bool(calls) and all(call.rows == 1 for call in calls) and patient.inputs.get(patient.inputs.main).dim() < 3
