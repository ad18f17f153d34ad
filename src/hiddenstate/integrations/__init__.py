"""Other libraries: writers for a Monitor, and a callback for Lightning."""

from .lightning import monitor_callback
from .writers import TensorBoardWriter, WandbWriter

__all__ = ["TensorBoardWriter", "WandbWriter", "monitor_callback"]
