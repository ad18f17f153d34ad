"""A state that a model keeps in its own attributes is owned by the carry while one is attached."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hiddenstate as hs
from hiddenstate.errors import CarryError, CarryWarning, StateMismatch

pytestmark = pytest.mark.usefixtures("no_warnings")

FEATURES, UNITS, BATCH, STEPS = 3, 4, 2, 12


class SelfHidden(nn.Module):
    """The tutorials' class: a state of its own, None at first, detached before it goes on."""

    def __init__(self, *, detach: bool = True) -> None:
        super().__init__()
        self.rnn = nn.GRU(FEATURES, UNITS, batch_first=True)
        self.detach, self.hidden = detach, None

    def reset(self) -> None:
        self.hidden = None

    def forward(self, x: Tensor) -> Tensor:
        if self.hidden is not None and self.detach:
            self.hidden = self.hidden.detach()
        out, self.hidden = self.rnn(x, self.hidden)
        return out


class Pair(nn.Module):
    """A tuple that is there from the beginning, for one number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(FEATURES, UNITS, batch_first=True)
        self.reset()

    def reset(self) -> None:
        self.hidden = (torch.zeros(1, BATCH, UNITS).double(), torch.zeros(1, BATCH, UNITS).double())

    def forward(self, x: Tensor) -> Tensor:
        out, hidden = self.rnn(x, self.hidden)
        self.hidden = tuple(part.detach() for part in hidden)
        return out


class Buffered(nn.Module):
    """A buffer that is written in place by a loop of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(FEATURES, UNITS)
        self.register_buffer("level", torch.zeros(BATCH, UNITS))

    def reset(self) -> None:
        self.level.zero_()

    def forward(self, x: Tensor) -> Tensor:
        out = []
        for frame in x.unbind(1):
            with torch.no_grad():
                self.level.mul_(0.5).add_(torch.tanh(self.inner(frame)))
            out.append(self.level.clone())
        return torch.stack(out, 1)


class Kept(NamedTuple):
    """A state in a class of its own."""

    slow: Tensor
    fast: Tensor


