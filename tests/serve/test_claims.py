"""Claims: what a tick knows of sessions, and what it gives back when it is over."""

from typing import Any

import pytest
from torch import nn

from hiddenstate.errors import SessionLost
from hiddenstate.serve.arena import Arena
from hiddenstate.serve.claims import SessionClaims
from hiddenstate.serve.futures import ResultFuture
from hiddenstate.serve.session_operations import Close, Info, ListNames, SessionOperation
from hiddenstate.serve.stores import Busy, Change, MemoryStore, Row
from hiddenstate.serve.trial import prepare


class Shared(MemoryStore):
    """A store that several workers could use, in which another one holds `held` and `damaged` cannot be read."""

    shared = True

    def __init__(self) -> None:
        super().__init__()
        self.released: list[tuple[str, int]] = []

    def claim(self, wanted) -> list[Any]:
        special = {"held": Busy(5.0), "damaged": SessionLost("it is damaged", "damaged")}
        return [special.get(name) or found for (name, _), found in zip(wanted, super().claim(wanted), strict=True)]

    def release(self, claims) -> None:
        self.released += claims


@pytest.fixture
def model():
    served = prepare(nn.GRU(3, 4, batch_first=True), example=None, init="zeros")
    yield served
    served.close()


def begun(model, store) -> tuple[SessionClaims, list[tuple[SessionOperation, float]]]:
    delayed: list[tuple[SessionOperation, float]] = []
    claims = SessionClaims(model, store, Arena(model.initial(), 4), delay=lambda *given: delayed.append(given))
    row = Row(0, 0, 1.0, 1.0, model.fingerprint, None)
    store.commit([Change(name, None, row) for name in ("a", "b", "held", "damaged")])
    claims.begin_tick()
    return claims, delayed


def test_what_is_claimed_and_not_changed_is_given_back(model):
    store = Shared()
    claims, _ = begun(model, store)
    entries = claims.look_up([Close(name, ResultFuture(1)) for name in "ab"])
    assert list(entries) == ["a", "b"]
    claims.changed(["a"])
    claims.end_tick()
    assert [session for session, _ in store.released] == ["b"]
    claims.begin_tick()
    claims.end_tick()
    assert len(store.released) == 1


def test_what_only_looks_claims_nothing(model):
    store = Shared()
    claims, _ = begun(model, store)
    entries = claims.look_up([Info("held", ResultFuture(1)), ListNames("", ResultFuture(1), after="", limit=9)])
    assert list(entries) == ["held"]
    claims.end_tick()
    assert store.released == []


def test_a_session_in_use_waits_a_damaged_one_fails_and_one_that_is_not_there_is_none(model):
    claims, delayed = begun(model, Shared())
    held, damaged, missing, fine = (Close(name, ResultFuture(1)) for name in ("held", "damaged", "missing", "a"))
    assert list(claims.look_up([held, damaged, missing, fine])) == ["a"]
    assert [op for op, _ in delayed] == [held]
    assert delayed[0][1] <= 0.01  # looked at again long before the lease ends at the latest
    assert str(damaged.result) == "it is damaged"
