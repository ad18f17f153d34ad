"""What torch's guards do not check: assignments to classes, new attributes, zeros that change their sign."""

from __future__ import annotations

import sys
from abc import get_cache_token
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import chain
from math import copysign
from operator import eq, is_
from types import (
    CellType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    NoneType,
)
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

_HEAP = 1 << 9  # the flag of a class that was made by Python code, and so can be written to
_ASKS_FOR_KINDS = {"isinstance", "issubclass"}
_IN_MODULES = ("_parameters", "_buffers", "_modules")
_WITHOUT_NAMES = {list, tuple, set, frozenset, deque, int, float, bool, str, NoneType}
_ALIAS = "__import_"  # by which torch's tracer keeps modules among the globals
_OF_THE_PROCESS: list[Any] = [sys.getrecursionlimit]  # functions that are called once, while a step is traced
if torch.distributed.is_available():
    _OF_THE_PROCESS += [getattr(torch.distributed, name) for name in ("is_initialized", "get_rank", "get_world_size")]
_NOWHERE = object()
_NONE: frozenset[str] = frozenset()
_DEEPEST = 4  # levels of containers that are looked into


class Unguarded:
    """What a trace read and its guards do not hold fast: kept here by identity, so that no other can take its id.

    What refers to a cell must not keep it alive: such things are known by weak references, and their end is a change.
    """

    def __init__(self, codes: frozenset[CodeType]) -> None:
        """Begin with nothing held; `codes` are what was traced."""
        self._codes = codes
        self._classes: dict[type, _ClassContent] = {}
        self._functions: list[_Definition] = []  # that are no part of a class
        self._looks: dict[str, str] = {}  # where something was read that equals others -> how it looked
        self._names: dict[str, tuple[frozenset[str], ...]] = {}  # where an object was read -> its own attributes
        self._places: tuple[CodeType, CodeType] | None = None  # all of these places in one expression each
        # What a class is an instance of may be told to an abstract one later.
        self._asked = frozenset(name for code in codes for name in names_in(code))
        kinds = bool(_ASKS_FOR_KINDS & self._asked)
        self._registered = get_cache_token() if kinds else None
        self._imported: dict[str, ModuleType] = {}  # name -> the module that it led to
        self._kept: list[Any] = []
        self._refs: list[ref[Any]] = []
        self._slots: dict[type, list[MemberDescriptorType]] = {}  # of what was read: these classes are held fast
        self._gone = False
        self.unsure = ""  # what was read and may have been misunderstood, or may change unseen

    def add(self, name: str, scope: Mapping[str, Any], *, by_identity: bool) -> None:
        """Hold one value that a guard looks at, found by `name` within `scope`."""
        try:
            value = eval(name, dict(scope))
        except Exception:  # made by torch for the trace, or not there, which is what is guarded
            return
        self._watch_class(value if isinstance(value, type) else type(value))
        if by_identity and not isinstance(value, Tensor):
            self._hold(value.__func__ if isinstance(value, MethodType) else value)
        if isinstance(value, float) and value == 0 and copysign(1, value) < 0:
            self.unsure = "it reads -0.0, of which torch's tracer may lose the sign"
        if any(value is known for known in _OF_THE_PROCESS):
            self.unsure = "it asks for what is set for the whole process, such as the rank"
        look, names = _look(value), _names(value, self._asked, self._slots)
        if look is not None:
            self._looks[name] = look
        if names is not None:  # of an attribute that was not there nothing is guarded
            self._names[name] = tuple(map(frozenset, names))

    def settle(self, scope: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Forget what was made for the trace alone; return globals that torch may have looked for elsewhere."""
        aliases = {name: value for name, value in scope["G"].items() if name.startswith(_ALIAS)}
        known = [(name, module, _ALIAS + name.replace(".", "_dot_")) for name, module in list(sys.modules.items())]
        self._imported = {name: module for name, module, alias in known if aliases.get(alias) is module}
        if {alias for _, module, alias in known if aliases.get(alias) is module} != aliases.keys():
            self.unsure = "it reads a module that is not to be found by its name"
        self._refs = [each for each in self._refs if each() is not None]
        self._gone = False
        found = [definition for content in self._classes.values() for definition in content.functions]
        return misnamed(definition.function() for definition in (*found, *self._functions))

    def holds(self, scope: dict[str, Any]) -> bool:
        """Say whether all is as it was read."""
        if self._gone or not all(content.same(kind) for kind, content in self._classes.items()):
            return False
        if not all(function.same() for function in self._functions):
            return False
        if self._registered is not None and self._registered != get_cache_token():
            return False
        if not all(sys.modules.get(name) is module for name, module in self._imported.items()):
            return False
        if self._places is None:
            self._places = _together(self._looks), _together(self._names)
        try:
            looked, named = (eval(places, scope) for places in self._places)
        except Exception:  # it is not to be found any more
            return False
        asked, slots = self._asked, self._slots
        for value, names in zip(named, self._names.values(), strict=True):
            if not _has_names(value, names, asked, slots):
                return False
        return all(_look(value) == look for value, look in zip(looked, self._looks.values(), strict=True))

    def _hold(self, value: Any) -> None:
        if self._traced(value):
            self._functions.append(_Definition(value))
            self._look_into(self._functions[-1:])
        try:
            self._refs.append(ref(value, self._lost))
        except TypeError:  # numbers, texts, tuples: nothing that leads back to a cell, as a rule
            self._kept.append(value)

    def _lost(self, _: Any) -> None:
        self._gone = True

    def _watch_class(self, kind: type) -> None:
        # What a class does not have is looked for in its own class.
        for base in chain.from_iterable(each.__mro__ for each in (kind, type(kind))):
            if base.__flags__ & _HEAP and base not in self._classes:
                self._classes[base] = _ClassContent(base, [f for f in functions_in(base) if self._concerns(base, f)])
                self._look_into(self._classes[base].functions)

    def _concerns(self, kind: type, function: FunctionType) -> bool:
        """Say whether a function of a class was traced, or may have been read without that: `__init__`, by its text."""
        return self._traced(function) or not _is_torchs(kind.__module__)

    def _traced(self, value: Any) -> bool:
        return isinstance(value, FunctionType) and value.__code__ in self._codes

    def _look_into(self, definitions: Iterable[_Definition]) -> None:
        for definition in definitions:
            if definition.code not in self._codes:
                continue
            if any(map(_is_object, definition.values())):
                name = definition.code.co_name
                self.unsure = f"an argument of {name} is by default an object, which may change unseen"
            for kind in definition.kinds:
                if isinstance(kind, type):
                    self._watch_class(kind)


class _ClassContent:
    """What a class holds, and its bases: by identity, and its functions as they were."""

    __slots__ = ("bases", "equals", "functions", "names", "values")

    def __init__(self, kind: type, functions: Iterable[FunctionType]) -> None:
        content = dict(vars(kind))
        self.bases, self.names, self.values = kind.__mro__, tuple(content), tuple(content.values())
        # Most things equal only themselves, so that all can be compared at once; these are looked at one by one.
        self.equals = [place for place, value in enumerate(self.values) if not _equals_itself_alone(value)]
        self.functions = list(map(_Definition, functions))

    def same(self, kind: type) -> bool:
        """Say whether the class is as it was."""
        now = vars(kind)
        if kind.__mro__ is not self.bases or tuple(now) != self.names:
            return False
        was, values = self.values, tuple(now.values())
        for place in self.equals:
            if values[place] is not was[place]:
                return False
        return values == was and all(function.same() for function in self.functions)


def _equals_itself_alone(value: Any) -> bool:
    kind: Any = type(value)
    return kind.__eq__ is object.__eq__


class _Definition:
    """A function as it was: its code, what its arguments are by default, and the classes that it calls by a name."""

    __slots__ = ("code", "content", "defaults", "function", "keywords", "kinds", "names")

    def __init__(self, function: FunctionType) -> None:
        self.function, self.code = ref(function), function.__code__
        self.defaults, self.keywords = function.__defaults__, function.__kwdefaults__
        mutable = any(isinstance(value, list | dict | set) for value in self.values())
        self.content = _content(self.values()) if mutable else None
        self.names = () if _is_torchs(function.__globals__.get("__name__", "")) else names_in(self.code)
        self.kinds = _kinds(function, self.names)

    def values(self) -> list[Any]:
        """Return what its arguments are by default."""
        return [*(self.defaults or ()), *(self.keywords or {}).values()]

    def same(self) -> bool:
        """Say whether the function is as it was."""
        function = self.function()
        if function is None or function.__code__ is not self.code or function.__defaults__ is not self.defaults:
            return False
        if function.__kwdefaults__ is not self.keywords:
            return False
        if self.names and not all(map(is_, self.kinds, _kinds(function, self.names))):
            return False
        return self.content is None or bool(_content(self.values()) == self.content)


def misnamed(functions: Iterable[FunctionType | None]) -> list[dict[str, Any]]:
    """Return the globals of functions whose module cannot be imported by its name, or is another by that name."""
    found = {id(function.__globals__): function.__globals__ for function in functions if function is not None}
    return [names for names in found.values() if "__name__" in names and _imported(names["__name__"]) is not names]


def functions_of(kind: type) -> list[FunctionType]:
    """Return the functions that a class is made of, its bases included, but for torch's own."""
    return [function for base in kind.__mro__ if not _is_torchs(base.__module__) for function in functions_in(base)]


def functions_in(kind: type) -> list[FunctionType]:
    """Return the functions that stand in a class itself, within properties and static methods too."""
    return [f for value in vars(kind).values() for f in _inside(value) if isinstance(f, FunctionType)]


def _inside(value: Any) -> tuple[Any, ...]:
    if isinstance(value, staticmethod | classmethod):
        return (value.__func__,)
    if isinstance(value, property):
        return (value.fget, value.fset)
    return (value.func,) if isinstance(value, cached_property) else (value,)


def _is_torchs(module: str) -> bool:
    return module == "torch" or module.startswith("torch.")


def _imported(name: str) -> dict[str, Any] | None:
    module = sys.modules.get(name)
    return None if module is None else vars(module)


def _kinds(function: FunctionType, names: tuple[str, ...]) -> list[Any]:
    """Return the classes that a function's names lead to, and which names lead nowhere yet.

    Torch guards neither a class that is called by the name of a closure, nor that no global stands before a builtin.
    """
    known = function.__globals__
    found = [known.get(name, _NOWHERE) for name in names]
    found += [_closed(cell) for cell in function.__closure__ or ()]
    return [value if value is _NOWHERE or isinstance(value, type) else None for value in found]


def names_in(code: CodeType) -> tuple[str, ...]:
    """Return the names and texts by which code, and the code within it, may look for anything."""
    inner = [const for const in code.co_consts if isinstance(const, CodeType)]
    texts = [const for const in code.co_consts if isinstance(const, str) and const.isidentifier()]
    return (*code.co_names, *texts, *(name for each in inner for name in names_in(each)))


def _closed(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _NOWHERE


def _is_object(value: Any) -> bool:
    """Say whether a value has attributes of its own that may change."""
    return hasattr(value, "__dict__") and not isinstance(value, Tensor | type | FunctionType | ModuleType)


def _content(value: Any, depth: int = 0) -> Any:
    """Return what a container holds, in a form that equals no other."""
    if depth < _DEEPEST and isinstance(value, list | tuple | set):
        return (type(value), *(_content(inner, depth + 1) for inner in value))
    if depth < _DEEPEST and isinstance(value, dict):
        return (dict, *((repr(key), _content(inner, depth + 1)) for key, inner in value.items()))
    return (type(value), repr(value) if isinstance(value, bool | int | float | complex | str) else id(value))


def _names(
    value: Any, asked: frozenset[str], slots: dict[type, list[MemberDescriptorType]]
) -> tuple[Iterable[Any], ...] | None:
    """Return the keys and attributes that an object holds itself: of what is not there nothing is guarded."""
    scope = vars(value) if isinstance(value, ModuleType) else value
    if (isinstance(scope, dict) and "__builtins__" in scope) or isinstance(value, ModuleType):
        # Of names in modules there are many, and ever more in some.
        return None if _is_torchs(scope.get("__name__", "")) else (asked & scope.keys(),)
    if isinstance(value, type | Tensor) or type(value) in _WITHOUT_NAMES:
        return None
    own = getattr(value, "__dict__", None)
    held: list[Mapping[Any, Any]] = [own] if isinstance(own, dict) else []
    if isinstance(value, dict | MappingProxyType):
        held.append(value)
    if isinstance(value, nn.Module):
        held += [names for names in map(held[0].get, _IN_MODULES) if isinstance(names, dict)]
    filled = _filled_slots(value, slots)
    if not held and not slots[type(value)]:
        return None  # nothing can appear in it
    return (*(dict.keys(each) if isinstance(each, dict) else each.keys() for each in held), filled)


def _filled_slots(value: Any, known: dict[type, list[MemberDescriptorType]]) -> frozenset[str]:
    """Return the slots of an object that are filled."""
    slots = known.get(type(value))
    if slots is None:
        made = [base for base in type(value).__mro__ if base.__flags__ & _HEAP and "__slots__" in vars(base)]
        slots = [slot for base in made for slot in vars(base).values() if isinstance(slot, MemberDescriptorType)]
        known[type(value)] = slots
    if not slots:
        return _NONE
    return frozenset(f"{slot.__objclass__.__name__}.{slot.__name__}" for slot in slots if _filled(slot, value))


def _filled(slot: MemberDescriptorType, value: Any) -> bool:
    try:
        slot.__get__(value)
    except AttributeError:
        return False
    return True


def _together(names: Iterable[str]) -> CodeType:
    return compile(f"({''.join(f'{name}, ' for name in names)})", "<what was read>", "eval")


def _has_names(
    value: Any,
    names: tuple[frozenset[str], ...],
    asked: frozenset[str],
    slots: dict[type, list[MemberDescriptorType]],
) -> bool:
    if type(value) is OrderedDict and len(names) == 3:  # as a module has seven of, for hooks
        if not (names[0] or names[1]):
            return not (value or value.__dict__)
        return value.__dict__.keys() == names[0] and value.keys() == names[1]
    if type(value) is dict and len(names) == 2 and "__builtins__" not in value:
        return value.keys() == names[0]
    now = _names(value, asked, slots)
    return now is not None and len(now) == len(names) and all(map(eq, now, names))


def _look(value: Any) -> str | None:
    """Return how a value looks that may equal others of another look: zeros have signs, ordered dicts an order."""
    if isinstance(value, dict | set | frozenset) and not all(type(key) is str for key in value):
        return repr(list(value))  # 1 equals True
    if isinstance(value, OrderedDict) and len(value) > 1:
        return repr(list(value))
    return repr(value) if _has_zero(value) else None


def _has_zero(value: Any, depth: int = 0) -> bool:
    if isinstance(value, float | complex):
        return value == 0 or isinstance(value, complex)
    if depth < _DEEPEST and isinstance(value, tuple | list | set | frozenset):
        return any(_has_zero(inner, depth + 1) for inner in value)
    if depth < _DEEPEST and isinstance(value, dict):
        return any(_has_zero(inner, depth + 1) for inner in (*value, *value.values()))
    return False
