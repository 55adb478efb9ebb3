"""Codes T7xx: findings of the verifier.

T70x declarations, T71x registers, T72x matching, T73x progress, T74x gradients, T75x data, T76x layouts, T77x memory,
T78x recompute tiers.
A plan that `titan plan` wrote has none of them; they tell of a pass with an error, or of a plan made elsewhere.
"""

from __future__ import annotations

from titan.grammar.diagnostics import Code

_PASS = "A pass or another program that wrote the plan has an error; the finding names the instruction."
_AGAIN = "Make the plan again from its spec; if it comes again, report the spec with the finding."


def _row(code: str, title: str, rule: str, example: str, cause: str = _PASS, cure: str = _AGAIN) -> Code:
    return Code(code, title, rule, cause, example, cure)


ROWS: tuple[Code, ...] = (
    _row("T700", "proof not carried out", "A proof needs a plan whose names can be looked up.", "a plan without sizes"),
    _row(
        "T701",
        "undeclared name or wrong form",
        "Every register, buffer, unit and group is declared, and every instruction has the operands of its opcode.",
        "forward s9.l0 ... where there is no segment s9",
    ),
    _row(
        "T702",
        "programs do not fit the mesh",
        "There is one role per pipeline coordinate, with the orders train and evaluate, calling blocks that exist.",
        "order train calls F.c7(0), which the role does not have",
    ),
    _row(
        "T703",
        "bucket not declared",
        "Every parameter lies inside a bucket whose groups and homes exist.",
        "parameter layers.0.attn.q.weight of bucket l9",
    ),
    _row(
        "T704",
        "buffers do not fit the buckets",
        "A role has the parameter and gradient buffers of exactly the buckets at home there, in their sizes.",
        "bucket l0 is at home on stage 0, which has no g.l0",
    ),
    _row(
        "T710",
        "read without a value",
        "A register holds a value when it is read: it was written before and not freed since.",
        "backward s0.l0 reads h.l0:i, freed by the block before",
    ),
    _row("T711", "written twice", "A register is written once in a step.", "F.c0(2) is called twice"),
    _row("T712", "freed without a value", "A register is freed once, while it holds a value.", "free <- h.l0:i, twice"),
    _row(
        "T713",
        "register left alive",
        "At the end of a step no register is alive or pending.",
        "x.l1:3 is never freed: memory grows with every step",
    ),
    _row(
        "T714",
        "pending register used",
        "What an asynchronous instruction writes is pending; only `wait` turns it into a value.",
        "forward reads x.l4:i before `wait x.l4:i <- x.l4:i?`",
    ),
    _row(
        "T715",
        "borrowed register freed",
        "What a pending instruction reads is borrowed until its wait and may not be freed.",
        "free <- x.l4:i before the wait of its send",
    ),
    _row(
        "T716",
        "buffer used under an update",
        "A buffer that a pending instruction updates is neither read nor updated before its wait.",
        "optimizer_step reads g.l0 while its reduce_grad is not waited for",
    ),
    _row(
        "T720",
        "members of a group disagree",
        "All members of a group issue the same collectives in the same order: opcode, size, dtype, attributes, stream.",
        "stage 0 issues all_reduce op=sum where stage 1 issues op=max",
    ),
    _row(
        "T721",
        "not a member of the group",
        "Only ranks of a group issue its collectives.",
        "stage 1 issues an all_reduce over homes of stages 0 and 3",
    ),
    _row(
        "T722",
        "send without its receive",
        "On every channel the n-th send meets the n-th receive: the same register of the same micro-batch.",
        "stage 1 receives x.l4:1 where stage 0 sends x.l4:0",
    ),
    _row(
        "T723",
        "groups in opposite orders",
        "Ranks that share groups acquire them in one global order.",
        "stage 0 issues over `tied`, then `all`; stage 3 over `all`, then `tied`",
    ),
    _row(
        "T730",
        "deadlock",
        "The programs run to the end when every exchange waits for its partner.",
        "two stages that each wait for their send before they receive",
        "Sends and receives cross, or a wait comes before the exchange that its partner needs first.",
    ),
    _row(
        "T740",
        "segment not run once",
        "Every segment of every micro-batch runs forward once and backward once (or split in two).",
        "s3.l5 runs backward 0 times",
    ),
    _row(
        "T741",
        "wrong operand",
        "Backward and recompute read the registers that belong to the forward run of their segment.",
        "backward s1.l0 reads the input of layer 1",
    ),
    _row(
        "T742",
        "gradient contribution missing or doubled",
        "A gradient used as that of a value holds the contribution of each of its consumers once.",
        "d.h.l0 lacks what h.l0 gave to s5.l0",
    ),
    _row(
        "T743",
        "gradient sum missing, doubled or out of place",
        "After its last contribution a gradient bucket is summed once over exactly the factors on which it is partial.",
        "g.l0 is never summed over data",
    ),
    _row(
        "T744",
        "norm wrong",
        "The gradient norm counts every gradient once, after its sums, and is summed over all ranks.",
        "grad_norm reads g.l0 twice",
    ),
    _row(
        "T745",
        "update wrong",
        "Every bucket is updated once in a step and cleared once, after its sums and its norm.",
        "bucket l0 is updated 2 times in a step",
    ),
    _row(
        "T746",
        "parameters not gathered",
        "Parameters whose state is sharded are gathered once after their update, over the shard group.",
        "p.l0 is gathered 0 times",
    ),
    _row(
        "T747",
        "loss wrong",
        "Each micro-batch adds to the loss once; the loss is summed over the ranks that hold parts, cleared and told.",
        "the loss is summed over tensor, it is partial over data",
    ),
    _row(
        "T748",
        "state not stored",
        "Optimizer state that lives on the host goes back there once, after its update.",
        "o.l0 is stored 0 times after its update",
    ),
    _row(
        "T750",
        "data not read once",
        "Over all ranks and micro-batches every token of the global batch is read exactly once.",
        "start=0 on every rank of a context group",
    ),
    _row(
        "T751",
        "tokens and labels mixed up",
        "An embedding reads tokens, a loss reads labels.",
        "load_batch tokens:i what=labels",
    ),
    _row(
        "T752",
        "count of labels wrong",
        "The loss is divided by the number of labels of the whole step, summed over data and context.",
        "count is the rank's own count",
    ),
    _row(
        "T760",
        "segment body does not type",
        "Shapes, dtypes and layouts in a segment follow from its operators; no operator reads a partial value.",
        "rms_norm reads attn_out, which is P on tensor",
    ),
    _row(
        "T761",
        "operand does not fit its segment",
        "A compute instruction has the operands of its segment: number, types, frame, buckets, one micro-batch.",
        "forward s1.l0 reads h.l0, which is f32[1,8,8], as attn_in of f32[1,4,8]",
    ),
    _row(
        "T762",
        "illegal conversion",
        "A collective turns the layout of its source into that of its target as the table of conversions says.",
        "all_gather over tensor of a value that is partial on tensor",
    ),
    _row(
        "T763",
        "parameter and bucket disagree",
        "A parameter is stored as it is read, and its bucket sums exactly the factors where its gradient is partial.",
        "final_norm.weight is partial on tensor, its bucket is summed over data only",
    ),
    _row(
        "T764",
        "gradient of the wrong type",
        "A gradient has the dtype and shape of its value and the dual of its layout.",
        "d.x is P on tensor while x is P on tensor",
    ),
    _row(
        "T765",
        "tier that cannot be rebuilt",
        "What a recompute tier does not store of a segment, its rebuild makes of what is stored.",
        "tier selective drops inner and stores neither gate nor up",
    ),
    _row(
        "T770",
        "too much memory",
        "Buffers, live registers and workspace of every role stay below the plan's memory limit.",
        "the role needs 81 GB, the limit is 74 GB",
        "The plan was made for devices with more memory.",
        "Plan again with more recomputation, sharding or devices.",
    ),
    _row(
        "T771",
        "too much host memory",
        "What a rank keeps in host memory stays below its share of the node's.",
        "the role needs 300 GB of host memory, a rank may take 256 GB",
        "The plan was made for nodes with more memory.",
        "Offload less, or give the cluster's `host_memory` as it is.",
    ),
    _row(
        "T780",
        "tier that is not chosen",
        "An instruction depends on a recompute tier that a watermark has chosen before and nothing has freed.",
        "recompute s0.l3 ... frame=tier.l3:i when=full in a block before the watermark",
    ),
    _row(
        "T781",
        "tier that concerns other ranks",
        "Each rank chooses tiers for itself, so no communication depends on them.",
        "all_gather ... frame=tier.l3:i when=full",
    ),
    _row(
        "T782",
        "frames that depend on each other",
        "What several frames touch, they touch in the same way in all tiers.",
        "tier full of layer 3 frees x.l4:i, which layer 4 reads",
    ),
    _row(
        "T783",
        "tier that stores more",
        "A lower tier stores a part of what the tier before stores, so that a frame can be demoted at any time.",
        "tier full stores h.l3:i, tier selective does not",
    ),
)
