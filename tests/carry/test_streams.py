"""Nothing is lost, nothing is repeated, and every row goes on where it stopped."""

from __future__ import annotations

import io
from collections import deque
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader

from hiddenstate.carry.streams import Chunk, Streams
from hiddenstate.errors import BadInput, StateMismatch


def numbered(lengths: list[int], *shape: int) -> list[Tensor]:
    """Sequences in which no two entries are equal and none is zero."""
    width = int(torch.tensor(shape).prod()) if shape else 1
    whole = torch.arange(1, sum(lengths) * width + 1).view(-1, *shape)
    return list(whole.split(lengths))


def same(a: Chunk, b: Chunk) -> bool:
    return all(p is q is None or (p.dtype == q.dtype and torch.equal(p, q)) for p, q in zip(a, b, strict=True))


def all_same(a: list[Chunk], b: list[Chunk]) -> bool:
    return len(a) == len(b) and all(same(p, q) for p, q in zip(a, b, strict=True))


def by_hand(sequences: list[Tensor], batch: int, steps: int) -> list[Chunk]:
    """The same chunks one step and one row at a time, for tokens without targets."""
    queue, rows = deque(sequences), [deque() for _ in range(batch)]
    chunks = []
    while queue or any(rows):
        x, starts = torch.zeros(batch, steps, dtype=torch.int64), torch.zeros(batch, steps, dtype=torch.bool)
        lengths = torch.zeros(batch, dtype=torch.int64)
        for t in range(steps):
            for b in range(batch):
                if not rows[b] and queue:
                    rows[b].extend(queue.popleft().tolist())
                    starts[b, t] = True
                if rows[b]:
                    x[b, t] = rows[b].popleft()
                    lengths[b] += 1
        chunks.append(Chunk(x, None, starts, lengths))
    return chunks


def rows_of(chunks: list[Chunk]) -> list[list[Tensor]]:
    """Each row's valid steps in one, cut at the starts."""
    rows = []
    for b in range(len(chunks[0].lengths)):
        x = torch.cat([chunk.x[b, : chunk.lengths[b]] for chunk in chunks])
        starts = torch.cat([chunk.starts[b, : chunk.lengths[b]] for chunk in chunks])
        assert starts[0]
        cuts = starts.nonzero().flatten().tolist()[1:]
        rows.append(list(x.tensor_split(cuts)))
    return rows


@st.composite
def settings(draw: st.DrawFn, least: int = 1) -> tuple[list[int], int, int]:
    lengths = draw(st.lists(st.integers(least, 12), min_size=1, max_size=9))
    return lengths, draw(st.integers(1, len(lengths))), draw(st.integers(1, 15))


# Laws


@given(settings())
def test_chunks_equal_those_made_by_hand_step_by_step(given_settings):
    lengths, batch, steps = given_settings
    sequences = numbered(lengths)
    assert all_same(list(Streams(sequences, batch, steps)), by_hand(sequences, batch, steps))


@given(settings(), st.sampled_from([(), (3,), (2, 2)]), st.booleans())
def test_rows_cut_at_their_starts_give_back_every_sequence_once_in_order(given_settings, shape, shuffle):
    lengths, batch, steps = given_settings
    sequences = numbered(lengths, *shape)
    chunks = list(Streams(sequences, batch, steps, shuffle=shuffle, seed=5))
    rows = rows_of(chunks)
    given_back = [piece for row in rows for piece in row]
    firsts = [int(piece.flatten()[0]) for piece in given_back]
    assert sorted(firsts) == [int(s.flatten()[0]) for s in sequences]
    found = dict(zip(firsts, given_back, strict=True))
    assert all(torch.equal(found[int(s.flatten()[0])], s) for s in sequences)
    if not shuffle:
        assert all(row == sorted(row) for row in ([int(p.flatten()[0]) for p in row] for row in rows))
        assert [int(row[0].flatten()[0]) for row in rows] == [int(s.flatten()[0]) for s in sequences[:batch]]
    assert sum(int(chunk.starts.sum()) for chunk in chunks) == len(sequences)


@given(settings())
def test_a_row_goes_on_where_it_stopped(given_settings):
    lengths, batch, steps = given_settings
    chunks = list(Streams(numbered(lengths), batch, steps))
    for last, following in pairwise(chunks):
        for b in range(batch):
            if following.lengths[b] and not following.starts[b, 0]:
                assert following.x[b, 0] == last.x[b, -1] + 1


