"""Every name of torch's that torch does not promise: it is there, and where it is gone, a sentence says so."""

import subprocess
import sys

import pytest
import torch
from torch import nn

import hiddenstate as hs
from hiddenstate import _torch_names
from hiddenstate._torch_names import NEEDED, lookup, require
from hiddenstate.errors import UnsupportedTorch, Untraceable
from hiddenstate.pool import steps
from hiddenstate.unrolling import engines
from tests.support.cells import TanhCell
from tests.support.private_names import BY_STRING, OF_OTHERS

EXPRESSIONS = [*(name.expression for name in OF_OTHERS.values()), *BY_STRING]
ALL = {name: part for part, names in NEEDED.items() for name in names}


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_this_version_of_torch_has_it(expression):
    assert eval(expression, {"torch": torch}) is not None


def test_what_is_needed_is_looked_up_when_the_library_is_loaded():
    needed = {name.expression for name in OF_OTHERS.values() if name.gone == "needed"}
    assert [name for name in needed if not any(f"{full}.".startswith(f"{name}.") for full in ALL)] == []
    assert ALL.keys() - needed == {"torch._C._dynamo.eval_frame", "torch._C.DisableTorchFunction", "torch._VF"}


@pytest.mark.parametrize("name", ALL)
def test_a_name_that_is_gone_is_an_error_in_a_sentence(name, monkeypatch):
    owner, _, last = name.rpartition(".")
    monkeypatch.delattr(lookup(owner) or torch, last)
    with pytest.raises(
        UnsupportedTorch, match=rf"torch 2\.\S+ has no {name}, which hiddenstate\.{ALL[name]} needs to "
    ):
        require(ALL[name])


def test_every_part_finds_what_it_needs_now():
    assert [name for name in ALL if lookup(name) is None] == []
    for part in (*NEEDED, "pool"):
        require(part)


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    return done.stderr.strip().splitlines()[-1]


def test_the_error_comes_when_the_library_is_loaded():
    said = run("import torch; del torch._C._current_graph_task_id; import hiddenstate")
    assert "UnsupportedTorch: torch" in said
    assert "has no torch._C._current_graph_task_id, which hiddenstate.cells needs to tell a layer" in said
    assert "newer hiddenstate" in said


def test_what_only_serving_needs_keeps_nothing_else_from_being_loaded():
    said = run("import torch; del torch._C._len_torch_function_stack; import hiddenstate as hs; hs.layers; hs.serve")
    assert "has no torch._C._len_torch_function_stack, which hiddenstate.serve needs" in said


OPTIONAL = ["_tracing_state", "_transforms", "_dispatch_mode", "_function_mode_stack"]


@pytest.mark.parametrize("name", OPTIONAL)
def test_cells_run_step_by_step_where_torch_does_not_say_what_is_at_work(name, monkeypatch):
    cell, x = TanhCell(), torch.randn(2, 5, 3)
    expected = hs.unroll(cell, x, engine="loop")[0]
    monkeypatch.setattr(engines, name, None)
    torch.testing.assert_close(hs.unroll(cell, x)[0], expected)
    with pytest.raises(Untraceable, match=r"torch 2\.\S+ does not say whether something else is at work"):
        hs.unroll(cell, x, engine="fast")


def test_pools_are_recorded_without_a_check_where_torch_has_none_for_graphs(monkeypatch):
    h, lengths, pool = torch.randn(2, 5, 3), torch.tensor([5, 2]), hs.pool.Last()
    expected = pool(h, lengths)
    monkeypatch.setattr(steps, "captured", lambda: True)
    monkeypatch.setattr(steps, "_assert_async", None)
    torch.testing.assert_close(pool(h, lengths), expected)


def test_weight_drop_says_what_it_misses():
    layer = hs.regularize.WeightDrop(nn.LSTM(3, 4)).train()
    del layer.layer._flat_weights_names
    with pytest.raises(UnsupportedTorch, match=r"keeps no _flat_weights .*WeightDrop cannot be trained.*Zoneout"):
        layer(torch.randn(5, 2, 3))


def test_a_name_is_looked_up_by_its_parts():
    assert lookup("torch.nn.Linear") is nn.Linear
    assert lookup("torch.nn.Liner") is None
    assert lookup("torch.no.Linear") is None
    assert _torch_names.lookup("torch") is torch
