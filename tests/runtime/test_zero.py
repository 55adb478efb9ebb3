"""ZeRO: what ranks hold and send, to the byte; what is alive at once; that its ways give the same numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from titan.compiler.cost.simulate import simulate
from titan.compiler.lower import lower
from titan.compiler.plan.instruction import Instruction
from titan.compiler.plan.operators import DTYPE_BYTES
from titan.compiler.plan.program import Plan
from titan.compiler.plan.sizes import Sizes
from titan.compiler.spec.resolve import resolve
from titan.compiler.spec.schema import Spec
from titan.compiler.strategy import Strategy
from titan.compiler.verify.proofs import verify
from titan.grammar.parser import parse
from titan.runtime.data import SyntheticSource
from titan.runtime.interpreter import Executable
from titan.runtime.loopback import collect_parameters, run_loopback
from titan.runtime.state import allocate

from tests.runtime.alone import EchoTransport, Sent

torch.set_num_threads(1)
LAYERS, MICRO_BATCHES = 3, 2
STAGES = {"one_f_one_b": (2, 1), "dualpipe": (2, 1), "interleaved": (1, 1, 1, 0), "zero_bubble_v": (1, 1, 1, 0)}
LARGE = """import models.llama
import clusters.nvidia
model = llama.llama3_70b
cluster = nvidia.dgx_h100 with { nodes = 64 }
train {
    sequence = 8Ki, global_batch = 128, precision = bf16, data = synthetic(128256)
    optimizer = adamw { learning_rate = 1e-4 }
}
"""
WAYS: dict[str, dict[str, Any]] = {
    "0": {"zero": 0},
    "1": {"zero": 1},
    "2": {"zero": 2},
    "3": {"zero": 3},
    "3 gathered once": {"zero": 3, "gather": "once"},
    "3 reduced once": {"zero": 3, "reduce": "once"},
    "3 held": {"zero": 3, "gather": "once", "reduce": "once"},
}


def spec_of(precision: str = "bf16", batch: int = 8, vocab: int = 64, hidden: int = 16, tied: bool = False) -> Spec:
    """Sizes that four ranks divide, so that no bucket has padding (unless the vocabulary is odd)."""
    return resolve(
        parse(
            f"""import clusters.local
