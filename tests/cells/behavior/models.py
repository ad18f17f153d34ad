"""Small recurrent models in the styles of public code; each notes its own state after every repetition."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.cells.behavior.noting import note

B, T, X, H = 3, 6, 4, 5


class Step(nn.Module):
    """A plain cell: next state from input and state."""

    def __init__(self, inputs: int = X, hidden: int = H) -> None:
        super().__init__()
        self.x, self.h = nn.Linear(inputs, hidden), nn.Linear(hidden, hidden)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return torch.tanh(self.x(x) + self.h(h))


class LongStep(nn.Module):
    """An LSTM cell that takes and gives a pair, or starts by itself."""

    def __init__(self, inputs: int = X, hidden: int = H) -> None:
        super().__init__()
        self.gates, self.hidden = nn.Linear(inputs + hidden, 4 * hidden), hidden

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        if state is None:
            state = (x.new_zeros(x.shape[0], self.hidden), x.new_zeros(x.shape[0], self.hidden))
        h, c = state
        i, f, g, o = self.gates(torch.cat([x, h], dim=-1)).chunk(4, dim=-1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        return h, (h, c)


class Elman(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.u = nn.Linear(X, H), nn.Linear(H, H)

    def forward(self, x):
        h = x.new_zeros(x.shape[0], H)
        outs = []
        for t in range(x.shape[1]):
            h = torch.tanh(self.w(x[:, t]) + self.u(h))
            note(h=h)
            outs.append(h)
        return torch.stack(outs, dim=1)


class ElmanTimeFirst(Elman):
    def forward(self, x):
        h = torch.zeros(x.shape[1], H)
        outs = []
        for x_t in x:
            h = torch.tanh(self.w(x_t) + self.u(h))
            note(h=h)
            outs.append(h)
        return torch.stack(outs), h


class Matrices(nn.Module):
    """Only functions and matrices; the first state is None."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(X, H) * 0.3)
        self.u = nn.Parameter(torch.randn(H, H) * 0.3)

    def forward(self, x):
        h, outs = None, []
        for x_t in x.unbind(1):
            z = x_t @ self.w
            h = torch.tanh(z if h is None else z + h @ self.u)
            note(h=h)
            outs += [h]
        return outs[-1]


class LearnedStart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h0, self.cell = nn.Parameter(torch.randn(1, H)), Step()

    def forward(self, x):
        h = self.h0.expand(x.shape[0], -1)
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
            note(h=h)
        return h


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = LongStep()

    def forward(self, x):
        state, outs = None, []
        for t in range(x.shape[1]):
            y, state = self.cell(x[:, t], state)
            note(h=state[0], c=state[1])
            outs.append(y)
        return torch.stack(outs, 1)


class Stacked(nn.Module):
    """Time outside, layers inside, nothing of torch between them."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList([Step(), Step(H), Step(H)])

    def forward(self, x):
        hs = [torch.zeros(x.shape[0], H) for _ in self.cells]
        outs = []
        for y in x.unbind(1):
            for i, cell in enumerate(self.cells):
                y = hs[i] = cell(y, hs[i])
            note(a=hs[0], b=hs[1], c=hs[2])
            outs.append(y)
        return torch.stack(outs, 1)


class LayerByLayer(nn.Module):
    """Layers outside, time inside."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.ModuleList([nn.Linear(X, H), nn.Linear(H, H)])
        self.u = nn.ModuleList([nn.Linear(H, H), nn.Linear(H, H)])

    def forward(self, x):
        for depth, (w, u) in enumerate(zip(self.w, self.u, strict=True)):
            h, outs = torch.zeros(x.shape[0], H), []
            for t in range(x.shape[1]):
                h = torch.tanh(w(x[:, t]) + u(h))
                note(**{f"h{depth}": h})
                outs.append(h)
            x = torch.stack(outs, 1)
        return x


