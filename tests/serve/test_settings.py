"""Settings: what an author set on a module, and where the ends of it are; `test_fingerprint.py` has what follows."""

import numpy as np
import torch
from torch import nn

from hiddenstate.serve.settings import Ends, settings


class Leaky(nn.Module):
    floor = 0.5

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.leak = np.float32(0.25)
        self.apart = [nn.Linear(1, 1, bias=False)]

    def forward(self, x):
        return self.linear(x)


def test_attributes_and_constants_of_the_class_are_settings_but_not_methods_weights_and_modes():
    assert [name for name, _ in settings(Leaky())] == ["apart", "floor", "leak"]


def test_what_torchs_own_modules_keep_for_themselves_is_none():
    assert "num_heads" in dict(settings(nn.MultiheadAttention(4, 2)))
    assert not [name for name, _ in settings(nn.GRU(2, 3)) if name.startswith("_")]


def test_ends_have_places_and_what_was_met_before_is_named_by_its_own():
    model = Leaky()
    both = {"a": [1, 2.0]}
    both["b"] = both["a"]
    assert list(Ends(model).of(both, "x")) == [
        ("x", "dict"),
        ("x.str 'a'", "list"),
        ("x.str 'a'.0", "int 1"),
        ("x.str 'a'.1", "float 2.0"),
        ("x.str 'b'", "list x.str 'a'"),
    ]


def test_a_module_that_the_model_does_not_know_is_followed_and_one_that_it_knows_is_not():
    model = Leaky()
    found = [end for _, end in Ends(model).of([model.linear, *model.apart], "x")]
    assert [end for end in found if isinstance(end, torch.Tensor)] == [model.apart[0].weight]
