"""Laws over the suite of models: what is found, recorded, carried and diagnosed is right, or refused by name.

Each law holds for every case of `tests/support/zoo`, whose own equations are the judge. What the library does not keep
yet stands in `KNOWN`, one line for each case and law, as a strict xfail: a repair shows as a failure of that line.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hiddenstate as hs
from hiddenstate.cells import Layer, Layers
from hiddenstate.errors import CarryWarning, HiddenStateWarning, NotRecurrent, RecordingWarning

from .support import zoo
from .support.untouched import portrait, untouched
from .support.zoo import CASES, Case, Expected
from .test_zoo import CUT, joined, leaves

ZOO = Path(zoo.__file__).parent
LAYERS = {"layer", "lstm", "gru", "rnn", "recurrent"}
CELLS = {"cell", "lstm_cell", "gru_cell", "rnn_cell"}
INNER = {"loop", "iteration", "attribute", "cache"}  # not a module of its own: it stands in the forward of its holder

KNOWN: dict[tuple[str, str], str] = {}


def law(name: str, cases: Sequence[str] = tuple(CASES)) -> pytest.MarkDecorator:
    """Try a law on each case; those in KNOWN have to fail."""

    def param(case: str) -> Any:
        reason = KNOWN.get((name, case))
        marks = [pytest.mark.xfail(strict=True, reason=reason)] if reason else []
        return pytest.param(CASES[case], id=case, marks=marks)

    return pytest.mark.parametrize("case", [param(case) for case in cases])


RECURRENT = [name for name, case in CASES.items() if not case.is_decoy]
DECOYS = [name for name, case in CASES.items() if case.is_decoy]


@cache
def looked_at(name: str) -> Layers:
    """What `hs.layers` says of a case; kept, since several laws ask."""
    case = CASES[name]
    args, kwargs = case.inputs()
    with seeded():
        return hs.layers(case.model(), *args, **kwargs)


@contextmanager
def seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        yield


def far(one: Any, other: Any) -> float:
    """How far apart two outputs are, NaN and infinity included; infinitely, where their shapes differ."""
    ours, theirs = leaves(one), leaves(other)
    if [leaf.shape for leaf in ours] != [leaf.shape for leaf in theirs]:
        return float("inf")
    pairs = [(a.detach(), b.detach()) for a, b in zip(ours, theirs, strict=True) if not torch.equal(a, b)]
    distances = [float((a.cdouble() - b.cdouble()).abs().max()) for a, b in pairs]
    return max((float("inf") if each != each else each for each in distances), default=0.0)


# -- what is found ----------------------------------------------------------------------------------------------------


def within(path: str, outer: str) -> bool:
    return not outer or path == outer or path.startswith(f"{outer}.")


def place_of(layer: Layer) -> str:
    return layer.seen.module if layer.seen is not None else layer.name


def is_right(layer: Layer, answer: Expected) -> bool:
    """Whether a find is what the answer says, where it says: the step itself, a cell in it, or the loop around it."""
    place, path = place_of(layer), answer.module_path
    here = within(place, path) or (layer.kind in INNER and within(path, place))
    words = next((kinds for kinds in (LAYERS, CELLS) if layer.kind in kinds), {layer.kind})
    allowed = answer.kind | ({"iteration"} if "none" in answer.kind else set())  # listed, and never carried
    return here and bool(words & allowed)


def is_refused(found: Layers, answer: Expected) -> bool:
    assert found.seen is not None
    doubted = [each.module for each in found.seen.unsure]
    return any(within(place, answer.module_path) or within(answer.module_path, place) for place in doubted)


@law("found")
def test_each_recurrence_is_found_as_what_it_is_or_refused_by_name(case):
    found = looked_at(case.name)
    for answer in case.expect:
        there = any(is_right(layer, answer) for layer in found)
        assert there or "none" in answer.kind or is_refused(found, answer), found.explain()
    for layer in found:
        right = layer.kind == "iteration" if case.is_decoy else any(is_right(layer, one) for one in case.expect)
        assert right, f"{layer.kind} at {place_of(layer) or 'the model'}:\n{found.explain()}"


@law("explained")
def test_an_explanation_names_the_users_own_line_of_all_that_was_found(case):
    found = looked_at(case.name)
    text = found.explain()
    for layer in found:
        if layer.seen is None:
            assert f"{layer.label}: {layer.kind}" in text
            continue
        name, _, number = layer.seen.line.partition(":")
        assert layer.seen.line in text
        assert (ZOO / name).exists(), f"{layer.seen.line} is no line of the user's"
        assert 0 < int(number) <= len((ZOO / name).read_text(encoding="utf-8").splitlines())


@law("named", RECURRENT)
def test_parts_are_called_as_the_code_calls_them(case):
    """By variable, key or attribute. A cell may also name its argument, torch's own layers have names of their own."""
    names = {part for answer in case.expect for part in answer.batch_axis} | set(CALLED.get(case.name, ()))
    for layer in looked_at(case.name):
        if layer.kind in INNER and not (layer.kind == "iteration" and any("none" in one.kind for one in case.expect)):
            assert set(layer.spec.parts) <= names, layer.spec.parts


