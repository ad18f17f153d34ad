"""Models with loops, as strangers write them: accelerated, they give what they gave, and most of them are rolled up."""

import random
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import hiddenstate as hs
from hiddenstate.unrolling.deciding import EngineDecision
from tests.support.loop_models import LOOP_MODELS, LoopCase
from tests.support.loop_models.comparing import outcome

SHAPES = [(3, 12), (3, 12), (2, 20), (2, 20), (3, 9)]
FEW = [
    *(
        "char_gru",
        "custom_lstm",
        "grud",
        "layers_within_time",
        "bahdanau_decoder",
        "zoneout_in_training",
        "world_model",
    ),
    *("generalized_advantage", "state_inside_the_tensor", "dict_state", "garch", "norm_gate", "counts_calls", "prints"),
    *("hooked_forward", "looks_back_and_wraps", "double_backward", "checkpointed", "per_sample_gradients"),
]


@pytest.fixture(autouse=True)
def faster_in_any_case(monkeypatch):
    """Have the engine run whatever it can: what is right must not depend on the clock."""
    monkeypatch.setattr("hiddenstate.unrolling.cache.decide", lambda *_: EngineDecision(1, "said so"))


def built(case: LoopCase, device: str = "cpu") -> tuple[nn.Module, bool]:
    model = case.model().to(device)
    # On a GPU in float32, which its own kernels are for.
    exact = device == "cpu" and case.doubles and next(model.parameters(), None) is not None
    return (model.double() if exact else model), exact


def outcomes(case: LoopCase, model: nn.Module, exact: bool, device: str = "cpu"):
    """Yield what each of several calls gives; the last ones after what the user changes, and with other data."""
    for number, (batch, steps) in enumerate([*SHAPES, SHAPES[-1]]):
        torch.manual_seed(number)
        random.seed(number)
        np.random.seed(number)
        changed = case.later(model) if number == len(SHAPES) and case.later is not None else nullcontext()
        args = case.inputs(batch, steps)
        if number == len(SHAPES) - 1 and case.surprise is not None:
            args = case.surprise(batch, steps)
        args = pytree.tree_map_only(Tensor, lambda x: x.to(device), args)
        wide = pytree.tree_map_only(Tensor, lambda x: x.double() if x.is_floating_point() else x, args)
        model.zero_grad()
        try:
            with changed:
                found = outcome(case, model, wide if exact else args)
            yield found
        except Exception as error:  # a model may fail, and then fails in the same way
            yield type(error).__name__


def rolled(case: LoopCase, device: str = "cpu") -> bool:
    """Compare a model with itself, accelerated; return whether a loop of it ran by the engine."""
    (plain, exact), (model, _) = built(case, device), built(case, device)
    near = {"atol": 1e-8, "rtol": 1e-6} if exact else {"atol": 2e-3, "rtol": 2e-3}
    near = {"atol": 0.1, "rtol": 0.1} if "autocast" in case.name else near  # products round to eight bits
    said = ""
    with hs.accelerate(model) as faster:
        pairs = zip(outcomes(case, plain, exact, device), outcomes(case, model, exact, device), strict=True)
        for expected, given in pairs:
            said += faster.explain()
            if isinstance(expected, str):
                assert given == expected, said
            else:
                assert not isinstance(given, str), (given, said)
                assert given.differences(expected, **near) == [], said
    return "by the engine" in said


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", FEW)
def test_an_accelerated_model_gives_what_it_gave(name):
    case = LOOP_MODELS[name]
    assert rolled(case) in {"roll": (True, False), "may": (True, False), "leave": (False,)}[case.expect]


@pytest.mark.long
@pytest.mark.parametrize("case", LOOP_MODELS.values(), ids=LOOP_MODELS)
def test_every_accelerated_model_gives_what_it_gave(case):
    rolled(case)


@pytest.mark.cuda
@pytest.mark.parametrize("case", LOOP_MODELS.values(), ids=LOOP_MODELS)
def test_every_accelerated_model_gives_what_it_gave_on_a_gpu(case):
    print("by the engine" if rolled(case, "cuda") else "as written")


@pytest.mark.long
def test_most_loops_of_strangers_are_rolled_up():
    healthy = [case for case in LOOP_MODELS.values() if case.expect == "roll"][::12]
    assert sum(map(rolled, healthy)) >= 0.75 * len(healthy)
