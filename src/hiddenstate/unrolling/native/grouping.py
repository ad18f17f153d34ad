"""Grouping the operations of a body: element-wise ones of the same shape share a loop, others stand alone."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from .operations import FILLED, POINTWISE, SPLITS, is_view
from .values import Unsupported, shape_of


@dataclass(slots=True, eq=False)
class Item:
    """Nodes that are computed together: one loop over elements, or a single product, sum or join."""

    nodes: list[fx.Node] = field(default_factory=list)
    shape: tuple[int, ...] | None = None  # of the loop over elements; None for other work


class Order:
    """Items in the order in which they run, and the item that makes each node."""

    def __init__(self, graph: fx.Graph) -> None:
        """Put the nodes of a body in order."""
        self.items: list[Item] = []
        self.place: dict[fx.Node, int] = {}  # node -> the item that makes it, or that it is a view of
        self.viewed: set[fx.Node] = set()  # views, which can be read only when their source is in memory
        for node in graph.nodes:
            if node.op == "call_function":
                self._add(node)
            elif node.op == "placeholder":
                self.place[node] = -1
            elif node.op != "output":
                raise Unsupported(f"{node.op} has no C here")

    def _add(self, node: fx.Node) -> None:
        if node.target in FILLED:
            self.place[node] = -1
        elif is_view(node) or node.target in SPLITS:
            source = node.all_input_nodes[0]
            self.place[node] = self.place[source]
            self.viewed.add(node)
        elif node.target in POINTWISE:
            self._join(node)
        else:
            self.items.append(Item([node]))
            self.place[node] = len(self.items) - 1

    def _join(self, node: fx.Node) -> None:
        shape = shape_of(node)
        first = 0
        for source in node.all_input_nodes:
            made = self.place[source]
            within = made >= 0 and source in self.items[made].nodes and self.items[made].shape == shape
            first = max(first, made if within else made + 1)
        for number in range(first, len(self.items)):
            if self.items[number].shape == shape:
                self.items[number].nodes.append(node)
                self.place[node] = number
                return
        self.items.append(Item([node], shape))
        self.place[node] = len(self.items) - 1
