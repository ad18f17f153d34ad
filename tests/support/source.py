"""The source as data: its classes, private names and imports, and which test goes with which file.

python -m tests.support.source            the tables of `tests/support/exceptions.py` as they are today
python -m tests.support.source --write    puts them there
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.support import exceptions
from tests.support.covered import WHY_ELSEWHERE, group_of

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "hiddenstate"
TESTS = ROOT / "tests"

Graph = dict[str, set[str]]  # file -> the files that it imports


@cache
def files(root: Path = SOURCE) -> dict[str, ast.Module]:
    """Every file of the source, by its path in the package."""
    paths = sorted(root.rglob("*.py"))
    return {path.relative_to(root).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def several_meanings(trees: dict[str, ast.Module]) -> dict[str, list[str]]:
    """Class names that stand for several classes, with their files; an underscore in front makes no other name."""
    found: dict[str, list[str]] = defaultdict(list)
    for file, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found[node.name.lstrip("_")].append(file)
    return {name: where for name, where in sorted(found.items()) if len(where) > 1}


class PrivateRead(NamedTuple):
    """A private attribute that a file reads and does not define."""

    file: str
    line: int
    text: str  # as it is written: `tensor._version`
    name: str


def private_reads(trees: dict[str, ast.Module]) -> Iterator[PrivateRead]:
    """Private attributes and names that a file takes from elsewhere: from other files of ours, or other libraries."""
    for file, tree in trees.items():
        own = set(_defined(tree))
        for node in ast.walk(tree):
            match node:
                case ast.Attribute(attr=name) if _is_private(name) and name not in own:
                    yield PrivateRead(file, node.lineno, ast.unparse(node), name)
                case ast.ImportFrom(module=module, names=names):
                    for alias in names:
                        inner = [part for part in f"{module or ''}.{alias.name}".split(".") if _is_private(part)]
                        inner = [part for part in inner if f"{part}.py" not in trees]  # a file of ours with that name
                        for part in inner:
                            yield PrivateRead(file, node.lineno, f"{'.' * node.level}{module or ''}.{alias.name}", part)
                case ast.Call(
                    func=ast.Name(id="getattr" | "hasattr" | "setattr"), args=[_, ast.Constant(value=name), *_]
                ):
                    if isinstance(name, str) and _is_private(name) and name not in own:
                        yield PrivateRead(file, node.lineno, ast.unparse(node), name)


def defined_names(trees: dict[str, ast.Module]) -> set[str]:
    """Every private name that some file of ours defines."""
    return {name for tree in trees.values() for name in _defined(tree) if _is_private(name)}


def _defined(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Attribute(attr=name, ctx=ast.Store(), value=ast.Name(id="self" | "cls")):
                yield name
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Assign(targets=[ast.Name(id="__slots__")], value=value):
                yield from (end.value for end in ast.walk(value) if isinstance(end, ast.Constant))


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


@cache
def import_graph(root: Path = SOURCE, *, late: bool) -> Graph:
    """Which file imports which: when it is loaded, or also `late`, within functions. Imports for types do not count."""
    trees = files(root)
    graph: Graph = {}
    for file, tree in trees.items():
        package = list(Path(file).parent.parts)
        found = (_target(base, name, trees) for base, name in _imported(tree, package, late))
        graph[file] = {target for target in found if target is not None and target != file}
    return graph


def _imported(node: ast.AST, package: list[str], late: bool) -> Iterator[tuple[list[str], str]]:
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda() if not late:
                continue
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                continue
            case ast.ImportFrom(module=module, level=level, names=names) if level:
                base = package[: len(package) - level + 1] + (module.split(".") if module else [])
                yield from ((base, alias.name) for alias in names)
            case _:
                yield from _imported(child, package, late)


def _target(base: list[str], name: str, trees: dict[str, ast.Module]) -> str | None:
    """The file that `from base import name` loads: a promise of a front door wins over a file of that name."""
    door = "/".join([*base, "__init__.py"])
    below = ["/".join([*base, f"{name}.py"]), "/".join([*base, name, "__init__.py"])]
    if door in trees:
        promised = name in _promised(trees[door])
        return door if promised else next((file for file in below if file in trees), door)
    return file if (file := "/".join(base) + ".py") in trees else None


@cache
def _promised(door: ast.Module) -> set[str]:
    for node in door.body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                return set(ast.literal_eval(value))
    return set()


@cache
def definition_graph(root: Path = SOURCE) -> Graph:
    """Which file uses names of which when it is loaded: a name from a front door leads to the file that defines it.

    A reader goes this way. A front door is a table of contents, and says nothing that its file does not say; it is
    not counted, and importing one name from it does not count as using all others.
    """
    trees = files(root)
    graph: Graph = {}
    for file, tree in trees.items():
        package = list(Path(file).parent.parts)
        found = (_definition(base, name, trees) for base, name in _imported(tree, package, late=False))
        graph[file] = {target for target in found if target is not None and target != file}
    return graph


def _definition(base: list[str], name: str, trees: dict[str, ast.Module]) -> str | None:
    target = _target(base, name, trees)
    if target is None or not target.endswith("__init__.py"):
        return target
    package = list(Path(target).parent.parts)
    origin = next((found for found in _imported(trees[target], package, late=False) if found[1] == name), None)
    if origin is None:
        return target
    if origin[0] != base:
        return _definition(*origin, trees)
    inner = "/".join([*base, name, "__init__.py"])  # the door promises a whole folder: `from . import measure`
    return inner if inner in trees else target


def reached(graph: Graph, start: str) -> set[str]:
    """Every file that is imported from `start`, directly or not."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = graph[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def cycles(graph: Graph) -> list[tuple[str, ...]]:
    """Files that import each other, directly or not."""
    ways = {file: reached(graph, file) for file in graph}
    rings = {
        tuple(sorted(other for other in ways[file] if file in ways[other])) for file in graph if file in ways[file]
    }
    return sorted(rings)


