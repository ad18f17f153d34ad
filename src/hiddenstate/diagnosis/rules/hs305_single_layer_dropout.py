"""HS305: dropout on a single layer.

`dropout=` on an `nn.LSTM`, `nn.GRU` or `nn.RNN` of one layer does nothing: torch drops out between layers.

**How it is known.** The settings of every such layer.

**Limit.** 2 layers or more.

## Sick

```python
import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")               # torch warns as well, once, when the layer is made
    model = nn.LSTM(3, 8, dropout=0.5, batch_first=True)
x = torch.randn(4, 10, 3)
```

## Healthy

```python
model = nn.LSTM(3, 8, num_layers=2, dropout=0.5, batch_first=True)
x = torch.randn(4, 10, 3)
```
"""

from __future__ import annotations

from torch import nn

from ..patient import Patient
from ..rule import Rule, Symptom


def check(patient: Patient) -> list[Symptom]:
    """Dropout on a layer of depth one, where torch applies none."""
    found = []
    for name, module in patient.model.named_modules():
        if isinstance(module, nn.RNNBase) and module.num_layers == 1 and module.dropout > 0:
            found.append(
                Symptom(
                    "warning",
                    name or "the model itself",
                    f"dropout={module.dropout:g} with num_layers=1 (needed: 2 layers or more).",
                    "torch drops out between layers only, and a single layer has no between",
                    f"nn.Dropout({module.dropout:g}) on the layer's output, or num_layers=2",
                    {"dropout": float(module.dropout), "layers": 1},
                )
            )
    return found


RULE = Rule("HS305", "dropout on a single layer", check, static=True)
