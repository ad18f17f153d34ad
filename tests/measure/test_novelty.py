import csv
import importlib.util
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import hiddenstate as hs
from hiddenstate.errors import BadInput
from hiddenstate.recording import Trajectory

METHODS = ("mahalanobis", "nearest")


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- the pattern: a sensor that misbehaves for a moment ---


def sensor(steps, seed):
    return torch.sin(torch.arange(steps) / 5).view(1, -1, 1) + 0.05 * noise(1, steps, 1, seed=seed)


@pytest.mark.parametrize("method", METHODS)
def test_a_fault_that_has_passed_when_the_sequence_ends_is_found_where_it_was(method):
    model = nn.GRU(1, 16, batch_first=True)
    x = sensor(300, seed=1)
    x[0, 100:106] += 2.0
    with torch.no_grad(), hs.record(model) as rec:
        model(sensor(2000, seed=2))
        model(x)
    seen, new = rec.runs("l0")
    found = hs.measure.novelty(new, seen, method=method, warmup=20)
    truth = torch.zeros(1, 300, dtype=torch.bool)
    truth[0, 100:106] = True
    assert found.auc(truth) > 0.95
    assert found.scores[0, :20].isnan().all()  # still under the spell of the initial state, as those of the seen rows
    assert 100 <= int(found.scores.nan_to_num().argmax()) <= 110
    assert float(found.flagged.float().mean()) < 0.15
    assert not found.flagged[0, -1]  # the final state knows nothing of it


@pytest.mark.parametrize("method", METHODS)
def test_the_same_with_states_collected_by_hand(method):
    cell, states, h = nn.GRUCell(1, 8), [], torch.zeros(1, 8)
    x = sensor(600, seed=3)[0]
    x[500:505] = -3.0
    with torch.no_grad():
        for step in x:
            h = cell(step.unsqueeze(0), h)
            states.append(h[0])
    states = torch.stack(states).unsqueeze(0).numpy()  # (1, time, unit)
    found = hs.measure.novelty(states[:, 400:], states[:, 20:400], method=method)
    assert 100 <= int(found.scores.argmax()) <= 107


def test_rows_of_a_batch_are_judged_by_their_strangest_step():
    seen, new = noise(30, 40, 6), noise(10, 40, 6, seed=1)
    new[3, 17] += 12
    new[8, 5] -= 12
    truth = torch.zeros(10, dtype=torch.bool)
    truth[[3, 8]] = True
    assert hs.measure.novelty(new, seen).auc(truth) == 1


@pytest.mark.skipif(importlib.util.find_spec("aeon") is None, reason="the series comes with aeon")
def test_on_a_real_heartbeat_the_anomaly_is_found():
    (place,) = importlib.util.find_spec("aeon").submodule_search_locations
    file = Path(place, "datasets", "data", "KDD-TSAD_135", "135_UCR_Anomaly_InternalBleeding16_TEST.csv")
    rows = list(csv.reader(file.read_text().splitlines()))[1:]
    x = torch.tensor([[float(row[1])] for row in rows]).unsqueeze(0)
    truth = torch.tensor([[row[-1] == "1" for row in rows]])
    x = (x - x[:, :1200].mean()) / x[:, :1200].std()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.GRU(1, 32, batch_first=True)  # not even trained: its states follow the signal all the same
    with torch.no_grad():
        states = model(x)[0]
    found = hs.measure.novelty(states[:, 1200:], states[:, :1200], warmup=(64, 0))
    assert found.auc(truth[:, 1200:]) > 0.9


# --- laws ---


@given(seed=st.integers(0, 500), size=st.floats(0.01, 100), shift=st.floats(-10, 10))
def test_units_and_their_origin_do_not_matter(seed, size, shift):
    seen, new = noise(4, 30, 3, seed=seed).double(), noise(2, 5, 3, seed=seed + 1).double()
    for method in METHODS:
        plain = hs.measure.novelty(new, seen, method=method)
        moved = hs.measure.novelty(new * size + shift, seen * size + shift, method=method)
        torch.testing.assert_close(moved.scores, plain.scores, rtol=1e-6, atol=1e-6)


def test_mahalanobis_is_the_textbooks():
    seen, new = noise(1, 200, 3).double(), noise(1, 4, 3, seed=9).double()
    apart = new[0] - seen[0].mean(0)
    expected = (apart @ torch.linalg.inv(seen[0].T.cov()) * apart).sum(1).sqrt()
    torch.testing.assert_close(hs.measure.novelty(new, seen).scores[0], expected, rtol=1e-3, atol=1e-3)


