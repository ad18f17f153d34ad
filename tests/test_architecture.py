"""The floors, held as data: a part imports from the floors below it, and from nothing above or beside it."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.exceptions import CYCLES, DEPTH, DEPTH_OF_THE_FRONT_DOOR
from tests.support.source import cycles, deepest, definition_graph, import_graph

PACKAGE = "hiddenstate"
SOURCE = Path(__file__).parents[1] / "src" / PACKAGE

FLOORS = (  # from the top down
    ("cli", "integrations"),
    ("testing",),
    ("reporting",),
    ("plot", "diagnosis", "serve"),
    ("measure", "pool", "regularize"),
    ("recording",),
    ("carry",),
    ("unrolling",),
    ("cells",),
    ("state",),
    ("_torch_names",),
    ("errors",),
    ("_compiling",),
)

# Tighter than the floors: these parts may import only these.
LIMITS = {
    "pool": {"recording", "state", "_torch_names", "errors", "_compiling"},
    "regularize": {"recording", "cells", "state", "_torch_names", "errors", "_compiling"},
    "serve": {"carry", "unrolling", "cells", "state", "errors"},
}

# For users only: no part imports these, and the roof offers them on first use.
FOR_USERS = {"testing"}

# Folders within a part that have a front door of their own, for those who write what belongs there.
INNER_DOORS = {"serve.stores"}

# Libraries that only some parts may import.
LIBRARIES = {
    "matplotlib": {"plot", "reporting"},
    "plotly": {"plot", "reporting"},
    "fastapi": {"serve"},
    "starlette": {"serve"},
    "uvicorn": {"serve"},
    "websockets": {"serve"},
}

HEIGHT = {part: -depth for depth, floor in enumerate(FLOORS) for part in floor}


@dataclass(frozen=True)
class Import:
    """One imported module, by its whole dotted name, and where it is asked for."""

    line: int
    module: str


def test_the_source_keeps_to_the_floors():
    assert list(violations(SOURCE)) == []


def violations(root: Path) -> Iterator[str]:
    for path in sorted(root.rglob("*.py")):
        importer = path.relative_to(root).parts[0].removesuffix(".py")
        if importer not in {*HEIGHT, "__init__", "__main__"}:
            yield f"{path}:1: '{importer}' is on no floor"
            continue
        for found in dict.fromkeys(imports(path, root)):
            if reason := why_not(importer, found.module):
                yield f"{path}:{found.line}: {reason}"


def why_not(importer: str, module: str) -> str | None:
    """The reason why a file of part `importer` may not import `module`, if there is one."""
    library, *inner = module.split(".")
    if library != PACKAGE:
        if importer not in LIBRARIES.get(library, {importer}):
            return f"{importer} may not import {library}: only {' and '.join(sorted(LIBRARIES[library]))} may"
        return None
    if not inner:
        return (
            None if importer.startswith("__") else f"{importer} may not import {PACKAGE} itself, the roof of the house"
        )
    part, *deeper = inner
    if part == importer:
        return None
    if part not in HEIGHT:
        return f"{importer} imports {module}, which is no part of the house"
    if deeper and ".".join(inner) not in INNER_DOORS:
        return f"{importer} may not import {module}: across parts only the front door, {PACKAGE}.{part}, is open"
    if part in FOR_USERS and importer != "__init__":
        return f"{importer} may not import {part}, which is there for users"
    if importer.startswith("__"):
        return None
    if HEIGHT[part] >= HEIGHT[importer]:
        where = "beside" if HEIGHT[part] == HEIGHT[importer] else "above"
        return f"{importer} may not import {part}, which stands {where} it"
    if part not in LIMITS.get(importer, {part}):
        return f"{importer} may not import {part}: only {', '.join(sorted(LIMITS[importer]))}"
    return None


def imports(path: Path, root: Path) -> Iterator[Import]:
    """Every import in a file, also inside functions, under TYPE_CHECKING, and by a literal `import_module`."""
    package = [PACKAGE, *path.relative_to(root).parent.parts]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        match node:
            case ast.Import(names=names):
                yield from (Import(node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                base = absolute("." * level + (module or ""), package)
                yield from (Import(node.lineno, target(base, alias.name, root)) for alias in names)
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(module)), *_],
            ):
                yield Import(node.lineno, absolute(module, package))


def absolute(module: str, package: list[str]) -> str:
    name = module.lstrip(".")
    level = len(module) - len(name)
    base = package[: len(package) - level + 1] if level else []
    return ".".join([*base, *([name] if name else [])])


def target(base: str, name: str, root: Path) -> str:
    """What `from base import name` reaches: a module of that name, or else a name in `base`.

    A part may promise a function that is called like the file it lives in: the promise wins.
    """
    library, *inner = base.split(".")
    if library != PACKAGE:
        return base
    folder = root.joinpath(*inner)
    is_module = (folder / name).is_dir() or (folder / f"{name}.py").is_file()
    if not inner:
        return f"{base}.{name}" if is_module or name in HEIGHT else base
    return f"{base}.{name}" if is_module and name not in promised(folder / "__init__.py") else base


def promised(front_door: Path) -> set[str]:
    """The names in a literal `__all__`."""
    if not front_door.is_file():
        return set()
    for node in ast.parse(front_door.read_text(encoding="utf-8")).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                return set(ast.literal_eval(value))
    return set()


def test_no_file_imports_itself_by_a_detour():
    assert cycles(import_graph(late=False)) == []
    found = cycles(import_graph(late=True))
    assert [ring for ring in found if ring not in CYCLES] == [], "files that import each other, within functions"
    assert [ring for ring in CYCLES if ring not in found] == [], "gone: take it out of tests/support/exceptions.py"


@pytest.mark.parametrize(("start", "depth"), [(None, DEPTH), ("__init__.py", DEPTH_OF_THE_FRONT_DOOR)])
def test_the_longest_chain_of_names_gets_no_longer(start, depth):
    chain = deepest(definition_graph(), start)
    assert len(chain) <= depth, f"the longest chain is {' → '.join(chain)}"
    assert len(chain) == depth, f"it is {len(chain)} files long now: say so in tests/support/exceptions.py"


FORBIDDEN = {
    "upward": ("state/value.py", "from ..cells import layers", "state may not import cells, which stands above it"),
    "upward, absolute": ("state/value.py", "import hiddenstate.carry", "carry, which stands above"),
    "upward, a part as a name": ("state/value.py", "from .. import carry", "carry, which stands above"),
    "upward, a file as a part": ("errors.py", "from .state import State", "errors may not import state"),
    "sideways": (
        "plot/heat.py",
        "from ..diagnosis import diagnose",
        "plot may not import diagnosis, which stands beside",
    ),
    "in a function": ("cells/find.py", "def f():\n    from ..unrolling import unroll", "find.py:2: cells may not"),
    "for types only": (
        "cells/find.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from hiddenstate.carry import Carry",
        "find.py:3: cells may not import carry",
    ),
    "by import_module": (
        "state/value.py",
        "import importlib\nimportlib.import_module('hiddenstate.carry')",
        "value.py:2: state may not import carry",
    ),
    "by relative import_module": (
        "state/value.py",
        "import_module('..carry', __package__)",
        "carry, which stands above",
    ),
    "a file of another part": (
        "carry/hooks.py",
        "from ..state.value import State",
        "only the front door, hiddenstate.state",
    ),
    "a file of another part, as a name": (
        "carry/hooks.py",
        "from ..state import value",
        "may not import hiddenstate.state.value",
    ),
    "a file of another part, from the top": ("__init__.py", "from .state.value import State", "only the front door"),
    "the roof": ("carry/hooks.py", "import hiddenstate as hs", "carry may not import hiddenstate itself"),
    "a name from the roof": ("carry/hooks.py", "from .. import State", "carry may not import hiddenstate itself"),
    "from a deeper folder": ("serve/stores/disk.py", "from ...measure import memory", "serve may not import measure"),
    "pool's limit": (
        "pool/last.py",
        "from ..carry import Carry",
        "pool may not import carry: only _compiling, _torch_names, errors, recording, state",
    ),
    "regularize's limit": ("regularize/zone.py", "from ..carry import Carry", "regularize may not import carry: only"),
    "serve's limit": ("serve/engine.py", "from ..recording import record", "serve may not import recording: only"),
    "a plotting library": (
        "measure/a.py",
        "import matplotlib.pyplot as plt",
        "measure may not import matplotlib: only plot",
    ),
    "a plotting library at the top": ("__init__.py", "import plotly", "__init__ may not import plotly"),
    "a web stack": (
        "reporting/a.py",
        "def f():\n    from fastapi import FastAPI",
        "a.py:2: reporting may not import fastapi",
    ),
    "what is there for users": ("cli/app.py", "from ..testing import check_cell", "cli may not import testing, which"),
    "what is there for users, at the top": ("__main__.py", "from . import testing", "__main__ may not import testing"),
    "an inner door from below": (
        "carry/hooks.py",
        "from ..serve.stores import Store",
        "carry may not import serve, which stands above",
    ),
    "a file behind an inner door": (
        "testing/check.py",
        "from ..serve.stores.memory import MemoryStore",
        "only the front door",
    ),
    "a part that nobody knows": ("helpers/a.py", "x = 1", "'helpers' is on no floor"),
    "a module that nobody knows": ("state/value.py", "from ..helpers import x", "no part of the house"),
}

ALLOWED = {
    "downward": ("carry/hooks.py", "from ..state import State\nfrom hiddenstate.errors import BadInput"),
    "a part below as a name": ("carry/hooks.py", "from .. import errors"),
    "its own files": (
        "serve/stores/disk.py",
        "from ..engine import Engine\nfrom . import memory\nfrom .memory import x",
    ),
    "a promise called like its file": ("recording/a.py", "from ..carry import tbptt"),
    "a plotting library for plots": ("plot/heat.py", "import matplotlib.pyplot as plt"),
    "a web stack to serve": ("serve/web.py", "from starlette.routing import Route"),
    "anything at the top": ("__init__.py", "from . import errors\nfrom .carry import Carry\nfrom .plot import heatmap"),
    "layers in regularize": ("regularize/zone.py", "from ..cells import Listener, layers"),
    "an inner door from above": ("testing/check.py", "from ..serve.stores import Store"),
    "errors from pool": ("pool/last.py", "from ..errors import BadInput\nfrom ..recording import Trajectory"),
}


@pytest.fixture
def house(tmp_path):
    """A small tree in which every import above can be found."""
    for name, text in {
        "state/__init__.py": "__all__ = ['State']",
        "state/value.py": "",
        "carry/__init__.py": "from .tbptt import tbptt\n__all__ = ['tbptt']",
        "carry/tbptt.py": "",
    }.items():
        write(tmp_path / name, text)
    return tmp_path


@pytest.mark.parametrize(("file", "text", "complaint"), FORBIDDEN.values(), ids=FORBIDDEN)
def test_a_planted_violation_is_found_with_file_and_line(house, file, text, complaint):
    write(house / file, text)
    (found,) = violations(house)
    assert complaint in found
    assert found.startswith(f"{house / file}:")


@pytest.mark.parametrize(("file", "text"), ALLOWED.values(), ids=ALLOWED)
def test_what_the_floors_allow_is_not_complained_of(house, file, text):
    write(house / file, text)
    assert list(violations(house)) == []


@pytest.mark.parametrize(
    ("second", "early", "late"),
    [
        ("from .first import x", 1, 1),
        ("def f():\n    from .first import x", 0, 1),
        ("def f():\n    from . import first", 0, 1),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .first import x", 0, 0),
        ("from ..errors import x", 0, 0),
        ("from . import third", 0, 0),  # a promise called like its file
    ],
)
def test_a_ring_of_imports_is_found(tmp_path, second, early, late):
    write(tmp_path / "errors.py", "")
    write(tmp_path / "carry/__init__.py", "__all__ = ['third']")
    write(tmp_path / "carry/first.py", "from .second import y")
    write(tmp_path / "carry/third.py", "from .second import y")
    write(tmp_path / "carry/second.py", second)
    ring = [("carry/first.py", "carry/second.py")]
    assert cycles(import_graph(tmp_path, late=False)) == ring * early
    assert cycles(import_graph(tmp_path, late=True)) == ring * late


def test_the_longest_chain_is_found(tmp_path):
    write(tmp_path / "__init__.py", "from .carry import x")
    write(tmp_path / "carry/__init__.py", "from .heavy import w\nfrom .first import x\n__all__ = ['w', 'x']")
    write(tmp_path / "carry/first.py", "from ..errors import y\ndef f():\n    from .second import z")
    write(tmp_path / "carry/second.py", "")
    write(tmp_path / "carry/heavy.py", "from .first import x")
    write(tmp_path / "errors.py", "")
    loaded = ["__init__.py", "carry/__init__.py", "carry/heavy.py", "carry/first.py", "errors.py"]
    assert deepest(import_graph(tmp_path, late=False)) == loaded
    assert deepest(definition_graph(tmp_path), "__init__.py") == ["__init__.py", "carry/first.py", "errors.py"]


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
