"""Recompute tiers: what they store, that they repeat no attention and no sum over ranks, and change not a bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from titan.compiler.lower import lower
from titan.compiler.plan.instruction import Instruction
from titan.compiler.plan.program import Plan
from titan.compiler.plan.segment import TIERS, Segment
from titan.compiler.plan.sizes import Sizes, block_profile, liveness
from titan.compiler.plan.text import parse_plan, print_plan
from titan.compiler.plan.tiers import at_tiers, layer_of
from titan.compiler.spec.schema import Spec
from titan.compiler.strategy import Strategy
from titan.compiler.verify.proofs import verify
from titan.runtime.data import SyntheticSource
from titan.runtime.interpreter import Executable, usual
from titan.runtime.loopback import LoopbackResult, run_loopback
from titan.runtime.watermark import Watermark

from tests.equivalence.configurations import Configuration, spec_of, strategy_of

torch.set_num_threads(1)
GPT2 = Configuration(family="dropout")  # GELU, layer norm, biases, dropout
SPREAD = {
    "tensor": Configuration(tensor=2),
    "sequence": Configuration(tensor=2, sequence_parallel=True, family="dropout"),
    "gathered": Configuration(context=2, data=2),
    "heads": Configuration(context=2, context_form="heads"),
    "ring": Configuration(context=2, context_form="ring"),
    "pipeline": Configuration(pipeline=2, schedule="zero_bubble_h1"),
    "sharded": Configuration(data=2, zero=3),
}


def plan_of(c: Configuration, recompute: str = "none", tiers: tuple[str, ...] = ()) -> Plan:
    return lower(spec_of(c), replace(strategy_of(c), recompute=recompute, tiers=tiers))


class Fixed(Watermark):
    """Gives the tiers that it is told to."""

    wanted: tuple[str, ...] = ()

    def admit(self, frame: str, position: int) -> str:
        self.admitted.add(frame)
        tier = self.wanted[layer_of(frame)]
        self.forecast.set(frame, tier, position)
        return tier


def fixed(tiers: tuple[str, ...]) -> partial[Watermark]:
    return partial(usual, kind=type("Given", (Fixed,), {"wanted": tiers}))


def trained(plan: Plan, watermark: object = None) -> LoopbackResult:
    source = SyntheticSource(int(plan.setting("model")["vocab"]), seed=3, ignore_fraction=0.2)
    return run_loopback(plan, 1, source, keep_gradients=True, check=True, watermark=watermark)  # type: ignore[arg-type]


def same_bits(a: LoopbackResult, b: LoopbackResult) -> bool:
    pairs = zip(a.gradients, b.gradients, strict=True)
    return a.losses == b.losses and all(torch.equal(x[name], y[name]) for x, y in pairs for name in y)


def findings(plan: Plan) -> list[str]:
    return [str(f) for proof in verify(plan).values() for f in proof.findings]


def test_gradients_have_the_same_bits_for_all_27_tier_vectors_with_dropout() -> None:
    spec = spec_of(replace(GPT2, pipeline=3, stages="even"))  # a model of three layers
    one = replace(strategy_of(GPT2), stages=(3,), micro_batch=spec.train.global_batch // 2, micro_batches=2)
    expected = trained(lower(spec, one))
    adaptive = lower(spec, replace(one, recompute="adaptive"))
    assert findings(adaptive) == []
    for tiers in product(TIERS, repeat=3):
        found = trained(adaptive, fixed(tiers))
        assert same_bits(found, expected), tiers
        static = lower(spec, replace(one, recompute="mixed", tiers=tiers))
        assert liveness(static, static.roles[0]).peak == found.reports[0][0].peak_bytes, tiers


@pytest.mark.parametrize("name", SPREAD)
@pytest.mark.parametrize("recompute", ["selective", "full", "adaptive"])
def test_every_layout_gives_the_same_bits_with_recompute(name: str, recompute: str) -> None:
    """S-RNG-01 among them: dropout with tensor and sequence parallelism draws the same masks when rebuilt."""
    plan = plan_of(SPREAD[name], recompute)
    assert findings(plan) == []
    assert parse_plan(print_plan(plan)) == plan
    layers = sum(len(chunk) for role in plan.roles for chunk in role.layers)
    policy = fixed(("full", "selective", "none")[:layers] + ("full",) * max(layers - 3, 0))
    found = trained(plan, policy if recompute == "adaptive" else None)
    assert same_bits(found, trained(plan_of(SPREAD[name])))


def stored_bytes(plan: Plan) -> float:
    """Bytes that the forward of a micro-batch leaves, of all layers."""
    block = next(b for b in plan.roles[0].blocks if b.name.startswith("F."))
    return block_profile(block, Sizes(plan)).change


def test_tiers_store_what_the_field_counts() -> None:
    """Per token and layer of width h: 32h bytes in 16 bits with GELU of width 4h, 20h selective, 4h full; beside that
    the norms' statistics, the log-sum-exp, and once what leaves the last layer with the head."""
    spec = spec_of(Configuration(family="gpt2"))
    strategy = replace(strategy_of(Configuration()), stages=(2,))
    deeper = replace(strategy, stages=(4,))
    tokens = strategy.micro_batch * spec.train.sequence
    unit = 8 // 2 * tokens * spec.model.hidden  # float64 in place of 16 bits
    for tier, wanted in (("none", 32), ("selective", 20), ("full", 4)):
        plans = [lower(textbook(spec, s), replace(s, recompute=tier)) for s in (strategy, deeper)]
        per_layer = (stored_bytes(plans[1]) - stored_bytes(plans[0])) / 2
        statistics = 8 * tokens * (4 + (4 if tier == "none" else 0))  # of four heads and two norms
        assert per_layer == wanted * unit + statistics, tier


