"""The engine's promises: a session in pieces equals one call; nothing is lost, doubled, mixed or begun anew."""

import asyncio
import copy
import random
import sqlite3
import threading

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import hiddenstate as hs
from hiddenstate.errors import (
    BadInput,
    DeadlineExceeded,
    ModelFailed,
    Overloaded,
    SequenceGap,
    ServeError,
    SessionExists,
    SessionLost,
    StateMismatch,
)
from hiddenstate.serve import Engine, Session
from hiddenstate.state import to_bytes
from hiddenstate.testing import FakeClock
from tests.support.models import Deep, Stepping, TimeFirst

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def whole(model: nn.Module, x: Tensor) -> Tensor:
    """What one call gives for one session, x (steps, feature)."""
    model.eval()
    with torch.no_grad():
        out = model(x.unsqueeze(0))
    return (out[0] if isinstance(out, tuple) else out)[0]


class Touchy(nn.Module):
    """Raises for inputs over 100, gives NaN for those below -100."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(3, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        if (x > 100).any():
            raise RuntimeError("too large for me")
        return self.gru(torch.where(x < -100, torch.nan, x))[0]


# A session in pieces equals one call.


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_sessions_in_pieces_equal_one_call_each(data):
    torch.manual_seed(0)
    model = Deep()
    sessions = data.draw(st.integers(1, 6))
    cuts = [data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)) for _ in range(sessions)]
    xs = [torch.randn(sum(cut), 3) for cut in cuts]
    wanted = [whole(model, x) for x in xs]
    with Engine(model, max_sessions=data.draw(st.integers(1, 6)), max_batch=data.draw(st.integers(1, 8))) as engine:
        names = [engine.open() for _ in cuts]
        pieces: dict[str, list[Tensor]] = {name: [] for name in names}
        waiting = [list(x.split(cut)) for x, cut in zip(xs, cuts, strict=True)]
        while any(waiting):
            turn = [place for place, left in enumerate(waiting) if left]
            got = engine.push_many([names[p] for p in turn], [waiting[p].pop(0) for p in turn])
            for place, out in zip(turn, got, strict=True):
                pieces[names[place]].append(out)
    for name, target in zip(names, wanted, strict=True):
        torch.testing.assert_close(torch.cat(pieces[name]), target, **CLOSE)


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(lambda: nn.LSTM(3, 4), id="time first, the layer itself"),
        pytest.param(lambda: nn.GRU(3, 4, num_layers=2, batch_first=True), id="two layers"),
        pytest.param(lambda: nn.LSTM(3, 4, proj_size=2, batch_first=True), id="projection"),
        pytest.param(lambda: nn.RNN(3, 4, batch_first=True).double(), id="double"),
        pytest.param(lambda: Stepping(nn.LSTMCell(3, 4)), id="cell in a loop"),
        pytest.param(lambda: Stepping(nn.GRUCell(3, 4)), id="another cell in a loop"),
        pytest.param(lambda: hs.Recurrent(nn.GRUCell, 3, 4, num_layers=2), id="Recurrent"),
    ],
)
def test_any_model_is_served_as_it_is(model, address):
    model = model()
    dtype = next(model.parameters()).dtype
    xs = [torch.randn(7, 3, dtype=dtype) for _ in range(3)]
    first = isinstance(model, nn.LSTM) and not model.batch_first
    with torch.no_grad():
        outs = [model(x.unsqueeze(1 if first else 0)) for x in xs]
    wanted = [(out[0] if isinstance(out, tuple) else out).squeeze(1 if first else 0) for out in outs]
    with Engine(model, address) as engine:
        names = [engine.open() for _ in xs]
        parts = [
            engine.push_many(names, [x[:2] for x in xs]),
            engine.push_many(names, [x[2 : 4 + place] for place, x in enumerate(xs)]),  # of different lengths
            engine.push_many(names, [x[4 + place :] for place, x in enumerate(xs)]),
        ]
    for place, target in enumerate(wanted):
        torch.testing.assert_close(torch.cat([part[place] for part in parts]), target, **CLOSE)


def test_one_step_comes_back_without_a_time_axis():
    model = Deep()
    x = torch.randn(3)
    with Engine(model) as engine:
        out = engine.push(engine.open(), x)
    assert out.shape == (2,)
    torch.testing.assert_close(out, whole(model, x.unsqueeze(0))[0], **CLOSE)


def test_a_cell_is_served_step_by_step():
    cell = nn.GRUCell(3, 4)
    x = torch.randn(2, 6, 3)
    wanted, _ = hs.unroll(cell, x)
    with Engine(cell) as engine:
        a, b = engine.open(), engine.open()
        first = engine.push_many([a, b], [x[0, :4], x[1, :1]])
        last = engine.push_many([a, b], [x[0, 4:], x[1, 1:]])
    torch.testing.assert_close(torch.cat([first[0], last[0]]), wanted[0], **CLOSE)
    torch.testing.assert_close(torch.cat([first[1], last[1]]), wanted[1], **CLOSE)


def test_nested_outputs_come_back_nested():
    model = TimeFirst()
    x = torch.randn(5, 3)
    out, h = model(x.unsqueeze(1))
    with Engine(model) as engine:
        session = engine.open()
        engine.push(session, x[:2])
        got = engine.push(session, x[2:])
    assert isinstance(got, tuple)
    torch.testing.assert_close(got[0], out[2:, 0].detach(), **CLOSE)
    torch.testing.assert_close(got[1], h[:, 0].detach(), **CLOSE)


def test_tokens_are_inputs_too():
    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 5)
            self.lstm = nn.LSTM(5, 4, batch_first=True)

        def forward(self, tokens: Tensor) -> dict[str, Tensor]:
            return {"logits": self.lstm(self.embed(tokens))[0]}

    model, tokens = Language(), torch.randint(0, 11, (6,))
    wanted = model(tokens.unsqueeze(0))["logits"][0].detach()
    with Engine(model) as engine:
        session = engine.open()
        got = [engine.push(session, tokens[:3])["logits"], engine.push(session, [int(t) for t in tokens[3:]])["logits"]]
        assert engine.push(session, 4)["logits"].shape == (4,)
        with pytest.raises(BadInput, match=r"x is torch.float32, but this model takes torch.int64"):
            engine.push(session, 0.5)
    torch.testing.assert_close(torch.cat(got), wanted, **CLOSE)


def test_a_model_that_flattens_rows_and_steps_is_served():
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.RNN(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.rnn(x)[0]).reshape(-1, 2)

    model, xs = Flat(), torch.randn(3, 5, 3)
    wanted = [model(x.unsqueeze(1)).detach() for x in xs]
    with Engine(model) as engine:
        names = [engine.open() for _ in xs]
        torch.testing.assert_close(engine.push_many(names, xs), torch.stack(wanted), **CLOSE)


def test_a_learned_start_is_where_sessions_start():
    model = nn.GRU(3, 4, batch_first=True)
    learned = hs.Learned(model, std=1.0)
    x = torch.randn(4, 3)
    wanted, _ = model(x.unsqueeze(0), learned(1)["h"])
    with Engine(model, init=learned) as engine:
        session = engine.open()
        torch.testing.assert_close(engine.push(session, x), wanted[0].detach(), **CLOSE)
        engine.reset(session)
        torch.testing.assert_close(engine.push(session, x), wanted[0].detach(), **CLOSE)


def test_inputs_in_one_tensor_are_answered_in_one_tensor():
    model, x = TimeFirst(), torch.randn(5, 4, 3)
    out, h = (part.detach() for part in model(x.transpose(0, 1)))
    with Engine(model, max_batch=3) as engine:  # in two ticks
        names = [engine.open() for _ in x]
        engine.push(names[1], torch.randn(3))  # and one of them in another call than the others
        engine.reset(names[1])
        first = engine.push_many(names, x[:, :1])
        got = engine.push_many(list(reversed(names)), x.flip(0)[:, 1:])
    torch.testing.assert_close(first[0], out[:1].transpose(0, 1), **CLOSE)
    torch.testing.assert_close(got[0].flip(0), out[1:].transpose(0, 1), **CLOSE)
    torch.testing.assert_close(got[1].flip(0), h.transpose(0, 1), **CLOSE)


def test_a_cell_that_changes_the_state_it_is_given_does_no_harm():
    class InPlace(nn.Module):
        hidden_size = 3

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(3))

        def forward(self, x: Tensor, state: Tensor | None = None) -> Tensor:
            if state is None:
                state = x.new_zeros(len(x), 3)
            state.add_(x)
            if (x > 100).any():
                raise RuntimeError("too late")
            return state.clone() @ self.weight

    with Engine(InPlace(), example=torch.zeros(2, 3)) as engine:
        names = [engine.open() for _ in range(3)]
        engine.push_many(names, torch.ones(3, 3))
        with pytest.raises(ModelFailed, match="too late"):
            engine.push_many(names, torch.tensor([[1.0] * 3, [1000.0] * 3, [1.0] * 3]))
        got = engine.push_many(names, torch.ones(3, 3))
    assert got[:, 0].tolist() == [3.0, 2.0, 3.0]


# Numbers of inputs.


def test_a_repeated_input_is_answered_again_and_not_applied_again(address):
    x = torch.randn(4, 3)
    with Engine(Deep(), address) as engine:
        session = engine.open()
        answers = [engine.push(session, step, seq) for seq, step in enumerate(x, 1)]
        before = engine.export(session)
        for seq, answer in enumerate(answers, 1):
            torch.testing.assert_close(engine.push(session, torch.randn(3), seq), answer, rtol=0, atol=0)
        assert engine.export(session) == before
        assert engine.info(session).seq == 4


def test_a_gap_is_an_error_that_says_what_comes_next(address):
    with Engine(Deep(), address) as engine:
        session = engine.open("a")
        with pytest.raises(SequenceGap, match=r"input 2 does not follow the last one of .*'a', which is 0: 1 comes"):
            engine.push(session, torch.randn(3), 2)
        engine.push(session, torch.randn(3), 1)
        with pytest.raises(SequenceGap) as caught:
            engine.push(session, torch.randn(3), 3)
        assert caught.value.seq == 1
        assert engine.info(session).seq == 1


def test_a_number_so_old_that_its_answer_is_gone_is_an_error_and_not_applied(address):
    with Engine(Deep(), address, replay=2) as engine:
        session = engine.open()
        for _ in range(4):
            engine.push(session, torch.randn(3))
        engine.push(session, torch.randn(3), 3)
        with pytest.raises(SequenceGap, match=r"input 2 .* was applied already .*the last one is 4.*the last 2 are"):
            engine.push(session, torch.randn(3), 2)


def test_nested_answers_are_kept_too(address):
    with Engine(TimeFirst(), address) as engine:
        session = engine.open()
        first, h = engine.push(session, torch.randn(2, 3), 1)
        again, h_again = engine.push(session, torch.randn(2, 3), 1)
    torch.testing.assert_close(again, first, rtol=0, atol=0)
    torch.testing.assert_close(h_again, h, rtol=0, atol=0)


@pytest.mark.parametrize("seq", [0, -1, True, 1.0, "1"])
def test_inputs_are_numbered_from_one(seq):
    with Engine(Deep()) as engine, pytest.raises(BadInput, match=r"seq is .*, but inputs are numbered from 1 on"):
        engine.push(engine.open(), torch.randn(3), seq)


# Never a silent zero state.


def test_an_unknown_session_is_an_error(address):
    with Engine(Deep(), address) as engine:
        for ask in (engine.export, engine.info, engine.reset, engine.fork, engine.close):
            with pytest.raises(SessionLost, match=r"there is no session 'nobody'.*open\('nobody'\)") as caught:
                ask("nobody")
            assert caught.value.reason == "unknown"
        with pytest.raises(SessionLost, match="there is no session 'nobody'"):
            engine.push("nobody", torch.randn(3))


def test_a_closed_session_is_unknown_and_its_name_begins_anew(address):
    model, x = Deep(), torch.randn(3, 3)
    with Engine(model, address) as engine:
        engine.open("a")
        engine.push("a", torch.randn(5, 3))
        engine.close("a")
        with pytest.raises(SessionLost, match="no session 'a'"):
            engine.push("a", x)
        engine.open("a")
        assert engine.info("a").seq == 0
        torch.testing.assert_close(engine.push("a", x, 1), whole(model, x), **CLOSE)


def test_a_session_expires_and_says_so(address):
    clock = FakeClock()
    with Engine(Deep(), address, ttl=10, clock=clock) as engine:
        engine.open("a")
        clock.now += 9
        engine.push("a", torch.randn(3))
        clock.now += 9
        engine.push("a", torch.randn(3))
        assert engine.info("a").expires == clock.now + 10
        clock.now += 10.5
        for ask in (lambda: engine.push("a", torch.randn(3)), lambda: engine.info("a"), lambda: engine.export("a")):
            with pytest.raises(SessionLost, match=r"'a' expired: its last .* 10.5 s ago.*kept for 10 s") as caught:
                ask()
            assert caught.value.reason == "expired"
        engine.open("a")
        assert engine.info("a").seq == 0


def test_a_session_of_another_model_is_refused(tmp_path):
    address = f"sqlite:///{tmp_path}/sessions.db"
    with Engine(Deep(), address) as engine:
        engine.open("a")
        engine.push("a", torch.randn(3))
        data = engine.export("a")
    with Engine(Deep(), address) as engine:  # the same shapes, other weights
        for ask in (lambda: engine.push("a", torch.randn(3)), lambda: engine.export("a"), lambda: engine.fork("a")):
            with pytest.raises(SessionLost, match="session 'a' belongs to another model") as caught:
                ask()
            assert caught.value.reason == "model"
        with pytest.raises(SessionLost, match=r"the state for session 'b' belongs to .*any_model=True"):
            engine.import_("b", data)
        engine.reset("a")
        engine.push("a", torch.randn(3))


def test_a_damaged_state_is_an_error(tmp_path):
    path = tmp_path / "sessions.db"
    model = Deep()
    with Engine(model, f"sqlite:///{path}") as engine:
        engine.open("a")
        engine.push("a", torch.randn(3))
    with sqlite3.connect(path) as db:
        ((state,),) = db.execute("SELECT state FROM sessions")
        db.execute("UPDATE sessions SET state = ?", (state[:-1] + bytes([state[-1] ^ 1]),))
    db.close()
    with Engine(model, f"sqlite:///{path}") as engine:
        with pytest.raises(SessionLost, match="'a' is lost: the stored state of session 'a' is damaged") as caught:
            engine.push("a", torch.randn(3))
        assert caught.value.reason == "damaged"


# Failures keep the last state.


def test_a_model_that_raises_fails_the_guilty_alone_and_the_engine_goes_on(address):
    model, x = Touchy(), torch.randn(5, 4, 3)
    wanted = [whole(model, row) for row in x]
    with Engine(model, address) as engine:
        names = [engine.open() for _ in x]
        first = engine.push_many(names, x[:, :2])
        spoiled = list(x[:, 2])
        spoiled[3] = torch.full((3,), 1000.0)
        second = engine.push_many(names, spoiled, errors="return")
        assert isinstance(second[3], ModelFailed)
        assert "the model raised RuntimeError for this input: too large for me" in str(second[3])
        second[3] = engine.push(names[3], x[3, 2])
        last = engine.push_many(names, x[:, 3])
    for place, target in enumerate(wanted):
        got = torch.cat([first[place], second[place][None], last[place][None]])
        torch.testing.assert_close(got, target, **CLOSE)


def test_nan_fails_the_guilty_alone_and_the_state_before_it_stays(address):
    model, x = Touchy(), torch.randn(3, 4, 3)
    with Engine(model, address) as engine:
        names = [engine.open() for _ in x]
        first = engine.push_many(names, x[:, :2])
        spoiled = x[:, 2].clone()
        spoiled[1] = -1000
        states = [engine.export(name) for name in names]
        second = engine.push_many(names, spoiled, errors="return")
        assert isinstance(second[1], ModelFailed)
        assert "the model gave NaN for this input, in its state gru.h, so" in str(second[1])
        assert engine.export(names[1]) == states[1]
        assert engine.info(names[1]).seq == 1
        second[1] = engine.push(names[1], x[1, 2], 2)
    for place, row in enumerate(x):
        got = torch.cat([first[place], second[place][None]])
        torch.testing.assert_close(got, whole(model, row)[:3], **CLOSE)


def test_the_first_error_of_many_is_raised_and_the_others_are_applied():
    with Engine(Touchy()) as engine:
        names = [engine.open() for _ in range(3)]
        with pytest.raises(ModelFailed, match="too large"):
            engine.push_many(names, [torch.zeros(3), torch.full((3,), 1e4), torch.zeros(3)])
        assert [engine.info(name).seq for name in names] == [1, 0, 1]


# Slots and limits.


def test_more_sessions_than_slots_go_on_all_the_same(address):
    model, xs = Deep(), torch.randn(20, 6, 3)
    wanted = [whole(model, x) for x in xs]
    with Engine(model, address, max_sessions=3, max_batch=8) as engine:
        names = [engine.open() for _ in xs]
        steps = [engine.push_many(names, xs[:, step]) for step in range(6)]
        assert engine.hot == 3
    for place, target in enumerate(wanted):
        torch.testing.assert_close(torch.stack([step[place] for step in steps]), target, **CLOSE)


def test_beyond_the_limit_of_the_store_sessions_are_refused_until_some_are_closed(address):
    with Engine(Deep(), address, max_stored=2) as engine:
        a, _ = engine.open("a"), engine.open("b")
        for ask in (lambda: engine.open("c"), lambda: engine.fork("a", "c")):
            with pytest.raises(Overloaded, match=r"the store holds 2 sessions, so 'c' cannot be added.*max_stored"):
                ask()
        engine.push(a, torch.randn(3))
        engine.close("b")
        engine.open("c")
        assert engine.sessions() == ["a", "c"]


def test_expired_sessions_make_room(address):
    clock = FakeClock()
    with Engine(Deep(), address, max_stored=2, ttl=10, clock=clock) as engine:
        engine.open("a")
        engine.open("b")
        clock.now += 11
        engine.open("c")
        assert engine.sessions() == ["c"]


def test_too_many_waiting_inputs_are_refused_at_once():
    model = Touchy()
    with Engine(model, max_pending=4) as engine:
        names = [engine.open() for _ in range(5)]
        with pytest.raises(Overloaded, match=r"0 operations are waiting and 5 more would make it over 4.*max_pending"):
            engine.push_many(names, torch.randn(5, 3))
        assert engine.pending == 0
        engine.push_many(names[:4], torch.randn(4, 3))


def test_ten_thousand_sessions_opened_and_abandoned_leave_no_trace():
    clock = FakeClock()
    with Engine(nn.GRU(2, 2, batch_first=True), max_sessions=64, max_stored=500, ttl=1, clock=clock) as engine:
        for _ in range(20):
            names = [engine.open() for _ in range(500)]
            engine.push_many(names[:10], torch.randn(10, 2))
            clock.now += 1.5
        assert engine.hot <= 64
        assert len(engine.sessions()) <= 500


# Sessions copied, saved, reset.


def test_a_fork_goes_its_own_way(address):
    model, x, y = Deep(), torch.randn(5, 3), torch.randn(5, 3)
    with Engine(model, address) as engine:
        a = engine.open()
        engine.push(a, x[:3])
        b = engine.fork(a)
        assert engine.info(b).seq == 1
        ends = engine.push(a, x[3:], 2), engine.push(b, y[3:], 2)
        with pytest.raises(SessionExists, match="already"):
            engine.fork(a, b)
        c = engine.fork(engine.open())
        torch.testing.assert_close(engine.push(c, x), whole(model, x), **CLOSE)
    torch.testing.assert_close(ends[0], whole(model, x)[3:], **CLOSE)
    torch.testing.assert_close(ends[1], whole(model, torch.cat([x[:3], y[3:]]))[3:], **CLOSE)


def test_an_exported_session_goes_on_elsewhere(address, tmp_path):
    model, x = Deep(), torch.randn(6, 3)
    with Engine(model, address) as engine:
        engine.open("a")
        engine.push("a", x[:2])
        engine.push("a", x[2])
        data = engine.export("a")
        engine.push("a", torch.randn(3))
    (tmp_path / "a.safetensors").write_bytes(data)
    assert sorted(hs.load(tmp_path / "a.safetensors")) == ["encoder.lstm.c", "encoder.lstm.h", "gru.h"]
    with Engine(model) as engine:
        engine.import_("b", data)
        assert (engine.info("b").seq, engine.info("b").steps) == (2, 3)
        with pytest.raises(SequenceGap, match="its answer is no longer kept"):
            engine.push("b", x[2], 2)
        torch.testing.assert_close(engine.push("b", x[3:], 3), whole(model, x)[3:], **CLOSE)


def test_importing_takes_a_session_back_and_forgets_later_answers(address):
    x = torch.randn(3, 3)
    with Engine(Deep(), address) as engine:
        engine.open("a")
        engine.push("a", x[0])
        data = engine.export("a")
        old = engine.push("a", x[1])
        engine.import_("a", data)
        assert engine.info("a").seq == 1
        with pytest.raises(SequenceGap):
            engine.push("a", x[0], 1)
        torch.testing.assert_close(engine.push("a", x[1], 2), old, rtol=0, atol=0)


def test_an_exported_session_without_inputs_starts_anew(address):
    model, x = Deep(), torch.randn(3, 3)
    with Engine(model, address) as engine:
        data = engine.export(engine.open())
        engine.import_("b", data)
        torch.testing.assert_close(engine.push("b", x, 1), whole(model, x), **CLOSE)


def test_a_state_made_elsewhere_is_imported(address):
    model, x = Deep(), torch.randn(6, 3)
    with hs.Carry(model) as carry, torch.no_grad():
        model(x[None, :4])
        state = carry.state
    with Engine(model, address) as engine:
        engine.import_("a", state)
        torch.testing.assert_close(engine.push("a", x[4:]), whole(model, x)[4:], **CLOSE)
        with pytest.raises(SessionLost, match=r"does not say which model it belongs to"):
            engine.import_("b", to_bytes(state))
        engine.import_("b", to_bytes(state), any_model=True)
        torch.testing.assert_close(engine.push("b", x[4:]), whole(model, x)[4:], **CLOSE)
        with pytest.raises(StateMismatch, match=r"but this model's are one row of Format\("):
            engine.import_("c", hs.State({"h": torch.zeros(1, 1, 4)}, 1))


def test_reset_starts_anew_and_numbers_go_on(address):
    model, x = Deep(), torch.randn(4, 3)
    with Engine(model, address) as engine:
        engine.open("a")
        first = engine.push("a", torch.randn(3, 3), 1)
        engine.reset("a")
        torch.testing.assert_close(engine.push("a", x, 2), whole(model, x), **CLOSE)
        torch.testing.assert_close(engine.push("a", x, 1), first, rtol=0, atol=0)


def test_names_are_listed_in_order_from_anywhere(address):
    with Engine(Deep(), address) as engine:
        for name in ("b1", "a2", "a1", "c%_", "a3"):
            engine.open(name)
        assert engine.sessions() == ["a1", "a2", "a3", "b1", "c%_"]
        assert engine.sessions("a") == ["a1", "a2", "a3"]
        assert engine.sessions("a", after="a1", limit=1) == ["a2"]
        assert engine.sessions("c%") == ["c%_"]


def test_info_tells_how_far_a_session_has_come(address):
    clock = FakeClock()
    with Engine(Deep(), address, clock=clock) as engine:
        engine.open("a")
        assert engine.info("a") == Session("a", 0, 0, 1000.0, 1000.0, None, engine.fingerprint, hot=False)
        clock.now = 1005.0
        engine.push("a", torch.randn(3, 3))
        assert engine.info("a") == Session("a", 1, 3, 1000.0, 1005.0, None, engine.fingerprint, hot=True)


def test_a_session_of_that_name_is_not_begun_twice(address):
    with Engine(Deep(), address) as engine:
        engine.open("a")
        engine.push("a", torch.randn(3))
        with pytest.raises(SessionExists, match=r"a session 'a' already, which has come to input 1.*exist_ok=True"):
            engine.open("a")
        assert engine.open("a", exist_ok=True) == "a"
        assert engine.info("a").seq == 1


@pytest.mark.parametrize("name", ["", "x" * 513, 7, None])
def test_a_name_is_a_string_of_some_length(name):
    with Engine(Deep()) as engine, pytest.raises(BadInput, match=r"a name of 1 to 512 characters is needed"):
        engine.push(name, torch.randn(3))


@pytest.mark.parametrize("x", [torch.zeros(4), torch.zeros(0, 3), torch.zeros(1, 2, 3), torch.zeros(())])
def test_an_input_of_another_shape_is_refused_before_it_reaches_others(x):
    with Engine(Deep()) as engine:
        session = engine.open()
        with pytest.raises(BadInput, match=r"x has shape .*one step of this model has \(3,\).*no batch axis"):
            engine.push(session, x)


def test_what_is_no_tensor_is_refused():
    with Engine(Deep()) as engine, pytest.raises(BadInput, match="x is str and cannot be made a tensor"):
        engine.push(engine.open(), "abc")


def test_as_many_inputs_as_sessions():
    with Engine(Deep()) as engine:
        with pytest.raises(BadInput, match="1 sessions, 2 inputs"):
            engine.push_many([engine.open()], torch.zeros(2, 3))
        with pytest.raises(BadInput, match="errors is 'ignore'"):
            engine.push_many([], [], errors="ignore")
        assert engine.push_many([], []) == []


@pytest.mark.parametrize("name", ["max_batch", "max_sessions", "max_stored", "max_pending"])
def test_limits_are_at_least_one(name):
    with pytest.raises(BadInput, match=f"{name} is 0, but 1 or more"):
        Engine(Deep(), **{name: 0})


# Durability.


def test_a_store_outlives_its_engine(tmp_path):
    model, x = Deep(), torch.randn(9, 3)
    got = []
    for begin in range(0, 9, 3):
        with Engine(model, f"sqlite:///{tmp_path}/sessions.db") as engine:
            engine.open("a", exist_ok=True)
            got.append(engine.push("a", x[begin : begin + 3], begin // 3 + 1))
            torch.testing.assert_close(engine.push("a", x[:1], begin // 3 + 1), got[-1], rtol=0, atol=0)
    torch.testing.assert_close(torch.cat(got), whole(model, x), **CLOSE)


def test_an_input_is_durable_when_it_is_answered(tmp_path):
    with Engine(Deep(), f"sqlite:///{tmp_path}/sessions.db") as engine:
        engine.open("a")
        reader = sqlite3.connect(tmp_path / "sessions.db")
        for seq in range(1, 4):
            engine.push("a", torch.randn(3))
            assert reader.execute("SELECT seq, fingerprint FROM sessions").fetchall() == [(seq, engine.fingerprint)]
        assert reader.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        reader.close()


# Callers of all kinds, at once.


def test_many_threads_each_keep_their_own_state(address):
    model, xs = Deep(), torch.randn(12, 8, 3)
    got: list[list[Tensor]] = [[] for _ in xs]
    with Engine(model, address, max_sessions=5) as engine:

        def call(place: int) -> None:
            session = engine.open()
            for step in xs[place]:
                got[place].append(engine.push(session, step))

        threads = [threading.Thread(target=call, args=(place,)) for place in range(len(xs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for place, x in enumerate(xs):
        torch.testing.assert_close(torch.stack(got[place]), whole(model, x), **CLOSE)


def test_coroutines_are_gathered_into_ticks(address):
    model, xs = Deep(), torch.randn(30, 5, 3)

    async def call(engine: Engine, x: Tensor) -> Tensor:
        session = await engine.aopen()
        out = [await engine.apush(session, step) for step in x]
        assert (await engine.ainfo(session)).seq == 5
        await engine.aclose(session)
        return torch.stack(out)

    async def main(engine: Engine) -> list[Tensor]:
        return await asyncio.gather(*(call(engine, x) for x in xs))

    with Engine(model, address) as engine:
        got = asyncio.run(main(engine))
        assert engine.stats().batch > 5
        assert engine.sessions() == []
    for out, x in zip(got, xs, strict=True):
        torch.testing.assert_close(out, whole(model, x), **CLOSE)


def test_inputs_to_one_session_are_applied_in_the_order_they_came():
    model, x = Deep(), torch.randn(20, 3)

    async def main(engine: Engine) -> list[Tensor]:
        session = await engine.aopen()
        return await asyncio.gather(*(engine.apush(session, step) for step in x))

    with Engine(model) as engine:
        got = asyncio.run(main(engine))
    torch.testing.assert_close(torch.stack(got), whole(model, x), **CLOSE)


def test_every_method_has_its_twin():
    async def main(engine: Engine) -> None:
        a = await engine.aopen("a")
        await engine.apush(a, torch.randn(3))
        b = await engine.afork(a, "b")
        assert b == "b"
        await engine.areset(a)
        data = await engine.aexport("b")
        await engine.aimport_("c", data)
        assert await engine.asessions("c") == ["c"]
        with pytest.raises(SessionLost):
            await engine.apush("nobody", torch.randn(3))

    with Engine(Deep()) as engine:
        asyncio.run(main(engine))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=10)
@given(seed=st.integers(0, 10_000))
def test_cancelled_closed_and_expiring_sessions_never_share_a_slot(seed):
    """Callers that give up, close, fork and let expire at random, with fewer slots than sessions: states never mix."""
    model = Deep()
    oracle = copy.deepcopy(model)  # the model itself is the engine's while it runs
    clock = FakeClock()
    chance = random.Random(seed)

    async def call(engine: Engine, place: int) -> None:
        for turn in range(4):
            name = f"{place}-{turn}"
            await engine.aopen(name)
            seen: list[Tensor] = []
            for _ in range(chance.randint(1, 6)):
                x = torch.randn(chance.randint(1, 3), 3)
                task = asyncio.ensure_future(engine.apush(name, x, len(seen) + 1))
                if chance.random() < 0.3:
                    for _ in range(chance.randint(0, 60)):  # of the loop, while the engine works
                        await asyncio.sleep(0)
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
                    out = await engine.apush(name, x, len(seen) + 1)  # applied now or before, but once
                else:
                    out = await task
                seen.append(x)
                torch.testing.assert_close(out, whole(oracle, torch.cat(seen))[-len(x) :], **CLOSE)
            match chance.randint(0, 2):
                case 0:
                    await engine.aclose(name)
                case 1:
                    clock.now += 0.01
                case 2:
                    asyncio.ensure_future(engine.apush(name, torch.randn(3)))  # noqa: RUF006 - nobody waits

    async def main(engine: Engine) -> None:
        await asyncio.gather(*(call(engine, place) for place in range(8)))

    with Engine(model, max_sessions=3, max_batch=4, ttl=5, clock=clock) as engine:
        asyncio.run(main(engine))


def test_a_caller_whose_loop_is_gone_disturbs_nobody():
    with Engine(Deep()) as engine:
        session = engine.open()

        async def vanish() -> None:
            asyncio.ensure_future(engine.apush(session, torch.randn(3)))  # noqa: RUF006 - meant to be left alone
            await asyncio.sleep(0)

        asyncio.run(vanish())
        engine.push(session, torch.randn(3))
        assert engine.info(session).seq in (1, 2)


# The model comes back as it was.


def test_the_model_comes_back_unharmed():
    model = Deep()
    model.train()
    model.gru.eval()
    own = [(sorted(vars(m)), len(m._forward_hooks)) for m in model.modules()]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    engine = Engine(model)
    engine.push(engine.open(), torch.randn(3))
    engine.shutdown()
    engine.shutdown()
    assert [(sorted(vars(m)), len(m._forward_hooks)) for m in model.modules()] == own
    assert model.training
    assert model.encoder.training
    assert not model.gru.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    with pytest.raises(ServeError, match="the engine is closed"):
        engine.open()


def test_shutting_down_finishes_what_is_under_way(tmp_path):
    model, x = Deep(), torch.randn(40, 3)
    address = f"sqlite:///{tmp_path}/sessions.db"

    async def main(engine: Engine) -> list[Tensor]:
        await engine.aopen("a")
        pushes = [asyncio.ensure_future(engine.apush("a", step)) for step in x]
        await asyncio.sleep(0)
        await asyncio.to_thread(engine.close)
        return await asyncio.gather(*pushes)

    got = asyncio.run(main(Engine(model, address)))
    torch.testing.assert_close(torch.stack(got), whole(model, x), **CLOSE)
    with Engine(model, address) as engine:
        assert engine.info("a").seq == 40


def test_an_answer_that_takes_too_long_is_a_timeout():
    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru, self.gate = nn.GRU(3, 4, batch_first=True), None

        def forward(self, x: Tensor) -> Tensor:
            if self.gate is not None:
                self.gate.wait(5)
            return self.gru(x)[0]

    model = Slow()
    with Engine(model) as engine:
        session = engine.open()
        model.gate = threading.Event()
        with pytest.raises(TimeoutError, match=r"no answer within 0.05 s.*same seq"):
            engine.push(session, torch.randn(3), 1, timeout=0.05)
        model.gate.set()
        engine.push(session, torch.randn(3), 1)
        assert engine.info(session).seq == 1


def test_an_input_whose_turn_does_not_come_in_time_is_never_applied():
    class Held(Deep):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.entered = threading.Event(), threading.Event()
            self.gate.set()

        def forward(self, x: Tensor) -> Tensor:
            self.entered.set()
            self.gate.wait(10)
            return super().forward(x)

    model = Held()
    with Engine(model) as engine:
        session = engine.open()
        model.gate.clear()
        model.entered.clear()
        first = threading.Thread(target=engine.push, args=(session, torch.randn(3)))
        first.start()
        model.entered.wait(10)
        with pytest.raises(DeadlineExceeded, match=r"did not come within 0\.05 s, so it was not applied and"):
            engine.push(session, torch.randn(3), timeout=0.05)

        async def ask() -> None:
            with pytest.raises(DeadlineExceeded, match=r"did not come within 0\.05 s"):
                await engine.apush(session, torch.randn(3), timeout=0.05)

        asyncio.run(ask())
        model.gate.set()
        first.join()
        assert engine.info(session).seq == 1
        engine.push(session, torch.randn(3), 2, timeout=10)
        assert asyncio.run(engine.apush(session, torch.randn(3), 3, timeout=10)).shape == (2,)


def test_what_a_caller_does_to_its_answer_does_not_change_the_kept_one(address):
    with Engine(Deep(), address) as engine:
        session = engine.open()
        out = engine.push(session, torch.randn(3), 1)
        kept = out.clone()
        out.zero_()
        again = engine.push(session, torch.randn(3), 1)
        torch.testing.assert_close(again, kept, rtol=0, atol=0)
        again.zero_()
        torch.testing.assert_close(engine.push(session, torch.randn(3), 1), kept, rtol=0, atol=0)


@pytest.mark.cuda
def test_outputs_come_back_to_where_the_input_came_from():
    model, x = Deep().cuda(), torch.randn(4, 3)
    with Engine(model) as engine:
        session = engine.open()
        assert engine.push(session, x).device.type == "cpu"
        assert engine.push(session, x.cuda()).device.type == "cuda"


@pytest.mark.cuda
@pytest.mark.parametrize("store", ["memory:", "sqlite:///{}/sessions.db"])
@pytest.mark.parametrize("model", [Deep, lambda: Stepping(nn.LSTMCell(3, 4)), lambda: nn.LSTM(3, 4, num_layers=2)])
def test_a_model_on_a_gpu_is_served_as_on_the_processor(model, store, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # which rounds far more coarsely
    torch.manual_seed(0)
    model = model()
    slow, x = copy.deepcopy(model), torch.randn(6, 9, 3)
    results = []
    for served, address in ((slow, "memory:"), (model.cuda(), store.format(tmp_path))):
        device = next(served.parameters()).device
        with Engine(served, address, max_sessions=4, max_batch=4) as engine:  # states are spilled and come back
            names = [engine.open(str(n)) for n in range(len(x))]
            got = [engine.push_many(names, x[:, 0].to(device)), engine.push_many(names, x[:, 1:3].to(device))]
            assert all(out.device == device for out in got)
            ragged = engine.push_many(names, [row[3 : 4 + place % 2].to(device) for place, row in enumerate(x)])
            rest = engine.push_many(names, [row[4 + place % 2 :] for place, row in enumerate(x)])
            assert torch.equal(engine.push(names[0], x[0, 0], 4), rest[0])
            pieces = [
                torch.cat([one.cpu().reshape(-1, one.shape[-1]) for one in out]) for out in zip(*got, strict=True)
            ]
            results.append(
                [
                    torch.cat([first, second.cpu(), third.cpu()])
                    for first, second, third in zip(pieces, ragged, rest, strict=True)
                ]
            )
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


@pytest.mark.cuda
def test_a_session_moves_between_a_gpu_and_the_processor(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)
    model, x = Deep(), torch.randn(6, 3)
    wanted = whole(model, x)
    with Engine(copy.deepcopy(model).cuda()) as there, Engine(model) as here:
        there.open("a")
        first = there.push("a", x[:2].cuda())
        here.import_("a", there.export("a"), any_model=True)
        second = here.push("a", x[2:4], 2)
        there.import_("a", here.export("a"), any_model=True)
        third = there.push("a", x[4:], 3)
    torch.testing.assert_close(torch.cat([first.cpu(), second, third]), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.cuda
def test_nan_and_errors_on_a_gpu_fail_the_guilty_alone():
    x = torch.randn(4, 3)
    x[1], x[2] = 1000.0, -1000.0
    with Engine(Touchy().cuda()) as engine:
        names = [engine.open() for _ in x]
        got = engine.push_many(names, x.cuda(), errors="return")
        assert [isinstance(one, ModelFailed) for one in got] == [False, True, True, False]
        assert [engine.info(name).seq for name in names] == [1, 0, 0, 1]