class InADict(nn.Module):
    """A named tuple in a dict in an attribute, with its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.cache = nn.Linear(FEATURES, UNITS), {}

    def reset(self) -> None:
        self.cache = {}

    def forward(self, x: Tensor) -> Tensor:
        state = self.cache.get("state", Kept(x.new_zeros(len(x), UNITS), x.new_zeros(len(x), UNITS)))
        out = []
        for frame in x.unbind(1):
            fast = torch.tanh(self.inner(frame) + 0.5 * state.fast + 0.1 * state.slow)
            state = Kept(0.9 * state.slow + 0.1 * fast, fast)
            out.append(state.fast + state.slow)
        self.cache = {"state": state}
        return torch.stack(out, 1)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "none at first": SelfHidden,
    "with its graph": lambda: SelfHidden(detach=False),
    "a pair": Pair,
    "a buffer": Buffered,
    "in a dict": InADict,
}
# There from the beginning, or handed to a layer that starts by itself: rows have a start.
STARTED = ("a pair", "a buffer", "none at first", "with its graph")


@pytest.fixture(params=MODELS)
def make(request) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        torch.manual_seed(0)
        return MODELS[request.param]().double()

    made.name = request.param
    return made


def whole(make: Callable[[], nn.Module], x: Tensor) -> Tensor:
    return make()(x).detach()


@pytest.mark.parametrize("override", [True, False])
def test_pieces_are_the_whole(make, override, x):
    model = make()
    with hs.Carry(model, override=override):
        out = torch.cat([model(piece).detach() for piece in x.split(4, 1)], 1)
    torch.testing.assert_close(out, whole(make, x))


@pytest.mark.parametrize("calls", [1, 2, 3])
def test_a_reset_of_the_carry_starts_the_model_anew(make, calls, x):
    model = make()
    with hs.Carry(model) as carry:
        for _ in range(2):
            out = [model(piece).detach() for piece in x.split(4, 1)[:calls]]
            torch.testing.assert_close(torch.cat(out, 1), whole(make, x)[:, : 4 * calls])
            carry.reset()


@pytest.mark.parametrize("calls", [1, 2])
def test_within_fresh_another_sequence_runs(make, calls, x):
    model, expected = make(), whole(make, x)
    with hs.Carry(model) as carry:
        for piece in x[:, :8].split(8 // calls, 1):
            model(piece)
        with carry.fresh():
            torch.testing.assert_close(model(x[:, :5]).detach(), expected[:, :5])
        torch.testing.assert_close(model(x[:, 8:]).detach(), expected[:, 8:])


def test_rows_start_anew_where_there_was_a_start(make, x):
    model = make()
    with hs.Carry(model) as carry:
        model(x[:, :4])
        model(x[:, 4:8])
        carry.reset([1])
        if make.name in STARTED:
            out = model(x[:, 8:]).detach()
            torch.testing.assert_close(out[0], whole(make, x)[0, 8:])
            torch.testing.assert_close(out[1], whole(make, x[:, 8:])[1])
        else:
            with pytest.raises(CarryError, match=r"cannot start anew: before its first call nothing was there for 2"):
                model(x[:, 8:])


@pytest.mark.parametrize("calls", [1, 2, 3])
def test_a_method_of_the_models_own_is_noticed(make, calls, x):
    model = make()
    with hs.Carry(model):
        for piece in x.split(4, 1)[:calls]:
            model(piece)
        model.reset()
        torch.testing.assert_close(model(x).detach(), whole(make, x))


def test_what_is_saved_goes_on_in_another_model(make, x):
    model, other = make(), make()
    with hs.Carry(model) as carry:
        model(x[:, :4])
        model(x[:, 4:8])
        kept = carry.state_dict()
    with hs.Carry(other) as carry:
        other(x[:, :4])
        other(x[:, 4:8])
        carry.load_state_dict(kept)
        torch.testing.assert_close(other(x[:, 8:]).detach(), whole(make, x)[:, 8:])


def test_the_state_can_be_taken_and_put_back(make, x):
    model = make()
    with hs.Carry(model) as carry:
        model(x[:, :4])
        model(x[:, 4:8])
        state = carry.state.clone()
        model(x[:, 8:])
        carry.state = state
        torch.testing.assert_close(model(x[:, 8:]).detach(), whole(make, x)[:, 8:])


def test_backward_after_every_call_works_though_the_model_keeps_its_graph(x):
    model = InADict().double()
    with hs.Carry(model):
        for piece in x.split(4, 1):
            model.zero_grad()
            model(piece).sum().backward()
            assert model.inner.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("k2", [4, 8])
def test_truncated_training_gives_the_gradients_of_a_layer_that_takes_its_state(k2, x):
    torch.manual_seed(0)
    model = SelfHidden().double()
    plain = copy.deepcopy(model.rnn)
    y = torch.randn(BATCH, STEPS, UNITS, dtype=torch.float64)
    for _ in hs.tbptt(model, x, y, lambda out, y: (out - y).square().mean(), k1=4, k2=k2):
        pass
    for _ in hs.tbptt(plain, x, y, lambda out, y: (out[0] - y).square().mean(), k1=4, k2=k2):
        pass
    torch.testing.assert_close([p.grad for p in model.rnn.parameters()], [p.grad for p in plain.parameters()])


class CutByTheModel(InADict):
    """A loop whose state the model itself cuts from the graph."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.cache = {"state": Kept(*(part.detach() for part in self.cache["state"]))}
        return out


def test_a_graph_that_the_model_cuts_itself_is_not_promised(x):
    model = CutByTheModel().double()
    with hs.Carry(model, detach=False):
        model(x[:, :4])
        with pytest.raises(CarryError, match=r"keeps fast, slow \(.*\) itself and cuts it from its graph"):
            model(x[:, 4:])


