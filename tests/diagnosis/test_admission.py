"""Admission: arguments are read, or made up for a cell; what cannot be meant is refused."""

import pytest
import torch
from torch import nn

import hiddenstate as hs
from hiddenstate.cells import calling
from hiddenstate.diagnosis.admission import admit, read_inputs
from hiddenstate.diagnosis.thresholds import Thresholds
from hiddenstate.state import ends
from tests.diagnosis.patients.healthy import Classifier, floats
from tests.support.cells import CELLS


@pytest.mark.parametrize("name", CELLS)
def test_a_healthy_cell_needs_no_input_and_gets_no_warning(name):
    report = hs.diagnose(CELLS[name].cell())
    assert report.ok, report.text()
    assert report.failed == {}
    assert "invented" in report.assumed[0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: hs.diagnose("model"), "takes an nn.Module, but this is str"),
        (lambda: hs.diagnose(nn.Linear(3, 3)), r"was given no inputs.*hs.diagnose\(model, x\)"),
        (lambda: hs.diagnose(Classifier(), None), "none of the inputs is a tensor"),
        (lambda: hs.diagnose(Classifier(), floats(), batch_axis=3), r"batch_axis is 3, but.*\(5, 9, 3\)"),
        (lambda: hs.diagnose(Classifier(), floats(), lengths=[3, 4]), "lengths has 2 entries.*5 rows.*batch_axis=1"),
        (lambda: hs.diagnose(Classifier(), torch.zeros(0, 9, 3)), "0 rows and 9 steps: there is nothing to look at"),
    ],
)
def test_what_cannot_be_meant_is_refused(call, message):
    with pytest.raises(hs.errors.BadInput, match=message):
        call()


def test_a_cell_is_examined_as_it_is_called():
    x, h = torch.randn(6, 3), torch.zeros(6, 4)
    report = hs.diagnose(nn.GRUCell(3, 4), x, h)
    assert report.ok
    assert "begins with it" in report.assumed[0]
    assert hs.diagnose(nn.GRUCell(3, 4), torch.randn(6, 5, 3)).ok


def test_unfamiliar_names_do_not_keep_a_cell_from_being_examined():
    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.input_size, self.hidden_size = 3, 4
            self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 4)

        def forward(self, x, y):
            return torch.tanh(self.a(x))

    assert hs.diagnose(Cell()).codes[0] == "HS103"


class Any(nn.Module):
    def forward(self, x, hidden=None, lengths=None, mask=None):
        return x


def read(*args, batch_axis=0, lengths=None):
    return read_inputs(calling(Any(), args, {}), args, batch_axis=batch_axis, lengths=lengths)


def test_states_lengths_and_masks_are_told_apart():
    x, lengths = torch.randn(4, 6, 3), torch.tensor([6, 4, 2, 1])
    state = (torch.zeros(2, 4, 5), torch.zeros(2, 4, 5))
    mask = torch.arange(6) < lengths.unsqueeze(1)
    inputs = read(x, state, lengths, mask, lengths=lengths)
    assert {a.path: (a.kind, a.rows) for a in inputs.arguments} == {
        (0,): ("sequence", 0),
        (1, 0): ("state", 1),
        (1, 1): ("state", 1),
        (2,): ("lengths", 0),
        (3,): ("mask", 0),
    }
    fewer = inputs.select([3, 1])
    assert [tuple(end.shape) for _, end in ends(fewer.args)] == [(2, 6, 3), (2, 2, 5), (2, 2, 5), (2,), (2, 6)]
    assert fewer.lengths.tolist() == fewer.args[2].tolist() == [1, 4]
    cropped = inputs.crop(3, [(0,), (3,)])
    assert cropped.args[2].tolist() == [3, 3, 2, 1]
    assert cropped.args[3].shape == (4, 3)


@pytest.mark.parametrize("told", [[6, 3, 2], torch.tensor([6, 3, 2])])
def test_lengths_that_are_named_so_need_not_be_told_twice(told):
    class Named(nn.Module):
        def forward(self, x, seq_len, speaker):
            return x

    x = torch.randn(3, 6, 2)
    by_name = read_inputs(calling(Named(), (x, told, None), {}), (x, told, None), batch_axis=0, lengths=None)
    assert by_name.lengths.tolist() == [6, 3, 2]
    other = read_inputs(calling(Named(), (x, None, told), {}), (x, None, told), batch_axis=0, lengths=None)
    assert other.lengths is None  # whole numbers up to the steps, but nobody calls them lengths
    assert (
        read_inputs(
            calling(Named(), (x, [7, 3, 2], None), {}), (x, [7, 3, 2], None), batch_axis=0, lengths=None
        ).lengths
        is None
    )


