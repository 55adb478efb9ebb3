"""Sequences of a million tokens on 16,384 GPUs: the plan is proven, fits, and costs what arithmetic says."""

from __future__ import annotations

from pathlib import Path

from titan.compiler.cost.memory import memory_ledger
from titan.compiler.cost.simulate import simulate
from titan.compiler.lower import lower
from titan.compiler.spec.resolve import resolve
from titan.compiler.strategy import Strategy
from titan.compiler.verify.proofs import verify
from titan.grammar.parser import parse

EXAMPLE = Path(__file__).parents[2] / "examples" / "llama3_8b_1m.titan"


def test_8b_on_a_million_tokens() -> None:
    """A ring of 64 ranks, every layer recomputed from its input, output and log-sum-exp of attention."""
    spec = resolve(parse(EXAMPLE.read_text(), EXAMPLE.name), EXAMPLE.parent)
    found = lower(
        spec,
        Strategy(data=256, context=64, context_form="ring", zero=3, recompute="full", loss_rows=2048, stages=(32,)),
    )
    assert {name: proof.findings[:2] for name, proof in verify(found).items() if not proof.ok} == {}
    assert memory_ledger(found).verdict == "fits"
    tokens, hidden, layers = 1 << 20, 4096, 32
    attention = 7 * layers * hidden * tokens**2 / 64  # FLOPs of a rank: nothing of it twice, all ranks alike
    least = attention / 989.4e12
    timeline = simulate(found)
    assert least < timeline.seconds < 3 * least
    assert timeline.exposed_comm_fraction < 0.05  # a block of 16,384 queries computes longer than its keys travel
