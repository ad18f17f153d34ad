"""The plain call again and varied: what moves between two calls, and which axes of the output are rows and steps."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hiddenstate.diagnosis.probes.calls import (
    FewerRows,
    OtherSeed,
    OutputLayout,
    OutputTensor,
    PlainCall,
    RepeatedCall,
    TracedCall,
    by_rows,
    finals,
)
from tests.support.admitted import admitted


class Net(nn.Module):
    """A layer, and something done with its output and state."""

    def __init__(self, head, *, batch_first=True):
        super().__init__()
        self.gru, self.head = nn.GRU(3, 4, batch_first=batch_first), head

    def forward(self, x):
        return self.head(*self.gru(x))


# what is returned -> where its rows and steps are, and what else is known of it
HEADS = {
    "steps": (lambda out, h: out, (0, 1)),
    "the last step": (lambda out, h: out[:, -1], (0, None)),
    "features before steps": (lambda out, h: out.transpose(1, 2), (0, 2)),
    "rows and steps on one axis": (lambda out, h: out.reshape(-1, 4), (0, None, "rows")),
    "similarities of rows": (lambda out, h: out[:, -1] @ out[:, -1].T, (None, None, "", True)),
    "the state": (lambda out, h: h, (1, None, "", False, True)),
}


@pytest.mark.parametrize("name", HEADS)
def test_rows_and_steps_are_seen_by_leaving_one_out(name):
    head, axes = HEADS[name]
    with admitted(Net(head), torch.randn(5, 7, 3)) as patient:
        (leaf,) = patient[OutputLayout].leaves
        assert leaf == OutputTensor((), leaf.shape, *axes)


def test_steps_may_come_first():
    with admitted(Net(lambda out, h: out, batch_first=False), torch.randn(7, 5, 3), batch_axis=1) as patient:
        (leaf,) = patient[OutputLayout].leaves
        assert (leaf.rows, leaf.time) == (1, 0)


@given(batch=st.integers(1, 4), steps=st.integers(1, 4), order=st.permutations([0, 1, 2]))
def test_an_output_in_any_layout_comes_back_with_rows_first(batch, steps, order):
    wanted = torch.randn(batch, steps, 2)
    given = wanted.permute(order)
    leaf = OutputTensor((), tuple(given.shape), order.index(0), order.index(1))
    assert torch.equal(by_rows(given, leaf, batch), wanted)


@given(batch=st.integers(1, 4), steps=st.integers(1, 4), outer=st.sampled_from(["rows", "time"]))
def test_rows_and_steps_on_one_axis_come_apart_again(batch, steps, outer):
    wanted = torch.randn(batch, steps, 2)
    given = (wanted if outer == "rows" else wanted.transpose(0, 1)).reshape(batch * steps, 2)
    assert torch.equal(by_rows(given, OutputTensor((), tuple(given.shape), 0, None, outer), batch), wanted)


def test_the_final_output_of_a_row_is_that_of_its_last_real_step():
    x, lengths = torch.randn(4, 6, 3), torch.tensor([6, 2, 1, 4])
    with admitted(Net(lambda out, h: out), x, lengths=lengths) as patient:
        plain = patient[PlainCall]
        assert torch.equal(finals(patient, plain)[0], plain.result[torch.arange(4), lengths - 1])


def test_a_model_for_one_batch_size_cannot_be_called_with_a_row_less():
    with admitted(Net(lambda out, h: out + torch.zeros(5, 1, 1)), torch.randn(5, 7, 3)) as patient:
        assert patient[FewerRows].outcome is None
    with admitted(Net(lambda out, h: out), torch.randn(5, 7, 3)) as patient:
        assert len(patient[FewerRows].outcome.result) == 4


def test_a_traced_call_gives_the_same_and_names_its_operations():
    with admitted(Net(lambda out, h: out.tanh()), torch.randn(5, 7, 3)) as patient:
        torch.testing.assert_close(patient[TracedCall].result, patient[PlainCall].result)
        assert len(patient[TracedCall].trace.named("tanh")) == 1
        assert not patient[PlainCall].trace


class Keeping(Net):
    """Goes on from its last call, in an attribute."""

    def forward(self, x):
        out, self.h = self.gru(x, getattr(self, "h", None))
        return out


def test_a_state_that_is_kept_shows_in_a_repeated_call():
    with admitted(Keeping(None), torch.randn(5, 7, 3)) as patient:
        assert patient[RepeatedCall].gap > 0
        assert set(patient[RepeatedCall].changed) == {"h"}
    with admitted(Net(lambda out, h: out), torch.randn(5, 7, 3)) as patient:
        assert (patient[RepeatedCall].gap, patient[RepeatedCall].changed) == (0, {})


def test_chance_shows_with_another_seed_only():
    with admitted(Net(lambda out, h: out + torch.randn_like(out)), torch.randn(5, 7, 3)) as patient:
        assert patient[RepeatedCall].gap == 0  # both calls begin with the same seed
        assert patient[OtherSeed].gap > 0
    with admitted(Net(lambda out, h: out), torch.randn(5, 7, 3)) as patient:
        assert patient[OtherSeed].gap == 0
