"""From a plan to a run: prepares the job once, then starts local ranks or takes this process' place in a world.

Whatever can be wrong with a run (data, folder, checkpoint, memory, size of the world) is found here, before any rank
exists and before anything is written.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from titan.compiler.plan.file import plan_hash, write_plan
from titan.compiler.plan.program import Plan
from titan.compiler.plan.queues import set_queues
from titan.compiler.plan.sizes import Sizes, memory_by_component
from titan.grammar.diagnostics import Diagnostic, Note, TitanError
from titan.runtime import checkpoint
from titan.runtime.log import Log
from titan.runtime.progress import Expectation, Progress
from titan.runtime.run import Job
from titan.runtime.world import Membership, membership

MOST_LOCAL_RANKS = 256
DEFAULT_BATCHES = 8  # of validation, when the spec does not say
SAVE_EVERY = 500
ROOT = "data_root"  # file of a run's folder


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says. `root`: the folder from which paths of data count; `steps` None: the plan's."""

    root: Path
    name: str = "run"
    steps: int | None = None
    resume: Path | None = None
    log_dir: Path | None = None
    save_every: int = SAVE_EVERY
    replay_tiers: Path | None = None
    device: str = "auto"
    expectation: Expectation = field(default_factory=Expectation)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Exit code and, on the process that watches the run, its result."""

    code: int
    result: dict[str, Any] | None


def train(plan: Plan, options: Options) -> Outcome:
    """Runs a plan. Errors (exit code 2) before anything is started: T5xx data, T607 to T609, T617 to T622;
    afterwards (exit code 1) T616 with the failure of the rank that failed first."""
    from titan.runtime.devices import choose_device

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # threads would not survive the fork
    cuda = options.device == "cuda" or (options.device == "auto" and Path("/dev/nvidiactl").exists())
    against = set_queues(plan, os.environ) if cuda else ""  # before CUDA starts
    place = membership()
    size = plan.mesh.world_size
    if place is None:
        check_local(plan)
    elif place.size != size:
        message = f"{place.maker} has made a world of {place.size} ranks, the plan is for {size}"
        raise TitanError(Diagnostic("T609", message, nearest=(f"start {size} ranks",)))
    choose_device(options.device, place.local_size if place else size)
    watches = place is None or place.rank == 0
    folder = run_folder(options) if watches else Path()  # the others are told in their world's store
    options = replace(options, root=data_root(options))
    job = prepare(plan, options, folder)
    if not watches:
        return _start(plan, options, job, place, None)
    with locked(folder):
        if not (folder / "run.plan").exists():
            write_plan(plan, folder / "run.plan")
            (folder / ROOT).write_text(f"{options.root}\n")
        tokens = int(plan.setting("train.global_batch")) * int(plan.setting("train.sequence"))
        with Log(folder, job.first if job.saved else None) as log:
            progress = Progress(options.expectation, size, job.first, job.stop, tokens)
            if against:
                progress.say(f"T323: {against}")
            return _start(plan, options, job, place, Watch(progress, log, job, folder))


def _start(plan: Plan, options: Options, job: Job, place: Membership | None, watch: Watch | None) -> Outcome:
    if place is None:
        from titan.runtime.local import run_local

        assert watch is not None
        return run_local(plan, options, job, watch)
    from titan.runtime.join import run_joined

    return run_joined(plan, options, job, place, watch)


class Watch:
    """Progress and log together: what the watching process does with each record."""

    def __init__(self, progress: Progress, log: Log, job: Job, folder: Path) -> None:
        self.progress, self.folder = progress, folder
        self._log, self._job = log, job

    def handle(self, record: dict[str, Any]) -> None:
        self._log.write(record)
        self.progress.handle(record)

    def finish(self) -> dict[str, Any]:
        """Closing lines; the run's result."""
        held_out = self._job.validation
        result = self.progress.result(held_out.unigram_entropy() if held_out is not None else None)
        result["log_dir"] = str(self.folder)
        self.progress.close()
        self.progress.summarise(result)
        self.progress.say(f"log, plan and checkpoints are in {self.folder}")
        return result


