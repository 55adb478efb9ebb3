"""The training loop of one rank: steps, validation, saves, and the records that it hands to whoever watches.

Every rank makes the same decisions, from the plan, the job and announcements that all read alike (`control`); nothing
here looks at this rank's own clock, memory or luck.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan.grammar.diagnostics import Diagnostic, TitanError
from titan.runtime import checkpoint
from titan.runtime.ahead import Ahead, Settled
from titan.runtime.drive import Program, drive
from titan.runtime.interpreter import Executable, usual
from titan.runtime.optimizer import Training
from titan.runtime.rehearsal import rehearse
from titan.runtime.state import allocate, fill
from titan.runtime.watermark import Decision, Replay, Watermark, decision_text, read_decisions

if TYPE_CHECKING:
    import torch
    from titan.compiler.plan.program import Plan
    from titan.runtime.data import TokenSource
    from titan.runtime.interpreter import StepReport
    from titan.runtime.world import World

Emit = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be done, equal on every rank.

    Steps count from 0: `first` is the first to run (the saved ones are done), `stop` the one before which to end. Every
    `validate_every` steps, and at the end, the held-out loss over `validation_batches` global batches is measured.
    Every `save_every` steps, and at the end, a save is made (0: only at the end). `replay` is the folder with the
    recompute tiers of an earlier run, which this one is to follow.
    """

    plan_hash: str
    source: TokenSource
    validation: TokenSource | None
    validation_batches: int
    validate_every: int
    first: int
    stop: int
    saved: checkpoint.Saved | None
    checkpoints: Path
    save_every: int
    replay: Path | None = None


class RankRun:
    """One rank in its world, ready to step."""

    def __init__(self, plan: Plan, world: World, job: Job, emit: Emit) -> None:
        compare_plans(job.plan_hash, world)
        from titan.runtime.transport.process_group import ProcessGroupTransport

        self.plan, self.world, self.job, self.emit = plan, world, job, emit
        rank, device = world.rank, world.device
        transport = ProcessGroupTransport(plan, rank, world.store, device, world.interface, world.generation)
        self.state = allocate(plan, rank, device, initialize=False)
        if device.type == "cuda" and plan.mesh.world_size > 1:
            rehearse(plan, self.state, job.source, device)
        if job.saved is None:
            fill(plan, self.state)
        else:
            checkpoint.load(job.saved, self.state)
        recorder = world.control.recorder(rank)

        def bind(source: TokenSource, order: str) -> Executable:
            return Executable(
                plan, rank, transport, self.state, source, order, delay=recorder, watermark=partial(_policy, job, rank)
            )

        self._rates = Training.of(plan)
        late = bool(plan.setting("strategy", {}).get("late_check"))
        self._ahead = Ahead(partial(bind, job.source), self._rates) if late else None
        self.training: Program = self._ahead or bind(job.source, "train")
        self.evaluation = None if job.validation is None else bind(job.validation, "evaluate")
        self.current: Program = self.training
        self.step = job.first
        self._tokens = int(plan.setting("train.global_batch")) * int(plan.setting("train.sequence"))
        self._last_saved = job.first if job.saved is not None else -1

    def run(self) -> None:
        """All steps, then the last save and the last validation; a requested stop skips the latter."""
        job, control = self.job, self.world.control
        done, stopped = job.first, False
        for step in range(job.first, job.stop):
            if self.world.rank == 0 and control.stop_requested():
                control.announce_last(step)
            self._step(step)
            done = step + 1
            if control.last_step() <= step:
                stopped = done < job.stop
                break
            if job.save_every and done % job.save_every == 0 and done < job.stop:
                self._save(done)
            if job.validate_every and done % job.validate_every == 0 and done < job.stop:
                self._validate(done)
        self._save(done)
        if not stopped:
            self._validate(done)
        self._end(done, stopped)

    def _drive(self, executable: Program, step: int) -> StepReport:
        self.current, self.step = executable, step
        order = "evaluate" if executable is self.evaluation else "train"
        self.world.control.mark(self.world.rank, step, order)
        return drive(executable, step, self.world.control, self.world.local_size)

    def _step(self, step: int) -> None:
        start = time.perf_counter()
        report = self._drive(self.training, step)
        seconds = time.perf_counter() - start
        for certain in (report,) if self._ahead is None else self._ahead.take():
            self._record(certain, seconds)

    def _settle(self, done: int) -> None:
        """Before the state is looked at: a step that was taken ahead of its check becomes certain."""
        if self._ahead is None:
            return
        start = time.perf_counter()
        drive(Settled(self._ahead), done, self.world.control, self.world.local_size)
        for certain in self._ahead.take():
            self._record(certain, time.perf_counter() - start)

    def _record(self, report: StepReport, seconds: float) -> None:
        if self.world.rank != 0:
            return
        self.emit(
            {
                "event": "step",
                "step": report.step + 1,
                "loss": report.loss,
                "grad_norm": report.grad_norm,
                "learning_rate": self._rates.learning_rate_at(report.step),
                "step_time_s": seconds,
                "tokens_per_s": self._tokens / seconds,
                "register_peak_bytes": report.peak_bytes,
                "process_peak_bytes": peak_memory(self.world.device),
                "skipped": report.skipped,
            }
        )

    def _validate(self, done: int) -> None:
        """Mean held-out loss over the batches, which hold equally many labels each."""
        if self.evaluation is None:
            return
        self._settle(done)
        start = time.perf_counter()
        losses = [self._drive(self.evaluation, batch).loss for batch in range(self.job.validation_batches)]
        if self.world.rank == 0:
            mean = sum(loss for loss in losses if loss is not None) / len(losses)
            seconds = time.perf_counter() - start
            self.emit({"event": "validation", "step": done, "validation_loss": mean, "seconds": seconds})

    def _save(self, done: int) -> None:
        self._settle(done)
        if done == self._last_saved:
            return
        start = time.perf_counter()
        if not checkpoint.save(self.job.checkpoints, self.job.plan_hash, done, self.state, self.world):
            raise TitanError(
                Diagnostic("T614", f"rank {self.world.rank} stopped while saving step {done}"), exit_code=1
            )
        self._last_saved = done
        if self.world.rank == 0:
            self.emit({"event": "saved", "step": done, "seconds": time.perf_counter() - start})

    def _end(self, done: int, stopped: bool) -> None:
        """The last record, with the largest peak of any rank; rank 0 leaves last, for it may host the store."""
        store, size = self.world.store, self.world.size
        store.set(f"end/{self.world.rank}", json.dumps(peak_memory(self.world.device)))
        if self.world.rank != 0:
            return
        names = [f"end/{rank}" for rank in range(size)]
        while not store.check(names) and not self.world.control.aborted():
            time.sleep(0.002)
        peaks = [int(json.loads(store.get(name))) for name in names]
        self.emit({"event": "end", "step": done, "stopped": stopped, "peak_memory_bytes": max(peaks)})


