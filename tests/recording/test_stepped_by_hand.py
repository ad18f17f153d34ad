"""Layers that are stepped by the user's own loop, as articles write it: one run, or as many as there are sequences."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

import hiddenstate as hs
from hiddenstate.errors import RecordingWarning, SeveralRuns

LAYERS = [nn.RNN, nn.GRU, nn.LSTM]


class Net(nn.Module):
    def __init__(self, kind=nn.LSTM):
        super().__init__()
        self.rnn = kind(3, 5, num_layers=2, batch_first=True)
        self.head = nn.Linear(5, 2)

    def forward(self, x, hidden=None):
        out, hidden = self.rnn(x, hidden)
        return self.head(out), hidden


class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(3, 5, batch_first=True)
        self.hidden = None

    def forward(self, x):
        out, self.hidden = self.rnn(x, self.hidden)
        return out


def detached(state):
    return tuple(part.detach() for part in state) if isinstance(state, tuple) else state.detach()


def copied(state):
    return tuple(part.detach().clone() for part in state) if isinstance(state, tuple) else state.detach().clone()


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("between", [lambda h: h, detached, copied], ids=["as it is", "detached", "copied"])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_that_a_script_steps_is_one_run_equal_to_one_call(kind, between, grad):
    rnn, x = kind(3, 5, batch_first=True), torch.randn(2, 7, 3)
    with torch.set_grad_enabled(grad), hs.record(rnn) as rec:
        h = None
        for t in range(7):
            _, h = rnn(x[:, t : t + 1], h)
            h = between(h)
    with hs.record(rnn) as whole:
        rnn(x)
    for name, part in whole["l0"].states.items():
        torch.testing.assert_close(rec["l0"].part(name), part)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("how", ["model", "model.rnn"])
def test_a_model_that_a_script_steps_is_one_run(kind, how):
    net, x = Net(kind), torch.randn(2, 6, 3)
    call = net if how == "model" else net.rnn
    with hs.record(net) as rec:
        h = None
        for t in range(6):
            _, h = call(x[:, t : t + 1], h)
    with hs.record(net) as whole:
        net(x)
    for track in ("rnn.l0", "rnn.l1"):
        torch.testing.assert_close(rec[track].h, whole[track].h)


class CharRNN(nn.Module):
    """As in torch's own tutorial on names."""

    def __init__(self):
        super().__init__()
        self.hidden_size = 5
        self.i2h = nn.Linear(3 + 5, 5)
        self.h2o = nn.Linear(5, 2)

    def forward(self, input, hidden):
        hidden = torch.tanh(self.i2h(torch.cat((input, hidden), 1)))
        return self.h2o(hidden), hidden

    def initHidden(self):
        return torch.zeros(1, 5)


def test_a_cell_of_ones_own_that_a_script_steps_is_one_run_for_each_name():
    rnn = CharRNN()
    with hs.record(rnn) as rec:
        states = []
        for length in (6, 4):
            hidden = torch.zeros(1, 5)
            for letter in torch.randn(length, 1, 3):
                _, hidden = rnn(letter, hidden)
                states.append(hidden)
    (track,) = rec
    assert [run.h.shape[1] for run in rec.runs(track)] == [6, 4]
    torch.testing.assert_close(rec.joined(track).h, torch.stack(states, 1))


def test_a_model_that_keeps_its_state_and_is_fed_frame_by_frame_is_one_run():
    net, x = Stateful(), torch.randn(2, 6, 3)
    with hs.record(net) as rec:
        for t in range(6):
            net(x[:, t : t + 1])
    assert rec["rnn"].h.shape == (2, 6, 5)


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("kind", [nn.RNNCell, nn.GRUCell])
def test_cell_sequences_from_random_states_are_as_many_runs(kind, grad):
    cell, x = kind(3, 5), torch.randn(2, 7, 3)
    with torch.set_grad_enabled(grad), hs.record(cell) as rec:
        for _ in range(3):
            h = torch.randn(2, 5)
            for t in range(7):
                h = cell(x[:, t], h)
    assert [run.h.shape[1] for run in rec.runs("l0")] == [7, 7, 7]


