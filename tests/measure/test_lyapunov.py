import math
from dataclasses import replace
from importlib import import_module

import pytest
import torch
from torch import nn

import hiddenstate as hs
from hiddenstate.errors import BadInput, NotRecurrent
from tests.support.cells import CELLS
from tests.support.dynamics import ChaoticNet, FreshMatrices, Henon, LinearNet, zeroed
from tests.support.untouched import untouched

module = import_module("hiddenstate.measure.lyapunov")  # the function has the name of its file


# --- values that are known ---


def test_a_linear_net_has_the_logarithms_of_its_eigenvalues():
    turn = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64))[0]
    w = turn @ torch.diag(torch.tensor([0.9, 0.7, 0.4, 0.1], dtype=torch.float64)) @ turn.T
    found = hs.measure.lyapunov(LinearNet(w), torch.zeros(1, 300, 1))
    expected = torch.tensor([0.9, 0.7, 0.4, 0.1], dtype=torch.float64).log()
    torch.testing.assert_close(found.exponents, expected, rtol=0, atol=1e-9)
    assert found.converged
    assert found.dimension == 0


def test_so_has_one_whose_eigenvectors_are_not_orthogonal():
    w = torch.randn(6, 6, dtype=torch.float64) / 6**0.5
    expected = torch.linalg.eigvals(w).abs().log().sort(descending=True).values
    found = hs.measure.lyapunov(LinearNet(w), torch.zeros(1, 3000, 1))
    torch.testing.assert_close(found.exponents, expected, rtol=0, atol=2e-3)


def test_an_orthogonal_net_neither_grows_nor_shrinks():
    w = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64))[0]
    found = hs.measure.lyapunov(LinearNet(w), torch.zeros(1, 100, 1))
    torch.testing.assert_close(found.exponents, torch.zeros(5, dtype=torch.float64), rtol=0, atol=1e-12)
    assert "at the edge" in str(found)


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
@pytest.mark.parametrize("depth", [1, 2])
def test_the_sum_of_all_is_the_mean_of_the_log_determinants(kind, depth):
    layer = kind(3, 4, num_layers=depth, dtype=torch.float64, batch_first=True)
    x = torch.randn(3, 20, 3, dtype=torch.float64)
    expected = torch.linalg.slogdet(hs.measure.jacobians(layer, x).values).logabsdet
    found = hs.measure.lyapunov(layer, x)
    assert float(found.exponents.sum()) == pytest.approx(float(expected.mean()), rel=1e-9)
    torch.testing.assert_close(found.rows.sum(1), expected.mean(1))
    assert (found.exponents.diff() <= 0).all()


def test_products_of_fresh_gaussian_matrices():
    x = 1.5 * torch.randn(16, 500, 400) / math.sqrt(20)
    found = hs.measure.lyapunov(FreshMatrices(20), x).exponents
    order = torch.arange(20, dtype=torch.float64)
    expected = (math.log(2 * 1.5**2 / 20) + torch.digamma((20 - order) / 2)) / 2
    assert expected[[0, -1]].tolist() == pytest.approx([0.380, -1.728], abs=5e-4)
    torch.testing.assert_close(found, expected, rtol=0, atol=0.03)
    assert float(found[0]) == pytest.approx(0.380, abs=0.01)


# Finite nets lie below the limit of large ones. Deviations measured over three nets each, gains in turn:
# 100 units -0.048, -0.022, -0.023, -0.045; 400 units -0.004, -0.003, -0.006, -0.010; 1000 units within 0.004 all.
@pytest.mark.slow
@pytest.mark.parametrize(("gain", "limit"), [(1.5, 0.0652), (2, 0.1547), (3, 0.3102), (5, 0.5324)])
def test_a_large_random_net_is_as_chaotic_as_theory_says(gain, limit):
    found = hs.measure.lyapunov(ChaoticNet(400, gain), torch.zeros(1, 1300, 1), warmup=300, k=1)
    assert float(found.exponents) == pytest.approx(limit, abs=0.02)
    assert "chaotic" in str(found)


def test_the_henon_map():
    found = hs.measure.lyapunov(Henon(), torch.zeros(1, 10_000, 1), warmup=100)
    assert float(found.exponents.sum()) == pytest.approx(math.log(0.3), abs=1e-12)
    assert found.exponents.tolist() == pytest.approx([0.419, -1.623], abs=0.015)
    first, second = found.exponents.tolist()
    assert found.dimension == pytest.approx(1 + first / -second)  # Kaplan and Yorke: about 1.26
    assert found.dimension == pytest.approx(1.26, abs=0.01)


