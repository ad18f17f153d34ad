"""The laws that hold for every pool."""

import copy
import math
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils._python_dispatch import TorchDispatchMode

from hiddenstate.errors import BadInput
from hiddenstate.pool import Attention, Concat, Last, LogSumExp, Max, Mean, MultiHead, Pool, Taps
from hiddenstate.recording import Trajectory

UNITS = 6
POOLS = {
    "last": lambda: Last(),
    "last of both directions": lambda: Last(bidirectional=True),
    "mean": lambda: Mean(),
    "max": lambda: Max(),
    "log-sum-exp": lambda: LogSumExp(),
    "attention": lambda: Attention(UNITS),
    "multi-head": lambda: MultiHead(UNITS, 3),
    "concat": lambda: Concat(Last(), Mean(), Attention(UNITS)),
    "taps, shared head": lambda: Taps([0, -1], nn.Linear(UNITS, 2)),
    "taps, own heads": lambda: Taps([0, -1], [nn.Linear(UNITS, 2), nn.Linear(UNITS, 2)]),
    "taps, zeros": lambda: Taps([3, -3], nn.Linear(UNITS, 2), short="zero"),
    "taps, the last": lambda: Taps(every=2, short="last"),
}
GARBAGE = (math.nan, math.inf, -math.inf, 3e38, -3e38)
each_pool = pytest.mark.parametrize("make", POOLS.values(), ids=POOLS)


@st.composite
def batches(draw):
    """States with rubbish for padding, and their lengths."""
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    time = max(lengths) + draw(st.integers(0, 2))
    h = torch.randn(len(lengths), time, UNITS)
    rubbish = draw(st.sampled_from(GARBAGE))
    for row, length in zip(h, lengths, strict=True):
        row[length:] = rubbish
    return h, torch.tensor(lengths)


def row_by_row(pool, h, lengths):
    """The slow and obvious way: each row alone, without its padding."""
    return torch.cat([pool(row[None, :length]) for row, length in zip(h, lengths.tolist(), strict=True)])


def grads(pool, compute, h):
    h = h.clone().requires_grad_()
    pool.zero_grad()
    result = compute(pool, h)
    (result * torch.linspace(0.5, 2, result.numel()).view_as(result)).sum().backward()
    return h.grad, [parameter.grad for parameter in pool.parameters()]


@pytest.mark.parametrize("make", [make for name, make in POOLS.items() if "the last" not in name])
@given(batch=batches())
def test_rubbish_in_the_padding_changes_nothing(make, batch):
    h, lengths = batch
    pool = make()
    assert torch.allclose(pool(h, lengths), row_by_row(pool, h, lengths), atol=1e-6)


@pytest.mark.parametrize("make", [make for name, make in POOLS.items() if "the last" not in name])
@given(batch=batches())
def test_gradients_are_those_without_padding_and_zero_in_it(make, batch):
    h, lengths = batch
    pool = make()
    into_h, into_weights = grads(pool, lambda p, x: p(x, lengths), h)
    true_h, true_weights = grads(pool, lambda p, x: row_by_row(p, x, lengths), h)
    padding = torch.arange(h.shape[1]) >= lengths[:, None]
    assert (into_h[padding] == 0).all()
    assert torch.allclose(into_h[~padding], true_h[~padding], atol=1e-5)
    for found, true in zip(into_weights, true_weights, strict=True):
        assert torch.allclose(found, true, atol=1e-5)


