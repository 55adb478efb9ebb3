"""`titan mfu`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import click
from titan.compiler.commands.output import print_json, show, si
from titan.compiler.plan.frozen import dataclass
from titan.grammar.diagnostics import Diagnostic, TitanError

if TYPE_CHECKING:
    from titan.compiler.cost.mfu import Convention
    from titan.compiler.spec.schema import Spec

MEASURES = ("--tokens-per-second", "--tokens-per-second-per-device", "--step-time")
MODEL_TEXT = """import models.{file}
import clusters.local
model = {name}
cluster = local.cpu
train {{
    sequence = {sequence}
    global_batch = 1
}}
"""


@dataclass(frozen=True, slots=True)
class Run:
    """What was measured on what: tokens per second of each device, its peak FLOP/s (None: not known), and how the
    FLOPs of the model may be counted."""

    devices: int
    speed: float
    peak: float | None
    peak_of: str
    rules: tuple[Convention, ...]


@click.command(
    epilog="Example: titan mfu examples/llama3_70b_1024gpu.titan --tokens-per-second 980000     or, without a spec:"
    " titan mfu --parameters 70G --devices 16 --peak '1000 TFLOP/s' --tokens-per-second 24000"
)
@click.argument("spec", required=False)
@click.option("--tokens-per-second", "total", type=float, help="Measured, of the whole job.")
@click.option("--tokens-per-second-per-device", "each", type=float, help="Measured, of one device.")
@click.option("--step-time", type=float, help="Measured seconds of one optimizer step of SPEC.")
@click.option("--parameters", help="Without SPEC: the model's size, as `70G` or `70e9`.")
@click.option("--model", help="Without SPEC: a model of the library, as `llama.llama3_70b`.")
@click.option("--sequence", type=click.IntRange(1, 2**31), help="Without SPEC: tokens of a sequence, with --model.")
@click.option("--devices", type=click.IntRange(1, 2**31), help="Devices of the job; else those of SPEC.")
@click.option("--peak", help="Dense peak of a device, as `989 TFLOP/s`; else that of SPEC's device.")
@click.option("--recompute", type=click.Choice(["none", "full"]), default="none", help="full: hardware FLOPs too.")
@click.option("--json", "as_json", is_flag=True, help="Print one object to stdout.")
def mfu(
    spec: str | None,
    total: float | None,
    each: float | None,
    step_time: float | None,
    parameters: str | None,
    model: str | None,
    sequence: int | None,
    devices: int | None,
    peak: str | None,
    recompute: str,
    as_json: bool,
) -> int:
    """Model FLOPs utilisation of a measured speed by every rule in use: 6N, exact model FLOPs, and how others count."""
    found = _spec(spec, parameters, model, sequence)
    if devices is None and spec is None and each is None:
        raise _usage("without SPEC the number of devices is needed", "--devices 16")
    if recompute == "full" and found is None:
        raise _usage("--recompute full needs the layers that are run again", "SPEC", "--model llama.llama3_70b")
    count = devices or (found.cluster.world_size if found and spec else 1)
    tokens = found.train.tokens_per_step if found and spec else None
    speed = _speed(total, each, step_time, count, tokens)
    run = _run(found, spec is not None, parameters, peak, speed, count, recompute)
    doubtful = _impossible(run)
    show(doubtful)
    if as_json:
        print_json(_object(run) | {"warnings": [f"{d.code}: {d.message}" for d in doubtful]})
    else:
        _print(run)
    return 0


def _spec(path: str | None, parameters: str | None, model: str | None, sequence: int | None) -> Spec | None:
    """The spec that the model comes from; None when only its size is given."""
    from titan.compiler.spec.resolve import load_spec, resolve

    if sum(given is not None for given in (path, parameters, model)) != 1:
        raise _usage("exactly one of SPEC, --parameters and --model says what was trained", "SPEC", "--parameters 70G")
    if sequence is not None and model is None:
        raise _usage("--sequence belongs to --model: SPEC has its own, and --parameters counts without one")
    if path is not None:
        return load_spec(path)
    if model is None:
        return None
    if sequence is None:
        raise _usage("--model needs the length of a sequence, for attention's FLOPs", "--sequence 8192")
    from titan.grammar.parser import parse

    if not re.fullmatch(r"\w+\.\w+", model):
        raise _usage(f"--model {model} names no model of the library", "--model llama.llama3_70b")
    text = MODEL_TEXT.format(file=model.partition(".")[0], name=model, sequence=sequence)
    return resolve(parse(text, "--model"))


def _run(
    spec: Spec | None,
    whole: bool,
    parameters: str | None,
    peak: str | None,
    speed: float,
    devices: int,
    recompute: str,
) -> Run:
    from titan.compiler.cost.mfu import SIMPLE_RULE, Convention, conventions, model_flops

    stated, of = (_quantity("--peak", peak, "flop/s"), "--peak") if peak is not None else (None, "")
    if spec is None:
        billions = re.sub(r"(?<=\d) ?[bB]$", "G", parameters or "")  # `70B`, as names of models say it, are no bytes
        size = _quantity("--parameters", billions, "")
        return Run(devices, speed, stated, of, (Convention("simple", "MFU", 6.0 * size, SIMPLE_RULE),))
    if stated is None and whole:
        stated = spec.cluster.device.peak.get(spec.train.precision)
        of = f"{spec.cluster.device.name}, {spec.train.precision}"
    flops = model_flops(spec.model.model_dump(), spec.train.sequence)
    return Run(devices, speed, stated, of, conventions(flops, recompute))


def _quantity(option: str, text: str, dimension: str) -> float:
    """A positive number, with a unit of the dimension or without one."""
    from titan.grammar.quantities import QuantityProblem, read_quantity

    try:
        value, found = read_quantity(text)
    except QuantityProblem as problem:
        raise _usage(f"{option}: {problem.message}", *problem.nearest) from None
    if found not in ("", dimension):
        raise _usage(f"{option} {text} is in {found}, not {f'in {dimension}' if dimension else 'a plain number'}")
    if value <= 0:
        raise _usage(f"{option} {text} is not possible: it must be > 0")
    return float(value)


def _speed(total: float | None, each: float | None, step_time: float | None, devices: int, tokens: int | None) -> float:
    """Tokens per second and device from the one measure that was given."""
    given = [value for value in (total, each, step_time) if value is not None]
    if len(given) != 1:
        raise _usage(f"{len(given)} measures are given, exactly one is needed", *MEASURES)
    if not 0 < given[0] < float("inf"):
        raise _usage(f"a measured speed or time of {given[0]:g} is not possible: it must be > 0")
    if each is not None:
        return each
    if total is None and tokens is None:
        raise _usage("--step-time needs SPEC, which says how many tokens a step has", *MEASURES[:2])
    return (total if total is not None else (tokens or 0) / (step_time or 1.0)) / devices


def _usage(message: str, *nearest: str) -> TitanError:
    return TitanError(Diagnostic("T601", message, nearest=nearest))


def _impossible(run: Run) -> list[Diagnostic]:
    """No device is faster than its peak. Raises TitanError T306 where our own rules say so: then the speed or the peak
    is not that of the run; warns where only another rule does, which counts what was not executed."""
    from titan.compiler.cost.mfu import impossible

    found = []
    for rule in run.rules:
        said = impossible(rule.kind, rule.per_token * run.speed, run.peak, f"`{rule.rule}`", run.peak_of)
        if said and rule.key in ("simple", "exact"):
            raise TitanError(Diagnostic("T306", said))
        found += [Diagnostic("T306", said, severity="warning")] if said else []
    return found


def _object(run: Run) -> dict[str, Any]:
    shares = {rule.key: rule.per_token * run.speed / run.peak if run.peak else None for rule in run.rules}
    exact = next((rule.per_token for rule in run.rules if rule.key == "exact"), None)
    return {
        "devices": run.devices,
        "tokens_per_s_per_gpu": run.speed,
        "peak_flops": run.peak,
        "mfu_simple": shares["simple"],
        "mfu": shares.get("exact"),
        "by_rule": shares,
        "flops_per_token": {rule.key: rule.per_token for rule in run.rules},
        "rules": {rule.key: rule.rule for rule in run.rules},
        "tflops_per_gpu": None if exact is None else exact * run.speed / 1e12,
    }


def _print(run: Run) -> None:
    print(f"{run.speed:,.1f} tokens/s on each of {run.devices:,} devices")
    stated = (
        f"  {si(run.peak, 'FLOP/s')} ({run.peak_of})" if run.peak else " unknown: give --peak, or run titan profile"
    )
    print(f"peak{stated}")
    for rule in run.rules:
        achieved = rule.per_token * run.speed
        shown = f"{rule.kind} {achieved / run.peak:.2%}" if run.peak else f"{rule.kind} unknown"
        print(f"{shown:<13} {si(achieved, 'FLOP/s'):>14}   {rule.rule}")
    if len(run.rules) == 1:
        print("exact FLOPs depend on the layers and the sequence: give SPEC, or --model and --sequence")
