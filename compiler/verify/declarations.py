"""Proof 0: everything that the programs name is declared, and every instruction has the form of its opcode.

The other proofs rest on it: they look names up without asking.
"""

from __future__ import annotations

from titan.compiler.plan.instruction import (
    BACK,
    FROM_HOST,
    HOST,
    STATE,
    TO_HOST,
    Instruction,
    base_name,
    type_name,
)
from titan.compiler.plan.opcodes import OPCODES
from titan.compiler.plan.program import Block, Plan, Role
from titan.compiler.plan.segment import TIERS, bind, parse_unit
from titan.compiler.verify.findings import Finding, at, found_alike

_GROUPED = ("collective", "transfer")
_IN_PLACE = ("unshard", "reduce_grad")
_COPIES = frozenset(name for name, row in OPCODES.items() if row.kind == "host")
_REQUIRED = {
    "all_gather": ("dim",),
    "reduce_scatter": ("dim",),
    "all_reduce": ("op",),
    "all_to_all": ("split", "concat"),
    "broadcast": ("root",),
    "send": ("peer",),
    "recv": ("peer",),
    "reduce_grad": ("mode",),
    "report": ("name",),
    "load_batch": ("what",),
    "watermark": ("begin",),
    "recompute": ("tier",),
}
_STEPS = {"": (2, 2), "ahead": (1, 3), "undo": (1, 2)}  # moment -> operands read and updated
_CHOICES = {
    "op": ("sum", "max"),
    "mode": ("all_reduce", "reduce_scatter", "all_reduce_shard"),
    "what": ("tokens", "labels", "starts", "count"),
    "name": ("loss", "grad_norm"),
    "begin": TIERS,
    "tier": TIERS[1:],
}
# opcode -> (writes, reads, updates) as (least, most); None: any number
_OPERANDS: dict[str, tuple[tuple[int, int], tuple[int, int], tuple[int, int]]] = {
    "load_batch": ((1, 1), (0, 0), (0, 0)),
    "loss": ((0, 1), (1, 1), (1, 1)),
    "add": ((1, 1), (2, 2), (0, 0)),
    "all_gather": ((1, 1), (1, 1), (0, 0)),
    "reduce_scatter": ((1, 1), (1, 1), (0, 0)),
    "all_reduce": ((1, 1), (1, 1), (0, 0)),
    "all_to_all": ((1, 1), (1, 1), (0, 0)),
    "broadcast": ((1, 1), (0, 1), (0, 0)),
    "send": ((1, 1), (1, 1), (0, 0)),
    "recv": ((1, 1), (0, 0), (0, 0)),
    "offload": ((1, 1), (1, 1), (0, 1)),
    "prefetch": ((1, 1), (1, 1), (0, 0)),
    "wait": ((0, 1), (1, 1), (0, 0)),
    "free": ((0, 0), (1, 1 << 30), (0, 0)),
    "watermark": ((1, 1), (0, 0), (0, 0)),
    "unshard": ((1, 1), (0, 1), (0, 1)),
    "open_grad": ((1, 1), (0, 0), (0, 0)),
    "reduce_grad": ((1, 1), (0, 1), (1, 1)),
    "report": ((0, 0), (1, 1), (0, 0)),
    "grad_norm": ((1, 1), (1, 1 << 30), (0, 0)),
    "optimizer_step": ((0, 0), (1, 2), (2, 3)),
    "zero_grad": ((0, 0), (0, 0), (1, 1)),
}


