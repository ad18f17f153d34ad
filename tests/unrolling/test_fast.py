"""The fast engine gives what the loop gives, in values and all gradients, or says why it cannot."""

import copy
import gc
import random
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hiddenstate as hs
from hiddenstate.cells import as_layer
from hiddenstate.errors import UnrollWarning, Untraceable
from hiddenstate.unrolling import cache, scheduled
from hiddenstate.unrolling.cache import known_to
from hiddenstate.unrolling.deciding import EngineDecision, LoopTime
from tests.support.cells import CELLS, HIDDEN, INPUT, LayerNormLSTMCell, LearnedCell, PairCell, ReadoutCell, TanhCell
from tests.support.equal import assert_same, inputs_of

every_cell = pytest.mark.parametrize("sample", CELLS.values(), ids=CELLS)


@pytest.fixture
def eager_auto(monkeypatch):
    """`auto` that takes the fast engine from the first step."""
    monkeypatch.setattr(LoopTime, "is_due", lambda *_: True)
    monkeypatch.setattr(cache, "decide", lambda *_: EngineDecision(1, ""))
    monkeypatch.setattr(scheduled, "_noted", set())


def flat(result):
    out, state = result
    return [out, *state.values()]


def both_ways(module, x, state=None, wanted=None, **options):
    """The loop and the fast engine on one task; equal in values and gradients."""
    wanted = inputs_of(module, x, *(state or {}).values()) if wanted is None else wanted
    assert_same(
        lambda: flat(hs.unroll(module, x, state, engine="loop", **options)),
        lambda: flat(hs.unroll(module, x, state, engine="fast", **options)),
        wanted,
    )


def some_state(module, x):
    initial = as_layer(module, x[:, 0]).initial(len(x))
    parts = {name: torch.randn_like(part).requires_grad_() for name, part in initial.items()}
    return hs.State(parts, initial.batch_axis)


@pytest.mark.sample(5)
@every_cell
def test_values_and_all_gradients_are_the_loops(sample):
    cell, x = sample.cell(), sample.x(batch=3, steps=6)
    both_ways(cell, x)
    both_ways(cell, x, some_state(cell, x))


@pytest.mark.sample(4)
@every_cell
def test_lengths_and_resets_are_the_loops(sample):
    cell, x = sample.cell(), sample.x(batch=3, steps=6)
    resets = torch.tensor([[0, 0, 1, 0, 0, 1], [1, 0, 0, 1, 1, 0], [0, 0, 0, 1, 0, 0]]).bool()
    both_ways(cell, x, some_state(cell, x), lengths=[3, 6, 1], resets=resets)


