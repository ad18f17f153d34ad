"""Tricky: what is true of a short piece, or of the first call, need not be true of others."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from .by_index import GRUModel
from .case import FEATURES, UNITS, Family, drawn_tokens, normal, series, setting, two_series
from .effects import Stepped
from .stacks import MyGRU

case = Family("lengths_apart")


def plain(name, call, **more):
    """The plain loop under a name, called in several ways one after the other."""
    case(series(), name=name, call=call, **more)(Stepped)


@case(series(), expect="may", why="the tenth step is different: shorter calls do not show it", least=1)
class LateChange(GRUModel):
    def forward(self, x):
        h, ys = self.start(x), []
        for t in range(x.size(1)):
            h = self.cell(x[:, t], h)
            if t == 9:
                h = h.flip(-1)
            ys.append(h)
        return torch.stack(ys, 1)


@case(series(), expect="may", why="the number of steps is a factor in the step")
class DividedByLength(GRUModel):
    def forward(self, x):
        h = self.start(x)
        for x_t in x.unbind(1):
            h = h + self.cell(x_t, h) / x.size(1)
        return h


@case(series(), expect="may", why="each step attends to the whole input: the memory is as long as the loop")
class AttendsToTheWholeInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.key, self.query = nn.Linear(FEATURES, 8), nn.Linear(UNITS, 8)
        self.cell = nn.GRUCell(2 * FEATURES, UNITS)

    def forward(self, x):
        keys, h, ys = self.key(x), x.new_zeros(x.size(0), UNITS), []
        for t in range(x.size(1)):
            weights = torch.softmax((keys @ self.query(h).unsqueeze(-1)).squeeze(-1), dim=1)
            context = (weights.unsqueeze(-1) * x).sum(1)
            h = self.cell(torch.cat([x[:, t], context], -1), h)
            ys.append(h)
        return torch.stack(ys, 1)


@case(series(), expect="may", why="a causal mask made of the number of steps, one row of it per step")
class MaskedAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.key, self.query = nn.Linear(FEATURES, 8), nn.Linear(UNITS, 8)
        self.cell = nn.GRUCell(FEATURES, UNITS)

    def forward(self, x):
        T = x.size(1)
        mask = torch.triu(torch.full((T, T), float("-inf"), dtype=x.dtype), diagonal=1)
        keys, h, ys = self.key(x), x.new_zeros(x.size(0), UNITS), []
        for t in range(T):
            weights = F.softmax(torch.einsum("btd,bd->bt", keys, self.query(h)) + mask[t], dim=-1)
            h = self.cell(torch.einsum("bt,btf->bf", weights, x), h)
            ys.append(h)
        return torch.stack(ys, 1)


@case(series(), why="normalized over time before the loop, and over time after it")
class NormalizedOverTime(GRUModel):
    def forward(self, x):
        x = (x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True, unbiased=False) + 1e-5)
        h, ys = self.start(x), []
        for x_t in x.unbind(1):
            h = self.cell(x_t, h)
            ys.append(h)
        y = torch.stack(ys, 1)
        return torch.softmax(self.out(y), dim=1), y.cumsum(1)


@case(series(), why="a summary of all steps is an input of each")
class GlobalContext(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(2 * FEATURES, UNITS)

    def forward(self, x):
        context, h = x.max(dim=1).values, x.new_zeros(x.size(0), UNITS)
        for x_t in x.unbind(1):
            h = self.cell(torch.cat([x_t, context], 1), h)
        return h


@case(series(), expect="may", why="each input is read twice: there are twice as many steps as inputs")
class Upsampled(GRUModel):
    def forward(self, x):
        h, ys = self.start(x), []
        for t in range(2 * x.size(1)):
            h = self.cell(x[:, t // 2], h)
            ys.append(h)
        return torch.stack(ys, 1)


@case(series(), expect="may", why="the inputs are read round and round", later=setting(rounds=2))
class Cycled(GRUModel):
    rounds = 3

    def forward(self, x):
        h = self.start(x)
        for t in range(self.rounds * x.size(1)):
            h = self.cell(x[:, t % x.size(1)], h)
        return h


def _unequal(batch, steps):
    return normal(batch, steps, FEATURES), normal(batch, steps + 3, 3)


@case(_unequal, why="two series of different length: the shorter one ends the loop")
class TheShorterEnds(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(FEATURES + 3, UNITS)

    def forward(self, x, extra):
        h = x.new_zeros(x.size(0), UNITS)
        for x_t, e_t in zip(x.unbind(1), extra.unbind(1)):  # noqa: B905
            h = self.cell(torch.cat([x_t, e_t], -1), h)
        return h


@case(two_series, why="the same layer over two sequences of different length in one call")
class SameLayerTwoLengths(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift, self.rnn = nn.Linear(3, FEATURES), MyGRU(FEATURES, UNITS)

    def forward(self, x, extra):
        short, h = self.rnn(self.lift(extra[:, : (extra.size(1) + 1) // 2]))
        long, _ = self.rnn(x, h)
        return short, long


@case(series(), why="one cell in two loops whose bodies differ")
class OneCellTwoBodies(GRUModel):
    def forward(self, x):
        h, ys = self.start(x), []
        for x_t in x.unbind(1):
            h = self.cell(x_t, h)
        for x_t in x.unbind(1):
            h = h + 0.5 * torch.tanh(self.cell(x_t, h))
            ys.append(self.out(h))
        return torch.stack(ys, 1)


@case(series(), why="an online layer and a target layer of the same class, the second without gradients")
class OnlineAndTarget(nn.Module):
    def __init__(self):
        super().__init__()
        self.online, self.target = MyGRU(FEATURES, UNITS), MyGRU(FEATURES, UNITS)

    def forward(self, x):
        y, _ = self.online(x)
        with torch.no_grad():
            z, _ = self.target(x)
        return F.mse_loss(y, z), z


def _grouped(batch, steps):
    return normal(batch, 3, steps, FEATURES), drawn_tokens(batch, 3) % 2


@case(_grouped, why="sentences folded into the batch for one loop, unfolded for the next")
class FoldedIntoTheBatch(nn.Module):
    def __init__(self):
        super().__init__()
        self.word, self.sentence = MyGRU(FEATURES, 8), MyGRU(8, UNITS)

    def forward(self, x, flags):
        B, S = x.shape[:2]
        _, h = self.word(x.flatten(0, 1))
        y, _ = self.sentence(h.view(B, S, 8))
        return y * flags.unsqueeze(-1)


def _asks_for_gradients_later(model, x):
    first = model(x.detach())
    later = x.detach().clone().requires_grad_()
    second = model(later)
    (slope,) = torch.autograd.grad(second.sum(), later, retain_graph=True)
    return first, second, slope


def _without_gradients_first(model, x):
    with torch.no_grad():
        first = model(x)
    return first, model(x)


def _with_gradients_first(model, x):
    first = model(x)
    with torch.inference_mode():
        second = model(x).clone()
    return first, second.sum().item(), model(x)


plain("one_row_first", lambda m, x: [m(x[:1]), m(x), m(x[:1])], why="one row, then many: a size of one is special")
plain("one_step_first", lambda m, x: [m(x[:, :1]), m(x), m(x[:, :2])], why="one step, then many")
plain("growing", lambda m, x: [m(x[:, : t + 1]) for t in range(x.size(1))], why="every length up to the whole")
plain("without_gradients_first", _without_gradients_first, why="the first call is without gradients, the next is not")
plain("with_gradients_first", _with_gradients_first, why="inference mode comes between")
plain(
    "gradients_of_inputs_later", _asks_for_gradients_later, why="the first call needs none for its input, the next does"
)
plain("no_rows", lambda m, x: [m(x[:0]), m(x)], why="a batch of no rows", expect="may")


def _last_state_overwritten(model, x):
    with torch.no_grad():
        y, h = model(x)
        h.zero_()
        return y, h


class OutputsAndState(GRUModel):
    """The common pair: all outputs, and the last state, which is a tensor of its own."""

    def forward(self, x):
        h, ys = self.start(x), []
        for x_t in x.unbind(1):
            h = self.cell(x_t, h)
            ys.append(h)
        return torch.stack(ys, 1), h


def _gradient_of_the_output(model, x):
    y, h = model(x)
    y.retain_grad()
    (y.square().sum() + h.sum()).backward(retain_graph=True)
    return y, y.grad.clone()


case(
    series(),
    name="last_state_overwritten",
    call=_last_state_overwritten,
    why="the caller writes into the last state; the outputs are another tensor",
    grads=False,
)(OutputsAndState)
case(
    series(),
    name="output_seen_flat",
    call=lambda model, x: model(x)[0].view(x.size(0), -1),
    why="view works on a result that lies in order",
)(OutputsAndState)
case(series(), name="gradient_of_the_output", call=_gradient_of_the_output, why="retain_grad on a result")(
    OutputsAndState
)
case(
    series(),
    name="only_the_state_is_used",
    call=lambda model, x: model(x)[1],
    why="gradients come by the last state alone",
)(OutputsAndState)
case(
    series(),
    name="one_step_of_the_output_is_used",
    call=lambda model, x: model(x)[0][:, x.size(1) // 2],
    why="gradients come by one step alone",
)(OutputsAndState)


@case(series(), why="some weights have no part in the result: their gradients are None, not zero")
class UnusedWeights(GRUModel):
    def __init__(self):
        super().__init__()
        self.spare, self.aside = nn.Linear(UNITS, UNITS), nn.Parameter(torch.ones(3))

    def forward(self, x):
        h = self.start(x)
        for x_t in x.unbind(1):
            h = self.cell(x_t, h)
            self.spare(h)
        return h
