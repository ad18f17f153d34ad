"""`hiddenstate demo`: what the library does, shown on a model that trains in half a minute."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ..diagnosis import Report, diagnose
from ..measure import memory
from ..recording import record
from ..reporting import report
from .characters import STEPS, CharacterModel, Text, judge, train

_SHOWN = 160  # characters of unseen text in the report

_NEXT = {
    "hiddenstate diagnose my_file.py:make_model -i x.npy": "what is wrong with its state",
    "hiddenstate report my_file.py:make_model -i x.npy": "a page like the one above",
    "hiddenstate bench my_file.py:make_model -i x.npy": "what recording and carrying would cost",
    "hiddenstate --help": "the rest; in Python, help(hiddenstate) says what each part is for",
}


def show_all(folder: Path, updates: int, console: Console) -> None:
    """Train with and without a carried state, look inside, diagnose, plant a bug, and write the report."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more threads do not speed up a small model, and slow it down on a busy machine
    try:
        _show_all(folder, updates, console)
    finally:
        torch.set_num_threads(threads)


def _show_all(folder: Path, updates: int, console: Console) -> None:
    text = Text()
    console.print("\n[bold]A recurrent model has a hidden state: what it remembers of all it has read.[/]")
    count = f"{len(text.seen):,}"
    console.print(f"Here a small LSTM reads Python's own help texts, {count} characters, in chunks of {STEPS}.\n")
    model = _carry(text, updates, console)
    rows = text.prose(4, _SHOWN)
    _see(model, rows, console)
    _diagnose(model, rows, console)
    _write(model, rows, text, folder=folder, console=console)


def _carry(text: Text, updates: int, console: Console) -> CharacterModel:
    _title(console, "1. Carry", "hs.Carry(model)", "keeps the state between chunks, where it is usually lost")
    columns = (TextColumn("   {task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    losses, model = {}, CharacterModel(len(text.symbols))
    with Progress(*columns, console=console) as bars:
        for carried in (False, True):
            torch.manual_seed(0)  # both models start alike and read the same text
            model = CharacterModel(len(text.symbols))
            task = bars.add_task("state carried  " if carried else "state forgotten", total=updates)
            train(model, text.seen, updates, carried=carried, tell=lambda task=task: bars.advance(task))  # type: ignore[misc]
            losses[carried] = judge(model, text.unseen, carried=carried)
    table = Table("between chunks", "loss on unseen text", "perplexity")
    for carried, loss in losses.items():
        table.add_row("state carried" if carried else "state forgotten", f"{loss:.3f}", f"{math.exp(loss):.2f}")
    console.print(Padding(table, (0, 0, 0, 3)))
    gain = 1 - math.exp(losses[True]) / math.exp(losses[False])
    better = f"{abs(gain):.0%} {'less' if gain > 0 else 'more'} perplexed"
    _say(console, f"Same model, same text, same updates: with its state carried it is [bold]{better}[/].\n")
    return model


def _see(model: CharacterModel, rows: torch.Tensor, console: Console) -> None:
    _title(console, "2. See", "hs.record(model, gates=True)", "watches every state and gate of a plain call")
    with record(model, gates=True) as seen, torch.no_grad():
        model(rows)
    walk = seen["lstm"]
    texts, steps, units = walk.h.shape
    steady = float((walk.gates["forget"] > 0.9).float().mean())
    _say(console, f"{units} units, {steps} steps of {texts} texts: states h and c, gates {', '.join(walk.gates)}.")
    _say(console, f"Forget gates are open (above 0.9: they keep what they hold) {steady:.0%} of the time.")
    felt = memory(model, rows)
    reach = f"{'at least ' if felt.cut_off else ''}{felt.length} characters"
    _say(console, f"What it reads is felt for {reach}, until {felt.threshold:.0%} of the strongest effect is left.\n")


def _diagnose(model: CharacterModel, rows: torch.Tensor, console: Console) -> None:
    _title(console, "3. Diagnose", "hs.diagnose(model, x)", "asks what is wrong, on the running model")
    _verdict(console, diagnose(model, rows), "the trained model")
    sick = copy.deepcopy(model)
    sick.lstm.batch_first = False
    _say(console, "Now one classic bug is planted: [bold]batch_first=False[/], so the LSTM takes rows for steps.")
    _say(console, "Shapes still fit and nothing is raised, so it can go unnoticed for weeks.")
    _verdict(console, diagnose(sick, rows), "the model with the bug")


def _write(model: CharacterModel, rows: torch.Tensor, text: Text, *, folder: Path, console: Console) -> None:
    _title(console, "4. Report", "hs.report(model, x)", "puts all of it on one page")
    labels = [f"text {number}" for number in range(1, len(rows) + 1)]
    tokens = [text.decode(row) for row in rows]
    with console.status("   looking"):
        where = report(model, rows, path=folder / "report.html", tokens=tokens, labels=labels)
    _say(console, f"{where.stat().st_size / 1e6:.1f} MB, needs no network. Open it in a browser:")
    console.print(f"   [bold]{escape(str(where.resolve()))}[/]\n", soft_wrap=True)
    console.print("[bold]Next, with a model of your own:[/]")
    for command, gives in _NEXT.items():
        console.print(f"   [bold]{escape(command)}[/]  {gives}", soft_wrap=True)
    console.print()


def _title(console: Console, number: str, call: str, does: str) -> None:
    console.print(f"[bold cyan]{number}[/]  [bold]{call}[/] {does}.")


def _say(console: Console, text: str, indent: int = 3) -> None:
    console.print(Padding(text, (0, 0, 0, indent)))


def _verdict(console: Console, found: Report, name: str) -> None:
    if not len(found):
        _say(console, f"[green]✓ {name}: nothing found[/]\n")
    for one in found:
        mark = {"error": "red", "warning": "yellow", "note": "cyan"}[one.severity]
        _say(console, f"[{mark}]✗ {name}: {one.code} {escape(one.title)}[/] ({escape(one.where)})")
        for label, said in (("evidence", one.evidence), ("cause", one.cause), ("advice", one.advice)):
            _say(console, f"[dim]{label}:[/] {escape(' '.join(said.split()))}", indent=5)
    if len(found):
        console.print()
