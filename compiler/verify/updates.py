"""What a step does to its buffers: every gradient is summed once over exactly its replicas, counted once in the norm,
used once in an update, cleared once; with sharded state the updated shards are gathered once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field

from titan.compiler.plan.frozen import dataclass
from titan.compiler.plan.instruction import STATE, Instruction, base_name
from titan.compiler.plan.program import Block, Bucket, Plan, Role
from titan.compiler.verify.bodies import active
from titan.compiler.verify.findings import Finding, at

_PASSING = frozenset(("wait", "free", "send", "recv", "add"))
_ON_GRADIENT = frozenset(("reduce_grad", "zero_grad", "grad_norm", "optimizer_step"))


@dataclass(frozen=True)
class Event:
    """An instruction at its place in the order; places compare in program order."""

    place: tuple[int, int]
    block: Block
    instruction: Instruction


@dataclass
class Step:
    """The instructions of one order that touch buffers. Contributions are kept as their first and last place only."""

    plan: Plan
    role: Role
    order: str
    findings: list[Finding] = field(default_factory=list)
    events: dict[str, list[Event]] = field(default_factory=dict)  # buffer -> everything but contributions and reads
    added: dict[str, tuple[Event, Event]] = field(
        default_factory=dict
    )  # gradient buffer -> first and last contribution
    read: dict[str, Event] = field(default_factory=dict)  # parameter buffer -> last use by a segment
    made: dict[str, list[Event]] = field(default_factory=dict)  # register of the step -> what writes it
    others: dict[str, list[Event]] = field(default_factory=dict)  # opcode -> events, for report and grad_norm

    def fail(self, code: str, message: str, event: Event | None = None) -> None:
        if event is None:
            self.findings.append(Finding(code, message, self.role.pipeline))
        else:
            self.findings.append(at(code, message, self.role, event.block, event.place[1], event.place[0]))

    @property
    def last(self) -> Event | None:
        """The last instruction of the order: where something is missing at the end."""
        calls = self.role.order(self.order)
        if not calls or not self.role.block_table[calls[-1].block].instructions:
            return None
        block = self.role.block_table[calls[-1].block]
        index = len(block.instructions) - 1
        return Event((len(calls) - 1, index), block, block.instructions[index])

    def collect(self) -> Step:
        for name, positions in turns(self.role, self.order).items():
            block = self.role.block_table[name]
            for index, instruction in noted(block):
                for position in positions:
                    self.note(Event((position, index), block, instruction))
        for events in (*self.events.values(), *self.made.values(), *self.others.values()):
            events.sort(key=lambda event: event.place)
        return self

    def note(self, event: Event) -> None:
        instruction = event.instruction
        opcode = instruction.opcode
        adds = opcode == "reduce_grad" and instruction.reads  # the scattered sum of one micro-batch's whole gradient
        gathers = opcode == "unshard" and instruction.reads
        if instruction.unit or opcode == "loss" or adds or gathers:
            for name in instruction.updates:
                known = self.added.get(name, (event, event))
                self.added[name] = (min(known[0], event, key=_place), max(known[1], event, key=_place))
            for name in instruction.reads:
                if name.startswith("p."):
                    self.read[name] = max(self.read.get(name, event), event, key=_place)
            return
        for name in instruction.updates:
            self.events.setdefault(name, []).append(event)
        if opcode in _ON_GRADIENT:
            for name in instruction.reads:
                self.events.setdefault(name, []).append(event)
        if opcode in ("report", "grad_norm", "load_batch"):
            self.others.setdefault(opcode, []).append(event)
        for name in instruction.writes:
            if opcode != "wait" and ":" not in name:
                self.made.setdefault(base_name(name), []).append(event)


def noted(block: Block) -> list[tuple[int, Instruction]]:
    """The instructions of a block that may have to do with the buffers of a step."""
    listed = enumerate(block.instructions)
    return [(index, i) for index, i in listed if i.opcode not in _PASSING and not _of_batch(i)]


def turns(role: Role, order: str) -> dict[str, list[int]]:
    """Where each block that an order calls has its turn, as far as buffers of a step are concerned: of blocks that run
    for micro-batches the first and the last."""
    names = role.called(order)
    last = dict(zip(names, range(len(names)), strict=True))
    first = dict(zip(reversed(names), range(len(names) - 1, -1, -1), strict=True))
    found = {name: sorted({first[name], at}) for name, at in last.items()}
    for name, places in found.items():
        if len(places) > 1 and not role.block_table[name].parameters:
            found[name] = [n for n, other in enumerate(names) if other == name]
    return found


def _of_batch(instruction: Instruction) -> bool:
    """A collective on registers of a micro-batch: nothing that the step as a whole keeps."""
    return instruction.row.kind == "collective" and ":" in instruction.writes[0]


def _place(event: Event) -> tuple[int, int]:
    return event.place


def _factors(plan: Plan, group: str) -> tuple[str, ...]:
    """Factors with more than one rank that a group spans, the pipeline among them."""
    declared = plan.group_table.get(group)
    axes = declared.axes if declared else group
    return tuple(f for f in plan.mesh.resolve(axes) if plan.mesh.size(f) > 1)


def _homes(plan: Plan, group: str) -> tuple[int, ...]:
    """Pipeline coordinates that a group joins; () when it does not span the pipeline."""
    declared = plan.group_table.get(group)
    if "pipeline" not in _factors(plan, group):
        return ()
    return declared.pipeline if declared and declared.pipeline else tuple(range(plan.mesh.size("pipeline")))


class _BucketStep:
    """The life of one bucket in one step, in order."""

    def __init__(self, step: Step, bucket: Bucket) -> None:
        self.step, self.bucket, self.plan = step, bucket, step.plan
        self.gradient = f"g.{bucket.name}"
        self.events = step.events.get(self.gradient, [])

    def of(self, opcode: str) -> list[Event]:
        return [event for event in self.events if event.instruction.opcode == opcode]

    def once(self, opcode: str, what: str) -> Event | None:
        found = self.of(opcode)
        if len(found) == 1:
            return found[0]
        event = found[1] if found else self.step.added[self.gradient][1]
        self.step.fail("T745", f"bucket {self.bucket.name} is {what} {len(found)} times in a step, not once", event)
        return None

    def check(self) -> None:
        added = self.step.added.get(self.gradient)
        if added is None:
            self.step.fail("T743", f"nothing adds to the gradients of bucket {self.bucket.name}", self.step.last)
            return
        self.reductions(added[1])
        norm, update = self.once("grad_norm", "counted in the norm"), self.once("optimizer_step", "updated")
        zero = self.once("zero_grad", "cleared")
        if not (norm and update and zero):
            return
        reduced = max((e.place for e in self.of("reduce_grad")), default=added[1].place)
        if not max(reduced, added[1].place) < norm.place:
            self.step.fail("T744", f"{self.gradient} is counted before it is summed", norm)
        if not max(reduced, added[1].place) < update.place:
            self.step.fail("T745", f"{self.gradient} is used before it is summed", update)
        if not (zero.place > max(update.place, norm.place) or zero.place < added[0].place):
            self.step.fail("T745", f"{self.gradient} is cleared between its first contribution and its update", zero)
        self.updated(update)
        self.fetched(update)
        self.gathered(update)

    def updated(self, update: Event) -> None:
        name = self.bucket.name
        places = {buffer.name: buffer.place for buffer in self.step.role.buffers}
        state = f"{STATE}{name}" if places.get(f"o.{name}") == "host" else f"o.{name}"
        if update.instruction.updates != (f"p.{name}", state) or update.instruction.reads[0] != self.gradient:
            self.step.fail("T745", f"{self.gradient} updates another bucket, or its state is not in {state}", update)
        read = self.step.read.get(f"p.{name}")
        if read is not None and read.place > update.place:
            self.step.fail("T745", f"p.{name} is used after its update in the same step", read)

    def fetched(self, update: Event) -> None:
        """State on the host: it is stored once, after the update. That it was fetched before, proof (a) says."""
        name = f"o.{self.bucket.name}"
        due = any(buffer.name == name and buffer.place == "host" for buffer in self.step.role.buffers)
        stored = [e for e in self.step.events.get(name, []) if e.instruction.opcode == "offload"]
        if len(stored) != due:
            event = stored[-1] if stored else update
            self.step.fail("T748", f"{name} is stored {len(stored)} times after its update, not {due:d}", event)
        elif stored and stored[0].place < update.place:
            self.step.fail("T748", f"{name} is stored before its update", stored[0])

    def gathered(self, update: Event) -> None:
        """Sharded state: the updated shards are gathered once, over the shard group, after the update."""
        name = f"p.{self.bucket.name}"
        gathers = [e for e in self.step.events.get(name, []) if e.instruction.opcode == "unshard"]
        due = bool(self.bucket.sharded) and "p" not in self.bucket.sharded
        if len(gathers) != due:
            event = gathers[-1] if gathers else update
            self.step.fail("T746", f"{name} is gathered {len(gathers)} times after its update, not {due:d}", event)
            return
        for event in gathers:
            if event.place < update.place:
                self.step.fail("T746", f"{name} is gathered before its update", event)
            group, shards = event.instruction.group, self.bucket.shards
            same = _homes(self.plan, group) == _homes(self.plan, shards)
            if _factors(self.plan, group) != _factors(self.plan, shards) or not same:
                self.step.fail("T746", f"{name} is sharded over {self.bucket.shards}", event)

    def reductions(self, last: Event) -> None:
        """Each factor of sums and replicas once, and the homes of a tied bucket once; the scatter in its place."""
        wanted = [f for g in (*self.bucket.sums, self.bucket.replicas) if g for f in _factors(self.plan, g)]
        if "g" in self.bucket.sharded:  # what arrives in the shard has been summed over the shard group
            wanted = [f for f in wanted if f not in _factors(self.plan, self.bucket.shards)]
        homes = self.bucket.homes if len(self.bucket.homes) > 1 else ()
        if "g" in self.bucket.sharded and self.plan.spans_homes(self.bucket):
            homes = ()
        done: list[str] = []
        scattered = tied = False
        for event in self.of("reduce_grad"):
            group = event.instruction.group
            joined = _homes(self.plan, group)
            factors = [f for f in _factors(self.plan, group) if f != "pipeline"]
            self.mode(event, scattered)
            if event.place < last.place:
                self.step.fail("T743", f"{self.gradient} is summed before its last contribution", event)
            if joined and (tuple(joined) != tuple(homes) or tied):
                self.step.fail("T743", f"{self.gradient} is summed over stages {joined}, its homes are {homes}", event)
            if [f for f in factors if f in done or f not in wanted]:
                self.step.fail(
                    "T743", f"{self.gradient} is not partial over {group} here: the sum counts it twice", event
                )
            done += factors
            tied = tied or bool(joined)
            scattered = scattered or event.instruction.attribute("mode") == "reduce_scatter"
        self.lacking([f for f in wanted if f not in done], bool(homes) and not tied, scattered)

    def mode(self, event: Event, scattered: bool) -> None:
        instruction, bucket = event.instruction, self.bucket
        mode = instruction.attribute("mode")
        whole = bool(bucket.sharded) and "g" not in bucket.sharded
        if mode == "reduce_scatter" and (not whole or instruction.group != bucket.shards):
            self.step.fail("T743", f"{self.gradient} is not whole, or not sharded over {instruction.group}", event)
        elif scattered and mode != "all_reduce_shard":
            self.step.fail("T743", f"after the scatter only the own shard of {self.gradient} may be summed", event)
        elif mode == "all_reduce_shard" and not (scattered and instruction.attribute("shard") == bucket.shards):
            self.step.fail("T743", f"{self.gradient} has no shard over {instruction.attribute('shard')} yet", event)

    def lacking(self, factors: list[str], tied: bool, scattered: bool) -> None:
        last = self.step.added[self.gradient][1]
        if factors:
            self.step.fail("T743", f"{self.gradient} is never summed over {', '.join(factors)}", last)
        if tied:
            self.step.fail("T743", f"{self.gradient} is never summed over its homes {self.bucket.homes}", last)
        if self.bucket.sharded and "g" not in self.bucket.sharded and not scattered and not factors:
            self.step.fail("T743", f"{self.gradient} is sharded but never scattered", last)


def _trace(step: Step, name: str) -> Iterator[Event]:
    """The collectives of the step's scalars that lead to a register, last first."""
    seen: set[str] = set()
    while len(step.made.get(name, ())) == 1 and name not in seen:
        seen.add(name)
        event = step.made[name][0]
        yield event
        if not event.instruction.reads:
            return
        name = base_name(event.instruction.reads[0])


