"""Tables of published runs that nobody has seen: cells are read as they are spelled, or named in what is left out."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from tests.benchmarks.published_runs import __main__ as scoreboard
from tests.benchmarks.published_runs.layout import network_of, planned
from tests.benchmarks.published_runs.rows import FIXTURES, Row, read, skipped
from tests.benchmarks.published_runs.software import software
from tests.benchmarks.published_runs.spelling import device, plain

TABLE = FIXTURES / "published_runs.csv"
ROWS = {row.key: row for row in read(TABLE)}


def written(path: Path, rows: list[dict[str, str]], encoding: str = "utf-8", ends: str = "\n") -> Path:
    with path.open("w", newline="", encoding=encoding) as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator=ends)
        writer.writeheader()
        writer.writerows(rows)
    return path


def spelled(key: str, **cells: str) -> Row:
    return Row(plain({**ROWS[key].cells, **cells}))


def reason(row: Row) -> str:
    found = scoreboard.compare((row, True))
    return found if isinstance(found, str) else ""


@pytest.mark.parametrize(
    ("key", "cells"),
    [
        ("korthikanti2022-0002", {"seq_len": "2,048", "vocab": " 51,200 ", "cp": "n/a", "ep": "0"}),
        ("korthikanti2022-0002", {"seq_len": "2k", "micro_batch": "4.0", "gpu": "NVIDIA A100-SXM4-80GB"}),
        ("korthikanti2022-0002", {"recompute": "Selective", "sequence_parallel": "Yes", "precision": "FP16-mixed"}),
        ("korthikanti2022-0002", {"offload": "No", "gated_mlp": "GELU", "gpu": "a100 80gb"}),
        ("llmfoundry-0152", {"zero_stage": "", "sharding": "fsdp FULL_SHARD"}),
        ("dgxc-benchmarking-0072", {"zero_stage": "ZeRO-1", "sharding": "Distributed Optimizer"}),
        ("dgxc-benchmarking-0072", {"inter_node": "8 × NDR 400 Gbps", "gated_mlp": "no"}),
        ("dgxc-benchmarking-0072", {"inter_node": "3.2 Tb/s per node"}),
        ("megatron-bridge-0020", {"model_name": "DeepSeek V3"}),
        ("megatron-bridge-0023", {"model_name": "NeMo_Qwen3_30B"}),
    ],
)  # fmt: skip
def test_other_spellings_are_the_same_run(key: str, cells: dict[str, str]) -> None:
    own, other = ROWS[key], spelled(key, **cells)
    name = own.text("model_name")
    mine, theirs = planned(own), planned(Row({**other.cells, "model_name": other.text("model_name")}))
    assert not skipped(other) and software(other) == software(own) and theirs[1] == mine[1]
    assert theirs[0].cluster == mine[0].cluster
    assert theirs[0].model.model_copy(update={"name": name}) == mine[0].model


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ({"seq_len": "long"}, "not understood: seq_len = long"),
        ({"micro_batch": "0.5"}, "not understood: micro_batch = 0.5"),
        ({"micro_batch": "-"}, "not fully specified: micro_batch"),
        ({"tp": "0"}, "not understood: tp = 0"),
        ({"recompute": "sometimes"}, "not understood: recompute = sometimes"),
        ({"iter_time_s": "~1.1"}, "not understood: iter_time_s = ~1.1"),
        ({"gated_mlp": "1", "ffn_hidden": ""}, "not fully specified: ffn_hidden"),
        ({"gated_mlp": "1", "num_experts": "8"}, "not fully specified: top_k"),
        ({"num_experts": "8", "top_k": "2"}, "a model with experts without a gate"),
        ({"pp": "8", "num_gpus": "64", "schedule": "interleaved (vpp not given)"}, "not fully specified: vpp"),
        ({"pp": "8", "num_gpus": "64", "schedule": "Chimera"}, "schedule Chimera"),
        ({"precision": "fp32"}, "arithmetic in fp32"),
        ({"precision": "FP8"}, "8-bit arithmetic, which A100-SXM-80GB has not"),
        ({"precision": "NVFP4"}, "4-bit arithmetic"),
        ({"gpu": "A100-PCIE-80GB"}, "no cluster for A100-PCIE-80GB"),
        ({"global_batch_seqs": "1"}, "fewer sequences than one micro-batch of every data rank"),
        ({"hidden": "6000"}, "heads do not divide the hidden width, and theirs is not told"),
        ({"model_name": "Nemotron-H-56B"}, "a model with layers of state spaces"),
        ({"model_name": "llama_lora"}, "fine-tuning run"),
        ({"notes": "an exploration in Colorado"}, ""),
    ],
)  # fmt: skip
def test_what_is_left_out_says_why(cells: dict[str, str], said: str) -> None:
    assert reason(spelled("korthikanti2022-0002", **cells)) == said


def test_a_node_has_the_devices_and_adapters_that_the_source_says() -> None:
    """Four devices of a node share its four adapters; of a rack the source counts trays, which share its links."""
    four = spelled("korthikanti2022-0004", gpus_per_node="4", inter_node="4x200 Gb/s HDR InfiniBand per node")
    cluster = planned(four)[0].cluster
    assert (cluster.devices_per_node, cluster.nodes) == (4, 16) and cluster.efficiency["adapters"].value == 1.0
    assert planned(ROWS["megatron-bridge-0020"])[0].cluster.devices_per_node > 8


def test_speeds_of_networks_by_hand() -> None:
    found = {
        text: network_of(Row({"inter_node": text}))
        for text in ("400 Gb/s per node", "50 GB/s per GPU", "400 Gb/s", "4 GPUs per node", "8x400G")
    }
    assert list(found.values()) == [(12.5e9, 0.5), (50e9, 1.0), None, None, (50e9, 1.0)]


def test_devices_on_other_boards_are_not_taken_for_those_with_all_links() -> None:
    assert device("H100", "80") == device("H100 SXM5 80GB", "") == device("h100", "") == "H100-SXM-80GB"
    for other in ("GH200-96GB", "H100-SXM-64GB", "A100-SXM-64GB", "H100 NVL", "V100-SXM3-32GB", "TPU v4", "A100"):
        assert device(other, "") == other


def test_a_table_as_spreadsheets_write_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mark of byte order, carriage returns, columns in capitals, further ones, a row twice, an empty one, one that
    ran out of memory, and speed instead of time. Every row is somewhere in the report."""
    own = {**ROWS["korthikanti2022-0001"].cells, "row_id": "one"}
    time = ROWS["korthikanti2022-0001"].step_time or 0.0
    tokens = int(own["global_batch_seqs"]) * int(own["seq_len"]) / time / int(own["num_gpus"])
    fast = {**own, "row_id": "two", "iter_time_s": "", "tokens_per_s_per_gpu": str(tokens)}
    lost = {**own, "row_id": "three", "status": "OOM", "iter_time_s": ""}
    untimed = {**lost, "row_id": "four", "status": "ok", "tokens_per_s_per_gpu": ""}
    rows = [own, own, fast, lost, dict.fromkeys(own, ""), untimed]
    loud = [{name.upper(): text for name, text in row.items()} | {"MORE": "x"} for row in rows]
    runs = written(tmp_path / "runs.csv", loud, "utf-8-sig", "\r\n")
    empty = tmp_path / "empty.csv"
    empty.touch()
    monkeypatch.setattr("sys.argv", ["published_runs", "--runs", str(runs), "--oom", str(empty), "--json"])
    monkeypatch.setattr(scoreboard, "leave_one_out", lambda runs: None)
    scoreboard.main()
    report = json.loads(capsys.readouterr().out)
    assert report["step_time"]["rows"] == 2 and report["fits"]["oom_rows"] == 1 and report["fits"]["ok_rows"] == 3
    assert report["not_measured"] == {"step_time": 1, "memory": 3}
    assert report["step_time"]["worst"][0]["measured_s"] == report["step_time"]["worst"][1]["measured_s"]
    assert report["skipped"].pop("the same row twice") == 1 and list(report["skipped"].values()) == [1]


def test_a_file_that_is_no_table_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, content in (("absent", None), ("latin", b"row_id,gpu\n\x93a,b\n")):
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        monkeypatch.setattr("sys.argv", ["published_runs", "--runs", str(path)])
        with pytest.raises(SystemExit):
            scoreboard.main()
        assert str(path) in capsys.readouterr().err


def test_one_row_that_fails_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(row: Row, memory_only: bool = False) -> None:
        raise KeyError("x")

    monkeypatch.setattr(scoreboard, "predict", broken)
    assert reason(ROWS["korthikanti2022-0001"]) == "failed: KeyError: 'x'"
