"""The pages in docs/findings and their table in docs/diagnosis.md, made from the docstrings of the rules.

They are kept in the repository, so that links work there too: `make pages` writes them, a test compares them.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from hiddenstate.diagnosis.rules import RULES

DOCS = Path(__file__).parent / "docs"
GROUPS = {"1": "Rows and steps", "2": "From call to call", "3": "Inside a cell", "4": "Values", "5": "Gradients"}
TABLE = re.compile(r"(?<=\| code \| what \|\n\|---\|---\|\n)(\|.*\n)+")


def pages() -> dict[Path, str]:
    """Return every file that is made from the rules, and what it should hold."""
    found = {}
    for rule in RULES:
        title, text = (sys.modules[rule.check.__module__].__doc__ or "").split("\n", 1)
        head = f"# {title.removesuffix('.')}"
        found[DOCS / "findings" / f"{rule.code}.md"] = f"{head}\n\n{text.strip()}\n\n[All findings](../diagnosis.md)\n"
    overview = DOCS / "diagnosis.md"
    found[overview] = TABLE.sub(lambda _: table(), overview.read_text(encoding="utf-8"))
    return found


def table() -> str:
    """Return the rows of the table of all findings, in the order of their codes."""
    rows, group = "", ""
    for rule in sorted(RULES, key=lambda rule: rule.code):
        if rule.code[2] != group:
            group = rule.code[2]
            rows += f"| **{GROUPS[group]}** | |\n"
        rows += f"| [{rule.code}](findings/{rule.code}.md) | {rule.title} |\n"
    return rows


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
