"""The operators: one row each with shapes, layout rule, saved values and FLOPs. The runtime has one file per name here.

A row's `signature` labels every dim like an einsum. For one mesh factor that shards a set of labels the rule is the
same for every operator: an operand with such a label is `V` there, an operand without is `R`, a result with it is `V`,
a result without is `P` (a contraction). A factor that shards no label leaves everything `I`, or everything `R` where
the gradient is to be summed later. Labels in `whole` may not be sharded.
"""

from __future__ import annotations

from collections.abc import Mapping

from titan.compiler.plan.frozen import dataclass
from titan.compiler.plan.mixture import (
    combine_type,
    dispatch_type,
    expert_flops,
    expert_type,
    latent_flops,
    latent_type,
    route_type,
    scores_flops,
    scores_type,
)
from titan.compiler.plan.sequence import mean_pairs, seen_pairs
from titan.compiler.plan.tensor import (
    DTYPE_BYTES,
    Attribute,
    Counting,
    Flops,
    Shape,
    TensorType,
    Typing,
    statistics_dtype,
)

__all__ = [
    "DTYPE_BYTES",
    "OPERATORS",
    "Attribute",
    "Flops",
    "LayoutError",
    "Operator",
    "Shape",
    "TensorType",
    "result_state",
    "statistics_dtype",
]


