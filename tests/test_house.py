"""The budgets of the house: small files, short functions, few positional parameters, honest names, exact pins."""

import ast
import importlib.metadata
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import hiddenstate
from tests.support import source
from tests.support.covered import WHY_ELSEWHERE, group_of
from tests.support.exceptions import (
    COVERED_ELSEWHERE,
    CYCLES,
    DEPTH,
    DEPTH_OF_THE_FRONT_DOOR,
)
from tests.support.private_names import OF_OTHERS

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "src").rglob("*.py"))

LINES_OF_A_FILE = 400
LINES_OF_A_FUNCTION = 70  # without its docstring; 40 is what one aims at
POSITIONAL = 3  # where users call it
POSITIONAL_INSIDE = 6

# Signatures that the design, or torch, writes with more positional parameters.
POSITIONAL_BY_CONTRACT = {
    "Adapter.give": 4,  # a call as torch hands it to hooks, and a state
    "Carry.__init__": 4,
    "fixed_points": 4,
    "lyapunov": 4,
    "probe": 4,
    "Recurrent.__init__": 6,
    "tbptt": 4,
}
CALLED_BY_TORCH = {"forward", "backward", "setup_context"}

SAYS_NOTHING = re.compile(r"Manager|Handler|Utils|Helper|^_?Base[A-Z]|^_?do_")

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Named(NamedTuple):
    """A function or class with its dotted name within its file."""

    name: str
    node: Function | ast.ClassDef


def definitions(tree: ast.AST, prefix: str = "") -> Iterator[Named]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function | ast.ClassDef):
            yield Named(prefix + node.name, node)
            yield from definitions(node, f"{prefix}{node.name}.")
        else:
            yield from definitions(node, prefix)


def lines_of(node: Function) -> int:
    lines = node.end_lineno - node.lineno + 1
    if ast.get_docstring(node, clean=False) is not None:
        lines -= node.body[0].end_lineno - node.body[0].lineno + 1
    return lines


def positional_of(node: Function, *, is_method: bool) -> int:
    static = any(isinstance(mark, ast.Name) and mark.id == "staticmethod" for mark in node.decorator_list)
    return len(node.args.posonlyargs) + len(node.args.args) - (is_method and not static)


def promised_by(path: Path) -> set[str]:
    """The names at the front door of the part that a file belongs to."""
    door = ROOT / "src" / "hiddenstate" / path.relative_to(ROOT / "src" / "hiddenstate").parts[0] / "__init__.py"
    tree = ast.parse((door if door.exists() else path).read_text(encoding="utf-8"))
    lists = [
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    return {name for found in lists for name in ast.literal_eval(found)}


def complaints(tree: ast.AST, promised: set[str] | None = None) -> Iterator[tuple[int, str]]:
    found = list(definitions(tree))
    classes = {name for name, node in found if isinstance(node, ast.ClassDef)}
    for name, node in found:
        owner, _, last = name.rpartition(".")
        if SAYS_NOTHING.search(last):
            yield node.lineno, f"the name {name} does not say what the thing is"
        if not isinstance(node, Function):
            continue
        if lines_of(node) > LINES_OF_A_FUNCTION:
            yield node.lineno, f"{name} has {lines_of(node)} lines, at most {LINES_OF_A_FUNCTION} are allowed"
        if not is_public(name) or last in CALLED_BY_TORCH or (owner and owner not in classes):
            continue
        used = promised is None or name.partition(".")[0] in promised
        allowed = POSITIONAL_BY_CONTRACT.get(name, POSITIONAL if used else POSITIONAL_INSIDE)
        if (count := positional_of(node, is_method=owner in classes)) > allowed:
            yield node.lineno, f"{name} takes {count} positional parameters, at most {allowed} are allowed"


def is_public(name: str) -> bool:
    *owners, last = name.split(".")
    return not any(part.startswith("_") for part in owners) and (last == "__init__" or not last.startswith("_"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT / "src")))
def test_a_file_keeps_to_the_budgets(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= LINES_OF_A_FILE
    assert [f"{path}:{line}: {what}" for line, what in complaints(ast.parse(text), promised_by(path))] == []


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("class StateManager: ...", "StateManager does not say"),
        ("class BaseCell: ...", "BaseCell does not say"),
        ("def do_it(): ...", "do_it does not say"),
        ("def f():\n" + "    x = 1\n" * 70, "f has 71 lines, at most 70"),
        ("def f(a, b, c, d): ...", "f takes 4 positional parameters, at most 3"),
        ("class A:\n    def f(self, a, b, c, d): ...", "A.f takes 4 positional"),
        ("class A:\n    @staticmethod\n    def f(a, b, c, d): ...", "A.f takes 4 positional"),
        ("class A:\n    def __init__(self, a, b, c, d): ...", "A.__init__ takes 4 positional"),
        ("def tbptt(a, b, c, d, e): ...", "tbptt takes 5 positional parameters, at most 4"),
    ],
)
def test_a_breach_of_the_budgets_is_found(text, complaint):
    ((_, found),) = complaints(ast.parse(text))
    assert complaint in found


@pytest.mark.parametrize(
    "text",
    [
        "class Baseline: ...",
        'def f():\n    """' + "\n" * 60 + '"""\n    return 1',
        "def f(a, b, c, *, d): ...",
        "def _hook(a, b, c, d): ...",
        "class A:\n    def f(self, a, b, c): ...",
        "class A:\n    def forward(self, a, b, c, d): ...",
        "def f():\n    def inner(a, b, c, d): ...",
    ],
)
def test_what_the_budgets_allow_is_not_complained_of(text):
    assert list(complaints(ast.parse(text))) == []


TREES = source.files()