@given(settings())
def test_only_the_end_of_a_row_is_padded_and_no_chunk_is_empty(given_settings):
    lengths, batch, steps = given_settings
    streams = Streams(numbered(lengths), batch, steps)
    promised, chunks = len(streams), list(streams)
    assert promised == len(chunks)
    for chunk in chunks:
        assert chunk.lengths.max() > 0
        assert torch.equal(chunk.mask, chunk.x != 0)
        assert not chunk.starts[~chunk.mask].any()
    for last, following in pairwise(chunks):
        assert (following.lengths[last.lengths < steps] == 0).all()


@given(settings(least=2), st.sampled_from([(), (2,)]))
def test_next_is_one_step_ahead_within_a_sequence(given_settings, shape):
    lengths, batch, steps = given_settings
    sequences = numbered(lengths, *shape)
    width = sequences[0][0].numel()
    chunks = list(Streams(sequences, batch, steps, targets="next"))
    for chunk in chunks:
        assert torch.equal(chunk.y[chunk.mask], chunk.x[chunk.mask] + width)
        assert not chunk.y[~chunk.mask].any()
    pieces = {int(piece.flatten()[0]): piece for row in rows_of(chunks) for piece in row}
    assert all(torch.equal(pieces[int(s.flatten()[0])], s[:-1]) for s in sequences)
    assert len(pieces) == len(sequences)


@given(settings(), st.booleans())
def test_given_targets_stay_beside_their_steps(given_settings, shuffle):
    lengths, batch, steps = given_settings
    sequences = numbered(lengths)
    targets = [torch.stack([s * 0.5, -s], dim=1) for s in sequences]
    for chunk in Streams(sequences, batch, steps, targets=targets, shuffle=shuffle):
        assert chunk.y.shape == (batch, steps, 2)
        assert chunk.y.dtype == torch.float32
        assert torch.equal(chunk.y, torch.stack([chunk.x * 0.5, -chunk.x], dim=2))


@given(settings(least=2), st.booleans(), st.integers(0, 2), st.data())
def test_a_resumed_epoch_equals_the_uninterrupted_rest(given_settings, shuffle, epochs, data):
    lengths, batch, steps = given_settings

    def build() -> Streams:
        return Streams(numbered(lengths), batch, steps, targets="next", shuffle=shuffle, seed=3)

    streams = build()
    for _ in range(epochs):
        list(streams)
    k = data.draw(st.integers(0, len(streams)))
    running = iter(streams)
    for _ in range(k):
        next(running)
    saved = io.BytesIO()
    torch.save(streams.state_dict(), saved)
    rest, following = list(running), list(streams)

    saved.seek(0)
    resumed = build()
    resumed.load_state_dict(torch.load(saved, weights_only=True))
    assert all_same(list(resumed), rest)
    assert all_same(list(resumed), following)


@given(settings(), st.integers(), st.integers(0, 3))
def test_shuffling_is_a_permutation_that_the_seed_settles(given_settings, seed, epochs):
    lengths, batch, steps = given_settings
    ones, others = (Streams(numbered(lengths), batch, steps, shuffle=True, seed=seed) for _ in range(2))
    for _ in range(epochs + 1):
        a, b = list(ones), list(others)
        assert all_same(a, b)
        steps_seen = torch.cat([chunk.x[chunk.mask] for chunk in a])
        assert torch.equal(steps_seen.sort().values, torch.arange(1, sum(lengths) + 1))


# Shuffling


def order(streams: Streams) -> list[int]:
    return torch.cat([chunk.x[chunk.starts] for chunk in streams]).tolist()


def test_every_epoch_and_every_seed_has_another_order():
    def build(seed: int) -> Streams:
        return Streams(numbered([1] * 50), 1, 7, shuffle=True, seed=seed)

    streams = build(0)
    orders = [order(streams) for _ in range(3)] + [order(build(seed)) for seed in (1, 2, -1, 2**70)]
    assert len({tuple(o) for o in orders}) == len(orders)
    assert order(build(0)) == orders[0]


def test_without_shuffle_every_epoch_is_the_same():
    streams = Streams(numbered([3, 5, 2]), 2, 4)
    assert all_same(list(streams), list(streams))


def test_the_global_random_stream_is_left_alone():
    before = torch.get_rng_state()
    list(Streams(numbered([3, 5, 2]), 2, 4, shuffle=True, seed=9))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_global_seed_does_not_change_the_order():
    orders = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        orders.append(order(Streams(numbered([1] * 20), 2, 4, shuffle=True)))
    assert orders[0] == orders[1]


def test_length_is_that_of_the_epoch_at_hand():
    # Of two rows the order decides which one gets the long sequence, and when.
    streams = Streams(numbered([20, 1, 1, 1, 7, 3]), 2, 1, shuffle=True)
    seen = set()
    for _ in range(12):
        coming = len(streams)
        during = [len(streams) for _ in streams]
        assert during == [coming] * coming
        seen.add(coming)
    assert len(seen) > 1


