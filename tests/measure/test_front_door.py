import subprocess
import sys

import pytest

import hiddenstate as hs


def in_a_new_process(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_measures_wait_until_they_are_asked_for():
    loaded = in_a_new_process("import sys, hiddenstate; print(*sys.modules)")
    assert "hiddenstate.measure" in loaded
    assert "hiddenstate.measure.lyapunov" not in loaded
    assert "hiddenstate.measure.system" not in loaded


def test_a_name_means_the_function_whatever_was_imported_before():
    code = """
import hiddenstate as hs
import hiddenstate.measure.memory
from hiddenstate.measure.probe import Probe
hs.measure.positions
print(*(type(f).__name__ for f in (hs.measure.memory, hs.measure.probe, hs.measure.positions)))
"""
    assert in_a_new_process(code) == ["function"] * 3


def test_every_promise_is_kept_and_results_live_beside_their_functions():
    for name in hs.measure.__all__:
        value = getattr(hs.measure, name)
        assert value.__name__ == name
        assert isinstance(value, type) != name.islower()
    assert dir(hs.measure) == sorted(hs.measure.__all__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"module 'hiddenstate.measure' has no attribute 'lyapunow'"):
        _ = hs.measure.lyapunow
