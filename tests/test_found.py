"""Laws over the suite of models: what is found, recorded, carried and diagnosed is right, or refused by name.

Each law holds for every case of `tests/support/zoo`, whose own equations are the judge. What the library does not keep
yet stands in `KNOWN`, one line for each case and law, as a strict xfail: a repair shows as a failure of that line.
"""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hiddenstate as hs
from hiddenstate.cells import Layer, Layers
from hiddenstate.diagnosis import Report
from hiddenstate.errors import CarryError, CarryWarning, HiddenStateWarning, NotRecurrent, RecordingWarning
from hiddenstate.recording import Recording

from .support import zoo
from .support.untouched import portrait, untouched
from .support.zoo import CASES, Case, Expected
from .test_zoo import CUT, joined, leaves

ZOO = Path(zoo.__file__).parent
LAYERS = {"layer", "lstm", "gru", "rnn", "recurrent"}
CELLS = {"cell", "lstm_cell", "gru_cell", "rnn_cell"}
INNER = {"loop", "iteration", "attribute", "cache"}  # not a module of its own: it stands in the forward of its holder

# What the library does not keep yet, by law and case. The first of each group are silent and wrong.
pytestmark = pytest.mark.long

KNOWN: dict[tuple[str, str], str] = {
    (
        "recorded again",
        "batch_norm_per_step",
    ): "normed between steps and without a graph, it is now one run, now several",
    (
        "recorded on and on",
        "batch_norm_per_step",
    ): "normed between steps and without a graph, it is now one run, now several",
    ("named", "dilated_rnn"): "a window of three states has one name in the code, and parts by their age",
    ("recorded", "packed_by_hand"): "a loop whose rows are not known is one row of 15 units",
    ("recorded", "quantized_lstm"): "c is not there; the model's own filter hides the warning that says so",
    ("diagnosed", "pointer_network"): "HS102: a decoder that points into all of its input is said to see the future",
    ("diagnosed", "message_passing"): "HS204: the two rows of an edge list pass for two rows of a batch",
    ("not recurrent", "cross_attention"): "HS103: it bears the names of a cell",
    ("not recurrent", "cell_never_fed_back"): "HS103, on purpose: a forgotten recurrent term is a finding",
    ("not recurrent", "cumulative_features"): "a scan without a loop may be a recurrence: refused as not examined",
}


def known(law: str, cases: str, reason: str) -> None:
    """Add what one reason explains in many cases."""
    KNOWN.update({(law, case): reason for case in cases.split()})


known(
    "carried",
    "alternating_lstm awd_lstm",
    "carried, though pieces cannot be the whole (a layer reads from the end, weights are drawn, a start symbol)",
)
known(
    "carried",
    "rssm none_at_first sru min_gru_parallel rwkv lmu li_gru ind_rnn differentiable_computer",
    "left out by name, though the module takes its state as an argument that is None at first",
)


LAWS: set[str] = set()


def law(name: str, cases: Sequence[str] = tuple(CASES)) -> pytest.MarkDecorator:
    """Try a law on each case; those in KNOWN have to fail."""

    LAWS.add(name)

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
    held = layer.seen is None and layer.kind in CELLS and bool(answer.kind & {"loop", "attribute"})  # a part of it
    return here and (bool(words & allowed) or held)


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


@law("found in a short call", [name for name, case in CASES.items() if case.carriable is not None])
def test_a_short_call_shows_nothing_else_and_what_it_cannot_show_is_said(case):
    for steps in (CUT, CUT - 1):
        (args, kwargs), _ = case.pieces(*case.inputs(), steps)
        with seeded():
            found = hs.layers(case.model(), *args, **kwargs)
        both = (found, looked_at(case.name))
        short, long = ({(each.kind, each.name, *sorted(each.spec.parts)) for each in one} for one in both)
        assert short <= long, found.explain()
        if steps == CUT and not any("none" in one.kind for one in case.expect):
            assert short == long or found.seen.unsure or found.seen.unseen, found.explain()


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
        free = layer.kind == "iteration" and any("none" in one.kind for one in case.expect)
        if layer.kind in INNER and layer.seen is not None and not free:
            assert set(layer.spec.parts) <= names, layer.spec.parts


