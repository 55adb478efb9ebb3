"""Layers that are alike are written once, and a plan so written is in everything the plan with all of them written."""

from __future__ import annotations

from typing import Any

import pytest
from titan.compiler import lower as lowering
from titan.compiler.cost.machine import read_machine
from titan.compiler.cost.memory import memory_ledger
from titan.compiler.cost.mfu import executed_flops
from titan.compiler.cost.simulate import simulate
from titan.compiler.lower import lower
from titan.compiler.passes.blocks import BlockWriter, Chunk
from titan.compiler.plan.instruction import Instruction
from titan.compiler.plan.listing import Listing
from titan.compiler.plan.program import Plan
from titan.compiler.plan.sizes import Sizes, block_profile
from titan.compiler.plan.text import print_plan
from titan.compiler.report.traffic import traffic
from titan.compiler.search.tiers import recomputing
from titan.compiler.strategy import Strategy

from tests.compiler.verify.tiny import model, spec

LAYERS = 24
TIERS = ("full",) * 9 + ("selective",) * 8 + ("none",) * 7

# strategy, whether all of its chunks have layers to leave out
WAYS: dict[str, dict[str, Any]] = {
    "one": {},
    "tensor": {"tensor": 2, "sequence_parallel": True},
    "zero 1": {"data": 2, "zero": 1},
    "zero 2": {"data": 2, "zero": 2},
    "zero 3": {"data": 2, "zero": 3},
    "zero 3 gathered once": {"data": 2, "zero": 3, "gather": "once"},
    "zero 3 far ahead": {"data": 2, "zero": 3, "prefetch": 3},
    "ring": {"data": 2, "context": 4, "context_form": "ring", "zero": 3, "recompute": "full"},
    "mixed": {"context": 2, "context_form": "ring", "zero": 3, "recompute": "mixed", "tiers": TIERS},
    "stages": {"pipeline": 2, "stages": (13, 11), "recompute": "selective"},
    "chunks": {"pipeline": 2, "stages": (8,) * 4, "schedule": "interleaved", "micro_batches": 4},
    "chunks gathered once": {
        "pipeline": 2, "data": 2, "zero": 3, "gather": "once", "schedule": "interleaved", "stages": (8, 9, 7, 10),
        "micro_batches": 4,
    },
    "folded and gathered once": {
        "pipeline": 3, "data": 2, "zero": 3, "gather": "once", "schedule": "zero_bubble_v",
        "stages": (8, 9, 7, 10, 8, 9), "micro_batches": 6,
    },
    "split": {"pipeline": 2, "data": 2, "zero": 2, "schedule": "zero_bubble_h1", "micro_batches": 4},
    "host": {"data": 2, "zero": 1, "offload": "activations", "offloaded": tuple(range(10))},
    "host under a ring": {
        "context": 4, "context_form": "ring", "zero": 3, "stages": (32,), "offload": "activations",
        "offloaded": tuple(range(18)),
    },
}  # fmt: skip


def plan(name: str) -> Plan:
    """The plan as it is lowered."""
    fields = WAYS[name]
    pipeline = fields.get("pipeline", 1)
    stages = fields.get("stages", (LAYERS // pipeline,) * pipeline)
    strategy = Strategy(**{"micro_batches": 3, **fields, "stages": stages})
    found = spec(model("llama", sum(stages), 4, 16, False), strategy.world_size, strategy.data * strategy.micro_batches)
    return lower(found, strategy)


@pytest.mark.parametrize("name", WAYS)
def test_a_plan_is_the_same_however_it_is_written(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = plan(name)
    monkeypatch.setattr(lowering, "shorter", lambda *_: None)
    written = plan(name)
    blocks = [block.instructions for role in listed.roles for block in role.blocks]
    assert any(isinstance(found, Listing) and len(found.stretches) > 1 for found in blocks)
    assert print_plan(listed) == print_plan(written)
    for one, other in zip(listed.roles, written.roles, strict=True):
        for a, b in zip(one.blocks, other.blocks, strict=True):
            assert block_profile(a, Sizes(listed), one) == block_profile(b, Sizes(written), other), a.name
    assert memory_ledger(listed) == memory_ledger(written)
    assert simulate(listed) == simulate(written)
    assert executed_flops(listed) == pytest.approx(executed_flops(written), rel=1e-12)
    assert traffic(listed) == traffic(written)
    machine = read_machine(listed.setting("cluster"))
    assert recomputing(listed, machine) == pytest.approx(recomputing(written, machine), rel=1e-12)


def test_what_is_repeated_does_not_grow_with_the_model() -> None:
    sizes = []
    for layers in (16, 64):
        found = lower(spec(model("llama", layers, 4, 16, False), 1, 3), Strategy(micro_batches=3, stages=(layers,)))
        listings = [b.instructions for b in found.roles[0].blocks if isinstance(b.instructions, Listing)]
        sizes.append(sum(len(stretch.instructions) for one in listings for stretch in one.stretches))
        assert sum(map(len, listings)) > 3 * sizes[-1] / 2
    assert sizes[0] == sizes[1]


def test_layers_that_differ_are_all_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the layers around the one that is repeated have other instructions, none is left out."""
    listed = plan("tensor")
    write = BlockWriter._forward

    def odd_layers_load_twice(self: BlockWriter, chunk: Chunk, keep: bool) -> list[Instruction]:
        found = write(self, chunk, keep)
        odd = [n for n, i in enumerate(found) if i.unit.startswith("s0.l") and int(i.unit[4:]) % 2]
        for n in reversed(odd):
            found.insert(n, Instruction("load_batch", (f"more.{found[n].unit[3:]}:i",)))
        return found

    monkeypatch.setattr(BlockWriter, "_forward", odd_layers_load_twice)
    irregular = plan("tensor")
    assert any(isinstance(block.instructions, Listing) for block in listed.roles[0].blocks)
    assert not any(isinstance(block.instructions, Listing) for block in irregular.roles[0].blocks)
    loads = [
        sum(i.opcode == "load_batch" for _, _, call, i in found.roles[0].instructions() if call.block[0] == "F")
        for found in (listed, irregular)
    ]
    assert loads[1] - loads[0] == 3 * LAYERS // 2  # of each micro-batch
