"""Ways to change, between two calls, what a step reads: after each, the fast engine must give what the loop gives.

Every entry of `CHANGES` makes a cell and returns it with the change, as a function without arguments.
"""

from __future__ import annotations

import abc
import builtins
import calendar
import collections
import dataclasses
import enum
import functools
import math
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune

SIZE = 4
CHANGES: dict[str, Callable[[], tuple[nn.Module, Callable[[], Any]]]] = {}
_AFTERWARDS: list[Callable[[], Any]] = []
FACTOR = 0.5
SETTINGS = {"scale": 0.5, "deep": {"scale": [0.5]}}
OUTSIDE = nn.Linear(SIZE, SIZE).double()


def helper(h):
    """Stand in for a function of the user's module."""
    return h * 0.5


def stopping(cell, h):
    """Stand in for a step that says where it fails; here, since pytest rewrites assertions in tests."""
    assert (h.abs() < 0.95).all(), "diverged"
    return h


def change(make: Callable[[], Any]) -> Callable[[], Any]:
    """Add a way to the table."""
    CHANGES[make.__name__.replace("_", " ")] = make
    return make


def afterwards(function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Have a change of the process taken back by `undo`: nobody knows when a cell goes."""
    _AFTERWARDS.append(functools.partial(function, *args, **kwargs))


def undo() -> None:
    """Take back what changes have done to the process."""
    while _AFTERWARDS:
        _AFTERWARDS.pop()()


class Plain(nn.Module):
    """The step that others vary: `after` works on the new state."""

    hidden_size = SIZE
    factor = 0.5

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.inner, self.recurrent = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE, bias=False)
        for name, value in attributes.items():
            setattr(self, name, value)
        self.double()

    def after(self, h):
        return h

    def forward(self, x, h):
        return self.after(torch.tanh(self.inner(x) + self.recurrent(h)))


def cell(after: Callable[[Any, Any], Any], **attributes: Any) -> Plain:
    """A cell of a class of its own with this `after`."""
    return type("Varied", (Plain,), {"after": after})(**attributes)


@dataclasses.dataclass
class Config:
    scale: float = 0.5
    inner: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    scale: float = 0.5


class Slotted:
    __slots__ = ("scale",)

    def __init__(self, scale):
        self.scale = scale


class Object:
    kind = 0.5

    def __init__(self, scale=0.5):
        self.scale = scale

    def times(self, h):
        return h * self.scale


class Mode(enum.Enum):
    HALF = 0.5
    DOUBLE = 2.0


class Small(enum.IntEnum):
    ONE = 1
    THREE = 3


class Pair(tuple):
    pass


# Attributes


@change
def float_attribute():
    c = cell(lambda s, h: h * s.scale, scale=0.5)
    return c, lambda: setattr(c, "scale", 0.25)


@change
def int_attribute():
    c = cell(lambda s, h: h * s.scale, scale=2)
    return c, lambda: setattr(c, "scale", 3)


@change
def int_becomes_float():
    c = cell(lambda s, h: h / s.scale if isinstance(s.scale, int) else h * s.scale, scale=2)
    return c, lambda: setattr(c, "scale", 2.0)


@change
def bool_becomes_int():
    c = cell(lambda s, h: h * 2 if s.flag is True else h * 3, flag=True)
    return c, lambda: setattr(c, "flag", 1)


@change
def bool_attribute():
    c = cell(lambda s, h: -h if s.flag else h, flag=True)
    return c, lambda: setattr(c, "flag", False)


@change
def string_attribute():
    c = cell(lambda s, h: getattr(torch, s.name)(h), name="tanh")
    return c, lambda: setattr(c, "name", "sin")


@change
def none_becomes_a_number():
    c = cell(lambda s, h: h if s.scale is None else h * s.scale, scale=None)
    return c, lambda: setattr(c, "scale", 0.1)


@change
def attribute_appears():
    c = cell(lambda s, h: h * s.extra if hasattr(s, "extra") else h)
    return c, lambda: setattr(c, "extra", 0.3)


@change
def attribute_goes():
    c = cell(lambda s, h: h * getattr(s, "extra", 1.0), extra=0.3)
    return c, lambda: delattr(c, "extra")


@change
def zero_turns_negative():
    c = cell(lambda s, h: h * math.copysign(1.0, s.scale), scale=0.0)
    return c, lambda: setattr(c, "scale", -0.0)


@change
def zero_turns_negative_in_a_tuple():
    c = cell(lambda s, h: h * math.copysign(1.0, s.scales[1]), scales=(1.0, 0.0))
    return c, lambda: setattr(c, "scales", (1.0, -0.0))


@change
def zero_turns_negative_under_a_fraction():
    c = cell(lambda s, h: torch.atan(1 / (h * 0 + s.scale)) * h, scale=0.0)
    return c, lambda: setattr(c, "scale", -0.0)


@change
def nan_attribute():
    c = cell(lambda s, h: h * (2 if s.scale != s.scale else 3), scale=math.nan)
    return c, lambda: setattr(c, "scale", 1.0)


@change
def list_item():
    c = cell(lambda s, h: h * s.scales[1], scales=[1.0, 0.5])
    return c, lambda: c.scales.__setitem__(1, 0.25)


@change
def list_grows():
    c = cell(lambda s, h: h * len(s.scales), scales=[1.0])
    return c, lambda: c.scales.append(1.0)


@change
def deep_dict():
    c = cell(lambda s, h: h * s.config["a"]["b"]["c"]["d"][0], config={"a": {"b": {"c": {"d": [0.5]}}}})
    return c, lambda: c.config["a"]["b"]["c"]["d"].__setitem__(0, 0.1)


@change
def dict_key_appears():
    c = cell(lambda s, h: h * s.config.get("scale", 1.0), config={"other": 1})
    return c, lambda: c.config.__setitem__("scale", 0.1)


@change
def dict_order():
    c = cell(lambda s, h: h * next(iter(s.config.values())), config={"a": 0.5, "b": 2.0})
    return c, lambda: c.config.__setitem__("a", c.config.pop("a"))


@change
def nested_object():
    c = cell(lambda s, h: h * s.config.scale, config=Object())
    return c, lambda: setattr(c.config, "scale", 0.1)


@change
def object_in_an_object():
    c = cell(lambda s, h: h * s.config.inner.scale, config=Config(inner=Object()))
    return c, lambda: setattr(c.config.inner, "scale", 0.1)


@change
def dataclass_field():
    c = cell(lambda s, h: h * s.config.scale, config=Config())
    return c, lambda: setattr(c.config, "scale", 0.1)


@change
def frozen_dataclass_replaced():
    c = cell(lambda s, h: h * s.config.scale, config=Frozen())
    return c, lambda: setattr(c, "config", Frozen(0.1))


@change
def simple_namespace():
    c = cell(lambda s, h: h * s.config.scale, config=types.SimpleNamespace(scale=0.5))
    return c, lambda: setattr(c.config, "scale", 0.1)


@change
def slots():
    c = cell(lambda s, h: h * s.config.scale, config=Slotted(0.5))
    return c, lambda: setattr(c.config, "scale", 0.1)


@change
def named_tuple():
    kind = collections.namedtuple("kind", "scale")
    c = cell(lambda s, h: h * s.config.scale, config=kind(0.5))
    return c, lambda: setattr(c, "config", kind(0.1))


@change
def numpy_array():
    c = cell(lambda s, h: h * torch.from_numpy(s.scales), scales=np.full(SIZE, 0.5))
    return c, lambda: c.scales.__setitem__(1, 0.1)


@change
def numpy_number():
    c = cell(lambda s, h: h * float(s.scale), scale=np.float64(0.5))
    return c, lambda: setattr(c, "scale", np.float64(0.1))


@change
def a_set():
    c = cell(lambda s, h: -h if "turn" in s.flags else h, flags={"turn"})
    return c, lambda: c.flags.discard("turn")


@change
def a_frozen_set():
    c = cell(lambda s, h: -h if "turn" in s.flags else h, flags=frozenset({"turn"}))
    return c, lambda: setattr(c, "flags", frozenset())


@change
def a_deque():
    c = cell(lambda s, h: h * s.scales[0], scales=collections.deque([0.5, 1.0]))
    return c, lambda: c.scales.rotate(1)


@change
def a_range():
    c = cell(lambda s, h: h * sum(s.steps), steps=range(3))
    return c, lambda: setattr(c, "steps", range(4))


@change
def enum_member():
    c = cell(lambda s, h: h * s.mode.value, mode=Mode.HALF)
    return c, lambda: setattr(c, "mode", Mode.DOUBLE)


@change
def int_enum_member():
    c = cell(lambda s, h: h * int(s.mode), mode=Small.ONE)
    return c, lambda: setattr(c, "mode", Small.THREE)


@change
def default_dict():
    c = cell(lambda s, h: h * s.config["scale"], config=collections.defaultdict(float, scale=0.5))
    return c, lambda: c.config.__setitem__("scale", 0.1)


@change
def ordered_dict():
    c = cell(lambda s, h: h * s.config.copy().popitem(False)[1], config=collections.OrderedDict(a=0.5, b=2.0))
    return c, lambda: c.config.move_to_end("a")


@change
def tuple_subclass_attribute():
    pair = Pair((1, 2))
    pair.scale = 0.5
    c = cell(lambda s, h: h * s.pair.scale, pair=pair)
    return c, lambda: setattr(pair, "scale", 0.1)


@change
def tensor_attribute_written():
    c = cell(lambda s, h: h * s.mask, mask=torch.ones(SIZE, dtype=torch.float64))
    return c, lambda: c.mask.__setitem__(1, 0.0)


@change
def tensor_attribute_replaced():
    c = cell(lambda s, h: h * s.mask, mask=torch.ones(SIZE, dtype=torch.float64))
    return c, lambda: setattr(c, "mask", torch.zeros(SIZE, dtype=torch.float64))


@change
def tensor_attribute_of_another_shape():
    c = cell(lambda s, h: h * s.mask, mask=torch.ones(SIZE, dtype=torch.float64))
    return c, lambda: setattr(c, "mask", torch.full((1, 1), 0.5, dtype=torch.float64))


@change
def tensor_written_past_its_version():
    c = cell(lambda s, h: h * s.mask, mask=torch.ones(SIZE, dtype=torch.float64))
    return c, lambda: c.mask.data.zero_()


@change
def tensors_in_a_list():
    c = cell(lambda s, h: h * s.masks[0], masks=[torch.ones(SIZE, dtype=torch.float64)])
    return c, lambda: c.masks.__setitem__(0, torch.zeros(SIZE, dtype=torch.float64))


@change
def tensor_in_a_nested_object():
    c = cell(lambda s, h: h * s.config.inner, config=Config(inner=torch.ones(SIZE, dtype=torch.float64)))
    return c, lambda: setattr(c.config, "inner", torch.zeros(SIZE, dtype=torch.float64))


@change
def scalar_tensor():
    c = cell(lambda s, h: h * s.scale, scale=torch.tensor(0.5, dtype=torch.float64))
    return c, lambda: c.scale.fill_(0.1)


# Classes, methods, functions


@change
def class_attribute():
    c = cell(lambda s, h: h * s.factor)
    return c, lambda: setattr(type(c), "factor", 0.1)


@change
def class_attribute_of_a_parent():
    parent = type("Parent", (Plain,), {"scale": 0.5, "after": lambda s, h: h * s.scale})
    c = type("Child", (parent,), {})()
    return c, lambda: setattr(parent, "scale", 0.1)


@change
def class_attribute_hidden_by_a_child():
    parent = type("Parent", (Plain,), {"scale": 0.5, "after": lambda s, h: h * s.scale})
    c = type("Child", (parent,), {})()
    return c, lambda: setattr(type(c), "scale", 0.1)


@change
def class_attribute_of_an_object():
    kind = type("Kind", (Object,), {"kind": 0.5})
    c = cell(lambda s, h: h * s.config.kind, config=kind())
    return c, lambda: setattr(kind, "kind", 0.1)


@change
def method_replaced_on_the_instance():
    c = cell(lambda s, h: h * 0.5)
    return c, lambda: setattr(c, "after", lambda h: h * 0.1)


@change
def method_replaced_on_the_class():
    c = cell(lambda s, h: h * 0.5)
    return c, lambda: setattr(type(c), "after", lambda s, h: h * 0.1)


@change
def method_of_an_object_replaced_on_its_class():
    kind = type("Kind", (Object,), {})
    c = cell(lambda s, h: s.config.times(h), config=kind())
    return c, lambda: setattr(kind, "times", lambda self, h: h * 0.1)


@change
def forward_replaced_on_the_class():
    c = cell(lambda s, h: h * 0.5)
    return c, lambda: setattr(type(c), "forward", lambda s, x, h: torch.tanh(s.inner(x) - h))


@change
def forward_replaced_on_the_instance():
    c = cell(lambda s, h: h * 0.5)
    return c, lambda: setattr(c, "forward", lambda x, h: torch.tanh(c.inner(x) - h))


@change
def forward_of_a_child_replaced():
    c = cell(lambda s, h: h)
    return c, lambda: setattr(c.inner, "forward", lambda x: F.linear(x, c.inner.weight) * 2)


@change
def code_of_a_method_replaced():
    c = cell(lambda s, h: h * 0.5)
    return c, lambda: setattr(type(c).after, "__code__", (lambda s, h: h * 0.1).__code__)


@change
def default_argument():
    def after(s, h, scale=0.5):
        return h * scale

    c = cell(after)
    return c, lambda: setattr(after, "__defaults__", (0.1,))


@change
def keyword_default():
    def after(s, h, *, scale=0.5):
        return h * scale

    c = cell(after)
    return c, lambda: setattr(after, "__kwdefaults__", {"scale": 0.1})


@change
def mutable_default_argument():
    def after(s, h, scale=[0.5]):  # noqa: B006
        return h * scale[0]

    c = cell(after)
    return c, lambda: after.__defaults__[0].__setitem__(0, 0.1)


@change
def object_as_a_default_argument():
    def after(s, h, config=Object()):  # noqa: B008
        return h * config.scale

    c = cell(after)
    after.__defaults__[0].scale = 0.5
    return c, lambda: setattr(after.__defaults__[0], "scale", 0.1)


@change
def default_argument_of_a_function():
    def times(h, scale=[0.5]):  # noqa: B006
        return h * scale[0]

    c = cell(lambda s, h: times(h))
    return c, lambda: times.__defaults__[0].__setitem__(0, 0.1)


@change
def class_of_an_object_replaced():
    kinds = [type("Kind", (), {"times": lambda self, h, scale=scale: h * scale}) for scale in (0.5, 0.1)]
    c = cell(lambda s, h: s.config.times(h), config=kinds[0]())
    return c, lambda: setattr(c.config, "__class__", kinds[1])


@change
def class_of_a_child_replaced():
    c = cell(lambda s, h: s.act(h), act=nn.Tanh())
    return c, lambda: setattr(c.act, "__class__", nn.Sigmoid)


@change
def a_property():
    c = cell(lambda s, h: h * s.scale, hidden=0.5)
    type(c).scale = property(lambda s: s.hidden * 2)
    return c, lambda: setattr(c, "hidden", 0.1)


@change
def a_property_replaced():
    c = cell(lambda s, h: h * s.scale)
    type(c).scale = property(lambda s: 0.5)
    return c, lambda: setattr(type(c), "scale", property(lambda s: 0.1))


@change
def class_replaced():
    c = cell(lambda s, h: h * 0.5)
    return c, lambda: setattr(c, "__class__", type("Other", (Plain,), {"after": lambda s, h: h * 0.1}))


@change
def closure_cell():
    scale = 0.5

    def after(s, h):
        return h * scale

    def set_scale():
        nonlocal scale
        scale = 0.1

    return cell(after), set_scale


@change
def closure_in_a_list():
    box = [0.5]
    return cell(lambda s, h: h * box[0]), lambda: box.__setitem__(0, 0.1)


@change
def closure_tensor():
    mask = torch.ones(SIZE, dtype=torch.float64)
    return cell(lambda s, h: h * mask), lambda: mask.zero_()


@change
def global_number():
    def set_factor(value):
        globals()["FACTOR"] = value

    set_factor(0.5)
    return cell(lambda s, h: h * FACTOR), lambda: set_factor(0.1)


@change
def global_dict():
    SETTINGS["deep"]["scale"][0] = 0.5
    return cell(lambda s, h: h * SETTINGS["deep"]["scale"][0]), lambda: SETTINGS["deep"]["scale"].__setitem__(0, 0.1)


@change
def global_function():
    before = helper

    def replace():
        globals()["helper"] = lambda h: h * 0.1

    globals()["helper"] = before if before.__name__ == "helper" else lambda h: h * 0.5
    return cell(lambda s, h: helper(h)), replace


@change
def global_module_weights():
    return cell(lambda s, h: torch.tanh(OUTSIDE(h))), lambda: OUTSIDE.weight.data.mul_(-1)


@change
def function_of_torch_replaced():
    kept = F.silu

    class Restoring:
        def __del__(self):
            F.silu = kept

    c = cell(lambda s, h: F.silu(h))
    object.__setattr__(c, "restoring", Restoring())
    return c, lambda: setattr(F, "silu", torch.sin)


@change
def partial_function():
    c = cell(lambda s, h: s.act(h), act=functools.partial(F.leaky_relu, negative_slope=0.5))
    return c, lambda: setattr(c, "act", functools.partial(F.leaky_relu, negative_slope=0.1))


@change
def function_attribute():
    c = cell(lambda s, h: s.act(h), act=torch.tanh)
    return c, lambda: setattr(c, "act", torch.sin)


@change
def list_of_functions():
    c = cell(lambda s, h: s.acts[0](h), acts=[torch.tanh, torch.sin])
    return c, lambda: c.acts.reverse()


@change
def callable_object():
    class Times:
        def __init__(self, scale):
            self.scale = scale

        def __call__(self, h):
            return h * self.scale

    c = cell(lambda s, h: s.act(h), act=Times(0.5))
    return c, lambda: setattr(c.act, "scale", 0.1)


# Modules and weights


@change
def weight_written():
    c = cell(lambda s, h: h)
    return c, lambda: c.inner.weight.data.mul_(-1)


@change
def weight_replaced():
    c = cell(lambda s, h: h)
    return c, lambda: setattr(c.inner, "weight", nn.Parameter(torch.randn(SIZE, SIZE).double()))


@change
def data_replaced():
    c = cell(lambda s, h: h)
    return c, lambda: setattr(c.inner.weight, "data", torch.randn(SIZE, SIZE).double())


@change
def weight_turned():
    c = cell(lambda s, h: h)
    return c, lambda: setattr(c.inner.weight, "data", torch.randn(SIZE, SIZE).double().t())


@change
def module_replaced():
    c = cell(lambda s, h: s.act(h), act=nn.Tanh())
    return c, lambda: setattr(c, "act", nn.Sigmoid())


@change
def module_settings():
    c = cell(lambda s, h: s.norm(h), norm=nn.LayerNorm(SIZE))
    return c, lambda: setattr(c.norm, "eps", 0.5)


@change
def module_list_grows():
    c = cell(lambda s, h: functools.reduce(lambda h, m: m(h), s.acts, h), acts=nn.ModuleList([nn.Tanh()]))
    return c, lambda: c.acts.append(nn.Sigmoid())


@change
def modules_swapped():
    c = cell(lambda s, h: s.two(s.one(h)), one=nn.Linear(SIZE, SIZE), two=nn.Linear(SIZE, SIZE))

    def swap():
        c.one, c.two = c.two, c.one

    return c, swap


@change
def weights_swapped():
    c = cell(lambda s, h: s.two(s.one(h)), one=nn.Linear(SIZE, SIZE), two=nn.Linear(SIZE, SIZE))

    def swap():
        c.one.weight, c.two.weight = c.two.weight, c.one.weight

    return c, swap


@change
def weights_tied():
    c = cell(lambda s, h: s.two(s.one(h)), one=nn.Linear(SIZE, SIZE), two=nn.Linear(SIZE, SIZE))
    return c, lambda: setattr(c.two, "weight", c.one.weight)


@change
def weights_untied():
    c = cell(lambda s, h: s.two(s.one(h)), one=nn.Linear(SIZE, SIZE), two=nn.Linear(SIZE, SIZE))
    c.two.weight = c.one.weight
    return c, lambda: setattr(c.two, "weight", nn.Parameter(torch.randn(SIZE, SIZE).double()))


@change
def weights_tied_elsewhere():
    c = cell(lambda s, h: s.three(s.two(s.one(h))), **{n: nn.Linear(SIZE, SIZE) for n in ("one", "two", "three")})
    c.two.weight = c.one.weight
    free = nn.Parameter(torch.randn(SIZE, SIZE).double())

    def retie():
        c.three.weight = c.one.weight
        c.two.weight = free

    return c, retie


@change
def pruned():
    c = cell(lambda s, h: h)
    return c, lambda: prune.l1_unstructured(c.inner, "weight", amount=0.5)


@change
def pruning_made_final():
    c = cell(lambda s, h: h)
    prune.random_unstructured(c.recurrent, "weight", amount=0.5)
    return c, lambda: prune.remove(c.recurrent, "weight")


@change
def weight_norm_added():
    c = cell(lambda s, h: h)

    def add():
        parametrizations.weight_norm(c.inner)
        c.inner.parametrizations.weight.original0.data.mul_(3)

    return c, add


@change
def weight_norm_removed():
    c = cell(lambda s, h: h)
    parametrizations.weight_norm(c.inner)
    c.inner.parametrizations.weight.original0.data.mul_(3)
    return c, lambda: parametrize.remove_parametrizations(c.inner, "weight")


@change
def bias_appears():
    c = cell(lambda s, h: h)
    return c, lambda: setattr(c.recurrent, "bias", nn.Parameter(torch.randn(SIZE).double()))


@change
def bias_goes():
    c = cell(lambda s, h: h)
    return c, lambda: setattr(c.inner, "bias", None)


@change
def bias_moves():
    c = cell(lambda s, h: s.two(s.one(h)), one=nn.Linear(SIZE, SIZE), two=nn.Linear(SIZE, SIZE, bias=False))

    def move():
        c.two.bias, c.one.bias = c.one.bias, None

    return c, move


@change
def parameter_becomes_a_buffer():
    c = cell(lambda s, h: h * s.gain)
    c.gain = nn.Parameter(torch.full((SIZE,), 0.5).double())

    def turn():
        del c.gain
        c.register_buffer("gain", torch.full((SIZE,), 0.1).double())

    return c, turn


@change
def parameter_list():
    c = cell(lambda s, h: h * s.gains[0])
    c.gains = nn.ParameterList([torch.full((SIZE,), 0.5).double()])
    return c, lambda: c.gains.__setitem__(0, nn.Parameter(torch.full((SIZE,), 0.1).double()))


@change
def parameters_in_a_dict():
    c = cell(lambda s, h: h * s.gains["a"])
    c.gains = {"a": nn.Parameter(torch.full((SIZE,), 0.5).double())}
    return c, lambda: c.gains.__setitem__("a", nn.Parameter(torch.full((SIZE,), 0.1).double()))


@change
def requires_grad_goes():
    c = cell(lambda s, h: h)
    return c, lambda: c.inner.weight.requires_grad_(False)


@change
def requires_grad_comes():
    c = cell(lambda s, h: h)
    c.inner.weight.requires_grad_(False)
    return c, lambda: c.inner.weight.requires_grad_(True)


@change
def training_mode():
    c = cell(lambda s, h: h * (0.5 if s.training else 0.1))
    return c, lambda: c.eval()


@change
def training_mode_of_a_child():
    c = cell(lambda s, h: s.drop(h), drop=nn.Dropout(0.5).eval())
    return c, lambda: setattr(c.drop, "p", 0.9)


@change
def state_dict_loaded():
    c = cell(lambda s, h: h)
    other = Plain()
    return c, lambda: c.load_state_dict(other.state_dict())


@change
def identities_used_again():
    c = cell(lambda s, h: h * s.config.scale, config=Object(0.5))

    def replace():  # often at the same address
        scale = 0.1
        c.config = None
        c.config = Object(scale)

    return c, replace


@change
def identities_of_functions_used_again():
    def times(scale):
        return lambda h: h * scale

    c = cell(lambda s, h: s.act(h), act=times(0.5))

    def replace():
        c.act = None
        c.act = times(0.1)

    return c, replace


@change
def identities_of_classes_used_again():
    def kind(scale):
        return type("Kind", (), {"times": lambda self, h: h * scale})

    c = cell(lambda s, h: s.config.times(h), config=kind(0.5)())

    def replace():
        import gc

        c.config = None
        gc.collect()
        c.config = kind(0.1)()

    return c, replace


# What is around


@change
def default_dtype():
    class Restoring:
        def __del__(self):
            torch.set_default_dtype(torch.float32)

    c = cell(lambda s, h: h + torch.full((SIZE,), 0.1).to(h.dtype))
    object.__setattr__(c, "restoring", Restoring())
    return c, lambda: torch.set_default_dtype(torch.float64)


@change
def module_of_python():
    module = types.ModuleType("settings")
    module.scale = 0.5
    return cell(lambda s, h: h * module.scale), lambda: setattr(module, "scale", 0.1)


@change
def hook_on_a_child():
    c = cell(lambda s, h: h)
    return c, lambda: c.inner.register_forward_hook(lambda m, args, out: out * 0.5)


@change
def attribute_read_by_name():
    c = cell(lambda s, h: h * getattr(s, s.which), which="small", small=0.1, large=0.9)
    return c, lambda: setattr(c, "which", "large")


@change
def attribute_by_getattr_method():
    kind = type("Kind", (), {"__getattr__": lambda self, name: self.__dict__["table"][name]})
    config = kind()
    config.table = {"scale": 0.5}
    c = cell(lambda s, h: h * s.config.scale, config=config)
    return c, lambda: config.table.__setitem__("scale", 0.1)


@change
def number_of_children():
    c = cell(lambda s, h: h * len(list(s.children())))
    return c, lambda: c.add_module("more", nn.Tanh())


@change
def one_attribute_for_two():
    c = cell(lambda s, h: h * s.one - h * s.two if s.one is s.two else h, one=[1], two=None)
    c.two = c.one
    c.after = types.MethodType(lambda s, h: h * (0.5 if s.one is s.two else 0.1), c)
    return c, lambda: setattr(c, "two", [1])


# What is looked for and not there, and what a class is


def module_named(name: str, source: str) -> types.ModuleType:
    """A module of the user's, found by its name."""
    made = sys.modules[name] = types.ModuleType(name)
    exec(source, vars(made))
    return made


@change
def attribute_that_was_not_there():
    def after(self, h):
        try:
            return h * self.gain
        except AttributeError:
            return h * 0.5

    c = cell(after)
    return c, lambda: setattr(c, "gain", 0.1)


@change
def parameter_that_was_not_there():
    def after(self, h):
        try:
            return h * self.gain
        except AttributeError:
            return h * 0.5

    c = cell(after)
    return c, lambda: c.register_parameter("gain", nn.Parameter(torch.full((SIZE,), 0.1).double()))


@change
def attribute_of_a_dict_hides_its_class():
    kind = type("Kind", (dict,), {"gain": 0.5, "__missing__": lambda self, key: self.gain})
    found = kind()
    c = cell(lambda s, h: h * s.found["any"], found=found)
    return c, lambda: setattr(found, "gain", 0.1)


@change
def name_of_a_module_that_was_not_there():
    module = module_named("changes_of_names", "")
    c = cell(lambda s, h: h * getattr(module, "gain", 0.5))
    return c, lambda: setattr(module, "gain", 0.1)


@change
def global_before_a_builtin():
    module = module_named("changes_of_builtins", "def after(self, h):\n    return h * abs(-0.5)\n")
    return cell(module.after), lambda: setattr(module, "abs", lambda value: 0.1)


@change
def global_before_a_builtin_in_a_function_inside():
    source = "def after(self, h):\n    inner = lambda v: v * abs(-0.5)\n    return inner(h)\n"
    module = module_named("changes_of_inner_builtins", source)
    return cell(module.after), lambda: setattr(module, "abs", lambda value: 0.1)


@change
def attribute_of_a_metaclass():
    meta = type("Meta", (type,), {"gain": 0.5})
    c = cell(lambda s, h: h * s.kind.gain, kind=meta("Kind", (), {}))
    return c, lambda: setattr(meta, "gain", 0.1)


@change
def bases_of_a_class():
    one, other = (type("Base", (), {"gain": gain}) for gain in (0.5, 0.1))
    kind = type("Kind", (one,), {})
    c = cell(lambda s, h: h * s.item.gain, item=kind())
    return c, lambda: setattr(kind, "__bases__", (other,))


@change
def class_registered_with_an_abstract_one():
    abstract = abc.ABCMeta("Abstract", (), {})
    kind = type("Kind", (), {})
    c = cell(lambda s, h: h * (0.5 if isinstance(s.item, abstract) else 0.1), item=kind())
    return c, lambda: abstract.register(kind)


@change
def method_of_tensors_replaced():
    c, before = cell(lambda s, h: h.tanh()), torch.Tensor.tanh
    afterwards(setattr, torch.Tensor, "tanh", before)
    return c, lambda: setattr(torch.Tensor, "tanh", lambda value: value * 0.1)


@change
def default_of_a_dataclass():
    kind = dataclasses.make_dataclass("Kind", [("gain", float, 0.5)])
    c = cell(lambda s, h: h * kind().gain)
    return c, lambda: setattr(kind.__init__, "__defaults__", (0.1,))


@change
def class_in_a_closure_replaced():
    kind, other = (dataclasses.make_dataclass("Kind", [("gain", float, gain)]) for gain in (0.5, 0.1))
    c = cell(lambda s, h: h * kind().gain)
    return c, lambda: setattr(type(c).after.__closure__[0], "cell_contents", other)


@change
def code_of_a_static_method():
    made = staticmethod(lambda h: h * 0.5)
    c = type("Varied", (Plain,), {"scaled": made, "after": lambda s, h: s.scaled(h)})()
    return c, lambda: setattr(made.__func__, "__code__", (lambda h: h * 0.1).__code__)


# Sizes of tensors that are not computed with, and how they lie in memory


def sized(ask: Callable[[Any], Any], before: torch.Tensor, after: torch.Tensor) -> Any:
    c = cell(lambda s, h: h * (ask(s.table) / 10), table=before)
    return c, lambda: setattr(c, "table", after)


@change
def size_of_a_tensor():
    return sized(lambda table: table.shape[0], torch.ones(4), torch.ones(7))


@change
def length_of_a_tensor():
    return sized(len, torch.ones(4), torch.ones(7))


@change
def last_size_of_a_tensor():
    return sized(lambda table: table.size(-1), torch.ones(3, 5), torch.ones(3, 6))


@change
def count_of_a_tensors_numbers():
    return sized(lambda table: table.numel(), torch.ones(2, 3), torch.ones(4, 5))


@change
def ratio_of_sizes():
    return sized(lambda table: table.shape[0] / table.shape[1], torch.ones(2, 4), torch.ones(4, 2))


@change
def rank_of_a_tensor():
    return sized(lambda table: table.dim(), torch.ones(4), torch.ones(4, 4))


@change
def stride_of_a_tensor():
    return sized(lambda table: table.stride(0), torch.ones(4, 6), torch.ones(6, 4).t())


@change
def place_of_a_tensor_in_its_memory():
    return sized(lambda table: table.storage_offset(), torch.ones(9)[2:], torch.ones(11)[4:])


@change
def dtype_of_a_tensor():
    return sized(lambda table: table.element_size(), torch.ones(4), torch.ones(4).double())


@change
def size_of_a_tensor_in_a_list():
    c = cell(lambda s, h: h * len(s.tables[0]), tables=[torch.ones(2)])
    return c, lambda: c.tables.__setitem__(0, torch.ones(3))


@change
def size_of_a_parameter():
    c = cell(lambda s, h: h / s.keys.shape[0], keys=nn.Parameter(torch.ones(3, 2)))
    return c, lambda: setattr(c, "keys", nn.Parameter(torch.ones(5, 2).double()))


@change
def size_of_a_tensor_in_a_closure():
    box = [torch.ones(3)]
    return cell(lambda s, h: h * box[0].shape[0]), lambda: box.__setitem__(0, torch.ones(2))


@change
def size_of_a_numpy_array():
    c = cell(lambda s, h: h * s.table.shape[0], table=np.ones(3))
    return c, lambda: setattr(c, "table", np.ones(2))


@change
def gradient_of_a_weight():
    c = cell(lambda s, h: h * (0.5 if s.inner.weight.grad is None else 0.1))
    return c, lambda: setattr(c.inner.weight, "grad", torch.zeros_like(c.inner.weight))


# Keys, items and slots that were not there


def excused(read: Callable[[Any], Any], **attributes: Any) -> Plain:
    """A cell that reads something, and goes on where it is not there."""

    def after(self, h):
        try:
            return h * read(self)
        except (KeyError, IndexError, AttributeError):
            return h * 0.5

    return cell(after, **attributes)


@change
def key_that_was_not_there():
    c = excused(lambda s: s.gains["gain"], gains={"other": 1.0})
    return c, lambda: c.gains.update(gain=0.1)


@change
def key_that_was_not_there_in_a_global():
    SETTINGS.pop("missing", None)
    c = excused(lambda s: SETTINGS["missing"])
    afterwards(SETTINGS.pop, "missing", None)
    return c, lambda: SETTINGS.update(missing=0.1)


@change
def key_that_was_not_there_deep_inside():
    c = excused(lambda s: s.gains["a"][1]["gain"], gains={"a": [{}, {}]})
    return c, lambda: c.gains["a"][1].update(gain=0.1)


@change
def key_that_was_not_there_in_a_subclass():
    c = excused(lambda s: s.gains["gain"], gains=type("Gains", (dict,), {})())
    return c, lambda: c.gains.update(gain=0.1)


@change
def key_that_was_not_there_in_an_ordered_dict():
    c = excused(lambda s: s.gains["gain"], gains=collections.OrderedDict())
    return c, lambda: c.gains.update(gain=0.1)


@change
def key_that_was_not_there_in_a_user_dict():
    c = excused(lambda s: s.gains["gain"], gains=collections.UserDict())
    return c, lambda: c.gains.update(gain=0.1)


@change
def key_that_was_not_there_behind_a_proxy():
    inside = {}
    c = excused(lambda s: s.gains["gain"], gains=types.MappingProxyType(inside))
    return c, lambda: inside.update(gain=0.1)


@change
def key_that_appears_in_front():
    front = {}
    c = cell(lambda s, h: h * s.gains["gain"], gains=collections.ChainMap(front, {"gain": 0.5}))
    return c, lambda: front.update(gain=0.1)


@change
def key_that_was_counted():
    c = cell(lambda s, h: h * (s.counts["steps"] + 1), counts=collections.Counter())
    return c, lambda: c.counts.update(["steps"])


@change
def key_that_is_missed():
    kind = type("Kind", (dict,), {"__missing__": lambda self, key: 0.5})
    c = cell(lambda s, h: h * s.gains["gain"], gains=kind())
    return c, lambda: c.gains.update(gain=0.1)


@change
def key_that_was_not_there_in_a_module_dict():
    c = excused(lambda s: s.inside["gain"].scale, inside=nn.ModuleDict())
    return c, lambda: c.inside.update({"gain": cell(lambda s, h: h, scale=0.1)})


@change
def key_that_was_not_there_in_a_parameter_dict():
    c = excused(lambda s: s.gains["gain"], gains=nn.ParameterDict())
    return c, lambda: c.gains.update({"gain": nn.Parameter(torch.full((SIZE,), 0.1).double())})


@change
def key_that_was_looked_for_among_keys():
    c = cell(lambda s, h: h * (0.5 if "gain" in list(s.gains.keys()) else 0.1), gains={})
    return c, lambda: c.gains.update(gain=1)


@change
def item_that_was_not_there():
    c = excused(lambda s: s.gains[1], gains=[0.5])
    return c, lambda: c.gains.append(0.1)


@change
def item_that_was_not_there_in_a_deque():
    c = excused(lambda s: s.gains[1], gains=collections.deque([0.5]))
    return c, lambda: c.gains.append(0.1)


@change
def slot_that_was_empty():
    config = Slotted.__new__(Slotted)
    c = excused(lambda s: s.config.scale, config=config)
    return c, lambda: setattr(config, "scale", 0.1)


@change
def slot_of_an_own_name_that_was_empty():
    class Kind:
        __slots__ = ("__gain",)

        def read(self):
            return self.__gain

        def fill(self):
            self.__gain = 0.1

    config = Kind()
    return excused(lambda s: s.config.read(), config=config), config.fill


@change
def attribute_of_a_function_that_was_not_there():
    def scaled(h):
        return h

    c = excused(lambda s: scaled.gain)
    return c, lambda: setattr(scaled, "gain", 0.1)


@change
def attribute_of_a_class_that_was_not_there():
    kind = type("Kind", (), {})
    c = excused(lambda s: s.item.gain, item=kind())
    return c, lambda: setattr(kind, "gain", 0.1)


@change
def member_of_an_enum_that_was_looked_for():
    c = cell(lambda s, h: h * (0.5 if s.mode in s.modes else 0.1), mode=Mode.HALF, modes={Mode.HALF})
    return c, lambda: c.modes.clear()


@change
def key_becomes_a_truth():
    c = cell(lambda s, h: h * (0.5 if isinstance(next(iter(s.gains)), bool) else 0.1), gains={1: 0})
    return c, lambda: (c.gains.clear(), c.gains.update({True: 0}))


@change
def element_becomes_a_truth():
    c = cell(lambda s, h: h * (0.5 if isinstance(next(iter(s.flags)), bool) else 0.1), flags={1})
    return c, lambda: setattr(c, "flags", {True})


# What belongs to the process, and what functions of Python's own library read


def environment(read: Callable[[], str]) -> Any:
    os.environ.pop("HIDDENSTATE_TESTED", None)
    c = cell(lambda s, h: h * float(read()))
    afterwards(os.environ.pop, "HIDDENSTATE_TESTED", None)
    return c, lambda: os.environ.update(HIDDENSTATE_TESTED="0.1")


@change
def environment_that_was_not_set():
    return environment(lambda: os.environ.get("HIDDENSTATE_TESTED", "0.5"))


@change
def environment_by_a_function():
    return environment(lambda: os.getenv("HIDDENSTATE_TESTED", "0.5"))


@change
def environment_that_was_set():
    c, set_it = environment(lambda: os.environ["HIDDENSTATE_TESTED"])
    os.environ["HIDDENSTATE_TESTED"] = "0.5"
    return c, set_it


@change
def environment_looked_into():
    return environment(lambda: 0.1 if "HIDDENSTATE_TESTED" in os.environ else 0.5)


@change
def limit_of_recursion():
    limit = sys.getrecursionlimit()
    c = cell(lambda s, h: h * (sys.getrecursionlimit() / limit))
    afterwards(sys.setrecursionlimit, limit)
    return c, lambda: sys.setrecursionlimit(limit + 500)


@change
def module_imported_in_the_step():
    module_named("changes_imported", "gain = 0.5")

    def after(self, h):
        import changes_imported  # type: ignore[import-not-found]

        return h * changes_imported.gain

    return cell(after), lambda: module_named("changes_imported", "gain = 0.1")


@change
def name_imported_in_the_step():
    module_named("changes_imported_from", "gain = 0.5")

    def after(self, h):
        from changes_imported_from import gain  # type: ignore[import-not-found]

        return h * gain

    return cell(after), lambda: module_named("changes_imported_from", "gain = 0.1")


@change
def module_imported_twice_and_written_after():
    module_named("changes_imported_twice", "gain = 0.5")

    def after(self, h):
        import changes_imported_twice  # type: ignore[import-not-found]

        return h * changes_imported_twice.gain

    module_named("changes_imported_twice", "gain = 0.5")
    return cell(after), lambda: setattr(sys.modules["changes_imported_twice"], "gain", 0.1)


@change
def module_looked_up_by_name():
    module_named("changes_looked_up", "gain = 0.5")
    c = cell(lambda s, h: h * sys.modules["changes_looked_up"].gain)
    return c, lambda: module_named("changes_looked_up", "gain = 0.1")


@change
def global_that_a_function_of_python_reads():
    before = calendar.firstweekday()
    c = cell(lambda s, h: h * (calendar.firstweekday() + 1))
    afterwards(calendar.setfirstweekday, before)
    return c, lambda: calendar.setfirstweekday(3)


@change
def global_of_a_module_with_a_name_of_pythons():
    before = sys.modules.get("this")

    def restore():
        sys.modules.pop("this", None)
        if before is not None:
            sys.modules["this"] = before

    module = module_named("this", "gain = 0.5\ndef scaled(h):\n    return h * gain\n")
    c = cell(lambda s, h: module.scaled(h))
    afterwards(restore)
    return c, lambda: setattr(module, "gain", 0.1)


@change
def cached_function_of_a_global():
    read = functools.lru_cache(lambda: SETTINGS["scale"])
    SETTINGS["scale"] = 0.5
    c = cell(lambda s, h: h * read())
    afterwards(SETTINGS.update, scale=0.5)
    return c, lambda: (SETTINGS.update(scale=0.1), read.cache_clear())


@change
def builtin_replaced():
    before = builtins.divmod
    c = cell(lambda s, h: h * (1 + divmod(7, 2)[0]))
    afterwards(setattr, builtins, "divmod", before)
    return c, lambda: setattr(builtins, "divmod", lambda one, other: (0, 0))


@change
def deterministic_algorithms():
    c = cell(lambda s, h: h * (0.1 if torch.are_deterministic_algorithms_enabled() else 0.5))
    afterwards(torch.use_deterministic_algorithms, False)
    return c, lambda: torch.use_deterministic_algorithms(True)


@change
def annotation_of_a_function():
    def scaled(h):
        return h

    scaled.__annotations__["h"] = 0.5
    c = cell(lambda s, h: h * scaled.__annotations__["h"])
    return c, lambda: scaled.__annotations__.update(h=0.1)


@change
def name_of_a_class():
    kind = type("Half", (Object,), {})
    c = cell(lambda s, h: h * (0.5 if type(s.config).__name__ == "Half" else 0.1), config=kind())
    return c, lambda: setattr(kind, "__name__", "Other")


@change
def attribute_of_a_thread():
    local = threading.local()
    local.gain = 0.5
    c = cell(lambda s, h: h * s.local.gain, local=local)
    return c, lambda: setattr(local, "gain", 0.1)


@change
def object_behind_a_weak_reference():
    config = Object(0.5)
    c = cell(lambda s, h: h * s.config().scale, config=weakref.ref(config))
    return c, lambda config=config: setattr(config, "scale", 0.1)


@change
def names_of_children():
    c = cell(lambda s, h: h * (0.5 if "more" in dict(s.named_children()) else 0.1))
    return c, lambda: c.add_module("more", nn.Tanh())


@change
def attributes_of_an_object_listed():
    c = cell(lambda s, h: h * len(vars(s.config)), config=Object())
    return c, lambda: setattr(c.config, "more", 1)


@change
def method_bound_to_another():
    one, other = Object(0.5), Object(0.1)
    c = cell(lambda s, h: s.act(h), act=one.times)
    return c, lambda: setattr(c, "act", other.times)


@change
def arguments_of_a_partial_function():
    inside = [0.5]
    c = cell(lambda s, h: s.act(h), act=functools.partial(lambda scales, h: h * scales[0], inside))
    return c, lambda: inside.__setitem__(0, 0.1)


@change
def item_of_a_dict_by_an_object():
    key = Object()
    c = cell(lambda s, h: h * s.gains.get(s.key, 0.5), gains={}, key=key)
    return c, lambda: c.gains.update({key: 0.1})


@change
def default_device():
    c = cell(lambda s, h: h * (0.5 if torch.get_default_device().type == "cpu" else 0.1))
    afterwards(torch.set_default_device, None)
    return c, lambda: torch.set_default_device("meta")
