"""Calls under way: hs.tap is an identity and a name for the recorder, and kernels are intercepted once."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import hiddenstate as hs
from hiddenstate.recording.frames import FUSED, Frame, Intercept, TrackWeights, innermost, parse, run_in
from hiddenstate.recording.recording import Options
from tests.support.recorded import KINDS


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


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_arguments_of_a_kernel_are_named(kind, bias, packed):
    layer = KINDS[kind](3, 5, num_layers=2, bidirectional=True, bias=bias, batch_first=True, dropout=0.25)
    x = torch.randn(2, 4, 3)
    fed = pack_sequence([x[0], x[1, :2]]) if packed else x
    calls = []

    def handle(function, args):
        calls.append(parse(function, args))
        return function(*args)

    with Intercept(FUSED, handle):
        layer(fed)
    (call,) = calls
    assert call.kind == layer.mode.lower()
    assert torch.equal(call.data, fed.data if packed else x)
    assert (call.batch_sizes is not None) == packed
    assert call.batch_first != packed  # a packed call has no such argument
    assert [tuple(part.shape[:2]) for part in call.state] == [(4, 2)] * (2 if call.kind == "lstm" else 1)
    assert (call.bias, call.layers, call.directions, call.dropout, call.training) == (bias, 2, 2, 0.25, True)
    each = len(call.weights(1)) // 2
    weights = TrackWeights.of(call.weights(1)[each:], bias)  # the second layer, backwards
    assert weights.ih is layer.weight_ih_l1_reverse
    assert weights.hh is layer.weight_hh_l1_reverse
    assert weights.bias_hh is (layer.bias_hh_l1_reverse if bias else None)
    assert weights.projection is (layer.weight_hr_l1_reverse if kind == "projected" else None)


def test_arguments_in_another_order_are_not_guessed():
    (function,) = (function for function, kind in FUSED.items() if kind == "gru")
    assert parse(function, (torch.zeros(1), torch.zeros(1))) is None
    assert parse(function, (torch.zeros(1), torch.zeros(1), [], True)) is None


def test_one_interception_serves_all_recordings_of_a_call():
    gru, seen = nn.GRU(2, 2), []
    intercept = Intercept(FUSED, lambda function, args: (seen.append(len(innermost())), function(*args))[1])

    def call():
        return gru(torch.randn(3, 1, 2))

    run_in(Frame(gru, Options()), lambda: run_in(Frame(gru, Options()), call, intercept), intercept)
    assert seen == [2]


def test_a_call_that_fails_leaves_no_frame():
    def fail():
        assert len(innermost()) == 1
        raise ValueError("as users' code does")

    with pytest.raises(ValueError, match="as users' code does"):
        run_in(Frame(nn.GRU(2, 2), Options()), fail)
    assert innermost() == []
