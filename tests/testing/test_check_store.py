"""`check_store`: our stores keep the laws, and one that breaks a law is told which."""

import uuid

import pytest

from hiddenstate.errors import LawBroken
from hiddenstate.serve.stores import open_store
from hiddenstate.testing import MemoryStore, check_store
from hiddenstate.testing.check_store import LAWS
from tests.support import redis


def test_sessions_in_memory_keep_the_laws():
    check_store(lambda: open_store("memory:"))


def test_sessions_in_sqlite_keep_the_laws(tmp_path):
    check_store(lambda: open_store(f"sqlite:///{tmp_path}/{uuid.uuid4().hex}.db"))


@pytest.mark.redis
@redis.needed
def test_sessions_in_redis_keep_the_laws(tmp_path):
    server = redis.RedisServer(tmp_path)
    try:
        check_store(lambda: open_store(server.address(uuid.uuid4().hex)))
    finally:
        server.stop()


class Misreading(MemoryStore):
    def read(self, session):
        found = super().read(session)
        return found and found._replace(steps=found.steps + 1)


class Overwriting(MemoryStore):
    def commit(self, changes):
        known = self.claim([(change.session, -1) for change in changes])
        tokens = [claim.token if claim else None for claim in known]
        return super().commit([c._replace(token=t) for c, t in zip(changes, tokens, strict=True)])


class Trusting(Overwriting):
    def commit(self, changes):
        if any(change.token is None for change in changes):
            return MemoryStore.commit(self, changes)
        return super().commit(changes)


class Lingering(MemoryStore):
    def count(self):
        return super().count() + 1


class Forgetful(MemoryStore):
    def answer(self, session, seq):
        return None


class Unordered(MemoryStore):
    def sessions(self, prefix, after, limit):
        return super().sessions(prefix, after, limit)[::-1]


class Greedy(MemoryStore):
    def sweep(self, before, limit):
        return super().sweep(before, 1000)


class Short(MemoryStore):
    def claim(self, wanted):
        return [found if place < 999 else None for place, found in enumerate(super().claim(wanted))]


class Textual(MemoryStore):
    def read(self, session):
        found = super().read(session)
        return found and found._replace(state=found.state and found.state.replace(b"\x00", b""))


class Alone(MemoryStore):
    def advance(self, moved, changes):
        return [version and version + 0 for version in super().advance(moved, changes)][:1]


class Failing(MemoryStore):
    def sweep(self, before, limit):
        raise OSError("the disk is full")


BROKEN = {
    "read": (Misreading, r"what is committed is read again. a session as it was begun: Row\(seq=0, steps=1"),
    "twice": (Overwriting, r"a session is not made twice. beginning one that is there: 2, but None was expected"),
    "tokens": (Trusting, r"under an old token is not taken.*a second change under the same token: \d+, but None"),
    "removed": (Lingering, r"a removed session is gone.*how many there are: 1, but 0 was expected"),
    "answers": (Forgetful, r"the last answers.*are kept.*answers 1 to 5, where 3 are kept: \[None, None, None"),
    "order": (Unordered, r"names are in order, and counted. all names: \['ä', 'b'"),
    "swept": (Greedy, r"a few at a time. no more than two at once: False, but True"),
    "many": (Short, r"many sessions are claimed at once. claims among 1200: 999, but 1200"),
    "bytes": (Textual, r"a state may be any bytes. a state of all bytes came back: False"),
    "moving": (Alone, r"to move many on at once is to change each. which of \["),
    "raising": (Failing, r"the old are swept, a few at a time. OSError: the disk is full"),
}


@pytest.mark.parametrize(("kind", "message"), BROKEN.values(), ids=BROKEN)
def test_a_broken_law_is_told_with_what_was_seen(kind, message):
    with pytest.raises(AssertionError, match=message) as caught:
        check_store(kind)
    assert isinstance(caught.value, LawBroken)
    assert str(caught.value).startswith(f"{kind.__name__} breaks a law: ")


def test_every_law_has_a_store_that_breaks_it():
    laws = set()
    for kind, _ in BROKEN.values():
        with pytest.raises(LawBroken) as caught:
            check_store(kind)
        laws |= {law for law in LAWS if f"breaks a law: {law}." in str(caught.value)}
    assert laws == set(LAWS)


def test_every_store_that_was_made_is_closed_whatever_happens():
    made, closed = [], []

    class Counted(Greedy):
        def __init__(self):
            super().__init__()
            made.append(self)

        def close(self):
            closed.append(self)

    with pytest.raises(LawBroken):
        check_store(Counted)
    assert made == closed
    assert len(made) > 1
