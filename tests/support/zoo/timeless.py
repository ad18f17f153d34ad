"""Models that go along time without a state: each step by itself, or all steps at once."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .case import BATCH, FEATURES, STEPS, UNITS, Family, drawn, series
from .cells import MakemoreCell

case = Family()


class PerStep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(FEATURES, UNITS)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([torch.relu(self.fc(x[:, t])) for t in range(x.shape[1])], 1)


@case(
    PerStep,
    style="A head applied to each step in a loop.",
    why="Nothing crosses: all steps can be done at once.",
    inputs=series,
    carriable=True,
)
def head_for_each_step(model, x, start):
    return model.fc(x).clamp(min=0)


class FreshCell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = MakemoreCell()

    def forward(self, x: Tensor) -> Tensor:
        out = torch.empty(len(x), 0, UNITS)
        for frame in x.unbind(1):
            h = self.cell(frame, torch.zeros(len(x), UNITS))
            out = torch.cat([out, h[:, None]], 1)
        return out


@case(
    FreshCell,
    style="A recurrent cell that gets new zeros at each step, its outputs joined to a growing tensor.",
    why="What the cell gives is never handed back; the growing tensor only collects.",
    inputs=series,
    carriable=True,
)
def cell_never_fed_back(model, x, start):
    layer = model.cell.xh_to_h
    return (x @ layer.weight[:, :FEATURES].T + layer.bias).tanh()


class SummedLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        loss = torch.zeros(())
        for t in range(x.shape[1] - 1):
            loss = loss + F.mse_loss(self.fc(x[:, t]), x[:, t + 1])
        return loss


@case(
    SummedLoss,
    style="A loss summed over steps in a loop.",
    why="The sum only collects: no step reads it.",
    inputs=series,
)
def summed_loss(model, x, start):
    return (model.fc(x[:, :-1]) - x[:, 1:]).pow(2).mean((0, 2)).sum()


class CausalConvolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv1d(FEATURES, FEATURES, 2, dilation=2**k) for k in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        for k, conv in enumerate(self.convs):
            x = x + torch.relu(conv(F.pad(x, (2**k, 0))))
        return x.transpose(1, 2)


@case(
    CausalConvolutions,
    style="A temporal convolutional network, causal and dilated.",
    why="It looks back without keeping anything; pieces differ, and there is no state that could mend it.",
    inputs=series,
    carriable=False,
)
def causal_convolutions(model, x, start):
    for k, conv in enumerate(model.convs):
        back = torch.cat([torch.zeros(BATCH, 2**k, FEATURES), x], 1)[:, : x.shape[1]]
        x = x + (back @ conv.weight[..., 0].T + x @ conv.weight[..., 1].T + conv.bias).clamp(min=0)
    return x


class WindowLoop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3 * FEATURES, UNITS)

    def forward(self, x: Tensor) -> Tensor:
        padded, out = F.pad(x, (0, 0, 2, 0)), []
        for t in range(x.shape[1]):
            out.append(torch.tanh(self.fc(padded[:, t : t + 3].flatten(1))))
        return torch.stack(out, 1)


@case(
    WindowLoop,
    style="A loop over windows of the input, as in autoregressive forecasters that are trained in parallel.",
    why="Steps share inputs, and give nothing to each other.",
    inputs=series,
    carriable=False,
)
def loop_over_windows(model, x, start):
    windows = F.pad(x, (0, 0, 2, 0)).unfold(1, 3, 1).transpose(2, 3).flatten(2)
    return model.fc(windows).tanh()


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(FEATURES, 2, 8, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x)


def attended(attention, query, memory, mask=None):
    """Torch's attention with two heads of two, by its own weights."""
    (w_q, w_k, w_v), (b_q, b_k, b_v) = attention.in_proj_weight.chunk(3), attention.in_proj_bias.chunk(3)
    q, k, v = query @ w_q.T + b_q, memory @ w_k.T + b_k, memory @ w_v.T + b_v
    heads = []
    for s in (slice(0, 2), slice(2, 4)):
        scores = q[..., s] @ k[..., s].mT / 2**0.5
        heads.append((scores if mask is None else scores + mask).softmax(-1) @ v[..., s])
    return attention.out_proj(torch.cat(heads, -1))


