"""Fingerprints: which model a state belongs to."""

import copy
import functools
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
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
