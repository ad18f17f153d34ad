"""Rows and changes of sessions, made up for the tests of stores."""

from hiddenstate.serve.stores import Change, Claim, Row, Store


def row(seq: int = 0, *, touched: float = 10.0, state: bytes | None = b"state", fingerprint: str = "model") -> Row:
    return Row(seq, 2 * seq, 5.0, touched, fingerprint, state)


def begin(store: Store, *names: str, **facts: object) -> None:
    assert None not in store.commit([Change(name, None, row(**facts)) for name in names])


def claimed(store: Store, name: str) -> Claim:
    (found,) = store.claim([(name, -1)])
    assert isinstance(found, Claim)
    return found
