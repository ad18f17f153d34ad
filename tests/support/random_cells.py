"""Cells that nobody wrote: random steps from a grammar of operations, nestings, forms of state, dtypes and views.

`random_case(seed)` gives the same cell and the same call for the same number, so that a difference can be found again.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hiddenstate as hs

Value = tuple[str, Tensor]  # kind, tensor: "h" (batch, size), "m" (batch, heads, width), "r" (batch, 1)


@dataclass
class Grammar:
    """Draws a step: a list of instructions, each of which makes one more value of those before."""

    dice: random.Random
    size: int
    heads: int
    code: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)

    def draw(self, count: int) -> None:
        for _ in range(count):
            name = self.dice.choice(list(OPERATIONS))
            self.code.append((name, tuple(self.dice.random() for _ in range(5))))


def _pick(values: list[Tensor], share: float) -> Tensor:
    # Later values more often: a step is deep rather than wide.
    return values[min(len(values) - 1, int(len(values) * share**0.5))]


UNARY: list[Callable[[Tensor], Tensor]] = [
    *(torch.tanh, torch.sigmoid, torch.relu, torch.sin, torch.cos, torch.abs, torch.neg, torch.square),
    *(F.silu, F.gelu, F.elu, F.softplus, F.leaky_relu, F.hardtanh, F.mish, F.hardswish, F.logsigmoid, F.hardsigmoid),
    lambda v: v.clamp(-0.5, 0.7),
    lambda v: v.clamp(min=0.1),
    lambda v: torch.exp(-v.abs()),
    lambda v: torch.log1p(v.abs()),
    lambda v: torch.sqrt(v.square() + 0.1),
    lambda v: torch.rsqrt(v.square() + 0.5),
    lambda v: v.sign() * v.abs().pow(0.5 + 1),
    lambda v: v.pow(3).clamp(-2, 2),
    lambda v: torch.where(v > 0, v, v * 0.3),
    lambda v: v * (v > 0.1),
    lambda v: v.masked_fill(v < -0.5, 0.25),
    lambda v: v.round().detach() * 0.1 + v,
    lambda v: torch.erf(v),
    lambda v: torch.nan_to_num(v),
    lambda v: v.float().to(v.dtype),
    lambda v: (v > 0).to(v.dtype) + (v > 0.2).to(v.dtype),
    lambda v: ((v > 0) & (v < 0.5)).to(v.dtype) * v,
    lambda v: (v * 2).to(torch.int64).to(v.dtype) * 0.25 + v,
    lambda v: v.detach() * 0.5,
    lambda v: 1 - v,
    lambda v: 0.5 / (1.5 + v.square()),
    lambda v: F.dropout(v, 0.5, training=False),
    lambda v: F.dropout(v, 0.3),
    lambda v: v + 0.1 * torch.randn_like(v),
]
BINARY: list[Callable[[Tensor, Tensor], Tensor]] = [
    *(torch.add, torch.sub, torch.mul, torch.maximum, torch.minimum),
    lambda a, b: a / (b.square() + 0.5),
    lambda a, b: torch.where(a > b, a, b * 0.5),
    lambda a, b: torch.lerp(a, b, 0.3),
    lambda a, b: torch.addcmul(a, b, b, value=0.1),
    lambda a, b: torch.atan2(a, b.abs() + 0.5),
    lambda a, b: a * b.sigmoid() + (1 - b.sigmoid()) * a.tanh(),
    lambda a, b: torch.sub(a, b, alpha=0.5),
    lambda a, b: torch.hypot(a, b + 0.3) * 0.3,
]
ACROSS: list[Callable[[Tensor], Tensor]] = [
    lambda v: v.softmax(-1),
    lambda v: v.log_softmax(-1).clamp(min=-3),
    lambda v: v - v.mean(-1, keepdim=True),
    lambda v: v / (v.norm(dim=-1, keepdim=True) + 0.3),
    lambda v: v.sum(-1, keepdim=True) * 0.1 + v,
    lambda v: v.amax(-1, keepdim=True) - v,
    lambda v: v.flip(-1),
    lambda v: v.roll(1, -1),
    lambda v: torch.cat([v[:, 1:], v[:, :1]], -1),
    lambda v: v.cumsum(-1) * 0.2,
    lambda v: F.layer_norm(v, v.shape[-1:]),
    lambda v: v[:, torch.arange(v.shape[1] - 1, -1, -1)],
    lambda v: F.pad(v[:, 1:], (0, 1)),
    lambda v: torch.stack([v[:, ::2], v.flip(-1)[:, ::2]], -1).flatten(1)[:, : v.shape[1]],
    lambda v: v.var(-1, keepdim=True) + v,
    lambda v: v.sort(-1).values,
]


def _heads(v: Tensor, heads: int) -> Tensor:
    return v.view(len(v), heads, -1) if v.is_contiguous() else v.reshape(len(v), heads, -1)


def _attend(a: Tensor, b: Tensor, heads: int) -> Tensor:
    one, other = _heads(a, heads), _heads(b, heads)
    return (torch.bmm(torch.softmax(one @ other.transpose(1, 2), -1), other)).flatten(1)


def _outer(a: Tensor, b: Tensor, heads: int) -> Tensor:
    one, other = _heads(a, heads), _heads(b, heads)
    return torch.einsum("bhi,bhj->bhij", one, other).mean(-1).reshape(len(a), -1)


def _written(v: Tensor) -> Tensor:
    new = v.clone()
    new[:, 0] = new[:, 1] * 0.5
    new[:, 1:].mul_(0.9)
    return new


OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "unary": lambda cell, values, d: UNARY[int(d[1] * len(UNARY))](_pick(values, d[0])),
    "unary again": lambda cell, values, d: UNARY[int(d[1] * len(UNARY))](_pick(values, d[0])),
    "binary": lambda cell, values, d: BINARY[int(d[1] * len(BINARY))](_pick(values, d[0]), _pick(values, d[2])),
    "binary again": lambda cell, values, d: BINARY[int(d[1] * len(BINARY))](_pick(values, d[0]), _pick(values, d[2])),
    "across": lambda cell, values, d: ACROSS[int(d[1] * len(ACROSS))](_pick(values, d[0])),
    "linear": lambda cell, values, d: cell.linears[int(d[1] * len(cell.linears))](_pick(values, d[0])),
    "linear again": lambda cell, values, d: cell.linears[int(d[1] * len(cell.linears))](_pick(values, d[0])),
    "joined": lambda cell, values, d: cell.wide(torch.cat([_pick(values, d[0]), _pick(values, d[1])], -1)),
    "gates": lambda cell, values, d: torch.mul(*cell.two(_pick(values, d[0])).chunk(2, -1)).tanh(),
    "norm": lambda cell, values, d: cell.norm(_pick(values, d[0])),
    "gain": lambda cell, values, d: _pick(values, d[0]) * cell.gain,
    "scale": lambda cell, values, d: _pick(values, d[0]) * cell.scale,
    "attend": lambda cell, values, d: _attend(_pick(values, d[0]), _pick(values, d[1]), cell.heads),
    "outer": lambda cell, values, d: _outer(_pick(values, d[0]), _pick(values, d[1]), cell.heads),
    "written": lambda cell, values, d: _written(_pick(values, d[0])),
    "without": lambda cell, values, d: _without(_pick(values, d[0])),
}


def _without(v: Tensor) -> Tensor:
    with torch.no_grad():
        shift = v.mean(-1, keepdim=True)
    return v - shift


class RandomCell(nn.Module):
    """A step that was drawn."""

    def __init__(self, dice: random.Random, form: str) -> None:
        super().__init__()
        self.heads = dice.choice([1, 2])
        self.size = self.hidden_size = self.heads * dice.choice([2, 3, 4, 8])
        self.form, size = form, self.size
        self.inner = nn.Linear(3, size, bias=dice.random() < 0.7)
        self.linears = nn.ModuleList(nn.Linear(size, size, bias=dice.random() < 0.7) for _ in range(2))
        self.wide, self.two, self.norm = nn.Linear(2 * size, size), nn.Linear(size, 2 * size), nn.LayerNorm(size)
        self.gain, self.scale = nn.Parameter(torch.rand(size)), nn.Parameter(torch.rand(()))
        self.register_buffer("decay", torch.linspace(0.1, 0.9, size))
        grammar = Grammar(dice, size, self.heads)
        grammar.draw(dice.randint(1, 7))
        self.code, self.ends = grammar.code, [dice.random() for _ in range(4)]

    def initial_state(self, batch: int) -> Any:
        like, size = self.gain, self.size
        h = like.new_zeros(batch, size)
        if self.form == "pair":
            return h, like.new_ones(batch, size) * 0.1
        if self.form == "dict":
            return {"h": h, "ticks": torch.zeros(batch, dtype=torch.int64), "on": torch.ones(batch, 1).bool()}
        if self.form == "matrix":
            return h, like.new_zeros(batch, size, size)
        return h

    def forward(self, x: Tensor, state: Any) -> Any:
        parts = (
            list(state.values()) if isinstance(state, dict) else list(state) if isinstance(state, tuple) else [state]
        )
        values = [self.inner(x), parts[0]]
        if self.form == "pair":
            values.append(parts[1])
        if self.form == "matrix":
            values.append(torch.einsum("bij,bj->bi", parts[1], parts[0]).tanh())
        if self.form == "dict":
            values.append(parts[0] * parts[1].unsqueeze(-1).to(x.dtype) * 0.1)
        for name, dice in self.code:
            values.append(OPERATIONS[name](self, values, dice))
        new = torch.tanh(values[-1] + 0.3 * _pick(values, self.ends[0]))
        out = _pick(values, self.ends[1]) if self.ends[2] < 0.3 else new
        if self.form == "pair":
            return out, (new, self.decay * parts[1] + _pick(values, self.ends[3]).tanh())
        if self.form == "dict":
            on = parts[2] ^ (new.sum(-1, keepdim=True) > 0.5)
            return out, {"h": torch.where(on, new, new * 0.5), "ticks": parts[1] + on.squeeze(-1).long(), "on": on}
        if self.form == "matrix":
            return out, (new, 0.9 * parts[1] + new.unsqueeze(2) * values[0].tanh().unsqueeze(1))
        return out, new


@dataclass
class RandomCase:
    """A cell with a call of it."""

    seed: int
    cell: RandomCell
    x: Tensor
    options: dict[str, Any]
    loss: Callable[[Tensor], Tensor]

    def __str__(self) -> str:
        made = ", ".join(name for name, _ in self.cell.code)
        call = f"{self.cell.form}, size {self.cell.size}, {tuple(self.x.shape)}, {[*self.options]}"
        return f"seed {self.seed}: {call}: {made}"


LOSSES: list[Callable[[Tensor], Tensor]] = [
    lambda out: out.cos().sum(),
    lambda out: out.sum(),  # whose gradient is one number seen everywhere
    lambda out: out[:, -1].square().sum(),
    lambda out: (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)).sum(),
    lambda out: out.transpose(0, 1).contiguous().view(-1).sin().sum(),
]


def random_case(seed: int, dtype: torch.dtype = torch.float64) -> RandomCase:
    """Draw a cell and a call of it."""
    dice = random.Random(seed)
    torch.manual_seed(seed)
    cell = RandomCell(dice, dice.choice(["plain", "pair", "dict", "matrix"])).to(dtype)
    batch, steps = dice.choice([1, 2, 3, 5]), dice.choice([1, 2, 4, 7])
    x = torch.randn(batch, steps, 3, dtype=dtype) * dice.choice([0.1, 1, 1, 5])
    way = dice.random()
    if way < 0.15:
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    elif way < 0.3:
        x = x.repeat(1, 1, 2)[:, :, ::2]
    x = x.detach().requires_grad_(dice.random() < 0.7)
    options: dict[str, Any] = {}
    if dice.random() < 0.4:
        options["lengths"] = [dice.randint(1, steps) for _ in range(batch)]
    if dice.random() < 0.3:
        options["resets"] = torch.rand(batch, steps) < 0.3
    if dice.random() < 0.2:
        cell.linears[0].weight.requires_grad_(False)
    return RandomCase(seed, cell, x, options, dice.choice(LOSSES))


def with_other_rows(case: RandomCase) -> RandomCase:
    """The same cell called with another number of rows."""
    dice = random.Random(case.seed + 1)
    batch, steps = dice.choice([1, 2, 3, 4, 7]), case.x.shape[1]
    x = torch.randn(batch, steps, 3, dtype=case.x.dtype).requires_grad_(case.x.requires_grad)
    options: dict[str, Any] = {}
    if "lengths" in case.options:
        options["lengths"] = [dice.randint(1, steps) for _ in range(batch)]
    if "resets" in case.options:
        options["resets"] = torch.rand(batch, steps) < 0.3
    return RandomCase(case.seed, case.cell, x, options, case.loss)


def results(case: RandomCase, engine: Any) -> list[Tensor | None]:
    """Values, and the gradients of all that requires one, None where nothing leads to it."""
    torch.manual_seed(case.seed)
    out, state = hs.unroll(case.cell, case.x, engine=engine, **case.options)
    wanted = [tensor for tensor in (case.x, *case.cell.parameters()) if tensor.requires_grad]
    roots = [case.loss(out)] if out.requires_grad else []
    if case.seed % 2:
        roots += [part.square().sum() for part in state.values() if part.requires_grad]
    grads = torch.autograd.grad(roots, wanted, allow_unused=True) if roots else [None] * len(wanted)
    return [out.detach(), *(part.detach() for part in state.values()), *grads]


def difference(case: RandomCase) -> str:
    """What tells the fast engine from the loop, "" where nothing does."""
    tolerance = {torch.float64: 1e-8, torch.float32: 5e-3}[case.x.dtype]
    expected, found = results(case, "loop"), results(case, "fast")
    for place, (one, other) in enumerate(zip(found, expected, strict=True)):
        if one is None or other is None:
            if one is not other:
                return f"result {place} is {'missing' if one is None else 'there'}, unlike the loop's"
        elif one.dtype != other.dtype or one.shape != other.shape:
            return f"result {place} is {one.dtype} {tuple(one.shape)}, not {other.dtype} {tuple(other.shape)}"
        else:
            size = float(other.double().nan_to_num(0, 0, 0).abs().max()) if other.numel() else 0.0
            near = torch.isclose(
                one.double(), other.double(), rtol=tolerance, atol=tolerance * (1 + size), equal_nan=True
            )
            if not bool(near.all()):
                return f"result {place} is off by {(one.double() - other.double()).abs().max():.2e} of {size:.2e}"
    return ""
