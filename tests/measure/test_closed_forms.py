"""One step of torch's layers, written out: the values are torch's own, the derivatives are autograd's."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hiddenstate.measure.closed_forms import FORMS, GateWeights

GATES = {"tanh": 1, "relu": 1, "gru": 3, "lstm": 4}


def random_weights(name, units, features, *, bias=True, visible=None):
    rows, seen = GATES[name] * units, visible or units
    numbers = [torch.randn(*shape, dtype=torch.float64) for shape in ((rows, features), (rows, seen), (rows,), (rows,))]
    w_ih, w_hh, b_ih, b_hh = numbers
    w_hr = None if visible is None else torch.randn(visible, units, dtype=torch.float64)
    return GateWeights(w_ih, w_hh, b_ih if bias else None, b_hh if bias else None, w_hr)


def torchs_layer(name, weights):
    """Torch's own layer with these weights."""
    units, visible = weights.w_ih.shape[0] // GATES[name], weights.w_hh.shape[1]
    options = {"bias": weights.b_ih is not None, "batch_first": True, "dtype": torch.float64}
    if name in ("tanh", "relu"):
        layer = nn.RNN(weights.w_ih.shape[1], units, nonlinearity=name, **options)
    elif name == "gru":
        layer = nn.GRU(weights.w_ih.shape[1], units, **options)
    else:
        layer = nn.LSTM(weights.w_ih.shape[1], units, proj_size=0 if weights.w_hr is None else visible, **options)
    given = {"weight_ih": weights.w_ih, "weight_hh": weights.w_hh, "bias_ih": weights.b_ih, "bias_hh": weights.b_hh}
    with torch.no_grad():
        for part, values in {**given, "weight_hr": weights.w_hr}.items():
            if values is not None:
                getattr(layer, f"{part}_l0").copy_(values)
    return layer


cases = st.fixed_dictionaries(
    {
        "name": st.sampled_from(list(FORMS)),
        "units": st.integers(2, 4),
        "features": st.integers(1, 3),
        "rows": st.integers(1, 3),
        "bias": st.booleans(),
        "projected": st.booleans(),
    }
)


def drawn(case):
    visible = 1 if case["name"] == "lstm" and case["projected"] else None
    weights = random_weights(case["name"], case["units"], case["features"], bias=case["bias"], visible=visible)
    x = torch.randn(case["rows"], case["features"], dtype=torch.float64)
    h = torch.randn(case["rows"], visible or case["units"], dtype=torch.float64)
    c = torch.randn(case["rows"], case["units"], dtype=torch.float64) if case["name"] == "lstm" else None
    return FORMS[case["name"]], weights, x, h, c


@given(case=cases)
def test_a_step_is_torchs_own(case):
    form, weights, x, h, c = drawn(case)
    found_h, found_c = form.step(weights, weights.drive(x), (h, c))
    state = h.unsqueeze(0) if c is None else (h.unsqueeze(0), c.unsqueeze(0))
    output, end = torchs_layer(case["name"], weights)(x.unsqueeze(1), state)
    torch.testing.assert_close(found_h, output[:, 0])
    if c is not None:
        torch.testing.assert_close(found_c, end[1][0])


@given(case=cases)
def test_derivatives_are_those_of_the_step(case):
    form, weights, x, h, c = drawn(case)
    found = form.derivatives(weights, weights.drive(x), (h, c), by_input=True)
    torch.testing.assert_close(found.next_h, form.step(weights, weights.drive(x), (h, c))[0])
    for row in range(case["rows"]):
        own = [part[row] for part in (h, x) if part is not None] + ([] if c is None else [c[row]])

        def step(h, x, c=None):
            parts = (h.unsqueeze(0), None if c is None else c.unsqueeze(0))
            following = form.step(weights, weights.drive(x.unsqueeze(0)), parts)
            return tuple(part[0] for part in following if part is not None)

        expected = torch.autograd.functional.jacobian(step, tuple(own))
        for block, by in zip((found.h, found.c), expected, strict=False):
            torch.testing.assert_close(block.by_h[row], by[0])
            torch.testing.assert_close(block.by_input[row], by[1])
            if c is not None:
                torch.testing.assert_close(block.by_c[row], by[2])


@pytest.mark.parametrize("name", FORMS)
def test_derivatives_by_the_input_are_made_only_where_asked_for(name):
    form, weights, x, h, c = drawn(
        {"name": name, "units": 2, "features": 1, "rows": 1, "bias": True, "projected": False}
    )
    found = form.derivatives(weights, weights.drive(x), (h, c), by_input=False)
    assert found.h.by_input is None
    assert found.c is None or found.c.by_input is None


def test_in_double_precision_the_weights_are_the_same_numbers():
    single = GateWeights(torch.randn(2, 1), torch.randn(2, 2), None, torch.randn(2), None)
    double = single.double()
    assert torch.equal(double.w_ih, single.w_ih.double())
    assert double.b_hh.dtype == torch.float64
    assert double.b_ih is None
    assert double.w_hr is None
