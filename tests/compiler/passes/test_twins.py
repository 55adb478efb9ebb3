"""What ranks do alike in other layers is written once, and a plan so written is in everything the plan with every rank
written by itself."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
from titan.compiler import lower as lowering
from titan.compiler.cost.memory import memory_ledger
from titan.compiler.cost.simulate import simulate
from titan.compiler.lower import lower
from titan.compiler.passes.blocks import Chunk
from titan.compiler.passes.twins import Kind, kind
from titan.compiler.plan.host import host_traffic
from titan.compiler.plan.listing import Renamed
from titan.compiler.plan.program import Plan
from titan.compiler.plan.sizes import Sizes, block_profile
from titan.compiler.plan.text import print_plan
from titan.compiler.spec.schema import Dense, LayerGroup
from titan.compiler.strategy import Strategy

from tests.compiler.verify.tiny import model, spec

RANKS, LAYERS = 6, 12
MIXED = ("full", "none", "none", "none", "full", "none", "selective", "none", "full", "none", "none", "full")

# strategy, ranks that are written as another one
WAYS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "all inner ones": ({}, (2, 3, 4)),
    "late check": ({"data": 2, "zero": 1, "late_check": True}, (2, 3, 4)),
    "gathered": ({"data": 2, "zero": 3, "prefetch": 2}, (2, 3, 4)),
    "gathered once": ({"data": 2, "zero": 3, "gather": "once", "reduce": "once"}, (2, 3, 4)),
    "split": ({"data": 2, "zero": 2, "schedule": "zero_bubble_h1"}, (2, 3, 4)),
    "two chunks": ({"stages": (1,) * LAYERS, "schedule": "zero_bubble_v"}, (2, 3, 4)),
    "two copies": ({"schedule": "dualpipe", "pipeline": 8, "stages": (1,) * 8, "micro_batches": 16}, ()),
    "all on the host": ({"offload": "both", "prefetch": 1}, (2, 3, 4)),
    "adaptive": ({"recompute": "adaptive"}, (2, 3, 4)),
    "other tiers": ({"recompute": "mixed", "tiers": MIXED}, (4,)),
    "other layers on the host": ({"offload": "activations", "offloaded": (2, 3, 5, 6, 7)}, (3,)),
    "other numbers of layers": ({"stages": (1, 2, 3, 2, 3, 1)}, (3, 4)),
    "other layers": ({"stages": (2,) * RANKS, "wide": 6}, (2, 4)),
    "long chunks": ({"stages": (12,) * RANKS}, (2, 3, 4)),
}


def plan(name: str) -> Plan:
    fields = dict(WAYS[name][0])
    wide = fields.pop("wide", 0)
    stages = fields.get("stages", (LAYERS // RANKS,) * RANKS)
    strategy = Strategy(**{"pipeline": RANKS, "micro_batches": 8, **fields, "stages": stages})
    found = model("llama", sum(stages), 4, 16, False)
    if wide:  # from that layer on they are wider
        groups = (LayerGroup(count=wide, block=found.layers[0].block),)
        more = LayerGroup(count=sum(stages) - wide, block=Dense(ffn=16, activation="swiglu"))
        found = found.model_copy(update={"layers": (*groups, more)})
    return lower(spec(found, strategy.world_size, strategy.data * strategy.micro_batches), strategy)


def twins(found: Plan) -> tuple[int, ...]:
    """Ranks whose blocks of micro-batches are renamed."""
    return tuple(
        role.pipeline
        for role in found.roles
        if all(isinstance(b.instructions, Renamed) for b in role.blocks if b.name[:2] in ("F.", "B.", "I.", "W."))
    )


@pytest.mark.parametrize("name", WAYS)
def test_a_plan_is_the_same_whether_ranks_have_twins(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = plan(name)
    assert name == "long chunks" or twins(shared) == WAYS[name][1]
    monkeypatch.setattr(lowering, "kind", lambda *_: None)
    apart = plan(name)
    assert not twins(apart)
    assert print_plan(shared) == print_plan(apart)
    assert shared == apart
    assert memory_ledger(shared) == memory_ledger(apart)
    assert simulate(shared) == simulate(apart)
    one, other = Sizes(shared), Sizes(apart)
    for a, b in zip(shared.roles, apart.roles, strict=True):
        assert host_traffic(a, one) == host_traffic(b, other)
        assert one.issued(a) == other.issued(b)
        for mine, theirs in zip(a.blocks, b.blocks, strict=True):
            assert block_profile(mine, one, a) == block_profile(theirs, other, b), mine.name


def chunks(*layers: tuple[int, int], after: int = 1) -> tuple[Chunk, ...]:
    """Chunks of one kind of layer, from the first layer to one past the last."""
    return tuple(
        Chunk(n, tuple((1, layer) for layer in range(first, last)), first, last, -1, after)
        for n, (first, last) in enumerate(layers)
    )


def test_what_ranks_of_one_kind_have_in_common() -> None:
    """Where messages come from and go to, and which layers of two chunks are the same, whatever their numbers."""
    buckets = plan("all inner ones").buckets
    part: Any = SimpleNamespace(parameters=(SimpleNamespace(name=".w"),))
    writer: Any = SimpleNamespace(
        strategy=Strategy(stages=(LAYERS,)),
        graph=SimpleNamespace(parts=(part, part, part)),
        bucket_of={f"layers.{n}.w": f"l{n}" for n in range(LAYERS)},
    )

    def of(found: tuple[Chunk, ...]) -> Kind | None:
        held = tuple(b for b in buckets if b.name in {f"l{n}" for c in found for _, n in c.chain})
        return kind(found, {"F.c0", "B.c0", "F.c1", "B.c1"}, held, writer)

    one = of(chunks((1, 3), (6, 8)))
    assert one is not None and one == of(chunks((2, 4), (9, 11)))
    assert one != of(chunks((1, 3), (6, 8), after=0))
    assert one != of(chunks((1, 3), (3, 5)))
    assert of(chunks((3, 5), (1, 3))) != of(chunks((6, 8), (1, 3)))  # what the second one leaves enters the first
    assert of(chunks((1, 3), (2, 4))) is None


@pytest.mark.parametrize("name", ["late check", "gathered once", "adaptive"])
def test_another_process_gets_the_whole_plan(name: str) -> None:
    found = plan(name)
    simulate(found)  # and what was worked out of it beside
    sent = pickle.loads(pickle.dumps(found))
    assert sent == found and print_plan(sent) == print_plan(found)
