"""Lists that are only appended to and joined: all turns at once give what one after the other gives."""

import ast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hiddenstate.errors import Untraceable
from hiddenstate.unrolling.rolled.joined import (
    AllTurns,
    apart,
    asks_for_gradients,
    escaping,
    join,
    only_joined,
)


def lists(code):
    return only_joined(ast.parse(f"def forward(self, x, given):\n    {'; '.join(code.split(' | '))}").body[0])


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("outs = [] | outs.append(x) | return torch.stack(outs, 1)", {"outs"}),
        ("a, b = [], [] | a += [x] | return torch.cat(a, 0), torch.stack(b)", {"a", "b"}),
        ("outs = [] | outs.append(x) | return torch.stack(outs), outs", set()),
        ("outs = [] | outs.append(x) | return torch.stack(outs) * len(outs)", set()),
        ("outs = [x] | outs.append(x) | return torch.stack(outs)", set()),
        ("outs = also = [] | outs.append(x) | return torch.stack(outs)", set()),
        ("outs = [] | self.outs = outs | return torch.stack(outs)", set()),
        ("outs = [] | f = lambda: torch.stack(outs) | return f()", set()),
        ("outs = [] | print(locals()) | return torch.stack(outs)", set()),
        ("given.append(x) | return torch.stack(given)", set()),
        ("given = [] | given.append(x) | return torch.stack(given)", set()),
        ("global outs | outs = [] | outs.append(x) | return torch.stack(outs)", set()),
        ("known.append(x) | return torch.stack(known)", set()),
    ],
)
def test_only_a_list_of_the_functions_own_that_nobody_looks_into_may_hold_all_turns_at_once(code, found):
    assert lists(code) == found


@given(
    shape=st.lists(st.integers(1, 3), max_size=3),
    before=st.integers(0, 2),
    function=st.sampled_from([torch.stack, torch.cat]),
    axis=st.integers(-4, 3),
    named=st.booleans(),
)
def test_all_turns_are_joined_as_one_after_the_other_would_be(shape, before, function, axis, named):
    first = [torch.randn(shape) for _ in range(before)]
    along = torch.randn(4, *shape, requires_grad=True)
    given_axis = ((), {"dim": axis}) if named else ((axis,), {})
    try:
        expected = function([*first, *along.unbind(0)], *given_axis[0], **given_axis[1])
    except (IndexError, RuntimeError) as error:
        with pytest.raises(type(error)):
            join(function, [*first, AllTurns(along)], *given_axis[0], **given_axis[1])
        return
    joined = join(function, [*first, AllTurns(along)], *given_axis[0], **given_axis[1])
    assert torch.equal(joined, expected)
    assert joined.stride() == expected.stride()
    joined.mul_(2).sum().backward()
    assert torch.equal(along.grad, torch.full_like(along, 2.0))


def test_things_of_several_sizes_are_joined_one_by_one():
    along = torch.randn(3, 2, 4)
    joined = join(torch.cat, [torch.ones(2, 1), AllTurns(along)], 1)
    assert torch.equal(joined, torch.cat([torch.ones(2, 1), *along], 1))
    assert join(torch.stack, [torch.ones(2)]).shape == (1, 2)


def test_what_turns_left_can_be_written_to_before_a_backward_pass():
    along = torch.randn(3, 2, requires_grad=True)
    first, *rest = apart(along * 1)
    first.mul_(3)
    torch.stack([first, *rest]).sum().backward()
    assert along.grad.tolist() == [[3.0, 3.0], [1.0, 1.0], [1.0, 1.0]]


@pytest.mark.parametrize("ask", [lambda item: item.retain_grad(), lambda item: item.register_hook(lambda grad: grad)])
def test_a_gradient_at_one_of_several_states_is_refused_and_at_the_last_is_right(ask):
    along = torch.randn(3, 2, requires_grad=True)
    for states, place in ((False, 0), (True, 2)):
        items = apart(along, states=states)
        ask(items[place])
        torch.stack(items).sum().backward()
    items = apart(along, states=True)
    ask(items[1])
    with pytest.raises(Untraceable, match=r"at one turn of a loop .* the way through later turns\. Close what"):
        torch.stack(items).sum().backward()


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("return outs, {'h': h}", {"outs", "h"}),
        ("self.outs = outs | return [torch.stack(a), b[-1]]", {"outs"}),
        ("return f(outs)", set()),
    ],
)
def test_names_that_a_function_hands_out_as_they_are(code, found):
    lines = "; ".join(code.split(" | "))
    assert escaping(ast.parse(f"def forward(self, x):\n    {lines}").body[0]) == found


@pytest.mark.parametrize(
    ("code", "asks"),
    [
        ("h.retain_grad", True),
        ("torch.autograd.grad", True),
        ("h.register_hook", True),
        ("h.grad", False),
        ("h", False),
    ],
)
def test_code_that_asks_for_gradients_on_the_way(code, asks):
    assert asks_for_gradients(ast.parse(code, mode="eval").body) is asks