# Where an epoch stands


def test_an_epoch_that_was_broken_off_is_not_taken_up_again():
    streams = Streams(numbered([5, 4]), 2, 2)
    next(iter(streams))
    assert all_same(list(streams), by_hand(numbered([5, 4]), 2, 2))


def test_a_state_saved_before_or_after_an_epoch_gives_the_whole_next_one():
    streams = Streams(numbered([1] * 30), 3, 4, shuffle=True)
    before = streams.state_dict()
    first = list(streams)
    after = streams.state_dict()
    assert (after["epoch"], after["chunk"]) == (1, 0)
    second = list(streams)
    for state, epoch in ((after, second), (before, first)):
        streams.load_state_dict(state)
        assert all_same(list(streams), epoch)


def test_a_state_saved_in_the_loop_at_the_last_chunk_has_an_empty_rest():
    streams = Streams(numbered([5, 4]), 2, 2)
    states = [streams.state_dict() for _ in streams]
    streams.load_state_dict(states[-1])
    assert list(streams) == []
    assert len(list(streams)) == 3


def test_loading_in_mid_epoch_takes_the_position_from_the_running_iterator():
    streams = Streams(numbered([6, 6]), 2, 2)
    whole = list(streams)
    running = iter(streams)
    next(running)
    state = streams.state_dict()
    streams.load_state_dict(state)
    assert all_same(list(running), whole[1:])
    assert streams.state_dict() == state
    assert all_same(list(streams), whole[1:])


def test_two_iterators_side_by_side_do_not_disturb_each_other():
    streams = Streams(numbered([6, 4, 3]), 2, 2)
    whole = by_hand(numbered([6, 4, 3]), 2, 2)
    pairs = list(zip(streams, streams, strict=True))
    assert all_same([a for a, _ in pairs], whole)
    assert all_same([b for _, b in pairs], whole)


def test_state_holds_nothing_but_ints_and_strings():
    state = Streams(numbered([6, 4, 3]), 2, 2, shuffle=True).state_dict()
    assert {type(value) for value in state.values()} == {int, str}


# What a chunk is


def test_a_chunk_unpacks_and_its_targets_are_none_unless_asked_for():
    x, y, starts, lengths = next(iter(Streams(numbered([3, 2], 4), 2, 3)))
    assert x.shape == (2, 3, 4)
    assert y is None
    assert (starts.dtype, starts.shape) == (torch.bool, (2, 3))
    assert (lengths.dtype, lengths.tolist()) == (torch.int64, [3, 2])


@pytest.mark.parametrize("targets", [None, "next"])
def test_a_chunk_moves_as_a_whole(targets):
    chunk = next(iter(Streams(numbered([3, 2]), 2, 3, targets=targets)))
    moved = chunk.to("meta")
    assert isinstance(moved, Chunk)
    assert {part.device.type for part in moved if part is not None} == {"meta"}
    assert (moved.y is None) == (targets is None)
    assert moved.mask.device.type == "meta"
    assert same(chunk.to("cpu"), chunk)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_sequences_on_a_device_give_chunks_on_that_device():
    here = list(Streams(numbered([6, 4, 3]), 2, 2, targets="next"))
    there = list(Streams([s.cuda() for s in numbered([6, 4, 3])], 2, 2, targets="next"))
    assert {part.device.type for chunk in there for part in chunk} == {"cuda"}
    assert all_same([chunk.to("cpu") for chunk in there], here)


@pytest.mark.parametrize("lengths", [[4], [4, 4]])
def test_writing_into_a_chunk_leaves_the_sequences_alone(lengths):
    sequences = numbered(lengths)
    kept = [s.clone() for s in sequences]
    next(iter(Streams(sequences, len(lengths), 4))).x.zero_()
    assert all(torch.equal(a, b) for a, b in zip(sequences, kept, strict=True))


def test_printing_tells_what_is_streamed():
    assert repr(Streams(numbered([6, 4, 3]), 2, 5, targets="next")) == (
        "Streams(3 sequences, 10 steps in all, batch=2, steps=5, targets='next')"
    )


def test_a_long_text_cut_by_chunk_is_streamed_whole():
    text = torch.arange(1, 1_000_001)
    streams = Streams(text.chunk(4), 4, 250_000)
    (chunk,) = streams
    assert torch.equal(chunk.x.flatten(), text)


# What is refused


