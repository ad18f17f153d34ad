"""Products by our own code are torch's, whatever the sizes, the layout and the threads."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hiddenstate.unrolling.native import compiling, products
from hiddenstate.unrolling.native.kernel import KERNEL

pytestmark = pytest.mark.skipif(not products.own_in_loops(), reason="no compiler, or not the processor for it")

sizes = st.integers(1, 140) | st.sampled_from([256, 511, 512, 513, 1100])
layouts = st.sampled_from(["rows", "columns", "gaps", "pages apart", "one row again and again"])


@pytest.fixture
def threads():
    """Set torch's number of threads, for this test alone."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def matrix(rows, columns, layout, dtype):
    if layout == "rows":
        return torch.randn(rows, columns, dtype=dtype)
    if layout == "columns":
        return torch.randn(columns, rows, dtype=dtype).t()
    if layout == "gaps":
        return torch.randn(rows, 2 * columns + 1, dtype=dtype)[:, 1::2]
    if layout == "pages apart":
        return torch.randn(rows, 1024 * math.ceil(columns / 1024), dtype=dtype)[:, :columns]
    return torch.randn(1, columns, dtype=dtype).expand(rows, columns)


@settings(max_examples=60, deadline=None)
@given(
    sides=st.tuples(sizes, sizes, sizes),
    shown=st.tuples(layouts, layouts),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    count=st.integers(1, 3),
)
def test_a_product_is_torchs(sides, shown, dtype, count):
    m, k, n = sides
    a, b = matrix(m, k, shown[0], dtype), matrix(k, n, shown[1], dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        ours = products.multiply(a, b)
    finally:
        torch.set_num_threads(before)
    exact = a.double() @ b.double()
    scale = a.double().abs() @ b.double().abs() + 1e-30
    assert ours.shape == (m, n)
    assert ours.dtype == dtype
    assert ours.is_contiguous()
    assert ((ours.double() - exact).abs() / scale).max() < 4 * k * torch.finfo(dtype).eps


def test_the_number_of_threads_changes_no_bit(threads):
    a, b = torch.randn(300, 700), torch.randn(700, 130)
    results = []
    for count in (1, 2, 3, 5):
        threads(count)
        results.append(products.multiply(a, b))
    assert all(torch.equal(results[0], other) for other in results)


def test_infinity_and_nan_stay_in_their_rows_and_columns():
    a, b = torch.ones(20, 30), torch.ones(30, 40)
    a[3, 5], b[7, 39] = math.inf, math.nan
    ours, theirs = products.multiply(a, b), a @ b
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours.isinf(), theirs.isinf())


def test_only_large_products_of_plain_numbers_are_ours(monkeypatch):
    seen = []
    real = products.multiply
    monkeypatch.setattr(products, "multiply", lambda a, b: seen.append(a.shape) or real(a, b))
    large, small = torch.randn(128, 128), torch.randn(16, 16)
    with products.own_products():
        assert torch.equal(large @ large, real(large, large))
        torch.testing.assert_close(small @ small, small.double().mm(small.double()).float())
        assert (large.bfloat16() @ large.bfloat16()).dtype == torch.bfloat16
        assert (large.long() @ large.long()).dtype == torch.int64
        torch.vmap(torch.mm, in_dims=(0, None))(torch.randn(3, 64, 128), large)
    large @ large
    assert seen == [(128, 128), (192, 128)]


def test_without_the_kernel_loops_use_torchs_products(monkeypatch, tmp_path):
    monkeypatch.setattr(products, "KERNEL", "this is no C")
    monkeypatch.setenv("HIDDENSTATE_CACHE", str(tmp_path))
    products._compiled.cache_clear()
    try:
        assert not products.own_in_loops()
        assert not products.own_around_loops()
    finally:
        products._compiled.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("without", ["-mno-avx512f", "-mno-avx"])
def test_processors_with_shorter_vectors_are_served_too(without, dtype, monkeypatch):
    monkeypatch.setattr(compiling, "_FLAGS", (*compiling._FLAGS, without))
    found = compiling.library(KERNEL)
    monkeypatch.setattr(
        products, "addresses", lambda: {name: products._address(found, name) for name in products._NAMES}
    )
    for m, k, n in ((1, 1, 1), (7, 33, 50), (64, 130, 200)):
        a, b = torch.randn(m, k, dtype=dtype), torch.randn(k, n, dtype=dtype)
        torch.testing.assert_close(products.multiply(a, b), a @ b, rtol=1e-4, atol=1e-4)
