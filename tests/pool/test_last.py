import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from hiddenstate.errors import BadInput
from hiddenstate.pool import Last

LENGTHS = torch.tensor([3, 7, 5])


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_it_is_the_final_state_that_the_layer_returns(kind, bidirectional):
    layer = kind(2, 4, batch_first=True, bidirectional=bidirectional)
    packed = pack_padded_sequence(torch.randn(3, 7, 2), LENGTHS, batch_first=True, enforce_sorted=False)
    output, state = layer(packed)
    final = state[0] if isinstance(state, tuple) else state  # (directions, batch, unit)
    pool = Last(bidirectional=bidirectional)
    assert torch.equal(pool(output), torch.cat(list(final), dim=-1))
    padded, lengths = pad_packed_sequence(output, batch_first=True)
    assert torch.equal(pool(padded, lengths), torch.cat(list(final), dim=-1))


def test_an_odd_number_of_units_has_no_two_directions():
    with pytest.raises(BadInput, match=r"5 units, but a bidirectional layer gives an even number.*use Last\(\)"):
        Last(bidirectional=True)(torch.randn(2, 3, 5))


def test_it_shows_what_it_is():
    assert repr(Last(bidirectional=True)) == "Last(bidirectional=True)"
    assert repr(Last()) == "Last()"
