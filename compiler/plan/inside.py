"""What a compute instruction holds while it runs: every storage that it makes, from the first call of its segment's
body to the last, by the rules of the runtime's bound segments.

A storage is not a value: some operators hand a gradient on as it is (a sum's gradient is that of both operands), and a
weight frame takes over what the frame and the output gradients hold already. So each value that an instruction writes
has a root: a value that was given to it (`x` a kept value, `d.x` a gradient), or a storage of its own (a number).
"""

from __future__ import annotations

from dataclasses import field
from functools import cached_property

from titan.compiler.plan.chains import chain_operands, chains
from titan.compiler.plan.frozen import dataclass
from titan.compiler.plan.operators import DTYPE_BYTES, statistics_dtype
from titan.compiler.plan.scratch import call_scratch, weight_scratch
from titan.compiler.plan.segment import Call, Segment

Root = str | int


@dataclass(frozen=True)
class Inside:
    """`peak`: most bytes of storages made by the instruction that are alive at once; `left`: those alive at its end.

    `sizes` are the bytes of its own storages by number; `gradients` the roots of input gradients in order, `frame`
    those of the weight frame's values (both of a backward only).
    """

    peak: int
    left: int
    sizes: tuple[int, ...] = ()
    gradients: tuple[Root, ...] = ()
    frame: tuple[Root, ...] = ()

    @cached_property
    def shares(self) -> bool:
        """Whether some written values are not storages of their own."""
        roots = (*self.gradients, *self.frame)
        return len(set(roots)) < len(roots) or any(isinstance(root, str) for root in roots)


def forward_inside(segment: Segment, body: tuple[Call, ...], made: frozenset[str]) -> Inside:
    """A forward or a rebuild that leaves the values `made`. What an identity makes is the storage of its operand."""
    joined = chains(body, made)
    last = {o: n for n, chain in enumerate(joined) for o in chain_operands(chain)}
    held: dict[str, int] = {}
    live = peak = 0
    for n, chain in enumerate(joined):
        call, operands, results = chain[0], chain_operands(chain), chain[-1].results
        for value in results:
            source = operands[0] if call.row.identity else ""
            handed = source in held and source not in made and last[source] == n
            held[value] = held.pop(source) if handed else segment.types[value].bytes
            live += 0 if handed else held[value]
        peak = max(peak, live + call_scratch(segment, call, False))
        for value in dict.fromkeys((*operands, *results)):
            if value in held and value not in made and last.get(value, n) == n:
                live -= held.pop(value)
    return Inside(peak, live)


def gradient_dtype(segment: Segment, value: str) -> str:
    """Dtype of a value's gradient."""
    kind = segment.types[value].dtype
    return statistics_dtype(kind) if value in segment.wide else kind


def gradient_bytes(segment: Segment, name: str) -> int:
    """Bytes of a value `x`, or of its gradient `d.x`."""
    kind = segment.types[name.removeprefix("d.")]
    dtype = gradient_dtype(segment, name[2:]) if name.startswith("d.") else kind.dtype
    return kind.elements * DTYPE_BYTES[dtype]


