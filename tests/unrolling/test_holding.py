import pytest
import torch
from torch import nn

from hiddenstate.errors import BadInput
from hiddenstate.unrolling.holding import changing_nothing, held_tensors, kept_astray, put_in, stand_in


class Holder(nn.Module):
    """A parameter, a buffer, a tensor, a module, and a list with one of them."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3))
        self.register_buffer("mean", torch.rand(3))
        self.mask, self.inner = torch.rand(3), nn.Linear(3, 3)
        self.all = [self.weight]


def test_all_tensors_of_a_module_are_found_where_they_are():
    module = Holder()
    found = {held.path: held.tensor for held in held_tensors(module)}
    assert list(found) == ["weight", "mean", "mask", "inner.weight", "inner.bias"]
    assert found["mask"] is module.mask


def test_other_tensors_are_put_in_for_a_while_also_where_they_are_listed_and_also_after_an_exception():
    module = Holder()
    own = [held.tensor for held in held_tensors(module)]
    others, seen = [torch.zeros_like(tensor) for tensor in own], []

    def look():
        seen.extend([module.weight, module.all[0], module.inner.bias])
        raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"), put_in(module, others):
        look()
    assert [id(tensor) for tensor in seen] == [id(others[0]), id(others[0]), id(others[-1])]
    assert all(held.tensor is mine for held, mine in zip(held_tensors(module), own, strict=True))
    assert module.all[0] is own[0]


@pytest.mark.parametrize("thing", [torch.rand(3), nn.Linear(3, 3)], ids=["tensor", "module"])
@pytest.mark.parametrize("wrap", [lambda t: [t], lambda t: {"key": [t]}, lambda t: (t,)], ids=["list", "dict", "tuple"])
def test_what_lies_in_a_container_alone_is_named(thing, wrap):
    module = Holder()
    assert kept_astray(module) == ""
    module.extra = wrap(thing)
    kind = "tensor" if isinstance(thing, torch.Tensor) else "module"
    assert f"Holder keeps a {kind} in a container" in kept_astray(module)


def change_attribute(module):
    module.scale = 2


def change_list(module):
    module.all.append(1)


def change_buffer(module):
    module.mean.add_(1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_attribute, "changes its attribute 'scale' as it runs"),
        (change_list, "changes its attribute 'all' as it runs"),
        (change_buffer, "writes into 'mean' as it runs"),
    ],
)
def test_what_changes_is_named(change, message):
    module = Holder()
    with pytest.raises(BadInput, match=rf"Holder {message}.*torch\.compiler\.disable"), changing_nothing(module):
        change(module)


def test_a_stand_in_is_a_module_of_its_own_that_takes_no_memory():
    module = Holder()
    body = stand_in(module)
    assert [held.path for held in held_tensors(body)] == [held.path for held in held_tensors(module)]
    assert all(held.tensor.untyped_storage().nbytes() == 4 for held in held_tensors(body))
    assert body.all[0] is body.weight
    assert body.weight is not module.weight
    body.scale = 3
    assert not hasattr(module, "scale")
