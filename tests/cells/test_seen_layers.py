"""Cells and loops that were seen in a call: their state goes in and comes out where it was seen to."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import hiddenstate as hs
from hiddenstate.cells import Layer
from hiddenstate.cells.seen_layers import SeenAdapter, SeenCell
from hiddenstate.errors import NotRecurrent, StateMismatch

B, T, X, H = 3, 5, 2, 4


class Mixed(nn.Module):
    """What all cells here compute: two parts, of which one is handed on beside the other."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.gate = nn.Linear(X + H, H), nn.Linear(X + H, H)

    def next(self, x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        joined = torch.cat([x, a + b], -1)
        return torch.tanh(self.mix(joined)), b + torch.sigmoid(self.gate(joined))


class InATuple(Mixed):
    def forward(self, inputs, past):
        a, b = self.next(inputs, *past)
        return a.exp(), (a, b)


class ByName(Mixed):
    def forward(self, *, token, fast, slow):
        return self.next(token, fast, slow)


class InADict(Mixed):
    def forward(self, past, inputs):
        a, b = self.next(inputs, past["a"], past["b"])
        return {"out": a.sin(), "past": {"a": a, "b": b}}


class Model(nn.Module):
    """Steps one of them, as its author would."""

    def __init__(self, inner: Mixed, start: float = 0.0) -> None:
        super().__init__()
        self.inner, self.start = inner, start

    def forward(self, x):
        a, b = (x.new_full((len(x), H), self.start) for _ in range(2))
        for step in x.unbind(1):
            if isinstance(self.inner, InATuple):
                _, (a, b) = self.inner(step, (a, b))
            elif isinstance(self.inner, ByName):
                a, b = self.inner(token=step, fast=a, slow=b)
            else:
                past = self.inner({"a": a, "b": b}, step)["past"]
                a, b = past["a"], past["b"]
        return a + b


KINDS = {"in a tuple": InATuple, "by name": ByName, "in a dict": InADict}


def seen(model: nn.Module) -> Layer:
    (layer,) = hs.layers(model, torch.randn(B, T, X))
    return layer


def call_of(inner: Mixed, x: Tensor, a: Tensor, b: Tensor):
    if isinstance(inner, InATuple):
        return (x, (a, b)), {}
    return ((), {"token": x, "fast": a, "slow": b}) if isinstance(inner, ByName) else (({"a": a, "b": b}, x), {})


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_the_state_of_a_call_is_found_and_another_takes_its_place(kind):
    model = Model(kind())
    layer = seen(model)
    assert isinstance(layer.adapter, SeenCell)
    assert (layer.name, layer.kind, layer.spec.parts) == ("inner", "cell", ("a", "b"))
    x, a, b = torch.randn(B, X), torch.randn(B, H), torch.randn(B, H)
    args, kwargs = call_of(model.inner, x, a, b)
    assert layer.rows(args, kwargs) == (B, True)
    given = layer.to_state(layer.given(args, kwargs))
    assert (given["a"] is a, given["b"] is b, given.batch) == (True, True, B)
    other = given.map(torch.randn_like)
    args, kwargs = layer.give(args, kwargs, layer.to_native(other))
    expected = call_of(model.inner, x, other["a"], other["b"])
    torch.testing.assert_close((args, kwargs), expected)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_what_a_call_returns_is_parted_into_output_and_state(kind):
    model = Model(kind())
    layer = seen(model)
    x, a, b = torch.randn(B, X), torch.randn(B, H), torch.randn(B, H)
    args, kwargs = call_of(model.inner, x, a, b)
    output, native = layer.split(model.inner(*args, **kwargs))
    new_a, new_b = model.inner.next(x, a, b)
    torch.testing.assert_close(native, {"a": new_a, "b": new_b})
    expected = {InATuple: new_a.exp(), ByName: new_a, InADict: new_a.sin()}[kind]
    torch.testing.assert_close(output, expected)


def test_a_call_without_its_state_is_given_one_as_the_module_nests_it():
    model = Model(InATuple())
    layer = seen(model)
    x, state = torch.randn(B, X), layer.initial(B).map(torch.ones_like)
    assert layer.given((x,), {}) is None
    args, kwargs = layer.give((x,), {}, layer.to_native(state))
    torch.testing.assert_close((args, kwargs), ((x, (state["a"], state["b"])), {}))


def test_a_cell_that_was_seen_to_start_from_zeros_starts_from_zeros():
    state = seen(Model(InATuple())).initial(7)
    assert state.batch == 7
    assert not any(part.any() for part in state.values())
    with pytest.raises(NotRecurrent, match="start from a state that the model itself makes, and it is not zero"):
        seen(Model(InATuple(), start=0.5)).initial(7)


def test_a_result_that_is_not_what_was_seen_is_refused():
    layer = seen(Model(InATuple()))
    with pytest.raises(NotRecurrent, match=r"returned something else than when it was first seen: 'a' is not where"):
        layer.split(torch.zeros(B, H))
    with pytest.raises(StateMismatch, match="the state has the parts h, but InATuple needs a, b"):
        layer.to_native(hs.State({"h": torch.zeros(B, H)}))


class Looping(Model):
    def forward(self, x):
        a, b = (x.new_zeros(len(x), H) for _ in range(2))
        for step in x.unbind(1):
            a, b = self.inner.next(step, a, b)
        return a


def test_a_loop_is_listed_but_nothing_that_could_be_called():
    model = Looping(InATuple())
    layer = seen(model)
    assert isinstance(layer.adapter, SeenAdapter)
    assert (layer.kind, layer.spec.parts, layer.spec.sizes) == ("loop", ("a", "b"), {"a": H, "b": H})
    assert layer.name.startswith("loop")
    for refused in (lambda: layer.initial(2), lambda: layer.split(None)):
        with pytest.raises(NotRecurrent, match=r"the loop at test_seen_layers.py:\d+ in Looping is no module of its"):
            refused()
