"""Loops over time written in Python, as they are and accelerated: whole models, forward and backward, in one run.

python benchmarks/loops.py                                   # a processor, one thread, 16 rows, 48 steps, 64 units
python benchmarks/loops.py --device cuda --rows 32 --steps 128 --units 256 --dtype float32
python benchmarks/loops.py --models GRU LSTM --compiled      # beside torch.compile

"as cuDNN's" is the time against torch's own LSTM of as many units with the same head. "made" is what the first calls
took until the loop ran by the engine, or was left as it is.
"""

import argparse
import math
import time
from functools import partial

import torch
from torch import Tensor, nn

import hiddenstate as hs
from timing import compare, machine

UNITS = 64


class _Loop(nn.Module):
    """What the models below have in common: an input of 16 features, a state of `UNITS`, a head on all states."""

    def __init__(self, *sizes: tuple[int, int]) -> None:
        super().__init__()
        self.maps = nn.ModuleList([nn.Linear(*size) for size in sizes])
        self.head = nn.Linear(UNITS, 8)

    def forward(self, x: Tensor) -> Tensor:
        h, outs = x.new_zeros(x.shape[0], UNITS), []
        for t in range(x.shape[1]):
            h = self.step(x[:, t], h)
            outs.append(h)
        return self.head(torch.stack(outs, 1))


class _Elman(_Loop):
    def __init__(self) -> None:
        super().__init__((16, UNITS), (UNITS, UNITS))

    def step(self, x: Tensor, h: Tensor) -> Tensor:
        return torch.tanh(self.maps[0](x) + self.maps[1](h))


class _GRU(_Loop):
    def __init__(self) -> None:
        super().__init__((16 + UNITS, 2 * UNITS), (16 + UNITS, UNITS))

    def step(self, x: Tensor, h: Tensor) -> Tensor:
        r, z = torch.sigmoid(self.maps[0](torch.cat([x, h], 1))).chunk(2, 1)
        return (1 - z) * h + z * torch.tanh(self.maps[1](torch.cat([x, r * h], 1)))


class _Leaky(_Elman):
    def step(self, x: Tensor, h: Tensor) -> Tensor:
        return 0.9 * h + 0.1 * torch.relu(self.maps[0](x) + self.maps[1](h)) + 0.01 * torch.randn_like(h)


class _MinimalGated(_GRU):
    def step(self, x: Tensor, h: Tensor) -> Tensor:
        f = torch.sigmoid(self.maps[0](torch.cat([x, h], 1))[:, :UNITS])
        return (1 - f) * h + f * torch.tanh(self.maps[1](torch.cat([x, f * h], 1)))


class _Highway(_GRU):
    def step(self, x: Tensor, h: Tensor) -> Tensor:
        for _ in range(3):
            gate = torch.sigmoid(self.maps[1](torch.cat([x, h], 1)))
            h = gate * torch.tanh(self.maps[0](torch.cat([x, h], 1))[:, :UNITS]) + (1 - gate) * h
        return h


class _LSTM(_Loop):
    def __init__(self) -> None:
        super().__init__((16, 4 * UNITS), (UNITS, 4 * UNITS))
        self.norm = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(x.shape[0], UNITS)
        outs = []
        for x_t in x.unbind(1):
            i, f, g, o = self.norm(self.maps[0](x_t) + self.maps[1](h)).chunk(4, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            outs.append(h)
        return self.head(torch.stack(outs, 1))


class _NormedLSTM(_LSTM):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * UNITS)


class _Stepped(_Loop):
    def __init__(self, cell: type[nn.Module] = nn.GRUCell) -> None:
        super().__init__()
        self.cell = cell(16, UNITS)

    def forward(self, x: Tensor) -> Tensor:
        state, out = None, x.new_zeros(x.shape[0], x.shape[1], UNITS)
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
            out[:, t] = state[0] if isinstance(state, tuple) else state
        return self.head(out)


class _Stacked(_Loop):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList([nn.LSTMCell(16, UNITS), nn.LSTMCell(UNITS, UNITS)])

    def forward(self, x: Tensor) -> Tensor:
        zeros, outs = x.new_zeros(x.shape[0], UNITS), []
        states = [(zeros, zeros), (zeros, zeros)]
        for t in range(x.shape[1]):
            inp = x[:, t]
            for place, cell in enumerate(self.cells):
                states[place] = cell(inp, states[place])
                inp = states[place][0]
            outs.append(inp)
        return self.head(torch.stack(outs, 1))


class _Attending(_Loop):
    def __init__(self) -> None:
        super().__init__((16, UNITS), (UNITS, UNITS))
        self.cell = nn.GRUCell(16 + UNITS, UNITS)

    def forward(self, x: Tensor) -> Tensor:
        memory, h, outs = self.maps[0](x), x.new_zeros(x.shape[0], UNITS), []
        for x_t in x.unbind(1):
            weights = torch.softmax((memory @ self.maps[1](h).unsqueeze(2)).squeeze(2) / UNITS**0.5, 1)
            h = self.cell(torch.cat([x_t, (weights.unsqueeze(1) @ memory).squeeze(1)], 1), h)
            outs.append(h)
        return self.head(torch.stack(outs, 1))


class _Masked(_Elman):
    def forward(self, x: Tensor) -> Tensor:
        mask, h = x[:, :, 0] > -1, x.new_zeros(x.shape[0], UNITS)
        for t in range(x.shape[1]):
            h = torch.where(mask[:, t : t + 1], self.step(x[:, t], h), h)
        return self.head(h)


