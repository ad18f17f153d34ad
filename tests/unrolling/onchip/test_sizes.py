"""However a loop is spread over the chip, every row and unit has its place, and everything fits."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hiddenstate.unrolling.native import Unsupported
from hiddenstate.unrolling.onchip.indexing import Extent
from hiddenstate.unrolling.onchip.sizes import Product, choose

products = st.builds(Product, inner=st.integers(8, 1024), parts=st.integers(1, 4), bytes=st.sampled_from([2, 4]))


@given(rows=st.integers(1, 300), units=st.integers(8, 800), work=st.lists(products, min_size=1, max_size=2))
def test_all_rows_and_units_have_a_place(rows, units, work):
    try:
        sizes = choose(Extent(rows, units), work, processors=132, exchanges=1)
    except Unsupported:
        assume(False)
    assert sizes.groups * sizes.rows >= rows > (sizes.groups - 1) * sizes.rows
    assert sizes.blocks * sizes.units >= units > (sizes.blocks - 1) * sizes.units
    assert sizes.groups * sizes.blocks <= 132
    assert sizes.elements * sizes.threads >= sizes.rows * sizes.units
    for product in work:
        assert sizes.depth(product) * sizes.warps * 64 >= product.inner * product.bytes
        assert sizes.columns(product) * 8 >= product.parts * sizes.units
        assert 1 <= sizes.chunk(product, work) <= sizes.depth(product)
    # Of 65,536 registers, and of 227 KiB of shared memory.
    assert sizes.registers(work) * sizes.threads < 50_000
    assert 4 * sum(map(sizes.partial, work)) < 227 * 1024


def test_what_does_not_fit_says_so():
    with pytest.raises(Unsupported, match="do not fit on the chip beside these rows"):
        choose(Extent(64, 4096), [Product(4096, 4, 4)], processors=132, exchanges=1)


def test_a_wide_state_is_spread_wider_than_a_narrow_one():
    few, many = (choose(Extent(16, units), [Product(units, 4, 4)], processors=132, exchanges=1) for units in (32, 768))
    assert few.blocks < many.blocks
