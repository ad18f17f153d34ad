import subprocess
import sys

import pytest

from hiddenstate.cli import main

MODELS = """
import torch
from torch import nn

class Tagger(nn.Module):
    def __init__(self, batch_first=True):
        super().__init__()
        self.embed = nn.Embedding(128, 5)
        self.lstm = nn.LSTM(5, 7, batch_first=batch_first)
        self.head = nn.Linear(7, 2)
    def forward(self, tokens):
        return self.head(self.lstm(self.embed(tokens))[0])

def healthy():
    torch.manual_seed(0)
    return Tagger()

def sick():
    torch.manual_seed(0)
    return Tagger(batch_first=False), torch.randint(0, 128, (4, 9))

def broken():
    return 1 / 0

def sized(width):
    return nn.GRU(width, 3)

def encode(text):
    return [1] * len(text)

gru = nn.GRU(3, 4, batch_first=True)
plain = nn.Linear(3, 4)
number = 3
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a user's module in it, as the working directory; the module is forgotten afterwards."""
    (tmp_path / "my_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in ("my_models", "bad_import", "bad_syntax"):
        sys.modules.pop(name, None)


class Ran:
    """What a command printed, and how it ended."""

    def __init__(self, code, out, err):
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def run(here, capsys):
    def call(*arguments):
        with pytest.raises(SystemExit) as ended:
            main([str(one) for one in arguments])
        said = capsys.readouterr()
        return Ran(ended.value.code or 0, said.out, said.err)

    return call


@pytest.fixture
def shell(here):
    """Run the command in a process of its own, as a person does."""

    def call(*arguments):
        command = [sys.executable, "-m", "hiddenstate", *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=here)
        return Ran(done.returncode, done.stdout, done.stderr)

    return call