def test_another_number_of_rows_is_refused(x):
    model = SelfHidden().double()
    with hs.Carry(model):
        model(x[:, :4])
        model(x[:, 4:8])
        model(x[:, 8:])
        with pytest.raises((StateMismatch, RuntimeError)):
            model(torch.cat([x, x[:1]]))


def test_a_statistic_is_no_state(x):
    model = nn.Sequential(nn.BatchNorm1d(STEPS), nn.GRU(FEATURES, UNITS, batch_first=True)).double()
    with hs.Carry(model) as carry:
        model(x)
        before: Any = model[0].running_mean.clone()
        carry.reset()
        torch.testing.assert_close(model[0].running_mean, before)
        assert all("running" not in part for part in carry.state or ())


def test_the_model_keeps_what_it_holds_when_the_carry_is_closed(make, x):
    model = make()
    with hs.Carry(model):
        model(x[:, :4])
        model(x[:, 4:8])
    torch.testing.assert_close(model(x[:, 8:]).detach(), whole(make, x)[:, 8:])


class KeepsItself(nn.Module):
    """A loop that goes on from what the last call left in an attribute, as it is or in a box."""

    def __init__(self, box=lambda h: h, unbox=lambda h: h) -> None:
        super().__init__()
        self.inner, self.h, self.box, self.unbox = nn.Linear(FEATURES, UNITS), None, box, unbox

    def forward(self, x: Tensor) -> Tensor:
        h, out = x.new_zeros(len(x), UNITS) if self.h is None else self.unbox(self.h), []
        for frame in x.unbind(1):
            h = torch.tanh(self.inner(frame) + 0.5 * h)
            out.append(h)
        self.h = self.box(h)
        return torch.stack(out, 1)


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("override", [True, False])
def test_what_a_model_keeps_itself_goes_on_in_another_process(x, calls, override):
    model = KeepsItself().double()
    other, pieces = copy.deepcopy(model), x.split(4, dim=1)
    with hs.Carry(model, override=override) as carry:
        for piece in pieces[:calls]:
            model(piece)
        saved = copy.deepcopy(carry.state_dict())
        expected = [model(piece) for piece in pieces[calls:]]
    with hs.Carry(other, override=override) as carry:
        carry.load_state_dict(saved)
        for piece, each in zip(pieces[calls:], expected, strict=True):
            torch.testing.assert_close(other(piece), each)
        carry.reset()
        model.h = None
        torch.testing.assert_close(other(pieces[0]), model(pieces[0]))


def test_rows_that_are_to_start_anew_are_not_lost_by_a_checkpoint(x):
    model, other = KeepsItself().double(), KeepsItself().double()
    model.h, other.h = x.new_zeros(len(x), UNITS), x.new_zeros(len(x), UNITS)
    with hs.Carry(model) as carry:
        model(x)
        model(x)
        carry.reset([0])
        saved = carry.state_dict()
        carry.load_state_dict(saved)
    with hs.Carry(other) as carry, pytest.raises(CarryError, match=r"start anew, and the model keeps h itself.*twice"):
        carry.load_state_dict(saved)


def test_a_checkpoint_after_one_call_says_what_is_not_in_it(x):
    model = KeepsItself(Boxed, lambda boxed: boxed.h).double()
    with hs.Carry(model) as carry:
        model(x)
        with pytest.warns(CarryWarning, match="not in this checkpoint: h, of which a second call tells"):
            carry.state_dict()
        model(x)
        assert [part.rpartition(".")[2] for part in carry.state] == ["h"]


@dataclass
class Boxed:
    """A container that a checkpoint does not hold."""

    h: Tensor


