"""Which states that a model itself hands to its layers give way to the carried one, and which are no starts."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import hiddenstate as hs
from hiddenstate.errors import CarryError, CarryWarning

FEATURES, UNITS, BATCH, STEPS = 3, 4, 2, 12
ELSEWHERE: dict[str, Tensor] = {}


class Keeps(nn.Module):
    """A GRU that goes on from what was kept, wherever that is."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(FEATURES, UNITS, batch_first=True)
        self.set_up()

    def set_up(self) -> None:
        ELSEWHERE.clear()

    def kept(self) -> Tensor | None:
        return ELSEWHERE.get("h")

    def keep(self, h: Tensor) -> None:
        ELSEWHERE["h"] = h.detach()

    def forward(self, x: Tensor) -> Tensor:
        out, h = self.rnn(x, self.kept())
        self.keep(h)
        return out


class InNamespace(Keeps):
    def set_up(self) -> None:
        self.memory = SimpleNamespace(h=None)

    def kept(self) -> Tensor | None:
        return self.memory.h

    def keep(self, h: Tensor) -> None:
        self.memory.h = h.detach()


class InDict(Keeps):
    """The key is the name of a module."""

    def set_up(self) -> None:
        self.states: dict[str, Tensor] = {}

    def kept(self) -> Tensor | None:
        return self.states.get("rnn")

    def keep(self, h: Tensor) -> None:
        self.states["rnn"] = h.detach()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(BATCH, STEPS, FEATURES, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CarryWarning)
        yield


def made(kind: type[Keeps]) -> Keeps:
    torch.manual_seed(0)
    return kind()


@pytest.mark.parametrize("override", [True, False])
def test_what_is_kept_out_of_sight_is_no_start(override, x):
    model = made(Keeps)
    with hs.Carry(model, override=override) as carry:
        model(x[:, :6])
        carry.reset()
        with pytest.raises(CarryError, match=r"'rnn' goes on from what it ended in, although it was reset: the"):
            model(x[:, 6:])


@pytest.mark.parametrize("override", [True, False])
@pytest.mark.parametrize("kind", [InNamespace, InDict])
@pytest.mark.parametrize("calls", [1, 2])
def test_what_lies_in_objects_and_dicts_starts_anew(kind, override, calls, x):
    model, expected = made(kind), made(kind)(x)
    with hs.Carry(model, override=override) as carry:
        for _ in range(2):
            out = [model(piece) for piece in x.split(6, 1)[:calls]]
            torch.testing.assert_close(torch.cat(out, 1), expected[:, : 6 * calls])
            carry.reset()


@pytest.mark.parametrize("kind", [InNamespace, InDict])
def test_rows_start_anew_once_it_is_known_who_reads_them(kind, x):
    model, expected = made(kind), made(kind)(x)
    with hs.Carry(model) as carry:
        model(x[:, :4])
        with pytest.raises(CarryError, match="single rows cannot start anew yet"):
            carry.reset([0])
        model(x[:, 4:8])
        carry.reset([0])
        out = model(x[:, 8:])
    torch.testing.assert_close(out[1], expected[1, 8:])
    torch.testing.assert_close(out[0], made(kind)(x[:, 8:])[0])


@pytest.mark.parametrize("calls", [1, 2, 3])
def test_a_call_that_raises_leaves_no_trace_in_what_the_model_keeps(calls, x):
    class Raises(InNamespace):
        def forward(self, x: Tensor, *, fail: bool = False) -> Tensor:
            out = super().forward(x)
            if fail:
                raise ArithmeticError("on purpose")
            return out

    model, expected = made(Raises), made(Raises)(x)
    pieces = x.split(3, 1)
    with hs.Carry(model):
        for piece in pieces[:calls]:
            model(piece)
        with pytest.raises(ArithmeticError):
            model(pieces[calls], fail=True)
        torch.testing.assert_close(model(pieces[calls]), expected[:, 3 * calls : 3 * calls + 3])


