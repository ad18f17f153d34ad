"""A recording reads well: names, tables, several runs."""

import pytest
import torch
from torch import nn

import hiddenstate as hs
from hiddenstate import pool, regularize
from hiddenstate.errors import BadInput


def model():
    made = nn.ModuleDict({"encoder": nn.ModuleDict({"lstm": nn.LSTM(3, 4)}), "stack": nn.GRU(4, 5, num_layers=2)})
    made.forward = lambda x: made["stack"](made["encoder"]["lstm"](x)[0])[0]
    return made


def recorded(calls=1, **options):
    made = model()
    with hs.record(made, **options) as rec:
        for _ in range(calls):
            made(torch.randn(6, 2, 3))
    return rec


def test_printing_it_is_a_table():
    rec = recorded(2, gates=True)
    lines = str(rec).splitlines()
    assert lines[0].split() == ["track", "kind", "run", "batch", "time", "unit", "kept", "bytes"]
    assert lines[1].split() == [
        *("encoder.lstm.l0", "lstm", "1", "of", "2", "2", "6", "4"),
        *("h,", "c,", "input,", "forget,", "candidate,", "output", "1.15", "KB"),
    ]
    assert len(lines) == 7
    assert repr(rec) == str(rec)
    assert "… 9 runs" in str(recorded(9))


def test_an_empty_one_says_what_to_do():
    rec = hs.record(model())
    assert str(rec) == "nothing recorded yet: call the model inside the block"
    with pytest.raises(hs.errors.UnknownTrack, match=r"'stack.l0' has not been run; those that have: none yet: call"):
        rec["stack.l0"]


def test_it_is_a_mapping():
    rec = recorded()
    assert list(rec) == ["encoder.lstm.l0", "stack.l0", "stack.l1"]
    assert len(rec) == 3
    assert "stack.l0" in rec
    assert "stack" not in rec
    assert "encoder.lstm" in rec
    assert 3 not in rec
    assert rec.get("nope") is None
    assert {track for track, run in rec.items() if run.c is not None} == {"encoder.lstm.l0"}
    assert rec.nbytes == sum(run.nbytes for run in rec.values())


def test_a_layer_of_one_track_answers_to_its_own_name():
    rec = recorded()
    assert rec["encoder.lstm"].track == "encoder.lstm.l0"
    with pytest.raises(hs.errors.UnknownTrack, match=r"'stack' is a layer of 2 tracks: name one of them"):
        rec["stack"]


def test_an_unknown_name_is_a_key_error_that_lists_the_tracks():
    with pytest.raises(KeyError) as caught:
        recorded()["decoder"]
    assert str(caught.value) == ("no track is named 'decoder'. The tracks are: encoder.lstm.l0, stack.l0, stack.l1.")


def test_several_runs_are_listed_and_never_mixed():
    rec = recorded(3)
    assert len(rec.runs("encoder.lstm")) == 3
    with pytest.raises(hs.errors.SeveralRuns, match=r"'stack.l1' has 3 runs: take one with rec.runs\('stack.l1'\)"):
        rec["stack.l1"]


def test_numpy_follows_the_runs():
    assert recorded().numpy()["stack.l1"]["h"].shape == (2, 6, 5)
    assert [arrays["h"].shape for arrays in recorded(2).numpy()["stack.l1"]] == [(2, 6, 5)] * 2


@pytest.mark.parametrize("use", [pool.Mean(), regularize.activity, regularize.temporal])
def test_a_recording_of_one_track_stands_for_its_trajectory(use):
    gru = torch.nn.GRU(2, 4, num_layers=2, batch_first=True)
    with hs.record(gru, tracks="l1", graph=True) as rec:
        gru(torch.randn(3, 5, 2))
    assert torch.equal(use(rec), use(rec["l1"]))
    with pytest.raises(BadInput, match=r"by track \(l0, l1\), but this is about one: rec\['l0'\]"):
        use({"l0": rec["l1"], "l1": rec["l1"]})
