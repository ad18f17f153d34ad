"""What turns leave behind, by the way it is written."""

import ast

import pytest

from hiddenstate.unrolling.rolled.collected import append_instead, collecting, growing


def statement(code):
    return ast.parse(code).body[0]


@pytest.mark.parametrize(
    ("code", "into", "value"),
    [
        ("outs.append(h)", "outs", "h"),
        ("outs += [h + 1]", "outs", "h + 1"),
        ("out[:, t] = h", "out", "h"),
        ("out[t] = f(h)", "out", "f(h)"),
    ],
)
def test_ways_to_keep_what_turns_give(code, into, value):
    found = collecting(statement(code), {"t"})
    assert (found[0], ast.unparse(found[1])) == (into, value)


@pytest.mark.parametrize(
    "code",
    ["outs.extend(h)", "outs.append(h, 1)", "self.outs.append(h)", "outs += h", "out[:, 0] = h", "out[t][0] = h"],
)
def test_what_is_no_such_way(code):
    assert collecting(statement(code), {"t"}) is None


@pytest.mark.parametrize(
    ("code", "axis"),
    [
        ("a = torch.cat([a, b], 1)", 1),
        ("a = torch.cat((a, b), dim=-1)", -1),
        ("a = torch.cat([a, b])", 0),
        ("if a is None:\n    a = b\nelse:\n    a = torch.cat([a, b], 1)", 1),
    ],
)
def test_a_tensor_that_grows(code, axis):
    into, value, found = growing(statement(code))
    assert (into, ast.unparse(value), found) == ("a", "b", axis)


@pytest.mark.parametrize(
    "code",
    [
        "a = torch.cat([b, a], 1)",
        "a = torch.cat([a, b, c], 1)",
        "a = torch.cat([a, b], axis)",
        "a = torch.stack([a, b])",
        "if a is None:\n    a = c\nelse:\n    a = torch.cat([a, b], 1)",
        "if a is not None:\n    a = b\nelse:\n    a = torch.cat([a, b], 1)",
    ],
)
def test_what_does_not_grow_in_that_way(code):
    assert growing(statement(code)) is None


def test_a_statement_becomes_one_that_appends():
    line = statement("out[:, t] = h * 2")
    append_instead(line, "left", line.value)
    assert ast.unparse(line) == "left.append(h * 2)"
