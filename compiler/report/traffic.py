"""Which communication of a plan takes longest, and over which links."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from titan.compiler.cost.machine import read_machine
from titan.compiler.cost.prices import Prices
from titan.compiler.plan.listing import weighted
from titan.compiler.plan.sizes import Sizes

if TYPE_CHECKING:
    from titan.compiler.cost.predict import Prediction
    from titan.compiler.plan.program import Plan

PCIE = 64e9  # bytes/s: what a device has one way on PCIe 5 x16; links of a node that are no faster are of that kind


def traffic(plan: Plan) -> Counter[tuple[str, str]]:
    """Nanoseconds of communication in a step of the busiest role, by (opcode, group), priced alone."""
    prices, sizes = Prices(plan, read_machine(plan.setting("cluster"))), Sizes(plan)
    found: list[Counter[tuple[str, str]]] = []
    for role in plan.roles:
        calls = Counter(role.called("train"))
        total: Counter[tuple[str, str]] = Counter()
        for block in role.blocks:
            for i, times in weighted(block.instructions) if calls[block.name] else ():
                if i.row.asynchronous and sizes.runs(i):
                    total[i.opcode, i.group] += calls[block.name] * times * prices.price(role, i)
        found.append(total)
    return max(found, key=lambda total: total.total())


def waiting(found: Prediction) -> str:
    """What a plan waits for, in words."""
    share, plan = found.timeline.exposed_comm_fraction, found.plan
    (opcode, group), spent = traffic(plan).most_common(1)[0]
    machine = read_machine(plan.setting("cluster"))
    text = f"{share:.0%} of the step waits for communication, most of it {opcode} over {group or 'pipeline'}"
    text += f" ({spent * 1e-9:.3g} s)"
    inside = machine.intra.bandwidth / machine.figures["intra"]
    if inside <= PCIE and machine.peaks and machine.devices_per_node > 1:
        text += f"; links inside a node carry {inside / 1e9:.0f} GB/s, as PCIe does"
    return text
