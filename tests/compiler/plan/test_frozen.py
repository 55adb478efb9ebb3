"""The quick `dataclass` against the standard one: the same classes by both."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, asdict, field, fields, replace
from typing import Any, ClassVar

import pytest
from titan.compiler.plan.frozen import dataclass

OPTIONS = [
    {"frozen": True, "slots": True},
    {"frozen": True},
    {"slots": True},
    {},
    {"frozen": True, "kw_only": True},
]


def classes(decorator: Callable[..., Any], options: dict[str, bool]) -> tuple[Any, Any]:
    """A class with every kind of field, and one that adds to it."""

    @decorator(**options)
    class Base:
        """Its text."""

        number: int
        LIMIT: ClassVar[int] = 3
        name: str = "unnamed"
        parts: list[int] = field(default_factory=list)
        note: str = field(default="", repr=False, compare=False)

        def doubled(self) -> int:
            return 2 * self.number

    @decorator(**options)
    class Derived(Base):
        sums: tuple[int, ...] = ()
        total: int = field(init=False)

        def __post_init__(self) -> None:
            object.__setattr__(self, "total", sum(self.sums))

    return Base, Derived


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_it_is_the_standard_one(options: dict[str, bool]) -> None:
    """Values, texts, comparison, fields, copies and refusals are equal for both."""

    def seen(decorator: Callable[..., Any]) -> list[Any]:
        base, derived = classes(decorator, options)
        one = base(number=1, parts=[1, 2], note="a")
        other = derived(number=1, sums=(4, 5))
        return [
            *(repr(v) for v in (one, other, base(number=2))),
            *(asdict(v) for v in (one, other, replace(one, name="b"), copy.copy(one), replace(other, sums=(1,)))),
            one == base(number=1, parts=[1, 2], note="b"),
            one == replace(one, number=2),
            one == other,
            one.__eq__(1),
            base(number=1).parts is base(number=1).parts,
            one.doubled(),
            base.LIMIT,
            base.__doc__,
            base.__match_args__,
            derived.__match_args__,
            [(f.name, f.init, f.kw_only) for f in fields(derived)],
            hasattr(one, "__dict__"),
            base.__hash__ is None,
            base.__init__.__qualname__,
            *(_error(call) for call in (base, lambda: base(number=1, more=2), lambda: base(1, "a"))),
            *(
                _error(call)
                for call in (lambda: base(1, number=1), lambda: derived(1, total=2), lambda: base(*"abcde"))
            ),
            _error(lambda: setattr(one, "number", 3)),
            _error(lambda: delattr(one, "name")),
        ]

    ours, standard = seen(dataclass), seen(dataclasses.dataclass)
    assert ours == standard


def _error(call: Callable[[], Any]) -> str:
    """What a call raises, as text; nothing when it does not."""
    try:
        call()
    except (TypeError, FrozenInstanceError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@dataclass(frozen=True, slots=True)
class Point:
    x: int
    y: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Named:
    """With methods of its own."""

    name: str
    number: int = 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Named) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return self.name


def test_frozen_slots_are_hashed_and_pickled() -> None:
    point = Point(1, (2, 3))
    assert {point: 1}[Point(1, (2, 3))] == 1
    assert pickle.loads(pickle.dumps(point)) == point
    assert hash(Point(2)) != hash(point)


def test_methods_that_a_class_has_are_kept() -> None:
    assert Named("a", 1) == Named("a", 2) and hash(Named("a", 1)) == hash("a") and repr(Named("a")) == "a"


@dataclass(frozen=True, slots=True)
class Shifted:
    """Named like what its constructor's text says: fields by number, and what it calls."""

    _1: int
    _0: int
    _put_0: int = 3
    _MISSING: list[int] = field(default_factory=list)
    _make_3: int = 5


@dataclass(frozen=True, slots=True)
class Plain:
    """Of the shape of `Shifted`."""

    a: int
    b: int
    c: int = 6
    d: list[int] = field(default_factory=lambda: [7])
    e: int = 8


def test_classes_of_one_shape_keep_their_own_names_and_defaults() -> None:
    assert asdict(Shifted(1, 2)) == {"_1": 1, "_0": 2, "_put_0": 3, "_MISSING": [], "_make_3": 5}
    assert asdict(Plain(b=1, a=2)) == {"a": 2, "b": 1, "c": 6, "d": [7], "e": 8}
    assert Shifted(1, 2) == Shifted(_0=2, _1=1) != Shifted(2, 1) and Plain(1, 2) != Shifted(1, 2)
    assert [list(inspect.signature(c).parameters) for c in (Shifted, Plain)] == [
        ["_1", "_0", "_put_0", "_MISSING", "_make_3"],
        ["a", "b", "c", "d", "e"],
    ]


def test_parameters_are_the_standard_ones() -> None:
    """Names, kinds and defaults, apart from how a default that a factory makes is marked."""

    def parameters(decorator: Callable[..., Any], options: dict[str, bool]) -> list[Any]:
        return [
            (p.name, p.kind, p.default if isinstance(p.default, (int, str, tuple)) else p.default is p.empty)
            for made in classes(decorator, options)
            for p in inspect.signature(made).parameters.values()
        ]

    for options in OPTIONS:
        assert parameters(dataclass, options) == parameters(dataclasses.dataclass, options)


def test_a_field_without_default_stands_before_those_with_one() -> None:
    with pytest.raises(TypeError, match="non-default argument 'late' follows default argument"):

        @dataclass
        class Wrong:
            early: int = 1
            late: int
