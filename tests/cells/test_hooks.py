"""Hooks that leave no trace: in copies, in pickles, after they are removed, and in compiled code."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from hiddenstate.cells import Hook
from tests.support.models import Stepping
from tests.support.untouched import untouched

X = torch.randn(2, 3, 3)


def hooked(module, seen):
    """Both kinds of hooks on a module; what they see goes into a list."""
    return [
        Hook(lambda module, args, kwargs: seen.append("before")).before(module),
        Hook(lambda module, args, kwargs, result: seen.append("after")).after(module),
    ]


def remove(handles):
    for handle in handles:
        handle.remove()


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": lambda model: saved_and_loaded(model),
}


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_copy_of_a_hooked_model_is_not_hooked(copied):
    model, seen = Stepping(nn.GRUCell(3, 4)), []
    handles = hooked(model.cell, seen)
    twin = copied(model)
    torch.testing.assert_close(twin(X), model(X))
    assert seen == ["before", "after"] * 3  # the model's own
    remove(handles)
    twin(X)
    assert len(seen) == 6
    assert type(twin.cell._parameters) is dict
    assert all(hook.observes for hook in twin.cell._forward_hooks.values())  # a schedule may pass them by


def test_a_removed_hook_leaves_the_module_as_it_was():
    model = Stepping(nn.GRUCell(3, 4))
    with untouched(model):
        first, second = hooked(model.cell, []), hooked(model.cell, [])
        remove(first)
        remove(first)  # twice is once
        model(X)
        remove(second)
    assert type(model.cell._parameters) is dict


def test_parameters_that_come_and_go_under_a_hook_do_so_for_good():
    cell = nn.GRUCell(3, 4)
    handles = hooked(cell, [])
    cell.extra = nn.Parameter(torch.zeros(2))
    cell.register_parameter("bias_ih", None)
    remove(handles)
    assert set(dict(cell.named_parameters())) == {"weight_ih", "weight_hh", "bias_hh", "extra"}


def test_a_hook_may_replace_what_a_module_takes_and_gives():
    layer = nn.Linear(3, 2)
    handles = [
        Hook(lambda module, args, kwargs: ((args[0] * 2,), kwargs)).before(layer),
        Hook(lambda module, args, kwargs, result: result + 1).after(layer),
    ]
    out = layer(X)
    remove(handles)
    torch.testing.assert_close(out, layer(X * 2) + 1)


def test_a_hook_is_called_after_an_error_too_where_it_is_asked_to():
    layer, seen = nn.Linear(3, 2), []
    Hook(lambda *args: seen.append("always")).after(layer, always=True)
    Hook(lambda *args: seen.append("not always")).after(layer)
    with pytest.raises(RuntimeError):
        layer(torch.zeros(2, 5))
    assert seen == ["always"]


WAYS = {
    "a wrapper": lambda model, backend: torch.compile(model, backend=backend),
    "in place": lambda model, backend: (model.compile(backend=backend), model)[1],
    "a function around it": lambda model, backend: torch.compile(lambda x: model(x), backend=backend),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler looks there
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_compiled_code_sees_hooks_come_and_go_and_is_made_once_for_each(way, backend):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, seen, graphs = Stepping(nn.GRUCell(3, 4)), [], []
    plain = model(X)
    compiled = way(model, backend)
    for _ in range(3):
        seen.clear()
        torch.testing.assert_close(compiled(X), plain)
        assert seen == []
        handles = hooked(model.cell, seen)
        torch.testing.assert_close(compiled(X), plain)
        remove(handles)
        assert seen == ["before", "after"] * 3
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    torch.testing.assert_close(compiled(X), plain)
    assert seen == ["before", "after"] * 3
    assert len(set(graphs)) == 1
