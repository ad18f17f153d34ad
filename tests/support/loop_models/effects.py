"""Tricky: the loop does more than compute: attributes, lines, hooks, buffers, writes in place, random streams."""

from __future__ import annotations

import io
import logging
from contextlib import contextmanager, redirect_stdout

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from .by_index import GRUModel
from .case import FEATURES, UNITS, Family, doing, normal, series, setting

case = Family("effects")


class Stepped(GRUModel):
    """The plain loop that most of these change a little."""

    def step(self, x_t, h):
        return self.cell(x_t, h)

    def forward(self, x):
        h, ys = self.start(x), []
        for t in range(x.size(1)):
            h = self.step(x[:, t], h)
            ys.append(self.out(h))
        return torch.stack(ys, 1)


def of(name):
    """Look at an attribute after the call, as numbers that can be compared."""

    def seen(model):
        value = getattr(model, name)
        if isinstance(value, torch.Tensor):
            return value.detach().clone()
        return [x.tolist() if isinstance(x, torch.Tensor) else x for x in value] if isinstance(value, list) else value

    return seen


@case(series(), expect="may", why="the state is kept in an attribute, and the next call goes on from it", seen=of("h"))
class StatefulLayer(Stepped):
    h = None

    def forward(self, x):
        self.h = self.start(x) if self.h is None or self.h.size(0) != x.size(0) else self.h.detach()
        ys = []
        for x_t in x.unbind(1):
            self.h = self.cell(x_t, self.h)
            ys.append(self.h)
        return torch.stack(ys, 1)


def _two_calls(model, x):
    return model(x[:, :3]), model(x[:, 3:]) if x.size(1) > 3 else None


case(
    series(),
    name="stateful_layer_in_pieces",
    expect="may",
    why="goes on in the second call",
    call=_two_calls,
    seen=of("h"),
)(StatefulLayer)


@case(series(), expect="leave", why="a list of the model grows by each step", seen=of("history"))
class KeepsHistory(Stepped):
    def __init__(self):
        super().__init__()
        self.history = []

    def step(self, x_t, h):
        h = self.cell(x_t, h)
        self.history.append(h.detach().mean().item())
        return h


@case(series(), expect="leave", why="a list of the model holds tensors of each step", seen=of("activations"))
class KeepsTensors(Stepped):
    def forward(self, x):
        self.activations = []
        h = self.start(x)
        for x_t in x.unbind(1):
            h = self.cell(x_t, h)
            self.activations.append(h)
        return self.out(h)


@case(series(), expect="leave", why="a counter of the model, which the step reads", seen=of("calls"))
class CountsCalls(Stepped):
    calls = 0

    def step(self, x_t, h):
        self.calls += 1
        return self.cell(x_t, h) / (1 + 0.01 * self.calls)


@case(series(), expect="leave", why="a dict of the model, filled by step", seen=lambda model: sorted(model.cache))
class FillsCache(Stepped):
    def __init__(self):
        super().__init__()
        self.cache = {}

    def forward(self, x):
        h = self.start(x)
        for t, x_t in enumerate(x.unbind(1)):
            h = self.cell(x_t, h)
            self.cache[t] = h.detach()
        return h


def _with_what_is_printed(model, x):
    with redirect_stdout(io.StringIO()) as lines:
        y = model(x)
    return y, lines.getvalue()


@case(series(), expect="leave", why="prints in each step", call=_with_what_is_printed)
class Prints(Stepped):
    def step(self, x_t, h):
        print("shape", tuple(x_t.shape))
        return self.cell(x_t, h)


LOG = logging.getLogger("a.model.somewhere")


def _with_what_is_logged(model, x):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    level = LOG.level
    LOG.addHandler(handler)
    LOG.setLevel(logging.DEBUG)
    try:
        return model(x), len(lines), lines[-1]
    finally:
        LOG.removeHandler(handler)
        LOG.setLevel(level)


