"""Where a Monitor's numbers and findings go."""

import csv
import json

import pytest
import torch

import hiddenstate as hs
from hiddenstate.diagnosis import CsvWriter, JsonlWriter
from tests.support.training_loop import Model, batches, train


def test_writers_get_numbers_and_findings(tmp_path):
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    writers = [CsvWriter(tmp_path / "log.csv"), JsonlWriter(tmp_path / "log.jsonl")]
    with hs.Monitor(model, optimizer, every=2, writers=writers) as monitor:
        train(model, optimizer, batches(5, bad=4))
    with open(tmp_path / "log.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["0", "2", "4"]
    assert float(rows[0]["lstm.norm"]) == pytest.approx(monitor.history["lstm.norm"][0])
    with open(tmp_path / "log.csv.findings.csv", newline="") as file:
        assert [(row["step"], row["event"], row["code"]) for row in csv.DictReader(file)] == [("4", "began", "HS401")]
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 2, 4, 4]
    assert lines[-1]["began"]["code"] == "HS401"
