"""Uses that the fast engine was not written for: it gives what the loop gives, gradients included, or says why not."""

import copy
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hiddenstate as hs
from hiddenstate.errors import Untraceable
from hiddenstate.unrolling.deciding import LoopTime

SIZE = 4


class Cell(nn.Module):
    """The step that others vary."""

    hidden_size = SIZE

    def __init__(self):
        super().__init__()
        self.inner, self.recurrent = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.double()

    def forward(self, x, h):
        return torch.tanh(self.inner(x) + self.recurrent(h))


def varied(forward, base=Cell, **names):
    """A cell of a class of its own with this step."""
    return type("Varied", (base,), {"forward": forward, **names})()


def some(batch=3, steps=5):
    return torch.randn(batch, steps, SIZE, dtype=torch.float64, requires_grad=True)


def outcome(cell, x, engine, loss, **options):
    """Values and gradients, None where nothing leads to a tensor."""
    cell.zero_grad(set_to_none=True)
    x.grad = None
    out, state = hs.unroll(cell, x, engine=engine, **options)
    loss(out, state).backward()
    return [out.detach(), *(part.detach() for part in state.values()), x.grad, *(p.grad for p in cell.parameters())]


def assert_loops(cell, x, loss=lambda out, state: out.cos().sum(), **options):
    expected, found = (outcome(cell, x, engine, loss, **options) for engine in ("loop", "fast"))
    assert [one is None for one in found] == [other is None for other in expected]
    for one, other in zip(found, expected, strict=True):
        if other is not None:
            torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8, equal_nan=True)


# What the user does with results


def test_outputs_may_be_written_to():
    assert_loops(Cell(), some(), lambda out, state: out.mul_(2).sum())


def test_an_output_that_is_the_input_is_another_tensor():
    cell, x = varied(lambda self, x, h: (x, Cell.forward(self, x, h))), some().detach()
    before = x.clone()
    with torch.no_grad():
        hs.unroll(cell, x, engine="fast")[0].zero_()
    assert torch.equal(x, before)


class Beside(Cell):
    """A second part of the state with weights of its own, of which the output knows nothing."""

    def __init__(self):
        super().__init__()
        self.other = nn.Linear(SIZE, SIZE).double()

    def initial_state(self, batch):
        zeros = self.inner.weight.new_zeros(batch, SIZE)
        return zeros, zeros.clone()

    def forward(self, x, state):
        h = super().forward(x, state[0])
        return h, (h, torch.tanh(self.other(x) + state[1]))


@pytest.mark.parametrize("steps", [1, 4])
def test_a_weight_that_the_loss_does_not_depend_on_has_no_gradient(steps):
    x = some(3, steps)
    assert_loops(Beside(), x)
    assert_loops(Beside(), x, lambda out, state: state["c"].sum())
    assert_loops(Beside(), x, lambda out, state: out.sum() + state["c"].sum())


def test_a_graph_may_be_walked_twice_and_differentiated_again():
    cell, x, found = Cell(), some(), []
    for engine in ("loop", "fast"):
        out = hs.unroll(cell, x, engine=engine)[0]
        (slope,) = torch.autograd.grad(out.cos().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(slope.square().sum(), list(cell.parameters()), retain_graph=True))
    torch.testing.assert_close(*found)


def test_weights_that_change_before_the_backward_pass_are_noticed():
    cell, x = Cell(), some()
    out = hs.unroll(cell, x, engine="fast")[0]
    with torch.no_grad():
        cell.recurrent.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_numbers_put_under_a_weight_before_the_backward_pass_do_not_count():
    cell, x = Cell(), some()
    before, found = cell.recurrent.weight.detach().clone(), []
    for engine in ("loop", "fast"):
        cell.recurrent.weight.data = before.clone()
        out, _ = hs.unroll(cell, x, engine=engine)
        cell.recurrent.weight.data = before * 2
        found.append(torch.autograd.grad(out.sin().sum(), [x, *cell.parameters()]))
    torch.testing.assert_close(*found)