@pytest.mark.parametrize("name", ["batch", "steps"])
@pytest.mark.parametrize("value", [0, -2, 1.5, True, None])
def test_rows_and_steps_are_counted_from_one(name, value):
    with pytest.raises(BadInput, match=rf"^{name} is {value}, but a whole number of at least 1 is needed"):
        Streams(numbered([3, 3]), **{"batch": 1, "steps": 1, name: value})


def test_a_seed_is_a_whole_number():
    with pytest.raises(BadInput, match=r"seed is 0.5, but a whole number is needed"):
        Streams(numbered([3]), 1, 1, seed=0.5)


def test_fewer_sequences_than_rows_are_refused_with_a_way_out():
    with pytest.raises(BadInput, match=r"sequences has 1 entries, but batch=8 rows.*text\.chunk\(8\).*smaller batch"):
        Streams([torch.arange(100)], 8, 5)


def test_a_sequence_without_a_next_step_is_refused():
    with pytest.raises(BadInput, match=r"sequences\[1\] has 1 step, but targets='next' needs at least 2.*len\(s\) > 1"):
        Streams(numbered([3, 1, 2]), 1, 1, targets="next")


def test_an_unknown_word_for_targets_is_refused():
    with pytest.raises(BadInput, match=r"targets is 'previous', but it can be 'next', a list parallel.*or None"):
        Streams(numbered([3]), 1, 1, targets="previous")


def test_targets_of_another_number_are_refused():
    with pytest.raises(BadInput, match=r"targets has 1 entries, but sequences has 2.*one target sequence for each"):
        Streams(numbered([3, 3]), 1, 1, targets=numbered([3]))


def test_targets_of_another_length_are_refused():
    with pytest.raises(BadInput, match=r"targets\[1\] has 2 steps, but sequences\[1\] has 3.*targets='next'"):
        Streams(numbered([3, 3]), 1, 1, targets=numbered([3, 2]))


def saved(lengths: tuple[int, ...] = (6, 4, 3), **settings: object) -> dict[str, int | str]:
    return Streams(numbered(list(lengths)), **{"batch": 2, "steps": 2, **settings}).state_dict()


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (saved(batch=3), r"batch is 3 in the state but 2 here"),
        (saved(steps=5), r"steps is 5 in the state but 2 here"),
        (saved(seed=7), r"seed is 7 in the state but 0 here"),
        (saved(shuffle=True), r"shuffle is 1 in the state but 0 here"),
        (saved(targets="next"), r"targets is 'next' in the state but 'none' here; total is 10 in the state but 13"),
        (saved(targets=numbered([6, 4, 3])), r"targets is 'given' in the state but 'none' here"),
        (saved((6, 4, 2, 1)), r"sequences is 4 in the state but 3 here; lengths"),
        (saved((6, 4, 4)), r"total is 14 in the state but 13 here"),
        (saved((4, 6, 3)), r"other data or settings: lengths is '\w+' in the state but '\w+' here.*in the same order"),
        (
            {"epoch": 0, "chunk": 1},
            r"the state lacks batch, steps, .*so it is not one that Streams.state_dict\(\) gave",
        ),
        (
            {**saved(), "chunk": 6},
            r"after chunk 6 of epoch 0, where no epoch of these sequences goes.*older checkpoint",
        ),
        ({**saved(), "chunk": -1}, r"after chunk -1 of epoch 0"),
        ({**saved(), "epoch": "1"}, r"after chunk 0 of epoch '1'"),
    ],
)
def test_a_state_of_something_else_is_refused_and_changes_nothing(state, message):
    streams = Streams(numbered([6, 4, 3]), 2, 2)
    running = iter(streams)
    next(running)
    before = streams.state_dict()
    with pytest.raises(StateMismatch, match=message):
        streams.load_state_dict(state)
    assert streams.state_dict() == before
    next(running)
    assert streams.state_dict()["chunk"] == 2


def test_a_data_loader_gives_the_chunks_as_they_are_epoch_by_epoch():
    alone, loaded = (Streams(numbered([5, 9, 3, 4]), 2, 4, targets="next", shuffle=True, seed=seed) for seed in (3, 3))
    loader = DataLoader(loaded, batch_size=None)
    assert len(loader) == len(alone)
    for _ in range(3):
        assert all_same(list(alone), [Chunk(*chunk) for chunk in loader])
    assert loaded.state_dict() == alone.state_dict()


def test_workers_of_a_data_loader_are_refused_since_each_would_have_all_streams():
    loader = DataLoader(Streams(numbered([5, 9]), 2, 4), batch_size=None, num_workers=1)
    with pytest.raises(BadInput, match=r"each worker has a copy of all of them.*num_workers=0"):
        next(iter(loader))
