"""A plan is learned from one run of a loop as it is written, or there is a reason why not."""

import pytest
import torch
from torch import nn

import hiddenstate as hs


class Loop(nn.Module):
    def __init__(self, turn):
        super().__init__()
        self.turn, self.weight = turn, nn.Parameter(torch.eye(3) * 0.5)

    def forward(self, x):
        h, kept, count = x.new_zeros(x.shape[0], 3), [], 0
        for t in range(x.shape[1]):
            h, kept, count = self.turn(self, x[:, t], h, kept, count)
        return h


def said(turn):
    torch.manual_seed(0)
    model, x = Loop(turn), torch.randn(2, 6, 3)
    expected = model(x)
    with hs.accelerate(model) as faster:
        for _ in range(2):
            assert torch.allclose(model(x), expected, atol=1e-6)
        return faster.explain()


def test_numbers_that_change_from_turn_to_turn_are_no_state():
    told = said(lambda self, x, h, kept, count: (torch.tanh(x + h @ self.weight), kept, count + 1))
    assert "left alone" in told
    assert "by the engine" not in told


def test_a_state_of_another_shape_at_each_turn():
    told = said(lambda self, x, h, kept, count: (torch.tanh(x + h[:, :3] @ self.weight), [*kept, h], count))
    assert "left alone: what crosses is of another kind after every turn" in told


def test_nothing_crosses():
    class Apart(nn.Module):
        def forward(self, x):
            outs = []
            for t in range(x.shape[1]):
                outs.append(x[:, t] * 2)
            return torch.stack(outs, 1)

    model, x = Apart(), torch.randn(2, 6, 3)
    with hs.accelerate(model) as faster:
        assert torch.equal(model(x), x * 2)
        assert "left alone: no tensor crosses from turn to turn" in faster.explain()


@pytest.mark.parametrize("grad", [True, False])
def test_a_first_turn_that_is_unlike_the_others_is_run_as_it_is_written(grad, monkeypatch):
    from hiddenstate.unrolling.deciding import EngineDecision

    monkeypatch.setattr("hiddenstate.unrolling.cache.decide", lambda *_: EngineDecision(1, "said so"))

    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.GRUCell(3, 3)

        def forward(self, x):
            h, total = None, 0
            for x_t in x.unbind(1):
                h = self.cell(x_t, h)
                total = total + h.sum()
            return h, total

    model, x = Late(), torch.randn(2, 6, 3)
    with torch.set_grad_enabled(grad):
        expected = model(x)
        with hs.accelerate(model) as faster:
            for _ in range(3):
                given = model(x)
                assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(given, expected, strict=True))
            assert "by the engine" in faster.explain()
