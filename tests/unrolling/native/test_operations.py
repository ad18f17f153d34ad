"""Every operation of the table, on every dtype and at the edges of its numbers, is what torch makes of it."""

import itertools

import pytest
import torch

from hiddenstate.unrolling.native import CompiledRunner, Unsupported, products
from hiddenstate.unrolling.native.operations import POINTWISE
from tests.support.chip import EmulatedRunner
from tests.support.operation_sweep import FLOATS, HALVES, Item, cases, compiled_results, difference

CHIP = (torch.float32, *HALVES)
PRECISION = {torch.float32: 4e-6, torch.float64: 1e-14, torch.bfloat16: 2e-2, torch.float16: 4e-3}
BY_OPERATION = {op: list(found) for op, found in itertools.groupby(cases(FLOATS), key=lambda case: case.operation)}
ON_CHIP = {op: list(found) for op, found in itertools.groupby(cases(CHIP), key=lambda case: case.operation)}


def wrong(found, make, *, gradients):
    """What is wrong with an operation in written code, case by case."""
    items = [item for case in found if (item := Item.of(case, gradients=gradients)) is not None]
    seen = []
    for start in range(0, len(items), 40):
        for item, ours in compiled_results(items[start : start + 40], make, gradients=gradients):
            for one, other in zip(ours, item.expected, strict=True):
                said = difference(one, other, PRECISION.get(other.dtype, 0), again=item)
                seen += [f"{item.case}: {said}"] if said else []
    return seen


def names(operation):
    return str(operation).removeprefix("aten.")


# Those in which whole numbers, truths and what is no number meet; `make test-long` sweeps all of them.
FEW = ["add.Tensor", "_to_copy.default", "eq.Scalar", "exp.default", "amax.default"]


@pytest.mark.skipif(not products.addresses(), reason="there is no C compiler")
@pytest.mark.parametrize("operation", [op for op in BY_OPERATION if names(op) in FEW], ids=names)
def test_an_operation_in_c_is_torchs(operation):
    assert wrong(BY_OPERATION[operation][::4], CompiledRunner, gradients=False) == []


@pytest.mark.long
@pytest.mark.parametrize("gradients", [False, True], ids=["values", "gradients"])
@pytest.mark.parametrize("operation", BY_OPERATION, ids=names)
def test_every_operation_in_c_is_torchs(operation, gradients):
    assert wrong(BY_OPERATION[operation], CompiledRunner, gradients=gradients) == []


@pytest.mark.long
@pytest.mark.parametrize("operation", ON_CHIP, ids=names)
def test_every_operation_in_a_kernel_is_torchs(operation):
    assert wrong(ON_CHIP[operation], EmulatedRunner, gradients=False) == []


def test_every_line_of_the_table_is_swept():
    assert set(POINTWISE) <= set(BY_OPERATION)


def test_a_loop_of_one_operation_is_refused_by_name_where_there_is_no_code_for_it():
    (case, *_) = BY_OPERATION[torch.ops.aten.pow.Tensor_Scalar]
    whole = [found for found in BY_OPERATION[case.operation] if found.dtypes == (torch.int64,)]
    with pytest.raises(Unsupported, match="whole numbers"):
        Item.of(whole[0], gradients=False).compiled(CompiledRunner)
