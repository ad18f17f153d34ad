"""The laws of carrying, on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hiddenstate.carry import Bridge, Carry, Learned, check_split, tbptt
from hiddenstate.errors import StateMismatch
from hiddenstate.state import load
from tests.support.models import Deep, Stepping

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("make", [Deep, lambda: Stepping(nn.LSTMCell(3, 4))])
def test_cutting_changes_nothing(make):
    model, x = make().cuda(), torch.randn(3, 12, 3, device="cuda")
    whole = model(x)
    with Carry(model) as carry:
        pieces = torch.cat([model(x[:, :5]), model(x[:, 5:])], dim=1)
        assert carry.state.device.type == "cuda"
        carry.reset(torch.tensor([True, False, False]))
        carry.reset(torch.tensor([False, False, True], device="cuda"))
        again = model(x)
    torch.testing.assert_close(pieces, whole, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(again[[0, 2]], whole[[0, 2]], atol=1e-4, rtol=1e-3)
    assert check_split(model, x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_under_autocast_the_state_is_kept_in_the_precision_of_the_weights(dtype):
    model, x = Deep().cuda(), torch.randn(3, 6, 3, device="cuda")
    with Carry(model) as carry:
        with torch.autocast("cuda", dtype=dtype):
            model(x)
            model(x)
        assert all(part.dtype == torch.float32 for part in carry.state.values())
        model(x)


def test_rows_start_and_end_in_mid_sequence():
    model, x = Deep().cuda(), torch.randn(2, 6, 3, device="cuda")
    starts = torch.zeros(2, 6, dtype=torch.bool, device="cuda")
    starts[1, 2] = True
    with Carry(model) as carry, torch.no_grad():
        model(x)
        carry.mark(starts=starts, lengths=torch.tensor([6, 5]))
        out = model(x)
        state = carry.state["gru.h"]
    with torch.no_grad():
        torch.testing.assert_close(out[1:, 2:5], model(x[1:, 2:5]), atol=1e-4, rtol=1e-3)
    assert state.device.type == "cuda"


def test_learned_states_bridges_and_truncation_live_where_the_model_does(tmp_path):
    model, x, y = Deep().cuda(), torch.randn(2, 6, 3, device="cuda"), torch.randn(2, 6, 2, device="cuda")
    learned = Learned(model)
    with Carry(model, init=learned) as carry:
        losses = list(tbptt(model, x, y, lambda out, y: (out - y).square().mean(), k1=2, k2=4))
        carry.state.save(tmp_path / "state")
        with pytest.raises(StateMismatch, match=r"on cpu, but the layer is on cuda"):
            carry.state = load(tmp_path / "state")
        carry.state = load(tmp_path / "state", device="cuda")
    assert len(losses) == 3
    assert all(row.grad.device.type == "cuda" for row in learned.parameters())
    bridge = Bridge(nn.LSTM(3, 5).cuda(), nn.GRU(3, 4).cuda())
    assert bridge(tuple(torch.randn(1, 2, 5, device="cuda") for _ in range(2))).device.type == "cuda"
