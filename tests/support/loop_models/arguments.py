"""Tricky: what is given to the call, or done with it, decides: flags, numbers, other callers, later backward passes."""

from __future__ import annotations

import copy
import io
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

from .case import FEATURES, UNITS, Family, doing, normal, series, setting, two_series
from .effects import Stepped

case = Family("arguments")


def plain(name, call=None, **more):
    """The plain loop under a name, with a way to call it or something that is done to it later."""
    case(series(), name=name, **({"call": call} if call else {}), **more)(Stepped)


def _siamese(model, x):
    """Both results are needed by one backward pass: the second call must not spoil what the first one keeps."""
    return model(x) * model(2 * x)


def _backward_twice(model, x):
    y = model(x)
    y.sum().backward(retain_graph=True)
    return y


def _backward_of_the_first_call_later(model, x):
    first = model(x)
    with torch.no_grad():
        other = model(-x)
    second = model(x[:, :1])
    first.sum().backward()
    return second, other


def _changed_afterwards(model, x):
    y = model(x)
    return y.mul_(2.0)


def _copied(model, x):
    return copy.deepcopy(model)(x).detach()


def _saved_and_loaded(model, x):
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.load_state_dict(torch.load(file))
    return other(x).detach()


def _in_threads(model, x):
    with ThreadPoolExecutor(2) as pool:
        # Without gradients: the order in which the graphs were made would decide how sums are rounded.
        return [y.detach() for y in pool.map(model, [x, 2 * x, x[:, :1]])]


def _only_one_gradient(model, x):
    y = model(x)
    return torch.autograd.grad(y.sum(), model.cell.weight_hh, retain_graph=True)[0], y


def _as_a_part(model, x):
    return nn.Sequential(nn.Identity(), model, nn.Tanh())(x)


def _in_training_then_at_rest(model, x):
    first = model.train()(x)
    second = model.eval()(x)
    model.train()
    return first, second


def _with_gradient_of_parts(model, x):
    head = x[:, :2].clone().requires_grad_()
    y = model(torch.cat([head, x[:, 2:]], 1))
    return y, torch.autograd.grad(y.sum(), head, retain_graph=True)[0]


plain("siamese", _siamese, why="two calls before one backward pass")
plain("backward_twice", _backward_twice, why="the graph is kept and gone through twice")
plain("backward_of_the_first_call_later", _backward_of_the_first_call_later, why="other calls come between")
plain("changed_afterwards", _changed_afterwards, why="the caller writes into the result")
plain("copied", _copied, expect="may", why="a copy of the model is called", grads=False)
plain("saved_and_loaded", _saved_and_loaded, expect="may", why="a copy with loaded weights is called", grads=False)
plain("in_threads", _in_threads, expect="may", why="called from several threads", grads=False)
plain("only_one_gradient", _only_one_gradient, why="the gradient of one weight alone is asked for")
plain("as_a_part", _as_a_part, why="the model stands in a bigger one, made later")
plain("in_training_then_at_rest", _in_training_then_at_rest, why="modes change between calls")
plain("with_gradient_of_parts", _with_gradient_of_parts, why="only a part of the input asks for gradients")


def _loaded(model):
    model.load_state_dict({name: 0.5 * value for name, value in model.state_dict().items()})


def _replaced_class(model):
    class Louder(type(model)):
        def step(self, x_t, h):
            return 1.5 * super().step(x_t, h)

    model.__class__ = Louder


plain("weights_loaded", why="other weights are loaded between calls", later=doing(_loaded))
plain("pruned", why="pruned between calls", later=doing(lambda m: prune.l1_unstructured(m.cell, "weight_hh", 0.5)))
plain(
    "parametrized",
    why="a weight becomes a product of two between calls; at first it is the same",
    later=doing(lambda m: _halved(parametrizations.weight_norm(m.cell, "weight_hh"))),
)
plain("class_replaced", why="the model's class becomes another", later=doing(_replaced_class))
plain("data_replaced", why="weights get other storage", later=doing(lambda m: _to_other_storage(m)))
plain("tied_later", why="two weights become one", later=doing(lambda m: setattr(m.cell, "bias_ih", m.cell.bias_hh)))


def _halved(cell):
    with torch.no_grad():
        cell.parametrizations.weight_hh.original0.mul_(0.5)


def _to_other_storage(model):
    model.cell.weight_hh.data = 0.5 * model.cell.weight_hh.data.clone()


@case(
    series(),
    expect="may",
    why="a flag of the call decides what the step does",
    call=lambda model, x: (model(x), model(x, mode="leaky"), model(x)),
)
class ByFlag(Stepped):
    def forward(self, x, mode="gru"):
        h = self.start(x)
        for x_t in x.unbind(1):
            h = self.cell(x_t, h) if mode == "gru" else 0.9 * h + 0.1 * self.cell(x_t, h)
        return h