# Where the code has another name for a part than the equations do, or none but a place in a container.
CALLED = {
    "rwkv": ("state[0]", "state[1]", "state[2]", "state[3]"),
    "self_hidden": ("hidden[0]", "hidden[1]"),
    "list_of_states": ("memories[0]", "memories[1]"),
    "dict_of_state_and_window": ("h",),
    "neural_turing_machine": ("state[0]", "state[1]"),
    "stateful_encoder": ("_states[0]", "_states[1]"),
}


@law("excluded by line")
def test_what_is_excluded_by_its_line_is_left_out_and_all_else_stays(case):
    for layer in looked_at(case.name):
        if layer.seen is not None:
            excluded(case, layer, layer.seen.line)


@law("excluded by name")
def test_what_is_excluded_by_its_name_is_left_out_and_all_else_stays(case):
    for layer in looked_at(case.name):
        excluded(case, layer, layer.name)


def excluded(case: Case, layer: Layer, way: str) -> None:
    args, kwargs = case.inputs()
    with seeded():
        left = [each.name for each in hs.layers(case.model(), *args, exclude=[way], **kwargs)]
    assert layer.name not in left, f"exclude={way!r}"
    assert {each.name for each in looked_at(case.name) if not is_of(each, way)} <= set(left), f"exclude={way!r}"


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

    def steps(self, track: str, run: int) -> int:
        return next(value.shape[1] for key, value in self.values.items() if key[:2] == (track, run))


@cache
def ran(name: str, *, recorded: bool) -> Seen:
    """Run a case forward and backward, and look at all that it left behind."""
    case = CASES[name]
    (args, kwargs), model, seen = case.inputs(), case.model(), Seen()
    # What is scripted is rewritten after its first runs, and rounds in another way then.
    with torch.jit.optimized_execution(False), seeded(), warnings.catch_warnings(record=True) as caught:
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


def read(rec: Recording, seen: Seen) -> None:
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
    return (
        where or any((ZOO / name).exists() for name in own) or any(part in text.split() for part in answer.batch_axis)
    )


@law("recorded again", RECURRENT)
@torch.no_grad()
def test_every_call_is_recorded(case):
    args, kwargs = case.inputs()
    model = case.model()
    with seeded(), warnings.catch_warnings():
        warnings.simplefilter("ignore", HiddenStateWarning)
        try:
            with hs.record(model) as rec:
                model(*args, **kwargs)
                model(*args, **kwargs)  # what is kept from call to call is known by now
                first = {track: len(rec.runs(track)) for track in rec}
                model(*args, **kwargs)
                model(*args, **kwargs)
        except NotRecurrent:
            return
        assert {track: len(rec.runs(track)) for track in rec} == {track: 2 * count for track, count in first.items()}


@law("recorded on and on", RECURRENT)
@torch.no_grad()
def test_a_later_call_is_recorded_like_a_first_one(case):
    """However it is seen by then, a fourth call is recorded as somebody records it who begins with it."""
    args, kwargs = case.inputs()
    model = case.model()
    with seeded(), warnings.catch_warnings():
        warnings.simplefilter("ignore", HiddenStateWarning)
        try:
            with hs.record(model) as rec:
                for _ in range(3):
                    model(*args, **kwargs)
                copy, before = deepcopy(model), {track: len(rec.runs(track)) for track in rec}
                stream = torch.get_rng_state()
                model(*args, **kwargs)
        except NotRecurrent:
            return
        torch.set_rng_state(stream)
        with hs.record(copy) as anew:
            copy(*args, **kwargs)
    for track in anew:
        ours, theirs = rec.runs(track)[before.get(track, 0) :], anew.runs(track)
        assert len(ours) == len(theirs), track
        for one, other in zip(ours, theirs, strict=True):
            assert one.states.keys() == other.states.keys()
            assert far(list(one.states.values()), list(other.states.values())) == 0
            assert (one.initial is None) == (other.initial is None)
            if one.initial is not None and other.initial is not None:
                assert far(list(one.initial.values()), list(other.initial.values())) == 0