@pytest.mark.sample(4)
@every_cell
def test_without_gradients_the_values_are_the_loops(sample):
    cell, x = sample.cell(torch.float32), sample.x(batch=2, steps=5, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(flat(hs.unroll(cell, x, engine="fast")), flat(hs.unroll(cell, x, engine="loop")))


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_any_number_of_steps_runs_by_the_same_schedule(steps):
    cell = CELLS["pair"].cell()
    both_ways(cell, CELLS["pair"].x(batch=3, steps=steps))
    assert known_to(cell) == 1


@pytest.mark.parametrize("settings", [{"num_layers": 2}, {"num_layers": 2, "bidirectional": True}], ids=str)
def test_stacks_in_both_directions_are_the_loops(settings):
    stack = hs.Recurrent(LayerNormLSTMCell, INPUT, HIDDEN, **settings).double()
    both_ways(stack, torch.randn(3, 5, INPUT, dtype=torch.float64), lengths=[5, 2, 4])


def test_learned_first_states_get_their_gradient_from_every_reset():
    cell, x = CELLS["learned"].cell(), CELLS["learned"].x(batch=2, steps=5)
    both_ways(cell, x, resets=torch.tensor([[0, 0, 1, 0, 1], [0, 1, 0, 0, 0]]).bool())


def test_gradients_pass_gradcheck_and_so_do_their_own():
    cell, x = CELLS["dict"].cell(), CELLS["dict"].x(batch=2, steps=3).requires_grad_()
    state = some_state(cell, x)

    def run(x, *parts):
        return tuple(flat(hs.unroll(cell, x, hs.State(dict(zip(state, parts, strict=True))), engine="fast")))

    assert torch.autograd.gradcheck(run, (x, *state.values()))
    assert torch.autograd.gradgradcheck(run, (x, *state.values()))


def test_what_lies_in_the_padding_does_not_matter():
    cell, x = CELLS["layer norm lstm"].cell(), CELLS["layer norm lstm"].x(batch=2, steps=4)
    x[0, 2:] = float("nan")
    x.requires_grad_()
    out, state = hs.unroll(cell, x, lengths=[2, 4], engine="fast")
    (out.sum() + state["c"].sum()).backward()
    assert (out[0, 2:] == 0).all()
    assert (x.grad[0, 2:] == 0).all()
    assert all(torch.isfinite(p.grad).all() for p in cell.parameters())


def test_only_what_requires_a_gradient_gets_one():
    cell, x = PairCell(), torch.randn(2, 4, INPUT)
    cell.gates.bias.requires_grad_(False)
    hs.unroll(cell, x, engine="fast")[0].sum().backward()
    assert cell.gates.bias.grad is None
    assert cell.gates.weight.grad is not None
    frozen = PairCell().requires_grad_(False)
    assert not hs.unroll(frozen, x, engine="fast")[0].requires_grad


def test_only_some_outputs_may_be_used():
    cell, x = CELLS["pair"].cell(), CELLS["pair"].x()
    for pick in (lambda r: [r[0]], lambda r: [r[1]["c"]], lambda r: [r[0][:, 2]]):
        assert_same(
            lambda pick=pick: pick(hs.unroll(cell, x, engine="loop")),
            lambda pick=pick: pick(hs.unroll(cell, x, engine="fast")),
            inputs_of(cell, x),
        )


def test_two_passes_before_one_backward_do_not_mix():
    cell = CELLS["pair"].cell()
    one, two = CELLS["pair"].x(), CELLS["pair"].x()

    def twice(engine):
        return [*flat(hs.unroll(cell, one, engine=engine)), *flat(hs.unroll(cell, two, engine=engine))]

    assert_same(lambda: twice("loop"), lambda: twice("fast"), inputs_of(cell, one, two))


def test_cutting_a_sequence_changes_nothing():
    cell, x = CELLS["named tuple"].cell(), CELLS["named tuple"].x(batch=2, steps=6)

    def in_two():
        head, middle = hs.unroll(cell, x[:, :2], engine="fast")
        tail, final = hs.unroll(cell, x[:, 2:], middle, engine="fast")
        return [torch.cat([head, tail], 1), *final.values()]

    assert_same(lambda: flat(hs.unroll(cell, x, engine="fast")), in_two, inputs_of(cell, x))


# What a schedule depends on


def test_new_weights_and_new_settings_are_seen():
    class Scaled(TanhCell):
        gain = 1.0

        def __init__(self):
            super().__init__()
            self.scale, self.factors, self.mask = 1.0, [1.0, 1.0], torch.ones(HIDDEN)

        def forward(self, x, h):
            return super().forward(x, h) * self.scale * self.factors[1] * self.mask

    cell, x = Scaled(), torch.randn(2, 4, INPUT)

    def check():
        torch.testing.assert_close(hs.unroll(cell, x, engine="fast")[0], hs.unroll(cell, x, engine="loop")[0])

    check()
    with torch.no_grad():
        cell.recurrent.weight.mul_(2)
    check()
    cell.inner.weight = nn.Parameter(torch.randn(HIDDEN, INPUT))
    check()
    cell.scale = 0.5
    check()
    cell.factors[1] = 3.0
    check()
    cell.mask = torch.zeros(HIDDEN)
    check()
    cell.mask[1] = 1.0
    check()


def test_submodules_that_are_shared_parametrized_or_frozen_are_fine():
    class Tied(nn.Module):
        hidden_size = HIDDEN

        def __init__(self):
            super().__init__()
            self.one = nn.utils.parametrizations.weight_norm(nn.Linear(HIDDEN, HIDDEN))
            self.two = self.one
            self.norm = nn.BatchNorm1d(HIDDEN).eval()

        def forward(self, x, state):
            return self.norm(torch.tanh(self.one(x) + self.two(state)))

    cell = Tied().double()
    both_ways(cell, torch.randn(2, 4, HIDDEN, dtype=torch.float64))


def test_writing_into_tensors_of_its_own_is_fine():
    class Writing(TanhCell):
        def forward(self, x, h):
            new = super().forward(x, h).clone()
            new[:, :2] *= 2
            new.mul_(0.5)
            memory = torch.zeros_like(new)
            memory[:, 1] = new[:, 0]
            return new + memory

    both_ways(Writing().double(), torch.randn(2, 4, INPUT, dtype=torch.float64))


def test_a_loop_that_no_input_reaches_runs():
    class Clock(nn.Module):
        hidden_size = HIDDEN

        def __init__(self):
            super().__init__()
            self.turn = nn.Linear(HIDDEN, HIDDEN)

        def forward(self, x, state):
            state = torch.tanh(self.turn(state))
            return state * x.sum(-1, keepdim=True), state

    cell, x = Clock().double(), torch.randn(2, 4, INPUT, dtype=torch.float64)
    both_ways(cell, x, some_state(cell, x))


def test_a_state_that_no_gradient_passes_through_is_carried():
    class Ticking(TanhCell):
        def initial_state(self, batch):
            h = self.inner.weight.new_zeros(batch, self.hidden_size)
            return {"h": h, "ticks": torch.zeros(batch, dtype=torch.int64), "seen": h.bool()}

        def forward(self, x, state):
            h = super().forward(x, state["h"].detach() if self.cut else state["h"])
            ticks = state["ticks"] + 1
            h = h * ticks.remainder(3).unsqueeze(-1).to(h.dtype)
            return h, {"h": h, "ticks": ticks, "seen": state["seen"] | (h > 0)}

    for cut in (False, True):
        cell, x = Ticking().double(), torch.randn(2, 5, INPUT, dtype=torch.float64)
        cell.cut = cut
        x.requires_grad_()
        one, two = (hs.unroll(cell, x, engine=engine) for engine in ("loop", "fast"))
        torch.testing.assert_close(flat(one), flat(two))
        wanted = [x, *cell.parameters()]
        grads = [torch.autograd.grad(out.cos().sum(), wanted) for out, _ in (one, two)]
        torch.testing.assert_close(*grads)


def test_inference_mode_and_a_default_device_are_fine():
    cell, x = PairCell(), torch.randn(2, 5, INPUT)
    expected = hs.unroll(cell, x, engine="loop")[0].detach()
    with torch.inference_mode():
        torch.testing.assert_close(hs.unroll(cell, x, engine="fast")[0], expected)
    with torch.device("cpu"):
        torch.testing.assert_close(hs.unroll(cell, x, engine="fast")[0].detach(), expected)


@pytest.mark.parametrize("engine", ["loop", "fast"])
@pytest.mark.parametrize("settings", [{}, {"num_layers": 2, "bidirectional": True}])
def test_nothing_of_ours_is_made_on_the_default_device(settings, engine):
    stack, x = hs.Recurrent(TanhCell, INPUT, HIDDEN, **settings), torch.randn(3, 5, INPUT)
    options = [{}, {"lengths": torch.tensor([5, 2, 3])}, {"lengths": [0, 2, 3]}]
    if not settings:
        resets = torch.zeros(3, 5, dtype=torch.bool)
        resets[1, 1:3] = True
        options += [{"resets": resets}, {"resets": resets.tolist(), "lengths": [5, 2, 3]}]
    for given in options:
        expected = stack(x, engine=engine, **given)
        fresh = copy.deepcopy(stack)
        with torch.device("meta"):  # on which no number is ever known
            torch.testing.assert_close(fresh(x, engine=engine, **given), expected)


@pytest.mark.parametrize("what", ["x", "state", "weights"])
def test_what_was_made_in_inference_mode_is_for_the_loop(what):
    cell, x = PairCell(), torch.randn(2, 5, INPUT)
    state = hs.unroll(cell, x)[1].detach()
    with torch.inference_mode():
        cell = PairCell() if what == "weights" else cell
        x, state = x.clone() if what == "x" else x, state.clone() if what == "state" else state
    with pytest.raises(Untraceable, match="a tensor that it reads was made in inference mode"):
        hs.unroll(cell, x, state, engine="fast")
    with torch.no_grad():
        assert torch.equal(hs.unroll(cell, x, state)[0], hs.unroll(cell, x, state, engine="loop")[0])
    with torch.inference_mode():
        found, expected = (hs.unroll(cell, x, state, engine=engine)[0] for engine in ("fast", "loop"))
        torch.testing.assert_close(found, expected)


def test_complex_and_sparse_things_stay_in_the_loop():
    class Spinning(nn.Module):
        def __init__(self):
            super().__init__()
            self.spin = nn.Parameter(torch.randn(HIDDEN, dtype=torch.complex64))

        def initial_state(self, batch):
            return torch.zeros(batch, HIDDEN, dtype=torch.complex64)

        def forward(self, x, state):
            state = state * self.spin + x.mean(-1, keepdim=True)
            return state.real, state

    with pytest.raises(Untraceable, match="complex or sparse"):
        hs.unroll(Spinning(), torch.randn(2, 4, INPUT), engine="fast")
    cell = CELLS["tokens"].cell()
    cell.embed = nn.Embedding(7, INPUT, sparse=True, dtype=torch.float64)
    with pytest.raises(Untraceable):
        hs.unroll(cell, CELLS["tokens"].x(), engine="fast")


class Numpy(TanhCell):
    def forward(self, x, h):
        return super().forward(x, h) + torch.from_numpy(h.detach().numpy())


OUTSIDE = nn.Linear(HIDDEN, HIDDEN)


class Borrowing(TanhCell):
    def forward(self, x, h):
        return OUTSIDE(super().forward(x, h))


@pytest.mark.parametrize("kind", [Numpy, Borrowing])
def test_what_a_step_reads_through_numpy_or_outside_its_module_is_part_of_it(kind):
    cell, x = kind().double(), torch.randn(2, 4, INPUT, dtype=torch.float64)
    OUTSIDE.double()
    both_ways(cell, x, wanted=inputs_of(cell, x, *OUTSIDE.parameters()))
    with torch.no_grad():
        OUTSIDE.weight.mul_(-2)
    both_ways(cell, x)


# Where there is no schedule


class Choosy(TanhCell):
    def forward(self, x, h):
        if h.sum() > 0:
            h = -h
        return super().forward(x, h)


class Counting(TanhCell):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x, h):
        self.calls += 1
        return super().forward(x, h)


