"""A Lightning callback that runs a Monitor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..diagnosis import Episode, Monitor
from ..errors import MissingExtra


def monitor_callback(every: int = 50, **options: Any) -> Any:
    """Return a Lightning callback that watches the trained module with `hs.Monitor(..., every=every, **options)`.

    The numbers go to the trainer's loggers. `callback.monitor` is the Monitor; it stays available after training.
    """
    Callback = _callback_type()

    class MonitorCallback(Callback):  # type: ignore[misc, valid-type]
        """Watches the module while a Trainer fits it."""

        monitor: Monitor | None = None

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            """Attach the Monitor, and report parameters that no optimizer holds."""
            optimizers = trainer.optimizers
            own = optimizers[0] if len(optimizers) == 1 else None
            writers = [*options.get("writers", ()), _TrainerWriter(trainer)]
            self.monitor = Monitor(pl_module, own, every, **{**options, "writers": writers})

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            """Detach."""
            if self.monitor is not None:
                self.monitor.close()

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            """Detach the Monitor if training fails."""
            self.on_train_end(trainer, pl_module)

    return MonitorCallback()


class _TrainerWriter:
    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        for logger in self._trainer.loggers:
            logger.log_metrics(
                {f"hiddenstate/{name}": n for name, n in numbers.items()}, step=self._trainer.global_step
            )

    def finding(self, step: int, episode: Episode) -> None:
        code = f"hiddenstate/{episode.finding.code}"
        for logger in self._trainer.loggers:
            logger.log_metrics({code: float(episode.ended is None)}, step=self._trainer.global_step)

    def close(self) -> None:
        pass


def _callback_type() -> Any:
    for name in ("lightning.pytorch", "pytorch_lightning"):
        try:
            from importlib import import_module

            return import_module(name).Callback
        except ImportError:
            continue
    raise MissingExtra("a Lightning callback needs Lightning: pip install 'hiddenstate[lightning]'.")
