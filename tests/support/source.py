"""The source as data: its classes, private names and imports, and which test goes with which file.

python -m tests.support.source            the tables of `tests/support/exceptions.py` as they are today
python -m tests.support.source --write    puts them there
"""

from __future__ import annotations

import ast
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.support import exceptions

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


def deepest(graph: Graph) -> list[str]:
    """The longest chain of imports, of a graph without cycles."""
    known: dict[str, list[str]] = {}

    def chain(file: str) -> list[str]:
        if file not in known:
            known[file] = [file, *max((chain(other) for other in sorted(graph[file])), key=len, default=[])]
        return known[file]

    return max((chain(file) for file in graph), key=len, default=[])


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
    tables = {
        "SEVERAL_MEANINGS": {name: len(where) for name, where in several_meanings(trees).items()},
        "CYCLES": cycles(import_graph(late=True)),
        "DEPTH": len(deepest(import_graph(late=False))),
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
    "SEVERAL_MEANINGS": "Class names, underscores in front left out, and how many classes have each.",
    "CYCLES": "Files that import each other, at least one of them within a function.",
    "DEPTH": "Files in the longest chain of imports when the library is loaded.",
    "COVERED_ELSEWHERE": "Files without a test file of their own, and the one that enters most of their functions.",
}


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        Path(exceptions.__file__).write_text(_written(), encoding="utf-8")
    else:
        print(_written())
