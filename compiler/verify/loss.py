"""The loss of a step: added once for each micro-batch, summed over exactly the ranks that hold parts, told to all."""

from __future__ import annotations

from titan.compiler.plan.instruction import base_name
from titan.compiler.plan.operators import TensorType
from titan.compiler.verify.updates import Event, Step, _factors, _trace

BUFFER = "b.loss"


def _holder(step: Step) -> int:
    """Pipeline coordinate of the role that adds up the loss."""
    holders = [r.pipeline for r in step.plan.roles if any(b.name == BUFFER for b in r.buffers)]
    return holders[0] if len(holders) == 1 else -1


def loss(step: Step) -> None:
    """Checks one order of one role; the evaluation's too."""
    plan, role = step.plan, step.role
    holder = _holder(step)
    if holder < 0:
        step.fail("T747", "exactly one role holds the loss")
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
    if role.pipeline == holder:
        _cleared(step)
    _reported(step, reports[0], holder, partial if role.pipeline == holder else set())


def _cleared(step: Step) -> None:
    added = step.added.get(BUFFER)
    zeros = [e for e in step.events.get(BUFFER, []) if e.instruction.opcode == "zero_grad"]
    if added is None:
        step.fail("T747", f"nothing is added to the loss in order {step.order}")
    elif len(zeros) != 1 or not (zeros[0].place > added[1].place or zeros[0].place < added[0].place):
        event = zeros[-1] if zeros else added[1]
        step.fail("T747", f"the loss is cleared {len(zeros)} times, or between its parts", event)


def _reported(step: Step, report: Event, holder: int, partial: set[str]) -> None:
    """The reported scalar is the loss buffer, summed over the factors on which it is partial, and broadcast."""
    plan = step.plan
    name = base_name(report.instruction.reads[0])
    path = list(_trace(step, name))
    summed: list[str] = []
    told = len(plan.roles) == 1
    for event in path:
        instruction = event.instruction
        if instruction.opcode == "broadcast":
            told = told or (
                _factors(plan, instruction.group) == ("pipeline",)
                and instruction.group not in plan.group_table
                and instruction.attribute("root") == holder
            )
        elif instruction.opcode == "all_reduce" and instruction.attribute("op") == "sum":
            summed += _factors(plan, instruction.group)
        else:
            step.fail("T747", f"{instruction.opcode} is no part of summing the loss", event)
    source = base_name(path[-1].instruction.reads[0]) if path and path[-1].instruction.reads else name
    if step.role.pipeline == holder and source != BUFFER:
        step.fail("T747", f"the reported loss comes from `{source}`, not from {BUFFER}", report)
    if step.role.pipeline != holder and (len(path) != 1 or path[0].instruction.reads):
        step.fail("T747", f"`{name}` is not the loss of stage {holder}", report)
    if sorted(summed) != sorted(partial):
        place = next((e for e in path if e.instruction.opcode == "all_reduce"), report)
        step.fail("T747", f"the loss is summed over {summed or 'nothing'}, it is partial over {sorted(partial)}", place)
    if not told:
        step.fail("T747", f"the loss is not broadcast from stage {holder}", report)
    read = step.added.get(BUFFER)
    if path and read and path[-1].place < read[1].place:
        step.fail("T747", "the loss is summed before its last part", path[-1])
    zeros = [e for e in step.events.get(BUFFER, []) if e.instruction.opcode == "zero_grad"]
    if zeros and zeros[0].place < (path[-1] if path else report).place and read and zeros[0].place > read[1].place:
        step.fail("T747", "the loss is cleared before it is reported", zeros[0])
