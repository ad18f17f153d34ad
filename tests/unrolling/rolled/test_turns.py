"""What all turns take at once is what each would take: held against Python's own indexing."""

import ast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hiddenstate.unrolling.rolled.index import LeftAlone
from hiddenstate.unrolling.rolled.loop_code import read_loop
from hiddenstate.unrolling.rolled.turns import TurnReader


def taken(text, names, over):
    """What turns `for t in ...: h = f(<text>, h)` take, by one call for all of them."""
    numbers = iter(range(99))
    loop = ast.parse(f"for t in over:\n    h = f({text}, h)").body[0]
    code, _, _ = read_loop(loop, set(), lambda stem: f"hs_{stem}_{next(numbers)}")
    turns = TurnReader(code, taken).read(names, (over,))
    (piece,) = code.taken
    rest = ast.unparse(ast.Module(code.body, []))
    shown = rest.removeprefix("h = f(").removesuffix(", h)")
    return [eval(shown, {}, {piece.name: each}) for each in turns.pieces[piece.name]]


INDICES = [
    "t",
    "t, :2",
    ":, t",
    ":, t, 1:",
    "..., t",
    "..., t, :",
    ":, t:t + 1",
    "t - 1",
    ":, T - 1 - t",
    ":, -t - 1",
    "2 * t",
]
ranges = st.builds(range, st.integers(0, 3), st.integers(4, 8), st.integers(1, 2)) | st.just(range(5, 0, -2))


@given(st.sampled_from(INDICES), ranges)
def test_a_piece_is_what_the_turn_itself_takes(index, over):
    names = {"x": torch.arange(8 * 8 * 8).view(8, 8, 8), "T": 8}
    try:
        expected = [eval(f"x[{index}]", {}, {**names, "t": t}) for t in over]
    except IndexError:
        expected = None
    if expected is None or len({each.shape for each in expected}) > 1:
        with pytest.raises(LeftAlone, match=r"beyond the end|different sizes"):
            taken(f"x[{index}]", names, over)
        return
    found = taken(f"x[{index}]", names, over)
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("text", "thing", "reason"),
    [
        ("x[t]", torch.nn.ModuleList([torch.nn.Identity()] * 4), "a turn takes its piece of a ModuleList"),
        ("x[t]", [1.0, 2.0, 3.0, 4.0], "each turn is given a float, which is no tensor"),
        ("x[t]", [torch.zeros(1), torch.zeros(2)] * 2, "turns are given tensors of different shapes"),
        ("x[:, :, t]", torch.zeros(4, 4), "a piece is taken of an axis that is not there"),
        ("x[t + 1]", torch.zeros(4, 4), "a piece is taken beyond the end"),
    ],
)
def test_what_cannot_be_taken_at_once_is_told(text, thing, reason):
    with pytest.raises(LeftAlone) as told:
        taken(text, {"x": thing}, range(4))
    assert told.value.reason == reason


def test_what_counts_the_turns_has_to_be_numbers():
    with pytest.raises(LeftAlone, match="its turns are counted by a Tensor"):
        taken("x[t]", {"x": torch.zeros(4, 4)}, torch.arange(4))
