"""`titan mfu`."""

from __future__ import annotations

import click
from titan.compiler.commands.output import print_json, si
from titan.grammar.diagnostics import Diagnostic, TitanError


@click.command(epilog="Example: titan mfu examples/llama3_70b_1024gpu.titan --tokens-per-second 980000")
@click.argument("spec")
@click.option("--tokens-per-second", "total", type=float, help="Measured, of the whole job.")
@click.option("--tokens-per-second-per-device", "each", type=float, help="Measured, of one device.")
@click.option("--step-time", type=float, help="Measured seconds of one optimizer step.")
@click.option("--json", "as_json", is_flag=True, help="Print one object to stdout.")
def mfu(spec: str, total: float | None, each: float | None, step_time: float | None, as_json: bool) -> int:
    """Model FLOPs utilisation of a measured speed, by the 6N rule and by exact model FLOPs, for SPEC's model."""
    from titan.compiler.cost.mfu import MODEL_RULE, SIMPLE_RULE, UNKNOWN_PEAK, model_flops, utilisation
    from titan.compiler.spec.resolve import load_spec

    found = load_spec(spec)
    devices = found.cluster.world_size
    speed = _speed(total, each, step_time, devices, found.train.tokens_per_step)
    flops = model_flops(found.model.model_dump(), found.train.sequence)
    peak = found.cluster.device.peak.get(found.train.precision)
    used = utilisation(flops, speed, peak)
    if as_json:
        rules = {"simple": SIMPLE_RULE, "exact": MODEL_RULE}
        per_token = {"simple": flops.simple, "exact": flops.exact}
        shares = {"mfu_simple": used.mfu_simple, "mfu": used.mfu}
        base = {"devices": devices, "tokens_per_s_per_gpu": speed, "peak_flops": peak}
        print_json({**base, **shares, "flops_per_token": per_token, "rules": rules, "tflops_per_gpu": used.tflops})
        return 0
    print(f"{speed:,.1f} tokens/s on each of {devices:,} devices ({found.cluster.device.name})")
    print(f"peak  {si(peak, 'FLOP/s') + ' ' + found.train.precision if peak else UNKNOWN_PEAK}")
    rows = ((used.mfu_simple, flops.simple, SIMPLE_RULE), (used.mfu, flops.exact, MODEL_RULE))
    for share, each_token, rule in rows:
        shown = f"MFU {share:.2%}" if share is not None else "MFU unknown"
        print(f"{shown:<13} {si(each_token * speed, 'FLOP/s'):>14}   {rule}")
    return 0


def _speed(total: float | None, each: float | None, step_time: float | None, devices: int, tokens: int) -> float:
    """Tokens per second and device from the one measure that was given."""
    given = [value for value in (total, each, step_time) if value is not None]
    options = ("--tokens-per-second", "--tokens-per-second-per-device", "--step-time")
    if len(given) != 1:
        message = f"{len(given)} measures are given, exactly one is needed"
        raise TitanError(Diagnostic("T601", message, nearest=options))
    if not 0 < given[0] < float("inf"):
        raise TitanError(
            Diagnostic("T601", f"a measured speed or time of {given[0]:g} is not possible: it must be > 0")
        )
    if each is not None:
        return each
    return (total if total is not None else tokens / (step_time or 1.0)) / devices
