"""What tracing takes apart gives what the whole gives, at the edges of its numbers too."""

import warnings
from contextlib import suppress

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from hiddenstate.unrolling.decompositions import decompositions
from tests.support.operation_sweep import EDGES, FLOATS, HALVES, difference

PRECISION = {torch.float32: 4e-6, torch.float64: 1e-8, torch.bfloat16: 2e-2, torch.float16: 4e-3}
DRAWN = {"rrelu", "gumbel_softmax", "bernoulli", "poisson", "empty_like", "rand_like", "randn_like", "normal"}
APART = {
    "gelu": "torch has code of its own for whole registers, which is off by 1e-4 and has no number at infinity",
    "prod": "torch goes another way where there are zeros, and finds a slope beside what is no number",
    "fbgemm_pack_gemm_matrix_fp16": "it packs memory",
    "from_dlpack": "it shares memory",
}


def functions_of_one():
    """Everything in torch that makes one tensor of one, by name: what comes anew with a version is swept too."""
    x = torch.tensor(EDGES[torch.float32]).repeat(2, 1)
    found = {}
    for part in (torch, torch.special, F):
        for name in dir(part):
            function = getattr(part, name)
            taken = {*DRAWN, *APART, *found}
            if name.startswith("_") or name.endswith("_") or "dropout" in name or name in taken:
                continue
            # Operations alone: torch.set_printoptions and its like take a tensor too, and change the process.
            operation = part is not torch or hasattr(torch._C._VariableFunctions, name)
            if operation and callable(function) and not isinstance(function, type):
                with warnings.catch_warnings(), suppress(Exception):
                    warnings.simplefilter("ignore")
                    if isinstance(function(x.clone()), torch.Tensor):
                        found[name] = function
    return found


OF_ONE = functions_of_one()
FEW = ["elu", "selu", "celu", "hardtanh", "relu6", "hardswish", "softplus", "silu", "layer_norm", "amax", "log_softmax"]


def value_and_slope(function):
    def both(x):
        x = x.detach().requires_grad_()
        y = function(x)
        if not y.requires_grad:
            return [y]
        return [y, *torch.autograd.grad(y, x, torch.full_like(y, 0.75))]

    return both


def check_function_of_one(name, dtype):
    # As often as fills registers: for what is left over torch has other code, with other slopes at what is no number.
    both, x = value_and_slope(OF_ONE[name]), torch.tensor(EDGES[dtype], dtype=dtype).repeat(64, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            theirs = both(x)
            ours = make_fx(both, decomposition_table=decompositions(), tracing_mode="fake")(x)(x)
        except (RuntimeError, NotImplementedError):  # torch has no such function of this dtype, or it cannot be traced
            return
    for one, other in zip(ours, theirs, strict=True):
        assert difference(one, other, PRECISION[dtype]) == ""


@pytest.mark.parametrize("name", [name for name in FEW if name in OF_ONE])
def test_a_function_of_one_tensor_is_torchs_at_the_edges_of_its_numbers(name):
    check_function_of_one(name, torch.float32)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [*FLOATS, *HALVES], ids=str)
@pytest.mark.parametrize("name", OF_ONE)
def test_every_function_of_one_tensor_is_torchs_at_the_edges_of_its_numbers(name, dtype):
    check_function_of_one(name, dtype)


