"""Proof (d): every segment runs forward and backward once per micro-batch, on the right operands; every gradient is
summed once over exactly its replicas; every parameter is updated once; the loss is summed where it is partial.

One micro-batch stands for all that run the same blocks (`flow`); the buffers of a step are followed along the order
(`updates`, `loss`).
"""

from __future__ import annotations

from dataclasses import field

from titan.compiler.plan.alike import Like
from titan.compiler.plan.frozen import dataclass
from titan.compiler.plan.program import Block, Plan, Role
from titan.compiler.plan.segment import bind, parse_unit
from titan.compiler.plan.threads import Met
from titan.compiler.verify.ahead import ahead
from titan.compiler.verify.findings import MOST, Finding, at, found_alike
from titan.compiler.verify.flow import Flow
from titan.compiler.verify.loss import BUFFER, loss
from titan.compiler.verify.micro_batch import evaluate_flow, forward_graph, train_flow
from titan.compiler.verify.piece import Piece
from titan.compiler.verify.rings import bare
from titan.compiler.verify.threads import by_met
from titan.compiler.verify.updates import Step, noted, train_step, turns
from titan.compiler.verify.whole import whole

_NOTHING = -1  # the kind of a micro-batch for which nothing is done


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

    def forward(self) -> dict[int, int]:
        """For each kind of micro-batch the first one that is the same in forward: no role has many."""
        flows = self.flows.items()
        return {
            number: next(n for n, f in flows if f.losses == flow.losses and f.forwards.keys() == flow.forwards.keys())
            for number, flow in flows
        }


class _Pieces:
    """Pieces of the blocks of roles that are alike, by what they do: those that do the same have one number."""

    def __init__(self, role: Role) -> None:
        self.pieces: list[Piece] = []
        self.numbers = {block.name: self._numbers(block) for block in role.blocks}

    def met(self, like: Like) -> dict[Met, int]:
        """Numbers of the pieces that micro-batches meet in a role."""
        return by_met({name: self.numbers[block.name] for name, block in like.blocks.items()})

    def _numbers(self, block: Block) -> tuple[int, ...]:
        """Those of a block, by parameter; none where it does nothing."""
        pieces = [Piece(block, symbol) for symbol in block.parameters]
        return tuple(map(self._number, pieces)) if any(piece.does for piece in pieces) else ()

    def _number(self, piece: Piece) -> int:
        number = next((n for n, other in enumerate(self.pieces) if other.does == piece.does), len(self.pieces))
        if number == len(self.pieces):
            self.pieces.append(piece)
        return number


class _Follower:
    """Follows one micro-batch of each kind through an order of roles that are alike: those for which the same is done
    are of one kind, by whatever blocks."""

    def __init__(self, plan: Plan, role: Role, order: str, pieces: _Pieces) -> None:
        self.plan, self.role, self.order, self.pieces = plan, role, order, pieces
        self.known: dict[tuple[int, ...], int] = {}  # kinds by the numbers of their pieces
        self.flows: list[Flow] = []

    def follow(self, like: Like, pieces: dict[Met, int]) -> _Program:
        """`pieces`: numbers of those that micro-batches meet in the role."""
        kinds: list[int] = []
        threads = like.role.threads[self.order]
        for thread in threads.kinds:
            met = tuple([pieces[met] for met in thread if met in pieces])
            kinds.append(self.number(met) if met else _NOTHING)
        batches = {batch: kinds[kind] for batch, kind in threads.batches.items() if kinds[kind] != _NOTHING}
        flows = {number: self.flows[number] for number in kinds if number != _NOTHING}
        return _Program(like, self.order, flows, batches)

    def number(self, listed: tuple[int, ...]) -> int:
        """The kind of a micro-batch that meets these pieces, in this order."""
        if listed not in self.known:
            self.known[listed] = len(self.flows)
            self.flows.append(self.flow(tuple(self.pieces.pieces[number] for number in listed)))
        return self.known[listed]

    def flow(self, pieces: tuple[Piece, ...]) -> Flow:
        flow = (train_flow if self.order == "train" else evaluate_flow)(self.plan, self.role, pieces)
        flow.findings += whole(self.plan, self.role, pieces)
        return flow


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
    same = [program.forward() for program in programs]
    units = {(at, number): p.units(number) for at, p in enumerate(programs) for number in {*same[at].values()}}
    everything = {unit for listed in units.values() for unit in listed}
    seen: set[tuple[int, ...]] = set()
    for batch in range(count):
        kinds = tuple(
            known.get(program.kinds.get(batch, -1), -1) for program, known in zip(programs, same, strict=True)
        )
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
        self.pieces = _Pieces(role)
        self.followers = [_Follower(plan, role, order, self.pieces) for order in ("train", "evaluate")]
        self.covered: set[tuple[object, ...]] = set()
        self.stepped: set[tuple[object, ...]] = set()
        self.noted = {block.name for block in role.blocks if noted(block)}

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
        key = tuple(self.turns(like, order) for order in ("train", "evaluate"))
        if key in self.stepped:
            return []
        self.stepped.add(key)
        return _steps(self.plan, like.role)

    def turns(self, like: Like, order: str) -> tuple[str, ...]:
        """Blocks that have to do with the buffers of a step, in turn."""
        table = {name: block.name for name, block in like.blocks.items() if block.name in self.noted}
        listed = turns(like.role, order).items()
        places = [(at, table[name]) for name, places in listed if name in table for at in places]
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
        pieces = kind.pieces.met(like)
        train, evaluate = (follower.follow(like, pieces) for follower in kind.followers)
        trained.append(train)
        evaluated.append(evaluate)
        found += kind.flows(train, evaluate)
        if len(found) < MOST:
            found += kind.steps(like)
    return found + _everywhere(plan, trained) + _everywhere(plan, evaluated)
