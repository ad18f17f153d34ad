"""Models without any recurrence: depth, experts, statistics, counters, and names that promise too much.

The oracle of a decoy computes the same in another order, or at once: what has no state does not mind.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from .case import BATCH, FEATURES, UNITS, Family, drawn, series

case = Family()

FLAT = {"inputs": lambda: ((drawn(BATCH, FEATURES),), {}), "time_axis": None}


class MLP(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(FEATURES, UNITS), nn.ReLU(), nn.Linear(UNITS, UNITS), nn.ReLU(), nn.Linear(UNITS, 2))


@case(MLP, style="A plain perceptron.", why="Each layer has weights of its own.", **FLAT)
def mlp(model, x, start):
    for layer in (model[0], model[2]):
        x = (x @ layer.weight.T + layer.bias).clamp(min=0)
    return model[4](x)


class DeepStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(FEATURES, FEATURES) for _ in range(8)])

    def forward(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            h = torch.tanh(layer(h)) + h
        return h


@case(
    DeepStack,
    style="Eight equal blocks in a loop, h = f(h) + h.",
    why="The operations repeat, the weights do not: that is depth.",
    **FLAT,
)
def deep_stack(model, h, start):
    for layer in model.layers:
        h = h + (h @ layer.weight.T + layer.bias).tanh()
    return h


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.blocks = nn.ModuleList([nn.Conv2d(4, 4, 3, padding=1) for _ in range(4)])
        self.norms = nn.ModuleList([nn.BatchNorm2d(4) for _ in range(4)])

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image)
        for conv, norm in zip(self.blocks, self.norms, strict=True):
            x = F.relu(x + norm(conv(x)))
        return x.mean((2, 3))


@case(
    ResNet,
    style="A residual network in training, with batch normalization.",
    why="Depth; and what its norms keep is shared by all rows.",
    inputs=lambda: ((drawn(BATCH, 3, 5, 5),), {}),
    time_axis=None,
)
def resnet(model, image, start):
    x = model.stem(image)
    for conv, norm in zip(model.blocks, model.norms, strict=True):
        y = conv(x)
        spread = (y.var((0, 2, 3), correction=0, keepdim=True) + norm.eps).sqrt()
        y = (y - y.mean((0, 2, 3), keepdim=True)) / spread
        x = (x + y * norm.weight.view(4, 1, 1) + norm.bias.view(4, 1, 1)).clamp(min=0)
    return x.mean((2, 3))


class Normalizer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(FEATURES))
        self.register_buffer("count", torch.tensor(1.0))
        self.fc = nn.Linear(FEATURES, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.count += len(x)
        self.mean += (x.detach() - self.mean).sum(0) / self.count
        return self.fc(x - self.mean)


@case(
    Normalizer,
    style="Running normalization of observations, as agents do it.",
    why="A mean over all rows is a statistic: no row has one of its own.",
    changes_itself=True,
    **FLAT,
)
def running_statistics(model, x, start):
    return model.fc(x - x.sum(0) / (1 + BATCH))


class Codebook(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(6, FEATURES))
        self.register_buffer("sizes", torch.ones(6))

    def forward(self, z: Tensor) -> Tensor:
        near = torch.cdist(z, self.codes).argmin(1)
        hot = F.one_hot(near, 6).float()
        quantized = self.codes[near]
        if self.training:
            self.sizes.mul_(0.9).add_(0.1 * hot.sum(0))
            self.codes.mul_(0.9).add_(0.1 * (hot.T @ z) / self.sizes[:, None])
        return z + (quantized - z).detach()


@case(
    Codebook,
    style="A VQ codebook that is averaged in training.",
    why="All rows share the codes.",
    changes_itself=True,
    **FLAT,
)
def averaged_codebook(model, z, start):
    return torch.stack([model.codes[(row - model.codes).norm(dim=1).argmin()] for row in z])


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = parametrizations.spectral_norm(nn.Linear(FEATURES, UNITS), n_power_iterations=2)
        norm = self.fc.parametrizations.weight[0]
        norm._v.copy_(F.normalize(torch.randn(FEATURES), dim=0))  # not at rest yet, as in training

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


@case(
    Spectral,
    style="Spectral normalization, which refines a vector in its buffers in each call.",
    why="A power iteration on a weight: no input is in it.",
    changes_itself=True,
    **FLAT,
)
def spectral_norm(model, x, start):
    norm, weight = model.fc.parametrizations.weight[0], model.fc.parametrizations.weight.original
    u, v = norm._u, norm._v
    for _ in range(2):
        u = F.normalize(weight.detach() @ v, dim=0)
        v = F.normalize(weight.detach().T @ u, dim=0)
    return x @ (weight / (u @ weight @ v)).T + model.fc.bias


class Scheduled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(FEATURES, UNITS)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.last_output = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last_output = F.dropout(self.fc(x), 0.1 * min(int(self.calls), 5), self.training)
        return self.last_output


@case(
    Scheduled,
    style="A dropout schedule by a count of calls, and an attribute that keeps the last output for a logger.",
    why="The count knows nothing of the input, and nobody reads the kept output.",
    changes_itself=True,
    **FLAT,
)
def counter_and_kept_output(model, x, start):
    return F.dropout(model.fc(x), 0.1, True)


class Queue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(FEATURES, UNITS)
        self.register_buffer("queue", F.normalize(torch.randn(9, UNITS), dim=1))

    def forward(self, x: Tensor) -> Tensor:
        q = F.normalize(self.fc(x), dim=1)
        logits = q @ self.queue.T
        self.queue = torch.cat([self.queue[len(x) :], q.detach()])
        return logits


@case(
    Queue,
    style="MoCo: a queue of earlier batches to compare with.",
    why="Every row sees all rows of earlier batches: shared, though made of rows.",
    changes_itself=True,
    **FLAT,
)
def queue_of_negatives(model, x, start):
    q = model.fc(x)
    return torch.einsum("bu,nu->bn", q / q.norm(dim=1, keepdim=True), model.queue)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(FEATURES, 4)
        self.experts = nn.ModuleList([nn.Linear(FEATURES, UNITS) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        weights, out = self.gate(x).softmax(-1), torch.zeros(*x.shape[:-1], UNITS)
        for k, expert in enumerate(self.experts):
            out = out + weights[..., k : k + 1] * expert(x)
        return out


@case(
    Experts,
    style="A mixture of experts, summed in a loop.",
    why="The sum only collects; its order does not matter.",
    inputs=series,
    carriable=True,
)
def mixture_of_experts(model, x, start):
    every = torch.stack([expert(x) for expert in model.experts], -1)
    return (every * model.gate(x).softmax(-1)[..., None, :]).sum(-1)


class Ensemble(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.members = nn.ModuleList([MLP() for _ in range(5)])

    def forward(self, x: Tensor) -> Tensor:
        total = 0
        for member in self.members:
            total = total + member(x)
        return total / len(self.members)


@case(Ensemble, style="An ensemble, averaged in a loop.", why="Members know nothing of each other.", **FLAT)
def ensemble(model, x, start):
    return torch.stack([member(x) for member in reversed(model.members)]).mean(0)


class Augmented(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(FEATURES, UNITS)

    def forward(self, x: Tensor) -> Tensor:
        views = [self.fc(x + 0.1 * torch.randn_like(x)) for _ in range(6)]
        return torch.stack(views).mean(0)


@case(
    Augmented,
    style="Test-time augmentation: six noisy views through one network.",
    why="One network, called six times, and never with what it gave before.",
    **FLAT,
)
def augmentation_loop(model, x, start):
    noise = torch.stack([torch.randn(BATCH, FEATURES) for _ in range(6)])
    return model.fc(x + 0.1 * noise).mean(0)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(FEATURES, FEATURES) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(lambda y, block=block: F.silu(block(y)), x, use_reentrant=False)
        return x


@case(Checkpointed, style="A perceptron whose blocks are recomputed in the backward.", why="Depth.", **FLAT)
def checkpointed_mlp(model, x, start):
    for block in model.blocks:
        y = block(x)
        x = y * y.sigmoid()
    return x


class HiddenStateCell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_size, self.hidden_size = FEATURES, UNITS
        self.hidden, self.output = nn.Linear(FEATURES, UNITS), nn.Linear(UNITS, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden_state = torch.tanh(self.hidden(x))
        return self.output(hidden_state)


@case(HiddenStateCell, style="A perceptron by the name of HiddenStateCell.", why="Names are hints only.", **FLAT)
def hidden_state_cell_by_name(model, x, start):
    return (x @ model.hidden.weight.T + model.hidden.bias).tanh() @ model.output.weight.T + model.output.bias


class CrossAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden_size = UNITS
        self.q, self.kv = nn.Linear(FEATURES, UNITS), nn.Linear(UNITS, 2 * UNITS)

    def forward(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        k, v = self.kv(memory).chunk(2, -1)
        return F.scaled_dot_product_attention(self.q(x), k, v), memory


@case(
    CrossAttention,
    style="Cross-attention with hidden_size and forward(x, memory), which also returns the memory.",
    why="The memory comes back as it went in: nothing is made of it.",
    inputs=lambda: ((*series()[0], drawn(BATCH, 6, UNITS)), {}),
    carriable=True,
    join=(1, "last"),
)
def cross_attention(model, x, memory, start):
    kv = model.kv(memory)
    weights = (torch.einsum("btu,bmu->btm", model.q(x), kv[..., :UNITS]) / UNITS**0.5).softmax(-1)
    return weights @ kv[..., UNITS:], memory
