"""Every argument that cannot mean what it says is refused, with the way out."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import hiddenstate as hs
from hiddenstate.errors import BadInput, StateMismatch
from tests.support.cells import HIDDEN, INPUT, TanhCell

unroll = partial(hs.unroll, time_axis=1)  # rows first, also for layers whose own layout is another

MODULES = {
    "own cell": lambda: TanhCell(),
    "torch cell": lambda: nn.GRUCell(INPUT, HIDDEN),
    "layer": lambda: nn.GRU(INPUT, HIDDEN, num_layers=2),
    "recurrent": lambda: hs.Recurrent(TanhCell, INPUT, HIDDEN, num_layers=2),
}
every_module = pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
X = torch.randn(3, 5, INPUT)


def refused(make, message, error=BadInput, x=X, **arguments):
    with pytest.raises(error, match=message):
        unroll(make(), x, **arguments)


BAD_LENGTHS = {
    "negative": ([5, -1, 3], r"row 1 has length -1, but 0 or more is needed; with 0 steps a row waits"),
    "too long": ([5, 3, 6], r"row 2 has length 6, but x has 5 steps"),
    "float": (torch.tensor([5.0, 3.0, 2.0]), r"lengths are torch\.float32.*lengths\.long\(\)"),
    "mask": (torch.ones(3, 5, dtype=torch.bool), r"lengths are torch\.bool.*mask\.sum\(1\)"),
    "too few": ([5, 3], r"lengths have shape \(2,\), but x has 3 rows"),
    "two axes": (torch.ones(3, 1, dtype=torch.int64), r"lengths have shape \(3, 1\)"),
}


@every_module
@pytest.mark.parametrize(("lengths", "message"), BAD_LENGTHS.values(), ids=BAD_LENGTHS)
def test_lengths_that_cannot_be_are_refused(make, lengths, message):
    refused(make, message, lengths=lengths)


@every_module
@pytest.mark.parametrize("kind", [list, tuple, torch.tensor, np.array, lambda n: torch.tensor(n, dtype=torch.int32)])
def test_lengths_may_be_any_integers_in_any_order(make, kind):
    module = make()
    same = unroll(module, X, lengths=torch.tensor([2, 5, 3]))[0]
    assert torch.equal(unroll(module, X, lengths=kind([2, 5, 3]))[0], same)


BAD_RESETS = {
    "integers": (torch.zeros(3, 5, dtype=torch.int64), r"resets are torch\.int64.*resets\.bool\(\)"),
    "one axis": (torch.zeros(3, dtype=torch.bool), r"resets have shape \(3,\).*shape \(3, 5\)"),
    "turned": (torch.zeros(5, 3, dtype=torch.bool), r"resets have shape \(5, 3\).*use resets\.T"),
}


@every_module
@pytest.mark.parametrize(("resets", "message"), BAD_RESETS.values(), ids=BAD_RESETS)
def test_resets_that_cannot_be_are_refused(make, resets, message):
    refused(make, message, resets=resets)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.LSTM(INPUT, HIDDEN, bidirectional=True),
        lambda: hs.Recurrent(TanhCell, INPUT, HIDDEN, bidirectional=True),
    ],
)
def test_resets_of_a_bidirectional_layer_are_refused(make):
    refused(make, r"resets are given to a bidirectional layer.*no meaning", resets=torch.rand(3, 5) < 2)


@every_module
def test_a_state_of_another_batch_is_refused_with_both_numbers(make):
    state = unroll(make(), torch.randn(8, 2, INPUT))[1]
    refused(make, r"x has 3 rows, but the state has 8\..*state\.select\(slice\(0, 3\)\)", StateMismatch, state=state)


@pytest.mark.parametrize("name", ["torch cell", "layer"])
def test_a_state_of_another_dtype_is_refused(name):
    state = unroll(MODULES[name](), X)[1].to(torch.float64)
    refused(MODULES[name], r"part 'h' of the state is torch\.float64, but GRU.* works in", StateMismatch, state=state)


@pytest.mark.parametrize("name", ["torch cell", "layer"])
def test_a_state_on_another_device_is_refused(name):
    state = unroll(MODULES[name](), X)[1].to("meta")
    refused(
        MODULES[name], r"is on meta, but GRU.* is on cpu\. Move it with state\.to\('cpu'\)", StateMismatch, state=state
    )


def test_a_state_of_another_kind_of_layer_is_refused():
    state = unroll(nn.LSTM(INPUT, HIDDEN), X)[1]
    refused(MODULES["layer"], r"the state has the parts h, c, but GRU needs h", StateMismatch, state=state)
    refused(MODULES["own cell"], r"the state has the parts h, c, but TanhCell needs h", StateMismatch, state=state)


def test_a_state_of_too_few_layers_is_refused():
    state = unroll(nn.GRU(INPUT, HIDDEN), X)[1]
    refused(MODULES["layer"], r"needs \(2, batch, 4\)", StateMismatch, state=state)
    refused(MODULES["recurrent"], r"this Recurrent needs \(2, 3, 4\)", StateMismatch, state=state)


@every_module
def test_x_without_rows_is_refused_with_the_way_out(make):
    refused(make, r"x has shape \(5, 3\).*x\.unsqueeze\(0\)", x=torch.randn(5, INPUT))


@every_module
def test_x_without_steps_is_refused(make):
    refused(make, r"no step to run.*axis 1", x=torch.randn(5, 0, INPUT))


@every_module
def test_a_packed_sequence_is_refused_with_the_way_out(make):
    refused(make, r"x is a PackedSequence.*pad_packed_sequence", x=pack_sequence([torch.randn(3, INPUT)]))


@every_module
def test_what_is_no_tensor_is_refused(make):
    refused(make, r"x is list, but a tensor", x=[1, 2])


def test_tokens_for_a_fused_layer_are_refused():
    refused(
        MODULES["layer"], r"x has shape \(3, 5\), but \(batch, time, feature\)", x=torch.zeros(3, 5, dtype=torch.int64)
    )


@pytest.mark.parametrize("make", [MODULES["own cell"], MODULES["torch cell"], MODULES["recurrent"]])
def test_an_empty_batch_stays_empty(make):
    out, _ = unroll(make(), torch.randn(0, 5, INPUT), lengths=[], resets=torch.zeros(0, 5, dtype=torch.bool))
    assert out.shape == (0, 5, HIDDEN)


@pytest.mark.parametrize(
    "make",
    [
        lambda n: nn.GRU(INPUT, HIDDEN, n, batch_first=True),
        lambda n: nn.LSTM(INPUT, HIDDEN, n),
        lambda n: hs.Recurrent(nn.GRUCell, INPUT, HIDDEN, n),
    ],
)
@pytest.mark.parametrize(
    ("layers", "shape", "message"),
    [
        (1, (3, HIDDEN), r"the axis of layers is missing, which comes first: h.unsqueeze\(0\)"),
        (
            2,
            (3, HIDDEN),
            r"the axis of layers is missing, which comes first: torch.stack\(\[h, ...\]\), one for each of 2",
        ),
        (1, (1, 1, HIDDEN), r"it has one row for all, and one for each is needed: h.expand\(1, 3, 4\)"),
        (2, (2, 1, HIDDEN), r"it has one row for all, and one for each is needed: h.expand\(2, 3, 4\)"),
        (
            1,
            (3, 1, HIDDEN),
            r"the rows are on axis 0, and belong on axis 1 \(batch_first=True turns.*h.transpose\(0, 1\)",
        ),
        (2, (3, 1, HIDDEN), r"the rows are on axis 0.*2 layers and directions: h.transpose\(0, 1\).repeat\(2, 1, 1\)"),
        (2, (3, 2, HIDDEN), r"the rows are on axis 0, and belong on axis 1"),
        (2, (HIDDEN,), r"the axis of rows is missing, axis 1: h.expand\(2, 3, 4\)"),
        (1, (1, 8, HIDDEN), r"x has 3 rows, but the state has 8. The last batch of an epoch is often smaller"),
    ],
)
def test_a_state_of_a_wrong_shape_is_told_which_axis_is_missing(make, layers, shape, message):
    layer, h = make(layers), torch.zeros(shape)
    with pytest.raises(StateMismatch, match=message):
        unroll(layer, torch.randn(3, 5, INPUT), (h, h) if isinstance(layer, nn.LSTM) else h)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, HIDDEN), "one row for all"),
        ((1, 3, HIDDEN), r"a cell's has none: h\[0\]"),
        ((HIDDEN,), "axis of rows is mis"),
    ],
)
def test_a_cells_state_of_a_wrong_shape_is_told_so_too(shape, message):
    with pytest.raises(StateMismatch, match=message):
        unroll(nn.GRUCell(INPUT, HIDDEN), torch.randn(3, 5, INPUT), torch.zeros(shape))
