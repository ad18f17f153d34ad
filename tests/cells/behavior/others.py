"""Models that repeat without time, keep their state from call to call, or hide it from a trace."""

from __future__ import annotations

import threading

import torch
import torch.nn.functional as F
from torch import nn

B, T, X, H = 3, 6, 4, 5


class Plain(nn.Module):
    """Two maps that all models here may use."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.u = nn.Linear(X, X), nn.Linear(X, X)

    def step(self, x, h):
        return torch.tanh(self.w(x) + self.u(h))


# Iterations


class Raft(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.look, self.cell, self.move = (
            nn.Linear(X, H),
            nn.Linear(2, X),
            nn.GRUCell(X, H),
            nn.Linear(H, 2),
        )

    def forward(self, x):
        h = torch.tanh(self.encode(x.mean(1)))
        flow = torch.zeros(x.shape[0], 2)
        for _ in range(8):
            h = self.cell(self.look(flow), h)
            flow = flow + self.move(h)
        return flow


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(X, 2, 8, batch_first=True)

    def forward(self, x):
        for _ in range(6):
            x = self.block(x)
        return x


class Sampler(Plain):
    def forward(self, x):
        z = torch.randn_like(x[:, 0])
        for i in range(5):
            z = z - 0.1 * self.w(z + i) + 0.01 * torch.randn_like(z)
        return z


class Slots(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.key, self.mu = nn.GRUCell(X, X), nn.Linear(X, X), nn.Parameter(torch.randn(1, 1, X))

    def forward(self, x):
        slots, keys = self.mu + torch.randn(x.shape[0], 3, X), self.key(x)
        for _ in range(3):
            updates = (slots @ keys.transpose(1, 2)).softmax(1) @ x
            slots = self.cell(updates.reshape(-1, X), slots.reshape(-1, X)).reshape(slots.shape)
        return slots


class Unrolled(Plain):
    """LISTA: the same input again and again."""

    def forward(self, x):
        z = torch.zeros_like(x)
        for _ in range(5):
            z = F.softshrink(self.w(x) + self.u(z))
        return z


class Sinkhorn(Plain):
    def forward(self, x):
        a = self.w(x)
        for _ in range(5):
            a = a - a.logsumexp(1, keepdim=True)
            a = a - a.logsumexp(2, keepdim=True)
        return a


class Greedy(nn.Module):
    """A decoder that is fed its own output only."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell, self.out = nn.Embedding(9, X), nn.GRUCell(X, H), nn.Linear(H, 9)

    def forward(self, x):
        h, token, outs = torch.zeros(x.shape[0], H), x.sum((1, 2)).long() % 9, []
        for _ in range(7):
            h = self.cell(self.embed(token), h)
            outs.append(self.out(h))
            token = outs[-1].argmax(-1)
        return torch.stack(outs, 1)


# Attributes


class Keeps(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.h = None

    def forward(self, x):
        if self.h is None or self.h.shape[0] != x.shape[0]:
            self.h = torch.zeros(x.shape[0], X)
        self.h = self.step(x[:, 0], self.h).detach()
        return 2 * self.h


class KeepsBuffer(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("h", torch.zeros(B, X))

    def forward(self, x):
        self.h.copy_(self.step(x[:, 0], self.h).detach())
        return 2 * self.h


class KeepsInDict(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.states = {}

    def forward(self, x):
        h = self.states.get("h")
        self.states["h"] = self.step(x[:, 0], torch.zeros_like(x[:, 0]) if h is None else h).detach()
        return self.states["h"]


class LoopsOn(Plain):
    """A loop that goes on from what the last call left."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("h", torch.zeros(B, X))

    def forward(self, x):
        outs = []
        for t in range(x.shape[1]):
            self.h = self.step(x[:, t], self.h).detach()
            outs.append(self.h)
        return torch.stack(outs, 1)


class Segments(nn.Module):
    """Transformer-XL: the last inputs are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.memory = nn.Linear(X, 3 * X), None

    def forward(self, x):
        whole = x if self.memory is None else torch.cat([self.memory, x], 1)
        q, k, v = self.qkv(whole).chunk(3, -1)
        self.memory = x[:, -2:].detach()
        return F.scaled_dot_product_attention(q[:, -x.shape[1] :], k, v)


# Caches


class KeyCache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qk, self.keys = nn.Linear(X, 2 * X), None

    def forward(self, x):
        q, k = self.qk(x).chunk(2, -1)
        self.keys = k if self.keys is None else torch.cat([self.keys, k], 1)
        return (q @ self.keys.transpose(1, 2)).softmax(-1).sum(-1)


class KeysInLoop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(X, X), nn.Linear(X, X)

    def forward(self, x):
        keys, outs = None, []
        for t in range(x.shape[1]):
            k = self.k(x[:, t : t + 1])
            keys = k if keys is None else torch.cat([keys, k], 1)
            outs.append((self.q(x[:, t : t + 1]) @ keys.transpose(1, 2)).softmax(-1) @ keys)
        return torch.cat(outs, 1)


# Not sure


class Halting(Plain):
    def forward(self, x):
        h, t, halted = torch.zeros(x.shape[0], X), 0, torch.zeros(x.shape[0], 1)
        while t < x.shape[1] and (halted < 2.5).any():
            h = self.step(x[:, t], h)
            halted = halted + torch.sigmoid(h.sum(-1, keepdim=True))
            t += 1
        return h


class ThroughNumpy(Plain):
    def forward(self, x):
        h = torch.zeros(x.shape[0], X)
        for t in range(x.shape[1]):
            h = torch.from_numpy(h.detach().numpy() * 0.5) + x[:, t]
        return h


class InNumbers(Plain):
    """The state is a Python number."""

    def forward(self, x):
        mean, outs = 0.0, []
        for t in range(x.shape[1]):
            mean = 0.9 * mean + 0.1 * x[:, t].mean().item()
            outs.append(self.w(x[:, t] - mean))
        return torch.stack(outs, 1)


class WrittenOutByHand(Plain):
    def forward(self, x):
        h = torch.tanh(self.w(x[:, 0]))
        h = torch.tanh(F.linear(h, self.u.weight) + x[:, 1])
        h = torch.tanh(F.linear(h, self.u.weight) + x[:, 2])
        return torch.tanh(F.linear(h, self.u.weight) + x[:, 3])


class Mapped(Plain):
    def forward(self, x):
        h = torch.zeros(x.shape[0], X)
        step = torch.vmap(self.step)
        for t in range(x.shape[1]):
            h = step(x[:, t], h)
        return h


class InThread(Plain):
    def forward(self, x):
        found = []

        def work():
            h = torch.zeros(x.shape[0], X)
            for t in range(x.shape[1]):
                h = torch.tanh(self.u(h) + x[:, t])
            found.append(h)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        return found[0]


class Scan(nn.Module):
    """minGRU: a recurrence without a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(X, 2 * X)

    def forward(self, x):
        gate, value = self.w(x).chunk(2, -1)
        keep = F.logsigmoid(-gate).cumsum(1)
        return torch.exp(keep + torch.logcumsumexp(F.logsigmoid(gate) + value.abs().log() - keep, 1))


class Shrinking(Plain):
    """Rows that end leave the batch."""

    def forward(self, x):
        h, outs = torch.zeros(x.shape[0], X), []
        for t in range(x.shape[1]):
            rows = max(1, x.shape[0] - t // 2)
            h = self.step(x[:rows, t], h[:rows])
            outs.append(h)
        return torch.cat(outs)


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(X, H, batch_first=True)

    def forward(self, x):
        return self.lstm(x)[0]
