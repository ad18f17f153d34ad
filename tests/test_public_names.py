"""What is promised is there, what is there is promised, and nothing more."""

import ast
import importlib
import pkgutil
import subprocess
import sys
from types import ModuleType

import pytest

import hiddenstate

FRONT_DOOR = {
    *("State", "load", "layers", "register", "Cell", "unroll", "Recurrent", "explain", "accelerate"),
    *("Carry", "Learned", "Noise", "Bridge", "tbptt", "Streams", "check_split"),
    *("record", "load_recording", "tap", "Trajectory", "diagnose", "Monitor", "report"),
}
NAMESPACES = {"errors", "measure", "pool", "regularize", "plot", "serve", "testing"}
LOADED_ON_FIRST_USE = {"Monitor", "diagnose", "plot", "serve", "report", "testing"}

PARTS = sorted(found.name for found in pkgutil.iter_modules(hiddenstate.__path__) if not found.name.startswith("_"))


def test_the_front_door_has_no_more_than_the_design_lists():
    assert set(hiddenstate.__all__) - FRONT_DOOR - NAMESPACES == set()


@pytest.mark.parametrize("name", hiddenstate.__all__)
def test_a_promised_name_is_there(name):
    assert isinstance(getattr(hiddenstate, name), ModuleType) == (name in NAMESPACES)


def test_what_is_there_is_promised():
    ours = {
        name
        for name, value in vars(hiddenstate).items()
        if not name.startswith("_")
        and (getattr(value, "__module__", None) or "").startswith("hiddenstate")
        and not isinstance(value, ModuleType)
    }
    namespaces = NAMESPACES & set(PARTS)
    assert ours | namespaces | set(hiddenstate._LAZY) == set(hiddenstate.__all__)


def test_the_list_of_names_is_sorted_and_names_each_once():
    assert hiddenstate.__all__ == sorted(set(hiddenstate.__all__))


def test_dir_shows_the_promise():
    assert dir(hiddenstate) == sorted([*hiddenstate.__all__, "__version__"])


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'hiddenstate' has no attribute 'Sate'"):
        _ = hiddenstate.Sate


def test_only_what_is_heavy_loads_on_first_use():
    assert set(hiddenstate._LAZY) == LOADED_ON_FIRST_USE & set(hiddenstate.__all__)


@pytest.mark.parametrize("lazy", ["json.tool", "json.tool:main"])
def test_a_lazy_name_loads_its_module_once_and_then_stays(lazy):
    # In a process of its own: this one may have loaded anything already.
    code = f"""
import sys, hiddenstate
hiddenstate._LAZY["later"] = {lazy!r}
assert "json.tool" not in sys.modules
value = hiddenstate.later
module = sys.modules["json.tool"]
assert value is (module.main if ":" in {lazy!r} else module)
assert vars(hiddenstate)["later"] is value
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("part", PARTS)
def test_a_part_promises_names_that_exist_and_describes_itself(part):
    module = importlib.import_module(f"hiddenstate.{part}")
    assert module.__doc__
    assert len(module.__all__) == len(set(module.__all__))
    for name in module.__all__:
        assert hasattr(module, name), f"hiddenstate.{part}.__all__ names {name}, which is not there"


def test_a_checker_sees_every_lazy_name():
    with open(hiddenstate.__file__, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    seen = {
        alias.asname or alias.name
        for block in tree.body
        if isinstance(block, ast.If) and isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == set(hiddenstate._LAZY)
