"""Ring attention in the plan: work, bytes, order and memory against formulas, and proofs against broken rings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from titan.compiler.lower import lower
from titan.compiler.plan.instruction import Instruction
from titan.compiler.plan.program import Block, Plan
from titan.compiler.plan.sequence import mean_pairs, most_pairs, runs, visible
from titan.compiler.plan.sizes import Sizes
from titan.compiler.spec.resolve import resolve
from titan.compiler.spec.schema import Spec
from titan.compiler.strategy import Strategy
from titan.compiler.verify.proofs import verify
from titan.grammar.parser import parse

HEADS, KV_HEADS, WIDTH, SEQUENCE, LAYERS = 8, 2, 4, 480, 2


@cache
def spec(precision: str = "fp32", kv_heads: int = KV_HEADS, layers: int = LAYERS) -> Spec:
    text = f"""
import clusters.local
model = model {{
    vocab = 32, hidden = 16, layers = {layers} * dense {{ ffn = 24 }}, max_positions = {SEQUENCE}
    attention = gqa {{ heads = {HEADS}, kv_heads = {kv_heads}, head_dim = {WIDTH} }}, rope = {{ theta = 10000 }}
}}
cluster = local.cpu with {{ devices_per_node = 16 }}
train {{ sequence = {SEQUENCE}, global_batch = 1, precision = {precision}, data = synthetic(32) }}
"""
    return resolve(parse(text, "ring.titan"), Path())


@cache
def plan(
    context: int, form: str = "ring", heads: int = 1, order: str = "zigzag", precision: str = "fp32",
    kv_heads: int = KV_HEADS, **choices: object,
) -> Plan:  # fmt: skip
    strategy = Strategy(
        context=context,
        context_form=form,
        context_heads=heads,
        context_order=order,
        stages=(LAYERS,),
        **choices,  # type: ignore[arg-type]
    )
    return lower(spec(precision, kv_heads), strategy)


def block(found: Plan, name: str) -> Block:
    return next(b for b in found.roles[0].blocks if b.name.startswith(name))


def pairs(ring: int, zigzag: bool, length: int) -> list[list[float]]:
    """Pairs of query and key for every rank and step, by the rule that the runtime computes by."""
    given = {"ring": ring, "zigzag": zigzag, "causal": True}
    squares = [[visible({**given, "rank": r, "step": s}, length) for s in range(ring)] for r in range(ring)]
    return [[sum(square.pairs for square in found) for found in row] for row in squares]


@pytest.mark.parametrize("ring", [1, 2, 3, 4, 5, 8, 16])
def test_every_pair_of_the_causal_mask_is_seen_once(ring: int) -> None:
    """Against the mask itself, position by position."""
    length = 4
    for zigzag in (0, ring):
        chunk = length // 2
        where = [
            [p for first, n in runs(rank * length, length, zigzag, chunk) for p in range(first, first + n)]
            for rank in range(ring)
        ]
        assert sorted(p for found in where for p in found) == list(range(ring * length))
        seen: list[tuple[int, int]] = []
        for rank in range(ring):
            for step in range(ring):
                attributes = {"ring": ring, "zigzag": bool(zigzag), "causal": True, "rank": rank, "step": step}
                for square in visible(attributes, length):
                    for i in range(square.queries):
                        for j in range(i + 1 if square.causal else square.keys):
                            seen.append((where[rank][square.query + i], where[(rank - step) % ring][square.key + j]))
        assert sorted(seen) == [(q, k) for q in range(ring * length) for k in range(q + 1)]


@pytest.mark.parametrize("ring", [2, 4, 8, 16])
def test_zigzag_balances_the_work_exactly(ring: int) -> None:
    """All ranks wait for the one with most work in each step: contiguous order costs (2n - 1) / n, zigzag nothing."""
    length = 64
    for zigzag, ratio in ((True, 1.0), (False, (2 * ring - 1) / ring)):
        table = pairs(ring, zigzag, length)
        ideal = (ring * length) ** 2 / 2 / ring
        assert sum(max(row[step] for row in table) for step in range(ring)) / ideal == ratio
        for step in range(ring):
            attributes = {"ring": ring, "zigzag": zigzag, "causal": True, "step": step}
            column = [row[step] for row in table]
            assert mean_pairs(attributes, length) == pytest.approx(sum(column) / ring, rel=1e-15)
            assert most_pairs(attributes, length) == max(column)


@pytest.mark.parametrize("context,heads", [(2, 1), (3, 1), (4, 1), (8, 1), (4, 2), (16, 2)])
def test_flops_of_the_plan_are_those_of_attention(context: int, heads: int) -> None:
    """Forward 2 products, backward 5, over half of all pairs, divided by the ranks."""
    found = plan(context, heads=heads)
    sizes, product = Sizes(found), 2.0 * HEADS * WIDTH * SEQUENCE**2 / 2 / context
    table = found.segment_table
    for name, number in (("F.c0", 2), ("B.c0", 5)):
        steps = [
            i for i in block(found, name).instructions if i.unit and table[i.unit.split(".l")[0]].body[0].row.alone
        ]
        assert len(steps) == LAYERS * context // heads
        assert sum(map(sizes.flops, steps)) == pytest.approx(LAYERS * number * product, rel=1e-12)


def sent(found: Plan, name: str) -> dict[str, int]:
    """Bytes that a rank sends in a block, by dtype and kind."""
    sizes, totals = Sizes(found), dict[str, int]()
    for i in block(found, name).instructions:
        if i.opcode in ("send", "all_to_all"):
            kind = "gradient" if i.reads[0].startswith("d.") else i.opcode
            totals[kind] = totals.get(kind, 0) + sizes.traffic(i).wire
    return totals


@pytest.mark.parametrize("precision,size", [("fp32", 4), ("bf16", 2), ("fp64", 8)])
@pytest.mark.parametrize("context", [2, 3, 4, 8])
def test_wire_bytes_are_the_formula(context: int, precision: str, size: int) -> None:
    """2 S h_kv (n-1)/n elements forward; as many again backward, and their gradients in float32."""
    moved = LAYERS * 2 * SEQUENCE * KV_HEADS * WIDTH * (context - 1) // context
    found = plan(context, precision=precision)
    assert sent(found, "F.c0") == {"send": moved * size}
    assert sent(found, "B.c0") == {"send": moved * size, "gradient": moved * (8 if size == 8 else 4)}


def test_grouped_queries_send_a_quarter() -> None:
    few, many = (sent(plan(4, kv_heads=n), "F.c0")["send"] for n in (2, 8))
    assert 4 * few == many


@pytest.mark.parametrize("form,heads", [("heads", 1), ("ring", 2)])
def test_head_exchange_has_its_own_formula(form: str, heads: int) -> None:
    """(2 h_q + 2 h_kv) S/c (u-1)/u over the u ranks that exchange, beside the ring's bytes over the others."""
    context, size = 4 if heads > 1 else 2, 4
    exchange = heads if heads > 1 else context
    width = 2 * (HEADS + KV_HEADS) * WIDTH
    found = plan(context, form, heads)
    wire = sent(found, "F.c0")
    assert wire["all_to_all"] == LAYERS * width * SEQUENCE // context * (exchange - 1) // exchange * size
    ring, keys = context // exchange, SEQUENCE // context * KV_HEADS * WIDTH
    assert wire.get("send", 0) == LAYERS * 2 * keys * (ring - 1) * size