class Logging(TanhCell):
    def __init__(self):
        super().__init__()
        self.log = []

    def forward(self, x, h):
        self.log.append(0)
        return super().forward(x, h)


class Averaging(TanhCell):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x, h):
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean())
        return super().forward(x, h) + self.mean


class Python(TanhCell):
    def forward(self, x, h):
        return super().forward(x, h) * random.random()


class Growing(TanhCell):
    def initial_state(self, batch):
        return torch.zeros(batch, HIDDEN)

    def forward(self, x, h):
        return super().forward(x, h[:, -HIDDEN:]), torch.cat([h, h], -1)


class Noisy(TanhCell):
    def forward(self, x, h):
        return super().forward(x, h) + torch.bernoulli(h.sigmoid())


UNTRACEABLE = {
    Choosy: r"asks for the value of a tensor.*test_fast\.py:\d+: if h\.sum\(\) > 0",
    Counting: r"changes its own attribute 'calls' at every step",
    Logging: r"changes its own attribute 'log' at every step",
    Averaging: r"writes into a tensor .*test_fast\.py:\d+: self\.mean\.mul_",
    Python: r"draws random numbers from Python or numpy",
    Growing: r"part 'h' of its state changes its shape in a step, from \(2, 4\) to \(2, 8\)",
    Noisy: r"draws random numbers in a step \(bernoulli\) that depend.*test_fast\.py:\d+",
}


