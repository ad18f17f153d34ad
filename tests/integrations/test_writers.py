"""Writers for TensorBoard and W&B, tried on stand-ins with the calls that those libraries have."""

import pytest
import torch
from torch import nn

import hiddenstate as hs
from hiddenstate.integrations import TensorBoardWriter, WandbWriter


class Board:
    def __init__(self):
        self.scalars, self.texts, self.flushed = [], [], False

    def add_scalar(self, name, value, step):
        self.scalars.append((name, value, step))

    def add_text(self, name, text, step):
        self.texts.append((name, text, step))

    def flush(self):
        self.flushed = True


class Run:
    def __init__(self):
        self.logged, self.summary = [], {}

    def log(self, numbers):
        self.logged.append(numbers)


def train(writer):
    model = nn.RNN(3, 8, batch_first=True)
    with hs.Monitor(model, every=1, writers=[writer]):
        for scale in (1, 1000, 1):
            model(scale * torch.randn(4, 6, 3))[0].sum().backward()


def test_tensorboard_gets_scalars_and_texts():
    board = Board()
    train(TensorBoardWriter(board))
    assert {step for _, _, step in board.scalars} == {0, 1, 2}
    assert any(name == "hiddenstate/model.norm" for name, _, _ in board.scalars)
    assert [(text.partition(":")[0], step) for _, text, step in board.texts] == [("began", 1), ("ended", 2)]
    assert "HS402" in board.texts[0][1]
    assert board.flushed


def test_wandb_gets_metrics_and_a_mark_for_each_finding():
    run = Run()
    train(WandbWriter(run))
    marks = [numbers["hiddenstate/HS402"] for numbers in run.logged if "hiddenstate/HS402" in numbers]
    assert marks == [1.0, 0.0]
    assert [n["hiddenstate/step"] for n in run.logged if "hiddenstate/model.norm" in n] == [0, 1, 2]
    assert "until step 2" in run.summary["hiddenstate/HS402"]


def test_the_real_tensorboard_takes_it(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path) as board:
        train(TensorBoardWriter(board))
    assert list(tmp_path.iterdir())


def test_tensorboard_gets_histograms_of_real_steps_and_a_picture_of_each_track(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    lstm = nn.LSTM(3, 4, num_layers=2, batch_first=True)
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(2, 9, 3), torch.tensor([9, 4]), batch_first=True)
    with SummaryWriter(tmp_path) as board:
        with hs.record(lstm, gates=True) as rec:
            lstm(packed)
        TensorBoardWriter(board).states(rec, step=7)
    read = EventAccumulator(str(tmp_path)).Reload()
    assert {"hiddenstate/l0/h", "hiddenstate/l1/c", "hiddenstate/l0/forget"} <= set(read.Tags()["histograms"])
    assert read.Histograms("hiddenstate/l0/h")[0].histogram_value.num == 4 * (9 + 4)
    assert [image.step for image in read.Images("hiddenstate/l1")] == [7]
