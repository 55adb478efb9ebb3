"""The space of legal strategies: every mesh that multiplies to the world size, with every other choice, as wished.

Some choices need no price to be ordered: ZeRO-1 never holds or moves more than ZeRO-0, sequence parallelism moves the
same bytes and holds less, and 1F1B takes as long as GPipe and holds no more micro-batches. They are counted, and the
better one stands for them wherever the wishes allow it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property, lru_cache
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

from titan.compiler.plan.frozen import dataclass
from titan.compiler.schedules.registry import SCHEDULES, schedule_row
from titan.compiler.spec.divisors import divisors
from titan.compiler.spec.legality import rules_reading
from titan.compiler.strategy import Strategy
from titan.grammar.diagnostics import Diagnostic

if TYPE_CHECKING:
    from titan.compiler.spec.schema import Spec
    from titan.compiler.spec.wishes import Wish

# values in order of preference: the first that the wishes allow stands for the others where they are never better
PREFERRED: dict[str, tuple[Any, ...]] = {
    "zero": (1, 0, 2, 3),
    "gather": ("once", "each"),
    "reduce": ("once", "each"),
    "schedule": ("one_f_one_b", *(name for name in SCHEDULES if name != "one_f_one_b")),
    "recompute": ("none", "selective", "full", "adaptive"),
    "offload": ("none", "optimizer", "activations", "both"),
    "sequence_parallel": (True, False),
    "context_form": ("gathered", "heads", "ring"),
    "context_order": ("zigzag", "contiguous"),
}


class Batch(NamedTuple):
    """A micro-batch size, with the schedule that stands for all that can be had with it, and its chunks per rank."""

    size: int
    schedule: str
    chunks: int


EXPERT_RULES = rules_reading("expert", "expert_tensor")


@dataclass(frozen=True, slots=True)
class Family:
    """Legal strategies on one mesh that differ only in the micro-batch (rising) and in how experts are shared."""

    plain: Strategy
    batches: tuple[Batch, ...]
    experts: tuple[tuple[int, int], ...]
    rows: tuple[int, ...]  # `loss_rows` of each batch

    def member(self, number: int, experts: tuple[int, int], **changes: Any) -> Strategy:
        """The strategy with a batch and a way to share experts, and with other choices changed."""
        size, schedule, chunks = self.batches[number]
        s = self.plain
        return s.but(
            micro_batch=size, micro_batches=s.micro_batch * s.micro_batches // size, schedule=schedule,
            wished_chunks=chunks, loss_rows=self.rows[number], expert=experts[0], expert_tensor=experts[1], **changes,
        )  # fmt: skip

    @property
    def thriftiest(self) -> tuple[tuple[int, int], ...]:
        """The way to share experts over most ranks, and for each width that needs more of them the same: no other holds
        fewer bytes."""
        return _thriftiest(self.experts)


@lru_cache(maxsize=1024)
def _thriftiest(experts: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    most = {width: expert for expert, width in sorted(experts)}
    found: list[tuple[int, int]] = []
    for width, expert in sorted(most.items()):
        if not found or expert * width > found[-1][0] * found[-1][1]:
            found.append((expert, width))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Space:
    """`families` hold the candidates that are to be priced (recompute at its first allowed value), `size` counts every
    legal strategy, `broken` the meshes that each rule refused: (diagnostic of the first, number)."""

    families: tuple[Family, ...]
    size: int
    broken: tuple[tuple[Diagnostic, int], ...]

    @property
    def candidates(self) -> Iterator[Strategy]:
        """Every candidate in a fixed order."""
        return (
            family.member(number, experts)
            for family in self.families
            for number in range(len(family.batches))
            for experts in family.experts
        )


def allowed(spec: Spec, key: str, idle: bool = False) -> tuple[Any, ...]:
    """Values of a choice that the wishes allow, preferred first. An idle choice (nothing to shard) keeps one value: the
    plainest that is allowed."""
    wish = getattr(spec.parallel, key)
    values = tuple(v for v in PREFERRED[key] if wish.allows(v))
    if key == "schedule" and wish.fixed:
        values = wish.values  # one read from a file is in no list
    if key == "offload" and not spec.cluster.host_bytes:
        values = values[:1]  # where that is not `none`, legality says what is missing
    if key == "offload" and spec.parallel.late_check.value is True:
        values = tuple(v for v in values if v in ("none", "activations")) or values  # legality says why
    if key == "recompute" and wish.relation == "auto":
        values = values[:-1]  # a plan that leaves the choice to the run is for those who ask for one
    if not idle or not values:
        return values
    plainest = {"zero": 0, "sequence_parallel": False}.get(key, values[0])
    return (plainest,) if plainest in values else values[:1]


def meshes(spec: Spec) -> list[tuple[int, int, int, int]]:
    """(pipeline, data, context, tensor) that multiply to the world size as wished, smallest tensor first."""
    p, world = spec.parallel, spec.cluster.world_size
    stages = p.stages.value
    pipelines = [
        d for d in divisors(world) if p.pipeline.allows(d) and (not stages or _placeable(spec, d, len(stages)))
    ]
    found = []
    for tensor in (d for d in divisors(world) if p.tensor.allows(d)):
        for context in (d for d in divisors(world // tensor) if p.context.allows(d)):
            for pipeline in pipelines:
                data, rest = divmod(world, tensor * context * pipeline)
                if not rest and p.data.allows(data):
                    found.append((pipeline, data, context, tensor))
    return found


def _placeable(spec: Spec, pipeline: int, stages: int) -> bool:
    """Whether listed stages can lie on so many ranks, with the schedule and the chunks that are wished."""
    chunks, rest = divmod(stages, pipeline)
    return not rest and any(schedule_row(name).takes(chunks) for name in chunked(spec, chunks))


def chunked(spec: Spec, chunks: int) -> list[str]:
    """Allowed schedules with so many chunks per rank."""
    if not spec.parallel.chunks.allows(chunks):
        return []
    return [name for name in allowed(spec, "schedule") if schedule_row(name).takes(chunks)]


def schedules(spec: Spec, pipeline: int, micro_batches: int) -> tuple[tuple[str, int], ...]:
    """(schedule, chunks per rank) that the wishes allow and that exist for these numbers, preferred first."""
    stages, layers = spec.parallel.stages.value or (), spec.model.layer_count
    if pipeline == 1 and len(stages) < 2:
        return _of_one_stage(spec, micro_batches)
    found = []
    for name in allowed(spec, "schedule", idle=pipeline == 1):
        row = schedule_row(name)
        for chunks in {len(stages) // pipeline} if stages else _chunk_numbers(spec, name):
            enough = bool(stages) or pipeline * chunks <= layers
            if row.takes(chunks) and enough and row.legal(pipeline, micro_batches):
                found.append((name, chunks))
    return tuple(found)


def _of_one_stage(spec: Spec, micro_batches: int) -> tuple[tuple[str, int], ...]:
    """All layers on one rank are one stage. A schedule that has no order of one stage (two chunks, two copies) is none
    that could be wished for there: it is 1F1B then."""
    found = []
    for name in allowed(spec, "schedule", idle=True):
        row = schedule_row(name)
        if row.size is not None:  # one that is written out is taken at its word
            found += [(name, 1)] if row.takes(1) and row.legal(1, micro_batches) else []
        elif _chunk_numbers(spec, name):
            own = row.chunks == 1 and row.legal(1, micro_batches)
            found.append((name if own else "one_f_one_b", 1))
    return tuple(found)


def _chunk_numbers(spec: Spec, name: str) -> tuple[int, ...]:
    """As many chunks as the schedule usually has; where it leaves the number open, those that are wished."""
    row, wish = schedule_row(name), spec.parallel.chunks
    if row.most_chunks and wish.fixed:
        return (int(wish.value),)
    numbers = (row.chunks, 2 * row.chunks) if row.most_chunks else (row.chunks,)
    return tuple(c for c in numbers if wish.allows(c))


def experts(spec: Spec, s: Strategy) -> list[tuple[int, int]]:
    """(ranks that share experts, tensor ranks that share the width of each) that the wishes allow and the mesh has."""
    number, p = spec.model.experts, spec.parallel
    if not number:
        return [(1, 1)]
    widths = [w for w in dict.fromkeys((1, s.tensor)) if p.expert_tensor.allows(w)]
    room = s.data * s.context
    return [
        (e, w)
        for w in widths
        for e in divisors(number)
        if p.expert.allows(e) and (room * (s.tensor if w == 1 else 1)) % e == 0
    ]


def context_forms(spec: Spec, context: int, tensor: int) -> list[tuple[str, int, str]]:
    """(form, ranks that exchange heads inside a ring's places, order of the ring) that the wishes allow. Without a
    window no order is better than the preferred one; with one it may be worth having equal work in fewer steps."""
    orders = allowed(spec, "context_order")
    windows = any(w is not None and w < spec.train.sequence for w in (g.block.window for g in spec.model.layers))
    rings = orders if windows else orders[:1]
    found: list[tuple[str, int, str]] = []
    wish, kv_heads = spec.parallel.context_heads, spec.model.attention.kv_heads if spec.model.attention else 1
    for form in allowed(spec, "context_form", idle=context == 1):
        if form != "ring":
            found += [(form, 1, orders[0])] if wish.allows(1) or context == 1 else []
            continue
        degrees = [h for h in divisors(context) if (h < context or context == 1) and wish.allows(h)]
        degrees = [h for h in degrees if h == 1 or wish.fixed or kv_heads % (h * tensor) == 0]
        found += [(form, h, order) for h in degrees for order in rings]
    return found


class Ways(tuple[dict[str, Any], ...]):
    """Ways to shard, from fast to thrifty, with what one tells about others: bit n stands for the n-th."""

    @cached_property
    def holds(self) -> tuple[int, ...]:
        """Of each those that hold no less of anything: where it does not fit, they do not."""
        return tuple(_bits(_only_holds(other, one) for other in self) for one in self)

    @cached_property
    def saves(self) -> dict[bool, tuple[int, ...]]:
        """Of each those that take no less time, where there are several micro-batches and where there is one."""
        return {
            several: tuple(_bits(_only_saves(other, one, several) for other in self) for one in self)
            for several in (False, True)
        }


def _bits(values: Iterable[bool]) -> int:
    return sum(1 << n for n, value in enumerate(values) if value)


def _only_saves(way: dict[str, Any], other: dict[str, Any], several: bool) -> bool:
    """Whether it moves, in each of several micro-batches, what the other moves once, or has less time to. Closed forms
    may say that sums of each hide where one sum would not: plans do not bear that out."""
    if way["zero"] != other["zero"] or way["shard"] != other["shard"]:
        return False
    each = ("each",) if several else ()
    later = way.get("prefetch", 0) <= other.get("prefetch", 0)
    return later and all(way.get(key) in (other.get(key), *each) for key in ("reduce", "gather"))


def _only_holds(way: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether it holds more parameters, or for longer, or in fewer shards."""
    if way["zero"] != other["zero"] or way.get("reduce") != other.get("reduce"):
        return False
    shards = way["shard"] == other["shard"] or other["shard"] == 0
    earlier = way.get("prefetch", 0) >= other.get("prefetch", 0)
    return shards and earlier and way.get("gather") in (other.get("gather"), "once")


class Shardings:
    """ZeRO choices for meshes that the wishes allow, from fast to thrifty: the first stands for the mesh, the others
    are tried where that does not fit. A group of shards spans all data ranks, or with ZeRO-3 those of one node. They
    are worked out once for all meshes that are alike in what decides them."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self._copies = {piped: _copies(spec, piped) for piped in (False, True)}
        self._known: dict[tuple[bool, int, int], Ways] = {}

    def of(self, s: Strategy) -> Ways:
        """Of the mesh of a strategy."""
        idle = s.data * s.context == 1 and not self._copies[s.pipeline > 1]
        node = self.spec.cluster.devices_per_node // (s.context * s.tensor)
        shard = self.spec.parallel.shard
        pinned = shard.value % s.data if shard.fixed and shard.value else -1
        key = (idle, node if 1 < node < s.data and s.data % node == 0 else 0, pinned)
        if key not in self._known:
            self._known[key] = self._worked_out(*key)
        return self._known[key]

    def _worked_out(self, idle: bool, node: int, pinned: int) -> Ways:
        """`pinned`: the degree that is wished, -1: any."""
        p, levels = self.spec.parallel, allowed(self.spec, "zero", idle)
        if levels and levels[0] in (0, 1):
            levels = levels[:1] + tuple(z for z in levels if z > 1)
        degrees = [node, 0] if node else [0]
        found: list[dict[str, Any]] = []
        for zero in levels:
            shards = [pinned] if pinned >= 0 else degrees if zero == 3 else [0]
            choices: dict[str, list[Any]] = {
                "shard": shards if zero else [0],
                "reduce": [r for r in {2: ("each",), 3: ("once", "each")}.get(zero, ()) if p.reduce.allows(r)],
                "gather": [g for g in ("once", "each") if zero == 3 and p.gather.allows(g)],
                "prefetch": _distances(p.prefetch, zero),
            }
            if zero < 2 or choices["reduce"]:
                named = [[(key, value) for value in values] for key, values in choices.items() if values]
                found += [{"zero": zero, **dict(values)} for values in product(*named)]
        if allowed(self.spec, "offload")[0] == "none":
            # what is gathered once a step is gathered at its beginning
            nearest = min((o["prefetch"] for o in found if "prefetch" in o), default=0)
            found = [o for o in found if o.get("gather") != "once" or o["prefetch"] == nearest]
        return Ways(found)


def shardings(spec: Spec, s: Strategy) -> tuple[dict[str, Any], ...]:
    """ZeRO choices for one mesh."""
    return Shardings(spec).of(s)


def options(spec: Spec, s: Strategy) -> tuple[dict[str, Any], ...]:
    """ZeRO choices for a mesh, without any too."""
    return (*(({"zero": 0},) if spec.parallel.zero.allows(0) else ()), *shardings(spec, s))


def _distances(wish: Wish, zero: int) -> list[int]:
    """Layers ahead of their use from which parameters are gathered: the closed forms tell one from none; farther is
    tried of the best plan (`distance`). A written one is of what comes from the host too."""
    if zero == 3:
        return [n for n in sorted({1, 0, *wish.values})[::-1] if wish.allows(n)]
    return [*wish.values] if wish.fixed else []


def _copies(spec: Spec, piped: bool) -> bool:
    """Whether some ranks of one data rank hold copies of the same weights, over which state can be sharded."""
    return piped and (spec.model.tied or all(schedule_row(name).copies > 1 for name in allowed(spec, "schedule")))
