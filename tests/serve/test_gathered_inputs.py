"""Inputs that coroutines give one by one: gathered, they are what each would have been alone."""

import asyncio

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hiddenstate.errors import ModelFailed, Overloaded, SequenceGap, SessionLost
from hiddenstate.serve import Engine
from tests.support.models import Deep

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


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
