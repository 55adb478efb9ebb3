"""`titan run`."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from titan.compiler.commands.output import print_json, show
from titan.compiler.commands.runtime import require_runtime
from titan.compiler.commands.sources import load
from titan.compiler.commands.verify import findings
from titan.grammar.diagnostics import Diagnostic, TitanError

if TYPE_CHECKING:
    from titan.compiler.plan.program import Plan

FOLDER = click.Path(path_type=Path, file_okay=False)


@click.command(epilog="Example: titan run examples/quickstart.titan --steps 50     or: srun -n 16 titan run SPEC")
@click.argument("source", metavar="SPEC|PLAN")
@click.option("--steps", type=click.IntRange(min=1), help="End at this step instead of the plan's last one.")
@click.option("--resume", type=FOLDER, help="Go on from the newest save in a run's folder.")
@click.option("--log-dir", type=FOLDER, help="Folder for log, plan and checkpoints (default: runs/NAME-TIME).")
@click.option(
    "--save-every",
    type=click.IntRange(min=0),
    default=500,
    show_default=True,
    help="Steps between saves; 0: only at the end.",
)
@click.option(
    "--replay-tiers",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Follow the recompute tiers that an earlier run chose: its folder `tiers`.",
)
@click.option(
    "--device",
    type=click.Choice(("auto", "cpu", "cuda")),
    default="auto",
    show_default=True,
    help="What ranks compute on.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as one object to stdout at the end.")
def run(
    source: str,
    steps: int | None,
    resume: Path | None,
    log_dir: Path | None,
    save_every: int,
    replay_tiers: Path | None,
    device: str,
    as_json: bool,
) -> int:
    """Train. Starts one process per rank on this machine, or joins the world that torchrun or SLURM has made.

    Ctrl-C finishes the running step, saves and exits; a second one stops at once.
    """
    require_runtime()
    found = load(source)
    refuse_unbuilt(found.plan)
    prove(found.plan)
    if found.compiled is not None:
        show(found.compiled.spec.warnings)
    launch = import_module("titan.runtime.launch")
    path = Path(source)
    options = launch.Options(
        root=path.absolute().parent,
        name=path.stem,
        steps=steps,
        resume=resume,
        log_dir=log_dir,
        save_every=save_every,
        replay_tiers=replay_tiers,
        device=device,
        expectation=import_module("titan.runtime.progress").Expectation(**expectation(found.plan)),
    )
    outcome = launch.train(found.plan, options)
    if as_json and outcome.result is not None:
        print_json(outcome.result)
    code: int = outcome.code
    return code


def refuse_unbuilt(plan: Plan) -> None:
    """T630: the plan has operators that are planned and priced, but not run yet."""
    names = plan.plan_only
    if names:
        message = f"this version cannot run {', '.join(names)}: it plans, proves and prices them"
        raise TitanError(Diagnostic("T630", message))


def prove(plan: Plan) -> None:
    """No plan runs unproved, wherever it comes from."""
    from titan.compiler.verify.proofs import verify

    proofs = verify(plan)
    if not all(proof.ok for proof in proofs.values()):
        raise TitanError(findings(proofs))


def expectation(plan: Plan) -> dict[str, Any]:
    """The predicted step time and what a utilisation is counted against, from the plan alone."""
    from titan.compiler.cost.mfu import MODEL_RULE, UNKNOWN_PEAK, model_flops
    from titan.compiler.cost.simulate import simulate

    flops = model_flops(plan.setting("model"), int(plan.setting("train.sequence")))
    peak = plan.setting("cluster")["device"].get("peak") or {}
    return {
        "step_time_s": simulate(plan).seconds,
        "flops_per_token": flops.exact,
        "mfu_rule": MODEL_RULE,
        "peak_flops": peak.get(plan.setting("train.precision")),
        "unknown_peak": UNKNOWN_PEAK,
    }