def _steps(found: Plan, name: str) -> Iterator[tuple[int, Instruction]]:
    for index, i in enumerate(block(found, name).instructions):
        if i.unit and found.segment_table[i.unit.split(".l")[0]].body[0].row.alone:
            yield index, i


def test_the_next_keys_are_on_their_way_while_a_step_computes() -> None:
    """Each step's keys are issued before the step before it computes, and waited for after."""
    found = plan(4)
    for name in ("F.c0", "B.c0"):
        listed = block(found, name).instructions
        steps = list(_steps(found, name))
        for (before, _), (now, step) in pairwise(steps):
            moved = [r for r in step.reads if ".ring" in r and not r.startswith(("q", "d.")) and ".ring0" not in r]
            for register in moved:
                issued = next(n for n, i in enumerate(listed) if i.writes == (register + "?",))
                waited = next(n for n, i in enumerate(listed) if i.writes == (register,))
                if step.unit.split(".l")[1] == listed[before].unit.split(".l")[1]:
                    assert issued < before < waited < now
    gradients = [
        n
        for n, i in enumerate(block(found, "B.c0").instructions)
        if i.opcode == "recv" and i.writes[0].startswith("d.")
    ]
    listed = block(found, "B.c0").instructions
    for n in gradients:
        name = listed[n].writes[0].rstrip("?")
        waited = next(k for k, i in enumerate(listed) if i.writes == (name,))
        assert any(n < step < waited for step, _ in _steps(found, "B.c0")), "a gradient travels beside a block"


