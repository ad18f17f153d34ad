"""A store that is set back to an older copy: what a worker remembers never wins, and callers are told."""

import copy
import shutil
import sqlite3

import pytest
import torch

from hiddenstate.errors import SequenceGap
from hiddenstate.serve import Engine
from tests.support import redis
from tests.support.models import Deep
from tests.support.redis import RedisServer

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


@pytest.fixture
def server(tmp_path):
    if redis.SERVER is None:
        pytest.skip("there is no redis-server on this machine")
    (tmp_path / "live").mkdir()
    made = RedisServer(tmp_path / "live")
    yield made
    made.stop()


class Copies:
    """Copies of a Redis server's files."""

    def __init__(self, server: RedisServer, folder) -> None:
        self._server, self._live, self._copy = server, folder / "live", folder / "copy"

    def take(self) -> None:
        shutil.copytree(self._live, self._copy)

    def put_back(self) -> None:
        self._server.stop()
        shutil.rmtree(self._live)
        shutil.copytree(self._copy, self._live)
        self._server.start()


def models(count: int) -> list[Deep]:
    torch.manual_seed(0)
    first = Deep().eval()
    return [first, *(copy.deepcopy(first) for _ in range(count - 1))]


def whole(oracle: Deep, *steps: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return oracle(torch.stack(steps)[None])[0]


@pytest.mark.redis
def test_a_state_in_memory_never_wins_over_a_store_that_was_set_back_and_went_on(server, tmp_path):
    """The other worker brings the session to the same number of changes: numbers alone would be the same again."""
    copies, (mine, theirs, oracle) = Copies(server, tmp_path), models(3)
    x, other = torch.randn(9, 3), torch.randn(2, 3)
    with Engine(mine, server.address()) as one, Engine(theirs, server.address()) as two:
        one.open("a")
        for step in x[:3]:
            one.push("a", step)
        copies.take()
        for step in x[3:5]:
            one.push("a", step)
        copies.put_back()
        for step in other:
            two.push("a", step)
        with pytest.raises(
            SequenceGap, match=r"set back to an older copy: session 'a' had come to input 5, and is now"
        ):
            one.push("a", x[5])
        assert one.stats().set_back == 1
        got = one.push("a", x[6])
        torch.testing.assert_close(got, whole(oracle, *x[:3], *other, x[6])[-1], **CLOSE)
        assert two.info("a").seq == one.info("a").seq == 6


@pytest.mark.redis
@pytest.mark.parametrize("changes", [1, 4, 40])
def test_the_only_worker_notices_however_far_the_store_went_back(server, tmp_path, changes):
    copies, (model, oracle) = Copies(server, tmp_path), models(2)
    x = torch.randn(changes + 3, 3)
    with Engine(model, server.address()) as engine:
        engine.open("a")
        engine.push("a", x[0])
        copies.take()
        for step in x[1 : 1 + changes]:
            engine.push("a", step)
        copies.put_back()
        with pytest.raises(SequenceGap, match=rf"had come to input {1 + changes}, and is now at 1.*from 2 on") as told:
            engine.push("a", x[-2])
        assert told.value.seq == 1
        torch.testing.assert_close(engine.push("a", x[-1]), whole(oracle, x[0], x[-1])[-1], **CLOSE)


@pytest.mark.redis
def test_a_numbered_input_says_itself_where_it_belongs(server, tmp_path):
    copies, (model, oracle) = Copies(server, tmp_path), models(2)
    x = torch.randn(4, 3)
    with Engine(model, server.address()) as engine:
        engine.open("a")
        engine.push("a", x[0], 1)
        copies.take()
        engine.push("a", x[1], 2)
        engine.push("a", x[2], 3)
        copies.put_back()
        with pytest.raises(SequenceGap, match="set back to an older copy") as told:
            engine.push("a", x[3], 4)
        got = [engine.push("a", x[seq - 1], seq) for seq in range(told.value.seq + 1, 5)]
    torch.testing.assert_close(torch.stack(got), whole(oracle, *x)[1:], **CLOSE)


@pytest.mark.redis
def test_what_other_workers_do_is_not_taken_for_a_store_that_was_set_back(server):
    (mine, theirs), x = models(2), torch.randn(3)
    with Engine(mine, server.address()) as one, Engine(theirs, server.address()) as two:
        one.open("a")
        one.push("a", x)
        for inputs in (1, 3, 14, 15, 16, 17, 40):
            for _ in range(inputs):
                two.push("a", x)
            two.reset("a")
            one.push("a", x)
        state = two.export("a")
        two.close("a")
        two.open("a")
        one.push("a", x)
        two.import_("a", state)
        one.push("a", x)
        assert one.stats().set_back == two.stats().set_back == 0


def test_a_file_that_is_restored_while_it_is_served(tmp_path):
    (model, oracle), x = models(2), torch.randn(5, 3)
    path = tmp_path / "sessions.db"
    with Engine(model, f"sqlite:///{path}") as engine:
        engine.open("a")
        engine.push("a", x[0])
        live, kept = sqlite3.connect(path), sqlite3.connect(tmp_path / "copy.db")
        live.backup(kept)
        engine.push("a", x[1])
        engine.push("a", x[2])
        kept.backup(live)
        live.close()
        kept.close()
        with pytest.raises(SequenceGap, match="session 'a' had come to input 3, and is now at 1"):
            engine.push("a", x[3])
        torch.testing.assert_close(engine.push("a", x[4]), whole(oracle, x[0], x[4])[-1], **CLOSE)