@law("started")
def test_the_start_that_is_recorded_is_the_true_one(case):
    seen, true = ran(case.name, recorded=True), truths(case)
    for key, value in seen.initial.items():
        starts = [each.start for each in true if each.start is not None]
        free = seen.kinds[key[0]] == "iteration" and any("none" in one.kind for one in case.expect)
        before = seen.kinds[key[0]] == "attribute"  # what an earlier call left
        longer = len(true) and seen.steps(*key[:2]) == true[0].steps.shape[1] + 1  # one call more, to make the start
        assert free or before or longer or any(begins(value, start) for start in starts), key


def begins(value: Tensor, start: Tensor) -> bool:
    """Whether it is this start, as rows of the batch or of something finer; what rows share is shown in each."""
    if len(start) == 1:
        start = start.expand(len(value), -1)
    return start.numel() == value.numel() and is_near(value.flatten(), start.flatten(), 1e-5)


@law("unharmed by recording")
def test_recording_changes_nothing(case):
    """Outputs, gradients of all weights, the random stream, buffers, attributes, modes and hooks."""
    plain, seen = ran(case.name, recorded=False), ran(case.name, recorded=True)
    if seen.refusal:  # the call itself was made
        with seeded():
            (args, kwargs), model = case.inputs(), case.model()
            model(*args, **kwargs)
            plain = Seen(after=portrait(model) | {"kept": kept_by(model)})
    assert far(seen.output, plain.output) == 0
    for aspect, value in plain.after.items():
        if aspect == "identity":
            continue
        other = seen.after[aspect]
        if aspect in ("weights", "grads", "buffers", "kept", "random stream"):
            assert far(other, value) == 0, aspect
            assert aspect in ("kept", "random stream") or other.keys() == value.keys(), aspect
        elif aspect == "hooks":
            assert {k: tuple(map(len, v)) for k, v in other.items()} == {
                k: tuple(map(len, v)) for k, v in value.items()
            }
        else:
            assert other == value, aspect


# -- what is carried --------------------------------------------------------------------------------------------------


# Their state goes through an argument of a module that is left out, or None, at first.
HANDED_OVER = (
    *("rssm", "leaky_neurons", "none_at_first", "sru", "min_gru_parallel", "rwkv", "lmu", "li_gru", "python_lstm"),
    *("hub_output", "fused_layer_stepped", "ind_rnn", "differentiable_computer"),
)


@dataclass
class Carried:
    """A case in pieces under `hs.Carry`, against the whole and against the same pieces without it."""

    refusal: str = ""
    warned: list[str] = field(default_factory=list)
    begins_the_same: bool = True
    is_whole: bool = False
    as_without: bool = False
    without_is_whole: bool = False
    attributes_as_without: bool = True


@cache
@torch.no_grad()
def carried(name: str) -> Carried:
    case, done = CASES[name], Carried()
    args, kwargs = case.inputs()
    calls = [(args, kwargs)] if case.carriable is None else list(case.pieces(args, kwargs, CUT))
    alone, model = case.model(), case.model()
    (whole,), without = called(case.model(), [(args, kwargs)]), called(alone, calls)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", HiddenStateWarning)
        try:
            with hs.Carry(model):
                outputs = called(model, calls)
        except NotRecurrent as error:
            done.refusal = str(error)
            return done
    done.warned = [str(each.message) for each in caught if issubclass(each.category, CarryWarning)]
    done.begins_the_same = far(outputs[0], without[0]) == 0
    done.is_whole = far(together(case, outputs), whole) <= 2 * case.tolerance
    done.as_without = all(far(ours, theirs) == 0 for ours, theirs in zip(outputs, without, strict=True))
    done.without_is_whole = far(together(case, without), whole) <= 2 * case.tolerance
    ours, theirs = portrait(model), portrait(alone)
    done.attributes_as_without = all(ours[one] == theirs[one] for one in ("attributes", "modes", "requires_grad"))
    return done


