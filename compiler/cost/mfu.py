"""FLOPs of a model and utilisation of the hardware, each figure with the rule that it goes by.

6N             6 * parameters per token (all parameters that a token meets, a tied head once; of experts top_k)
causal model   3 * (2 * weights of matrix products + 2 * L * s * heads * head_dim) per token: forward once, backward
               twice; a causal mask leaves half of the scores, a window w of a sequence s the share w (2 - w/s) / (2 s);
               the output head counts, embedding look-ups do not
executed       every FLOP of the plan's instructions, recomputation and attention's rebuilt scores included

Other trainers count otherwise, so a measured speed is shown by their rules too (`conventions`): they count a parameter
that takes part in no product (norms, biases), the whole score matrix, and some the embedding that is only looked up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from titan.compiler.cost.shape import latent_products
from titan.compiler.plan.frozen import dataclass
from titan.compiler.plan.listing import weighted
from titan.compiler.plan.program import Block, Plan, Role
from titan.compiler.plan.sizes import Sizes

SIMPLE_RULE = "6N: 6 x parameters per token"
MODEL_RULE = "model FLOPs: 6 x matrix weights + 6 x layers x sequence x heads x head_dim per token (causal half)"
HARDWARE_RULE = "executed FLOPs of the plan (recompute and rebuilt attention scores included)"
FULL_RULE = "6 x parameters without the embedding look-up + 12 x layers x sequence x heads x head_dim (full scores)"
EMBEDDED_RULE = "6 x parameters, embedding counted, + 12 x layers x sequence x heads x head_dim (full scores)"
REBUILT_RULE = "hardware FLOPs: as with full scores, and the forward of every layer once more (recompute = full)"
UNKNOWN_PEAK = "peak unknown: run titan profile"


_NO_ATTENTION = {"heads": 0, "kv_heads": 0, "head_dim": 0, "bias": False, "out_bias": False}


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """Training FLOPs per token by both rules, and the numbers they come from: all parameters, those that one token
    meets (of experts top_k), of these the weights of products; parameters that are only looked up; FLOPs of causal
    attention scores, forward and backward; and FLOPs of the output head."""

    simple: float
    exact: float
    parameters: int
    matrix_weights: int
    met: int = 0
    looked_up: int = 0
    scores: float = 0.0
    head: float = 0.0


@dataclass(frozen=True, slots=True)
class Convention:
    """FLOPs per token as somebody counts them: `key` in machine output, `kind` MFU or HFU, `rule` in words."""

    key: str
    kind: str
    per_token: float
    rule: str


def conventions(flops: ModelFlops, recompute: str = "none") -> tuple[Convention, ...]:
    """A model's FLOPs by every rule in use, ours first; with `recompute` = full also what the hardware executes."""
    full = 6.0 * (flops.met - flops.looked_up) + 2 * flops.scores
    found = [
        Convention("simple", "MFU", flops.simple, SIMPLE_RULE),
        Convention("exact", "MFU", flops.exact, MODEL_RULE),
        Convention("full_scores", "MFU", full, FULL_RULE),
        Convention("embedding_counted", "MFU", 6.0 * flops.met + 2 * flops.scores, EMBEDDED_RULE),
    ]
    if recompute == "full":
        found.append(Convention("hardware", "HFU", full + (full - flops.head) / 3, REBUILT_RULE))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Utilisation:
    """Of one device. Shares are None where the peak is not known; `tflops` is by the model rule."""

    tokens_per_second: float
    tflops: float
    mfu: float | None
    mfu_simple: float | None
    peak: float | None


