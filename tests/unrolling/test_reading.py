"""A cell is read anew whenever anything has changed that its step reads, and a reading leaves no trace."""

import copy
import gc
import pickle
import re
import warnings

import pytest
import torch
from torch import nn

import hiddenstate as hs
from hiddenstate.cells import as_layer
from hiddenstate.errors import Untraceable
from hiddenstate.unrolling.reading import StepReader
from tests.support.cells import INPUT, LayerNormLSTMCell, TanhCell
from tests.support.changes import CHANGES, SIZE, Plain, stopping, undo


@pytest.fixture(autouse=True)
def _undone():
    yield
    undo()


def outcome(cell, x, engine):
    """Outputs, final states and all gradients, None where there is none."""
    out, state = hs.unroll(cell, x, engine=engine)
    values = [out, *state.values()]
    roots = [value.cos().sum() for value in values if value.requires_grad]
    wanted = [parameter for parameter in cell.parameters() if parameter.requires_grad]
    grads = torch.autograd.grad(roots, wanted, allow_unused=True) if roots else []
    return [value.detach() for value in values], list(grads)


def assert_loops(cell, x):
    """The fast engine gives what the loop gives, or refuses."""
    expected = outcome(cell, x, "loop")
    try:
        found = outcome(cell, x, "fast")
    except Untraceable:
        return False
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9, equal_nan=True)
    return True


def check_change(name):
    x = torch.randn(3, 4, SIZE, dtype=torch.float64)
    cell, change = CHANGES[name]()
    try:
        assert_loops(cell, x)
        assert_loops(cell, x)
        change()
        assert_loops(cell, x)
        assert_loops(cell, x)
    finally:
        del cell, change
        gc.collect()  # some put back in the end what they changed


# One of each kind; all of them are tried by `make test-long`.
FEW = ["nested object", "numpy array", "method replaced on the class", "closure cell", "bias moves"]
FEW += ["zero turns negative in a tuple", "identities of classes used again", "attribute that was not there"]
FEW += ["class in a closure replaced", "bases of a class", "size of a tensor", "ratio of sizes"]
FEW += ["key that was not there", "key that appears in front", "slot that was empty", "environment by a function"]
FEW += ["module imported in the step", "limit of recursion", "global of a module with a name of pythons"]


@pytest.mark.sample(7)
@pytest.mark.parametrize("name", FEW)
def test_a_change_between_two_calls_is_seen(name):
    check_change(name)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in CHANGES if name not in FEW])
def test_every_change_between_two_calls_is_seen_or_the_cell_refused(name):
    check_change(name)


def step_of(cell, batch=3):
    layer = as_layer(cell, torch.randn(batch, INPUT))
    state = layer.to_native(layer.initial(batch))
    return torch.randn(batch, INPUT), state, list(state) if isinstance(state, tuple) else [state]


def test_a_reading_tells_the_tensors_that_a_step_reads_now():
    cell, reader = LayerNormLSTMCell(), StepReader()
    one = reader.read(cell, *step_of(cell))
    assert {id(weight) for weight in one.weights} == {id(parameter) for parameter in cell.parameters()}
    cell.norm_c.weight = nn.Parameter(torch.zeros_like(cell.norm_c.weight))
    two = reader.read(cell, *step_of(cell))
    assert any(weight is cell.norm_c.weight for weight in two.weights)
    assert two.graph is one.graph
    assert reader.made == 1


def test_one_reading_serves_all_batch_sizes():
    cell, reader = TanhCell(), StepReader()
    for batch in (2, 5, 6, 7, 40, 3):
        reader.read(cell, *step_of(cell, batch))
    assert reader.made <= 2


def test_every_cell_of_a_class_is_read_however_many_there_are():
    x = torch.randn(2, 3, INPUT)
    for _ in range(12):
        cell = TanhCell()
        torch.testing.assert_close(hs.unroll(cell, x, engine="fast")[0], hs.unroll(cell, x, engine="loop")[0])


def test_a_cell_that_was_read_is_copied_pickled_and_unchanged():
    cell, x = TanhCell(), torch.randn(2, 3, INPUT)
    before = set(cell.__dict__), set(cell.state_dict())
    expected = hs.unroll(cell, x, engine="fast")[0]
    assert (set(cell.__dict__), set(cell.state_dict())) == before
    for other in (copy.deepcopy(cell), pickle.loads(pickle.dumps(cell))):
        torch.testing.assert_close(hs.unroll(other, x, engine="fast")[0], expected)