def prepare(plan: Plan, options: Options, folder: Path) -> Job:
    """Opens data and the save to go on from; everything that can be wrong is found here."""
    from titan.runtime.data import check_data, open_data, open_validation

    setting = plan.setting
    sequence, batch = int(setting("train.sequence")), int(setting("train.global_batch"))
    stop = options.steps if options.steps is not None else total_steps(plan)
    description = str(setting("train.data") or "")
    if not description:
        near = ("data = shakespeare", 'data = tokens("corpus.tokens")')
        raise TitanError(Diagnostic("T617", "the plan names no data to train on", nearest=near))
    digest = plan_hash(plan)
    saved = checkpoint.find(options.resume, digest, plan.mesh.world_size) if options.resume else None
    if saved is not None and saved.step >= stop:
        message = f"the checkpoint {saved.folder} has {saved.step} steps done, the run is to end at step {stop}"
        raise TitanError(Diagnostic("T617", message, nearest=(f"--steps {saved.step + 1} or more",)))
    source = open_data(description, options.root, sequence, int(setting("train.seed", 0)))
    vocabulary = int(setting("model")["vocab"])
    wishes = setting("train.validation") or {}
    validation = open_validation(wishes.get("data") or description, options.root, sequence)
    problems = check_data(source, sequence, batch, vocabulary)
    if validation is not None:
        problems += check_data(validation, sequence, batch, vocabulary)
    if problems:
        raise TitanError(problems)
    batches = int(wishes.get("batches") or DEFAULT_BATCHES)
    whole = validation.samples // batch if validation is not None else batches
    first = saved.step if saved else 0
    every = int(wishes.get("every") or 0)
    checkpoints = folder / "checkpoints"
    batches = min(batches, whole)
    saves = (saved, checkpoints, options.save_every)
    return Job(digest, source, validation, batches, every, first, stop, *saves, options.replay_tiers)


def total_steps(plan: Plan) -> int:
    """Optimizer steps of the whole training. Errors: T617 when neither steps nor total tokens are given."""
    steps, tokens = plan.setting("train.steps"), plan.setting("train.total_tokens")
    if steps is None and tokens is not None:
        per_step = int(plan.setting("train.global_batch")) * int(plan.setting("train.sequence"))
        return -(-int(tokens) // per_step)
    if steps is None:
        near = ("steps = 1000 in `train`", "titan run SPEC --steps 1000")
        raise TitanError(Diagnostic("T617", "the plan does not say how long to train", nearest=near))
    return int(steps)


def run_folder(options: Options) -> Path:
    """Where the run writes; not made yet. Errors: T618 it holds another run."""
    given = options.log_dir or _resumed_folder(options.resume)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    folder = given or Path("runs") / f"{options.name}-{stamp}-{os.getpid()}"
    if options.resume is None and checkpoint.has_saves(folder / "checkpoints"):
        message = f"{folder} holds the checkpoints of an earlier run; beginning at step 0 would mix the two"
        near = (f"--resume {folder}", "another --log-dir")
        raise TitanError(Diagnostic("T618", message, nearest=near))
    return folder.absolute()


def data_root(options: Options) -> Path:
    """The folder from which paths of data count: a run that goes on reads what it read before, also when its plan is
    now taken from the run's own folder."""
    resumed = _resumed_folder(options.resume)
    try:
        known = Path((resumed / ROOT).read_text().strip()) if resumed else options.root
    except (OSError, ValueError):
        return options.root
    return known if known.is_dir() else options.root


def _resumed_folder(resume: Path | None) -> Path | None:
    """The folder of the run that is gone on with, from it or from a place inside it."""
    if resume is None:
        return None
    if resume.name.startswith("step-"):
        resume = resume.parent
    return resume.parent if resume.name == "checkpoints" else resume


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Makes the run's folder and holds it: one run at a time; the lock ends with the process. Errors: T603, T618."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"the run's folder {folder} cannot be made: {error.strerror}"
        raise TitanError(Diagnostic("T603", message)) from None
    with (folder / "lock").open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            message = f"another run is at work in {folder}"
            raise TitanError(Diagnostic("T618", message, nearest=("another --log-dir",))) from None
        yield


def check_local(plan: Plan) -> None:
    """Refuses, before anything is allocated, what this machine cannot hold. Errors: T607."""
    size = plan.mesh.world_size
    note = Note("on a cluster start it with torchrun or srun, one process per rank")
    if size > MOST_LOCAL_RANKS:
        message = f"the plan is for {size:,} ranks; at most {MOST_LOCAL_RANKS} are started on one machine"
        raise TitanError(Diagnostic("T607", message, notes=(note,)))
    sizes = Sizes(plan)
    each = size // len(plan.roles)
    needed = each * sum(sum(memory_by_component(plan, role, sizes).values()) for role in plan.roles)
    available = available_memory()
    if available is not None and needed > available:
        message = (
            f"the plan's {size} ranks need {needed / 2**30:.1f} GiB together, {available / 2**30:.1f} GiB are free"
        )
        raise TitanError(Diagnostic("T607", message, notes=(note,)))


def available_memory() -> int | None:
    """Bytes that processes may still take on this machine; None where that cannot be known."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return None
