"""Laws of calls inside graphs of torch's: the graph is whole, and what it gives is what the call gives outside."""

import copy
import gc
import io
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hiddenstate as hs
from hiddenstate.errors import BadInput, Untraceable
from hiddenstate.state import tensors
from hiddenstate.unrolling.engines import layer_for
from tests.support.cells import LayerNormLSTMCell, TanhCell

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


class Model(nn.Module):
    """A stack between two layers of other kinds."""

    def __init__(self, Cell=nn.LSTMCell, **options):
        super().__init__()
        self.stack = hs.Recurrent(Cell, 3, 5, **options)
        self.head = nn.Linear(self.stack.output_size, 2)

    def forward(self, x, state=None, **options):
        out, state = self.stack(x * 2, state, **options)
        return self.head(out), state


class Masked(nn.Module):
    """A cell with a tensor, a number and a list beside its weights."""

    hidden_size = 5

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 5)
        self.mask, self.scale, self.seen = torch.ones(5), 1.0, []

    def forward(self, x, h):
        return self.linear(torch.cat([x, h], -1)).tanh() * self.mask * self.scale


class Unrolled(nn.Module):
    """A model that does something to its cell before it runs it."""

    def __init__(self, cell, before=lambda model: None):
        super().__init__()
        self.cell, self.before, self.gain, self.calls = cell, before, nn.Parameter(torch.rand(5)), 0

    def forward(self, x):
        self.before(self)
        out, state = hs.unroll(self.cell, x)
        return out.cos() + state["h"][:, None]


def compiled(model, backend="aot_eager", **options):
    torch._dynamo.reset()
    return torch.compile(model, backend=backend, fullgraph=True, **options)


def loss_of(result):
    return sum(value.cos().sum() for value in tensors(result).values())


def check_same(model, other, *args, weights=None, **kwargs):
    """Hold that two ways of a call give the same, and the same gradients."""
    weights = list(model.parameters()) if weights is None else weights
    results = [way(*args, **kwargs) for way in (model, other)]
    torch.testing.assert_close(results[1], results[0])
    grads = [torch.autograd.grad(loss_of(result), weights, allow_unused=True) for result in results]
    torch.testing.assert_close(grads[1], grads[0])


@pytest.mark.sample(3)
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}, {"batch_first": False}])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_a_stack_is_compiled_whole_and_gives_the_same(backend, options):
    model, x = Model(**options), torch.randn(4, 4, 3)
    whole = compiled(model, backend)
    check_same(model, whole, x)
    _, state = model(x)
    check_same(model, whole, x, tuple(part.detach() for part in state))
    check_same(model, whole, x, lengths=torch.tensor([4, 1, 2, 3]))
    check_same(model, whole, x, lengths=[4, 0, 2, 3])


@pytest.mark.sample(2)
@pytest.mark.parametrize("engine", ["loop", "fast", "auto"])
@pytest.mark.parametrize("make", [lambda: nn.GRUCell(3, 5), Masked])
def test_unroll_is_compiled_whole_whatever_the_cell_and_the_engine(make, engine):
    cell, x = make(), torch.randn(4, 6, 3)
    resets = torch.zeros(4, 6, dtype=torch.bool)
    resets[2, 3] = True

    def run(x):
        out, state = hs.unroll(cell, x * 2, resets=resets, engine=engine)
        return out * 2, state

    for _ in range(3):
        check_same(run, compiled(run), x, weights=list(cell.parameters()))


def test_a_state_goes_in_and_comes_out_of_a_graph_as_a_state():
    cell, x = nn.LSTMCell(3, 5), torch.randn(4, 6, 3)

    def pieces(x):
        head, middle = hs.unroll(cell, x[:, :2])
        tail, end = hs.unroll(cell, x[:, 2:], middle)
        return torch.cat([head, tail], 1), end

    out, end = compiled(pieces)(x)
    whole, state = hs.unroll(cell, x)
    assert isinstance(end, hs.State)
    torch.testing.assert_close((out, dict(end)), (whole, dict(state)))