@pytest.mark.parametrize("recompute", ["none", "full", "adaptive"])
def test_the_first_keys_of_backward_travel_under_the_layer_above(recompute: str) -> None:
    """No block of the layer itself could hide them. Where its own keys are rebuilt they leave with those."""
    listed = block(plan(4, recompute=recompute), "B.c0").instructions
    for layer in range(LAYERS):
        issued = next(n for n, i in enumerate(listed) if i.writes == (f"r.kv.ring3.l{layer}:i?",))
        below = [n for n, i in enumerate(listed) if i.unit == f"s5.l{layer}" and i.opcode == "backward"]
        above = [n for n, i in enumerate(listed) if i.unit == f"s1.l{layer + 1}" and i.opcode == "backward"]
        assert issued < below[0]
        if recompute == "full":
            assert listed[issued - 2].opcode == "recompute"
        elif above:
            assert issued < above[0]
        else:
            assert issued == 1


def test_memory_holds_two_blocks_whatever_the_degree() -> None:
    """What is alive in a step beside what is kept: keys and values that compute, and those that arrive. At a fixed
    sequence everything falls as 1/c."""
    peaks: dict[int, int] = {}
    for context in (2, 4, 8):
        found = plan(context)
        sizes, alive, most = Sizes(found), set[str](), 0
        for i in block(found, "F.c0").instructions:
            if i.opcode == "free":
                alive -= {n.rstrip("?") for n in i.reads}
            alive |= {n.rstrip("?") for n in i.writes}
            visiting = [n for n in alive if n.startswith("kv.") and ".ring0" not in n]
            most = max(most, sum(map(sizes.register, visiting)))
            peaks[context] = max(peaks.get(context, 0), sum(map(sizes.register, alive)))
        own = 2 * SEQUENCE // context * KV_HEADS * WIDTH * 4
        assert most <= 2 * own
    assert peaks[2] / peaks[4] == pytest.approx(2, rel=0.1) and peaks[4] / peaks[8] == pytest.approx(2, rel=0.1)


def test_recompute_never_runs_attention_twice() -> None:
    found = plan(4, recompute="full")
    again = [i for i in block(found, "B.c0").instructions if i.opcode == "recompute"]
    bodies = [call.operator for i in again for call in found.segment_table[i.unit.split(".l")[0]].body]
    assert again and not [operator for operator in bodies if operator.startswith("attention")]


@pytest.mark.parametrize(
    "choices",
    [
        {"context": 2},
        {"context": 5, "order": "contiguous"},
        {"context": 8, "recompute": "full"},
        {"context": 4, "heads": 2, "precision": "bf16"},
        {"context": 4, "tensor": 2, "sequence_parallel": True},
        {"context": 2, "tensor": 4, "kv_heads": 2, "precision": "bf16"},
    ],
)
def test_rings_are_proven(choices: dict[str, int]) -> None:
    found = {name: proof.findings[:2] for name, proof in verify(plan(**choices)).items() if not proof.ok}
    assert found == {}


def _changed(found: Plan, name: str, change: Callable[[list[Instruction]], None]) -> Plan:
    role = found.roles[0]
    blocks = []
    for b in role.blocks:
        listed = list(b.instructions)
        if b.name == name:
            change(listed)
        blocks.append(replace(b, instructions=tuple(listed)))
    return replace(found, roles=(replace(role, blocks=tuple(blocks)),))


def _index(listed: list[Instruction], opcode: str, start: str, number: int = 0) -> int:
    names = [n for n, i in enumerate(listed) if i.opcode == opcode and (*i.writes, *i.reads)[0].startswith(start)]
    return names[number]


def _drop_receive(listed: list[Instruction]) -> None:
    del listed[_index(listed, "recv", "kv.ring2")]


def _wrong_way(listed: list[Instruction]) -> None:
    for opcode, start in (("send", "t.kv.ring2"), ("recv", "kv.ring2")):
        n = _index(listed, opcode, start)
        listed[n] = replace(listed[n], attributes=(("peer", -int(listed[n].attribute("peer"))),))


def _swap_keys(listed: list[Instruction]) -> None:
    """The step after the next gets the keys of this one."""
    n = next(n for n, i in enumerate(listed) if i.unit.startswith("s2.l0"))
    listed[n] = replace(listed[n], reads=tuple("kv.ring0.l0:i" if "kv.ring" in r else r for r in listed[n].reads))