def called(model: nn.Module, calls: Sequence[tuple[tuple, dict]]) -> list[Any]:
    with seeded():
        return [model(*args, **kwargs) for args, kwargs in calls]


def together(case: Case, outputs: list[Any]) -> Any:
    return outputs[0] if len(outputs) == 1 else joined(case.join, *outputs)


@law("carried")
def test_pieces_are_the_whole_or_as_without_a_carry_and_said_by_name(case):
    done = carried(case.name)
    if done.refusal:
        assert case.name not in HANDED_OVER
        assert type(case.model()).__name__ in done.refusal
        return
    assert done.attributes_as_without
    assert done.begins_the_same, "the first piece has nothing to go on from"
    assert done.is_whole or done.as_without, "neither the whole, nor what the model does by itself"
    assert done.is_whole or case.name not in HANDED_OVER, done.warned
    if not done.is_whole:
        assert done.warned, "pieces are not the whole, and nothing was said"
        unnamed = [one for one in case.expect if not any(is_named(text, one) for text in done.warned)]
        assert not unnamed, (unnamed, done.warned)


def is_named(text: str, answer: Expected) -> bool:
    inside = re.findall(r"the layer '([\w.]*)'", text)
    return names(text, answer) or any(within(place, answer.module_path) for place in inside)


@law("carried in truth", [name for name, case in CASES.items() if case.carriable is not None])
def test_a_carry_says_only_what_is_true(case):
    """What is carried is not called left out; what the model keeps by itself is not said to begin anew."""
    done = carried(case.name)
    if done.is_whole:
        untrue = "begins anew in every call" if done.without_is_whole else "not carried"
        assert not [text for text in done.warned if untrue in text]


# -- what is carried in the place of a start of the model's own --------------------------------------------------------

# Why a model is not carried, though pieces could give the whole: each says so by name.
NOT_OVERRIDDEN = {
    "zero_dim_part": "one part is shared by all rows",
    **dict.fromkeys(
        ("stateful_encoder", "tacotron_decoder", "input_feeding"),
        "it keeps what it ended in, so its start may be its own reset",
    ),
    "masked_episodes": "its caller hands the state in",
    "dilated_rnn": "a window of three states needs more than three steps to be told",
    "growing_memory": "a cache grows",
    "none_at_first": "its first turn starts from nothing, and takes another way",
    "layer_in_a_closure": "a fused kernel is called by itself",
    "min_gru_parallel": "a scan without a loop",
    "lru_scan": "a scan without a loop",
    "s4_by_fft": "a convolution",
    "ctc_lattice": "its start is put together in memory",
    "running_maximum": "one operation",
    "scripted_layer": "scripted",
    "transducer_greedy": "its first step is none of the input's",
    "dict_of_state_and_window": "the model keeps it, and cuts it from its graph",
}


def weighted(output: Any) -> Tensor:
    """A number that every entry of an output enters with a weight of its own."""
    floating = [each for each in leaves(output) if each.is_floating_point() and each.requires_grad]
    weights = [torch.linspace(0.5, 1.5, each.numel()).reshape(each.shape) for each in floating]
    return sum(((each * weight).sum() for each, weight in zip(floating, weights, strict=True)), torch.zeros(()))


def gradients(model: nn.Module, output: Any) -> dict[str, Tensor]:
    total = weighted(output)
    if total.requires_grad:
        total.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@law("overridden", [name for name, case in CASES.items() if case.carriable is not None])
