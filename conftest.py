"""What holds for every test and every docstring example: one thread, one seed, nothing left behind."""

import gc
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator

import hypothesis
import pytest
import torch

import hiddenstate

# Nothing is left in the caches of whoever runs the tests; all workers of a run share what they compile.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["HIDDENSTATE_CACHE"] = tempfile.mkdtemp(prefix="hiddenstate-tests-")

# Pictures are drawn in memory, also where there is a screen.
os.environ["MPLBACKEND"] = "agg"

# Two workers share two cores: more threads would only make them wait for each other.
torch.set_num_threads(1)

hypothesis.settings.register_profile("house", deadline=None, max_examples=25, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("house")


class TorchRandom:
    """Torch's random stream as hypothesis wants it, so that each example draws the same numbers when run again."""

    def seed(self, seed: int) -> None:
        # Not torch.manual_seed: that formats a stack trace for CUDA on each call, a cost felt over many examples.
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_available():
            torch.cuda.manual_seed_all(seed)

    def getstate(self) -> torch.Tensor:
        return torch.get_rng_state()

    def setstate(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)


# hypothesis keeps a weak reference only.
TORCH_RANDOM = TorchRandom()
hypothesis.register_random(TORCH_RANDOM)

# What a test may change but has to put back: how to read it, how to put it back.
GLOBALS: dict[str, tuple[Callable[[], object], Callable]] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "default device": (torch.get_default_device, torch.set_default_device),
    "grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "number of threads": (torch.get_num_threads, torch.set_num_threads),
    "deterministic mode": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
}


@pytest.fixture(autouse=True)
def seeded() -> None:
    TORCH_RANDOM.seed(0)


@pytest.fixture(autouse=True)
def globals_put_back() -> Iterator[None]:
    before = {name: read() for name, (read, _) in GLOBALS.items()}
    yield
    left = []
    for name, (read, write) in GLOBALS.items():
        if (after := read()) != before[name]:
            left.append(f"{name}: {before[name]} before, {after} after")
            write(before[name])
    if left:
        pytest.fail("this test changed torch for all that follow: " + "; ".join(left), pytrace=False)


@pytest.fixture(autouse=True)
def pictures_closed() -> Iterator[None]:
    yield
    if pyplot := sys.modules.get("matplotlib.pyplot"):
        pyplot.close("all")


@pytest.fixture(autouse=True)
def names_in_doctests(doctest_namespace: dict[str, object]) -> None:
    doctest_namespace.update(torch=torch, nn=torch.nn, hs=hiddenstate)


def pytest_collection_finish() -> None:
    # Thousands of tests and all that torch has loaded stay to the end: no collection need look at them again.
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is marked long
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    cases = defaultdict(list)
    for item in items:
        if (sample := item.get_closest_marker("sample")) and not item.get_closest_marker("long"):
            cases[item.nodeid.partition("[")[0], sample.args[0]].append(item)
    for (_, kept), items_of_one in cases.items():
        in_sample = {place * len(items_of_one) // kept for place in range(kept)}
        for place, item in enumerate(items_of_one):
            if place not in in_sample:
                item.add_marker(pytest.mark.long)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device here")
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(skip)
