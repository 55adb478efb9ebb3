"""ZeRO: shards in buffers, whole buckets in registers; gathers ahead of their use, sums under the backward.

Three rewrites of a block before liveness ends its registers:
- sharded parameters are gathered into a register `prefetch` layers before the layer that reads them, and end with it
  (each forward and each backward gathers anew), or live from the step's first use to its last (gathered once);
- sharded gradients begin as a whole bucket of zeros for one micro-batch, whose sum is scattered and added to the shard
  right after the bucket's last contribution, under the backward of the layer before;
- gradients that are kept whole are summed once a step: issued in the block of the bucket's last contribution (`.last`),
  so that the sums run under what is left of the backward. With a split backward that is a W.

Only what an order does first or last differs from the other micro-batches; so those calls get a variant of the block.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property

from titan.compiler.passes.liveness import liveness
from titan.compiler.plan.instruction import Instruction
from titan.compiler.plan.program import Block, BlockCall, Bucket
from titan.compiler.plan.segment import parse_unit

GATHER, REDUCE = "data.gather", "data.reduce"  # streams
BETWEEN = "data.replicate"  # the factor of data over which shards are copies of each other (HSDP)


@dataclass(frozen=True)
class Draft:
    """A block before its registers end: `outlive` are those that later blocks read."""

    name: str
    instructions: tuple[Instruction, ...]
    outlive: frozenset[str]
    by_tier: tuple[tuple[str, frozenset[str]], ...] = ()  # what outlives it beside, by recompute tier

    @property
    def phase(self) -> str:
        return self.name.partition(".")[0]

    @property
    def chunk(self) -> str:
        return self.name.partition(".")[2]

    @cached_property
    def reads(self) -> frozenset[str]:
        """Buckets whose parameters are read."""
        return frozenset(n[2:] for i in self.instructions for n in i.reads if n.startswith("p."))

    @cached_property
    def updates(self) -> frozenset[str]:
        """Buckets whose gradients are added to."""
        return frozenset(n[2:] for i in self.instructions for n in i.updates if n.startswith("g."))


@dataclass(frozen=True)
class Marks:
    """What is special about one call: buckets read for the first or last time, gradients added to for the last time."""

    opens: frozenset[str] = frozenset()
    closes: frozenset[str] = frozenset()
    complete: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.opens or self.closes or self.complete)


@dataclass(frozen=True)
class Choices:
    """The strategy's part: `once`: parameters are gathered once a step; `prefetch` layers ahead of their use."""

    once: bool
    prefetch: int


def reduces_early(bucket: Bucket) -> bool:
    """Whether the sum over the replicas can be issued in the last backward: stages that share a bucket meet later."""
    return bool(bucket.replicas) and "g" not in bucket.sharded and len(bucket.homes) == 1


def first_sum(bucket: Bucket) -> Instruction:
    """Issues the sum of a gradient that is kept whole, over the replicas or into the own shard."""
    mode = "reduce_scatter" if bucket.sharded else "all_reduce"
    group = bucket.shards if bucket.sharded else bucket.replicas
    name = bucket.name
    return Instruction("reduce_grad", (f"u.g.{name}?",), (), (f"g.{name}",), "", group, REDUCE, (("mode", mode),))