def test_one_graph_serves_all_batch_sizes_and_lengths():
    model = Model()
    whole = compiled(model, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for shape in ((4, 6), (5, 9), (3, 2)):
            check_same(model, whole, torch.randn(*shape, 3))


def test_a_training_run_by_a_graph_is_the_same_and_leaves_nothing_behind():
    from hiddenstate.unrolling.operators import kept_runs

    gc.collect()
    before = kept_runs()  # of graphs that others still hold
    model, x = Model(engine="auto"), torch.randn(4, 6, 3)
    twin = copy.deepcopy(model)
    ways = [(model, compiled(model)), (twin, twin)]
    for _ in range(5):
        for own, way in ways:
            optimizer = torch.optim.SGD(own.parameters(), 0.1)
            optimizer.zero_grad()
            loss_of(way(x)).backward()
            optimizer.step()
    torch.testing.assert_close(list(model.parameters()), list(twin.parameters()))
    whole = compiled(model, "eager")
    loss = loss_of(whole(x))
    assert kept_runs() == before + 1
    loss.backward(retain_graph=True)
    loss.backward()
    whole(x)  # whose backward pass never comes
    del loss
    gc.collect()
    assert kept_runs() == before


def test_without_gradients_nothing_is_kept():
    from hiddenstate.unrolling.operators import kept_runs

    before = kept_runs()
    model, x = Model(), torch.randn(4, 6, 3)
    whole = compiled(model)
    with torch.no_grad():
        result = whole(x)
        assert kept_runs() == before
        torch.testing.assert_close(result, model(x))
    with torch.inference_mode():
        torch.testing.assert_close(whole(x), model(x))


def test_weights_that_are_shared_get_their_gradient_once():
    stack = hs.Recurrent(nn.GRUCell, 5, 5, num_layers=2)
    stack.l1.weight_ih = stack.l0.weight_ih
    check_same(stack, compiled(stack), torch.randn(4, 6, 5))


# What the code around a call did before it


def set_mask(model):
    model.cell.mask = model.gain.sigmoid()


def count(model):
    model.calls += 1


def write_weights(model):
    with torch.no_grad():
        model.cell.linear.weight.mul_(0.5)


@pytest.mark.parametrize("before", [set_mask, count, write_weights])
def test_tensors_that_the_graph_made_or_changed_before_go_in(before):
    model = Unrolled(Masked(), before)
    twin, x = copy.deepcopy(model), torch.randn(4, 6, 3)
    whole = compiled(model)
    for _ in range(3):
        one, two = whole(x), twin(x)
        torch.testing.assert_close(one, two)
        if before is not write_weights:
            grads = [
                torch.autograd.grad(loss_of(y), list(m.parameters()), allow_unused=True)
                for m, y in ((model, one), (twin, two))
            ]
            torch.testing.assert_close(*grads)


def set_scale(model):
    model.cell.scale = model.cell.scale + 1


def append(model):
    model.cell.seen.append(1)


@pytest.mark.parametrize(("before", "why"), [(set_scale, "its attribute 'scale' is changed"), (append, "a list, dict")])
def test_what_a_graph_changes_later_keeps_the_call_outside_and_right(before, why):
    model, x = Unrolled(Masked(), before), torch.randn(4, 6, 3)
    twin = copy.deepcopy(model)
    with pytest.raises(Exception, match=f"keeps this call out of the graph, because {why}"):
        compiled(model)(x)
    torch._dynamo.reset()
    broken = torch.compile(model, backend="aot_eager")
    for _ in range(3):
        torch.testing.assert_close(broken(x), twin(x))


class Counting(Masked):
    def forward(self, x, h):
        self.scale = self.scale * 0.9
        return super().forward(x, h)


class Averaging(Masked):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x, h):
        return self.norm(super().forward(x, h))


class Listing(Masked):
    def __init__(self):
        super().__init__()
        self.seen = [torch.ones(5)]

    def forward(self, x, h):
        return super().forward(x, h) * self.seen[0]


_elsewhere = torch.ones(5, requires_grad=True)


class Reaching(Masked):
    def forward(self, x, h):
        return super().forward(x, h) * _elsewhere


