"""Torch's fused layers by our own kernels: nothing changes but the time, and the model is as it was."""

import copy
import pickle
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.checkpoint import checkpoint

import hiddenstate as hs
from hiddenstate.errors import NotRecurrent
from hiddenstate.unrolling import accelerate as front
from hiddenstate.unrolling import verdicts
from hiddenstate.unrolling.verdicts import Verdict

module = __import__("sys").modules["hiddenstate.unrolling.accelerate"]
OURS = Verdict(ours=True, ratio=0.5, low=0.4, high=0.6)
KINDS = {"lstm": nn.LSTM, "gru": nn.GRU, "tanh": nn.RNN, "relu": nn.RNN}


@pytest.fixture
def always_ours(monkeypatch):
    """Let every call that can be run by our kernels be, whatever the clock says."""
    monkeypatch.setattr(module, "compare", lambda *_: OURS)
    monkeypatch.setattr(verdicts.Verdicts, "_shared", verdicts.Verdicts(None))


def made(kind, **options):
    torch.manual_seed(1)
    extra = {"nonlinearity": kind} if kind in ("tanh", "relu") else {}
    return KINDS[kind](3, 4, **extra, **options).double()


@st.composite
def calls(draw):
    """A layer, what it is called with, and whether it is called as its caller likes."""
    kind = draw(st.sampled_from(sorted(KINDS)))
    options = {
        "num_layers": draw(st.integers(1, 3)),
        "bidirectional": draw(st.booleans()),
        "bias": draw(st.booleans()),
        "batch_first": draw(st.booleans()),
        "proj_size": draw(st.sampled_from([0, 2])) if kind == "lstm" else 0,
    }
    if kind != "lstm":
        del options["proj_size"]
    options["dropout"] = draw(st.sampled_from([0.0, 0.4])) if options["num_layers"] > 1 else 0.0
    form = draw(st.sampled_from(["batch", "batch", "one sequence", "packed", "packed in order"]))
    return kind, options, form, draw(st.booleans()), draw(st.integers(1, 4)), draw(st.integers(4, 9))


def arguments_of(layer, form, stated, rows, steps):
    torch.manual_seed(2)
    if form == "one sequence":
        x = torch.randn(steps, 3, dtype=torch.float64, requires_grad=True)
        rows = None
    elif form == "batch":
        shape = (rows, steps, 3) if layer.batch_first else (steps, rows, 3)
        x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    else:
        lengths = [steps - row % 3 for row in range(rows)]
        lengths = sorted(lengths, reverse=True) if form == "packed in order" else lengths[::-1]
        flat = [torch.randn(length, 3, dtype=torch.float64, requires_grad=True) for length in lengths]
        x = pack_sequence(flat, enforce_sorted=form == "packed in order")
    if not stated:
        return (x,)
    count = layer.num_layers * (2 if layer.bidirectional else 1)
    sizes = [layer.proj_size or layer.hidden_size] + ([layer.hidden_size] if layer.mode == "LSTM" else [])
    between = () if rows is None else (rows,)
    parts = tuple(torch.randn(count, *between, size, dtype=torch.float64, requires_grad=True) for size in sizes)
    return x, (parts if layer.mode == "LSTM" else parts[0])


def tensors_in(nested):
    if isinstance(nested, PackedSequence):
        return [nested.data]
    if isinstance(nested, tuple):
        return [tensor for inner in nested for tensor in tensors_in(inner)]
    return [nested]


