"""Recordings on disk: streamed in bounded memory, safe from kills, honest about full disks and damage."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

import hiddenstate as hs
from hiddenstate.recording import folder
from hiddenstate.recording.runs import OpenRuns


def run(model, x, path, calls=3, **options):
    """Record some calls on disk and in memory at once."""
    with hs.record(model, to=path, **options) as rec, hs.record(model, **options) as memory:
        for _ in range(calls):
            model(x)
    return rec, memory


def same(a, b):
    assert list(a) == list(b)
    for track in a:
        pairs = list(zip(a.runs(track), b.runs(track), strict=True))
        for one, other in pairs:
            left, right = one.numpy(), other.numpy()
            assert left.keys() == right.keys()
            assert all((left[name] == right[name]).all() and left[name].dtype == right[name].dtype for name in left)
            assert all(torch.equal(one.initial[part], other.initial[part]) for part in other.initial)
            assert (one.kind, one.track, one.every) == (other.kind, other.track, other.every)


@pytest.mark.parametrize("options", [{}, {"gates": True}, {"every": 3, "gates": True}, {"tracks": "l1"}], ids=str)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_what_was_written_is_what_was_recorded(tmp_path, kind, options):
    layer, x = kind(3, 4, num_layers=2, bidirectional=True), torch.randn(7, 2, 3)
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([3, 7]), enforce_sorted=False)
    rec, memory = run(layer, packed, tmp_path / "deep" / "run", **options)
    same(rec, memory)
    same(hs.load_recording(tmp_path / "deep" / "run"), memory)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_dtype_comes_back_as_it_was(tmp_path, dtype):
    layer = nn.GRU(3, 4)
    _, memory = run(layer, torch.randn(7, 2, 3), tmp_path, dtype=dtype)
    loaded = hs.load_recording(tmp_path)
    assert loaded.runs("l0")[0].h.dtype == dtype
    same(loaded, memory)


def test_a_loaded_recording_is_mapped_not_read(tmp_path):
    layer = nn.GRU(3, 4)
    with hs.record(layer, to=tmp_path):
        layer(torch.randn(7, 2, 3))
    h = hs.load_recording(tmp_path)["l0"].h
    maps = Path("/proc/self/maps").read_text()
    assert str(tmp_path / "000000.safetensors") in maps
    h[:] = 0  # stays in memory
    assert hs.load_recording(tmp_path)["l0"].h.any()


def test_other_tools_open_the_files(tmp_path):
    layer = nn.LSTM(3, 4)
    with hs.record(layer, gates=True, to=tmp_path) as rec:
        layer(torch.randn(7, 2, 3))
    with safe_open(tmp_path / "000000.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("l0/0/0/states.c").transpose(0, 1), rec["l0"].c)
        assert "l0/0/0/gates.forget" in file.keys()  # noqa: SIM118 - not a mapping


def test_memory_stays_bounded_and_files_are_few(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "_SHARD_BYTES", 100_000)
    layer, x = nn.GRU(3, 32), torch.randn(50, 4, 3)  # 25 KB each
    with hs.record(layer, to=tmp_path) as rec:
        for _ in range(40):
            layer(x)
            held = sum(run.nbytes for run in rec._folder._waiting)
            assert held < 130_000
            assert not any(rec._runs.values())
    assert len(list(tmp_path.glob("*.safetensors"))) <= 15
    assert len(hs.load_recording(tmp_path).runs("l0")) == 40


def test_a_cell_that_is_stepped_on_and_on_goes_to_disk_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(OpenRuns, "piece_bytes", 2_000)
    cell = nn.LSTMCell(3, 4)

    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = cell

        def forward(self, x):
            state = None
            for step in x:
                state = self.cell(step, state)
                assert all(steps.nbytes < 4_000 for _, steps in rec._cells.open.values())

    for every in (1, 3):
        model = Loop()
        options = {"gates": True, "every": every}
        with hs.record(model, to=tmp_path / str(every), **options) as rec, hs.record(model, **options) as memory:
            model(torch.randn(50, 2, 3))
            model(torch.randn(20, 2, 3))
        same(rec, memory)
        same(hs.load_recording(tmp_path / str(every)), memory)


@pytest.mark.parametrize("where", ["inside", "after"])
def test_gradients_are_waited_for(tmp_path, where):
    layer, x = nn.LSTM(3, 4), torch.randn(7, 2, 3)
    with hs.record(layer, grads=True) as memory, hs.record(layer, grads=True, to=tmp_path) as rec:
        for _ in range(3):
            layer(x)[0].sum().backward()
        with torch.no_grad():
            layer(x)
        if where == "inside":
            assert len(rec._folder.counts) == 1
    loaded = hs.load_recording(tmp_path)
    for a, b in zip(loaded.runs("l0")[:3], memory.runs("l0")[:3], strict=True):
        assert torch.equal(a.grads["h"], b.grads["h"])
        assert torch.equal(a.grads["c"], b.grads["c"])
    assert loaded.runs("l0")[3].grads == {}


def test_a_folder_that_holds_another_recording_is_refused(tmp_path):
    layer = nn.GRU(3, 4)
    with hs.record(layer, to=tmp_path / "run"):
        layer(torch.randn(7, 2, 3))
    with pytest.raises(hs.errors.BadInput, match=r"run' holds another recording.*Name a new folder"):
        hs.record(layer, to=tmp_path / "run").__enter__()
    assert not layer._forward_hooks
    assert len(hs.load_recording(tmp_path / "run").runs("l0")) == 1
    (tmp_path / "file").write_text("")
    with pytest.raises(hs.errors.BadInput, match=r"file' is a file, but a recording is a folder"):
        hs.record(layer, to=tmp_path / "file").__enter__()


KILLED = """
import sys, torch, hiddenstate as hs
layer = torch.nn.GRU(3, 4)
with hs.record(layer, to=sys.argv[1]) as rec:
    for n in range(100000):
        layer(torch.full((5, 2, 3), float(n)))
        if n == 20:
            rec.flush()
            print("flushed", flush=True)
        if n == 200:
            print("gone on", flush=True)