@pytest.mark.parametrize("kind", LAYERS)
def test_fused_sequences_from_random_states_are_as_many_runs(kind):
    rnn, x = kind(3, 5, batch_first=True), torch.randn(2, 4, 3)
    with hs.record(rnn) as rec:
        for _ in range(2):
            h = torch.randn(1, 2, 5)
            h = (h, torch.randn(1, 2, 5)) if kind is nn.LSTM else h
            for t in range(4):
                _, h = rnn(x[:, t : t + 1], h)
    assert [run.h.shape[1] for run in rec.runs("l0")] == [4, 4]


class Twice(nn.Module):
    """Encodes two sentences with one cell, as siamese models do."""

    def __init__(self, start):
        super().__init__()
        self.cell, self.start = nn.GRUCell(3, 5), start

    def encode(self, x):
        h = self.start(len(x))
        for x_t in x.unbind(1):
            h = self.cell(x_t, h) if h is not None else self.cell(x_t)
        return h

    def forward(self, a, b):
        return self.encode(a) - self.encode(b)


@pytest.mark.parametrize(
    "start",
    [lambda rows: None, lambda rows: torch.zeros(rows, 5), lambda rows: torch.randn(rows, 5)],
    ids=["none", "zeros", "random"],
)
def test_a_cell_that_runs_two_sentences_in_one_call_makes_two_runs(start):
    model = Twice(start)
    with hs.record(model) as rec:
        model(torch.randn(2, 4, 3), torch.randn(2, 6, 3))
    assert [run.h.shape[1] for run in rec.runs("cell")] == [4, 6]


@settings(max_examples=30, deadline=None)
@given(cuts=st.lists(st.integers(1, 4), min_size=1, max_size=6), kind=st.sampled_from(LAYERS))
def test_pieces_whose_state_is_handed_on_are_one_run_wherever_they_are_cut(cuts, kind):
    rnn, x = kind(3, 5, batch_first=True), torch.randn(2, sum(cuts), 3)
    with hs.record(rnn) as rec:
        h = None
        for piece in x.split(cuts, dim=1):
            _, h = rnn(piece, h)
    with hs.record(rnn) as whole:
        rnn(x)
    torch.testing.assert_close(rec["l0"].h, whole["l0"].h)
    assert torch.equal(rec["l0"].lengths, whole["l0"].lengths)


@pytest.mark.parametrize("detach", [True, False])
@pytest.mark.parametrize("wrap", [lambda gru: gru, nn.Sequential, lambda gru: nn.Sequential(nn.Sequential(gru))])
def test_chunks_of_a_carried_stream_are_runs_that_can_be_joined(wrap, detach):
    net, x = wrap(nn.GRU(3, 5, batch_first=True)), torch.randn(2, 12, 3)
    with hs.record(net) as whole:
        net(x)
    (track,) = whole
    with hs.Carry(net, detach=detach), hs.record(net) as rec:
        for chunk in x.split(5, dim=1):
            net(chunk)
    assert len(rec.runs(track)) == 3
    with pytest.raises(SeveralRuns, match=rf"3 runs.*rec\.joined\('{track}'\)"):
        rec[track]
    torch.testing.assert_close(rec.joined(track).h, whole[track].h)
    assert torch.equal(rec.joined(track).initial["h"], rec.runs(track)[0].initial["h"])


def test_a_state_that_the_caller_hands_on_makes_one_run_also_where_one_is_carried():
    gru, x = nn.GRU(3, 5, batch_first=True), torch.randn(2, 12, 3)
    with hs.Carry(gru), hs.record(gru) as rec:
        state = None
        for chunk in x.split(5, dim=1):
            _, state = gru(chunk, state)
    assert [run.h.shape[1] for run in rec.runs("l0")] == [12]


def never_reassigned(cell, x):
    h = torch.zeros(2, 5)
    for t in range(5):
        cell(x[:, t], h)


