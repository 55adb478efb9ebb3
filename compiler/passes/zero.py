"""ZeRO: shards in buffers, whole buckets in registers; gathers ahead of their use, sums under the backward.

Three rewrites of a block before liveness ends its registers:
- sharded parameters are gathered into a register `prefetch` layers before the layer that reads them, across blocks too
  (`overlap`), and end with it (each forward and each backward gathers anew), or live until the step's last use
  (gathered once): then all are issued when the step begins, in the order of their first use, and come under the first
  micro-batch and while a stage waits for it. They are what the step before has updated, so none can be issued earlier
  than behind the end of that;
- sharded gradients begin as a whole bucket of zeros for one micro-batch, whose sum is scattered and added to the shard
  right after the bucket's last contribution, under the backward of the layer before;
- gradients that are kept whole are summed once a step: issued in the block of the bucket's last contribution (`.last`),
  so that the sums run under what is left of the backward. With a split backward that is a W.

What an order does first or last differs from the other micro-batches, and so does what stands before another element;
such calls get a variant of the block.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import field, replace
from functools import cached_property
from operator import itemgetter

from titan.compiler.passes.draft import Draft, Twin
from titan.compiler.passes.liveness import liveness
from titan.compiler.passes.marks import NONE, Ends, Marks, Place, by_place, ends_of, usual_places
from titan.compiler.passes.overlap import OWN, Early, Overlap, overlap
from titan.compiler.plan.frozen import dataclass
from titan.compiler.plan.instruction import Instruction
from titan.compiler.plan.program import Block, BlockCall, Bucket, called

GATHER, REDUCE = "data.gather", "data.reduce"  # streams
BETWEEN = "data.replicate"  # the factor of data over which shards are copies of each other (HSDP)


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
    """Finishes the drafts of one role. `buckets` are those at home there; `model` is that of the role in which what is
    a twin here is written."""

    def __init__(
        self, drafts: Iterable[Draft], buckets: tuple[Bucket, ...], choices: Choices, model: Sharding | None = None
    ) -> None:
        self.drafts = {draft.name: draft for draft in drafts}
        self.buckets = {bucket.name: bucket for bucket in buckets}
        self.choices = choices
        self._model = model  # not itself: a cycle would keep all that it has written
        self.blocks: dict[tuple[str, Marks], Block] = {}
        self._taken: set[str] = set()  # names of blocks
        self._texts: dict[tuple[object, ...], tuple[Instruction, ...]] = {}
        self._uses: dict[str, list[dict[str, list[int]]]] = {}
        self.first: dict[tuple[str, frozenset[str]], tuple[Early, ...]] = {}
        self.between: dict[str, Block] = {}  # blocks that issue what no element can issue for the next

    @property
    def model(self) -> Sharding:
        return self._model or self

    def order(self, calls: tuple[BlockCall, ...]) -> tuple[BlockCall, ...]:
        """The calls with the names of variants where a call is the first or last of something, or issues something for
        the next."""
        names, plain = called(calls), Marks()
        ends = ends_of(names)
        marks = self._marks(ends)

        def early(position: int, number: int, half: str) -> tuple[Early, ...]:
            return self._early(self.drafts[half], marks.get((position, number), plain).opens)

        marked = {position for position, _ in marks}
        places = overlap(calls, self.drafts, early, marked) if self._ahead else Overlap()
        self.between |= places.blocks
        special = marked | places.under.keys()
        usual: dict[str, str] = {}  # other names of calls that are nothing special
        found = list(calls)
        for position in sorted({*special, *usual_places(names, ends, special)}):
            call, under, name = calls[position], places.under.get(position), names[position]
            halves = name.split("+")
            if halves[0] in self.drafts:
                of = [marks.get((position, n), plain) for n in range(len(halves))]
                if under is not None:
                    of[-1] = replace(of[-1], early=under.early, following=under.name)
                name = "+".join(self._block(half, mark).name for half, mark in zip(halves, of, strict=True))
            if name == call.block:
                continue
            if position not in special:
                usual[call.block] = name
            else:
                found[position] = BlockCall(name, (*call.arguments, *(under.arguments if under else ())))
        for position, (block, arguments) in enumerate(calls if usual else ()):
            if block in usual and position not in special:
                found[position] = BlockCall(usual[block], arguments)
        return (*self._opening(ends), *places.called(found))

    def finished(self) -> tuple[Block, ...]:
        """Every block that an order calls, in the order of the drafts."""
        names = list(self.drafts)
        written = sorted(self.blocks.items(), key=lambda item: names.index(item[0][0]))
        return (*self.between.values(), *(block for _, block in written))

    def _marks(self, ends: dict[str, Ends]) -> dict[Place, Marks]:
        """What is special, by position of the call and number of the half. `ends`: first and last call of each name."""
        halves: dict[str, tuple[Place, Place]] = {}  # of each draft: its first call and its last
        for block, (begin, end) in ends.items():
            for number, half in enumerate(block.split("+")):
                first, last = halves.get(half, ((begin, number), (end, number)))
                halves[half] = min(first, (begin, number)), max(last, (end, number))
        opens: dict[str, Place] = {}
        closes: dict[str, Place] = {}
        complete: dict[str, Place] = {}
        for half, (first, last) in halves.items():
            draft = self.drafts.get(half)
            for name in draft.reads & self._once if draft else ():
                opens[name] = min(opens.get(name, first), first)
                closes[name] = max(closes.get(name, last), last)
            for name in draft.updates & self._summed if draft else ():
                complete[name] = max(complete.get(name, last), last)
        read, left, summed = map(by_place, (opens, closes, complete))
        places = read.keys() | left.keys() | summed.keys()
        return {p: Marks(read.get(p, NONE), left.get(p, NONE), summed.get(p, NONE)) for p in places}

    @cached_property
    def _once(self) -> frozenset[str]:
        """Buckets that are gathered once a step."""
        return frozenset(name for name in self.buckets if self.choices.once and self._sharded(name, "p"))

    @cached_property
    def _summed(self) -> frozenset[str]:
        """Buckets whose gradients are summed once a step, under the last backward."""
        return frozenset(name for name, bucket in self.buckets.items() if reduces_early(bucket))

    @cached_property
    def _ahead(self) -> bool:
        """Whether anything is issued before the block that needs it."""
        gathered = not self.choices.once and any("p" in bucket.sharded for bucket in self.buckets.values())
        return gathered or any(draft.early for draft in self.drafts.values())

    def _sharded(self, bucket: str, kind: str) -> bool:
        return kind in self.buckets[bucket].sharded

    def _block(self, name: str, marks: Marks) -> Block:
        found = self.blocks.get((name, marks))
        if found is None:
            word, taken = name + marks.word, self._taken
            word = next(w for w in (word, *(f"{word}{n}" for n in range(2, len(taken) + 3))) if w not in taken)
            taken.add(word)
            text = self._text(self.drafts[name], marks)
            found = self.blocks[name, marks] = Block(word, (*OWN[:1], *marks.symbols), text)
        return found

    def _text(self, draft: Draft, marks: Marks) -> Sequence[Instruction]:
        """The instructions of a block, written at the first time for all roles that are alike."""
        if isinstance(draft, Twin):
            return draft.like.instructions(self.model.written(draft.of, marks.renamed(draft.like.back)))
        return self.written(draft, marks)

    def written(self, draft: Draft, marks: Marks) -> tuple[Instruction, ...]:
        """The instructions of a block of this role."""
        key = (draft.name, marks.opens, marks.closes, marks.complete, marks.early)
        found = self._texts.get(key)
        if found is None:
            rewrite = _Rewrite(self, draft, marks)
            instructions = rewrite.run()
            found = liveness(instructions, draft.outlive | rewrite.outlive, dict(draft.by_tier))
            self._texts[key] = found
        return found

    def unshard(self, bucket: str, register: str) -> Instruction:
        group = self.buckets[bucket].shards
        return Instruction("unshard", (f"{register}?",), (f"p.{bucket}",), (), "", group, GATHER)

    def _opening(self, names: Iterable[str]) -> tuple[BlockCall, ...]:
        """Gathers everything that is gathered once, in the order of its first use by the blocks of these names."""
        if not self.choices.once:
            return ()
        halves = [h for h in dict.fromkeys(h for n in names for h in n.split("+")) if h in self.drafts]
        used = dict.fromkeys(b for h in halves for run in self.uses(self.drafts[h]) for b in run)
        if not used:
            return ()
        name = f"gather.{self.drafts[halves[0]].phase}"
        self.between[name] = Block(name, (), tuple(self.unshard(bucket, f"w.{bucket}") for bucket in used))
        return (BlockCall(name),)

    def _early(self, draft: Draft, opens: frozenset[str]) -> tuple[Early, ...]:
        """What is issued before a draft that reads the buckets of `opens` first."""
        if (draft.name, opens) not in self.first:
            rewrite = _Rewrite(self, draft, Marks(opens=opens))
            rewrite.gather()
            self.first[draft.name, opens] = (*draft.early, *rewrite.early)
        return self.first[draft.name, opens]

    def uses(self, draft: Draft) -> list[dict[str, list[int]]]:
        """Of each stretch of a draft the sharded buckets whose parameters it reads, and the instructions that do."""
        found = self._uses.get(draft.name)
        if found is None and isinstance(draft, Twin):
            there = self.model.uses(draft.of)
            found = self._uses[draft.name] = [{draft.like.bucket(b): n for b, n in run.items()} for run in there]
        elif found is None:
            sharded = {f"p.{name}": name for name in draft.reads if self._sharded(name, "p")}
            found = self._uses[draft.name] = [{} for _ in draft.runs]
            for run, uses in zip(draft.runs if sharded else (), found, strict=False):
                for index in run:
                    for name in draft.instructions[index].reads:
                        if name in sharded:
                            indices = uses.setdefault(sharded[name], [])
                            indices += [] if indices[-1:] == [index] else [index]
        return found

    def shared(self, bucket: str) -> bool:
        """Whether several chunks of the role use a bucket (embedding and head of a folded pipeline)."""
        return len(self._chunks[bucket]) > 1

    @cached_property
    def _chunks(self) -> dict[str, set[str]]:
        """Chunks that use each bucket."""
        found: dict[str, set[str]] = {}
        for draft in self.drafts.values():
            for bucket in draft.reads | draft.updates:
                found.setdefault(bucket, set()).add(draft.chunk)
        return found


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
    early: list[Early] = field(default_factory=list)  # gathers that belong before the block

    def run(self) -> list[Instruction]:
        self.gather()
        self._add_up()
        self._issue_for_next()
        found: list[Instruction] = []
        for index, instruction in enumerate(self.draft.instructions):
            found += self.before.get(index, ())
            found.append(self._rename(self.renamed[index], instruction) if index in self.renamed else instruction)
            found += self.after.get(index, ())
        return found

    @staticmethod
    def _rename(names: dict[str, str], i: Instruction) -> Instruction:
        reads, updates = (tuple([names.get(name, name) for name in listed]) for listed in (i.reads, i.updates))
        return Instruction(i.opcode, i.writes, reads, updates, i.unit, i.group, i.stream, i.attributes)

    # -- parameters ---------------------------------------------------------------------------------------------------

    def gather(self) -> None:
        """Sharded parameters, stretch by stretch."""
        uses = self.sharding.uses(self.draft)
        last = {bucket: number for number, run in enumerate(uses) for bucket in run}
        used: dict[str, int] = {}
        for number, run in enumerate(uses):
            for bucket, indices in run.items():
                used[bucket] = used.get(bucket, 0) + 1
                self._gathered(bucket, number, indices, used[bucket], last[bucket] == number)

    def _gathered(self, bucket: str, run: int, uses: list[int], times: int, last: bool) -> None:
        once = self.sharding.choices.once
        register = f"w.{bucket}" if once else self._register("w", bucket, times)
        for index in uses:
            self.renamed.setdefault(index, {})[f"p.{bucket}"] = register
        if not once:
            ahead = run - self.sharding.choices.prefetch
            issue = self.sharding.unshard(bucket, register)
            if ahead < 0:
                self.early.append(Early(-ahead, issue))
            else:
                place = self.draft.runs[ahead][0] if ahead else 0  # before the wait for what another stage sends
                self.before.setdefault(place, []).append(issue)
        if not once or (bucket in self.marks.opens and times == 1):
            self.before.setdefault(uses[0], []).append(Instruction("wait", (register,), (f"{register}?",)))
        if last and bucket in self.marks.closes:
            self.after.setdefault(uses[-1], []).append(Instruction("free", reads=(register,)))

    def _issue_for_next(self) -> None:
        """What the element that follows needs first; what is read stays alive for it."""
        for item in self.marks.early:
            layer = len(self.draft.runs) - item.layers
            place = self.draft.runs[layer][0] if layer > 0 else 0
            self.before.setdefault(place, []).append(item.issue)
            self.outlive.update(name for name in item.issue.reads if ":" in name)

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
        self.before.setdefault(uses[0], []).append(Instruction("open_grad", (register,)))
        group, token = self.sharding.buckets[bucket].shards, f"u.{register}?"
        mode = (("mode", "reduce_scatter"),)
        issue = Instruction("reduce_grad", (token,), (register,), (f"g.{bucket}",), "", group, REDUCE, mode)
        self.after.setdefault(uses[-1], []).append(issue)
        runs = self.draft.runs
        run = bisect_right(runs, uses[-1], key=itemgetter(0)) - 1
        place = runs[run + 1][-1] if run + 1 < len(runs) else len(self.draft.instructions) - 1
        self.after.setdefault(place, []).append(Instruction("wait", (), (token,)))