def deepest(graph: Graph, start: str | None = None) -> list[str]:
    """The longest chain of imports, of a graph without cycles: from this file, or from any."""
    known: dict[str, list[str]] = {}

    def chain(file: str) -> list[str]:
        if file not in known:
            known[file] = [file, *max((chain(other) for other in sorted(graph[file])), key=len, default=[])]
        return known[file]

    return max((chain(file) for file in ([start] if start else graph)), key=len, default=[])


def silent_tests(root: Path = TESTS) -> list[str]:
    """Tests that only see that nothing is raised: neither they nor what they call of ours asserts anything."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(root.rglob("*.py"))}
    found = []
    for path, tree in trees.items():
        tests = [node for node in ast.walk(tree) if isinstance(node, _Function) and node.name.startswith("test_")]
        if path.name.startswith("test_"):
            found += [f"{path.relative_to(root)}:{test.lineno}" for test in tests if not _says(test, path, trees, ())]
    return found


_Function = ast.FunctionDef | ast.AsyncFunctionDef
_SAYS = re.compile(r"(raises|warns|deprecated_call|fail|assert\w*|enforce)$")


def _says(node: ast.AST, path: Path, trees: dict[Path, ast.Module], seen: tuple[str, ...]) -> bool:
    if any(isinstance(inner, ast.Assert) for inner in ast.walk(node)):
        return True
    called = {inner.func for inner in ast.walk(node) if isinstance(inner, ast.Call)}
    names = {func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "") for func in called}
    if any(_SAYS.match(name) for name in names):
        return True
    return any(
        _says(helper, where, trees, (*seen, name))
        for name in names - set(seen)
        for where, helper in _helpers(name, path, trees)
        if helper is not node
    )


def _helpers(name: str, path: Path, trees: dict[Path, ast.Module]) -> Iterator[tuple[Path, ast.AST]]:
    """What a test of this file means by a name: a function or class here, of another test file, or of ours."""
    for node in ast.walk(trees[path]):
        if isinstance(node, _Function | ast.ClassDef) and node.name == name:
            yield path, node
        if isinstance(node, ast.ImportFrom) and name in {alias.asname or alias.name for alias in node.names}:
            parts = (node.module or "").split(".")
            if parts == ["hiddenstate", "testing"] and name.startswith("check_"):
                yield path, ast.parse("assert True")  # these raise where a law is broken
            other = ROOT.joinpath(*parts).with_suffix(".py")
            if other in trees and other != path:
                yield from _helpers(name, other, trees)


def sleeping_tests(root: Path = TESTS) -> list[str]:
    """Where tests, or programs that they start, let time pass by themselves; giving way with `sleep(0)` is none."""
    here = {path: path.read_text(encoding="utf-8") for path in sorted(root.rglob("*.py")) if path.stem != "deadline"}
    lines = ((path, number, line) for path, text in here.items() for number, line in enumerate(text.splitlines(), 1))
    return [f"{path.relative_to(root)}:{number}" for path, number, line in lines if _SLEEP.search(line)]


_SLEEP = re.compile(r"\b(?:time|asyncio)\.sleep\((?!0\))")


def own_test(file: str) -> str:
    """Where the test of a file belongs."""
    path = Path(file)
    return (path.parent / f"test_{path.stem.lstrip('_')}.py").as_posix()


def without_own_test(trees: Iterable[str]) -> list[str]:
    """Files of the source that no test file mirrors; front doors are tested as such."""
    return [file for file in trees if not Path(file).name.startswith("__") and not (TESTS / own_test(file)).exists()]


def nearest_tests(trees: dict[str, ast.Module]) -> dict[str, str]:
    """For each file without a test of its own, that of the nearest file that uses it; "" where there is none."""
    graph = import_graph(late=True)
    users: Graph = defaultdict(set)
    for file, imported in graph.items():
        for other in imported:
            users[other].add(file)
    found = {}
    for file in without_own_test(trees):
        seen, ring = {file}, [file]
        while ring and not any((TESTS / own_test(user)).exists() for user in ring):
            seen |= set(ring)
            ring = sorted({user for one in ring for user in users[one]} - seen)
        part = file.partition("/")[0]
        tested = [own_test(user) for user in ring if (TESTS / own_test(user)).exists()]
        found[file] = min(tested, key=lambda test: (test.partition("/")[0] != part, test), default="")
    return found


def _written() -> str:
    """The tables as they are today; where a file is tested is kept as it was said, as far as it still holds."""
    trees = files()
    nearest = nearest_tests(trees)
    said = {file: test for file, test in exceptions.COVERED_ELSEWHERE.items() if (TESTS / test).is_file()}
    groups = {file: WHY_ELSEWHERE[group_of(file)].test for file in nearest if group_of(file) in WHY_ELSEWHERE}
    said |= {file: test for file, test in groups.items() if test}
    tables = {
        "CYCLES": cycles(import_graph(late=True)),
        "DEPTH": len(deepest(definition_graph())),
        "DEPTH_OF_THE_FRONT_DOOR": len(deepest(definition_graph(), "__init__.py")),
        "COVERED_ELSEWHERE": {file: said.get(file, test) for file, test in nearest.items()},
    }
    text = f'"""{exceptions.__doc__}"""\n'
    for name, table in tables.items():
        comment, shown = _COMMENTS[name], repr(table)
        if isinstance(table, dict):
            shown = "\n".join(
                ["{", *(f"    {json.dumps(key)}: {json.dumps(value)}," for key, value in table.items()), "}"]
            )
        elif isinstance(table, list):
            rings = (f"    ({', '.join(map(json.dumps, ring))})," for ring in table)
            shown = "\n".join(["[", *rings, "]"]) if table else "[]"
        text += f"\n# {comment}\n{name}{': list[tuple[str, ...]]' if name == 'CYCLES' else ''} = {shown}\n"
    return text


_COMMENTS = {
    "CYCLES": "Files that import each other, at least one of them within a function.",
    "DEPTH": "Files in the longest chain of names, each defined in one and used by the one before.",
    "DEPTH_OF_THE_FRONT_DOOR": "The same for what `import hiddenstate` loads; httpx has 10, in one part.",
    "COVERED_ELSEWHERE": "Files without a test file of their own, and the one that covers each; `covered.py` says why.",
}


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        Path(exceptions.__file__).write_text(_written(), encoding="utf-8")
    else:
        print(_written())