@pytest.mark.parametrize("told", [{"batch_axis": 1}, {"time_axis": 0}], ids=str)
@pytest.mark.parametrize("name", ["tensor", "pair"])
def test_a_healthy_cell_may_be_given_time_first(name, told):
    report = hs.diagnose(CELLS[name].cell(torch.float32), torch.randn(12, 4, 3), **told)
    assert report.ok, report.text()
    assert hs.diagnose(nn.LSTMCell(3, 8), torch.randn(12, 4, 3), **told).ok
    assert any("4 rows on axis 1" in each for each in report.assumed)


class TimeFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.GRU(3, 8), nn.Linear(8, 2)

    def forward(self, x, hidden=None):
        return self.head(self.rnn(x, hidden)[0])


def test_what_lies_beside_the_sequence_tells_where_its_rows_are():
    x = torch.randn(12, 4, 3)
    for more, told in (
        (({"lengths": [12, 3, 7, 9]}, ()), "as lengths has so many"),
        (({}, (torch.zeros(1, 4, 8),)), "as the state has so many"),
    ):
        report = hs.diagnose(TimeFirst(), x, *more[1], **more[0])
        assert any(told in each for each in report.assumed)
        assert "HS101" not in report.codes
    doubted = hs.diagnose(TimeFirst(), x)
    assert doubted.codes == ("HS101",)
    assert "hs.diagnose(..., batch_axis=1)" in doubted[0].advice
    assert hs.diagnose(TimeFirst(), x, time_axis=0).ok


class Insists(TimeFirst):
    def forward(self, x, hidden):
        return self.head(self.rnn(x.transpose(0, 1), hidden)[0]).transpose(0, 1)