def test_a_gru_without_weights_halves_all_directions():
    found = hs.measure.lyapunov(zeroed(nn.GRU(1, 3, batch_first=True)), torch.zeros(1, 30, 1))
    torch.testing.assert_close(found.exponents, torch.full((3,), math.log(0.5), dtype=torch.float64))


def test_an_lstm_without_weights_forgets_half_of_its_directions_at_once():
    found = hs.measure.lyapunov(zeroed(nn.LSTM(1, 2, batch_first=True)), torch.zeros(1, 30, 1))
    torch.testing.assert_close(found.exponents[:2], torch.full((2,), math.log(0.5), dtype=torch.float64))
    assert (found.exponents[2:] < -30).all()


@pytest.mark.parametrize(
    ("exponents", "size", "expected"),
    [
        ([0.419, -1.623], 2, 1 + 0.419 / 1.623),
        ([-0.1, -0.2], 2, 0.0),
        ([0.5, 0.0, -0.25, -1.0], 4, 3.25),
        ([0.5, 0.4], 2, 2.0),
        ([0.5, -math.inf], 2, 1.0),
        ([0.5, 0.4], 5, math.nan),
    ],
)
def test_the_kaplan_yorke_dimension(exponents, size, expected):
    assert module._kaplan_yorke(exponents, size) == pytest.approx(expected, nan_ok=True)


# --- laws ---


@pytest.mark.parametrize("sample", CELLS.values(), ids=CELLS)
def test_a_few_exponents_are_the_first_of_all(sample):
    cell, x = sample.cell(), sample.x(batch=1, steps=60)
    with untouched(cell):
        some = hs.measure.lyapunov(cell, x, k=1)
    whole = hs.measure.lyapunov(cell, x)
    assert float(some.exponents) == pytest.approx(float(whole.exponents[0]), abs=0.1)
    assert len(whole.exponents) == hs.measure.jacobians(cell, x).values.shape[-1]


def test_pieces_equal_the_whole(monkeypatch):
    layer, x = nn.GRU(3, 4, dtype=torch.float64, batch_first=True), torch.randn(2, 30, 3, dtype=torch.float64)
    whole = hs.measure.lyapunov(layer, x)
    monkeypatch.setattr(module, "_CHUNK", 2 * 4 * 4 * 7)
    torch.testing.assert_close(hs.measure.lyapunov(layer, x).exponents, whole.exponents)


def test_warmup_is_run_but_not_counted():
    layer, x = nn.GRU(3, 4, dtype=torch.float64, batch_first=True), torch.randn(2, 40, 3, dtype=torch.float64)
    found = hs.measure.lyapunov(layer, x, warmup=15)
    expected = torch.linalg.slogdet(hs.measure.jacobians(layer, x).values[:, 15:]).logabsdet.mean()
    assert float(found.exponents.sum()) == pytest.approx(float(expected))
    assert found.steps == 25
    assert found.history.shape == (25, 4)
    torch.testing.assert_close(found.history[-1].sum(), found.exponents.sum())


def test_a_given_state_is_where_it_starts():
    net = ChaoticNet(20, 2.0)
    state = torch.zeros(1, 20)  # the fixed point at the origin, of which all states but this one know nothing
    found = hs.measure.lyapunov(net, torch.zeros(1, 500, 1), state=state, k=1)
    assert float(found.exponents) == pytest.approx(
        float(torch.linalg.eigvals(net.w.detach()).abs().max().log()), abs=0.01
    )


@pytest.mark.parametrize("k", [1, None])
@pytest.mark.parametrize("filling", [0.0, 1e3, float("nan")])
def test_padding_never_counts(filling, k):
    layer, x = CELLS["pair"].cell(), torch.randn(2, 30, 3, dtype=torch.float64)
    alone = hs.measure.lyapunov(layer, x[1:, :20], k=k)
    x[1, 20:] = filling
    found = hs.measure.lyapunov(layer, x, lengths=torch.tensor([30, 20]), k=k)
    torch.testing.assert_close(found.rows[1], alone.exponents)
    assert found.rows.isfinite().all()


