"""The memory budget of a plan: what each component takes on each role, what each saving bought and what it costs."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING

from titan.compiler.plan.host import host_memory, host_traffic
from titan.compiler.plan.operators import DTYPE_BYTES
from titan.compiler.plan.sizes import Sizes, gradient_dtype

if TYPE_CHECKING:
    from titan.compiler.plan.instruction import Instruction
    from titan.compiler.plan.program import Plan, Role

KINDS = {"o": "optimizer state", "g": "gradients", "p": "parameters"}


def budget_lines(plan: Plan) -> Iterator[str]:
    """One line per role with its components, then one per saving of the fullest role."""
    from titan.compiler.cost.memory import memory_ledger

    ledger = memory_ledger(plan)
    yield f"memory of {_size(ledger.limit)} per device"
    for role in ledger.roles:
        parts = ", ".join(f"{name} {_size(size)}" for name, size in role.components.items() if size >= 2**18)
        yield f"  rank {role.pipeline:<4} {_size(role.point):>10}  {parts}"
    if ledger.host:
        yield f"host memory of {_size(ledger.host_limit)} per device"
        for role in ledger.roles:
            parts = ", ".join(f"{name} {_size(size)}" for name, size in role.host.items() if size)
            yield f"  rank {role.pipeline:<4} {_size(sum(role.host.values())):>10}  {parts}"
    yield from (f"  {line}" for line in _savings(plan, plan.roles[ledger.worst.pipeline]))


def _savings(plan: Plan, role: Role) -> Iterator[str]:
    """Sharded buffers against whole ones, with the bytes that a rank sends for them in a step."""
    sizes = Sizes(plan)
    traffic: dict[str, int] = {}
    for *_, instruction in role.instructions():
        if instruction.opcode in ("unshard", "reduce_grad"):
            kind = _kind(instruction)
            traffic[kind] = traffic.get(kind, 0) + sizes.traffic(instruction).wire
    for kind, name in KINDS.items():
        saved = sum(_saved(plan, b.name, kind) for b in plan.buckets if role.pipeline in b.homes)
        if saved:
            degrees = {plan.shard_degree(b) for b in plan.buckets if kind in b.sharded}
            shares = " or ".join(map(str, sorted(degrees)))
            yield f"{name} sharded over {shares} ranks save {_size(saved)}: {_price(kind, traffic)}"
    yield from _recomputed(role, sizes)
    yield from _offloaded(role, sizes)


def _recomputed(role: Role, sizes: Sizes) -> Iterator[str]:
    """What is not kept against the work of making it again."""
    again = [i for *_, i in role.instructions() if i.opcode == "recompute" and sizes.runs(i)]
    if not again:
        return
    rebuilt = sum(map(sizes.flops, again))
    whole = sum(sizes.flops(i) for *_, i in role.instructions() if sizes.runs(i))
    saved, flying = _dropped(role, sizes)
    yield (
        f"recompute keeps {_size(saved)} less of {flying} micro-batch{'es' if flying > 1 else ''} in flight and runs"
        f" {rebuilt / (whole - rebuilt):.1%} more FLOPs"
    )


def _dropped(role: Role, sizes: Sizes) -> tuple[int, int]:
    """Bytes that are not kept of the micro-batches between forward and backward, where these are most, and how many
    frames of a chunk that are."""
    flying: dict[str, int] = {}
    bytes_of: dict[str, int] = {}
    live, most = 0, (0, 0)
    for call in role.order("train"):
        for half in call.block.split("+"):
            phase, _, rest = half.partition(".")
            chunk = rest.partition(".")[0]
            if phase not in ("F", "B", "I"):
                continue
            if chunk not in bytes_of:
                bytes_of[chunk] = _made_again(role, chunk, sizes)
            step = 1 if phase == "F" else -1
            flying[chunk] = flying.get(chunk, 0) + step
            live += step * bytes_of[chunk]
            most = max(most, (live, max(flying.values())))
    return most


def _made_again(role: Role, chunk: str, sizes: Sizes) -> int:
    """Bytes that the backward of one micro-batch makes again."""
    backward = next(b for b in role.blocks if b.name.split(".")[:2] in (["B", chunk], ["I", chunk]))
    return sum(
        sizes.register(name)
        for i in backward.instructions
        if i.opcode == "recompute" and sizes.runs(i)
        for name in i.writes
    )


def _offloaded(role: Role, sizes: Sizes) -> Iterator[str]:
    """What is on the host, with the bytes that its link moves in a step."""
    held = host_memory(role, sizes)
    if held["optimizer"]:
        yield f"optimizer state on the host saves {_size(held['optimizer'])} but for the buckets that are updated"
    if held["activations"]:
        yield f"activations on the host take {_size(held['activations'])} there that would wait on the device"
    if sum(held.values()):
        out, back = host_traffic(role, sizes)
        yield f"a rank copies {_size(out)} to the host and {_size(back)} from it in a step"


def _kind(instruction: Instruction) -> str:
    """What a parameter collective is for: `p` gathers before use, `o` after the update, `g` sums of gradients."""
    if instruction.opcode == "reduce_grad":
        return "g"
    return "p" if instruction.reads else "o"


def _price(kind: str, traffic: dict[str, int]) -> str:
    sent = traffic.get(kind, 0)
    return {
        "o": f"a rank sends {_size(sent)} to gather what was updated" if sent else "gathered with the parameters",
        "g": f"a rank sends {_size(sent)} to scatter them after each micro-batch",
        "p": f"a rank sends {_size(sent)} to gather them before use",
    }[kind]


def _saved(plan: Plan, name: str, kind: str) -> int:
    """Bytes of one bucket that are on other ranks."""
    bucket = plan.bucket_table[name]
    if kind not in bucket.sharded:
        return 0
    statistic = DTYPE_BYTES[gradient_dtype(bucket.dtype)]
    narrow = DTYPE_BYTES[bucket.dtype] < statistic
    size = {"p": DTYPE_BYTES[bucket.dtype], "g": statistic, "o": prod((statistic, 3 if narrow else 2))}[kind]
    degree = plan.shard_degree(bucket)
    return bucket.elements * size * (degree - 1) // degree


def _size(size: float) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
