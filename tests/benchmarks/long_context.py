"""Long sequences on real processes: `python -m tests.benchmarks.long_context [--quick] [--tokens N] [--json]`.

long          a model of two layers and two heads of 64 trains on sequences of 131,072 tokens over four ranks
forms         ring, head exchange, mixed and gathered keys beside one process: seconds, bytes of registers, loss
activations   bytes of registers per rank at one, two and four ranks; `activation_ratio` is the degree times the
              share of one rank's bytes that is left: 1 when they fall as 1/c
wire          bytes that the ranks sent, counted while they ran, against the formula
overlap       two ranks in two network namespaces joined by a limited link: how much of the transfers is hidden,
              beside a plan that waits at once and beside the simulation. Needs root; else counted as skipped
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as processes
from titan.compiler.cost.simulate import simulate
from titan.compiler.lower import lower
from titan.compiler.plan.instruction import Instruction
from titan.compiler.plan.program import Block, Plan
from titan.compiler.spec.resolve import resolve
from titan.compiler.spec.schema import Spec
from titan.compiler.strategy import Strategy
from titan.compiler.verify.rings import exchanges, in_ring
from titan.grammar.parser import parse
from titan.runtime.data import SyntheticSource
from titan.runtime.interpreter import Executable
from titan.runtime.state import allocate
from titan.runtime.transport.process_group import ProcessGroupChannel, ProcessGroupTransport
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from tests.benchmarks.slow_link import End, enter, missing, slow_link

LONG, HEADS, WIDTH, LAYERS, VOCAB = 131072, 2, 64, 2, 512
ROWS = 2048  # tokens whose logits are formed at once
MEGABITS = 800


def spec(tokens: int, ranks: int = 1, megabits: int = 1000) -> Spec:
    text = f"""
