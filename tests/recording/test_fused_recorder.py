"""Calls of a fused layer in one call of the model: one run where each goes on from the last, else several."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hiddenstate as hs
from tests.support.calling import WAYS


class Stepped(nn.Module):
    """A fused layer that is called on `size` steps at a time, its state handed on, changed on the way or not at all."""

    def __init__(self, kind, size=1, between=lambda state: state):
        super().__init__()
        self.rnn, self.size, self.between = kind(3, 4, 2, batch_first=True), size, between

    def forward(self, x):
        state, outs = None, []
        for piece in x.split(self.size, dim=1):
            out, state = self.rnn(piece, state)
            state = self.between(state)
            outs.append(out)
        return torch.cat(outs, dim=1)


def on_both(change):
    return lambda state: tuple(map(change, state)) if isinstance(state, tuple) else change(state)


KINDS = pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])


@KINDS
@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("grads", [True, False])
def test_a_layer_that_is_stepped_is_recorded_as_in_one_call(kind, size, grads):
    stepped, x = Stepped(kind, size), torch.randn(2, 7, 3)
    with hs.record(stepped, gates=True, grads=grads) as rec:
        stepped(x).square().sum().backward()
    with hs.record(stepped.rnn, gates=True, grads=grads) as once:
        stepped.rnn(x)[0].square().sum().backward()
    for depth in ("l0", "l1"):
        pieces, whole = rec[f"rnn.{depth}"], once[depth]
        assert pieces.h.shape == (2, 7, 4)
        assert (pieces.gates.keys(), pieces.grads.keys()) == (whole.gates.keys(), whole.grads.keys())
        for group in ("states", "gates", "grads"):
            for name, value in getattr(whole, group).items():
                torch.testing.assert_close(getattr(pieces, group)[name], value)
        torch.testing.assert_close(pieces.initial["h"], whole.initial["h"])


@pytest.mark.filterwarnings("ignore:not recorded")  # what `map` hands on could be anything, and that is said
@KINDS
def test_a_state_that_is_changed_on_the_way_still_goes_on(kind):
    masked = Stepped(kind, between=on_both(lambda part: part * 0.5))
    with hs.record(masked) as rec:
        masked(torch.randn(2, 5, 3))
    assert rec["rnn.l0"].h.shape == (2, 5, 4)


@KINDS
@pytest.mark.parametrize("between", [lambda state: None, on_both(torch.zeros_like)], ids=["none", "zeros"])
def test_calls_that_start_anew_are_runs_of_their_own(kind, between):
    model = Stepped(kind, 2, between=between)
    with hs.record(model) as rec:
        model(torch.randn(2, 6, 3))
    assert [run.h.shape[1] for run in rec.runs("rnn.l1")] == [2, 2, 2]


def test_two_calls_of_the_model_are_two_runs():
    model = Stepped(nn.GRU)
    with hs.record(model) as rec:
        model(torch.randn(2, 6, 3))
        model(torch.randn(2, 4, 3))
    assert [run.h.shape[1] for run in rec.runs("rnn.l0")] == [6, 4]


def test_steps_are_thinned_along_the_whole_run():
    model, x = Stepped(nn.GRU, 2), torch.randn(2, 7, 3)
    with hs.record(model) as rec, hs.record(model, every=3) as thin:
        model(x)
    assert torch.equal(thin["rnn.l0"].h, rec["rnn.l0"].h[:, ::3])


def test_a_long_run_goes_to_disk_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr("hiddenstate.recording.runs.OpenRuns.piece_bytes", 200)
    model = Stepped(nn.LSTM)
    with hs.record(model, to=tmp_path / "run") as rec, hs.record(model) as memory:
        model(torch.randn(2, 30, 3))
    loaded = hs.load_recording(tmp_path / "run")
    for track in ("rnn.l0", "rnn.l1"):
        for part, values in memory[track].states.items():
            assert torch.equal(loaded[track].states[part], values)
            assert torch.equal(rec[track].states[part], values)


@KINDS
@pytest.mark.parametrize("gates", [True, False])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_every_way_to_call_a_layer_is_recorded_alike_and_trains_alike(way, kind, gates):
    layer = kind(3, 4, batch_first=True)
    state = (torch.randn(1, 2, 4), torch.randn(1, 2, 4)) if kind is nn.LSTM else torch.randn(1, 2, 4)
    x = torch.randn(2, 5, 3, requires_grad=True)
    layer(x, state)[0].square().sum().backward()
    plain = [parameter.grad.clone() for parameter in layer.parameters()]
    layer.zero_grad()
    with hs.record(layer, gates) as rec:
        out = way(layer, x, state)[0]
        out.square().sum().backward()
    torch.testing.assert_close(rec["l0"].h, out.detach())
    for parameter, grad in zip(layer.parameters(), plain, strict=True):
        torch.testing.assert_close(parameter.grad, grad)


@pytest.mark.parametrize("gates", [True, False])
@pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward outside"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.LSTMCell, nn.GRUCell])
def test_a_checkpointed_model_is_recorded_and_trains_as_ever(kind, inside, gates):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = kind(3, 4)
            self.drop = nn.Dropout(0.5)

        def forward(self, x):
            return checkpoint(self.run, x, use_reentrant=False)

        def run(self, x):
            if isinstance(self.rnn, nn.RNNBase):
                return self.rnn(self.drop(x))[0]
            state = None
            for step in self.drop(x):
                state = self.rnn(step, state)
            return state[0] if isinstance(state, tuple) else state

    model, x = Model(), torch.randn(5, 2, 3, requires_grad=True)

    def train(watch):
        torch.manual_seed(0)
        model.zero_grad()
        with watch as rec:
            loss = model(x).square().sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        return rec, [parameter.grad.clone() for parameter in model.parameters()]

    _, plain = train(torch.enable_grad())
    rec, watched = train(hs.record(model, gates))
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    assert [run.h.shape[1] for track in rec for run in rec.runs(track)] == [5]


def test_gradients_inside_a_checkpoint_are_said_not_to_be_recorded():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.GRU(3, 4)

        def forward(self, x):
            return checkpoint(self.rnn, x, use_reentrant=False)[0]

    model = Model()
    warned = pytest.warns(hs.errors.RecordingWarning, match=r"'rnn': its gradients are not recorded.*checkpointing")
    with warned, hs.record(model, grads=True) as rec:
        model(torch.randn(5, 2, 3, requires_grad=True)).sum().backward()
    assert not rec["rnn"].grads


@pytest.mark.parametrize("gates", [True, False])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_marked_call_is_recorded_by_the_users_rows_and_steps(kind, gates):
    layer, x = kind(3, 4, 2, batch_first=True), torch.randn(3, 6, 3)
    starts = torch.zeros(3, 6, dtype=torch.bool)
    starts[1, 3] = True
    with hs.Carry(layer) as carry, hs.record(layer, gates) as rec, torch.no_grad():
        carry.mark(starts=starts, lengths=torch.tensor([6, 5, 0]))
        out, _ = layer(x)
    run = rec["l1"]
    assert run.lengths.tolist() == [6, 5, 0]
    torch.testing.assert_close(run.h, out)
    with hs.record(layer, gates) as alone, torch.no_grad():
        layer(x[1:2, 3:5])
    for name, gate in alone["l1"].gates.items():
        torch.testing.assert_close(run.gates[name][1:2, 3:5], gate)


def test_a_layer_that_is_never_called_is_named_at_the_end():
    class Choosing(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.other = nn.GRU(3, 4), nn.GRU(3, 4)

        def forward(self, x):
            return self.used(x)[0]

    model = Choosing()
    warned = pytest.warns(hs.errors.RecordingWarning, match=r"'other' was found in the model, but never called")
    with warned, hs.record(model):
        model(torch.randn(5, 2, 3))
    with hs.record(model, tracks="used"):
        model(torch.randn(5, 2, 3))