def test_with_override_pieces_are_the_whole_in_values_and_gradients_or_it_is_refused(case):
    args, kwargs = case.inputs()
    alone, model = case.model(), case.model()
    (whole,) = called(alone, [(args, kwargs)])
    slopes = gradients(alone, whole)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", HiddenStateWarning)
        refusal = ""
        try:
            with hs.Carry(model, override=True, detach=False):
                output = together(case, called(model, list(case.pieces(args, kwargs, CUT))))
            ours = gradients(model, output)
        except (CarryError, NotRecurrent) as error:
            refusal = str(error)
    if refusal:
        assert case.is_decoy or case.carriable is False or case.name in NOT_OVERRIDDEN, refusal
        places = [type(model).__name__, "loop", "cut", *(f"'{name}'" for name, _ in model.named_modules() if name)]
        assert any(word in refusal for word in places), "it names no place"
        return
    if case.carriable and not caught:
        assert case.name not in NOT_OVERRIDDEN, "it is carried now: take it off the list"
        assert far(output, whole) <= 4 * case.tolerance
        assert ours.keys() == slopes.keys()
        assert all(is_near(ours[name], slope, 1e-3) for name, slope in slopes.items())
    assert caught or far(output, whole) <= 4 * case.tolerance, "neither the whole, nor said"


# -- what is diagnosed ------------------------------------------------------------------------------------------------

# What is true of a case, though it is not a mistake in its style: findings that are no false alarms.
TRUE_FINDINGS = {
    "unregistered_cell": ("HS205", "its modules are in a plain list"),
    "layer_in_a_closure": ("HS205", "its layer is in a closure, where parameters() does not find it"),
    "centered_over_rows": ("HS101", "it centers over the rows of the batch"),
    "detached_each_step": ("HS105", "it detaches its state at each step"),
    "rims": ("HS202 HS302 HS503", "it starts at random, and its query only chooses, so that it has no gradient"),
    "zero_dim_part": ("HS101", "its gain is a mean over all rows"),
    "echo_state": ("HS105", "a reservoir has no gradient"),
    "transducer_predictor": ("HS108", "each call puts a start symbol in front"),
    "quantized_lstm": ("HS205", "the zoo keeps the plain layer in a list"),
    "self_hidden": ("HS201 HS204", "it keeps its state, which fits one batch size"),
    "buffer_beside_statistics": ("HS201 HS204", "it keeps its state, which fits one batch size"),
    "list_of_states": ("HS105", "it detaches its states at each step"),
    "dict_of_state_and_window": ("HS201", "it keeps its state"),
    "key_value_cache": ("HS201 HS203", "it keeps its cache with the graph"),
    "streaming_convolution": ("HS201 HS204", "it keeps its window, which fits one batch size"),
    "neural_turing_machine": ("HS203", "it keeps its state with the graph"),
    "residual_quantizer": ("HS105", "a choice of codes has no gradient"),
}


def diagnosed(case: Case) -> Report:
    args, kwargs = case.inputs()
    model = case.model()
    with seeded(), warnings.catch_warnings(), untouched(model):
        warnings.simplefilter("ignore", HiddenStateWarning)
        return hs.diagnose(model, *args, batch_axis=1 if case.time_axis == 0 else 0, **kwargs)


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


# -- what the suite has no model for, as small as it gets --------------------------------------------------------------


class Plain(nn.Module):
    """A raw Elman loop; `frames` makes something else of what it is given."""

    def __init__(self, frames: Callable[[Tensor], Any] = lambda x: x) -> None:
        super().__init__()
        self.mix, self.frames = nn.Linear(7, 4), frames

    def forward(self, x: Any) -> Tensor:
        given = self.frames(x)
        h, out = self.mix.weight.new_zeros(2, 4), []
        for frame in given.unbind(1) if isinstance(given, Tensor) else given:
            h = torch.tanh(self.mix(torch.cat([frame, h], 1)))
            out.append(h)
        return torch.stack(out, 1)


