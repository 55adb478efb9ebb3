"""What the software of a published run did otherwise than a plan of ours: attention kernel, recomputation, separate
kernels where a plan has one, width and time of gradient sums. Read from the row's columns, so that rows of any source
that say the same are priced alike.

    generation       told by
    scores           "mixed" precision on A100 without a word of a fused attention kernel: Megatron-LM and DeepSpeed
                     before FlashAttention, attention scores are tensors
    engine           "distributed optimizer" or "Megatron-FSDP": Megatron-Core with Transformer Engine
    torch            all others: PyTorch, its kernels separate unless the row says `torch.compile`
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.benchmarks.published_runs.rows import Row

# Figures of software, shared by all rows of its kind; those of machines stand in the clusters of the library.
FIGURES: dict[str, float] = {
    "flash1": 0.779,  # rate of FlashAttention 1, and of Triton's, relative to FlashAttention 2
    "flash2_hopper": 0.405,  # rate of FlashAttention 2 on H100 relative to attention with its asynchronous products
    "engine_hidden": 0.9,  # share of tensor collectives that Transformer Engine runs under matrix products
    # the same of sums of input gradients that products for weight gradients run beside: one layer of 22B takes 11.9 ms
    # backward, 11.8 with sequence parallelism (Korthikanti et al. 2022, table 4), 13.0 if all of a sum were exposed
    "summed_under_weights": 0.6,
    "torch_hidden": 0.3,  # the same of PyTorch's asynchronous tensor parallelism
    "unstated_adapters": 0.4,  # adapters per device where a source does not name its network
    "deepspeed": 3.33,  # time of DeepSpeed's collectives of gradients and parameters as a multiple of NCCL's
    "step_seconds": 0.0137,  # a step outside its instructions: data, bookkeeping, unequal ranks
    "fragments": 0.15,  # of tensors, what PyTorch's allocator may lose: an upper bound, from runs out of memory
    "dispatched": 0.9,  # share of its adapter that DeepEP reaches: 43 to 47 of 50 GB/s in its published measurements
    "expert_passes": 3,  # reads and writes of routed tokens as a multiple of once in and once out
}

# Bytes that separate kernels read and write, relative to a fused one; forward, backward. Counted from the operations
# of the usual PyTorch code, in 32 bits between the casts where it upcasts:
SEPARATE = {
    "rms_norm": (9.0, 12.0),  # cast, square, mean, scale, cast, gain: 36 bytes per element where one kernel moves 4
    "rope": (4.5, 4.5),  # negate, concatenate, two products, sum: 18 bytes where one kernel moves 4
    "swiglu": (1.7, 1.8),  # activation, product: 10 bytes where one kernel moves 6
    "vocab_sum": (12.0, 5.0),  # cast, shift, exponential, sum, division in 32 bits: 24 bytes where one kernel moves 2
}
# Bytes of each logit at the start of backward where the loss is a chain of PyTorch's kernels: log-softmax, its gradient
# and that of the logits in 32 bits; where they are not let go the logits themselves (Scaling hands them on as a layer's
# output) and widened (it counts right answers in them; fitted on its runs out of memory); a fourth number in 32 bits in
# the loss over tensor ranks (torch.distributed.tensor.parallel, `loss_parallel`: exponential beside the sum)
LOSS_BYTES = {"whole": 12, "kept": 18, "parallel": 16}
PLAN_LOSS = 4  # of these a plan has the logits and their gradient in 16 bits
# Bytes that separate kernels of norm and activation keep of each number that they make: Llama's norm its input widened
# and its normalised form, the activation its result before the product with the other half
KEPT_BESIDES = {"rms_norm": 6.0, "swiglu": 2.0}
# Bytes of each attention score at the most while its layer runs backward: fused softmax and dropout keep 5 and have two
# gradients; separate ones keep it widened after the softmax and as a factor, with two widened gradients
SCORE_BYTES = {"fused": 9, "separate": 14}
SCORES_KEPT = 5  # of these where the layer is not run again
DEEPSPEED_BUCKET = 1_000_000_000  # bytes: DeepSpeed's reduce_bucket_size and allgather_bucket_size, 5e8 numbers each
RESERVED = 0.04  # more that PyTorch's allocator reserves than tensors take (the runs that state both: 3 to 7%)
EIGHT_BIT_KEPT = 0.85  # of a layer's activations where inputs of products are kept in 8 bits: 32 of 37 bytes in a dense
# layer (residual and norm 8, attention 8.5, feed-forward 21 bytes per hidden dim), less with experts
SUM_BYTES = 2.0  # read of each weight's gradient by a kernel of its own that adds it to the sum, beside the sum itself
FUSED_NORM = ("vocab_sum", "rope", "swiglu")


@dataclass(frozen=True, slots=True)
class Again:
    """Shares of a layer's forward that are run again in backward: matrix products, attention, the rest, collectives."""

    products: float = 0.0
    attention: float = 0.0
    rest: float = 0.0
    collectives: float = 0.0
    dropped: float = 0.0  # share of what a layer keeps until backward that it does not keep

    @property
    def any(self) -> bool:
        return bool(self.products or self.attention or self.rest)


