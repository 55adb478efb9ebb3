"""Predicted memory of a configuration against what single ranks really hold."""

from __future__ import annotations

from dataclasses import dataclass

from titan.compiler.lower import lower
from titan.compiler.plan.program import Plan
from titan.compiler.plan.sizes import Sizes, memory_by_component
from titan.compiler.plan.storages import moments
from titan.compiler.plan.tiers import at_start

from tests.equivalence.configurations import Configuration, spec_of, strategy_of, with_train
from tests.runtime.alone import Held, hold

SCALE = 4  # of the grid's models: so large that what is counted are tensors of the model, not single numbers
CLIP = 1e-9  # far below any norm: gradients are scaled, for which the ledger has room
STATES = ("parameters", "gradients", "optimizer")


@dataclass(frozen=True)
class Compared:
    """Bytes of the fullest rank by component, predicted and measured. `resting`: the most that registers hold between
    instructions (with what the transport holds for collectives under way); `peak`: the most of everything at any time.
    """

    rank: int
    predicted: dict[str, int]
    measured: dict[str, int]

    @property
    def deviation(self) -> float:
        """Of the peak and of what rests, whichever is worse, in parts of the peak; infinite where states differ."""
        if any(self.predicted[kind] != self.measured[kind] for kind in STATES):
            return float("inf")
        gaps = (abs(self.predicted[kind] - self.measured[kind]) for kind in ("resting", "peak"))
        return max(gaps) / self.measured["peak"]


def compared(c: Configuration, precision: str = "fp32") -> tuple[Compared, ...]:
    """The first and the last stage, with the tiers that an adaptive plan begins with."""
    spec = with_train(spec_of(c, precision, SCALE), clip=CLIP)
    plan = at_start(lower(spec, strategy_of(c)))
    found = []
    for stage in sorted({0, c.pipeline - 1}):
        ranks = _ends(plan, stage)
        held = [measured(hold(plan, spec.model.vocab, rank)) for rank in ranks]
        fullest = {kind: max(h[kind] for h in held) for kind in held[0]}
        found.append(Compared(ranks[0], predicted(plan, ranks[0]), fullest))
    return tuple(found)


def _ends(plan: Plan, stage: int) -> tuple[int, ...]:
    """The first and the last of a context: the ledger is of the fullest rank, and the one counts the norm, the other
    has all before it that a window or a causal mask reaches."""
    at = {axis: 0 for axis, _ in plan.mesh.factors} | {"pipeline": stage}
    last = {axis: size - 1 for axis, size in plan.mesh.factors if axis.split(".")[0] == "context"}
    return tuple(sorted({plan.mesh.rank(at), plan.mesh.rank(at | last)}))


def predicted(plan: Plan, rank: int) -> dict[str, int]:
    role, sizes = plan.role_of(rank), Sizes(plan)
    parts = memory_by_component(plan, role, sizes)
    fixed = sum(parts[kind] for kind in (*STATES, "buffers"))
    program = (instruction for *_, instruction in role.instructions())
    resting = fixed + max(moment.live for moment in moments(program, sizes, role))
    return {**{kind: parts[kind] for kind in STATES}, "resting": resting, "peak": sum(parts.values())}


def measured(held: Held) -> dict[str, int]:
    return {**{kind: held.buffers[kind[0]] for kind in STATES}, "resting": held.resting, "peak": held.peak}


def worst(c: Configuration, precision: str = "fp32") -> float:
    """The largest deviation of its ranks, in percent."""
    return 100 * max(found.deviation for found in compared(c, precision))
