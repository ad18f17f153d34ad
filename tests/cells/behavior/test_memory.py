"""Which value a tensor holds, against an oracle that marks every number with who wrote it last."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hiddenstate.cells.behavior.memory import TracedMemory, Value, Write, box_of, storage_of, version_of


@st.composite
def views(draw, count: int = 1):
    """A tensor of up to three axes, and views on it: parts, turned or with an axis more or less."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    base = torch.zeros(shape)
    found = []
    for _ in range(count):
        index = []
        for size in shape:
            start = draw(st.integers(0, size - 1))
            index.append(start if draw(st.booleans()) else slice(start, draw(st.integers(start + 1, size))))
        view = base[tuple(index)]
        if view.dim() > 1 and draw(st.booleans()):
            view = view.transpose(0, 1)
        found.append(view.unsqueeze(0) if draw(st.booleans()) else view)
    return base, found


def marked(base: Tensor, view: Tensor) -> Tensor:
    """Where in `base` the numbers of a view on it lie."""
    before = base.clone()
    base.zero_()
    view.fill_(1)
    found = base.bool()
    base.copy_(before)
    return found


def known(base: Tensor) -> tuple[TracedMemory, Value]:
    memory = TracedMemory()
    first = memory.new(-1, "argument", base)
    memory.hold(base, first)
    return memory, first


@given(views())
def test_the_box_of_a_view_holds_its_numbers_and_no_others(drawn):
    base, (view,) = drawn
    memory, _ = known(base)
    box = box_of(view, memory.store_of(base))
    assert box is not None
    inside = torch.zeros_like(base, dtype=torch.bool)
    inside[tuple(slice(start, end) for start, end in box)] = True
    assert torch.equal(inside, marked(base, view))


def test_what_is_no_box_may_be_anywhere():
    base = torch.zeros(4, 4)
    memory, _ = known(base)
    store = memory.store_of(base)
    assert box_of(base.diagonal(), store) is None
    assert box_of(base.flatten()[1:9], store) is None
    assert box_of(base.flatten()[::2], store) is None


@given(views(count=7))
def test_a_view_is_made_of_whoever_wrote_its_numbers_last(drawn):
    base, (*targets, seen) = drawn
    memory, first = known(base)
    store = memory.store_of(base)
    last = torch.full(base.shape, first.number)
    for op, target in enumerate(targets):
        value = memory.new(op, "made", target)
        store.writes.append(Write(box_of(target, store), value))
        last[marked(base, target)] = value.number
    sources = memory.sources(seen)
    assert sources is not None
    writers = set(last[marked(base, seen)].tolist())
    assert writers <= {value.number for value in sources}
    written = [value.number for value in sources if value is not first]
    assert written == sorted(written, reverse=True)  # the newest first
    over = [v.number for v in memory.values[1:] if bool((marked(base, v.tensor) >= marked(base, seen)).all())]
    assert not over or min(value.number for value in sources) == max(over)  # what lies under it counts no more
    assert all(bool((marked(base, value.tensor) & marked(base, seen)).any()) for value in sources if value is not first)


def test_nothing_is_a_source_before_anything_was_written():
    memory, _ = known(torch.zeros(3))
    assert memory.sources(memory.values[0].tensor) is None
    assert memory.sources(torch.zeros(3)) is None


@given(views(count=2))
def test_a_value_is_given_as_it_was_or_not_at_all(drawn):
    base, (seen, target) = drawn
    base.copy_(torch.arange(base.numel()).reshape(base.shape))
    memory, first = known(base)
    value = memory.new(0, "made", seen)
    memory.hold(seen, value)
    was = seen.clone()
    store = memory.store_of(base)
    store.writes.append(Write(box_of(target, store), memory.new(1, "made", target)))
    target.sub_(100)
    found = value.data()
    if bool((marked(base, seen) & marked(base, target)).any()):
        assert found is None
        first.copy = base.detach().clone()  # as the trace keeps it before a write
        first.copy[marked(base, target)] += 100
        found = value.data()
    torch.testing.assert_close(found, was)


def test_a_kept_value_outlives_all_writes_and_copies_are_kept_within_a_budget(monkeypatch):
    monkeypatch.setattr("hiddenstate.cells.behavior.memory._BUDGET", 16)
    memory, value = known(torch.ones(4))
    memory.keep(value, value.tensor)
    value.tensor.zero_()
    torch.testing.assert_close(value.data(), torch.ones(4))
    other = memory.new(0, "made", torch.ones(1))
    memory.keep(other, other.tensor)  # one number too many
    assert other.copy is None


def test_a_value_comes_with_its_graph_where_the_tensor_still_has_it():
    leaf = torch.ones(2, requires_grad=True)
    made = leaf * 2
    memory, value = known(made)
    assert value.alive() is made
    store = memory.store_of(made)
    memory.keep(value, made)
    store.writes.append(Write(box_of(made, store), memory.new(0, "made", made)))
    assert value.alive().grad_fn is None


def test_tensors_without_a_storage_or_a_count_of_writes_are_no_trouble():
    sparse = torch.eye(3).to_sparse()
    assert storage_of(sparse) == 0
    memory, value = known(sparse)
    assert memory.store_of(sparse) is None
    memory.keep(value, sparse)
    assert value.copy is None
    with torch.inference_mode():
        assert version_of(torch.ones(1)) == -1
    assert version_of(torch.ones(1).add_(1)) == 1
