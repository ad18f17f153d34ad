"""Subscripts that move with the turns: what is read off them, and what is none."""

import ast

import pytest

from hiddenstate.unrolling.rolled.index import is_int, read_piece


def subscript(text):
    return ast.parse(text, mode="eval").body


@pytest.mark.parametrize(
    ("text", "axis", "index", "rest"),
    [
        ("x[t]", 0, "t", []),
        ("x[:, t]", 1, "t", []),
        ("x[:, t, :]", 1, "t", []),
        ("x[..., t]", -1, "t", []),
        ("x[..., t, :]", -2, "t", []),
        ("x[None, :, t]", 1, "t", ["None", ":"]),
        ("x[:, t + 1, 2:]", 1, "t + 1", [":", "2:"]),
        ("x[t, rows]", 0, "t", ["rows"]),
    ],
)
def test_what_a_subscript_takes(text, axis, index, rest):
    piece = read_piece(subscript(text), {"t"})
    assert (piece.before, ast.unparse(piece.index), [ast.unparse(each) for each in piece.rest]) == (axis, index, rest)


@pytest.mark.parametrize("text", ["x[0]", "x[t, t]", "x[:, rows, t]", "x[f(t)]", "x[:, t:]", "x[t:t + 4:2]", "x[y[t]]"])
def test_what_is_no_piece(text):
    assert read_piece(subscript(text), {"t"}) is None


def test_whole_numbers_as_such():
    assert is_int(subscript("-1"))
    assert not is_int(subscript("n"))
    assert not is_int(subscript("True"))
