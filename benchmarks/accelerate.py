"""What does `hs.accelerate` bring? Torch's fused layers as they are, and by the kernel that was decided for.

python benchmarks/accelerate.py                                                # a processor, one thread
python benchmarks/accelerate.py --device cuda --dtypes float32 bfloat16 float16 --layers 1 2 4
python benchmarks/accelerate.py --device cuda --packed --shapes 64x256x512
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import hiddenstate as hs
from hiddenstate.cells import unheard
from timing import compare, machine

SHAPES = {  # rows x steps x units
    "cpu": ("32x100x128", "64x256x512", "1x1000x256"),
    "cuda": ("32x100x128", "64x256x512", "16x1024x768", "1x1024x256", "128x128x1024"),
}
KINDS = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}


def rivals(layer: nn.RNNBase, x: Tensor | PackedSequence, *, backward: bool) -> dict[str, Callable[[], None]]:
    """Return the two ways of one call."""
    weights = list(layer.parameters())

    def call() -> None:
        if not backward:
            with torch.no_grad():
                layer(x)
            return
        out = layer(x)[0]
        out = out.data if isinstance(out, PackedSequence) else out
        torch.autograd.grad(out, weights, torch.ones_like(out))

    def plain() -> None:
        with unheard():
            call()

    for _ in range(4):
        call()  # decides
    return {"torch": plain, "accelerated": call}


def inputs(rows: int, steps: int, units: int, *, packed: bool, **kind: object) -> Tensor | PackedSequence:
    """Return what a layer is called with; packed, rows are between half as long and whole."""
    x = torch.randn(rows, steps, units).to(**kind)
    lengths = torch.linspace(steps, steps // 2, rows).long()
    return pack_padded_sequence(x, lengths, batch_first=True) if packed else x


def main() -> None:
    """Print a line for each shape, kind, depth, direction and dtype."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--shapes", nargs="+")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--dtypes", nargs="+", default=["float32"])
    parser.add_argument("--layers", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--directions", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--packed", action="store_true")
    parser.add_argument("--explain", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(machine())
    wide = []
    shapes = [tuple(map(int, shape.split("x"))) for shape in options.shapes or SHAPES[options.device]]
    ways = product(shapes, options.kinds, options.layers, options.directions, options.dtypes)
    for (rows, steps, units), name, depth, directions, dtype in ways:
        torch.manual_seed(0)
        kind = {"device": options.device, "dtype": getattr(torch, dtype)}
        both = directions == 2
        layer = KINDS[name](units, units, num_layers=depth, bidirectional=both, batch_first=True).to(**kind)
        if options.device == "cuda":
            layer.flatten_parameters()
        x = inputs(rows, steps, units, packed=options.packed, **kind)
        found = []
        with hs.accelerate(layer) as faster:
            for backward in (False, True):
                found.append(compare(rivals(layer, x, backward=backward), rounds=options.rounds))
            said = faster.explain()
        if units >= 256:
            wide.append(found[1].ratios["accelerated"])
        print(
            f"{name:4} B{rows} T{steps} H{units} x{depth}{' both' if both else ''} {dtype}: "
            + ", ".join(
                f"{way} {1e3 * one.seconds['torch']:.2f} ms x {one.ratios['accelerated']:.2f} "
                f"({one.spread['accelerated'][0]:.2f} to {one.spread['accelerated'][1]:.2f})"
                for way, one in zip(("forward", "with backward"), found, strict=True)
            ),
            flush=True,
        )
        if options.explain:
            print(said, flush=True)
    if wide:
        mean = math.exp(sum(map(math.log, wide)) / len(wide))
        print(f"units from 256 on, with backward: geometric mean x {mean:.2f}, worst x {max(wide):.2f}")


if __name__ == "__main__":
    main()
