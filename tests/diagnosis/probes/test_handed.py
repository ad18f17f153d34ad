"""States that modules inside a model are handed."""

import pytest
import torch
from torch import nn

import hiddenstate as hs
from hiddenstate.diagnosis.probes.handed import HandedStates, StateGivenBack
from tests.support.admitted import admitted
from tests.support.untouched import untouched


class Encoder(nn.Module):
    def __init__(self, share):
        super().__init__()
        self.rnn, self.share = nn.LSTM(3, 4, batch_first=True), share

    def forward(self, x, state=None):
        return self.rnn(x, None if state is None else tuple(self.share * part for part in state))


class Model(nn.Module):
    def __init__(self, share, *, named):
        super().__init__()
        self.encoder, self.named = Encoder(share), named

    def forward(self, x):
        state, outs = None, []
        for piece in x.split(3, 1):
            out, state = self.encoder(piece, state=state) if self.named else self.encoder(piece, state)
            outs.append(out)
        return torch.cat(outs, 1)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_whether_a_module_follows_its_state_is_seen(share, named):
    model = Model(share, named=named)
    x = torch.randn(4, 9, 3)
    with untouched(model), admitted(model, x) as patient:
        (handed,) = patient[HandedStates]
    assert (handed.module, handed.argument) == ("encoder", "state")
    assert (handed.moved > 1e-3) == bool(share)


def test_a_module_that_is_never_handed_one_says_nothing():
    with admitted(Model(0.5, named=False), torch.randn(4, 3, 3)) as patient:
        assert patient[HandedStates] == ()


class Step(nn.Module):
    """One step of a recurrence whose loop is elsewhere, made of nothing that is known by its type."""

    def __init__(self, share):
        super().__init__()
        self.map, self.share = nn.Linear(3 + 2 + 4, 4), share

    def forward(self, x, context, hidden):
        hidden = self.map(torch.cat([x, context, self.share * hidden], 1))
        return hidden[:, :2], hidden


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_state_that_goes_in_and_comes_out_is_seen_where_it_counts(share):
    with admitted(Step(share), torch.randn(4, 3), torch.randn(4, 2), torch.zeros(4, 4)) as patient:
        assert patient[StateGivenBack].name == ("hidden" if share else "")


def test_such_a_model_is_examined_and_one_without_a_state_is_refused_with_a_way_out():
    report = hs.diagnose(Step(1.0), torch.randn(4, 3), torch.randn(4, 2), torch.zeros(4, 4))
    assert report.ok, report.text()
    assert "hidden goes in and comes out of each call: the model was examined as one step" in report.assumed
    with pytest.raises(
        hs.errors.NotRecurrent, match=r"goes in and comes out of each call.*hs\.diagnose\(model, x, hidden\)"
    ):
        hs.diagnose(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.randn(4, 3))