@pytest.mark.parametrize(
    ("Cell", "why"),
    [
        (Counting, "Counting changes its attribute 'scale' as it runs"),
        (Averaging, "Averaging writes into 'norm.num_batches_tracked' as it runs"),
        (Listing, "Listing keeps a tensor in a container"),
        (Reaching, r"gradients of Reaching reach a tensor of shape \(5,\) that it reads and does not hold"),
    ],
)
def test_a_cell_of_which_a_graph_would_not_see_all_stays_outside_and_right(Cell, why):
    model, x = Unrolled(Cell()), torch.randn(4, 6, 3)
    twin = copy.deepcopy(model)
    with pytest.raises(Exception, match=why):
        compiled(model)(x)
    torch._dynamo.reset()
    broken = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        torch.testing.assert_close(broken(x), twin(x))


def test_what_is_changed_about_a_cell_after_compiling_counts():
    model, x = Unrolled(Masked()), torch.randn(4, 6, 3)
    whole = compiled(model)
    whole(x)
    model.cell.scale = 0.5
    torch.testing.assert_close(whole(x), model(x))
    model.cell.register_forward_hook(lambda cell, given, made: made * 2)
    torch.testing.assert_close(whole(x), model(x))


def test_a_cell_that_gives_something_else_than_when_it_was_compiled_is_refused():
    class Wide(nn.Module):
        hidden_size, twice = 5, False

        def forward(self, x, h):
            h = (h + x.sum(-1, keepdim=True)).tanh()
            return (torch.cat([h, h], -1) if self.twice else h), h

    cell, x = Wide(), torch.randn(4, 6, 3)
    whole = compiled(lambda x: hs.unroll(cell, x)[0] * 2)
    whole(x)
    cell.twice = True
    with pytest.raises(BadInput, match=r"expects Wide .* \(4, 6, 5\) float32.* gives \(4, 6, 10\).*compiler.reset"):
        whole(x)


def test_what_no_graph_can_hold_stays_outside_and_says_so():
    cell, x = nn.GRUCell(3, 5), torch.randn(4, 6, 3)

    def start(rows):
        return hs.State({"h": torch.ones(rows, 5)})

    with pytest.raises(Exception, match="initial is a function, which no graph can hold"):
        compiled(lambda x: hs.unroll(cell, x, initial=start)[0])(x)
    packed = nn.utils.rnn.pack_padded_sequence(x, [6, 5, 4, 3], batch_first=True)
    stack = hs.Recurrent(nn.GRUCell, 3, 5)
    torch._dynamo.reset()
    broken = torch.compile(lambda x: stack(x)[0].data * 2, backend="aot_eager")
    torch.testing.assert_close(broken(packed), stack(packed)[0].data * 2)


# Around a graph


