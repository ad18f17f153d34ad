"""Models without a state that crosses in time: nothing may be claimed of them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

B, T, X = 3, 6, 4


class Mlp(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(layer for _ in range(4) for layer in (nn.Linear(X, X), nn.ReLU())))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU()) for _ in range(5)]
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x.mean((2, 3))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(X, 2, 8, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4)

    def forward(self, x):
        mask = torch.triu(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool), 1)
        return self.encoder(x, mask=mask)


class HandTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.ModuleList([nn.Linear(X, 3 * X) for _ in range(4)])
        self.norms = nn.ModuleList([nn.LayerNorm(X) for _ in range(4)])

    def forward(self, x):
        for qkv, norm in zip(self.qkv, self.norms, strict=True):
            q, k, v = qkv(norm(x)).chunk(3, -1)
            x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Transformer(X, 2, 3, 3, 8, batch_first=True)

    def forward(self, x):
        return self.inner(x, x.flip(1))


class PerStep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(X, X)

    def forward(self, x):
        return torch.stack([self.fc(x[:, t]) for t in range(x.shape[1])], 1)


class LossSum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(X, 1)

    def forward(self, x):
        loss = torch.zeros(())
        for t in range(x.shape[1]):
            loss = loss + self.fc(x[:, t]).pow(2).mean()
        return loss / x.shape[1]


class InPlaceSum(PerStep):
    def forward(self, x):
        total = torch.zeros_like(x[:, 0])
        for t in range(x.shape[1]):
            total += torch.relu(self.fc(x[:, t]))
        return total


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(X, 4), nn.ModuleList([nn.Linear(X, X) for _ in range(4)])

    def forward(self, x):
        x = x.reshape(-1, X)
        weights = self.gate(x).softmax(-1)
        top = weights.argmax(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = torch.where(top == i)[0]
            out.index_add_(0, rows, weights[rows, i, None] * expert(x[rows]))
        return out


class Ensemble(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.members = nn.ModuleList([nn.Linear(X, X) for _ in range(5)])

    def forward(self, x):
        votes = 0
        for member in self.members:
            votes = votes + member(x)
        return votes / len(self.members)


class Codebook(nn.Module):
    """Statistics that rows share, kept from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(X)
        self.register_buffer("codes", torch.randn(5, X))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        x = self.norm(x.reshape(-1, X))
        nearest = torch.cdist(x, self.codes).argmin(-1)
        hot = F.one_hot(nearest, 5).float()
        with torch.no_grad():
            self.codes.mul_(0.9).add_(0.1 * hot.t() @ x)
            self.calls += 1
        return self.codes[nearest]


class NormPerStep(nn.Module):
    """Batch normalization within a loop over time."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc = nn.BatchNorm1d(X), nn.utils.spectral_norm(nn.Linear(X, X))

    def forward(self, x):
        return torch.stack([self.fc(self.norm(x[:, t])) for t in range(x.shape[1])], 1)


class Positions(nn.Module):
    """A recurrence of constants: rotations for positions."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(X, X)

    def forward(self, x):
        turn, angle, rows = torch.tensor([[0.8, -0.6], [0.6, 0.8]]), torch.tensor([1.0, 0.0]), []
        for _ in range(x.shape[1]):
            angle = turn @ angle
            rows.append(angle)
        return self.fc(x) + torch.stack(rows).repeat(1, X // 2)


class Augment(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(X, X)

    def forward(self, x):
        views = []
        for _ in range(4):
            views.append(self.net(x + 0.1 * torch.randn_like(x)))
        return torch.stack(views).mean(0)


class CausalConv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv1d(X, X, 2, dilation=2**i) for i in range(3)])

    def forward(self, x):
        x = x.transpose(1, 2)
        for i, conv in enumerate(self.convs):
            x = torch.relu(conv(F.pad(x, (2**i, 0)))) + x
        return torch.fft.irfft(torch.fft.rfft(x), n=x.shape[-1])


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(X, 2, batch_first=True)

    def forward(self, x):
        return self.inner(x, x, x)[0]


class Unet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv1d(X, X, 3, stride=2, padding=1) for _ in range(3)])
        self.up = nn.ModuleList([nn.Conv1d(2 * X, X, 3, padding=1) for _ in range(3)])

    def forward(self, x):
        x = x.transpose(1, 2)
        skips = []
        for down in self.down:
            skips.append(x)
            x = torch.relu(down(x))
        for up in self.up:
            skip = skips.pop()
            x = up(torch.cat([F.interpolate(x, size=skip.shape[-1]), skip], 1))
        return x


