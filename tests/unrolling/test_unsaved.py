import torch
from torch.autograd.graph import saved_tensors_hooks

from hiddenstate.unrolling.unsaved import unsaved


def test_hooks_on_saved_tensors_see_nothing_of_what_is_run_inside_and_all_of_the_rest():
    seen, x = [], torch.rand(3, requires_grad=True)

    def pack(tensor):
        seen.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        with unsaved():
            x.sin()
        assert not seen
        x.cos()
    assert len(seen) == 1
