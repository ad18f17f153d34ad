"""Ways to run a cell along time, against torch's own layer: forward, with backward, first call, memory.

python benchmarks/unroll.py                              # CPU, the small shapes, one thread
python benchmarks/unroll.py --device cuda --dtype bfloat16
python benchmarks/unroll.py --shapes 32x100x128 64x256x512 --kinds lstm layernorm --rivals layer ours

Every row is a ratio to the first one, torch's layer of the same kind (for a LayerNorm-LSTM: nn.LSTM, which does less).
"""

import argparse
import time
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

import hiddenstate as hs
from timing import compare, machine

SHAPES = {"cpu": ["32x100x128", "1x1000x256"], "cuda": ["32x100x128", "1x1024x256", "64x256x512", "16x1024x768"]}


class TanhCell(nn.Module):
    """A plain recurrent cell, as one writes it by hand."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.hidden_size = size
        self.inner, self.recurrent = nn.Linear(size, size), nn.Linear(size, size)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        """Return the next state."""
        return torch.tanh(self.inner(x) + self.recurrent(h))


class GRUCell(nn.Module):
    """A GRU by hand."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.hidden_size = size
        self.inner, self.recurrent = nn.Linear(size, 3 * size), nn.Linear(size, 3 * size)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        """Return the next state."""
        (xr, xz, xn), (hr, hz, hn) = self.inner(x).chunk(3, -1), self.recurrent(h).chunk(3, -1)
        update = torch.sigmoid(xz + hz)
        return (1 - update) * torch.tanh(xn + torch.sigmoid(xr + hr) * hn) + update * h


class LSTMCell(nn.Module):
    """An LSTM by hand; with `norm`, its gates are normalized, which no fused kernel does."""

    def __init__(self, size: int, norm: bool = False) -> None:
        super().__init__()
        self.hidden_size = size
        self.inner, self.recurrent = nn.Linear(size, 4 * size), nn.Linear(size, 4 * size)
        self.norm_x, self.norm_h = (nn.LayerNorm(4 * size) if norm else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the next state."""
        h, c = state
        i, f, g, o = (self.norm_x(self.inner(x)) + self.norm_h(self.recurrent(h))).chunk(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c


KINDS = {
    "lstm": (nn.LSTM, nn.LSTMCell, LSTMCell),
    "gru": (nn.GRU, nn.GRUCell, GRUCell),
    "tanh": (nn.RNN, nn.RNNCell, TanhCell),
    "layernorm": (nn.LSTM, nn.LSTMCell, lambda size: LSTMCell(size, norm=True)),
}


def by_hand(cell: Callable[..., object], x: Tensor, pair: bool, size: int) -> Tensor:
    """The loop that everybody writes."""
    zeros = x.new_zeros(x.shape[0], size)
    state, outputs = ((zeros, zeros) if pair else zeros), []
    for step in x.unbind(1):
        state = cell(step, state)
        outputs.append(state[0] if pair else state)
    return torch.stack(outputs, 1)


def scanned(cell: nn.Module, x: Tensor, pair: bool, size: int) -> Tensor:
    """Torch's own scan."""
    from torch._higher_order_ops.scan import scan

    def step(state: object, now: Tensor) -> tuple[object, Tensor]:
        state = cell(now, state)
        return state, (state[0] if pair else state).clone()

    zeros = x.new_zeros(x.shape[0], size)
    return scan(step, (zeros, zeros.clone()) if pair else zeros, x.transpose(0, 1), dim=0)[1].transpose(0, 1)


def rivals_for(kind: str, x: Tensor, size: int) -> dict[str, Callable[[], Tensor]]:
    """Every way to run one kind of cell along `x`."""
    layer_type, torch_cell, own = KINDS[kind]
    like = {"device": x.device, "dtype": x.dtype}
    layer, stepped, cell = (
        layer_type(size, size, batch_first=True).to(**like),
        torch_cell(size, size).to(**like),
        own(size),
    )
    cell = cell.to(**like)
    pair = isinstance(cell, LSTMCell)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(stepped)
    compiled = torch.compile(cell, dynamic=False)
    return {
        "layer": lambda: layer(x)[0],
        "ours": lambda: hs.unroll(cell, x, engine="fast")[0],
        "loop": lambda: by_hand(cell, x, pair, size),
        "torch cell": lambda: by_hand(stepped, x, pair, size),
        "script": lambda: by_hand(scripted, x, pair, size),
        "compile": lambda: by_hand(compiled, x, pair, size),
        "scan": lambda: scanned(cell, x, pair, size),
    }


def first_call(call: Callable[[], Tensor]) -> float | str:
    """Seconds until the first result with its gradient, or why there is none."""
    start = time.perf_counter()
    try:
        call().sum().backward()
    except Exception as error:  # a rival that cannot run is a row of its own
        return f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
    return time.perf_counter() - start


def peak(call: Callable[[], Tensor]) -> str:
    """MiB at the peak of one forward and backward pass, where the device counts them."""
    if not torch.cuda.is_available():
        return "-"
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call().sum().backward()
    return f"{(torch.cuda.max_memory_allocated() - before) / 2**20:.0f}"


def table(kind: str, shape: str, options: argparse.Namespace) -> None:
    """Print one table."""
    batch, steps, size = map(int, shape.split("x"))
    x = torch.randn(batch, steps, size, device=options.device, dtype=getattr(torch, options.dtype), requires_grad=True)
    named = {name: call for name, call in rivals_for(kind, x, size).items() if name in options.rivals}
    first = {name: first_call(call) for name, call in named.items()}
    able = {name: call for name, call in named.items() if not isinstance(first[name], str)}
    with torch.no_grad():
        forward = compare(able, rounds=options.rounds, warmup=1)
    both = compare(
        {name: lambda c=c: c().sum().backward() for name, c in able.items()}, rounds=options.rounds, warmup=1
    )
    print(f"\n{kind}, batch {batch}, {steps} steps, hidden {size}, {options.dtype}")
    print(f"{'':12}{'forward':>10}{'with backward':>16}{'(middle half)':>18}{'ms':>10}{'first call':>12}{'MiB':>8}")
    for name in named:
        if name not in able:
            print(f"{name:12}{first[name]}")
            continue
        low, high = both.spread[name]
        print(
            f"{name:12}{forward.ratios[name]:>9.2f}x{both.ratios[name]:>15.2f}x{f'{low:.2f} to {high:.2f}':>18}"
            f"{1e3 * both.seconds[name]:>10.2f}{first[name]:>11.1f}s{peak(named[name]):>8}"
        )


def main() -> None:
    """Print a table for each kind and shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--shapes", nargs="+", help="batch x steps x hidden")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS))
    parser.add_argument("--rivals", nargs="+", default=["layer", "ours", "loop", "torch cell", "script"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1, help="more than are idle measure waiting")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    # The layers of cuDNN round the factors of their products; everybody may.
    torch.set_float32_matmul_precision("high")
    print(machine())
    for shape in options.shapes or SHAPES[options.device]:
        for kind in options.kinds:
            table(kind, shape, options)


if __name__ == "__main__":
    main()
