"""`record(graph=True)`: recorded states train the model that made them, as its own outputs would."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import hiddenstate as hs
from hiddenstate import pool, regularize
from hiddenstate.errors import BadInput, RecordingWarning

KINDS = {
    "rnn": lambda: nn.RNN(3, 4, 2, batch_first=True),
    "gru": lambda: nn.GRU(3, 4, 2, batch_first=True, bidirectional=True),
    "lstm": lambda: nn.LSTM(3, 4, 2, batch_first=True, bidirectional=True),
    "lstm with a projection": lambda: nn.LSTM(3, 4, 2, batch_first=True, proj_size=2),
    "lstm without bias": lambda: nn.LSTM(3, 4, 2, batch_first=True, bias=False),
}


def gradients(loss, model):
    return torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, retain_graph=True)


def stepped_lstm(lstm, x, lengths):
    """All c of a one-layer LSTM, one step at a time."""
    state, cells = None, []
    for t in range(x.shape[1]):
        _, state = lstm(x[:, t : t + 1], state)
        cells.append(state[1][0])
    c = torch.stack(cells, 1)
    return c * (torch.arange(x.shape[1]) < lengths.unsqueeze(1)).unsqueeze(-1)


@pytest.mark.parametrize("gates", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_last_layer_has_the_gradients_of_the_output(kind, gates):
    rnn, x = KINDS[kind](), torch.randn(2, 6, 3)
    with hs.record(rnn, gates, graph=True) as rec:
        out, _ = rnn(x)
    last = [rec[track] for track in rec if track.startswith("l1")]
    seen = torch.cat([run.h for run in last], -1)
    assert torch.equal(seen, out)
    torch.testing.assert_close(gradients(seen.square().sum(), rnn), gradients(out.square().sum(), rnn))


@pytest.mark.parametrize("kind", KINDS)
def test_a_penalty_on_a_lower_layer_reaches_its_weights_and_no_higher_ones(kind):
    rnn = KINDS[kind]()
    with hs.record(rnn, graph=True) as rec:
        rnn(torch.randn(2, 6, 3))
    for name, part in rec["l0"].states.items():
        grads = dict(zip([n for n, _ in rnn.named_parameters()], gradients(part.square().sum(), rnn), strict=True))
        assert grads["weight_hh_l0"].abs().sum() > 0, name
        assert grads["weight_ih_l1"] is None, name


@pytest.mark.parametrize("lengths", [[6, 6], [6, 2]])
def test_the_cells_of_an_lstm_have_the_gradients_of_its_steps(lengths):
    lstm, x, lengths = nn.LSTM(3, 4, batch_first=True).double(), torch.randn(2, 6, 3).double(), torch.tensor(lengths)
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
    with hs.record(lstm, graph=True) as rec:
        lstm(packed)
    expected = stepped_lstm(lstm, x, lengths)
    torch.testing.assert_close(rec["l0"].c, expected)
    torch.testing.assert_close(gradients(rec["l0"].c.sin().sum(), lstm), gradients(expected.sin().sum(), lstm))


def test_a_loop_of_ones_own_and_a_cell_train_by_their_recorded_states():
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 4)

        def forward(self, x):
            h = x.new_zeros(len(x), 4)
            for x_t in x.unbind(1):
                h = torch.tanh(self.a(x_t) + self.b(h))
            return h

    loop, cell, x = Loop(), nn.LSTMCell(3, 4), torch.randn(2, 6, 3)
    with hs.record(loop, graph=True) as rec:
        last = loop(x)
    (track,) = rec
    torch.testing.assert_close(gradients(rec[track].h[:, -1].sum(), loop), gradients(last.sum(), loop))
    with hs.record(cell, graph=True) as rec:
        state = None
        for x_t in x.unbind(1):
            state = cell(x_t, state)
    torch.testing.assert_close(gradients(rec["l0"].c[:, -1].sum(), cell), gradients(state[1].sum(), cell))


def test_other_recordings_of_the_same_call_hold_no_graph():
    lstm, x = nn.LSTM(3, 4, 2, batch_first=True), torch.randn(2, 6, 3)
    with hs.record(lstm, gates=True) as plain, hs.record(lstm, graph=True) as rec, hs.record(lstm) as inner:
        lstm(x)
    for other in (plain, inner):
        for track in ("l0", "l1"):
            for name, part in other[track].states.items():
                assert not part.requires_grad
                torch.testing.assert_close(part, rec[track].part(name).detach())


def test_a_graph_is_not_written_to_disk():
    with pytest.raises(BadInput, match=r"graph=True.*cannot be written to a folder"):
        hs.record(nn.GRU(3, 4), graph=True, to="somewhere")


def test_where_checkpointing_throws_the_graph_away_it_is_said():
    gru, x = nn.GRU(3, 4), torch.randn(5, 2, 3)
    with pytest.warns(RecordingWarning, match=r"its graph is not recorded.*checkpointing"), hs.record(gru, graph=True):
        torch.utils.checkpoint.checkpoint(lambda x: gru(x)[0], x, use_reentrant=False)


HEADS = {
    "activity": regularize.activity,
    "temporal": regularize.temporal,
    "norm_stabilizer": regularize.norm_stabilizer,
    "mean": pool.Mean(),
    "last": pool.Last(),
    "attention": pool.Attention(4),
}


@pytest.mark.parametrize("head", HEADS)
def test_recorded_states_without_a_graph_are_refused_while_gradients_are_on(head):
    gru, x = nn.GRU(3, 4, batch_first=True), torch.randn(2, 5, 3)
    with hs.record(gru) as rec:
        gru(x)
    with pytest.raises(BadInput, match=r"'l0'.*without their graph.*trains nothing.*record\(model, graph=True\)"):
        HEADS[head](rec["l0"])
    with torch.no_grad():
        plain = HEADS[head](rec["l0"])
    frozen = rec["l0"].h.detach()  # on purpose: a head on frozen states
    torch.testing.assert_close(HEADS[head](frozen, rec["l0"].lengths), plain)
    with hs.record(gru, graph=True) as rec:
        gru(x)
    cost = HEADS[head](rec["l0"]).sum()
    torch.testing.assert_close(cost, plain.sum())
    cost.backward()
    assert gru.weight_hh_l0.grad.abs().sum() > 0


def test_measures_take_states_with_their_graph():
    gru = nn.GRU(3, 4, batch_first=True)
    with hs.record(gru, graph=True) as rec:
        gru(torch.randn(8, 50, 3))
    assert 0 <= float(hs.measure.saturation(rec["l0"]).share) <= 1
    assert rec["l0"].numpy()["h"].shape == (8, 50, 4)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.GRUCell])
def test_so_are_their_tensors_and_views_of_them(head, kind):
    torch.manual_seed(0)
    layer = kind(3, 4) if kind is nn.GRUCell else kind(3, 4, batch_first=True)
    with hs.record(layer) as rec:
        h = None
        for x in torch.randn(6, 2, 3) if kind is nn.GRUCell else [torch.randn(2, 6, 3)]:
            h = layer(x, h) if kind is nn.GRUCell else layer(x)
    run = rec[next(iter(rec))]
    for taken in (run.h, rec[run.track].h, run.h[:, ::2], run.h[:1]):
        with pytest.raises(BadInput, match=r"without their graph.*run.h.detach\(\), run.lengths train a head"):
            HEADS[head](taken)
        with torch.no_grad():
            expected = HEADS[head](taken)
        torch.testing.assert_close(HEADS[head](taken.detach()), expected)
        torch.testing.assert_close(HEADS[head](taken.clone()), expected)


def test_a_frozen_tensor_of_anybodys_else_is_taken():
    assert float(regularize.activity(torch.ones(1, 2, 3))) == 1
    assert pool.Mean()(hs.recording.Trajectory(torch.ones(1, 2, 3))).shape == (1, 3)


@pytest.mark.parametrize("wanted", ["graph", "grads"])
def test_of_a_frozen_layer_nothing_is_said_of_checkpointing(wanted):
    gru = nn.GRU(3, 4).requires_grad_(False)
    with warnings.catch_warnings(), hs.record(gru, **{wanted: True}) as rec:
        warnings.simplefilter("error")
        gru(torch.randn(5, 2, 3))
    assert not rec["l0"].h.requires_grad
    with pytest.raises(BadInput, match="as those of a model whose weights are frozen are in any case"):
        pool.Mean()(rec["l0"])
    pool.Mean()(rec["l0"].h.detach())