model = model {{
    vocab = {vocab}, hidden = {hidden}, layers = {LAYERS} * dense {{ ffn = 32 }}, max_positions = 16, norm = rms_norm
    attention = gqa {{ heads = 4, kv_heads = 2, head_dim = 4 }}, positions = rope, rope = {{ theta = 10000 }}
    tied = {str(tied).lower()}, init_std = 0.2
}}
cluster = local.cpu with {{ devices_per_node = 8 }}
train {{
    sequence = 16, global_batch = {batch}, precision = {precision}, steps = 4, clip = 0.1
    optimizer = adamw {{ learning_rate = 0.01 }}, data = synthetic({vocab})
}}
""",
            "zero.titan",
        ),
        Path(),
    )


def plan_of(spec: Spec, data: int, **choices: Any) -> Plan:
    stages = choices.pop("stages", (LAYERS,))
    micro_batches = spec.train.global_batch // data
    return lower(spec, Strategy(data=data, micro_batches=micro_batches, stages=stages, **choices))


def elements(plan: Plan, *words: str) -> int:
    """Elements of all buckets, or of those whose name begins with one of the words."""
    return sum(b.elements for b in plan.buckets if not words or b.name.startswith(words))


def alone(plan: Plan, spec: Spec, rank: int = 0) -> list[Sent]:
    """What one rank communicates in a step about parameters and gradients."""
    transport = EchoTransport(rank)
    executable = Executable(plan, rank, transport, allocate(plan, rank), SyntheticSource(spec.model.vocab, seed=1))
    for handle in executable.run(0):
        raise AssertionError(f"nothing is waited for here, but {handle}")
    return [s for s in transport.sent if s.stream.startswith("data.")]


def instructions(plan: Plan, *opcodes: str) -> Iterator[Instruction]:
    return (i for *_, i in plan.roles[0].instructions() if i.opcode in opcodes)


# --- bytes


@pytest.mark.parametrize(("precision", "whole", "held"), [
    ("bf16", {"p": 2, "g": 4, "o": 12}, (18, 6 + 12 / 4, 2 + 16 / 4, 18 / 4)),
    ("fp32", {"p": 4, "g": 4, "o": 8}, (16, 8 + 8 / 4, 4 + 12 / 4, 16 / 4)),
])  # fmt: skip
def test_bytes_per_parameter_are_those_of_the_table(
    precision: str, whole: dict[str, int], held: tuple[float, ...]
) -> None:
    """bf16 parameters, float32 gradients, masters and moments: 18; 6 + 12/d; 2 + 16/d; 18/d. float32: 16; ...; 16/d."""
    spec = spec_of(precision)
    for zero, expected in enumerate(held):
        plan = plan_of(spec, 4, zero=zero)
        number = elements(plan)
        buffers = [b for b in plan.roles[0].buffers if b.kind != "metric"]
        assert sum(b.bytes for b in buffers) == expected * number
        for rank in (0, 3):
            state = allocate(plan, rank)
            storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in state.buffers.values()}
            assert sum(storages.values()) == expected * number + state.buffers["b.loss"].nbytes
            for bucket in plan.buckets:
                for kind, size in whole.items():
                    share = 4 if kind in bucket.sharded else 1
                    assert state.buffers[f"{kind}.{bucket.name}"].nbytes == bucket.elements * size // share


def test_shards_inside_copies_of_them() -> None:
    """HSDP: shards of two ranks, two copies of each."""
    plan = plan_of(spec_of("bf16"), 4, zero=3, shard=2)
    number = elements(plan)
    assert sum(b.bytes for b in plan.roles[0].buffers if b.kind != "metric") == 18 * number // 2
    assert {b.shards for b in plan.buckets} == {"data.shard"} and {b.uncounted for b in plan.buckets} == {
        "data.replicate"
    }


def volumes(way: str, m: int) -> tuple[int, int, int]:
    """Passes of layers and head, of the embedding (whose backward reads no table), and of gradients, in a step."""
    gathered = {"3": (2 * m, m), "3 reduced once": (2 * m, m)}.get(way, (0, 0) if way == "0" else (1, 1))
    reduced = {"0": 2, "2": m, "3": m, "3 gathered once": m}.get(way, 1)
    return (*gathered, reduced)


@pytest.mark.parametrize("way", WAYS)
def test_bytes_on_the_wire_are_those_of_the_formulas(way: str) -> None:
    """Per rank and step in units of (d - 1)/d: 2 of the gradients; 1 + 1; 1 + m; 2m + m; m or 1 where once a step."""
    spec, d = spec_of("bf16"), 4
    plan = plan_of(spec, d, **WAYS[way])
    gathers, of_embedding, reductions = volumes(way, MICRO_BATCHES)
    layers, embedding = elements(plan, "l", "head"), elements(plan, "embed")
    wire = 2 * (gathers * layers + of_embedding * embedding) + 4 * reductions * (layers + embedding)
    expected = wire * (d - 1) // d
    sizes = Sizes(plan)
    predicted = [(i.stream, sizes.traffic(i)) for i in instructions(plan, "unshard", "reduce_grad")]
    sent = alone(plan, spec)
    assert sum(t.wire for _, t in predicted) == expected == sum(s.wire for s in sent)
    assert [(stream, t.payload, t.wire) for stream, t in predicted] == [(s.stream, s.whole, s.wire) for s in sent]


def test_copies_of_shards_meet_once_a_step() -> None:
    """HSDP of 2 x 2 with two micro-batches: shards are accumulated first, then summed between copies: 2 (r - 1)/r of
    the shard, once for each bucket."""
    spec = spec_of("bf16")
    for way in ({"zero": 3}, {"zero": 2}, {"zero": 1}, {"zero": 3, "reduce": "once"}):
        plan = plan_of(spec, 4, shard=2, **way)
        between = [i for i in instructions(plan, "reduce_grad") if i.group == "data.replicate"]
        assert Counter(i.updates[0] for i in between) == {f"g.{b.name}": 1 for b in plan.buckets}
        inside = [i for i in instructions(plan, "reduce_grad") if i.group == "data.shard"]
        each = MICRO_BATCHES if "g" in plan.buckets[0].sharded else 1
        assert Counter(i.updates[0] for i in inside) == {f"g.{b.name}": each for b in plan.buckets}
        sizes = Sizes(plan)
        assert sum(sizes.traffic(i).wire for i in between) == 4 * elements(plan) // 2 * 2 * 1 // 2


def test_gathering_once_sends_the_twelfth_of_gathering_each_time() -> None:
    """With 8 micro-batches a layer is gathered 16 times, or once; bytes 24 against 2."""
    spec = spec_of("bf16", batch=16)
    each, once = plan_of(spec, 2, zero=3), plan_of(spec, 2, zero=3, gather="once", reduce="once")
    counts = [Counter(i.reads[0] for i in instructions(p, "unshard"))["p.l1"] for p in (each, once)]
    assert counts == [16, 1]
    volume = []
    for plan in (each, once):
        found = [i for i in instructions(plan, "unshard", "reduce_grad") if (*i.reads, *i.updates)[-1].endswith(".l1")]
        sizes = Sizes(plan)
        volume.append(sum(sizes.traffic(i).payload // (2 if i.opcode == "unshard" else 4) for i in found))
    assert volume[0] == 12 * volume[1]


# --- what is alive at once


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_as_many_layers_are_whole_at_once_as_are_gathered_ahead(prefetch: int) -> None:
    plan = plan_of(spec_of("bf16"), 4, zero=3, prefetch=prefetch)
    live: set[str] = set()
    most = 0
    for *_, i in plan.roles[0].instructions():
        live.update(w.rstrip("?") for w in i.writes if w.removeprefix("r.").startswith("w."))
        most = max(most, sum(".l" in name for name in live))
        live -= set(i.reads) if i.opcode == "free" else set()
    assert most == 1 + prefetch and not live


def test_a_layer_is_gathered_before_the_compute_of_the_layer_before() -> None:
    """Issued, then another layer's segments, then the wait: in forward and in backward."""
    plan = plan_of(spec_of("bf16"), 4, zero=3, prefetch=1)
    for name, register, other in (("F.c0.to_B0", "w.l1:i", ".l0"), ("B.c0", "r.w.l1:i", ".l2")):
        block = plan.roles[0].block_table[name].instructions
        issued = next(n for n, i in enumerate(block) if i.writes == (register + "?",))
        waited = next(n for n, i in enumerate(block) if i.writes == (register,))
        between = [i.unit for i in block[issued:waited] if i.unit]
        assert between and all(unit.endswith(other) for unit in between)


