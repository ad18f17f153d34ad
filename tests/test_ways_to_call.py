"""Whoever listens to a model hears the same, however the model calls its layers and whatever is wrapped around it."""

from __future__ import annotations

from contextlib import closing
from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import hiddenstate as hs
from hiddenstate.errors import BadInput, HiddenStateError
from hiddenstate.reporting.model_run import run_model
from hiddenstate.serve import Engine
from tests.support.calling import SUBCLASSES, WAYS, Calling, subclassed


def gradients(model, total):
    total.backward()
    found = [whole(torch.zeros_like(p) if p.grad is None else p.grad.clone()) for p in model.parameters()]
    model.zero_grad()  # here, since a sharded model holds other parameters between a call and its backward
    return found


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


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
    # The size of a graph may differ, and of a sharded model no rows are run again.
    kept = {
        name: each for name, each in numbers.items() if name != "graph" and not name.endswith((".memory", ".gates"))
    }
    return {name: torch.as_tensor(each) for name, each in kept.items()}


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


def sharded(model, *, layer=True):
    for part in [model.rnn] if layer else []:
        fully_shard(part)
    return fully_shard(model)


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


@pytest.mark.sample(16)
@pytest.mark.parametrize("forward", SUBCLASSES)
@pytest.mark.parametrize("listener", LISTENERS)
@settings(max_examples=4, deadline=None)
@given(kind=st.sampled_from([nn.RNN, nn.LSTM, nn.GRU]), chunk=st.none() | st.integers(1, 4), passes=st.booleans())
def test_the_same_is_heard_whatever_a_subclass_takes_besides(listener, forward, kind, chunk, passes):
    x = torch.randn(2, 7, 3)
    plain = Calling(kind(3, 4, batch_first=True), "layer(x)", chunk)
    layer = subclassed(kind, forward)(3, 4, batch_first=True)
    layer.load_state_dict(plain.rnn.state_dict())
    model = Calling(layer, SUBCLASSES[forward] if passes else way_without_none(SUBCLASSES[forward]), chunk)
    model.read = plain.read
    same(listener(model, x), listener(plain, x))


def way_without_none(way):
    """Pass no state where there is none: with it a layer gets arguments that it is else called without."""
    return lambda layer, x, h: layer(x) if h is None else way(layer, x, h)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # about views that a fused layer returns
@pytest.mark.parametrize("layer", [True, False])
@pytest.mark.parametrize("listener", [each for each in LISTENERS if each not in (diagnosed, served)])
@settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(kind=st.sampled_from([nn.RNN, nn.LSTM, nn.GRU]), chunk=st.none() | st.integers(1, 4))
@pytest.mark.usefixtures("group")
def test_the_same_is_heard_of_a_sharded_model(listener, layer, kind, chunk):
    x = torch.randn(2, 7, 3)
    plain = Calling(kind(3, 4, batch_first=True), "layer(x, h)", chunk)
    model = sharded(deepcopy(plain), layer=layer)
    same(listener(model, x), listener(plain, x))
    assert not [module for module in model.modules() if "forward" in vars(module)], "something of ours is left"


def before_anything(model, x):
    pass


def after_a_call(model, x):
    with torch.no_grad():
        model(x)


def after_training(model, x):
    model(x).sum().backward()


LOOKS = {
    "layers": lambda model, x: hs.layers(model, x),
    "split": hs.check_split,
    "report": lambda model, x: run_model(model, (x,)),
    "memory": lambda model, x: hs.measure.memory(model, x),
    "data set": lambda model, x: list(hs.measure.runs_of(model, [x])),
    "engine": lambda model, x: Engine(model).shutdown(),
    "diagnose": hs.diagnose,
}


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize("layer", [True, False])
@pytest.mark.parametrize("before", [before_anything, after_a_call, after_training])
@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
@pytest.mark.usefixtures("group")
def test_a_sharded_model_comes_back_as_it_was(look, before, layer):
    x = torch.randn(2, 7, 3)
    plain = Calling(nn.LSTM(3, 4, batch_first=True), "layer(x, h)")
    model = sharded(deepcopy(plain), layer=layer)
    before(model, x)
    kept = [(p, None if p.grad is None else whole(p.grad.clone())) for p in model.parameters()]
    if look in (LOOKS["diagnose"], LOOKS["engine"]):
        with pytest.raises(BadInput, match=r"FSDPCalling is sharded by fully_shard: .* before the model is sharded\."):
            look(model, x)
    else:
        look(model, x)
    for (one, grad), now in zip(kept, model.parameters(), strict=True):
        assert one is now
        torch.testing.assert_close(None if now.grad is None else whole(now.grad), grad)
    with torch.no_grad():
        torch.testing.assert_close(model(x), plain(x))
    model.reshard()
    model.zero_grad()
    for ours, theirs in zip(gradients(model, model(x).sum()), gradients(plain, plain(x).sum()), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")  # in a group of one
@pytest.mark.parametrize("inner", [True, False])
@pytest.mark.parametrize("original", [True, False])
@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
@pytest.mark.usefixtures("group")
def test_a_model_that_only_its_wrapper_may_call_is_refused_by_name(look, original, inner):
    def flat(module):
        return FullyShardedDataParallel(module, device_id=torch.device("cpu"), use_orig_params=original)

    model, x = Calling(nn.LSTM(3, 4, batch_first=True), "layer(x, h)"), torch.randn(2, 7, 3)
    if inner:
        model.rnn = flat(model.rnn)
        with pytest.raises(BadInput, match="Calling is wrapped in FullyShardedDataParallel, or holds a module that is"):
            look(model, x)
    wrapped = flat(model)
    with pytest.raises(BadInput, match=r"Calling is wrapped in FullySharded.*Do it before.*hs\.Carry, hs\.record"):
        look(wrapped, x)
    whole = wrapped(x).detach()
    with hs.Carry(wrapped), hs.record(wrapped) as rec:  # what listens does hear it
        torch.testing.assert_close(torch.cat([wrapped(piece) for piece in x.split([3, 4], dim=1)], dim=1), whole)
    assert sum(run.h.shape[1] for track in rec for run in rec.runs(track)) == 7


ATTACHED = {
    "hs.Carry": hs.Carry,
    "hs.record": hs.record,
    "hs.regularize.Penalty": lambda model: hs.regularize.Penalty(model, activity=1.0),
    "hs.accelerate": lambda model: closing(hs.accelerate(model)),
    "Monitor": lambda model: closing(hs.Monitor(model)),
}


@pytest.mark.filterwarnings("ignore:hs.Monitor.* saw not a single training call")
@pytest.mark.parametrize("name", ATTACHED)
def test_replicas_are_refused_in_words_that_users_know(name):
    model = nn.Sequential(nn.GRU(3, 4, batch_first=True))
    with (
        ATTACHED[name](model),
        pytest.raises(HiddenStateError, match=rf"nn\.DataParallel copies.* and {name}, attached"),
    ):
        model[0]._replicate_for_data_parallel()
    model[0]._replicate_for_data_parallel()
