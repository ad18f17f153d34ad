"""Sums over time, computed as one product over all steps instead of one for each step."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, cast

import torch
from torch import Tensor, fx

aten = torch.ops.aten

# Of one argument, and linear in it: the sum may be taken before.
_LINEAR = {
    *(aten.t.default, aten.transpose.int, aten.permute.default, aten.view.default, aten._unsafe_view.default),
    *(aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.expand.default),
    *(aten.neg.default, aten.clone.default, aten.constant_pad_nd.default, aten.select_backward.default),
    *(aten.slice_backward.default, aten.flip.default, aten._to_copy.default),
}


class Values(Protocol):
    """Where the value of a node is found while a backward pass runs."""

    steps: int

    @property
    def multiply(self) -> Callable[[Tensor, Tensor], Tensor]:
        """By which products over all steps are taken."""

    def fixed(self, node: fx.Node) -> Tensor:
        """Return a value that is the same at all steps."""

    def along(self, node: fx.Node) -> Tensor:
        """Return the values at all steps, (time, ...)."""

    def total(self, node: fx.Node) -> Tensor:
        """Return a value that the loop has added up."""


Sum: TypeAlias = Callable[[Values], Tensor]


class Sums:
    """Plans how the gradients of weights are summed over time, and collects what that needs."""

    def __init__(self, *, fixed: set[fx.Node], looped: set[fx.Node], sunk: set[fx.Node], limit: int) -> None:
        """Know which nodes are the same at all steps, which are made in the loop, and which outside it.

        A node of the loop with more than `limit` numbers is added up in the loop rather than kept for all steps.
        """
        self._fixed, self._looped, self._sunk, self._limit = fixed, looped, sunk, limit
        self.along: dict[fx.Node, None] = {}  # needed at all steps
        self.totals: dict[fx.Node, None] = {}  # added up in the loop

    def plan(self, node: fx.Node) -> Sum:
        """Return a function that gives the sum of a node over all steps."""
        if node in self._fixed:
            return lambda values: values.fixed(node) * values.steps
        if node in self._looped and node.meta["val"].numel() > self._limit:
            self.totals[node] = None
            return lambda values: values.total(node)
        return (self._inside_out(node) if node in self._sunk else None) or self._plain(node)

    def _plain(self, node: fx.Node) -> Sum:
        self.along[node] = None
        return lambda values: values.along(node).sum(0)

    def _inside_out(self, node: fx.Node) -> Sum | None:
        args = node.args
        if node.target in _LINEAR and isinstance(args[0], fx.Node) and len(node.all_input_nodes) == 1:
            return self._linear(node, args[0])
        if node.target in (aten.mm.default, aten.bmm.default):
            return self._product(node)
        if node.target in (aten.add.Tensor, aten.sub.Tensor):
            return self._added(node)
        if node.target in (aten.mul.Tensor, aten.div.Tensor):
            return self._scaled(node)
        if node.target is aten.sum.dim_IntList:
            return self._reduced(node)
        if node.target is aten.embedding_dense_backward.default and not args[4]:
            return self._looked_up(node)
        if node.target is operator.getitem:
            inner = self._backward_of(args[0])
            return None if inner is None else (lambda values: inner(values)[args[1]])  # type: ignore[index]
        return self._backward_of(node)

    def _backward_of(self, node: Any) -> Sum | None:
        """Return the sum of an operation's derivative, which is linear in the gradient that it is given first."""
        gradient = node.args[0] if node.args else None
        if not str(node.target).split(".")[1 if "." in str(node.target) else 0].endswith("_backward"):
            return None
        if not isinstance(gradient, fx.Node) or any(arg not in self._fixed for arg in node.all_input_nodes[1:]):
            return None
        before, rest, target = self.plan(gradient), node.args[1:], node.target

        def summed(values: Values) -> Tensor:
            others = [values.fixed(arg) if isinstance(arg, fx.Node) else arg for arg in rest]
            total: Tensor = target(before(values), *others, **node.kwargs)
            return total

        return summed

    def _linear(self, node: fx.Node, inner: fx.Node) -> Sum:
        before, rest, target = self.plan(inner), node.args[1:], node.target
        return lambda values: target(before(values), *rest, **node.kwargs)  # type: ignore[operator]

    def _added(self, node: fx.Node) -> Sum | None:
        left, right = node.args[:2]
        if not (isinstance(left, fx.Node) and isinstance(right, fx.Node)):
            return None
        one, other, target = self.plan(left), self.plan(right), node.target
        return lambda values: target(one(values), other(values), **node.kwargs)  # type: ignore[operator]

    def _scaled(self, node: fx.Node) -> Sum | None:
        inner, by = node.args[:2]
        if not isinstance(inner, fx.Node) or (isinstance(by, fx.Node) and by not in self._fixed):
            return None
        before, target = self.plan(inner), node.target

        def scaled(values: Values) -> Tensor:
            total: Tensor = target(before(values), values.fixed(by) if isinstance(by, fx.Node) else by)  # type: ignore[operator]
            return total

        return scaled

    def _reduced(self, node: fx.Node) -> Sum | None:
        inner = node.args[0]
        assert isinstance(inner, fx.Node)
        dims: Any = node.args[1]
        keep, dtype = bool(node.args[2]) if len(node.args) > 2 else False, cast(Any, node.kwargs.get("dtype"))
        if not dims or inner in self._fixed:
            return None
        self.along[inner] = None
        axes = [dim + 1 if dim >= 0 else dim for dim in dims]
        return lambda values: values.along(inner).sum(axes, keepdim=keep, dtype=dtype).sum(0)

    def _product(self, node: fx.Node) -> Sum | None:
        left, right = node.args
        assert isinstance(left, fx.Node)
        assert isinstance(right, fx.Node)
        if left in self._fixed or right in self._fixed:
            return self._half_product(node, left, right)
        turned = left.target is aten.t.default and left in self._sunk and left.args[0] not in self._fixed
        base = left.args[0] if turned else left
        assert isinstance(base, fx.Node)
        self.along.update({base: None, right: None})

        def product(values: Values) -> Tensor:
            # All steps side by side along the axis that is summed over: sum_t A_t B_t = [A_1 A_2 …] [B_1; B_2; …].
            a, b = values.along(base), values.along(right)
            if turned:
                return values.multiply(a.flatten(0, 1).t(), b.flatten(0, 1))
            return a.movedim(0, -2).flatten(-2) @ b.movedim(0, -3).flatten(-3, -2)

        return product

    def _half_product(self, node: fx.Node, left: fx.Node, right: fx.Node) -> Sum:
        target = node.target
        if left in self._fixed:
            after = self.plan(right)
            return lambda values: target(values.fixed(left), after(values))  # type: ignore[operator]
        before = self.plan(left)
        return lambda values: target(before(values), values.fixed(right))  # type: ignore[operator]

    def _looked_up(self, node: fx.Node) -> Sum | None:
        grad, index, *rest = node.args
        assert isinstance(grad, fx.Node)
        assert isinstance(index, fx.Node)
        if grad in self._fixed or index in self._fixed:
            return None
        self.along.update({grad: None, index: None})
        target = node.target
        return lambda values: target(values.along(grad), values.along(index), *rest)  # type: ignore[operator]
