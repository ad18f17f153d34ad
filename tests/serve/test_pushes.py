"""Inputs made of what callers give: read once, refused with a reason, and answered in the same form."""

import pytest
import torch
from torch import nn

from hiddenstate.errors import BadInput, ModelFailed
from hiddenstate.serve.futures import ResultFuture
from hiddenstate.serve.pushes import PushFactory
from hiddenstate.serve.session_operations import OutputRow, Push, PushMany
from hiddenstate.serve.trial import prepare


@pytest.fixture
def pushes():
    model = prepare(nn.GRU(3, 4, batch_first=True), example=None, init="zeros")
    yield PushFactory(model)
    model.close()


@pytest.mark.parametrize(
    ("x", "steps", "single"),
    [
        (torch.ones(3), 1, True),
        (torch.ones(3, requires_grad=True), 1, True),
        (torch.ones(1, 3), 1, False),
        (torch.ones(5, 3), 5, False),
        (torch.ones(3, dtype=torch.int64), 1, True),
        (torch.ones(3, 5).t(), 5, False),
        ([1.0, 1.0, 1.0], 1, True),
    ],
)
def test_an_input_is_the_same_numbers_however_it_is_given(pushes, x, steps, single):
    push = pushes.one(ResultFuture(1), "a", x, 7)
    assert (push.session, push.steps, push.single_step, push.seq) == ("a", steps, single, 7)
    piece = push.piece(torch.float32, (3,))
    torch.testing.assert_close(piece, torch.ones(steps, 3))
    assert not piece.requires_grad


@pytest.mark.parametrize(
    ("x", "seq", "message"),
    [
        (torch.ones(2), None, r"x has shape \(2,\), but one step of this model has \(3,\)"),
        (torch.ones(0, 3), None, "one or more"),
        (torch.ones(3, dtype=torch.complex64), None, "a cast would lose what is in it"),
        (object(), None, "cannot be made a tensor"),
        (torch.ones(3), 0, "seq is 0, but inputs are numbered from 1 on"),
        (torch.ones(3), True, "seq is True, but inputs are numbered from 1 on"),
    ],
)
def test_what_is_no_input_is_refused_with_the_reason(pushes, x, seq, message):
    with pytest.raises(BadInput, match=message):
        pushes.one(ResultFuture(1), "a", x, seq)


def test_one_tensor_for_many_sessions_is_one_operation_and_a_list_is_many(pushes):
    rows, names = torch.randn(2, 3), ["a", "b"]
    (many,) = pushes.many(ResultFuture(2), names, rows, None)
    assert isinstance(many, PushMany)
    single = pushes.many(ResultFuture(2), names, list(rows), [None, 4])
    assert [type(push) for push in single] == [Push, Push]
    assert [push.seq for push in single] == [None, 4]
    for push, own in zip(many.as_pushes(), single, strict=True):
        torch.testing.assert_close(push.piece(torch.float32, (3,)), own.piece(torch.float32, (3,)))


def test_raw_bytes_have_as_many_steps_as_fit_in_them(pushes):
    x = torch.randn(2, 3)
    (push,) = pushes.raw(ResultFuture(1), "a", [(memoryview(x.numpy().tobytes()), 3)])
    assert (push.steps, push.seq) == (2, 3)
    torch.testing.assert_close(push.piece(torch.float32, (3,)), x)


def test_outputs_come_in_one_tensor_or_one_by_one_and_the_first_error_is_raised(pushes):
    y, xs = torch.randn(2, 4), torch.randn(2, 3)
    future = ResultFuture(2)
    future.put_rows(0, 2, [y])
    torch.testing.assert_close(pushes.outputs(future, xs, raises=True), y)
    mixed = ResultFuture(2)
    mixed.put(0, OutputRow([y], 1, None))
    mixed.put(1, ModelFailed("no"))
    with pytest.raises(ModelFailed, match="no"):
        pushes.outputs(mixed, xs, raises=True)
    first, second = pushes.outputs(mixed, xs, raises=False)
    torch.testing.assert_close(first, y[1])
    assert isinstance(second, ModelFailed)
