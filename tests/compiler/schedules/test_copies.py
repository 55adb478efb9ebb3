"""Two copies of the model: mirrored stages share one optimizer state, and proofs see who holds what."""

from __future__ import annotations

from dataclasses import replace

import pytest
from titan.compiler.lower import lower
from titan.compiler.plan.operators import DTYPE_BYTES
from titan.compiler.plan.program import Plan
from titan.compiler.strategy import Strategy
from titan.compiler.verify.proofs import verify

from tests.compiler.schedules.small import small_spec


def plan_of(schedule: str, data: int, zero: int = 1, precision: str = "bf16") -> Plan:
    spec = small_spec(layers=8, batch=16 * data, devices=4 * data, precision=precision)
    return lower(
        spec,
        Strategy(pipeline=4, data=data, schedule=schedule, zero=zero, micro_batches=16, stages=(2, 2, 2, 2)),
    )


def held(plan: Plan, kind: str) -> int:
    """Bytes of one kind of buffer over all stages, for one data rank."""
    return sum(b.bytes for role in plan.roles for b in role.buffers if b.kind == kind)


@pytest.mark.parametrize("data", [1, 2])
def test_mirrored_stages_share_the_optimizer_state(data: int) -> None:
    """Two bytes of parameters and the transient gradients twice; masters and moments (12 bytes) once per model."""
    one, two = plan_of("one_f_one_b", data), plan_of("dualpipe", data)
    elements = sum(p.tensor.elements for p in one.parameters)
    padded = sum(b.elements for b in two.buckets)
    assert sum(b.elements for b in one.buckets) <= padded < elements + 16 * len(two.buckets)
    assert held(two, "parameters") == 2 * DTYPE_BYTES["bf16"] * padded
    assert held(two, "gradients") == 2 * DTYPE_BYTES["f32"] * padded
    assert held(two, "optimizer") == 12 * padded // data  # 12 N / (stages x 2 data) per rank, of two copies of N
    without = plan_of("dualpipe", data, zero=0)
    assert held(without, "optimizer") == 2 * 12 * sum(b.elements for b in without.buckets)
    for bucket in two.buckets:
        assert len(bucket.homes) == 2 and two.shard_degree(bucket) == 2 * data and two.spans_homes(bucket)


def test_proofs_refuse_shards_over_other_stages() -> None:
    plan = plan_of("dualpipe", 1, precision="fp32")
    assert all(proof.ok for proof in verify(plan).values())
    bucket = next(b for b in plan.buckets if b.name.startswith("l0"))
    group = plan.group_table[bucket.shards]
    wrong = tuple(replace(g, pipeline=(0, 1)) if g.name == group.name else g for g in plan.groups)
    assert not all(proof.ok for proof in verify(replace(plan, groups=wrong)).values())
    apart = tuple(replace(b, homes=(bucket.homes[0],)) if b is bucket else b for b in plan.buckets)
    assert not all(proof.ok for proof in verify(replace(plan, buckets=apart)).values())