@pytest.mark.parametrize("schedule", ["one_f_one_b", "interleaved", "zero_bubble_v", "dualpipe"])
def test_what_is_gathered_once_is_on_its_way_before_anything_is_computed(schedule: str) -> None:
    """In the order of first use, each waited for where it is used first: the last of them under the first forwards."""
    plan = plan_of(spec_of("bf16"), 2, pipeline=2, schedule=schedule, stages=STAGES[schedule], **WAYS["3 held"])
    assert [f for proof in verify(plan).values() for f in proof.findings] == []
    for role in plan.roles:
        for order in ("train", "evaluate"):
            program = [i for *_, i in role.instructions(order)]
            issues = [n for n, i in enumerate(program) if i.opcode == "unshard"]
            waits = {i.writes[0]: n for n, i in enumerate(program) if i.opcode == "wait" and i.writes}
            first = next(n for n, i in enumerate(program) if i.unit)
            assert len(issues) == sum(role.pipeline in b.homes for b in plan.buckets) and max(issues) < first
            ends = [waits[program[n].writes[0].rstrip("?")] for n in issues]
            assert ends == sorted(ends) and ends[-1] > first


def test_gathering_at_the_beginning_of_a_step_hides_what_waits_at_its_end() -> None:
    """Llama 3 70B in 8 stages: what ZeRO-1 waits for behind its updates comes under the first micro-batch. The first
    stage has the most to gather: ten layers and the embedding, over a link of 400 Gb/s for each rank."""
    spec = resolve(parse(LARGE, "large.titan"), Path())
    strategy = Strategy(
        pipeline=8, data=8, tensor=8, sequence_parallel=True, micro_batches=16, stages=(10,) * 8, zero=1
    )
    behind, before = (simulate(lower(spec, strategy.but(**WAYS[way]))) for way in ("1", "3 held"))
    gather = 2 * (10 * 855.6e6 + 128256 * 8192) / 8 * 7 / 8 / 50e9  # seconds
    assert 0.8 * gather < behind.seconds - before.seconds < gather
    assert before.exposed_comm_fraction < behind.exposed_comm_fraction


