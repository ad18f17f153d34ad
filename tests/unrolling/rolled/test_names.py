"""Names that statements read, bind, and read before they bind them: held against what Python does."""

import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hiddenstate.unrolling.rolled.names import exposed, loads, stores


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("h = f(x, h)", {"f", "x", "h"}),
        ("y = x\nh = y + h", {"x", "h"}),
        ("if c:\n    y = 1\nz = y", {"c", "y"}),
        ("if c:\n    y = 1\nelse:\n    y = 2\nz = y", {"c"}),
        ("for a in b:\n    y = a\nz = y", {"b", "y"}),
        ("while c:\n    y = 1\nz = y", {"c", "y"}),
        ("with a as b:\n    y = b\nz = y", {"a"}),
        ("y += 1", {"y"}),
        ("h[i] = x", {"h", "i", "x"}),
        ("y = [a * b for a in c]", {"b", "c"}),
        ("y = (lambda a, b=d: a + b + e)(x)", {"d", "e", "x"}),
        ("(y := x)\nz = y", {"x", "y"}),
        ("y, (z, *w) = x\nv = y, z, w", {"x"}),
    ],
)
def test_what_is_read_before_it_is_bound(code, found):
    assert exposed(ast.parse(code).body) == found


def test_comprehensions_and_lambdas_keep_their_names():
    tree = ast.parse("y = {k: v for k, v in d.items() if (w := v)}; z = lambda q: q")
    assert stores(tree.body) == {"y", "z", "w"}
    assert loads(tree.body) == {"d"}


NAMES = "abc"
line = st.one_of(
    st.tuples(st.sampled_from(NAMES), st.sampled_from(NAMES)).map(lambda pair: f"{pair[0]} = {pair[1]} + 1"),
    st.tuples(st.sampled_from(NAMES), st.integers(0, 1), st.sampled_from(NAMES)).map(
        lambda three: f"if {three[1]}:\n    {three[0]} = {three[2]}"
    ),
    st.tuples(st.sampled_from(NAMES), st.integers(0, 1), st.sampled_from(NAMES)).map(
        lambda three: f"for _ in range({three[1]}):\n    {three[0]} = {three[2]}"
    ),
)


@given(st.lists(line, min_size=1, max_size=6).map("\n".join))
def test_whatever_python_misses_is_told(code):
    """Run without a name that is not told, the code never misses it."""
    told = exposed(ast.parse(code).body)
    scope = {name: 0 for name in told if name in NAMES}
    exec(code, {"range": range}, scope)
    assert set(scope) >= told & set(NAMES)
