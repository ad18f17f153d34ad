"""The example of recording runs as a newcomer would run it, only shorter."""

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "recording.py"


@pytest.mark.slow
def test_the_example_runs_and_prints_what_it_found(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["recording.py", "--updates", "2", "--steps", "5"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    printed = capsys.readouterr().out
    assert "lstm.l0  lstm  1 of 1  256    5" in printed
    assert "forget gate, mean after step 0" in printed
