"""However inputs come, one by one, in a row or many at once: each is answered as if it had come alone."""

import asyncio
import copy
import uuid
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hiddenstate.errors import HiddenStateError, ModelFailed, SequenceGap
from hiddenstate.serve import Engine
from hiddenstate.serve.session_operations import outcomes
from tests.support.models import Deep, TimeFirst

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


class Touchy(nn.Module):
    """Raises for inputs over 100, gives NaN for those below -100."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        if (x > 100).any():
            raise RuntimeError("too large for me")
        return self.lstm(torch.where(x < -100, torch.nan, x))[0]


@dataclass(frozen=True)
class Asked:
    """One input of a session: how many steps, with what in it, under which number."""

    session: int
    steps: int  # 0: one bare step
    mood: str
    number: str

    def x(self, place: int) -> Tensor:
        x = torch.randn(max(1, self.steps), 3, generator=torch.Generator().manual_seed(place))
        if self.mood != "well":
            x[-1, 0] = 1000.0 if self.mood == "raises" else -1000.0
        return x if self.steps else x[0]


ASKED = st.builds(
    Asked,
    session=st.integers(0, 2),
    steps=st.sampled_from([0, 1, 1, 1, 2, 3]),
    mood=st.sampled_from(["well"] * 8 + ["raises", "nan"]),
    number=st.sampled_from(["none"] * 4 + ["next"] * 4 + ["again", "gap"]),
)


def numbered(asked: list[Asked], applied: list[bool]) -> list[int | None]:
    """The number of each, as a caller would count that knows which ones will be applied."""
    at = [0, 0, 0]
    numbers: list[int | None] = []
    for one, well in zip(asked, applied, strict=True):
        following = at[one.session] + 1
        numbers.append(
            {"none": None, "next": following, "again": max(1, following - 1), "gap": following + 3}[one.number]
        )
        at[one.session] += well
    return numbers


def one_by_one(engine: Engine, names: list[str], asked: list[Asked]) -> tuple[list[int | None], list[object]]:
    """What each input is answered when the next one comes only then."""
    numbers: list[int | None] = []
    results: list[object] = []
    applied: list[bool] = []
    for place, one in enumerate(asked):
        number = numbered(asked[: place + 1], [*applied, False])[-1]
        before = engine.info(names[one.session]).seq
        try:
            results.append(engine.push(names[one.session], one.x(place), number))
        except HiddenStateError as error:
            results.append(error)
        numbers.append(number)
        applied.append(engine.info(names[one.session]).seq > before)
    return numbers, results


def assert_alike(got: list[object], wanted: list[object]) -> None:
    for mine, theirs in zip(got, wanted, strict=True):
        if isinstance(theirs, Exception):
            assert type(mine) is type(theirs)
        else:
            torch.testing.assert_close(mine, theirs, **CLOSE)


@pytest.mark.sample(1)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(asked=st.lists(ASKED, min_size=1, max_size=24), batch=st.integers(1, 4))
def test_inputs_that_come_at_once_are_answered_as_if_one_by_one(address, asked, batch):
    torch.manual_seed(0)
    model = Touchy()
    with Engine(copy.deepcopy(model)) as slow:
        numbers, wanted = one_by_one(slow, [slow.open(str(n)) for n in range(3)], asked)
        ends = [slow.info(str(n)) for n in range(3)]

    async def at_once(engine: Engine, names: list[str]) -> list[object]:
        each = enumerate(zip(asked, numbers, strict=True))
        pushes = [engine.apush(names[one.session], one.x(place), number) for place, (one, number) in each]
        return await asyncio.gather(*pushes, return_exceptions=True)

    with Engine(model, address, max_batch=batch) as engine:
        names = [engine.open(uuid.uuid4().hex) for _ in range(3)]
        got = asyncio.run(at_once(engine, names))
        assert [(engine.info(n).seq, engine.info(n).steps) for n in names] == [(end.seq, end.steps) for end in ends]
    assert_alike(got, wanted)


@pytest.mark.sample(1)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25, deadline=None)
@given(moods=st.lists(st.sampled_from(["well"] * 6 + ["raises", "nan"]), min_size=2, max_size=8), data=st.data())
def test_many_at_once_are_answered_as_if_one_by_one(address, moods, data):
    """Also where some fail, some come twice, some have other numbers than come next, and some sessions are unknown."""
    torch.manual_seed(0)
    model, count = Touchy(), len(moods)
    rows = torch.stack([Asked(0, 0, mood, "none").x(place) for place, mood in enumerate(moods)])
    seqs = data.draw(st.none() | st.lists(st.sampled_from([None, None, 2, 2, 1, 9]), min_size=count, max_size=count))
    who = data.draw(st.permutations(range(count)) | st.lists(st.integers(0, count), min_size=count, max_size=count))
    results: list[list[object]] = []
    for store, at_once in (("memory:", False), (address, True)):
        with Engine(copy.deepcopy(model), store, max_batch=data.draw(st.sampled_from([2, 5, 100]))) as engine:
            names = [engine.open(uuid.uuid4().hex) for _ in range(count)]
            engine.push_many(names, torch.ones(count, 3))
            asked = [*names, "nobody"]
            sessions, numbers = [asked[n] for n in who], seqs or [None] * count
            if at_once:
                got = engine.push_many(sessions, rows, seqs=seqs, errors="return")
            else:
                got = []
                for session, x, seq in zip(sessions, rows, numbers, strict=True):
                    got += engine.push_many([session], x[None], seqs=[seq], errors="return")
            results.append([*got, *(engine.push(name, torch.ones(3)) for name in names)])
    assert_alike(results[1], results[0])


def test_inputs_in_a_row_are_one_call_of_the_model():
    calls: list[tuple[int, ...]] = []

    class Counted(Deep):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(tuple(x.shape[:2]))
            return super().forward(x)

    async def stream(engine: Engine, names: list[str]) -> None:
        await asyncio.gather(*(engine.apush(name, torch.randn(3)) for _ in range(8) for name in names))

    with Engine(Counted()) as engine:
        names = [engine.open() for _ in range(3)]
        engine.push_many(names, torch.randn(3, 3))
        calls.clear()
        asyncio.run(stream(engine, names))
        assert calls == [(3, 8)]
        assert {engine.info(name).seq for name in names} == {9}


def test_an_output_of_the_last_step_alone_is_never_run_in_a_row():
    async def stream(engine: Engine, name: str) -> list[tuple[Tensor, Tensor]]:
        return await asyncio.gather(*(engine.apush(name, step) for step in x))

    model, x = TimeFirst(), torch.randn(6, 3)
    wanted = []
    with torch.no_grad():
        for end in range(1, 7):
            out, h = model(x[:end].unsqueeze(1))
            wanted.append((out[-1, 0], h[:, 0]))
    with Engine(model) as engine:
        got = asyncio.run(stream(engine, engine.open()))
    for (out, h), (out_wanted, h_wanted) in zip(got, wanted, strict=True):
        torch.testing.assert_close(out, out_wanted, **CLOSE)
        torch.testing.assert_close(h, h_wanted, **CLOSE)


def test_answers_to_inputs_in_a_row_are_kept_each_under_its_own_number(address):
    x = torch.randn(40, 3)

    async def stream(engine: Engine, name: str) -> list[Tensor]:
        return await asyncio.gather(*(engine.apush(name, step) for step in x))

    with Engine(Deep(), address, replay=3) as engine:
        session = engine.open()
        got = asyncio.run(stream(engine, session))
        for seq in (38, 39, 40):
            assert torch.equal(engine.push(session, torch.zeros(3), seq), got[seq - 1])
        with pytest.raises(SequenceGap, match="its answer is no longer kept: the last 3 are"):
            engine.push(session, torch.zeros(3), 37)


def test_an_input_in_a_row_whose_caller_gave_up_is_not_applied():
    x = torch.randn(5, 3)

    async def stream(engine: Engine, session: str) -> list[object]:
        tasks = [asyncio.ensure_future(engine.apush(session, step)) for step in x]
        await asyncio.sleep(0)
        tasks[2].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    model = Deep()
    oracle = copy.deepcopy(model)
    with Engine(model) as engine:
        got = asyncio.run(stream(engine, session := engine.open()))
        assert engine.info(session).seq == 4
    assert isinstance(got.pop(2), asyncio.CancelledError)
    with torch.no_grad():
        torch.testing.assert_close(torch.stack(got), oracle(x[None, [0, 1, 3, 4]])[0], **CLOSE)


def test_bare_bytes_are_inputs_too():
    model, x = Deep(), torch.randn(9, 3)
    oracle = copy.deepcopy(model)

    async def stream(engine: Engine, session: str) -> list[object]:
        frames = [memoryview(piece.contiguous().numpy()).cast("B") for piece in x.split([1, 1, 1, 1, 2, 3])]
        pushes = engine.submit_raw(session, [(frame, seq) for seq, frame in enumerate(frames, 1)])
        found = await outcomes(pushes)
        assert [push.seq for push in pushes] == [1, 2, 3, 4, 5, 6]
        return [torch.frombuffer(bytearray(engine.output_raw(one)), dtype=torch.float32).view(-1, 2) for one in found]

    for replay in (8, 0):
        with Engine(model, replay=replay) as engine, torch.no_grad():
            got = asyncio.run(stream(engine, engine.open()))
            torch.testing.assert_close(torch.cat(got), oracle(x[None])[0], **CLOSE)


def test_a_model_that_gives_the_same_tensor_again_and_again_does_no_harm(address):
    class Reusing(nn.Module):
        hidden_size = 3

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(3))
            self.buffers_of = {}

        def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
            new = x @ self.weight + (0 if state is None else state)
            kept = self.buffers_of.setdefault(tuple(new.shape), torch.empty_like(new))
            return kept.copy_(new), kept

    with Engine(Reusing(), address, example=torch.zeros(2, 3), max_sessions=2) as engine:
        names = [engine.open(uuid.uuid4().hex) for _ in range(6)]
        answers = []
        for turn in range(1, 4):
            for pair in (names[:2], names[2:4], names[4:]):
                answers.append((pair[0], turn, engine.push(pair[0], torch.full((3,), float(turn)))))
                engine.push(pair[1], torch.full((3,), 100.0))
        for name, turn, answer in answers:
            assert answer.tolist() == [turn * (turn + 1) / 2] * 3
            assert torch.equal(engine.push(name, torch.zeros(3), turn), answer)


def test_an_output_that_is_the_state_itself_may_be_changed_by_its_caller(address):
    """The model hands out its hidden state: what a caller does to it must not reach the session."""

    class Open(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = nn.GRU(3, 4, batch_first=True)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            out, h = self.gru(x)
            return out, h

    model, x = Open(), torch.randn(4, 3, 3)
    with torch.no_grad():
        wanted = model(x)[0]
    with Engine(model, address, max_sessions=4) as engine:
        names = [engine.open(uuid.uuid4().hex) for _ in range(4)]
        for step in range(3):
            out, h = engine.push_many(names, x[:, step])
            torch.testing.assert_close(out, wanted[:, step], **CLOSE)
            h.fill_(9.0)
            out.fill_(9.0)
            if step == 1:  # the states at hand make way for others
                for name in [engine.open(uuid.uuid4().hex) for _ in range(4)]:
                    engine.push(name, torch.zeros(3))


def test_a_model_call_fails_in_a_row_for_the_guilty_alone():
    async def stream(engine: Engine, session: str) -> list[object]:
        pushes = [engine.apush(session, step, seq) for seq, step in enumerate(x, 1)]
        return await asyncio.gather(*pushes, return_exceptions=True)

    x = torch.randn(6, 3)
    x[3] = 1000.0
    with Engine(Touchy()) as engine:
        got = asyncio.run(stream(engine, session := engine.open()))
        assert engine.info(session).seq == 3
    assert isinstance(got[3], ModelFailed)
    assert [type(one) for one in got[4:]] == [SequenceGap, SequenceGap]


class Endless(nn.Module):
    """Gives infinity for inputs over 100, its negative for those below -100, and NaN for NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(3, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(x.clamp(-1, 1))[0] + torch.where(x.abs() > 100, x * torch.inf, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_infinity_of_either_sign_is_an_answer_and_nan_is_none(dtype):
    with Engine(Endless().to(dtype)) as engine:
        names = [engine.open() for _ in range(4)]
        x = torch.tensor([[101.0, -101.0, 0.0], [-101.0] * 3, [0.0, torch.nan, 0.0], [0.0] * 3], dtype=dtype)
        above, below, none, usual = engine.push_many(names, x, errors="return")
        assert above.tolist()[:2] == [torch.inf, -torch.inf]
        assert below.tolist() == [-torch.inf] * 3
        assert usual.isfinite().all()
        assert isinstance(none, ModelFailed)
        assert [engine.info(name).seq for name in names] == [1, 1, 0, 1]
