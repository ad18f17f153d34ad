import runpy
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "measure.py"


@pytest.mark.slow
def test_the_example_shows_eight_stable_states(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["measure.py"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    before, after = capsys.readouterr().out.split("after training")
    assert "8 of them stable" not in before
    assert "8 of them stable" in after