@pytest.mark.parametrize(("kind", "reason"), UNTRACEABLE.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_a_cell_that_cannot_be_traced_is_refused_with_reason_and_line_and_left_alone(kind, reason):
    cell, x = kind(), torch.randn(2, 4, INPUT)
    before, stream = copy.deepcopy(cell), torch.get_rng_state()
    with pytest.raises(Untraceable, match=rf"{kind.__name__} cannot run by a schedule, because .*{reason}"):
        hs.unroll(cell, x, engine="fast")
    assert torch.equal(torch.get_rng_state(), stream)
    for (name, old), new in zip(before.state_dict().items(), cell.state_dict().values(), strict=True):
        assert torch.equal(old, new), name
    assert getattr(cell, "calls", 0) == 0
    assert getattr(cell, "log", []) == []


@pytest.mark.parametrize("kind", UNTRACEABLE)
def test_auto_runs_such_a_cell_in_the_loop_and_says_so_once(kind, eager_auto):
    cell, x = kind(), torch.randn(2, 4, INPUT)
    torch.manual_seed(3)
    random.seed(3)
    expected = hs.unroll(copy.deepcopy(cell), x, engine="loop")[0]
    torch.manual_seed(3)
    random.seed(3)
    with pytest.warns(UnrollWarning, match=rf"{kind.__name__} runs step by step.*engine='loop'") as noted:
        out = hs.unroll(cell, x)[0]
    assert len(noted) == 1
    assert torch.equal(out, expected)
    hs.unroll(cell, x)  # a second warning would be an error here


def test_hooks_keep_a_cell_in_the_loop():
    cell, x, seen = TanhCell(), torch.randn(2, 4, INPUT), []
    handle = cell.inner.register_forward_hook(lambda *_: seen.append(1))
    with pytest.raises(Untraceable, match="hooks on it want to see every step"):
        hs.unroll(cell, x, engine="fast")
    hs.unroll(cell, x)
    assert len(seen) == 4
    handle.remove()
    hs.unroll(cell, x, engine="fast")


@pytest.mark.filterwarnings("ignore:.torch.jit.*:DeprecationWarning")  # torch's own, in forward mode
def test_transforms_of_torch_run_in_the_loop(eager_auto):
    cell, x = CELLS["tensor"].cell(), CELLS["tensor"].x(batch=2, steps=3)
    for_loop = torch.func.jacrev(lambda x: hs.unroll(cell, x, engine="loop")[0])(x)
    torch.testing.assert_close(torch.func.jacrev(lambda x: hs.unroll(cell, x)[0])(x), for_loop)
    with pytest.raises(Untraceable, match=r"a transform of torch\.func is at work"):
        torch.func.jacrev(lambda x: hs.unroll(cell, x, engine="fast")[0])(x)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        out = torch.autograd.forward_ad.unpack_dual(hs.unroll(cell, dual)[0])
        assert out.tangent is not None


def test_a_first_state_drawn_anew_at_every_reset_keeps_a_cell_in_the_loop():
    class Drawn(TanhCell):
        def initial_state(self, batch):
            return torch.randn(batch, self.hidden_size)

    cell, x, resets = Drawn(), torch.randn(2, 4, INPUT), torch.tensor([[0, 0, 1, 0]] * 2).bool()
    stream = torch.get_rng_state()
    with pytest.raises(Untraceable, match="initial state is drawn at random"):
        hs.unroll(cell, x, torch.zeros(2, HIDDEN), resets=resets, engine="fast")
    assert torch.equal(torch.get_rng_state(), stream)


# Auto


def test_auto_is_the_loop_under_autocast_too(eager_auto):
    cell, x = PairCell(), torch.randn(2, 5, INPUT)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fast, loop = flat(hs.unroll(cell, x, engine="fast")), flat(hs.unroll(cell, x, engine="loop"))
        auto = flat(hs.unroll(cell, x))
    for one, two, three in zip(fast, loop, auto, strict=True):
        assert one.dtype == two.dtype == three.dtype
        torch.testing.assert_close(one, two, rtol=0.05, atol=0.02)
        torch.testing.assert_close(three, two, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_dtypes_run_by_torchs_own_operations(dtype):
    cell, x = PairCell().to(dtype), torch.randn(2, 5, INPUT).to(dtype)
    out = hs.unroll(cell, x, engine="fast")[0]
    torch.testing.assert_close(out, hs.unroll(cell, x, engine="loop")[0], rtol=0.05, atol=0.02)
    assert "has no C type" in str(hs.explain(cell, x))


# Caching, threads, compilers


def test_schedules_of_many_shapes_are_bounded():
    cell = LearnedCell()
    for batch in range(1, 40):
        hs.unroll(cell, torch.randn(batch, 2, INPUT), engine="auto")
    assert known_to(cell) <= 32


def test_a_cell_that_is_gone_takes_its_schedules_along():
    cell = TanhCell()
    hs.unroll(cell, torch.randn(2, 3, INPUT), engine="fast")
    gone = weakref.ref(cell)
    del cell
    gc.collect()
    assert gone() is None


def test_many_threads_may_use_one_cell_at_once():
    cell, xs = CELLS["pair"].cell(), [CELLS["pair"].x(batch=2 + n % 3, steps=5) for n in range(12)]
    expected = [hs.unroll(cell, x, engine="loop")[0] for x in xs]
    with ThreadPoolExecutor(len(xs)) as threads:  # which hands on what a thread fails with
        found = list(threads.map(lambda x: hs.unroll(cell, x, engine="fast")[0], xs))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_without_a_compiler_torchs_own_operations_run_the_loop(monkeypatch, tmp_path):
    monkeypatch.setenv("HIDDENSTATE_CACHE", str(tmp_path))
    monkeypatch.setenv("CC", "false")
    cell, x = CELLS["tensor"].cell(), CELLS["tensor"].x(batch=5, steps=4)
    both_ways(cell, x)
    assert "by torch's own operations, because the C compiler refused" in str(hs.explain(cell, x))


def test_code_that_was_compiled_once_is_found_again(monkeypatch, tmp_path):
    monkeypatch.setenv("HIDDENSTATE_CACHE", str(tmp_path))
    cell, x = CELLS["tensor"].cell(), CELLS["tensor"].x(batch=6, steps=4)
    hs.unroll(cell, x, engine="fast")
    made = {path: path.stat().st_ino for path in tmp_path.rglob("*.so")}
    assert len(made) == 2  # forward and backward
    hs.unroll(copy.deepcopy(cell), x, engine="fast")
    assert {path: path.stat().st_ino for path in tmp_path.rglob("*.so")} == made


# On a GPU


@pytest.mark.cuda
@every_cell
def test_values_and_gradients_on_cuda_are_the_loops(sample):
    cell, x = sample.cell().cuda(), sample.x(batch=3, steps=6).cuda()
    resets = torch.rand(3, 6, device="cuda") < 0.3
    both_ways(cell, x, some_state(cell, x))
    both_ways(cell, x, some_state(cell, x), lengths=[3, 6, 1], resets=resets)


@pytest.mark.cuda
def test_two_passes_before_one_backward_do_not_mix_on_cuda():
    cell = CELLS["pair"].cell().cuda()
    one, two = CELLS["pair"].x().cuda(), CELLS["pair"].x().cuda()

    def twice(engine):
        return [*flat(hs.unroll(cell, one, engine=engine)), *flat(hs.unroll(cell, two, engine=engine))]

    assert_same(lambda: twice("loop"), lambda: twice("fast"), inputs_of(cell, one, two))


def test_a_cell_that_reads_its_output_twice_is_summed_right():
    class Heads(ReadoutCell):
        def forward(self, x, hidden):
            out, hidden = super().forward(x, hidden)
            return torch.cat([out, F.softmax(out, -1)], -1), hidden

    both_ways(Heads().double(), torch.randn(2, 4, INPUT, dtype=torch.float64))


def test_a_state_that_is_not_the_second_argument_keeps_a_cell_in_the_loop():
    class Masked(TanhCell):
        def forward(self, x, mask=None, state=None):
            state = super().forward(x, state)
            return state if mask is None else state * mask

    cell, x = Masked(), torch.randn(2, 4, INPUT)
    with pytest.raises(Untraceable, match="its state is not its second argument"):
        hs.unroll(cell, x, engine="fast")
    plain = TanhCell()
    plain.load_state_dict(cell.state_dict())
    assert torch.equal(hs.unroll(cell, x, engine="loop")[0], hs.unroll(plain, x, engine="loop")[0])
