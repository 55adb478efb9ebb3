"""Derived quantities against formulas, and the walk over blocks against one over every instruction."""

from __future__ import annotations

from dataclasses import replace

import pytest
from titan.compiler.plan.instruction import Instruction
from titan.compiler.plan.program import Plan, Role
from titan.compiler.plan.sizes import (
    Sizes,
    instruction_bytes,
    instruction_flops,
    liveness,
    memory_by_component,
    register_bytes,
)
from titan.compiler.plan.storages import moments

from tests.compiler.plan.small_plans import two_stages
from tests.compiler.verify.tiny import KINDS, plan


def unrolled(found: Plan, role: Role, order: str) -> tuple[int, int, dict[int, int]]:
    """Peak of registers alone, that with what transports and instructions hold beside, and the bytes after each call:
    register by register, whatever they share, and call by call."""
    sizes = Sizes(found)
    live: dict[str, int] = {}
    beside: dict[str, tuple[int, int]] = {}
    registers = peak = 0
    curve = {}
    for position, _, _, instruction in role.instructions(order):
        needed = 0
        if instruction.opcode == "free":
            for name in instruction.reads:
                del live[name]
        elif instruction.opcode == "wait":
            live.pop(instruction.reads[0])
            for name in instruction.writes:
                live[name] = register_bytes(found, name)
            _, needed = beside.get(instruction.reads[0], (0, 0))
        else:
            for name in instruction.writes:
                live[name] = register_bytes(found, name)
            if instruction.row.asynchronous:
                staged = sizes.staged(instruction)
                beside[instruction.writes[0]] = staged.held, staged.landing
            needed = sizes.workspace(instruction)
        registers = max(registers, sum(live.values()))
        peak = max(peak, sum(live.values()) + sum(held for held, _ in beside.values()) + needed)
        if instruction.opcode == "wait":
            beside.pop(instruction.reads[0], None)
        curve[position] = sum(live.values()) + sum(held for held, _ in beside.values())
    return registers, peak, curve


@pytest.mark.parametrize("name", KINDS)
def test_blocks_and_single_instructions_give_the_same_curve(name: str) -> None:
    """Blocks follow shared storages inside them, a walk over the whole order through it all, registers not at all."""
    found = plan(name)
    for role in found.roles:
        for order, calls in role.orders:
            walk = liveness(found, role, order)
            _, most, curve = unrolled(found, role, order)
            whole = moments((i for *_, i in role.instructions(order)), Sizes(found), role)
            least = max((m.live + m.workspace for m in whole), default=0)
            assert least <= walk.peak == walk.registers + walk.workspace <= most
            assert [curve.get(n, walk.curve[n]) for n in range(len(calls))] == list(walk.curve)
            assert walk.curve[-1] == 0


def test_a_receive_counts_from_its_issue() -> None:
    found = two_stages(3)
    second = found.roles[1]
    first = second.blocks[0]
    early = replace(first, name="early", instructions=first.instructions[:1])
    late = replace(first, name="late", instructions=first.instructions[1:])
    calls = tuple(call._replace(block=name) for name in ("early", "late") for call in second.order("train"))
    ahead = replace(second, blocks=(early, late), orders=(("train", calls),))
    size = 4 * 1 * 4 * 8
    assert liveness(found, second).peak == size
    assert liveness(found, ahead).peak == 3 * size
    assert liveness(found, ahead).curve == (size, 2 * size, 3 * size, 2 * size, size, 0)


def test_registers_and_tokens() -> None:
    found = two_stages()
    assert register_bytes(found, "x.l0:i?") == 4 * 32
    assert register_bytes(found, "t.y.l0:2?") == 0
    with pytest.raises(KeyError):
        register_bytes(found, "nothing.l0:i")


def test_flops_of_a_linear_layer_with_relu() -> None:
    found = two_stages()
    product, elements = 2 * 4 * 8 * 8, 4 * 8
    assert instruction_flops(found, Instruction("forward", unit="s0.l0")) == product + elements
    assert instruction_flops(found, Instruction("backward", unit="s0.l0")) == 2 * product + elements
    assert instruction_flops(found, Instruction("backward_input", unit="s0.l0")) == product + elements
    assert instruction_flops(found, Instruction("backward_weight", unit="s0.l0")) == product
    assert instruction_flops(found, Instruction("wait", (), ("t.y.l0:i?",))) == 0


def test_ring_volumes_of_collectives() -> None:
    """Tensor parallelism over 4 (two factors): 8 tokens of width 8 in float64, sharded along the sequence or whole."""
    found = plan("kv")
    whole = 8 * 8 * 8
    for _, block, instruction in (
        (r, b, i) for r in found.roles for b in r.blocks for i in b.instructions if i.row.kind == "collective"
    ):
        traffic = instruction_bytes(found, instruction)
        if (
            instruction.group == "tensor"
            and "dim" in dict(instruction.attributes)
            and block.name.startswith(("F", "B"))
        ):
            assert (traffic.payload, traffic.wire) == (whole, whole * 3 // 4)
        if instruction.opcode == "all_reduce" and instruction.group == "tensor":
            assert traffic.wire == 2 * traffic.payload * 3 // 4


def test_volumes_of_gradient_sums() -> None:
    for name, mode, passes in (("data", "all_reduce", 2), ("zero", "reduce_scatter", 1)):
        found = plan(name)
        sums = [i for b in found.roles[0].blocks for i in b.instructions if i.opcode == "reduce_grad"]
        assert sums and all(i.attribute("mode") == mode for i in sums)
        moved = sum(instruction_bytes(found, i).wire for i in sums)
        assert moved == passes * sum(b.elements * 8 for b in found.buckets) // 2


def test_memory_by_component_is_the_sum_of_what_is_declared() -> None:
    found = plan("half")
    role = found.roles[0]
    parts = memory_by_component(found, role)
    elements = sum(b.elements for b in found.buckets if 0 in b.homes)
    assert parts["parameters"] == 2 * elements  # bf16
    assert parts["gradients"] == 4 * elements  # float32
    assert parts["optimizer"] == 3 * 4 * elements // 2  # two moments and the master copy, sharded over two ranks
    walk = max((liveness(found, role, order) for order, _ in role.orders), key=lambda w: w.peak)
    assert parts["activations"] + parts["workspace"] == walk.peak


def test_the_interpreter_counts_the_same_bytes() -> None:
    from titan.runtime.data import SyntheticSource
    from titan.runtime.loopback import run_loopback

    for name in ("square", "all"):
        found = plan(name)
        (reports,) = run_loopback(found, 1, SyntheticSource(vocabulary=13)).reports
        for rank, report in enumerate(reports):
            role = found.role_of(rank)
            assert report.peak_bytes == unrolled(found, role, "train")[0]