NUMBERS = [1.0, -1.5, 2, 0.3, -0.0, float("inf"), float("nan")]
TAKEN_APART = {
    "remainder": torch.remainder,
    "fmod": torch.fmod,
    "clamp from below": lambda a, b: a.clamp(min=b),
    "clamp from above": lambda a, b: a.clamp(max=b),
    "clamp": lambda a, b: a.clamp(b, b + 1),
    "divide and cut": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "divide and floor": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "hard sigmoid": lambda a, b: F.hardsigmoid(a) + 0 * b.nan_to_num(0, 0, 0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", TAKEN_APART)
def test_an_operation_of_two_is_torchs_to_the_bit(name, dtype):
    edges = torch.tensor(EDGES[dtype], dtype=dtype)
    a, b = edges.unsqueeze(1).expand(-1, len(edges)).contiguous(), edges.expand(len(edges), -1).contiguous()
    ours = make_fx(TAKEN_APART[name], decomposition_table=decompositions())(a, b)(a, b)
    theirs = TAKEN_APART[name](a, b)
    assert torch.equal(ours.nan_to_num(0.123), theirs.nan_to_num(0.123))
    assert torch.equal(ours.signbit() & ~ours.isnan(), theirs.signbit() & ~theirs.isnan())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("function", [F.hardsigmoid, F.hardswish, F.hardtanh, F.leaky_relu, F.softplus, F.elu])
def test_derivatives_are_torchs(function, dtype):
    x = torch.linspace(-5, 5, 41, dtype=dtype)

    def slope(x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(function(x).sum(), x)[0]

    ours = make_fx(slope, decomposition_table=decompositions())(x)(x)
    torch.testing.assert_close(ours, slope(x), rtol=1e-6 if dtype is torch.float32 else 1e-14, atol=0)


@pytest.mark.parametrize("by", NUMBERS)
def test_a_remainder_of_a_number_is_torchs_to_the_bit(by):
    a = torch.tensor(EDGES[torch.float64], dtype=torch.float64)
    ours = make_fx(lambda a: torch.remainder(a, by), decomposition_table=decompositions())(a)(a)
    torch.testing.assert_close(ours, torch.remainder(a, by), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_the_sum_of_all_is_torchs(shape, dtype):
    x = (torch.arange(6)[: int(torch.Size(shape).numel())].view(shape) + 1).to(dtype)
    ours = make_fx(torch.sum, decomposition_table=decompositions())(x)(x)
    torch.testing.assert_close(ours, x.sum())


NORM = torch.nn.BatchNorm1d(6).double().eval()
MOVED = {
    "roll": lambda x: x.roll(2, 1),
    "roll along two axes": lambda x: x.roll((-1, 1), (0, 1)),
    "roll by nothing": lambda x: x.roll(6, 1),
    "roll of all": lambda x: x.roll(2),
    "flip": lambda x: x.flip(0, 1),
    "running sum": lambda x: x.cumsum(1),
    "pad": lambda x: F.pad(x, (1, 2)),
    "pad and cut": lambda x: F.pad(x, (-1, 2, 1, -1), value=3.0),
    "cut": lambda x: F.pad(x, (0, 0, -1, -1)),
    "copy": lambda x: torch.ops.aten.copy(x.new_zeros(2, *x.shape), x.detach()) + 0 * x,
    "every second": lambda x: x[:, 1::2] * x[:, ::2],
    "some of many": lambda x: x[:, 1:3:2],
    "every third row": lambda x: x[::3],
    "softmax of what may be shut out": lambda x: torch.ops.aten._safe_softmax(x, -1),
    "prelu": lambda x: F.prelu(x, torch.linspace(-1, 1, 6).to(x.dtype)),
    "steps": lambda x: torch.heaviside(x.detach(), x.new_tensor(0.5)) + 0 * x,
    "kept statistics": NORM,
    "kept statistics alone": lambda x: F.batch_norm(x, NORM.running_mean, NORM.running_var),
}
_WHOLE = {"roll of all", "some of many"}  # of which nothing is known but its own name


@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("name", MOVED)
def test_what_moves_along_an_axis_is_taken_apart_and_torchs_with_its_slope(name, odd):
    both = value_and_slope(MOVED[name])
    x = torch.randn(3, 6, dtype=torch.float64)
    if odd:
        x[0], x[1, 1:4] = float("-inf"), torch.tensor([float("nan"), 0.0, -0.0])
        x[2, 3] = float("inf")
    table = decompositions()
    made = make_fx(both, decomposition_table=table, tracing_mode="fake", _allow_non_fake_inputs=True)(x)
    for one, other in zip(made(x), both(x), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12, equal_nan=True)
    reduced = {torch.ops.aten.sum.dim_IntList, torch.ops.aten.amax.default}  # whose axes are named already
    left = {node.target for node in made.graph.nodes} & table.keys() - reduced
    assert bool(left) == (name in _WHOLE)


@pytest.mark.parametrize("function", [torch.cumsum, torch.flip])
def test_what_would_be_very_many_pieces_stays_whole(function):
    x = torch.randn(2, 500)
    made = make_fx(lambda x: function(x, (1,) if function is torch.flip else 1), decomposition_table=decompositions())
    assert len(made(x).graph.nodes) == 3
