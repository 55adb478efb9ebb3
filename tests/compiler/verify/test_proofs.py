"""The proofs hold for every plan that the lowering makes, and each finding is given for the mistake it is named for."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from titan.compiler.plan.instruction import Instruction
from titan.compiler.plan.program import Block, BlockCall, Plan, Role
from titan.compiler.verify.proofs import PROOFS, verify
from titan.grammar.catalogue_verify import ROWS

from tests.benchmarks import mutation_headers, mutation_values  # noqa: F401  (their operators join the table)
from tests.benchmarks.mutants import sample
from tests.benchmarks.mutation import mutants, with_block, with_role
from tests.clock import slowness
from tests.compiler.verify.tiny import KINDS, plan


def codes(broken: Plan) -> set[str]:
    return {finding.code for proof in verify(broken).values() for finding in proof.findings}


@pytest.mark.parametrize("name", KINDS)
def test_every_layout_is_proven(name: str) -> None:
    proofs = verify(plan(name))
    assert list(proofs) == [name for name, _ in PROOFS]
    assert [str(f) for proof in proofs.values() for f in proof.findings] == []
    assert all(proof.ok for proof in proofs.values())


# proof, code, plan, operator, beginning of the place
CASES = [
    ("declarations", "T701", "one", "wrong_segment", ""),
    ("declarations", "T702", "one", "wrong_tied_group", None),
    ("declarations", "T703", "tied", "wrong_parameter_header", ""),
    ("registers", "T710", "one", "drop_segment", ""),
    ("registers", "T711", "one", "repeat_segment", ""),
    ("registers", "T712", "one", "repeat_free", ""),
    ("registers", "T713", "one", "drop_free", ""),
    ("registers", "T714", "pipeline", "wait_late", ""),
    ("registers", "T715", "pipeline", "swap_neighbours", "0/sent"),
    ("registers", "T716", "data", "swap_calls", ""),
    ("matching", "T720", "pipeline", "wrong_reduction", "0/norm"),
    ("matching", "T722", "pipeline", "exchange_micro_batches", "0/train"),
    ("progress", "T730", "pipeline", "exchanges_that_need_buffers", ""),
    ("gradients", "T740", "one", "drop_segment", ""),
    ("gradients", "T741", "one", "wrong_register", ""),
    ("gradients", "T742", "tensor", "drop_carry", ""),
    ("gradients", "T743", "data", "drop_gradient_sum", ""),
    ("gradients", "T744", "one", "norm_misses_a_bucket", ""),
    ("gradients", "T745", "one", "repeat_update", ""),
    ("gradients", "T746", "zero", "drop_gather_of_parameters", ""),
    ("gradients", "T747", "one", "drop_loss", ""),
    ("data", "T750", "ring", "wrong_load", ""),
    ("data", "T751", "one", "wrong_load", ""),
    ("data", "T752", "data", "bypass_collective", "0/begin"),
    ("layout", "T760", "tensor", "wrong_declared_value", ""),
    ("layout", "T761", "one", "swap_operands", ""),
    ("layout", "T762", "sequence", "wrong_dim", ""),
    ("layout", "T763", "sequence", "wrong_bucket_header", ""),
    ("layout", "T764", "tensor", "wrong_layout", "tensor d."),
]


@pytest.mark.parametrize(("proof", "code", "name", "operator", "place"), CASES, ids=[c[1] for c in CASES])
def test_each_proof_fails_on_a_plan_broken_on_purpose(
    proof: str, code: str, name: str, operator: str, place: str | None
) -> None:
    broken = [m.make() for m in mutants(plan(name), operator) if place is None or m.where.startswith(place)]
    if code == "T702":
        broken = [replace(plan(name), roles=())]
    found = [finding for p in broken[:25] for finding in verify(p)[proof].findings]
    assert code in {finding.code for finding in found}
    assert all(finding.message for finding in found)


def test_every_code_has_a_case() -> None:
    """Codes of recompute tiers (T765, T78x) have theirs where tiers are tested, the host's too (T748, T771)."""
    elsewhere = {"T700", "T704", "T721", "T723", "T770"}  # below
    codes_here = {row.code for row in ROWS if row.code < "T765" or row.code == "T770"} - {"T748"}
    assert {case[1] for case in CASES} | elsewhere == codes_here


def with_instruction(found: Plan, stage: int, block: str, at: int, new: Instruction) -> Plan:
    role = found.roles[stage]
    listing = role.block_table[block].instructions
    return with_block(found, role, role.block_table[block], (*listing[:at], new, *listing[at:]))


def test_t704_a_missing_buffer() -> None:
    found = plan("one")
    role = replace(found.roles[0], buffers=tuple(b for b in found.roles[0].buffers if not b.name.startswith("g.")))
    assert "T704" in codes(with_role(found, role))


