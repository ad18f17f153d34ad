"""hs.tap: an identity, and a name for the recorder."""

import pytest
import torch
from torch import nn

import hiddenstate as hs


class Gated(nn.Module):
    hidden_size = 2

    def __init__(self, tapped):
        super().__init__()
        self.tapped = tapped
        self.inner = nn.Linear(2, 2)

    def forward(self, x, h):
        for name, value in self.tapped(x, h).items():
            assert hs.tap(name, value) is value
        return torch.tanh(self.inner(x) + h)


def run(cell, steps=3, **options):
    with hs.record(cell, **options) as rec:
        h = torch.zeros(4, 2)
        for _ in range(steps):
            h = cell(torch.randn(4, 2), h)
    return rec["l0"]


def test_outside_a_recording_it_is_the_identity_on_anything():
    value = object()
    assert hs.tap("x", value) is value
    x = torch.ones(2, requires_grad=True)
    assert hs.tap("x", x) is x


def test_taps_are_gates_and_are_kept_only_when_asked_for():
    cell = Gated(
        lambda x, h: {"one": x * 2, "scalar": x.mean(), "wide": x.unsqueeze(-1).expand(-1, 2, 3), "flat": x[:, 0]}
    )
    gates = run(cell, gates=True).gates
    assert {name: tuple(gate.shape) for name, gate in gates.items()} == {
        "one": (4, 3, 2),
        "scalar": (4, 3, 1),
        "wide": (4, 3, 6),
        "flat": (4, 3, 1),
    }
    assert run(cell).gates == {}


def test_what_is_tapped_is_kept_as_it_was():
    class Spoiling(nn.Module):
        hidden_size = 2

        def forward(self, x, h):
            gate = torch.sigmoid(x)
            hs.tap("gate", gate)
            kept = gate.clone()
            gate.zero_()
            return kept

    run_of = run(Spoiling(), gates=True)
    assert torch.equal(run_of.gates["gate"], run_of.h)
    assert not run_of.gates["gate"].requires_grad


def test_a_step_without_its_tap_is_nan():
    gates = run(Gated(lambda x, h: {"late": x} if h.any() else {}), gates=True).gates
    assert gates["late"].isnan()[0, :, 0].tolist() == [True, False, False]


def test_a_value_without_rows_is_refused_with_a_way_out():
    with pytest.raises(
        hs.errors.BadInput, match=r"tap\('w', ...\) was given .* shape \(7, 2\) in a step of 4 rows.*expand"
    ):
        run(Gated(lambda x, h: {"w": torch.zeros(7, 2)}), gates=True)
    with pytest.raises(hs.errors.BadInput, match=r"tap\('w', ...\) was given float, but a tensor is needed"):
        run(Gated(lambda x, h: {"w": 0.5}), gates=True)
    assert not Gated(lambda x, h: {})._forward_hooks


def test_taps_of_an_inner_cell_are_its_own():
    inner = Gated(lambda x, h: {"inside": x})

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = inner

        def forward(self, x):
            hs.tap("lost", x)  # inside no cell
            return self.cell(x, torch.zeros(4, 2))

    model = Outer()
    with hs.record(model, gates=True) as rec:
        model(torch.randn(4, 2))
    assert list(rec["cell"].gates) == ["inside"]