def dropped(cell, x):
    for t in range(5):
        cell(x[:, t])


def renamed(cell, x):
    h = torch.randn(2, 5)
    for t in range(5):
        h_next = cell(x[:, t], h)
    return h_next


@pytest.mark.parametrize("loop", [never_reassigned, dropped, renamed])
def test_a_loop_that_never_hands_the_new_state_on_is_told(loop):
    cell, x = nn.GRUCell(3, 5), torch.randn(2, 5, 3)
    said = r"the model itself was called 5 times with the same state.*hand it on"
    with pytest.warns(RecordingWarning, match=said), hs.record(cell):
        loop(cell, x)


@pytest.mark.parametrize("kind", LAYERS)
def test_a_fused_layer_whose_state_is_never_handed_on_is_told(kind):
    net, x = Net(kind), torch.randn(2, 5, 3)
    with pytest.warns(RecordingWarning, match=r"'rnn' was called 5 times with the same state"), hs.record(net):
        [net(x[:, t : t + 1]) for t in range(5)]


def averaged(h):
    return h.detach().mean(0, keepdim=True).expand(4, -1)


@pytest.mark.parametrize(
    "broadcast",
    [lambda h: h[:1].expand(4, -1), lambda h: h[1:2].repeat(4, 1), lambda h: h[[0, 0, 0, 0]], averaged],
    ids=["expanded", "repeated", "indexed", "averaged"],
)
def test_one_row_s_state_for_all_rows_is_told(broadcast):
    cell, x = nn.GRUCell(3, 5), torch.randn(4, 5, 3)

    def loop(h):
        for t in range(5):
            h = broadcast(cell(x[:, t], h)) if t < 4 else cell(x[:, t], h)

    with pytest.warns(RecordingWarning, match=r"4 times with one state for all rows"), hs.record(cell):
        loop(torch.zeros(4, 5))


def test_whole_sequences_and_healthy_loops_are_told_nothing():
    rnn, cell, x = nn.GRU(3, 5, batch_first=True), nn.GRUCell(3, 5), torch.randn(4, 6, 3)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with hs.record(rnn):
            for _ in range(6):
                rnn(x)
                rnn(x, torch.zeros(1, 4, 5))
        with hs.record(cell):
            for _ in range(4):
                h = torch.zeros(4, 5)
                for t in range(6):
                    h = cell(x[:, t], h)
    assert said == []


@pytest.mark.parametrize("cut", [1, 3])
def test_a_recurrent_of_a_cell_is_stepped_as_torch_s_layers_are(cut):
    rnn, x = hs.Recurrent(nn.GRUCell, 3, 5, num_layers=2), torch.randn(2, 9, 3)
    with hs.record(rnn) as whole:
        rnn(x)
    with hs.record(rnn) as rec:
        state = None
        for piece in x.split(cut, dim=1):
            _, state = rnn(piece, state)
        rnn(x)
    for track in whole:
        first, second = rec.runs(track)
        torch.testing.assert_close(first.h, whole[track].h)
        torch.testing.assert_close(second.h, whole[track].h)


class InTurns(nn.Module):
    """Steps one cell or layer along several sequences, whose turn it is as `turns` says."""

    def __init__(self, kind):
        super().__init__()
        self.rnn = kind(3, 5, **({} if kind.__name__.endswith("Cell") else {"batch_first": True}))
        self.fused, self.pair = not kind.__name__.endswith("Cell"), kind.__name__.startswith("LSTM")
        self.learned = nn.Parameter(torch.randn(4, 2, 5))

    def start(self, how, number):
        shape = (1, 2, 5) if self.fused else (2, 5)
        made = {
            "none": lambda: None,
            "zeros": lambda: torch.zeros(shape),
            "random": lambda: torch.randn(shape),
            "learned": lambda: self.learned[number].view(shape),
        }[how]
        h = made()
        return (h, made()) if self.pair and h is not None else h

    def step(self, x, h):
        if self.fused:
            return self.rnn(x.unsqueeze(1), h)[1]
        return self.rnn(x, h) if h is not None else self.rnn(x)

    def forward(self, x, turns, start, between):
        states = [self.start(start, number) for number in range(4)]
        seen = [[] for _ in states]
        for t, number in enumerate(turns):
            states[number] = self.step(x[t], states[number])
            h = states[number][0] if self.pair else states[number]
            seen[number].append(h.detach().reshape(2, 5))
            states[number] = between(states[number])
        return [torch.stack(each, 1) for each in seen if each]


