"""Proof (d): every segment runs forward and backward once per micro-batch, on the right operands; every gradient is
summed once over exactly its replicas; every parameter is updated once; the loss is summed where it is partial.

One micro-batch stands for all that run the same blocks (`flow`); the buffers of a step are followed along the order
(`updates`, `loss`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from titan.compiler.plan.program import Plan, Role
from titan.compiler.plan.segment import bind, parse_unit
from titan.compiler.verify.ahead import ahead
from titan.compiler.verify.findings import MOST, Finding, at
from titan.compiler.verify.flow import Flow
from titan.compiler.verify.loss import BUFFER, loss
from titan.compiler.verify.micro_batch import evaluate_flow, forward_graph, train_flow
from titan.compiler.verify.piece import Piece
from titan.compiler.verify.rings import bare
from titan.compiler.verify.updates import Step, train_step
from titan.compiler.verify.whole import whole


def batches(role: Role, order: str) -> dict[int, tuple[tuple[str, str], ...]]:
    """What runs for each micro-batch, in order: (block, its parameter that is this micro-batch)."""
    found: dict[int, list[tuple[str, str]]] = {}
    table = role.block_table
    for call in role.order(order):
        for argument, symbol in zip(call.arguments, table[call.block].parameters):
            found.setdefault(argument, []).append((call.block, symbol))
    return {batch: tuple(pieces) for batch, pieces in found.items()}


@dataclass
class _Program:
    """One order of one role: the flow of each kind of micro-batch, and the kind of each micro-batch."""

    role: Role
    order: str
    flows: list[Flow] = field(default_factory=list)
    kinds: dict[int, int] = field(default_factory=dict)


def _follow(plan: Plan, role: Role, order: str) -> _Program:
    """Follows one micro-batch of each kind: those that run the same blocks are alike, and those for which other blocks
    do the same."""
    found = _Program(role, order)
    known: dict[tuple[tuple[str, str], ...], int] = {}
    done: list[list[object]] = []  # by each flow
    each: dict[tuple[str, str], Piece] = {}
    check = train_flow if order == "train" else evaluate_flow
    for batch, pieces in batches(role, order).items():
        kind = tuple(sorted(pieces))
        if kind not in known:
            each |= {key: Piece(role.block_table[key[0]], key[1]) for key in pieces if key not in each}
            listed = tuple(each[key] for key in pieces)
            does = [what for piece in listed for what in piece.does]
            known[kind] = next((n for n, other in enumerate(done) if other == does), len(done))
            if known[kind] == len(done):
                done.append(does)
                flow = check(plan, role, listed)
                flow.findings += whole(plan, role, listed)
                found.flows.append(flow)
        found.kinds[batch] = known[kind]
    return found


def _covered(plan: Plan, program: _Program) -> list[Finding]:
    """Every parameter that is at home here is used, every layer of the role runs."""
    used: set[str] = set()
    layers: set[int] = set()
    for flow in program.flows:
        for unit in flow.forwards:
            name, layer = parse_unit(unit)
            used.update(bind(formal, layer) for formal in plan.segment_table[name].parameters)
            if layer is not None:
                layers.add(layer)
    role, found = program.role, []
    here = {bucket.name for bucket in plan.buckets if role.pipeline in bucket.homes}
    for parameter in plan.parameters:
        if parameter.bucket in here and parameter.name not in used:
            message = f"no segment runs with parameter {parameter.name} in order {program.order}"
            found.append(Finding("T740", message, role.pipeline))
    held = {layer for chunk in role.layers for layer in chunk}
    if layers != held:
        message = f"the role holds layers {sorted(held)}, its programs run {sorted(layers)}"
        found.append(Finding("T740", message, role.pipeline))
    return found


def _everywhere(plan: Plan, programs: list[_Program]) -> list[Finding]:
    """Over all roles every micro-batch runs the same segments, each once, and adds to the loss once."""
    count = int(plan.setting("train.micro_batches") or 0)
    everything = {unit for program in programs for flow in program.flows for unit in flow.forwards}
    seen: set[tuple[int, ...]] = set()
    for batch in range(count):
        kinds = tuple(program.kinds.get(batch, -1) for program in programs)
        if kinds in seen:
            continue
        seen.add(kinds)
        flows = [program.flows[kind] for program, kind in zip(programs, kinds, strict=True) if kind >= 0]
        found = _once(batch, flows, everything)
        if found:
            return found
    extra = {batch for program in programs for batch in program.kinds} - set(range(count))
    if extra:
        return [Finding("T740", f"micro-batch {min(extra)} runs, the plan has {count}")]
    return []


def _once(batch: int, flows: list[Flow], everything: set[str]) -> list[Finding]:
    ran: set[str] = set()
    for flow in flows:
        for unit in flow.forwards:
            if unit in ran:
                message = f"micro-batch {batch} runs {unit} on two stages"
                return [at("T740", message, flow.role, *flow.places[unit])]
            ran.add(unit)
    if ran != everything:
        return [Finding("T740", f"micro-batch {batch} never runs {', '.join(sorted(everything - ran)[:3])}")]
    losses = [flow for flow in flows for _ in flow.losses]
    if len(losses) != 1:
        place = (losses or flows)[-1]
        unit = list(place.places)[-1]
        message = f"micro-batch {batch} adds to the loss {len(losses)} times"
        return [at("T747", message, place.role, *place.places[unit])]
    return []


def _agree(train: _Program, evaluate: _Program) -> list[Finding]:
    """Every kind of micro-batch computes the same forward, in training and in evaluation."""
    first: dict[str, tuple[object, ...]] = {}
    trained = [(flow, forward_graph(flow)) for flow in train.flows]
    for flow, graph in trained:
        for register, made in graph.items():
            if first.setdefault(register, made) != made:
                return [_differs(flow, register, made)]
    again: dict[str, tuple[object, ...]] = {}
    for flow in evaluate.flows:
        graph = forward_graph(flow)
        for register in graph:
            if first.get(register) != graph[register]:
                return [_differs(flow, register, graph[register])]
        again |= graph
    for flow, graph in trained:
        for register, made in graph.items():
            if register not in again:
                return [_differs(flow, register, made)]
    return []


def _differs(flow: Flow, register: str, made: tuple[object, ...]) -> Finding:
    message = f"`{register}` is not computed alike in training and in evaluation, or for all micro-batches"
    place = flow.places.get(str(made[0]))
    if place:
        return at("T741", message, flow.role, *place)
    for block in flow.role.blocks:
        for index, instruction in enumerate(block.instructions):
            if instruction.writes and bare(instruction.writes[0]) == register:
                return at("T741", message, flow.role, block, index)
    return Finding("T741", message, flow.role.pipeline)


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


def _steps(plan: Plan, role: Role) -> list[Finding]:
    step, evaluation = train_step(plan, role), _evaluation(plan, role)
    loss(step)
    loss(evaluation)
    return step.findings + evaluation.findings


def gradients(plan: Plan) -> list[Finding]:
    """Findings of proof (d) over all roles."""
    found: list[Finding] = []
    programs: dict[str, list[_Program]] = {"train": [], "evaluate": []}
    for role in plan.roles:
        for order, listed in programs.items():
            program = _follow(plan, role, order)
            listed.append(program)
            found += [finding for flow in program.flows for finding in flow.findings]
            found += _covered(plan, program)
        found += _agree(programs["train"][-1], programs["evaluate"][-1])
        if len(found) < MOST:
            found += _steps(plan, role)
    for listed in programs.values():
        found += _everywhere(plan, listed)
    return found + ahead(plan)
