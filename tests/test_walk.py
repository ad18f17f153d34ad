"""`tools/walk.py`: each walk passes through the files that do the work, and is the same when it is taken again."""

import runpy
import sys

import pytest

from tests.support.source import ROOT, SOURCE

TOOL = runpy.run_path(str(ROOT / "tools" / "walk.py"))
WALKS, Walk = TOOL["WALKS"], TOOL["Walk"]

# What a call cannot do without: a part, for each walk.
THROUGH = {
    "carry": "carry",
    "record": "recording",
    "unroll-built": "unrolling",
    "unroll-cached": "unrolling",
    "diagnosis": "diagnosis",
    "frame": "serve",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WALKS)
def test_a_walk_names_files_and_functions_of_ours(name):
    walk = Walk()
    WALKS[name](walk)
    assert all((SOURCE / file).is_file() for file in walk.files)
    assert f"{THROUGH[name]}/" in "".join(walk.files)
    assert len(walk.files) <= len(walk.functions) <= sum(walk.calls.values())
    assert sys.getprofile() is None


def test_a_schedule_that_is_cached_is_a_shorter_way_than_one_that_is_built():
    built, cached = Walk(), Walk()
    WALKS["unroll-built"](built)
    WALKS["unroll-cached"](cached)
    assert len(cached.files) < len(built.files)


def test_a_walk_taken_again_is_the_same():
    walks = [Walk(), Walk()]
    for walk in walks:
        WALKS["carry"](walk)
    assert walks[0].calls == walks[1].calls
