"""All legal strategies of a spec, mesh by mesh, as families."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from titan.compiler.search.loss import loss_rows
from titan.compiler.search.space import (
    EXPERT_RULES,
    Batch,
    Family,
    Shardings,
    Space,
    allowed,
    chunked,
    context_forms,
    experts,
    meshes,
    schedules,
)
from titan.compiler.spec.divisors import divisors
from titan.compiler.spec.legality import RULES, diagnostic, legal, rules_reading
from titan.compiler.spec.verdicts import Verdicts
from titan.compiler.strategy import Strategy
from titan.grammar.diagnostics import Diagnostic

if TYPE_CHECKING:
    from titan.compiler.spec.schema import Spec

FORMS = ("sequence_parallel", "context_form", "context_heads", "context_order")
BATCHES = (
    "micro_batch", "schedule", "chunks", "stages", "zero", "shard", "reduce", "gather", "prefetch", "offload",
    "late_check", "recompute",
)  # fmt: skip
# what is not available is so whatever else is chosen; no other rule reads choices of both
OF_FORMS, OF_BATCHES = (
    tuple(rule for rule in rules_reading(*keys) if rule not in EXPERT_RULES) for keys in (FORMS, BATCHES)
)


def enumerate_space(spec: Spec) -> Space:
    """All families of candidates in a fixed order."""
    one = _Enumeration(spec)
    for mesh in meshes(spec):
        one.enter(mesh)
    broken = tuple((one.first[code], number) for code, number in one.broken.most_common())
    return Space(tuple(one.families), one.size, broken)


class _Enumeration:
    """The space so far, and what depends on some degrees of a mesh only, worked out once for these."""

    def __init__(self, spec: Spec) -> None:
        p = spec.parallel
        self.spec = spec
        self.families: list[Family] = []
        self.size = 0
        self.first: dict[str, Diagnostic] = {}
        self.broken: Counter[str] = Counter()
        self.of_meshes, self.of_batches, self.of_forms, self.of_experts = (
            Verdicts(spec, rules) for rules in (RULES, OF_BATCHES, OF_FORMS, EXPERT_RULES)
        )
        self.shardings = Shardings(spec)
        self.recompute = allowed(spec, "recompute")
        self.parallels = {shared: allowed(spec, "sequence_parallel", idle=not shared) for shared in (False, True)}
        self.harmless = Strategy(stages=p.stages.value or ())
        self.wished = self.harmless.but(
            recompute=self.recompute[0], late_check=p.late_check.value is True, offload=allowed(spec, "offload")[0]
        )
        self.orders: dict[tuple[int, int], tuple[tuple[str, int], ...]] = {}  # by pipeline and micro-batches
        self.batches: dict[tuple[int, int], list[Batch]] = {}  # by pipeline and sequences of a data rank
        self.forms: dict[tuple[int, int], list[tuple[str, int, str]]] = {}  # by context and tensor
        self.rows: dict[tuple[int, int, int], int] = {}  # by micro-batch, context and tensor

    def enter(self, mesh: tuple[int, int, int, int]) -> None:
        """Add the families of a mesh, or the rules that it breaks."""
        pipeline, data, context, tensor = mesh
        degrees = {"pipeline": pipeline, "data": data, "context": context, "tensor": tensor}
        batch = self.spec.train.global_batch // data
        plain = self._plain(self.harmless.but(**degrees, micro_batches=batch))
        broken = self.of_meshes.broken(plain)
        for rule in broken:
            if rule.code not in self.first:
                breach = rule.breach(self.spec, plain)
                assert breach is not None
                self.first[rule.code] = diagnostic(self.spec, rule, breach)
            self.broken[rule.code] += 1
        if broken:
            return
        before = len(self.families)
        options = self.shardings.of(plain)
        if options:
            self._add(self.wished.but(**degrees, micro_batches=batch, **options[0]), len(options))
        for found in () if len(self.families) > before else self._why_none(plain):
            self.first.setdefault(found.code, found)
            self.broken[found.code] += 1

    def _plain(self, s: Strategy) -> Strategy:
        """The mesh alone, everything else as harmless as possible: what breaks here breaks for every choice."""
        chunks = len(s.stages) // s.pipeline
        names = chunked(self.spec, chunks) if chunks > 1 else []
        return s.but(schedule=names[0]) if names else s

    def _why_none(self, s: Strategy) -> tuple[Diagnostic, ...]:
        """The rules that the first wished schedule breaks on a mesh that is legal otherwise."""
        p, wished = self.spec.parallel, allowed(self.spec, "schedule")
        if not wished:
            return ()
        batch = s.micro_batches
        micro = next((b for b in divisors(batch) if p.micro_batch.allows(b)), 1)
        some = s.but(
            schedule=wished[0], micro_batch=micro, micro_batches=batch // micro, wished_chunks=p.chunks.value or 0
        )
        return legal(self.spec, some)

    def _add(self, s: Strategy, shardings: int) -> None:
        """The families of a mesh with its first choices; how many ways there are to shard is counted."""
        batches = self._legal_batches(s)
        if not batches:
            return
        orders = sum(len(self.orders[s.pipeline, s.micro_batches // b.size]) for b in batches)
        rows = tuple(self._rows(b.size, s.context, s.tensor) for b in batches)
        parallels = self.parallels[s.tensor > 1]
        shared: dict[bool, tuple[tuple[int, int], ...]] = {}
        number = 0
        for form, heads, order in self._forms(s.context, s.tensor):
            for parallel in parallels:
                plain = s.but(sequence_parallel=parallel, context_form=form, context_heads=heads, context_order=order)
                if self.of_forms.broken(plain):
                    continue
                if parallel not in shared:
                    shared[parallel] = self._shared_experts(plain)
                if not shared[parallel]:
                    continue
                self.families.append(Family(plain, tuple(batches), shared[parallel], rows))
                number += len(shared[parallel]) * (len(parallels) if parallel else 1)
                break  # sequence parallelism moves the same bytes and holds less: where it is legal it stands for both
        self.size += number * orders * shardings * len(self.recompute)

    def _legal_batches(self, s: Strategy) -> list[Batch]:
        """Those that break no rule. Micro-batches divide by construction, so one for each schedule speaks for all."""
        batches = self._batches(s.pipeline, s.micro_batches)
        agreed: dict[str, bool] = {}
        for size, schedule, chunks in batches:
            if schedule not in agreed:
                number = s.micro_batches // size
                one = s.but(schedule=schedule, wished_chunks=chunks, micro_batch=size, micro_batches=number)
                agreed[schedule] = not self.of_batches.broken(one)
        return batches if all(agreed.values()) else [b for b in batches if agreed[b.schedule]]

    def _batches(self, pipeline: int, sequences: int) -> list[Batch]:
        """Micro-batches that the wishes allow and some schedule takes."""
        if (pipeline, sequences) not in self.batches:
            sizes = [b for b in divisors(sequences) if self.spec.parallel.micro_batch.allows(b)]
            found = ((b, self._orders(pipeline, sequences // b)) for b in sizes)
            self.batches[pipeline, sequences] = [Batch(b, *orders[0]) for b, orders in found if orders]
        return self.batches[pipeline, sequences]

    def _orders(self, pipeline: int, micro_batches: int) -> tuple[tuple[str, int], ...]:
        key = (pipeline, micro_batches)
        if key not in self.orders:
            self.orders[key] = schedules(self.spec, *key)
        return self.orders[key]

    def _forms(self, context: int, tensor: int) -> list[tuple[str, int, str]]:
        key = (context, tensor)
        if key not in self.forms:
            self.forms[key] = context_forms(self.spec, *key)
        return self.forms[key]

    def _rows(self, micro_batch: int, context: int, tensor: int) -> int:
        key = (micro_batch, context, tensor)
        if key not in self.rows:
            self.rows[key] = loss_rows(self.spec, *key)
        return self.rows[key]

    def _shared_experts(self, plain: Strategy) -> tuple[tuple[int, int], ...]:
        """How experts can be shared, by the rules that read it."""
        found = experts(self.spec, plain)
        if not self.spec.model.experts:
            return tuple(found)
        return tuple(
            (expert, width)
            for expert, width in found
            if not self.of_experts.broken(plain.but(expert=expert, expert_tensor=width))
        )
