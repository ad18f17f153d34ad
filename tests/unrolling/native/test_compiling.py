"""Compiled loops are kept for the next time, wherever that can be."""

import ctypes
import shutil

import pytest

from hiddenstate.unrolling.native import compiling
from hiddenstate.unrolling.native.values import Unsupported

SOURCE = "void run(long n, long parts, void *p, void *tools) { ((long *)p)[0] = n; }"

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="there is no C compiler on this machine"
)


def test_a_loop_is_compiled_once_and_found_again(monkeypatch, tmp_path):
    monkeypatch.setenv("HIDDENSTATE_CACHE", str(tmp_path))
    compiling.load(SOURCE)
    (kept,) = tmp_path.rglob("*.so")
    before = kept.stat()
    compiling.load(SOURCE)
    assert kept.stat().st_ino == before.st_ino
    assert before.st_mode & 0o077 == 0
    assert list(tmp_path.rglob("*.tmp")) == []


def test_a_home_that_cannot_be_written_to_is_no_obstacle(monkeypatch, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("HIDDENSTATE_CACHE", str(blocked))
    assert compiling.load(SOURCE) is not None


def test_where_nothing_can_be_kept_it_says_so(monkeypatch, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("HIDDENSTATE_CACHE", str(blocked))
    monkeypatch.setattr(compiling, "_private", lambda: blocked)
    with pytest.raises(Unsupported, match="compiled code can be kept nowhere"):
        compiling.load(SOURCE)


def test_a_compiler_that_refuses_is_quoted(monkeypatch, tmp_path):
    monkeypatch.setenv("HIDDENSTATE_CACHE", str(tmp_path))
    with pytest.raises(Unsupported, match="the C compiler refused"):
        compiling.load("this is no C")


def runs(function):
    """Whether it is the function that was asked for."""
    numbers = (ctypes.c_long * 1)()
    function(7, 1, ctypes.addressof(numbers), None)
    return numbers[0] == 7


def test_the_folder_may_be_chosen(monkeypatch, tmp_path):
    monkeypatch.setenv("HIDDENSTATE_CACHE", str(tmp_path / "chosen"))
    compiling.load(SOURCE)
    assert len(list((tmp_path / "chosen" / "loops").glob("*.so"))) == 1


def test_code_in_a_folder_that_others_may_write_to_is_not_run(monkeypatch, tmp_path):
    monkeypatch.setenv("HIDDENSTATE_CACHE", str(tmp_path))
    compiling.load(SOURCE)
    (kept,) = tmp_path.rglob("*.so")
    kept.unlink()  # it is loaded: written over in place, it would take the process down at its end
    kept.write_bytes(b"foreign")
    kept.parent.chmod(0o777)
    assert runs(compiling.load(SOURCE))
    assert kept.read_bytes() == b"foreign"  # neither run nor touched


@pytest.mark.parametrize("spoil", [lambda path: path.write_bytes(b"\x7fELF"), lambda path: path.chmod(0o770)])
def test_a_file_that_was_cut_short_or_that_others_may_have_changed_is_made_anew(monkeypatch, tmp_path, spoil):
    monkeypatch.setenv("HIDDENSTATE_CACHE", str(tmp_path))
    source = SOURCE + f"/* {spoil.__code__.co_names} */"
    path = tmp_path / "loops"
    monkeypatch.setattr(compiling.ctypes, "CDLL", seen_once(compiling.ctypes.CDLL))
    compiling.load(source)
    (kept,) = path.glob("*.so")
    before = kept.stat().st_ino
    spoil(kept)
    assert runs(compiling.load(source))
    assert kept.stat().st_ino != before or kept.stat().st_mode & 0o077 == 0


def seen_once(load):
    """A loader that never hands out what it has in memory already, as in another process."""

    def loaded(path):
        copy = shutil.copy(path, f"{path}.{len(copies)}")
        copies.append(copy)
        return load(copy)

    copies = []
    return loaded


def test_what_was_not_used_for_longest_is_removed(monkeypatch, tmp_path):
    monkeypatch.setenv("HIDDENSTATE_CACHE", str(tmp_path))
    for number in range(3):
        compiling.load(SOURCE + f"/* {number} */")
    first, size = min(tmp_path.rglob("*.so"), key=lambda path: path.stat().st_mtime_ns), 0
    size = first.stat().st_size
    monkeypatch.setattr(compiling, "_MOST_BYTES", int(2.5 * size))
    compiling.load(SOURCE + "/* one more */")
    assert len(list(tmp_path.rglob("*.so"))) == 2
    assert not first.exists()


def test_another_compiler_makes_code_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setenv("HIDDENSTATE_CACHE", str(tmp_path))
    compiling.load(SOURCE)
    monkeypatch.setenv("CC", f"{shutil.which('cc') or shutil.which('gcc')} -O1")
    compiling.load(SOURCE)
    assert len(list(tmp_path.rglob("*.so"))) == 2


def test_a_disk_that_is_full_leaves_nothing_behind(monkeypatch, tmp_path):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setenv("HIDDENSTATE_CACHE", str(tmp_path))
    monkeypatch.setattr(compiling.shutil, "copyfile", full)
    with pytest.raises(Unsupported, match="No space left on device"):
        compiling.load(SOURCE + "/* on a full disk */")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