class Rows(nn.Module):
    """A loop over the rows of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(X, X)

    def forward(self, x):
        out = torch.empty_like(x)
        for b in range(x.shape[0]):
            out[b] = self.fc(x[b])
        return out


class LastOutput(nn.Module):
    """Something is kept for whoever looks at it, and never read."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.last = nn.Linear(X, X), None

    def forward(self, x):
        self.last = self.fc(x)
        return self.last


class MaxOverTime(PerStep):
    def forward(self, x):
        best = torch.full_like(x[:, 0], -1e9)
        for t in range(x.shape[1]):
            best = torch.maximum(best, self.fc(x[:, t]))
        return best


class Pyramid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.laterals = nn.ModuleList([nn.Conv1d(X, X, 1) for _ in range(3)])

    def forward(self, x):
        x = x.transpose(1, 2)
        levels = [lateral(F.avg_pool1d(x, 2**i, ceil_mode=True)) for i, lateral in enumerate(self.laterals)]
        top, outs = levels[-1], []
        for level in reversed(levels[:-1]):
            top = level + F.interpolate(top, size=level.shape[-1])
            outs.append(top)
        return outs[-1]


class Mixture(nn.Module):
    """Tokens to experts by index, added where they came from; one gate for all."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(X, 4), nn.ModuleList([nn.Linear(X, X) for _ in range(4)])

    def forward(self, x):
        flat = x.reshape(-1, X)
        weights, chosen = self.gate(flat).topk(2)
        weights, out = weights.softmax(-1), torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            rows, nth = torch.where(chosen == i)
            out[rows] += weights[rows, nth, None].detach() * expert(flat[rows]).detach()
        return out.reshape(x.shape)


class ResidualCodes(nn.Module):
    """Codebooks that are buffers, one after the other on what is left."""

    def __init__(self) -> None:
        super().__init__()
        for i in range(4):
            self.register_buffer(f"codes{i}", torch.randn(7, X))

    def forward(self, x):
        rest, out = x.reshape(-1, X), 0
        for i in range(4):
            codes = getattr(self, f"codes{i}")
            near = codes[torch.cdist(rest, codes).argmin(-1)]
            rest = rest - near
            out = out + near
        return out


class Detr(nn.Module):
    """Decoder layers of their own around one shared norm and head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.TransformerDecoderLayer(X, 2, 8, batch_first=True) for _ in range(4)])
        self.norm, self.query = nn.LayerNorm(X), nn.Parameter(torch.randn(5, X))

    def forward(self, x):
        out = self.query.expand(x.shape[0], -1, -1)
        steps = []
        for layer in self.layers:
            out = self.norm(layer(out, x))
            steps.append(out)
        return torch.stack(steps)


class Queue(nn.Module):
    """MoCo: a queue of keys in a buffer, shared by all rows, read by the next call."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.place = nn.Linear(X, X), 0
        self.register_buffer("queue", torch.randn(X, 12))

    def forward(self, x):
        keys = F.normalize(self.fc(x[:, 0]), dim=-1)
        logits = keys @ self.queue.clone().detach()
        with torch.no_grad():
            self.queue[:, self.place : self.place + x.shape[0]] = keys.t()
        return logits


class Teacher(nn.Module):
    """A moving average of weights, written within the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(X, X), nn.Linear(X, X)

    def forward(self, x):
        with torch.no_grad():
            for mine, its in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                mine.data.mul_(0.9).add_(0.1 * its.data)
        return self.student(x) - self.teacher(x)


class ByHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(X, 3 * X)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        outs = []
        for h in range(2):
            part = slice(2 * h, 2 * h + 2)
            outs.append((q[..., part] @ k[..., part].transpose(1, 2)).softmax(-1) @ v[..., part])
        return torch.cat(outs, -1)


ALL = [
    Mlp, ResNet, Transformer, HandTransformer, EncoderDecoder, PerStep, LossSum, InPlaceSum, Experts, Ensemble,
    Codebook, NormPerStep, Positions, Augment, CausalConv, Heads, Unet, Rows, LastOutput, MaxOverTime, Pyramid,
    Mixture, ResidualCodes, Detr, Queue, Teacher, ByHeads,
]  # fmt: skip