@pytest.mark.parametrize("engine", ["loop", "fast"])
def test_autocast_holds_in_a_graph_as_outside(engine):
    model, x = Model(nn.GRUCell, engine=engine), torch.randn(4, 6, 3)

    def run(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x)[0]

    whole = compiled(run)
    assert whole(x).dtype == torch.bfloat16
    check_same(run, whole, x, weights=list(model.parameters()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check_same(model, compiled(model), x)


@pytest.mark.parametrize("inside", [True, False])
def test_activation_checkpointing_holds_in_a_graph_and_around_it(inside):
    model, x = Model(nn.GRUCell), torch.randn(4, 6, 3, requires_grad=True)
    whole = compiled(lambda x: checkpoint(model, x, use_reentrant=False) if inside else model(x))
    run = whole if inside else (lambda x: checkpoint(whole, x, use_reentrant=False))
    check_same(model, run, x)


class Dropping(TanhCell):
    def forward(self, x, h):
        return nn.functional.dropout(super().forward(x, h))


@pytest.mark.sample(1)
@pytest.mark.parametrize("engine", ["loop", "fast"])
def test_random_numbers_in_a_graph_are_those_of_the_call_outside_also_where_it_is_run_again(engine):
    model, x = Model(Dropping, engine=engine), torch.randn(4, 6, 3)

    def seeded(way):
        torch.manual_seed(0)
        return torch.autograd.grad(loss_of(way(x)[0]), list(model.parameters()))

    expected = seeded(model)
    torch.testing.assert_close(seeded(compiled(model, "eager")), expected)
    torch.testing.assert_close(seeded(compiled(model)), expected)
    inside = compiled(lambda x: checkpoint(model, x, use_reentrant=False))
    torch.testing.assert_close(seeded(inside), expected)
    around = compiled(model)
    torch.testing.assert_close(seeded(lambda x: checkpoint(around, x, use_reentrant=False)), expected)


def test_gradients_of_a_graph_reach_the_hooks_of_distributed_data_parallel(tmp_path):
    dist = torch.distributed
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        model, x = Model(nn.GRUCell), torch.randn(4, 6, 3)
        parallel = nn.parallel.DistributedDataParallel(model)
        seen = []

        def hear(_, bucket):
            seen.append(bucket.buffer().clone())
            future = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        parallel.register_comm_hook(None, hear)
        torch._dynamo.reset()
        loss_of(torch.compile(parallel, backend="aot_eager")(x)[0]).backward()
        found = [weight.grad.clone() for weight in model.parameters()]
        torch.testing.assert_close(found, list(torch.autograd.grad(loss_of(model(x)[0]), list(model.parameters()))))
        assert sum(bucket.numel() for bucket in seen) == sum(weight.numel() for weight in model.parameters())
    finally:
        dist.destroy_process_group()


def test_functional_call_puts_its_weights_into_a_graph():
    model, x = Model(), torch.randn(4, 6, 3)
    weights = {name: (weight.detach() * 0.5).requires_grad_() for name, weight in model.named_parameters()}

    def run(weights, x):
        return torch.func.functional_call(model, weights, (x,))

    check_same(run, compiled(run), weights, x, weights=list(weights.values()))


@pytest.mark.parametrize("Cell", [nn.LSTMCell, TanhCell, LayerNormLSTMCell])
def test_ensembles_of_cells_run_under_vmap_and_grad(Cell):
    models, x = [Model(Cell, num_layers=2) for _ in range(3)], torch.randn(4, 6, 3)
    weights, _ = torch.func.stack_module_state(models)

    def loss(weights, x):
        return loss_of(torch.func.functional_call(models[0], weights, (x,)))

    found = torch.vmap(torch.func.grad(loss), in_dims=(0, None))(weights, x)
    for place, model in enumerate(models):
        grads = torch.autograd.grad(loss_of(model(x)), list(model.parameters()))
        torch.testing.assert_close([found[name][place] for name, _ in model.named_parameters()], list(grads))


def test_a_step_teaches_the_state_of_a_cell_also_where_an_ensemble_holds_its_weights():
    cells, x = [LayerNormLSTMCell() for _ in range(2)], torch.randn(5, 6, 3)
    weights, _ = torch.func.stack_module_state(cells)
    seen = []

    class Looking(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = cells[0]

        def forward(self, x):
            seen.append(layer_for(self.cell, x).initial(1))
            return x

    named = {f"cell.{name}": weight for name, weight in weights.items()}
    model = Looking()
    torch.vmap(lambda weights: torch.func.functional_call(model, weights, (x,)))(named)
    plain = layer_for(LayerNormLSTMCell(), x).initial(1)
    assert {name: part.shape for name, part in seen[0].items()} == {name: part.shape for name, part in plain.items()}
    assert all(type(weight) is nn.Parameter for weight in cells[0].parameters())


@pytest.mark.parametrize("what", ["lengths", "resets"])
def test_lengths_that_differ_under_vmap_are_refused(what):
    stack, x = hs.Recurrent(TanhCell, 3, 5), torch.randn(2, 4, 6, 3)
    given = torch.ones(2, 4, dtype=torch.int64) if what == "lengths" else torch.ones(2, 4, 6, dtype=torch.bool)
    with pytest.raises(BadInput, match=rf"{what} differ along the axis of a torch.func.vmap.*flatten\(0, 1\)"):
        torch.vmap(lambda x, given: stack(x, **{what: given})[0])(x, given)
    same = torch.vmap(lambda x, given: stack(x, **{what: given})[0], in_dims=(0, None))(x, given[0])
    torch.testing.assert_close(same[1], stack(x[1], **{what: given[0]})[0])


def test_transforms_inside_a_graph_keep_the_call_outside_and_right():
    model, x = Model(TanhCell), torch.randn(2, 4, 6, 3)

    def many(x):
        return torch.vmap(lambda x: model(x)[0])(x)

    with pytest.raises(Exception, match=r"because a transform of torch\.func is at work"):
        compiled(many)(x)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(many, backend="aot_eager")(x), many(x))


def test_an_operation_without_a_rule_for_vmap_is_named():
    stack = hs.Recurrent(nn.LSTMCell, 3, 5)
    with pytest.raises(BadInput, match=r"(?s)a step of LSTMCell .*vmap has no rule: .*lstm_cell.* plain operations"):
        torch.vmap(lambda x: stack(x)[0])(torch.randn(2, 4, 6, 3))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_recurrent_is_not_scripted_and_says_what_to_do():
    with pytest.raises(BadInput, match=r"cannot be scripted.*torch\.jit\.trace.*torch\.export"):
        torch.jit.script(Model())


# Exported


def operators_of(program):
    return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_has_one_operator_for_all_steps(strict):
    model, x = Model(), torch.randn(4, 6, 3)
    batch, time = torch.export.Dim("batch"), torch.export.Dim("time")
    shapes = ({0: batch, 1: time},)
    program = torch.export.export(model, (x,), dynamic_shapes=None if strict else shapes, strict=strict)
    assert operators_of(program).count("hiddenstate.unroll.default") == 1
    assert not [name for name in operators_of(program) if "cell" in name or "zeros" in name]
    module = program.module()
    torch.testing.assert_close(module(x), model(x))
    grads = [torch.autograd.grad(loss_of(way(x)), list(way.parameters())) for way in (module, model)]
    torch.testing.assert_close(*grads)
    if not strict:
        other = torch.randn(3, 9, 3)
        expected = model(other)
        del model
        gc.collect()
        torch.testing.assert_close(module(other), expected)  # it has a module of its own, as the weights are


def test_with_the_loop_all_steps_are_written_out():
    program = torch.export.export(Model(nn.GRUCell, engine="loop"), (torch.randn(4, 6, 3),))
    assert operators_of(program).count("aten.gru_cell.default") == 6
    assert "hiddenstate.unroll.default" not in operators_of(program)


def test_with_the_fast_engine_turned_off_everywhere_all_steps_are_written_out_too(monkeypatch):
    monkeypatch.setenv("HIDDENSTATE_ENGINE", "loop")
    program = torch.export.export(Model(nn.GRUCell), (torch.randn(4, 6, 3),))
    assert operators_of(program).count("aten.gru_cell.default") == 6


def test_a_saved_program_runs_where_its_module_is_known_and_says_so_elsewhere(monkeypatch):
    from hiddenstate.unrolling import contracts

    model, x, file = Model(), torch.randn(4, 6, 3), io.BytesIO()
    torch.export.save(torch.export.export(model, (x,)), file)
    file.seek(0)
    program = torch.export.load(file).module()
    torch.testing.assert_close(program(x), model(x))
    monkeypatch.setattr(contracts, "_contracts", {})
    with pytest.raises(
        BadInput, match=r"no such module is known in this process.*engine='loop', all steps are written"
    ):
        program(x)


def test_an_exported_program_runs_in_several_threads_at_once():
    models, x = [Model(), Model()], torch.randn(4, 6, 3)
    program = torch.export.export(models[0], (x,))
    programs = [program.module(), program.module()]
    programs[1].load_state_dict(models[1].state_dict(), assign=True)
    expected = [model(x)[0] for model in models]

    def call(place):
        return all(torch.allclose(programs[place % 2](x)[0], expected[place % 2], atol=1e-6) for _ in range(20))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(call, range(4)))


def test_second_derivatives_of_an_exported_program_are_refused():
    program, x = (
        torch.export.export(Model(), (torch.randn(4, 6, 3),)).module(),
        torch.randn(4, 6, 3, requires_grad=True),
    )
    (grad,) = torch.autograd.grad(loss_of(program(x)), x, create_graph=True)
    with pytest.raises(Untraceable, match=r"second derivatives .* are not there.*torch\.compiler\.disable"):
        grad.sum().backward()
