"""Fingerprints: which model a state belongs to."""

import array
import collections
import copy
import datetime
import decimal
import enum
import fractions
import functools
import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import PurePosixPath
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hiddenstate.errors import SessionLost
from hiddenstate.serve import Engine
from hiddenstate.serve.fingerprint import fingerprint
from tests.support.models import Deep
from tests.support.web import ROOT


def changed_weight(model: Deep) -> None:
    with torch.no_grad():
        model.head.bias[0] += 1e-6


def changed_buffer(model: Deep) -> None:
    model.register_buffer("scale", torch.ones(1))


def changed_dtype(model: Deep) -> None:
    model.double()


@pytest.mark.parametrize("change", [changed_weight, changed_buffer, changed_dtype])
def test_a_fingerprint_tells_models_apart(change):
    torch.manual_seed(0)
    model = Deep()
    before = fingerprint(model)
    assert fingerprint(model) == before
    change(model)
    assert fingerprint(model) != before


def test_a_fingerprint_knows_what_is_not_in_the_weights():
    one, other = nn.RNN(3, 4, nonlinearity="tanh"), nn.RNN(3, 4, nonlinearity="relu")
    other.load_state_dict(one.state_dict())
    assert fingerprint(one) != fingerprint(other)


def test_a_fingerprint_does_not_know_mode_or_gradients():
    model = Deep()
    before = fingerprint(model)
    model(torch.randn(1, 2, 3)).sum().backward()
    model.eval()
    assert fingerprint(model) == before


class Leaky(nn.Module):
    """A model with settings of every kind."""

    floor = 0.0

    def __init__(self, **changed: object) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gru = nn.GRU(3, 4, batch_first=True)
        self.norm = nn.LayerNorm(4, eps=changed.pop("eps", 1e-5))
        self.leak = 0.3
        self.act = torch.tanh
        self.squash = lambda h: 0.5 * h
        self.rates, self.names, self.gain = [1, (2.0, "a")], {"a": 1}, torch.ones(2)
        self.config = SimpleNamespace(clip=1.0, inner=SimpleNamespace(mode="soft"))
        self.part = functools.partial(torch.clamp, min=0.0)
        self.table = np.ones(3)
        self.kind = torch.float32
        self.register_buffer("mask", torch.ones(3), persistent=False)
        for name, value in changed.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.leak * self.act(self.gru(x * self.mask)[0])


CHANGES = [
    {"leak": 0.8},
    {"leak": 1},
    {"floor": 0.1},
    {"eps": 1e-3},
    {"act": torch.relu},
    {"squash": lambda h: 0.6 * h},
    {"rates": [1, (2.5, "a")]},
    {"names": {"a": 2}},
    {"gain": torch.full((2,), 2.0)},
    {"config": SimpleNamespace(clip=1.0, inner=SimpleNamespace(mode="hard"))},
    {"part": functools.partial(torch.clamp, min=0.5)},
    {"table": np.zeros(3)},
    {"kind": torch.float64},
    {"mask": torch.zeros(3)},
    {"added": None},
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: next(iter(change)))
def test_a_setting_that_is_no_weight_tells_models_apart(change):
    assert fingerprint(Leaky()) == fingerprint(Leaky())
    assert fingerprint(Leaky(**change)) != fingerprint(Leaky())


def test_a_constant_of_a_class_is_a_setting():
    class Other(Leaky):
        floor = 0.2

    Other.__qualname__ = Leaky.__qualname__
    assert fingerprint(Other()) != fingerprint(Leaky())


def test_what_is_no_setting_does_not_count():
    model = Leaky()
    before = fingerprint(model)
    model.lock, twin = threading.Lock(), Leaky()
    twin.lock = threading.Lock()
    assert fingerprint(model) == fingerprint(twin)
    del model.lock
    model.register_forward_hook(lambda *_: None)
    model.alias = model.gru.weight_hh_l0  # by another name, but the same weight
    model.eval()
    del model.alias
    assert fingerprint(model) == before
    assert fingerprint(copy.deepcopy(Leaky())) == before