@case(series(), expect="leave", why="logs in each step", call=_with_what_is_logged)
class Logs(Stepped):
    def step(self, x_t, h):
        h = self.cell(x_t, h)
        LOG.debug("largest %.3f", h.detach().abs().max())
        return h


class Hooked(Stepped):
    """A plain loop whose user has put hooks on the cell."""

    def __init__(self, kind):
        super().__init__()
        self.noted = []
        note = lambda *args: self.noted.append(len(args))  # noqa: E731
        if kind == "forward":
            self.cell.register_forward_hook(note)
        elif kind == "changing":
            self.cell.register_forward_pre_hook(lambda module, args: (2 * args[0], args[1]))
        elif kind == "output":
            self.out.register_forward_hook(lambda module, args, out: 0.5 * out)
        elif kind == "backward":
            self.out.register_full_backward_hook(note)
        elif kind == "tensor":
            self.step = lambda x_t, h: self.clipped(self.cell(x_t, h))

    @staticmethod
    def clipped(h):
        if h.requires_grad:
            h.register_hook(lambda grad: grad.clamp(-0.05, 0.05))
        return h


for kind, why in {
    "forward": "a hook on the cell notes each step",
    "changing": "a hook changes what the cell is given",
    "output": "a hook on another module in the loop changes what it gives",
    "backward": "a backward hook on a module in the loop",
    "tensor": "gradients of the state are clipped by a hook, which no value shows",
}.items():
    case(
        series(),
        name=f"hooked_{kind}",
        builder=lambda kind=kind: Hooked(kind),
        expect="leave",
        why=why,
        seen=of("noted"),
    )(Hooked)


def _hook_later(model):
    model.noted = []
    model.cell.register_forward_hook(lambda *args: model.noted.append(1))


@case(
    series(),
    why="a hook comes between two calls",
    later=doing(_hook_later),
    seen=lambda model: len(getattr(model, "noted", [])),
)
class HookedLater(Stepped):
    pass


@case(series(), why="dropout in the step, drawn as the loop draws", doubles=False, later=doing(nn.Module.eval))
class DropoutInTheStep(Stepped):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.3)

    def step(self, x_t, h):
        return self.cell(self.drop(x_t), F.dropout(h, 0.2, self.training))


@case(series(), expect="may", why="noise of a generator of its own", doubles=False, seen=lambda m: m.gen.get_state())
class OwnGenerator(Stepped):
    def __init__(self):
        super().__init__()
        self.gen = torch.Generator().manual_seed(5)

    def step(self, x_t, h):
        return self.cell(x_t + 0.1 * torch.randn(x_t.shape, generator=self.gen), h)


@case(series(), expect="may", why="batch statistics are updated by each step, one after the other", least=2)
class BatchNormInTheStep(Stepped):
    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm1d(UNITS)

    def step(self, x_t, h):
        return torch.tanh(self.bn(self.cell(x_t, h))) if len(h) > 1 else self.cell(x_t, h)


@case(series(), expect="may", why="a buffer follows the state, and the step reads it", least=1)
class MovingAverageBuffer(Stepped):
    def __init__(self):
        super().__init__()
        self.register_buffer("ema", torch.zeros(UNITS))

    def step(self, x_t, h):
        h = self.cell(x_t, h)
        with torch.no_grad():
            self.ema.mul_(0.9).add_(0.1 * h.mean(0))
        return h - 0.5 * self.ema.clone()


@case(series(), expect="leave", why="the weights themselves change in the loop", seen=of("plastic"))
class Hebbian(Stepped):
    def __init__(self):
        super().__init__()
        self.register_buffer("plastic", torch.zeros(UNITS, UNITS))

    def step(self, x_t, h):
        new = torch.tanh(self.cell(x_t, h) + h @ self.plastic.clone())
        self.plastic = 0.95 * self.plastic + 0.05 * (h.detach().T @ new.detach()) / len(h)
        return new


