"""`dataclass`, as `dataclasses` has it, in a fifth of the time.

The standard library compiles six methods of a frozen class and copies its fields by name; with some two hundred classes
that is a third of what starting the compiler takes. Here it reads the fields alone; what is compiled is a constructor,
which fills slots directly, and comparison and hash where they are used.
"""

from __future__ import annotations

import dataclasses
from dataclasses import MISSING, Field, FrozenInstanceError, fields
from functools import partial
from types import MemberDescriptorType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(cls=None, /, *, frozen=False, slots=False, kw_only=False):
        """The standard decorator, with those of its options that are in use."""
        made = partial(_made, frozen=frozen, slots=slots, kw_only=kw_only)
        return made if cls is None else made(cls)


__all__ = ["dataclass"]


def _made(cls: type, frozen: bool, slots: bool, kw_only: bool) -> type:
    written = {name for name, value in vars(cls).items() if value is not None}  # None: an `__eq__` without `__hash__`
    if cls.__doc__ is None:
        cls.__doc__ = cls.__name__  # otherwise made of the signature
    of_fields = dataclasses.dataclass(init=False, repr=False, eq=False, slots=slots, kw_only=kw_only)
    cls = of_fields(cls)
    methods = {"__init__": _constructor(cls, frozen), "__repr__": _shown, **_compared_later(cls, frozen)}
    if frozen:
        methods |= {"__setattr__": _refuse, "__delattr__": _refuse}
        if slots:
            methods |= {"__getstate__": _state, "__setstate__": _restore}
    for name, method in methods.items():
        if name not in written:
            setattr(cls, name, method)
    return cls


def _constructor(cls: type, frozen: bool) -> Any:
    known: dict[str, Any] = {"_MISSING": MISSING, "_put": object.__setattr__}
    parameters: list[str] = []
    keywords: list[str] = []
    body: list[str] = []
    for f in fields(cls):
        value = f.name
        if f.init:
            (keywords if f.kw_only else parameters).append(_parameter(f, known))
        if f.default_factory is not MISSING:
            known[f"_make_{f.name}"] = f.default_factory
            value = f"_make_{f.name}()" + (f" if {f.name} is _MISSING else {f.name}" if f.init else "")
        elif not f.init:
            continue
        body.append(_assignment(cls, f.name, value, known) if frozen else f"self.{f.name} = {value}")
    if hasattr(cls, "__post_init__"):
        body.append("self.__post_init__()")
    signature = ", ".join(["self", *parameters, *(["*", *keywords] if keywords else [])])
    return _compiled(cls, f"def __init__({signature}): {'; '.join(body) or 'pass'}", known)["__init__"]


def _compared_later(cls: Any, frozen: bool) -> dict[str, Any]:
    """Comparison and hash, compiled when first asked for: one class in ten is."""

    def __eq__(self: object, other: object) -> Any:
        compile_both()
        return cls.__eq__(self, other)

    def __hash__(self: object) -> Any:
        compile_both()
        return cls.__hash__(self)

    def compile_both() -> None:
        mine, others = (
            f"({''.join(f'{of}.{f.name}, ' for f in fields(cls) if f.compare)})" for of in ("self", "other")
        )
        equal = f"{mine} == {others} if other.__class__ is self.__class__ else NotImplemented"
        text = f"def __eq__(self, other): return {equal}\ndef __hash__(self): return hash({mine})"
        for name, method in _compiled(cls, text, {}).items():
            if vars(cls)[name] in (__eq__, __hash__):
                setattr(cls, name, method)

    return {"__eq__": __eq__, "__hash__": __hash__ if frozen else None}


def _compiled(cls: type, text: str, known: dict[str, Any]) -> dict[str, Any]:
    """The functions of a text, named as tracebacks and messages name methods. Nothing but text could be as fast."""
    methods: dict[str, Any] = {}
    exec(text, known, methods)
    for name, method in methods.items():
        method.__qualname__ = f"{cls.__qualname__}.{name}"
    return methods


def _parameter(f: Field[Any], known: dict[str, Any]) -> str:
    if f.default is not MISSING:
        known[f"_default_{f.name}"] = f.default
        return f"{f.name}=_default_{f.name}"
    return f.name if f.default_factory is MISSING else f"{f.name}=_MISSING"


def _assignment(cls: type, name: str, value: str, known: dict[str, Any]) -> str:
    """Past the refusal of a frozen class."""
    slot = getattr(cls, name, None)
    if not isinstance(slot, MemberDescriptorType):
        return f"_put(self, {name!r}, {value})"
    known[f"_put_{name}"] = slot.__set__
    return f"_put_{name}(self, {value})"


def _refuse(self: object, name: str, *value: object) -> None:
    raise FrozenInstanceError(f"cannot {'assign to' if value else 'delete'} field {name!r}")


def _shown(self: Any) -> str:
    values = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if f.repr)
    return f"{type(self).__qualname__}({values})"


def _state(self: Any) -> list[Any]:
    return [getattr(self, f.name) for f in fields(self)]


def _restore(self: Any, state: list[Any]) -> None:
    for f, value in zip(fields(self), state, strict=True):
        object.__setattr__(self, f.name, value)
