"""What a plan is predicted to do: speed, utilisation, idle shares, memory, a lower bound, and the whole job."""

from __future__ import annotations

from typing import Any

from titan.compiler.cost.bound import lower_bound
from titan.compiler.cost.machine import Machine, read_machine
from titan.compiler.cost.memory import MemoryLedger, memory_ledger
from titan.compiler.cost.mfu import ModelFlops, Utilisation, executed_flops, model_flops, utilisation
from titan.compiler.cost.simulate import simulate
from titan.compiler.cost.timeline import Timeline
from titan.compiler.graph.build import COMPUTE_DTYPE
from titan.compiler.plan.frozen import dataclass
from titan.compiler.plan.program import Plan


@dataclass(frozen=True, slots=True)
class Job:
    """The whole training: cost is None without a price per device-hour."""

    steps: int
    tokens: int
    days: float
    device_hours: float
    cost: float | None


@dataclass(frozen=True, slots=True)
class Prediction:
    """All predicted figures of one plan; `hfu` is None where the peak is not known."""

    plan: Plan
    timeline: Timeline
    ledger: MemoryLedger
    used: Utilisation
    flops: ModelFlops
    hfu: float | None
    lower_bound: float
    job: Job | None
    cost_per_token: float | None  # money; None without a price per device-hour

    @property
    def figures(self) -> dict[str, Any]:
        """The `predicted` object of the command line."""
        return {
            "step_time_s": self.timeline.seconds,
            "tokens_per_s_per_gpu": self.used.tokens_per_second,
            "tflops_per_gpu": self.used.tflops,
            "mfu": self.used.mfu,
            "mfu_6n": self.used.mfu_simple,
            "hfu": self.hfu,
            "bubble_fraction": self.timeline.bubble_fraction,
            "span_bubble_fraction": self.timeline.span_bubble_fraction,
            "exposed_comm_fraction": self.timeline.exposed_comm_fraction,
            "peak_memory_bytes": self.ledger.peak,
            "peak_memory_upper_bytes": self.ledger.upper,
            "memory_verdict": self.ledger.verdict,
            "lower_bound_step_time_s": self.lower_bound,
            "cost_per_million_tokens": None if self.cost_per_token is None else 1e6 * self.cost_per_token,
            "tokens_per_money": 1 / self.cost_per_token if self.cost_per_token else None,
        }


def predict(
    plan: Plan, timeline: Timeline | None = None, ledger: MemoryLedger | None = None, bound: float = 0.0
) -> Prediction:
    """Prediction of a plan from the plan alone; what the search has already worked out may be passed, with the `bound`
    of the step (seconds) that it knows."""
    machine = read_machine(plan.setting("cluster"))
    timeline, ledger = timeline or simulate(plan, machine), ledger or memory_ledger(plan, machine)
    dtype = COMPUTE_DTYPE[plan.setting("train.precision")]
    tokens = int(plan.setting("train.sequence")) * int(plan.setting("train.global_batch"))
    world, peak, price = plan.mesh.world_size, machine.peak(dtype), machine.price_per_device_hour
    flops = model_flops(plan.setting("model"), int(plan.setting("train.sequence")))
    return Prediction(
        plan,
        timeline,
        ledger,
        utilisation(flops, tokens / timeline.seconds / world, peak),
        flops,
        executed_flops(plan) / timeline.seconds / world / peak if peak else None,
        max(bound, lower_bound(plan, machine)),
        _job(plan, tokens, timeline.seconds, machine),
        None if price is None else price * world * timeline.seconds / 3600 / tokens,
    )


def _job(plan: Plan, tokens: int, seconds: float, machine: Machine) -> Job | None:
    steps, total = plan.setting("train.steps"), plan.setting("train.total_tokens")
    if not steps and not total:
        return None
    steps = int(steps or -(-int(total) // tokens))
    hours = steps * seconds / 3600
    device_hours = hours * plan.mesh.world_size
    price = machine.price_per_device_hour
    return Job(steps, steps * tokens, hours / 24, device_hours, None if price is None else price * device_hours)
