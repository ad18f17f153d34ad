import pytest
import torch
from torch import nn

import hiddenstate as hs
from hiddenstate.errors import BadInput
from hiddenstate.pool import Attention, Last, Max, Mean, Taps, compare_heads
from tests.support.untouched import untouched


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def planted(where):
    """States that know their class at one place only."""
    h, y = noise(120, 12, 5), torch.arange(120) % 2
    sign = (2.0 * y - 1).unsqueeze(1)
    if where == "last":
        h[:, -1, 0] += 6 * sign[:, 0]
    elif where == "tap":
        h[:, 3, 0] += 6 * sign[:, 0]
    elif where == "all":
        h[:, :, 0] += 1.5 * sign
    else:  # at a step of its own in each row, marked by another unit
        rows, steps = torch.arange(120), torch.randint(12, (120,), generator=torch.Generator().manual_seed(2))
        h[rows, steps, 1] = 12.0
        h[rows, steps, 0] += 6 * sign[:, 0]
    return h, y


@pytest.mark.parametrize(
    ("where", "winners"),
    [("last", {"last", "taps"}), ("tap", {"taps"}), ("all", {"mean", "attention"}), ("marked", {"attention"})],
)
def test_the_head_that_looks_where_the_class_is_wins(where, winners):
    h, y = planted(where)
    found = compare_heads(h, y)
    assert set(found.scores) == {"last", "mean", "max", "attention", "taps"}
    assert found.best in winners
    assert float(found.scores[found.best].mean()) > 0.9


def test_of_states_that_know_nothing_no_head_learns():
    found = compare_heads(noise(200, 6, 4), torch.arange(200) % 2)
    assert all(0.3 < float(scores.mean()) < 0.7 for scores in found.scores.values())
    assert found.chance == 0.5


def test_a_trajectory_and_strings_will_do_and_padding_never_counts():
    model, x = nn.GRU(2, 4, batch_first=True), noise(60, 8, 2)
    x[:, :, 0] += torch.where(torch.arange(60) % 2 == 0, 1.0, -1.0).unsqueeze(1)
    lengths = torch.arange(60) % 6 + 3
    with hs.record(model) as rec:
        model(nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
    names = ["even" if row % 2 == 0 else "odd" for row in range(60)]
    found = compare_heads(rec["l0"], names)
    spoiled = rec["l0"].h.clone()
    for row, length in enumerate(lengths):
        spoiled[row, length:] = float("nan")
    again = compare_heads(spoiled, names, lengths=lengths)
    for name, scores in found.scores.items():
        torch.testing.assert_close(again.scores[name], scores)
    assert float(found.scores["mean"].mean()) > 0.8


def test_real_targets_are_regressed():
    h = noise(100, 6, 3)
    found = compare_heads(h, h[:, -1].sum(1), {"last": Last(), "max": Max()})
    assert found.best == "last"
    assert float(found.scores["last"].mean()) > 0.95
    assert str(found).startswith("R² on unseen rows, 5 folds; chance 0.000")


def test_the_text_ranks_them_with_how_far_they_are_behind():
    lines = str(compare_heads(*planted("last"), {"mean": Mean(), "last": Last()})).splitlines()
    assert lines[0] == "accuracy on unseen rows, 5 folds; chance 0.500"
    assert lines[1].startswith("  last")
    assert lines[2].endswith("behind")


def test_heads_of_the_user_and_the_world_come_back_untouched():
    head = Attention(5)
    h, y = planted("all")
    with untouched(head):
        compare_heads(h, y, {"mine": head})
        with torch.no_grad():
            compare_heads(h, y, {"mine": head, "taps": Taps([0, 3])})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"targets": [0, 1]}, r"targets have shape \(2,\), but there are 8 rows"),
        ({"targets": [1] * 8}, "all targets are of one class"),
        ({"targets": torch.full((8,), float("nan"))}, "NaN or Inf"),
        ({"targets": [0, 1] * 4, "folds": 5}, "8 rows cannot be split into 5 folds: from 2 to 4"),
        ({"targets": [0, 1] * 4, "heads": {}, "folds": 2}, "no head to compare"),
    ],
)
def test_what_cannot_be_compared_is_refused(options, message):
    with pytest.raises(BadInput, match=message):
        compare_heads(noise(8, 4, 2), **options)


def test_arrays_are_compared_as_tensors_are():
    h, label = torch.randn(40, 6, 3, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 2
    h[:, 2, 0] += 8.0 * label
    heads = {"last": Last(), "step 2": Taps([2])}
    found = compare_heads(h.numpy(), label.numpy(), heads)
    assert str(found) == str(compare_heads(h, label, heads))
    assert found.best == "step 2"
