"""The report: for people in a terminal or notebook, and for programs."""

import importlib
import json
import sys

import pytest
import torch

import hiddenstate as hs
from hiddenstate.diagnosis import Finding, Report
from tests.diagnosis.patients.sick import SICK

ERROR = Finding("HS101", "error", "model.py:31", "rows changed by 0.9 (limit 0.0001).", "a view", "x.transpose(0, 1)")
WARNING = Finding("HS305", "warning", "lstm[0] <b>", "dropout=0.3 (needed: 2 layers).", "one layer", "num_layers=2")
NOTE = Finding("HS201", "note", "hidden", "differ by 1 (limit 0).", "reset()", "model.reset()", {"gap": 1.0})


def report():
    return Report([NOTE, WARNING, ERROR], model="M", assumed=["5 rows"], failed={"HS203": "ValueError: no"})


def test_the_gravest_comes_first():
    assert report().codes == ("HS101", "HS305", "HS201")
    assert [finding.severity for finding in report()] == ["error", "warning", "note"]
    assert report()[0] is ERROR
    assert list(report()[1:]) == [WARNING, NOTE]
    assert len(report()) == 3


@pytest.mark.parametrize(
    ("findings", "ok", "worst"),
    [([], True, ""), ([NOTE], True, "note"), ([NOTE, WARNING], False, "warning"), ([ERROR], False, "error")],
)
def test_only_errors_and_warnings_are_not_ok(findings, ok, worst):
    assert Report(findings).ok is ok
    assert Report(findings).worst() == worst
    assert Report(findings), "an empty report is still a report"


def test_a_model_that_could_not_be_called_is_not_ok():
    broken = Report([], broken="TypeError: no")
    assert not broken.ok
    assert broken.worst() == "error"
    assert "could not be examined: TypeError: no" in str(broken)


def test_the_text_tells_everything():
    text = report().text()
    assert text.startswith("M: 1 error, 1 warning, 1 note\n")
    for finding in report():
        for part in (finding.code, finding.title, finding.where, finding.evidence, finding.cause, finding.advice):
            assert part in text
    assert "assumed: 5 rows" in text
    assert "HS203 could not run: ValueError: no" in text
    assert Report([], model="M").text() == "M: nothing found"


def test_a_terminal_gets_a_table(monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    shown = str(report())
    assert "\x1b[" in shown
    assert "┃" in shown
    assert "lstm[0]" in shown
    assert "HS101" in shown


def test_a_notebook_gets_a_table_without_foreign_markup():
    page = report()._repr_html_()
    assert "<td" in page
    assert "lstm[0] &lt;b&gt;" in page
    assert "<table" not in Report([])._repr_html_()


def test_json_survives_the_way_there_and_back():
    plain = json.loads(json.dumps(report().to_dict()))
    assert plain["ok"] is False
    assert [finding["code"] for finding in plain["findings"]] == ["HS101", "HS305", "HS201"]
    assert plain["findings"][2]["numbers"] == {"gap": 1.0}
    assert plain["findings"][0]["page"] == "docs/findings/HS101.md"
    assert plain["failed"] == {"HS203": "ValueError: no"}


def test_sarif_names_rules_levels_and_lines():
    sarif = json.loads(json.dumps(report().to_sarif()))
    (run,) = sarif["runs"]
    assert sarif["version"] == "2.1.0"
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == ["HS101", "HS305", "HS201"]
    assert [result["level"] for result in run["results"]] == ["error", "warning", "note"]
    place = run["results"][0]["locations"][0]["physicalLocation"]
    assert place == {"artifactLocation": {"uri": "model.py"}, "region": {"startLine": 31}}
    assert "physicalLocation" not in run["results"][2]["locations"][0]
    for result in run["results"]:
        assert run["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"]


def test_a_line_beside_a_layer_is_found_for_sarif():
    model, inputs, options = SICK["detached inside the loop"][1]()
    (result,) = hs.diagnose(model, *inputs, **options).to_sarif()["runs"][0]["results"]
    assert result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "sick.py"


def test_infinite_numbers_become_null_in_json():
    finding = hs.diagnosis.Finding("HS201", "error", "h", "1", "c", "a.b", {"gap": float("inf")})
    assert finding.to_dict()["numbers"] == {"gap": None}


def test_every_result_in_sarif_has_a_file_since_code_hosts_refuse_others(tmp_path, monkeypatch):
    (tmp_path / "net.py").write_text(
        "import torch\n\n\nclass Net(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.rnn = torch.nn.GRU(3, 8, batch_first=True, bidirectional=True)\n"
        "        self.head = torch.nn.Linear(16, 2)\n\n    def forward(self, x):\n"
        "        return self.head(self.rnn(x)[0][:, -1])\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "net", raising=False)
    report = hs.diagnose(importlib.import_module("net").Net(), torch.randn(4, 9, 3))
    monkeypatch.delitem(sys.modules, "net")
    assert report.codes == ("HS107",)
    (result,) = report.to_sarif()["runs"][0]["results"]
    place = result["locations"][0]["physicalLocation"]
    assert (place["artifactLocation"]["uri"], place["region"]["startLine"]) == ("net.py", 4)
    assert hs.diagnose(torch.nn.GRU(3, 8)).source is None  # torch's own file is not the user's
