"""What surrounds the body of a step: the count of labels, gradient sums, the norm, the update, the loss.

Gradients of a bucket are summed once, after its last backward: first over tensor factors, then over the replicas
(all-reduce, or with ZeRO reduce-scatter into the own shard), then over the pipeline homes of tied weights.
"""

from __future__ import annotations

from titan.compiler.plan.instruction import Instruction
from titan.compiler.plan.operators import Attribute
from titan.compiler.plan.program import Block, BlockCall, Bucket

Attributes = tuple[tuple[str, Attribute], ...]


def homes_group(homes: tuple[int, ...]) -> str:
    """Name of the declared group of the pipeline ranks that hold copies of the same weights."""
    return f"homes.{'-'.join(map(str, homes))}"


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


def end(data_group: str, ends: tuple[int, ...], stages: int, here: int) -> Block:
    """Sums the loss over the replicas (and over the stages in `ends`, one per copy of the model), tells every stage."""
    emitted: list[Instruction] = []
    source, done, holds_loss = "b.loss", [], here in ends
    group = "ends" if len(ends) > 1 else data_group
    if holds_loss and group:
        emitted += _collective("all_reduce", "loss.sum", source, group, (("op", "sum"),))
        source = "loss.sum"
        done.append(source)
    if stages > 1:
        root = ends[0]
        reads = source if here == root else ""
        emitted += _collective("broadcast", "loss.all", reads, "pipeline", (("root", root),))
        source = "loss.all"
        done.append(source)
    emitted.append(Instruction("report", reads=(source,), attributes=(("name", "loss"),)))
    if holds_loss:
        done.append("count")
    if done:
        emitted.append(Instruction("free", reads=tuple(done)))
    if holds_loss:
        emitted.append(Instruction("zero_grad", updates=("b.loss",)))
    return Block("end", (), tuple(emitted))


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
    return Instruction("wait", (), (f"u.{token}?",))


def reduce_blocks(bucket: Bucket) -> tuple[Block, ...]:
    """`reduce.b` issues the sum over the replicas, `reduced.b` waits: so all buckets' sums are under way at once."""
    name = bucket.name
    issue: list[Instruction] = []
    for number, group in enumerate(bucket.sums):
        issue += [
            _reduce(bucket, f"g.{name}.{number}", group, group, (("mode", "all_reduce"),)),
            _wait(f"g.{name}.{number}"),
        ]
    finish: list[Instruction] = []
    if bucket.replicas:
        mode = "reduce_scatter" if bucket.sharded else "all_reduce"
        issue.append(_reduce(bucket, f"g.{name}", bucket.replicas, "data.reduce", (("mode", mode),)))
        finish.append(_wait(f"g.{name}"))
    if len(bucket.homes) > 1:
        attributes: Attributes = (("mode", "all_reduce"),)
        if bucket.sharded:
            attributes = (("mode", "all_reduce_shard"), ("shard", bucket.replicas))
        group = homes_group(bucket.homes)
        finish += [_reduce(bucket, f"g.{name}.homes", group, group, attributes), _wait(f"g.{name}.homes")]
    blocks = (Block(f"reduce.{name}", (), tuple(issue)), Block(f"reduced.{name}", (), tuple(finish)))
    return tuple(block for block in blocks if block.instructions)


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


def step_blocks(bucket: Bucket) -> tuple[Block, ...]:
    """`step.b` updates a bucket, clears its gradients and, with ZeRO, issues the gather of the updated shards."""
    name = bucket.name
    update = [
        Instruction("optimizer_step", (), (f"g.{name}", "nsq"), (f"p.{name}", f"o.{name}")),
        Instruction("zero_grad", updates=(f"g.{name}",)),
    ]
    if not bucket.sharded:
        return (Block(f"step.{name}", (), tuple(update)),)
    update.append(Instruction("unshard", (f"u.p.{name}?",), (), (f"p.{name}",), "", bucket.replicas, "data.gather"))
    return Block(f"step.{name}", (), tuple(update)), Block(f"gathered.{name}", (), (_wait(f"p.{name}"),))


def epilogue(buckets: tuple[Bucket, ...], world_size: int) -> tuple[tuple[Block, ...], tuple[BlockCall, ...]]:
    """All blocks after the last backward and the calls in order: sums, norm, updates, gathers."""
    reduces = {b.name: reduce_blocks(b) for b in buckets}
    steps = {b.name: step_blocks(b) for b in buckets}
    done = Block("stepped", (), (Instruction("free", reads=("nsq",)),))
    ordered = [b.name for b in reversed(buckets)]  # the order in which backward completes them
    names = [f"{kind}.{b}" for kind in ("reduce", "reduced") for b in ordered]
    names += ["norm", *(f"step.{b.name}" for b in buckets), "stepped", *(f"gathered.{b.name}" for b in buckets)]
    blocks = (
        *(x for b in buckets for x in reduces[b.name]),
        norm(buckets, world_size),
        *(x for b in buckets for x in steps[b.name]),
        done,
    )
    table = {block.name for block in blocks}
    return blocks, tuple(BlockCall(name) for name in names if name in table)
