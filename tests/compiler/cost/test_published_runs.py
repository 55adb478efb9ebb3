"""The scoreboard of published runs: what it counts, what it leaves out, and that prices stay near what was measured."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from statistics import mean, median

import pytest
from titan.compiler.cost.compute import tiled_share
from titan.compiler.cost.machine import read_machine
from titan.compiler.cost.network import transfer_seconds

from tests.benchmarks.published_runs import __main__ as scoreboard
from tests.benchmarks.published_runs.held import held_bytes
from tests.benchmarks.published_runs.layout import planned
from tests.benchmarks.published_runs.parameters import PARAMETERS, current
from tests.benchmarks.published_runs.predict import predict, prepare
from tests.benchmarks.published_runs.rows import FIXTURES, Row, read, skipped
from tests.benchmarks.published_runs.run_prices import sent_share
from tests.benchmarks.published_runs.score import Compared, errors, headline
from tests.benchmarks.published_runs.software import software
from tests.compiler.cost.test_network import CLUSTER

ROWS = {row.key: row for row in read(FIXTURES / "published_runs.csv")}
ROWS_OOM = {row.key: row for row in read(FIXTURES / "published_runs_oom.csv")}


def changed(key: str, **cells: str) -> Row:
    return Row({**ROWS[key].cells, **cells})


def test_keys_of_the_report_and_reasons_of_what_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three rows that are priced, one without a micro-batch, one on a device that no cluster has."""
    chosen = [ROWS[key] for key in ("korthikanti2022-0001", "korthikanti2022-0002", "simumax-0003")]
    chosen += [changed("korthikanti2022-0001", micro_batch=""), changed("korthikanti2022-0002", gpu="TPU")]
    path = tmp_path / "runs.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(chosen[0].cells))
        writer.writeheader()
        writer.writerows(row.cells for row in chosen)
    monkeypatch.setattr("sys.argv", ["published_runs", "--runs", str(path), "--oom", str(path), "--json"])
    monkeypatch.setattr(scoreboard, "leave_one_out", lambda runs: None)
    scoreboard.main()
    report = json.loads(capsys.readouterr().out)
    keys = {"rows", "median_abs_pct", "mean_abs_pct", "p90_abs_pct", "bias_pct", "by_source"}
    assert keys <= set(report["step_time"]) and keys <= set(report["memory"])
    assert report["step_time"]["rows"] == 2 and set(report["step_time"]["by_source"]) == {"korthikanti2022"}
    assert report["memory_all_rows"]["by_source"]["simumax"]["rows"] == 1
    assert set(report["groups"]) == {"context > 1", "experts", "8 bits"}
    assert report["fits"]["oom_rows"] == report["fits"]["ok_rows"] == 3
    assert report["skipped"] == {"not fully specified: micro_batch": 2, "no cluster for TPU": 2}


def test_errors_by_hand() -> None:
    found = errors([("a", 0.1), ("a", -0.2), ("b", 0.3)])
    assert (found["rows"], found["median_abs_pct"], found["mean_abs_pct"], found["bias_pct"]) == (3, 20.0, 20.0, 6.67)
    assert found["p90_abs_pct"] == 28.0 and found["by_source"]["a"]["bias_pct"] == -5.0


SAMPLE = (
    "korthikanti2022-0001", "korthikanti2022-0002", "zerobubble2023-0017", "zerobubble2023-0029", "llmfoundry-0038",
    "llmfoundry-0152", "torchtitan-0005", "torchtitan-0034", "dgxc-benchmarking-0046", "dgxc-benchmarking-0068",
    "dgxc-benchmarking-0072", "fms-fsdp-0005", "fms-fsdp-0015", "hagemann2023-0765", "hagemann2023-0945",
)  # fmt: skip


def test_prices_are_near_a_sample_of_published_step_times() -> None:
    """Of eight sources, three devices, tensor, pipeline, context and data parallelism, with and without recompute."""
    off = [predict(ROWS[key]).seconds / (ROWS[key].step_time or 1.0) - 1 for key in SAMPLE]
    assert all(headline(ROWS[key]) and not skipped(ROWS[key]) for key in SAMPLE)
    assert median(map(abs, off)) < 0.08 and abs(mean(off)) < 0.05 and max(map(abs, off)) < 0.25


