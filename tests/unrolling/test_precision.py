"""How exactly loops multiply: as torch's matrix products are told to, or as cuDNN's layers are."""

import pytest
import torch

from hiddenstate.unrolling.precision import as_cudnn, cudnn_rounds, is_exact

PLACES = (torch.backends.cudnn.rnn, torch.backends.cudnn, torch.backends)


@pytest.fixture(autouse=True)
def settings_put_back():
    before = torch.get_float32_matmul_precision(), [place.fp32_precision for place in PLACES]
    yield
    for place, precision in zip(reversed(PLACES), reversed(before[1]), strict=True):
        place.fp32_precision = precision
    torch.set_float32_matmul_precision(before[0])


@pytest.mark.parametrize(("asked", "exact"), [("highest", True), ("high", False), ("medium", False)])
def test_a_cell_multiplies_as_torchs_products_do(asked, exact):
    torch.set_float32_matmul_precision(asked)
    assert is_exact() == exact


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
@pytest.mark.parametrize("asked", ["highest", "high"])
def test_a_layer_of_torchs_multiplies_as_cudnn_is_told_to_whatever_products_do(precision, asked):
    torch.set_float32_matmul_precision(asked)
    torch.backends.cudnn.rnn.fp32_precision = precision
    with as_cudnn():
        assert is_exact() == (precision == "ieee")
    assert is_exact() == (asked == "highest")


def test_what_is_set_nearest_counts(monkeypatch):
    for place in PLACES:  # torch writes some of them through, so that they cannot all be set apart
        monkeypatch.setattr(type(place), "fp32_precision", "none", raising=False)
    assert not cudnn_rounds()
    monkeypatch.setattr(type(torch.backends), "fp32_precision", "tf32", raising=False)
    assert cudnn_rounds()
    monkeypatch.setattr(type(torch.backends.cudnn), "fp32_precision", "ieee", raising=False)
    assert not cudnn_rounds()
    monkeypatch.setattr(type(torch.backends.cudnn.rnn), "fp32_precision", "tf32", raising=False)
    assert cudnn_rounds()


def test_it_is_left_after_an_error():
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.rnn.fp32_precision = "ieee"
    with pytest.raises(ZeroDivisionError), as_cudnn():
        raise ZeroDivisionError
    assert not is_exact()