@dataclass
class _Backward:
    """The gradients of a backward by their roots, and how many hold each root."""

    segment: Segment
    sizes: list[int] = field(default_factory=list)
    holders: dict[int, int] = field(default_factory=dict)
    roots: dict[str, Root] = field(default_factory=dict)  # of the gradient of a value
    live: int = 0
    peak: int = 0

    def new(self, size: int) -> int:
        self.sizes.append(size)
        self.holders[len(self.sizes) - 1] = 1
        self.live += size
        self.peak = max(self.peak, self.live)
        return len(self.sizes) - 1

    def hold(self, root: Root) -> Root:
        if isinstance(root, int):
            self.holders[root] += 1
        return root

    def drop(self, root: Root) -> None:
        if isinstance(root, int):
            self.holders[root] -= 1
            self.live -= 0 if self.holders[root] else self.sizes[root]

    def need(self, size: int) -> None:
        self.peak = max(self.peak, self.live + size)

    def dtype(self, value: str) -> str:
        return gradient_dtype(self.segment, value)

    def bytes(self, value: str) -> int:
        return gradient_bytes(self.segment, f"d.{value}")

    def call(self, call: Call, weights: bool, kept: frozenset[str]) -> None:
        """The transpose of one call; `kept`: gradients that a weight frame holds until the end."""
        row, segment = call.row, self.segment
        main = tuple(segment.final(r) for r in call.results[: len(row.main_results)])
        operands = list(zip(row.operands, call.operands, strict=True))
        inputs = [(name, o) for name, o in operands if name not in row.data and name not in row.parameters]
        zeros = [self.new(self.bytes(r)) for r in main if r not in self.roots]
        if any(o in segment.differentiable for _, o in inputs):
            given = self.roots.get(main[0], zeros[0] if zeros else "")
            twice = len({o for _, o in inputs}) < len(inputs)
            own = [name not in row.hands_on and not twice for name, _ in inputs]
            found = [(o, self._input(name, o, given, call, main[0])) for name, o in inputs]
            self.need(call_scratch(segment, call, True))
            for (operand, root), new in zip(found, own, strict=True):
                if operand in segment.differentiable:
                    self._add(operand, root, new)
            for _, root in found:
                self.drop(root)
        if weights and not row.weight_with_input:
            self.need(weight_scratch(segment, call))
        for root in zeros:
            self.drop(root)
        for value in main:
            if value in self.roots and f"d.{value}" not in kept:
                self.drop(self.roots.pop(value))

    def _input(self, name: str, operand: str, given: Root, call: Call, result: str) -> Root:
        if name in call.row.hands_on and self.dtype(operand) == self.dtype(result):
            return self.hold(given)
        return self.new(self.bytes(operand))

    def _add(self, operand: str, root: Root, own: bool) -> None:
        """A sum of what several readers give is made in what the call gives of its `own`, else, before the summands go,
        anew."""
        before = self.roots.get(operand)
        self.roots[operand] = self.hold(root) if own or before is None else self.new(self.bytes(operand))
        if before is not None:
            self.drop(before)


def backward_inside(segment: Segment, weights: bool, carried: frozenset[str]) -> Inside:
    """A backward, with the weights' gradients or without; `carried`: inputs to whose gradient others' is added."""
    state = _Backward(segment)
    outputs = [segment.final(v) for v in segment.outputs if v in segment.differentiable]
    state.roots |= {value: f"d.{value}" for value in outputs}
    kept = frozenset() if weights else frozenset(segment.weight_frame)
    reached = {v for v in segment.outputs if v in segment.differentiable}
    for call in reversed(segment.body):
        if call.row.differentiable and reached.intersection(call.results):
            wanted = [o for n, o in zip(call.row.operands, call.operands, strict=True) if n not in call.row.data]
            reached.update(o for o in wanted if o in segment.differentiable and o not in segment.parameters)
            state.call(call, weights, kept)
    inputs = [v for v in segment.inputs if v in segment.differentiable]
    gradients = []
    for value in inputs:
        root = state.roots.get(value, "")
        gradients.append(state.new(state.bytes(value)) if value in carried else root)
    frame = () if weights else tuple(_frame_root(state, name) for name in segment.weight_frame)
    left = {r for r in (*gradients, *frame) if isinstance(r, int)}
    return Inside(state.peak, sum(state.sizes[r] for r in left), tuple(state.sizes), tuple(gradients), frame)


def _frame_root(state: _Backward, name: str) -> Root:
    return state.roots.get(name.removeprefix("d."), "") if name.startswith("d.") else name


def weight_inside(segment: Segment) -> Inside:
    """A backward to weights: nothing but what the products take."""
    return Inside(max((weight_scratch(segment, call) for call in segment.body), default=0), 0)