class _Names:
    """What may be named: looked up once for every name of the plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.known: dict[str, bool] = {}
        self.groups: dict[str, bool] = {}
        self.units: dict[str, str] = {}
        self.forms: set[tuple[object, ...]] = set()  # those that are right, of instructions without attributes

    def form(self, i: Instruction) -> str:
        """What is wrong with an instruction's own form, or ""."""
        if i.attributes or i.opcode in _COPIES:
            return _form(i)
        form = (i.opcode, len(i.writes), len(i.reads), len(i.updates), not i.group, not i.stream)
        if form not in self.forms:
            wrong = _form(i)
            if wrong:
                return wrong
            self.forms.add(form)
        return ""

    def register(self, name: str) -> bool:
        if name not in self.known:
            prefix, _, rest = type_name(name).partition(".")
            token = prefix in ("t", "u") and bool(rest)
            segment = self.plan.segment_table.get(rest)
            frame = segment is not None and (prefix == "wf" or prefix in segment.pieces)
            token = token or name.startswith("tier.l")
            bucket = prefix in ("w", "dw", "state") and self.bucket(name)
            self.known[name] = token or frame or bucket or type_name(name) in self.plan.types
        return self.known[name]

    def bucket(self, name: str) -> bool:
        try:
            return bool(self.plan.bucket_of(name))
        except KeyError:
            return False

    def group(self, name: str) -> bool:
        if name not in self.groups:
            declared = self.plan.group_table.get(name)
            axes = declared.axes if declared else name
            resolved = [self.plan.mesh.resolve(part) for part in axes.split("*")]
            factors = [f for part in resolved for f in part]
            self.groups[name] = all(resolved) and len(factors) == len(set(factors))
        return self.groups[name]

    def unit(self, name: str) -> str:
        """ "" when the segment exists and all its parameters do, else the sentence."""
        if name not in self.units:
            segment_name, layer = parse_unit(name)
            segment = self.plan.segment_table.get(segment_name)
            if segment is None:
                self.units[name] = f"there is no segment `{segment_name}`"
            else:
                table = self.plan.parameter_table
                missing = [bind(p, layer) for p in segment.parameters if bind(p, layer) not in table]
                self.units[name] = f"there is no parameter `{missing[0]}`" if missing else ""
        return self.units[name]


def _form(instruction: Instruction) -> str:
    """What is wrong with the instruction's own form, or ""."""
    row = OPCODES[instruction.opcode]
    limits = _OPERANDS.get(instruction.opcode)
    if limits:
        for what, names, (least, most) in zip(
            ("writes", "reads", "updates"),
            (instruction.writes, instruction.reads, instruction.updates),
            limits,
            strict=True,
        ):
            if not least <= len(names) <= most:
                return f"{instruction.opcode} {what} {len(names)} names, the opcode wants {least}" + (
                    "" if least == most else " or more"
                )
    if row.asynchronous and not instruction.stream:
        return f"{instruction.opcode} names no stream"
    if bool(instruction.group) != (row.kind in _GROUPED or instruction.opcode in _IN_PLACE):
        return f"{instruction.opcode} names {'no group' if not instruction.group else 'a group'}"
    given = dict(instruction.attributes)
    if instruction.opcode in _COPIES:
        return _copy(instruction)
    if instruction.opcode == "optimizer_step":
        wanted = _STEPS.get(str(given.get("moment", "")))
        if wanted != (len(instruction.reads), len(instruction.updates)):
            return f"a step of moment `{given.get('moment', '')}` has other operands"
    for key in _REQUIRED.get(instruction.opcode, ()):
        if key not in given:
            return f"{instruction.opcode} lacks `{key}`"
        if key in _CHOICES and given[key] not in _CHOICES[key]:
            return f"`{key}={given[key]}` is none of {', '.join(_CHOICES[key])}"
        if key in ("dim", "split", "concat", "root", "peer") and type(given[key]) is not int:
            return f"`{key}={given[key]}` is not a number"
    return ""


def _copy(instruction: Instruction) -> str:
    """A copy goes by the name of what it is a copy of, which nothing changes later; optimizer state comes from its own
    buffer and goes back there. Each direction has its stream."""
    stream = TO_HOST if instruction.opcode == "offload" else FROM_HOST
    if instruction.stream != stream:
        return f"{instruction.opcode} runs on {stream}, not on {instruction.stream}"
    written, read = base_name(instruction.writes[0]), base_name(instruction.reads[0])
    if instruction.updates or read.startswith("o."):
        state = STATE + (instruction.updates or instruction.reads)[0].removeprefix("o.")
        right = (written, read) == (f"u.{state}", state) if instruction.updates else written == state
    elif instruction.opcode == "offload":
        right = written == HOST + read and not read.startswith((HOST, BACK, STATE, "dw."))
    else:
        right = read.startswith(HOST) and written == BACK + read.removeprefix(HOST)
    return "" if right else f"`{written}` is no copy of `{read}`"