class BothWays(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.forth, self.back = Step(), Step()

    def forward(self, x):
        h, k = torch.zeros(x.shape[0], H), torch.zeros(x.shape[0], H)
        forth, back = [], []
        for t in range(x.shape[1]):
            h = self.forth(x[:, t], h)
            note(h=h)
            forth.append(h)
        for t in reversed(range(x.shape[1])):
            k = self.back(x[:, t], k)
            note(k=k)
            back.insert(0, k)
        return torch.cat([torch.stack(forth, 1), torch.stack(back, 1)], -1)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = LongStep()

    def forward(self, x, mask):
        h = c = torch.zeros(x.shape[0], H)
        for t in range(x.shape[1]):
            m = mask[:, t, None]
            _, (h_new, c_new) = self.cell(x[:, t], (h, c))
            h = m * h_new + (1 - m) * h
            c = torch.where(m.bool(), c_new, c)
            note(h=h, c=c)
        return h


class Buffered(nn.Module):
    """States in a tensor made beforehand, written and read by index."""

    def __init__(self) -> None:
        super().__init__()
        self.u = nn.Linear(X, X)

    def forward(self, x):
        states = torch.zeros(x.shape[0], x.shape[1] + 1, X)
        for t in range(x.shape[1]):
            states[:, t + 1] = torch.tanh(self.u(states[:, t]) + x[:, t])
            note(h=states[:, t + 1].clone())
        return states[:, 1:]


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.u = nn.Linear(X, X)

    @torch.no_grad()
    def forward(self, x):
        h = torch.zeros(x.shape[0], X)
        out = torch.empty_like(x)
        for t in range(x.shape[1]):
            h.mul_(0.5).add_(torch.tanh(self.u(h) + x[:, t]))
            note(h=h.clone())
            out[:, t] = h
        return out


class Clockwork(nn.Module):
    """A part of the state is written in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.u = nn.Linear(X, X)

    @torch.no_grad()
    def forward(self, x):
        h = torch.zeros(x.shape[0], X)
        for t in range(x.shape[1]):
            new = torch.tanh(self.u(h) + x[:, t])
            width = 2 if t % 2 else X
            h[:, :width] = new[:, :width]
            note(h=h.clone())
        return h.clone()


class Dicts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.u = nn.Linear(X, H), nn.Linear(H, H)

    def step(self, x, state):
        fast = torch.tanh(self.w(x) + self.u(state["slow"]))
        return {"fast": fast, "slow": 0.9 * state["slow"] + 0.1 * fast + 0.01 * state["fast"]}

    def forward(self, x):
        zero = torch.zeros(x.shape[0], H)
        state = {"fast": zero, "slow": zero}
        for t in range(x.shape[1]):
            state = self.step(x[:, t], state)
            note(**state)
        return state["slow"]


class Moments(NamedTuple):
    mean: Tensor
    spread: Tensor


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(X, H)

    def forward(self, x):
        state = Moments(torch.zeros(x.shape[0], H), torch.ones(x.shape[0], H))
        outs = []
        for t in range(x.shape[1]):
            z = self.w(x[:, t])
            mean = 0.8 * state.mean + 0.2 * z
            state = Moments(mean, 0.8 * state.spread + 0.2 * (z - mean) ** 2)
            note(mean=state.mean, spread=state.spread)
            outs.append((z - state.mean) / state.spread.sqrt())
        return torch.stack(outs, 1)


@dataclass
class Latent:
    deter: Tensor
    stoch: Tensor


class Rssm(nn.Module):
    """A world model: a deterministic and a drawn part."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.prior = nn.GRUCell(H + X, H), nn.Linear(H, 2 * H)

    def forward(self, actions):
        state = Latent(torch.zeros(actions.shape[0], H), torch.zeros(actions.shape[0], H))
        for t in range(actions.shape[1]):
            deter = self.cell(torch.cat([state.stoch, actions[:, t]], -1), state.deter)
            mean, std = self.prior(deter).chunk(2, -1)
            stoch = torch.distributions.Normal(mean, F.softplus(std) + 0.1).rsample()
            state = Latent(deter, stoch)
            note(deter=deter, stoch=stoch)
        return state.deter


class Complex(nn.Module):
    """A diagonal state space model with complex states."""

    def __init__(self) -> None:
        super().__init__()
        self.log, self.b, self.c = nn.Parameter(torch.rand(H)), nn.Linear(X, H), nn.Linear(H, X)

    def forward(self, x):
        a = torch.exp(torch.complex(-self.log, self.log * 3))
        s = torch.zeros(x.shape[0], H, dtype=torch.cfloat)
        ys = []
        for t in range(x.shape[1]):
            s = a * s + self.b(x[:, t])
            note(s=s)
            ys.append(self.c(s.real))
        return torch.stack(ys, 1)


class FastWeights(nn.Module):
    """A matrix for each row as the state."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(X, H) for _ in range(3))

    def forward(self, x):
        m = torch.zeros(x.shape[0], H, H)
        outs = []
        for t in range(x.shape[1]):
            q, k, v = self.q(x[:, t]), self.k(x[:, t]), self.v(x[:, t])
            m = 0.9 * m + torch.einsum("bi,bj->bij", v, k)
            note(m=m)
            outs.append(torch.einsum("bij,bj->bi", m, q))
        return torch.stack(outs, 1)


class SelectiveScan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.proj = nn.Parameter(torch.rand(X, H)), nn.Linear(X, 2 * H + X)

    def forward(self, u):
        (b, length, d), n = u.shape, H
        delta, bs, cs = self.proj(u).split([d, n, n], dim=-1)
        delta = F.softplus(delta)
        da = torch.exp(torch.einsum("bld,dn->bldn", delta, -self.a))
        db = torch.einsum("bld,bln,bld->bldn", delta, bs, u)
        x = torch.zeros((b, d, n))
        ys = []
        for i in range(length):
            x = da[:, i] * x + db[:, i]
            note(x=x)
            ys.append(torch.einsum("bdn,bn->bd", x, cs[:, i, :]))
        return torch.stack(ys, dim=1)


class LastSeen(nn.Module):
    """GRU-D: the last value seen goes along with the state."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = Step(2 * X)

    def forward(self, x, mask):
        h, last = torch.zeros(x.shape[0], H), torch.zeros(x.shape[0], X)
        for t in range(x.shape[1]):
            m, v = mask[:, t, None], x[:, t]
            last = m * v + (1 - m) * last
            h = self.cell(torch.cat([last, m.expand_as(last)], -1), h)
            note(h=h, last=last)
        return h


class InputFeeding(nn.Module):
    """An attention decoder that is fed its own attention vector, under teacher forcing."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.join = LongStep(X + H), nn.Linear(2 * H, H)

    def forward(self, memory, targets):
        state = (memory.mean(1), torch.zeros_like(memory[:, 0]))
        feed = torch.zeros(memory.shape[0], H)
        outs = []
        for t in range(targets.shape[1]):
            h, state = self.cell(torch.cat([targets[:, t], feed], -1), state)
            weights = torch.softmax((memory @ h.unsqueeze(-1)).squeeze(-1), -1)
            context = (weights.unsqueeze(-1) * memory).sum(1)
            feed = torch.tanh(self.join(torch.cat([h, context], -1)))
            note(h=state[0], c=state[1], feed=feed)
            outs.append(feed)
        return torch.stack(outs, 1)


class AttentionSums(nn.Module):
    """Tacotron 2: attention that looks at the sum of its own weights."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.loc, self.out = Step(X + H), nn.Conv1d(2, 1, 3, padding=1), nn.Linear(H, X)

    def forward(self, memory, mels):
        batch, length, _ = memory.shape
        self.hidden = memory.new_zeros(batch, H)
        self.weights = memory.new_zeros(batch, length)
        self.total = memory.new_zeros(batch, length)
        self.context = memory.new_zeros(batch, H)
        outs = []
        for t in range(mels.shape[1]):
            outs.append(self.decode(memory, mels[:, t]))
        return torch.stack(outs, 1)

    def decode(self, memory, mel):
        self.hidden = self.cell(torch.cat([mel, self.context], -1), self.hidden)
        seen = torch.stack([self.weights, self.total], 1)
        energy = (memory @ self.hidden.unsqueeze(-1)).squeeze(-1) + self.loc(seen).squeeze(1)
        self.weights = torch.softmax(energy, -1)
        self.total = self.total + self.weights
        self.context = torch.bmm(self.weights.unsqueeze(1), memory).squeeze(1)
        note(hidden=self.hidden, weights=self.weights, total=self.total, context=self.context)
        return self.out(self.hidden)


class ConvLstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2 + 3, 12, 3, padding=1)

    def step(self, x, state):
        h, c = state
        i, f, o, g = torch.split(self.conv(torch.cat([x, h], 1)), 3, dim=1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c

    def forward(self, x):  # (B, T, 2, 4, 4)
        h, c = (torch.zeros(x.size(0), 3, 4, 4) for _ in range(2))
        outs = []
        for t in range(x.size(1)):
            h, c = self.step(x[:, t, :, :, :], (h, c))
            note(h=h, c=c)
            outs.append(h)
        return torch.stack(outs, 1)


class GraphCell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.cand = nn.Linear(X + H, H), nn.Linear(X + H, H)
        self.register_buffer("adjacency", torch.softmax(torch.randn(4, 4), -1))

    def forward(self, x, h):
        both = self.adjacency @ torch.cat([x, h], -1)
        z = torch.sigmoid(self.gate(both))
        return z * h + (1 - z) * torch.tanh(self.cand(both))


class Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = GraphCell()

    def forward(self, x):  # (B, T, nodes, X)
        h = torch.zeros(x.shape[0], x.shape[2], H)
        for t in range(x.shape[1]):
            h = self.cell.forward(x[:, t], h)
            note(h=h)
        return h


class Spiking(nn.Module):
    """A neuron that keeps its own potential, reset before every call."""

    def __init__(self) -> None:
        super().__init__()
        self.mem = None

    def reset(self) -> None:
        self.mem = None

    def forward(self, x):
        if self.mem is None:
            self.mem = torch.zeros_like(x)
        self.mem = 0.9 * self.mem + x
        spike = (self.mem > 0.5).float()
        self.mem = self.mem - 0.5 * spike
        note(mem=self.mem)
        return spike


class SpikingNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.lif = nn.Linear(X, H), Spiking()

    def forward(self, x):
        self.lif.reset()
        spikes = []
        for t in range(x.shape[1]):
            spikes.append(self.lif(self.fc(x[:, t])))
        return torch.stack(spikes, 1).mean(1)


class Reduced(nn.Module):
    """No loop statement at all."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.u = nn.Linear(X, H), nn.Linear(H, H)

    def step(self, h, x):
        h = torch.tanh(self.w(x) + self.u(h))
        note(h=h)
        return h

    def forward(self, x):
        return functools.reduce(self.step, x.unbind(1), torch.zeros(x.shape[0], H))


class Accumulated(Reduced):
    def forward(self, x):
        start = torch.zeros(x.shape[0], H)
        return torch.stack(list(itertools.accumulate(x.unbind(1), self.step, initial=start))[1:], 1)


class Generated(Reduced):
    def states(self, x):
        h = torch.zeros(x.shape[0], H)
        for x_t in x.unbind(1):
            h = self.step(h, x_t)
            yield h

    def forward(self, x):
        return torch.stack(list(self.states(x)), 1)


class WrittenOut(nn.Module):
    """A cell called line by line."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = Step()

    def forward(self, x):
        h1 = self.cell(x[:, 0], torch.zeros(x.shape[0], H))
        h2 = self.cell(x[:, 1], h1)
        h3 = self.cell(x[:, 2], h2)
        h4 = self.cell(x[:, 3], h3)
        note(h=h1), note(h=h2), note(h=h3), note(h=h4)
        return h4


class Recursive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = Step()

    def run(self, xs, h):
        if not xs:
            return h
        h = self.cell(xs[0], h)
        note(h=h)
        return self.run(xs[1:], h)

    def forward(self, x):
        return self.run(list(x.unbind(1)), torch.zeros(x.shape[0], H))


class While(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.u = nn.Linear(X, H), nn.Linear(H, H)

    def forward(self, x):
        h, t = torch.zeros(x.shape[0], H), 0
        while t < x.shape[1]:
            h = torch.relu(self.w(x.select(1, t)) + self.u(h))
            note(h=h)
            t += 1
        return h


class Chunked(nn.Module):
    """Chunks outside, steps inside, the state through both."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.u = nn.Linear(X, H), nn.Linear(H, H)

    def forward(self, x):
        h = torch.zeros(x.shape[0], H)
        for chunk in x.split(3, dim=1):
            h = h.detach()
            for t in range(chunk.shape[1]):
                h = torch.tanh(self.w(chunk[:, t]) + self.u(h))
                note(h=h)
        return h


class Unfolds(nn.Module):
    """An inner iteration within each step: a liquid time-constant cell."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.u = nn.Linear(X, H), nn.Linear(H, H)

    def forward(self, x):
        v = torch.zeros(x.shape[0], H)
        for t in range(x.shape[1]):
            drive = self.w(x[:, t])
            for _ in range(4):
                v = v + 0.1 * (torch.tanh(self.u(v) + drive) - v)
            note(v=v)
        return v


class StackedTensor(nn.Module):
    """The states of both layers as one tensor, taken apart and put together in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Step(), Step(H)

    def forward(self, x):
        h = torch.zeros(2, x.shape[0], H)
        for t in range(x.shape[1]):
            a = self.a(x[:, t], h[0])
            b = self.b(a, h[1])
            h = torch.stack([a, b])
            note(a=a, b=b)
        return h


class SecondOrder(nn.Module):
    """The last two states go along."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.u, self.v = nn.Linear(X, H), nn.Linear(H, H), nn.Linear(H, H)

    def forward(self, x):
        h1 = h2 = torch.zeros(x.shape[0], H)
        for t in range(x.shape[1]):
            h = torch.tanh(self.w(x[:, t]) + self.u(h1) + self.v(h2))
            h1, h2 = h, h1
            note(h1=h1, h2=h2)
        return h1


class WithLoss(nn.Module):
    """A sum of losses goes along and is no state."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = LongStep(), nn.Linear(H, 1)

    def forward(self, x, y):
        state, loss = None, 0.0
        for t in range(x.shape[1]):
            h, state = self.cell(x[:, t], state)
            note(h=state[0], c=state[1])
            loss = loss + F.mse_loss(self.out(h).squeeze(-1), y[:, t])
        return loss / x.shape[1]


class Dropped(nn.Module):
    """Random draws in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.u = nn.Linear(X, H), nn.Linear(H, H)

    def forward(self, x):
        h = torch.zeros(x.shape[0], H)
        for t in range(x.shape[1]):
            h = F.dropout(torch.tanh(self.w(x[:, t]) + self.u(h) + 0.1 * torch.randn_like(h)), 0.3, True)
            note(h=h)
        return h


class Tokens(nn.Module):
    """makemore: whole numbers in, an embedding in front."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.start, self.cell, self.head = (
            nn.Embedding(9, X),
            nn.Parameter(torch.zeros(1, H)),
            Step(),
            nn.Linear(H, 9),
        )

    def forward(self, idx, targets=None):
        b, t = idx.size()
        emb = self.embed(idx)
        hprev = self.start.expand((b, -1))
        hiddens = []
        for i in range(t):
            xt = emb[:, i, :]
            ht = self.cell(xt, hprev)
            hprev = ht
            note(h=ht)
            hiddens.append(ht)
        return self.head(torch.stack(hiddens, 1)), None


class MyGru(nn.Module):
    """A layer of the user's own: a sequence in, a sequence and the last state out."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.u = nn.Linear(X, 3 * H), nn.Linear(H, 3 * H)

    def forward(self, x, h=None):
        if h is None:
            h = x.new_zeros(x.shape[0], H)
        ys = []
        for t in range(x.shape[1]):
            (a, b, c), (d, e, f) = self.w(x[:, t]).chunk(3, -1), self.u(h).chunk(3, -1)
            z, r = torch.sigmoid(a + d), torch.sigmoid(b + e)
            h = (1 - z) * torch.tanh(c + r * f) + z * h
            note(h=h)
            ys.append(h)
        return torch.stack(ys, 1), h


class WithMyGru(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = MyGru(), nn.Linear(H, 2)

    def forward(self, x):
        y, _ = self.gru(x)
        return self.head(y)


class EmptyStart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = Step()

    def forward(self, x):
        h = torch.zeros(0)
        for t in range(x.shape[1]):
            if h.numel() == 0:
                h = x.new_zeros(x.shape[0], H)
            h = self.cell(x[:, t], h)
            note(h=h)
        return h


class Whole(nn.Module):
    """States that are whole numbers: a finite automaton."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randint(0, 7, (7, 5)))

    def forward(self, symbols):
        q = torch.zeros(symbols.shape[0], dtype=torch.long)
        outs = []
        for t in range(symbols.shape[1]):
            q = self.table[q, symbols[:, t]]
            note(q=q)
            outs.append(q)
        return torch.stack(outs, 1)


class Scalar(nn.Module):
    """A number without axes goes along: a running scale."""

    def __init__(self) -> None:
        super().__init__()
        self.u = nn.Linear(X, X)

    def forward(self, x):
        h, scale = torch.zeros(x.shape[0], X), torch.ones(())
        for t in range(x.shape[1]):
            scale = 0.9 * scale + 0.1 * x[:, t].abs().mean()
            h = torch.tanh(self.u(h) + x[:, t] / scale)
            note(h=h, scale=scale)
        return h


class OneHand(nn.Module):
    """torch's own cell, unless somebody knows it."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(X, H)

    def forward(self, x):
        h = c = torch.zeros(x.shape[0], H)
        for t in range(x.shape[1]):
            h, c = self.cell(x[:, t], (h, c))
            note(h=h, c=c)
        return h


class Normed(nn.Module):
    """A norm outside the cell is on the way: what crosses is what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.norm = Step(), nn.LayerNorm(H)

    def forward(self, x):
        h = torch.zeros(x.shape[0], H)
        for t in range(x.shape[1]):
            h = self.norm(self.cell(x[:, t], h))
            note(h=h)
        return h


class Memory(nn.Module):
    """A neural Turing machine in small: memory, weights, controller."""

    def __init__(self) -> None:
        super().__init__()
        self.controller, self.key, self.add, self.erase = (
            LongStep(X + H),
            nn.Linear(H, H),
            nn.Linear(H, H),
            nn.Linear(H, H),
        )

    def forward(self, x):
        b = x.shape[0]
        memory, read, state = torch.full((b, 7, H), 0.1), torch.zeros(b, H), None
        outs = []
        for t in range(x.shape[1]):
            h, state = self.controller(torch.cat([x[:, t], read], 1), state)
            w = torch.softmax(F.cosine_similarity(memory, self.key(h).unsqueeze(1), dim=-1), 1).unsqueeze(-1)
            memory = memory * (1 - w * torch.sigmoid(self.erase(h)).unsqueeze(1)) + w * self.add(h).unsqueeze(1)
            read = (w * memory).sum(1)
            note(memory=memory, read=read, h=state[0], c=state[1])
            outs.append(read)
        return torch.stack(outs, 1)


class Branches(nn.Module):
    """Every other step is computed elsewhere in the code."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.u = nn.Linear(X, H), nn.Linear(H, H)

    def forward(self, x):
        h = torch.zeros(x.shape[0], H)
        for t in range(x.shape[1]):
            z = self.w(x[:, t])
            if t % 2 == 0:
                h = torch.tanh(self.u(h) + z)
            else:
                z = torch.relu(z)
                h = torch.sin(z - self.u(h))
            note(h=h)
        return h


class Detaches(nn.Module):
    """Truncated by hand, with two parts of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.u = nn.Linear(X, H), nn.Linear(H, H)

    def forward(self, x):
        h, v = torch.zeros(x.shape[0], H), torch.zeros(x.shape[0], H)
        for t, x_t in enumerate(x.unbind(1)):
            if t % 2 == 0:
                h, v = h.detach(), v.detach()
            v = 0.9 * v + self.w(x_t)
            h = torch.tanh(self.u(h) + v)
            note(h=h, v=v)
        return h


class Restarts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.u = nn.Linear(X, H), nn.Linear(H, H)

    def forward(self, x):
        h = torch.zeros(x.shape[0], H)
        for t in range(x.shape[1]):
            if t == 3:
                h = torch.ones(x.shape[0], H)
            h = torch.tanh(self.u(h) + self.w(x[:, t]))
            note(h=h)
        return h


class BrokenOff(nn.Module):
    """The last turn of the loop only finds out that it is over."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.u = nn.Linear(X, H), nn.Linear(H, H)

    def forward(self, x):
        h, t = torch.zeros(x.shape[0], H), 0
        padded = F.pad(x, (0, 0, 0, 1))
        while True:
            x_t = padded[:, t]
            if t == x.shape[1]:
                break
            h = torch.tanh(self.u(h) + self.w(x_t))
            note(h=h)
            t += 1
        return h


class RowsLeft(nn.Module):
    """allennlp: only rows that go on are written."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.u = nn.Linear(X, H), nn.Linear(H, H)

    def forward(self, x):
        state = x.new_zeros(x.shape[0], H)
        for t in range(x.shape[1]):
            rows = max(1, x.shape[0] - t // 2)
            new = torch.tanh(self.w(x[:rows, t]) + self.u(state[:rows].clone()))
            state = state.clone()
            state[:rows] = new
            note(h=state.clone())
        return state


class SharedCell(nn.Module):
    """One cell for three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = Step(H)
        self.first = nn.Linear(X, H)

    def forward(self, x):
        hs = [torch.zeros(x.shape[0], H) for _ in range(3)]
        for x_t in self.first(x).unbind(1):
            y = x_t
            for i in range(3):
                y = hs[i] = self.cell(y, hs[i])
            note(a=hs[0], b=hs[1], c=hs[2])
        return y


class Memories(nn.Module):
    """spikingjelly: states behind `__getattr__`, in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self._memories = {"v": 0.0}

    def __getattr__(self, name):
        held = self.__dict__.get("_memories", {})
        return held[name] if name in held else super().__getattr__(name)

    def __setattr__(self, name, value):
        if name in self.__dict__.get("_memories", {}):
            self._memories[name] = value
        else:
            super().__setattr__(name, value)

    def forward(self, x):
        if isinstance(self.v, float):
            self.v = torch.full_like(x, self.v)
        self.v = self.v + (x - self.v) / 2
        spike = (self.v >= 0.2).to(x)
        self.v = (1 - spike) * self.v
        note(v=self.v)
        return spike


class MemoriesNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.node = nn.Linear(X, H), Memories()

    def forward(self, x):
        self.node._memories["v"], rate = 0.0, 0.0
        for t in range(x.shape[1]):
            rate = rate + self.node(self.fc(x[:, t]))
        return rate / x.shape[1]