class LastTurnApart(Plain):
    def forward(self, x: Tensor) -> Tensor:
        h, out = x.new_zeros(2, 4), []
        for t in range(x.shape[1]):
            h = torch.tanh(self.mix(torch.cat([x[:, t], h], 1)))
            if t < x.shape[1] - 1:
                h = h / 2
            out.append(h)
        return torch.stack(out, 1)


class Within(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Plain()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)

    def generate(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Keeping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.state = nn.Linear(7, 4), None

    def forward(self, x: Tensor) -> Tensor:
        if self.state is None:
            self.state = x.new_zeros(2, 4)
        for frame in x.unbind(1):
            self.state = torch.tanh(self.mix(torch.cat([frame, self.state], 1))).detach()
        return self.state


class RunningMean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.mean += 0.1 * (x - self.mean).mean(0)
        return x - self.mean


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 6, 3)


def is_true(model: nn.Module, x: Any) -> None:
    """One call is recorded as it was."""
    with hs.record(model) as rec:
        out = model(x)
    (run,) = (rec[track] for track in rec)
    torch.testing.assert_close(run.h, out.detach())


def is_unchanged(make: Callable[[], nn.Module], x: Tensor) -> None:
    """A recorded call gives what a plain one gives."""
    outputs = []
    for around in (nullcontext, hs.record):
        with seeded():
            model = make()
            with around(model):
                outputs.append(model(x))
    assert torch.equal(*outputs)


def test_a_last_turn_that_takes_another_branch_is_recorded_as_it_was(x):
    is_true(LastTurnApart(), x)


def test_a_loop_is_recorded_in_the_grad_mode_it_ran_in(x):
    is_true(Plain(lambda x: x if torch.is_grad_enabled() else 2 * x), x)


def test_recording_does_not_move_an_iterator_of_the_model_on(x):
    def make() -> nn.Module:
        scale = count(1)
        return Plain(lambda x: x * next(scale))

    is_unchanged(make, x)


def test_recording_does_not_draw_from_the_models_own_random_numbers(x):
    def make() -> nn.Module:
        numbers = random.Random(0)
        return Plain(lambda x: x * numbers.random())

    is_unchanged(make, x)


def test_a_recorded_call_happens_once(x):
    happened = []
    model = Plain(lambda x: happened.append(1) or x)
    with hs.record(model):
        model(x)
    assert len(happened) == 1


def test_a_generator_is_left_to_the_real_call(x):
    is_true(Plain(), (frame for frame in x.unbind(1)))


@pytest.mark.parametrize("rows", [2, 3, 8])
def test_a_running_mean_is_no_state(rows):
    assert not hs.layers(RunningMean(), torch.randn(rows, 3))


def test_gradients_of_a_loop_are_kept_or_refused(x):
    model = Plain()
    try:
        with pytest.warns(RecordingWarning), hs.record(model, grads=True) as rec:
            model(x).sum().backward()
    except pytest.fail.Exception:
        (run,) = (rec[track] for track in rec)
        assert run.grads


def test_a_loop_that_was_recorded_to_a_folder_is_in_it(x, tmp_path):
    model = Plain()
    with hs.record(model, to=tmp_path / "run") as rec:
        model(x)
    assert list(hs.load_recording(tmp_path / "run")) == list(rec) != []


def test_a_submodule_that_is_called_by_itself_is_recorded_or_the_empty_recording_is_said(x):
    heard(Within(), lambda model: model.inner(x))


def test_a_method_that_is_called_is_recorded_or_the_empty_recording_is_said(x):
    heard(Within(), lambda model: model.generate(x))


def heard(model: nn.Module, call: Callable[[Any], Any]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RecordingWarning)
        with hs.record(model) as rec:
            call(model)
    assert list(rec) or caught


def test_a_loop_whose_state_is_an_attribute_is_recorded_in_every_call(x):
    model = Keeping()
    with hs.record(model) as rec:
        for _ in range(3):
            model(x)
    assert [len(rec.runs(track)) for track in rec] == [3]