def test_nearest_sees_a_hole_in_the_cloud():
    turn = torch.arange(400) * 0.1
    ring = torch.stack([turn.cos(), turn.sin()], dim=1).unsqueeze(0)
    middle = torch.zeros(1, 1, 2)
    assert bool(hs.measure.novelty(middle, ring, method="nearest").flagged)
    assert not bool(hs.measure.novelty(middle, ring).flagged)  # the very center of the cloud


@given(seed=st.integers(0, 500), ties=st.booleans())
def test_auc_is_the_share_of_pairs_in_the_right_order(seed, ties):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(2, 9, generator=generator, dtype=torch.float64)
    scores = (scores * 4).floor() if ties else scores
    truth = torch.rand(2, 9, generator=generator) < 0.4
    found = hs.measure.Novelty(scores, 0.0, 0.9, scores.flatten().sort().values, "nearest").auc(truth)
    pairs = [(a > b) + (a == b) / 2 for a in scores[truth].tolist() for b in scores[~truth].tolist()]
    assert found == pytest.approx(sum(pairs) / len(pairs) if pairs else float("nan"), nan_ok=True)


@pytest.mark.parametrize("method", METHODS)
def test_about_as_many_normal_steps_are_flagged_as_were_asked_for(method):
    found = hs.measure.novelty(noise(50, 40, 5, seed=1), noise(50, 40, 5), method=method, quantile=0.9)
    assert float(found.flagged.float().mean()) == pytest.approx(0.1, abs=0.03)
    assert float(found.rarity.mean()) == pytest.approx(0.5, abs=0.06)


def test_padding_has_no_score():
    h = noise(2, 6, 3)
    h[1, 2:] = float("nan")
    found = hs.measure.novelty(Trajectory(h, torch.tensor([6, 2])), noise(5, 9, 3))
    assert found.scores.isnan().tolist() == [[False] * 6, [False] * 2 + [True] * 4]
    assert found.rarity.isnan().equal(found.scores.isnan())
    assert not found.flagged[1, 2:].any()


def test_many_seen_runs_are_as_one():
    seen, new = noise(1, 90, 3), noise(1, 5, 3, seed=2)
    torch.testing.assert_close(
        hs.measure.novelty(new, [seen[:, :20], seen[:, 20:]]).scores, hs.measure.novelty(new, seen).scores
    )


def test_the_text_says_where_and_by_what():
    new = torch.zeros(2, 4, 3)
    new[1, 2] = 30.0
    text = str(hs.measure.novelty(new, noise(10, 20, 3)))
    assert "12.5% of 8 steps are stranger than 0.99 of 200 seen states (Mahalanobis distance above" in text
    assert "the strangest is step 2 of row 1" in text


@pytest.mark.parametrize("method", METHODS)
def test_seen_states_that_never_move_make_every_other_state_strange(method):
    found = hs.measure.novelty(torch.tensor([[[1.0, 1.0], [1.5, 1.0]]]), torch.ones(1, 20, 2), method=method)
    assert found.flagged.tolist() == [[False, True]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda h: hs.measure.novelty(h, h, method="forest"), "mahalanobis or nearest, but is 'forest'"),
        (lambda h: hs.measure.novelty(h, h, quantile=1.0), "between 0 and 1, but is 1.0"),
        (lambda h: hs.measure.novelty(h, h, warmup=19), "only 2 seen states are left, but 10 or more"),
        (lambda h: hs.measure.novelty(h, h[..., :2]), "the states have 3 units, but the seen ones 2"),
        (lambda h: hs.measure.novelty(h, h).auc(torch.zeros(3)), r"truth has shape \(3,\), but \(2, 20\) is needed"),
        (lambda h: hs.measure.novelty(h * torch.inf, h), "at step 0 of row 0"),
    ],
)
def test_what_cannot_be_judged_is_refused(call, message):
    with pytest.raises(BadInput, match=message):
        call(noise(2, 20, 3))


def test_seen_and_judged_rows_may_warm_up_apart():
    h = noise(2, 40, 3, seed=5)
    both, seen = hs.measure.novelty(h, h, warmup=10), hs.measure.novelty(h, h, warmup=(10, 0))
    assert both.scores[:, :10].isnan().all()
    assert not seen.scores.isnan().any()
    torch.testing.assert_close(both.scores[:, 10:], seen.scores[:, 10:])
    with pytest.raises(BadInput, match="warmup is -1"):
        hs.measure.novelty(h, h, warmup=-1)
    with pytest.raises(BadInput, match="the longest judged row has 40 steps, and 40 are left out"):
        hs.measure.novelty(h, h, warmup=(0, 40))
