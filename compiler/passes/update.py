"""What surrounds the body of a step: the count of labels, gradient sums, the norm, the update, the loss.

What the body's blocks have not summed yet is summed here, once for each factor on which a bucket's gradient is partial:
over the replicas first (into the own shard with ZeRO), so that all later sums are of the shard only: over tensor
factors, between copies of the shards (HSDP), over the pipeline homes of copied weights unless these share the shards.

Optimizer state that lives on the host comes bucket by bucket: it is fetched `ahead` buckets before its update, the
first ones under the last sums, and goes back under the updates after it.
"""

from __future__ import annotations

from titan.compiler.passes.buckets import homes_group, shared_by_copies
from titan.compiler.passes.zero import BETWEEN, GATHER, REDUCE, first_sum, reduces_early
from titan.compiler.plan.instruction import FROM_HOST, STATE, TO_HOST, Instruction
from titan.compiler.plan.mesh import Mesh
from titan.compiler.plan.operators import Attribute
from titan.compiler.plan.program import Block, BlockCall, Bucket

Attributes = tuple[tuple[str, Attribute], ...]


def begin(data_group: str) -> Block:
    """Counts the valid labels of the whole step, by which the loss is divided."""
    if not data_group:
        return Block("begin", (), (Instruction("load_batch", ("count",), attributes=(("what", "count"),)),))
    return Block(
        "begin",
        (),
        (
            Instruction("load_batch", ("count.local",), attributes=(("what", "count"),)),
            *_collective("all_reduce", "count", "count.local", data_group, (("op", "sum"),)),
            Instruction("free", reads=("count.local",)),
        ),
    )


def counted() -> Block:
    """The count has done its work with the last micro-batch."""
    return Block("counted", (), (Instruction("free", reads=("count",)),))


def end(data_group: str, ends: tuple[int, ...], stages: int, here: int) -> Block:
    """Sums the loss over the replicas (and over the stages in `ends`, one per copy of the model), tells every stage."""
    emitted: list[Instruction] = []
    source, holds_loss = "b.loss", here in ends
    cleared = [Instruction("zero_grad", updates=("b.loss",))] if holds_loss else []
    group = "ends" if len(ends) > 1 else data_group
    if holds_loss and group:
        emitted += _collective("all_reduce", "loss.sum", source, group, (("op", "sum"),))
        source = "loss.sum"
        cleared.append(Instruction("free", reads=(source,)))
    if stages == 1:
        return Block("end", (), (*emitted, _told(source), *cleared))
    reads = source if here == ends[0] else ""
    issue, wait = _collective("broadcast", "loss.all", reads, "pipeline", (("root", ends[0]),))
    return Block(
        "end", (), (*emitted, issue, *cleared, wait, _told("loss.all"), Instruction("free", reads=("loss.all",)))
    )


def _told(source: str) -> Instruction:
    return Instruction("report", reads=(source,), attributes=(("name", "loss"),))


def _collective(opcode: str, result: str, source: str, group: str, attributes: Attributes) -> list[Instruction]:
    reads = (source,) if source else ()
    stream = "all" if group == "all" else group
    return [
        Instruction(opcode, (f"{result}?",), reads, (), "", group, stream, attributes),
        Instruction("wait", (result,), (f"{result}?",)),
    ]


def _reduce(bucket: Bucket, token: str, group: str, stream: str, attributes: Attributes) -> Instruction:
    return Instruction("reduce_grad", (f"u.{token}?",), (), (f"g.{bucket.name}",), "", group, stream, attributes)


def _wait(token: str) -> Instruction:
    return Instruction("wait", (), (token,))


def _sums(bucket: Bucket, mesh: Mesh) -> list[Instruction]:
    """The sums of a bucket in order, without those that the blocks of its micro-batches do."""
    name = bucket.name
    found = [first_sum(bucket)] if (bucket.replicas or bucket.shards) and "g" not in bucket.sharded else []
    attributes: Attributes = (("mode", "all_reduce"),)
    if bucket.sharded and "g" not in bucket.sharded:
        attributes = (("mode", "all_reduce_shard"), ("shard", bucket.shards))
    groups = [*bucket.sums]
    if bucket.sharded and mesh.size(BETWEEN) > 1:
        groups.append(BETWEEN)
    if len(bucket.homes) > 1 and not shared_by_copies(bucket):
        groups.append(homes_group(bucket.homes))
    for group in groups:
        stream = REDUCE if group == BETWEEN else group
        found.append(_reduce(bucket, f"g.{name}.{len(found)}", group, stream, attributes))
    return found


