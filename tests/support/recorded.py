"""The slow and obvious way to every state and gate: one row, one step, float64."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

GATES = {"LSTM": ("input", "forget", "candidate", "output"), "GRU": ("reset", "update", "candidate")}
KINDS = {
    "lstm": nn.LSTM,
    "projected": lambda *a, **k: nn.LSTM(*a, proj_size=3, **k),
    "gru": nn.GRU,
    "rnn": nn.RNN,
    "relu": lambda *a, **k: nn.RNN(*a, nonlinearity="relu", **k),
}


@dataclass
class Expected:
    h: Tensor  # (batch, time, unit)
    c: Tensor  # (batch, time, hidden)
    gates: dict[str, Tensor]


def track_of(
    module: nn.RNNBase, depth: int, reverse: bool, x: Tensor, state: list[Tensor], lengths: list[int]
) -> Expected:
    """What one layer and direction of a fused module goes through on `x (batch, time, feature)`."""
    end = f"_l{depth}" + ("_reverse" if reverse else "")
    w = {name: getattr(module, name + end).detach().double() for name in ("weight_ih", "weight_hh")}
    for name in ("bias_ih", "bias_hh"):
        w[name] = getattr(module, name + end).detach().double() if module.bias else torch.zeros(()).double()
    w_hr = getattr(module, "weight_hr" + end).detach().double() if module.proj_size else None
    batch, time = x.shape[:2]
    gates = {name: torch.zeros(batch, time, module.hidden_size).double() for name in GATES.get(module.mode, ())}
    expected = Expected(
        torch.zeros(batch, time, module.proj_size or module.hidden_size).double(),
        torch.zeros(batch, time, module.hidden_size).double(),
        gates,
    )
    for row in range(batch):
        h, *cell = (part[row].double() for part in state)
        steps = range(lengths[row])
        for t in reversed(steps) if reverse else steps:
            from_x = w["weight_ih"] @ x[row, t].double() + w["bias_ih"]
            from_h = w["weight_hh"] @ h + w["bias_hh"]
            h, cell, found = step(module.mode, from_x, from_h, h, cell)
            if w_hr is not None:
                h = w_hr @ h
            expected.h[row, t] = h
            for name, value in zip(gates, found, strict=True):
                gates[name][row, t] = value
            if cell:
                expected.c[row, t] = cell[0]
    return expected


def step(mode: str, from_x: Tensor, from_h: Tensor, h: Tensor, cell: list[Tensor]):
    if mode == "LSTM":
        i, f, g, o = (from_x + from_h).chunk(4)
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        c = f * cell[0] + i * g
        return o * c.tanh(), [c], (i, f, g, o)
    if mode == "GRU":
        (a, b, n), (ha, hb, hn) = from_x.chunk(3), from_h.chunk(3)
        r, z = (a + ha).sigmoid(), (b + hb).sigmoid()
        n = (n + r * hn).tanh()
        return (1 - z) * n + z * h, [], (r, z, n)
    return (from_x + from_h).tanh() if mode == "RNN_TANH" else (from_x + from_h).relu(), [], ()


def stack_of(module: nn.RNNBase, x: Tensor, state: list[Tensor], lengths: list[int]) -> dict[str, Expected]:
    """Every track of a fused module without dropout; state parts `(layers * directions, batch, unit)`."""
    found: dict[str, Expected] = {}
    ends = ("", "_reverse") if module.bidirectional else ("",)
    for depth in range(module.num_layers):
        outs = []
        for side, end in enumerate(ends):
            parts = [part[depth * len(ends) + side] for part in state]
            found[f"l{depth}{end}"] = track_of(module, depth, bool(side), x, parts, lengths)
            outs.append(found[f"l{depth}{end}"].h)
        x = torch.cat(outs, -1)
    return found
