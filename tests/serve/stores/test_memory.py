"""The buffer behind the memory store: each slot has its own row, and memory stays close to what is in use."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hiddenstate.serve.stores.memory import SegmentedBuffer

SLOTS = 40


@given(data=st.data())
def test_each_slot_has_what_was_last_written_to_it_and_little_else_is_kept(data):
    buffer, held = SegmentedBuffer(SLOTS // 2), {}
    buffer.grow(SLOTS)
    for turn in range(data.draw(st.integers(1, 25))):
        slots = data.draw(st.lists(st.integers(0, SLOTS - 1), unique=True))
        at = np.array(slots, np.int64)
        if data.draw(st.booleans()):
            buffer.drop(at)
            held = {slot: row for slot, row in held.items() if slot not in slots}
        else:
            width = data.draw(st.integers(0, 3))
            pieces = [np.random.default_rng(turn).integers(0, 256, (len(at), n), np.uint8) for n in (width, 4)]
            buffer.write(at, pieces, turn)
            for row, slot in enumerate(slots):
                held[slot] = (turn, b"".join(piece[row].tobytes() for piece in pieces))
        assert [buffer.read(slot) for slot in range(SLOTS)] == [held.get(slot) for slot in range(SLOTS)]
        assert buffer.nbytes <= 4 * sum(len(row) for _, row in held.values())