@pytest.mark.parametrize("how", [{"lengths": [12, 5]}, {"starts": [[False] * 5 + [True] + [False] * 6] * 2}])
def test_marks_are_refused_where_the_model_keeps_what_no_layer_gave(how, x):
    model = KeepsItself().double()
    with hs.Carry(model) as carry:
        model(x)
        model(x)
        carry.mark(**{name: torch.tensor(value) for name, value in how.items()})
        with pytest.raises(CarryError, match=r"carry.mark was told where rows.*is kept by the model itself"):
            model(x)


def test_marks_hold_where_it_keeps_what_a_layer_gave(x):
    model, other = SelfHidden().double(), SelfHidden().double()
    other.load_state_dict(model.state_dict())
    other(x[:, :6])
    with hs.Carry(model) as carry:
        model(x[:, :4])
        carry.mark(lengths=torch.tensor([4, 2]))
        model(x[:, 4:8])
        torch.testing.assert_close(carry.state["rnn.h"][:, 1], other.hidden[:, 1].detach())


def test_gradients_go_back_through_what_a_model_keeps_itself(x):
    model = KeepsItself().double()
    other, y = copy.deepcopy(model), torch.zeros(BATCH, STEPS, UNITS, dtype=torch.float64)
    with hs.Carry(model):
        for _ in hs.tbptt(model, x, y, nn.functional.mse_loss, k1=6, k2=12):
            ours = [p.grad.clone() for p in model.parameters()]
            model.zero_grad()
    nn.functional.mse_loss(other(x)[:, 6:], y[:, 6:]).backward()
    torch.testing.assert_close(ours, [p.grad for p in other.parameters()])


def test_a_model_that_cuts_its_own_graph_is_trained_in_pieces(x):
    model = KeepsItself(torch.detach).double()
    losses = [float(each) for each in hs.tbptt(model, x, x[..., :1], lambda out, y: (out - y).square().mean(), k1=4)]
    assert len(losses) == 3


def test_another_number_of_rows_is_refused_before_the_model_meets_it(x):
    model = KeepsItself().double()
    with hs.Carry(model):
        model(x)
        model(x)
        with pytest.raises(StateMismatch, match=r"the input has 1 rows, but the carried state of '.*' has 2"):
            model(x[:1])


class Checkpointed(nn.Module):
    """A part of a model under activation checkpointing, or not."""

    def __init__(self, part: nn.Module, reentrant: bool | None) -> None:
        super().__init__()
        self.part, self.reentrant = part, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x) if self.reentrant is None else checkpoint(self.part, x, use_reentrant=self.reentrant)


class InItsForward(KeepsItself):
    """Only what reads the attribute is checkpointed, by the model itself."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class AsArgument(nn.Module):
    """What is checkpointed is handed the state, and hands it back."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.inner, self.h, self.reentrant = nn.Linear(FEATURES, UNITS), None, reentrant

    def run(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        out = []
        for frame in x.unbind(1):
            h = torch.tanh(self.inner(frame) + 0.5 * h)
            out.append(h)
        return torch.stack(out, 1), h

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), UNITS) if self.h is None else self.h
        again = self.reentrant is not None
        out, self.h = checkpoint(self.run, x, h, use_reentrant=self.reentrant) if again else self.run(x, h)
        return out


