"""Probe: which rows of the input each row of the output depends on."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...cells import Call, Layer
from ...state import tensors
from ..outcome import Makers, Operation, Outcome, change, eps
from ..patient import Patient, PatientProbe
from .calls import FewerRows, OutputLayout, OutputTensor, PlainCall, attempt, by_rows
from .states import RecordedStates, recorded


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


class RowTrials(tuple[tuple[Tensor, Outcome], ...], PatientProbe):
    """Calls with half of the rows replaced: which rows (batch,), and what came of it."""

    @classmethod
    def measure(cls, patient: Patient) -> RowTrials:
        """Replace rows of the input by halves."""
        inputs = patient.inputs
        if not inputs.batched or inputs.batch < 2:
            return cls()
        masks = enumerate(patterns(inputs.batch))
        return cls((mask, patient.run(inputs.other_rows(mask, seed=k), collect=True)) for k, mask in masks)


class RowInfluences(tuple[Influence, ...], PatientProbe):
    """For each output that has rows, how much they follow rows of the input that are not theirs."""

    @classmethod
    def measure(cls, patient: Patient) -> RowInfluences:
        """See which rows of each output change where rows of the input do."""
        leaves = [leaf for leaf in patient[OutputLayout].leaves if leaf.rows is not None]
        if not leaves or not patient[RowTrials]:
            return cls()
        return cls(_best_order(leaf, patient[PlainCall], list(patient[RowTrials]), patient) for leaf in leaves)


@dataclass(frozen=True, slots=True)
class StateInfluence:
    """How much the states of a layer follow rows of the input that are not theirs."""

    layer: str
    share: float  # the largest foreign change, relative to the largest change of all
    row: int
    others: int  # how many rows changed without having been touched


class StateInfluences(tuple[StateInfluence, ...], PatientProbe):
    """Layers whose states mix rows, also where nothing of it is left in the output."""

    @classmethod
    def measure(cls, patient: Patient) -> StateInfluences:
        """See which rows of each layer's states change where rows of the input do."""
        fewer, batch = patient[FewerRows].outcome, patient.inputs.batch
        if not patient[RowTrials] or fewer is None:
            return cls()
        found = []
        for layer in patient.layers:
            old, less = patient[PlainCall].calls.of(layer), fewer.calls.of(layer)
            # Rows of the layer are rows of the input: there is one less of them where the input has one less.
            if not old or len(less) != len(old) or old[0].rows != batch or less[0].rows != batch - 1:
                continue
            # Each of several sequences may be sorted by its own lengths.
            apart = layer.fused and all(call.steps > 1 for call in old)
            for piece in [slice(k, k + 1) for k in range(len(old))] if apart else [slice(None)]:
                trials = [(mask, _states(run.calls.of(layer)[piece])) for mask, run in patient[RowTrials]]
                found.append(_state_influence(layer.label, _states(old[piece]), trials, patient))
        if not patient.layers and patient.seen:
            found += _in_loops(patient)
        return cls(each for each in found if each is not None)


def _states(calls: list[Call]) -> Tensor:
    """Return what a layer starts from, and gives at each step: (batch, numbers)."""
    parts = [] if not calls or calls[0].given is None else list(calls[0].given.items())
    given = calls[0].given if calls else None
    first = [] if given is None else [part.detach().movedim(given.batch_axis[name], 0) for name, part in parts]
    pieces = [*first, *(call.output.detach() for call in calls)]
    flat = [piece.flatten(1).double() for piece in pieces if len(piece) == len(pieces[-1])]
    return torch.cat(flat, dim=1) if flat else torch.zeros(0, 0)


def _in_loops(patient: Patient) -> list[StateInfluence | None]:
    """Look at loops that are written out in forward, which are known by what they do."""
    plain, batch = patient[RecordedStates], patient.inputs.batch
    tracks = {name: track.h for name, track in plain.items() if len(track.h) == batch}
    if not tracks:
        return []
    half = torch.arange(batch) < (batch + 1) // 2
    trials = [
        (mask, recorded(patient, patient.inputs.other_rows(mask, seed=k), gates=False))
        for k, mask in enumerate((half, ~half))
    ]
    return [
        _state_influence(
            name,
            h.flatten(1).double(),
            [(mask, t[name].h.flatten(1).double()) for mask, t in trials if name in t],
            patient,
        )
        for name, h in tracks.items()
    ]


def _state_influence(
    name: str, old: Tensor, trials: list[tuple[Tensor, Tensor]], patient: Patient
) -> StateInfluence | None:
    fits = [(mask, change(old, new).max(1).values) for mask, new in trials if new.shape == old.shape]
    if not fits or not old.numel():
        return None
    touched, changed = (torch.stack(each) for each in zip(*fits, strict=True))  # (patterns, batch)
    largest = float(changed.max())
    limit = max(1e-5 * float(old.abs().nan_to_num(posinf=0.0).max()), patient.thresholds.leak * largest)
    foreign = changed.masked_fill(touched, 0).max(0).values
    if not largest > 0 or not float(foreign.max()) > limit:
        return None
    sources = _sources(changed > limit, touched)
    if sources is not None and sorted(sources) == list(range(len(sources))):
        return None  # rows in another order, as packing by length makes them
    return StateInfluence(name, float(foreign.max()) / largest, int(foreign.argmax()), int((foreign > limit).sum()))