def test_a_step_that_changes_anything_outside_itself_is_refused_and_not_run():
    seen = []

    class Telling(TanhCell):
        def forward(self, x, h):
            seen.append(1)
            return super().forward(x, h)

    cell, x = Telling(), torch.randn(2, 3, INPUT)
    hs.unroll(cell, x, engine="loop")
    told = len(seen)
    with pytest.raises(Untraceable, match=r"changes something outside itself"):
        hs.unroll(cell, x, engine="fast")
    assert len(seen) == told


def stopping_in_torch(cell, h):
    torch._assert_async((h.abs() < 0.95).all())
    return h


def stopping_in_a_function(cell, h):
    return stopping(cell, h) * 2


def hooked(cell, h):
    h.register_hook(lambda grad: grad * 2)
    return h * 1


def without_gradients_from_now_on(cell, h):
    torch.set_grad_enabled(False)
    return h * 2


def while_compiled(cell, h):
    return h * 2 if torch.compiler.is_compiling() else h


def scaled_and_divided(cell, h):
    return torch.addcdiv(h, h, h + 2, value=0.5)


REFUSED = {
    stopping: "it checks values at every step, as assert does",
    stopping_in_torch: "it checks values at every step, as assert does",
    stopping_in_a_function: "it checks values at every step, as assert does",
    hooked: "it puts a hook on a tensor at every step",
    without_gradients_from_now_on: "it leaves gradients switched on or off",
    while_compiled: "its Python code asks for 'is_compiling' which is answered otherwise while it is read",
    scaled_and_divided: "its Python code asks for 'addcdiv' which torch's tracer computes in another order",
}


@pytest.mark.parametrize("after", REFUSED, ids=lambda after: after.__name__)
def test_what_no_value_depends_on_or_changes_from_step_to_step_is_refused_by_name(after):
    cell = type("Cell", (Plain,), {"after": after})()
    with pytest.raises(Untraceable, match=f"because {re.escape(REFUSED[after])}"):
        hs.unroll(cell, torch.randn(2, 3, SIZE, dtype=torch.float64), engine="fast")
    assert torch.is_grad_enabled()


def test_an_assertion_that_fails_later_is_raised_by_the_default_engine():
    cell = type("Cell", (Plain,), {"after": stopping})()
    x = torch.randn(2, 8, SIZE, dtype=torch.float64)
    for _ in range(20):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", hs.errors.UnrollWarning)
            hs.unroll(cell, x * 0.01)
    with pytest.raises(AssertionError, match="diverged"):
        hs.unroll(cell, x * 100)


def test_how_an_input_lies_in_memory_is_no_number_to_compute_with():
    class Cell(Plain):
        def forward(self, x, h):
            return torch.tanh(self.inner(x) + h) / x.stride(0)

    with pytest.raises(Untraceable, match="computes with how its input or state lies in memory"):
        hs.unroll(Cell(), torch.randn(2, 3, SIZE, dtype=torch.float64), engine="fast")


def test_nothing_is_left_behind_that_keeps_a_weight_from_being_swapped():
    cell, x = nn.GRUCell(INPUT, 4), torch.randn(2, 5, INPUT)
    hs.unroll(cell, x, engine="fast")
    torch.utils.swap_tensors(cell.weight_hh, nn.Parameter(torch.zeros(12, 4)))
    torch.testing.assert_close(hs.unroll(cell, x, engine="fast")[0], hs.unroll(cell, x, engine="loop")[0])


def test_where_torchs_compiler_is_told_to_stand_aside_the_loop_runs():
    cell, x = TanhCell(), torch.randn(2, 3, INPUT)
    with torch.compiler.set_stance("force_eager"), pytest.raises(Untraceable, match=r"compiler is told"):
        hs.unroll(cell, x, engine="fast")


SOURCE = """
import torch
from torch import nn

FACTOR = {factor}


def helper(h):
    return h * FACTOR


class Loaded(nn.Module):
    hidden_size = 4

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x, h):
        return helper(torch.tanh(self.inner(x) + h)) * FACTOR
"""


@pytest.mark.parametrize("name", ["nowhere_to_be_imported", "tests.support.changes", None])
def test_globals_are_read_where_they_are_and_not_where_their_name_leads(name):
    scope = {} if name is None else {"__name__": name, "__file__": "loaded.py"}
    exec(SOURCE.format(factor=0.25), scope)
    cell, x = scope["Loaded"](), torch.randn(2, 3, 4)
    for factor in (0.25, 0.5):
        scope["FACTOR"] = factor
        torch.testing.assert_close(hs.unroll(cell, x, engine="fast")[0], hs.unroll(cell, x, engine="loop")[0])
    assert scope.get("__name__") == name
