"""What operations come to: deciding raises or returns, and changes nothing."""

import pytest
import torch
from torch import nn

from hiddenstate.errors import Overloaded, SequenceGap, SessionExists, SessionLost
from hiddenstate.serve.arena import Arena, SessionEntry
from hiddenstate.serve.futures import ResultFuture
from hiddenstate.serve.policy import Decision, SessionPolicy
from hiddenstate.serve.session_operations import Close, Fork, Info, Open, Push, Reset
from hiddenstate.serve.stores import Change, MemoryStore, Row
from hiddenstate.serve.trial import prepare


@pytest.fixture
def model():
    served = prepare(nn.GRU(3, 4, batch_first=True))
    yield served
    served.close()


@pytest.fixture
def store(model) -> MemoryStore:
    made = MemoryStore()
    made.ttl = 10.0
    made.commit([Change("a", None, Row(2, 2, 0.0, 100.0, model.fingerprint, None))])
    return made


@pytest.fixture
def policy(model, store) -> SessionPolicy:
    return SessionPolicy(model, store, Arena(model.initial(), 4), max_stored=2)


def entry(model, *, seq: int = 2, fingerprint: str | None = None) -> SessionEntry:
    made = SessionEntry("a", 1, 1)
    made.seq, made.touched, made.fingerprint = seq, 100.0, fingerprint or model.fingerprint
    return made


def push(seq: int | None) -> Push:
    return Push("a", ResultFuture(1), torch.zeros(1, 1, 3), steps=1, single_step=True, seq=seq)


@pytest.mark.parametrize("seq", [None, 3])
def test_the_next_input_is_to_be_applied(policy, model, seq):
    known = entry(model)
    assert policy.admit(push(seq), known, 105.0) is known


@pytest.mark.parametrize(("seq", "message"), [(4, "4 does not follow"), (2, "was applied already")])
def test_any_other_input_is_a_gap_or_too_old(policy, model, seq, message):
    with pytest.raises(SequenceGap, match=message) as caught:
        policy.admit(push(seq), entry(model), 105.0)
    assert caught.value.seq == 2


@pytest.mark.parametrize(
    ("known", "now", "reason"), [(False, 105.0, "unknown"), (True, 111.0, "expired"), ("other", 105.0, "model")]
)
def test_a_session_that_cannot_go_on_is_lost_for_a_reason(policy, model, known, now, reason):
    found = entry(model, fingerprint="other" if known == "other" else None) if known else None
    with pytest.raises(SessionLost) as caught:
        policy.admit(push(None), found, now)
    assert caught.value.reason == reason


def test_what_changes_a_session_shows_the_token_it_was_read_with(policy, model):
    for op, row in ((Reset("a", ResultFuture(1)), True), (Close("a", ResultFuture(1)), False)):
        change = policy.decide(op, entry(model), 105.0).change
        assert (change.session, change.token, change.row is not None) == ("a", 1, row)
    assert policy.decide(Info("a", ResultFuture(1)), entry(model), 105.0).change is None


def test_a_session_is_not_begun_twice_unless_that_is_fine(policy, model):
    with pytest.raises(SessionExists, match="there is a session 'a' already, which has come to input 2"):
        policy.decide(Open("a", ResultFuture(1)), entry(model), 105.0)
    assert policy.decide(Open("a", ResultFuture(1), exist_ok=True), entry(model), 105.0) == Decision("a")


def test_sessions_begun_in_one_tick_count_before_they_are_committed(policy, model, store):
    policy.begin_tick()
    assert policy.decide(Open("b", ResultFuture(1)), None, 105.0).change.token is None
    with pytest.raises(Overloaded, match="the store holds 2 sessions, so 'c' cannot be added"):
        policy.decide(Fork("a", ResultFuture(1), target="c"), entry(model), 105.0)
    policy.begin_tick()  # nothing was committed, so there is room again
    assert policy.decide(Fork("a", ResultFuture(1), target="c"), entry(model), 105.0).result == "c"
    assert store.sessions("", "", 10) == ["a"]
