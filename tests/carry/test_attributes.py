"""Attributes of a model as values: found by name, copied, put back."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from hiddenstate.carry.attributes import (
    attribute_holding,
    copied,
    put_back,
    set_at,
    tensors_of,
    unchanged,
    value_at,
    version_of,
    ways_in,
)


class Pair(NamedTuple):
    h: Tensor
    c: Tensor


@dataclass
class Memory:
    slow: Tensor


def tensor() -> Tensor:
    return torch.ones(2)


HOLDERS: dict[str, tuple[Any, tuple[Any, ...], str]] = {
    "itself": (tensor(), (), "held"),
    "tuple": ((tensor(), tensor()), (1,), "held[1]"),
    "named tuple": (Pair(tensor(), tensor()), (1,), "c"),
    "list": ([None, tensor()], (1,), "held[1]"),
    "dict": ({"a": {"b": tensor()}}, ("a", "b"), "b"),
    "deque": (deque([tensor()], 1), (0,), "held[0]"),
    "dataclass": (Memory(tensor()), ("slow",), "slow"),
    "namespace": (SimpleNamespace(h=tensor()), ("h",), "h"),
}


@pytest.fixture(params=HOLDERS)
def held(request) -> tuple[nn.Module, tuple[Any, ...], str]:
    value, rest, label = HOLDERS[request.param]
    module = nn.Module()
    module.held = copied(value)
    return module, ("held", *rest), label


def test_a_tensor_is_found_read_and_replaced_wherever_it_lies(held):
    module, way, label = held
    assert ways_in(module)[label] == way
    assert attribute_holding(module, label) == (module, "held")
    set_at(module, way, torch.zeros(2))
    assert torch.equal(value_at(module, way), torch.zeros(2))
    assert torch.equal(value_at(module, ways_in(module)[label]), torch.zeros(2))


def test_a_copy_shares_nothing_and_is_put_back(held):
    module, way, _ = held
    kept = copied(module.held)
    value_at(module, way).zero_()
    put_back(module, "held", kept)
    assert torch.equal(value_at(module, way), torch.ones(2))
    value_at(module, way).zero_()
    put_back(module, "held", kept)
    assert torch.equal(value_at(module, way), torch.ones(2)), "what was kept is still as it was"


@pytest.mark.parametrize("name", ["list", "dict", "deque", "dataclass", "namespace"])
def test_a_container_stays_the_same_one(name):
    module = nn.Module()
    module.held = there = copied(HOLDERS[name][0])
    put_back(module, "held", HOLDERS[name][0])
    assert module.held is there


def test_a_change_is_seen_by_identity_and_by_writes():
    module = nn.Module()
    module.held = (tensor(), tensor())
    place = (module, "held")
    left = [(each, version_of(each)) for each in tensors_of(place)]
    assert unchanged(tensors_of(place), left)
    module.held[0].add_(1)
    assert not unchanged(tensors_of(place), left)
    module.held = (tensor(), tensor())
    assert not unchanged(tensors_of(place), left)
    module.held = None
    assert not unchanged(tensors_of(place), left)
