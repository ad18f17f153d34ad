import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hiddenstate as hs
from hiddenstate.errors import BadInput
from hiddenstate.measure.clustering import k_means


def best_spread(states, clusters):
    """The slow, obvious way: every way to part the states."""
    found = []
    for numbers in itertools.product(range(clusters), repeat=len(states)):
        parts = [states[[i for i, n in enumerate(numbers) if n == c]] for c in set(numbers)]
        found.append(sum(float(((part - part.mean(0)) ** 2).sum()) for part in parts))
    return min(found)


@given(seed=st.integers(0, 50))
def test_few_states_are_parted_nearly_as_well_as_can_be(seed):
    states = torch.randn(6, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    assert k_means(states, 2).spread <= 1.3 * best_spread(states, 2) + 1e-12


def test_groups_far_apart_are_found_the_largest_first():
    states = torch.cat([torch.randn(5, 3), torch.randn(9, 3) + 50, torch.randn(2, 3) - 50])
    found = k_means(states, 3)
    assert found.numbers.tolist() == [1] * 5 + [0] * 9 + [2] * 2
    assert found.nearest(torch.full((1, 3), 49.0)).tolist() == [0]


def test_the_same_seed_gives_the_same_clusters():
    states = torch.randn(40, 4)
    assert torch.equal(k_means(states, 5, seed=3).numbers, k_means(states, 5, seed=3).numbers)


def test_fewer_different_states_than_clusters_make_fewer():
    assert len(k_means(torch.tensor([[1.0], [1.0], [2.0]]), 3).centers) == 2


def test_a_comparison_names_its_clusters():
    found = hs.measure.compare(torch.tensor([[0.0], [0.1], [9.0]]), clusters=2)
    assert found.clusters.tolist() == [0, 0, 1]
    assert str(found).endswith("; 2 clusters of 2, 1")


@pytest.mark.parametrize("clusters", [0, 4, True, 1.5])
def test_what_no_clusters_can_be_is_refused(clusters):
    with pytest.raises(BadInput, match=f"3 states fall into 1 to 3 clusters, but {clusters} are asked for"):
        k_means(torch.randn(3, 2), clusters)
