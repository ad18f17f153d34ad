"""States as bytes and on disk: the same to the bit, an older file never lost, and no bad file taken for a state."""

import errno
import json
import os
import pickle
import re
import signal
import stat
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from hiddenstate.errors import StateFileError, StateMismatch
from hiddenstate.state import State, from_bytes, load, to_bytes
from tests.support.strategies import same, states

OLD = State({"h": torch.full((2, 3), 1.0)})
NEW = State({"h": torch.full((2, 3), 2.0)})


def content_with(header: object, tensors: dict[str, torch.Tensor] | None = None) -> bytes:
    """A safetensors file whose metadata say `header` of the state in it."""
    text = header if isinstance(header, str) else json.dumps(header)
    return safetensors.torch.save(tensors or {"h": torch.ones(2, 3)}, {"hiddenstate.state": text})


def header_of(data: bytes) -> dict:
    length = int.from_bytes(data[:8], "little")
    return json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["hiddenstate.state"])


class TestTheSameToTheBit:
    @given(state=states())
    def test_as_bytes(self, state):
        assert same(from_bytes(to_bytes(state)), state)

    @given(state=states())
    def test_on_disk(self, tmp_path_factory, state):
        path = tmp_path_factory.mktemp("states") / "state.safetensors"
        state.save(path)
        assert path.read_bytes() == to_bytes(state)
        assert same(load(path), state)
        assert same(load(str(path)), state)

    @given(length=st.integers(1, 300))
    def test_whatever_the_length_of_the_header(self, length):
        # The file begins with that length, which may look like the first bytes of a pickle.
        state = State({"x" * length: torch.ones(2)})
        assert same(from_bytes(to_bytes(state)), state)

    def test_also_for_every_nan_and_minus_zero(self):
        bits = torch.tensor([0x7FC00001, -0x3FFFFF, 0x7F800001, -(2**31), 0x7F800000], dtype=torch.int32)
        state = State({"h": bits.view(torch.float32)})
        assert torch.equal(from_bytes(to_bytes(state))["h"].view(torch.int32), bits)

    @pytest.mark.parametrize(
        "dtype", [torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex128]
    )
    def test_also_for_rarer_dtypes(self, dtype):
        state = State({"h": torch.arange(6).to(torch.float32).view(2, 3).to(dtype)})
        assert same(from_bytes(to_bytes(state)), state)

    def test_also_for_conjugates_and_their_halves(self):
        z = torch.randn(3, 2, dtype=torch.complex64).conj()
        state = State({"z": z, "imaginary": z.imag})
        assert z.is_conj()
        assert state["imaginary"].is_neg()
        assert same(from_bytes(to_bytes(state)), state)

    def test_also_where_parts_share_memory(self):
        buffer = torch.randn(2, 3, 4)
        state = State({"h": buffer[0], "c": buffer[1], "again": buffer[0], "wide": torch.ones(3, 1).expand(3, 4)})
        read = from_bytes(to_bytes(state))
        assert same(read, state)
        assert len({part.untyped_storage().data_ptr() for part in read.values()}) == 4

    def test_the_order_of_parts_and_names_of_any_kind_survive(self):
        names = ["z", "a", "", "encoder.lstm.h", "ß✓", 'with "quotes"', "new\nline"]
        assert list(from_bytes(to_bytes(State({name: torch.zeros(1) for name in names})))) == names

    def test_a_graph_is_left_behind(self):
        state = State({"h": torch.ones(2, requires_grad=True) * 2})
        assert not from_bytes(to_bytes(state))["h"].requires_grad

    def test_what_is_read_may_be_written_to(self):
        assert torch.equal(from_bytes(to_bytes(OLD))["h"].add_(1), OLD["h"] + 1)

    def test_safetensors_itself_reads_the_file(self, tmp_path):
        OLD.save(tmp_path / "state.safetensors")
        assert torch.equal(safetensors.torch.load_file(tmp_path / "state.safetensors")["h"], OLD["h"])

    def test_it_is_read_to_the_device_asked_for(self):
        assert from_bytes(to_bytes(OLD), device="meta").device == torch.device("meta")

    @pytest.mark.cuda
    def test_from_a_gpu_and_to_a_gpu(self, tmp_path):
        state = State({"h": torch.randn(2, 3, 4)}, 1)
        state.to("cuda").save(tmp_path / "state.safetensors")
        assert same(load(tmp_path / "state.safetensors"), state)
        assert same(load(tmp_path / "state.safetensors", device="cuda:0"), state.to("cuda:0"))


