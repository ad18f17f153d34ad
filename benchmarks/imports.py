"""What `import hiddenstate` costs on top of torch, numpy and safetensors.

Each import is a process of its own; bytecode is kept in a folder of this run, since Python would compile it once only.
"""

import os
import statistics
import subprocess
import sys
import tempfile

from timing import machine

CODE = """
import time
start = time.process_time()
import torch, numpy, safetensors.torch
middle = time.process_time()
import hiddenstate
print(middle - start, time.process_time() - middle)
"""
ROUNDS = 9


def main() -> None:
    """Print both costs and their ratio, the median of nine processes."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": folder}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        timed = [_timed(environment) for _ in range(ROUNDS + 1)][1:]  # the first one compiles
    print(machine())
    print(f"torch, numpy, safetensors  {statistics.median(torch_ for torch_, _ in timed):6.3f} s")
    print(f"hiddenstate on top         {statistics.median(ours for _, ours in timed):6.3f} s", end="  ")
    print(f"x {statistics.median(ours / torch_ for torch_, ours in timed):.3f}")


def _timed(environment: dict[str, str]) -> tuple[float, float]:
    printed = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, check=True, env=environment
    ).stdout
    torch_, ours = map(float, printed.split())
    return torch_, ours


if __name__ == "__main__":
    main()
