"""Under DistributedDataParallel each process carries its own rows."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

from hiddenstate.carry import Carry
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
    finally:
        dist.destroy_process_group()


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
