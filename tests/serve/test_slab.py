"""Slots: one session each, whatever comes and goes."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from hiddenstate.serve.slab import Entry, Slab
from hiddenstate.state import State

LIKE = State({"h": torch.zeros(2, 1, 3), "count": torch.zeros(1).long()}, {"h": 1, "count": 0})


def states(values: list[int]) -> State:
    numbers = torch.tensor(values)
    return State({"h": numbers.float()[None, :, None].expand(2, -1, 3).clone(), "count": numbers}, {"h": 1, "count": 0})


@given(data=st.data())
def test_no_two_sessions_share_a_slot_and_each_keeps_its_own(data):
    slab, held = Slab(LIKE, 4), {}
    for turn in range(data.draw(st.integers(1, 30))):
        name = data.draw(st.sampled_from("abcdefgh"))
        if name in held and data.draw(st.booleans()):
            slab.drop(name)
            del held[name]
            continue
        entry = slab.entries.get(name)
        if entry is None:
            slab.make_room(1, {name})
            held = {kept: value for kept, value in held.items() if slab.has(kept)}
            entry = Entry(name, 0, 0)
            slab.enter(entry)
        entry.used = turn
        slab.scatter([entry.slot], states([turn]))
        held[name] = turn
        slots = [slab.entries[kept].slot for kept in held]
        assert len(set(slots)) == len(slots) == len(slab) <= 4
        found = slab.gather(slots)
        assert found["count"].tolist() == list(held.values())
        assert found["h"][1, :, 2].tolist() == list(held.values())


def test_those_longest_unused_make_room_and_those_needed_do_not():
    slab = Slab(LIKE, 3)
    for used, name in enumerate("abc"):
        entry = Entry(name, 0, 0)
        slab.enter(entry)
        entry.used = used
    slab.make_room(2, {"a", "d"})
    assert sorted(slab.entries) == ["a"]


@given(slots=st.permutations(range(5)).flatmap(lambda order: st.integers(0, 5).map(lambda n: order[:n])))
def test_any_slots_in_any_order(slots):
    slab = Slab(LIKE, 5)
    slab.scatter(range(5), states([10, 11, 12, 13, 14]))
    assert slab.gather(slots)["count"].tolist() == [10 + slot for slot in slots]
    slab.scatter(slots, states([slot for slot in slots]) if slots else states([]))
    assert slab.gather(range(5))["count"].tolist() == [slot if slot in slots else 10 + slot for slot in range(5)]


def test_what_is_gathered_may_be_changed():
    slab = Slab(LIKE, 3)
    for slots in ([0, 1], [2, 0]):
        slab.gather(slots)["h"].fill_(7.0)
        assert not slab.gather([0, 1, 2])["h"].any()
