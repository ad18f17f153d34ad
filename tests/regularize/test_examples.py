"""The example on penalties runs, prints its table and writes its figure."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "penalties.py"


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="its figure needs hiddenstate[plot]")
def test_it_prints_a_table_and_writes_a_figure(tmp_path):
    command = [sys.executable, str(EXAMPLE), "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [word for word in ("none", "activity", "temporal", "both", "unseen") if word not in done.stdout] == []
    assert (tmp_path / "penalties.png").read_bytes().startswith(b"\x89PNG")