class TestWhatCannotBeWritten:
    def test_the_name_the_format_has_taken(self):
        with pytest.raises(StateFileError, match="cannot be written as safetensors: the name '__metadata__' is taken"):
            to_bytes(State({"__metadata__": torch.zeros(2)}))

    def test_a_name_that_is_no_text(self):
        with pytest.raises(StateFileError, match=r"cannot be written as safetensors: .*surrogates"):
            to_bytes(State({"\ud800": torch.zeros(2)}))

    @pytest.mark.parametrize("part", [torch.zeros(2, 3, device="meta"), torch.zeros(2, 3).to_sparse()])
    def test_a_tensor_without_plain_data(self, part, tmp_path):
        path = tmp_path / "state.safetensors"
        with pytest.raises(
            StateFileError, match=r"State\(h \(2, 3\) float32; batch of 2\) cannot be written as safeten"
        ):
            State({"h": part}).save(path)
        assert list(tmp_path.iterdir()) == []


class TestBadContent:
    """Each is a StateFileError that names its source."""

    def test_every_cut_of_a_file(self):
        data = to_bytes(State({"h": torch.randn(2, 3), "z": torch.randn(2, dtype=torch.complex64)}))
        for length in range(1, len(data)):
            with pytest.raises(
                StateFileError, match=r"state of ann .*(not a whole safetensors file .*cut short|pickle)"
            ):
                from_bytes(data[:length], source="the state of ann")

    def test_bytes_too_many(self):
        with pytest.raises(StateFileError, match="these bytes is not a whole safetensors file"):
            from_bytes(to_bytes(OLD) + b"\0")

    @given(data=st.data())
    def test_a_flipped_bit_is_always_noticed(self, data):
        state = State({"h": torch.randn(2, 3), "b": torch.ones(2, dtype=torch.bool), "z": torch.ones(2, 1).cfloat()})
        content = bytearray(to_bytes(state))
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        with pytest.raises(StateFileError, match=r"^the state of ann "):
            from_bytes(bytes(content), source="the state of ann")

    @given(junk=st.binary(max_size=64))
    def test_any_bytes_at_all(self, junk):
        with pytest.raises(StateFileError, match=r"^the state of ann is "):
            from_bytes(junk, source="the state of ann")

    def test_nothing(self):
        with pytest.raises(StateFileError, match=r"these bytes is empty: nothing was ever written.*disk was full"):
            from_bytes(b"")

    def test_a_damaged_number(self):
        content = bytearray(to_bytes(OLD))
        content[-1] ^= 1
        with pytest.raises(
            StateFileError, match=r"is damaged \(ValueError: part 'h' does not have the checksum.*older"
        ):
            from_bytes(bytes(content))

    def test_weights(self):
        weights = safetensors.torch.save(torch.nn.LSTM(2, 3).state_dict(), {"format": "pt"})
        for data in (weights, safetensors.torch.save({"h": torch.ones(2)})):
            with pytest.raises(
                StateFileError, match=r"does not hold a state: .* batch axes.*safetensors\.torch\.load_f"
            ):
                from_bytes(data)

    @pytest.mark.parametrize("version", [0, 2, "1", None])
    def test_another_version(self, version):
        with pytest.raises(StateFileError, match=rf"has version {version!r} of the .* reads version 1\..*upgrade"):
            from_bytes(content_with({"version": version, "parts": []}))

    @pytest.mark.parametrize(
        "header",
        [
            "",
            "{",
            "[" * 100_000,
            "null",
            "[]",
            "1" * 5000,
            {},
            {"version": 1},
            {"version": 1, "parts": None},
            {"version": 1, "parts": []},
            {"version": 1, "parts": ["h"]},
            {"version": 1, "parts": [{"name": "h"}]},
            {"version": 1, "parts": [{"name": ["h"], "axis": 0}]},
            {"version": 1, "parts": [{"name": "x", "axis": 0, "complex": False, "crc32": 0}]},
            {"version": 1, "parts": [{"name": "h", "axis": 0, "complex": True, "crc32": 0}]},
            {"version": 1, "parts": [{"name": "h", "axis": 0, "complex": False, "crc32": 0}]},
        ],
        ids=lambda header: str(header)[:40],
    )
    def test_damaged_metadata(self, header):
        with pytest.raises(StateFileError, match=r"^ann's state is damaged \(\w+: .*\), so .*Go back to an older copy"):
            from_bytes(content_with(header), source="ann's state")

    @pytest.mark.parametrize("change", [{"axis": 1}, {"axis": 7}, {"axis": "0"}, {"axis": None}, {"name": "c"}])
    def test_metadata_that_do_not_match_the_tensors(self, change):
        header = header_of(to_bytes(OLD))
        header["parts"][0] |= change
        with pytest.raises(StateFileError, match="these bytes is damaged"):
            from_bytes(content_with(header, dict(OLD)))

    def test_a_part_too_many_or_too_few(self):
        header = header_of(to_bytes(OLD))
        for tensors in ({"h": OLD["h"], "c": OLD["h"].clone()}, {"c": OLD["h"]}):
            with pytest.raises(
                StateFileError, match=rf"lists the parts \['h'\], but holds {re.escape(str(sorted(tensors)))}"
            ):
                from_bytes(content_with(header, tensors))

    def test_a_dtype_torch_does_not_know(self):
        header = json.dumps({"h": {"dtype": "F99", "shape": [1], "data_offsets": [0, 1]}}).encode()
        with pytest.raises(StateFileError, match="not a whole safetensors file"):
            from_bytes(struct.pack("<Q", len(header)) + header + b"\0")


