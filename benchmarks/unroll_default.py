"""The default engine as one gets it: `hs.unroll(cell, x)` in a plain training loop, from its first call on.

python benchmarks/unroll_default.py
python benchmarks/unroll_default.py --shapes 32x100x128 --kinds gru

Each cell runs in a process of its own. A call is forward and backward, in processor time on one thread; those of the
default take turns with the same cell step by step, by `engine="fast"`, and with torch's layer of the same kind. Then
come batches of other sizes, each once, and what `hs.explain` says that was decided.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

import hiddenstate as hs
from timing import machine
from unroll_rivals import KINDS

CALLS = (1, 3, 10, 30, 100)
SIZES = (31, 17, 5, 48, 1, 64, 23, 9)


def timed(run: Callable[[], Tensor]) -> float:
    """Seconds of the processor that one call takes, forward and backward."""
    start = time.process_time()
    run().sum().backward()
    return time.process_time() - start


def one(kind: str, shape: str, most: int) -> None:
    """Print what became of one cell in so many calls."""
    counted = [call for call in CALLS if call <= most]
    batch, steps, size = map(int, shape.split("x"))
    torch.manual_seed(0)
    ours, plain, fast = (KINDS[kind][2](size) for _ in range(3))
    layer, x = KINDS[kind][0](size, size, batch_first=True), torch.randn(batch, steps, size)
    calls: dict[str, Callable[[], Tensor]] = {
        "default": lambda: hs.unroll(ours, x)[0],
        "loop": lambda: hs.unroll(plain, x, engine="loop")[0],
        "layer": lambda: layer(x)[0],
    }
    took: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(most):
        for name, run in calls.items():
            took[name].append(timed(run))
    hs.unroll(fast, x, engine="fast")[0].sum().backward()
    best = statistics.median(timed(lambda: hs.unroll(fast, x, engine="fast")[0]) for _ in range(20))
    usual = statistics.median(took["layer"])
    slowest = max(range(len(took["default"])), key=took["default"].__getitem__)
    print(f"{shape} {kind}: ratios to torch's layer, {1e3 * usual:.1f} ms")
    print(f"  loop x {statistics.median(took['loop']) / usual:.2f}, engine='fast' x {best / usual:.2f}")
    print("  default at call " + ", ".join(f"{call}: x {took['default'][call - 1] / usual:.2f}" for call in counted))
    print(f"  made at call {slowest + 1}, which took {took['default'][slowest]:.2f} s")
    others = []
    for rows in SIZES:
        other = torch.randn(rows, steps, size)
        mine = timed(lambda other=other: hs.unroll(ours, other)[0])
        theirs = timed(lambda other=other: hs.unroll(plain, other, engine="loop")[0])
        others.append(f"{rows}: x {mine / theirs:.2f}")
    print("  batches of other sizes, each once, ratios to the loop: " + ", ".join(others))
    print(f"  auto: {hs.explain(ours, x).auto}", flush=True)


def main() -> None:
    """Run each cell in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["32x100x128", "1x1000x256", "64x256x512"])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS))
    parser.add_argument("--calls", type=int, default=max(CALLS))
    parser.add_argument("--one", nargs=2, help="this kind and shape alone, in this process")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.one:
        one(*options.one, options.calls)
        return
    print(machine(), flush=True)
    for shape in options.shapes:
        for kind in options.kinds:
            subprocess.run([sys.executable, __file__, "--calls", str(options.calls), "--one", kind, shape], check=True)


if __name__ == "__main__":
    main()