def test_many_gradients_may_come_as_one():
    cell, x = Cell(), some(2, 3)
    ours, theirs = (
        torch.autograd.functional.jacobian(lambda x, e=e: hs.unroll(cell, x, engine=e)[0], x, vectorize=True)
        for e in ("fast", "loop")
    )
    torch.testing.assert_close(ours, theirs)
    seeds = torch.eye(24, dtype=torch.float64).view(24, 2, 3, SIZE)
    for engine in ("loop", "fast"):
        out, _ = hs.unroll(cell, x, engine=engine)
        (grad,) = torch.autograd.grad(out, x, seeds, is_grads_batched=True)
        torch.testing.assert_close(grad.view(2, 3, SIZE, 2, 3, SIZE), theirs)


def test_a_hook_on_a_weight_is_called_once():
    cell, x, calls = Cell(), some(), []
    cell.inner.weight.register_hook(lambda grad: calls.append(1))
    hs.unroll(cell, x, engine="fast")[0].sum().backward()
    assert len(calls) == 1


# Rows


def test_what_would_come_of_a_row_after_its_end_reaches_no_gradient():
    cell = varied(lambda self, x, h: h * h + self.inner(x).sigmoid() + 1)
    assert_loops(cell, some(3, 16), lambda out, state: out[:, 0].sum(), lengths=[1, 3, 2])


def test_cells_whose_rows_meet_are_right_without_lengths_and_refused_by_name_with_them():
    cells = [
        varied(lambda self, x, h: torch.tanh(self.inner(x) + self.recurrent(h - h.mean(0, keepdim=True)))),
        varied(lambda self, x, h: torch.tanh(self.inner(x) + (h @ h.T).softmax(-1) @ h)),
    ]
    for cell in cells:
        assert_loops(cell, some(4, 9))
        with pytest.raises(Untraceable, match=r"its rows take part in each other's steps"):
            hs.unroll(cell, some(4, 9), lengths=[8, 9, 7, 9], engine="fast")


@pytest.mark.parametrize("share", [1e-5, 1e-12])
def test_rows_that_meet_ever_so_little_are_refused_with_lengths(share):
    cell = varied(lambda self, x, h: torch.tanh(self.inner(x) + self.recurrent(h) + share * h.amax(0, keepdim=True)))
    with pytest.raises(Untraceable, match=r"its rows take part in each other's steps"):
        hs.unroll(cell.float(), some(4, 9).float(), lengths=[8, 9, 7, 9], engine="fast")


def test_a_first_state_that_depends_on_a_rows_place_is_refused_with_resets():
    class Placed(Cell):
        def initial_state(self, batch):
            return torch.linspace(0, 1, batch, dtype=torch.float64).unsqueeze(1).repeat(1, SIZE)

    resets = torch.tensor([[0, 0, 1, 0, 0], [0, 0, 0, 0, 1], [0, 1, 0, 0, 0]]).bool()
    with pytest.raises(Untraceable, match="other numbers"):
        hs.unroll(Placed(), some(), resets=resets, engine="fast")


# Buffers


@pytest.mark.parametrize("functional", [False, True])
def test_statistics_of_batches_are_refused_and_left_alone(functional):
    class Normed(Cell):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(SIZE).double()

        def forward(self, x, h):
            if functional:
                new = F.batch_norm(self.inner(x) + h, self.norm.running_mean, self.norm.running_var, training=True)
            else:
                new = self.norm(self.inner(x) + h)
            return torch.tanh(new)

    cell, x = Normed(), some()
    before = copy.deepcopy(cell.state_dict())
    with pytest.raises(Untraceable, match=r"writes into|changes its own attribute"):
        hs.unroll(cell, x, engine="fast")
    assert all(torch.equal(value, before[name]) for name, value in cell.state_dict().items())
    if not functional:
        assert_loops(cell.eval(), x)
        with torch.no_grad():
            torch.testing.assert_close(hs.unroll(cell, x, engine="fast")[0], hs.unroll(cell, x, engine="loop")[0])