class TakesApart(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(3, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, x, hidden):
        h, c = hidden
        return self.head(self.rnn(x, (h, c))[0])


def test_a_state_that_a_model_insists_on_is_handed_in_and_that_is_said():
    for model, what in ((Insists(), "None was handed in"), (TakesApart(), "first states were handed in")):
        report = hs.diagnose(model, torch.randn(4, 12, 3))
        assert not report.broken
        assert report.ok, report.text()
        assert what in report.assumed[0]


class Columns(nn.Module):
    """The minimal character model: each step is a column, and W @ x."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.Wxh, self.Whh = nn.Parameter(0.5 * torch.randn(6, 3)), nn.Parameter(0.4 * torch.randn(6, 6))
        self.Why, self.bh = nn.Parameter(torch.randn(2, 6)), nn.Parameter(torch.zeros(6, 1))

    def forward(self, inputs, hprev=None):
        h, ys = torch.zeros(6, 1) if hprev is None else hprev, []
        for x in inputs:
            h = torch.tanh(self.Wxh @ x + self.Whh @ h + self.bh)
            ys.append(self.Why @ h)
        return torch.stack(ys), h


@pytest.mark.parametrize("state", [(), (torch.zeros(6, 1),)], ids=["own start", "handed in"])
@pytest.mark.parametrize("stacked", [False, True], ids=["list", "tensor"])
def test_steps_that_are_columns_have_their_rows_on_the_other_axis(stacked, state):
    steps = [torch.randn(3, 1) for _ in range(12)]
    report = hs.diagnose(Columns(), torch.stack(steps) if stacked else steps, *state)
    assert "HS204" not in report.codes
    assert "HS101" not in report.codes
    assert f"each step is a column of 3 features, so rows are on axis {2 if stacked else 1}" in report.text()


def test_rows_of_one_feature_are_no_columns():
    class Rows(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.GRUCell(1, 6)

        def forward(self, steps):
            h = None
            for x in steps:
                h = self.cell(x, h)
            return h

    assert "column" not in hs.diagnose(Rows(), [torch.randn(4, 1) for _ in range(9)]).text()
    assert "column" not in hs.diagnose(nn.GRU(1, 6, batch_first=True), torch.randn(4, 9, 1)).text()


class TimeFirstCell(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(3, 6)

    def forward(self, x):
        h, seen = torch.zeros(x.size(1), 6), []
        for t in range(x.size(0)):
            h = self.cell(x[t], h)
            seen.append(h)
        return torch.stack(seen)


class TimeFirstFormula(TimeFirstCell):
    def __init__(self):
        super().__init__()
        self.cell, self.a, self.b = None, nn.Linear(3, 6), nn.Linear(6, 6)

    def forward(self, x):
        h, seen = torch.zeros(x.size(1), 6), []
        for t in range(x.size(0)):
            h = torch.tanh(self.a(x[t]) + self.b(h))
            seen.append(h)
        return torch.stack(seen)


class TimeFirstIteration(TimeFirstCell):
    def forward(self, x):
        h, seen = torch.zeros(x.size(1), 6), []
        for step in x:
            h = self.cell(step, h)
            seen.append(h)
        return torch.stack(seen)


@pytest.mark.parametrize("make", [TimeFirstCell, TimeFirstFormula, TimeFirstIteration])
def test_a_loop_that_takes_time_first_is_told_how_to_say_so(make):
    report = hs.diagnose(make(), torch.randn(20, 4, 3))
    assert "hs.diagnose(..., batch_axis=1)" in next(f.advice for f in report.findings if f.code == "HS101")
    assert hs.diagnose(make(), torch.randn(20, 4, 3), batch_axis=1).ok


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("model", [nn.GRU(3, 6, batch_first=True), Classifier()], ids=["layer", "model"])
def test_arrays_are_taken_as_tensors(model, dtype):
    x = torch.randn(5, 9, 3).numpy().astype(dtype)
    assert hs.diagnose(model, x).codes == hs.diagnose(model, torch.as_tensor(x).float()).codes


def test_arrays_by_name_and_beside_a_sequence_too():
    class Started(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = nn.GRU(3, 6, batch_first=True)

        def forward(self, x, hidden):
            return self.gru(x, hidden)[0]

    x, hidden = torch.randn(4, 9, 3).double().numpy(), torch.zeros(1, 4, 6).numpy()
    assert hs.diagnose(Started(), x, hidden).ok
    assert hs.diagnose(Started(), x=x, hidden=hidden).ok


STATES = {
    "stacked": lambda: torch.zeros(1, 4, 8),
    "a pair": lambda: (torch.zeros(1, 4, 8), torch.zeros(1, 4, 8)),
    "a list of pairs": lambda: [(torch.zeros(1, 4, n), torch.zeros(1, 4, n)) for n in (8, 5)],
    "two axes": lambda: torch.zeros(4, 8),
    "a pair of two axes": lambda: (torch.zeros(4, 8), torch.zeros(4, 8)),
    "a dict": lambda: {"h": torch.zeros(4, 8), "c": torch.zeros(4, 8)},
}


@pytest.mark.parametrize("name", ["hidden", "state", "hid", "rnn_hxs", "carry"])
@pytest.mark.parametrize("form", STATES)
@pytest.mark.parametrize("x", [torch.randn(9, 4, 3), torch.randint(5, (9, 4))], ids=["floats", "tokens"])
def test_a_state_of_any_form_tells_that_rows_are_on_axis_1(x, form, name):
    scope = {"nn": nn}
    exec(f"class Takes(nn.Module):\n    def forward(self, x, {name}):\n        return x", scope)

    def admitted(given):
        return admit(
            scope["Takes"](), (given, STATES[form]()), lengths=None, axes=(None, None), thresholds=Thresholds()
        )

    patient = admitted(x)
    assert (patient.inputs.batch, patient.inputs.steps) == (4, 9)
    assert "4 rows on axis 1, as the state has so many; batch_axis= says otherwise" in patient.assumed
    assert all(a.rows == (0 if "two" in form or form == "a dict" else 1) for a in patient.inputs.arguments[1:])
    assert admitted(x.transpose(0, 1)).inputs.argument((0,)).rows == 0


def test_a_list_with_a_number_for_each_row_goes_with_the_rows_whatever_it_counts():
    inputs = read(torch.randn(4, 6, 3), None, [9, 7, 6, 4])
    assert inputs.lengths is None
    assert inputs.select([0, 2]).args[2] == [9, 6]


def test_a_pair_of_batches_is_no_list_of_sequences():
    class Towers(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = nn.GRU(3, 2, batch_first=True)

        def forward(self, pair):
            return tuple(self.gru(rows.unsqueeze(1))[1][-1] for rows in pair)

    report = hs.diagnose(Towers(), [torch.randn(6, 3), torch.randn(6, 3)])
    assert "6 rows on axis 0" in report.text()
