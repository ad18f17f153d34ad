"""An index seen through views reads what torch reads."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from hiddenstate.unrolling.native import Unsupported
from hiddenstate.unrolling.onchip.indexing import Along, Extent, at, broadcast, part_of_join, through

aten = torch.ops.aten


def element(tensor, index, row, unit):
    return tensor[tuple(place.row * row + place.unit * unit + place.shift for place in index)]


def source_of(node, index, extent):
    while node.op != "placeholder":
        if node.target in (aten.cat.default, aten.stack.default):
            node, index = part_of_join(node, index, extent)
        else:
            node, index = through(node, index, extent)
    return node, index


VIEWS = {
    "chunks": lambda x, units: x.chunk(3, -1)[1],
    "slice": lambda x, units: x[:, units : 2 * units],
    "gates": lambda x, units: x.view(len(x), 3, units).select(1, 2),
    "whole gates": lambda x, units: x.view(len(x), 3, units),
    "gates and back": lambda x, units: x.view(len(x), 3, units)[:, 1:].reshape(len(x), -1),
    "turned": lambda x, units: x.view(len(x), 3, units).transpose(1, 2).permute(0, 2, 1),
    "axes": lambda x, units: x.unsqueeze(1).expand(-1, 2, -1).squeeze(-1)[:, 1],
    "joined": lambda x, units: torch.cat([x[:, units:], x[:, :units]], -1),
    "stacked": lambda x, units: torch.stack([x[:, :units], x[:, units : 2 * units]], 1).flatten(1),
    "twice": lambda x, units: x.t().t()[:, : 2 * units].unflatten(1, (2, units))[:, 0],
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@settings(deadline=None, max_examples=8)
@given(rows=st.integers(1, 4), units=st.integers(2, 5))
def test_what_is_read_through_views_is_what_torch_shows(view, rows, units):
    x = torch.randn(rows, 3 * units)
    graph = make_fx(lambda x: view(x, units), tracing_mode="fake")(x).graph
    shown, extent = view(x, units), Extent(rows, units)
    result = next(iter(graph.nodes)).graph.find_nodes(op="output")[0].args[0]
    for index in extent.windows(shown.shape):
        _, inner = source_of(result, index, extent)
        for row in range(rows):
            for unit in range(units):
                assert element(shown, index, row, unit) == element(x, inner, row, unit)


@given(rows=st.integers(1, 4), units=st.integers(2, 6), parts=st.integers(1, 4), extra=st.integers(0, 3))
def test_windows_reach_every_element_once(rows, units, parts, extra):
    shape = (rows, *[2] * extra, parts * units) if extra < 3 else (rows,)
    extent, seen = Extent(rows, units), torch.zeros(shape)
    for index in extent.windows(shape):
        spread = any(place.unit for place in index)
        for row in range(rows):
            for unit in range(units if spread else 1):
                place = tuple(p.row * row + p.unit * unit + p.shift for p in index)
                seen[place] += 1
    assert (seen == 1).all()


@pytest.mark.parametrize(
    ("view", "reason"),
    [
        (lambda x: x[:, ::2], "every other element"),
        (lambda x: torch.cat([x[:, 1:], x[:, :1]], -1), "no multiple of the state's width"),
    ],
)
def test_views_across_units_say_so(view, reason):
    x, extent = torch.randn(2, 12), Extent(2, 4)
    result = make_fx(view, tracing_mode="fake")(x).graph.find_nodes(op="output")[0].args[0]
    windows = extent.windows((2, 4)) if reason.startswith("every") else extent.windows((2, 12))
    with pytest.raises(Unsupported, match=reason):
        [source_of(result, index, extent) for index in windows]


def test_values_that_no_row_owns_say_so():
    with pytest.raises(Unsupported, match="without an axis of rows"):
        Extent(3, 8).windows((5, 8))
    with pytest.raises(Unsupported, match="of another width than the state"):
        Extent(3, 8).windows((3, 100))


def test_broadcast_axes_are_read_at_their_only_place():
    index = (Along(row=1), Along(unit=1, shift=8))
    assert broadcast(index, (1, 16)) == (at(0), Along(unit=1, shift=8))
    assert broadcast(index, (16,)) == (Along(unit=1, shift=8),)
    assert broadcast(index, ()) == ()
