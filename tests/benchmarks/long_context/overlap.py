"""How much of a ring's transfers hides under its blocks: two ranks in two network namespaces with a limited link.

The same plan runs with its overlap and with every wait right behind its transfer. What a wait costs is the shorter one
of the two ranks' times: the other rank also waits for this one to come so far, and that is no transfer.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.multiprocessing as processes
from titan.compiler.cost.simulate import simulate
from titan.compiler.cost.timeline import Timeline
from titan.compiler.plan.instruction import Instruction
from titan.compiler.plan.program import Block, Plan
from titan.compiler.verify.rings import exchanges
from titan.runtime.attention_blocks import attention_block, attention_block_backward

from tests.benchmarks.long_context.model import HEADS, LAYERS, SIZE, WIDTH, Form, plan
from tests.benchmarks.long_context.ranks import Ran, run
from tests.benchmarks.slow_link import End, Impossible, slow_link

PAIR = Form(2)
PROBED = 4096  # tokens of the block whose speed prices attention


def waiting_at_once(found: Plan) -> Plan:
    """The same plan without overlap: every exchange around a ring is waited for where it is issued."""
    roles = tuple(replace(role, blocks=tuple(map(_at_once, role.blocks))) for role in found.roles)
    return replace(found, roles=roles)


def _at_once(block: Block) -> Block:
    """Values are freed where they were: nothing is read after that, so only waits move."""
    pairs, _ = exchanges(block)
    waits = {i.reads[0]: i for i in block.instructions if i.opcode == "wait"}
    moved: dict[int, list[Instruction]] = {}
    for pair in pairs:
        names = [block.instructions[n].writes[0] for n in (pair.received, pair.sent)]
        moved[max(pair.sent, pair.received)] = [waits[name] for name in names]
    gone = {i.reads[0] for listed in moved.values() for i in listed}
    listed: list[Instruction] = []
    for index, instruction in enumerate(block.instructions):
        if instruction.opcode != "wait" or instruction.reads[0] not in gone:
            listed += [instruction, *moved.get(index, ())]
    return replace(block, instructions=tuple(listed))


def overlap(tokens: int, steps: int, rates: tuple[int, ...]) -> dict[str, Any]:
    """One case per rate of the link, in megabits per second; the smallest share hidden of those whose blocks last
    longer than their transfers."""
    try:
        cases = [_case(tokens, steps, rate) for rate in rates]
    except Impossible as reason:
        return {"skipped": str(reason)}
    able = [case["hidden_share"] for case in cases if case["block_seconds"] > case["transfer_seconds"]]
    return {"hidden_share": min(able, default=None), "cases": cases}


def _case(tokens: int, steps: int, megabits: int) -> dict[str, Any]:
    found = plan(tokens, PAIR, f"nodes = 2, inter.bandwidth = {megabits} Mb/s, {_measured_figures()}")
    with slow_link(megabits) as ends:
        shown, plain = (_measured(p, steps, ends) for p in (found, waiting_at_once(found)))
    timelines = [simulate(p) for p in (found, waiting_at_once(found))]
    exposed, serial = shown["exposed"], plain["exposed"]
    return {
        "tokens": tokens,
        "megabits": megabits,
        "transfer_seconds": 2 * tokens // 2 * HEADS * WIDTH * SIZE * 8 / megabits / 1e6,
        "block_seconds": shown["block"],
        "seconds": shown["seconds"],
        "seconds_without": plain["seconds"],
        "exposed_seconds": exposed,
        "exposed_without": serial,
        "hidden_share": 1 - exposed / serial,
        "predicted_seconds": timelines[0].seconds,
        "predicted_exposed": _exposed(timelines[0]),
        "predicted_without": _exposed(timelines[1]),
    }


def _exposed(timeline: Timeline) -> float:
    return timeline.exposed_comm_fraction * timeline.seconds


def _measured(found: Plan, steps: int, ends: tuple[End, ...]) -> dict[str, float]:
    """Medians over the steps after the first, which warms up. The shortest block is one of forward: two of seven
    products, over all blocks of the layers."""
    ran = run(found, steps, ends)
    later = range(1, steps)
    return {
        "seconds": statistics.median(max(r.seconds[s] for r in ran) for s in later),
        "exposed": statistics.median(_transfers(ran, s) for s in later),
        "block": statistics.median(min(r.attention[s] for r in ran) for s in later) * 2 / 7 / LAYERS / PAIR.ring,
    }


def _transfers(ran: tuple[Ran, ...], step: int) -> float:
    return sum(map(min, zip(*(r.waits[step] for r in ran), strict=True)))


def _measured_figures() -> str:
    """Speed of attention here; the link is as fast as it is set."""
    return f'{attention_figure()}, efficiency.inter = measured(0.95, "headers")'


@cache
def attention_figure() -> str:
    """FLOP/s of attention here, as the language writes it, with as many ranks at work as in the runs."""
    with processes.get_context("fork").Pool(PAIR.context) as pool:
        rate = statistics.median(pool.map(_attention_rate, range(PAIR.context), chunksize=1))
    return f'efficiency.flops = measured({rate:.3g}, "attention here")'


def _attention_rate(_: int) -> float:
    """FLOP/s of one block of attention forward and backward on one thread, whatever else the machine does."""
    torch.set_num_threads(1)
    q, k, v, g = (torch.randn(1, HEADS, PROBED, WIDTH) for _ in range(4))
    seconds = []
    for _ in range(3):
        start = time.process_time()
        out, lse = attention_block(q, k, v, False)
        attention_block_backward(g, q, k, v, out, lse, False)
        seconds.append(time.process_time() - start)
    return 7 * 2.0 * HEADS * WIDTH * PROBED**2 / min(seconds)