class _Peephole(_LSTM):
    def __init__(self) -> None:
        super().__init__()
        self.peeps = nn.Parameter(torch.randn(3, UNITS) / 10)

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(x.shape[0], UNITS)
        out = x.new_empty(x.shape[0], x.shape[1], UNITS)
        for t in range(x.shape[1]):
            i, f, g, o = (self.maps[0](x[:, t]) + self.maps[1](h)).chunk(4, 1)
            i, f = torch.sigmoid(i + self.peeps[0] * c), torch.sigmoid(f + self.peeps[1] * c)
            c = f * c + i * torch.tanh(g)
            h = torch.sigmoid(o + self.peeps[2] * c) * torch.tanh(c)
            out[:, t] = h
        return self.head(out)


class _Layers(_Loop):
    """Two loops, one after the other."""

    def __init__(self) -> None:
        super().__init__((16, UNITS), (UNITS, UNITS), (UNITS, UNITS), (UNITS, UNITS))

    def forward(self, x: Tensor) -> Tensor:
        for inner, recurrent in (self.maps[:2], self.maps[2:]):
            h, outs = x.new_zeros(x.shape[0], UNITS), []
            for x_t in x.unbind(1):
                h = torch.tanh(inner(x_t) + recurrent(h))
                outs.append(h)
            x = torch.stack(outs, 1)
        return self.head(x)


class _BothWays(_Elman):
    def forward(self, x: Tensor) -> Tensor:
        ahead, back = x.new_zeros(x.shape[0], UNITS), x.new_zeros(x.shape[0], UNITS)
        aheads, backs = [], []
        for t in range(x.shape[1]):
            ahead = self.step(x[:, t], ahead)
            aheads.append(ahead)
        for t in reversed(range(x.shape[1])):
            back = self.step(x[:, t], back)
            backs.append(back)
        return self.head(torch.stack(aheads, 1) + torch.stack(backs[::-1], 1))


class _Decaying(_GRU):
    """Missing values that fade to a mean, and a state that fades with the time since the last one."""

    def forward(self, x: Tensor) -> Tensor:
        seen, h, outs = x > 0, x.new_zeros(x.shape[0], UNITS), []
        last = since = torch.zeros_like(x[:, 0])
        for t in range(x.shape[1]):
            now = seen[:, t].to(x.dtype)
            since = (1 - now) * since + 1
            last = now * x[:, t] + (1 - now) * last
            fade = torch.exp(-torch.relu(since))
            h = self.step(now * x[:, t] + (1 - now) * fade * last, h * fade.mean(1, keepdim=True))
            outs.append(h)
        return self.head(torch.stack(outs, 1))


class _Dropping(_GRU):
    def step(self, x: Tensor, h: Tensor) -> Tensor:
        return super().step(x, torch.dropout(h, 0.2, self.training))


MODELS = {
    **{
        kind.__name__[1:]: kind
        for kind in (_Elman, _GRU, _Leaky, _MinimalGated, _Highway, _LSTM, _NormedLSTM, _Stacked, _Attending, _Masked)
    },
    **{kind.__name__[1:]: kind for kind in (_Peephole, _Layers, _BothWays, _Decaying, _Dropping)},
    **{"GRUCell": _Stepped, "LSTMCell": lambda: _Stepped(nn.LSTMCell)},
}


class _Fused(_Loop):
    """Torch's own LSTM with the same head."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, UNITS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0])


def train(model: nn.Module, x: Tensor) -> None:
    """Run a model forward and backward."""
    model(x).sum().backward()


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    """Print a line for each model, and the mean of all ratios."""
    global UNITS
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--units", type=int, default=UNITS)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    UNITS, kind = options.units, {"device": options.device, "dtype": getattr(torch, options.dtype)}
    print(f"{machine()}\n{options.rows} rows, {options.steps} steps, {UNITS} units, {options.dtype}")
    ratios, fused = [], []
    for name in options.models:
        models = []
        for make in (MODELS[name], MODELS[name], MODELS[name], _Fused):
            torch.manual_seed(0)
            models.append(make().to(**kind))
        plain, ours, compiled, lstm = models
        x = torch.randn(options.rows, options.steps, 16).to(**kind)
        with hs.accelerate(ours) as faster:
            _wait()
            start = time.perf_counter()
            for _ in range(4):
                train(ours, x)
            _wait()
            made = time.perf_counter() - start
            rivals = {"as written": partial(train, plain, x), "accelerated": partial(train, ours, x)}
            rivals["cuDNN"] = partial(train, lstm, x)
            took = ""
            if options.compiled:
                start = time.perf_counter()
                rivals["compiled"] = partial(train, torch.compile(compiled), x)
                rivals["compiled"]()
                _wait()
                took = f", compiled in {time.perf_counter() - start:.1f} s"
            # On a processor other work on the machine does not count.
            clock = time.process_time if options.device == "cpu" else time.perf_counter
            result = compare(rivals, rounds=options.rounds, clock=clock)
            ratios.append(result.ratios["accelerated"])
            low, high = result.spread["accelerated"]
            said = "by the engine" if "by the engine" in faster.explain() else faster.explain()
        fused.append(result.seconds["accelerated"] / result.seconds["cuDNN"])
        print(
            f"{name:14} {1e3 * result.seconds['as written']:8.2f} ms  {1e3 * result.seconds['accelerated']:8.2f} ms  "
            f"x {ratios[-1]:.3f} ({low:.3f} to {high:.3f})  as cuDNN's x {fused[-1]:.2f}  made in {made:.1f} s  {said}"
            + (f"  torch.compile x {result.ratios['compiled']:.3f}{took}" if options.compiled else ""),
            flush=True,
        )
    print(f"geometric mean x {_mean(ratios):.3f}, as cuDNN's LSTM x {_mean(fused):.2f}")


def _mean(ratios: list[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


if __name__ == "__main__":
    main()
