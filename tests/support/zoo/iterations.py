"""Repetitions without time: nothing of the input comes anew each time. They may be listed, and are never carried."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .case import BATCH, FEATURES, UNITS, Family, drawn, expected, gru_step, series, zeros

case = Family()

ROUNDS = 6
NO_TIME = {"carriable": None, "time_axis": None, "resume": "an iteration has no time to cut"}


def features() -> tuple[tuple[Tensor], dict]:
    return (drawn(BATCH, FEATURES),), {}


class Refinement(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.context, self.gru = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(2 + 2 + 3, 6, 3, padding=1)
        self.flow_head = nn.Conv2d(3, 2, 3, padding=1)

    def forward(self, first: Tensor, second: Tensor, iters: int = ROUNDS) -> list[Tensor]:
        net, flow = torch.tanh(self.context(first)), torch.zeros_like(first)
        predictions = []
        for _ in range(iters):
            flow = flow.detach()
            corr = (second - first) * (1 + flow)
            z, q = self.gru(torch.cat([corr, flow, net], 1)).chunk(2, 1)
            net = (1 - torch.sigmoid(z)) * net + torch.sigmoid(z) * torch.tanh(q)
            flow = flow + self.flow_head(net)
            predictions.append(flow)
        return predictions


@case(
    Refinement,
    expected("iteration", "", ROUNDS, net=0, flow=0),
    style="RAFT: a recurrent unit refines a flow field again and again from the same two images.",
    inputs=lambda: ((drawn(BATCH, 2, 4, 4), drawn(BATCH, 2, 4, 4, seed=3)), {}),
    own_start="encoder",
    **NO_TIME,
)
def flow_refinement(model, first, second, start):
    run = start(net=model.context(first).tanh(), flow=torch.zeros(BATCH, 2, 4, 4))
    for _ in range(ROUNDS):
        flow = run["flow"].detach()
        gates = model.gru(torch.cat([(second - first) * (1 + flow), flow, run["net"]], 1))
        net = run["net"] + gates[:, :3].sigmoid() * (gates[:, 3:].tanh() - run["net"])
        run.keep(net=net, flow=flow + model.flow_head(net))
    return run.parts["flow"][1:]


class Equilibrium(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inject, self.inner = nn.Linear(FEATURES, UNITS), nn.Linear(UNITS, UNITS)

    def forward(self, x: Tensor) -> Tensor:
        z, injected = torch.zeros(x.shape[0], UNITS), self.inject(x)
        for _ in range(50):
            z_next = torch.tanh(0.5 * self.inner(z) + injected)
            settled = bool((z_next - z).abs().max() < 1e-4)
            z = z_next
            if settled:
                break
        return z


@case(
    Equilibrium,
    expected("iteration", "", 7, z=0),
    style="A deep equilibrium model: the same map until nothing moves, so the number of rounds depends on the data.",
    inputs=features,
    own_start="zeros",
    idle={"z": "an equilibrium forgets where it began"},
    **NO_TIME,
)
def deep_equilibrium(model, x, start):
    run = start(z=zeros())
    while True:
        old = run["z"]
        run.keep(z=(0.5 * model.inner(old) + model.inject(x)).tanh())
        if (run["z"] - old).abs().max() < 1e-4:
            return run["z"]


class Hopfield(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("patterns", torch.randn(8, FEATURES))

    def forward(self, xi: Tensor) -> Tensor:
        for _ in range(4):
            xi = torch.softmax(1.5 * xi @ self.patterns.T, -1) @ self.patterns
        return xi


@case(
    Hopfield,
    expected("iteration", "", 4, xi=0),
    style="A modern Hopfield network: retrieval by a few rounds of attention to stored patterns.",
    inputs=features,
    own_start="encoder",
    **NO_TIME,
)
def hopfield_retrieval(model, xi, start):
    run = start(xi=xi)
    for _ in range(4):
        weights = (1.5 * torch.einsum("bf,pf->bp", run["xi"], model.patterns)).softmax(1)
        run.keep(xi=torch.einsum("bp,pf->bf", weights, model.patterns))
    return run["xi"]


class Sampler(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.denoise = nn.Sequential(nn.Linear(2 * FEATURES + 1, UNITS), nn.SiLU(), nn.Linear(UNITS, FEATURES))
        self.register_buffer("betas", torch.linspace(0.1, 0.4, ROUNDS))

    def forward(self, condition: Tensor) -> Tensor:
        x = torch.randn_like(condition)
        for i in reversed(range(ROUNDS)):
            beta = self.betas[i]
            eps = self.denoise(torch.cat([x, condition, beta.expand(len(x), 1)], 1))
            x = (x - beta * eps) / torch.sqrt(1 - beta)
            if i > 0:
                x = x + torch.sqrt(beta) * torch.randn_like(x)
        return x


@case(
    Sampler,
    expected("iteration", "", ROUNDS, x=0),
    style="A diffusion sampler: noise becomes a sample; each round takes a piece of a schedule, none of the input.",
    inputs=features,
    own_start="random",
    **NO_TIME,
)
def diffusion_sampler(model, condition, start):
    run = start(x=torch.randn(BATCH, FEATURES))
    for i in range(ROUNDS - 1, -1, -1):
        beta = float(model.betas[i])
        eps = model.denoise(torch.cat([run["x"], condition, torch.full((BATCH, 1), beta)], 1))
        noise = beta**0.5 * torch.randn(BATCH, FEATURES) if i else 0.0
        run.keep(x=(run["x"] - beta * eps) / (1 - beta) ** 0.5 + noise)
    return run["x"]


class SharedBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(FEATURES, 2, 8, dropout=0.0, batch_first=True)
        self.depth = nn.Parameter(torch.randn(ROUNDS, FEATURES) / 5)

    def forward(self, x: Tensor) -> Tensor:
        for d in range(ROUNDS):
            x = self.block(x + self.depth[d])
        return x


@case(
    SharedBlocks,
    expected("iteration", "block", ROUNDS, x=0),
    style="A universal transformer: one block applied six times, each time with another learned offset.",
    inputs=series,
    own_start="encoder",
    **(NO_TIME | {"time_axis": 1}),
)
def shared_transformer_block(model, x, start):
    block, run = model.block, start(x=x)
    for d in range(ROUNDS):
        y = run["x"] + model.depth[d]
        q, k, v = (y @ block.self_attn.in_proj_weight.T + block.self_attn.in_proj_bias).chunk(3, -1)
        heads = [
            (q[..., s] @ k[..., s].mT / 2**0.5).softmax(-1) @ v[..., s] for s in (slice(0, 2), slice(2, 4))
        ]  # two heads of two
        y = block.norm1(y + block.self_attn.out_proj(torch.cat(heads, -1)))
        run.keep(x=block.norm2(y + block.linear2(block.linear1(y).clamp(min=0))))
    return run["x"]


class MessagePassing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(FEATURES, FEATURES), nn.GRUCell(FEATURES, FEATURES)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        h, (source, target) = nodes, edges
        for _ in range(ROUNDS):
            heard = torch.zeros_like(h).index_add(0, target, self.message(h)[source])
            h = self.update(heard, h)
        return h


@case(
    MessagePassing,
    expected("iteration", "update", ROUNDS, rows=8, h=0),
    style="A gated graph network: six rounds of messages with one GRU cell. Torch's cell, and still no time.",
    inputs=lambda: ((drawn(8, FEATURES), torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 0], [1, 2, 3, 4, 5, 6, 7, 0, 4]])), {}),
    own_start="encoder",
    **NO_TIME,
)
def message_passing(model, nodes, edges, start):
    run = start(h=nodes)
    for _ in range(ROUNDS):
        sent, heard = model.message(run["h"]), zeros(8, FEATURES)
        for source, target in edges.T.tolist():
            heard[target] += sent[source]
        run.keep(h=gru_step(model.update, heard, run["h"]))
    return run["h"]


class Euler(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(FEATURES + 1, UNITS), nn.Tanh(), nn.Linear(UNITS, FEATURES))

    def forward(self, y: Tensor) -> Tensor:
        t, dt, path = 0.0, 0.1, []
        while t < 0.75:
            y = y + dt * self.field(torch.cat([y, torch.full_like(y[:, :1], t)], 1))
            t += dt
            path.append(y)
        return torch.stack(path, 1)


@case(
    Euler,
    expected("iteration", "", 8, y=0),
    style="A neural differential equation by Euler steps: time of its own, with nothing coming in.",
    inputs=features,
    own_start="encoder",
    **NO_TIME,
)
def neural_ode(model, y, start):
    run = start(y=y)
    for k in range(8):
        run.keep(y=run["y"] + 0.1 * model.field(torch.cat([run["y"], zeros(BATCH, 1) + 0.1 * k], 1)))
    return run.along("y")


class Slots(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mu, self.gru = nn.Parameter(torch.randn(1, 2, FEATURES)), nn.GRUCell(FEATURES, FEATURES)

    def forward(self, inputs: Tensor) -> Tensor:
        slots = self.mu + torch.randn(inputs.shape[0], 2, FEATURES)
        for _ in range(4):
            attention = torch.softmax(slots @ inputs.mT, dim=1) + 1e-8
            updates = (attention / attention.sum(-1, keepdim=True)) @ inputs
            slots = self.gru(updates.flatten(0, 1), slots.flatten(0, 1)).view_as(slots)
        return slots


@case(
    Slots,
    expected("iteration", "gru", 4, slots=0),
    style="Slot attention: slots compete for the same inputs in a few rounds; a GRU cell, but no time.",
    inputs=series,
    own_start="random",
    **NO_TIME,
)
def slot_attention(model, inputs, start):
    run = start(slots=model.mu + torch.randn(BATCH, 2, FEATURES))
    for _ in range(4):
        share = torch.einsum("bsf,btf->bst", run["slots"], inputs).softmax(1) + 1e-8
        share = share / share.sum(2, keepdim=True)
        new = [gru_step(model.gru, share[:, s : s + 1].bmm(inputs)[:, 0], run["slots"][:, s]) for s in range(2)]
        run.gave(slots=torch.stack(new, 1).flatten(0, 1))
        run.keep(slots=torch.stack(new, 1))
    return run["slots"]


class SharedMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(ROUNDS):
            x = x + F.gelu(self.block(x))
        return x


@case(
    SharedMLP,
    expected("iteration", "block", ROUNDS, x=0),
    style="A block with shared weights applied six times to a whole sequence, as in ALBERT.",
    inputs=series,
    own_start="encoder",
    **(NO_TIME | {"time_axis": 1}),
)
def shared_block(model, x, start):
    run = start(x=x)
    for _ in range(ROUNDS):
        inner = run["x"] @ model.block.weight.T + model.block.bias
        run.gave(x=inner)
        run.keep(x=run["x"] + F.gelu(inner))
    return run["x"]


class ResidualQuantizer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.codebooks = nn.Parameter(torch.randn(4, 8, FEATURES))

    def forward(self, z: Tensor) -> Tensor:
        residual, quantized = z, torch.zeros_like(z)
        for stage in range(4):
            nearest = torch.cdist(residual, self.codebooks[stage]).argmin(1)
            code = F.embedding(nearest, self.codebooks[stage])
            residual, quantized = residual - code, quantized + code
        return quantized


@case(
    ResidualQuantizer,
    expected("iteration none", "", 4, residual=0),
    style="Residual quantization, as in sound codecs: what is left over goes to the next codebook.",
    inputs=features,
    own_start="encoder",
    # The sum of codes only collects: it is the input less the residual.
    **NO_TIME,
)
def residual_quantizer(model, z, start):
    run, total = start(residual=z), zeros(BATCH, FEATURES)
    for book in model.codebooks:
        code = torch.stack([book[(row - book).pow(2).sum(1).argmin()] for row in run["residual"]])
        run.keep(residual=run["residual"] - code)
        total = total + code
    return total


class PositionTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("turn", torch.tensor([[0.8, -0.6], [0.6, 0.8]]))
        self.out = nn.Linear(FEATURES + 2, UNITS)

    def forward(self, x: Tensor) -> Tensor:
        angle, table = torch.tensor([1.0, 0.0]), []
        for _ in range(x.shape[1]):
            angle = self.turn @ angle
            table.append(angle)
        return self.out(torch.cat([x, torch.stack(table).expand(len(x), -1, -1)], 2))


@case(
    PositionTable,
    expected("iteration none", "", 7, angle=None),
    style="A table of positions made by turning a constant again and again: it repeats, but nobody's input is in it.",
    inputs=series,
    own_start=None,
    **(NO_TIME | {"time_axis": 1}),
)
def positions_by_turning(model, x, start):
    run = start(angle=torch.tensor([1.0, 0.0]))
    for _ in range(x.shape[1]):
        a, b = run["angle"]
        run.keep(angle=torch.stack([0.8 * a - 0.6 * b, 0.6 * a + 0.8 * b]))
    return model.out(torch.cat([x, run.along("angle", dim=0).expand(BATCH, -1, -1)], 2))
