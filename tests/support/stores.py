"""Rows and changes of sessions, made up for the tests of stores."""

import numpy as np
import torch

from hiddenstate.serve.stores import Advance, Blobs, Change, Claim, Row, Store
from hiddenstate.state import Format, State


def row(seq: int = 0, *, touched: float = 10.0, state: bytes | None = b"state", fingerprint: str = "model") -> Row:
    return Row(seq, 2 * seq, 5.0, touched, fingerprint, state)


def begin(store: Store, *names: str, **facts: object) -> None:
    assert None not in store.commit([Change(name, None, row(**facts)) for name in names])


def claimed(store: Store, name: str) -> Claim:
    (found,) = store.claim([(name, -1)])
    assert isinstance(found, Claim)
    return found


def moved(names: list[str], tokens: list[int], seqs: dict[str, int], inputs: int) -> Advance:
    """Sessions that have come so many inputs further, with states and answers made up."""
    states = State({"h": torch.randn(2, len(names), 3), "c": torch.randn(2, len(names), 1)}, 1)
    answers = State({"0": torch.randn(len(names) * inputs, 4)})
    after = np.array([seqs[name] + inputs for name in names])
    return Advance(
        sessions=names,
        tokens=np.array(tokens),
        seqs=after,
        steps=2 * after,
        opened=np.full(len(names), 5.0),
        states=Blobs(Format(states), states),
        answers=Blobs(Format(answers), answers),
        inputs=inputs,
        touched=10.0,
        fingerprint="model",
    )
