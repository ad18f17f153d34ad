"""What a loop starts from, where that is made and read, and why nothing else can be put there."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hiddenstate.cells.behavior import LoopStart, Overriding, find

X = torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """A loop with a start and a step of the test's own."""

    def __init__(self) -> None:
        super().__init__()
        self.h0 = nn.Parameter(torch.zeros(1, 3))
        self.register_buffer("resting", torch.ones(2, 3))

    def start(self, x: Tensor) -> Tensor | None:
        return x.new_zeros(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        h, out = self.start(x), []
        for frame in x.unbind(1):
            h = torch.tanh(0.5 * h + frame)
            out.append(h)
        return torch.stack(out, 1)


def start_of(model: nn.Module, *args: Tensor) -> LoopStart:
    (found,) = [start for each, start in find(model, args or (X,)).starts.items() if each.kind in ("loop", "layer")]
    return found


def test_a_start_is_known_by_where_it_is_made_and_who_reads_it():
    (part,) = start_of(Net()).parts
    assert (part.part, part.number, part.label) == ("h", 0, "")
    assert part.site is not None
    assert len(part.readers) == 1
    assert part.end is not None


def test_a_parameter_or_buffer_is_known_by_its_name():
    class Learned(Net):
        def start(self, x: Tensor) -> Tensor:
            return self.h0

    class Resting(Net):
        def start(self, x: Tensor) -> Tensor:
            return self.resting.clone()

    (learned,), (resting,) = start_of(Learned()).parts, start_of(Resting()).parts
    assert (learned.label, learned.site) == ("h0", None)
    assert (resting.label, resting.kept_in) == ("", "resting")


def test_a_start_that_is_written_is_replaced_where_it_is_made():
    class InPlace(Net):
        def forward(self, x: Tensor) -> Tensor:
            h, out = torch.zeros(2, 3), []
            for frame in x.unbind(1):
                h.mul_(0.5).add_(frame)
                out.append(h.clone())
            return torch.stack(out, 1)

    (part,) = start_of(InPlace()).parts
    assert part.readers == frozenset()


def test_parts_that_share_a_start_are_told_apart_by_who_reads_it():
    class Shared(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = c = torch.zeros(2, 3)
            for frame in x.unbind(1):
                c = 0.9 * c + frame
                h = torch.tanh(c - h)
            return h

    one, other = start_of(Shared()).parts
    assert {one.part, other.part} == {"h", "c"}
    assert one.site == other.site
    assert not one.readers & other.readers


def test_what_cannot_be_replaced_says_why():
    class FromNothing(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = None
            for frame in x.unbind(1):
                h = frame.tanh() if h is None else torch.tanh(0.5 * h + frame)
            return h

    class HandedIn(Net):
        def forward(self, x: Tensor, h: Tensor) -> Tensor:
            for frame in x.unbind(1):
                h = torch.tanh(0.5 * h + frame)
            return h

    assert "starts from nothing" in start_of(FromNothing()).why_not
    assert "handed in by the caller" in start_of(HandedIn(), X, torch.zeros(2, 3)).why_not


def test_an_output_that_is_written_step_by_step_is_no_part():
    class Collects(Net):
        def forward(self, x: Tensor) -> Tensor:
            h, out = torch.zeros(2, 3), torch.zeros(6, 2, 3)
            for t in range(x.shape[1]):
                h = torch.tanh(0.5 * h + x[:, t])
                out = out.index_copy(0, torch.tensor([t]), h[None])
            return out

    assert [part.part for part in start_of(Collects()).parts] == ["h"]


def test_another_start_is_read_in_its_place_once_the_model_runs():
    model = Net()
    start, other = start_of(model), torch.full((2, 3), 0.7)
    mode = Overriding(model, start.parts, lambda part, own: other, ends=True)
    with torch.no_grad():
        out = mode.beneath(lambda: model(X), lambda run: run(), tapped=False)
        h = other
        for t in range(6):
            h = torch.tanh(0.5 * h + X[:, t])
            torch.testing.assert_close(out[:, t], h)
    (part,) = start.parts
    assert torch.equal(mode.met[part], torch.zeros(2, 3))
    assert mode.read == {part}
    torch.testing.assert_close(mode.ends[part], h)
    with torch.no_grad():
        assert not torch.equal(model(X), out), "only while it is on"
