"""Addresses of stores."""

import pytest

from hiddenstate.errors import BadInput
from hiddenstate.serve.stores import MemoryStore, open_store


@pytest.mark.parametrize("address", ["", "memory:x", "sqlite://x", "sqlite:///", "postgres://x", "redis:", "file.db"])
def test_an_address_that_leads_nowhere_is_refused(address):
    with pytest.raises(BadInput, match=r"the store is .*, but 'memory:', 'sqlite:///path'"):
        open_store(address)


def test_a_store_may_be_given_as_it_is():
    store = MemoryStore()
    assert open_store(store) is store
