"""A state that a model makes itself at the start of its call gives way to the carried one."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hiddenstate as hs
from hiddenstate.errors import CarryError, CarryWarning, StateMismatch

pytestmark = pytest.mark.usefixtures("no_warnings")

FEATURES, UNITS, BATCH, STEPS = 3, 4, 2, 12


class Loop(nn.Module):
    """A net written out, from zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(FEATURES, UNITS), nn.Linear(UNITS, UNITS)

    def start(self, x: Tensor) -> Tensor:
        return x.new_zeros(len(x), UNITS)

    def forward(self, x: Tensor) -> Tensor:
        h, out = self.start(x), []
        for frame in x.unbind(1):
            h = torch.tanh(self.inner(frame) + self.outer(h))
            out.append(h)
        return torch.stack(out, 1)


class LearnedLoop(Loop):
    """From a parameter that all rows share."""

    def __init__(self) -> None:
        super().__init__()
        self.h0 = nn.Parameter(torch.randn(1, UNITS))

    def start(self, x: Tensor) -> Tensor:
        return self.h0.expand(len(x), -1)


class BareParameter(LearnedLoop):
    """From the parameter as it is."""

    def start(self, x: Tensor) -> Tensor:
        return self.h0


class Encoded(Loop):
    """From what an encoder makes of the first frame."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(FEATURES, UNITS)

    def start(self, x: Tensor) -> Tensor:
        return torch.tanh(self.encode(x[:, 0]))


class InPlace(Loop):
    """A state that is written in place."""

    def forward(self, x: Tensor) -> Tensor:
        h, out = x.new_zeros(len(x), UNITS), []
        for frame in x.unbind(1):
            h.mul_(0.5).add_(self.inner(frame))
            out.append(h.clone())
        return torch.stack(out, 1)


class Shared(nn.Module):
    """Two parts that start from one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.Linear(FEATURES + UNITS, 4 * UNITS)

    def forward(self, x: Tensor) -> Tensor:
        h = c = torch.zeros(len(x), UNITS)
        out = []
        for t in range(x.shape[1]):
            i, f, g, o = self.gates(torch.cat([x[:, t], h], 1)).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            out.append(h)
        return torch.stack(out, 1)


class Stack(nn.Module):
    """Layers of one class: their loops stand at one place in the code."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = LearnedLoop(), LearnedLoop()
        self.between = nn.Linear(UNITS, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.between(self.one(x)))


class Given(nn.Module):
    """A layer of torch's that is handed a start."""

    def __init__(self, kind: type[nn.RNNBase] = nn.LSTM, learned: bool = False) -> None:
        super().__init__()
        self.rnn = kind(FEATURES, UNITS, batch_first=True)  # type: ignore[call-arg]
        self.h0 = nn.Parameter(torch.randn(1, 1, UNITS)) if learned else None

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(1, len(x), UNITS) if self.h0 is None else self.h0.repeat(1, len(x), 1)
        return self.rnn(x, (h, torch.zeros_like(h)) if isinstance(self.rnn, nn.LSTM) else h)[0]