class Sharding:
    """Finishes the drafts of one role. `buckets` are those at home there."""

    def __init__(self, drafts: Iterable[Draft], buckets: tuple[Bucket, ...], choices: Choices) -> None:
        self.drafts = {draft.name: draft for draft in drafts}
        self.buckets = {bucket.name: bucket for bucket in buckets}
        self.choices = choices
        self.blocks: dict[tuple[str, Marks], Block] = {}

    def order(self, calls: tuple[BlockCall, ...]) -> tuple[BlockCall, ...]:
        """The calls with the names of variants where a call is the first or last of something."""
        marks, plain, found = self._marks(calls), Marks(), []
        special = {position for position, _ in marks}
        usual: dict[str, str] = {}  # names of calls that are neither first nor last of anything
        for position, call in enumerate(calls):
            if position in special or call.block not in usual:
                halves = call.block.split("+")
                name = call.block
                if halves[0] in self.drafts:
                    places = ((half, marks.get((position, n), plain)) for n, half in enumerate(halves))
                    name = "+".join(self._block(half, mark).name for half, mark in places)
                if position not in special:
                    usual[call.block] = name
            else:
                name = usual[call.block]
            found.append(call if name == call.block else BlockCall(name, call.arguments))
        return tuple(found)

    def finished(self) -> tuple[Block, ...]:
        """Every block that an order calls, in the order of the drafts."""
        names = list(self.drafts)
        return tuple(
            block for (name, _), block in sorted(self.blocks.items(), key=lambda item: names.index(item[0][0]))
        )

    def _marks(self, calls: tuple[BlockCall, ...]) -> dict[tuple[int, int], Marks]:
        opening: dict[str, tuple[int, int]] = {}  # of each draft: its first call and its last
        closing: dict[str, tuple[int, int]] = {}
        for position, call in enumerate(calls):
            for number, half in enumerate(call.block.split("+")):
                opening.setdefault(half, (position, number))
                closing[half] = (position, number)
        first: dict[str, tuple[int, int]] = {}
        last: dict[str, tuple[int, int]] = {}
        added: dict[str, tuple[int, int]] = {}
        for half in (h for h in opening if h in self.drafts):
            draft = self.drafts[half]
            for name in draft.reads:
                first[name] = min(first.get(name, opening[half]), opening[half])
                last[name] = max(last.get(name, closing[half]), closing[half])
            for name in draft.updates:
                added[name] = max(added.get(name, closing[half]), closing[half])
        if not self.choices.once:
            first, last = {}, {}
        first, last = ({b: p for b, p in table.items() if self._sharded(b, "p")} for table in (first, last))
        added = {b: p for b, p in added.items() if reduces_early(self.buckets[b])}
        return {
            place: Marks(*(frozenset(b for b, p in table.items() if p == place) for table in (first, last, added)))
            for place in {*first.values(), *last.values(), *added.values()}
        }

    def _sharded(self, bucket: str, kind: str) -> bool:
        return kind in self.buckets[bucket].sharded

    def _block(self, name: str, marks: Marks) -> Block:
        if (name, marks) not in self.blocks:
            draft = self.drafts[name]
            rewrite = _Rewrite(self, draft, marks)
            instructions = rewrite.run()
            word = name + (".first" if marks.opens else "") + (".last" if marks.closes or marks.complete else "")
            taken = sum(block.name.startswith(word) for block in self.blocks.values()) if word != name else 0
            word += str(taken + 1) if taken else ""
            self.blocks[name, marks] = Block(
                word, ("i",), liveness(instructions, draft.outlive | rewrite.outlive, dict(draft.by_tier))
            )
        return self.blocks[name, marks]

    def shared(self, bucket: str) -> bool:
        """Whether several chunks of the role use a bucket (embedding and head of a folded pipeline)."""
        return len({d.chunk for d in self.drafts.values() if bucket in d.reads | d.updates}) > 1

    def begun(self, draft: Draft, bucket: str) -> bool:
        """Whether the gradient of the micro-batch was begun by the backward to inputs (norms and biases)."""
        return draft.phase == "W" and bucket in self.drafts[f"I.{draft.chunk}"].updates

    def goes_on(self, draft: Draft, bucket: str) -> bool:
        """Whether the backward to weights will add to the gradient."""
        return draft.phase == "I" and bucket in self.drafts[f"W.{draft.chunk}"].updates


