"""Proofs of a plan that is likely to be the one, begun in a second process before that is known."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from titan.compiler.verify.proofs import Proving

if TYPE_CHECKING:
    from titan.compiler.plan.program import Plan
    from titan.compiler.verify.findings import Proof


class EarlyProofs:
    """What is proven is always the plan itself: a likely plan's proofs are kept only where all that they read of the
    plan asked for is the same. A context; leaving it ends what is under way."""

    def __init__(self) -> None:
        self._under_way: Proving | None = None

    def __enter__(self) -> EarlyProofs:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def begin(self, plan: Plan) -> None:
        """Begins the proofs of this plan in place of another's, while here it is measured."""
        if self._under_way is None or not _same(self._under_way.plan, plan):
            self._stop()
            self._under_way = Proving(plan, measured=True)

    def proofs(self, plan: Plan) -> dict[str, Proof]:
        """Every proof of this plan by name."""
        self.begin(plan)
        proving, self._under_way = self._under_way, None
        assert proving is not None
        return proving.proofs()

    def _stop(self) -> None:
        if self._under_way is not None:
            self._under_way.stop()
            self._under_way = None


def _same(plan: Plan, other: Plan) -> bool:
    """Equal but for the reasons of choices, which no proof reads."""
    return plan is other or (_read(plan) == _read(other) and replace(plan, settings=()) == replace(other, settings=()))


def _read(plan: Plan) -> dict[str, Any]:
    """Settings without the reasons."""
    strategy = {key: value for key, value in plan.setting("strategy").items() if key != "reasons"}
    return {**plan.setting_table, "strategy": strategy}