class Stepped(nn.Module):
    """Cells of torch's in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.LSTMCell(FEATURES, UNITS), nn.GRUCell(UNITS, UNITS)

    def forward(self, x: Tensor) -> Tensor:
        state = {"low": (x.new_zeros(len(x), UNITS), x.new_zeros(len(x), UNITS)), "high": x.new_zeros(len(x), UNITS)}
        out = []
        for frame in x.unbind(1):
            state["low"] = self.low(frame, state["low"])
            state["high"] = self.high(state["low"][0], state["high"])
            out.append(state["high"])
        return torch.stack(out, 1)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "loop": Loop,
    "learned": LearnedLoop,
    "bare parameter": BareParameter,
    "in place": InPlace,
    "shared": Shared,
    "stack": Stack,
    "lstm": Given,
    "learned gru": lambda: Given(nn.GRU, learned=True),
    "stepped": Stepped,
}


@pytest.fixture(params=MODELS)
def model(request) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[request.param]().double()


def slopes(model: nn.Module, out: Tensor) -> dict[str, Tensor]:
    (out * torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype).reshape(out.shape)).sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def cuts() -> st.SearchStrategy[list[int]]:
    """Lengths of pieces, the first long enough to show what recurs."""
    return (
        st.lists(st.integers(1, 4), min_size=1, max_size=3)
        .map(lambda rest: [STEPS - sum(rest), *rest])
        .filter(lambda pieces: pieces[0] > 2)
    )


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=8, deadline=None)
@given(lengths=cuts())
def test_pieces_are_the_whole_in_values_and_gradients(name, lengths):
    torch.manual_seed(0)
    model = MODELS[name]().double()
    x = torch.randn(BATCH, STEPS, FEATURES, dtype=torch.float64)
    whole = model(x)
    expected = slopes(model, whole)
    with hs.Carry(model, override=True, detach=False):
        out = torch.cat([model(piece) for piece in x.split(lengths, 1)], 1)
    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(slopes(model, out), expected)


def test_a_reset_starts_as_the_model_does(model, x):
    whole = model(x)
    with hs.Carry(model, override=True) as carry:
        for _ in range(3):
            pieces = [model(piece) for piece in x.split(5, 1)]
            torch.testing.assert_close(torch.cat(pieces, 1), whole)
            carry.reset()


def test_rows_that_are_reset_are_separate_runs(model, x):
    with hs.Carry(model, override=True) as carry:
        model(x[:, :5])
        carry.reset([1])
        out = model(x[:, 5:])
    torch.testing.assert_close(out[0], model(x)[0, 5:])
    torch.testing.assert_close(out[1], model(x[:, 5:])[1])


def test_a_learned_start_keeps_its_gradient_in_the_rows_that_start_anew(x):
    model = LearnedLoop().double()
    with hs.Carry(model, override=True) as carry:
        model(x[:, :5])
        carry.reset([1])
        model(x[:, 5:])[1].sum().backward()
        ours = model.h0.grad.clone()
        model.zero_grad()
    model(x[:, 5:])[1].sum().backward()
    torch.testing.assert_close(ours, model.h0.grad)


def test_what_is_saved_goes_on_in_another_model(model, x):
    whole, other = model(x), copy.deepcopy(model)
    with hs.Carry(model, override=True) as carry:
        model(x[:, :5])
        kept, state = carry.state_dict(), carry.state
    with hs.Carry(other, override=True) as carry:
        carry.load_state_dict(kept)
        torch.testing.assert_close(other(x[:, 5:]), whole[:, 5:])
        carry.state = state
        torch.testing.assert_close(other(x[:, 5:]), whole[:, 5:])


def test_within_fresh_another_sequence_runs(model, x):
    whole = model(x)
    with hs.Carry(model, override=True) as carry:
        model(x[:, :5])
        with carry.fresh():
            torch.testing.assert_close(model(x[:, :4]), whole[:, :4])
        torch.testing.assert_close(model(x[:, 5:]), whole[:, 5:])


def test_the_model_is_as_it_was_once_the_carry_is_closed(model, x):
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    whole = model(x)
    with hs.Carry(model, override=True):
        model(x[:, :5])
        model(x[:, 5:])
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before
    torch.testing.assert_close(model(x), whole, atol=0, rtol=0)


def test_a_call_that_raises_keeps_the_states_of_before(model, x):
    whole = model(x)
    with hs.Carry(model, override=True):
        model(x[:, :5])
        with pytest.raises(RuntimeError):
            model(x[:, 5:, :2])
        torch.testing.assert_close(model(x[:, 5:]), whole[:, 5:])


def test_another_number_of_rows_is_refused(model, x):
    with hs.Carry(model, override=True):
        model(x)
        with pytest.raises((StateMismatch, RuntimeError)):
            model(torch.cat([x, x[:1]]))


@pytest.mark.parametrize("k2", [3, 6])
def test_truncated_training_gives_the_gradients_of_a_model_that_takes_its_state(k2, x):
    model, plain = Given(nn.GRU).double(), nn.GRU(FEATURES, UNITS, batch_first=True).double()
    plain.load_state_dict(model.rnn.state_dict())
    y = torch.randn(BATCH, STEPS, UNITS, dtype=torch.float64)
    with hs.Carry(model, override=True):
        ours = _train(model, x, y, k2, lambda out, y: (out - y).square().mean())
    theirs = _train(plain, x, y, k2, lambda out, y: (out[0] - y).square().mean())
    torch.testing.assert_close(ours, theirs)


def _train(model: nn.Module, x: Tensor, y: Tensor, k2: int, loss: Callable[[Any, Tensor], Tensor]) -> list[Tensor]:
    for _ in hs.tbptt(model, x, y, loss, k1=3, k2=k2):
        pass
    return [p.grad for p in model.parameters()]


def test_without_override_a_warning_names_the_loop_and_what_to_do(x):
    model = Loop().double()
    with hs.Carry(model), pytest.warns(CarryWarning, match=r"h of the loop at test_override\.py:\d+.*override=True"):
        model(x)


def test_without_override_a_layer_that_is_handed_zeros_is_named(x):
    model = Given().double()
    with hs.Carry(model):
        model(x)
        with pytest.warns(CarryWarning, match=r"'rnn' is handed a state of zeros by the model itself.*override=True"):
            model(x)


# -- what is refused ---------------------------------------------------------------------------------------------------


class InFront(Loop):
    """A convolution in front, which looks across the cut."""

    def __init__(self) -> None:
        super().__init__()
        self.smooth = nn.Conv1d(FEATURES, FEATURES, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.smooth(x.mT).mT)


class Positions(Given):
    """Positions that are counted from zero in every call."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.arange(x.shape[1], dtype=x.dtype)[:, None])


