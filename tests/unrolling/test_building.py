"""Whatever is met while a schedule is made or its loops are written, a cell runs, and it is said why not faster."""

import pytest
import torch
from torch import nn

import hiddenstate as hs
from hiddenstate.unrolling import building
from tests.support.changes import SIZE, Plain

X = torch.randn(3, 6, SIZE, dtype=torch.float64)


def failing(*_, **__):
    raise ValueError("not enough values to unpack")


def test_an_error_of_a_writer_leaves_the_loops_to_torch_and_is_told(monkeypatch):
    monkeypatch.setattr(building, "CompiledRunner", failing)
    cell = Plain()
    torch.testing.assert_close(hs.unroll(cell, X, engine="fast")[0], hs.unroll(cell, X, engine="loop")[0])
    told = hs.explain(cell, X)
    assert told.fast
    assert "because ValueError: not enough values to unpack" in str(told)


@pytest.mark.parametrize("name", ["trace", "split", "Schedule", "Judge"])
def test_an_error_while_a_schedule_is_made_leaves_the_cell_to_the_loop_and_is_told(monkeypatch, name):
    monkeypatch.setattr(building, name, failing)
    cell = Plain()
    with pytest.raises(hs.errors.Untraceable, match="its schedule fails: ValueError: not enough values to unpack"):
        hs.unroll(cell, X, engine="fast")
    assert "its schedule fails: ValueError: not enough values to unpack" in hs.explain(cell, X).reason


REDUCED = {
    "the largest of all": lambda h: h * (h.abs().amax() < 50),
    "the mean of all": lambda h: h - h.mean(),
    "the mean of all, kept": lambda h: h - h.mean(dim=(0, 1), keepdim=True),
    "the sum of all by no axis": lambda h: h / (1 + h.abs().sum(dim=None)),
    "the largest along no axis": lambda h: h - h.amax(dim=()),
    "the largest along one, kept": lambda h: h - h.amax(dim=1, keepdim=True),
}


@pytest.mark.parametrize("name", REDUCED)
def test_reductions_over_all_axes_run_in_every_way_that_they_are_written(name):
    cell = type("Cell", (Plain,), {"after": lambda self, h: REDUCED[name](h)})()
    x = X.clone().requires_grad_()
    found = [hs.unroll(cell, x, engine=engine)[0] for engine in ("loop", "fast")]
    torch.testing.assert_close(found[1], found[0])
    grads = [torch.autograd.grad(out.cos().sum(), [x, *cell.parameters()]) for out in found]
    torch.testing.assert_close(grads[1], grads[0])


def test_a_cell_that_fails_on_a_single_row_runs_on_batches_of_any_size():
    class Normed(Plain):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(SIZE, track_running_stats=False).double()

        def after(self, h):
            return self.norm(h)

    cell = Normed()
    for rows in (3, 5, 2):
        x = torch.randn(rows, 5, SIZE, dtype=torch.float64)
        torch.testing.assert_close(hs.unroll(cell, x, engine="fast")[0], hs.unroll(cell, x, engine="loop")[0])
