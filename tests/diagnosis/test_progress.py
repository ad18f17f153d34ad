"""The bar: for a person at a terminal, once it has taken long."""

import sys

from hiddenstate.diagnosis import progress


def test_nothing_is_shown_where_nobody_watches(capsys, monkeypatch):
    monkeypatch.setattr(progress, "_PATIENCE", 0.0)
    assert list(progress.tracked([1, 2], "diagnosing", 2)) == [1, 2]
    assert capsys.readouterr().err == ""


def test_a_bar_is_shown_at_a_terminal_after_a_while(monkeypatch):
    shown = []

    class Bar:
        task_ids = (0,)

        def update(self, task, completed):
            shown.append(completed)

        def stop(self):
            shown.append("stopped")

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(progress, "_bar", lambda label, total: Bar())
    assert list(progress.tracked([1, 2], "diagnosing", 2)) == [1, 2]
    assert shown == [], "two seconds have not passed"
    monkeypatch.setattr(progress, "_PATIENCE", -1.0)
    assert list(progress.tracked([1, 2], "diagnosing", 2)) == [1, 2]
    assert shown == [1, 2, "stopped"]
