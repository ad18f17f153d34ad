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
LAZY_PARTS = ("cli", "integrations", "plot", "serve", "reporting", "testing")

FILES = 105  # what an import costs is in benchmarks/imports.py; it grows with the files that are read


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


def test_the_import_adds_few_files_and_nobody_elses_but_pythons_own():
    code = """
import sys, torch, numpy, safetensors.torch
before = set(sys.modules)
import hiddenstate
print(*sorted(set(sys.modules) - before))
"""
    added = in_a_new_process(code).split()
    ours = [name for name in added if name.split(".")[0] == "hiddenstate"]
    others = {name.split(".")[0] for name in added} - {"hiddenstate"} - sys.stdlib_module_names
    assert not others
    assert len(ours) <= FILES