# Where the code has another name for a part than the equations do, or none but a place in a container.
CALLED: dict[str, tuple[str, ...]] = {}


@law("excluded")
def test_what_is_excluded_is_left_out_and_all_else_stays(case):
    args, kwargs = case.inputs()
    found = looked_at(case.name)
    for layer in found:
        for way in {layer.name, layer.seen.line} if layer.seen is not None else {layer.name}:
            with seeded():
                left = [each.name for each in hs.layers(case.model(), *args, exclude=[way], **kwargs)]
            assert layer.name not in left, f"exclude={way!r}"
            assert {each.name for each in found if not is_of(each, way)} <= {*left, ""}, f"exclude={way!r}"


def is_of(layer: Layer, way: str) -> bool:
    return within(layer.name, way) or (layer.seen is not None and layer.seen.line == way)


@law("unharmed by looking")
def test_looking_leaves_everything_as_it_was(case):
    (args, kwargs), model = case.inputs(), case.model()
    kept = kept_by(model)
    with untouched(model):
        hs.layers(model, *args, **kwargs)
    assert far((args, kwargs), case.inputs()) == 0
    assert far(kept_by(model), kept) == 0
    assert far(case.run(model, args, kwargs), case.run(case.model(), *case.inputs())) == 0


def kept_by(model: nn.Module) -> list[Any]:
    """All tensors in the attributes of all modules, whatever they are kept in."""
    found: list[Any] = []
    for module in model.modules():
        for name, value in sorted(vars(module).items()):
            if not name.startswith("_") or name == "_states":
                found += [leaf.detach().clone() for leaf in leaves(value)]
    return found


# -- what is recorded -------------------------------------------------------------------------------------------------


@dataclass
class Seen:
    """A run of a case under `hs.record`, or without it."""

    output: Any = None
    refusal: str = ""
    warned: list[str] = field(default_factory=list)
    values: dict[tuple[str, int, str], Tensor] = field(default_factory=dict)  # track, run, part
    lengths: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    initial: dict[tuple[str, int, str], Tensor] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    after: dict[str, Any] = field(default_factory=dict)


