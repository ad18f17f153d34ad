"""States that modules inside a model are handed."""

import pytest
import torch
from torch import nn

from hiddenstate.diagnosis.probes.handed import HandedStates
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
