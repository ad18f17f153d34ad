"""What is proven of one way through a model is not taken for granted on another: it is proven again, or refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import hiddenstate as hs
from hiddenstate.carry.ways import KnownWays
from hiddenstate.errors import CarryError
from tests.support.later_ways import LATE_STEPS, LateLoop, stepped

FEATURES, UNITS, BATCH, STEPS = 3, 4, 2, 24
ANOTHER_WAY = r"this call takes another way through \w+ than those in which the carried state was seen to be right"

ELSEWHERE = r"this call took another way through the model|this call made the start of '\w+' elsewhere"


class Turning(nn.Module):
    """Starts from zeros, in a cell or a layer, and does something else once `late` is set."""

    late = False
    raw = False  # whether the step is written out, and no cell is called

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(FEATURES, UNITS)
        self.mix = nn.Linear(FEATURES + UNITS, UNITS)
        self.gru = nn.GRU(FEATURES, UNITS, batch_first=True)
        self.norm = nn.BatchNorm1d(FEATURES)
        self.read = nn.Linear(UNITS, FEATURES)

    def step(self, frame: Tensor, h: Tensor) -> Tensor:
        return torch.tanh(self.mix(torch.cat([frame, h], -1))) if self.raw else self.cell(frame, h)

    def fused(self, x: Tensor) -> Tensor:
        return self.gru(x, x.new_zeros(1, len(x), UNITS))[0]


class SecondState(Turning):
    """A sum that crosses beside the cell."""

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(len(x), UNITS)
        h, out = x.new_zeros(len(x), UNITS), []
        for frame in x.unbind(1):
            h = self.step(frame, h)
            if self.late:
                total = 0.9 * total + h
            out.append(h + total)
        return torch.stack(out, 1)


class SecondLoop(Turning):
    """A loop behind the layer."""

    def forward(self, x: Tensor) -> Tensor:
        out = self.fused(x)
        if self.late:
            total, sums = x.new_zeros(len(x), UNITS), []
            for step in out.unbind(1):
                total = 0.9 * total + step
                sums.append(total)
            out = torch.stack(sums, 1)
        return out


class Smoothed(Turning):
    """A window in front of the layer."""

    def forward(self, x: Tensor) -> Tensor:
        return self.fused(F.avg_pool1d(x.mT, 3, 1, 1).mT if self.late else x)


class OwnPredictions(Turning):
    """What it predicts is its next input; picked in Python, where no operation tells."""

    def forward(self, x: Tensor) -> Tensor:
        h, said, out = x.new_zeros(len(x), UNITS), x.new_zeros(len(x), FEATURES), []
        for frame in x.unbind(1):
            h = self.step(said if self.late else frame, h)
            said = self.read(h)
            out.append(said)
        return torch.stack(out, 1)


class MaskedAtFirst(Turning):
    """A mask on the state, before the first step alone."""

    def forward(self, x: Tensor) -> Tensor:
        h, out = x.new_zeros(len(x), UNITS), []
        for step, frame in enumerate(x.unbind(1)):
            if self.late and step == 0:
                h = h * (frame[:, :1] > 0)
            h = self.step(frame, h)
            out.append(h)
        return torch.stack(out, 1)


class WrittenAtFirst(Turning):
    """The same, by an index."""

    def forward(self, x: Tensor) -> Tensor:
        h, out = x.new_zeros(len(x), UNITS), []
        for step, frame in enumerate(x.unbind(1)):
            if self.late and step == 0:
                h[frame[:, 0] > 0] = 0.0
            h = self.step(frame, h)
            out.append(h)
        return torch.stack(out, 1)


class OtherStart(Turning):
    """Another tensor that was there already, which no operation tells."""

    def forward(self, x: Tensor) -> Tensor:
        zeros, ones = x.new_zeros(len(x), UNITS), x.new_ones(len(x), UNITS) * x[:, :1, 0]
        h, out = ones if self.late else zeros, []
        for frame in x.unbind(1):
            h = self.step(frame, h)
            out.append(h)
        return torch.stack(out, 1) + 0 * ones[:, None]


def pieces(model: nn.Module, x: Tensor, *, late: int, each: int = 4) -> Tensor:
    out = []
    for number, piece in enumerate(x.split(each, 1)):
        model.late = number >= late
        out.append(model(piece))
    return torch.cat(out, 1)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(BATCH, STEPS, FEATURES, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("late", [1, 2, 4])
@pytest.mark.parametrize("make", [SecondState, SecondLoop, Smoothed, OwnPredictions, MaskedAtFirst, WrittenAtFirst])
@pytest.mark.filterwarnings("ignore:.* found in the model, but not called:hiddenstate.errors.CarryWarning")
def test_a_branch_on_which_the_state_is_not_right_stops_with_a_sentence(make, late, raw, x):
    torch.manual_seed(0)
    model = make()
    model.raw = raw
    with hs.Carry(model, override=True) as carry:
        head = x[:, : 4 * late]
        kept = pieces(model, head, late=late)
        before = carry.state.clone()
        model.late = True
        seen = ANOTHER_WAY + r": it goes another way at .*The states of before are"
        with pytest.raises(CarryError, match=f"{seen}|{ELSEWHERE}" if raw else seen):
            model(x[:, 4 * late : 4 * late + 4])
        for name, part in before.items():
            torch.testing.assert_close(carry.state[name], part)
        model.late = False  # and it goes on where it was
        after = model(x[:, 4 * late : 4 * late + 4])
    model.late = False
    torch.testing.assert_close(torch.cat([kept, after], 1), model(x[:, : 4 * late + 4]))


@pytest.mark.filterwarnings("ignore:.* found in the model, but not called:hiddenstate.errors.CarryWarning")
def test_another_start_that_python_picks_gives_way_too(x):
    model = OtherStart()
    with hs.Carry(model, override=True):
        out = pieces(model, x, late=3)
    model.late = False
    torch.testing.assert_close(out, model(x))


class Harmless(Turning):
    """Branches that change nothing of what crosses."""

    def forward(self, x: Tensor) -> Tensor:
        if self.late:
            x = x + torch.zeros_like(x)
        h, out = x.new_zeros(len(x), UNITS), []
        for frame in x.unbind(1):
            h = self.step(frame, h)
            out.append(self.read(h) if self.late else F.linear(h, self.read.weight, self.read.bias))
        return torch.stack(out, 1)


@pytest.mark.filterwarnings("ignore:.* found in the model, but not called:hiddenstate.errors.CarryWarning")
def test_a_branch_on_which_all_is_right_goes_on(x):
    model = Harmless()
    with hs.Carry(model, override=True):
        out = pieces(model, x, late=3)
    torch.testing.assert_close(out, model(x))


class TeacherForced(Turning):
    """While training it is told what it should have said."""

    def forward(self, x: Tensor) -> Tensor:
        h, said, out = x.new_zeros(len(x), UNITS), x.new_zeros(len(x), FEATURES), []
        for frame in x.unbind(1):
            h = self.cell(frame if self.training else said, h)
            said = self.read(h)
            out.append(said)
        return torch.stack(out, 1)


class Normed(Turning):
    """Statistics of the batch, along time too, while training."""

    def forward(self, x: Tensor) -> Tensor:
        return self.fused(self.norm(x.mT).mT)


class NormedLoop(Turning):
    """The same in front of a loop that is written out."""

    def forward(self, x: Tensor) -> Tensor:
        h, out = x.new_zeros(len(x), UNITS), []
        for frame in self.norm(x.mT).mT.unbind(1):
            h = torch.tanh(frame.sum(1, keepdim=True) + h.roll(1, 1))
            out.append(h)
        return torch.stack(out, 1)


@pytest.mark.parametrize(("make", "first"), [(TeacherForced, True), (Normed, False), (NormedLoop, False)])
@pytest.mark.filterwarnings("ignore:.* found in the model, but not called:hiddenstate.errors.CarryWarning")
def test_a_mode_on_which_the_state_is_not_right_stops_with_a_sentence(make, first, x):
    model = make().train(first)
    with hs.Carry(model, override=True) as carry:
        model(x[:, :4])
        model(x[:, 4:8])
        model.train(not first)
        with carry.fresh():
            model(x[:, :8])
            with pytest.raises(CarryError, match=ANOTHER_WAY + r": no call before had \w+ (training|in eval)"):
                model(x[:, 8:])


@pytest.mark.filterwarnings("ignore:.* found in the model, but not called:hiddenstate.errors.CarryWarning")
def test_modes_on_which_it_is_right_may_take_turns(x):
    class Dropping(Turning):
        def forward(self, x: Tensor) -> Tensor:
            return self.fused(self.drop(x))

    model = Dropping()
    model.drop = nn.Dropout(0.5)
    with hs.Carry(model, override=True) as carry:
        model(x[:, :8])
        model.eval()
        with carry.fresh():
            out = torch.cat([model(piece) for piece in x.split(6, 1)], 1)
        model.train()
        model(x[:, 8:])
    torch.testing.assert_close(out, model.eval()(x))


class Agent(nn.Module):
    """An agent whose state is put to zero where an episode is done, at every step or only where one is."""

    def __init__(self, kind: type[nn.Module], *, always: bool) -> None:
        super().__init__()
        self.core, self.always = kind(FEATURES, FEATURES), always

    def forward(self, x: Tensor, done: Tensor) -> Tensor:
        fused = isinstance(self.core, nn.RNNBase)
        h, out = x.new_zeros(*([1] if fused else []), x.shape[1], FEATURES), []
        for frame, ends in zip(x, done, strict=True):
            if self.always or ends.any():
                h = h * (1 - ends[:, None])
            h = self.core(frame[None], h)[1] if fused else self.core(frame, h)
            out.append(h[0] if fused else h)
        return torch.stack(out)


@settings(max_examples=20)
@given(
    done=st.lists(st.integers(0, 3 * STEPS // 2 - 1), max_size=5),
    always=st.booleans(),
    kind=st.sampled_from([nn.GRUCell, nn.GRU]),
)
@example(done=[8 * 3 + 1], always=False, kind=nn.GRUCell)  # at the first step of a later piece
@example(done=[0], always=False, kind=nn.GRUCell)
@example(done=[], always=True, kind=nn.GRU)
def test_an_agents_episodes_end_where_they_end_or_it_is_refused(done, always, kind):
    torch.manual_seed(0)
    model, x, ends = Agent(kind, always=always), torch.randn(STEPS // 2, 3, FEATURES), torch.zeros(STEPS // 2 * 3)
    ends[done] = 1
    ends = ends.view(STEPS // 2, 3)
    with hs.Carry(model, override=True):
        try:
            out = torch.cat([model(*piece) for piece in zip(x.split(4), ends.split(4), strict=True)])
        except CarryError:
            assert not always
            return
    torch.testing.assert_close(out, model(x, ends))


class BackToStart(nn.Module):
    """An agent that picks its start once more where an episode is done: the tensor itself, read beside the state."""

    def __init__(self, kind: str, *, learned: bool) -> None:
        super().__init__()
        self.kind, self.core = kind, nn.LSTMCell(FEATURES, UNITS) if kind == "lstm" else nn.GRUCell(FEATURES, UNITS)
        self.mix = nn.Linear(FEATURES + UNITS, UNITS)
        self.first = nn.Parameter(torch.randn(UNITS)) if learned else None

    def forward(self, x: Tensor, done: Tensor) -> Tensor:
        rows = x.shape[1]
        start = x.new_zeros(rows, UNITS) if self.first is None else self.first.expand(rows, UNITS)
        cells = x.new_zeros(rows, UNITS)
        h, c, out = start, cells, []
        for frame, ends in zip(x, done[..., None], strict=True):
            h = torch.where(ends > 0, start, h)
            if self.kind == "lstm":
                c = torch.lerp(c, cells, ends)
                h, c = self.core(frame, (h, c))
            else:
                h = self.core(frame, h) if self.kind == "gru" else torch.tanh(self.mix(torch.cat([frame, h], 1)))
            out.append(h)
        return torch.stack(out)


@settings(max_examples=12)
@given(done=st.lists(st.integers(0, 3 * STEPS // 2 - 1), max_size=5), learned=st.booleans())
@example(done=[12], learned=False)  # at the first step of a later piece
@example(done=[24, 25, 26], learned=True)
@pytest.mark.parametrize("kind", ["gru", "lstm", "written out"])
@pytest.mark.filterwarnings("ignore:.* found in the model, but not called:hiddenstate.errors.CarryWarning")
def test_a_start_that_is_read_as_a_constant_too_stays_one(done, learned, kind):
    torch.manual_seed(0)
    model, x = BackToStart(kind, learned=learned), torch.randn(STEPS // 2, 3, FEATURES)
    ends = torch.zeros(STEPS // 2 * 3)
    ends[done] = 1
    ends = ends.view(STEPS // 2, 3)
    with hs.Carry(model, override=True):
        out = torch.cat([model(*piece) for piece in zip(x.split(4), ends.split(4), strict=True)])
    torch.testing.assert_close(out, model(x, ends))


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("each", [4, 6])  # as long as there are features, and not
@pytest.mark.parametrize("name", LATE_STEPS)
def test_a_step_that_python_changes_later_is_right_or_refused(name, each, raw):
    torch.manual_seed(0)
    model, x = LateLoop(LATE_STEPS[name], raw=raw), torch.randn(3, 24, 4)
    for late in ([False, False, False, True, True, False], [False, True, False, True, False, False]):
        late = late[: 24 // each]
        whole, out = stepped(model, x, [one for one in late for _ in range(each)]), list[Tensor]()
        with hs.Carry(model, override=True), contextlib.suppress(CarryError):
            for piece, model.late in zip(x.split(each, 1), late, strict=True):
                out.append(model(piece))
        assert out, "the first call has nothing to go on from"
        torch.testing.assert_close(torch.cat(out, 1), whole[:, : each * len(out)])


def test_a_layer_that_is_not_called_although_its_start_is_made_is_refused():
    model, x = LateLoop(LATE_STEPS["skipped"], raw=False), torch.randn(3, 8, 4)
    with hs.Carry(model, override=True) as carry:
        model(x[:, :4])
        before, model.late = carry.state.clone(), True
        with pytest.raises(
            CarryError, match=r"makes what 'cell' starts from, but does not call it.*Call the layer, or"
        ):
            model(x[:, 4:])
        torch.testing.assert_close(carry.state["cell.h"], before["cell.h"])


def test_a_way_on_which_no_piece_can_be_tried_is_refused_where_others_could(x):
    class Sized(Turning):
        def forward(self, x: Tensor) -> Tensor:
            return self.fused(x.reshape(len(x), 8, FEATURES) if self.late else x)

    model = Sized()
    model.cell = None
    with hs.Carry(model, override=True):
        model(x[:, :8])
        model.late = True
        with pytest.raises(CarryError, match=ANOTHER_WAY + r".*a piece of its input could not be run \(RuntimeError"):
            model(x[:, 8:16])


class Tower(nn.Module):
    """Two layers from zeros, of which later calls do something else with what they start from."""

    def __init__(self, late: str) -> None:
        super().__init__()
        self.one, self.two = nn.LSTM(FEATURES, UNITS, batch_first=True), nn.GRU(UNITS, UNITS, batch_first=True)
        self.what, self.late = late, False

    def forward(self, x: Tensor) -> Tensor:
        h, c, g = (x.new_zeros(1, len(x), UNITS) for _ in range(3))
        if self.late and self.what == "a mask on the start":
            h = h * (x[:, 0, :1] > 0)
        y, (end, _) = self.one(x, (h, c))
        if self.late and self.what == "the start in the output":
            y = y + h[0][:, None]
        return self.two(y, end if self.late and self.what == "another layer's end" else g)[0]


@pytest.mark.parametrize("late", [1, 3])
@pytest.mark.parametrize("what", ["a mask on the start", "the start in the output", "another layer's end"])
def test_something_else_done_with_what_layers_start_from_stops_with_a_sentence(what, late, x):
    model = Tower(what)
    with hs.Carry(model, override=True):
        out = pieces(model, x[:, : 4 * late], late=late)
        model.late = True
        with pytest.raises(CarryError, match=ANOTHER_WAY):
            model(x[:, 4 * late : 4 * late + 4])
    model.late = False
    torch.testing.assert_close(out, model(x[:, : 4 * late]))


def test_what_reads_a_start_that_has_given_way_is_named(x):
    model = Tower("a mask on the start")
    with hs.Carry(model, override=True):
        model(x[:, :4])
        model.late = True
        with pytest.raises(CarryError, match=r"way at test_ways\.py:\d+, and reads there what one, two starts from"):
            model(x[:, 4:8])


def way_of(known: KnownWays, run: Callable[[], Any]) -> Any:
    way = known.new()

    def seen() -> Any:
        way.ours = False
        return run()

    way.along(seen)
    return way


def test_a_way_is_the_same_however_many_steps_it_takes_and_whatever_the_numbers_are(x):
    model = MaskedAtFirst()
    known = KnownWays(model)
    known.learn(way_of(known, lambda: model(x)))
    short = -x[:, :5]
    assert known.news(way_of(known, lambda: model(short))) == ""
    model.late = True
    assert "it goes another way at test_ways.py:" in known.news(way_of(known, lambda: model(x)))


def test_modes_of_the_models_own_go_on_while_the_way_is_noted(x):
    class OnDevice(Turning):
        def forward(self, x: Tensor) -> Tensor:
            with torch.device("cpu"):
                return self.gru(x, torch.zeros(1, len(x), UNITS))[0]

    model = OnDevice()
    model.cell = None
    with hs.Carry(model, override=True):
        out = torch.cat([model(piece) for piece in x.split(6, 1)], 1)
    assert torch._C._len_torch_function_stack() == 0
    torch.testing.assert_close(out, model(x))


def test_a_call_that_raises_leaves_no_mode_behind(x):
    model = Harmless()
    model.cell = None
    with hs.Carry(model, override=True), pytest.raises(TypeError):
        model(x)
    assert torch._C._len_torch_function_stack() == 0