class Masked(nn.Module):
    """An agent whose state is wiped where an episode has ended, before it goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.core, self.state = nn.LSTMCell(FEATURES, UNITS), None

    def forward(self, x: Tensor, done: Tensor) -> Tensor:
        if self.state is None:
            self.state = (x.new_zeros(len(x), UNITS), x.new_zeros(len(x), UNITS))
        out = []
        for frame, over in zip(x.unbind(1), done.unbind(1), strict=True):
            self.state = tuple(part * (1 - over)[:, None] for part in self.state)
            self.state = self.core(frame, self.state)
            out.append(self.state[0])
        return torch.stack(out, 1)


def test_what_the_model_makes_of_what_it_keeps_is_left_alone(x):
    torch.manual_seed(0)
    model = Masked()
    done = (torch.rand(BATCH, STEPS, generator=torch.Generator().manual_seed(2)) < 0.3).float()
    whole = model(x, done)
    model.state = None
    with hs.Carry(model):
        out = torch.cat([model(*pair) for pair in zip(x.split(3, 1), done.split(3, 1), strict=True)], 1)
    torch.testing.assert_close(out, whole)


def test_a_number_that_counts_on_is_told(x):
    class Counts(InNamespace):
        def set_up(self) -> None:
            super().set_up()
            self.steps = 0

        def forward(self, x: Tensor) -> Tensor:
            self.steps += x.shape[1]
            return super().forward(x)

    model = made(Counts)
    with hs.Carry(model):
        model(x)
        with pytest.warns(CarryWarning, match=r"not carried, and not put back by a reset: steps, a number"):
            model(x)


def test_single_rows_of_what_is_kept_out_of_sight_cannot_start_anew(x):
    model = made(Keeps)
    with hs.Carry(model) as carry:
        model(x)
        model(x)
        carry.reset([0])
        with pytest.raises(CarryError, match=r"'rnn' goes on from what it ended in, although it was reset"):
            model(x)


def test_a_graph_that_is_cut_out_of_sight_is_not_promised(x):
    model = made(Keeps)
    with hs.Carry(model, detach=False):
        model(x)
        with pytest.raises(CarryError, match=r"handed what it ended in, cut from its graph by the model itself"):
            model(x)


class ResetsItself(nn.Module):
    """A cell, or a layer, that goes on from what the model keeps, or starts anew where its caller says so."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.core = (nn.GRU if fused else nn.GRUCell)(FEATURES, UNITS)
        self.fused, self.h = fused, None

    def forward(self, x: Tensor, reset: bool = False) -> Tensor:
        if reset or self.h is None:
            self.h = x.new_zeros(*([1] if self.fused else []), len(x), UNITS)
        if self.fused:
            out, self.h = self.core(x.transpose(0, 1), self.h)
            return out.transpose(0, 1)
        out = []
        for frame in x.unbind(1):
            self.h = self.core(frame, self.h)
            out.append(self.h)
        return torch.stack(out, 1)


