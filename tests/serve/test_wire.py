"""Tensors on the wire: what is sent is what arrives."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hiddenstate.errors import BadInput
from hiddenstate.serve.wire import from_json, named_tensors, pack, parse_json, to_json, to_raw, unpack

TENSORS = st.builds(
    lambda shape, dtype: (torch.randn(shape) * 10).to(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from([torch.float32, torch.float64, torch.int64]),
)


@given(x=TENSORS)
def test_a_tensor_survives_every_form(x):
    assert torch.equal(unpack(pack({"x": x})), x)
    assert torch.equal(torch.frombuffer(bytearray(to_raw(x)) or bytearray(8), dtype=x.dtype)[: x.numel()], x.flatten())
    if x.numel():
        assert torch.equal(from_json(json.loads(to_json(x)), x.dtype), x)


def test_a_view_is_sent_as_it_is_seen():
    x = torch.arange(6.0).view(2, 3).t()
    assert torch.equal(unpack(pack({"x": x})), x)
    assert to_raw(x) == to_raw(x.contiguous())


def test_outputs_are_named_by_their_place():
    output = {"logits": torch.zeros(1), "states": (torch.ones(2), None, [torch.ones(3)])}
    assert {name: len(tensor) for name, tensor in named_tensors(output).items()} == {
        "y.logits": 1,
        "y.states.0": 2,
        "y.states.2.0": 3,
    }


@pytest.mark.parametrize("x", ["text", [[1, 2], [3]], [True], None, [1, "2"]])
def test_what_is_no_tensor_is_refused(x):
    with pytest.raises(BadInput, match=r"x is not made of numbers|x cannot be made a tensor"):
        from_json(x, torch.float32)


def test_fractions_are_not_rounded():
    with pytest.raises(BadInput, match=r"x has fractions, but this model takes torch\.int64"):
        from_json([1.5], torch.int64)


def test_a_file_with_another_tensor_is_refused():
    with pytest.raises(BadInput, match="the file holds z, but one tensor named 'x' is needed"):
        unpack(pack({"z": torch.zeros(1)}))
    with pytest.raises(BadInput, match="the body is no safetensors file"):
        unpack(b"nothing")


def test_text_that_is_no_json_is_refused():
    with pytest.raises(BadInput, match="this is no JSON"):
        parse_json("{")


@pytest.mark.parametrize(
    ("x", "dtype", "message"),
    [
        ([1.0, 1e39], torch.float32, r"x has 1e\+39, which this model's torch.float32 cannot hold"),
        ([70000.0], torch.float16, r"x has 70000, which this model's torch.float16 cannot hold"),
        ([2**40], torch.int32, r"x has 1.09951e\+12, which this model's torch.int32 cannot hold"),
        ([-1], torch.uint8, r"x has -1, which this model's torch.uint8 cannot hold"),
    ],
)
def test_a_number_that_would_become_another_is_refused(x, dtype, message):
    with pytest.raises(BadInput, match=message):
        from_json(x, dtype)