def textbook(spec: Spec, strategy: Strategy) -> Spec:
    """As many layers as the strategy wants, with four heads that fill the width and a feed-forward part of 4h."""
    model, group = spec.model, spec.model.layers[0]
    assert model.attention is not None
    block = group.block.model_copy(update={"ffn": 4 * model.hidden})
    layers = (group.model_copy(update={"count": sum(strategy.stages), "block": block}),)
    attention = model.attention.model_copy(update={"heads": 4, "kv_heads": 4, "head_dim": model.hidden // 4})
    return replace(spec, model=model.model_copy(update={"layers": layers, "attention": attention}))


@pytest.mark.parametrize("name", SPREAD)
def test_no_tier_runs_attention_or_a_sum_over_ranks_again(name: str) -> None:
    for recompute in ("selective", "full"):
        plan = plan_of(SPREAD[name], recompute)
        for segment in plan.segments:
            for tier in TIERS[1:]:
                assert not any(call.operator.startswith("attention") for call in segment.rebuild_body(tier))
        again = [
            i for r in plan.roles for b in r.blocks for i in b.instructions if any(w[:2] == "r." for w in i.writes)
        ]
        assert any(i.opcode == "recompute" for i in again)
        around = {"recv", "wait"}  # keys and values that come around a ring are not stored in any tier
        assert {i.opcode for i in again} <= {"recompute", "all_gather", "all_to_all", "unshard", *around}


def test_fused_attention_alone_is_never_what_is_recomputed() -> None:
    """S-MEM-09: dropping the inside of attention would save nothing, for the kernel stores no scores."""
    plan = plan_of(GPT2, "selective")
    makers = {call.operator for s in plan.segments for call in s.body if set(call.results) & set(dropped_by(s))}
    assert makers == {"layer_norm", "gelu"}


def dropped_by(segment: Segment) -> tuple[str, ...]:
    return tuple(v for tier, values in segment.drops if tier == "selective" for v in values)


def test_a_plan_of_one_tier_is_the_static_plan() -> None:
    """What the proofs read of an adaptive plan is what lowering writes for that tier, but for the choosing."""
    adaptive = plan_of(GPT2, "adaptive")
    for tier in TIERS[1:]:
        chosen, static = at_tiers(adaptive, lambda layer, tier=tier: tier), plan_of(GPT2, tier)  # type: ignore[misc]
        for left, right in zip(chosen.roles[0].blocks, static.roles[0].blocks, strict=True):
            kept = [i for i in left.instructions if "tier.l" not in "".join((*i.writes, *i.reads))]
            assert kept == list(right.instructions), (tier, left.name)


def test_the_verifier_refuses_frames_that_are_not_independent() -> None:
    plan = plan_of(Configuration(tensor=2), "adaptive")
    role = plan.roles[0]
    forward = next(b for b in role.blocks if b.name == "F.c0")
    broken = {
        "T781": [i.only("tier.l0:i", ("full",)) if i.opcode == "all_reduce" else i for i in forward.instructions],
        "T780": [i for i in forward.instructions if i.opcode != "watermark"],
    }
    for code, instructions in broken.items():
        blocks = tuple(replace(b, instructions=tuple(instructions)) if b is forward else b for b in role.blocks)
        changed = replace(plan, roles=(replace(role, blocks=blocks),))
        assert code in {f.code for f in verify(changed)["tiers"].findings}


def altered(plan: Plan, name: str, change: Callable[[Instruction], Instruction]) -> Plan:
    """One block of the only role with other instructions."""
    role = plan.roles[0]
    blocks = tuple(
        replace(b, instructions=tuple(map(change, b.instructions))) if b.name == name else b for b in role.blocks
    )
    return replace(plan, roles=(replace(role, blocks=blocks),))


def test_a_frame_must_not_end_what_another_needs() -> None:
    def ends_more(i: Instruction) -> Instruction:
        last = i.opcode == "free" and i.when == ("full",) and i.frame == "tier.l1:i"
        return replace(i, reads=(*i.reads, "x.l0:i")) if last else i

    changed = altered(plan_of(GPT2, "adaptive"), "B.c0", ends_more)
    assert "T782" in {f.code for f in verify(changed)["tiers"].findings}


def test_a_lower_tier_must_not_store_more() -> None:
    def turned(i: Instruction) -> Instruction:
        other = {("none",): ("full",), ("full",): ("none",)}.get(i.when)
        return i.always().only(i.frame, other) if other else i

    changed = altered(plan_of(GPT2, "adaptive"), "F.c0", turned)
    assert "T783" in {f.code for f in verify(changed)["tiers"].findings}


def test_a_rebuild_that_lacks_what_it_needs_is_refused() -> None:
    plan = plan_of(GPT2, "full")
    template = next(s for s in plan.segments if s.rebuilds)
    again = template.rebuild("full")
    assert again is not None
    poorer = replace(template, rebuilds=(replace(again, reads=()),))
    changed = replace(plan, segments=tuple(poorer if s is template else s for s in plan.segments))
    assert "T765" in {f.code for f in verify(changed)["layout"].findings}


def test_an_executable_without_pressure_recomputes_nothing() -> None:
    plan = plan_of(GPT2, "adaptive")
    seen: list[Watermark] = []

    def watched(executable: Executable) -> Watermark:
        seen.append(usual(executable))
        return seen[-1]

    assert same_bits(trained(plan, watched), trained(plan_of(GPT2)))
    assert set(seen[0].expected.values()) == {"none"}
