"""The errors: the tree drawn on top of the file is the tree there is."""

import builtins
import inspect
import re

import pytest

from hiddenstate import errors

LINE = re.compile(r"^(?P<branch>[│├└─ ]*)(?P<name>\w+) {2,}(?P<meaning>\S.*?)(?: +\((?P<python>\w+(?:, \w+)*)\))?$")

CLASSES = {
    name: value for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, BaseException)
}


def drawn() -> dict[str, tuple[str | None, str | None]]:
    """Of each class in the drawing, the name of the class it hangs from and what stands in parentheses."""
    found: dict[str, tuple[str | None, str | None]] = {}
    above: list[str] = []
    for line in inspect.getdoc(errors).splitlines()[1:]:
        if not line.strip():
            continue
        match = LINE.match(line)
        assert match, f"this line is no part of a tree: {line!r}"
        depth = len(match["branch"]) // 4
        del above[depth:]
        found[match["name"]] = (above[-1] if above else None, match["python"])
        above.append(match["name"])
    return found


def test_every_exception_is_drawn_and_every_drawn_exception_is_there():
    assert set(drawn()) == set(CLASSES) == set(errors.__all__)


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_hangs_where_it_is_drawn(name):
    parent, _ = drawn()[name]
    ours = [base.__name__ for base in CLASSES[name].__bases__ if base.__module__ == errors.__name__]
    assert ours == ([parent] if parent else [])


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_is_also_the_exception_of_python_that_is_drawn_beside_it(name):
    _, python = drawn()[name]
    own = {base.__name__ for base in CLASSES[name].__bases__ if base.__module__ == "builtins"} - {"Exception"}
    assert own == set(python.split(", ") if python else [])


@pytest.mark.parametrize("name", sorted(set(CLASSES) - {"HiddenStateError"}))
def test_every_class_is_ours_and_pythons(name):
    kind = CLASSES[name]
    assert issubclass(kind, errors.HiddenStateError | errors.HiddenStateWarning)
    plain = {"BaseException", "Exception", "Warning", "object"}
    pythons = {base.__name__ for base in kind.__mro__ if base.__module__ == builtins.__name__} - plain
    assert pythons, f"{name} cannot be caught as one of Python's own exceptions"


@pytest.mark.parametrize("name", CLASSES)
def test_every_class_says_what_it_means(name):
    assert inspect.getdoc(CLASSES[name])
    assert CLASSES[name].__doc__ != inspect.getdoc(CLASSES[name].__bases__[0])
