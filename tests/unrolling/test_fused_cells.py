"""Torch's cells in their equations give what torch's own cells give."""

import pytest
import torch
from torch import nn

import hiddenstate as hs
from hiddenstate.unrolling import fused_cells, step_graph

CELLS = {"lstm": nn.LSTMCell, "gru": nn.GRUCell}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", CELLS)
def test_the_equations_are_torchs(kind, bias):
    torch.manual_seed(0)
    cell = CELLS[kind](3, 4, bias=bias, dtype=torch.float64)
    x, h, c = (torch.randn(2, size, dtype=torch.float64) for size in (3, 4, 4))
    state = (h, c) if kind == "lstm" else h
    weights = [cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh]
    ours = getattr(fused_cells, f"{kind}_cell")(x, state, *weights)
    torch.testing.assert_close(ours, cell(x, state), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", CELLS)
def test_under_autocast_all_of_it_is_in_half_precision(kind):
    cell, x, h = CELLS[kind](3, 4), torch.randn(2, 3), torch.randn(2, 4)
    state = (h, h) if kind == "lstm" else h
    weights = [cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh]
    with torch.autocast("cpu", torch.bfloat16):
        ours = getattr(fused_cells, f"{kind}_cell")(x, state, *weights)
    made = ours if isinstance(ours, tuple) else (ours,)
    assert {part.dtype for part in made} == {torch.bfloat16}
    torch.testing.assert_close(made[0].float(), fused_cells_in_full(kind, x, state, weights), rtol=0.05, atol=0.05)


def fused_cells_in_full(kind, x, state, weights):
    made = getattr(fused_cells, f"{kind}_cell")(x, state, *weights)
    return made[0] if isinstance(made, tuple) else made


@pytest.mark.parametrize("kind", CELLS)
def test_a_schedule_of_them_gives_what_the_loop_gives(kind, monkeypatch):
    monkeypatch.setattr(step_graph, "equations_of", lambda operation, _: fused_cells._EQUATIONS.get(operation))
    torch.manual_seed(0)
    cell, x = CELLS[kind](3, 4), torch.randn(2, 5, 3, requires_grad=True)
    found = []
    for engine in ("loop", "fast"):
        out, _ = hs.unroll(cell, x, engine=engine)
        found.append([out, *torch.autograd.grad(out.cos().sum(), [x, *cell.parameters()])])
    torch.testing.assert_close(*found)


def test_on_a_processor_torch_itself_takes_them_apart():
    assert fused_cells.equations_of(torch.gru_cell, (torch.zeros(1, 3),)) is None
    assert fused_cells.equations_of(torch.tanh, ()) is None


@pytest.mark.cuda
@pytest.mark.parametrize("kind", CELLS)
def test_on_a_gpu_cells_of_torchs_run_as_one_kernel(kind):
    cell, x = CELLS[kind](16, 32).cuda(), torch.randn(5, 9, 16, device="cuda", requires_grad=True)
    found = []
    for engine in ("loop", "fast"):
        out, _ = hs.unroll(cell, x, engine=engine)
        found.append([out, *torch.autograd.grad(out.cos().sum(), [x, *cell.parameters()])])
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)
    assert "one CUDA kernel" in hs.explain(cell, x).compiled
