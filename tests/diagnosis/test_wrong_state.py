"""States of another shape: the axis is named, and the advice runs."""

import re

import pytest
import torch
from torch import nn

import hiddenstate as hs

ROWS, STEPS, UNITS = 4, 5, 6


class Wrapped(nn.Module):
    """A model that hands its state on."""

    def __init__(self, rnn):
        super().__init__()
        self.rnn, self.head = rnn, nn.Linear(UNITS, 1)

    def forward(self, x, hidden):
        out, hidden = self.rnn(x, hidden)
        return self.head(out), hidden


def layer(kind, layers, wrapped):
    rnn = kind(3, UNITS, layers, batch_first=True)
    return Wrapped(rnn) if wrapped else rnn


SHAPES = {
    "first axis missing": (lambda layers: (ROWS, UNITS), "the first axis is missing, layers × directions"),
    "rows missing": (lambda layers: (layers, UNITS), "the axis of rows is missing"),
    "swapped": (lambda layers: (ROWS, layers, UNITS), "its first two axes are swapped: .*also with batch_first=True"),
    "one row": (lambda layers: (layers, 1, UNITS), "it has one row, and the input has 4"),
    "another batch": (lambda layers: (layers, 3, UNITS), "it has 3 rows, and the input has 4: .*another batch"),
    "other units": (lambda layers: (layers, ROWS, 5), "it has 5 units, and the layer has 6"),
    "other layers": (lambda layers: (layers + 3, ROWS, UNITS), "it is of . layers × directions, and there are"),
    "too many axes": (lambda layers: (1, layers, ROWS, UNITS), "it has 4 axes, and 3 are needed"),
}


@pytest.mark.parametrize("wrong", SHAPES)
@pytest.mark.parametrize("wrapped", [False, True], ids=["layer", "wrapped"])
@pytest.mark.parametrize(("kind", "layers"), [(nn.RNN, 1), (nn.GRU, 2), (nn.LSTM, 2)])
def test_the_axis_that_is_wrong_is_named_and_the_advice_runs(wrong, kind, layers, wrapped):
    shape, cause = SHAPES[wrong]
    model, x, h = layer(kind, layers, wrapped), torch.randn(ROWS, STEPS, 3), torch.randn(shape(layers))
    report = hs.diagnose(model, x, (h, h) if kind is nn.LSTM else h)
    (finding,) = report.findings
    assert (finding.code, finding.title) == ("HS204", "a state of another shape")
    assert finding.where == ("hidden" if wrapped else "hx")
    assert f"it has shape {tuple(h.shape)}" in finding.evidence
    assert f"wants ({layers}, {ROWS}, {UNITS})" in finding.evidence
    assert re.search(cause, finding.cause)
    assert "last batch" not in finding.cause
    mended = eval(finding.advice.removesuffix(", or none at all"), {"h": h, "torch": torch})
    assert mended.shape == (layers, ROWS, UNITS)
    model(x, (mended, mended) if kind is nn.LSTM else mended)


def test_a_pair_is_asked_for_where_one_tensor_was_given():
    lstm, h = nn.LSTM(3, UNITS, 2, batch_first=True), torch.zeros(2, ROWS, UNITS)
    (finding,) = hs.diagnose(lstm, torch.randn(ROWS, STEPS, 3), h).findings
    assert "it is one tensor, and an LSTM takes a pair, (h, c), of (2, 4, 6) each" in finding.cause
    assert finding.title == "a state of another shape"


@pytest.mark.parametrize("how", ["keyword", "time first", "both directions"])
def test_however_it_is_called(how):
    x, h = torch.randn(ROWS, STEPS, 3), torch.randn(ROWS, 2, UNITS)
    if how == "keyword":
        found = hs.diagnose(Wrapped(nn.GRU(3, UNITS, 2, batch_first=True)), x, hidden=h).findings
    elif how == "time first":
        found = hs.diagnose(nn.GRU(3, UNITS, 2), x.transpose(0, 1), h, batch_axis=1).findings
    else:
        found = hs.diagnose(nn.GRU(3, UNITS, bidirectional=True, batch_first=True), x, h).findings
    assert "its first two axes are swapped" in found[0].cause


@pytest.mark.parametrize(
    ("shape", "cause"), [((1, ROWS, UNITS), "takes no axis of layers"), ((2, UNITS), "it has 2 rows")]
)
def test_cells_too(shape, cause):
    (finding,) = hs.diagnose(nn.GRUCell(3, UNITS), torch.randn(ROWS, 3), torch.randn(shape)).findings
    assert cause in finding.cause


def test_a_state_made_in_forward_for_another_batch_is_still_a_written_number():
    class Written(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = nn.GRU(3, UNITS, batch_first=True)

        def forward(self, x):
            return self.gru(x, torch.zeros(1, 3, UNITS))[0]

    (finding,) = hs.diagnose(Written(), torch.randn(ROWS, STEPS, 3)).findings
    assert finding.title == "one batch size only"


def test_one_made_in_forward_without_its_axis_is_named_by_its_layer():
    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = nn.GRU(3, UNITS, batch_first=True)

        def forward(self, x):
            return self.gru(x, torch.zeros(len(x), UNITS))[0]

    (finding,) = hs.diagnose(Flat(), torch.randn(ROWS, STEPS, 3)).findings
    assert finding.where == "the state that gru is handed"
    assert finding.cause == "the first axis is missing, layers × directions"