@each_pool
@pytest.mark.parametrize("rubbish", [0.0, 3e38, math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_keeps_rubbish_out(make, rubbish, dtype):
    h, lengths = torch.randn(3, 7, UNITS).to(dtype), torch.tensor([4, 7, 5])
    pool = make().to(dtype)
    clean = pool(h, lengths)
    h[0, 4:] = h[2, 5:] = rubbish
    into_h, into_weights = grads(pool, lambda p, x: p(x, lengths), h)
    assert clean.dtype == dtype
    assert torch.allclose(pool(h, lengths), clean, atol=1e-3)
    assert (into_h[0, 4:] == 0).all()
    assert all(g.isfinite().all() for g in [into_h, *into_weights])


@each_pool
def test_without_lengths_all_steps_count(make):
    h, pool = torch.randn(3, 5, UNITS), make()
    assert torch.allclose(pool(h), pool(h, torch.tensor([5, 5, 5])), atol=1e-6)


@each_pool
@pytest.mark.parametrize("kind", [torch.int16, torch.int32, torch.uint8, list])
def test_lengths_may_be_of_any_whole_kind(make, kind):
    h, lengths, pool = torch.randn(3, 7, UNITS), torch.tensor([7, 4, 5]), make()
    given = lengths.tolist() if kind is list else lengths.to(kind)
    assert torch.equal(pool(h, given), pool(h, lengths))


@each_pool
def test_packed_sequences_and_trajectories_know_their_lengths(make):
    h, lengths, pool = torch.randn(3, 7, UNITS), torch.tensor([4, 7, 5]), make()
    wanted = pool(h, lengths)
    packed = pack_padded_sequence(h, lengths, batch_first=True, enforce_sorted=False)
    assert torch.allclose(pool(packed), wanted, atol=1e-6)
    assert torch.allclose(pool(Trajectory(h, lengths)), wanted, atol=1e-6)


@each_pool
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_wrong_in_a_real_step_is_passed_on_and_stays_in_its_row(make, bad):
    h, lengths, pool = torch.randn(3, 7, UNITS), torch.tensor([7, 6, 5]), make()
    wanted = pool(h, lengths)
    h[1, :6] = bad
    found = pool(h, lengths)
    assert not found[1].isfinite().any()
    assert torch.allclose(found[[0, 2]], wanted[[0, 2]])


@each_pool
def test_an_empty_batch_gives_an_empty_result(make):
    pool = make()
    whole = pool(torch.randn(2, 5, UNITS))
    assert pool(torch.randn(0, 5, UNITS), torch.tensor([], dtype=torch.int64)).shape == (0, *whole.shape[1:])


@each_pool
def test_the_second_derivative_is_there(make):
    h = torch.randn(2, 4, UNITS, dtype=torch.float64, requires_grad=True)
    pool = make().double()
    assert torch.autograd.gradcheck(lambda x: pool(x, [4, 3]), h)
    assert torch.autograd.gradgradcheck(lambda x: pool(x, [4, 3]), h)


@each_pool
def test_autocast_is_welcome(make):
    h, lengths, pool = torch.randn(3, 7, UNITS), torch.tensor([4, 7, 5]), make()
    wanted = pool(h, lengths)
    h[0, 4:] = math.nan
    with torch.autocast("cpu", torch.bfloat16):
        found = pool(h, lengths)
        assert found.dtype == pool(h[1:2]).dtype  # whatever the padding is
    assert torch.allclose(found.float(), wanted, atol=0.05)
    for parameter in pool.parameters():
        (into,) = torch.autograd.grad(found.float().sum(), parameter, retain_graph=True)
        assert into.isfinite().all()


@pytest.fixture
def nothing_compiled():
    """Forget what other tests compiled: torch refuses to compile one method too often."""
    torch._dynamo.reset()


@each_pool
@pytest.mark.usefixtures("nothing_compiled")
def test_one_graph_holds_it(make):
    pool = make()
    compiled = torch.compile(pool, fullgraph=True, backend="aot_eager")
    for lengths in ([4, 7, 5], [7, 7, 4]):
        check_recorded(pool, compiled, lengths)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.usefixtures("nothing_compiled")
def test_the_compiler_itself_gives_the_same():
    pool = Concat(*(POOLS[name]() for name in ("last", "mean", "max", "log-sum-exp", "multi-head")))
    check_recorded(pool, torch.compile(pool, fullgraph=True), [4, 7, 5])


@each_pool
def test_a_trace_takes_other_sizes_and_lengths(make):
    pool = make()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning, message="`torch.jit.trace")
        traced = torch.jit.trace(pool, (torch.randn(2, 6, UNITS), torch.tensor([6, 5])))
    check_recorded(pool, traced, [4, 7, 5])


@each_pool
def test_an_export_takes_other_sizes_and_lengths(make):
    pool = make()
    batch, time = torch.export.Dim("batch", min=2), torch.export.Dim("time", min=4)
    example = (torch.randn(2, 6, UNITS), torch.tensor([6, 5]))
    exported = torch.export.export(pool, example, dynamic_shapes=({0: batch, 1: time}, {0: batch}))
    check_recorded(pool, exported.module(), [4, 7, 5])


def check_recorded(pool, recorded, lengths):
    h = torch.randn(3, 7, UNITS)
    for row, length in zip(h, lengths, strict=True):
        row[length:] = math.nan
    lengths = torch.tensor(lengths)
    found, wanted = grads(pool, lambda _, x: recorded(x, lengths), h), grads(pool, lambda p, x: p(x, lengths), h)
    assert torch.allclose(recorded(h, lengths), pool(h, lengths), atol=1e-6)
    assert torch.allclose(found[0], wanted[0], atol=1e-5)


@pytest.mark.usefixtures("nothing_compiled")
def test_a_compiled_pool_still_refuses_lengths_that_cannot_be():
    compiled = torch.compile(Mean(), fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match="a length is below 1 or above the number of steps"):
        compiled(torch.randn(2, 5, UNITS), torch.tensor([5, 0]))


@each_pool
def test_a_pool_can_be_copied_and_saved(make):
    pool = make()
    twin = make()
    twin.load_state_dict(pool.state_dict())
    h = torch.randn(2, 5, UNITS)
    assert torch.equal(twin(h), pool(h))
    assert torch.equal(copy.deepcopy(pool)(h), pool(h))


class Largest(TorchDispatchMode):
    """The most numbers any operation makes at once; views make none."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, tuple | list) else [result]:
            if isinstance(made, torch.Tensor) and not made._is_view():
                self.numbers = max(self.numbers, made.untyped_storage().nbytes() // made.element_size())
        return result


@each_pool
@pytest.mark.parametrize("rubbish", [0.0, math.nan])
def test_nothing_larger_than_the_input_is_made(make, rubbish):
    h, pool = torch.randn(4, 50, UNITS), make()
    h[0, 40:] = rubbish
    h.requires_grad_()
    with Largest() as largest:
        pool(h, torch.tensor([40, 50, 50, 50])).sum().backward()
    assert largest.numbers <= h.numel()


@pytest.mark.cuda
@each_pool
def test_cuda_gives_the_same(make):
    h, lengths, pool = torch.randn(3, 7, UNITS), torch.tensor([4, 7, 5]), make()
    h[0, 4:] = math.nan
    wanted = grads(pool, lambda p, x: p(x, lengths), h)
    twin = copy.deepcopy(pool).cuda()
    found = grads(twin, lambda p, x: p(x, lengths.cuda()).cpu(), h.cuda())
    assert torch.allclose(twin(h.cuda(), lengths.cuda()).cpu(), pool(h, lengths), atol=1e-5)
    assert torch.allclose(found[0].cpu(), wanted[0], atol=1e-5)


@pytest.mark.cuda
@each_pool
def test_cuda_autocast_is_welcome(make):
    h, lengths, pool = torch.randn(3, 7, UNITS).cuda(), torch.tensor([4, 7, 5]).cuda(), make().cuda()
    wanted = pool(h, lengths)
    h[0, 4:] = math.nan
    with torch.autocast("cuda", torch.float16):
        assert torch.allclose(pool(h.half(), lengths).float(), wanted.float(), atol=0.02)


def test_a_pool_of_ones_own_needs_one_method():
    class First(Pool):
        def pool(self, steps):
            return steps.h[:, 0]

    h = torch.randn(2, 3, UNITS)
    assert torch.equal(First()(h), h[:, 0])
    with pytest.raises(NotImplementedError, match=r"Pool needs a method pool\(steps\)"):
        Pool()(h)


def test_a_layers_whole_answer_is_refused():
    with pytest.raises(BadInput, match=r"this is tuple.*returns \(output, state\): give its output"):
        Mean()(nn.GRU(2, 3)(torch.randn(4, 2, 2)))
