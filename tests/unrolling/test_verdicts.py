"""Which kernel is faster: only what is beyond doubt is taken, and it is kept for later processes."""

import itertools
import stat

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import hiddenstate as hs
from hiddenstate.cells import Call
from hiddenstate.unrolling import verdicts
from hiddenstate.unrolling.cache_folder import cache_folder
from hiddenstate.unrolling.verdicts import Setting, Verdict, Verdicts, compare

FASTER = Verdict(ours=True, ratio=0.5, low=0.4, high=0.6)


def setting(rows=3, steps=9, **options):
    layer = nn.GRU(2, 4, **options)
    return Setting.of(Call(hs.layers(layer)[0], (torch.randn(steps, rows, 2),)), layer)


def timed(monkeypatch, theirs, ours):
    """Let the clock say so: for each way, its times in order."""
    times = iter(itertools.chain.from_iterable(zip(itertools.cycle(theirs), itertools.cycle(ours), strict=True)))
    monkeypatch.setattr(verdicts, "seconds_of", lambda way: next(times))
    layer = nn.GRU(2, 4)
    return compare(layer, layer, (torch.randn(5, 1, 2),), layer)


@given(ratio=st.floats(0.1, 10), noise=st.floats(0, 0.3))
def test_ours_is_taken_only_where_it_is_faster_beyond_doubt(ratio, noise):
    with pytest.MonkeyPatch.context() as patch:
        found = timed(patch, [1.0], [ratio * (1 + noise * sign) for sign in (1, -1, 1, -1, 0, 1, -1, 1, -1)])
    assert found.low <= found.ratio <= found.high
    assert found.ours == (found.high < 1)
    if noise == 0:
        assert found.ratio == pytest.approx(ratio, rel=1e-3)


def test_ours_has_to_win_with_what_it_takes_to_hear_the_call(monkeypatch):
    assert not timed(monkeypatch, [100e-6], [70e-6]).ours
    assert timed(monkeypatch, [100e-6], [50e-6]).ratio == pytest.approx(0.9)


def test_within_noise_torchs_own_stays(monkeypatch):
    assert not timed(monkeypatch, [1.0], [0.8, 1.1, 0.9, 1.05, 0.7, 1.2, 0.95, 1.0, 1.1]).ours


def test_long_calls_are_made_fewer_times(monkeypatch):
    made = []
    monkeypatch.setattr(verdicts, "seconds_of", lambda way: made.append(1) or 2.0)
    layer = nn.GRU(2, 4)
    assert not compare(layer, layer, (torch.randn(5, 1, 2),), layer).ours
    assert len(made) == 2 * (1 + 4)


def test_trials_leave_gradients_and_random_streams_alone():
    layer, x = nn.GRU(2, 4, num_layers=2, dropout=0.5), torch.randn(5, 3, 2, requires_grad=True)
    before = torch.get_rng_state()
    compare(layer, layer, (x, torch.zeros(2, 3, 4)), layer)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(leaf.grad is None for leaf in (x, *layer.parameters()))


@given(rows=st.integers(1, 300), steps=st.integers(1, 300))
def test_sizes_are_decided_up_to_the_next_power_of_two(rows, steps):
    found = setting(rows, steps)
    assert rows <= found.rows < 2 * rows
    assert steps <= found.steps < 2 * steps
    assert setting(found.rows, found.steps) == found


def test_what_changes_the_work_changes_the_setting():
    layer = nn.GRU(2, 4)
    x = torch.randn(9, 3, 2)
    packed = Setting.of(Call(hs.layers(layer)[0], (pack_sequence([x[:, 0], x[:, 1]]),)), layer)
    with torch.no_grad():
        forward = setting()
    different = [setting(), setting(bidirectional=True), setting(num_layers=2), setting(bias=False), packed, forward]
    assert len(set(different)) == len(different)
    assert str(setting()) == "up to 4 rows of 16 steps, forward and backward"
    assert str(packed) == "up to 2 rows of 16 steps, packed, forward and backward"
    assert str(forward) == "up to 4 rows of 16 steps, forward"


def test_a_verdict_outlives_its_process_in_a_file_of_its_owner(tmp_path):
    path = tmp_path / "cache" / "verdicts.json"
    Verdicts(path).put(setting(), FASTER)
    Verdicts(path).put(setting(rows=40), Verdict(ours=False, ratio=2.0, low=1.5, high=2.5))
    later = Verdicts(path)
    assert later.get(setting()) == FASTER
    assert not later.get(setting(rows=40)).ours
    assert later.get(setting(rows=400)) is None
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_reason_is_not_kept_for_later_processes(tmp_path):
    known = Verdicts(tmp_path / "verdicts.json")
    known.put(setting(), Verdict(ours=False, because="there is no compiler"))
    assert str(known.get(setting())) == "because there is no compiler"
    assert Verdicts(tmp_path / "verdicts.json").get(setting()) is None


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"a": 1}', '{"a": {"ours": true, "later": 1}}'])
def test_a_damaged_file_is_as_good_as_none(tmp_path, content):
    path = tmp_path / "verdicts.json"
    path.write_text(content, encoding="utf-8")
    known = Verdicts(path)
    assert known.get(setting()) is None
    known.put(setting(), FASTER)
    assert Verdicts(path).get(setting()) == FASTER


def test_a_folder_that_cannot_be_made_costs_only_the_memory_of_later_processes(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    known = Verdicts(tmp_path / "file" / "verdicts.json")
    assert known.put(setting(), FASTER) is FASTER
    assert known.get(setting()) is FASTER


def test_the_folder_for_caches_is_the_platforms_or_the_one_that_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("HIDDENSTATE_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("HIDDENSTATE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert cache_folder() == tmp_path / "x" / "hiddenstate"


def test_a_packed_sequence_is_tried_without_its_own_graph():
    layer, rows = nn.GRU(2, 4), [torch.randn(5, 2, requires_grad=True), torch.randn(3, 2, requires_grad=True)]
    packed = pack_sequence(rows)
    seen = []

    def way(x):
        seen.append((x.data.is_leaf, x.data.requires_grad, torch.equal(x.data, packed.data)))
        return layer(x)

    compare(way, way, (packed,), layer)
    assert set(seen) == {(True, True, True)}
    layer(packed)[0].data.sum().backward()  # the user's own graph is whole
    assert all(row.grad is not None for row in rows)


def test_what_was_left_open_is_not_kept_for_later_processes_and_measured_again(tmp_path):
    known = Verdicts(tmp_path / "verdicts.json")
    assert known.due(setting())
    known.put(setting(), Verdict(ours=False, ratio=0.5, low=0.2, high=1.8))
    assert Verdicts(tmp_path / "verdicts.json").get(setting()) is None
    assert [call for call in range(1, 1000) if known.due(setting())] == [50, 500]
    known.put(setting(), FASTER)
    assert not any(known.due(setting()) for _ in range(1000))
    assert Verdicts(tmp_path / "verdicts.json").get(setting()) == FASTER


def test_without_a_home_verdicts_are_kept_in_memory(monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(verdicts, "cache_folder", homeless)
    monkeypatch.setattr(Verdicts, "_shared", None)
    shared = Verdicts.shared()
    assert shared.put(setting(), FASTER) is shared.get(setting())