def norm(step: Step, buckets: tuple[Bucket, ...]) -> None:
    """The norm reads every bucket of the role once, is summed over all ranks, and is what every update reads."""
    plan = step.plan
    counts = step.others.get("grad_norm", [])
    if len(counts) != 1:
        step.fail("T744", f"the role takes the norm {len(counts)} times, not once", counts[-1] if counts else step.last)
        return
    wanted = sorted(f"g.{b.name}" for b in buckets)
    if sorted(counts[0].instruction.reads) != wanted:
        step.fail("T744", f"the norm must count each of {', '.join(wanted)} once", counts[0])
    local = base_name(counts[0].instruction.writes[0])
    everything = {*active(plan.mesh), *(("pipeline",) if len(plan.roles) > 1 else ())}
    for bucket in buckets:
        for event in step.events.get(f"g.{bucket.name}", []):
            if event.instruction.opcode == "optimizer_step":
                _global(step, event, base_name(event.instruction.reads[1]), local, everything, "nsq")
    reports = [e for e in step.others.get("report", []) if e.instruction.attribute("name") == "grad_norm"]
    if len(reports) != 1:
        step.fail("T744", f"the norm is reported {len(reports)} times", reports[-1] if reports else counts[0])
    for event in reports:
        _global(step, event, base_name(event.instruction.reads[0]), local, everything, "norm")