# How much there is of each exception in `tests/support/exceptions.py`: lower a number when you can, never raise it.
AT_MOST = {
    "rings of imports": 0,
    "files in a chain of names": 30,
    "files that the front door leads through": 18,
    "files without a test": 74,
}


def test_there_are_no_more_exceptions_than_before():
    found = {
        "rings of imports": len(CYCLES),
        "files in a chain of names": DEPTH,
        "files that the front door leads through": DEPTH_OF_THE_FRONT_DOOR,
        "files without a test": len(COVERED_ELSEWHERE),
    }
    assert found == AT_MOST


def test_a_class_name_has_one_meaning_across_the_library():
    assert source.several_meanings(TREES) == {}, "these names, underscores in front left out, stand for several classes"


def test_no_private_name_is_read_from_another_file_of_ours():
    ours = source.defined_names(TREES)
    reads = [read for read in source.private_reads(TREES) if read.name not in OF_OTHERS]
    assert [f"{read.file}:{read.line}: {read.text}" for read in reads if read.name in ours] == []


def test_every_private_name_of_another_library_is_in_the_table():
    reads = [read for read in source.private_reads(TREES) if read.name not in OF_OTHERS]
    assert [f"{read.file}:{read.line}: {read.text}" for read in reads] == []
    assert OF_OTHERS.keys() - {read.name for read in source.private_reads(TREES)} == set(), "no longer used"


def test_every_file_has_a_test_of_its_own_or_a_line_that_says_where_it_is_tested():
    alone = source.without_own_test(TREES)
    expected = {file: source.own_test(file) for file in alone if file not in COVERED_ELSEWHERE}
    assert expected == {}, "write these tests, named like the files"
    assert COVERED_ELSEWHERE.keys() - set(alone) == set(), "these have tests of their own now, or are gone"
    missing = {file: test for file, test in COVERED_ELSEWHERE.items() if not (source.TESTS / test).is_file()}
    assert missing == {}, "these tests are not there"


def test_every_file_that_is_tested_elsewhere_has_a_reason_why():
    assert {file: group_of(file) for file in COVERED_ELSEWHERE if group_of(file) not in WHY_ELSEWHERE} == {}
    assert WHY_ELSEWHERE.keys() - set(map(group_of, COVERED_ELSEWHERE)) == set(), "no longer needed"
    told = {file: WHY_ELSEWHERE[group_of(file)].test or test for file, test in COVERED_ELSEWHERE.items()}
    assert told == COVERED_ELSEWHERE, "the two tables name different tests"


def test_no_test_only_sees_that_nothing_is_raised():
    assert source.silent_tests() == []


def test_no_test_sleeps():
    assert source.sleeping_tests() == [], "wait for what happens, with `wait_until` of tests/support/deadline.py"


@pytest.mark.parametrize(
    ("text", "silent"),
    [
        ("def test_a():\n    run()", True),
        ("def run(): ...\ndef test_a():\n    run()", True),
        ("def test_a():\n    assert run()", False),
        ("def test_a():\n    with pytest.raises(ValueError):\n        run()", False),
        ("def test_a():\n    torch.testing.assert_close(1, 1)", False),
        ("def run():\n    assert True\ndef test_a():\n    run()", False),
        ("from hiddenstate.testing import check_cell\ndef test_a():\n    check_cell(1)", False),
    ],
)
def test_a_test_that_says_nothing_is_found(tmp_path, text, silent):
    (tmp_path / "test_it.py").write_text(text, encoding="utf-8")
    line = 1 + text[: text.index("def test_a")].count("\n")
    assert source.silent_tests(tmp_path) == [f"test_it.py:{line}"] * silent


@pytest.mark.parametrize(("text", "found"), [("time.{}(1)", 1), ("await asyncio.{}(0)", 0), ("a{}(1)", 0)])
def test_a_test_that_sleeps_is_found(tmp_path, text, found):
    (tmp_path / "test_it.py").write_text(text.format("sleep"), encoding="utf-8")
    assert len(source.sleeping_tests(tmp_path)) == found


@pytest.mark.parametrize(
    ("texts", "found"),
    [
        ({"a.py": "class Run: ...", "b/c.py": "def f():\n    class _Run: ..."}, {"Run": ["a.py", "b/c.py"]}),
        ({"a.py": "class Run: ...", "b.py": "class Runs: ..."}, {}),
    ],
)
def test_a_name_of_two_classes_is_found(texts, found):
    assert source.several_meanings({file: ast.parse(text) for file, text in texts.items()}) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("def f(other):\n    return other._x", ["other._x"]),
        ("from .other import _x", [".other._x"]),
        ("def f(other):\n    return getattr(other, '_x', None)", ["getattr(other, '_x', None)"]),
        ("class A:\n    def __init__(self, other):\n        self._x = other._x", []),
        ("class A:\n    __slots__ = ('_x',)\n    def f(self, other):\n        return other._x", []),
        ("def f(other):\n    return other.__dict__", []),
    ],
)
def test_a_private_name_from_elsewhere_is_found(text, found):
    assert [read.text for read in source.private_reads({"a.py": ast.parse(text)})] == found


def test_every_direct_dependency_is_pinned_exactly_or_between_two_versions():
    required = {re.match(r"[\w.-]+", line).group() for line in importlib.metadata.requires("hiddenstate")}
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {found.group(1) for line in lines if (found := re.match(r"([\w.-]+)(==|>=[\d.]+,<=)\d", line))}
    assert required - {"hiddenstate"} - pinned == set()


def test_the_changelog_knows_this_version():
    assert f"## {hiddenstate.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_installed_version_is_the_one_in_the_source():
    assert importlib.metadata.version("hiddenstate") == hiddenstate.__version__
