"""The laws of a store, which an engine relies on wherever its sessions are kept."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
import torch

from ..serve.stores import Advance, Blobs, Change, Claim, Row, Store
from ..state import Format, State
from .law import enforce

# What was looked at, what was found, and what was expected.
Seen: TypeAlias = tuple[str, Any, Any]

_REPLAY = 3  # answers to keep


def check_store(make_store: Callable[[], Store]) -> None:
    """Raise `LawBroken`, an `AssertionError`, if a store breaks a law that an engine relies on.

    >>> from hiddenstate.testing import MemoryStore
    >>> check_store(MemoryStore)
    >>> class Forgetful(MemoryStore):
    ...     def answer(self, session, seq):
    ...         return None
    >>> check_store(Forgetful)
    Traceback (most recent call last):
    hiddenstate.errors.LawBroken: Forgetful breaks a law: the last answers of a session are kept, as many as `replay`...

    Args:
        make_store: Makes a new, empty store. It is called once for each law; each store is closed afterwards.
    """
    made: list[Store] = []

    def new() -> Store:
        made.append(make_store())
        made[-1].replay = _REPLAY
        return made[-1]

    name = type(new()).__name__
    try:
        enforce({law: _compared(tried, new) for law, tried in LAWS.items()}, None, name)
    finally:
        for store in made:
            store.close()


def _compared(tried: Callable[[Store], Iterator[Seen]], new: Callable[[], Store]) -> Callable[[None], str | None]:
    def law(_: None) -> str | None:
        for what, found, expected in tried(new()):
            if found != expected:
                return f"{what}: {found!r}, but {expected!r} was expected."
        return None

    return law


def _row(seq: int = 0, *, touched: float = 10.0, state: bytes | None = b"state") -> Row:
    return Row(seq, 2 * seq, 5.0, touched, "model", state)


def _begin(store: Store, *names: str, touched: float = 10.0, state: bytes | None = b"state") -> None:
    rows = [Change(name, None, _row(touched=touched, state=state)) for name in names]
    if None in store.commit(rows):
        raise ValueError(f"{type(store).__name__}.commit refused to begin sessions that were not there")


def _token(store: Store, name: str) -> int:
    (found,) = store.claim([(name, -1)])
    if not isinstance(found, Claim):
        raise ValueError(f"{type(store).__name__}.claim gave {found!r} for a session that is there")
    return found.token


def _committed_is_read(store: Store) -> Iterator[Seen]:
    _begin(store, "a", "ü:/%", state=None)
    yield "a session as it was begun", store.read("a"), _row(state=None)
    version = store.commit([Change("a", _token(store, "a"), _row(1), b"answer")])[0]
    yield "a change under its token was taken", version is not None, True
    yield "a session after a change", store.read("a"), _row(1)
    (found,) = store.claim([("a", -1)])
    yield "a claim of it", found.row if isinstance(found, Claim) else found, _row(1)
    yield "the one beside it", store.read("ü:/%"), _row(state=None)
    yield "one that nobody began", store.read("nobody"), None
    yield "a claim of it", store.claim([("nobody", -1), ("a", -1)])[0], None


def _not_made_twice(store: Store) -> Iterator[Seen]:
    _begin(store, "a")
    first, second = store.commit([Change("a", None, _row(7)), Change("b", None, _row())])
    yield "beginning one that is there", first, None
    yield "a new one beside it was taken", second is not None, True
    yield "the one that was there", store.read("a"), _row()
    yield "the new one", store.read("b"), _row()


def _old_tokens_hold_no_more(store: Store) -> Iterator[Seen]:
    _begin(store, "a", "b")
    old = _token(store, "a")
    yield "a change under its token was taken", store.commit([Change("a", old, _row(1))]) != [None], True
    first, second = store.commit([Change("a", old, _row(1)), Change("b", _token(store, "b"), _row(1))])
    yield "a second change under the same token", first, None
    yield "another session's change beside it was taken", second is not None, True
    yield "that other session", store.read("b"), _row(1)


def _removed_is_gone(store: Store) -> Iterator[Seen]:
    _begin(store, "a")
    store.commit([Change("a", _token(store, "a"), _row(1), b"answer")])
    token = _token(store, "a")
    yield "what removing returns", store.commit([Change("a", token, None, None, True)]), [0]
    yield "the removed session", store.read("a"), None
    yield "how many there are", store.count(), 0
    _begin(store, "a")
    yield "an answer of the old one, asked of a new one of that name", store.answer("a", 1), None
    yield "a change of the new one under the old token", store.commit([Change("a", token, _row(1))]), [None]


def _last_answers_are_kept(store: Store) -> Iterator[Seen]:
    _begin(store, "a")
    for seq in range(1, 6):
        store.commit([Change("a", _token(store, "a"), _row(seq), b"answer %d" % seq)])
    kept = [None, None, b"answer 3", b"answer 4", b"answer 5"]
    yield "answers 1 to 5, where 3 are kept", [store.answer("a", seq) for seq in range(1, 6)], kept
    store.commit([Change("a", _token(store, "a"), _row(4), None, True)])
    yield "answers after a new start", [store.answer("a", seq) for seq in range(3, 6)], [None] * 3


def _names_are_in_order(store: Store) -> Iterator[Seen]:
    _begin(store, "b", "a1", "a3", "a2", "ä")
    yield "all names", store.sessions("", "", 10), ["a1", "a2", "a3", "b", "ä"]
    yield "two that begin with a", store.sessions("a", "", 2), ["a1", "a2"]
    yield "those after a1", store.sessions("a", "a1", 10), ["a2", "a3"]
    yield "all after a3", store.sessions("", "a3", 10), ["b", "ä"]
    yield "how many there are", store.count(), 5


def _old_are_swept(store: Store) -> Iterator[Seen]:
    _begin(store, *(f"old{n}" for n in range(5)), touched=1.0)
    _begin(store, "young", touched=100.0)
    gone = [store.sweep(50.0, 2) for _ in range(4)]
    yield "how many of five went in four sweeps", sum(gone), 5
    yield "no more than two at once", max(gone) <= 2, True
    yield "who is left", store.sessions("", "", 10), ["young"]
    yield "how many are left", store.count(), 1


def _many_are_claimed(store: Store) -> Iterator[Seen]:
    names = [f"{n:04d}" for n in range(1200)]
    _begin(store, *names)
    found = store.claim([(name, -1) for name in names])
    yield "claims among 1200", sum(isinstance(one, Claim) for one in found), 1200


def _states_are_any_bytes(store: Store) -> Iterator[Seen]:
    state = bytes(range(256)) * 40
    _begin(store, "a", state=state)
    found = store.read("a")
    yield "a state of all bytes came back", found is not None and found.state == state, True


def _moving_many_is_changing_each(store: Store) -> Iterator[Seen]:
    """Move random sessions, some under outdated tokens; by several inputs at once if the store supports it."""
    draw = random.Random(0)
    names = [f"session {n}" for n in range(5)]
    _begin(store, *names, state=None)
    seqs = dict.fromkeys(names, 0)
    answers: dict[tuple[str, int], bytes] = {}
    for _ in range(12):
        moving = draw.sample(names, draw.randint(1, len(names)))
        inputs = draw.randint(1, 5) if store.chains else 1
        tokens = [_token(store, name) for name in moving]
        stale = [draw.random() < 0.3 for _ in moving]
        shown = [token + 10**6 * old for token, old in zip(tokens, stale, strict=True)]
        group = moved_on(moving, shown, seqs, inputs)
        assert group.answers is not None
        states, given = ((b.sealed() if store.sealed else b.bare()) for b in (group.states, group.answers))
        versions = store.advance([group], [])
        yield f"which of {moving} were refused", [version is None for version in versions], stale
        for place, name in enumerate(moving):
            if not stale[place]:
                for ahead in range(inputs):
                    seqs[name] += 1
                    answers[name, seqs[name]] = given[place * inputs + ahead]
                row = Row(seqs[name], 2 * seqs[name], 5.0, 10.0, "model", states[place])
                yield f"{name}, moved on by {inputs}", store.read(name), row
        store.release(list(zip(moving, tokens, strict=True)))
        for name in names:
            kept = range(max(1, seqs[name] - store.replay + 1), seqs[name] + 1)
            found = [store.answer(name, seq) for seq in kept]
            bare = [one if isinstance(one, bytes | None) else one[1] for one in found]
            yield f"the last answers of {name}", bare, [answers[name, seq] for seq in kept]
            yield f"an older one of {name}", store.answer(name, seqs[name] - store.replay), None


def moved_on(names: list[str], tokens: list[int], seqs: dict[str, int], inputs: int) -> Advance:
    """Return an advance of these sessions by some inputs, with made-up states and answers."""
    generator = torch.Generator().manual_seed(sum(seqs.values()))
    h, c = (torch.randn(2, len(names), units, generator=generator) for units in (3, 1))
    states = State({"h": h, "c": c}, 1)
    answers = State({"0": torch.randn(len(names) * inputs, 4, generator=generator)})
    after = np.array([seqs[name] + inputs for name in names])
    return Advance(
        sessions=names,
        tokens=np.array(tokens),
        seqs=after,
        steps=2 * after,
        opened=np.full(len(names), 5.0),
        states=Blobs(Format(states), states),
        answers=Blobs(Format(answers), answers),
        inputs=inputs,
        touched=10.0,
        fingerprint="model",
    )


LAWS: dict[str, Callable[[Store], Iterator[Seen]]] = {
    "what is committed is read again": _committed_is_read,
    "a session is not made twice": _not_made_twice,
    "a change under an old token is not taken, and others are": _old_tokens_hold_no_more,
    "a removed session is gone with its answers, and its token holds no more": _removed_is_gone,
    "the last answers of a session are kept, as many as `replay`": _last_answers_are_kept,
    "names are in order, and counted": _names_are_in_order,
    "the old are swept, a few at a time": _old_are_swept,
    "many sessions are claimed at once": _many_are_claimed,
    "a state may be any bytes": _states_are_any_bytes,
    "to move many on at once is to change each": _moving_many_is_changing_each,
}
