"""Values that hold many numbers say what they hold, in a few lines, and never the numbers."""

from dataclasses import dataclass, fields

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import hiddenstate as hs
from hiddenstate import measure
from hiddenstate.state import shown_in_short


@shown_in_short
@dataclass
class Held:
    value: object


@given(shape=st.lists(st.integers(1, 400), min_size=1, max_size=3))
def test_a_tensor_is_told_by_its_shape(shape):
    assert repr(Held(torch.zeros(1).expand(shape))) == f"Held\n  value {tuple(shape)}"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (torch.tensor(0.25), "value 0.25"),
        (1 / 3, "value 0.3333"),
        ({"h": torch.zeros(2, 3)}, "value {h (2, 3)}"),
        (tuple(range(9)), "value [0, 1, 2, 3, … 9 in all]"),
        (Held(1), "value Held"),
        (None, ""),
        ({}, ""),
    ],
)
def test_a_field_is_told_in_a_few_words(value, said):
    assert repr(Held(value)).partition("\n  ")[2] == said


def results():
    """One result of each measure that has one, of a layer of 300 units."""
    torch.manual_seed(0)
    model, x = nn.GRU(3, 300, batch_first=True), torch.randn(3, 40, 3)
    with hs.record(model, gates=True) as seen:
        model(x)
    run = seen["l0"]
    yield run
    yield from (make(run) for make in (measure.saturation, measure.dead_units, measure.statistics, measure.dimension))
    yield measure.compare(run)
    yield measure.memory(model, x)
    yield measure.lyapunov(nn.GRU(3, 4, batch_first=True), x, k=1)
    yield measure.jacobians(nn.GRU(3, 4, batch_first=True), x)


def test_a_result_of_hundreds_of_units_is_five_lines():
    for result in results():
        lines = repr(result).splitlines()
        assert lines[0].startswith(type(result).__name__)
        assert 2 <= len(lines) <= 5
        assert "tensor(" not in repr(result)


def test_a_notebook_gets_a_table_with_each_field_and_nothing_breaks_out():
    for result in results():
        shown = result._repr_html_()
        held = [field.name for field in fields(result) if getattr(result, field.name) not in (None, "", {})]
        assert all(f"<th>{name}</th>" in shown for name in held if not isinstance(getattr(result, name), dict))
    assert "&lt;b&gt;" in Held("<b>")._repr_html_()


def test_recordings_and_layers_are_tables_in_a_fixed_font():
    model = nn.GRU(3, 4, batch_first=True)
    with hs.record(model) as seen:
        model(torch.randn(2, 5, 3))
    for shown in (hs.layers(model), seen):
        assert shown._repr_html_() == f"<pre>{shown}</pre>"


def test_a_state_is_a_table_of_its_parts():
    shown = hs.State({"<h>": torch.zeros(2, 5, 8), "n": torch.zeros(5).long()}, {"<h>": 1, "n": 0})._repr_html_()
    assert "<b>State</b> batch of 5" in shown
    assert "<th>&lt;h&gt;</th><td>(2, 5, 8)</td><td>float32</td><td>rows on axis 1</td>" in shown
    assert "<th>n</th><td>(5,)</td><td>int64</td><td>rows on axis 0</td>" in shown