@dataclass(frozen=True, slots=True)
class Software:
    """attention       kernel: scores, flash1, flash2 or engine
    softmax           of formed scores: fused or separate
    separate          operators whose kernels are separate
    keeps_besides     these keep more than one kernel would
    again             what is recomputed
    gradient_bytes    width of the gradients that are summed
    narrow_gradients  they are also kept in that width
    second_gradients  gradients of a micro-batch are kept in 16 bits beside their sum in 32 (DeepSpeed's BF16_Optimizer)
    widened_shard     a step widens the gradients of the shard that it updates to 32 bits, in flat tensors that find no
                      place in what activations have left
    narrow_state      optimizer state in the width of the parameters, without a copy of these in 32 bits
    step_buffers      bytes of the buffers that gradients and parameters are moved through
    hidden            figure of the share of tensor collectives that runs under matrix products; empty: none
    hidden_sums       sums of input gradients over tensor ranks run beside the products for weight gradients
    scattered         tensor ranks send their share of an activation to the next stage, which gathers it there
    late_sum          gradients are summed after the last backward
    separate_sums     gradients of a micro-batch are formed first and then added to the sum
    deepspeed         collectives of gradients and parameters are DeepSpeed's
    whole_sum         gradients are summed on every rank though each updates only its shard: by DeepSpeed under
                      pipelines, and by its ZeRO-3 of 2021, which reduces slice by slice
    hidden_gather     updated parameters are gathered under the next forward
    fused_inputs      products with the same input are one product
    shard_kept        of an activation that tensor ranks gather for a product, backward keeps the own shard only
    weighted_experts  experts' activations are weighted before their last product, whose result is not kept
    eight_bit         inputs of products are kept in 8 bits
    loss              how it is formed: fused, or a key of LOSS_BYTES
    gathered_loss     of logits that tensor ranks gather first
    sent_once         experts that a token is routed to, where it goes once to a node (within one: to a rank) that has
                      several of them; 0: it is sent to each expert
    most_nodes        nodes that the routing of a token is limited to; 0: it is not
    unstated_network  the source does not say how fast nodes are joined
    """

    attention: str
    softmax: str = "fused"
    separate: tuple[str, ...] = ()
    keeps_besides: bool = False
    again: Again = Again()
    gradient_bytes: int = 4
    narrow_gradients: bool = False
    second_gradients: bool = False
    widened_shard: bool = False
    narrow_state: bool = False
    step_buffers: int = 0
    hidden: str = ""
    hidden_sums: bool = False
    scattered: bool = False
    late_sum: bool = False
    separate_sums: bool = False
    deepspeed: bool = False
    whole_sum: bool = False
    hidden_gather: bool = False
    fused_inputs: bool = False
    shard_kept: bool = False
    weighted_experts: bool = False
    eight_bit: bool = False
    loss: str = "fused"
    gathered_loss: bool = False
    sent_once: int = 0
    most_nodes: int = 0
    unstated_network: bool = False

    @property
    def kept(self) -> float:
        """Bytes of a layer's activations as a multiple of a plan's."""
        return EIGHT_BIT_KEPT if self.eight_bit else 1.0


def software(row: Row) -> Software:
    """The traits of a row's software."""
    kind = generation(row)
    deepspeed, pipelined = is_deepspeed(row), row.number("pp", 1) > 1
    narrow = _narrow(row, kind)
    old = kind == "scores"
    parallel = row.text("sequence_parallel") == "true"
    return Software(
        attention=_attention(row, kind),
        softmax="separate" if "attention kernel: torch" in row.text("notes") else "fused",
        separate=_separate(row, kind),
        keeps_besides=is_scaling(row),
        again=_again(row, kind),
        gradient_bytes=2 if narrow else 4,
        narrow_gradients=narrow,
        second_gradients=is_deepspeed(row) and "fp32 grad" in row.text("precision") + row.text("sharding"),
        widened_shard=is_deepspeed(row) and narrow,
        narrow_state=_narrow_state(row),
        step_buffers=2 * DEEPSPEED_BUCKET if is_deepspeed(row) and not is_scaling(row) else 0,
        hidden=_hidden(row, kind),
        hidden_sums=old and "sequence parallel" in row.text("notes") + " sequence parallel" * parallel,
        scattered=old and not deepspeed,
        late_sum=old or deepspeed,
        separate_sums=deepspeed,
        deepspeed=deepspeed,
        whole_sum=deepspeed and (pipelined or row.text("zero_stage") == "3"),
        hidden_gather=kind == "engine",
        fused_inputs=kind in ("engine", "scores") or row.text("gated_mlp") == "0",
        shard_kept=kind in ("engine", "scores"),
        weighted_experts=kind == "engine",
        eight_bit=row.eight_bit and kind == "engine",
        loss=_loss(row, kind),
        gathered_loss=is_scaling(row),
        sent_once=row.number("top_k") if _dispatches_once(row) else 0,
        most_nodes=4 if row.model == "deepseek-v3" else 0,  # its report, section 2.1.2
        unstated_network=_unstated(row),
    )


