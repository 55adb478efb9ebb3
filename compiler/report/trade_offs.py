"""`titan plan --pareto`: the table of plans of which none is better than another in everything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from titan.compiler.report.summary import one_line

if TYPE_CHECKING:
    from titan.compiler.search.goal import Choice


def trade_offs_json(choices: Sequence[Choice]) -> dict[str, Any]:
    """One object per plan; cost is None without a price per device-hour."""
    return {
        "plans": [
            {
                "devices": choice.devices,
                "step_time_s": choice.seconds,
                "peak_memory_bytes": choice.memory,
                "device_hours_per_million_tokens": 1e6 * choice.hours,
                "cost_per_million_tokens": _cost(choice),
                "strategy": one_line(choice.result.strategy),
            }
            for choice in choices
        ]
    }


def _cost(choice: Choice) -> float | None:
    price = choice.spec.cluster.price_per_device_hour
    return None if price is None else 1e6 * choice.hours * price


def print_trade_offs(choices: Sequence[Choice]) -> None:
    """The table, to stdout: it is what was asked for."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    priced = any(_cost(choice) is not None for choice in choices)
    cost = "$ per M tokens" if priced else "device-hours per M tokens"
    for name in ("devices", "step", "memory", cost):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("plan")
    for choice in choices:
        money = _cost(choice) if priced else 1e6 * choice.hours
        table.add_row(
            f"{choice.devices:,}",
            f"{choice.seconds:.4g} s",
            f"{choice.memory / 2**30:.1f} GiB",
            f"{money:.4g}",
            one_line(choice.result.strategy),
        )
    console = Console(highlight=False, soft_wrap=True, emoji=False)
    if not console.is_terminal:
        console.width = 140
    console.print(table)
    console.print("none is better than another in devices, step time and memory; all within the limits")