@dataclass
class _Rewrite:
    """One block: instructions to put before and after those of the draft, by index."""

    sharding: Sharding
    draft: Draft
    marks: Marks
    before: dict[int, list[Instruction]] = field(default_factory=dict)
    after: dict[int, list[Instruction]] = field(default_factory=dict)
    renamed: dict[int, dict[str, str]] = field(default_factory=dict)  # by index
    outlive: set[str] = field(default_factory=set)

    def run(self) -> list[Instruction]:
        self.runs = stretches(self.draft.instructions)
        self._gather()
        self._add_up()
        found: list[Instruction] = []
        for index, instruction in enumerate(self.draft.instructions):
            found += self.before.get(index, ())
            found.append(self._rename(index, instruction))
            found += self.after.get(index, ())
        return found

    def _rename(self, index: int, instruction: Instruction) -> Instruction:
        names = self.renamed.get(index)
        if names is None:
            return instruction

        def new(listed: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(names.get(name, name) for name in listed)

        return replace(instruction, reads=new(instruction.reads), updates=new(instruction.updates))

    # -- parameters ---------------------------------------------------------------------------------------------------

    def _gather(self) -> None:
        used: dict[str, int] = {}
        for number, run in enumerate(self.runs):
            for bucket in dict.fromkeys(b for index in run for b in self._read(index)):
                used[bucket] = used.get(bucket, 0) + 1
                self._gathered(bucket, number, [n for n in run if bucket in self._read(n)], used[bucket])

    def _read(self, index: int) -> list[str]:
        reads = self.draft.instructions[index].reads
        return [n[2:] for n in reads if n.startswith("p.") and self.sharding._sharded(n[2:], "p")]

    def _gathered(self, bucket: str, run: int, uses: list[int], times: int) -> None:
        once = self.sharding.choices.once
        register = f"w.{bucket}" if once else self._register("w", bucket, times)
        for index in uses:
            self.renamed.setdefault(index, {})[f"p.{bucket}"] = register
        if not once or (bucket in self.marks.opens and times == 1):
            ahead = run - self.sharding.choices.prefetch
            place = 0 if ahead <= 0 else self.runs[ahead][0]
            group = self.sharding.buckets[bucket].shards
            issue = Instruction("unshard", (f"{register}?",), (f"p.{bucket}",), (), "", group, GATHER)
            self.before.setdefault(place, []).append(issue)
            self.before.setdefault(uses[0], []).append(Instruction("wait", (register,), (f"{register}?",)))
        if bucket in self.marks.closes and not self._later(bucket, run):
            self.after.setdefault(uses[-1], []).append(Instruction("free", reads=(register,)))

    def _later(self, bucket: str, run: int) -> bool:
        return any(bucket in self._read(n) for later in self.runs[run + 1 :] for n in later)

    def _register(self, kind: str, bucket: str, times: int = 1) -> str:
        again = "r." if kind == "w" and self.draft.phase in "BI" else ""
        chunk = f".{self.draft.chunk}" if self.sharding.shared(bucket) else ""
        return f"{again}{kind}.{bucket}{chunk}{f'.{times}' if times > 1 else ''}:i"

    # -- gradients ----------------------------------------------------------------------------------------------------

    def _add_up(self) -> None:
        added: dict[str, list[int]] = {}
        for index, instruction in enumerate(self.draft.instructions):
            for name in instruction.updates:
                if name.startswith("g."):
                    added.setdefault(name[2:], []).append(index)
        for bucket, uses in added.items():
            if self.sharding._sharded(bucket, "g"):
                self._scattered(bucket, uses)
            elif bucket in self.marks.complete:
                self.after.setdefault(uses[-1], []).append(first_sum(self.sharding.buckets[bucket]))

    def _scattered(self, bucket: str, uses: list[int]) -> None:
        """From zeros to the shard; waited for when the layer after has been computed."""
        register = self._register("dw", bucket)
        for index in uses:
            self.renamed.setdefault(index, {})[f"g.{bucket}"] = register
        if not self.sharding.begun(self.draft, bucket):
            self.before.setdefault(uses[0], []).append(Instruction("open_grad", (register,)))
        if self.sharding.goes_on(self.draft, bucket):
            self.outlive.add(register)
            return
        group, token = self.sharding.buckets[bucket].shards, f"u.{register}?"
        mode = (("mode", "reduce_scatter"),)
        issue = Instruction("reduce_grad", (token,), (register,), (f"g.{bucket}",), "", group, REDUCE, mode)
        self.after.setdefault(uses[-1], []).append(issue)
        run = next(n for n, indices in enumerate(self.runs) if uses[-1] in indices)
        place = self.runs[run + 1][-1] if run + 1 < len(self.runs) else len(self.draft.instructions) - 1
        self.after.setdefault(place, []).append(Instruction("wait", (), (token,)))


def stretches(instructions: tuple[Instruction, ...]) -> list[list[int]]:
    """Indices of compute instructions, one list for each stretch of one layer (or of embedding or head)."""
    runs: list[list[int]] = []
    before: object = None
    for index, instruction in enumerate(instructions):
        if not instruction.unit:
            continue
        name, layer = parse_unit(instruction.unit)
        instance = name.partition(".")[0] if layer is None else layer
        if instance != before:
            runs.append([])
        runs[-1].append(index)
        before = instance
    return runs
