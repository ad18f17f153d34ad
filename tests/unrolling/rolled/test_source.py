"""Functions made again from their source are the same functions: closures, defaults, private names, lines."""

import traceback

import pytest
import torch
from torch import nn

from hiddenstate.unrolling.rolled.index import LeftAlone
from hiddenstate.unrolling.rolled.source import called_modules, has_loops, rewrite

GLOBAL = 3


def as_written(number, names, over):
    return None


def made(function, owner=None, enter=as_written):
    return rewrite(function, owner, enter, lambda *_: None, lambda called: called)


def test_globals_closures_defaults_and_keywords_are_the_functions_own():
    captured = 5

    def work(items, factor=2, *, more=7):
        total = 0
        for item in items:
            total = total + item * factor
        return total + captured + GLOBAL + more

    found = made(work)
    assert len(found.loops) == 1
    assert found.function([1, 2]) == work([1, 2]) == 21
    assert found.function([1], 10, more=0) == work([1], 10, more=0)
    captured = 6
    assert found.function([]) == work([]) == 16


class Base:
    def run(self, items):
        return list(items)


class Derived(Base):
    __secret = 4

    def run(self, items):
        for item in super().run(items):
            last = item + self.__secret
        return last


def test_super_and_private_names():
    assert made(Derived.run, Derived).function(Derived(), [1, 2]) == 6


def test_an_error_shows_the_users_own_line():
    def fails(items):
        for item in items:
            raise_here = 1 // item
        return raise_here

    with pytest.raises(ZeroDivisionError) as told:
        made(fails).function([0])
    frames = traceback.extract_tb(told.value.__traceback__)
    assert frames[-1].filename == __file__
    assert "1 // item" in frames[-1].line


def test_values_that_are_handed_in_take_the_place_of_the_loop():
    def work(items):
        total = 0
        for item in items:
            total = total + item
        return total, item

    assert made(work, enter=lambda *_: {"total": 7, "item": 1}).function([1, 2]) == (7, 1)


@torch.no_grad()
def decorated(items):
    for item in items:
        last = item
    return last


def test_what_is_left_alone_as_a_whole():
    with pytest.raises(LeftAlone, match=r"it is no plain function|it is decorated with torch.no_grad\(\)"):
        made(decorated.__wrapped__)
    namespace = {}
    exec("def unseen(items):\n    for item in items:\n        pass", namespace)
    with pytest.raises(LeftAlone, match="its source cannot be read"):
        made(namespace["unseen"])


def test_loops_are_found_in_what_is_called():
    def inner(items):
        for item in items:
            return item

    def outer(items):
        return inner(items)

    def none(items):
        return sorted(items)

    assert has_loops(outer, None)
    assert not has_loops(none, None)
    assert not has_loops(torch.stack, None)


def test_modules_that_a_turn_may_call():
    import ast

    model = nn.Module()
    model.cell, model.head = nn.GRUCell(2, 3), nn.Sequential(nn.Linear(3, 1))
    calls = called_modules(ast.parse("h = self.cell(x, h) + self.head[0].weight").body, {"self": model})
    assert model.cell in calls
    assert model not in calls
    assert set(called_modules(ast.parse("h = f(self, x)").body, {"self": model})) == set(model.modules())


def test_a_comprehension_that_carries_something_on_is_named():
    def work(items):
        total = 0
        return [total := total + item for item in items]

    def none(items):
        return [item for item in items], sum(item for item in items)

    assert [each.reason for each in made(work).left_alone] == ["it is a comprehension, and no for statement"]
    assert has_loops(work, None)
    assert not has_loops(none, None)
