"""The benchmark of long context itself: its formulas against the plans that it runs, and a plan without overlap."""

from __future__ import annotations

import pytest
import torch
from titan.compiler.cost.simulate import simulate
from titan.compiler.plan.segment import parse_unit
from titan.compiler.plan.sizes import Sizes, liveness
from titan.compiler.verify.proofs import verify
from titan.runtime.data import SyntheticSource
from titan.runtime.reference import reference_loss
from titan.runtime.state import allocate

from tests.benchmarks.long_context.model import FORMS, VOCAB, Form, attention_flops, plan, wire_bytes
from tests.benchmarks.long_context.overlap import waiting_at_once
from tests.benchmarks.long_context.peer import loss_sum, peer, rotary

TOKENS = 1024
MOVES = ("send", "all_to_all", "all_gather", "reduce_scatter")


@pytest.mark.parametrize("name", FORMS)
def test_bytes_and_work_of_every_form_are_the_formulas(name: str) -> None:
    found = plan(TOKENS, FORMS[name])
    sizes, listed = Sizes(found), [i for *_, i in found.roles[0].instructions()]
    moved = (i for i in listed if i.opcode in MOVES and i.group.startswith("context"))
    assert sum(sizes.traffic(i).wire for i in moved) == wire_bytes(TOKENS, FORMS[name])
    if FORMS[name].kind == "ring":  # whose blocks are segments of their own
        attention = [i for i in listed if i.unit and found.segment_table[parse_unit(i.unit)[0]].body[0].row.alone]
        flops = sum(map(sizes.flops, attention))
        assert flops == pytest.approx(attention_flops(TOKENS, FORMS[name].context), rel=1e-12)


def test_waiting_at_once_is_the_same_plan_without_overlap() -> None:
    found = plan(1 << 16, Form(2), "nodes = 2, inter.bandwidth = 800 Mb/s")
    plain = waiting_at_once(found)
    assert sorted(map(str, found.roles[0].blocks[0].instructions)) == sorted(
        map(str, plain.roles[0].blocks[0].instructions)
    )
    assert {name: proof.ok for name, proof in verify(plain).items() if not proof.ok} == {}
    hidden, shown = (t.exposed_comm_fraction * t.seconds for t in map(simulate, (found, plain)))
    transfer = 8 * wire_bytes(1 << 16, Form(2)) / 800e6
    assert shown == pytest.approx(transfer / 0.8, rel=0.02)  # at the share of its link that the cluster gives
    assert hidden < 0.1 * shown


def test_activations_fall_as_one_over_the_degree() -> None:
    """At the length of the long run, without running it."""
    peaks = {c: liveness(found, found.roles[0]).peak for c in (1, 2, 4) for found in [plan(1 << 17, Form(c))]}
    for context, peak in peaks.items():
        assert peak * context / peaks[1] == pytest.approx(1, rel=0.1)


def test_the_model_given_to_torch_is_the_plan_s() -> None:
    found = plan(64, FORMS["one"])
    parameters = allocate(found, 0).parameters
    tokens, labels = SyntheticSource(VOCAB, seed=3).load([0], 0, 64)
    total = loss_sum(parameters, tokens, labels, *rotary(64))
    wanted, _ = reference_loss(found.setting("model"), parameters, tokens, labels, [0])
    assert float(total) == pytest.approx(float(wanted), rel=1e-6)


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="there are devices")
def test_without_devices_torch_s_context_parallel_is_counted_as_skipped() -> None:
    assert "two CUDA devices" in peer(64, 1)["skipped"]