class Behind(nn.Module):
    """A loop behind one of torch's layers, and another one on request."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.one, self.other = nn.GRU(3, 3, batch_first=True), Plain(), Plain()

    def forward(self, x: Tensor, other: bool = False) -> Tensor:
        return self.other(x) if other else self.one(self.gru(x)[0])


def test_a_loop_behind_a_carried_layer_is_recorded_as_it_was(x):
    model = Behind()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CarryWarning)
        with hs.Carry(model), hs.record(model, tracks=lambda track: "loop" in track) as rec:
            outputs = [model(piece).detach() for piece in x.split(3, 1)]
    (track,) = rec
    torch.testing.assert_close([run.h for run in rec.runs(track)], outputs)


def test_a_hook_of_the_users_on_the_model_works_once(x):
    model = Plain()
    model.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    is_true(model, x)


def test_what_only_a_later_call_reaches_is_recorded_or_said(x):
    model = Behind()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RecordingWarning)
        with hs.record(model) as rec:
            model(x)
            model(x, other=True)
    assert any(track.startswith("other") for track in rec) or caught


@pytest.mark.parametrize("look", [hs.record, hs.Carry])
def test_a_call_of_one_step_is_not_taken_for_a_model_without_recurrence(look, x):
    model = Plain()
    expected = model(x[:, :1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HiddenStateWarning)
        with look(model):
            torch.testing.assert_close(model(x[:, :1]), expected)


class Stepping(nn.Module):
    """A model that steps a cell which starts by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.step = Starting()

    def forward(self, x: Tensor) -> Tensor:
        level = None
        for frame in x.unbind(1):
            level = self.step(frame, level)
        return level


class Starting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(7, 4)

    def forward(self, x: Tensor, level: Tensor | None = None) -> Tensor:
        return torch.tanh(self.mix(torch.cat([x, x.new_zeros(len(x), 4) if level is None else level], 1)))


def test_a_carry_goes_on_from_a_checkpoint_of_a_cell_that_was_seen(x):
    model = Stepping()
    whole = model(x)
    with hs.Carry(model) as carry:
        model(x[:, :3])
        kept = carry.state_dict()
    with hs.Carry(model) as carry:
        carry.load_state_dict(kept)
        torch.testing.assert_close(model(x[:, 3:]), whole)


class Backwards(Stepping):
    def forward(self, x: Tensor) -> Tensor:
        level, out = None, []
        for frame in reversed(x.unbind(1)):
            level = self.step(frame, level)
            out.append(level)
        return torch.stack(out[::-1], 1)


class MixedOn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        state, out = None, []
        for frame in x.unbind(1):
            h, c = self.cell(frame, state)
            state = (h / 2, c)
            out.append(h)
        return torch.stack(out, 1)


class InPart(Stepping):
    def forward(self, x: Tensor) -> Tensor:
        level, smooth, out = None, x.new_zeros(2, 4), []
        for frame in x.unbind(1):
            level = self.step(frame, level)
            smooth = torch.tanh(0.9 * smooth + level)
            out.append(smooth)
        return torch.stack(out, 1)


@pytest.mark.parametrize(
    "make",
    [
        Backwards,
        MixedOn,
        InPart,
    ],
)
@torch.no_grad()
def test_a_carry_gives_the_whole_or_leaves_the_model_alone_and_says_so(make, x):
    model = make()
    plain, whole = [model(piece) for piece in x.split(3, 1)], model(x)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CarryWarning)
        with hs.Carry(model):
            pieces = [model(piece) for piece in x.split(3, 1)]
    alone = all(map(torch.equal, pieces, plain))
    assert torch.allclose(torch.cat(pieces, 1), whole, atol=1e-6) or (alone and caught)


def test_every_known_failure_is_one_of_a_law_and_a_case():
    assert {case for _, case in KNOWN} <= CASES.keys()
    assert {law for law, _ in KNOWN} <= LAWS