"""


@pytest.mark.slow
def test_what_was_flushed_survives_a_kill(tmp_path):
    with subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"flushed\n"
        assert process.stdout.readline() == b"gone on\n"
        process.send_signal(signal.SIGKILL)
    rec = hs.load_recording(tmp_path)
    assert len(rec.runs("l0")) >= 21
    assert all(run.h.shape == (2, 5, 4) for run in rec.runs("l0"))
    assert "was not closed" in str(rec)


FULL = """
import resource, signal, sys, warnings, torch, hiddenstate as hs
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
layer, x = torch.nn.GRU(3, 64), torch.randn(100, 8, 3)
optimizer = torch.optim.SGD(layer.parameters(), 0.1)
small = torch.nn.GRU(3, 4)
model = torch.nn.ModuleDict({"small": small, "large": layer})
model.forward = lambda x: (small(x[:2])[0], layer(x)[0])[1]
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter(sys.argv[2])
    with hs.record(model, to=sys.argv[1]) as rec:
        model(x)
        rec.flush()
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        for step in range(20):
            model(x).sum().backward()
            optimizer.step()
            rec.flush()
assert [w.category for w in seen] == ([hs.errors.RecordingWarning] if sys.argv[2] == "always" else []), seen
assert not layer._forward_hooks
print(rec.stopped)
"""


@pytest.mark.parametrize("filter", ["always", pytest.param("error", marks=pytest.mark.long)])
@pytest.mark.slow
def test_a_disk_that_fills_up_stops_the_recording_but_not_the_training(tmp_path, filter):
    done = subprocess.run([sys.executable, "-c", FULL, str(tmp_path), filter], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("the recording stops before run 1 of ")
    assert "File too large" in done.stdout
    rec = hs.load_recording(tmp_path)
    assert len(rec.runs("large.l0")) == 1
    assert rec.stopped == done.stdout.strip()
    assert "stops before run 1" in str(rec)
    assert not list(tmp_path.glob(".*"))  # nothing half-written is left


def test_after_the_disk_is_full_nothing_more_is_kept_in_memory(tmp_path, monkeypatch):
    layer, x = nn.GRU(3, 4), torch.randn(5, 2, 3)
    with hs.record(layer, to=tmp_path) as rec:
        layer(x)

        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(folder, "write_shard", full)
        layer(x)
        with pytest.warns(hs.errors.RecordingWarning, match="stops before run 1 of 'l0': No space left on device"):
            rec.flush()
        for _ in range(3):
            layer(x)
        assert not any(rec._runs.values())
        assert not rec._folder._waiting
    assert len(rec.runs("l0")) == 1
    assert "No space left" in str(rec)


def test_a_file_cut_short_is_named(tmp_path):
    layer = nn.GRU(3, 4)
    with hs.record(layer, to=tmp_path):
        layer(torch.randn(5, 2, 3))
    file = tmp_path / "000000.safetensors"
    whole = file.read_bytes()
    for cut in (len(whole) - 1, 300, 20, 3, 0):
        file.write_bytes(whole[:cut])
        with pytest.raises(hs.errors.RecordingFileError, match=r"000000.safetensors .*Move it away to read the rest"):
            hs.load_recording(tmp_path)
    file.unlink()
    with pytest.raises(hs.errors.UnknownTrack, match="has not been run"):
        hs.load_recording(tmp_path)["l0"]


def test_a_folder_that_holds_no_recording_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no folder"):
        hs.load_recording(tmp_path / "nowhere")
    with pytest.raises(hs.errors.RecordingFileError, match=r"holds no recording: its recording.json is missing"):
        hs.load_recording(tmp_path)
    for text in ("", "{", "[]", '{"format": "other"}'):
        (tmp_path / "recording.json").write_text(text)
        with pytest.raises(hs.errors.RecordingFileError, match="holds no recording"):
            hs.load_recording(tmp_path)
    about = {"format": "hiddenstate.recording", "version": 99, "every": 1, "tracks": [], "closed": True}
    (tmp_path / "recording.json").write_text(json.dumps(about))
    with pytest.raises(hs.errors.RecordingFileError, match=r"version 99.*upgrade"):
        hs.load_recording(tmp_path)


def test_a_value_that_no_file_can_hold_is_named(tmp_path):
    with pytest.raises(hs.errors.RecordingFileError, match=r"h is torch.complex128.*dtype="):
        folder.write_shard(tmp_path / "x", {"h": torch.zeros(1, dtype=torch.complex128)}, [])


def test_an_exception_in_the_block_closes_the_recording(tmp_path):
    layer = nn.GRU(3, 4)
    layer.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), hs.record(layer, to=tmp_path):
        layer(torch.randn(5, 2, 3))
    rec = hs.load_recording(tmp_path)
    assert rec.stopped is None
    assert len(rec.runs("l0")) == 1  # the layer had done its work