# Layouts


class Memory(nn.Module):
    """A matrix for each row, read as one long vector too."""

    def __init__(self):
        super().__init__()
        self.key, self.value = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.double()

    def initial_state(self, batch):
        return self.key.weight.new_zeros(batch, SIZE, SIZE)

    def forward(self, x, memory):
        memory = 0.9 * memory + torch.einsum("bi,bj->bij", self.key(x), self.value(x)).tanh()
        return memory.view(len(x), SIZE * SIZE), memory


def test_matrix_memories_take_gradients_of_any_layout():
    cell, x = Memory(), some()
    assert_loops(cell, x)
    assert_loops(cell, x, lambda out, state: out.sum() + state["h"].sum())
    assert_loops(cell, x, lambda out, state: out.transpose(0, 1).contiguous().sin().sum())
    assert_loops(cell, x, lambda out, state: state["h"].transpose(1, 2).contiguous().sin().sum())


def test_inputs_of_any_layout_run_by_one_schedule():
    cell = varied(lambda self, x, h: torch.tanh(self.inner(x.contiguous().view(-1, 2, 2).flatten(1)) + h))
    for x in (some(), some(5, 3).transpose(0, 1), torch.randn(3, SIZE, 5).double().mT, some(3, 1).expand(3, 5, SIZE)):
        assert_loops(cell, x.detach().requires_grad_())


# What torch does around


def test_checkpointing_works_whichever_engine_ran_first(monkeypatch):
    monkeypatch.setattr(LoopTime, "is_due", lambda time, _: time.steps >= 6)
    cell, x = Cell(), some()
    for _ in range(4):
        out = checkpoint(lambda x: hs.unroll(cell, x)[0], x, use_reentrant=False)
        hs.unroll(cell, x)
        out.sum().backward()
    for kind in (Cell(), nn.GRUCell(SIZE, SIZE).double()):
        x.grad = None
        checkpoint(lambda x, kind=kind: hs.unroll(kind, x, engine="fast")[0], x, use_reentrant=False).sum().backward()
        found, x.grad = x.grad, None
        hs.unroll(kind, x, engine="loop")[0].sum().backward()
        torch.testing.assert_close(found, x.grad)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_anomaly_mode_sees_every_operation():
    cell, x = Cell(), some()
    with torch.autograd.detect_anomaly(), pytest.raises(Untraceable, match="anomaly mode"):
        hs.unroll(cell, x, engine="fast")
    with torch.autograd.detect_anomaly():
        hs.unroll(cell, x)[0].sum().backward()


def test_a_first_call_may_be_within_vmap():
    cell, x = Cell(), torch.randn(2, 3, 5, SIZE).double()
    expected = torch.stack([hs.unroll(cell, one, engine="loop")[0] for one in x])
    fresh = copy.deepcopy(cell)
    torch.testing.assert_close(torch.vmap(lambda x: hs.unroll(fresh, x)[0])(x), expected)


def test_weights_that_are_swapped_in_for_a_call_are_those_that_count():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = Cell()

        def forward(self, x, engine):
            return hs.unroll(self.cell, x, engine=engine)[0]

    model, x = Model(), some()
    model(x, "fast")
    others = {name: torch.randn_like(value).requires_grad_() for name, value in model.named_parameters()}
    both = [torch.func.functional_call(model, others, (x, engine)) for engine in ("loop", "fast")]
    torch.testing.assert_close(*both)
    torch.testing.assert_close(*(torch.autograd.grad(out.cos().sum(), list(others.values())) for out in both))


def test_derivatives_that_a_user_wrote_are_used():
    class Spike(torch.autograd.Function):
        @staticmethod
        def forward(ctx, v):
            ctx.save_for_backward(v)
            return (v > 0).to(v.dtype)

        @staticmethod
        def backward(ctx, grad):
            (v,) = ctx.saved_tensors
            return grad / (1 + 10 * v.abs()) ** 2

    def forward(self, x, h):
        h = 0.9 * h + self.inner(x)
        return Spike.apply(h - 0.1), h - 0.5 * Spike.apply(h - 0.1)

    assert_loops(varied(forward), some())


