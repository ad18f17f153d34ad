"""Rows held one by one out of sheets written by the hundred: each holder its own, and no more memory than that."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hiddenstate.serve.stores.lookup import Lookup
from hiddenstate.serve.stores.sheets import Sheets

HOLDERS = 40


@given(data=st.data())
def test_each_holder_holds_what_was_last_written_for_it_and_little_else_is_kept(data):
    sheets, held = Sheets(HOLDERS // 2), {}
    sheets.grow(HOLDERS)
    for turn in range(data.draw(st.integers(1, 25))):
        holders = data.draw(st.lists(st.integers(0, HOLDERS - 1), unique=True))
        at = np.array(holders, np.int64)
        if data.draw(st.booleans()):
            sheets.drop(at)
            held = {holder: row for holder, row in held.items() if holder not in holders}
        else:
            width = data.draw(st.integers(0, 3))
            pieces = [np.random.default_rng(turn).integers(0, 256, (len(at), n), np.uint8) for n in (width, 4)]
            sheets.write(at, pieces, turn)
            for row, holder in enumerate(holders):
                held[holder] = (turn, b"".join(piece[row].tobytes() for piece in pieces))
        assert [sheets.read(holder) for holder in range(HOLDERS)] == [held.get(holder) for holder in range(HOLDERS)]
        assert sheets.nbytes <= 4 * sum(len(row) for _, row in held.values())


@given(steps=st.lists(st.tuples(st.sampled_from(["add", "remove", "ask"]), st.sampled_from("abcd")), max_size=30))
def test_a_lookup_that_remembers_is_never_out_of_date(steps):
    where, known = Lookup(), {}
    asked: list[str] = []
    for number, (verb, name) in enumerate(steps):
        if verb == "add":
            where.add(name, number)
            known[name] = number
        elif verb == "remove":
            assert where.remove(name) == known.pop(name, None)
        else:
            asked.append(name)  # of the list that the last answer was for
        assert where.all(asked).tolist() == [known.get(one, -1) for one in asked]
        assert where.names == known
