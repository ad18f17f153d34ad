"""Stores to run the same tests on."""

import pytest


@pytest.fixture(params=["memory", "sqlite"])
def address(request, tmp_path) -> str:
    """The address of an empty store of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/sessions.db"
    return "memory:"
