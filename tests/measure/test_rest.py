import pytest
import torch
from torch import nn

import hiddenstate as hs
from hiddenstate.measure.rest import at_rest
from tests.support.untouched import untouched


def model():
    net = nn.Sequential(nn.GRU(3, 4), nn.Dropout(), nn.BatchNorm1d(4))
    net[2].eval()
    net[0].weight_hh_l0.requires_grad_(False)
    net[0].bias_hh_l0.grad = torch.ones(12)
    return net


def test_inside_all_is_quiet_and_outside_all_is_as_before():
    net = model()
    with untouched(net), torch.no_grad():
        with at_rest(net):
            assert torch.is_grad_enabled()
            assert not any(module.training for module in net.modules())
            assert not any(weight.requires_grad for weight in net.parameters())
            net[2].running_mean += 1
            torch.rand(3)
        assert not torch.is_grad_enabled()


def test_an_exception_changes_nothing_either():
    net = model()
    with untouched(net), pytest.raises(KeyboardInterrupt), at_rest(net):
        raise KeyboardInterrupt


def test_carrying_and_recording_rest_too_and_users_hooks_do_not():
    net = nn.GRU(3, 4)
    seen = []
    net.register_forward_hook(lambda *_: seen.append("user"))
    carry = hs.Carry(net)
    x = torch.randn(5, 2, 3)
    with hs.record(net) as recording, untouched(net), at_rest(net):
        net(x)
        net.forward(x)
    assert not list(recording)
    assert carry.state is None
    assert seen == ["user"]
    net(x)
    assert carry.state is not None
    carry.close()