class _Checker:
    """Instructions of one role. What was found right is remembered: forms, names as they are written and read, and
    instructions that stand in several blocks."""

    def __init__(self, role: Role, names: _Names) -> None:
        self.role, self.names = role, names
        self.buffers = {buffer.name for buffer in role.buffers}
        self.right: dict[tuple[str, ...], tuple[set[str], set[str]]] = {}  # by the parameters of a block
        self.seen: dict[tuple[str, ...], dict[int, Instruction]] = {}  # by the same, those that are right

    def block(self, block: Block) -> list[Finding]:
        right, symbols = self.right.setdefault(block.parameters, (set(), set())), {"", *block.parameters}
        seen = self.seen.setdefault(block.parameters, {})
        found = []
        for index, i in enumerate(block.instructions):
            wrong = "" if id(i) in seen else self.wrong(i, right, symbols)
            if wrong:
                found.append(at("T701", wrong, self.role, block, index))
            else:
                seen[id(i)] = i
        return found

    def wrong(self, i: Instruction, right: tuple[set[str], set[str]], symbols: set[str]) -> str:
        """What is wrong with an instruction, or ""."""
        names, (written, read) = self.names, right
        wrong = names.form(i) or (names.unit(i.unit) if i.row.unit else "")
        if wrong:
            return wrong
        if i.group and not names.group(i.group):
            return f"there is no group `{i.group}` in this mesh"
        if not written.issuperset(i.writes):
            wrong = self.operands(i.writes, written, symbols, True)
        if not (wrong or read.issuperset(i.reads)):
            wrong = self.operands(i.reads, read, symbols, False)
        return wrong if wrong or self.buffers.issuperset(i.updates) else self.updates(i.updates, symbols)

    def operands(self, given: tuple[str, ...], right: set[str], symbols: set[str], written: bool) -> str:
        for name in given:
            if name in self.buffers:
                if written:
                    return f"buffer `{name}` is written as a register"
            elif not self.names.register(name):
                return f"`{name}` is neither a typed register nor a buffer of this role"
            elif _symbol(name) not in symbols:
                return f"`{name}` has micro-batch `{_symbol(name)}`, which is no parameter of the block"
            right.add(name)
        return ""

    def updates(self, given: tuple[str, ...], symbols: set[str]) -> str:
        for name in given:
            held = name.startswith(("dw.", STATE)) and self.names.register(name) and name.partition(":")[2] in symbols
            if name not in self.buffers and not held:
                return f"`{name}` is no buffer of this role"
        return ""


def _symbol(name: str) -> str:
    return name.rstrip("?").partition(":")[2]


def _blocks(role: Role, names: _Names) -> list[Finding]:
    checker = _Checker(role, names)
    return [finding for block in role.blocks for finding in checker.block(block)]


def _orders(role: Role) -> list[Finding]:
    found: list[Finding] = []
    table = {block.name: len(block.parameters) for block in role.blocks}
    for name, before in role.legs:
        if all(table.get(block) == count for block, count in role.threads[name].given):
            continue
        first = len(role.order(before)) if before else 0
        for position, call in enumerate(role.order(name)[first:], first):
            if table.get(call.block) != len(call.arguments):
                problem = "does not exist" if call.block not in table else f"takes {table[call.block]} micro-batches"
                message = f"order {name} calls {call}: the block {problem}"
                found.append(Finding("T702", message, role.pipeline, call.block, call=position))
    return found


