"""Inputs made of what callers give: read once, refused with a reason, answered in the same form, gathered or alone."""

import asyncio

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hiddenstate.errors import BadInput, ModelFailed, Overloaded, SequenceGap, SessionLost
from hiddenstate.serve import Engine
from hiddenstate.serve.futures import ResultFuture
from hiddenstate.serve.pushes import PushFactory
from hiddenstate.serve.session_operations import OutputRow, Push, PushMany
from hiddenstate.serve.trial import prepare
from tests.support.models import Deep

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


@pytest.fixture
def pushes():
    model = prepare(nn.GRU(3, 4, batch_first=True), example=None, init="zeros")
    yield PushFactory(model)
    model.close()


@pytest.mark.parametrize(
    ("x", "steps", "single"),
    [
        (torch.ones(3), 1, True),
        (torch.ones(3, requires_grad=True), 1, True),
        (torch.ones(1, 3), 1, False),
        (torch.ones(5, 3), 5, False),
        (torch.ones(3, dtype=torch.int64), 1, True),
        (torch.ones(3, 5).t(), 5, False),
        ([1.0, 1.0, 1.0], 1, True),
    ],
)
def test_an_input_is_the_same_numbers_however_it_is_given(pushes, x, steps, single):
    push = pushes.one(ResultFuture(1), "a", x, 7)
    assert (push.session, push.steps, push.single_step, push.seq) == ("a", steps, single, 7)
    piece = push.piece(torch.float32, (3,))
    torch.testing.assert_close(piece, torch.ones(steps, 3))
    assert not piece.requires_grad


@pytest.mark.parametrize(
    ("x", "seq", "message"),
    [
        (torch.ones(2), None, r"x has shape \(2,\), but one step of this model has \(3,\)"),
        (torch.ones(0, 3), None, "one or more"),
        (torch.ones(3, dtype=torch.complex64), None, "a cast would lose what is in it"),
        (object(), None, "cannot be made a tensor"),
        (torch.ones(3), 0, "seq is 0, but inputs are numbered from 1 on"),
        (torch.ones(3), True, "seq is True, but inputs are numbered from 1 on"),
    ],
)
def test_what_is_no_input_is_refused_with_the_reason(pushes, x, seq, message):
    with pytest.raises(BadInput, match=message):
        pushes.one(ResultFuture(1), "a", x, seq)


def test_one_tensor_for_many_sessions_is_one_operation_and_a_list_is_many(pushes):
    rows, names = torch.randn(2, 3), ["a", "b"]
    (many,) = pushes.many(ResultFuture(2), names, rows, None)
    assert isinstance(many, PushMany)
    single = pushes.many(ResultFuture(2), names, list(rows), [None, 4])
    assert [type(push) for push in single] == [Push, Push]
    assert [push.seq for push in single] == [None, 4]
    for push, own in zip(many.as_pushes(), single, strict=True):
        torch.testing.assert_close(push.piece(torch.float32, (3,)), own.piece(torch.float32, (3,)))


def test_raw_bytes_have_as_many_steps_as_fit_in_them(pushes):
    x = torch.randn(2, 3)
    (push,) = pushes.raw(ResultFuture(1), "a", [(memoryview(x.numpy().tobytes()), 3)])
    assert (push.steps, push.seq) == (2, 3)
    torch.testing.assert_close(push.piece(torch.float32, (3,)), x)


def test_outputs_come_in_one_tensor_or_one_by_one_and_the_first_error_is_raised(pushes):
    y, xs = torch.randn(2, 4), torch.randn(2, 3)
    future = ResultFuture(2)
    future.put_rows(0, 2, [y])
    torch.testing.assert_close(pushes.outputs(future, xs, raises=True), y)
    mixed = ResultFuture(2)
    mixed.put(0, OutputRow([y], 1, None))
    mixed.put(1, ModelFailed("no"))
    with pytest.raises(ModelFailed, match="no"):
        pushes.outputs(mixed, xs, raises=True)
    first, second = pushes.outputs(mixed, xs, raises=False)
    torch.testing.assert_close(first, y[1])
    assert isinstance(second, ModelFailed)