@case(
    series(),
    expect="may",
    why="a Python number of the call is used in the step",
    call=lambda model, x: [model(x, dt=dt) for dt in (0.1, 0.2, 0.1, 1)],
)
class ByNumber(Stepped):
    def forward(self, x, dt=0.1):
        h = self.start(x)
        for x_t in x.unbind(1):
            h = h + dt * (self.cell(x_t, h) - h)
        return h


@case(
    series(),
    why="a tensor of no dimension is given to the call and used in all steps",
    call=lambda model, x: [model(x, torch.tensor(v, dtype=x.dtype)) for v in (0.1, 0.2)],
)
class ByTensorNumber(Stepped):
    def forward(self, x, dt):
        h = self.start(x)
        for x_t in x.unbind(1):
            h = h + dt * (self.cell(x_t, h) - h)
        return h


def _in_pieces(model, x):
    head, state = model(x[:, : x.size(1) // 2])
    tail, state = model(x[:, x.size(1) // 2 :], state)
    return torch.cat([head, tail], 1), state


def _in_pieces_cut(model, x):
    head, state = model(x[:, : x.size(1) // 2])
    tail, state = model(x[:, x.size(1) // 2 :], tuple(part.detach() for part in state))
    return torch.cat([head, tail], 1), state


class Continued(nn.Module):
    """Takes its state and gives it back."""

    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(FEATURES, UNITS)

    def forward(self, x, state=None):
        if state is None:
            state = (x.new_zeros(x.size(0), UNITS), x.new_zeros(x.size(0), UNITS))
        ys = []
        for x_t in x.unbind(1):
            state = self.cell(x_t, state)
            ys.append(state[0])
        return torch.stack(ys, 1), state


case(
    series(), name="continued", why="the state of a call is given to the next, with gradients", call=_in_pieces, least=2
)(Continued)
case(series(), name="continued_and_cut", why="the state is detached between calls", call=_in_pieces_cut, least=2)(
    Continued
)


@case(two_series, why="arguments by name", call=lambda model, x, extra: model(extra=extra, x=x, scale=0.5))
class ByKeyword(Stepped):
    def __init__(self):
        super().__init__()
        self.more = nn.Linear(3, FEATURES)

    def forward(self, *, x, extra, scale):
        h = self.start(x)
        for x_t, e_t in zip(x.unbind(1), extra.unbind(1), strict=True):
            h = self.cell(x_t + scale * self.more(e_t), h)
        return h


@case(series(), expect="may", why="another method than forward holds the loop", call=lambda model, x: model.encode(x))
class Encoder(Stepped):
    def encode(self, x):
        h = self.start(x)
        for x_t in x.unbind(1):
            h = self.cell(x_t, h)
        return F.normalize(h, dim=-1)


@case(series(), why="the settings are a dict, changed between calls", later=doing(lambda m: m.config.update(leak=0.9)))
class ByConfig(Stepped):
    def __init__(self):
        super().__init__()
        self.config = {"leak": 0.2, "act": "tanh"}

    def step(self, x_t, h):
        act = getattr(torch, self.config["act"])
        return h + self.config["leak"] * (act(self.cell(x_t, h)) - h)


@case(series(), why="which function is used is an attribute", later=setting(act=torch.relu))
class ByFunction(Stepped):
    act = staticmethod(torch.tanh)

    def step(self, x_t, h):
        return self.act(F.linear(x_t, self.cell.weight_ih[:UNITS]) + F.linear(h, self.cell.weight_hh[:UNITS]))


@case(series(), why="how often the inner loop runs is an attribute", later=setting(inner=1))
class ByInnerSteps(Stepped):
    inner = 3

    def step(self, x_t, h):
        for _ in range(self.inner):
            h = self.cell(x_t, h)
        return h


@case(
    lambda batch, steps: (normal(batch, steps, FEATURES), None),
    expect="may",
    why="a mask that may be missing: another body without it",
    call=lambda model, x, mask: (model(x, mask), model(x, (x[..., 0] > 0).to(x.dtype))),
)
class PerhapsMasked(Stepped):
    def forward(self, x, mask=None):
        h = self.start(x)
        for t in range(x.size(1)):
            new = self.cell(x[:, t], h)
            h = new if mask is None else mask[:, t, None] * new + (1 - mask[:, t, None]) * h
        return h


@case(series(), why="the caller makes the start, and it asks for gradients", call=lambda m, x: m(x, _made_start(x)))
class GivenStart(Stepped):
    def forward(self, x, h):
        for x_t in x.unbind(1):
            h = self.cell(x_t, h)
        return h


def _made_start(x):
    """One row for all: expanded, so that its rows share memory."""
    return torch.full((1, UNITS), 0.1, dtype=x.dtype, requires_grad=True).expand(x.size(0), UNITS)