class TestBadFiles:
    def pickles(self, path: Path) -> None:
        state = {"h": torch.ones(2)}
        torch.save(state, path / "torch.save")
        torch.save(state, path / "legacy", _use_new_zipfile_serialization=False)
        np.savez(path / "numpy.npz", h=np.ones(2))
        for protocol in (2, 5):
            (path / f"protocol {protocol}").write_bytes(pickle.dumps({"h": [1.0]}, protocol=protocol))
        with zipfile.ZipFile(path / "zip", "w") as file:
            file.writestr("h", "1")

    def test_a_pickle_is_never_opened(self, tmp_path):
        self.pickles(tmp_path)
        names = sorted(path.name for path in tmp_path.iterdir())
        assert len(names) == 6
        for name in names:
            message = r" is a pickle or a zip .*may run code.*weights_only=True.*State\.save"
            with pytest.raises(StateFileError, match=re.escape(str(tmp_path / name)) + message):
                load(tmp_path / name)

    def test_the_oldest_pickles_run_no_code_either(self, tmp_path):
        class Bomb:
            def __reduce__(self):
                return os.mkdir, (str(tmp_path / "boom"),)

        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            path = tmp_path / f"{protocol}.pkl"
            path.write_bytes(pickle.dumps(Bomb(), protocol=protocol))
            with pytest.raises(StateFileError, match=re.escape(str(path))):
                load(path)
        assert not (tmp_path / "boom").exists()

    @pytest.mark.parametrize("content", [b"", b"h", b"not a state at all", to_bytes(OLD)[:-1], content_with({})])
    def test_the_error_names_the_file(self, tmp_path, content):
        path = tmp_path / "state.safetensors"
        path.write_bytes(content)
        with pytest.raises(StateFileError, match=rf"^{re.escape(str(path))} is "):
            load(path)

    def test_a_folder(self, tmp_path):
        with pytest.raises(StateFileError, match=rf"^{re.escape(str(tmp_path))} is a folder, but a state is one file"):
            load(tmp_path)

    def test_a_missing_file_is_pythons_own_error(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"state\.safetensors"):
            load(tmp_path / "state.safetensors")

    def test_every_error_is_a_value_error_too(self):
        with pytest.raises(ValueError, match="is empty"):
            from_bytes(b"")
        assert not issubclass(StateFileError, StateMismatch)


# Each is run in a process of its own, which saves NEW over OLD and is killed on the way.
KILLED_BEFORE_THE_RENAME = """
os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
"""
KILLED_IN_THE_MIDDLE_OF_WRITING = """
class Half:
    def __init__(self, file): self.file = file
    def __enter__(self): return self
    def __exit__(self, *_): self.file.close()
    def write(self, data):
        self.file.write(data[: len(data) // 2])
        self.file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
files.open = lambda *arguments: Half(open(*arguments))
"""
KILLED_BEFORE_THE_BYTES_ARE_ON_DISK = """
os.fsync = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
"""
SAVE = """
import os, signal, sys, torch
from hiddenstate.state import State, files
{accident}
State({{"h": torch.full((2, 3), 2.0)}}).save(sys.argv[1])
"""


