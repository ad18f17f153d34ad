"""Hypothesis strategies for states and rows: any part names, batch axes, dtypes, sizes and memory layouts."""

from collections.abc import Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor

from hiddenstate.state import State

FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
COMPLEX = (torch.complex64, torch.complex128)
OTHERS = (torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool)
DTYPES = FLOATING + COMPLEX + OTHERS

# Names as layers give them (`encoder.lstm.h`, `1.0`), and whatever else a string may be.
part_names = st.sampled_from(["h", "c", "0", "1.0", "encoder.lstm.h"]) | st.text(
    st.characters(exclude_categories=["Cs"]), max_size=5
).filter(lambda name: name != "__metadata__")


@st.composite
def tensors(draw: st.DrawFn, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Tensors of ordinary values, laid out in memory in one way or another."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31), label="seed"))
    layout = draw(st.sampled_from(["contiguous", "strided", "transposed"]), label="layout")
    if layout == "strided":
        shape = [*shape, 2]
    elif layout == "transposed":
        shape = list(reversed(shape))
    if dtype in OTHERS:
        tensor = torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=generator).to(dtype)
    elif dtype in COMPLEX:
        tensor = torch.randn(shape, generator=generator, dtype=dtype)
    else:
        tensor = torch.randn(shape, generator=generator).to(dtype)
    if layout == "strided":
        return tensor[..., 1]
    return tensor.permute(*reversed(range(tensor.dim()))) if layout == "transposed" else tensor


@st.composite
def states(
    draw: st.DrawFn,
    *,
    batch: st.SearchStrategy[int] = st.integers(0, 4),  # noqa: B008 - a strategy is a value
    dtypes: Sequence[torch.dtype] = DTYPES,
) -> State:
    """States of one to three parts, each with a batch axis, dtype and size of its own; a row may be a mere number."""
    rows = draw(batch, label="batch")
    names = draw(st.lists(part_names, min_size=1, max_size=3, unique=True), label="names")
    parts, axes = {}, {}
    for name in names:
        sizes = draw(st.lists(st.integers(0, 3), max_size=3), label="sizes")
        axes[name] = draw(st.integers(0, len(sizes)), label="axis")
        sizes.insert(axes[name], rows)
        parts[name] = draw(tensors(sizes, draw(st.sampled_from(dtypes), label="dtype")))
    return State(parts, axes)


@st.composite
def states_like(draw: st.DrawFn, state: State, *, batch: int) -> State:
    """States of `batch` rows that fit `state`."""
    parts = {}
    for name, part in state.items():
        shape = list(part.shape)
        shape[state.batch_axis[name]] = batch
        parts[name] = draw(tensors(shape, part.dtype))
    return State(parts, state.batch_axis)


def row_lists(batch: int, *, unique: bool = False) -> st.SearchStrategy[list[int]]:
    """Lists of rows of a batch, counted from the front."""
    if batch == 0:
        return st.just([])
    return st.lists(st.integers(0, batch - 1), max_size=batch if unique else 6, unique=unique)


def slices(batch: int) -> st.SearchStrategy[slice]:
    """Slices in both directions, within a batch or beyond it."""
    ends = st.none() | st.integers(-batch - 2, batch + 2)
    return st.builds(slice, ends, ends, st.none() | st.integers(-3, 3).filter(bool))


def same(one: State, other: State) -> bool:
    """Whether two states are the same to the bit: names in order, axes, dtypes, devices, shapes and values."""
    return (
        list(one) == list(other)
        and dict(one.batch_axis) == dict(other.batch_axis)
        and all(_same_bits(one[name], other[name]) for name in one)
    )


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if (one.dtype, one.device, one.shape) != (other.dtype, other.device, other.shape):
        return False
    if one.numel() == 0:
        return True
    # The last axis of one entry is there because torch views as bytes only what has a stride of 1.
    flat = [tensor.detach().resolve_conj().resolve_neg().reshape(-1).unsqueeze(-1) for tensor in (one, other)]
    return torch.equal(flat[0].view(torch.uint8), flat[1].view(torch.uint8))
