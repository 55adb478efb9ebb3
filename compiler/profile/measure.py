"""The road from a machine to its cluster file: what is measured, in which order, and what becomes of it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any, Protocol

from titan.compiler.cost.curves import Curve
from titan.compiler.plan.frozen import dataclass
from titan.compiler.plan.program import Plan
from titan.compiler.profile.fit import (
    Fitted,
    Watched,
    fit_curve,
    fit_instructions,
    fit_operators,
    peak_rate,
    samples_of,
    shares_of,
)
from titan.compiler.profile.pace import OPERATORS, SECONDS, WARM_UP, Pace, Share
from titan.compiler.profile.probes import plan_of, probes

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
SIZES = (64, 1 << 12, 1 << 16, 1 << 18, 1 << 19, 1 << 20, 1 << 22, 1 << 24)  # bytes
QUICK_SIZES = (64, 1 << 16, 1 << 20)
PRECISIONS = {"f32": "fp32", "bf16": "bf16"}  # plan dtype -> name of a peak
SMALL = 1 << 18  # bytes of a collective that is asked for without copying much
STREAM = 64 << 20  # bytes copied: larger than caches


class Session(Protocol):
    """The runtime's side (`titan.runtime.profile.session`)."""

    device: str
    ranks: int
    cores: int
    version: str

    def watch(self, plan: Plan, warm_up: int, steps: int) -> list[tuple[Any, Any]]: ...
    def collective(self, kind: str, members: int, size: int, times: int) -> tuple[float, float]: ...
    def transfer(self, size: int, times: int) -> float: ...
    def overlap(self, size: int, times: int) -> list[tuple[float, float, float]]: ...
    def polling(self, seconds: float) -> tuple[float, float]: ...
    def stream(self, size: int, times: int) -> float: ...
    def memory(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Measured:
    """All numbers of a cluster file: bytes, bytes/s, FLOP/s, seconds. `left_out`: what there was no time for."""

    device: str
    ranks: int
    cores: int
    version: str
    memory: int
    reserved: int
    stream: float
    peaks: dict[str, float]
    figures: dict[str, float]
    curves: dict[str, Curve]
    left_out: tuple[str, ...] = ()


def groups(ranks: int) -> tuple[int, ...]:
    """Sizes of groups that are measured: powers of two, and all."""
    return tuple(sorted({n for n in (2, 4, 8) if n <= ranks} | ({ranks} if 1 < ranks <= 8 else set())))


def measure(
    session: Session, progress: Callable[[float, str], None], quick: bool = False, seconds: float = SECONDS
) -> Measured:
    """Everything, within so many `seconds`; `progress` is told the share that is done and what comes next."""
    begun = time.perf_counter()
    memory = session.memory()
    shared = memory["total"] // session.ranks if session.device == "cpu" else memory["total"]
    chosen, ahead = probes(session.ranks, session.device, shared, quick), session.device != "cpu"
    lacking = len(probes(session.ranks, session.device, sys.maxsize, quick)) - len(chosen)
    if lacking:
        progress(0.0, f"{lacking} of the largest models are left out: they need more than half of {shared >> 20} MiB")
    total = len(chosen) + 1 + len(groups(session.ranks)) * len(COLLECTIVES) + 1
    steps = iter(range(total + 1))

    def tell(what: str) -> None:
        progress(next(steps) / total, what)

    tell("memory")
    stream = session.stream(STREAM << (4 if ahead else 0), 5)
    watched: list[tuple[Plan, list[Watched]]] = []
    pace, left_out = Pace(chosen, begun + OPERATORS * seconds), list[str]()
    for probe in chosen:
        times = min(pace.steps(probe), 2 if quick else probe.steps)
        tell(f"operators: {probe}")
        started = time.perf_counter()
        if not times:
            left_out.append(str(probe))
        else:
            plan = plan_of(probe)
            watched.append((plan, [Watched(*found) for found in session.watch(plan, WARM_UP, times)]))
        pace.done(probe, times, time.perf_counter() - started)
    host = fit_instructions(watched, ahead)
    interpreter = host.figures["instruction_seconds"], host.figures["call_seconds"]
    samples = [
        sample
        for plan, ranks in watched
        for sample in samples_of(plan, ranks, None if ahead else shares_of(plan, ranks, *interpreter))
    ]
    operators = fit_operators(samples)
    figures, curves = {**operators.figures, **host.figures}, {**operators.curves, **host.curves}
    figures |= _interference(session, quick)
    share = Share(total - len(chosen) - 1, begun + seconds)
    communication = _communication(session, tell, quick, figures["communication_load"], share)
    curves, figures = curves | communication.curves, figures | communication.figures
    peaks = {dtype: rate for dtype in PRECISIONS if (rate := peak_rate(samples, dtype))}
    progress(1.0, "done")
    return Measured(
        session.device, session.ranks, session.cores, session.version, shared, memory["base"], stream, peaks,
        figures | {"communicator_bytes": float(memory["communicator"])}, curves, tuple(left_out),
    )  # fmt: skip


def _interference(session: Session, quick: bool) -> dict[str, float]:
    """What a running collective takes of a core, and how much longer compute beside it takes.

    Alone a gather takes g seconds and compute c; begun together t. While the gather runs, n ranks and their shares l
    of a core lie on n cores, so both take 1 + l times as long: t = c + l g. Of the three as they follow each other:
    in the next moment the machine may be faster.
    """
    if session.ranks < 2:
        return {"communication_load": 1.0}
    found = session.overlap(1 << 22 if not quick else 1 << 20, 4 if quick else 40)
    load = min(max(median((both - compute) / gather for gather, compute, both in found), 0.05), 1.0)
    waiting, seconds = session.polling(0.2 if quick else 1.0)
    return {
        "communication_load": load,
        "overlap_slowdown": 1.0 + load,
        "polling_load": min(waiting, 1.0),
        "polling_seconds": seconds,
    }


def _communication(session: Session, tell: Callable[[str], None], quick: bool, load: float, share: Share) -> Fitted:
    """Curves of collectives by members of the group, and of messages; of groups that do not have a core each, what they
    would take with one. Where ranks do the work themselves, the time in which they ask for what is small."""
    sizes, found, asked = QUICK_SIZES if quick else SIZES, Fitted(), list[float]()
    for members in groups(session.ranks):
        crowded = max(members * load / session.cores, 1.0) if session.cores else 1.0
        for kind in COLLECTIVES:
            tell(f"{kind} over {members} ranks")
            points, part = [], share.next()
            for size in sizes:
                seconds, asking = session.collective(kind, members, size, _times(size, quick, part))
                points.append((float(size), seconds / crowded))
                asked += [asking] if size <= SMALL and members <= (session.cores or members) else []
            found.curves[f"{kind}_{members}"] = fit_curve(points)
    tell("messages")
    if session.ranks > 1:
        part = share.next()
        points = [(float(size), session.transfer(size, _times(size, quick, part))) for size in sizes]
        found.curves["send"] = fit_curve(points)
    found.figures["issue_seconds"] = median(asked) if asked and session.cores else 0.0
    return found


def _times(size: int, quick: bool, share: float) -> int:
    """Repetitions, of which there is time for a share."""
    return max(3 if quick else round((4 if size > 1 << 21 else 12) * share), 3)
