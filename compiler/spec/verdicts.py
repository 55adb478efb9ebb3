"""What rules say of many strategies: each is asked as rarely as can be."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

from titan.compiler.spec.breach import Choices
from titan.compiler.spec.degrees import AXES
from titan.compiler.spec.legality import Rule
from titan.compiler.spec.schema import Spec


class Verdicts:
    """Which of some rules strategies break. A rule that reads few degrees is asked once for all strategies that are
    alike in what it reads."""

    def __init__(self, spec: Spec, rules: Iterable[Rule]) -> None:
        self._spec, self._rules = spec, tuple(rule for rule in rules if not rule.partial)
        by_degrees: dict[frozenset[str], list[Rule]] = {}
        for rule in self._rules:
            by_degrees.setdefault(frozenset(AXES) & {*rule.needs}, []).append(rule)
        self._often = [rule for axes, group in by_degrees.items() for rule in group if len(axes) > 2]
        self._once: list[tuple[Callable[[Choices], Any], list[Rule], dict[Any, list[Rule]]]] = [
            (attrgetter(*{key for rule in group for key in rule.needs}), group, {})
            for axes, group in by_degrees.items()
            if len(axes) <= 2
        ]

    def broken(self, strategy: Choices) -> list[Rule]:
        """The rules that the strategy breaks, in their order."""
        found = self._ask(self._often, strategy)
        for read, group, known in self._once:
            key = read(strategy)
            if key not in known:
                known[key] = self._ask(group, strategy)
            found += known[key]
        return [rule for rule in self._rules if rule in found] if found else found

    def _ask(self, rules: list[Rule], strategy: Choices) -> list[Rule]:
        return [rule for rule in rules if rule.breach(self._spec, strategy) is not None]
