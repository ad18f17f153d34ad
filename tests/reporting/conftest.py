import pytest
import torch
from torch import nn

from hiddenstate.reporting import report

TEXT = "it was $5 <b>&\n%{x} ok </script>"


class Tagger(nn.Module):
    """A model as people write it: tokens in, scores for each step out."""

    def __init__(self, symbols: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(symbols, 6)
        self.lstm = nn.LSTM(6, 10, num_layers=2, batch_first=True)
        self.head = nn.Linear(10, 3)

    def forward(self, tokens):
        return self.head(self.lstm(self.embed(tokens))[0])


class Sick(Tagger):
    """The same with a classic bug: the batch is taken for time."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 10, num_layers=2)


@pytest.fixture
def tokens():
    return torch.tensor([[ord(symbol) for symbol in TEXT], [ord("x")] * len(TEXT), list(range(len(TEXT)))])


@pytest.fixture(scope="session")
def pages(tmp_path_factory):
    """Two pages, made once: of a healthy model and of a sick one."""
    folder = tmp_path_factory.mktemp("pages")
    torch.manual_seed(0)
    x = torch.tensor([[ord(symbol) for symbol in TEXT], [ord("x")] * len(TEXT), list(range(len(TEXT)))])
    labels = ["text", "constant <i>", "rising"]
    healthy = report(Tagger(), x, path=folder / "healthy.html", tokens=list(TEXT), labels=labels)
    sick = report(Sick(), x, path=folder / "sick.html", tokens=list(TEXT), labels=labels)
    return {"healthy": healthy, "sick": sick}
