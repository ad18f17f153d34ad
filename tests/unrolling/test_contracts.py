import gc

import pytest
import torch
from torch import nn

from hiddenstate.errors import BadInput
from hiddenstate.unrolling import unroll
from hiddenstate.unrolling.contracts import CallKind, found_contract, leaves_of, make_contract
from tests.support.cells import CELLS

KIND = CallKind((3,), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("sample", CELLS.values(), ids=CELLS)
def test_a_contract_says_what_a_run_gives_or_why_there_is_none(sample):
    cell, x = sample.cell(), sample.x(batch=3, steps=5)
    contract = make_contract(cell, unroll, CallKind(tuple(x.shape[2:]), x.dtype, x.device))
    if isinstance(contract, str):
        assert "changes its attribute" in contract or "writes into" in contract
        return
    out, state = unroll(cell, x)
    found = [(tuple(value.shape), value.dtype) for value in (out, *state.values())]
    assert found == contract.shapes(x)
    assert contract.axes == dict(state.batch_axis)
    weights = list(cell.parameters())
    used = [weight.requires_grad for weight in weights]
    assert sum(contract.reached) >= len(leaves_of([out, *state.values()])) or not any(used)


def test_a_trial_leaves_no_trace():
    class Dropping(nn.GRUCell):
        def forward(self, x, h):
            return super().forward(nn.functional.dropout(x), h)

    cell = Dropping(3, 5)
    before, stream = [weight.clone() for weight in cell.parameters()], torch.get_rng_state()
    assert not isinstance(make_contract(cell, unroll, KIND), str)
    assert torch.equal(torch.get_rng_state(), stream)
    assert all(weight.grad is None for weight in cell.parameters())
    torch.testing.assert_close(list(cell.parameters()), before)


def test_two_contracts_of_one_cell_that_promise_different_things_have_different_names():
    cell = nn.GRUCell(3, 5)
    one, two = (make_contract(cell, unroll, kind) for kind in (KIND, CallKind((3,), KIND.dtype, KIND.device, rows=1)))
    assert one.name.split()[-1] != two.name.split()[-1]


def test_a_contract_goes_with_its_module_and_says_so():
    cell = nn.GRUCell(3, 5)
    contract = make_contract(cell, unroll, KIND)
    assert found_contract(contract.name) is contract
    del cell
    gc.collect()
    with pytest.raises(BadInput, match=r"no such module is known in this process.*engine='loop'"):
        found_contract(contract.name)
    with pytest.raises(BadInput, match=r"that module is gone: a graph does not keep it alive. Keep the model"):
        contract.run([], torch.randn(2, 2, 3), ())


def test_a_state_of_other_parts_has_no_contract():
    kind = CallKind((3,), torch.float32, torch.device("cpu"), state=(torch.float32, torch.float32))
    assert make_contract(nn.GRUCell(3, 5), unroll, kind) == "the state has 2 parts, but h are needed."
