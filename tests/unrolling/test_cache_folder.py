"""Where compiled loops and verdicts are kept."""

from pathlib import Path

from hiddenstate.unrolling.cache_folder import cache_folder


def test_the_folder_is_the_one_that_was_chosen_or_the_platforms(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HIDDENSTATE_CACHE", str(tmp_path / "chosen"))
    assert cache_folder() == tmp_path / "chosen"
    monkeypatch.delenv("HIDDENSTATE_CACHE")
    assert cache_folder() == tmp_path / "xdg" / "hiddenstate"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    for platform, folder in (("linux", ".cache"), ("darwin", "Library/Caches")):
        monkeypatch.setattr("sys.platform", platform)
        assert cache_folder() == tmp_path / folder / "hiddenstate"
