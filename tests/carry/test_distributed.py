"""Models within the wrappers of torch.distributed are carried and recorded; with DDP each process has its own rows."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from hiddenstate.carry import Carry
from hiddenstate.recording import record
from tests.support.models import Deep


def work(rank: int, store: str, results) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        torch.manual_seed(0)
        model = DistributedDataParallel(Deep().double())
        x = torch.randn(4, 8, 3, dtype=torch.float64)
        rows = x[2 * rank : 2 * rank + 2]
        with Carry(model) as carry:
            for piece in rows.split(4, dim=1):
                model(piece).square().mean().backward()
            state = {name: part.tolist() for name, part in carry.state.items()}
        results.put((rank, state, [p.grad.tolist() for p in model.parameters()]))
        dist.barrier()
    finally:
        dist.destroy_process_group()
    results.close()
    results.join_thread()
    # Not by the interpreter's own end: a thread of gloo that is still on its way aborts the process there.
    os._exit(0)


@pytest.mark.slow
def test_each_rank_carries_its_own_rows_and_gradients_are_shared(tmp_path):
    context = mp.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=work, args=(rank, str(tmp_path / "store"), results)) for rank in range(2)]
    for process in processes:
        process.start()
    found = dict((rank, (state, grads)) for rank, state, grads in (results.get(timeout=120) for _ in processes))
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    torch.manual_seed(0)
    model = Deep().double()
    x = torch.randn(4, 8, 3, dtype=torch.float64)
    with Carry(model) as carry:
        for piece in x.split(4, dim=1):
            model(piece).square().mean().backward()
        expected = carry.state
    for rank in range(2):
        state, grads = found[rank]
        for name, part in expected.select([2 * rank, 2 * rank + 1]).items():
            torch.testing.assert_close(torch.tensor(state[name], dtype=torch.float64), part)
        for parameter, grad in zip(model.parameters(), grads, strict=True):
            torch.testing.assert_close(torch.tensor(grad, dtype=torch.float64), parameter.grad)


@pytest.fixture
def group(tmp_path):
    """A process group of one."""
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded(model, device):
    mesh = init_device_mesh(device, (1,))
    fully_shard(model.gru, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def checkpointing(model, device):
    model.gru = checkpoint_wrapper(model.gru)
    return model


WRAPPERS = {
    "DistributedDataParallel": lambda model, device: DistributedDataParallel(model),
    "fully_shard": sharded,
    "checkpoint_wrapper": checkpointing,
    "FullyShardedDataParallel": lambda model, device: FullyShardedDataParallel(model, use_orig_params=True),
}


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")  # in a group of one
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # about views that a fused layer returns
@pytest.mark.parametrize("wrap", WRAPPERS)
def test_a_wrapped_model_is_heard_under_the_names_of_the_plain_one(wrap, group):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if wrap == "FullyShardedDataParallel" and device == "cpu":
        pytest.skip("FullyShardedDataParallel wants a GPU")
    plain = Deep().to(device)
    x = torch.randn(2, 8, 3, device=device)
    whole = plain(x)
    model = WRAPPERS[wrap](plain, device)
    with Carry(model) as carry, record(model) as rec:
        pieces = torch.cat([model(x[:, :3]), model(x[:, 3:])], dim=1)
        pieces.sum().backward()
        assert list(carry.state) == ["encoder.lstm.h", "encoder.lstm.c", "gru.h"]
    torch.testing.assert_close(pieces, whole)
    assert [run.h.shape[1] for run in rec.runs("gru")] == [3, 5]
