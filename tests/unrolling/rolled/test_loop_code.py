"""What a loop is by its source: what is taken, what crosses, what is left; and why one is left alone."""

import ast
import itertools

import pytest

from hiddenstate.unrolling.rolled.index import LeftAlone
from hiddenstate.unrolling.rolled.loop_code import read_loop


def read(code, later=""):
    numbers = itertools.count()
    loop = ast.parse(code).body[0]
    return read_loop(loop, set(later.split()), lambda stem: f"hs_{stem}_{next(numbers)}")


def body_of(found):
    return ast.unparse(ast.Module(found.body, []))


def test_a_loop_as_everybody_writes_it():
    found, evaluated, over = read("for t in range(T):\n    h = cell(x[:, t], h)\n    outs.append(h)", "h outs")
    assert found.carried == ["h"]
    assert found.read == {"cell"}
    assert found.finals == []
    assert [(each.into, each.axis) for each in found.collected] == [("outs", None)]
    assert [ast.unparse(each.piece.thing) for each in found.taken] == ["x"]
    assert body_of(found) == "h = cell(hs_piece_2, h)\nhs_left_1.append(h)"
    assert [ast.unparse(each) for each in evaluated] == ["hs_over_0 = range(T)"]
    assert ast.unparse(over) == "hs_over_0"


@pytest.mark.parametrize(
    ("code", "targets"),
    [
        ("for x_t in x.unbind(1):\n    h = f(x_t, h)", ["x_t"]),
        ("for t, x_t in enumerate(x):\n    h = f(x_t, m[t], h)", ["t", "x_t"]),
        ("for a, (b, c) in zip(u, zip(v, w)):\n    h = f(a, b, c, h)", ["a", "b", "c"]),
        ("for t in reversed(range(T)):\n    h = f(x[t], h)", ["t"]),
    ],
)
def test_what_a_loop_goes_over(code, targets):
    assert [source.target for source in read(code)[0].leaves] == targets


def test_the_last_of_a_list_crosses():
    found, _, _ = read("for x_t in xs:\n    hs.append(f(x_t, hs[-1]))")
    assert list(found.lasts.values()) == ["hs"]
    assert found.carried == list(found.lasts)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("h = f(x[t], h) * t", "it computes with the number of the turn, 't'"),
        ("if t == 0:\n        h = f(h)", "it computes with the number of the turn, 't'"),
        ("h = self.h = f(x[t], h)", "a turn writes the attribute 'h'"),
        ("h = f(h)\n    if done:\n        break", "a turn may end the loop, or itself, early"),
        ("h = f(h)\n    return h", "a turn may end the loop, or itself, early"),
        ("global h", "a turn changes names that are not its own"),
        ("yield h", "a turn hands control to somebody else"),
        ("try:\n        h = f(h)\n    except ValueError:\n        pass", "a turn may go on after an error"),
        ("t = t + 1", "it computes with the number of the turn, 't'"),
        ("h = sum(v[t] for v in vs) + h", "it computes with the number of the turn, 't'"),
    ],
)
def test_a_loop_that_is_left_alone_says_why_and_where(line, reason):
    with pytest.raises(LeftAlone) as told:
        read(f"for t in range(T):\n    {line}")
    assert told.value.reason == reason
    assert told.value.line >= 2


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        ("for a, b in pairs:", "each turn is given several things, (a, b)"),
        ("for t in range(*bounds):", "it goes over range(*bounds)"),
        ("for t, x in zip(*both):", "it goes over zip(*both)"),
    ],
)
def test_what_it_may_not_go_over(head, reason):
    with pytest.raises(LeftAlone) as told:
        read(f"{head}\n    h = f(h)")
    assert told.value.reason == reason


def test_a_loop_with_an_else():
    with pytest.raises(LeftAlone, match="it has an else"):
        read("for t in range(T):\n    h = f(h)\nelse:\n    h = 0")