@case(
    Encoder,
    style="Torch's transformer encoder of three layers.",
    why="Depth, and attention to all steps at once.",
    inputs=series,
    carriable=False,
)
def transformer_encoder(model, x, start):
    for layer in model.encoder.layers:
        x = layer.norm1(x + attended(layer.self_attn, x, x))
        x = layer.norm2(x + layer.linear2(layer.linear1(x).clamp(min=0)))
    return x


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(FEATURES, 2, 8, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.layer(x, memory, tgt_mask=mask)


@case(
    Decoder,
    style="Torch's causal transformer decoder, with a memory to attend to.",
    why="No cache: each call computes all steps, and the memory stays as it is.",
    inputs=lambda: ((*series()[0], drawn(BATCH, 6, FEATURES, seed=3)), {}),
    carriable=False,
)
def transformer_decoder(model, x, memory, start):
    layer, mask = model.layer, torch.full((x.shape[1], x.shape[1]), -torch.inf).triu(1)
    x = layer.norm1(x + attended(layer.self_attn, x, x, mask))
    x = layer.norm2(x + attended(layer.multihead_attn, x, memory))
    return layer.norm3(x + layer.linear2(layer.linear1(x).clamp(min=0)))


class FourierMixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(FEATURES, UNITS)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real)


@case(
    FourierMixing,
    style="FNet: an FFT over time and features in place of attention.",
    why="All steps at once.",
    inputs=series,
    carriable=False,
    tolerance=1e-5,
)
def fourier_mixing(model, x, start):
    def turns(n):
        return torch.exp(-2j * torch.pi * torch.outer(torch.arange(n), torch.arange(n)) / n).to(torch.cfloat)

    return model.fc((turns(x.shape[1]) @ x.to(torch.cfloat) @ turns(FEATURES)).real)


class CumulativeFeatures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * FEATURES, UNITS)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.cat([x, x.cumsum(1)], -1))


@case(
    CumulativeFeatures,
    style="Cumulative sums of the input as additional features.",
    why="One operation on the input, before any weight, and no place for a state. Yet it looks across a cut, so pieces "
    "differ from the whole: that is to be said where someone carries this model, but no state may be named.",
    inputs=series,
    carriable=False,
)
def cumulative_features(model, x, start):
    sums = torch.tril(torch.ones(x.shape[1], x.shape[1])) @ x
    return model.fc(torch.cat([x, sums], -1))


class RotaryCache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.cos = nn.Linear(FEATURES, UNITS), None

    def forward(self, x: Tensor) -> Tensor:
        if self.cos is None or self.cos.shape[0] < x.shape[1]:
            self.cos = torch.cos(torch.arange(x.shape[1])[:, None] * torch.tensor([1.0, 0.5, 0.25, 0.1]))
        return self.fc(x * self.cos[: x.shape[1]])


@case(
    RotaryCache,
    style="A table of positions that the first call fills and later calls read.",
    why="A cache of constants, the same for every input. Positions are counted from zero, so pieces differ.",
    inputs=series,
    carriable=False,
)
def table_filled_at_first(model, x, start):
    angles = torch.outer(torch.arange(x.shape[1]).float(), torch.tensor([1.0, 0.5, 0.25, 0.1]))
    return model.fc(x * angles.cos())


class RowLoop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.score = nn.Linear(FEATURES, UNITS), nn.Linear(UNITS, 1)

    def forward(self, bags: Tensor) -> Tensor:
        pooled = []
        for row in bags:
            h = torch.tanh(self.embed(row))
            pooled.append((self.score(h).softmax(0) * h).sum(0))
        return torch.stack(pooled)


@case(
    RowLoop,
    style="Attention pooling over bags, one row of the batch at a time.",
    why="The loop goes over rows, and rows are strangers to each other.",
    inputs=lambda: ((drawn(8, STEPS, FEATURES),), {}),
)
def loop_over_rows(model, bags, start):
    h = model.embed(bags).tanh()
    return (model.score(h).softmax(1) * h).sum(1)