@pytest.mark.parametrize(("zero", "schedule"), [(0, "one_f_one_b"), (1, "zero_bubble_h1"), (1, "one_f_one_b")])
def test_gradients_are_summed_once_after_the_last_contribution_and_under_the_backward(zero: int, schedule: str) -> None:
    """Two stages, two data ranks: each bucket once, after its last B or W (never an I); compute follows all but one."""
    plan = plan_of(spec_of("bf16"), 2, zero=zero, pipeline=2, schedule=schedule, stages=(2, 1))
    for role in plan.roles:
        program = [i for *_, i in role.instructions()]
        mine = [b.name for b in plan.buckets if role.pipeline in b.homes]
        followed = 0
        for bucket in mine:
            issues = [n for n, i in enumerate(program) if i.opcode == "reduce_grad" and f"g.{bucket}" in i.updates]
            added = [n for n, i in enumerate(program) if i.unit and f"g.{bucket}" in i.updates]
            assert len(issues) == 1 and issues[0] > max(added)
            assert program[max(added)].opcode == ("backward_weight" if schedule != "one_f_one_b" else "backward")
            followed += any(i.unit for i in program[issues[0] :])
        assert followed == len(mine) - 1


# --- numbers


def trained(plan: Plan, spec: Spec, steps: int = 3) -> tuple[tuple[float, ...], dict[str, torch.Tensor]]:
    found = run_loopback(plan, steps, SyntheticSource(spec.model.vocab, seed=1, ignore_fraction=0.2))
    return found.losses, collect_parameters(found.states, plan)


@pytest.mark.parametrize("way", [w for w in WAYS if w != "0"])
def test_every_way_gives_the_bits_of_none(way: str) -> None:
    """bf16 with masters, clipping, tied weights, one micro-batch: sums are the same in every way, so are the bits. The
    vocabulary and the degree divide nothing: every bucket is padded."""
    spec = spec_of("bf16", batch=3, vocab=61, hidden=20, tied=True)
    losses, parameters = trained(plan_of(spec, 3), spec)
    plan = plan_of(spec, 3, **WAYS[way])
    assert any(b.elements > sum(p.tensor.elements for p in plan.bucket_parameters(b.name)) for b in plan.buckets)
    found, after = trained(plan, spec)
    assert found == losses
    for name, value in parameters.items():
        assert torch.equal(after[name], value), name


@pytest.mark.parametrize("way", WAYS)
def test_every_way_and_precision_is_proved(way: str) -> None:
    for precision, data, shard in (("fp32", 2, 0), ("bf16", 4, 2)):
        plan = plan_of(spec_of(precision), data, shard=shard, **WAYS[way])
        assert [f for proof in verify(plan).values() for f in proof.findings] == []


def test_dtypes_of_whole_buckets() -> None:
    """Gathered parameters have the parameters' dtype, whole gradients that of the sums."""
    plan = plan_of(spec_of("bf16"), 2, zero=3)
    sizes, bucket = Sizes(plan), plan.bucket_table["l1"]
    assert sizes.register("r.w.l1:0") == sizes.register("w.l1:i?") == bucket.elements * DTYPE_BYTES["bf16"]
    assert sizes.register("dw.l1:1") == bucket.elements * DTYPE_BYTES["f32"]


@pytest.mark.parametrize(("zero", "bytes_each"), [(2, 2 + 16 / 4), (3, 18 / 4)])
def test_copies_of_the_model_share_what_is_sharded(zero: int, bytes_each: float) -> None:
    """Two copies on two stages and two data ranks: shards lie on all four ranks that hold a bucket; what a rank keeps
    of both its stages, so of all parameters, is the row of the table for d = 4. Gradients are those of one process:
    see `tests/equivalence`."""
    spec = spec_of("bf16", batch=8)
    plan = plan_of(spec, 2, pipeline=2, schedule="dualpipe", stages=(2, 1), zero=zero)
    assert {b.shards for b in plan.buckets} == {"copies.0-1"} and {plan.shard_degree(b) for b in plan.buckets} == {4}
    assert [f for proof in verify(plan).values() for f in proof.findings] == []
    for role in plan.roles:
        held = sum(b.bytes for b in role.buffers if b.kind != "metric")
        assert held == elements(plan) * bytes_each


def test_homes_with_other_programs_share_no_gradients() -> None:
    """Embedding and head of one matrix on the first and the last stage meet once a step: in each micro-batch the last
    stage would wait for what the first does after it."""
    spec = spec_of("bf16", batch=8, tied=True)
    plan = plan_of(spec, 2, pipeline=2, zero=2, stages=(2, 1))
    assert not plan.spans_homes(plan.bucket_table["embed.tied"]) and verify(plan)["progress"].ok
