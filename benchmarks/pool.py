"""What lengths cost a pool: at most 1.3 times the same pool without them; and what attention holds in memory."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from time import perf_counter, process_time

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hiddenstate.pool import Attention, Last, LogSumExp, Max, Mean, MultiHead
from timing import compare, machine

SIZES = ((32, 100, 64), (64, 200, 256))  # (batch, time, unit)
BUDGET = 1.3


def main() -> None:
    """Print one line for each pool and size, then the largest tensor that attention makes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--device", default="cpu")
    settings = parser.parse_args()
    torch.set_num_threads(1)
    print(machine())
    print(f"lengths are drawn from a quarter of the steps to all of them; the budget is x {BUDGET}")
    for size in SIZES:
        print(f"\nstates {size}: with lengths against without")
        for name, pool in pools(size[2], settings.device).items():
            train, infer = (ratio(pool, size, settings, grad=grad) for grad in (True, False))
            mark = "" if train <= BUDGET else "  over budget"
            print(f"{name:<12} forward and backward x {train:5.2f}   forward alone x {infer:5.2f}{mark}")
    print()
    for name in ("Attention", "MultiHead"):
        print(f"{name:<12} makes no tensor of more than {largest(name, settings.device):.2f} times its input")


def pools(units: int, device: str) -> dict[str, nn.Module]:
    """Every pool that looks at all steps, and Last for comparison."""
    all_pools = [Last(), Mean(), Max(), LogSumExp(), Attention(units), MultiHead(units, 4)]
    return {type(pool).__name__: pool.to(device) for pool in all_pools}


def ratio(pool: nn.Module, size: tuple[int, int, int], settings: argparse.Namespace, *, grad: bool) -> float:
    """The cost with lengths, as a multiple of the cost without."""
    batch, time, _ = size
    h = torch.randn(size, device=settings.device, requires_grad=grad)
    lengths = torch.randint(time // 4, time + 1, (batch,), device=settings.device)
    lengths[0] = time
    rivals = {"without": run(pool, h, None, grad=grad), "with": run(pool, h, lengths, grad=grad)}
    # On a busy machine the time of the processor says more than the time of the clock; a GPU has only the latter.
    clock = process_time if settings.device == "cpu" else perf_counter
    return compare(rivals, rounds=settings.rounds, clock=clock).ratios["with"]


def run(pool: nn.Module, h: Tensor, lengths: Tensor | None, *, grad: bool) -> Callable[[], object]:
    """One call, with its backward where gradients are wanted."""

    def train() -> None:
        h.grad = None
        pool(h, lengths).sum().backward()

    def infer() -> None:
        with torch.no_grad():
            pool(h, lengths)

    return train if grad else infer


class Largest(TorchDispatchMode):
    """The most numbers that any operation makes at once."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run the operation and look at what it made."""
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, tuple | list) else [result]:
            if isinstance(made, Tensor):
                self.numbers = max(self.numbers, made.untyped_storage().nbytes() // made.element_size())
        return result


def largest(name: str, device: str) -> float:
    """The largest tensor of a forward and a backward, as a multiple of the input."""
    h = torch.randn(64, 200, 256, device=device, requires_grad=True)
    lengths = torch.randint(50, 201, (64,), device=device)
    with Largest() as seen:
        pools(256, device)[name](h, lengths).sum().backward()
    return seen.numbers / h.numel()


if __name__ == "__main__":
    main()
