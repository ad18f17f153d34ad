from importlib import import_module

import pytest
import torch

import hiddenstate as hs
from hiddenstate.errors import BadInput
from hiddenstate.recording import Trajectory

module = import_module("hiddenstate.measure.probe")  # the function has the name of its file


def labeled(rows=120, time=4, units=6, classes=3, from_step=2):
    """States that know their label from some step on."""
    labels = torch.arange(rows) % classes
    states = torch.randn(rows, time, units)
    states[:, from_step:, :classes] += 8 * torch.nn.functional.one_hot(labels, classes).unsqueeze(1)
    return states, labels


def test_what_states_know_is_found_when_they_know_it():
    states, labels = labeled()
    found = hs.measure.probe(states, labels)
    assert found.accuracy.shape == found.shuffled.shape == (4,)
    assert (found.accuracy[:2] < 0.55).all()
    assert (found.accuracy[2:] > 0.97).all()
    assert found.chance == pytest.approx(1 / 3)
    assert (found.shuffled < 0.5).all()
    assert found.rows.tolist() == [120] * 4
    assert "chance 0.333, shuffled targets" in str(found)
    assert "(5 folds)" in str(found)


def test_random_states_are_at_chance_and_so_is_the_control():
    states, labels = torch.randn(200, 6, 20), torch.arange(200) % 2
    found = hs.measure.probe(states, labels)
    assert float(found.accuracy.mean()) == pytest.approx(0.5, abs=0.08)
    assert float(found.shuffled.mean()) == pytest.approx(0.5, abs=0.06)


def test_real_targets_have_an_r2():
    states = torch.randn(100, 3, 5)
    targets = states[:, 1] @ torch.randn(5) + 2
    found = hs.measure.probe(states, targets)
    assert float(found.r2[1]) == pytest.approx(1, abs=1e-4)
    assert (found.r2[[0, 2]] < 0.3).all()
    assert found.chance == 0
    assert (found.shuffled < 0.1).all()
    assert str(found).startswith("R²")


def test_an_accuracy_is_not_called_r2():
    states, labels = labeled(30)
    with pytest.raises(AttributeError, match="targets are classes"):
        _ = hs.measure.probe(states, labels).r2


def test_targets_of_each_step():
    states = torch.randn(80, 4, 5)
    signs = states[..., 0] > 0
    found = hs.measure.probe(states, signs)
    assert (found.accuracy > 0.85).all()
    real = hs.measure.probe(states, states[..., :2])
    assert real.accuracy.tolist() == pytest.approx([1] * 4, abs=1e-4)


def test_names_booleans_and_lists_are_classes():
    states, labels = labeled(60, classes=2)
    expected = hs.measure.probe(states, labels).accuracy
    for targets in (["ab"[k] for k in labels.tolist()], labels.bool(), labels.tolist(), labels.numpy()):
        assert torch.equal(hs.measure.probe(states, targets).accuracy, expected)


def test_padding_never_counts():
    states, labels = labeled(100)
    lengths = torch.full((100,), 4)
    lengths[::2] = 2
    cut = states.clone()
    cut[::2, 2:] = float("nan")
    found = hs.measure.probe(cut, labels, lengths=lengths)
    whole = hs.measure.probe(states, labels)
    assert torch.equal(found.accuracy[:2], whole.accuracy[:2])
    assert (found.accuracy[2:] > 0.95).all()
    assert found.rows.tolist() == [100, 100, 50, 50]


def test_padding_of_targets_never_counts_either():
    states = torch.randn(60, 3, 4)
    targets = states[..., 0].clone()
    targets[30:, 2] = float("nan")
    lengths = torch.tensor([3] * 30 + [2] * 30)
    assert (hs.measure.probe(states, targets, lengths=lengths).r2 > 0.99).all()


def test_a_step_that_few_rows_reach_has_no_score():
    states, labels = labeled(40)
    lengths = torch.full((40,), 3)
    lengths[:6] = 4
    found = hs.measure.probe(states, labels, lengths=lengths)
    assert found.accuracy[3].isnan()
    assert found.accuracy[:3].isfinite().all()
    assert "at step 2" in str(found)


