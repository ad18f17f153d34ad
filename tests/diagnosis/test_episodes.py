"""Findings along a run: each begins once, takes new numbers where it lasts, and ends where it was judged."""

from hiddenstate.diagnosis import Finding
from hiddenstate.diagnosis.episodes import Episodes


def finding(code="HS402", where="rnn", **numbers):
    return Finding(code, "warning", where, "seen.", "a cause", "a way out", numbers)


def test_a_finding_begins_once_and_ends_once_and_all_are_told():
    told = []
    episodes = Episodes([], lambda each: told.append((each.finding.where, each.began, each.ended)))
    for step, found in enumerate([[finding()], [finding(), finding(where="out")], [finding(where="out")], []]):
        episodes.settle(step, found, lambda _: True)
    assert told == [("rnn", 0, None), ("out", 1, None), ("rnn", 0, 2), ("out", 1, 3)]
    assert [each.finding.where for each in episodes] == ["rnn", "out"]


def test_what_a_look_has_not_judged_lasts():
    episodes = Episodes([], None)
    episodes.begin(finding("HS505"), 0)
    episodes.settle(1, [], lambda one: one.code != "HS505")
    assert episodes.lasts("HS505")
    episodes.end("HS505", 2, where="elsewhere")
    assert episodes.lasts("HS505")
    episodes.end("HS505", 3)
    assert [each.ended for each in episodes] == [3]


def test_a_finding_that_lasts_takes_new_numbers_only_where_asked():
    episodes = Episodes([], None)
    episodes.begin(finding(calls=1), 0)
    episodes.begin(finding(calls=2), 1)
    assert next(iter(episodes)).finding.numbers == {"calls": 1}
    episodes.begin(finding(calls=3), 2, anew=True)
    (only,) = episodes
    assert (only.finding.numbers, only.began) == ({"calls": 3}, 0)
