"""Quantities that follow from a plan and are never stored in it: bytes, FLOPs, traffic, the curve of live bytes.

`Sizes(plan)` remembers what it has worked out; the module's functions ask a fresh one. All sizes are bytes on one rank.

Liveness: registers are written once and freed once, and their sizes do not depend on the micro-batch. So a block moves
the sum of live bytes by a fixed amount and reaches a fixed height above where it began: the walk over an order adds one
pair of numbers per call, however long the blocks are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from titan.compiler.plan.instruction import HOST, Instruction, type_name
from titan.compiler.plan.operators import DTYPE_BYTES, Flops
from titan.compiler.plan.program import Block, Plan, Role
from titan.compiler.plan.segment import parse_unit
from titan.compiler.plan.tiers import layer_of, start_tiers
from titan.compiler.plan.workspace import rebuild_flops, segment_flops, segment_workspace


@dataclass(frozen=True, slots=True)
class Traffic:
    """`payload`: bytes of the whole tensor that is moved or formed; `wire`: bytes each member sends (ring volume)."""

    payload: int
    wire: int


_NO_TRAFFIC = Traffic(0, 0)


def gradient_dtype(bucket_dtype: str) -> str:
    """Gradients and optimizer state are float32, or float64 in a float64 run."""
    return "f64" if bucket_dtype == "f64" else "f32"


class Sizes:
    """Sizes of one plan, each worked out once."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._types: dict[str, int] = {}
        self._registers: dict[str, int] = {}
        self._flops: dict[str, Flops] = {}
        self._workspace: dict[tuple[str, str, tuple[str, ...], str], int] = {}

    @cached_property
    def start(self) -> dict[int, str]:
        """Recompute tiers with which a plan begins that leaves them to the run."""
        return start_tiers(self.plan)

    def runs(self, instruction: Instruction) -> bool:
        """Whether an instruction runs with the tiers that the plan begins with."""
        return not instruction.when or self.start[layer_of(instruction.frame)] in instruction.when

    def register(self, name: str) -> int:
        """Bytes of a register on the device; copies on the host (`host.`), tokens of transfers (`t.`), in-place
        collectives (`u.`) and tiers (`tier.`) have none.

        Raises KeyError when neither the plan's tensors nor its segments know the name.
        """
        found = self._registers.get(name)
        if found is None:
            found = self._registers[name] = 0 if name.startswith(HOST) else self._typed(type_name(name))
        return found

    def host(self, name: str) -> int:
        """Bytes of a register in host memory."""
        return self._typed(type_name(name)) if name.startswith(HOST) else 0

    def _typed(self, key: str) -> int:
        found = self._types.get(key)
        if found is None:
            found = self._types[key] = self._measure(key)
        return found

    def _measure(self, key: str) -> int:
        prefix, _, rest = key.partition(".")
        if prefix in ("t", "u", "tier"):
            return 0
        if prefix in ("w", "dw"):
            return self.whole_bucket(key)
        if prefix == "state":
            return self.optimizer_state(key)
        if prefix in ("f", "fs", "fn"):
            segment = self.plan.segment_table[rest]
            return segment.bytes_of(segment.pieces[prefix])
        if prefix == "wf":
            segment = self.plan.segment_table[rest]
            return segment.bytes_of(segment.weight_frame)
        return self.plan.types[key].bytes

    def segment_flops(self, name: str) -> Flops:
        if name not in self._flops:
            self._flops[name] = segment_flops(self.plan.segment_table[name])
        return self._flops[name]

    def flops(self, instruction: Instruction) -> float:
        """Floating-point operations of one instruction on one rank (matrix products and element-wise work)."""
        if not instruction.unit:
            return 0.0
        name = parse_unit(instruction.unit)[0]
        if instruction.opcode == "recompute":
            return rebuild_flops(self.plan.segment_table[name], str(instruction.attribute("tier")))
        work = self.segment_flops(name)
        return {
            "forward": work.forward,
            "backward": work.backward_input + work.backward_weight,
            "backward_input": work.backward_input,
            "backward_weight": work.backward_weight,
        }.get(instruction.opcode, 0.0)

    def workspace(self, instruction: Instruction) -> int:
        """Bytes that a compute instruction needs beside what it reads and writes, while it runs."""
        if not instruction.unit:
            return 0
        name = parse_unit(instruction.unit)[0]
        pieces = tuple(w.partition(".")[0] for w in instruction.writes if w.startswith(("f.", "fs.", "fn.")))
        key = (name, instruction.opcode, pieces, str(instruction.attribute("tier")))
        if key not in self._workspace:
            self._workspace[key] = segment_workspace(self.plan.segment_table[name], *key[1:])
        return self._workspace[key]

    def whole_bucket(self, name: str) -> int:
        """Bytes of a whole bucket: parameters `p.l0`, `w.l0:i` in their dtype, gradients `g.l0`, `dw.l0:i` so."""
        bucket = self.plan.bucket_of(name)
        dtype = bucket.dtype if name.removeprefix("r.")[0] in "pw" else gradient_dtype(bucket.dtype)
        return bucket.elements * DTYPE_BYTES[dtype]

    def held_bucket(self, name: str) -> int:
        """Bytes of a bucket's buffer `p.l0` or `g.l0` on one rank: the shard where that is sharded."""
        bucket, kind = self.plan.bucket_of(name), name[0]
        degree = self.plan.shard_degree(bucket) if kind in bucket.sharded else 1
        return self.whole_bucket(name) // degree

    def optimizer_state(self, name: str) -> int:
        """Bytes of a bucket's optimizer state on one rank (`state.l0`), which is also that of its buffer `o.l0`."""
        bucket = self.plan.bucket_of(name)
        elements = bucket.state_copies * bucket.local("o", self.plan.shard_degree(bucket))
        return elements * DTYPE_BYTES[gradient_dtype(bucket.dtype)]

    def traffic(self, instruction: Instruction) -> Traffic:
        """Bytes moved by a collective or transfer: ring volumes, `(n-1)/n` of the whole per pass over the n members. A
        copy to or from the host has a payload and sends nothing."""
        kind = instruction.row.kind
        if kind == "host":
            moved = instruction.reads[0] if instruction.opcode == "offload" else instruction.writes[0]
            return Traffic(self._typed(type_name(moved)), 0)
        if kind == "transfer":
            size = self.register(instruction.reads[0] if instruction.opcode == "send" else instruction.writes[0])
            return Traffic(size, size if instruction.opcode == "send" else 0)
        if kind == "collective":
            return self._collective(instruction)
        if instruction.opcode in ("unshard", "reduce_grad"):
            return self._in_place(instruction)
        return _NO_TRAFFIC

    def _collective(self, instruction: Instruction) -> Traffic:
        members = self.plan.group_size(instruction.group)
        if instruction.opcode in ("all_gather", "broadcast", "all_reduce"):
            whole = self.register(instruction.writes[0])
        else:
            whole = self.register(instruction.reads[0])
        passes = 2 if instruction.opcode == "all_reduce" else 1
        return Traffic(whole, passes * whole * (members - 1) // members)

    def _in_place(self, instruction: Instruction) -> Traffic:
        """Parameters gathered, or gradients summed: in place, from a shard into a register, or back."""
        members = self.plan.group_size(instruction.group)
        mode = instruction.attribute("mode") if instruction.opcode == "reduce_grad" else ""
        if mode == "all_reduce":
            whole = self.held_bucket(instruction.updates[0])
        else:
            whole = self.whole_bucket((*instruction.reads, *instruction.updates)[0])
        if mode == "all_reduce_shard":
            whole //= self.plan.group_size(str(instruction.attribute("shard")))
        passes = 1 if mode in ("", "reduce_scatter") else 2
        return Traffic(whole, passes * whole * (members - 1) // members)


def register_bytes(plan: Plan, name: str) -> int:
    """Bytes of one register on one rank."""
    return Sizes(plan).register(name)


def instruction_bytes(plan: Plan, instruction: Instruction) -> Traffic:
    """Bytes that a collective or transfer moves."""
    return Sizes(plan).traffic(instruction)


def instruction_flops(plan: Plan, instruction: Instruction) -> float:
    """Floating-point operations of one instruction on one rank."""
    return Sizes(plan).flops(instruction)


@dataclass(frozen=True, slots=True)
class Liveness:
    """Live bytes of registers over an order.

    peak         largest sum of live registers and of the running instruction's workspace
    registers    live registers at that moment
    workspace    workspace of that instruction
    place        (call, index in its block) of that instruction; (-1, -1) when the order is empty
    curve        live bytes after each call of the order
    """

    peak: int
    registers: int
    workspace: int
    place: tuple[int, int]
    curve: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Profile:
    """A block relative to its beginning: net change, and the instruction where registers plus workspace are highest."""

    change: int
    height: int  # live registers there
    workspace: int
    index: int


def block_profile(block: Block, sizes: Sizes) -> Profile:
    """Registers count from the instruction that issues their write (a receive too) to the end of their `free`."""
    live = height = workspace = 0
    top, index = -1, 0
    register = sizes.register
    for n, instruction in enumerate(block.instructions):
        opcode = instruction.opcode
        if opcode == "wait" or not sizes.runs(instruction):
            continue
        if opcode == "free":
            for name in instruction.reads:
                live -= register(name)
            continue
        for name in instruction.writes:
            live += register(name)
        needed = sizes.workspace(instruction) if instruction.unit else 0
        if live + needed > top:
            top, height, workspace, index = live + needed, live, needed, n
    return Profile(live, height, workspace, index)


def liveness(plan: Plan, role: Role, order: str = "train", sizes: Sizes | None = None) -> Liveness:
    """Walks the calls of an order; exact for the registers, in bytes on one rank."""
    sizes = sizes or Sizes(plan)
    calls = role.order(order)
    used = {call.block for call in calls}
    profiles = {block.name: block_profile(block, sizes) for block in role.blocks if block.name in used}
    live = 0
    best = (0, 0, 0, (-1, -1))
    curve: list[int] = []
    for position, call in enumerate(calls):
        found = profiles[call.block]
        if live + found.height + found.workspace > best[0]:
            registers = live + found.height
            best = (registers + found.workspace, registers, found.workspace, (position, found.index))
        live += found.change
        curve.append(live)
    return Liveness(*best, tuple(curve))


_COMPONENT = {"parameters": "parameters", "gradients": "gradients", "optimizer": "optimizer"}


def memory_by_component(plan: Plan, role: Role, sizes: Sizes | None = None) -> dict[str, int]:
    """Bytes of a role on the device: `parameters`, `gradients`, `optimizer`, `buffers` (the rest), `activations` and
    `workspace` at the highest moment of any order. Their sum is the peak of what the plan itself holds there."""
    sizes = sizes or Sizes(plan)
    found = dict.fromkeys(("parameters", "gradients", "optimizer", "buffers"), 0)
    for buffer in role.buffers:
        if buffer.place == "device":
            found[_COMPONENT.get(buffer.kind, "buffers")] += buffer.bytes
    walks = [liveness(plan, role, name, sizes) for name, _ in role.orders]
    highest = max(walks, key=lambda walk: walk.peak, default=Liveness(0, 0, 0, (-1, -1), ()))
    return {**found, "activations": highest.registers, "workspace": highest.workspace}
