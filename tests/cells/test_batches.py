"""Batches of data sets as articles make them, read as a call of the model."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import pack_sequence, pad_sequence
from torch.utils.data import DataLoader, TensorDataset

from hiddenstate.cells import BegunDataSet, as_tensors, is_data_set, read_batch
from hiddenstate.errors import BadInput


def takes(signature):
    """Return a model whose forward has these arguments."""
    scope = {"nn": nn}
    exec(f"class Model(nn.Module):\n    def forward(self, {signature}): ...", scope)
    return scope["Model"]()


X, LENGTHS, Y = (
    pad_sequence([torch.ones(n) for n in (5, 3, 1)], batch_first=True),
    torch.tensor([5, 3, 1]),
    torch.ones(3),
)


@pytest.mark.parametrize(
    ("signature", "batch", "args", "lengths"),
    [
        ("x", X, [X], None),
        ("x", (X, Y), [X], None),
        ("x", [X, LENGTHS, Y], [X], LENGTHS),
        ("x, lengths", (X, LENGTHS, Y), [X, LENGTHS], LENGTHS),
        ("x, lengths", (X, Y, LENGTHS), [X, LENGTHS], LENGTHS),
        ("text, text_len=None", ((X, LENGTHS), Y), [X, LENGTHS], LENGTHS),
        ("x, seq_lens", (X, [5, 3, 1], Y), [X, [5, 3, 1]], LENGTHS),
        ("source, target", (X, Y), [X, Y], None),
        ("source, target, teacher_forcing=0.5", (X, Y), [X, Y], None),
        ("x, mask=None", {"x": X, "label": Y}, [X], None),
        ("x, lengths=None", {"label": Y, "lengths": LENGTHS, "x": X}, [X, LENGTHS], LENGTHS),
        ("x", {"x": X, "lengths": LENGTHS}, [X], LENGTHS),
    ],
)
def test_a_batch_is_read_by_what_forward_takes(signature, batch, args, lengths):
    read = read_batch(takes(signature), batch)
    assert len(read.args) == len(args)
    for given_, wanted in zip(read.args, args, strict=True):
        assert given_ is wanted or torch.equal(torch.as_tensor(given_), torch.as_tensor(wanted))
    assert read.lengths is None if lengths is None else torch.equal(read.lengths, lengths)


def test_labels_are_what_is_left_over():
    assert read_batch(takes("x"), (X, LENGTHS, Y)).rest == (Y,)
    assert read_batch(takes("x"), {"x": X, "y": Y}).rest == (Y,)


@given(seed=st.integers(0, 1000), rows=st.integers(2, 6), steps=st.integers(2, 9))
def test_labels_are_never_taken_for_lengths(seed, rows, steps):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, steps, 2, generator=generator)
    labels = torch.randint(1, steps, (rows,), generator=generator)  # each would cut off a real step
    assert read_batch(takes("x"), (x, labels)).lengths is None


@given(lengths=st.lists(st.integers(1, 8), min_size=2, max_size=5), first=st.booleans())
def test_lengths_are_known_by_what_lies_behind_them(lengths, first):
    x = pad_sequence([torch.randn(n, 3) for n in lengths], batch_first=first, padding_value=-1.0)
    told = read_batch(takes("x"), (x, torch.tensor(lengths), torch.zeros(len(lengths)))).lengths
    assert told is not None
    assert told.tolist() == lengths


class Reader(nn.Module):
    def __init__(self, batch_first, padding_idx=0):
        super().__init__()
        self.embed = nn.Embedding(9, 4, padding_idx=padding_idx)
        self.gru = nn.GRU(4, 5, batch_first=batch_first)

    def forward(self, tokens):
        return self.gru(self.embed(tokens))[0]


@given(lengths=st.lists(st.integers(1, 6), min_size=2, max_size=5), first=st.booleans())
def test_tokens_end_where_the_models_own_padding_begins(lengths, first):
    rows = [torch.randint(1, 9, (n,)) for n in lengths]
    tokens = pad_sequence(rows, batch_first=first)
    told = read_batch(Reader(first), (tokens, torch.zeros(len(lengths)))).lengths
    if min(lengths) == max(lengths):
        assert told is None
    else:
        assert told.tolist() == lengths
    assert read_batch(Reader(first, None), (tokens, torch.zeros(len(lengths)))).lengths is None


def test_arrays_and_packed_sequences_go_in_too():
    (x,) = read_batch(takes("x"), (np.zeros((2, 3), np.float32), np.zeros(2))).args
    assert isinstance(x, torch.Tensor)
    packed = pack_sequence([torch.ones(3, 1), torch.ones(2, 1)])
    assert read_batch(takes("x"), (packed, Y)).args == (packed,)
    assert read_batch(takes("x"), packed).args == (packed,)


def test_a_state_that_forward_insists_on_is_made():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(3, 4, batch_first=True)

        def forward(self, x, hidden):
            h, c = hidden
            return self.rnn(x, (h, c))

    read = read_batch(Net(), (torch.randn(2, 5, 3), torch.zeros(2)))
    assert [part.shape for part in read.args[1]] == [(1, 2, 4), (1, 2, 4)]


def test_a_mapping_that_does_not_fit_is_told_with_what_forward_takes():
    with pytest.raises(
        BadInput, match=r"a mapping of input_ids, labels, but Model.forward takes x: x is missing.*call="
    ):
        read_batch(takes("x"), {"input_ids": X, "labels": Y})


def test_an_empty_batch_and_an_empty_data_set_are_refused():
    with pytest.raises(BadInput, match="a batch is empty"):
        read_batch(takes("x"), ())
    with pytest.raises(BadInput, match="the data set has no batches"):
        BegunDataSet(iter([]))


def test_a_data_set_is_known_from_what_a_model_takes():
    loader = DataLoader(TensorDataset(X), batch_size=2)
    assert is_data_set(loader)
    assert is_data_set(batch for batch in [X])
    for other in (X, [X, X], (X, X), {"x": X}, "text", pack_sequence([torch.ones(2, 1)]), nn.GRU(1, 1), 3):
        assert not is_data_set(other)


def test_a_data_set_that_was_begun_still_has_all_its_batches():
    begun = BegunDataSet(DataLoader(TensorDataset(torch.arange(5)), batch_size=2))
    assert begun.first[0].tolist() == [0, 1]
    assert len(begun) == 3
    assert [batch[0].tolist() for batch in begun] == [[0, 1], [2, 3], [4]]


def test_arrays_become_tensors_of_the_models_dtype_and_all_else_stays():
    model, tokens = nn.GRU(3, 4).double(), np.array([[1, 2]])
    made = as_tensors(model, (np.zeros((2, 3), "float32"), {"tokens": tokens}, "name", None))
    assert made[0].dtype == torch.float64
    assert made[1]["tokens"].dtype == torch.int64
    assert made[2:] == ("name", None)
    nothing = ([torch.zeros(1)], 3)
    assert as_tensors(model, nothing) is nothing
    tokens.setflags(write=False)
    as_tensors(model, tokens)


def test_an_array_of_objects_is_refused():
    with pytest.raises(BadInput, match=r"array of object, but numbers are needed: often rows of unequal length"):
        as_tensors(nn.GRU(3, 4), np.array([[1], [2, 3]], dtype=object))
