"""A large input is cut down to what is worth its cost; what is found is the same, and says what it was measured on."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import hiddenstate as hs
from hiddenstate.diagnosis import first_call
from tests.diagnosis.patients.healthy import HEALTHY, Classifier, floats
from tests.diagnosis.patients.sick import SICK


@pytest.fixture
def costly(monkeypatch):
    """Every model costs too much: four rows and five steps are all that is left, of however few."""
    for name, value in {"FREE": -1.0, "SECONDS": 0.0, "SHORT": 5, "STEPS": 5}.items():
        monkeypatch.setattr(first_call, name, value)


def cut_of(report):
    return next((line for line in report.assumed if "measured on" in line), "")


@pytest.mark.sample(25)
@pytest.mark.usefixtures("costly")
@pytest.mark.parametrize("name", HEALTHY)
def test_a_piece_of_a_healthy_models_input_shows_nothing_wrong(name):
    model, inputs, options = HEALTHY[name]()
    report = hs.diagnose(model, *inputs, **options)
    assert report.ok, report.text()
    assert report.failed == {}


@pytest.mark.sample(25)
@pytest.mark.usefixtures("costly")
@pytest.mark.parametrize("name", SICK)
def test_a_mistake_is_found_in_a_piece_as_well(name):
    codes, make = SICK[name]
    model, inputs, options = make()
    report = hs.diagnose(model, *inputs, **options)
    assert report.codes[:1] == codes[:1], report.text()


class Tagger(nn.Module):
    """One output for each step."""

    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(3, 4, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.gru(x)[0])


class Mixing(nn.Module):
    """A tagger that takes the mean over the batch."""

    def __init__(self, fixed=None):
        super().__init__()
        self.gru = nn.GRU(3, 4, batch_first=True)
        self.norm = nn.LayerNorm(fixed) if fixed else nn.Identity()

    def forward(self, x):
        out = self.norm(self.gru(x)[0])
        return out - out.mean(0)


@pytest.mark.usefixtures("costly")
def test_evidence_says_how_much_it_was_measured_on():
    report = hs.diagnose(Mixing(), floats(9, 20, 3))
    (finding,) = [finding for finding in report if finding.code == "HS101"]
    assert finding.evidence.endswith("so did 4 of 4 rows. Eval mode. Measured on 4 of 9 rows and 5 of 20 steps.")
    assert cut_of(report) == "the whole input was run once; all else was measured on 4 of 9 rows and 5 of 20 steps"


@pytest.mark.usefixtures("costly")
def test_what_holds_of_the_model_alone_was_measured_on_nothing():
    (finding,) = [f for f in hs.diagnose(Dropping(), floats(9, 20, 3)) if f.code == "HS305"]
    assert "Measured" not in finding.evidence


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        with pytest.warns(UserWarning, match="dropout option adds dropout after all but last"):
            self.gru = nn.GRU(3, 4, dropout=0.5, batch_first=True)

    def forward(self, x):
        return self.gru(x)[0]


@pytest.mark.usefixtures("costly")
def test_a_model_of_fixed_length_keeps_its_steps():
    report = hs.diagnose(Mixing(fixed=(20, 4)), floats(9, 20, 3))
    assert cut_of(report).endswith("measured on 4 of 9 rows")
    assert "HS101" in report.codes


@pytest.mark.usefixtures("costly")
def test_a_row_alone_is_still_multiplied():
    report = hs.diagnose(Mixing(), floats(1, 20, 3))
    assert cut_of(report).endswith("measured on 5 of 20 steps")
    assert any("4 were used" in line for line in report.assumed)
    assert "HS101" in report.codes


@pytest.mark.usefixtures("costly")
def test_a_hole_in_the_data_is_found_wherever_it_is():
    x = floats(9, 20, 3)
    x[8, 17] = float("nan")
    (finding,) = hs.diagnose(Tagger(), x)
    assert finding.code == "HS401"
    assert "at row 8, step 17" in finding.evidence
    assert "Measured" not in finding.evidence


def test_a_short_input_is_never_cut_whatever_it_costs(monkeypatch):
    monkeypatch.setattr(first_call, "FREE", -1.0)
    monkeypatch.setattr(first_call, "SECONDS", 0.0)
    assert cut_of(hs.diagnose(Tagger(), floats(4, 64, 3))) == ""
    assert cut_of(hs.diagnose(Tagger(), floats(4, 65, 3))).endswith("measured on 32 of 65 steps")
    assert cut_of(hs.diagnose(Tagger(), floats(5, 64, 3))).endswith("measured on 4 of 5 rows")


def test_a_cheap_model_is_never_cut(monkeypatch):
    monkeypatch.setattr(first_call, "FREE", 1e9)
    assert cut_of(hs.diagnose(Tagger(), floats(4, 200, 3))) == ""


def test_what_the_time_allows_is_kept(monkeypatch):
    monkeypatch.setattr(first_call, "FREE", -1.0)
    monkeypatch.setattr(first_call, "SECONDS", 1e9)
    assert cut_of(hs.diagnose(Tagger(), floats(16, 100, 3))) == ""


@pytest.mark.parametrize(("budgeted", "expected"), [(2.0, (4, 64)), (4.0, (8, 100)), (0.1, (4, 32))])
def test_steps_come_before_rows(monkeypatch, budgeted, expected):
    monkeypatch.setattr(first_call, "FREE", -1.0)
    monkeypatch.setattr(first_call, "SECONDS", budgeted)
    monkeypatch.setattr(first_call, "timed", lambda run: (run(), 1.0 if expected[1] < 100 else 0.64))
    rows, steps = expected
    text = cut_of(hs.diagnose(Tagger(), floats(12, 100, 3)))
    assert f"{rows} of 12 rows" in text
    assert (f"{steps} of 100 steps" in text) == (steps < 100)


def by_step(out, y):
    assert out.shape[:2] == y.shape
    return cross_entropy(out.flatten(0, 1), y.flatten())


def joined(out, y):
    return cross_entropy(out.flatten(0, 1), y)


@pytest.mark.usefixtures("costly")
def test_targets_are_cut_along_where_they_can_be():
    y = torch.randint(2, (9, 20))
    report = hs.diagnose(Tagger(), floats(9, 20, 3), loss=by_step, targets=y)
    assert report.ok, report.text()
    assert report.failed == {}
    assert cut_of(report).startswith("the whole input was run once;")


@pytest.mark.usefixtures("costly")
def test_a_loss_whose_targets_cannot_be_cut_gets_the_whole():
    y = torch.randint(2, (180,))
    report = hs.diagnose(Tagger(), floats(9, 20, 3), loss=joined, targets=y)
    assert report.ok, report.text()
    assert report.failed == {}
    assert cut_of(report).startswith("the whole input was run once, and again with the loss;")


@pytest.mark.usefixtures("costly")
@pytest.mark.parametrize(("scale", "code"), [(1.15, "HS502"), (0.8, "HS501")])
def test_gradients_over_the_steps_that_were_left_out_are_a_note(scale, code):
    rnn = nn.RNN(3, 4, batch_first=True, nonlinearity="relu", bias=False)
    with torch.no_grad():
        rnn.weight_hh_l0.copy_(scale * torch.eye(4))
        rnn.weight_ih_l0.abs_()
    x = torch.rand(4, 80, 3)
    (finding,) = [f for f in hs.diagnose(rnn, x) if f.code == code]
    assert finding.severity == "note"
    ratio = scale**79
    assert f"a factor of {scale:.2f} per step, which over all 80 steps would make {ratio:.2g}" in finding.evidence
    assert finding.evidence.endswith("Measured on 5 of 80 steps.")


def test_a_row_alone_is_multiplied_and_many_rows_are_thinned_out():
    assert any("4 were used" in line for line in hs.diagnose(Classifier(), floats(1, 9, 3)).assumed)
    report = hs.diagnose(Classifier(), floats(40, 9, 3))
    assert report.ok
    assert any("16 of 40 rows were used" in line for line in report.assumed)


def test_a_table_of_samples_read_as_one_sequence_is_noted():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(5, 8, batch_first=True)
            self.fc = nn.Linear(8, 1)

        def forward(self, x):
            return self.fc(self.lstm(x)[0])

    report = hs.diagnose(Table(), torch.randn(16, 5))
    assert report.ok
    assert report.codes == ("HS101",)
    assert "unsqueeze(1)" in report[0].advice


def test_a_large_vocabulary_is_examined_with_a_few_rows():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.gru, self.head = (
                nn.Embedding(30_000, 4),
                nn.GRU(4, 4, batch_first=True),
                nn.Linear(4, 30_000),
            )

        def forward(self, x):
            return self.head(self.gru(self.embed(x))[0])

    report = hs.diagnose(Words(), torch.randint(30_000, (8, 9)))
    assert report.ok, report.text()
    assert any("4 of 8 rows" in line for line in report.assumed)
