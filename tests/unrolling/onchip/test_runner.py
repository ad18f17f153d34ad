"""A loop as one kernel gives what the plain loop gives: on a chip made of threads, and where there is a GPU on that."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import hiddenstate as hs
from hiddenstate.cells import as_layer
from hiddenstate.unrolling import building
from hiddenstate.unrolling.checks import read
from hiddenstate.unrolling.fast import execute, prepare
from hiddenstate.unrolling.judging import agree
from hiddenstate.unrolling.native import Unsupported
from hiddenstate.unrolling.onchip import compiling
from hiddenstate.unrolling.onchip.plan import Plan
from hiddenstate.unrolling.reading import StepReader
from tests.support.chip import emulated

INPUT, HIDDEN = 5, 16


class Gates(nn.Module):
    """An LSTM whose gates are an axis of their own."""

    hidden_size = HIDDEN

    def __init__(self, size=HIDDEN):
        super().__init__()
        self.hidden_size = size
        self.inner, self.recurrent = nn.Linear(INPUT, 4 * size), nn.Linear(size, 4 * size, bias=False)

    def forward(self, x, state):
        h, c = state
        i, f, o, g = (self.inner(x) + self.recurrent(h)).view(len(x), 4, self.hidden_size).unbind(1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c


class ResetFirst(nn.Module):
    """A GRU as it was first written: the state is reset before it is multiplied, so that two products follow."""

    hidden_size = HIDDEN

    def __init__(self):
        super().__init__()
        self.gates, self.new = nn.Linear(INPUT + HIDDEN, 2 * HIDDEN), nn.Linear(INPUT + HIDDEN, HIDDEN)

    def forward(self, x, h):
        update, reset = torch.sigmoid(self.gates(torch.cat([x, h], -1))).chunk(2, -1)
        new = torch.tanh(self.new(torch.cat([x, reset * h], -1)))
        return (1 - update) * h + update * new


class Normed(nn.Module):
    """Norms of the state in the loop: sums over all units."""

    hidden_size = HIDDEN

    def __init__(self):
        super().__init__()
        self.inner, self.recurrent = nn.Linear(INPUT, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, x, h):
        return torch.tanh(self.inner(x) + self.norm(self.recurrent(h)))


class Competing(Normed):
    """Units that share one sum: a softmax."""

    def forward(self, x, h):
        return torch.softmax(self.inner(x) + self.recurrent(h), -1) * 4


class Projected(nn.Module):
    """A state of two widths."""

    def __init__(self):
        super().__init__()
        self.inner, self.recurrent = nn.Linear(INPUT, 4 * HIDDEN), nn.Linear(8, 4 * HIDDEN)
        self.down = nn.Linear(HIDDEN, 8, bias=False)

    def initial_state(self, batch):
        return {"p": self.down.weight.new_zeros(batch, 8), "c": self.down.weight.new_zeros(batch, HIDDEN)}

    def forward(self, x, state):
        i, f, g, o = (self.inner(x) + self.recurrent(state["p"])).chunk(4, -1)
        c = torch.sigmoid(f) * state["c"] + torch.sigmoid(i) * torch.tanh(g)
        p = self.down(torch.sigmoid(o) * torch.tanh(c))
        return p, {"p": p, "c": c}


class Ticking(Normed):
    """A state with a number and a flag for each row beside it."""

    def initial_state(self, batch):
        h = self.inner.weight.new_zeros(batch, HIDDEN)
        return {"h": h, "ticks": torch.zeros(batch, dtype=torch.int64, device=h.device), "loud": h[:, :1] > 1}

    def forward(self, x, state):
        h = torch.tanh(self.inner(x) + self.recurrent(state["h"]))
        h = torch.where(state["loud"], h * 0.5, h) / (state["ticks"] + 1).to(h.dtype).unsqueeze(-1)
        return h, {"h": h, "ticks": state["ticks"] + 1, "loud": h.sum(-1, keepdim=True) > 0}


class Multiplied(Normed):
    """A product of a product: the second needs the first of all units."""

    def forward(self, x, h):
        return torch.tanh(self.recurrent(self.inner(x) * self.recurrent(h)))


class Leaky(Normed):
    """Units that never meet: no product with a weight in the loop."""

    def forward(self, x, h):
        return torch.relu(h * self.norm.weight + self.inner(x))


CELLS = {
    type_.__name__: type_ for type_ in (Gates, ResetFirst, Normed, Competing, Projected, Ticking, Multiplied, Leaky)
}
every_cell = pytest.mark.parametrize("cell_type", CELLS.values(), ids=CELLS)


def run_of(cell, x, **options):
    layer = as_layer(cell, x[:, 0])
    return prepare(layer, read(layer, x, None, **{"lengths": None, "resets": None} | options), StepReader())


def assert_the_loops(cell, x, monkeypatch, *, tolerance=1e-4, **options):
    """Values and all gradients by the emulated chip are those of the plain loop."""
    monkeypatch.setattr(building, "is_wide", lambda run: True)
    run = run_of(cell, x, **options)
    schedule, judge = building.build(run)
    plainly = judge.at_edges(schedule)
    emulated(schedule)
    judge.tolerance = tolerance
    judge.check(schedule)
    for ours, theirs in zip(judge.at_edges(schedule), plainly, strict=True):
        agree(ours, theirs, tolerance)


@pytest.mark.sample(2)
@every_cell
def test_values_and_gradients_are_the_loops(cell_type, monkeypatch):
    torch.manual_seed(0)
    assert_the_loops(cell_type(), torch.randn(3, 3, INPUT, requires_grad=True), monkeypatch)


def test_rows_that_end_or_start_anew_are_the_loops(monkeypatch):
    resets = torch.tensor([[0, 1, 0], [0, 0, 1], [1, 0, 0]]).bool()
    x = torch.randn(3, 3, INPUT, requires_grad=True)
    assert_the_loops(Gates(), x, monkeypatch, lengths=[3, 1, 2], resets=resets)


@pytest.mark.long
@pytest.mark.parametrize("batch", [1, 9, 35])
def test_any_number_of_rows_is_the_loops(batch, monkeypatch):
    assert_the_loops(Gates(), torch.randn(batch, 3, INPUT), monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize("size", [9, 34])
def test_any_number_of_units_is_the_loops(size, monkeypatch):
    assert_the_loops(Gates(size), torch.randn(2, 3, INPUT), monkeypatch)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.02), (torch.float16, 0.003)], ids=str)
def test_half_precision_is_the_loops(dtype, tolerance, monkeypatch):
    torch.manual_seed(0)
    cell, x = Gates().to(dtype), torch.randn(3, 3, INPUT, dtype=dtype)
    assert_the_loops(cell, x, monkeypatch, tolerance=tolerance)


def test_autocast_is_the_loops(monkeypatch):
    class Widened(Normed):
        def forward(self, x, h):
            return torch.tanh(self.inner(x) + self.recurrent(h)).float()

    with torch.autocast("cpu", torch.bfloat16):
        assert_the_loops(Widened(), torch.randn(3, 3, INPUT), monkeypatch, tolerance=0.02)


def test_a_row_of_nan_stays_alone(monkeypatch):
    monkeypatch.setattr(building, "is_wide", lambda run: True)
    x = torch.randn(4, 3, INPUT)
    x[1, 1] = float("nan")
    run = run_of(Gates(), x)
    schedule, _ = building.build(run)
    emulated(schedule)
    with torch.no_grad():
        out, _ = execute(schedule, run)
    assert torch.isnan(out[1, 1:]).all()
    assert torch.isfinite(out[[0, 2, 3]]).all()


@pytest.mark.parametrize(
    ("cell_type", "exchanges"),
    [(Gates, (1, 1)), (Normed, (3, 2)), (ResetFirst, (2, 2)), (Multiplied, (2, 2)), (Leaky, (0, 0))],
)
def test_blocks_meet_no_more_often_than_they_must(cell_type, exchanges, monkeypatch):
    monkeypatch.setattr(building, "is_wide", lambda run: True)
    schedule, _ = building.build(run_of(cell_type(), torch.randn(3, 3, INPUT, requires_grad=True)))
    assert tuple(Plan(loop).exchanges for loop in schedule.loops()) == exchanges


class Narrow(Normed):
    hidden_size = 4

    def __init__(self):
        super().__init__()
        self.inner, self.recurrent = nn.Linear(INPUT, 4), nn.Linear(4, 4)

    def forward(self, x, h):
        return torch.tanh(self.inner(x) + self.recurrent(h))


class Shifting(Normed):
    def forward(self, x, h):
        return torch.tanh(self.inner(x) + self.recurrent(h) + h.roll(1, -1))


class Attending(Normed):
    def forward(self, x, h):
        return torch.tanh(self.inner(x) + (h.unsqueeze(1) @ h.unsqueeze(2)).squeeze(2) + self.recurrent(h))


class Mixing(Normed):
    def forward(self, x, h):
        return torch.tanh(self.inner(x) + self.recurrent(h) - h.mean(0, keepdim=True))


REFUSED = {
    "float64": (lambda: Gates().double(), "torch.float64 has no kernel here"),
    "narrow": (Narrow, "the parts of its state are 4 units wide"),
    "shifting": (Shifting, "values are joined at a place that is no multiple of the state's width"),
    "attending": (Attending, "aten.bmm.default has no kernel here"),
    "mixing": (Mixing, "rows are added up in a step"),
}


@pytest.mark.parametrize(("make", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_one_kernel_says_why(make, reason, monkeypatch):
    monkeypatch.setattr(building, "is_wide", lambda run: True)
    cell = make()
    dtype = next(cell.parameters()).dtype
    schedule, _ = building.build(run_of(cell, torch.randn(3, 3, INPUT, dtype=dtype)))
    with pytest.raises(Unsupported, match=reason):
        emulated(schedule)


def test_weights_that_do_not_fit_say_so(monkeypatch):
    monkeypatch.setattr(building, "is_wide", lambda run: True)
    schedule, _ = building.build(run_of(Gates(512), torch.randn(3, 3, INPUT)))
    with pytest.raises(Unsupported, match="its weights do not fit on the chip"):
        emulated(schedule)


class Driver:
    """A driver that notes what is asked of it, and answers every call with one code."""

    def __init__(self, code=0):
        self.code, self.calls = code, []

    def __getattr__(self, name):
        return lambda *given: self.calls.append(name) or self.code


@pytest.fixture
def driver(monkeypatch):
    """A driver in place of CUDA's, and nothing loaded so far."""
    made = Driver()
    stream = type("Stream", (), {"synchronize": lambda self: None, "cuda_stream": 0})()
    monkeypatch.setattr(compiling, "_driver", lambda: made)
    monkeypatch.setattr(compiling, "compiled", lambda source, architecture: b"")
    monkeypatch.setattr(compiling, "_functions", {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    return made


def test_a_kernel_is_loaded_once_for_each_device_and_launched_whole(driver):
    for device in ("cuda:0", "cuda:0", "cuda:1"):
        launchable = compiling.Launchable("text", torch.device(device), shared=64)
        launchable(3, [torch.zeros(2)], grid=2, threads=128)
    assert driver.calls.count("cuModuleLoadData") == 2
    assert driver.calls.count("cuLaunchCooperativeKernel") == 3


def test_what_the_driver_refuses_is_a_reason(driver):
    driver.code = 720
    with pytest.raises(Unsupported, match="CUDA answers with error 720"):
        compiling.Launchable("text", torch.device("cuda:0"), shared=64)


# On a GPU


@pytest.mark.cuda
@every_cell
@pytest.mark.parametrize("precision", ["highest", "high"])
def test_values_and_gradients_on_a_gpu_are_the_loops(cell_type, precision):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        torch.manual_seed(0)
        cell, x = cell_type().cuda(), torch.randn(21, 12, INPUT, device="cuda", requires_grad=True)
        resets = torch.rand(21, 12) < 0.2
        lengths = torch.randint(1, 13, (21,))
        for options in ({}, {"lengths": lengths, "resets": resets}):
            results = []
            for engine in ("loop", "fast"):
                out, state = hs.unroll(cell, x, engine=engine, **options)
                floats = [part for part in state.values() if part.requires_grad]
                loss = sum(value.cos().sum() for value in (out, *floats))
                wanted = [x, *cell.parameters()]
                results.append([out, *state.values(), *torch.autograd.grad(loss, wanted, materialize_grads=True)])
            loose = {"rtol": 2e-2, "atol": 2e-2} if precision == "high" else {"rtol": 1e-4, "atol": 1e-4}
            torch.testing.assert_close(*results, **loose)
        assert "on the chip" in hs.explain(cell, x).compiled
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_on_a_gpu_is_the_loops(dtype):
    cell, x = Gates(64).cuda(), torch.randn(7, 9, INPUT, device="cuda")
    with torch.no_grad(), torch.autocast("cuda", dtype):
        one, two = (hs.unroll(cell, x, engine=engine)[0] for engine in ("loop", "fast"))
    torch.testing.assert_close(one, two, rtol=3e-2, atol=3e-2)


@pytest.mark.cuda
def test_two_streams_do_not_mix():
    cell = Gates(64).cuda()
    xs = [torch.randn(8, 50, INPUT, device="cuda") for _ in range(2)]
    with torch.no_grad():
        expected = [hs.unroll(cell, x, engine="loop")[0] for x in xs]
        for _ in range(4):
            hs.unroll(cell, xs[0], engine="fast")
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream() for _ in xs]
        found = []
        for _ in range(20):
            for x, stream in zip(xs, streams, strict=True):
                with torch.cuda.stream(stream):
                    found.append(hs.unroll(cell, x, engine="fast")[0])
        torch.cuda.synchronize()
    for number, out in enumerate(found):
        torch.testing.assert_close(out, expected[number % 2], rtol=1e-4, atol=1e-5)