def _wait_first(listed: list[Instruction]) -> None:
    send, receive = _index(listed, "send", "t.kv.ring1"), _index(listed, "recv", "kv.ring1")
    waited = next(n for n, i in enumerate(listed) if i.writes == ("kv.ring1.l0:i",))
    wait = listed.pop(waited)
    listed[send], listed[receive] = listed[receive], listed[send]
    listed.insert(send + 1, wait)


def _merge_twice(listed: list[Instruction]) -> None:
    n = next(n for n, i in enumerate(listed) if i.unit.startswith("s3.l0"))
    listed[n] = replace(listed[n], reads=tuple(r.replace("part1", "part0") for r in listed[n].reads))


def _stay_away(listed: list[Instruction]) -> None:
    """The gradient of the last block is not sent home: its sender keeps it for its own keys."""
    n = next(n for n, i in enumerate(listed) if i.opcode == "add" and i.writes[0].startswith("d.kv.ring2.l0"))
    listed[n] = replace(listed[n], reads=(listed[n].reads[0], listed[n].reads[0]))


def _wrong_again(listed: list[Instruction]) -> None:
    """In backward a block is computed with the keys that came one step before."""
    n = next(n for n, i in enumerate(listed) if i.unit.startswith("s3.l0"))
    listed[n] = replace(listed[n], reads=tuple(r.replace("r.kv.ring2", "r.kv.ring3") for r in listed[n].reads))


def _other_way_home(listed: list[Instruction]) -> None:
    for opcode, start in (("send", "t.d.kv.ring2"), ("recv", "d.kv.ring2")):
        n = _index(listed, opcode, start)
        listed[n] = replace(listed[n], attributes=(("peer", -int(listed[n].attribute("peer"))),))


@pytest.mark.parametrize(
    "name,change,proofs",
    [
        ("F.c0", _drop_receive, {"matching"}),
        ("F.c0", _wrong_way, {"gradients"}),
        ("F.c0", _swap_keys, {"gradients"}),
        ("F.c0", _wait_first, {"progress"}),
        ("F.c0", _merge_twice, {"gradients"}),
        ("B.c0.last", _stay_away, {"gradients"}),
        ("B.c0.last", _wrong_again, {"gradients"}),
        ("B.c0.last", _other_way_home, {"gradients"}),
    ],
)
def test_a_broken_ring_is_refused(name: str, change: Callable[[list[Instruction]], None], proofs: set[str]) -> None:
    found = plan(4)
    if name not in found.roles[0].block_table:
        name = name.removesuffix(".last")
    broken = {n for n, proof in verify(_changed(found, name, change)).items() if not proof.ok}
    assert proofs <= broken


def _with_attribute(found: Plan, operator: str, number: int, **values: object) -> Plan:
    """One call of an operator with other attributes."""
    segments, seen = [], 0
    for segment in found.segments:
        body = []
        for call in segment.body:
            if call.operator == operator:
                if seen == number:
                    given = {**dict(call.attributes), **values}
                    call = replace(call, attributes=tuple(given.items()))  # type: ignore[arg-type]
                seen += 1
            body.append(call)
        segments.append(replace(segment, body=tuple(body)))
    return replace(found, segments=tuple(segments))


@pytest.mark.parametrize(
    "operator,number,values",
    [
        ("attention_merge", 1, {"step": 3}),
        ("attention_merge", 0, {"zigzag": False}),
        ("attention_merge", 0, {"rank": 0}),
        ("attention_merge", 1, {"causal": False}),
        ("attention_merge", 2, {"final": False}),
        ("attention_block", 0, {"ring": 8}),
        ("rope", 0, {"zigzag": 0}),
        ("rope", 1, {"chunk": 1}),
        ("rope", 1, {"start": 0}),
    ],
)
def test_a_wrong_place_in_the_ring_is_refused(operator: str, number: int, values: dict[str, object]) -> None:
    assert not all(proof.ok for proof in verify(_with_attribute(plan(4), operator, number, **values)).values())


def test_tokens_are_loaded_in_the_order_of_the_rings() -> None:
    def change(listed: list[Instruction]) -> None:
        n = next(n for n, i in enumerate(listed) if i.opcode == "load_batch" and i.attribute("what") == "labels")
        kept = tuple((k, v) for k, v in listed[n].attributes if k not in ("zigzag", "chunk"))
        listed[n] = replace(listed[n], attributes=kept)

    assert not verify(_changed(plan(4), "F.c0", change))["data"].ok
