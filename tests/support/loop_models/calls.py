"""Tricky: plain loops called in unusual ways, written with unusual means, or changed between two calls."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .case import FEATURES, UNITS, VOCAB, Family, doing, normal, series, tokens
from .effects import Stepped

case = Family("calls")


def plain(name, call=None, **more):
    """The plain loop under a name, with a way to call it or something that is done to it later."""
    case(series(), name=name, **({"call": call} if call else {}), **more)(Stepped)


def _gradient_penalty(model, x):
    x = x.clone().requires_grad_()
    y = model(x)
    (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    return y, slope.square().sum()


def _functional(model, x):
    weights = {name: 0.9 * value for name, value in model.named_parameters()}
    return torch.func.functional_call(model, weights, (x,))


def _per_sample_gradients(model, x):
    weights = {name: value.detach() for name, value in model.named_parameters()}

    def loss(weights, row):
        return torch.func.functional_call(model, weights, (row.unsqueeze(0),)).square().mean()

    return torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, x)


def _in_inference_mode(model, x):
    with torch.inference_mode():
        return model(x)


def _in_autocast(model, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(x)


def _several_lengths(model, x):
    return [model(x[:, :steps]) for steps in (x.size(1), 1, 3, 5, 2) if steps <= x.size(1)]


def _several_batches(model, x):
    return [model(x), model(x[:1]), model(x.repeat(3, 1, 1)), model(x[:, :1])]


def _gradients_of_inputs(model, x):
    x = x.clone().requires_grad_()
    y = model(x)
    (slope,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    return y, slope


def _with_strides(model, x):
    return model(x.transpose(0, 1).contiguous().transpose(0, 1)), model(x[..., :].expand_as(x)), model(x.flip(1))


def _checkpointed(model, x):
    return checkpoint(model, x, use_reentrant=False)


plain("double_backward", _gradient_penalty, why="gradients of gradients")
plain("functional_call", _functional, expect="may", why="called with weights that are not its own")
plain("per_sample_gradients", _per_sample_gradients, expect="may", why="vmap of grad", grads=False)
plain("inference_mode", _in_inference_mode, why="no gradients at all", grads=False)
plain("no_grad", torch.no_grad()(lambda model, x: model(x)), why="no gradients at all", grads=False)
plain("autocast_around", _in_autocast, why="half precision by autocast", doubles=False)
plain("several_lengths", _several_lengths, why="another length in each call, also one step alone")
plain("several_batches", _several_batches, why="another number of rows in each call, also one row")
plain("gradients_of_inputs", _gradients_of_inputs, why="the gradient of the input is asked for")
plain("strided_inputs", _with_strides, why="inputs that do not lie in order in memory")
plain("checkpointed", _checkpointed, why="run again in the backward pass")
plain("forward_by_name", lambda model, x: model.forward(x), expect="may", why="forward is called, not the model")


def _step_of_sgd(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(0.1 * parameter.sign())


def _replaced_parameter(model):
    model.cell.weight_hh = nn.Parameter(0.5 * model.cell.weight_hh.detach())


def _another_step(model):
    model.step = lambda x_t, h: torch.tanh(model.cell(x_t, h) * 2)


plain("weights_updated", why="an optimizer's step between calls", later=doing(_step_of_sgd))
plain("parameter_replaced", why="a parameter is replaced between calls", later=doing(_replaced_parameter))
plain(
    "cell_replaced",
    why="a module is replaced by one of another kind between calls",
    later=doing(lambda model: setattr(model, "cell", nn.RNNCell(FEATURES, UNITS))),
)
plain("method_replaced", why="the user puts another step into the model", later=doing(_another_step))
plain("cell_frozen", why="some weights no longer learn", later=doing(lambda model: model.cell.requires_grad_(False)))
plain(
    "grown_double",
    lambda model, x: model(x.to(model.out.weight.dtype)),
    why="the model goes to float64",
    later=doing(nn.Module.double),
)


@case(series(), why="only a part of the weights learns")
class PartlyFrozen(Stepped):
    def __init__(self):
        super().__init__()
        self.cell.weight_hh.requires_grad_(False)
        self.cell.bias_ih.requires_grad_(False)


@case(series(), expect="may", why="no steps at all: the state comes back as it was", least=0)
class PerhapsNoSteps(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.h0 = nn.GRUCell(FEATURES, UNITS), nn.Parameter(torch.randn(UNITS))

    def forward(self, x):
        h = self.h0.expand(x.size(0), UNITS)
        for x_t in x.unbind(1) if x.size(1) else ():
            h = self.cell(x_t, h)
        return h


@case(series(), why="a row alone, without a batch", call=lambda model, x: [model(row) for row in x])
class Unbatched(Stepped):
    def forward(self, x):
        if x.dim() == 2:
            return super().forward(x.unsqueeze(0)).squeeze(0)
        return super().forward(x)


@case(series(), expect="may", why="the step runs partly without gradients")
class TargetWithoutGradient(Stepped):
    def forward(self, x):
        h, losses = self.start(x), []
        for x_t in x.unbind(1):
            new = self.cell(x_t, h)
            with torch.no_grad():
                target = F.normalize(new + x_t.mean(-1, keepdim=True), dim=-1)
            losses.append((F.normalize(self.cell(x_t, new), dim=-1) - target).square().sum(-1))
            h = new
        return torch.stack(losses, 1)


@case(series(), expect="may", why="autocast within the step: the state changes its dtype on the way", doubles=False)
class AutocastWithin(Stepped):
    def step(self, x_t, h):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = F.linear(x_t, self.cell.weight_ih[:UNITS]) + F.linear(h, self.cell.weight_hh[:UNITS])
        return torch.tanh(y).float()


@case(series(), expect="may", why="the state starts in one dtype and goes on in another", doubles=False)
class WidensAtTheFirstStep(Stepped):
    def forward(self, x):
        h, total = torch.zeros(x.size(0), UNITS), 0
        for x_t in x.unbind(1):
            h = torch.tanh(F.linear(x_t.double(), self.cell.weight_ih[:UNITS].double()) + 0.5 * h)
            total = total + h
        return total


@case(series(), expect="may", why="the state starts with one row and has all from the first step on")
class BroadcastsAtTheFirstStep(Stepped):
    def start(self, x):
        return x.new_zeros(1, UNITS)

    def step(self, x_t, h):
        return torch.tanh(x_t @ self.cell.weight_ih[:UNITS].T + h @ self.cell.weight_hh[:UNITS].T)


@case(series(), expect="may", why="try and except around the step")
class TriesAndExcepts(Stepped):
    def step(self, x_t, h):
        try:
            return self.cell(x_t, h)
        except RuntimeError:
            return h


def each_state(cell, x, h):
    for x_t in x.unbind(1):
        h = cell(x_t, h)
        yield h


@case(series(), expect="may", why="the loop is a generator")
class Generator(Stepped):
    def forward(self, x):
        return torch.stack([self.out(h) for h in each_state(self.cell, x, self.start(x))], 1)


@case(series(), expect="may", why="the loop is a recursion")
class Recursive(Stepped):
    def unfold(self, xs, h):
        return [] if not xs else [h := self.cell(xs[0], h), *self.unfold(xs[1:], h)]

    def forward(self, x):
        return torch.stack(self.unfold(x.unbind(1), self.start(x)), 1)


@case(
    lambda batch, steps: (list(normal(batch, steps, FEATURES).unbind(1)),),
    expect="may",
    why="the list that the user gave is empty afterwards",
)
class EatsItsInput(Stepped):
    def forward(self, frames):
        h = frames[0].new_zeros(len(frames[0]), UNITS)
        while frames:
            h = self.cell(frames.pop(0), h)
        return h, len(frames)


class CalledOtherwise(nn.GRUCell):
    def __call__(self, x, h):
        return 0.5 * super().__call__(x, h) + 0.5 * h


@case(series(), expect="may", why="the cell's class has a __call__ of its own")
class OwnCall(Stepped):
    def __init__(self):
        super().__init__()
        self.cell = CalledOtherwise(FEATURES, UNITS)


@case(series(), expect="may", why="gradients are taken within the step, and gradients go through them")
class PredictiveCoding(nn.Module):
    """Each step settles its state by descent on an energy."""

    def __init__(self):
        super().__init__()
        self.dynamics, self.decode = nn.Linear(UNITS, UNITS), nn.Linear(UNITS, FEATURES)

    def forward(self, x):
        h = x.new_zeros(x.size(0), UNITS)
        for x_t in x.unbind(1):
            with torch.enable_grad():
                prior = torch.tanh(self.dynamics(h))
                energy = (self.decode(prior) - x_t).square().sum()
                (slope,) = torch.autograd.grad(energy, prior, create_graph=True)
            h = prior - 0.1 * slope
        return h


@case(series(), expect="may", why="each step is checkpointed")
class CheckpointedSteps(Stepped):
    def step(self, x_t, h):
        return checkpoint(self.cell, x_t, h, use_reentrant=False)


@case(series(), expect="may", why="iterations of the same step on a fixed input: no time axis at all")
class RefinedEstimate(Stepped):
    """The update operator of optical flow: correlate, update, add."""

    def __init__(self, iterations=8):
        super().__init__()
        self.iterations, self.delta = iterations, nn.Linear(UNITS, FEATURES)

    def forward(self, x):
        context, h, flow, flows = x.mean(1), self.start(x), torch.zeros_like(x[:, 0]), []
        for _ in range(self.iterations):
            flow = flow.detach()
            h = self.cell(context - flow, h)
            flow = flow + self.delta(h)
            flows.append(flow)
        return flows


@case(series(), expect="may", why="whether gradients are on is asked within the step")
class AsksForGradients(Stepped):
    def step(self, x_t, h):
        return self.cell(x_t, h) if torch.is_grad_enabled() else 0.5 * self.cell(x_t, h)


@case(series(), why="no loop over time: members of an ensemble, whose sum looks like a state", expect="may")
class Ensemble(nn.Module):
    def __init__(self):
        super().__init__()
        self.members = nn.ModuleList(nn.Linear(FEATURES, UNITS) for _ in range(5))

    def forward(self, x):
        total = 0
        for member in self.members:
            total = total + torch.tanh(member(x))
        return total


@case(tokens(), expect="may", why="the embedding scales its rows in place as they are looked up")
class RenormalizedEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.cell = nn.Embedding(VOCAB, FEATURES, max_norm=1.0), nn.GRUCell(FEATURES, UNITS)

    def forward(self, idx):
        h = self.cell.weight_hh.new_zeros(idx.size(0), UNITS)
        for t in range(idx.size(1)):
            h = self.cell(self.emb(idx[:, t]), h)
        return h


@case(series(), expect="may", why="layers that take their sizes from the first call", doubles=False)
class LazyLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.rec = nn.LazyLinear(UNITS), nn.LazyLinear(UNITS)

    def forward(self, x):
        h = x.new_zeros(x.size(0), UNITS)
        for x_t in x.unbind(1):
            h = torch.tanh(self.inp(x_t) + self.rec(h))
        return h


@case(
    series(),
    expect="may",
    why="the recurrent weight is dropped anew in each call and set as an attribute",
    doubles=False,
)
class WeightDrop(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.raw = nn.Linear(FEATURES, UNITS), nn.Parameter(torch.randn(UNITS, UNITS) * 0.3)

    def forward(self, x):
        self.weight = F.dropout(self.raw, 0.4, self.training)
        h = x.new_zeros(x.size(0), UNITS)
        for x_t in x.unbind(1):
            h = torch.tanh(self.inp(x_t) + h @ self.weight)
        return h