@pytest.mark.parametrize("override", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_a_start_that_the_model_makes_by_its_own_argument_stands(fused, override, x):
    model = ResetsItself(fused=fused)
    with hs.Carry(model, override=override), warnings.catch_warnings():
        warnings.simplefilter("error", CarryWarning)  # it is the model's own reset: nothing is lost that was to stay
        head = [model(x[:, :4]), model(x[:, 4:8])]
        tail = [model(x[:, 8:10], reset=True), model(x[:, 10:])]
    model.h = None
    torch.testing.assert_close(torch.cat(head, 1), model(x[:, :8]))
    torch.testing.assert_close(torch.cat(tail, 1), model(x[:, 8:], reset=True))


def test_a_reset_in_the_second_call_stands_too(x):
    model = ResetsItself(fused=False)
    with hs.Carry(model, override=True):
        out = [model(x[:, :4]), model(x[:, 4:8], reset=True), model(x[:, 8:])]
    torch.testing.assert_close(torch.cat(out[1:], 1), model(x[:, 4:], reset=True))


def test_a_start_that_may_be_a_reset_is_not_replaced_before_that_is_known(x):
    model = ResetsItself(fused=False)
    with hs.Carry(model, override=True):
        model(x[:, :4], reset=True)
        with pytest.raises(
            CarryError, match=r"keeps in h what it ended in, and may go on from that: .* first two calls"
        ):
            model(x[:, 4:8], reset=True)


def test_the_warning_of_a_lost_state_names_the_layer_and_the_line(x):
    class Zeros(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(FEATURES, UNITS, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.rnn(x, x.new_zeros(1, len(x), UNITS))[0]

    model, line = Zeros(), Zeros.forward.__code__.co_firstlineno + 1
    with hs.Carry(model):
        model(x[:, :4])
        with pytest.warns(
            CarryWarning, match=rf"'rnn' is handed .* zeros by the model itself \(test_given\.py:{line}\)"
        ):
            model(x[:, 4:])


class HandsNone(nn.Module):
    """Hands its layer what it keeps, or nothing where its caller says so."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.h = nn.GRU(FEATURES, UNITS, batch_first=True), None

    def forward(self, x: Tensor, reset: bool = False) -> Tensor:
        out, h = self.rnn(x, None if reset else self.h)
        self.h = h.detach()
        return out


@pytest.mark.parametrize("override", [False, True])
def test_a_reset_by_handing_nothing_stands(override, x):
    model = HandsNone()
    with hs.Carry(model, override=override):
        out = [model(x[:, :4]), model(x[:, 4:8]), model(x[:, 8:10], reset=True), model(x[:, 10:])]
    torch.testing.assert_close(torch.cat(out[2:], 1), model(x[:, 8:], reset=True))


def test_handing_nothing_is_refused_before_it_is_known_to_be_a_reset(x):
    model = HandsNone()
    with hs.Carry(model):
        first = model(x[:, :4])
        with pytest.raises(CarryError, match=r"'rnn' is handed no state .* while h holds .*two calls go on from h"):
            model(x[:, 4:], reset=True)
        out = [model(x[:, 4:8]), model(x[:, 8:], reset=True)]  # the states of before were kept, and now it is known
    torch.testing.assert_close(torch.cat([first, out[0]], 1), model(x[:, :8], reset=True))
    torch.testing.assert_close(out[1], model(x[:, 8:], reset=True))


def test_with_override_our_own_calls_tell_that_it_is_a_reset(x):
    model = HandsNone()
    with hs.Carry(model, override=True):
        out = [model(x[:, :4]), model(x[:, 4:8], reset=True), model(x[:, 8:])]
    torch.testing.assert_close(torch.cat(out[1:], 1), model(x[:, 4:], reset=True))


class PartOfABuffer(nn.Module):
    """A cell that goes on from the first rows of a buffer that is made for more of them."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(FEATURES, UNITS)
        self.register_buffer("h", torch.zeros(2 * BATCH, UNITS))

    def forward(self, x: Tensor) -> Tensor:
        h, out = self.h[: len(x)].clone(), []
        for frame in x.unbind(1):
            h = self.cell(frame, h)
            out.append(h)
        self.h[: len(x)] = h.detach()
        return torch.stack(out, 1)


@pytest.mark.parametrize("override", [True, False])
@pytest.mark.parametrize("step", [0, 2])
def test_a_part_of_a_larger_buffer_is_no_start_for_marked_rows(step, override, x):
    model, starts = made(PartOfABuffer), torch.zeros(BATCH, 4, dtype=torch.bool)
    starts[0, step] = True
    with hs.Carry(model, override=override) as carry, torch.no_grad():
        model(x[:, :4])
        model(x[:, 4:8])
        carry.mark(starts=starts)
        said = r"goes on from what it ended in, although .*a part of a larger|a loop in a forward, whose steps are not"
        with pytest.raises(CarryError, match=said):
            model(x[:, 8:])


class CutsNowAndThen(nn.Module):
    """A cell whose state is cut from its graph before every `every`-th step of a call."""

    def __init__(self, every: int) -> None:
        super().__init__()
        self.cell, self.every = nn.GRUCell(FEATURES, UNITS), every

    def forward(self, x: Tensor) -> Tensor:
        h, out = x.new_zeros(len(x), UNITS), []
        for step, frame in enumerate(x.unbind(1)):
            h = h.detach() if step % self.every == 0 else h
            h = self.cell(frame, h)
            out.append(h)
        return torch.stack(out, 1)


def test_a_state_that_is_cut_before_some_steps_only_is_not_taken_into_the_next_call_with_its_graph(x):
    model = CutsNowAndThen(2)
    with hs.Carry(model, override=True, detach=False):
        model(x[:, :6])
        with pytest.raises(CarryError, match=r"cuts the state of 'cell' from its graph before some steps and not"):
            model(x[:, 6:])
    always = CutsNowAndThen(1)
    with hs.Carry(always, override=True, detach=False):
        pieces = [always(x[:, :6]), always(x[:, 6:])]
    torch.testing.assert_close(torch.cat(pieces, 1), always(x))


class MasksWhatItKeeps(nn.Module):
    """Starts the rows anew that are done, in what it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.h = nn.GRU(FEATURES, UNITS, batch_first=True), None

    def forward(self, x: Tensor, done: Tensor) -> Tensor:
        if self.h is not None and done.any():
            self.h = self.h * ~done[None, :, None]
        out, self.h = self.rnn(x, self.h)
        return out


@pytest.mark.usefixtures("no_warnings")
def test_a_mask_on_what_the_model_keeps_is_no_lost_state(x):
    model, done = MasksWhatItKeeps(), torch.tensor([True, *[False] * (BATCH - 1)])
    with torch.no_grad():
        first, h = model.rnn(x[:, :6])
        rest, _ = model.rnn(x[:, 6:], h * ~done[None, :, None])
        with hs.Carry(model):
            torch.testing.assert_close(model(x[:, :6], done), first)
            torch.testing.assert_close(model(x[:, 6:], done), rest)
