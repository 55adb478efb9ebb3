"""`minimize step_time subject to memory <= 92% of device, devices <= 512` to an objective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from titan.compiler.spec.report import Refusal, Report, similar
from titan.compiler.spec.schema import Cluster, Objective, Train
from titan.compiler.spec.values import Origins
from titan.grammar import syntax

GOALS = ("step_time", "cost", "memory")
_PRICE = "price_per_device_hour"


def read_objective(
    written: syntax.Objective | None, cluster: Cluster | None, train: Train | None, report: Report, origins: Origins
) -> Objective:
    """The objective, its default where nothing is written; errors go to the report."""
    if written is None:
        return Objective()
    found: dict[str, Any] = {}
    try:
        found["goal"] = _goal(written)
        origins.values["objective.goal"] = written.goal.span
        for limit in written.limits:
            key, value = _limit(limit, cluster)
            found[key] = min(found.get(key, value), value)
            origins.values[f"objective.{key}"] = limit.span
        _check_money(written, cluster, train)
    except Refusal as refusal:
        report.add(refusal.diagnostic)
        return Objective()
    return Objective(**found)


def _goal(written: syntax.Objective) -> str:
    goal = written.goal.dotted
    if written.direction != "minimize":
        near = tuple(f"minimize {name}" for name in GOALS)
        text = f"`{written.direction}` is not available in this version; available: minimize"
        raise Refusal("T224", text, written.span, near)
    if goal not in GOALS:
        near = similar(goal, GOALS) or GOALS
        raise Refusal("T217", f"`{goal}` cannot be minimized", written.goal.span, near)
    return goal


def _limit(limit: syntax.Limit, cluster: Cluster | None) -> tuple[str, float]:
    """Field of the objective and the number that it may reach."""
    key, value = limit.key.dotted, limit.value
    if key not in _LIMITS:
        near = similar(key, tuple(_LIMITS)) or tuple(_LIMITS)
        raise Refusal("T217", f"`{key}` cannot be limited", limit.key.span, tuple(_LIMITS[k][1] for k in near))
    read, form = _LIMITS[key]
    if limit.relation != "<=" or not isinstance(value, syntax.Quantity):
        raise Refusal("T223", f"a limit of `{key}` is written `{form}`", limit.span, (form,))
    if limit.of is not None and (key != "memory" or limit.of.dotted != "device"):
        raise Refusal("T217", f"{key} is no share of `{limit.of.dotted}`", limit.of.span, (form,))
    return read(limit, value, cluster)


def _memory(limit: syntax.Limit, value: syntax.Quantity, cluster: Cluster | None) -> tuple[str, float]:
    """A share of device memory: `92% of device`, or an amount such as `74 GiB`."""
    share = float(value.value)
    if value.dimension == "bytes" and limit.of is None:
        share = share / cluster.device.memory if cluster else 1.0
    elif value.dimension not in ("fraction", ""):
        raise Refusal("T215", f"{value.text} is no share of memory and no amount of it", value.span, ("92% of device",))
    if not 0 < share <= 1:
        raise Refusal("T216", f"a memory limit lies between 0 and 100% of the device, not at {value.text}", value.span)
    return "memory_fraction", share


def _step_time(limit: syntax.Limit, value: syntax.Quantity, cluster: Cluster | None) -> tuple[str, float]:
    return "step_time", _positive(limit, value, "seconds", "a time")


def _cost(limit: syntax.Limit, value: syntax.Quantity, cluster: Cluster | None) -> tuple[str, float]:
    return "cost", _positive(limit, value, "money", "an amount of money")


def _devices(limit: syntax.Limit, value: syntax.Quantity, cluster: Cluster | None) -> tuple[str, float]:
    number = _positive(limit, value, "", "a number of devices")
    if number != int(number):
        raise Refusal("T216", f"{value.text} is no whole number of devices", value.span)
    return "devices", int(number)


def _positive(limit: syntax.Limit, value: syntax.Quantity, dimension: str, what: str) -> float:
    form = _LIMITS[limit.key.dotted][1]
    if value.dimension != dimension:
        raise Refusal("T215", f"{value.text} is not {what}, which limits {limit.key.dotted}", value.span, (form,))
    if value.value <= 0:
        raise Refusal("T216", f"a limit of {limit.key.dotted} must be greater than 0, not {value.text}", value.span)
    return float(value.value)


_Read = Callable[[syntax.Limit, syntax.Quantity, Cluster | None], tuple[str, float]]
_LIMITS: dict[str, tuple[_Read, str]] = {
    "memory": (_memory, "memory <= 92% of device"),
    "step_time": (_step_time, "step_time <= 5 s"),
    "devices": (_devices, "devices <= 512"),
    "cost": (_cost, "cost <= 100000 USD"),
}


def _check_money(written: syntax.Objective, cluster: Cluster | None, train: Train | None) -> None:
    """Cost needs a price of a device, and a limit of the whole job's cost needs the length of the job."""
    limits = {limit.key.dotted: limit for limit in written.limits}
    at = written.goal.span if written.goal.dotted == "cost" else None
    at = limits["cost"].span if "cost" in limits else at
    if at is None:
        return
    if cluster is not None and cluster.price_per_device_hour is None:
        text = f"cost is not known: the cluster has no `{_PRICE}`"
        raise Refusal("T262", text, at, (f"{_PRICE} = 2.5 USD/h",))
    if "cost" in limits and train is not None and train.total_steps is None:
        text = "a limit of cost is of the whole job, whose length is not said: `train` has no `steps` or `total_tokens`"
        raise Refusal("T262", text, at, ("total_tokens = 1T tokens",))
