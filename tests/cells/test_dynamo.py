"""Code that torch.compile leaves alone runs in every call, as it is written."""

import torch

from hiddenstate.cells import uncompiled
from hiddenstate.cells.dynamo import mark_uncompiled


def test_what_is_kept_on_the_side_is_kept_in_every_call_of_compiled_code():
    seen = []

    @uncompiled
    def aside(x, *, more):
        """Add, and remember."""
        seen.append(float(x))
        return x + more

    def model(x):
        return aside(x * 2, more=1) * 3

    mark_uncompiled()
    compiled = torch.compile(model, backend="eager")
    results = [float(compiled(torch.tensor(float(n)))) for n in range(4)]
    assert results == [(2 * n + 1) * 3 for n in range(4)]
    assert seen == [0, 2, 4, 6]
    assert (aside.__name__, aside.__doc__) == ("aside", "Add, and remember.")


def test_an_error_in_it_is_the_users_to_catch():
    @uncompiled
    def failing(x):
        raise ZeroDivisionError(float(x))

    def model(x):
        try:
            return failing(x)
        except ZeroDivisionError:
            return x - 1

    for run in (model, torch.compile(model, backend="eager")):
        assert float(run(torch.tensor(3.0))) == 2
