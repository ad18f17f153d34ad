"""`Cell`, the protocol: what a type checker takes for a cell, and what it refuses."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

WRITTEN = """
from typing import Any

import torch
from torch import Tensor, nn

import hiddenstate as hs

Pair = tuple[Tensor, Tensor]


class PairCell(nn.Module):
    def initial_state(self, batch: int) -> Pair:
        return torch.zeros(batch, 4), torch.zeros(batch, 4)

    def __call__(self, x: Tensor, state: Pair) -> tuple[Tensor, Pair]:
        return x, state


class Unstarted(nn.Module):
    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return x, state


class Bare:
    def initial_state(self, batch: int) -> Tensor:
        return torch.zeros(batch, 4)

    def __call__(self, x: Tensor, state: Tensor) -> Tensor:
        return state


def step(cell: hs.Cell[Pair]) -> Pair:
    output, state = cell(torch.zeros(1, 4), cell.initial_state(1))
    return state


step(PairCell())
step(hs.regularize.Zoneout(nn.GRUCell(4, 4)))
wrong: hs.Cell[Tensor] = PairCell()
unstarted: hs.Cell[Any] = Unstarted()
alone: hs.Cell[Tensor] = Bare()
"""


@pytest.mark.long
@pytest.mark.slow
def test_a_type_checker_takes_cells_and_refuses_what_is_none(tmp_path):
    file = tmp_path / "written.py"
    file.write_text(WRITTEN)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--config-file=", str(file)],
        capture_output=True, text=True, cwd=ROOT, env={"MYPYPATH": str(ROOT / "src")},
    )  # fmt: skip
    errors = [line for line in done.stdout.splitlines() if ": error:" in line]
    lines = WRITTEN.splitlines()
    refused = [lines[int(error.split(":")[1]) - 1] for error in errors]
    assert refused == [line for line in lines if line.startswith(("wrong", "unstarted", "alone"))], done.stdout
