"""The Lightning callback: with Lightning where it is there, and a clear word where it is not."""

import importlib.util
import sys

import pytest
import torch
from torch import nn

import hiddenstate as hs
from hiddenstate.cells import listeners
from hiddenstate.integrations import monitor_callback
from tests.support.calling import WAYS, Calling


def test_without_lightning_the_extra_is_named(monkeypatch):
    for name in ("lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(hs.errors.MissingExtra, match=r"pip install 'hiddenstate\[lightning\]'"):
        monitor_callback()


class Callback:
    """As much of Lightning's as is needed."""


class Logger:
    def __init__(self):
        self.logged = []

    def log_metrics(self, numbers, step):
        self.logged.append((step, numbers))


class Trainer:
    def __init__(self, optimizers):
        self.optimizers, self.loggers, self.global_step = optimizers, [Logger()], 0


@pytest.fixture
def lightning(monkeypatch):
    """A stand-in for Lightning."""
    stand_in = type(sys)("lightning.pytorch")
    stand_in.Callback = Callback
    monkeypatch.setitem(sys.modules, "lightning", type(sys)("lightning"))
    monkeypatch.setitem(sys.modules, "lightning.pytorch", stand_in)


@pytest.mark.usefixtures("lightning")
def test_the_callback_watches_from_start_to_end():
    model = nn.GRU(3, 4, batch_first=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer, callback = Trainer([optimizer]), monitor_callback(every=1)
    callback.on_train_start(trainer, model)
    for step in range(2):
        trainer.global_step = step
        model(torch.randn(2, 5, 3))[0].sum().backward()
        optimizer.step()
    callback.on_exception(trainer, model, KeyboardInterrupt())
    assert callback.monitor.step == 2
    assert len(trainer.loggers[0].logged) == 2
    assert "hiddenstate/model.norm" in trainer.loggers[0].logged[0][1]
    assert not listeners(model)


class Wrapped(nn.Module):
    """A module whose training step calls a part of it, as many LightningModules do."""

    def __init__(self, way):
        super().__init__()
        self.net = Calling(nn.GRU(3, 4, batch_first=True), way)

    def training_step(self, batch):
        return self.net(batch).square().mean()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.usefixtures("lightning")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # torch's, of reentrant checkpoints
def test_a_step_that_calls_a_part_of_the_module_is_heard(way):
    module = Wrapped(way)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    trainer, callback = Trainer([optimizer]), monitor_callback(every=1)
    callback.on_train_start(trainer, module)
    for step in range(3):
        trainer.global_step = step
        module.training_step(torch.randn(2, 5, 3)).backward()
        optimizer.step()
        optimizer.zero_grad()
    callback.on_train_end(trainer, module)
    assert callback.monitor.step == 3
    assert sum("hiddenstate/net.rnn.norm" in numbers for _, numbers in trainer.loggers[0].logged) == 3
    assert not any(listeners(part) for part in module.modules())


@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="lightning is not installed")
@pytest.mark.filterwarnings("ignore")  # Lightning's own, of torch's newer ways
def test_the_real_trainer_takes_it(tmp_path):
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.gru = nn.GRU(3, 4, batch_first=True)

        def forward(self, x):
            return self.gru(x)[0]

        def training_step(self, batch, _):
            return self(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    callback = monitor_callback(every=1)
    trainer = pl.Trainer(max_steps=2, callbacks=[callback], logger=False, enable_checkpointing=False, accelerator="cpu",
                         enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path)  # fmt: skip
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.randn(4, 5, 3), batch_size=2))
    assert callback.monitor.step == 2