class TestSaving:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        "accident",
        [KILLED_BEFORE_THE_RENAME, KILLED_IN_THE_MIDDLE_OF_WRITING, KILLED_BEFORE_THE_BYTES_ARE_ON_DISK],
        ids=["before the rename", "in the middle of writing", "before the bytes are on disk"],
    )
    def test_the_old_file_survives_a_kill(self, tmp_path, accident):
        path = tmp_path / "state.safetensors"
        OLD.save(path)
        killed = subprocess.run([sys.executable, "-c", SAVE.format(accident=accident), str(path)], check=False)
        assert killed.returncode == -signal.SIGKILL
        assert len(list(tmp_path.iterdir())) == 2, "the killed process had begun to write"
        assert same(load(path), OLD)
        NEW.save(path)
        assert same(load(path), NEW)

    @pytest.mark.parametrize("accident", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")])
    @pytest.mark.parametrize("where", ["fsync", "replace"])
    def test_the_old_file_survives_an_exception_and_nothing_else_is_left(self, tmp_path, monkeypatch, where, accident):
        path = tmp_path / "state.safetensors"
        OLD.save(path)

        def fail(*_):
            raise accident

        with monkeypatch.context() as patch:
            patch.setattr(os, where, fail)
            with pytest.raises(type(accident)):
                NEW.save(path)
        assert list(tmp_path.iterdir()) == [path]
        assert same(load(path), OLD)

    def test_a_full_disk_is_an_os_error_that_says_what_became_of_the_state(self, tmp_path, monkeypatch):
        def fail(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "fsync", fail)
        message = r"No space left on device \(the state was not saved; an older file there is untouched\).*safetensors"
        with pytest.raises(OSError, match=message) as caught:
            NEW.save(tmp_path / "state.safetensors")
        assert caught.value.errno == errno.ENOSPC

    def test_a_missing_folder_is_named(self, tmp_path):
        path = tmp_path / "no" / "state.safetensors"
        with pytest.raises(
            FileNotFoundError, match=rf"No such file or directory \(.*not saved.*{re.escape(str(path))}"
        ):
            OLD.save(path)

    def test_a_file_in_place_of_the_folder_is_named(self, tmp_path):
        (tmp_path / "file").write_text("a file")
        with pytest.raises(NotADirectoryError, match=r"(?i)not a directory \(the state was not saved"):
            OLD.save(tmp_path / "file" / "state.safetensors")

    def test_an_unwritable_folder_is_named(self, tmp_path, monkeypatch):
        folder = tmp_path / "sealed"
        folder.mkdir(mode=0o500)
        if os.access(folder, os.W_OK):  # the superuser may write anywhere

            def refuse(path, *_):
                raise PermissionError(errno.EACCES, "Permission denied", str(path))

            monkeypatch.setattr("hiddenstate.state.files.open", refuse, raising=False)
        path = folder / "state.safetensors"
        with pytest.raises(PermissionError, match=rf"Permission denied \(.*not saved.*{re.escape(str(path))}'$"):
            OLD.save(path)
        assert list(folder.iterdir()) == []

    @pytest.mark.parametrize("path", ["", ".", "/"])
    def test_a_folder_is_no_place_for_a_state(self, path):
        with pytest.raises(IsADirectoryError, match="saved to a file, but this is a folder"):
            OLD.save(path)

    def test_a_link_is_followed_and_stays_a_link(self, tmp_path):
        (tmp_path / "elsewhere").mkdir()
        file, link = tmp_path / "elsewhere" / "state.safetensors", tmp_path / "latest"
        link.symlink_to(file)
        for state in (OLD, NEW):  # at first the link leads nowhere
            state.save(link)
            assert link.is_symlink()
            assert same(load(file), state)
        assert list((tmp_path / "elsewhere").iterdir()) == [file]

    def test_a_new_file_has_the_rights_of_any_new_file_and_an_old_one_keeps_its_own(self, tmp_path):
        path, plain = tmp_path / "state.safetensors", tmp_path / "plain"
        plain.touch()
        OLD.save(path)
        assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)
        path.chmod(0o640)
        NEW.save(path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o640

    def test_a_name_as_long_as_names_may_be(self, tmp_path):
        path = tmp_path / ("x" * 255)
        OLD.save(path)
        assert same(load(path), OLD)

    def test_a_relative_path(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        OLD.save("state.safetensors")
        assert same(load("state.safetensors"), OLD)
