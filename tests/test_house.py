"""The budgets of the house: small files, short functions, few positional parameters, honest names, exact pins."""

import ast
import importlib.metadata
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import hiddenstate

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


def test_every_direct_dependency_is_pinned_exactly():
    required = {re.match(r"[\w.-]+", line).group() for line in importlib.metadata.requires("hiddenstate")}
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {line.split("==")[0] for line in lines if re.match(r"[\w.-]+==\d", line)}
    assert required - {"hiddenstate"} - pinned == set()


def test_the_changelog_knows_this_version():
    assert f"## {hiddenstate.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_installed_version_is_the_one_in_the_source():
    assert importlib.metadata.version("hiddenstate") == hiddenstate.__version__