def _buckets(plan: Plan, names: _Names) -> list[Finding]:
    found = []
    stages = plan.mesh.size("pipeline")
    for bucket in plan.buckets:
        groups = [g for g in (*bucket.sums, bucket.replicas, bucket.shards, bucket.uncounted) if g]
        missing = [g for g in groups if not names.group(g)]
        if missing:
            found.append(Finding("T703", f"bucket {bucket.name}: there is no group `{missing[0]}`"))
        if set(bucket.sharded) - {"o", "g", "p"} or bool(bucket.sharded) != ("o" in bucket.sharded):
            found.append(Finding("T703", f"bucket {bucket.name}: sharded={','.join(bucket.sharded)}, o comes first"))
        if bool(bucket.sharded) != bool(bucket.shards):
            found.append(Finding("T703", f"bucket {bucket.name}: sharded over `{bucket.shards}`: {bucket.sharded}"))
        if not bucket.homes or any(not 0 <= home < stages for home in bucket.homes):
            found.append(
                Finding("T703", f"bucket {bucket.name}: homes {bucket.homes} are not stages 0 to {stages - 1}")
            )
    for parameter in plan.parameters:
        bucket_here = plan.bucket_table.get(parameter.bucket)
        if bucket_here is None:
            found.append(Finding("T703", f"parameter {parameter.name}: there is no bucket `{parameter.bucket}`"))
        elif not 0 <= parameter.offset <= bucket_here.elements - parameter.tensor.elements:
            found.append(Finding("T703", f"parameter {parameter.name} does not fit into bucket {parameter.bucket}"))
    return found


def _buffers(plan: Plan, role: Role) -> list[Finding]:
    """The role has exactly the buffers of the buckets that are at home there, with the right kinds and sizes."""
    found = []
    given = {buffer.name: buffer for buffer in role.buffers}
    if len(given) != len(role.buffers):
        found.append(Finding("T704", "a buffer is declared twice", role.pipeline))
    for bucket in plan.buckets:
        if role.pipeline not in bucket.homes:
            continue
        statistic = "f64" if bucket.dtype == "f64" else "f32"
        rows = (
            ("p", "parameters", bucket.dtype, 1),
            ("g", "gradients", statistic, 1),
            ("o", "optimizer", statistic, bucket.state_copies),
        )
        for prefix, kind, dtype, copies in rows:
            buffer = given.get(f"{prefix}.{bucket.name}")
            elements = copies * bucket.local(prefix, plan.shard_degree(bucket))
            on_host = buffer is not None and buffer.place == "host" and kind != "optimizer"
            if buffer is None or on_host or (buffer.kind, buffer.dtype, buffer.elements) != (kind, dtype, elements):
                message = f"bucket {bucket.name} is at home here but {prefix}.{bucket.name} is not {dtype}[{elements}]"
                found.append(Finding("T704", message, role.pipeline))
    return found


def declarations(plan: Plan) -> list[Finding]:
    """Every name that cannot be looked up, every instruction without the form of its opcode."""
    stages = plan.mesh.size("pipeline")
    if [role.pipeline for role in plan.roles] != list(range(stages)):
        return [Finding("T702", f"the mesh has {stages} stages, the plan has programs of {len(plan.roles)}")]
    for group in plan.groups:
        if any(not 0 <= stage < stages for stage in group.pipeline):
            return [Finding("T702", f"group {group.name} names stages that do not exist")]
    names = _Names(plan)
    found = [
        Finding("T702", f"group `{group.name}`: `{group.axes}` is not in this mesh")
        for group in plan.groups
        if not names.group(group.name)
    ]
    for role in plan.roles:
        missing = {"train", "evaluate"} - {name for name, _ in role.orders}
        if missing or len(role.block_table) != len(role.blocks):
            found.append(
                Finding("T702", f"the role lacks {sorted(missing)} or has two blocks of one name", role.pipeline)
            )
        if {name for name, _ in role.orders} != {name for name, _ in plan.roles[0].orders}:
            found.append(Finding("T702", "the role has other orders than the first", role.pipeline))
        found += _buffers(plan, role)
        found += _orders(role)
    found += found_alike(plan, lambda likes: [f for k in likes if k.first is k.role for f in _blocks(k.role, names)])
    return found + _buckets(plan, names)