@pytest.mark.parametrize("override", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("part", [SelfHidden, Pair, Buffered, KeepsItself])
def test_what_the_model_keeps_is_not_carried_through_checkpointing(part, reentrant, override, x):
    def train() -> None:
        for piece in x.requires_grad_().split(4, 1):
            model(piece).square().sum().backward()

    model = Checkpointed(part().double(), reentrant)
    message = r"which the model keeps itself, under activation checkpointing: .* without"
    with hs.Carry(model, override=override), pytest.raises(CarryError, match=message):
        train()


def test_nor_where_the_model_checkpoints_what_reads_it(x):
    model = InItsForward().double()
    with hs.Carry(model), pytest.raises(CarryError, match=r"InItsForward goes on from h, .*activation checkpointing"):
        model(x)


def test_without_gradients_nothing_is_run_again_and_it_is_carried(x):
    model = Checkpointed(SelfHidden().double(), False)
    with hs.Carry(model), torch.no_grad():
        out = torch.cat([model(piece) for piece in x.split(4, 1)], 1)
        model.part.hidden = None
    torch.testing.assert_close(out, model.part(x).detach())


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_state_that_is_an_argument_of_what_is_checkpointed_is_carried(reentrant, x):
    grads = []
    for each in (None, reentrant):
        torch.manual_seed(0)
        model = AsArgument(each).double()
        with hs.Carry(model, detach=False):
            sum(model(piece).square().sum() for piece in x.clone().requires_grad_().split(4, 1)).backward()
        grads.append(model.inner.weight.grad)
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("units", [FEATURES, UNITS])
def test_a_layer_of_any_size_is_seen_to_keep_its_rows_apart(layers, units, recwarn, x):
    """Torch's kernels give other last bits with and without gradients, in some sizes."""

    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.hidden = nn.LSTM(FEATURES, units, layers, batch_first=True), None

        def forward(self, x: Tensor) -> Tensor:
            out, hidden = self.rnn(x, self.hidden)
            self.hidden = tuple(part.detach() for part in hidden)
            return out

    model, x = Kept(), x.float()
    with hs.Carry(model) as carry:
        model(x[:, :4])
        model(x[:, 4:8])
        carry.reset()
        out = model(x[:, 8:])
        model.hidden = None
        again = model(x[:, 8:])
    model.hidden = None
    torch.testing.assert_close(out, model(x[:, 8:]))
    torch.testing.assert_close(again, out)
    assert not recwarn


def test_rows_of_what_the_model_keeps_cannot_wait(x):
    model = KeepsItself().double()
    with hs.Carry(model, rows="first"):
        model(x)
        model(x)
        with pytest.raises(
            StateMismatch, match=r"has 1 rows, but h, which KeepsItself keeps itself, has 2: rows='first'"
        ):
            model(x[:1])


def test_what_autocast_leaves_behind_is_of_use_without_it(x):
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(FEATURES, UNITS), nn.Linear(UNITS, UNITS)
            self.register_buffer("h", torch.zeros(BATCH, UNITS))

        def forward(self, x: Tensor) -> Tensor:
            out = []
            for frame in x.unbind(1):
                self.h = torch.tanh(self.inner(frame) + self.outer(self.h))
                out.append(self.h)
            return torch.stack(out, 1)

    model, x = Mixed(), x.float()
    with hs.Carry(model):
        with torch.autocast("cpu", torch.bfloat16):
            model(x[:, :4])
        assert model(x[:, 4:]).dtype is torch.float32


class BufferOfZeros(nn.Module):
    """Keeps its state in a buffer of zeros, written in place or bound anew."""

    def __init__(self, kind, in_place):
        super().__init__()
        self.rnn, self.in_place = kind(3, 8, batch_first=True), in_place
        self.register_buffer("hidden", torch.zeros(1, 2, 8))

    def forward(self, x):
        out, hidden = self.rnn(x, self.hidden)
        if self.in_place:
            self.hidden.copy_(hidden.detach())
        else:
            self.hidden = hidden.detach()
        return out


@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN])
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("calls", [1, 2])
def test_single_rows_of_a_buffer_of_zeros_start_anew_however_it_is_written(calls, in_place, kind):
    model, x = BufferOfZeros(kind, in_place), torch.randn(2, 12, 3)
    whole = model.rnn(x)[0]
    with hs.Carry(model) as carry:
        for at in range(calls):
            model(x[:, 4 * at : 4 * at + 4])
        carry.reset([0])
        after = model(torch.stack([x[0, :4], x[1, 4 * calls : 4 * calls + 4]]))
    torch.testing.assert_close(after[0], whole[0, :4])
    torch.testing.assert_close(after[1], whole[1, 4 * calls : 4 * calls + 4])


