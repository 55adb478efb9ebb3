"""A plan written by hand: two stages, two data ranks, one linear layer each; and one as large as a 405B model's."""

from __future__ import annotations

from titan.compiler.plan.instruction import Instruction as I
from titan.compiler.plan.mesh import Group, Mesh
from titan.compiler.plan.operators import TensorType
from titan.compiler.plan.program import Block, BlockCall, Bucket, Buffer, Parameter, Plan, Role
from titan.compiler.plan.segment import Call, Segment

ACTIVATION = TensorType("f32", (1, 4, 8), (("data", "V0"),))
WEIGHT = TensorType("f32", (8, 8), (("data", "R"),))


def two_stages(micro_batches: int = 3) -> Plan:
    """Stage 0 and 1, each `y = relu(x w)`, data parallel over two ranks; no embedding, no loss."""
    layer = Segment(
        "s0",
        ("x",),
        (".w.weight",),
        ("y",),
        (Call("linear", ("h",), ("x", ".w.weight")), Call("relu", ("y",), ("h",), (("note", "a b#c"),))),
        (("x", ACTIVATION), (".w.weight", WEIGHT), ("h", ACTIVATION), ("y", ACTIVATION)),
    )
    first = Role(
        0,
        ((0,),),
        (Buffer("p.l0", "parameters", "f32", 64), Buffer("g.l0", "gradients", "f32", 64)),
        (
            Block("zero", (), (I("zero_grad", updates=("g.l0",)),)),
            Block(
                "F.c0",
                ("i",),
                (
                    I(
                        "load_batch",
                        ("x.l0:i",),
                        attributes=(("what", "tokens"), ("micro_batch", "i"), ("start", "@context*4")),
                    ),
                    I("forward", ("y.l0:i",), ("x.l0:i", "p.l0"), unit="s0.l0"),
                    I("send", ("t.y.l0:i?",), ("y.l0:i",), group="pipeline", stream="act", attributes=(("peer", 1),)),
                    I("wait", (), ("t.y.l0:i?",)),
                    I("free", (), ("x.l0:i", "y.l0:i")),
                ),
            ),
        ),
        (("train", (BlockCall("zero"), *(BlockCall("F.c0", (i,)) for i in range(micro_batches)))), ("evaluate", ())),
    )
    second = Role(
        1,
        ((1,),),
        (),
        (
            Block(
                "F.c0",
                ("i",),
                (
                    I("recv", ("y.l0:i?",), group="pipeline", stream="act", attributes=(("peer", -1),)),
                    I("wait", ("y.l0:i",), ("y.l0:i?",)),
                    I("free", (), ("y.l0:i",)),
                ),
            ),
        ),
        (("train", tuple(BlockCall("F.c0", (i,)) for i in range(micro_batches))),),
    )
    return Plan(
        1,
        (("train.sequence", "4"), ("model", '{"name": "a # b", "eps": 1e-05}')),
        Mesh((("region", 1), ("pipeline", 2), ("data", 2), ("context", 1), ("tensor", 1))),
        (Group("all", "pipeline*data*context*tensor"), Group("tied", "pipeline", (0, 1))),
        (("x", ACTIVATION), ("y", ACTIVATION)),
        (
            Bucket("l0", 64, "f32", ("context",), "data", "data", ("o", "g"), "tensor", (0, 1)),
            Bucket("l1", 64, "f64", (), "", "", (), "", ()),
        ),
        (Parameter("layers.0.w.weight", (8, 8), 7, WEIGHT, "l0", 0, True, "normal:0.02"),),
        (layer,),
        (first, second),
    )


def one_f_one_b(stage: int, stages: int, micro_batches: int) -> tuple[BlockCall, ...]:
    """Order of the one-forward-one-backward schedule on one stage."""
    warm = min(stages - 1 - stage, micro_batches)
    calls = [BlockCall("F.c0", (i,)) for i in range(warm)]
    for i in range(micro_batches - warm):
        calls += [BlockCall("F.c0", (warm + i,)), BlockCall("B.c0", (i,))]
    return tuple(calls + [BlockCall("B.c0", (i,)) for i in range(micro_batches - warm, micro_batches)])