def test_a_fingerprint_is_the_same_in_another_process():
    code = """
from hiddenstate.serve.fingerprint import fingerprint
from tests.serve.test_fingerprint import Leaky
print(fingerprint(Leaky()))
"""
    seeds = [{**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"} for seed in ("1", "2")]
    runs = [subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True) for env in seeds]
    assert {run.stdout.strip() for run in runs} == {fingerprint(Leaky())}


def test_sessions_of_a_model_with_another_setting_are_not_continued(tmp_path):
    store = f"sqlite:///{tmp_path}/sessions.db"
    with Engine(Leaky(), store) as engine:
        engine.open("a")
        engine.push("a", torch.zeros(3))
    with Engine(Leaky(leak=0.8), store) as engine, pytest.raises(SessionLost, match="belongs to another model"):
        engine.push("a", torch.zeros(3))
    with Engine(Leaky(), store) as engine:
        engine.push("a", torch.zeros(3), 2)


# Whatever holds a number: the same twice is the same, and another number makes another model.


@dataclass(slots=True)
class Slotted:
    leak: object


class Private:
    __slots__ = ("__leak",)

    def __init__(self, leak):
        self.__leak = leak


class Named(collections.namedtuple("Pair", "leak other")):
    pass


class Listed(list):
    """A list with an attribute."""


class Scaler:
    def __init__(self, leak):
        self.leak = leak

    def scale(self, h):
        return self.leak * h


def mode_of(leak):
    return enum.Enum("Mode", {"SOFT": leak}).SOFT


def listed(leak):
    made = Listed([1])
    made.leak = leak
    return made


def cyclic(leak):
    made = {"leak": leak}
    made["self"] = made
    return made


def deep(leak):
    return functools.reduce(lambda inner, _: [inner], range(40), leak)


def linear(leak):
    made = nn.Linear(1, 1)
    with torch.no_grad():
        made.weight.fill_(leak)
        made.bias.fill_(0.0)
    return made


def constant(leak):
    scope: dict = {}
    exec(f"act = lambda h: [g * (1.0, {leak})[1] for g in h]", scope)
    return scope["act"]


def reading(leak):
    scope = {"LEAK": leak}
    exec("act = lambda h: LEAK * h", scope)
    return scope["act"]


def defaulted(leak):
    def act(h, *, leak=leak):
        return leak * h

    return act


def enclosing(leak):
    return lambda h: leak * h


def attention(leak):
    made = nn.MultiheadAttention(8, 2 if leak == 0.25 else 4)
    return _same(made)


def encoder(leak):
    return _same(nn.TransformerEncoderLayer(8, 2, activation="relu" if leak == 0.25 else "gelu"))


def _same(module):
    with torch.no_grad():
        for weight in module.parameters():
            weight.zero_()
    return module


def objects(leak):
    return np.array([None, leak], dtype=object)


HOLDERS = [
    *(float, np.float32, np.float64, np.float16, str, decimal.Decimal, fractions.Fraction, complex),
    *(Slotted, Private, Scaler, listed, mode_of, cyclic, deep, linear, attention, encoder, objects),
    *(constant, reading, defaulted, enclosing),
    lambda leak: Named(leak, 1),
    lambda leak: np.array(leak),
    lambda leak: np.array([str(leak)]),
    lambda leak: np.array([(1, leak)], dtype=[("a", "i4"), ("b", "f4")]),
    lambda leak: np.array([(1, leak)], dtype=[("a", "i4"), ("b", "f4")])[0],
    lambda leak: np.array([leak], ">f4"),
    lambda leak: np.datetime64(int(1000 * leak), "s"),
    lambda leak: np.dtype(f"V{int(8 * leak)}"),
    lambda leak: range(int(100 * leak)),
    lambda leak: slice(int(100 * leak)),
    lambda leak: collections.deque([leak]),
    lambda leak: collections.OrderedDict(a=leak),
    lambda leak: collections.UserDict(a=leak),
    lambda leak: MappingProxyType({"a": leak}),
    lambda leak: {("a", leak): 1},
    lambda leak: {frozenset([1]): leak},
    lambda leak: {leak},
    lambda leak: frozenset([("a", leak)]),
    lambda leak: {"a": [Slotted({"b": (leak,)})]},
    lambda leak: bytearray([int(100 * leak)]),
    lambda leak: array.array("d", [leak]),
    lambda leak: datetime.timedelta(seconds=leak),
    lambda leak: PurePosixPath(f"{leak}"),
    lambda leak: Scaler(leak).scale,
    lambda leak: functools.partial(torch.clamp, min=Slotted(leak)),
    lambda leak: torch.distributions.Normal(torch.tensor(0.0), torch.tensor(leak)),
    lambda leak: torch.tensor([0.0, leak]).to_sparse(),
    lambda leak: [linear(leak)],
    lambda leak: {"a": nn.Sequential(nn.Identity(), linear(leak))},
    lambda leak: Scaler(linear(leak)),
    lambda leak: np.tanh if leak == 0.25 else np.sin,
    lambda leak: torch.Size([int(100 * leak)]),
]


@pytest.mark.parametrize("on", ["module", "class", "object"])
@pytest.mark.parametrize("holder", HOLDERS, ids=range(len(HOLDERS)))
def test_whatever_holds_a_number_it_tells_models_apart(holder, on):
    def made(leak):
        if on == "class":
            if callable(holder(leak)) and not isinstance(holder(leak), nn.Module | functools.partial):
                pytest.skip("functions of a class are its code")
            kind = type("Model", (Leaky,), {"held": holder(leak)})
            return fingerprint(kind())
        return fingerprint(Leaky(held=holder(leak) if on == "module" else SimpleNamespace(inner=[holder(leak)])))

    assert made(0.25) == made(0.25)
    assert made(0.25) != made(0.75)


ENDS = st.one_of(st.integers(), st.floats(allow_nan=False), st.text(max_size=3), st.booleans(), st.none())
NESTED = st.recursive(
    ENDS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        inner.map(Slotted),
        inner.map(lambda value: SimpleNamespace(value=value)),
        st.lists(inner, max_size=2).map(tuple),
        st.lists(inner, max_size=2).map(collections.deque),
    ),
    max_leaves=12,
)


