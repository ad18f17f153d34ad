"""What is compiled knows it, and what is run beside it, in another thread, is not taken for it."""

import pytest
import torch
from torch import nn

import hiddenstate as hs
from hiddenstate._compiling import compiling
from hiddenstate.errors import BadInput, StateMismatch
from tests.support.cells import TanhCell


def test_what_another_thread_compiles_is_not_taken_for_what_is_run_here(monkeypatch):
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)  # torch sets it for the whole process
    cell, x = TanhCell(3, 4), torch.randn(2, 5, 3)
    assert not compiling()
    torch.testing.assert_close(hs.unroll(cell, x, engine="fast")[0], hs.unroll(cell, x, engine="loop")[0])
    with pytest.raises(StateMismatch, match="row"):
        hs.State({"h": torch.zeros(1, 2, 3)}, {"h": 1}).select([0, 7])
    with pytest.raises(BadInput, match="lengths go from 2 to 9"):
        hs.regularize.activity(torch.zeros(2, 5, 3), [2, 9])
    with pytest.raises(BadInput, match="every row is empty"):
        hs.regularize.activity(torch.zeros(2, 5, 3), [0, 0])


@pytest.mark.parametrize("how", ["compiled", "exported", "exported as it runs"])
def test_what_is_compiled_here_knows_it(how):
    class Asking(nn.Module):
        def forward(self, x):
            return x + 1 if compiling() else x

    model, x = Asking(), torch.zeros(2)
    if how == "compiled":
        made = torch.compile(model, backend="eager", fullgraph=True)
    else:
        made = torch.export.export(model, (x,), strict=how == "exported").module()
    assert made(x).tolist() == [1, 1]
    assert model(x).tolist() == [0, 0]
