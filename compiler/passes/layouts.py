"""The only pass that inserts communication: it compares what producers give with what consumers demand.

Every operator's states follow, factor by factor, from its sharded labels by one rule (`compiler/plan/operators.py`);
where an operand's layout differs, a conversion from the one table (`compiler/plan/layout.py`) is inserted before it.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import field, replace

from titan.compiler.graph.model_graph import Convert, ModelGraph, Op, Part, Value, active_factors, op_labels
from titan.compiler.plan.frozen import dataclass
from titan.compiler.plan.layout import Layout, conversion, state
from titan.compiler.plan.mesh import Mesh
from titan.compiler.plan.operators import Attribute, result_state
from titan.compiler.strategy import Strategy

# which operand and dim says where on the global tensor this rank's piece begins, for operators that need to know
START = {
    "embedding": (1, 0),
    "add_positions": (0, 1),
    "rope": (0, 1),
    "dropout": (0, 1),
    "attention": (0, 1),
    "attention_documents": (0, 1),
    "add_positions_documents": (0, 1),
    "latent_attention": (0, 1),
    "vocab_max": (0, 2),
    "vocab_sum": (0, 2),
    "linear_vocab_max": (1, 0),
    "linear_vocab_sum": (1, 0),
}


def layouts(graph: ModelGraph, strategy: Strategy) -> ModelGraph:
    """Gives every value its layout and inserts the conversions between producers and consumers."""
    factors = active_factors(graph.mesh)
    residual = _residual(factors, strategy)
    return graph.with_parts(
        tuple(_Part(part, graph.mesh, factors, residual, graph.zigzag).run() for part in graph.parts)
    )


def _residual(factors: tuple[str, ...], strategy: Strategy) -> dict[str, str]:
    """Layout of the residual stream, which crosses parts and pipeline stages."""
    found = {}
    for factor in factors:
        if factor.split(".")[0] == "data":
            found[factor] = "V0"
        elif factor.split(".")[0] == "context" or strategy.sequence_parallel:
            found[factor] = "V1"
    return found


@dataclass
class _Part:
    part: Part
    mesh: Mesh
    factors: tuple[str, ...]
    residual: dict[str, str]
    zigzag: int = 0
    values: dict[str, Value] = field(default_factory=dict)
    steps: list[Op | Convert] = field(default_factory=list)
    converted: dict[tuple[str, Layout], str] = field(default_factory=dict)

    def run(self) -> Part:
        self.values = dict(self.part.table)
        ops = [op for op in self.part.steps if isinstance(op, Op)]
        dims = {value.name: value.dims for value in self.part.values}
        labels = [{f: op_labels(op, dims, op.sharding(f)) for f in self.factors} for op in ops]
        raised = {f: _raised(ops, [found[f] for found in labels], self.part) for f in self.factors}
        for name in self.part.inputs:
            if self.values[name].kind == "activation":
                self._place(name, self.residual)
        index = 0
        for step in self.part.steps:
            if isinstance(step, Convert):  # a shift: the same layout on another rank
                self.values[step.result] = replace(self.values[step.result], layout=self.values[step.source].layout)
                self.steps.append(step)
            elif isinstance(step, Op):
                self._op(step, labels[index], {f for f in self.factors if index in raised[f]})
                index += 1
        outputs = tuple(self._output(name) for name in self.part.outputs)
        return replace(self.part, outputs=outputs, values=tuple(self.values.values()), steps=tuple(self.steps))

    def _place(self, name: str, states: dict[str, str], nesting: tuple[str, ...] = ()) -> None:
        """Mesh order, but factors that share a dim stand outermost first as `nesting` says."""
        layout = [(f, states[f]) for f in self.factors if states.get(f, "I") != "I"]
        for held in {s for _, s in layout if s.startswith("V")}:
            slots = [n for n, (_, s) in enumerate(layout) if s == held]
            order = {f: n for n, f in enumerate(nesting)}
            nested = sorted((layout[n] for n in slots), key=lambda item: order.get(item[0], -1))
            for slot, item in zip(slots, nested, strict=True):
                layout[slot] = item
        self.values[name] = replace(self.values[name], layout=tuple(layout))

    def _op(self, op: Op, labels: dict[str, frozenset[str]], raised: set[str]) -> None:
        operands = []
        for position, name in enumerate(op.operands):
            demanded = {f: _demand(op, position, labels[f], f in raised) for f in self.factors}
            operands.append(self._operand(name, demanded))
        found = {
            f: result_state(op.row, f, tuple(state(self.values[o].layout, f) for o in operands)) for f in self.factors
        }
        nesting = tuple(dict.fromkeys(f for o in operands for f, _ in self.values[o].layout))
        for position, name in enumerate(op.results):
            main = position < len(op.row.main_results)
            states = {f: found[f][position] if main else self._follow(op.results[0], name, f) for f in self.factors}
            self._place(name, states, nesting)
        self.steps.append(self._start(replace(op, operands=tuple(operands))))

    def _follow(self, main: str, auxiliary: str, factor: str) -> str:
        """State of a kept statistic: sharded where the main result is sharded along a dim of the same name."""
        held = state(self.values[main].layout, factor)
        if not held.startswith("V"):
            return held
        dim = self.values[main].dims[int(held[1:])]
        return f"V{self.values[auxiliary].dims.index(dim)}"

    def _operand(self, name: str, demanded: dict[str, str]) -> str:
        value = self.values[name]
        layout = tuple((f, s) for f, s in demanded.items() if s != "I")
        if value.kind != "activation":  # parameters lie as they are read, data is loaded as it is read
            self._place(name, demanded)
            return name
        if value.layout != layout and (name, layout) in self.converted:
            return self.converted[name, layout]
        groups: dict[tuple[str, str], list[str]] = {}
        for factor in self.factors:
            pair = (state(value.layout, factor), demanded[factor])
            if pair[0] != pair[1]:
                groups.setdefault(pair, []).append(factor)
        result = name
        while groups:  # sums first, then what lies innermost
            ready = [p for p, factors in groups.items() if self._innermost(result, p[0], factors)]
            pair = min(ready, key=lambda p: p[0] not in "PM") if len(groups) > 1 else next(iter(groups))
            result = self._convert(name, result, *pair, tuple(groups.pop(pair)))
        self.converted[name, layout] = result
        return result

    def _convert(self, origin: str, name: str, source: str, target: str, factors: tuple[str, ...]) -> str:
        row = conversion(source, target)
        assert row is not None
        self._check_inner(name, source, factors)
        result = f"{origin}.{target}"
        while result in self.values:
            result += "'"
        self.values[result] = replace(self.values[name], name=result)
        now = {f: target if f in factors else state(self.values[name].layout, f) for f in self.factors}
        outer = tuple(f for f, _ in self.values[name].layout if f not in factors)
        self._place(result, now, (*outer, *factors))  # what is split now lies innermost
        dims = [int(s[1:]) if s.startswith("V") else None for s in (source, target)]
        group = group_name(self.mesh, factors)
        reduction = "max" if source == "M" else "sum"
        self.steps.append(Convert(result, name, row.forward, row.backward, group, dims[0], dims[1], reduction))
        return result

    def _check_inner(self, name: str, source: str, factors: tuple[str, ...]) -> None:
        """A dim can only be gathered from its innermost factors outwards, else its pieces would be interleaved."""
        assert self._innermost(name, source, list(factors)), f"{name}: {factors} are not innermost on {source}"

    def _innermost(self, name: str, source: str, factors: list[str]) -> bool:
        holders = [f for f, s in self.values[name].layout if s == source]
        return not source.startswith("V") or holders[len(holders) - len(factors) :] == factors

    def _output(self, name: str) -> str:
        if self.values[name].shape == ():
            return name  # the loss stays partial: the step sums it once
        return self._operand(name, {f: self.residual.get(f, "I") for f in self.factors})

    def _start(self, op: Op) -> Op:
        if op.operator not in START:
            return op
        operand, dim = START[op.operator]
        value = self.values[op.operands[operand]]
        skip = {f for f, s in self.values[op.operands[1]].layout if s == "V1"} if "attention" in op.operator else set()
        attributes: tuple[tuple[str, Attribute], ...] = (("start", first_index(value, dim, self.mesh, skip)),)
        if dim == 1 and "sequence" in value.dims:
            attributes = (*attributes, *permutation(self.zigzag, value.shape[dim]))
        return replace(op, attributes=(*op.attributes, *attributes))


def first_index(value: Value, dim: int, mesh: Mesh, skip: Set[str] = frozenset()) -> str | int:
    """First global index of a rank's piece along a dim, as a coordinate expression."""
    stride, terms = value.shape[dim], []
    for factor, held in value.layout:
        if held == f"V{dim}" and factor not in skip:
            stride //= mesh.size(factor)
            terms.append(f"@{factor}*{stride}")
    return "+".join(terms) or 0


