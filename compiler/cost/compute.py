"""Seconds of compute on one device: a roofline per operator with an efficiency curve.

    matrix product   max(f / (peak * matmul * t * k/(k+h) * f/(f+F)), bytes / bandwidth)
    attention        f / (peak * attention * keys/(keys+h))
    everything else  bytes read and written / bandwidth

and never less than the launch floor; f = 2mnk. `d/(d+h)` is the usual saturation of tiled kernels: small dims leave
tiles and their pipelines partly empty. t is the share of its rate that a product keeps when its result is cut into
tiles and these are dealt to the multiprocessors in waves (`tiled_share`), or m/(m+h) * n/(n+h) where a machine does not
say how many it has.
"""

from __future__ import annotations

from functools import lru_cache

from titan.compiler.cost.curves import curve_name, operator_size
from titan.compiler.cost.machine import Machine
from titan.compiler.plan.frozen import dataclass
from titan.compiler.plan.mask import band_pairs
from titan.compiler.plan.operators import DTYPE_BYTES, TensorType
from titan.compiler.plan.program import Bucket
from titan.compiler.plan.segment import Call, Segment
from titan.compiler.plan.sequence import mean_pairs, most_pairs, needed_steps

# tiles of a result that kernels of matrix products come with, and the rate of a full one relative to the largest: less
# reuse of what is loaded (NVIDIA, Matrix Multiplication Background User's Guide, "Tile quantization")
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (128, 64, 0.82), (64, 128, 0.82), (64, 64, 0.65))
SPLITS = ((1, 1.0), (2, 0.95), (4, 0.90))  # parts of the inner dim that are summed afterwards, and what that costs
TURNED = ("rope", "dropout")  # their gradients are moved though nothing was saved for them
SPLIT_DEPTH = 1024  # a part is never shorter


@dataclass(frozen=True, slots=True)
class Seconds:
    """Forward, backward to inputs, backward to weights."""

    forward: float = 0.0
    backward_input: float = 0.0
    backward_weight: float = 0.0

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(
            self.forward + other.forward,
            self.backward_input + other.backward_input,
            self.backward_weight + other.backward_weight,
        )


