"""`minimize step_time subject to memory <= 92% of device` to an objective."""

from __future__ import annotations

from titan.compiler.spec.report import Refusal, Report, similar
from titan.compiler.spec.schema import Cluster, Objective
from titan.compiler.spec.values import Origins
from titan.grammar import syntax

_LATER_GOALS = ("cost", "memory", "energy", "tokens_per_second")


def read_objective(
    written: syntax.Objective | None, cluster: Cluster | None, report: Report, origins: Origins
) -> Objective:
    """The objective, its default where nothing is written; errors go to the report."""
    if written is None:
        return Objective()
    try:
        _check_goal(written)
        shares = [_memory_share(limit, cluster) for limit in written.limits]
    except Refusal as refusal:
        report.add(refusal.diagnostic)
        return Objective()
    origins.values["objective.goal"] = written.goal.span
    if not shares:
        return Objective()
    origins.values["objective.memory_fraction"] = written.limits[-1].span
    return Objective(memory_fraction=min(shares))


def _check_goal(written: syntax.Objective) -> None:
    goal = written.goal.dotted
    if written.direction != "minimize":
        text = f"`{written.direction}` is not available in this version; available: minimize"
        raise Refusal("T224", text, written.span, ("minimize step_time",))
    if goal in _LATER_GOALS:
        text = f"`minimize {goal}` is not available in this version; available: step_time"
        raise Refusal("T224", text, written.goal.span, ("step_time",))
    if goal != "step_time":
        near = similar(goal, ("step_time",)) or ("step_time",)
        raise Refusal("T217", f"`{goal}` cannot be minimized", written.goal.span, near)


def _memory_share(limit: syntax.Limit, cluster: Cluster | None) -> float:
    """A limit as the share of device memory: `92% of device`, or an amount such as `74 GiB`."""
    key, value = limit.key.dotted, limit.value
    if key != "memory":
        raise Refusal("T217", f"`{key}` cannot be limited", limit.key.span, ("memory <= 92% of device",))
    if limit.relation != "<=" or not isinstance(value, syntax.Quantity):
        raise Refusal("T223", "a memory limit is written `memory <= 92% of device`", limit.span)
    if limit.of is not None and limit.of.dotted != "device":
        raise Refusal("T217", f"memory is a share `of device`, not of `{limit.of.dotted}`", limit.of.span, ("device",))
    if value.dimension == "bytes" and limit.of is None:
        return _within(value, float(value.value) / cluster.device.memory if cluster else 1.0)
    if value.dimension not in ("fraction", ""):
        raise Refusal("T215", f"{value.text} is no share of memory and no amount of it", value.span, ("92% of device",))
    return _within(value, float(value.value))


def _within(value: syntax.Quantity, share: float) -> float:
    if not 0 < share <= 1:
        raise Refusal("T216", f"a memory limit lies between 0 and 100% of the device, not at {value.text}", value.span)
    return share