def laid(tensor):
    """How a tensor lies in memory; an axis of one entry lies nowhere."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def outcome(layer, arguments):
    """All values that come of a call, and all gradients."""
    torch.manual_seed(3)
    result = layer(*arguments)
    values = tensors_in(result)
    torch.manual_seed(4)
    loss = sum((value * torch.randn(value.shape, dtype=value.dtype)).sum() for value in values)
    leaves = [tensor for tensor in tensors_in(arguments) if tensor.requires_grad]
    grads = torch.autograd.grad(loss, [*leaves, *layer.parameters()], allow_unused=True)
    return result, [*values, *grads], torch.get_rng_state()


@settings(max_examples=4)
@given(case=calls())
def test_values_gradients_and_random_stream_are_torchs(case):
    check_case(*case)


@pytest.mark.long
@settings(max_examples=100)
@given(case=calls())
def test_values_gradients_and_random_stream_are_torchs_for_many_layers(case):
    check_case(*case)


def check_case(kind, options, form, stated, rows, steps):
    layer = made(kind, **options)
    arguments = arguments_of(layer, form, stated, rows, steps)
    expected, theirs, stream = outcome(layer, arguments)
    patch = pytest.MonkeyPatch()
    with patch.context() as patched:
        patched.setattr(module, "compare", lambda *_: OURS)
        patched.setattr(verdicts.Verdicts, "_shared", verdicts.Verdicts(None))
        with hs.accelerate(layer) as faster:
            result, ours, after = outcome(layer, arguments)
        assert ": by ours, x 0.50" in faster.explain()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-10)
    assert torch.equal(stream, after)
    assert [laid(value) for value in tensors_in(result)] == [laid(value) for value in tensors_in(expected)]
    assert type(result[0]) is type(expected[0])
    if isinstance(expected[0], PackedSequence):
        for mine, other in zip(result[0][1:], expected[0][1:], strict=True):
            assert mine is other or torch.equal(mine, other)


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("frozen", ["weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "all"])
def test_only_what_asks_for_gradients_gets_them(always_ours, kind, frozen):
    layer, x = made(kind), torch.randn(6, 2, 3, dtype=torch.float64)
    for name, weight in layer.named_parameters():
        weight.requires_grad_(frozen not in (name, "all"))
    x.requires_grad_(frozen == "all")
    grads = []
    for ours in (True, False):
        handle = hs.accelerate(layer) if ours else None
        layer(x)[0].square().sum().backward()
        grads.append([leaf.grad for leaf in (x, *layer.parameters())])
        for leaf in (x, *layer.parameters()):
            leaf.grad = None
        if handle:
            handle.close()
    for mine, theirs in zip(*grads, strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or torch.allclose(mine, theirs, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_gradients_are_torchs(always_ours, kind):
    layer, x = made(kind), torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True)

    def second():
        (first,) = torch.autograd.grad(layer(x)[0].square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), [x, *layer.parameters()], allow_unused=True)

    theirs = second()
    with hs.accelerate(layer):
        ours = second()
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine is None) == (other is None)
        assert mine is None or torch.allclose(mine, other, rtol=1e-8, atol=1e-9)


def test_weights_that_change_between_calls_are_seen(always_ours):
    layer, x = made("gru"), torch.randn(6, 2, 3, dtype=torch.float64)
    with hs.accelerate(layer):
        before = layer(x)[0]
        with torch.no_grad():
            layer.weight_hh_l0.mul_(2)
        mid = layer(x)[0]
        layer.weight_hh_l0.data = torch.randn(12, 4, dtype=torch.float64)
        after = layer(x)[0]
    assert not torch.allclose(before, mid)
    assert not torch.allclose(mid, after)
    torch.testing.assert_close(after, layer(x)[0], rtol=1e-9, atol=1e-10)


def test_rows_and_steps_may_change_from_call_to_call(always_ours):
    layer = made("gru", num_layers=2)
    for rows, steps in ((2, 6), (5, 6), (1, 9), (3, 40), (2, 6)):
        x = torch.randn(steps, rows, 3, dtype=torch.float64)
        expected = layer(x)[0]
        with hs.accelerate(layer):
            torch.testing.assert_close(layer(x)[0], expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_gives_the_same_gradients(always_ours, reentrant):
    layer, x = made("gru"), torch.randn(6, 2, 3, dtype=torch.float64, requires_grad=True)

    def grads():
        out = checkpoint(lambda value: layer(value)[0], x, use_reentrant=reentrant)
        found = torch.autograd.grad(out.square().sum(), x) if not reentrant else None
        if reentrant:
            x.grad = None
            out.square().sum().backward()
            found, x.grad = (x.grad,), None
            layer.zero_grad()
        return found

    expected = grads()
    with hs.accelerate(layer):
        for mine, theirs in zip(grads(), expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-10)


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, num_layers=2, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.lstm(x)[0])


def test_the_model_is_as_it_was(always_ours):
    model, x = Tagger(), torch.randn(2, 6, 3)
    names, before = list(model.state_dict()), {key: id(value) for key, value in vars(model.lstm).items()}
    seen = []
    hook = model.lstm.register_forward_hook(lambda *_: seen.append(1))
    with hs.accelerate(model):
        assert list(model.state_dict()) == names
        clone, thawed = copy.deepcopy(model), pickle.loads(pickle.dumps(model.lstm.state_dict()))
        assert "forward" not in vars(clone.lstm)
        assert list(thawed) == [name.removeprefix("lstm.") for name in names if name.startswith("lstm.")]
        model.lstm.flatten_parameters()
        model(x)
    hook.remove()
    assert seen == [1]
    assert {key: id(value) for key, value in vars(model.lstm).items()} == before


def test_closing_twice_and_an_exception_inside_leave_nothing(always_ours):
    model = Tagger()
    with pytest.raises(RuntimeError), hs.accelerate(model) as faster:
        model(torch.randn(2, 6, 5))
    faster.close()
    assert "forward" not in vars(model.lstm)
    assert "forward" not in vars(model)


def test_what_is_measured_is_not_heard_draws_nothing_and_leaves_no_gradient(monkeypatch):
    model, x = nn.GRU(3, 4, num_layers=2, dropout=0.5), torch.randn(20, 2, 3)
    torch.manual_seed(0)
    expected = model(x)[0]
    heard = []
    monkeypatch.setattr(verdicts.Verdicts, "_shared", verdicts.Verdicts(None))
    with hs.accelerate(model) as faster, hs.Monitor(model) as monitor:
        torch.manual_seed(0)
        torch.testing.assert_close(model(x)[0], expected)
        heard.append(monitor.step)
    assert heard == [1]
    assert all(weight.grad is None for weight in model.parameters())
    assert "of torch's time" in faster.explain()


USES = {
    "carried": lambda model, x: _carried(model, x),
    "marked": lambda model, x: _marked(model, x),
    "recorded": lambda model, x: _recorded(model, x),
    "penalized": lambda model, x: _penalized(model, x),
}


def _carried(model, x):
    with hs.Carry(model) as carry:
        return [*(model(piece) for piece in x.split(6, dim=1)), *carry.state.values()]


def _marked(model, x):
    with hs.Carry(model) as carry:
        carry.mark(starts=torch.zeros(3, 18).bool().index_fill(1, torch.tensor([7]), True), lengths=[18, 11, 5])
        return [model(x)]


def _recorded(model, x):
    with hs.record(model, gates=True) as seen:
        out = model(x)
    run = seen["lstm.l1"]
    return [out, run.h, run.c, *run.gates.values()]


def _penalized(model, x):
    with hs.regularize.Penalty(model, activity=1.0, temporal=1.0) as penalty:
        out = model(x)
        return [out, penalty()]


@pytest.mark.parametrize("use", USES)
def test_it_works_together_with_the_rest(always_ours, use):
    torch.manual_seed(0)
    model, x = Tagger().double(), torch.randn(3, 18, 3, dtype=torch.float64)
    expected = USES[use](model, x)
    with hs.accelerate(model) as faster:
        found = USES[use](model, x)
    assert use == "recorded" or ": by ours, x 0.50" in faster.explain()
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-10)


def test_dropped_weights_are_those_that_count(always_ours):
    layer, x = hs.regularize.WeightDrop(made("lstm"), 0.5), torch.randn(6, 2, 3, dtype=torch.float64)
    torch.manual_seed(0)
    expected = layer(x)[0]
    with hs.accelerate(layer) as faster:
        torch.manual_seed(0)
        assert torch.equal(layer(x)[0], expected)
        assert "lent other weights than its parameters, as by WeightDrop" in faster.explain()
        layer.eval()
        layer(x)
    assert "by ours" in faster.explain()


LEFT = {
    "fewer than 4 steps": lambda layer: layer(torch.randn(3, 2, 3)),
    "its input is empty": lambda layer: layer(torch.randn(5, 0, 3)),
    "its input is torch.bfloat16": lambda layer: layer.bfloat16()(torch.randn(5, 2, 3).bfloat16()),
}


@pytest.mark.parametrize("reason", LEFT)
def test_a_call_that_is_left_to_torch_says_why(always_ours, reason):
    layer = nn.GRU(3, 4)
    with hs.accelerate(layer) as faster:
        LEFT[reason](layer)
    assert f"GRU, by torch's own kernel: {reason}" in faster.explain().replace("a call of ", "")


def test_hooks_on_weights_autocast_determinism_and_the_switch_leave_torchs_kernel(always_ours, monkeypatch):
    layer, x = nn.GRU(3, 4), torch.randn(6, 2, 3)
    with hs.accelerate(layer) as faster:
        with torch.autocast("cpu"):
            layer(x)
        torch.use_deterministic_algorithms(True)
        layer(x)
        torch.use_deterministic_algorithms(False)
        handle = layer.weight_hh_l0.register_hook(lambda grad: grad)
        layer(x)
        handle.remove()
        monkeypatch.setenv("HIDDENSTATE_ENGINE", "loop")
        layer(x)
    said = faster.explain()
    for reason in ("autocast chooses", "deterministic algorithms", "a hook on its weights", "HIDDENSTATE_ENGINE=loop"):
        assert reason in said


def test_cells_and_layers_that_were_not_called_are_named():
    normed = nn.utils.parametrizations.weight_norm(nn.GRU(3, 4), "weight_hh_l0")
    model = nn.ModuleDict({"gru": nn.GRU(3, 4), "cell": nn.LSTMCell(3, 4), "normed": normed})
    with hs.accelerate(model) as faster:
        pass
    assert str(faster).splitlines() == [
        "gru: GRU, not called yet",
        "cell: LSTMCell, left alone: a cell, which a loop steps",
        "normed: ParametrizedGRU, left alone: no nn.RNN, nn.LSTM or nn.GRU itself, and a subclass may do things of "
        "its own",
    ]


def test_a_model_with_cells_alone_is_told_that_nothing_is_done():
    with hs.accelerate(nn.ModuleList([nn.LSTMCell(3, 4), hs.Recurrent(nn.GRUCell, 3, 4)])) as faster:
        pass
    assert str(faster).splitlines() == [
        "0: LSTMCell, left alone: a cell, which a loop steps",
        "1: Recurrent, left alone: an hs.Recurrent, which the fast engine runs by itself (hs.explain)",
    ]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_state_that_torch_refuses_is_refused_by_torch(always_ours, kind):
    layer, h = kind(3, 4), torch.zeros(1, 1, 4)
    with hs.accelerate(layer) as faster, pytest.raises(RuntimeError, match=r"unbatched 2-D input, hx .*2-D"):
        layer(torch.randn(8, 3), (h, h) if kind is nn.LSTM else h)
    assert "which torch refuses" in faster.explain()


# On a GPU


ON_A_GPU = {
    "float32": (torch.float32, False, 1e-5),
    "bfloat16": (torch.bfloat16, False, 1e-2),
    "float16": (torch.float16, False, 2e-3),
    "autocast": (torch.float32, True, 2e-3),
}
# Torch itself says so of every layer in bfloat16: it flattens no weights of that dtype.
unflattened = pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk")


def layer_on_a_gpu(kind, dtype, **options):
    torch.manual_seed(0)
    extra = {"nonlinearity": kind} if kind in ("tanh", "relu") else {}
    layer = KINDS[kind](24, 32, num_layers=2, **extra, **options).to("cuda", dtype)
    layer.flatten_parameters()
    return layer


def given_to(kind, form, **like):
    """What a layer is called with, whose tensors ask for gradients."""
    torch.manual_seed(0)
    x = torch.randn(17, 9, 24).to(**like).requires_grad_()
    if form == "packed":
        return (nn.utils.rnn.pack_padded_sequence(x, [17, 16, 16, 9, 5, 5, 3, 2, 1]),)
    if form == "stated":
        parts = tuple(torch.randn(2, 9, 32).to(**like).requires_grad_() for _ in range(2))
        return (x, parts if kind == "lstm" else parts[0])
    return (x,)


def all_it_gives(layer, given, *, grad):
    with torch.set_grad_enabled(grad):
        values = tensors_in(layer(*given))
    if not grad:
        return values
    torch.manual_seed(2)
    loss = sum((value * torch.randn(value.shape).to(value)).sum() for value in values)
    leaves = [tensor for tensor in tensors_in(given) if tensor.requires_grad]
    return [*(value.detach() for value in values), *torch.autograd.grad(loss, [*leaves, *layer.parameters()])]


@pytest.mark.cuda
@unflattened
@pytest.mark.parametrize("form", ["batch", "packed", "stated", "no_grad"])
@pytest.mark.parametrize("way", ON_A_GPU)
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu_its_error_is_that_of_cudnn(always_ours, kind, way, form):
    """Both are held against float64: a relu may turn on either side of zero, and takes its gradients with it."""
    dtype, autocast, rounding = ON_A_GPU[way]
    layer, grad = layer_on_a_gpu(kind, dtype, bidirectional=form != "stated"), form != "no_grad"
    given = given_to(kind, form, device="cuda", dtype=dtype)
    exact = all_it_gives(copy.deepcopy(layer).cpu().double(), given_to(kind, form, dtype=torch.float64), grad=grad)
    found = []
    for ours in (False, True):
        handle = hs.accelerate(layer) if ours else nullcontext()
        with handle, torch.autocast("cuda", torch.float16, enabled=autocast):
            for _ in range(4):  # from the third call on a pass is recorded
                gives = all_it_gives(layer, given, grad=grad)
            found.append(gives)
            assert not ours or ": by ours, x 0.50" in handle.explain(), handle.explain()
    for theirs, mine, true in zip(*found, exact, strict=True):
        assert mine.dtype == theirs.dtype
        theirs, mine = (float((value.double().cpu() - true).norm() / true.norm()) for value in (theirs, mine))
        assert mine <= 3 * theirs + rounding


@pytest.mark.cuda
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu_it_drops_as_many_as_cudnn(always_ours, kind):
    layer, x = layer_on_a_gpu(kind, torch.float32, dropout=0.5), torch.randn(17, 9, 24, device="cuda")

    def outputs():
        torch.manual_seed(1)
        with torch.no_grad():
            return torch.stack([layer(x)[0] for _ in range(300)]).double()

    theirs = outputs()
    with hs.accelerate(layer) as faster:
        ours = outputs()
        assert ": by ours" in faster.explain()
        assert torch.equal(ours, outputs())  # one seed, one result
    error = (theirs.var(0) / 300 + ours.var(0) / 300).sqrt() + 1e-4
    assert float(((theirs.mean(0) - ours.mean(0)) / error).abs().max()) < 6
    torch.testing.assert_close(ours.std(0).mean(), theirs.std(0).mean(), rtol=0.05, atol=0)


@pytest.mark.cuda
def test_a_call_within_a_graph_of_the_users_is_recorded_with_it(always_ours):
    layer, x = nn.GRU(24, 32).cuda(), torch.randn(9, 5, 24, device="cuda")
    with torch.no_grad(), hs.accelerate(layer) as faster:
        for _ in range(4):
            layer(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer(x)[0]
        x.normal_()
        graph.replay()
        assert ": by ours" in faster.explain()
        torch.testing.assert_close(out, layer(x)[0], rtol=1e-2, atol=1e-2)


def test_a_model_without_a_fused_layer_is_refused_with_a_way_out():
    with pytest.raises(NotRecurrent, match=r"Linear has no nn\.RNN, nn\.LSTM or nn\.GRU.*hs\.Recurrent"):
        front(nn.Linear(2, 2))


@pytest.fixture
def heard(monkeypatch):
    """Collect the calls that are looked at; torch's kernel is faster beyond doubt in all of them."""
    calls, layer_call = [], module.Accelerated.layer_call
    monkeypatch.setattr(module, "compare", lambda *_: Verdict(ours=False, ratio=2.0, low=1.5, high=2.5))
    monkeypatch.setattr(verdicts.Verdicts, "_shared", verdicts.Verdicts(None))

    def counted(self, call, proceed):
        calls.append(call)
        return layer_call(self, call, proceed)

    monkeypatch.setattr(module.Accelerated, "layer_call", counted)
    return calls


def test_calls_for_which_torchs_kernel_was_chosen_for_good_are_not_looked_at_any_more(heard):
    layer, x = nn.LSTM(3, 4), torch.randn(6, 2, 3)
    expected = layer(x)[0]
    with hs.accelerate(nn.Sequential(layer)):
        for _ in range(5):
            assert torch.equal(layer(x)[0], expected)
        assert len(heard) == 2
        for other in (x[:, :1], x.clone().requires_grad_()):  # others are
            layer(other)
        layer(input=x)
        assert len(heard) == 5
        for _ in range(3):
            layer(x[:2])  # too short to be compared at all
        assert len(heard) == 6
        with hs.record(layer) as rec:  # somebody else hears every call
            layer(x)
        assert len(heard) == 7
        assert torch.equal(rec["l0"].h.transpose(0, 1), expected)
        layer(x)
    layer(x)
    assert len(heard) == 7