@lru_cache(maxsize=65536)
def tiled_share(m: int, n: int, k: int, batch: int, processors: int) -> float:
    """Share of the rate of full tiles on all processors, with the tile and the split that suit `batch` products best:
    tiles at the edge are partly empty, and so is the last wave."""
    best = 0.0
    splits = SPLITS[: 1 + sum(k >= parts * SPLIT_DEPTH for parts, _ in SPLITS[1:])]
    for rows, columns, rate in TILES:
        tiles, area = batch * -(-m // rows) * -(-n // columns), processors * rows * columns
        for parts, kept in splits:
            share = rate * kept * batch * m * n * parts / (-(-tiles * parts // processors) * area)
            if share > best:
                best = share
    return best


def gemm_seconds(
    machine: Machine, m: int, n: int, k: int, dtype: str = "bf16", result_bytes: int | None = None, batch: int = 1
) -> float:
    """[m, k] x [k, n] in `dtype`; `result_bytes` per element of the result (float32 gradients: 4, read and written).
    A kernel may do a `batch` of such products."""
    figures, work = machine.figures, 2.0 * batch * m * n * k
    half = figures["matmul_half_dim"]
    filled = (k / (k + half)) * work / (work + figures["matmul_half_flops"])
    if figures["processors"]:
        filled *= tiled_share(m, n, k, batch, int(figures["processors"])) ** figures["matmul_waves"]
    else:
        filled *= (m / (m + half)) * (n / (n + half))
    size = DTYPE_BYTES[dtype]
    moved = batch * ((m * k + k * n) * size + m * n * (result_bytes or size))
    return max(
        work / (machine.rate(dtype, "matmul") * filled),
        moved / machine.memory_bandwidth,
        figures["launch_seconds"],
    )


def attention_seconds(machine: Machine, flops: float, keys: int, dtype: str = "bf16") -> float:
    """Fused attention of `flops` over `keys` positions."""
    figures = machine.figures
    rate = machine.rate(dtype, "attention") * keys / (keys + figures["attention_half_keys"])
    return max(flops / rate, figures["launch_seconds"])


def fullest(queries: int, keys: int, window: int = 0) -> float:
    """Causal work of the rank that holds the last `queries` of `keys` positions, as a multiple of the mean rank's:
    without a window it sees all but half a triangle of its own square."""
    last = band_pairs((keys - queries, queries), (0, keys), window)
    return last / (band_pairs((0, keys), (0, keys), window) * queries / keys)


@lru_cache(maxsize=1024)
def slowest_steps(ring: int, length: int, window: int) -> float:
    """Work of a zigzag ring whose ranks wait in each step for the one with most pairs, as a multiple of the mean."""
    given = [
        {"ring": ring, "zigzag": True, "causal": True, "window": window, "step": step}
        for step in needed_steps(ring, True, length, window)
    ]
    return sum(most_pairs(g, length) for g in given) / sum(mean_pairs(g, length) for g in given)


def moved_seconds(machine: Machine, moved: float, kernels: int = 1) -> float:
    """Memory-bound kernels that read and write `moved` bytes together."""
    return max(moved / machine.memory_bandwidth, kernels * machine.figures["launch_seconds"])


def segment_seconds(machine: Machine, segment: Segment) -> Seconds:
    """All calls of a segment one after another."""
    total = Seconds()
    for call in segment.body:
        total += call_seconds(machine, segment, call)
    return total


def call_seconds(machine: Machine, segment: Segment, call: Call) -> Seconds:
    """One call of a segment; gradients that nobody needs cost nothing."""
    operands = tuple(segment.types[name] for name in call.operands)
    results = tuple(segment.types[name] for name in call.results)
    needed = [o for n, o in zip(call.row.operands, call.operands, strict=True) if n not in call.row.data]
    backward = call.row.differentiable and any(o in segment.differentiable for o in needed)
    measured = _measured_seconds(machine, segment, call, backward)
    if measured is not None:
        return measured
    if call.operator in ("linear", "expert_linear"):
        return _linear_seconds(machine, call, operands, call.operands[0] in segment.differentiable)
    if call.operator == "latent_attention":
        given = dict(call.attributes)
        flops, keys = call.row.flops(given, operands), operands[1].shape[1]
        more = fullest(operands[0].shape[1], keys) if keys > operands[0].shape[1] else 1.0
        return Seconds(
            attention_seconds(machine, more * flops.forward, keys, operands[0].dtype)
            + moved_seconds(machine, 2.0 * operands[0].bytes),
            attention_seconds(machine, more * flops.backward_input, keys, operands[0].dtype)
            + moved_seconds(machine, 2.0 * operands[0].bytes),
        )
    if call.operator.removesuffix("_documents") in ("attention", "attention_block", "attention_merge"):
        given = dict(call.attributes)
        flops = call.row.flops(given, operands)
        keys, dtype, window = operands[1].shape[-2], operands[0].dtype, int(given.get("window", 0))
        if "ring" in given:
            more = most_pairs(given, keys) / mean_pairs(given, keys)
        else:
            more = fullest(operands[0].shape[1], keys, window) if given.get("causal", True) else 1.0
        keys = min(keys, window or keys)  # of one kernel
        return Seconds(
            attention_seconds(machine, more * flops.forward, keys, dtype),
            attention_seconds(machine, more * flops.backward_input, keys, dtype),
        )
    if call.operator == "attention_scores":
        return _scores_seconds(machine, call, operands)
    if call.operator.startswith("linear_vocab"):  # logits formed in pieces; backward forms them again
        once = _linear_seconds(machine, call, operands[:2], True)
        logits = 2.0 * results[0].elements * operands[1].shape[0] * DTYPE_BYTES[operands[0].dtype]
        again = once.forward + once.backward_input + once.backward_weight
        moved = moved_seconds(machine, logits)
        return Seconds(once.forward + moved, again + 2 * moved if backward else 0.0)
    if call.operator == "wide_gradient":  # the tensor itself; its gradient becomes narrow
        return Seconds(0.0, moved_seconds(machine, 3.0 * operands[0].bytes) if backward else 0.0)
    forward = moved_seconds(machine, sum(t.bytes for t in operands) + sum(t.bytes for t in results))
    if call.operator == "embedding":
        written = results[0].bytes
        return Seconds(
            moved_seconds(machine, 2.0 * written), 0.0, moved_seconds(machine, written + 8.0 * results[0].elements)
        )
    return Seconds(forward, _backward_seconds(machine, call, segment) if backward else 0.0)


def _measured_seconds(machine: Machine, segment: Segment, call: Call, backward: bool) -> Seconds | None:
    """By the machine's own curves; None where it has none for this operator."""
    row, types = call.row, segment.types
    operands, results = (tuple(types[name] for name in names) for names in (call.operands, call.results))
    dtype = operands[1 if "tokens" in row.data[:1] else 0].dtype
    forward = machine.curves.get(curve_name(call.operator, "forward", dtype))
    if forward is None:
        return None
    size, host = (
        operator_size(call, operands, results, machine.figures["matmul_half_dim"]),
        machine.figures["call_seconds"],
    )

    def seconds(phase: str) -> float:
        curve = machine.curves.get(curve_name(call.operator, phase, dtype))
        return curve(size) + host if curve else 0.0

    inputs = any(
        o in segment.differentiable
        for n, o in zip(row.operands, call.operands, strict=True)
        if n not in row.data and n not in row.parameters
    )
    together = row.weight_with_input and seconds("backward")
    return Seconds(
        forward(size) + host,
        (together or seconds("backward_input")) if backward and (inputs or row.weight_with_input) else 0.0,
        seconds("backward_weight") if backward and row.parameters and not together else 0.0,
    )


def _scores_seconds(machine: Machine, call: Call, operands: tuple[TensorType, ...]) -> Seconds:
    """Attention that forms its scores: a product per head and direction, and kernels between them that read and write
    every score (scale, mask and softmax in one, dropout in another)."""
    batch, queries, width = operands[0].shape
    keys, size, dtype = operands[1].shape[1], DTYPE_BYTES[operands[0].dtype], operands[0].dtype
    depth = int(dict(call.attributes)["head_dim"])
    heads = batch * width // depth
    products = [
        gemm_seconds(machine, m, n, k, dtype, batch=heads)
        for m, n, k in ((queries, keys, depth), (queries, depth, keys), (keys, depth, queries))
    ]
    if depth % 8:  # vector units cannot load such rows whole
        products = [p / machine.figures["misaligned"] for p in products]
    moved = heads * queries * keys * size / machine.memory_bandwidth
    return Seconds(products[0] + products[1] + 4 * moved, products[0] + products[1] + 2 * products[2] + 6 * moved)


def _linear_seconds(machine: Machine, call: Call, operands: tuple[TensorType, ...], input_gradient: bool) -> Seconds:
    """Products in the operands' dtype, or in a narrower one to which they are cast first; of experts one of a kernel
    for each."""
    x, weight = operands
    n, k = weight.shape[-2:]
    experts = weight.shape[0] if call.operator == "expert_linear" else 1
    m = x.elements // k // experts
    dtype = str(dict(call.attributes).get("product", x.dtype))

    def product(m: int, n: int, k: int, result_bytes: int) -> float:
        return gemm_seconds(machine, m, n, k, dtype, result_bytes, experts)

    size = DTYPE_BYTES[x.dtype]
    cast, back = (
        (0.0, 0.0) if dtype == x.dtype else (cast_seconds(machine, x.elements), cast_seconds(machine, m * n * experts))
    )
    return Seconds(
        product(m, n, k, size) + cast,
        (product(m, k, n, size) if input_gradient else 0.0) + back,
        product(n, k, m, 8),  # float32 gradient, read and written in place
    )


def cast_seconds(machine: Machine, elements: float) -> float:
    """16 bits read twice (the largest value is found first), 8 bits written in both orders."""
    return moved_seconds(machine, machine.figures["cast_bytes"] * elements)


def _backward_seconds(machine: Machine, call: Call, segment: Segment) -> float:
    """Reads what was saved and the gradients of the results, writes the gradients of the operands."""
    row, types = call.row, segment.types
    named = dict(zip(row.operands + row.results, call.operands + call.results, strict=True))
    moved = sum(types[named[name]].bytes for name in {*row.saves, *row.saves_weight})
    moved += sum(types[named[name]].bytes for name in row.main_results)
    moved += sum(
        types[named[name]].bytes for name in row.operands if name not in row.data and name not in row.parameters
    )
    return moved_seconds(machine, moved) if row.saves or row.weight_with_input or call.operator in TURNED else 0.0


def optimizer_seconds(machine: Machine, bucket: Bucket, elements: int) -> float:
    """AdamW over `elements`: reads gradient, moments and the master copy of bf16, writes all but the gradient."""
    statistic = 8 if bucket.dtype == "f64" else 4
    parameter = DTYPE_BYTES[bucket.dtype]
    master = 2 * statistic if bucket.dtype == "bf16" else parameter
    return moved_seconds(machine, elements * (statistic + 4 * statistic + master + parameter))
