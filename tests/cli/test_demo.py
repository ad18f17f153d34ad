"""The demo: what it says is what it measured, and the page is there."""

import torch
from rich.console import Console

from hiddenstate.cli.characters import CharacterModel, Text, judge, train
from hiddenstate.cli.demo import show_all


def test_the_demo_tells_its_story_and_writes_the_page(tmp_path, capsys):
    threads = torch.get_num_threads()
    show_all(tmp_path / "demo", 3, Console(width=120))
    said = capsys.readouterr().out
    story = ("1. Carry", "state forgotten", "state carried", "2. See", "3. Diagnose", "HS101", "4. Report")
    order = [said.index(word) for word in story]
    assert order == sorted(order)
    assert "batch_first" in said
    page = tmp_path / "demo" / "report.html"
    assert str(page) in said
    assert page.stat().st_size < 6e6
    assert torch.get_num_threads() == threads


def test_a_carried_state_helps_on_unseen_text():
    text = Text()
    losses = {}
    for carried in (False, True):
        torch.manual_seed(0)
        model = CharacterModel(len(text.symbols), units=32)
        train(model, text.seen[:40_000], 90, carried=carried, tell=lambda: None)
        losses[carried] = judge(model, text.unseen[:8000], carried=carried)
    assert losses[True] < losses[False]


def test_training_goes_on_beyond_the_end_of_the_text():
    text = Text()
    told = []
    train(CharacterModel(len(text.symbols), units=4), text.seen[:2000], 9, carried=True, tell=lambda: told.append(1))
    assert len(told) == 9


def test_text_is_read_back_as_it_was():
    text = Text()
    assert "".join(text.decode(text.encode("hidden state"))) == "hidden state"
    rows = text.prose(3, 50)
    assert rows.shape == (3, 50)
    assert sum(symbol.isalpha() for symbol in text.decode(rows[0])) > 30
