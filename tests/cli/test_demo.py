"""The demo: what it says is what it measured, and the page is there."""

import torch
from rich.console import Console

from hiddenstate.cli.app import app
from hiddenstate.cli.demo import _NEXT, show_all

COMMANDS = {command.name or command.callback.__name__ for command in app.registered_commands}


def test_the_demo_tells_its_story_and_writes_the_page(tmp_path, capsys):
    threads = torch.get_num_threads()
    show_all(tmp_path / "demo", 3, Console(width=120))
    said = capsys.readouterr().out
    story = ("1. Carry", "state forgotten", "state carried", "2. See", "3. Diagnose", "HS101", "4. Report", "Next")
    order = [said.index(word) for word in story]
    assert order == sorted(order)
    assert "batch_first" in said
    page = tmp_path / "demo" / "report.html"
    assert str(page) in said
    assert all(command.split()[1] in COMMANDS for command in _NEXT if not command.endswith("--help"))
    assert page.stat().st_size < 6e6
    assert torch.get_num_threads() == threads
