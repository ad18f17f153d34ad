"""Eigenvalues about the unit circle and exponents about zero, each once, and counted."""

import pytest
import torch

from hiddenstate import measure, plot
from hiddenstate.errors import BadInput
from tests.plot.gallery import corners, exponents, ring, title


def dots(ax):
    """Everything that is scattered, as complex numbers."""
    points = [complex(x, y) for cloud in ax.collections for x, y in cloud.get_offsets()]
    return sorted(points, key=lambda z: (z.real, z.imag))


def test_each_eigenvalue_is_drawn_where_it_is():
    values = ring(12)
    expected = sorted((complex(z) for z in values), key=lambda z: (z.real, z.imag))
    assert dots(plot.spectrum(values)) == pytest.approx(expected)


def test_the_circle_has_radius_one():
    (circle,) = plot.spectrum(ring()).lines
    radius = (circle.get_xdata() ** 2 + circle.get_ydata() ** 2) ** 0.5
    assert radius.tolist() == pytest.approx([1] * 361)


def test_what_lies_outside_the_circle_is_counted():
    assert title(plot.spectrum(torch.tensor([0.5, 1.5, -2.0]))) == "largest modulus 2; 2 of 3 outside (▲)"


def test_jacobians_of_a_layer_are_drawn():
    found = measure.jacobians(torch.nn.LSTM(2, 3, batch_first=True), torch.randn(2, 5, 2))
    ax = plot.spectrum(found)
    assert sum(len(dots.get_offsets()) for dots in ax.collections) == 2 * 5 * 6


def test_of_many_steps_some_are_drawn_and_it_is_said():
    found = measure.jacobians(torch.nn.GRU(2, 3, batch_first=True), torch.randn(1, 200, 2))
    assert title(plot.spectrum(found)).endswith("every 4th of 200 steps")


def test_padding_has_no_eigenvalues():
    values = torch.eye(2).expand(1, 3, 2, 2)
    found = measure.Jacobians(values, torch.tensor([[True, False, False]]), torch.zeros(1, 3, 2))
    (dots,) = plot.spectrum(found).collections
    assert len(dots.get_offsets()) == 2


def test_exponents_are_drawn_about_zero():
    found = measure.lyapunov(torch.nn.GRU(2, 4, batch_first=True), torch.randn(2, 40, 2))
    ax = plot.spectrum(found)
    assert title(ax).startswith(f"largest exponent {float(found.exponents[0]):.3g}")
    assert ax.get_ylabel() == "growth per step (natural log)"


def test_thousands_of_eigenvalues_are_thinned():
    assert title(plot.spectrum(ring(30_000))).endswith("every 2nd of 30,000 eigenvalues")


def test_eigenvalues_of_fixed_points_are_drawn_too():
    assert len(dots(plot.spectrum(corners()))) == 18


def test_each_exponent_has_its_place_and_the_dimension_is_said():
    ax = plot.spectrum(exponents(torch.tensor([0.5, 0.1, -1.0]), 2.6))
    drawn = sorted((x, y) for line in ax.lines[1:] for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True))
    assert drawn == [(1, pytest.approx(0.5)), (2, pytest.approx(0.1)), (3, pytest.approx(-1))]
    assert title(ax) == "largest exponent 0.5; dimension 2.6"


def test_nan_and_inf_are_no_eigenvalues():
    assert dots(plot.spectrum(torch.tensor([0.5, torch.nan, torch.inf]))) == [0.5]


def test_what_is_no_result_is_refused_by_name():
    message = "measure.jacobians, lyapunov or fixed_points, or a tensor .* but this is str"
    with pytest.raises(BadInput, match=message):
        plot.spectrum("x")