class BatchStatistics(Given):
    """Numbers that depend on all steps of the call."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x.mT).mT)


class Pooled(Loop):
    """A mean over all steps behind the loop."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mean(1)


@pytest.mark.parametrize("make", [InFront, Positions, BatchStatistics, Pooled])
def test_what_looks_across_the_cut_is_refused(make, x):
    model = make().double()
    with hs.Carry(model, override=True), pytest.raises(CarryError, match=rf"something in {make.__name__} looks across"):
        model(x)


def test_told_otherwise_it_is_carried_and_said(x):
    model = InFront().double()
    with hs.Carry(model, override=True, exact=False) as carry:
        with pytest.warns(CarryWarning, match="looks across the cut.*the model: what stands in front looks across"):
            model(x)
        assert carry.state is not None


class Branches(Loop):
    """Another way through the model."""

    def forward(self, x: Tensor, *, other: bool = False) -> Tensor:
        if not other:
            return super().forward(x)
        h, out = torch.ones(len(x), UNITS, dtype=x.dtype), []
        for frame in x.unbind(1):
            h = torch.sigmoid(self.inner(frame) - self.outer(h))
            out.append(h)
        return torch.stack(out, 1)


@pytest.mark.parametrize("calls", [1, 3])
def test_a_call_that_takes_another_way_stops_with_a_sentence(calls, x):
    model = Branches().double()
    with hs.Carry(model, override=True) as carry:
        for piece in x.split(STEPS // calls, 1):
            model(piece)
        before = carry.state
        with pytest.raises(CarryError, match="took another way through the model than the ones before"):
            model(x, other=True)
        torch.testing.assert_close(dict(carry.state), dict(before))


class Filled(Loop):
    """A cache that is filled in the first call, by the code that makes starts."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = self.start(x)
        return super().forward(x) + self.table[:, None]


def test_a_table_that_only_the_first_call_makes_moves_no_start(x):
    model = Filled().double()
    whole = model(x)
    model.table = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CarryWarning)
        try:
            with hs.Carry(model, override=True):
                out = torch.cat([model(piece) for piece in x.split(4, 1)], 1)
        except CarryError:
            return  # said
    torch.testing.assert_close(out, whole)


class Checkpointed(Loop):
    """A loop, or a cell, under activation checkpointing."""

    def __init__(self, *, reentrant: bool, cell: bool) -> None:
        super().__init__()
        self.reentrant, self.cell = reentrant, nn.GRUCell(FEATURES, UNITS) if cell else None

    def forward(self, x: Tensor) -> Tensor:
        if self.cell is None:
            return checkpoint(super().forward, x, use_reentrant=self.reentrant)
        h, out = x.new_zeros(len(x), UNITS), []
        for frame in x.unbind(1):
            h = checkpoint(self.cell, frame, h, use_reentrant=self.reentrant)
            out.append(h)
        return torch.stack(out, 1)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("cell", [True, False])
@pytest.mark.parametrize("closed", [True, False])
def test_checkpointing_gives_the_same_gradients_or_is_refused(reentrant, cell, closed, x):
    torch.manual_seed(0)
    model = Checkpointed(reentrant=reentrant, cell=cell).double()
    x.requires_grad_()
    expected = slopes(model, model(x))
    carry = hs.Carry(model, override=True, detach=False)
    try:
        out = torch.cat([model(piece) for piece in x.split(4, 1)], 1)
        if closed:
            carry.close()
        ours = slopes(model, out)
    except CarryError as error:
        assert reentrant or not cell, "a cell is heard, and known again"
        assert "checkpointing" in str(error)  # noqa: PT017
        return
    finally:
        carry.close()
    torch.testing.assert_close(ours, expected)


class CheckpointedLayer(Given):
    """A layer, its own start within what is checkpointed."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__(nn.GRU)
        self.inner, self.reentrant = nn.Linear(FEATURES, FEATURES), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, self.inner(x), use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_graph_goes_through_a_checkpointed_layer_or_is_refused(reentrant, x):
    model = CheckpointedLayer(reentrant=reentrant).double()
    expected = slopes(model, model(x))
    with hs.Carry(model, override=True, detach=False):
        first = model(x[:, :5])
        if reentrant:
            with pytest.raises(CarryError, match=r"reentrant form, through which no gradient goes back"):
                model(x[:, 5:])
            return
        out = torch.cat([first, model(x[:, 5:])], 1)
    torch.testing.assert_close(slopes(model, out), expected)


def test_a_second_carry_of_one_model_is_refused():
    model = Loop()
    with hs.Carry(model, override=True), pytest.raises(CarryError, match="Loop is carried by another Carry already"):
        hs.Carry(model, override=True)
    hs.Carry(model, override=True).close()


class Twice(Given):
    """One layer for two sequences, each from a start of its own."""

    def forward(self, x: Tensor, *, twice: bool = False) -> Tensor:
        out = super().forward(x)
        return out + super().forward(x.flip(2)) if twice else out


def test_a_second_start_in_one_call_is_refused(x):
    model = Twice().double()
    with hs.Carry(model, override=True):
        model(x)
        with pytest.raises(CarryError, match="called again in this call of the model with a start of its own"):
            model(x, twice=True)


def test_marks_in_mid_sequence_are_refused_for_a_loop_and_kept_for_a_layer(x):
    starts = torch.zeros(BATCH, STEPS, dtype=torch.bool)
    starts[1, 4] = True
    loop, layer = Loop().double(), Given().double()
    with hs.Carry(loop, override=True) as carry:
        loop(x)
        carry.mark(starts=starts)
        with pytest.raises(CarryError, match="rows start anew in mid-sequence, but 'loop"):
            loop(x)
    with hs.Carry(layer, override=True) as carry:
        carry.mark(starts=starts)
        out = layer(x)
    torch.testing.assert_close(out[1, 4:], layer(x[1:, 4:])[0])


def test_each_row_of_a_loop_is_kept_at_its_own_length(x):
    model, lengths = Loop().double(), torch.tensor([5, 3])
    with hs.Carry(model, override=True) as carry:
        model(x[:, :4])
        carry.mark(lengths=lengths)
        model(x[:, 4:9])
        out = model(x[:, 9:])
    ways = [torch.cat([x[:1, :9], x[:1, 9:]], 1), torch.cat([x[1:, :7], x[1:, 9:]], 1)]
    torch.testing.assert_close(out, torch.cat([model(way)[:, -3:] for way in ways]))


def test_a_part_of_the_model_that_is_called_by_itself_is_said_not_to_be_carried(x):
    model = Stack().double()
    with hs.Carry(model, override=True):
        model(x)
        with pytest.warns(CarryWarning, match="not carried in calls of a part of the model by itself: one.loop"):
            model.one(x)


@dataclass
class Pair:
    """A state in a class of one's own."""

    h: Tensor
    c: Tensor


class InAnObject(Shared):
    """The state in a dataclass."""

    def forward(self, x: Tensor) -> Tensor:
        state, out = Pair(torch.zeros(len(x), UNITS), torch.zeros(len(x), UNITS)), []
        for frame in x.unbind(1):
            i, f, g, o = self.gates(torch.cat([frame, state.h], 1)).chunk(4, 1)
            c = f.sigmoid() * state.c + i.sigmoid() * g.tanh()
            state = Pair(o.sigmoid() * c.tanh(), c)
            out.append(state.h)
        return torch.stack(out, 1)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_autocast_is_the_same_in_pieces(half):
    torch.manual_seed(0)
    model, x = InAnObject(), torch.randn(BATCH, STEPS, FEATURES)
    with torch.autocast("cpu", dtype=half), torch.no_grad():
        whole = model(x)
        with hs.Carry(model, override=True):
            out = torch.cat([model(piece) for piece in x.split(4, 1)], 1)
    torch.testing.assert_close(out, whole)


def test_training_and_evaluation_may_take_turns(x):
    model = nn.Sequential(Loop(), nn.Dropout(0.5)).double()
    model.eval()
    whole = model(x)
    with hs.Carry(model, override=True) as carry:
        model.train()
        model(x[:, :6])
        carry.reset()
        model.eval()
        out = torch.cat([model(piece) for piece in x.split(4, 1)], 1)
    torch.testing.assert_close(out, whole)


@pytest.mark.parametrize("how", ["the model", "its forward", "a part of it"])
def test_compiled_models_are_carried_as_they_are_written(how, x):
    inner = Loop().double()
    whole = inner(x)
    if how == "its forward":
        inner.forward = torch.compile(inner.forward, backend="eager")
    model = torch.compile(inner, backend="eager") if how == "the model" else inner
    if how == "a part of it":
        model = nn.Sequential(torch.compile(inner, backend="eager"))
    with hs.Carry(model, override=True):
        out = torch.cat([model(piece) for piece in x.split(4, 1)], 1)
    torch.testing.assert_close(out, whole)
