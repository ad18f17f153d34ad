"""The examples run as a newcomer would run them, only shorter."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
QUICK = {
    "carry.py": (["--updates", "2"], "loss on unseen text"),
    "gallery.py": (["--updates", "2"], "Lyapunov exponent"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_an_example_runs_and_prints_what_it_found(name, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, *QUICK[name][0]])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert QUICK[name][1] in capsys.readouterr().out
