"""What is written at a call: a keyword that is True in so many words, and nothing else that comes to the same."""

import sys
from types import CodeType
from typing import Any

import pytest

from hiddenstate.diagnosis.source import raised_at, says


def here(**options: bool) -> tuple[CodeType, int]:
    frame = sys._getframe(1)
    return frame.f_code, frame.f_lasti


def refuse(*, strict=True):
    raise ValueError(strict)


def test_true_in_so_many_words_is_read():
    assert says(*here(strict=True), "strict")
    assert says(
        *here(
            loose=False,
            strict=True,
        ),
        "strict",
    )


def test_a_variable_another_keyword_and_silence_are_not():
    yes = True
    assert not says(*here(strict=yes), "strict")
    assert not says(*here(strict=False), "strict")
    assert not says(*here(loose=True), "strict")
    assert not says(*here(), "strict")


def test_code_that_nobody_can_read_says_nothing():
    made: dict[str, Any] = {"here": here}
    exec("place = here(strict=True)", made)
    scope, line = made["place"]
    assert not says(scope, line, "strict")
    assert not says(None, -1, "strict")


@pytest.mark.parametrize("said", [True, False])
def test_the_place_of_a_call_that_raised_is_found(said):
    with pytest.raises(ValueError, match="True") as raised:
        refuse(strict=True) if said else refuse()
    assert says(*raised_at(raised.value, "refuse"), "strict") is said
    assert raised_at(raised.value, "another") == (None, -1)
