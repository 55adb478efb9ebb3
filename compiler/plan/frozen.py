"""`dataclass`, as `dataclasses` has it, in a fifth of the time.

The standard library compiles six methods of a frozen class and copies its fields by name; with some two hundred classes
that is a third of what starting the compiler takes. Here it reads the fields alone; what is compiled is a constructor,
which fills slots directly, once for all classes of its shape, and comparison and hash where they are used.
"""

from __future__ import annotations

import dataclasses
from dataclasses import MISSING, Field, FrozenInstanceError, fields
from functools import cache, partial
from types import CodeType, FunctionType, MemberDescriptorType
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
    for name, f in _numbered(cls).items():
        value = name
        if f.init:
            (keywords if f.kw_only else parameters).append(name)
        if f.default_factory is not MISSING:
            known[f"_make{name}"] = f.default_factory
            value = f"_make{name}()" + (f" if {name} is _MISSING else {name}" if f.init else "")
        elif not f.init:
            continue
        body.append(_assignment(cls, name, f, value, known) if frozen else f"self.{name} = {value}")
    if hasattr(cls, "__post_init__"):
        body.append("self.__post_init__()")
    signature = ", ".join(["self", *parameters, *(["*", *keywords] if keywords else [])])
    method = _method(cls, f"def __init__({signature}): {'; '.join(body) or 'pass'}", known)
    method.__defaults__, method.__kwdefaults__ = _defaults(cls)
    return method


def _compared_later(cls: Any, frozen: bool) -> dict[str, Any]:
    """Comparison and hash, made when first asked for: one class in ten is."""

    def __eq__(self: object, other: object) -> Any:
        make_both()
        return cls.__eq__(self, other)

    def __hash__(self: object) -> Any:
        make_both()
        return cls.__hash__(self)

    def make_both() -> None:
        compared = [name for name, f in _numbered(cls).items() if f.compare]
        mine, others = (f"({''.join(f'{of}.{name}, ' for name in compared)})" for of in ("self", "other"))
        equal = f"{mine} == {others} if other.__class__ is self.__class__ else NotImplemented"
        for text in (f"def __eq__(self, other): return {equal}", f"def __hash__(self): return hash({mine})"):
            method = _method(cls, text, {})
            if vars(cls)[method.__name__] in (__eq__, __hash__):
                setattr(cls, method.__name__, method)

    return {"__eq__": __eq__, "__hash__": __hash__ if frozen else None}


def _numbered(cls: type) -> dict[str, Field[Any]]:
    """The fields as texts name them, by number: so classes of one shape have one text."""
    return {f"_{number}": f for number, f in enumerate(fields(cls))}


def _method(cls: type, text: str, known: dict[str, Any]) -> Any:
    """The function of a text, with the class's names in place of numbers. Nothing but compiled text could be as fast,
    and compiling takes longer than all else."""
    code = _compiled(text)
    names = {number: f.name for number, f in _numbered(cls).items()}
    variables, attributes, constants = (
        tuple(names.get(word, word) for word in words) for words in (code.co_varnames, code.co_names, code.co_consts)
    )
    method = FunctionType(code.replace(co_varnames=variables, co_names=attributes, co_consts=constants), known)
    method.__qualname__ = f"{cls.__qualname__}.{code.co_name}"  # as tracebacks and messages name methods
    return method


@cache
def _compiled(text: str) -> CodeType:
    made: dict[str, Any] = {}
    exec(text, {}, made)
    (function,) = made.values()
    code: CodeType = function.__code__
    return code


def _defaults(cls: type) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Of the last parameters, and of keywords by name; where a factory makes it, `MISSING`."""
    last: list[Any] = []
    keywords: dict[str, Any] = {}
    for f in fields(cls):
        optional = f.default is not MISSING or f.default_factory is not MISSING
        if f.init and f.kw_only and optional:
            keywords[f.name] = f.default
        elif f.init and not f.kw_only and optional:
            last.append(f.default)
        elif f.init and not f.kw_only and last:
            raise TypeError(f"non-default argument {f.name!r} follows default argument")
    return tuple(last), keywords


def _assignment(cls: type, name: str, f: Field[Any], value: str, known: dict[str, Any]) -> str:
    """Past the refusal of a frozen class."""
    slot = getattr(cls, f.name, None)
    if not isinstance(slot, MemberDescriptorType):
        return f"_put(self, {name!r}, {value})"
    known[f"_put{name}"] = slot.__set__
    return f"_put{name}(self, {value})"


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