def test_a_step_that_asks_what_differs_from_step_to_step_is_refused():
    cell = varied(lambda self, x, h: Cell.forward(self, x, h) * (2 if h.requires_grad else 1))
    with pytest.raises(Untraceable, match=r"asks for 'requires_grad' of a tensor"):
        hs.unroll(cell, some(), engine="fast")


def test_a_cell_goes_on_after_torchs_compiler_was_reset_and_within_code_that_it_compiled():
    cell, x = Cell(), some()
    assert_loops(cell, x)
    torch._dynamo.reset()
    assert_loops(cell, x)
    compiled = torch.compile(lambda x: hs.unroll(cell, x, engine="fast")[0] * 2, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), hs.unroll(cell, x, engine="loop")[0] * 2)


def test_threads_may_read_trace_and_run_at_the_same_time():
    cells, failures = [Cell(), Cell()], []

    def work(number):
        try:
            x = torch.randn(2 + number % 2, 4, SIZE).double()
            for cell in cells:
                expected = hs.unroll(cell, x, engine="loop")[0]
                torch.testing.assert_close(hs.unroll(cell, x, engine="fast")[0], expected)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_state_that_is_taken_for_complex_numbers_runs_by_a_schedule():
    class Rotating(nn.Module):
        def __init__(self):
            super().__init__()
            self.turn, self.inner = nn.Parameter(torch.randn(SIZE, 2).double()), nn.Linear(SIZE, SIZE * 2).double()

        def initial_state(self, batch):
            return torch.zeros(batch, SIZE, 2, dtype=torch.float64)

        def forward(self, x, pairs):
            number = torch.view_as_complex(pairs) * torch.view_as_complex(self.turn)
            number = number + torch.view_as_complex(self.inner(x).unflatten(-1, (SIZE, 2)))
            return number.real, torch.view_as_real(number / (1 + number.abs()))

    assert_loops(Rotating(), some())


def turned(part):
    return part.T.contiguous().T


def between_others(part):
    return torch.stack([part, part + 1], -1)[..., 0]


def one_for_all(part):
    return part[:1].expand(part.shape)


@pytest.mark.parametrize("layout", [turned, between_others, one_for_all])
def test_a_cell_that_fills_a_tensor_piece_by_piece_takes_states_of_any_layout(layout):
    class Filling(Cell):
        def forward(self, x, h):
            gates, out = self.inner(x), torch.empty_like(h)
            out[:, :2] = (gates.sigmoid() * h)[:, :2]
            out[:, 2:] = (h * 2)[:, 2:].mul_(gates.tanh()[:, 2:])
            return out

    cell, x = Filling(), some()
    state = torch.randn(3, SIZE, dtype=torch.float64)
    hs.unroll(cell, x, state, engine="fast")  # so that a schedule is there for states without gaps
    given = hs.State({"h": layout(state)})
    weights = turned(torch.randn(5, SIZE, dtype=torch.float64))
    assert_loops(cell, x, lambda out, after: (out * weights).sum(), state=given)


def test_a_product_may_lie_between_others_in_a_join():
    class Joined(nn.Module):
        hidden_size = SIZE

        def __init__(self):
            super().__init__()
            self.ways = nn.ModuleList(nn.Linear(SIZE, 2, bias=False) for _ in range(2)).double()

        def forward(self, x, h):
            both = torch.cat([self.ways[0](torch.tanh(x + h)), self.ways[1](torch.tanh(x - h))], -1)
            return both, both * 0.5

    cell = Joined()
    assert_loops(cell, some())
    assert_loops(cell, some(1))
    assert hs.explain(cell, some()).compiled == "its loops are compiled to C"
