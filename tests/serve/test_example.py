"""The example: a thousand sensors, killed in the middle."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "serve.py"


@pytest.mark.slow
def test_the_example_loses_nothing():
    done = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "killed after step 25" in done.stdout
    assert "alarms as without the kill: True" in done.stdout
    assert "states equal to the last bit: True (1000 sessions)" in done.stdout
