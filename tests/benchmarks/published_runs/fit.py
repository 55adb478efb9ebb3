"""Fits the shared figures to published step times: `python -m tests.benchmarks.published_runs.fit [--steps N]`.

Least squares on the logarithm of predicted over measured time with a loss that grows linearly for outliers
(soft l1, 5%), within the bounds of `parameters`. Each step linearises the simulator by finite differences, solves, and
shortens itself until the true loss falls. Sources with many rows are thinned (`EVERY`), so that none decides alone;
the rows of two sources that specify everything count double. Prints the figures; the library's clusters and
`software.FIGURES` hold what it found.
"""

from __future__ import annotations

import argparse
import gc
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import expm1, log
from multiprocessing import get_context
from multiprocessing.pool import Pool

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from tests.benchmarks.published_runs.layout import Refused
from tests.benchmarks.published_runs.parameters import PARAMETERS, current, figures
from tests.benchmarks.published_runs.predict import Prepared, prepare
from tests.benchmarks.published_runs.rows import FIXTURES, Row, read, skipped
from tests.benchmarks.published_runs.score import errors, headline

EVERY = {"hagemann2023": 5, "llmfoundry": 5, "zerobubble2023": 6, "dgxc-benchmarking": 3}  # every so many rows
DOUBLE = ("korthikanti2022", "narayanan2021")
SCALE = 0.05  # error at which the loss turns from square to linear
DIFFERENCE = 0.03  # of a parameter's range
RANGE = 0.25  # of a parameter's range that one step may go
DAMPING = 0.3  # weight of a whole range of a parameter, in units of SCALE

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Linear:
    """Logarithms of predicted over measured time at `values`, and their derivatives by parameter."""

    rows: tuple[Row, ...]
    values: Vector
    residuals: Vector
    slopes: Vector

    @property
    def weights(self) -> Vector:
        return np.array([2.0 if row.source in DOUBLE else 1.0 for row in self.rows])


_PREPARED: list[Prepared] = []  # of this process and of those it forks


def _residual(job: tuple[int, tuple[float, ...]]) -> float:
    place, values = job
    found = _PREPARED[place]
    return log(found.seconds(figures(found.row, values)) / (found.row.step_time or 1.0))


def residuals(pool: Pool, values: Vector, places: Iterable[int]) -> Vector:
    return np.array(pool.map(_residual, [(i, tuple(values)) for i in places], chunksize=1))


def prepare_all(rows: Sequence[Row]) -> None:
    """Plans of all rows that can be planned, the dearest first; before processes are forked."""
    _PREPARED.clear()
    for row in rows:
        try:
            _PREPARED.append(prepare(row))
        except Refused:
            continue
    _PREPARED.sort(key=lambda p: -p.strategy.pipeline * len(p.plans))


def linearised(pool: Pool, values: Vector, known: Vector | None = None) -> Linear:
    """The prepared rows at `values`; a parameter is varied only for rows that it applies to."""
    every = range(len(_PREPARED))
    at = residuals(pool, values, every) if known is None else known
    slopes = np.zeros((len(at), len(PARAMETERS)))
    for k, parameter in enumerate(PARAMETERS):
        places = [i for i in every if parameter.applies(_PREPARED[i].row, _PREPARED[i].software)]
        by = DIFFERENCE * (parameter.high - parameter.low)
        moved = values.copy()
        moved[k] += by if values[k] + by <= parameter.high else -by
        if places:
            slopes[places, k] = (residuals(pool, moved, places) - at[places]) / (moved[k] - values[k])
    return Linear(tuple(p.row for p in _PREPARED), values, at, slopes)


def solve(linear: Linear, kept: Sequence[int] | None = None) -> Vector:
    """Values that fit the rows at places `kept` (all of them without) best, as far as the slopes reach."""
    low = np.array([p.low for p in PARAMETERS])
    high = np.array([p.high for p in PARAMETERS])
    span, start = high - low, linear.values
    chosen = list(range(len(linear.rows)) if kept is None else kept)
    at, slopes, weights = linear.residuals[chosen], linear.slopes[chosen], linear.weights[chosen]

    def loss(values: Vector) -> Vector:
        fitted = weights * (at + slopes @ (values - start)) / SCALE
        return np.concatenate([fitted, DAMPING * (values - start) / span])

    bounds = (np.maximum(low, start - RANGE * span) - 1e-12, np.minimum(high, start + RANGE * span) + 1e-12)
    found: Vector = least_squares(loss, start, bounds=bounds, loss="soft_l1", x_scale=span).x
    return np.clip(found, low, high)


def cost(found: Vector, weights: Vector) -> float:
    return float(2 * (np.sqrt(1 + (weights * found / SCALE) ** 2) - 1).sum())


def fit(pool: Pool, values: Vector, steps: int) -> Linear:
    """Gauss-Newton from `values`; ends early when a step gains nothing."""
    linear = linearised(pool, values)
    for _ in range(steps):
        step = solve(linear) - linear.values
        for share in (1.0, 0.4, 0.15):
            moved = linear.values + share * step
            at = residuals(pool, moved, range(len(_PREPARED)))
            if cost(at, linear.weights) < cost(linear.residuals, linear.weights):
                break
        else:
            break
        linear = linearised(pool, moved, at)
    return linear


def without_each(linear: Linear) -> list[tuple[str, float]]:
    """(source, error) of each row, its source left out of the fit."""
    found = []
    for source in sorted({row.source for row in linear.rows}):
        others = [i for i, row in enumerate(linear.rows) if row.source != source]
        mine = [i for i, row in enumerate(linear.rows) if row.source == source]
        if not others:
            continue
        moved = solve(linear, others) - linear.values
        found += [(source, expm1(linear.residuals[i] + float(linear.slopes[i] @ moved))) for i in mine]
    return found


def fitted_rows(rows: Sequence[Row]) -> list[Row]:
    """Complete, trustworthy rows in 16 bits of models without experts, thinned."""
    seen: Counter[str] = Counter()
    found = []
    for row in rows:
        if skipped(row) or not headline(row) or not row.step_time or row.number("num_experts"):
            continue
        if seen[row.source] % EVERY.get(row.source, 1) == 0:
            found.append(row)
        seen[row.source] += 1
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.published_runs.fit", description=__doc__)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    gc.disable()
    prepare_all(fitted_rows(read(FIXTURES / "published_runs.csv")))
    with get_context("fork").Pool(2) as pool:
        linear = fit(pool, np.array(current()), options.steps)
    for parameter, value in zip(PARAMETERS, linear.values, strict=True):
        print(f"{parameter.name:28s} {parameter.figure:20s} {value:.4g}")
    print(errors((row.source, expm1(e)) for row, e in zip(linear.rows, linear.residuals, strict=True)))
    print(errors(without_each(linear)))


if __name__ == "__main__":
    main()