def test_rows_that_say_everything_are_near_what_was_measured() -> None:
    """Megatron-LM with and without sequence parallelism and recompute, and ZeRO-3 on up to 2,240 devices."""
    for source, numbers in (("korthikanti2022", (1, 2, 3, 4)), ("narayanan2021", (13, 16, 17, 18))):
        rows = [ROWS[f"{source}-{number:04d}"] for number in numbers]
        assert mean(abs(predict(row).seconds / (row.step_time or 1.0) - 1) for row in rows) < 0.035


def test_memory_is_near_what_allocators_reported() -> None:
    off = []
    for key in (
        "torchtitan-0004",
        "torchtitan-0005",
        "torchtitan-0012",
        "simumax-0002",
        "simumax-0007",
        "simumax-0028",
    ):
        found = predict(ROWS[key], memory_only=True).held(ROWS[key].text("mem_kind"))
        off.append(abs(found / (ROWS[key].memory or 1.0) - 1))
    assert median(off) < 0.02 and max(off) < 0.07


def test_a_loss_of_separate_kernels_by_hand() -> None:
    """Llama-13B, four sequences of 8,192 on four tensor ranks that gather logits of 128,000: 18 bytes of each of
    32,768 x 128,000 numbers, where a plan has 4 of a quarter of them."""
    found = prepare(ROWS_OOM["hagemann2023-0164"], memory_only=True)
    plan, traits = found.plans[0], found.software
    fused = replace(traits, loss="fused", gathered_loss=False)
    machine = found.machine({})
    more = held_bytes(plan, machine, traits)[0] - held_bytes(plan, machine, fused)[0]
    assert more == 18 * 32768 * 128000 - 4 * 32768 * 32000


def test_verdicts_on_runs_that_ran_out_of_memory_and_on_some_that_did_not() -> None:
    """Gathered logits, separate norms and scores: each alone decides one of the first three."""
    failed = ("hagemann2023-0168", "hagemann2023-0630", "hagemann2023-0240", "bloom-0120")
    for key in failed:
        assert Compared(ROWS_OOM[key], predict(ROWS_OOM[key], memory_only=True)).verdict != "fits"
    for key in ("hagemann2023-0315", "hagemann2023-0963", "nemo-automodel-0007", "megatron-bridge-0036"):
        assert Compared(ROWS[key], predict(ROWS[key], memory_only=True)).verdict != "does not fit"


def test_no_trait_or_figure_is_of_one_source_alone() -> None:
    """Traits are read from what a row says of its run: the same row under another source is priced alike."""
    for key in SAMPLE:
        stranger = changed(key, source_key="elsewhere2027", source="elsewhere", row_id="elsewhere2027-0001")
        assert software(stranger) == software(ROWS[key]) and planned(stranger)[1] == planned(ROWS[key])[1]
    assert all(p.low <= value <= p.high for p, value in zip(PARAMETERS, current(), strict=True))


def test_tiles_fill_waves() -> None:
    """2048 x 1024 in tiles of 256 x 128 are 64 tiles: of 108 processors as many work; 128 x 128 makes 128 tiles, two
    waves. A product that fills every wave keeps its rate."""
    assert tiled_share(2048, 1024, 512, 1, 108) == pytest.approx(max(64 / 108, 0.95 * 128 / 216, 0.82 * 256 / 324))
    assert tiled_share(108 * 256, 128, 512, 1, 108) == 1.0
    assert tiled_share(1, 1, 512, 1, 108) < 1e-4


def test_copies_of_a_token_that_is_sent_once_to_a_node() -> None:
    """Eight experts on eight nodes: a token meets 8 (1 - (7/8)^8) = 5.25 of them, four where routing is limited."""
    assert sent_share(8, 8) == pytest.approx(8 * (1 - (7 / 8) ** 8) / 8)
    assert sent_share(8, 8, 4) == 0.5 and sent_share(1, 16) == pytest.approx(1.0)


def test_devices_share_adapters() -> None:
    """With an adapter for two devices a node's eight send at half the rate of two that send alone."""
    whole, half = read_machine(CLUSTER), read_machine({**CLUSTER, "efficiency": {"inter": 1.0, "adapters": 0.5}})
    assert half.inter.bandwidth == pytest.approx(whole.inter.bandwidth / 2)
    every, few = transfer_seconds(half, True, 1e8), transfer_seconds(half, True, 1e8, senders=2)
    assert every - 8e-6 == pytest.approx(2 * (few - 8e-6))
    assert few == pytest.approx(transfer_seconds(whole, True, 1e8, senders=2))
