"""The examples on real series run, print their table and write their figure."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
NEEDED = {"aeon": "pip install --no-deps aeon", "matplotlib": "pip install hiddenstate[plot]"}
MISSING = [how for name, how in NEEDED.items() if importlib.util.find_spec(name) is None]
needs_series = pytest.mark.skipif(bool(MISSING), reason=f"the series and the figure need: {'; '.join(MISSING)}")


@pytest.mark.long
@pytest.mark.slow
@needs_series
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("pooling", ("Last", "Attention", "Taps", "JapaneseVowels")),
        ("anomalies", ("ROC AUC", "final state", "all states", "no anomaly")),
    ],
)
def test_it_prints_a_table_and_writes_a_figure(name, words, tmp_path):
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [word for word in words if word not in done.stdout] == []
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield importlib.import_module
    for name in ("series", "anomalies"):
        sys.modules.pop(name, None)


@needs_series
def test_the_series_are_as_their_archive_says(example):
    series = example("series")
    train, test, classes = series.classification("JapaneseVowels")
    assert (train.x.shape, test.x.shape, len(classes)) == ((270, 26, 12), (370, 29, 12), 9)
    assert (int(train.lengths.min()), int(test.lengths.max())) == (7, 29)
    assert (train.x[0, train.lengths[0] :] == 0).all()
    thirds, _, _ = series.classification("PickupGestureWiimoteZ", every=3)
    assert int(thirds.lengths.max()) == 121
    _, labels = series.anomalies("KDD-TSAD_135", "135_UCR_Anomaly_InternalBleeding16_TEST.csv")
    assert labels.nonzero().flatten().tolist() == list(range(4187, 4199))


@needs_series
def test_the_area_under_the_curve_is_the_chance_to_be_ranked_right(example):
    auc = example("anomalies").auc
    scores, labels = torch.tensor([1.0, 2.0, 2.0, 3.0]), torch.tensor([False, False, True, True])
    assert auc(scores, labels) == (1 + 0.5 + 1 + 1) / 4
    assert auc(-scores, labels) == 1 - auc(scores, labels)
    assert auc(scores, torch.zeros(4).bool()) != auc(scores, torch.zeros(4).bool())  # NaN
