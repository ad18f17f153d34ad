"""What is compiled knows it, and what is run beside it, in another thread, is not taken for it."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hiddenstate as hs
from hiddenstate._compiling import compiling, may_be_recomputed, recomputing, under_checkpointing
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


class AskingWhetherItIsRunAgain(nn.Module):
    def __init__(self):
        super().__init__()
        self.answers = []

    def forward(self, x):
        foreseen = not recomputing() and may_be_recomputed(grad_before=True)
        self.answers.append((recomputing(), foreseen, under_checkpointing()))
        return torch.tanh(x)


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_first_run_is_foreseen_and_the_second_is_seen(reentrant):
    model, x = AskingWhetherItIsRunAgain(), torch.ones(2, requires_grad=True)
    model(x).sum().backward()
    checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    assert [answer[:2] for answer in model.answers] == [(False, False), (False, True), (True, False)]
    assert [answer[2] for answer in model.answers[:2]] == [False, True]


def test_without_gradients_before_nothing_is_run_again():
    with torch.no_grad():
        assert not may_be_recomputed(grad_before=False)
        assert not may_be_recomputed(grad_before=True)
