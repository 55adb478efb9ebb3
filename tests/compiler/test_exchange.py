"""Orders of a pipeline out to a table, back in by a spec, and what is refused on the way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from titan.compiler.commands.sources import load
from titan.compiler.formats.pipeline_csv import order_of
from titan.compiler.schedules.registry import SCHEDULES
from titan.compiler.verify.proofs import verify

from tests.compiler.test_cli import titan

SPEC = """import models.tiny
import clusters.local
model = tiny.llama with {{ layers = 4 * dense {{ ffn = 64 }} }}
cluster = local.cpu with {{ devices_per_node = {devices} }}
train {{ sequence = 32, global_batch = {batch}, steps = 2, data = synthetic(256) }}
parallel {{ {parallel} }}
"""


def spec(folder: Path, parallel: str, batch: int = 8, devices: int = 2, name: str = "my.titan") -> str:
    path = folder / name
    path.write_text(SPEC.format(devices=devices, batch=batch, parallel=parallel))
    return str(path)


@pytest.mark.parametrize("schedule", ["zero_bubble_h1", "interleaved", "dualpipe_v"])
def test_an_exported_order_comes_back_by_its_file(
    schedule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = spec(tmp_path, f"pipeline = 2, micro_batch = 1, schedule = {schedule}")
    table = tmp_path / "order.csv"
    assert titan(capsys, "export", "pipeline-csv", whole, "-o", str(table))[0] == 0
    again = load(spec(tmp_path, 'schedule = "order.csv"', name="again.titan")).plan
    made = order_of(again)
    assert made == SCHEDULES[schedule].order(2, 8) == order_of(load(whole).plan)
    assert again.setting("strategy")["schedule"].startswith("order@")
    assert all(proof.ok for proof in verify(again).values())


def test_a_plan_by_a_written_order_trains_like_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Backward of the second micro-batch before that of the first: no schedule's rule makes this."""
    (tmp_path / "odd.csv").write_text("0F0,0F1,0F2,0B1,0B0,0B2\n1F0,1F1,1B1,1I0,1F2,1W0,1B2\n")
    code, out, _ = titan(capsys, "verify", spec(tmp_path, 'schedule = "odd.csv"', batch=3), "--execute", "--json")
    found = json.loads(out)
    assert code == 0 and found["execute"]["ok"] and found["progress"]["ok"]


def test_what_a_table_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = spec(tmp_path, "pipeline = 4, micro_batch = 1, schedule = one_f_one_b", devices=4)
    _, table, _ = titan(capsys, "export", "pipeline-csv", whole)
    (tmp_path / "plain.csv").write_text(table)
    code, out, _ = titan(capsys, "import", "pipeline-csv", str(tmp_path / "plain.csv"), "--json")
    found = json.loads(out)
    assert code == 0 and (found["ranks"], found["stages"], found["micro_batches"]) == (4, 4, 8)
    assert round(100 * found["flush_bubble"], 1) == 27.3  # (D - 1)(F + B) of m(F + B) + (D - 1)(F + B)
    assert found["frames"] == [4, 3, 2, 1]


@pytest.mark.parametrize(
    ("parallel", "table", "code", "words"),
    [
        ('schedule = "gone.csv"', None, "T410", "cannot be read"),
        ('schedule = "t.csv"', "0F0,0F0\n", "T410", "0F0 is done 2 times"),
        (
            'micro_batch = 1, schedule = "t.csv"',
            "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n",
            "T253",
            "pipeline = 2 and 2 micro-batches",
        ),
        ('schedule = "t.csv"', "0F0,2F0,2B0,0B0\n1F0,1B0\n", "T410", "every rank must hold as many"),
        ('micro_batch = 1, pipeline = 1, data = 2, schedule = "t.csv"', "0F0,0B0\n1F0,1B0\n", "T253", "pipeline = 2"),
    ],
)
def test_tables_that_do_not_fit_are_refused(
    parallel: str, table: str | None, code: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if table is not None:
        (tmp_path / "t.csv").write_text(table)
    found, _, err = titan(capsys, "check", spec(tmp_path, parallel))
    assert found == 2 and code in err and words in err and "my.titan:6:" in err


def test_a_bidirectional_order_has_no_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = spec(tmp_path, "pipeline = 2, micro_batch = 1, schedule = dualpipe")
    code, out, err = titan(capsys, "export", "pipeline-csv", whole)
    assert code == 2 and out == "" and "T411" in err
