"""Proof (d): every segment runs forward and backward once per micro-batch, on the right operands; every gradient is
summed once over exactly its replicas; every parameter is updated once; the loss is summed where it is partial.

One micro-batch stands for all that run the same blocks (`flow`); the buffers of a step are followed along the order
(`updates`, `loss`).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import field

from titan.compiler.plan.alike import Like
from titan.compiler.plan.frozen import dataclass
from titan.compiler.plan.program import Plan, Role
from titan.compiler.plan.segment import bind, parse_unit
from titan.compiler.verify.ahead import ahead
from titan.compiler.verify.findings import MOST, Finding, at, found_alike
from titan.compiler.verify.flow import Flow
from titan.compiler.verify.loss import BUFFER, loss
from titan.compiler.verify.micro_batch import evaluate_flow, forward_graph, train_flow
from titan.compiler.verify.piece import Piece
from titan.compiler.verify.rings import bare
from titan.compiler.verify.threads import take_apart
from titan.compiler.verify.updates import Step, block_places, train_step
from titan.compiler.verify.whole import whole


@dataclass
class _Program:
    """One order of one role: the flow of each kind of micro-batch by its number, and the kind of each micro-batch.
    Flows are those of the role that stands for this one."""

    like: Like
    order: str
    flows: dict[int, Flow] = field(default_factory=dict)
    kinds: dict[int, int] = field(default_factory=dict)

    def units(self, number: int) -> list[str]:
        """What runs forward in a kind of micro-batch, by the names of this role."""
        return list(map(self.like.renaming.name, self.flows[number].forwards))


class _Follower:
    """Follows one micro-batch of each kind through an order of roles that are alike: those that run the same blocks are
    of one kind, and those for which other blocks do the same."""

    def __init__(self, plan: Plan, role: Role, order: str) -> None:
        self.plan, self.role, self.order = plan, role, order
        self.known: dict[tuple[int, ...], int] = {}  # pieces by number
        self.done: list[list[object]] = []  # by each flow
        self.flows: list[Flow] = []
        self.pieces = [Piece(block, symbol) for block in role.blocks for symbol in block.parameters]
        numbers = iter(range(len(self.pieces)))
        self.numbers = {block.name: tuple(next(numbers) for _ in block.parameters) for block in role.blocks}

    def follow(self, like: Like) -> _Program:
        found = _Program(like, self.order)
        batches: defaultdict[int, list[int]] = defaultdict(list)
        numbers = {name: self.numbers[block.name] for name, block in like.blocks.items()}
        take_apart(like.role.order(self.order), numbers, batches)
        kinds: dict[tuple[int, ...], int] = {}
        for batch, listed in batches.items():
            kind = tuple(sorted(listed))
            if kind not in kinds:
                kinds[kind] = self.number(tuple(listed))
            found.kinds[batch] = kinds[kind]
        found.flows = {number: self.flows[number] for number in kinds.values()}
        return found

    def number(self, listed: tuple[int, ...]) -> int:
        """The number of the flow of these pieces, in this order."""
        if listed not in self.known:
            pieces = tuple(self.pieces[number] for number in listed)
            does = [what for piece in pieces for what in piece.does]
            number = self.known[listed] = next(
                (n for n, other in enumerate(self.done) if other == does), len(self.done)
            )
            if number == len(self.done):
                check = train_flow if self.order == "train" else evaluate_flow
                flow = check(self.plan, self.role, pieces)
                flow.findings += whole(self.plan, self.role, pieces)
                self.done.append(does)
                self.flows.append(flow)
        return self.known[listed]


def _covered(plan: Plan, program: _Program) -> list[Finding]:
    """Every parameter that is at home here is used, every layer of the role runs."""
    used: set[str] = set()
    layers: set[int] = set()
    for flow in program.flows.values():
        for unit in flow.forwards:
            name, layer = parse_unit(unit)
            used.update(bind(formal, layer) for formal in plan.segment_table[name].parameters)
            if layer is not None:
                layers.add(layer)
    role, found = program.like.first, []
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
    units = {(at, number): p.units(number) for at, p in enumerate(programs) for number in p.flows}
    everything = {unit for listed in units.values() for unit in listed}
    seen: set[tuple[int, ...]] = set()
    for batch in range(count):
        kinds = tuple(program.kinds.get(batch, -1) for program in programs)
        if kinds in seen:
            continue
        seen.add(kinds)
        flows = [(programs[at].flows[kind], units[at, kind]) for at, kind in enumerate(kinds) if kind >= 0]
        found = _once(batch, flows, everything)
        if found:
            return found
    extra = {batch for program in programs for batch in program.kinds} - set(range(count))
    if extra:
        return [Finding("T740", f"micro-batch {min(extra)} runs, the plan has {count}")]
    return []


def _once(batch: int, flows: list[tuple[Flow, list[str]]], everything: set[str]) -> list[Finding]:
    ran: set[str] = set()
    for flow, units in flows:
        for unit, own in zip(units, flow.forwards, strict=True):
            if unit in ran:
                message = f"micro-batch {batch} runs {unit} on two stages"
                return [at("T740", message, flow.role, *flow.places[own])]
            ran.add(unit)
    if ran != everything:
        return [Finding("T740", f"micro-batch {batch} never runs {', '.join(sorted(everything - ran)[:3])}")]
    losses = [flow for flow, _ in flows for _ in flow.losses]
    if len(losses) != 1:
        place = losses[-1] if losses else flows[-1][0]
        unit = list(place.places)[-1]
        message = f"micro-batch {batch} adds to the loss {len(losses)} times"
        return [at("T747", message, place.role, *place.places[unit])]
    return []


def _agree(train: _Program, evaluate: _Program) -> list[Finding]:
    """Every kind of micro-batch computes the same forward, in training and in evaluation."""
    first: dict[str, tuple[object, ...]] = {}
    trained = [(flow, forward_graph(flow)) for flow in train.flows.values()]
    for flow, graph in trained:
        for register, made in graph.items():
            if first.setdefault(register, made) != made:
                return [_differs(flow, register, made)]
    again: dict[str, tuple[object, ...]] = {}
    for flow in evaluate.flows.values():
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


class _Kind:
    """Roles that are alike, and what was found to hold of some of them."""

    def __init__(self, plan: Plan, role: Role) -> None:
        self.plan = plan
        self.followers = [_Follower(plan, role, order) for order in ("train", "evaluate")]
        self.covered: set[tuple[object, ...]] = set()
        self.stepped: set[tuple[object, ...]] = set()

    def flows(self, train: _Program, evaluate: _Program) -> list[Finding]:
        """Findings of the flows of one role, where another had others."""
        key = (tuple(train.flows), tuple(evaluate.flows))
        if key in self.covered:
            return []
        self.covered.add(key)
        found = [f for program in (train, evaluate) for flow in program.flows.values() for f in flow.findings]
        return found + _covered(self.plan, train) + _covered(self.plan, evaluate) + _agree(train, evaluate)

    def steps(self, like: Like) -> list[Finding]:
        """Findings of the buffers of one role, where the blocks of another ran in another order."""
        key = tuple(_turns(like, order) for order in ("train", "evaluate"))
        if key in self.stepped:
            return []
        self.stepped.add(key)
        return _steps(self.plan, like.role)


def _turns(like: Like, order: str) -> tuple[str, ...]:
    """Blocks in turn, at the places that count for the buffers of a step."""
    places = [(at, like.blocks[name].name) for name, listed in block_places(like.role, order).items() for at in listed]
    return tuple(name for _, name in sorted(places))


def gradients(plan: Plan) -> list[Finding]:
    """Findings of proof (d) over all roles."""
    return found_alike(plan, lambda likes: _gradients(plan, likes)) + ahead(plan)


def _gradients(plan: Plan, likes: tuple[Like, ...]) -> list[Finding]:
    found: list[Finding] = []
    trained: list[_Program] = []
    evaluated: list[_Program] = []
    kinds: dict[int, _Kind] = {}
    for like in likes:
        stage = like.first.pipeline
        kind = kinds[stage] = kinds.get(stage) or _Kind(plan, like.first)
        train, evaluate = (follower.follow(like) for follower in kind.followers)
        trained.append(train)
        evaluated.append(evaluate)
        found += kind.flows(train, evaluate)
        if len(found) < MOST:
            found += kind.steps(like)
    return found + _everywhere(plan, trained) + _everywhere(plan, evaluated)
