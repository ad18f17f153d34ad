"""The ways in which models call their recurrent layers: whatever listens must hear the same in all of them."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hiddenstate as hs
from hiddenstate.cells import given_call

WAYS = {
    "layer(x)": lambda layer, x, h: layer(x) if h is None else layer(x, h),
    "layer(x, h)": lambda layer, x, h: layer(x, h),
    "layer(x, hx=h)": lambda layer, x, h: layer(x, hx=h),
    "layer(input=x, hx=h)": lambda layer, x, h: layer(input=x, hx=h),
    "layer(hx=h, input=x)": lambda layer, x, h: layer(hx=h, input=x),
    "layer.forward(x, h)": lambda layer, x, h: layer.forward(x, h),
    "layer.forward(hx=h, input=x)": lambda layer, x, h: layer.forward(hx=h, input=x),
    "checkpoint(layer)": lambda layer, x, h: checkpoint(layer, x, h, use_reentrant=False),
    "checkpoint(keywords)": lambda layer, x, h: checkpoint(lambda a: layer(hx=h, input=a), x, use_reentrant=False),
    "checkpoint(layer), reentrant": lambda layer, x, h: checkpoint(layer, x, h, use_reentrant=True),
    "checkpoint(forward), reentrant": lambda layer, x, h: checkpoint(layer.forward, x, h, use_reentrant=True),
}


def masked(self, x, mask=None, hx=None):
    return kind_of(self).forward(self, x if mask is None else x * mask, hx)


def renamed(self, sequence, lengths=None, prev_state=None, return_state=True):
    return kind_of(self).forward(self, sequence, prev_state)


def by_name_alone(self, x, *, hx=None):
    return kind_of(self).forward(self, x, hx)


def by_position_alone(self, x, hx=None, /):
    return kind_of(self).forward(self, x, hx)


def handing_on(self, *args, **kwargs):
    return kind_of(self).forward(self, *args, **kwargs)


def handing_on_names(self, x, mask=None, **kwargs):
    return kind_of(self).forward(self, x, **kwargs)


def handing_on_places(self, x, *args):
    return kind_of(self).forward(self, x, *args)


# Forwards that a subclass of a layer or cell of torch's may have, and how a model calls each with a state.
SUBCLASSES = {
    masked: lambda layer, x, h: layer(x, None, h),
    renamed: lambda layer, x, h: layer(prev_state=h, sequence=x),
    by_name_alone: lambda layer, x, h: layer(x, hx=h),
    by_position_alone: lambda layer, x, h: layer(x, h),
    handing_on: lambda layer, x, h: layer(hx=h, input=x),
    handing_on_names: lambda layer, x, h: layer(x, hx=h),
    handing_on_places: lambda layer, x, h: layer(x, h),
}


def kind_of(layer):
    """Return the kind of torch's that a layer is a subclass of."""
    return next(kind for kind in type(layer).__mro__ if kind.__module__.startswith("torch."))


def subclassed(kind, forward):
    """Return a subclass of a layer of torch's, with a forward of its own."""
    return type(f"{forward.__name__.title()}{kind.__name__}", (kind,), {"forward": forward})


class Calling(nn.Module):
    """Calls its layer in one of these ways: at once, or `chunk` steps at a time with the state handed on."""

    def __init__(self, rnn, way, chunk=None):
        super().__init__()
        self.rnn, self.read = rnn, nn.Linear(rnn.hidden_size, 2)
        self.way, self.chunk = WAYS.get(way, way), chunk

    def forward(self, x, state=None):
        outputs = []
        for piece in x.split(self.chunk or x.shape[1], dim=1):
            output, state = self.way(self.rnn, piece, state)
            outputs.append(output)
        self.seen = torch.cat(outputs, dim=1)
        return self.read(self.seen)


def plain_call(model, *inputs):
    """The call `model(*inputs)`, as a function of the library takes it from its user."""
    return given_call(hs.report, model, inputs, kwargs={}, call=None, options={})
