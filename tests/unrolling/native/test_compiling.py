"""Compiled loops are kept for the next time, wherever that can be."""

import shutil

import pytest

from hiddenstate.unrolling.native import compiling
from hiddenstate.unrolling.native.values import Unsupported

SOURCE = "void run(long n, long parts, void *p, void *tools) { ((long *)p)[0] = n; }"

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="there is no C compiler on this machine"
)


def test_a_loop_is_compiled_once_and_found_again(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiling.load(SOURCE)
    (kept,) = tmp_path.rglob("*.so")
    before = kept.stat().st_mtime_ns
    compiling.load(SOURCE)
    assert kept.stat().st_mtime_ns == before


def test_a_home_that_cannot_be_written_to_is_no_obstacle(monkeypatch, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert compiling.load(SOURCE) is not None


def test_where_nothing_can_be_kept_it_says_so(monkeypatch, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    monkeypatch.setattr(compiling, "_private", lambda: blocked)
    with pytest.raises(Unsupported, match="compiled code can be kept nowhere"):
        compiling.load(SOURCE)


def test_a_compiler_that_refuses_is_quoted(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(Unsupported, match="the C compiler refused"):
        compiling.load("this is no C")
