"""One call of a model: traced it gives what it gives plainly, and what calls of our own change is put back."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from hiddenstate.cells.behavior.model_call import ModelCall
from hiddenstate.errors import BadInput


class Careless(nn.Module):
    """Changes whatever a call can change."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)
        self.register_buffer("mean", torch.zeros(4))
        self.calls, self.past, self.h = 0, [], None

    def forward(self, x, *, scale=1.0):
        self.calls += 1
        self.past.append(x)
        self.mean.add_(x.detach().mean(0))
        with torch.no_grad():
            self.mix.weight.mul_(1.01)
            x.add_(1)
        self.h = self.drop(self.mix(x)) * scale
        return self.h


def called(model: nn.Module, *args, **kwargs) -> ModelCall:
    return ModelCall(model, (args, kwargs), set(), again=model)


def portrait(model: Careless, x: Tensor):
    tensors = [*model.parameters(), model.mean, x]
    return (
        model.calls,
        list(model.past),
        model.h,
        [tensor.detach().clone() for tensor in tensors],
        torch.get_rng_state(),
    )


def assert_same(one, other):
    assert one[0] == other[0]
    assert [id(each) for each in one[1]] == [id(each) for each in other[1]]
    assert one[2] is other[2]
    torch.testing.assert_close(one[3:], other[3:], rtol=0, atol=0)


@pytest.mark.parametrize("fails", [False, True])
def test_after_calls_of_our_own_everything_is_as_it_was(fails):
    model, x = Careless(), torch.randn(2, 4)
    call, before = called(model, x, scale=2.0), portrait(model, x)

    def work():
        with call.unharmed():
            call.traced(call.inputs)
            call.plain(call.inputs)
            assert model.calls == 2
            if fails:
                raise ZeroDivisionError

    if fails:
        with pytest.raises(ZeroDivisionError):
            work()
    else:
        work()
    assert_same(portrait(model, x), before)


def test_the_users_own_call_is_traced_and_keeps_what_it_does():
    model, x = Careless(), torch.randn(2, 4)
    twin, same = copy.deepcopy(model), x.clone()
    torch.manual_seed(0)
    expected = twin(same, scale=2.0)
    torch.manual_seed(0)
    call = called(model, x, scale=2.0)
    assert not call.is_real
    trace, result = call.real(lambda: model.forward(x, scale=2.0))
    assert call.is_real
    assert result is model.h
    torch.testing.assert_close(result, expected, rtol=0, atol=0)
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=0, atol=0)
    assert torch.equal(x, same)
    assert "forward" not in vars(model)
    assert {"linear", "dropout", "add_"} <= {op.name for op in trace.ops}
    assert [trace_call.path for trace_call in trace.calls] == ["", "mix", "drop"]


def test_a_module_that_is_known_is_one_operation():
    model = nn.Sequential(nn.GRU(4, 4), nn.Identity())
    model.forward = lambda x: model[0](x)[0]
    trace = ModelCall(model, ((torch.randn(3, 2, 4),), {}), {model[0]}, again=model).traced(
        ((torch.randn(3, 2, 4),), {})
    )
    assert [op.name for op in trace.ops if op.call > 0] == ["GRU.forward"]
    assert [call.known for call in trace.calls] == [False, True]


def test_a_call_that_would_use_something_up_is_not_made_again():
    model = nn.Identity()
    call = called(model, iter([torch.ones(1)]))
    with pytest.raises(BadInput, match="a second call would use up a list_iterator"), call.unharmed():
        raise AssertionError("not reached")
    model.source = (n for n in range(3))
    with pytest.raises(BadInput, match="a second call would use up a generator"), called(model).unharmed():
        raise AssertionError("not reached")
