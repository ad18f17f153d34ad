import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hiddenstate as hs
from hiddenstate import measure, pool, regularize
from hiddenstate.errors import BadInput
from hiddenstate.recording import refuse_time_first

ROWS, STEPS = 4, 9


def by_layer(kind, **settings):
    """Return what a layer gives for the same numbers of rows and steps, by its own axes."""
    layer = kind(3, 6, **settings)
    x = torch.randn(ROWS, STEPS, 3) if layer.batch_first else torch.randn(STEPS, ROWS, 3)
    return layer(x)


def by_loop(kind, axis):
    cell, state, outputs = kind(3, 6), None, []
    for _ in range(STEPS):
        state = cell(torch.randn(ROWS, 3), state)
        outputs.append(state[0] if isinstance(state, tuple) else state)
    return torch.stack(outputs, axis)


ON_THE_WAY = {
    "as it is": lambda h: h,
    "dropout": F.dropout,
    "layer norm": nn.LayerNorm(6),
    "half of the units": lambda h: h[..., :3],
    "turned twice": lambda h: h.transpose(0, 1).permute(1, 0, 2),
    "squashed": torch.tanh,
    "joined": lambda h: torch.cat([h, h], -1),
    "added to what it was made of": lambda h: torch.randn_like(h) + 0.5 * h + h.sigmoid(),
}


@pytest.mark.parametrize("way", ON_THE_WAY)
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
@pytest.mark.parametrize("layers", [1, 2])
def test_states_of_a_layer_are_refused_just_where_time_is_first(kind, layers, way):
    h = ON_THE_WAY[way](by_layer(kind, num_layers=layers)[0])
    with pytest.raises(BadInput, match=r"\(9, 4, \d+\) have time on axis 0.*is needed: h\.transpose\(0, 1\)"):
        refuse_time_first(h)
    refuse_time_first(h.transpose(0, 1))
    right = ON_THE_WAY[way](by_layer(kind, num_layers=layers, batch_first=True)[0])
    refuse_time_first(right)
    with pytest.raises(BadInput, match="time on axis 0"):
        refuse_time_first(right.transpose(-2, 0))


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_both_directions_are_joined_without_losing_their_axes(kind):
    with pytest.raises(BadInput, match="time on axis 0"):
        refuse_time_first(by_layer(kind, bidirectional=True)[0])
    refuse_time_first(by_layer(kind, bidirectional=True, batch_first=True)[0])


@pytest.mark.parametrize("kind", [nn.RNNCell, nn.GRUCell, nn.LSTMCell])
def test_steps_that_a_loop_stacked_are_told_from_rows_that_it_stacked(kind):
    with pytest.raises(BadInput, match=r"torch\.stack\(steps\)"):
        refuse_time_first(by_loop(kind, 0))
    refuse_time_first(by_loop(kind, 1))
    gru = nn.GRU(3, 6)
    refuse_time_first(torch.stack([gru(torch.randn(STEPS, 3))[0] for _ in range(ROWS)]))


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_final_states_that_lie_on_each_other_are_no_steps(kind):
    state = by_layer(kind, num_layers=3)[1]
    assert refuse_time_first(state[0] if isinstance(state, tuple) else state) is None


def test_what_we_make_ourselves_is_known_in_both_layouts():
    x, cell = torch.randn(ROWS, STEPS, 3), nn.GRUCell(3, 6)
    refuse_time_first(hs.unroll(cell, x)[0])
    with pytest.raises(BadInput, match="time on axis 0"):
        refuse_time_first(hs.Recurrent(nn.GRUCell, 3, 6, batch_first=False)(x.transpose(0, 1))[0])
    gru = nn.GRU(3, 6)
    with hs.record(gru, graph=True) as rec:
        gru(x.transpose(0, 1))
    refuse_time_first(rec["l0"].h)


def test_states_that_show_nothing_are_taken_as_they_are():
    h = by_layer(nn.GRU)[0]
    taken = [h.detach(), h.flatten(1), torch.randn(2, 3, 4, requires_grad=True) * 2]
    taken.append(torch.randn(1, 1, 6, requires_grad=True) + h)  # what stands first shows nothing
    assert [refuse_time_first(each) for each in taken] == [None] * 4


def test_where_torch_shows_nothing_of_a_graph_all_are_taken(monkeypatch):
    monkeypatch.setattr("hiddenstate.recording.layout._saved", lambda node, name: None)
    for kind in (nn.RNN, nn.GRU):
        assert refuse_time_first(by_layer(kind)[0]) is None


TAKES_ORDER = {
    "Mean": lambda h: pool.Mean()(h),
    "Attention": lambda h: pool.Attention(6)(h),
    "compare_heads": lambda h: pool.compare_heads(h, torch.arange(len(h)) % 2, folds=2),
    "temporal": regularize.temporal,
    "norm_stabilizer": regularize.norm_stabilizer,
    "activity": lambda h: regularize.activity(h, torch.ones(len(h), dtype=torch.int64)),
    "VariationalDropout": regularize.VariationalDropout(),
    "probe": lambda h: measure.probe(h, torch.arange(len(h)) % 2, folds=2),
    "compare": measure.compare,
    "automaton": lambda h: measure.automaton(h, torch.zeros(h.shape[:2], dtype=torch.int64), 2),
    "novelty": lambda h: measure.novelty(h.detach(), h),
    "heatmap": hs.plot.heatmap,
    "trajectories": hs.plot.trajectories,
}


@pytest.mark.parametrize("name", TAKES_ORDER)
def test_whatever_reads_steps_in_their_order_refuses_states_with_time_first(name):
    h = by_layer(nn.LSTM)[0]
    with pytest.raises(BadInput, match=r"time on axis 0.*(transpose|batch_first=False)"):
        TAKES_ORDER[name](h)
    TAKES_ORDER[name](h.transpose(0, 1))


@pytest.mark.parametrize("asked", [measure.saturation, measure.statistics, measure.dead_units, measure.dimension])
def test_what_knows_no_order_takes_both_layouts_alike(asked):
    h = by_layer(nn.LSTM)[0]
    assert str(asked(h)) == str(asked(h.transpose(0, 1)))


def test_results_say_what_they_took_of_a_tensor_that_does_not_tell():
    said = "rows on axis 0 and time on axis 1: assumed, since a plain tensor does not tell"
    h = torch.randn(20, 5, 3)
    tokens = torch.randint(2, (20, 5))
    assert said in str(measure.novelty(h, h))
    assert said in str(measure.automaton(h, tokens, 2))
    assert said in str(measure.probe(h, tokens))
    assert said not in str(measure.probe(h, tokens[:, 0])), "20 targets tell which axis has the rows"
    assert said not in str(measure.novelty(hs.Trajectory(h), h))
    assert said not in str(measure.novelty(h, h, lengths=torch.full((20,), 5)))
