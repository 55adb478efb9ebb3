"""The quick `dataclass` against the standard one: the same classes by both."""

from __future__ import annotations

import copy
import dataclasses
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