def _policy(job: Job, rank: int, executable: Executable) -> Watermark:
    """Chooses recompute tiers, or follows an earlier run; every change goes to the rank's file in the run's folder."""
    file = job.checkpoints.parent / "tiers" / f"rank{rank}.jsonl"

    def record(decision: Decision) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as lines:
            lines.write(decision_text(decision) + "\n")

    if job.replay is None:
        return usual(executable, record)
    earlier = job.replay / file.name
    found = usual(executable, record, Replay)
    assert isinstance(found, Replay)
    return found.follow(read_decisions(earlier) if earlier.exists() else ())


def compare_plans(plan_hash: str, world: World) -> None:
    """Before anything else: all ranks must hold rank 0's plan; none goes on before all have agreed. Errors: T615."""
    if world.rank == 0:
        world.store.set("plan", plan_hash)
    _await(world, lambda: world.store.check(["plan"]))
    first = world.store.get("plan").decode()
    if first != plan_hash:
        message = f"rank {world.rank} has plan {plan_hash[:16]}, rank 0 has plan {first[:16]}"
        raise TitanError(Diagnostic("T615", message), exit_code=1)
    world.store.add("agreed", 1)
    _await(world, lambda: world.store.add("agreed", 0) == world.size)


def _await(world: World, ready: Callable[[], bool]) -> None:
    """Polls the store, looking at the abort flag meanwhile."""
    while not ready():
        if world.control.aborted():
            raise TitanError(Diagnostic("T614", f"rank {world.rank} stopped while the run began"), exit_code=1)
        time.sleep(0.002)


def peak_memory(device: torch.device) -> int:
    """Bytes: the device allocator's peak, or the largest resident size of this process."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def where(run: RankRun | None) -> str:
    """`step 12, instruction 47 `all_reduce ...``, for messages."""
    if run is None:
        return "before the first step"
    position = run.current.position
    text = " ".join(run.current.describe(position).split())
    return f"step {run.step + 1}, instruction {position} `{text}`"