class ForOtherRows(nn.Module):
    """Zeros for one row, which are made anew where a call has another number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.rows = nn.GRU(FEATURES, UNITS, batch_first=True), "1"
        self.hidden = [torch.zeros(1, 1, UNITS).double()]

    def forward(self, x: Tensor) -> Tensor:
        if str(len(x)) != self.rows:
            self.rows, self.hidden = str(len(x)), [x.new_zeros(1, len(x), UNITS)]
        out, h = self.rnn(x, self.hidden[0])
        self.hidden = [h.detach()]
        return out


class Expanded(nn.Module):
    """A buffer of zeros for one row, expanded over the rows of the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(FEATURES, UNITS)
        self.register_buffer("level", torch.zeros(1, UNITS))

    def forward(self, x: Tensor) -> Tensor:
        h, out = self.level.expand(len(x), -1), []
        for frame in x.unbind(1):
            h = torch.tanh(self.inner(frame) + 0.5 * h)
            out.append(h)
        self.level = h.detach()
        return torch.stack(out, 1)


@pytest.mark.parametrize("kind", [ForOtherRows, Expanded])
def test_zeros_for_other_rows_are_a_start_for_all_rows_and_for_single_ones(kind, x):
    model = kind().double()
    plain, rest = copy.deepcopy(model)(x), copy.deepcopy(model)(x[:, 8:])
    with torch.no_grad(), hs.Carry(model) as carry:
        pieces = [model(x[:, :4]), model(x[:, 4:8])]
        torch.testing.assert_close(torch.cat(pieces, 1), plain[:, :8])
        state = carry.state
        carry.reset([0])
        torch.testing.assert_close(model(x[:, 8:]), torch.cat([rest[:1], plain[1:, 8:]]))
        carry.reset()
        torch.testing.assert_close(model(x[:, 8:]), rest)
        carry.state = state
        torch.testing.assert_close(model(x[:, 8:]), plain[:, 8:])


class CacheBesideALayer(nn.Module):
    """A window over what a layer gives: the steps before it are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.past = nn.GRU(FEATURES, UNITS, batch_first=True), None

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.rnn(x)
        past = y.new_zeros(len(y), 2, UNITS) if self.past is None else self.past
        longer = torch.cat([past, y], 1)
        self.past = longer[:, -2:].detach()
        return nn.functional.avg_pool1d(longer.mT, 3, 1).mT


def test_what_is_kept_beside_a_carried_layer_is_adopted_though_the_call_was_handed_a_state(x):
    model = CacheBesideALayer().double()
    plain = copy.deepcopy(model)(x)
    with torch.no_grad(), hs.Carry(model) as carry:
        torch.testing.assert_close(torch.cat([model(piece) for piece in x.split(4, 1)], 1), plain)
        carry.reset()
        torch.testing.assert_close(model(x), plain)


def test_rows_are_told_of_a_piece_of_a_longer_sequence(x):
    torch.manual_seed(0)
    model = InADict()  # whose numbers are rounded otherwise where they lie otherwise
    long = torch.randn(3, STEPS, FEATURES)
    with torch.no_grad(), hs.Carry(model) as carry:
        for piece in long.split((4, 5, 3), 1):
            model(piece)
        assert carry.state is not None
        assert carry.state.batch == 3


def test_weights_that_torch_makes_anew_in_every_call_are_no_state(x):
    layer = nn.GRU(FEATURES, UNITS, batch_first=True)
    model = SelfHidden().double()
    model.rnn = nn.utils.parametrizations.weight_norm(layer.double(), "weight_hh_l0")
    with torch.no_grad():
        plain = copy.deepcopy(model)(x)
        with hs.Carry(model):
            torch.testing.assert_close(torch.cat([model(x[:, :8]), model(x[:, 8:])], 1), plain)
