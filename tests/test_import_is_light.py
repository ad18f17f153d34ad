"""`import hiddenstate` brings torch, numpy and safetensors, and nothing heavier."""

import subprocess
import sys

import pytest

HEAVY = (
    *("matplotlib", "plotly", "pandas", "sklearn", "scipy", "xarray", "sympy"),
    *("fastapi", "uvicorn", "starlette", "websockets", "httpx", "prometheus_client", "redis"),
    *("lightning", "pytorch_lightning", "tensorboard", "transformers"),
    *("typer", "click", "rich"),
    *("torch._dynamo", "torch._inductor", "triton"),
)
LAZY_PARTS = ("cli", "integrations", "plot", "serve", "reporting")

BUDGET = 0.150  # seconds on top of torch, numpy and safetensors
ATTEMPTS = 5


def in_a_new_process(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture(scope="module")
def loaded() -> set[str]:
    return set(in_a_new_process("import sys, hiddenstate; print(*sys.modules)").split())


@pytest.mark.parametrize("name", HEAVY)
def test_nothing_heavy_is_loaded(loaded, name):
    assert name not in loaded


@pytest.mark.parametrize("part", LAZY_PARTS)
def test_parts_that_need_heavy_things_wait_for_their_first_use(loaded, part):
    assert f"hiddenstate.{part}" not in loaded


def test_the_import_costs_little_on_top_of_torch():
    # The time of the processor, not of the clock, and the best of a few: other work on the machine does not count.
    code = """
import time, torch, numpy, safetensors.torch
before = time.process_time()
import hiddenstate
print(time.process_time() - before)
"""
    costs = []
    for _ in range(ATTEMPTS):
        costs.append(float(in_a_new_process(code)))
        if costs[-1] < BUDGET:
            return
    pytest.fail(f"import hiddenstate took {min(costs):.3f} s at best, and may take {BUDGET} s")
