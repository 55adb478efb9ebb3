"""Offload: the same bits as without it, less on the device, and both pools hold what the plan says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from titan.compiler.lower import lower
from titan.compiler.pipeline import compile_spec
from titan.compiler.plan.host import host_memory, host_traffic
from titan.compiler.plan.instruction import Instruction
from titan.compiler.plan.program import Plan
from titan.compiler.plan.sizes import Sizes, memory_by_component
from titan.compiler.plan.text import parse_plan, print_plan
from titan.compiler.verify.proofs import verify
from titan.runtime.data import SyntheticSource
from titan.runtime.interpreter import Executable
from titan.runtime.loopback import LoopbackResult, run_loopback
from titan.runtime.state import allocate

from tests.compiler.plan.test_sizes import unrolled
from tests.equivalence.configurations import Configuration, spec_of, strategy_of
from tests.runtime.alone import EchoTransport, Pools
from tests.runtime.small_runs import go, write_spec

torch.set_num_threads(1)
WORDS = ("optimizer", "activations", "both")
LAYOUTS = {
    "dropout": Configuration(family="dropout"),
    "ring": Configuration(context=2, context_form="ring"),
    "stages": Configuration(pipeline=2, data=2, zero=1, schedule="zero_bubble_h1"),
    "pairs": Configuration(pipeline=2, schedule="dualpipe", tied=True),
    "shards": Configuration(data=2, zero=3, recompute="full"),
    "adaptive": Configuration(recompute="adaptive"),
}


@cache
def plan_of(name: str, word: str = "none", offloaded: tuple[int, ...] = (), precision: str = "fp64") -> Plan:
    c = LAYOUTS[name]
    return lower(spec_of(c, precision), replace(strategy_of(c), offload=word, offloaded=offloaded))


def trained(plan: Plan, steps: int = 2) -> LoopbackResult:
    source = SyntheticSource(int(plan.setting("model")["vocab"]), seed=3, ignore_fraction=0.2)
    return run_loopback(plan, steps, source, keep_gradients=True, check=True)


@cache
def plainly(name: str, precision: str) -> LoopbackResult:
    return trained(plan_of(name, precision=precision))


def same_bits(a: LoopbackResult, b: LoopbackResult) -> bool:
    gradients = zip(a.gradients, b.gradients, strict=True)
    buffers = [(x.buffers, y.buffers) for x, y in zip(a.states, b.states, strict=True)]
    pairs = [*gradients, *buffers]
    return a.losses == b.losses and all(x.keys() == y.keys() and torch.equal(x[n], y[n]) for x, y in pairs for n in x)


def findings(plan: Plan) -> list[str]:
    return [f.code for proof in verify(plan).values() for f in proof.findings]


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_gives_the_same_bits(name: str, word: str) -> None:
    """Optimizer state too, and with bfloat16 its masters."""
    precision = "bf16" if name == "stages" else "fp64"
    plan = plan_of(name, word, precision=precision)
    assert findings(plan) == [] and parse_plan(print_plan(plan)) == plan
    assert same_bits(trained(plan), plainly(name, precision))


def test_layers_that_are_not_named_stay_on_the_device() -> None:
    plan = plan_of("dropout", "activations", (0,))
    moved = [i.reads[0] for b in plan.roles[0].blocks for i in b.instructions if i.opcode == "offload"]
    assert moved and all(".l0" in name for name in moved)
    assert findings(plan) == [] and same_bits(trained(plan), plainly("dropout", "fp64"))


@pytest.mark.parametrize("name", ["dropout", "stages"])
def test_ledgers_of_device_and_host_are_those_of_the_plan(name: str) -> None:
    plan, plain = plan_of(name, "both"), plan_of(name)
    sizes = Sizes(plan)
    for rank, report in enumerate(trained(plan, 1).reports[0]):
        role = plan.role_of(rank)
        assert report.host_bytes == host_memory(role, sizes)["activations"] > 0
        assert report.peak_bytes == unrolled(plan, role, "train")[0]
        before, after = (memory_by_component(p, p.role_of(rank)) for p in (plain, plan))
        assert after["optimizer"] == 0 and host_memory(role, sizes)["optimizer"] == before["optimizer"]


def test_what_moves_is_what_the_forward_leaves_and_the_state_twice() -> None:
    """By hand: a step moves 16 bytes per parameter of float64 state each way, and per micro-batch what two layers
    leave."""
    plan, role = plan_of("dropout", "both"), plan_of("dropout", "both").roles[0]
    sizes = Sizes(plan)
    states = sum(16 * bucket.elements for bucket in plan.buckets)
    forward = next(b for b in role.blocks if b.name == "F.c0")
    left = {i.reads[0] for i in forward.instructions if i.opcode == "offload"}
    per_batch = sum(sizes.register(name) for name in left)
    out, back = host_traffic(role, sizes)
    assert out == back == states + per_batch * int(plan.setting("train.micro_batches"))
    assert {name.partition(":")[0].rpartition(".l")[2] for name in left} == {"0", "1"}


# --- two pools, counted storage by storage


@pytest.mark.parametrize("word", WORDS)
def test_storages_of_both_pools_are_those_predicted(word: str) -> None:
    c = Configuration(family="gpt2", pipeline=3)
    strategy = replace(strategy_of(replace(c, pipeline=1)), stages=(3,), micro_batch=4, micro_batches=2)
    spec = spec_of(c)
    plan = lower(spec, replace(strategy, offload=word))
    role, sizes = plan.roles[0], Sizes(plan)
    with Pools() as pools:
        state = allocate(plan, 0)
        executable = Executable(plan, 0, EchoTransport(0), state, SyntheticSource(spec.model.vocab, seed=1))
        for _ in range(2):
            pools.peak, pools.host.peak = pools.live, pools.host.live
            assert list(executable.run(0)) == []
    assert pools.host.peak == sum(host_memory(role, sizes).values())
    assert pools.peak == pytest.approx(sum(memory_by_component(plan, role).values()), rel=0.02)


# --- broken plans


def altered(plan: Plan, change: Callable[[Instruction], Instruction | None]) -> Plan:
    """The plan with every instruction changed, or left out."""
    roles = []
    for role in plan.roles:
        blocks = []
        for block in role.blocks:
            kept = [changed for i in block.instructions if (changed := change(i)) is not None]
            blocks.append(replace(block, instructions=tuple(kept)))
        roles.append(replace(role, blocks=tuple(blocks)))
    return replace(plan, roles=tuple(roles))


def _unless(opcode: str, name: str) -> Callable[[Instruction], Instruction | None]:
    return lambda i: None if i.opcode == opcode and name in (*i.reads, *i.writes) else i


BROKEN: dict[str, tuple[str, Callable[[Instruction], Instruction | None]]] = {
    "no wait after the prefetch": ("T714", _unless("wait", "back.x.l1:i")),
    "no prefetch": ("T714", _unless("prefetch", "back.x.l1:i?")),
    "no wait before the free": ("T715", _unless("wait", "host.x.l1:i?")),
    "use after offload": (
        "T710",
        lambda i: replace(i, reads=tuple("x.l1:i" if n == "back.x.l1:i" else n for n in i.reads)) if i.unit else i,
    ),
    "another copy": (
        "T701",
        lambda i: replace(i, reads=("host.x.l0:i",)) if i.writes == ("back.x.l1:i?",) else i,
    ),
    "state not stored": (
        "T748",
        lambda i: None if "u.state.l0?" in (*i.writes, *i.reads) else i,
    ),
    "update without its state": (
        "T745",
        lambda i: replace(i, updates=("p.l0", "o.l0")) if i.opcode == "optimizer_step" and "p.l0" in i.updates else i,
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_verifier_refuses(name: str) -> None:
    code, change = BROKEN[name]
    assert code in findings(altered(plan_of("dropout", "both"), change))


def test_the_verifier_refuses_more_than_the_host_has() -> None:
    plan = plan_of("dropout", "both")
    settings = tuple((key, "1000" if key == "memory.host_bytes" else text) for key, text in plan.settings)
    assert findings(replace(plan, settings=settings)) == ["T771"]


def test_two_processes_with_state_and_activations_on_the_host_give_the_same_losses(tmp_path: Path) -> None:
    """Real ranks over gloo, bfloat16 with masters, an evaluation between and a checkpoint at the end."""
    host = "host_memory = 1 GiB, host_link = link { bandwidth = 5 GB/s, latency = 10 us }"
    found = []
    for word in ("none", "both"):
        folder = tmp_path / word
        folder.mkdir()
        path = write_spec(folder, f"pipeline = 2, late_check = false, offload = {word}", precision="bf16")
        path.write_text(path.read_text().replace("devices_per_node = 2", f"devices_per_node = 2, {host}"))
        result = go(compile_spec(path).plan, folder).result
        found.append((result["first_loss"], result["final_loss"], result["validation_loss"]))
    assert found[0] == found[1]
