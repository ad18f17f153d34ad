"""What rows share is a statistic and never a state, whatever its length happens to equal."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hiddenstate.cells.behavior import find

SHAPES = [(3, 4), (4, 4), (3, 7, 4), (4, 4, 4), (3, 3, 7), (3, 4, 5, 5), (2, 2), (1, 4)]


def flat(x):
    """All rows of all other axes, by the last one."""
    return x.detach().reshape(-1, x.shape[-1])


class Statistic(nn.Module):
    """Something kept over calls that all rows had a share in, and that every row is normalized by."""

    def __init__(self, update, start, mix: bool) -> None:
        super().__init__()
        self.update, self.mix = update, mix
        self.register_buffer("kept", start)

    def forward(self, x):
        self.kept = self.update(self.kept, x)
        y = x - self.kept.sum() if self.kept.shape != x.shape[-1:] else x - self.kept
        return y @ torch.ones(x.shape[-1], 2) if self.mix else y


UPDATES = {
    "mean": lambda kept, x: 0.9 * kept + 0.1 * flat(x).mean(0),
    "first rows": lambda kept, x: 0.9 * kept + 0.1 * x.detach().flatten(0, -2)[:1].mean(0),
    "largest": lambda kept, x: torch.maximum(kept, flat(x).amax(0)),
    "quantile": lambda kept, x: 0.5 * kept + 0.5 * flat(x).quantile(0.7, dim=0),
    "median of rows": lambda kept, x: 0.5 * kept + 0.5 * flat(x).median(0).values,
    "count of winners": lambda kept, x: kept + torch.bincount(flat(x).argmax(-1), minlength=len(kept)).float(),
    "scale": lambda kept, x: 0.9 * kept + 0.1 * x.detach().abs().mean(),
    "in place": lambda kept, x: kept.lerp_(flat(x).var(0, correction=0), 0.1),
}


@pytest.mark.parametrize("mix", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", UPDATES)
def test_a_statistic_is_never_claimed(name, shape, mix):
    torch.manual_seed(0)
    model = Statistic(UPDATES[name], torch.zeros(shape[-1]), mix)
    found = find(model, (torch.randn(shape),))
    assert found.recurrences == (), found.explain()
    assert found.passed or found.unsure, "said by name, either way"


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_counters_of_any_length_are_never_claimed(size):
    model = Statistic(lambda kept, x: kept + (x.detach().mean() > torch.linspace(-1, 1, size)), torch.zeros(size), True)
    assert find(model, (torch.randn(3, 7, 4),)).recurrences == ()


@pytest.mark.parametrize("along", [0, 1])
def test_a_state_with_rows_is_claimed_along_either_axis(along):
    class Leaky(nn.Module):
        v = None

        def forward(self, x):
            v = torch.zeros_like(x.select(1 - along, 0)) if self.v is None else self.v
            for t in range(x.shape[1 - along]):
                v = 0.5 * v + x.select(1 - along, t)
            self.v = v.detach()
            return v

    found = find(Leaky(), (torch.randn(3, 5, 4),))
    assert [(part.name, part.batch_axis) for each in found.recurrences for part in each.parts if part.name == "v"] == [
        ("v", 0)
    ], found.explain()


def test_a_loop_over_time_that_averages_rows_claims_nothing_kept():
    class Running(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(4))
            self.fc = nn.Linear(4, 2)

        def forward(self, x):
            out = []
            for t in range(x.shape[1]):
                self.mean = 0.9 * self.mean + 0.1 * x[:, t].detach().mean(0)
                out.append(self.fc(x[:, t] - self.mean))
            return torch.stack(out, 1)

    for shape in ((3, 7, 4), (4, 4, 4), (4, 7, 4)):
        found = find(Running(), (torch.randn(shape),))
        assert [each for each in found.recurrences if each.kind == "attribute"] == [], found.explain()


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("units", [4, 5])
def test_a_layer_whose_kernels_round_otherwise_without_gradients_keeps_rows_apart(layers, units):
    class Kept(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.h = nn.LSTM(4, units, layers, batch_first=True), None

        def forward(self, x):
            out, (h, _) = self.rnn(x, None if self.h is None else (self.h, self.h))
            self.h = h.detach()
            return out

    model = Kept()
    found = find(model, (torch.randn(3, 6, 4),), known=[model.rnn])
    parts = [(part.name, part.batch_axis) for each in found.recurrences for part in each.parts]
    assert parts == [("h", 1)], found.explain()
