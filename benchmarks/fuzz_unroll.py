"""The fast engine against the loop on random cells, for as long as one likes: values and all gradients.

python benchmarks/fuzz_unroll.py --minutes 60
python benchmarks/fuzz_unroll.py --seed 277          # one of them again

Cells come from the grammar in tests/support/random_cells.py. Every difference is printed with its seed; the exit status
says whether there was one.
"""

import argparse
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from hiddenstate.errors import Untraceable
from tests.support.random_cells import difference, random_case, with_other_rows


def judged(seed: int, dtype: torch.dtype, reasons: Counter[str]) -> str:
    """What became of one cell."""
    case = random_case(seed, dtype)
    try:
        found = difference(case) or difference(with_other_rows(case))
    except Untraceable as refusal:
        reasons[str(refusal).partition("because ")[2][:100]] += 1
        return "refused"
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    if found:
        print(f"{dtype} {case}\n    {found}", flush=True)
    return "different" if found else "same"


def main() -> None:
    """Draw cells until the time is up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--first", type=int, default=1_000, help="the first seed")
    parser.add_argument("--seed", type=int, help="this one alone")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    if options.seed is not None:
        print([judged(options.seed, dtype, reasons) for dtype in (torch.float64, torch.float32)])
        return
    end, seed = time.monotonic() + 60 * options.minutes, options.first
    while time.monotonic() < end:
        # What is off in float32 may be rounding that a cell has blown up; one in four shows the rest.
        counts[judged(seed, torch.float32 if seed % 4 == 0 else torch.float64, reasons)] += 1
        seed += 1
    print(f"{sum(counts.values())} cells: {dict(counts)}")
    for reason, count in reasons.most_common(8):
        print(f"{count:6d} refused: {reason}")
    sys.exit(bool(counts["different"]))


if __name__ == "__main__":
    main()