@dataclass(frozen=True, slots=True)
class ForeignMarks(PatientProbe):
    """An argument with one mark for each row, such as whether its episode is over, that acts on other rows."""

    name: str = ""  # "" where there is none
    row: int = 0  # of the output, that changed
    share: float = 0.0  # of the output's size
    whole: bool = False  # it holds whole numbers

    @classmethod
    def measure(cls, patient: Patient) -> ForeignMarks:
        """Mark all rows but one as that one is marked, and see whether it changes."""
        inputs = patient.inputs
        marks = [a for a in inputs.arguments if a.rows is not None and a.kind in ("mask", "other")]
        marks = [a for a in marks if isinstance(inputs.get(a.path), Tensor)]
        if not inputs.batched or inputs.batch < 3 or not marks:
            return cls()
        for argument in marks:
            values = inputs.get(argument.path)
            rows = values.movedim(argument.rows or 0, 0)
            for row in range(min(inputs.batch, _KEPT)):
                # All rows but one are marked as that one is: as an index, marks of any two kinds would pick the same.
                alike = rows[row : row + 1].expand_as(rows).movedim(0, argument.rows or 0)
                found = attempt(patient, inputs.put(argument.path, alike.contiguous()))
                hit = None if found is None else _foreign(patient, found, torch.arange(inputs.batch) != row)
                if hit is not None:
                    whole = not values.is_floating_point() and values.dtype != torch.bool
                    return cls(inputs.name(argument.path) or "an argument", *hit, whole)
        return cls()


_KEPT = 4  # rows that are tried one by one


def _foreign(patient: Patient, run: Outcome, mask: Tensor) -> tuple[int, float] | None:
    """Return an output row that was not touched and changed, and by how much of the output's size."""
    for leaf in patient[OutputLayout].leaves:
        old, new = patient[PlainCall].outputs[leaf.path], run.outputs.get(leaf.path)
        if leaf.rows is None or leaf.merged or new is None or new.shape != old.shape:
            continue
        gaps = (
            change(*(by_rows(t, leaf, patient.inputs.batch) for t in (old, new))).reshape(len(mask), -1).max(1).values
        )
        size = float(old.detach().abs().nan_to_num(posinf=0.0, neginf=0.0).max()) or 1.0
        gaps = gaps.masked_fill(mask, 0) / size
        if float(gaps.max()) > patient.thresholds.leak:
            return int(gaps.argmax()), float(gaps.max())
    return None


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
    shape: tuple[int, ...] = ()  # of what it was applied to

    @property
    def where(self) -> str:
        """The line, or where that is unknown what stands in its place."""
        return self.line or self.name or "the model"

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
                    a = _joined_before(a, b, plain.trace.makers(), mask)
                    shape = tuple(a.inputs[0].shape) if a.inputs else ()
                    return cls(a.name, a.line, any(id(tensor) in states for tensor in a.inputs), shape)
        return cls()


def _floats(found: list[Tensor]) -> list[Tensor]:
    return [t.detach() for t in found if t.is_floating_point()]


_RESHAPES = ("view", "reshape", "flatten", "unflatten", "view_as")


def _joined_before(found: Operation, other: Operation, made: Makers, mask: Tensor) -> Operation:
    """Return the operation that did it, where the first whose result shows it was only handed what had been done.

    A statistic of everything is one number, in which no rows can be told; and a view that joins rows with something
    else leaves them apart until the next operation takes them for features.
    """
    for old, new in zip(found.inputs, other.inputs, strict=False):
        maker = made.get(id(old))
        if maker is None or old.shape != new.shape or not maker.inputs or not old.is_floating_point():
            continue
        if old.numel() < len(mask) and maker.inputs[0].numel() >= len(mask) and not bool((old == new).all()):
            return maker
        before = maker.inputs[0]
        if maker.name in _RESHAPES and len(mask) in before.shape and not _on_an_axis(old, new, mask):
            return maker
    return found


def _on_an_axis(old: Tensor, new: Tensor, mask: Tensor) -> bool:
    """Whether some axis has one entry for each row, or holds one block of entries for each, as rows and steps do."""
    changed, first = (old != new).cpu(), 0
    for axis, size in enumerate(changed.shape):
        flat = changed.movedim(axis, 0).reshape(size, -1).any(1)
        folded = axis == first and size % len(mask) == 0
        for rows in (flat.reshape(len(mask), -1).any(1), flat.reshape(-1, len(mask)).any(0)) if folded else ():
            if not bool(rows[~mask].any()):
                return True
        if size == len(mask) and not bool(flat[~mask].any()):
            return True
    return False


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
