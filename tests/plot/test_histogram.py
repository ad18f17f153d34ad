"""How values are spread: every finite value of every run is in one column."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import pyplot
from torch import nn

from hiddenstate import measure, plot, record
from hiddenstate.errors import BadInput
from tests.plot.gallery import title, walk, waves


def stairs(ax):
    """Return shares and edges of each outline."""
    return [(patch.get_data().values, patch.get_data().edges) for patch in ax.patches if not patch.get_fill()]


@given(seed=st.integers(0, 1000), size=st.sampled_from([1e-6, 0.3, 1.0, 700.0]))
def test_columns_are_those_of_numpy(seed, size):
    values = (torch.randn(3, 8, 4, generator=torch.Generator().manual_seed(seed)) * size).double()
    ((shares, edges),) = stairs(plot.histogram(values))
    counts, _ = np.histogram(values.numpy(), bins=edges)
    assert counts.sum() == values.numel()
    np.testing.assert_allclose(shares, counts / values.numel())
    assert len(shares) <= 64
    pyplot.close("all")


def test_each_layer_of_a_recording_has_a_line_over_all_its_runs():
    model = nn.GRU(3, 6, num_layers=2, batch_first=True)
    with record(model) as rec:
        for steps in (4, 9, 1):  # three calls of unequal length
            model(torch.randn(2, steps, 3))
    ax = plot.histogram(rec)
    assert [text.get_text().split(":")[0] for text in ax.get_legend().get_texts()] == ["l0", "l1"]
    everything = torch.cat([run.h.flatten() for run in rec.runs("l1")])
    shares, edges = stairs(ax)[1]
    np.testing.assert_allclose(shares, np.histogram(everything.detach().numpy(), bins=edges)[0] / len(everything))


def test_columns_of_all_layers_are_equally_wide():
    ax = plot.histogram({"narrow": waves() / 100, "wide": waves(), "huge": waves() * 1000})
    assert len({round(float(edges[1] - edges[0]), 9) for _, edges in stairs(ax)}) == 1
    assert all(shares.sum() == pytest.approx(1) for shares, _ in stairs(ax))


@pytest.mark.parametrize("source", [waves(2), waves(2).numpy(), walk(rows=2), [walk(), walk(steps=4)]])
def test_states_in_any_form_are_drawn(source):
    assert plot.histogram(source).has_data()


def test_padding_is_not_among_the_values_and_what_is_not_finite_is_said():
    states = torch.ones(1, 4, 2)
    states[0, 1, 0] = torch.nan
    ax = plot.histogram(measure.statistics(states, lengths=torch.tensor([3])))
    assert title(ax) == "3 steps of 2 units, 0.0% near zero (below 0.01); 1 NaN or Inf left out"
    assert ax.patches[0].get_data().values.sum() == pytest.approx(1)


def test_gates_and_gradients_are_drawn_by_name():
    assert plot.histogram(walk(), part="forget").get_xlabel() == "forget"
    assert plot.histogram(walk(), log=True).get_yscale() == "log"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plot.histogram(torch.full((1, 2, 3), torch.nan)), "no finite value to draw"),
        (lambda: plot.histogram("l0"), "but this is str"),
        (lambda: plot.histogram(walk(), part="grads.h"), r"no 'grads.h'.*grads=True\) and a backward pass"),
    ],
)
def test_what_cannot_be_drawn_is_refused_by_name(call, message):
    with pytest.raises(BadInput, match=message):
        call()


def test_states_that_are_all_zero_stand_where_zero_is_seen():
    ((shares, edges),) = stairs(plot.histogram(torch.zeros(2, 3, 4)))
    assert sum(shares) == 1
    assert max(abs(edges)) == 0.01
