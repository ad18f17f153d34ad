"""The arena: one session per slot, whatever comes and goes."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hiddenstate.serve.arena import Arena, SessionEntry, as_slots
from hiddenstate.state import State

LIKE = State({"h": torch.zeros(2, 1, 3), "count": torch.zeros(1).long()}, {"h": 1, "count": 0})


def states(values: list[int]) -> State:
    numbers = torch.tensor(values)
    return State({"h": numbers.float()[None, :, None].expand(2, -1, 3).clone(), "count": numbers}, {"h": 1, "count": 0})


@given(data=st.data())
def test_no_two_sessions_share_a_slot_and_each_keeps_its_own(data):
    arena, held = Arena(LIKE, 4), {}
    for turn in range(data.draw(st.integers(1, 30))):
        name = data.draw(st.sampled_from("abcdefgh"))
        if name in held and data.draw(st.booleans()):
            arena.drop(name)
            del held[name]
            continue
        entry = arena.entry(name)
        if entry is None:
            arena.make_room(1, {name})
            held = {kept: value for kept, value in held.items() if arena.has(kept)}
            entry = SessionEntry(name, 0, 0)
            arena.enter(entry)
        arena.table.used[entry.slot] = turn
        arena.scatter(np.array([entry.slot]), states([turn]))
        held[name] = turn
        slots = arena.find(list(held))
        assert len(set(slots.tolist())) == len(slots) == len(arena) <= 4
        assert arena.find(["nobody", *held])[0] == -1
        found = arena.gather(slots)
        assert found["count"].tolist() == list(held.values())
        assert found["h"][1, :, 2].tolist() == list(held.values())


def test_those_longest_unused_make_room_and_those_needed_do_not():
    arena = Arena(LIKE, 3)
    for used, name in enumerate("abc"):
        entry = SessionEntry(name, 0, 0)
        entry.used = used
        arena.enter(entry)
    arena.make_room(2, {"a", "d"})
    assert [name for name in "abc" if arena.has(name)] == ["a"]


@given(slots=st.permutations(range(5)).flatmap(lambda order: st.integers(0, 5).map(lambda n: order[:n])))
def test_any_slots_in_any_order(slots):
    arena, at = Arena(LIKE, 5), as_slots(np.array(slots, np.int64))
    arena.scatter(slice(0, 5), states([10, 11, 12, 13, 14]))
    for look in (arena.gather, arena.view):
        assert look(at)["count"].tolist() == [10 + slot for slot in slots]
    arena.scatter(at, states([slot for slot in slots]) if slots else states([]))
    assert arena.gather(slice(0, 5))["count"].tolist() == [slot if slot in slots else 10 + slot for slot in range(5)]


@given(data=st.data())
def test_what_was_written_last_is_what_is_read(data):
    arena, held = Arena(LIKE, 5), [0] * 5
    for turn in range(1, data.draw(st.integers(2, 12))):
        first = data.draw(st.integers(0, 4))
        at = slice(first, data.draw(st.integers(first + 1, 5)))
        slots = list(range(5))[at]
        if data.draw(st.booleans()):
            arena.scatter(at if data.draw(st.booleans()) else np.array(slots), states([turn] * len(slots)))
            held[at] = [turn] * len(slots)
        else:
            look = data.draw(st.sampled_from([arena.gather, arena.view]))
            assert look(at)["count"].tolist() == look(np.array(slots))["count"].tolist() == held[at]


def test_slots_side_by_side_are_a_slice():
    assert as_slots(np.array([3, 4, 5])) == slice(3, 6)
    for slots in ([5, 4, 3], [3, 5], [3, 3, 5], []):
        assert as_slots(np.array(slots, np.int64)).tolist() == slots


def test_what_is_gathered_may_be_changed():
    arena = Arena(LIKE, 3)
    for slots in ([0, 1], [2, 0]):
        arena.gather(as_slots(np.array(slots)))["h"].fill_(7.0)
        assert not arena.gather(slice(0, 3))["h"].any()


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.int64, torch.uint8, torch.complex64]
)
def test_states_of_any_kind_of_number(dtype):
    rows = torch.randn(3, 4).to(dtype)
    arena = Arena(State({"h": rows[:1]}), 5)
    for at in (slice(1, 4), np.array([4, 0, 2])):
        arena.scatter(at, State({"h": rows.conj()}))
        assert torch.equal(arena.gather(at)["h"], rows.conj().resolve_conj())


def test_what_is_known_of_a_session_stays_with_its_slot():
    arena, entry = Arena(LIKE, 2), SessionEntry("a", 7, 6)
    entry.seq, entry.steps, entry.opened, entry.touched, entry.initial, entry.used = 3, 9, 1.5, 2.5, False, 4
    arena.enter(entry)
    found = arena.entry("a")
    assert {name: getattr(found, name) for name in SessionEntry.__slots__} == {
        name: getattr(entry, name) for name in SessionEntry.__slots__
    }
    arena.table.advance(np.array([found.slot]), np.array([8]), inputs=2, steps=6, now=5.0)
    found = arena.entry("a")
    assert (found.token, found.version, found.seq, found.steps, found.touched) == (8, 8, 5, 15, 5.0)
    arena.drop("a")
    assert arena.entry("a") is None