@given(NESTED, NESTED)
@settings(max_examples=60, deadline=None)
def test_values_that_are_written_otherwise_are_other_settings(one, other):
    found = [fingerprint(Leaky(held=value)) for value in (one, copy.deepcopy(one), other)]
    assert found[0] == found[1]
    assert (found[0] == found[2]) == (repr(one) == repr(other) or _keys_sorted(one) == _keys_sorted(other))


def _keys_sorted(value):
    """The text of a value, with what stands in no order put in one."""
    if isinstance(value, dict):
        return f"dict {sorted((key, _keys_sorted(inner)) for key, inner in value.items())}"
    if isinstance(value, Slotted | SimpleNamespace):
        return f"{type(value)} {_keys_sorted(value.leak if isinstance(value, Slotted) else value.value)}"
    if isinstance(value, list | tuple | collections.deque):
        return f"{type(value)} {list(map(_keys_sorted, value))}"
    return f"{type(value)} {value!r}"


def test_what_is_too_large_to_be_looked_at_whole_is_said(caplog, monkeypatch):
    from hiddenstate.serve import settings as settings_of

    monkeypatch.setattr(settings_of, "_MOST", 100)
    fingerprint(Leaky(vocabulary=list(range(1000))))
    assert ".vocabulary holds more than 100 values: a change in the others is not noticed" in caplog.text


def test_devices_locks_random_streams_and_handles_are_no_settings():
    def made():
        model = Leaky(place=torch.device("cpu"), lock=threading.Lock(), stream=torch.Generator(), draws=np.random.rand)
        model.handle = model.register_forward_hook(lambda *_: None)
        model.iterator = iter([1, 2])
        return model

    assert fingerprint(made()) == fingerprint(made())