def test_t770_memory_above_the_limit_names_the_instruction_of_the_peak() -> None:
    found = plan("pipeline")
    settings = tuple((k, "2000" if k == "memory.limit_bytes" else v) for k, v in found.settings)
    (finding, *_) = verify(replace(found, settings=settings))["memory"].findings
    assert finding.code == "T770" and finding.index >= 0 and "2000" in finding.message


def test_t770_the_limit_itself_is_allowed() -> None:
    from titan.compiler.plan.sizes import memory_by_component

    found = plan("pipeline")
    peak = max(sum(memory_by_component(found, role).values()) for role in found.roles)

    def limited(limit: int) -> bool:
        settings = tuple((k, str(limit) if k == "memory.limit_bytes" else v) for k, v in found.settings)
        return verify(replace(found, settings=settings))["memory"].ok

    assert limited(peak) and not limited(peak - 1)


def _issuing(*orders: tuple[str, ...]) -> Plan:
    """Stages that issue one collective over each of two groups which both join all stages, each in its own order."""
    found = plan("pipeline")
    found = replace(found, groups=(*found.groups, replace(found.groups[0], name="second")))
    registers = {"all": "nsq.local", "second": "loss.sum"}
    for stage, groups in enumerate(orders):
        issues = [
            Instruction("all_reduce", (f"{registers[g]}?",), ("b.extra",), (), "", g, g, (("op", "sum"),))
            for g in groups
        ]
        waits = [Instruction("wait", (r,), (f"{r}?",)) for r in registers.values()]
        block = Block("crossing", (), (*issues, *waits))
        role = replace(
            found.roles[stage], blocks=(block,), orders=(("train", (BlockCall("crossing"),)), ("evaluate", ()))
        )
        found = with_role(found, role)
    return found


def test_t723_two_groups_in_opposite_orders() -> None:
    from titan.compiler.verify.matching import matching

    assert {f.code for f in matching(_issuing(("all", "second"), ("second", "all")))} == {"T723"}
    assert not matching(_issuing(("all", "second"), ("all", "second")))


def test_t721_a_stage_outside_the_group() -> None:
    from titan.compiler.verify.matching import matching

    found = plan("tied")
    (group, *_) = [g for g in found.groups if len(g.pipeline) > 1]
    extra = Instruction("all_reduce", ("nsq.local?",), ("b.x",), (), "", group.name, "x", (("op", "sum"),))
    outside = next(s for s in range(len(found.roles)) if s not in group.pipeline)
    broken = with_instruction(found, outside, "end", 0, extra)
    assert "T721" in {f.code for f in matching(broken)}


def test_findings_name_role_block_index_and_instruction() -> None:
    (mutant,) = [m for m in mutants(plan("pipeline"), "drop_send") if m.where.startswith("0/F.c0")]
    findings = verify(mutant.make())["matching"].findings
    assert any(f.role == 1 and f.block.startswith("recv") and "recv" in f.instruction for f in findings)


def test_a_deadlock_is_told_as_a_cycle_of_waits() -> None:
    (mutant,) = mutants(plan("pipeline"), "exchanges_that_need_buffers")
    (finding, *_) = verify(mutant.make())["progress"].findings
    assert "stage 0 waits" in finding.message and "stage 1 waits" in finding.message
    assert finding.instruction.startswith("wait")


def test_no_broken_plan_stops_the_verifier() -> None:
    """A proof that cannot be carried out says so; it must not hide what another proof finds."""
    for name in ("zero", "tied", "ring"):
        for mutant in sample(name, 2, seed=9):
            verify(mutant.make())


def _large(make: Callable[[], Plan]) -> float:
    found = make()
    start = time.perf_counter()
    proofs = verify(found)
    seconds = time.perf_counter() - start
    assert all(proof.ok for proof in proofs.values()), [str(f) for p in proofs.values() for f in p.findings][:3]
    return seconds


def test_a_plan_of_405b_for_16384_ranks_is_proven_in_a_blink() -> None:
    from titan.compiler.lower import lower
    from titan.compiler.spec.resolve import load_spec
    from titan.compiler.strategy import Strategy

    spec = load_spec("examples/llama3_405b_16384gpu.titan")
    strategy = Strategy(
        tensor=8,
        pipeline=16,
        data=128,
        sequence_parallel=True,
        zero=1,
        recompute="full",
        stages=(7,) + (8,) * 14 + (7,),
        micro_batches=16,
    )
    assert _large(lambda: lower(spec, strategy)) < 1.5 * slowness()  # 0.1 s on a quiet machine


def test_roles_are_told_apart() -> None:
    """A role's program in another role's place is refused, although each is sound alone."""
    found = plan("pipeline")
    first: Role = found.roles[0]
    broken = replace(found, roles=(first, replace(first, pipeline=1)))
    assert codes(broken)