import clusters.local
model = model {{
    vocab = {VOCAB}, hidden = {HEADS * WIDTH}, layers = {LAYERS} * dense {{ ffn = 256 }}, max_positions = {tokens}
    attention = gqa {{ heads = {HEADS}, kv_heads = {HEADS}, head_dim = {WIDTH} }}, rope = {{ theta = 500000 }}
}}
cluster = local.cpu with {{ nodes = {ranks}, inter.bandwidth = {megabits} Mb/s }}
train {{ sequence = {tokens}, global_batch = 1, precision = fp32, steps = 3, data = synthetic({VOCAB}) }}
"""
    return resolve(parse(text, "long_context.titan"), Path())


def plan(tokens: int, context: int, form: str = "ring", heads: int = 1, **link: int) -> Plan:
    strategy = Strategy(context=context, context_form=form, context_heads=heads, stages=(LAYERS,), loss_rows=ROWS)
    return lower(spec(tokens, context, **link), strategy)


@dataclass(frozen=True, slots=True)
class Ran:
    """What one rank did: seconds of each step and of its waits for ring transfers, bytes it sent around the ring, most
    bytes of registers, and of the process (0 where other work came before)."""

    losses: tuple[float, ...]
    seconds: tuple[float, ...]
    waited: tuple[float, ...]
    sent: int
    registers: int
    resident: int


def _rank(rank: int, found: Plan, steps: int, folder: Path, ends: tuple[End, ...]) -> None:
    torch.set_num_threads(1)
    if ends:
        enter(ends[rank][0])
    sent = _count_sends()
    store = FileStore(str(folder / "store"), found.mesh.world_size)
    transport = ProcessGroupTransport(found, rank, store, interface=ends[rank][1] if ends else "lo")
    executable = Executable(found, rank, transport, allocate(found, rank), SyntheticSource(VOCAB, seed=3))
    instructions = [i for *_, i in found.role_of(rank).instructions()]
    ring = {i.writes[0] for i in instructions if in_ring(i)}
    waits = [i.opcode == "wait" and i.reads[0] in ring for i in instructions]
    reports, seconds, waited = [], [], []
    for step in range(steps):
        start, blocked = time.perf_counter(), 0.0
        run = executable.run(step)
        while True:
            try:
                handle = next(run)
            except StopIteration as end:
                reports.append(end.value)
                break
            began = time.perf_counter()
            while not handle.done():
                time.sleep(2e-5)
            blocked += (time.perf_counter() - began) * waits[executable.position]
        seconds.append(time.perf_counter() - start)
        waited.append(blocked)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    losses = tuple(float(r.loss) for r in reports)
    ran = Ran(losses, tuple(seconds), tuple(waited), sent[0] // steps, reports[-1].peak_bytes, resident)
    torch.save(ran, folder / f"rank{rank}")


def _count_sends() -> list[int]:
    """Bytes that channels send from now on in this process."""
    total, send = [0], ProcessGroupChannel.send

    def counted(self: ProcessGroupChannel, value: Tensor) -> Any:
        total[0] += value.nbytes
        return send(self, value)

    ProcessGroupChannel.send = counted  # type: ignore[method-assign]
    return total


def run(found: Plan, steps: int, ends: tuple[End, ...] = ()) -> tuple[Ran, ...]:
    """One process per rank; what each did."""
    with tempfile.TemporaryDirectory() as name:
        folder, size = Path(name), found.mesh.world_size
        processes.start_processes(_rank, (found, steps, folder, ends), nprocs=size, start_method="fork")
        return tuple(torch.load(folder / f"rank{rank}", weights_only=False) for rank in range(size))


def formula(tokens: int, ring: int, size: int = 4) -> int:
    """Bytes that a rank sends around the ring in a step: keys and values forward, again backward with their gradients,
    2 S h_kv (n-1)/n elements each time."""
    return LAYERS * 3 * 2 * tokens * HEADS * WIDTH * (ring - 1) // ring * size


def long(tokens: int, ranks: int, steps: int) -> dict[str, Any]:
    found = run(plan(tokens, ranks), steps)
    return {
        "tokens": tokens,
        "ranks": ranks,
        "losses": found[0].losses,
        "seconds": max(r.seconds for r in found),
        "register_bytes": max(r.registers for r in found),
        "resident_bytes": max(r.resident for r in found),
        "sent": max(r.sent for r in found),
        "expected": formula(tokens, ranks),
    }


def forms(tokens: int, steps: int) -> dict[str, dict[str, Any]]:
    """Every form on the same model and data, beside one process."""
    cases: dict[str, tuple[int, str, int]] = {
        "one": (1, "gathered", 1),
        "ring": (2, "ring", 1),
        "heads": (2, "heads", 1),
        "gathered": (2, "gathered", 1),
        "ring4": (4, "ring", 1),
        "mixed4": (4, "ring", 2),
        "gathered4": (4, "gathered", 1),
    }
    found = {}
    for name, (context, form, heads) in cases.items():
        ran = run(plan(tokens, context, form, heads), steps)
        found[name] = {
            "ranks": context,
            "seconds": min(max(r.seconds[s] for r in ran) for s in range(steps)),
            "register_bytes": max(r.registers for r in ran),
            "loss": ran[0].losses[-1],
            "sent": max(r.sent for r in ran),
            "expected": formula(tokens, context // heads) // heads if form == "ring" else 0,
        }
    return found


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


def overlap(tokens: int, steps: int, megabits: int) -> dict[str, Any]:
    """Seconds in which a step waits for the ring, with the plan's overlap and without."""
    reason = missing()
    if reason:
        return {"skipped": reason}
    found = plan(tokens, 2, megabits=megabits)
    with slow_link(megabits) as ends:
        shown, plain = (run(p, steps, ends) for p in (found, waiting_at_once(found)))

    def best(ran: tuple[Ran, ...], of: Callable[[Ran], tuple[float, ...]]) -> float:
        return min(max(of(r)[s] for r in ran) for s in range(1, steps))  # the first step warms up

    timeline = simulate(found)
    exposed, serial = best(shown, lambda r: r.waited), best(plain, lambda r: r.waited)
    return {
        "tokens": tokens,
        "megabits": megabits,
        "transfer_seconds": formula(tokens, 2) * 8 / megabits / 1e6,
        "seconds": best(shown, lambda r: r.seconds),
        "seconds_without": best(plain, lambda r: r.seconds),
        "exposed_seconds": exposed,
        "exposed_without": serial,
        "predicted_exposed": timeline.exposed_comm_fraction * timeline.seconds,
        "hidden_share": 1 - exposed / serial,
    }


def measure(quick: bool, tokens: int) -> dict[str, Any]:
    small = 2048 if quick else 8192
    compared = forms(small, 2)
    table = {"1": compared["one"], "2": compared["ring"], "4": compared["ring4"]}
    whole = compared["one"]["register_bytes"]
    trained = long(tokens, 4, 1 if quick else 3)
    rings = [compared[name] for name in ("ring", "ring4", "mixed4")] + [trained]
    try:
        hidden = overlap(8192 if quick else 16384, 3, MEGABITS)
    except OSError as error:
        hidden = {"skipped": f"no namespaces: {error}"}
    return {
        "tokens": trained["tokens"],
        "long": trained,
        "forms": compared,
        "activation_ratio": {c: found["register_bytes"] * int(c) / whole for c, found in table.items()},
        "wire_bytes_exact": all(found["sent"] == found["expected"] for found in rings),
        "hidden_share": hidden.get("hidden_share"),
        "overlap": hidden,
        "peer": "torch context_parallel does not run on a CPU: absent",
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="shorter sequences, one step")
    parser.add_argument("--tokens", type=int, default=0, help=f"length of the long sequence; {LONG} without --quick")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    found = measure(options.quick, options.tokens or (16384 if options.quick else LONG))
    if options.json:
        print(json.dumps(found))
        return 0
    for key, value in found.items():
        print(f"{key:18} {value}", file=sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
