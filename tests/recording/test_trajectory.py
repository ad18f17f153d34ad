"""Trajectories: what belongs together stays together, whatever is cut out of it."""

import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import hiddenstate as hs
from hiddenstate import Trajectory


def walk(**options):
    layer = nn.LSTM(3, 4, batch_first=True)
    packed = nn.utils.rnn.pack_padded_sequence(
        torch.randn(4, 9, 3), torch.tensor([9, 2, 5, 7]), True, enforce_sorted=False
    )
    with hs.record(layer, gates=True, grads=True, **options) as rec:
        layer(packed)[0].data.sum().backward()
    return rec["l0"]


@given(
    rows=st.one_of(
        st.slices(4), st.integers(-4, 3), st.lists(st.integers(0, 3)), st.lists(st.booleans(), min_size=4, max_size=4)
    ),
    start=st.one_of(st.none(), st.integers(-12, 12)),
    stop=st.one_of(st.none(), st.integers(-12, 12)),
    stride=st.integers(1, 4),
)
def test_a_cut_is_the_cut_of_every_part(rows, start, stop, stride):
    whole, steps = walk(), slice(start, stop, stride)
    cut = whole[rows, steps]
    index = np.atleast_1d(np.arange(4)[rows if rows != [] else slice(0)]).copy()
    for name, values in whole.numpy().items():
        expected = values[index] if name == "lengths" else values[index][:, steps]
        if name != "lengths":
            assert (cut.numpy()[name] == expected).all()
    assert torch.equal(cut.valid, whole.valid[index][:, steps])
    assert cut.every == stride


def test_the_state_before_the_first_step_goes_along():
    whole = walk()
    assert torch.equal(whole[[2, 0]].initial["c"], whole.initial["c"][[2, 0]])
    assert torch.equal(whole[1:3, 4:].initial["h"], whole.h[1:3, 3])
    assert torch.equal(whole[1:3, 4:].initial["c"], whole.c[1:3, 3])
    assert walk(every=2)[:, 1:].initial is None


@pytest.mark.parametrize(
    "where", [(slice(None), 3), (slice(None), slice(None, None, -1)), (slice(None), [1, 2])], ids=str
)
def test_steps_are_cut_by_forward_slices_only(where):
    with pytest.raises(hs.errors.BadInput, match=r"forward slice, as walk\[:, 10:20\]"):
        walk()[where]


@pytest.mark.parametrize("rows", [9, [0, 9], "first", [True, False]], ids=str)
def test_rows_that_are_not_there_are_refused(rows):
    with pytest.raises(hs.errors.BadInput, match=r"rows .* are asked for, but there are 4, 0 to 3"):
        walk()[rows]


def test_numpy_has_everything_by_name():
    run = walk()
    arrays = run.numpy()
    assert set(arrays) == {"h", "c", "lengths", "grads.h", "grads.c", *(f"gates.{name}" for name in run.gates)}
    assert (arrays["gates.forget"] == run.gates["forget"].numpy()).all()
    assert walk(dtype=torch.bfloat16).numpy()["h"].dtype == np.float32


def test_xarray_names_its_dims():
    pytest.importorskip("xarray")
    data = walk(every=3).to_xarray()
    assert data["h"].dims == data["gates.input"].dims == ("batch", "time", "unit")
    assert data["time"].values.tolist() == [0, 3, 6]
    assert data.attrs == {"track": "l0", "kind": "lstm"}
    layer = nn.LSTM(3, 4, proj_size=2, dtype=torch.float64)
    with hs.record(layer) as rec:
        layer(torch.randn(5, 2, 3, dtype=torch.float64))
    assert rec["l0"].to_xarray()["c"].dims == ("batch", "time", "unit_c")
    assert rec.to_xarray()["l0"].sizes["unit"] == 2


def test_without_xarray_the_way_to_it_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "xarray", None)
    with pytest.raises(hs.errors.MissingExtra, match=r"pip install 'hiddenstate\[analysis\]'"):
        walk().to_xarray()


def test_bytes_are_those_of_all_values():
    run = walk()
    assert run.nbytes == sum(array.nbytes for name, array in run.numpy().items() if name != "lengths")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: hs.Trajectory(torch.zeros(3, 4)), r"\(batch, time, unit\), but h has shape \(3, 4\).*unsqueeze"),
        (lambda: hs.Trajectory(torch.zeros(3, 4, 2), torch.ones(2).long()), r"lengths have shape \(2,\).*3 rows"),
        (lambda: hs.Trajectory(torch.zeros(1, 4, 2), torch.tensor([5])), r"lengths go from 5 to 5, but h has 4 steps"),
    ],
)
def test_parts_that_do_not_fit_are_refused(make, message):
    with pytest.raises(hs.errors.BadInput, match=message):
        make()


@given(lengths=st.lists(st.integers(0, 5), min_size=1, max_size=4))
def test_lengths_told_later_cut_the_padding_off(lengths):
    h = torch.rand(len(lengths), 5, 2) + 1
    walk = Trajectory(h, c=h, gates={"input": h}).without_padding(lengths)
    assert walk.lengths.tolist() == lengths
    for part in (walk.h, walk.c, walk.gates["input"]):
        assert torch.equal(part != 0, walk.valid.unsqueeze(2).expand_as(part))


@pytest.mark.parametrize("lengths", [[3], [3, 3, 3], [9, 1], [-1, 2]])
def test_lengths_of_other_rows_or_steps_change_nothing(lengths):
    walk = Trajectory(torch.ones(2, 4, 1))
    assert walk.without_padding(lengths) is walk
    known = Trajectory(torch.ones(2, 4, 1), torch.tensor([4, 2]))
    assert known.without_padding([1, 1]) is known


@pytest.mark.parametrize("part", ["h", "forget"])
def test_a_table_has_a_line_for_each_real_step(part):
    pytest.importorskip("pandas")
    values = torch.randn(2, 4, 3)
    walk = hs.Trajectory(values, torch.tensor([4, 2]), gates={"forget": 2 * values}, every=5)
    table = walk.to_pandas(part)
    assert table.index.names == ["row", "step"]
    assert list(table.index) == [(0, 0), (0, 5), (0, 10), (0, 15), (1, 0), (1, 5)]
    assert torch.equal(torch.tensor(table.loc[1].to_numpy()), walk.part(part)[1, :2])
    assert torch.equal(walk.real(part), torch.tensor(table.to_numpy()))


def test_without_pandas_the_way_to_it_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(hs.errors.MissingExtra, match=r"pip install 'hiddenstate\[analysis\]'"):
        hs.Trajectory(torch.zeros(1, 2, 3)).to_pandas()