def test_every_track_of_a_mapping_gets_its_own():
    states, labels = labeled(60)
    tracks = {"low": Trajectory(torch.randn(60, 4, 3)), "high": Trajectory(states)}
    found = hs.measure.probe(tracks, labels)
    assert list(found) == ["low", "high"]
    assert found["high"].accuracy[-1] > 0.95 > found["low"].accuracy[-1]


def test_a_recording_is_such_a_mapping():
    model = torch.nn.LSTM(3, 8, num_layers=2, batch_first=True)
    x = torch.randn(60, 5, 3)
    with hs.record(model) as rec:
        model(x)
    found = hs.measure.probe(rec, x[:, -1, 0])
    assert set(found) == {"l0", "l1"}
    assert found["l0"].r2[-1] > 0.7


def test_the_seed_decides():
    states, labels = labeled(50)
    first, second = hs.measure.probe(states, labels, seed=1), hs.measure.probe(states, labels, seed=1)
    assert torch.equal(first.shuffled, second.shuffled)
    assert not torch.equal(first.shuffled, hs.measure.probe(states, labels, seed=2).shuffled)


def test_the_random_stream_is_left_alone():
    states, labels = labeled(30)
    before = torch.get_rng_state()
    hs.measure.probe(states, labels)
    assert torch.equal(torch.get_rng_state(), before)


def test_every_fold_gets_its_share_of_each_class():
    classes = torch.nn.functional.one_hot(torch.tensor([0] * 20 + [1] * 10)).double().unsqueeze(0)
    valid = torch.ones(2, 30, dtype=torch.bool)
    valid[1, :10] = False
    generator = torch.Generator().manual_seed(0)
    parts = module._folds(classes, valid, 5, generator)
    for part in range(5):
        assert classes[0, parts[0] == part].sum(0).tolist() == [4, 2]
        assert classes[0, parts[1] == part].sum(0).tolist() == [2, 2]
    assert (parts[1, :10] == -1).all()
    order = module._shuffled(parts, generator)
    assert torch.equal(parts.gather(1, order), parts)  # within folds
    assert torch.equal(order.sort(dim=1).values, torch.arange(30).expand(2, 30))
    assert not torch.equal(order[0], torch.arange(30))


def test_the_control_is_at_chance_also_for_targets_of_each_step():
    states, targets = torch.randn(200, 10, 20), torch.rand(200, 10) < 0.5
    found = hs.measure.probe(states, targets)
    assert float(found.shuffled.mean()) == pytest.approx(0.5, abs=0.03)
    assert float(found.accuracy.mean()) == pytest.approx(0.5, abs=0.05)


def test_pieces_equal_the_whole_and_interrupting_keeps_them(monkeypatch):
    states, labels = labeled(60, time=6)
    whole = hs.measure.probe(states, labels)
    monkeypatch.setattr(module, "_CHUNK", 60 * 6 * 2)
    pieces = hs.measure.probe(states, labels)
    assert torch.equal(pieces.accuracy, whole.accuracy)

    def tracked(items, label, total):
        yield from list(items)[:2]
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "tracked", tracked)
    found = hs.measure.probe(states, labels)
    assert found.interrupted
    assert torch.equal(found.accuracy[:4], whole.accuracy[:4])
    assert found.accuracy[4:].isnan().all()
    assert "later steps are missing" in str(found)


@pytest.mark.parametrize(
    ("targets", "options", "message"),
    [
        (torch.arange(5), {}, r"10 rows, but targets have shape \(5,\)"),
        (torch.zeros(10, 7, dtype=torch.int64), {}, r"shape \(10, 7\), but \(10,\) or \(10, 3\) is needed"),
        (torch.zeros(10, 3, 2, 2), {}, r"shape \(10, 3, 2, 2\)"),
        (torch.full((10,), float("nan")), {}, "targets hold NaN"),
        (torch.arange(10), {"folds": 11}, "10 rows cannot be split into 11 folds: from 2 to 10"),
        (torch.arange(10), {"folds": 1}, "into 1 folds"),
    ],
)
def test_what_cannot_be_probed_is_refused(targets, options, message):
    with pytest.raises(BadInput, match=message):
        hs.measure.probe(torch.randn(10, 3, 2), targets, **options)