def reduce_blocks(bucket: Bucket, mesh: Mesh, issued: bool) -> tuple[Block, ...]:
    """One block per sum: waits for the one before and issues the next, so that all buckets' sums are under way at once.
    `issued`: the first one is, by the last backward."""
    sums = _sums(bucket, mesh)
    blocks: list[Block] = []
    for number, instruction in enumerate((*sums, None)):
        emitted = [_wait(sums[number - 1].writes[0])] if number else []
        emitted += [instruction] if instruction and not (issued and number == 0) else []
        name = f"reduce.{bucket.name}" + (f".{number}" if number else "")
        blocks.append(Block(name if instruction else f"reduced.{bucket.name}", (), tuple(emitted)))
    return tuple(blocks) if sums else ()


def norm(buckets: tuple[Bucket, ...], world_size: int) -> Block:
    """The global gradient norm (squared): every gradient counted once, over all ranks."""
    reads = tuple(f"g.{bucket.name}" for bucket in buckets)
    local = "nsq.local" if world_size > 1 else "nsq"
    emitted = [Instruction("grad_norm", (local,), reads)]
    if world_size > 1:
        emitted += [
            *_collective("all_reduce", "nsq", local, "all", (("op", "sum"),)),
            Instruction("free", reads=(local,)),
        ]
    emitted.append(Instruction("report", reads=("nsq",), attributes=(("name", "grad_norm"),)))
    return Block("norm", (), tuple(emitted))


def step_blocks(bucket: Bucket, on_host: bool = False) -> tuple[Block, ...]:
    """`step.b` updates a bucket, clears its gradients and gathers updated shards, unless parameters stay sharded.
    `on_host`: `fetch.b` brings the state before, `stow.b` ends what the update has sent back."""
    name = bucket.name
    state = f"{STATE}{name}" if on_host else f"o.{name}"
    update = [
        Instruction("optimizer_step", (), (f"g.{name}", "nsq"), (f"p.{name}", state)),
        Instruction("zero_grad", updates=(f"g.{name}",)),
    ]
    around: tuple[Block, ...] = ()
    if on_host:
        token = f"u.{state}?"
        update.insert(0, Instruction("wait", (state,), (f"{state}?",)))
        update.append(Instruction("offload", (token,), (state,), (f"o.{name}",), stream=TO_HOST))
        fetch = Instruction("prefetch", (f"{state}?",), (f"o.{name}",), stream=FROM_HOST)
        stow = (_wait(token), Instruction("free", reads=(state,)))
        around = (Block(f"fetch.{name}", (), (fetch,)), Block(f"stow.{name}", (), stow))
    if not bucket.sharded or "p" in bucket.sharded:
        return Block(f"step.{name}", (), tuple(update)), *around
    token = f"u.p.{name}?"
    update.append(Instruction("unshard", (token,), (), (f"p.{name}",), "", bucket.shards, GATHER))
    return Block(f"step.{name}", (), tuple(update)), Block(f"gathered.{name}", (), (_wait(token),)), *around


def updates(buckets: tuple[Bucket, ...], ahead: int) -> list[str]:
    """Names of the blocks that update the buckets, in order, each after the fetch of a later one and before the end of
    what an earlier one has sent to the host."""
    names = [bucket.name for bucket in buckets]
    found = []
    for number, name in enumerate(names):
        found += [f"fetch.{later}" for later in names[number + ahead : number + ahead + 1]]
        found += [f"step.{name}", *(f"stow.{earlier}" for earlier in names[max(number - 1, 0) : number])]
    return [*found, *(f"stow.{name}" for name in names[-1:])]


def epilogue(
    buckets: tuple[Bucket, ...], mesh: Mesh, on_host: bool = False, ahead: int = 1
) -> tuple[tuple[Block, ...], tuple[BlockCall, ...]]:
    """All blocks after the last backward and the calls in order: sums, norm, updates, gathers. `ahead`: buckets whose
    state is on its way from the host while one is updated."""
    reduces = {b.name: reduce_blocks(b, mesh, reduces_early(b)) for b in buckets}
    steps = {b.name: step_blocks(b, on_host) for b in buckets}
    done = Block("stepped", (), (Instruction("free", reads=("nsq",)),))
    ordered = [reduces[b.name] for b in reversed(buckets)]  # the order in which backward completes them
    names = [f"fetch.{b.name}" for b in buckets[:ahead]]
    names += [blocks[n].name for n in range(max(map(len, ordered))) for blocks in ordered if n < len(blocks)]
    names += ["norm", *updates(buckets, ahead), "stepped", *(f"gathered.{b.name}" for b in buckets)]
    blocks = (
        *(x for b in buckets for x in reduces[b.name]),
        norm(buckets, mesh.world_size),
        *(x for b in buckets for x in steps[b.name]),
        done,
    )
    table = {block.name: block for block in blocks if block.instructions}
    return tuple(table.values()), tuple(BlockCall(name) for name in names if name in table)