def permutation(zigzag: int, sequence: int) -> tuple[tuple[str, Attribute], ...]:
    """Attributes of an instruction or operator that needs true positions of a permuted sequence."""
    return (("zigzag", zigzag), ("chunk", sequence // (2 * zigzag))) if zigzag else ()


def _demand(op: Op, position: int, labels: frozenset[str], raised: bool) -> str:
    for dim, label in enumerate(op.row.labels[0][position]):
        if label in labels:
            return f"V{dim}"
    if op.row.operands[position] in op.row.data:
        return "I"
    return "R" if labels or raised else "I"


def _raised(ops: list[Op], labels: list[frozenset[str]], part: Part) -> frozenset[int]:
    """Operators with no sharded label that go `R` as a whole.

    All their consumers want partial gradients, and no operand would need a sum of its own for it. The sum then falls on
    the parameters, once a step (replicated KV heads are the case).
    """
    producers = {name: index for index, op in enumerate(ops) for name in op.results}
    wanted: dict[str, list[int]] = {}
    for index, op in enumerate(ops):
        for name, operand in zip(op.row.operands, op.operands, strict=True):
            if name not in op.row.data:
                wanted.setdefault(operand, []).append(index)
    chosen: set[int] = set()
    for index in reversed(range(len(ops))):
        used = [c for name in ops[index].results for c in wanted.get(name, [])]
        exported = any(name in part.outputs for name in ops[index].results)
        if (
            not labels[index]
            and used
            and not exported
            and all(_wants_partial(ops[c], labels[c], c in chosen, ops[index]) for c in used)
        ):
            chosen.add(index)
    kinds = part.table
    for index in range(len(ops)):
        if index in chosen:
            for operand in ops[index].operands:
                free = kinds[operand].kind != "activation" or producers.get(operand) in chosen
                if (
                    not free
                    and not _sharded(operand, producers, ops, labels)
                    and not any(labels[c] and c not in chosen for c in wanted[operand])
                ):
                    chosen.discard(index)
    return frozenset(chosen)


def _sharded(name: str, producers: dict[str, int], ops: list[Op], labels: list[frozenset[str]]) -> bool:
    """Whether a value comes out of its operator sharded: to gather it takes no sum that it would not take anyway."""
    if name not in producers:
        return False
    op = ops[producers[name]]
    row = op.row.labels[1]
    position = op.results.index(name)
    return position < len(row) and bool(labels[producers[name]] & set(row[position]))


def _wants_partial(consumer: Op, labels: frozenset[str], raised: bool, producer: Op) -> bool:
    if raised:
        return True
    for position, operand in enumerate(consumer.operands):
        if operand in producer.results and (not labels or labels & set(consumer.row.labels[0][position])):
            return False
    return True


def group_name(mesh: Mesh, factors: tuple[str, ...]) -> str:
    """Shortest name of a group: an axis whose factors are all there is called by its own name."""
    names: list[str] = []
    for factor in factors:
        axis = factor.split(".")[0]
        whole = [f for f, size in mesh.factors if size > 1 and f.split(".")[0] == axis]
        name = axis if set(whole) <= set(factors) else factor
        if name not in names:
            names.append(name)
    return "*".join(names)
