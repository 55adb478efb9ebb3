"""The loss of a step: added once for each micro-batch, summed over exactly the ranks that hold parts, told to all."""

from __future__ import annotations

from titan.compiler.plan.instruction import Instruction, base_name
from titan.compiler.plan.operators import TensorType
from titan.compiler.verify.updates import Event, Step, _factors, _homes, _trace

BUFFER = "b.loss"


def _holders(step: Step) -> tuple[int, ...]:
    """Pipeline coordinates of the roles that add up the loss: one per copy of the model."""
    return tuple(r.pipeline for r in step.plan.roles if any(b.name == BUFFER for b in r.buffers))


def loss(step: Step) -> None:
    """Checks one order of one role; the evaluation's too."""
    plan, role = step.plan, step.role
    holders = _holders(step)
    if not holders:
        step.fail("T747", "no role holds the loss", step.last)
        return
    reports = [e for e in step.others.get("report", []) if e.instruction.attribute("name") == "loss"]
    if len(reports) != 1:
        step.fail(
            "T747",
            f"the loss is reported {len(reports)} times in order {step.order}",
            reports[-1] if reports else step.last,
        )
        return
    partial = {f for f, s in plan.types.get("loss", TensorType("f32", ())).layout if s == "P" and plan.mesh.size(f) > 1}
    if role.pipeline in holders:
        _cleared(step)
    _reported(step, reports[0], holders, partial if role.pipeline in holders else set())


def _cleared(step: Step) -> None:
    added = step.added.get(BUFFER)
    zeros = [e for e in step.events.get(BUFFER, []) if e.instruction.opcode == "zero_grad"]
    if added is None:
        step.fail("T747", f"nothing is added to the loss in order {step.order}")
    elif len(zeros) != 1 or not (zeros[0].place > added[1].place or zeros[0].place < added[0].place):
        event = zeros[-1] if zeros else added[1]
        step.fail("T747", f"the loss is cleared {len(zeros)} times, or between its parts", event)


def _reported(step: Step, report: Event, holders: tuple[int, ...], partial: set[str]) -> None:
    """The reported scalar is the loss buffer, summed over the factors on which it is partial and over the stages that
    hold parts, and broadcast from one of these."""
    stage, name = step.role.pipeline, base_name(report.instruction.reads[0])
    path = list(_trace(step, name))
    told = [event.instruction for event in path if event.instruction.opcode == "broadcast"]
    root = stage if len(step.plan.roles) == 1 else _root(step, told)
    if root not in holders:
        step.fail("T747", f"the loss is not broadcast from one of the stages {holders}", path[0] if path else report)
    elif stage == root:
        source = base_name(path[-1].instruction.reads[0]) if path and path[-1].instruction.reads else name
        if source != BUFFER:
            step.fail("T747", f"the reported loss comes from `{source}`, not from {BUFFER}", report)
    elif len(path) != 1 or path[0].instruction.reads:
        step.fail("T747", f"`{name}` is not the loss of stage {root}", report)
    if stage in holders:
        sums = path if stage == root else [e for events in step.made.values() for e in events if _reads_loss(e)]
        sent = next((e for e in path if e.instruction.opcode == "broadcast" and e.instruction.reads), report)
        _summed(step, [e for e in sums if e.instruction.opcode != "broadcast"], report, holders, partial, sent)


def _reads_loss(event: Event) -> bool:
    return event.instruction.reads[:1] == (BUFFER,)


def _root(step: Step, told: list[Instruction]) -> int:
    """The stage that broadcasts along the whole pipeline; -1 when none does, or another group is used."""
    if len(told) != 1 or told[0].group in step.plan.group_table or _factors(step.plan, told[0].group) != ("pipeline",):
        return -1
    return int(told[0].attribute("root"))


def _summed(
    step: Step, sums: list[Event], report: Event, holders: tuple[int, ...], partial: set[str], sent: Event
) -> None:
    """The sums that the loss passes: each factor and holding stage once, after its last part, before it is cleared.
    `sent` is where the loss leaves the stage, or is reported."""
    factors: list[str] = []
    stages: list[int] = []
    for event in sums:
        instruction = event.instruction
        if instruction.opcode != "all_reduce" or instruction.attribute("op") != "sum":
            step.fail("T747", f"{instruction.opcode} is no part of summing the loss", event)
        factors += [f for f in _factors(step.plan, instruction.group) if f != "pipeline"]
        stages += _homes(step.plan, instruction.group)
    place = sums[0] if sums else report
    if sorted(factors) != sorted(partial):
        message = f"the loss is summed over {factors or 'nothing'}, it is partial over {sorted(partial)}"
        step.fail("T747", message, place)
    if sorted(stages) != (sorted(holders) if len(holders) > 1 else []):
        step.fail("T747", f"the loss is summed over stages {stages}, parts are on {holders}", place)
    added = step.added.get(BUFFER)
    first = sums[-1] if sums else sent
    if added and first.place < added[1].place:
        step.fail("T747", "the loss is summed before its last part", first)
    for zero in step.events.get(BUFFER, []):
        if added and added[1].place < zero.place < first.place:
            step.fail("T747", "the loss is cleared before it is reported", zero)