@dataclass(frozen=True, slots=True)
class Operator:
    """One row.

    operands      names; those in `parameters` are weights, those in `data` carry no gradient
    results       names; those in `auxiliary` (statistics kept for backward) follow the main results
    signature     einsum-like labels of operands and main results
    whole         labels that may not be sharded
    saves         operand and result names that backward_input needs
    saves_weight  names that backward_weight needs beside the gradient
    weight_with_input  parameters get their gradient together with backward_input instead (norms, biases: cheap, and
                  they need the same values)
    alone         always a segment by itself, so that what it reads and makes are registers of the plan
    accumulates   (operand, result): the operand is an earlier, partial state of the result. It carries no gradient of
                  its own: backward works from the final state and its gradient, whatever the part
    wide          names whose gradients are float32 (float64 in a float64 run) whatever their dtype: sums of many parts
    resizes       labels whose dims have another length in the results (slots of tokens, narrower heads), as `typing`
                  says; how they are sharded carries over
    identity      the result is the operand itself
    hands_on      operands whose gradient is the result's own or a view of it, where both have one dtype
    plan_only     planned, proved and priced, but not run yet: the runtime has no file for it
    typing        attributes, operand types -> (dtype, local shape) of every result
    flops         attributes, operand types -> Flops
    """

    name: str
    operands: tuple[str, ...]
    results: tuple[str, ...]
    signature: str
    typing: Typing
    flops: Counting
    parameters: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    auxiliary: tuple[str, ...] = ()
    whole: str = ""
    saves: tuple[str, ...] = ()
    saves_weight: tuple[str, ...] = ()
    weight_with_input: bool = False
    differentiable: bool = True
    partial: str = "P"  # state of a result that lacks a sharded label
    alone: bool = False
    accumulates: tuple[tuple[str, str], ...] = ()
    wide: tuple[str, ...] = ()
    resizes: str = ""
    identity: bool = False
    hands_on: tuple[str, ...] = ()
    plan_only: bool = False

    @property
    def main_results(self) -> tuple[str, ...]:
        return self.results[: len(self.results) - len(self.auxiliary)]

    @property
    def labels(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Labels of the operands and of the main results."""
        left, right = self.signature.split("->")
        return tuple(left.split(",")), tuple(right.split(","))


def _same(attributes: Mapping[str, Attribute], ins: tuple[TensorType, ...]) -> tuple[tuple[str, Shape], ...]:
    return ((ins[0].dtype, ins[0].shape),)


def _elementwise(forward: float, backward: float) -> Counting:
    def count(attributes: Mapping[str, Attribute], ins: tuple[TensorType, ...]) -> Flops:
        return Flops(forward * ins[0].elements, backward * ins[0].elements)

    return count


def _linear_type(attributes: Mapping[str, Attribute], ins: tuple[TensorType, ...]) -> tuple[tuple[str, Shape], ...]:
    return ((ins[0].dtype, (*ins[0].shape[:-1], ins[1].shape[0])),)


def _linear_flops(attributes: Mapping[str, Attribute], ins: tuple[TensorType, ...]) -> Flops:
    work = 2.0 * ins[0].elements * ins[1].shape[0]
    return Flops(work, work, work)


def _passes(forward: int, backward: int) -> Counting:
    """Products of a matrix with every token: the logits, again in backward where they are not kept, both gradients."""

    def count(attributes: Mapping[str, Attribute], ins: tuple[TensorType, ...]) -> Flops:
        work = 2.0 * ins[0].elements * ins[1].shape[0]
        return Flops(forward * work, backward * work)

    return count


def _norm_type(statistics: int) -> Typing:
    def typing(attributes: Mapping[str, Attribute], ins: tuple[TensorType, ...]) -> tuple[tuple[str, Shape], ...]:
        kept = (statistics_dtype(ins[0].dtype), ins[0].shape[:-1])
        return ((ins[0].dtype, ins[0].shape), *(kept for _ in range(statistics)))

    return typing


def _embedding_type(attributes: Mapping[str, Attribute], ins: tuple[TensorType, ...]) -> tuple[tuple[str, Shape], ...]:
    return ((ins[1].dtype, (*ins[0].shape, ins[1].shape[1])),)


def _attention_type(attributes: Mapping[str, Attribute], ins: tuple[TensorType, ...]) -> tuple[tuple[str, Shape], ...]:
    batch, sequence, width = ins[0].shape
    heads = width // int(attributes["head_dim"])
    return ((ins[0].dtype, ins[0].shape), (statistics_dtype(ins[0].dtype), (batch, heads, sequence)))


def _attention_flops(attributes: Mapping[str, Attribute], ins: tuple[TensorType, ...]) -> Flops:
    """Two matrix products forward, five backward (the scores are formed again), over the pairs that the mask leaves; a
    mean over the ranks that share the queries."""
    batch, sequence, width = ins[0].shape
    keys = ins[1].shape[1]
    product = 2.0 * batch * width * seen_pairs(attributes, keys) * sequence / keys
    return Flops(2 * product, 5 * product)


def _pair_type(attributes: Mapping[str, Attribute], ins: tuple[TensorType, ...]) -> tuple[tuple[str, Shape], ...]:
    return ((ins[0].dtype, (2, *ins[0].shape)),)


def _block_type(attributes: Mapping[str, Attribute], ins: tuple[TensorType, ...]) -> tuple[tuple[str, Shape], ...]:
    """Partial results stay in the statistics' dtype, the final one has that of the queries."""
    (dtype, shape), lse = _attention_type(attributes, ins)
    return ((dtype if attributes["final"] else statistics_dtype(dtype), shape), lse)


def _block_flops(attributes: Mapping[str, Attribute], ins: tuple[TensorType, ...]) -> Flops:
    """As for attention, over the pairs of this step; a mean over the ring where its ranks differ."""
    batch, sequence, width = ins[0].shape
    product = 2.0 * batch * width * mean_pairs(attributes, sequence)
    return Flops(2 * product, 5 * product)


def _vocab_max_type(attributes: Mapping[str, Attribute], ins: tuple[TensorType, ...]) -> tuple[tuple[str, Shape], ...]:
    return ((statistics_dtype(ins[0].dtype), ins[0].shape[:-1]),)


def _vocab_sum_type(attributes: Mapping[str, Attribute], ins: tuple[TensorType, ...]) -> tuple[tuple[str, Shape], ...]:
    return ((statistics_dtype(ins[0].dtype), ins[0].shape[:-1]),) * 2


def _loss_type(attributes: Mapping[str, Attribute], ins: tuple[TensorType, ...]) -> tuple[tuple[str, Shape], ...]:
    return ((ins[1].dtype, ()),)


_ROWS = (
    Operator(
        "embedding", ("tokens", "table"), ("out",), "bs,vh->bsh", _embedding_type, lambda a, i: Flops(0.0),
        parameters=("table",), data=("tokens",), whole="h", saves_weight=("tokens",),
    ),
    Operator(
        "add_positions", ("x", "table"), ("out",), "bsh,ph->bsh", _same, _elementwise(1, 0),
        parameters=("table",), whole="hp", weight_with_input=True, hands_on=("x",),
    ),
    Operator(
        "linear", ("x", "weight"), ("out",), "bsk,nk->bsn", _linear_type, _linear_flops,
        parameters=("weight",), saves=("weight",), saves_weight=("x",),
    ),
    Operator(
        "bias", ("x", "bias"), ("out",), "bsn,n->bsn", _same, _elementwise(1, 0),
        parameters=("bias",), weight_with_input=True, hands_on=("x",),
    ),
    Operator(
        "rms_norm", ("x", "gain"), ("out", "rstd"), "bsh,h->bsh", _norm_type(1), _elementwise(4, 8),
        parameters=("gain",), auxiliary=("rstd",), whole="h", saves=("x", "gain", "rstd"), weight_with_input=True,
    ),
    Operator(
        "layer_norm", ("x", "gain", "shift"), ("out", "mean", "rstd"), "bsh,h,h->bsh", _norm_type(2),
        _elementwise(6, 10),
        parameters=("gain", "shift"), auxiliary=("mean", "rstd"), whole="h", saves=("x", "gain", "mean", "rstd"),
        weight_with_input=True,
    ),
    Operator("rope", ("x",), ("out",), "bsn->bsn", _same, _elementwise(3, 3)),
    Operator(
        "attention", ("q", "k", "v"), ("out", "lse"), "bsn,btm,btm->bsn", _attention_type, _attention_flops,
        auxiliary=("lse",), whole="t", saves=("q", "k", "v", "out", "lse"),
    ),
    Operator(
        "wide_gradient", ("x",), ("out",), "bsn->bsn", _same, lambda a, i: Flops(0.0),
        wide=("out",), identity=True, hands_on=("x",),
    ),
    Operator(
        "pack_keys", ("k", "v"), ("kv",), "bsm,bsm->cbsm", _pair_type, lambda a, i: Flops(0.0),
        wide=("kv",), hands_on=("k", "v"),
    ),
    Operator(
        "attention_block", ("q", "kv"), ("out", "lse"), "bsn,cbtm->bsn", _block_type, _block_flops,
        auxiliary=("lse",), saves=("q", "kv", "out", "lse"), alone=True, wide=("q", "kv"),
    ),
    Operator(
        "attention_merge", ("q", "kv", "partial", "partial_lse"), ("out", "lse"), "bsn,cbtm,bsn,bhs->bsn",
        _block_type, _block_flops,
        data=("partial", "partial_lse"), auxiliary=("lse",), saves=("q", "kv", "out", "lse"), alone=True,
        accumulates=(("partial", "out"), ("partial_lse", "lse")), wide=("q", "kv"),
    ),
    Operator(
        "attention_scores", ("q", "k", "v"), ("out", "scores"), "bsn,btm,btm->bsn", scores_type, scores_flops,
        auxiliary=("scores",), whole="t", saves=("q", "k", "v", "out", "scores"), plan_only=True,
    ),
    Operator(
        "latent_attention", ("q", "kv", "place"), ("out", "lse"), "bsn,btm,btr->bsn", latent_type, latent_flops,
        auxiliary=("lse",), whole="tr", saves=("q", "kv", "place", "out", "lse"), resizes="nst", plan_only=True,
    ),
    Operator(
        "head_norm", ("x", "gain"), ("out",), "bsn,h->bsn", _same, _elementwise(4, 8),
        parameters=("gain",), whole="h", saves=("x", "gain"), weight_with_input=True, plan_only=True,
    ),
    Operator(
        "route", ("logits",), ("weights",), "bse->bsk", route_type, _elementwise(5, 5),
        whole="ek", saves=("logits", "weights"), plan_only=True,
    ),
    Operator(
        "dispatch", ("x", "weights"), ("out",), "bsh,bsk->ebsh", dispatch_type, lambda a, i: Flops(0.0),
        data=("weights",), whole="hke", saves=("weights",), resizes="s", plan_only=True,
    ),
    Operator(
        "expert_linear", ("x", "weight"), ("out",), "ebsk,enk->ebsn", expert_type, expert_flops,
        parameters=("weight",), saves=("weight",), saves_weight=("x",), plan_only=True,
    ),
    Operator(
        "expert_swiglu", ("gate", "up"), ("out",), "ebsf,ebsf->ebsf", _same, _elementwise(5, 10),
        saves=("gate", "up"), plan_only=True,
    ),
    Operator(
        "combine", ("parts", "weights"), ("out",), "ebsh,bsk->bsh", combine_type, _elementwise(2, 3),
        whole="hke", saves=("parts", "weights"), resizes="s", plan_only=True,
    ),
    Operator(
        "attention_documents", ("q", "k", "v", "starts"), ("out", "lse"), "bsn,btm,btm,bs->bsn", _attention_type,
        _attention_flops, data=("starts",), auxiliary=("lse",), whole="t",
        saves=("q", "k", "v", "starts", "out", "lse"),
    ),
    Operator(
        "attention_block_documents", ("q", "kv", "starts"), ("out", "lse"), "bsn,cbtm,bs->bsn", _block_type,
        _block_flops, data=("starts",), auxiliary=("lse",), saves=("q", "kv", "starts", "out", "lse"),
        alone=True, wide=("q", "kv"),
    ),
    Operator(
        "attention_merge_documents", ("q", "kv", "starts", "partial", "partial_lse"), ("out", "lse"),
        "bsn,cbtm,bs,bsn,bhs->bsn", _block_type, _block_flops,
        data=("starts", "partial", "partial_lse"), auxiliary=("lse",),
        saves=("q", "kv", "starts", "out", "lse"), alone=True,
        accumulates=(("partial", "out"), ("partial_lse", "lse")), wide=("q", "kv"),
    ),
    Operator(
        "add_positions_documents", ("x", "table", "starts"), ("out",), "bsh,ph,bs->bsh", _same, _elementwise(1, 0),
        parameters=("table",), data=("starts",), whole="hp", saves=("starts",), weight_with_input=True,
        hands_on=("x",),
    ),
    Operator("swiglu", ("gate", "up"), ("out",), "bsf,bsf->bsf", _same, _elementwise(5, 10), saves=("gate", "up")),
    Operator("gelu", ("x",), ("out",), "bsf->bsf", _same, _elementwise(8, 12), saves=("x",)),
    Operator("relu", ("x",), ("out",), "bsf->bsf", _same, _elementwise(1, 1), saves=("out",)),
    Operator("add", ("a", "b"), ("out",), "bsh,bsh->bsh", _same, _elementwise(1, 0), hands_on=("a", "b")),
    Operator("dropout", ("x",), ("out",), "bsh->bsh", _same, _elementwise(2, 2), whole="h"),
    Operator(
        "vocab_max", ("logits",), ("peak",), "bsv->bs", _vocab_max_type, _elementwise(1, 0),
        data=("logits",), differentiable=False, partial="M",
    ),
    Operator(
        "vocab_sum", ("logits", "labels", "peak"), ("total", "target"), "bsv,bs,bs->bs,bs",
        _vocab_sum_type, _elementwise(3, 4),
        data=("labels", "peak"), saves=("logits", "labels", "peak"),
    ),
    Operator(
        "linear_vocab_max", ("x", "weight"), ("peak",), "bsk,vk->bs", _vocab_max_type, _passes(1, 0),
        parameters=("weight",), whole="k", weight_with_input=True, differentiable=False, partial="M",
    ),
    Operator(
        "linear_vocab_sum", ("x", "weight", "labels", "peak"), ("total", "target"), "bsk,vk,bs,bs->bs,bs",
        _vocab_sum_type, _passes(1, 3),
        parameters=("weight",), data=("labels", "peak"), whole="k", saves=("x", "weight", "labels", "peak"),
        weight_with_input=True,
    ),
    Operator(
        "token_loss", ("peak", "total", "target", "labels", "count"), ("loss",), "bs,bs,bs,bs,->",
        _loss_type, _elementwise(3, 3),
        data=("peak", "labels", "count"), saves=("total", "labels", "count"),
    ),
)  # fmt: skip


OPERATORS: dict[str, Operator] = {row.name: row for row in _ROWS}


class LayoutError(Exception):
    """An operator was given operands that do not lie as its rule demands."""


def result_state(row: Operator, factor: str, operands: tuple[str, ...]) -> tuple[str, ...]:
    """States of the main results on one factor, given the operands' states.

    Raises LayoutError naming operand, state found and state demanded: this is the rule that keeps partial values from
    being read as values and gradient sums from being forgotten.
    """
    left, right = row.labels
    sharded: set[str] = set()
    for labels, found in zip(left, operands, strict=True):
        if found.startswith("V"):
            sharded.add(labels[int(found[1:])])
    if sharded & set(row.whole):
        raise LayoutError(f"{row.name}: dim {sorted(sharded & set(row.whole))} may not be sharded over {factor}")
    if not sharded:
        return _unsharded(row, factor, operands)
    for name, labels, found in zip(row.operands, left, operands, strict=True):
        held = [d for d, label in enumerate(labels) if label in sharded]
        demanded = f"V{held[0]}" if held else ("I" if name in row.data else "R")
        if found != demanded and not (name in row.data and not held and found == "R"):
            raise LayoutError(f"{row.name}: operand {name} is {found} on {factor}, must be {demanded}")
    results = []
    for labels in right:
        held = [d for d, label in enumerate(labels) if label in sharded]
        results.append(f"V{held[0]}" if held else row.partial)
    return tuple(results)


def _unsharded(row: Operator, factor: str, operands: tuple[str, ...]) -> tuple[str, ...]:
    """No label sharded: everything `I`, or everything `R` (gradients stay partial and are summed elsewhere)."""
    kinds = {found for name, found in zip(row.operands, operands, strict=True) if name not in row.data}
    if any(found not in ("I", "R") for found in operands) or len(kinds) > 1:
        raise LayoutError(f"{row.name}: operands are {', '.join(operands)} on {factor}, must all be I or all R")
    common = kinds.pop() if kinds else "I"
    return tuple(common for _ in row.main_results)
