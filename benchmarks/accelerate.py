"""What does `hs.accelerate` bring? Torch's fused layers as they are, and by the kernel that was decided for."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import nn

import hiddenstate as hs
from hiddenstate.cells import unheard
from timing import compare

SHAPES = ((32, 100, 128), (64, 256, 512), (1, 1000, 256))  # rows, steps, units
KINDS = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}


def rivals(layer: nn.RNNBase, x: torch.Tensor, *, backward: bool) -> dict[str, Callable[[], None]]:
    """Return the two ways of one call."""
    weights = list(layer.parameters())

    def call() -> None:
        if not backward:
            with torch.no_grad():
                layer(x)
            return
        out = layer(x)[0]
        torch.autograd.grad(out, weights, torch.ones_like(out))

    def plain() -> None:
        with unheard():
            call()

    call()  # decides
    return {"torch": plain, "accelerated": call}


def main(threads: int, rounds: int) -> None:
    """Print a table for each shape, kind, depth and direction."""
    torch.set_num_threads(threads)
    for rows, steps, units in SHAPES:
        for name, kind in KINDS.items():
            for depth, both in ((1, False), (2, True)):
                if units == 512 and depth == 2:
                    continue  # minutes
                torch.manual_seed(0)
                layer = kind(units, units, num_layers=depth, bidirectional=both, batch_first=True)
                with hs.accelerate(layer) as faster:
                    for backward in (False, True):
                        ways = "forward and backward" if backward else "forward"
                        what = f"{name} B{rows} T{steps} H{units}, {depth} layers{', both directions' if both else ''}"
                        found = compare(
                            rivals(layer, torch.randn(rows, steps, units), backward=backward), rounds=rounds
                        )
                        print(f"\n{what}, {ways}\n{found}")
                    print(faster.explain())


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--rounds", type=int, default=9)
    main(**vars(options.parse_args()))
