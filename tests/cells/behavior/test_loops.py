"""What crosses in a loop: a state, an iteration, a cache, an attribute; or nothing that is claimed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hiddenstate.cells.behavior.analysis import analyze

from .noting import run

B, T, H = 3, 5, 4


class Looped(nn.Module):
    """Runs a function with some weights at hand."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function, self.mix, self.out = function, nn.Linear(2 * H, H), nn.Linear(H, H)
        self.deep = nn.ModuleList([nn.Linear(H, H) for _ in range(4)])
        self.register_buffer("kept", torch.zeros(B, H))

    def next(self, x, h):
        return torch.tanh(self.mix(torch.cat([x, h], 1)))

    def forward(self, x):
        return self.function(self, x)


def analyzed(function, steps: int = T):
    with torch.no_grad():
        trace, _ = run(Looped(function), (torch.randn(B, steps, H),), {})
    return analyze(trace)


def elman(m, x):
    h = x.new_zeros(len(x), H)
    for step in x.unbind(1):
        h = m.next(step, h)
    return h


def iterated(m, x):
    h, step = x.new_zeros(len(x), H), x[:, 0]
    for _ in range(T):
        h = m.next(step, h)
    return h


def cached(m, x):
    seen = []
    for step in x.unbind(1):
        seen.append(m.out(step))
        step = torch.softmax(torch.stack(seen).sum(-1), 0).unsqueeze(-1) * torch.stack(seen)
    return step


def grown(m, x):
    keys = x[:, :1]
    for t in range(1, x.shape[1]):
        keys = torch.cat([keys, m.out(x[:, t : t + 1]) * keys.mean(1, keepdim=True)], 1)
    return keys


def attribute(m, x):
    for step in x.unbind(1):
        m.kept = m.next(step, m.kept)
    return m.kept


KINDS = {
    "loop": (elman, ["h"]),
    "iteration": (iterated, ["h"]),
    "cache": (grown, ["keys"]),
    "attribute": (attribute, ["kept"]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_crosses_is_called_what_it_is_and_by_the_users_name(kind):
    function, names = KINDS[kind]
    (candidate,) = analyzed(function).candidates
    assert (candidate.kind, [draft.name for draft in candidate.drafts]) == (kind, names)


def test_a_list_that_is_read_again_as_a_whole_is_a_cache():
    assert [(c.kind, [d.name for d in c.drafts]) for c in analyzed(cached).candidates] == [("cache", ["seen"])]


@given(st.integers(3, 7))
def test_a_part_has_a_value_for_every_turn_and_begins_where_the_loop_does(steps):
    (candidate,) = analyzed(elman, steps).candidates
    (draft,) = candidate.drafts
    assert candidate.windows.count == len(draft.values) == steps
    assert not draft.initial.tensor.any()
    assert [candidate.windows.turn(value.op) for value in draft.values] == list(range(steps))


def given_up(m, x):
    for step in x.unbind(1):
        m.kept = m.next(step, m.kept)
    last, m.kept = m.kept, torch.zeros(B, H)
    return last


def test_an_attribute_that_begins_anew_in_every_call_is_a_loop_like_others():
    assert [candidate.kind for candidate in analyzed(given_up).candidates] == ["loop"]


def summed(m, x):
    total, h = x.new_zeros(len(x), H), x.new_zeros(len(x), H)
    for step in x.unbind(1):
        h = m.next(step, h)
        total = total + h
    return total


def in_depth(m, x):
    h = x[:, 0]
    for layer in m.deep:
        h = torch.tanh(layer(h))
    return h


def constant(m, x):
    count = torch.zeros(())
    for step in x.unbind(1):
        count = torch.sin(count + 1)
        step.exp()
    return count


LEFT = {
    "a sum": (summed, "only collects", ["h"]),
    "layers": (in_depth, "weights of its own: layers in depth", []),
    "a counter": (constant, "does not depend on the call's input", []),
}


@pytest.mark.parametrize(("function", "why", "others"), LEFT.values(), ids=LEFT)
def test_what_is_certainly_no_state_is_left_with_a_reason(function, why, others):
    analysis = analyzed(function)
    assert [draft.name for candidate in analysis.candidates for draft in candidate.drafts] == others
    assert any(why in str(each) for each in analysis.passed), list(map(str, analysis.passed))
    assert not analysis.unsure


def steered(m, x):
    h = x.new_zeros(len(x), H)
    for step in x.unbind(1):
        h = m.next(step, h)
        if float(h.sum()) > 1e9:
            break
    return h


def shrinking(m, x):
    h = x
    for _ in range(3):
        h = torch.tanh(m.out(h[:, 1:] + h[:, :-1]))
    return h


def doubling(m, x):
    h = x
    for distance in (1, 2, 4):
        h = h + torch.nn.functional.pad(h, (0, 0, distance, 0))[:, : h.shape[1]]
    return h


DOUBTED = {
    "two turns": (elman, 2, "only two repetitions"),
    "a number that leaves for Python": (steered, T, "leaves for Python"),
    "another size in every turn": (shrinking, T, "changes its size"),
    "a scan by doubling": (doubling, T, "it may be a scan along time"),
}


@pytest.mark.parametrize(("function", "steps", "why"), DOUBTED.values(), ids=DOUBTED)
def test_what_cannot_be_told_is_said_and_not_claimed(function, steps, why):
    analysis = analyzed(function, steps)
    assert analysis.candidates == []
    assert any(why in str(each) for each in analysis.unsure), list(map(str, analysis.unsure))


def begun_before(m, x):
    h = torch.tanh(m.out(x[:, 0]))
    for t in range(1, x.shape[1]):
        h = torch.tanh(m.out(x[:, t]) + h)
    return h


def made_before(m, x):
    h = torch.sin(x.mean(1))
    for step in x.unbind(1):
        h = torch.tanh(m.out(step) + h)
    return h


def test_a_first_step_that_is_written_before_the_loop_is_a_turn_of_it():
    (candidate,) = analyzed(begun_before).candidates
    (draft,) = candidate.drafts
    assert (candidate.windows.count, len(draft.values), draft.initial) == (T, T, None)
    assert any("written before the loop" in sentence for sentence in candidate.evidence)


def half_a_step(m, x):
    h = torch.sin(m.out(x[:, 0]))
    for t in range(1, x.shape[1] + 1):
        h = torch.tanh(m.out(x[:, t - 1]) + h)
    return h


@pytest.mark.parametrize("function", [made_before, half_a_step])
def test_a_start_that_is_made_in_another_way_is_none(function):
    (candidate,) = analyzed(function).candidates
    (draft,) = candidate.drafts
    assert (candidate.windows.count, len(draft.values)) == (T, T)
    assert draft.initial is not None
    assert any("h starts from what test_loops.py" in sentence for sentence in candidate.evidence)
