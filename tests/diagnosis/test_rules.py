"""The rules: one file each, with one code, a page, a sick and a healthy patient, and the probes that it declares."""

import ast
import importlib
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import hiddenstate as hs
import mkdocs_findings
from hiddenstate.diagnosis import diagnose as examination
from hiddenstate.diagnosis import rules
from hiddenstate.diagnosis.patient import PatientProbe
from hiddenstate.diagnosis.probes.calls import PlainCall, TracedCall
from hiddenstate.diagnosis.rule import Rule, Symptom
from hiddenstate.diagnosis.rules import RULES
from hiddenstate.testing import check_rule
from tests.diagnosis.patients.sick import SICK

FOLDER = Path(rules.__file__).parent
FILES = sorted(path for path in FOLDER.glob("*.py") if path.stem != "__init__")
BLOCK = re.compile(r"^## (Sick|Healthy)\n\n```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"\bHS\d{3}\b")


def module_of(path):
    return importlib.import_module(f"{rules.__name__}.{path.stem}")


def code_of(tree):
    """What a file does, without what its docstrings and comments say."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_holds_one_rule_with_the_code_it_is_named_for(path):
    rule = module_of(path).RULE
    assert isinstance(rule, Rule)
    assert path.stem.startswith(f"{rule.code.lower()}_")
    assert RULES.count(rule) == 1
    used = set(CODE.findall(code_of(ast.parse(path.read_text(encoding="utf-8")))))
    assert used == {rule.code, *rule.explains}, "a rule speaks for itself alone"


def test_every_rule_is_a_file_and_every_file_is_listed():
    assert len(RULES) == len(FILES) == len({rule.code for rule in RULES})
    assert {code for rule in RULES for code in rule.explains} <= {rule.code for rule in RULES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_rule_calls_another(path):
    imported = [
        node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.ImportFrom)
    ]
    assert [node.module for node in imported if node.level == 1 or "rules" in (node.module or "")] == []


@pytest.mark.parametrize("path", sorted((FOLDER.parent / "probes").glob("*.py")), ids=lambda path: path.stem)
def test_a_probe_knows_nothing_of_rules(path):
    text = path.read_text(encoding="utf-8")
    assert CODE.findall(text) == []
    imported = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    assert [node.module for node in imported if re.match(r"rules?\b|report", node.module or "")] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_rule_declares_every_probe_that_it_asks_for(path):
    module = module_of(path)
    asked = {
        ast.unparse(node.slice)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "patient"
    }
    declared = {probe.__name__ for probe in module.RULE.probes}
    assert asked <= declared
    assert all(issubclass(probe, PatientProbe) for probe in module.RULE.probes)
    assert len(declared) == len(module.RULE.probes)


def test_a_rule_that_asks_for_more_than_it_declares_fails(monkeypatch):
    def check(patient):
        assert patient[PlainCall].calls
        return Symptom("note", "here", f"{len(patient[TracedCall].trace)} operations", "a cause", "an.advice()")

    def examined(*probes):
        monkeypatch.setattr(examination_module(), "RULES", (Rule("HS901", "a toy", check, probes=probes),))
        return hs.diagnose(nn.GRU(3, 4, batch_first=True), torch.randn(4, 6, 3))

    assert examined(PlainCall).failed == {
        "HS901": "LookupError: TracedCall is not among the probes that this rule declares"
    }
    (finding,) = examined(PlainCall, TracedCall)
    assert (finding.code, finding.title, finding.where) == ("HS901", "a toy", "here")


@pytest.mark.parametrize(
    ("cause", "told"), [("warning", ["HS902", "HS901"]), ("error", ["HS901"]), ("note", ["HS902", "HS901"])]
)
def test_what_is_less_grave_hides_nothing(monkeypatch, cause, told):
    def says(severity):
        return lambda patient: Symptom(severity, "here", "1 of 1", "a cause", "an.advice()")

    rules = (Rule("HS901", "a cause", says(cause), explains=("HS902",)), Rule("HS902", "a consequence", says("error")))
    monkeypatch.setattr(examination_module(), "RULES", rules)
    report = hs.diagnose(nn.GRU(3, 4, batch_first=True), torch.randn(4, 6, 3))
    assert [finding.code for finding in report] == told


def examination_module():
    """The module, which the function that it promises hides from an import."""
    return importlib.import_module(examination.__module__)


def patient(block):
    """What a page's example hands to `hs.diagnose`."""
    names = {"torch": torch, "nn": nn, "pack_padded_sequence": pack_padded_sequence}
    exec(compile(block, "page", "exec"), names)
    inputs = names["inputs"] if "inputs" in names else (names["x"],)
    return names["model"], inputs, names.get("options", {})


MONITORED = [path for path in FILES if module_of(path).RULE.monitored]


@pytest.mark.parametrize("path", MONITORED, ids=lambda path: path.stem)
@pytest.mark.parametrize("state", ["Sick", "Healthy"])
def test_a_rule_of_the_monitor_is_told_in_the_sick_training_of_its_page_alone(path, state):
    module = module_of(path)
    names = {"torch": torch, "nn": nn}
    exec(compile(dict(BLOCK.findall(module.__doc__))[state], "page", "exec"), names)
    optimizer = torch.optim.SGD(names["model"].parameters(), lr=0.01)
    with hs.Monitor(names["model"], optimizer, every=2) as monitor:
        for _ in range(5):
            names["step"](optimizer)
    told = [episode.finding.code for episode in monitor.findings if episode.finding.severity != "note"]
    assert told == ([module.RULE.code] if state == "Sick" else [])


@pytest.mark.parametrize("path", [path for path in FILES if path not in MONITORED], ids=lambda path: path.stem)
def test_a_rule_keeps_the_laws_on_the_sick_and_the_healthy_patient_of_its_page(path):
    module = module_of(path)
    code, page = module.RULE.code, module.__doc__
    assert page.startswith(f"{code}: {module.RULE.title}.\n\n")
    assert "**How it is known.**" in page
    assert "**Limit.**" in page
    patients = dict(BLOCK.findall(page))
    check_rule(code, sick=lambda: patient(patients["Sick"]), healthy=lambda: patient(patients["Healthy"]))


def test_every_code_has_a_sick_patient_that_it_is_told_of_first():
    told_second = {"HS405"}  # a state that never changes is also one that is ignored
    assert {codes[0] for codes, _ in SICK.values()} | told_second == {rule.code for rule in RULES if not rule.monitored}


def test_the_pages_are_what_the_rules_say():
    """`make pages` writes them."""
    expected = mkdocs_findings.pages()
    assert set((mkdocs_findings.DOCS / "findings").iterdir()) <= set(expected)
    assert [path.name for path, text in expected.items() if path.read_text(encoding="utf-8") != text] == []