def masked(state):
    rows = torch.tensor([[1.0], [0.0]])
    return tuple(part * rows for part in state) if isinstance(state, tuple) else state * rows


def normed(state):
    return tuple(map(normed, state)) if isinstance(state, tuple) else nn.functional.layer_norm(state, (5,))


KINDS = [nn.RNNCell, nn.GRUCell, nn.LSTMCell, nn.RNN, nn.GRU, nn.LSTM]
BETWEEN = {"as it is": lambda h: h, "detached": detached, "copied": copied, "masked": masked, "normed": normed}


def runs_in_turns(net, *how, where, grad):
    x = torch.randn(len(how[0]), 2, 3)
    with torch.set_grad_enabled(grad), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of states that are changed on the way
        with hs.record(net if where == "model" else net.rnn) as rec:
            made = net(x, *how)
    return [run.h for run in rec.runs("l0" if where == "script" else "rnn")], made


@settings(max_examples=60, deadline=None)
@given(
    turns=st.lists(st.integers(0, 3), min_size=1, max_size=12),
    kind=st.sampled_from(KINDS),
    start=st.sampled_from(["none", "zeros", "random", "learned"]),
    between=st.sampled_from([name for name in BETWEEN if name != "normed"]),
    where=st.sampled_from(["model", "script"]),
    grad=st.booleans(),
    seed=st.integers(0, 9),
)
def test_sequences_that_one_layer_runs_in_turns_are_a_run_each(turns, kind, start, between, where, grad, seed):
    # Where no graph tells, a start of its own can only be told from a state that was changed while that is still held.
    assume(grad or where == "script" or start in ("none", "zeros") or between == "as it is")
    torch.manual_seed(seed)
    runs, made = runs_in_turns(InTurns(kind), turns, start, BETWEEN[between], where=where, grad=grad)
    order = list(dict.fromkeys(turns))
    expected = dict(zip(sorted(order), made, strict=True))
    assert [run.shape for run in runs] == [expected[number].shape for number in order]
    for run, number in zip(runs, order, strict=True):
        torch.testing.assert_close(run, expected[number])


def test_a_recurrent_that_runs_two_sequences_in_turns_makes_two_runs():
    rnn, x = hs.Recurrent(nn.GRUCell, 3, 5, num_layers=2), torch.randn(2, 2, 6, 3)
    with hs.record(rnn) as rec:
        states = [None, None]
        for t in range(6):
            for i in (0, 1):
                _, states[i] = rnn(x[i, :, t : t + 1], states[i])
    for i in (0, 1):
        with hs.record(rnn) as whole:
            rnn(x[i])
        for track in whole:
            torch.testing.assert_close(rec.runs(track)[i].h, whole[track].h)


@pytest.mark.parametrize("kind", [nn.GRUCell, nn.LSTM])
def test_sequences_in_turns_are_written_to_disk_as_a_run_each(kind, tmp_path, monkeypatch):
    monkeypatch.setattr("hiddenstate.recording.runs.OpenRuns.piece_bytes", 100)  # both go there in several pieces
    net, turns = InTurns(kind), [0, 1] * 8
    with hs.record(net.rnn, to=tmp_path / "rec") as rec:
        made = net(torch.randn(16, 2, 3), turns, "zeros", lambda h: h)
    for found in (rec, hs.load_recording(tmp_path / "rec")):
        for run, expected in zip(found.runs("l0"), made, strict=True):
            torch.testing.assert_close(run.h, expected)
