"""Values that are recomputed where they are read, which is cheaper than storing and loading them."""

from __future__ import annotations

import operator
from collections.abc import Container

import torch
from torch import fx

from .operations import POINTWISE, SPLITS, is_view
from .values import shape_of

aten = torch.ops.aten

_CHEAP = {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.neg.default}
_CUTS = {operator.getitem, aten.slice.Tensor, aten.select.int}


def inlined(graph: fx.Graph, results: list[fx.Node], targets: Container[fx.Node]) -> set[fx.Node]:
    """Return cheap values that are read only through views, as the sum of gates before it is cut into pieces.

    Computing each element where it is read costs next to nothing.
    """
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):  # readers before what they read
        if node.target in _CHEAP and node not in targets and _only_cut(node, results, found):
            found.add(node)
    return found


def _only_cut(node: fx.Node, results: list[fx.Node], found: set[fx.Node]) -> bool:
    """Say whether a value is read by element-wise work alone, and no element of it more than about once."""
    readers = [reader for user in node.users for reader in (user.users if user.target in SPLITS else [user])]
    for reader in readers:
        if is_view(reader):
            fits = reader.target in _CUTS and reader not in results and len(reader.users) <= 2
            if not fits or not all(_elementwise(user) and user not in found for user in reader.users):
                return False
        elif len(readers) > 1 or reader not in found or shape_of(reader) != shape_of(node):
            return False
    return bool(readers)


def _elementwise(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in POINTWISE