@cache
def ran(name: str, *, recorded: bool) -> Seen:
    """Run a case forward and backward, and look at all that it left behind."""
    case = CASES[name]
    (args, kwargs), model, seen = case.inputs(), case.model(), Seen()
    with seeded(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", HiddenStateWarning)
        try:
            if recorded:
                with hs.record(model) as rec:
                    seen.output = trained(model, args, kwargs)
                read(rec, seen)
            else:
                seen.output = trained(model, args, kwargs)
        except NotRecurrent as refusal:
            seen.refusal = str(refusal)
        seen.after = portrait(model) | {"kept": kept_by(model)}
    seen.warned = [str(each.message) for each in caught if issubclass(each.category, RecordingWarning)]
    return seen


def trained(model: nn.Module, args: tuple, kwargs: dict) -> Any:
    output = model(*args, **kwargs)
    if losses := [leaf.abs().square().mean() for leaf in leaves(output) if leaf.requires_grad]:
        torch.stack(losses).sum().backward()
    return output


def read(rec: hs.Recording, seen: Seen) -> None:
    for track in rec:
        for number, run in enumerate(rec.runs(track)):
            seen.kinds[track], seen.lengths[track, number] = run.kind, run.lengths
            seen.values |= {(track, number, part): value for part, value in run.states.items()}
            seen.initial |= {(track, number, part): value for part, value in (run.initial or {}).items()}


@dataclass(frozen=True)
class Truth:
    """One part of an answer, or what a cell returned in its place, as recordings show it."""

    answer: int
    part: str
    steps: Tensor  # (batch, time, unit)
    start: Tensor | None  # (batch, unit)
    shared: bool


def truths(case: Case) -> list[Truth]:
    args, kwargs = case.inputs()
    found = []
    for number, answer in enumerate(case.answers(case.model(), args, kwargs)):
        for part, values in (*answer.parts.items(), *answer.returned.items()):
            if len({value.shape for value in values}) > 1:
                continue  # it grows, or has fewer and fewer rows: there is no trajectory of it
            axis, start = answer.batch_axis[part], answer.initial[part]
            steps = torch.stack([by_rows(value, axis) for value in values], 1).detach()
            first = None if start is None else by_rows(start, axis).detach()
            found.append(Truth(number, part, steps, first, axis is None))
    return found


def by_rows(value: Tensor, axis: int | None) -> Tensor:
    value = value.unsqueeze(0) if axis is None else value.movedim(axis, 0)
    return value.reshape(value.shape[0], -1)


def is_near(value: Tensor, truth: Tensor, tolerance: float) -> bool:
    if value.shape != truth.shape or value.dtype.is_complex != truth.dtype.is_complex:
        return False
    apart = (value.cdouble() - truth.cdouble()).abs()
    return bool((apart <= tolerance * (1 + truth.cdouble().abs())).all())


def tells(case: Case, value: Tensor, lengths: Tensor, truth: Truth) -> bool:
    """Whether a recorded part is the true one at all steps that each row has, and rests in truth after them."""
    tolerance = max(case.tolerance, 1e-5)
    steps = truth.steps.expand(len(value), -1, -1) if truth.shared else truth.steps
    if value.shape[1] == steps.shape[1] + 1 and truth.start is not None:
        # One call more, to make the start.
        steps = torch.cat([truth.start.unsqueeze(1), steps], 1)
    if value.shape != steps.shape:
        return False
    for row, length in enumerate(lengths.tolist()):
        if not length or not is_near(value[row, :length], steps[row, :length], tolerance):
            return False
        rest = steps[row, length:]
        if not is_near(rest, steps[row, length - 1].expand(rest.shape), tolerance):
            return False
    return True


def is_last(case: Case, value: Tensor, truth: Truth) -> bool:
    """Whether a recorded part is what a call left behind in an attribute."""
    return value.shape[1] == 1 and is_near(value[:, 0], truth.steps[:, -1], max(case.tolerance, 1e-5))


@law("recorded")
def test_what_is_recorded_is_what_the_equations_say_and_what_is_not_is_said_by_name(case):
    seen, true = ran(case.name, recorded=True), truths(case)
    told = set()
    for key, value in seen.values.items():
        kind, lengths = seen.kinds[key[0]], seen.lengths[key[:2]]
        right = {(each.answer, each.part) for each in true if tells(case, value, lengths, each)}
        left = kind == "attribute" and any(is_last(case, value, each) for each in true)
        free = kind == "iteration" and (case.is_decoy or any("none" in one.kind for one in case.expect))
        assert right or left or free, f"{key} is recorded, but the equations know nothing like it"
        told |= right
    for number, answer in enumerate(case.expect):
        missing = [part for part in answer.batch_axis if part not in answer.derived and (number, part) not in told]
        said = [text for text in seen.warned if names(text, answer)]
        assert not missing or said or seen.refusal or "none" in answer.kind, f"{missing} is missing without a word"


def names(text: str, answer: Expected) -> bool:
    """Whether a warning names a recurrence: its module, or a part of it; the model itself by a line of its code."""
    own = re.findall(r"(\w+\.py):\d+", text)
    where = answer.module_path in text if answer.module_path else "the model" in text
    return where or any((ZOO / name).exists() for name in own) or any(part in text.split() for part in answer.batch_axis)


@law("started")
def test_the_start_that_is_recorded_is_the_true_one(case):
    seen, true = ran(case.name, recorded=True), truths(case)
    for key, value in seen.initial.items():
        starts = [each.start for each in true if each.start is not None]
        free = seen.kinds[key[0]] == "iteration" and any("none" in one.kind for one in case.expect)
        before = seen.kinds[key[0]] == "attribute"  # what an earlier call left
        assert free or before or any(is_near(value, one.expand(value.shape), 1e-5) for one in starts if fits(one, value))


def fits(start: Tensor, value: Tensor) -> bool:
    return start.shape == value.shape or (len(start) == 1 and start.shape[1] == value.shape[1])


@law("unharmed by recording")
def test_recording_changes_nothing(case):
    """Outputs, gradients of all weights, the random stream, buffers, attributes, modes and hooks."""
    plain, seen = ran(case.name, recorded=False), ran(case.name, recorded=True)
    if seen.refusal:
        # Refused before the call: the model is as it was made.
        with seeded():
            plain = Seen(after=portrait(model := case.model()) | {"kept": kept_by(model)})
    assert far(seen.output, plain.output) == 0
    for aspect, value in plain.after.items():
        if aspect == "identity":
            continue
        other = seen.after[aspect]
        if aspect in ("weights", "grads", "buffers", "kept", "random stream"):
            assert far(other, value) == 0, aspect
            assert aspect in ("kept", "random stream") or other.keys() == value.keys(), aspect
        elif aspect == "hooks":
            assert {k: tuple(map(len, v)) for k, v in other.items()} == {k: tuple(map(len, v)) for k, v in value.items()}
        else:
            assert other == value, aspect


# -- what is carried --------------------------------------------------------------------------------------------------


def through_an_argument(case: Case) -> bool:
    """Whether all state goes through an argument of a module that is None, or left out, at first."""
    return case.name in HANDED_OVER


HANDED_OVER: tuple[str, ...] = ()


@law("carried")
@torch.no_grad()
def test_pieces_are_the_whole_or_as_without_a_carry_and_said_by_name(case):
    args, kwargs = case.inputs()
    calls = [(args, kwargs)] if case.carriable is None else list(case.pieces(args, kwargs, CUT))

    def run(model: nn.Module, calls: Sequence[tuple[tuple, dict]]) -> list[Any]:
        with seeded():
            return [model(*given, **named) for given, named in calls]

    def put_together(outputs: list[Any]) -> Any:
        return outputs[0] if len(outputs) == 1 else joined(case.join, *outputs)

    whole, plain, model = run(case.model(), [(args, kwargs)]), run(case.model(), calls), case.model()
    refusal, carried = "", None
    with warnings.catch_warnings(record=True) as caught, untouched_but_for_calls(model):
        warnings.simplefilter("always", HiddenStateWarning)
        try:
            with hs.Carry(model):
                carried = run(model, calls)
        except NotRecurrent as error:
            refusal = str(error)
    warned = [str(each.message) for each in caught if issubclass(each.category, CarryWarning)]
    if refusal:
        assert not through_an_argument(case)
        return
    is_whole = far(put_together(carried), put_together(whole)) <= 2 * case.tolerance
    as_without = all(far(ours, theirs) == 0 for ours, theirs in zip(carried, plain, strict=True))
    assert far(carried[0], plain[0]) == 0, "the first piece has nothing to go on from"
    assert is_whole or as_without, "neither the whole, nor what the model does by itself"
    if through_an_argument(case):
        assert is_whole
    if not is_whole:
        assert warned, "pieces are not the whole, and nothing was said"
        parts = [one for one in case.expect if not any(named_in(text, one) for text in warned)]
        assert not parts, (parts, warned)


def named_in(text: str, answer: Expected) -> bool:
    inside = re.findall(r"the layer '([\w.]*)'", text)
    return names(text, answer) or any(within(place, answer.module_path) for place in inside)


@contextmanager
def untouched_but_for_calls(model: nn.Module) -> Iterator[None]:
    """What calls leave behind in buffers and attributes is the model's own business."""
    before = portrait(model)
    yield
    after = portrait(model)
    for aspect in ("weights", "grads", "requires_grad", "modes", "hooks", "attributes", "random stream", "grad mode"):
        same = before[aspect] == after[aspect] if not leaves(before[aspect]) else far(before[aspect], after[aspect]) == 0
        assert same, f"{aspect} changed"


# -- what is diagnosed ------------------------------------------------------------------------------------------------

# What is true of a case, though it is not a mistake in its style: findings that are no false alarms.
TRUE_FINDINGS: dict[str, tuple[str, str]] = {}


def diagnosed(case: Case) -> hs.Report:
    args, kwargs = case.inputs()
    model = case.model()
    given = inspect.signature(model.forward).bind(*args, **kwargs)
    with seeded(), warnings.catch_warnings(), untouched(model):
        warnings.simplefilter("ignore", HiddenStateWarning)
        return hs.diagnose(model, *given.args, batch_axis=1 if case.time_axis == 0 else 0)


@law("diagnosed", RECURRENT)
def test_a_healthy_model_gets_no_alarm(case):
    codes, _ = TRUE_FINDINGS.get(case.name, ("", ""))
    try:
        report = diagnosed(case)
    except NotRecurrent:
        assert any("none" in one.kind for one in case.expect)
        return
    alarms = [each for each in report.findings if each.severity != "note"]
    assert {each.code for each in alarms} == set(codes.split()), report.text()


@law("not recurrent", DECOYS)
def test_there_is_nothing_to_diagnose_in_a_decoy(case):
    with pytest.raises(NotRecurrent, match=type(case.model()).__name__):
        diagnosed(case)


def test_every_known_failure_is_one_of_a_law_and_a_case():
    laws = {mark.args[0] for mark in _laws()}
    assert laws
    assert {case for _, case in KNOWN} <= set(CASES)


def _laws() -> list[Any]:
    tests: list[Callable] = [value for name, value in globals().items() if name.startswith("test_")]
    return [mark for test in tests for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"]
