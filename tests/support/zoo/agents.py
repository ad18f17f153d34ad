"""Models of the kind that act, read two sequences, or go both ways: RSSM, RIMs, masked episodes, trees."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .case import BATCH, FEATURES, STEPS, UNITS, Family, drawn, expected, gru_step, lstm_step, series, zeros
from .cells import NO_ARGUMENT

case = Family()


class RSSM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRUCell(UNITS, UNITS)
        self.embed, self.posterior = nn.Linear(2 + 2, UNITS), nn.Linear(UNITS + FEATURES, 4)

    def initial(self, batch: int) -> dict[str, Tensor]:
        return {"stoch": torch.zeros(batch, 2), "deter": torch.zeros(batch, UNITS)}

    def obs_step(self, prev_state: dict[str, Tensor], action: Tensor, embed: Tensor) -> dict[str, Tensor]:
        x = F.elu(self.embed(torch.cat([prev_state["stoch"], action], -1)))
        deter = self.gru(x, prev_state["deter"])
        mean, std = self.posterior(torch.cat([deter, embed], -1)).chunk(2, -1)
        return {"stoch": mean + F.softplus(std) * torch.randn_like(mean), "deter": deter}

    def forward(self, embed: Tensor, action: Tensor, state: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        state = self.initial(action.shape[0]) if state is None else state
        posts = []
        for e, a in zip(embed.unbind(1), action.unbind(1), strict=True):
            state = self.obs_step(state, a, e)
            posts.append(state)
        return {key: torch.stack([post[key] for post in posts], 1) for key in state}


@case(
    RSSM,
    expected("loop cell", "", derived=("stoch",), stoch=0, deter=0),
    style="RSSM of Dreamer: a dict of a drawn and a determined part; the step is a method, not a module.",
    inputs=lambda: ((drawn(BATCH, STEPS, FEATURES), drawn(BATCH, STEPS, 2, seed=3)), {}),
    carriable=True,
    own_start="zeros",
    resume=lambda model, states, embed, action: model(embed, action, states[0]),
    cut_inputs=(0, 1),
    join={"stoch": 1, "deter": 1},
)
def rssm(model, embed, action, start):
    run = start(stoch=zeros(BATCH, 2), deter=zeros())
    for t in range(embed.shape[1]):
        x = F.elu(model.embed(torch.cat([run["stoch"], action[:, t]], 1)))
        deter = gru_step(model.gru, x, run["deter"])
        out = model.posterior(torch.cat([deter, embed[:, t]], 1))
        run.keep(stoch=out[:, :2] + F.softplus(out[:, 2:]) * torch.randn(BATCH, 2), deter=deter)
    return {"stoch": run.along("stoch"), "deter": run.along("deter")}


class RIMCell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.key, self.query = nn.Linear(FEATURES, 3), nn.Linear(UNITS, 3)
        self.w_x = nn.Parameter(torch.randn(4, FEATURES, UNITS) / 2)
        self.w_h = nn.Parameter(torch.randn(4, UNITS, UNITS) / 2)

    def forward(self, x: Tensor, hs: Tensor) -> Tensor:
        scores = (self.query(hs) * self.key(x)[:, None]).sum(-1)
        active = torch.zeros_like(scores).scatter_(1, scores.topk(2, dim=1).indices, 1.0).unsqueeze(-1)
        new = torch.tanh(torch.einsum("bf,mfh->bmh", x, self.w_x) + torch.einsum("bmh,mhk->bmk", hs, self.w_h))
        return active * new + (1 - active) * hs


class RIM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = RIMCell()
        self.head = nn.Linear(4 * UNITS, 2)

    def forward(self, x: Tensor) -> Tensor:
        hs = torch.randn(x.size(0), 4, UNITS)
        for xs in x.split(1, 1):
            hs = self.cell(xs.squeeze(1), hs)
        return self.head(hs.flatten(1))


@case(
    RIM,
    expected("cell loop", "cell", track="cell", hs=0),
    style="Recurrent independent mechanisms: modules compete for the input, 3-D state, a start drawn at random.",
    inputs=series,
    carriable=True,
    own_start="random",
    resume=NO_ARGUMENT,
    join="last",
)
def rims(model, x, start):
    cell, run = model.cell, start(hs=torch.randn(BATCH, 4, UNITS))
    for t in range(x.shape[1]):
        hs = run["hs"].clone()
        for row in range(BATCH):
            scores = cell.query(run["hs"][row]) @ cell.key(x[row, t])
            for m in scores.topk(2).indices:
                hs[row, m] = torch.tanh(x[row, t] @ cell.w_x[m] + run["hs"][row, m] @ cell.w_h[m])
        run.keep(hs=hs)
    return model.head(run["hs"].flatten(1))


class Actor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.core = nn.LSTMCell(FEATURES, UNITS)
        self.policy = nn.Linear(UNITS, 2)

    def initial_state(self, batch: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(batch, UNITS), torch.zeros(batch, UNITS)

    def forward(self, obs: Tensor, done: Tensor, core_state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        logits, notdone = [], (~done).float()
        for frame, nd in zip(obs.unbind(), notdone.unbind(), strict=True):
            core_state = tuple(nd.view(-1, 1) * s for s in core_state)
            core_state = self.core(frame, core_state)
            logits.append(self.policy(core_state[0]))
        return torch.stack(logits), core_state


def episode():
    done = torch.zeros(STEPS, BATCH, dtype=torch.bool)
    done[3, 1] = done[5, 0] = True
    return (drawn(STEPS, BATCH, FEATURES), done, (zeros(), zeros())), {}


@case(
    Actor,
    expected("cell loop", "core", track="core", h=0, c=0),
    style="Actors in the style of torchbeast: the state is an argument of the model, masked where an episode begins.",
    inputs=episode,
    carriable=True,
    time_axis=0,
    own_start=None,
    resume=lambda model, states, obs, done, _: model(obs, done, (states[0]["h"], states[0]["c"])),
    cut_inputs=(0, 1),
    join=(0, "last"),
)
def masked_episodes(model, obs, done, core_state, start):
    run = start(h=core_state[0], c=core_state[1])
    for t in range(obs.shape[0]):
        live = 1 - done[t].float()[:, None]
        h, c = lstm_step(model.core, obs[t], run["h"] * live, run["c"] * live)
        run.keep(h=h, c=c)
    return model.policy(run.along("h", dim=0)), (run["h"], run["c"])


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(FEATURES, UNITS)

    def encode(self, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), UNITS)
        for frame in x.unbind(1):
            h = self.cell(frame, h)
        return h

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return torch.exp(-(self.encode(left) - self.encode(right)).abs().sum(1))


@case(
    Siamese,
    expected("cell loop", "cell", track="cell", h=0),
    expected("cell loop", "cell", STEPS - 2, track="cell", h=0),
    style="A Siamese network: one cell reads two sequences of different lengths, each from zero.",
    inputs=lambda: ((drawn(BATCH, STEPS, FEATURES), drawn(BATCH, STEPS - 2, FEATURES, seed=3)), {}),
    carriable=None,
    resume="the two inputs end at different times",
    own_start="zeros",
    join="last",
)
def one_cell_two_sequences(model, left, right, start):
    ends = []
    for x in (left, right):
        run = start(h=zeros())
        for t in range(x.shape[1]):
            run.keep(h=gru_step(model.cell, x[:, t], run["h"]))
        ends.append(run["h"])
    return (-(ends[0] - ends[1]).abs().sum(1)).exp()


class BothWays(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fwd, self.bwd = nn.GRUCell(FEATURES, UNITS), nn.GRUCell(FEATURES, UNITS)

    def forward(self, x: Tensor) -> Tensor:
        hf = hb = torch.zeros(x.shape[0], UNITS)
        steps = x.shape[1]
        left, right = [], [None] * steps
        for t in range(steps):
            hf = self.fwd(x[:, t], hf)
            left.append(hf)
        for t in reversed(range(steps)):
            hb = self.bwd(x[:, t], hb)
            right[t] = hb
        return torch.cat([torch.stack(left, 1), torch.stack(right, 1)], -1)


@case(
    BothWays,
    expected("cell loop", "fwd", track="fwd", hf=0),
    expected("cell loop", "bwd", track="bwd", hb=0),
    style="A bidirectional RNN by hand: one loop forth, one loop back. The backward part steps from the end.",
    inputs=series,
    carriable=False,
    resume="the loop back begins at the end of the whole",
    own_start="zeros",
)
def both_ways_by_hand(model, x, start):
    forth, back = start(hf=zeros()), start(hb=zeros())
    for t in range(x.shape[1]):
        forth.keep(hf=gru_step(model.fwd, x[:, t], forth["hf"]))
        back.keep(hb=gru_step(model.bwd, x[:, x.shape[1] - 1 - t], back["hb"]))
    return torch.cat([forth.along("hf"), back.along("hb").flip(1)], 2)


class TreeLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.iou, self.forget = nn.Linear(FEATURES + UNITS, 3 * UNITS), nn.Linear(FEATURES + UNITS, UNITS)

    def node(self, x: Tensor, children: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        h_sum = sum((h for h, _ in children), torch.zeros(x.shape[0], UNITS))
        i, o, u = self.iou(torch.cat([x, h_sum], 1)).chunk(3, 1)
        c = torch.sigmoid(i) * torch.tanh(u)
        for h_child, c_child in children:
            c = c + torch.sigmoid(self.forget(torch.cat([x, h_child], 1))) * c_child
        return torch.sigmoid(o) * torch.tanh(c), c

    def forward(self, x: Tensor, tree: dict) -> Tensor:
        def visit(index: int) -> tuple[Tensor, Tensor]:
            return self.node(x[:, index], [visit(child) for child in tree.get(index, ())])

        return visit(0)[0]


@case(
    TreeLSTM,
    expected("cell loop none", "", h=0, c=0),
    style="Child-sum TreeLSTM: what a node gives goes to its parent, so there is an order, but no time to cut.",
    inputs=lambda: ((drawn(BATCH, STEPS, FEATURES), {0: (1, 2), 1: (3, 4), 2: (5, 6)}), {}),
    carriable=None,
    resume="a tree has no time to cut",
    time_axis=None,
    own_start="zeros",
    idle={"h": "in a tree no state crosses from one step to the next", "c": "the same"},
)
def tree_lstm(model, x, tree, start):
    run, done = start(h=zeros(), c=zeros()), {}
    for index in (3, 4, 1, 5, 6, 2, 0):  # children first
        children = [done[child] for child in tree.get(index, ())]
        done[index] = model.node(x[:, index], children)
        run.keep(h=done[index][0], c=done[index][1])
    return done[0][0]


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(FEATURES, UNITS)

    def forward(self, x: Tensor) -> Tensor:
        h, out = torch.zeros(len(x), UNITS), []
        for frame in x.unbind(1):
            h = checkpoint(self.cell, frame, h, use_reentrant=False)
            out.append(h)
        return torch.stack(out, 1)


@case(
    Recomputed,
    expected("cell loop", "cell", track="cell", h=0),
    style="A cell under checkpointing: each step is computed again in the backward.",
    inputs=series,
    carriable=True,
    own_start="zeros",
    resume=NO_ARGUMENT,
)
def checkpointed_loop(model, x, start):
    run = start(h=zeros())
    for t in range(x.shape[1]):
        run.keep(h=gru_step(model.cell, x[:, t], run["h"]))
    return run.along("h")