@case(series(), expect="may", why="each use of the weight makes a step of power iteration")
class SpectralNormCell(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.u = nn.Linear(FEATURES, UNITS), parametrizations.spectral_norm(nn.Linear(UNITS, UNITS))

    def forward(self, x):
        h = x.new_zeros(x.size(0), UNITS)
        for x_t in x.unbind(1):
            h = torch.tanh(self.w(x_t) + self.u(h))
        return h


@case(series(), why="the weight is made of two parameters at each use")
class WeightNormCell(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.u = nn.Linear(FEATURES, UNITS), parametrizations.weight_norm(nn.Linear(UNITS, UNITS))

    def forward(self, x):
        h = x.new_zeros(x.size(0), UNITS)
        for x_t in x.unbind(1):
            h = torch.tanh(self.w(x_t) + self.u(h))
        return h


SCALE = 1.0


@contextmanager
def _another_scale(model):
    global SCALE
    SCALE = 0.5
    yield
    SCALE = 1.0


@case(series(), expect="may", why="a number of the file is read in the step", later=_another_scale)
class GlobalScale(Stepped):
    def step(self, x_t, h):
        return SCALE * self.cell(x_t, h)


@case(series(), expect="may", why="the state is updated in place")
class InPlaceLeak(Stepped):
    def forward(self, x):
        h, ys = self.start(x), []
        drive = torch.tanh(x @ self.cell.weight_ih[:UNITS].T)
        for t in range(x.size(1)):
            h *= 0.9
            h += drive[:, t]
            ys.append(h.clone())
        return self.out(torch.stack(ys, 1))


@case(series(), expect="may", why="all collected outputs are the one tensor that is written in place")
class CollectsWithoutCopying(Stepped):
    def forward(self, x):
        h, ys = self.start(x), []
        for x_t in x.unbind(1):
            h.mul_(0.9).add_(x_t @ self.cell.weight_ih[:UNITS].T)
            ys.append(h)
        return torch.stack(ys, 1)


@case(series(UNITS), expect="may", why="the state is a view of the input, which is written to", input_grads=False)
class WritesIntoItsInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Linear(UNITS, UNITS)

    def forward(self, x):
        h = x[:, 0]
        for t in range(1, x.size(1)):
            h += 0.1 * x[:, t].detach()
        return self.w(h), x.clone()


@case(series(), expect="may", why="both states are rows of one tensor, written by index")
class ViewsOfOneTensor(Stepped):
    def forward(self, x):
        state = x.new_zeros(2, x.size(0), UNITS)
        ys = []
        for x_t in x.unbind(1):
            h, c = state[0].clone(), state[1].clone()
            new = self.cell(x_t, h)
            state = state.clone()
            state[0], state[1] = new, 0.5 * c + new
            ys.append(state[1])
        return torch.stack(ys, 1)


@case(series(), expect="may", why="a part of the state is written in place, the rest is kept")
class HalfIsWritten(Stepped):
    def step(self, x_t, h):
        new = h.clone()
        new[:, : UNITS // 2] = self.cell(x_t, h)[:, : UNITS // 2]
        return new


def _tables(batch, steps):
    return normal(batch, steps, FEATURES), (normal(batch, steps, salt=2).abs() * 10).long() % 4


@case(_tables, expect="may", why="rows of a memory are overwritten by index: index_put on the state")
class SlotMemory(Stepped):
    def forward(self, x, slots):
        memory = x.new_zeros(x.size(0), 4, UNITS)
        rows = torch.arange(x.size(0))
        for t in range(x.size(1)):
            memory = memory.clone()
            memory[rows, slots[:, t]] = self.cell(x[:, t], memory[rows, slots[:, t]])
        return memory


case(series(), name="alpha_is_set", why="an attribute of the model is set between calls", later=setting(alpha=0.9))(
    type("Leaky", (Stepped,), {"alpha": 0.3, "step": lambda self, x, h: h + self.alpha * (self.cell(x, h) - h)})
)
