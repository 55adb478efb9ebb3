"""`titan plan`: the JSON object and the summary for people."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from titan.compiler.cost.mfu import HARDWARE_RULE, MODEL_RULE, SIMPLE_RULE, UNKNOWN_PEAK, impossible
from titan.compiler.cost.predict import Prediction, predict
from titan.compiler.plan.queues import VARIABLE, queues
from titan.compiler.report.traffic import waiting
from titan.compiler.spec.advice import crossing
from titan.compiler.spec.padding import padding_in_words

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from titan.compiler.plan.program import Plan
    from titan.compiler.search.search import SearchResult
    from titan.compiler.spec.schema import Spec
    from titan.compiler.strategy import Strategy
    from titan.compiler.verify.findings import Proof

WAITING = 0.2  # share of a step in which compute waits for communication
MARGIN = 0.08  # share of a device below which what is left over is no reserve
ROWS = 12  # of the stage table; what is between the first and the last is left out
DEGREES = ("region", "pipeline", "data", "context", "tensor")


def plan_json(spec: Spec, result: SearchResult, proofs: Mapping[str, Proof]) -> dict[str, Any]:
    """The object that `titan plan --json` prints: numbers in base units, shares as fractions, None where unknown."""
    found = predict(result.plan, result.timeline, result.ledger, result.bound)
    s = result.strategy
    return {
        "world_size": result.plan.mesh.world_size,
        "mesh": {axis: getattr(s, axis) for axis in (*DEGREES, "expert")},
        "micro_batch": s.micro_batch,
        "micro_batches": s.micro_batches,
        "schedule": s.schedule,
        "chunks": max(len(role.layers) for role in result.plan.roles),
        "zero": s.zero,
        "recompute": s.recompute,
        "offload": s.offload,
        "sequence_parallel": s.sequence_parallel,
        "context_form": s.context_form,
        "predicted": found.figures,
        "rules": {"mfu": MODEL_RULE, "mfu_6n": SIMPLE_RULE, "hfu": HARDWARE_RULE, "peak_flops": found.used.peak},
        "memory": [
            {"pipeline": r.pipeline, **r.components, "upper": r.upper, "host": sum(r.host.values())}
            for r in result.ledger.roles
        ],
        "memory_limit_bytes": result.ledger.limit,
        "stages": list(s.stages),
        "search": _search_json(result),
        "runners_up": [
            {"strategy": one_line(r.strategy), "step_time_s": r.seconds, "peak_memory_bytes": r.memory}
            for r in result.runners_up
        ],
        "reasons": [{"choice": key, "origin": origin, "reason": text} for key, origin, text in s.reasons],
        "verified": {name: proof.ok for name, proof in proofs.items()}
        | {"seconds": sum(proof.seconds for proof in proofs.values())},
        "job": _job_json(found),
        "environment": {VARIABLE: str(queues(result.plan).number)},
        "warnings": warnings(spec, result.strategy, found),
    }


def _search_json(result: SearchResult) -> dict[str, Any]:
    return {
        "candidates": result.candidates,
        "priced": result.priced,
        "fitting": result.fitting,
        "compiled": result.compiled,
        "seconds": result.seconds,
        "notes": list(result.notes),
    }


def _job_json(found: Prediction) -> dict[str, Any] | None:
    job = found.job
    if job is None:
        return None
    return {name: getattr(job, name) for name in ("steps", "tokens", "days", "device_hours", "cost")}


def warnings(
    spec: Spec, strategy: Strategy, found: Prediction, environment: Mapping[str, str] = os.environ
) -> list[str]:
    """Everything that the user should know before relying on the plan, each with its code."""
    listed = [f"{w.code}: {w.message}" for w in spec.warnings if w.code != "T310"]  # of the strategy found, below
    filled = padding_in_words(spec.train.sequence, strategy)
    listed += [f"T310: {filled}"] if filled else []
    ledger = found.ledger
    margin = 1 - ledger.peak / spec.cluster.device.memory
    if ledger.verdict == "at risk" or margin < MARGIN:
        listed.append(
            f"T303: memory at risk: {_gib(ledger.peak)} predicted, {_gib(ledger.upper)} at most,"
            f" limit {_gib(ledger.limit)}; the reserve of the device for fragmentation is a margin of {margin:.1%}"
        )
    if found.used.peak is None:
        listed.append(f"T305: {UNKNOWN_PEAK}; times are rough until then")
    slow = crossing(spec, strategy.tensor)
    if slow is not None and not any(w.code == slow.code for w in spec.warnings):
        listed.append(f"{slow.code}: {slow.message}: no layout within a node was found better")
    if found.timeline.exposed_comm_fraction > WAITING:
        listed.append(f"T322: {waiting(found)}")
    given = environment.get(VARIABLE)
    if given is not None and found.used.peak is not None and (against := queues(found.plan).against(given)):
        listed.append(f"T323: {against}")
    return listed + _impossible(spec, found)


def _impossible(spec: Spec, found: Prediction) -> list[str]:
    """Utilisation above 100%: figures of the cluster that promise more than its peak."""
    peak, of = found.used.peak, f"{spec.cluster.device.name}, {spec.train.precision}"
    shares = (("MFU", found.used.mfu, MODEL_RULE), ("HFU", found.hfu, HARDWARE_RULE))
    said = (impossible(kind, (share or 0.0) * (peak or 0.0), peak, f"`{rule}`", of) for kind, share, rule in shares)
    return [f"T306: {text}" for text in said if text]


def one_line(s: Strategy) -> str:
    """Degrees and the choices that matter, in the words of the `parallel` section."""
    parts = [f"{axis} {getattr(s, axis)}" for axis in DEGREES if getattr(s, axis) > 1] or ["one rank"]
    if s.expert > 1:
        parts.append(f"expert {s.expert}" + (f", expert width over {s.expert_tensor}" if s.expert_tensor > 1 else ""))
    parts.append(f"micro-batch {s.micro_batch} x {s.micro_batches}")
    if s.pipeline > 1:
        parts.append(s.schedule)
    if s.late_check:
        parts.append("norm checked late")
    if s.context > 1:
        natural = s.context_form == "ring" and s.context_order == "contiguous"
        parts.append(f"context {s.context_form}" + (" in contiguous order" if natural else ""))
    if s.tensor > 1 and s.sequence_parallel:
        parts.append("sequence parallel")
    if s.data * s.context > 1 or s.zero:
        parts.append(f"zero {s.zero}")
    if s.recompute != "none":
        parts.append(f"recompute {s.recompute}")
    if s.offload != "none":
        parts.append(f"offload {s.offload}" + (f" of {len(s.offloaded)} layers" if s.offloaded else ""))
    return ", ".join(parts)


def print_summary(spec: Spec, result: SearchResult) -> None:
    """The summary for people, to stderr; what was proved of the plan follows."""
    found = predict(result.plan, result.timeline, result.ledger, result.bound)
    console = _console()
    model, cluster = spec.model.name, spec.cluster
    console.print(f"[bold]{model}[/bold] on {cluster.world_size:,} x {cluster.device.name} ({cluster.name})")
    console.print(f"  {one_line(result.strategy)}")
    console.print(_prediction_table(found))
    console.print(_stage_table(result.plan, found))
    for line in (*_job_lines(found), *_search_lines(result)):
        console.print(f"  {line}", markup=False)
    for text in warnings(spec, result.strategy, found):
        console.print(f"  [yellow]warning[/yellow] {text.replace('[', chr(92) + '[')}")


def print_proofs(plan: Plan, proofs: Mapping[str, Proof]) -> None:
    """The last line of a summary."""
    failed = [name for name, proof in proofs.items() if not proof.ok]
    seconds = sum(proof.seconds for proof in proofs.values())
    if failed:
        _console().print(f"[red]not proved[/red]: {', '.join(failed)}")
    else:
        proved = f"[green]proved[/green] for all {plan.mesh.world_size:,} ranks in {seconds:.2f} s"
        _console().print(f"{proved}: {', '.join(proofs)}")


def _console() -> Console:
    from rich.console import Console

    console = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)
    if not console.is_terminal:
        console.width = 120
    return console


def _plain_table() -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    return Table(box=SIMPLE_HEAD, pad_edge=False)


def _prediction_table(found: Prediction) -> Table:
    table = _plain_table()
    for name in ("predicted", "", "by which rule"):
        table.add_column(name, justify="right" if not name else "left")
    for row in _prediction_rows(found):
        table.add_row(*row)
    return table


def _prediction_rows(found: Prediction) -> list[tuple[str, str, str]]:
    used, times, ledger = found.used, found.timeline, found.ledger
    bound = found.lower_bound
    memory = f"at most {_gib(ledger.upper)}, limit {_gib(ledger.limit)}: {ledger.verdict}"
    distance = f"{times.seconds / bound:.2f} x: what every plan within the wishes must do"
    return [
        ("step", _seconds(times.seconds), "simulation of every program of the plan"),
        ("tokens/s per device", f"{used.tokens_per_second:,.1f}", ""),
        ("TFLOP/s per device", f"{used.tflops:,.3g}", MODEL_RULE),
        ("MFU", _share(used.mfu), f"of {used.peak / 1e12:,.1f} TFLOP/s" if used.peak else UNKNOWN_PEAK),
        ("MFU by 6N", _share(used.mfu_simple), SIMPLE_RULE),
        ("HFU", _share(found.hfu), HARDWARE_RULE),
        ("bubble", _share(times.bubble_fraction), "flush: all ranks start and end the step together"),
        ("exposed communication", _share(times.exposed_comm_fraction), "compute waits for communication in progress"),
        ("peak memory", _gib(ledger.peak), memory),
        ("lower bound of the step", _seconds(bound), distance),
        *_cost_rows(found),
    ]


def _cost_rows(found: Prediction) -> list[tuple[str, str, str]]:
    cost = found.cost_per_token
    if not cost:
        return []
    return [("cost", f"${1e6 * cost:.3g}", f"per million tokens: {1 / cost:,.0f} tokens per dollar")]


COLUMNS = {
    "params": ("parameters",),
    "grads": ("gradients",),
    "optim": ("optimizer",),
    "activ": ("activations", "workspace", "buffers"),
    "other": ("communicators", "allocator", "reserved"),
}


def _stage_table(plan: Plan, found: Prediction) -> Table:
    """One row per run of pipeline ranks that are alike: layers, shares of the step, memory."""
    table = _plain_table()
    unit, total = (2**30, "GiB") if found.ledger.peak >= 4 * 2**30 else (2**20, "MiB")
    for name in ("rank", "layers", "busy", "bubble", *COLUMNS, total, "at most"):
        table.add_column(name, justify="right", no_wrap=True)
    rows: list[tuple[list[str], list[int]]] = []
    for role, time, memory in zip(plan.roles, found.timeline.roles, found.ledger.roles, strict=True):
        layers = "+".join(str(len(chunk)) for chunk in role.layers)
        cells = [layers, _share(time.busy / found.timeline.step, 0), _share(time.bubble / found.timeline.step, 0)]
        sums = [sum(memory.components[part] for part in parts) for parts in COLUMNS.values()]
        cells += [f"{size / unit:.1f}" for size in (*sums, memory.point, memory.upper)]
        if rows and rows[-1][0] == cells:
            rows[-1][1].append(role.pipeline)
        else:
            rows.append((cells, [role.pipeline]))
    shown = rows if len(rows) <= ROWS else [*rows[: ROWS // 2], ([], []), *rows[-ROWS // 2 :]]
    for cells, ranks in shown:
        table.add_row(f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else str(ranks[0]) if ranks else "...", *cells)
    return table


def _job_lines(found: Prediction) -> list[str]:
    job = found.job
    if job is None:
        return []
    size = f"{job.steps:,} steps, {job.tokens:,} tokens"
    line = f"whole job: {size}, {_days(job.days)}, {_hours(job.device_hours)} device-hours"
    return [line + (f", cost ${job.cost:,.0f}" if job.cost is not None else "")]


def _search_lines(result: SearchResult) -> list[str]:
    lines = [
        f"search: {result.candidates:,} legal strategies, {result.priced:,} priced, {result.fitting:,} fit,"
        f" {result.compiled} compiled and simulated, {result.seconds:.2f} s"
    ]
    lines += [
        f"  runner-up: {_seconds(r.seconds)}, {_gib(r.memory)}: {one_line(r.strategy)}" for r in result.runners_up[:3]
    ]
    return lines + [f"  note: {note}" for note in result.notes]


def _share(value: float | None, digits: int = 1) -> str:
    return "unknown" if value is None else f"{value:.{digits}%}"


def _seconds(value: float) -> str:
    return f"{value:.3f} s" if value >= 1 else f"{value * 1e3:.2f} ms"


def _days(days: float) -> str:
    return (
        f"{days:,.1f} days"
        if days >= 1
        else f"{days * 24:.1f} hours"
        if days * 24 >= 1
        else f"{days * 1440:.1f} minutes"
    )


def _hours(hours: float) -> str:
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.2g}"


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
