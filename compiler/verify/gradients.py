"""Proof (d): every segment runs forward and backward once per micro-batch, on the right operands; every gradient is
summed once over exactly its replicas; every parameter is updated once; the loss is summed where it is partial.

One micro-batch stands for all that run the same blocks (`flow`); the buffers of a step are followed along the order
(`updates`, `loss`).
"""

from __future__ import annotations

from titan.compiler.plan.program import Block, Plan, Role
from titan.compiler.plan.segment import bind, parse_unit
from titan.compiler.verify.findings import MOST, Finding, at
from titan.compiler.verify.flow import Flow, evaluate_flow, forward_graph, train_flow
from titan.compiler.verify.loss import BUFFER, loss
from titan.compiler.verify.updates import Step, train_step


def batches(role: Role, order: str) -> dict[int, tuple[str, ...]]:
    """The blocks that run for each micro-batch, in order of their calls."""
    found: dict[int, list[str]] = {}
    for call in role.order(order):
        for argument in call.arguments:
            found.setdefault(argument, []).append(call.block)
    return {batch: tuple(blocks) for batch, blocks in found.items()}


def _classes(plan: Plan, role: Role, order: str) -> tuple[list[tuple[Block, ...]], list[Finding]]:
    """Distinct sets of blocks over the micro-batches, which must be 0 to the plan's number less one."""
    found = batches(role, order)
    count = plan.setting("train.micro_batches")
    if sorted(found) != list(range(int(count or 0))):
        message = f"order {order} runs {len(found)} micro-batches, the plan has {count}"
        return [], [Finding("T740", message, role.pipeline)]
    kinds: dict[tuple[str, ...], tuple[str, ...]] = {}
    for blocks in found.values():
        kinds.setdefault(tuple(sorted(blocks)), blocks)
    return [tuple(role.block_table[name] for name in blocks) for blocks in kinds.values()], []


def _covered(plan: Plan, role: Role, flow: Flow) -> list[Finding]:
    """Every parameter that is at home here is used, every layer of the role runs."""
    used: set[str] = set()
    layers: set[int] = set()
    for unit in flow.forwards:
        name, layer = parse_unit(unit)
        used.update(bind(formal, layer) for formal in plan.segment_table[name].parameters)
        if layer is not None:
            layers.add(layer)
    found = []
    homes = {bucket.name: bucket.homes for bucket in plan.buckets}
    for parameter in plan.parameters:
        if role.pipeline in homes[parameter.bucket] and parameter.name not in used:
            found.append(Finding("T740", f"no segment runs with parameter {parameter.name}", role.pipeline))
    held = {layer for chunk in role.layers for layer in chunk}
    if layers != held:
        message = f"the role holds layers {sorted(held)}, its programs run {sorted(layers)}"
        found.append(Finding("T740", message, role.pipeline))
    return found


def _losses(role: Role, flow: Flow, blocks: tuple[Block, ...]) -> list[Finding]:
    holds = any(buffer.name == BUFFER for buffer in role.buffers)
    if len(flow.losses) == (1 if holds else 0):
        return []
    message = f"a micro-batch adds to the loss {len(flow.losses)} times"
    places = [(b, n) for b in blocks for n, i in enumerate(b.instructions) if i.opcode == "loss"]
    last = [(b, n) for b in blocks for n, i in enumerate(b.instructions) if i.opcode == "forward"]
    return [at("T747", message, role, *(places or last)[-1])]


def _role(plan: Plan, role: Role) -> list[Finding]:
    found: list[Finding] = []
    graphs = []
    for order, check in (("train", train_flow), ("evaluate", evaluate_flow)):
        kinds, wrong = _classes(plan, role, order)
        found += wrong
        for blocks in kinds:
            flow = check(plan, role, blocks)
            found += flow.findings + _covered(plan, role, flow) + _losses(role, flow, blocks)
            graphs.append((flow, forward_graph(flow)))
    found += _agree(role, graphs)
    if len(found) < MOST:
        step = train_step(plan, role)
        evaluation = _evaluation(plan, role)
        loss(step)
        loss(evaluation)
        found += step.findings + evaluation.findings
    return found


def _agree(role: Role, graphs: list[tuple[Flow, dict[str, tuple[object, ...]]]]) -> list[Finding]:
    """Every kind of micro-batch computes the same forward, in training and in evaluation."""
    for flow, graph in graphs[1:]:
        _, first = graphs[0]
        for register in (*first, *graph):
            if first.get(register) != graph.get(register):
                made = graph.get(register, first.get(register, ("?",)))[0]
                place = flow.places.get(str(made)) or graphs[0][0].places.get(str(made))
                message = f"`{register}` is computed in two ways: in training and in evaluation"
                if place:
                    return [at("T741", message, role, *place)]
                return [_moved(role, flow, register, message)]
    return []


def _moved(role: Role, flow: Flow, register: str, message: str) -> Finding:
    for block in role.blocks:
        for index, instruction in enumerate(block.instructions):
            if instruction.writes and instruction.writes[0].partition(":")[0].rstrip("?") == register:
                return at("T741", message, role, block, index)
    return Finding("T741", message, role.pipeline)


def _evaluation(plan: Plan, role: Role) -> Step:
    """An evaluation changes no parameter, gradient or state."""
    step = Step(plan, role, "evaluate").collect()
    for name, events in step.events.items():
        if name != BUFFER:
            step.fail("T745", f"{name} changes in an evaluation", events[0])
    for name, (event, _) in step.added.items():
        if name != BUFFER:
            step.fail("T745", f"{name} changes in an evaluation", event)
    return step


def gradients(plan: Plan) -> list[Finding]:
    """Findings of proof (d) over all roles."""
    return [finding for role in plan.roles for finding in _role(plan, role)]