def is_deepspeed(row: Row) -> bool:
    """Whether DeepSpeed ran it: it is named, or its ZeRO is."""
    return row.text("sharding").startswith("ZeRO") or row.model.startswith("mt-nlg")


def is_scaling(row: Row) -> bool:
    """Whether Aleph Alpha's Scaling ran it, whose measurements name the attention kernel: tensor ranks gather logits
    (TransformerLMHead) and form the loss and the accuracy of all of them (CrossEntropyLoss)."""
    return row.text("notes").startswith("attention kernel:")


def generation(row: Row) -> str:
    sharding = row.text("sharding")
    if "distributed optimizer" in sharding or sharding == "Megatron-FSDP" or row.text("gpu")[:2] in ("B2", "B3", "GB"):
        return "engine"
    if "-mixed" in row.text("precision") and row.text("gpu").startswith("A100"):
        return "scores"
    return "torch"


def _attention(row: Row, kind: str) -> str:
    kernel = re.search(r"attention kernel: ([^;]*)", row.text("notes"))
    named = kernel[1] if kernel else ""
    if named.startswith(("torch", "fused")) or kind == "scores":
        return "scores"
    if "flash_attentionv1" in named or "FSDP mixed precision mode" in row.text("notes"):
        return "flash1"
    return "engine" if kind == "engine" or "kernels TE" in row.text("notes") else "flash2"


def _separate(row: Row, kind: str) -> tuple[str, ...]:
    notes = row.text("notes")
    if kind == "engine" or "torch.compile" in notes or "kernels TE" in notes:
        return ()
    if "FSDP mixed precision mode" in notes:  # MPT
        return ("vocab_sum",)
    return FUSED_NORM if "RMS kernel" in notes else tuple(SEPARATE)


def _loss(row: Row, kind: str) -> str:
    """MPT's loss and Megatron's are fused; what NeMo AutoModel's recipes have is not widened; torchtitan compiles its
    loss since its second table of measurements (float8 with `float8 all-gather`)."""
    notes = row.text("notes")
    if kind != "torch" or row.text("gated_mlp") == "0" or "kernels TE" in notes or "100th iteration" in notes:
        return "fused"
    if is_scaling(row):
        return "kept"
    return "parallel" if row.number("tp", 1) > 1 else "whole"


def _dispatches_once(row: Row) -> bool:
    """DeepEP and HybridEP, and what DeepSeek trained with, send a token once to a node and spread it there."""
    return bool(re.search("deepep|hybridep|node-limited", row.text("notes"), re.IGNORECASE))


def _narrow_state(row: Row) -> bool:
    """NeMo AutoModel's recipes give PyTorch's Adam parameters in bf16."""
    return "kernels TE" in row.text("notes")


def _hidden(row: Row, kind: str) -> str:
    if kind == "engine" and row.text("sequence_parallel") == "true":
        return "engine_hidden"
    return "torch_hidden" if "AsyncTP" in row.text("notes") else ""


def _again(row: Row, kind: str) -> Again:
    recompute, detail = row.text("recompute"), row.text("recompute_detail").lower()
    if recompute == "full":
        return Again(1.0, 1.0, 1.0, 1.0, 1.0)
    if recompute != "selective":
        return Again()
    if "core attention" in detail or (kind == "engine" and not detail):
        return Again(attention=1.0)
    if "mla_up_proj" in detail or "norm" in detail or detail == "mlp":
        return Again(products=0.5 if "mlp" in detail else 0.1, rest=0.5, dropped=0.3)
    if "op" in detail or "config" in detail or (not detail and "FSDP2" in row.text("sharding")):
        # every second matrix product, and what lies between; kept are the results of the query, value, gate and down
        # products and of attention: 3.3 + 3.5 of 16 (+ input) widths of Llama 3's layers
        return Again(0.5, 0.0, 1.0, 0.5, 0.58)
    return Again(0.5, 0.5, 0.5, 0.5, 0.5)  # every second layer


def _narrow(row: Row, kind: str) -> bool:
    """Whether gradients are summed and kept in 16 bits: by fp16 and DeepSpeed where no word says 32, in PyTorch's
    first FSDP but for its default mode, in NeMo's recipes (`grad_reduce_in_fp32 = False`), and where parameters have no
    copy in 32 bits."""
    notes, precision, sharding = row.text("notes"), row.text("precision"), row.text("sharding")
    if "fp32 grad" in precision or "fp32 grad" in sharding or "MP mode DEFAULT" in notes:
        return False
    first = sharding.startswith(("FSDP ", "HSDP")) and "XLA" not in sharding
    recipe = kind == "engine" and (notes.startswith("recipe") or row.eight_bit)
    return precision.startswith("fp16") or is_deepspeed(row) or first or recipe or _narrow_state(row)


def _unstated(row: Row) -> bool:
    text = row.text("inter_node")
    return row.number("num_gpus") > 8 and not re.search(r"\d ?[GT](b|\b)|[HN]DR|DGX", text, re.IGNORECASE)
