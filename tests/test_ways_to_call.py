"""Whoever listens to a model hears the same, however the model calls its layers and whatever is wrapped around it."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hiddenstate as hs
from hiddenstate.reporting.model_run import run_model
from hiddenstate.serve import Engine
from tests.support.calling import WAYS, Calling


def gradients(model, total):
    model.zero_grad()
    total.backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


def carried(model, x):
    """Pieces with the state handed over, also in the backward pass; rows that start anew and end on the way."""
    whole = gradients(model, model(x).square().sum())
    with hs.Carry(model, detach=not goes_back(model)) as carry:
        out = torch.cat([model(piece) for piece in x.split([2, 1, 4], dim=1)], dim=1)
        state = carry.state
        if goes_back(model):
            for ours, theirs in zip(gradients(model, out.square().sum()), whole, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        carry.reset()
        starts = torch.zeros(2, 7, dtype=torch.bool)
        starts[1, 4] = True
        carry.mark(starts=starts, lengths=torch.tensor([7, 5]))
        marked = model(x)
        return out, dict(state), marked[0], marked[1, :5], dict(carry.state)


def goes_back(model):
    """Gradients go through a handed-over state, but for the reentrant form of checkpointing, which is refused."""
    inner = getattr(model, "module", getattr(model, "_orig_mod", model))
    return inner.way not in [way for name, way in WAYS.items() if "reentrant" in name]


def recorded(model, x):
    with hs.record(model) as rec:
        model(x).sum().backward()
    (name,) = rec
    (run,) = rec.runs(name)
    return run.h, run.lengths


def penalized(model, x):
    with hs.regularize.Penalty(model, activity=1.0, temporal=1.0) as penalty:
        model(x)
        cost = penalty()
        return cost, gradients(model, cost)


def monitored(model, x):
    with hs.Monitor(model, every=1) as monitor:
        for _ in range(2):
            model(x).square().mean().backward()
        monitor.flush()
        assert monitor.step == 2
        numbers = monitor.history
    return {name: torch.as_tensor(each) for name, each in numbers.items() if name != "graph"}  # its size may differ


def split(model, x):
    assert hs.check_split(model, x)
    return ()


def diagnosed(model, x):
    codes = {finding.code for finding in hs.diagnose(model, x, batch_axis=0).findings}
    # Its input has no gradient, and then one form of checkpointing gives none to the weights: that is a finding.
    assert "HS503" not in codes or not goes_back(model)
    return sorted(codes - {"HS503"})


def reported(model, x):
    ran = run_model(model, (x,))
    (name,) = ran.recording
    return ran.recording[name].h, ran.inputs["rnn"]


def served(model, x):
    with Engine(model) as engine:
        engine.open("one")
        return torch.cat([engine.push("one", piece) for piece in x[0].split([3, 4])])


LISTENERS = [carried, recorded, penalized, monitored, split, diagnosed, reported, served]


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    """A process group of one."""
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


WRAPPERS = {
    "as it is": lambda model: model,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "distributed": DistributedDataParallel,
}


def same(one, other):
    if isinstance(one, list):
        assert one == other
    else:
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("wrap", ["as it is", "distributed", pytest.param("compiled", marks=pytest.mark.long)])
@pytest.mark.parametrize("listener", LISTENERS)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # when Dynamo looks at it
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # torch's, of reentrant checkpoints
@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    way=st.sampled_from(list(WAYS)),
    kind=st.sampled_from([nn.RNN, nn.LSTM, nn.GRU]),
    chunk=st.none() | st.integers(1, 4),
)
@pytest.mark.usefixtures("group")
def test_the_same_is_heard_however_a_layer_is_called(listener, wrap, way, kind, chunk):
    # Torch's reentrant form sends no gradient into the tensors of a tuple, and DDP refuses to see it twice in one call.
    assume(chunk is None or "reentrant" not in way or (kind is not nn.LSTM and wrap != "distributed"))
    x = torch.randn(2, 7, 3, requires_grad=True)  # else one form of checkpointing gives no gradients
    plain = Calling(kind(3, 4, batch_first=True), "layer(x, h)")
    model = deepcopy(plain)
    model.way, model.chunk = WAYS[way], chunk
    expected = listener(plain, x)
    wrapped = WRAPPERS[wrap](model)
    same(listener(wrapped, x), expected)
    model(x)  # what a backward pass might have run once more is left until now
    assert not [module for module in model.modules() if "forward" in vars(module)], "something of ours is left"