def test_the_verdict_states_its_tolerance():
    layer = nn.GRU(3, 4, batch_first=True)
    short = hs.measure.lyapunov(layer, torch.randn(1, 30, 3))
    assert not short.converged
    assert "not converged over 30 steps (errors up to 0.01)" in str(short)
    assert hs.measure.lyapunov(layer, torch.randn(1, 30, 3), tolerance=1.0).converged
    assert not hs.measure.lyapunov(layer, torch.randn(1, 1, 3), tolerance=1.0).converged  # nothing to compare


def test_interrupting_keeps_the_steps_that_are_done(monkeypatch):
    def tracked(items, label, total):
        for number, item in enumerate(items):
            if number == 12:
                raise KeyboardInterrupt
            yield item

    layer, x = nn.GRU(3, 4, dtype=torch.float64, batch_first=True), torch.randn(2, 30, 3, dtype=torch.float64)
    expected = torch.linalg.slogdet(hs.measure.jacobians(layer, x).values[:, :12]).logabsdet.mean()
    monkeypatch.setattr(module, "tracked", tracked)
    with untouched(layer):
        found = hs.measure.lyapunov(layer, x)
    assert found.interrupted
    assert not found.converged
    assert found.steps == 12
    assert float(found.exponents.sum()) == pytest.approx(float(expected))
    assert str(found).endswith("interrupted")
    with pytest.raises(KeyboardInterrupt):
        hs.measure.lyapunov(layer, x, warmup=20)


# --- what cannot be measured ---


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (torch.zeros(2, 5, 3), {"warmup": 5}, "shortest sequence has 5 steps and 5 are warmup"),
        (torch.zeros(2, 5, 3), {"warmup": 3, "lengths": torch.tensor([5, 2])}, "shortest sequence has 2 steps and 3"),
        (torch.zeros(2, 5, 3), {"warmup": -1}, "and -1 are warmup"),
        (torch.zeros(2, 5, 3), {"k": 5}, "k is 5, but this layer's state has 4 coordinates"),
        (torch.zeros(2, 5, 3), {"k": 0}, "from 1 to 4"),
        (torch.zeros(0, 5, 3), {}, "no rows"),
    ],
)
def test_what_cannot_be_measured_is_refused(x, options, message):
    with pytest.raises(BadInput, match=message):
        hs.measure.lyapunov(nn.GRU(3, 4, batch_first=True), x, **options)


@pytest.mark.parametrize("k", [1, None])
def test_a_state_that_runs_away_is_said_with_step_and_row(k):
    class Explosive(nn.Module):
        hidden_size, input_size = 5, 5

        def forward(self, x, state):
            return (state + x) ** 2

    x = torch.zeros(2, 20, 5)
    x[1, 6] = 100.0
    with pytest.raises(BadInput, match="not finite from step 10 of row 1 on"):
        hs.measure.lyapunov(Explosive(), x, k=k)


def test_both_directions_are_refused():
    with pytest.raises(NotRecurrent, match="bidirectional"):
        hs.measure.lyapunov(nn.GRU(2, 3, bidirectional=True, batch_first=True), torch.zeros(1, 2, 2))


@pytest.mark.cuda
def test_on_cuda_the_numbers_are_the_same():
    layer, x = nn.LSTM(3, 4, batch_first=True), torch.randn(2, 50, 3)
    expected = hs.measure.lyapunov(layer, x).exponents
    found = hs.measure.lyapunov(layer.cuda(), x.cuda()).exponents
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-3, atol=1e-3)


def test_a_few_directions_of_a_wide_state_grow_as_by_whole_jacobians(monkeypatch):
    layer, x = nn.LSTM(3, 12, num_layers=2, batch_first=True), torch.randn(2, 60, 3)
    whole = hs.measure.lyapunov(layer, x, k=2)
    monkeypatch.setattr(module, "_WIDE", 10)
    pushed = hs.measure.lyapunov(layer, x, k=2)
    torch.testing.assert_close(pushed.exponents, whole.exponents, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("exponent", "error", "kind"), [
    (0.1, 0.01, "chaotic"), (-0.1, 0.01, "contracting"), (0.01, 0.01, "at the edge"), (-0.0005, 0.0, "at the edge"),
])  # fmt: skip
def test_what_grows_is_said_only_where_it_is_sure(exponent, error, kind):
    found = hs.measure.lyapunov(nn.RNN(1, 2, batch_first=True), torch.zeros(1, 30, 1), k=1)
    assert replace(found, exponents=torch.tensor([exponent]), error=torch.tensor([error])).kind == kind