def whole(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model.eval()(x.unsqueeze(0))[0]


def warm(engine: Engine) -> None:
    """Let the engine learn that its ticks are short, as event loops need to know."""
    engine.open("warm")
    for _ in range(40):
        engine.push("warm", torch.zeros(3))


@given(order=st.lists(st.sampled_from(["a", "b", "x:a", "y:a"]), min_size=1, max_size=24), numbered=st.booleans())
@settings(max_examples=30, deadline=None)
def test_inputs_of_one_turn_are_each_answered_as_if_alone(order, numbered):
    model, x = Deep(), torch.randn(24, 3)
    given_to: dict[str, list[int]] = {name: [] for name in order}
    with Engine(model, max_sessions=3) as engine:
        warm(engine)

        async def main() -> list[Tensor]:
            for name in given_to:
                await engine.aopen(name)
            pushes = []
            for place, name in enumerate(order):
                given_to[name].append(place)
                seq = len(given_to[name]) if numbered else None
                pushes.append(asyncio.ensure_future(engine.apush(name, x[place], seq)))
            return await asyncio.gather(*pushes)

        got = asyncio.run(main())
        ticks = engine.stats().ticks
        assert ticks < 41 + len(given_to) + len(order) + 1
        numbers = {name: engine.info(name).seq for name in given_to}
    for name, places in given_to.items():
        assert numbers[name] == len(places)
        torch.testing.assert_close(torch.stack([got[p] for p in places]), whole(model, x[places]), **CLOSE)


def test_many_coroutines_are_one_tick():
    with Engine(Deep()) as engine:
        warm(engine)
        names = [engine.open() for _ in range(50)]
        engine.push_many(names, torch.randn(50, 3))
        before = engine.stats()

        async def main() -> list[Tensor]:
            return await asyncio.gather(*(engine.apush(name, torch.randn(3)) for name in names))

        got = asyncio.run(main())
        after = engine.stats()
        assert (after.ticks - before.ticks, after.inputs - before.inputs) == (1, 50)
        assert sum(after.answering.counts) - sum(before.answering.counts) == 50
    # Each has its own memory: who keeps one answer does not keep all of them.
    assert len({y.untyped_storage().data_ptr() for y in got}) == 50
    assert all(y.untyped_storage().nbytes() == 2 * 4 for y in got)


def test_the_guilty_fail_alone_and_the_cancelled_are_not_applied():
    nan = torch.full((3,), torch.nan)
    with Engine(Deep()) as engine:
        warm(engine)
        for name in "abcd":
            engine.open(name)

        async def main() -> list[object]:
            inputs = {"a": torch.randn(3), "b": nan, "c": torch.randn(3), "missing": torch.randn(3)}
            tasks = [asyncio.ensure_future(engine.apush(name, x)) for name, x in inputs.items()]
            tasks.append(asyncio.ensure_future(engine.apush("d", torch.randn(3), 7)))
            await asyncio.sleep(0)
            tasks[2].cancel()
            return await asyncio.gather(*tasks, return_exceptions=True)

        a, b, c, missing, d = asyncio.run(main())
        assert isinstance(a, Tensor)
        kinds = (ModelFailed, asyncio.CancelledError, SessionLost, SequenceGap)
        assert [type(e) for e in (b, c, missing, d)] == list(kinds)
        assert [engine.info(name).seq for name in "abcd"] == [1, 0, 0, 0]


def test_where_there_is_no_room_for_all_there_is_for_some():
    with Engine(Deep(), max_pending=4) as engine:
        warm(engine)
        names = [engine.open() for _ in range(6)]

        async def main() -> list[object]:
            return await asyncio.gather(*(engine.apush(n, torch.randn(3)) for n in names), return_exceptions=True)

        got = asyncio.run(main())
    assert sum(isinstance(y, Tensor) for y in got) == 4
    assert sum(isinstance(y, Overloaded) for y in got) == 2


def test_outputs_with_several_tensors_are_nested_as_the_model_nests_them():
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = nn.GRU(3, 4, batch_first=True)

        def forward(self, x: Tensor) -> dict[str, object]:
            y, _ = self.gru(x)
            return {"y": y, "more": (y * 2, None)}

    model, x = Several(), torch.randn(2, 3)
    with Engine(model) as engine:
        warm(engine)
        engine.open("a")
        engine.open("b")

        async def main() -> list[dict[str, object]]:
            return await asyncio.gather(engine.apush("a", x[0]), engine.apush("b", x[1]))

        got = asyncio.run(main())
    with torch.no_grad():
        wanted = model(x[:, None])
    for row, one in enumerate(got):
        torch.testing.assert_close(one["y"], wanted["y"][row, 0], **CLOSE)
        torch.testing.assert_close(one["more"][0], wanted["more"][0][row, 0], **CLOSE)
        assert one["more"][1] is None


def test_what_a_loop_left_behind_when_it_ended_disturbs_nobody():
    with Engine(Deep()) as engine:
        warm(engine)
        engine.open("a")

        async def leave() -> None:
            asyncio.get_running_loop().call_soon(asyncio.get_running_loop().stop)
            await engine.apush("a", torch.randn(3))

        loop = asyncio.new_event_loop()
        task = loop.create_task(leave())
        with pytest.raises(RuntimeError, match="Event loop stopped before Future completed"):
            loop.run_until_complete(task)
        task.cancel()
        loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
        loop.close()

        async def main() -> Tensor:
            return await engine.apush("a", torch.randn(3))

        assert asyncio.run(main()).shape == (2,)
        assert engine.pending == 0
