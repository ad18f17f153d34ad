"""Fingerprints: which model a state belongs to."""

import pytest
import torch
from torch import nn

from hiddenstate.serve.fingerprint import fingerprint
from tests.support.models import Deep


def changed_weight(model: Deep) -> None:
    with torch.no_grad():
        model.head.bias[0] += 1e-6


def changed_buffer(model: Deep) -> None:
    model.register_buffer("scale", torch.ones(1))


def changed_dtype(model: Deep) -> None:
    model.double()


@pytest.mark.parametrize("change", [changed_weight, changed_buffer, changed_dtype])
def test_a_fingerprint_tells_models_apart(change):
    torch.manual_seed(0)
    model = Deep()
    before = fingerprint(model)
    assert fingerprint(model) == before
    change(model)
    assert fingerprint(model) != before


def test_a_fingerprint_knows_what_is_not_in_the_weights():
    one, other = nn.RNN(3, 4, nonlinearity="tanh"), nn.RNN(3, 4, nonlinearity="relu")
    other.load_state_dict(one.state_dict())
    assert fingerprint(one) != fingerprint(other)


def test_a_fingerprint_does_not_know_mode_or_gradients():
    model = Deep()
    before = fingerprint(model)
    model(torch.randn(1, 2, 3)).sum().backward()
    model.eval()
    assert fingerprint(model) == before
