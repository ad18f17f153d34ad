import gc

import pytest
import torch
from torch import nn

from hiddenstate.errors import Untraceable
from hiddenstate.unrolling import unroll
from hiddenstate.unrolling.contracts import CallKind, make_contract
from hiddenstate.unrolling.operators import kept_runs


def arguments_for(cell, x):
    """Return what a graph would hand to the operator."""
    contract = make_contract(cell, unroll, CallKind((3,), x.dtype, x.device))
    return contract.name, list(cell.parameters()), x, [], [None, None], [True] * 4 + [False]


def test_the_operator_keeps_torchs_own_rules_for_operators():
    cell, x = nn.GRUCell(3, 5), torch.randn(4, 6, 3)
    tests = ("test_schema", "test_faketensor")
    found = torch.library.opcheck(torch.ops.hiddenstate.unroll.default, arguments_for(cell, x), test_utils=tests)
    assert found == dict.fromkeys(tests, "SUCCESS")


def test_a_run_is_kept_as_long_as_its_number_and_then_no_backward_pass_is_made_up():
    cell, x = nn.GRUCell(3, 5), torch.randn(4, 6, 3)
    gc.collect()
    before = kept_runs()
    out, final, number = torch.ops.hiddenstate.unroll(*arguments_for(cell, x))
    assert kept_runs() == before + 1
    copied = number.clone()
    grads = [torch.ones_like(out), torch.ones_like(final)]
    found = torch.ops.hiddenstate.unroll_backward(number, list(cell.parameters()), grads)
    expected, state = unroll(cell, x, engine="loop")
    torch.testing.assert_close(
        list(found), list(torch.autograd.grad(expected.sum() + state["h"].sum(), list(cell.parameters())))
    )
    del out, final, number
    gc.collect()
    assert kept_runs() == before
    with pytest.raises(Untraceable, match=r"comes when what it needs is gone.*torch\.compiler\.disable"):
        torch.ops.hiddenstate.unroll_backward(copied, list(cell.parameters()), grads)


def test_what_the_operator_gives_may_be_written_to_before_the_backward_pass():
    cell, x = nn.GRUCell(3, 5), torch.randn(4, 6, 3)
    out, final, number = torch.ops.hiddenstate.unroll(*arguments_for(cell, x))
    grads = [torch.ones_like(out), torch.ones_like(final)]
    first = torch.ops.hiddenstate.unroll_backward(number, list(cell.parameters()), grads)
    with torch.no_grad():
        out.zero_()
        final.zero_()
    again = torch.ops.hiddenstate.unroll_backward(number, list(cell.parameters()), grads)
    torch.testing.assert_close(again, first)