def _global(step: Step, event: Event, name: str, local: str, factors: set[str], what: str) -> None:
    """`name` is `local` summed once over all given factors."""
    path = list(_trace(step, name))
    if not path or base_name(path[-1].instruction.writes[0]) != local:
        step.fail("T744", f"`{name}` does not come from `{local}`", event)
        return
    done: list[str] = []
    for sum_ in path[:-1]:
        instruction = sum_.instruction
        declared = step.plan.group_table.get(instruction.group)
        if (
            instruction.opcode != "all_reduce"
            or instruction.attribute("op") != "sum"
            or (declared and declared.pipeline)
        ):
            step.fail("T744", f"`{local}` must be summed over all ranks on its way to `{name}`", sum_)
            return
        done += _factors(step.plan, instruction.group)
    if sorted(done) != sorted(factors):
        step.fail("T744", f"`{name}` is summed over {done or 'nothing'}, the {what} is over {sorted(factors)}", event)


def train_step(plan: Plan, role: Role) -> Step:
    """Checks the buffers of one role in a training step."""
    step = Step(plan, role, "train").collect()
    buckets = tuple(b for b in plan.buckets if role.pipeline in b.homes)
    for bucket in buckets:
        _BucketStep(step, bucket).check()
    for name, events in step.events.items():
        if name.startswith("g.") and name[2:] not in {b.name for b in buckets}:
            step.fail("T745", f"{name} has no home here", events[0])
    norm(step, buckets)
    return step
