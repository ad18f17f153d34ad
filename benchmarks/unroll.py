"""Ways to run a cell along time, against torch's own layer: forward, with backward, first call, memory.

python benchmarks/unroll.py                              # CPU, all shapes and rivals, one thread
python benchmarks/unroll.py --quick                      # without those that take long to compile or to run
python benchmarks/unroll.py --device cuda --dtype float32 bfloat16 float16
python benchmarks/unroll.py --shapes 32x100x128 64x256x512 --kinds lstm layernorm --rivals layer ours

Times are ratios to torch's layer of the same kind (for a LayerNorm-LSTM: nn.LSTM, which does less), in the same rounds.
First calls are forward and backward, in seconds. Memory is the most that one forward and backward call has on top of
what there was before: what is allocated on a GPU, and what is resident on a CPU.
"""

import argparse
import ctypes
import re
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from timing import Comparison, compare, machine
from unroll_rivals import KINDS, NAMES, SLOW, Rivals

SHAPES = {
    "cpu": ["32x100x128", "1x1000x256", "64x256x512"],
    "cuda": ["32x100x128", "1x1024x256", "64x256x512", "16x1024x768"],
}
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Give up what takes longer, as soon as it comes back to Python."""
    late, reason = [], f"took more than {seconds:.0f} s"

    def stop(*_: object) -> None:
        late.append(True)
        raise TimeoutError(reason)

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except Exception as error:
        if late:  # whatever became of it on its way out
            raise TimeoutError(reason) from error
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def resident(field: str) -> int:
    """KiB that are resident: VmRSS now, VmHWM at most so far."""
    found = re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())
    return int(found[1]) if found else 0


def peak(call: Callable[[], object], device: str) -> str:
    """MiB on top of what there was, at the peak of one call."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return f"{(torch.cuda.max_memory_allocated() - before) / 2**20:.0f}"
    try:
        ctypes.CDLL(None).malloc_trim(0)  # what was freed goes back, or this call would be seen to use it for nothing
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    except (OSError, AttributeError):
        return "-"
    before = resident("VmRSS")
    call()
    return f"{(resident('VmHWM') - before) / 2**10:.0f}"


def backward(call: Callable[[], Tensor]) -> Callable[[], None]:
    """A call with its backward pass."""
    return lambda: call().sum().backward()


class Group:
    """The rivals for one kind, shape and dtype, those that can run at all."""

    def __init__(self, kind: str, x: Tensor, options: argparse.Namespace) -> None:
        self.options, self.calls, self.first, self.failed = options, {}, {}, {}
        ways = Rivals(kind, x)
        for name in options.rivals:
            start = time.perf_counter()
            with self._or_not(name), limited(options.limit), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                call = ways.make(name)
                backward(call)()
                self.calls[name], self.first[name] = call, time.perf_counter() - start

    @contextmanager
    def _or_not(self, name: str) -> Iterator[None]:
        """Note why a rival cannot run, which is a row of its own, and leave it out."""
        try:
            yield
        except Exception as error:
            self.failed[name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:90]}"
            self.calls.pop(name, None)

    def measure(self, wrap: Callable[[Callable[[], Tensor]], Callable[[], object]]) -> dict[str, Comparison]:
        """Each rival's comparison; slow ones are compared with the layer in fewer rounds of their own."""
        calls = {name: wrap(call) for name, call in self.calls.items()}
        quick = {name: call for name, call in calls.items() if name not in SLOW}
        found = dict.fromkeys(quick, self._compare(quick, self.options.rounds))
        for name in [name for name in calls if name in SLOW]:
            with self._or_not(name), limited(3 * self.options.limit):
                found[name] = self._compare({"layer": calls["layer"], name: calls[name]}, 3)
        return found

    def _compare(self, calls: dict[str, Callable[[], object]], rounds: int) -> Comparison:
        start = time.perf_counter()
        for call in calls.values():
            call()
        fit = int(self.options.budget / (time.perf_counter() - start))
        rounds = max(2, min(rounds, fit))
        return compare(calls, rounds=rounds, warmup=1 if fit > 3 else 0, clock=CLOCKS[self.options.clock])

    def rows(self) -> Iterator[str]:
        """The lines of the table."""
        with torch.no_grad():
            forward = self.measure(lambda call: call)
        both = self.measure(backward)
        for name in self.options.rivals:
            if name in self.failed:
                yield f"{name:12}{'-':>10}{'-':>16}   {self.failed[name]}"
                continue
            low, high = both[name].spread[name]
            yield (
                f"{name:12}{forward[name].ratios[name]:>9.2f}x{both[name].ratios[name]:>15.2f}x"
                f"{f'{low:.2f} to {high:.2f}':>18}{1e3 * both[name].seconds[name]:>10.2f}{self.first[name]:>11.1f}s"
                f"{peak(backward(self.calls[name]), self.options.device):>8}"
            )


def read_options() -> argparse.Namespace:
    """What is to be measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", nargs="+", default=["float32"])
    parser.add_argument("--shapes", nargs="+", help="batch x steps x hidden")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--rivals", nargs="+", default=list(NAMES), choices=NAMES, help="the layer is always one")
    parser.add_argument("--quick", action="store_true", help=f"without {' and '.join(SLOW)}")
    parser.add_argument("--rounds", type=int, default=9, help="at most")
    parser.add_argument("--budget", type=float, default=40, help="seconds for the rounds of one comparison, about")
    parser.add_argument("--limit", type=float, default=60, help="seconds for a first call; what takes more is left out")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="processor: on a busy machine, with one thread")
    parser.add_argument("--threads", type=int, default=1, help="more than are idle measure waiting")
    options = parser.parse_args()
    options.rivals = ["layer", *(n for n in options.rivals if n != "layer" and not (options.quick and n in SLOW))]
    options.shapes = options.shapes or SHAPES[options.device]
    return options


def main() -> None:
    """Print one table."""
    options = read_options()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    # The layers of cuDNN round the factors of their products; everybody may.
    torch.set_float32_matmul_precision("high")
    warnings.filterwarnings("ignore", "RNN module weights")  # cuDNN has no flat weights in bfloat16
    print(machine(), f"· {options.clock} time")
    print(f"{'':12}{'forward':>10}{'with backward':>16}{'(middle half)':>18}{'ms':>10}{'first call':>12}{'MiB':>8}")
    for shape in options.shapes:
        batch, steps, size = map(int, shape.split("x"))
        for kind in options.kinds:
            for dtype in options.dtype:
                like = {"device": options.device, "dtype": getattr(torch, dtype)}
                print(f"\n{kind}, batch {batch}, {steps} steps, hidden {size}, {dtype}", flush=True)
                for row in Group(kind, torch.randn(batch, steps, size, **like, requires_grad=True), options).rows():
                    print(row, flush=True)


if __name__ == "__main__":
    main()