def model_flops(model: Mapping[str, Any], sequence: int) -> ModelFlops:
    """`model` is the plain dictionary of a spec's model (`plan.setting("model")`); `sequence` in tokens."""
    attention, hidden = model["attention"] or _NO_ATTENTION, model["hidden"]
    latent = latent_products(attention, hidden)
    layers = sum(group["count"] for group in model["layers"])
    near, mixed, scores = _attention_weights(attention, hidden)
    if latent:
        near, mixed = sum(k * n for k, n, _ in latent), (attention["query_rank"] or 0) + attention["kv_rank"]
        scores = attention["heads"] * (attention["head_dim"] + attention["rope_dim"] + attention["value_dim"]) / 2
    met = held = biases = 0  # weights that a token meets; all of them
    seen = 0.0  # tokens that a token sees, twice the mean of all, summed over layers
    for group in model["layers"]:
        block, count = group["block"], group["count"]
        number = 3 if block["activation"] == "swiglu" else 2
        one = number * hidden * block["ffn"]
        experts = block.get("experts", 0)
        router = hidden * experts
        met += count * (near + (router + (block["top_k"] + block["shared"]) * one if experts else one))
        held += count * (near + (router + (experts + block["shared"]) * one if experts else one))
        biases += count * mixed
        window = min(block.get("window") or sequence, sequence)
        seen += count * window * (2 - window / sequence)
        biases += count * ((number - 1) * block["ffn"] + hidden if block["bias"] else 0)
    head = model["vocab"] * hidden
    norms = {"rms_norm": 1, "layer_norm": 2, "none": 0}[model["norm"]] * hidden * (2 * layers + 1)
    positions = model["max_positions"] * hidden if model["positions"] == "learned" else 0
    rest = biases + norms + positions + head * (1 if model["tied"] else 2)
    rest += model["vocab"] if model.get("head_bias") else 0
    attention_flops = 6.0 * seen * scores
    looked_up = positions + (0 if model["tied"] else head)
    return ModelFlops(
        6.0 * (met + rest), 6.0 * (met + head) + attention_flops, held + rest, met + head, met + rest, looked_up,
        attention_flops, 6.0 * head,
    )  # fmt: skip


def impossible(kind: str, achieved: float, peak: float | None, rule: str, peak_of: str) -> str:
    """What is wrong with `achieved` FLOP/s above `peak`; empty where it is possible or the peak is not known."""
    if not peak or achieved <= peak:
        return ""
    return (
        f"{kind} of {achieved / peak:.1%} is more than the device has, by {rule} and a peak of"
        f" {peak / 1e12:,.1f} TFLOP/s ({peak_of}): the speed, the peak or the rule is not that of the run"
    )


def _attention_weights(attention: Mapping[str, Any], hidden: int) -> tuple[int, int, float]:
    """(weights of products, biases and norms, width of the heads) of one layer."""
    if "kv_rank" in attention:
        return 0, 0, 0.0
    heads, shared = attention["heads"] * attention["head_dim"], attention["kv_heads"] * attention["head_dim"]
    biases = (heads + 2 * shared if attention["bias"] else 0) + (hidden if attention["out_bias"] else 0)
    biases += 2 * attention["head_dim"] if attention.get("qk_norm") else 0
    return 2 * hidden * (heads + shared), biases, float(heads)


def utilisation(flops: ModelFlops, tokens_per_second: float, peak: float | None) -> Utilisation:
    """Utilisation of one device that trains `tokens_per_second`; `peak` in FLOP/s, None when not known."""
    achieved, simple = flops.exact * tokens_per_second, flops.simple * tokens_per_second
    return Utilisation(
        tokens_per_second,
        achieved / 1e12,
        achieved / peak if peak else None,
        simple / peak if peak else None,
        peak,
    )


def executed_flops(plan: Plan, order: str = "train") -> float:
    """FLOPs that all ranks together execute in one pass of the order."""
    sizes = Sizes(plan)
    total = 0.0
    for role in plan.roles:
        calls = Counter(role.called(order))
        each = sizes.each(role, _block_flops)
        for block in role.blocks:
            total += calls[block.name] * each[block.name]
    return total * (plan.mesh.world_size // len(plan.roles))


def _block_flops(block: Block, sizes: Sizes, role: Role) -> float:
    """FLOPs of one call of a block on one rank."""
    return sum(times * sizes.flops(i) for i, times in weighted(block.instructions) if i.unit and sizes.runs(i))
