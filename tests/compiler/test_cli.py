"""The command line's contract: exit codes, what goes where, and that no input ends in a traceback."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from titan.compiler.cli import COMMANDS, run
from titan.compiler.plan.file import read_plan, write_plan
from titan.compiler.verify.findings import Finding
from titan.grammar.catalogue import CATALOGUE

ROOT = Path(__file__).parents[2]
QUICKSTART = str(ROOT / "examples" / "quickstart.titan")


def titan(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of one command in this process."""
    capsys.readouterr()
    code = run(list(arguments))
    out, err = capsys.readouterr()
    return code, out, err


MIXTURE = """
import clusters.local
model {
    vocab = 512
    hidden = 64
    attention = gqa { heads = 4 }
    layers = 2 * moe { experts = 4, top_k = 2, ffn = 64 }
    rope = { theta = 10000 }
    max_positions = 64
}
cluster = local.cpu with { devices_per_node = 2 }
train { sequence = 64, global_batch = 4, steps = 1, data = synthetic(512) }
parallel { expert = 2 }
"""


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "quickstart.plan"
    assert run(["plan", QUICKSTART, "-o", str(path)]) == 0
    return path


# --- start-up


def modules_after(*arguments: str) -> set[str]:
    code = (
        "import sys\nfrom titan.compiler.cli import run\nrun(sys.argv[1:])\n"
        "print(' '.join(m for m in sys.modules if '.' not in m), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    return set(done.stderr.splitlines()[-1].split())


def test_help_imports_nothing_heavy() -> None:
    assert not modules_after("--help") & {"torch", "numpy", "pydantic", "lark", "rich", "networkx"}


def test_check_imports_only_what_it_needs() -> None:
    assert not modules_after("check", QUICKSTART) & {"torch", "numpy", "rich", "networkx"}


def test_plan_does_not_import_torch(tmp_path: Path) -> None:
    assert not modules_after("plan", QUICKSTART, "--json") & {"torch", "networkx"}


# --- help


def test_every_command_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = titan(capsys, "--help")
    assert code == 0
    assert [name for name in COMMANDS if f"  {name} " not in out] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (name, "prepare", "--help") if name == "data" else (name, "--help")
    code, out, _ = titan(capsys, *arguments)
    assert code == 0 and "Example: titan " in out


@pytest.mark.parametrize("name", COMMANDS)
def test_the_table_names_the_command_that_it_loads(name: str) -> None:
    module, _, function = COMMANDS[name][0].partition(":")
    assert getattr(import_module(module), function).name == name


# --- exit codes and places


def test_check_says_what_is_right_to_people_only(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = titan(capsys, "check", QUICKSTART)
    assert (code, out) == (0, "")
    assert "no errors" in err


def test_check_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = titan(capsys, "check", QUICKSTART, "--json")
    assert code == 0 and json.loads(out)["ok"] is True


def test_errors_are_pictures_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = tmp_path / "wrong.titan"
    spec.write_text(Path(QUICKSTART).read_text().replace("warmup_steps", "warmup_stesp"))
    code, out, err = titan(capsys, "check", str(spec), "--json")
    (found,) = json.loads(out)["diagnostics"]
    assert code == 2
    assert found["path"] == str(spec) and found["line"] == 24 and "warmup_steps" in str(found["nearest"])
    assert f"{spec}:24:" in err and "^" in err


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["chekc", QUICKSTART], "nearest legal: check"),
        (["check"], "Missing argument"),
        (["check", QUICKSTART, "--jsno"], "--json"),
        (["inspect", QUICKSTART, "--rank", "-1"], "-1"),
        (["run", QUICKSTART, "--steps", "0"], "0 is not in the range"),
    ],
)
def test_wrong_command_lines(arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = titan(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error T601: ") and part in err


def test_a_warning_does_not_stop_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = tmp_path / "idle.titan"
    spec.write_text(Path(QUICKSTART).read_text().replace("tensor   = 2", "tensor = 1\n    sequence_parallel = true"))
    assert "warning T251" in titan(capsys, "check", str(spec))[2]
    code, out, err = titan(capsys, "plan", str(spec), "--json")
    assert code == 0, err
    assert any("T251" in warning for warning in json.loads(out)["warnings"])


def test_nothing_fits_is_three(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = tmp_path / "large.titan"
    text = (ROOT / "examples" / "llama3_70b_1024gpu.titan").read_text()
    spec.write_text(text.replace("nodes = 128", "nodes = 1, host_memory = none"))
    code, _, err = titan(capsys, "plan", str(spec), "-o", str(tmp_path / "large.plan"))
    assert code == 3, err
    assert err.count("error T3") == 1
    assert list(tmp_path.iterdir()) == [spec]


def test_an_internal_error_is_one_line_and_a_report(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("titan.compiler.spec.resolve.load_spec", lambda path: 1 // 0)
    code, out, err = titan(capsys, "check", QUICKSTART)
    (report,) = tmp_path.iterdir()
    assert (code, out) == (1, "")
    assert (
        err == f"error T600: internal error: ZeroDivisionError: integer division or modulo by zero (report: {report})\n"
    )
    assert "ZeroDivisionError" in report.read_text() and report.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("command", ["run", "verify"])
def test_without_pytorch_the_cure_is_named(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("titan.compiler.commands.runtime.find_spec", lambda name: None)
    arguments = (command, QUICKSTART) if command == "run" else (command, QUICKSTART, "--execute")
    code, _, err = titan(capsys, *arguments)
    assert code == 2 and "error T604" in err and "pip install 'titan-compiler[run]'" in err


def test_a_missing_plan_file(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = titan(capsys, "verify", "no-such.plan")
    assert code == 2 and "error T602" in err and "no-such.plan" in err


def test_an_interrupt_is_130(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(path: str) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("titan.compiler.spec.resolve.load_spec", interrupt)
    assert titan(capsys, "check", QUICKSTART)[0] == 130


def test_an_interrupt_inside_of_exec_is_130_as_well(tmp_path: Path) -> None:
    """Imports run such code; `python -m` remembers the interrupt and would end the process by the signal."""
    (tmp_path / "interrupted.py").write_text("""import signal
from titan.compiler import cli

signal.signal(signal.SIGINT, signal.default_int_handler)
cli.titan.main = lambda *_, **__: exec("signal.raise_signal(signal.SIGINT)")
cli.main(["check"])
""")
    command = [sys.executable, "-m", "interrupted"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_a_closed_pipe_is_quiet(plan_file: Path) -> None:
    command = f"{sys.executable} -m titan.compiler.cli inspect {plan_file} --rank 1 | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout.splitlines()[1] == "0"


# --- plan, verify, inspect, diff


def test_plan_json_has_the_promised_keys(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = titan(capsys, "plan", QUICKSTART, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["world_size"] == 4
    assert found["mesh"] == {"region": 1, "pipeline": 2, "data": 1, "context": 1, "tensor": 2, "expert": 1}
    keys = {"micro_batch", "micro_batches", "schedule", "chunks", "zero", "recompute", "predicted", "memory", "stages"}
    assert keys | {"search", "verified", "warnings"} <= found.keys()


def test_a_plan_that_is_not_proved_says_so_last_and_is_not_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its summary is printed while the proofs run."""
    refused = (("memory", lambda plan: [Finding("T770", "no limit")]),)
    monkeypatch.setattr("titan.compiler.verify.proofs.PROOFS", refused)
    code, _, err = titan(capsys, "plan", QUICKSTART, "-o", str(tmp_path / "tiny.plan"))
    assert code == 1 and not list(tmp_path.iterdir())
    assert err.index("peak memory") < err.index("not proved: memory") < err.index("T770")
    assert "proved for all" not in err


def test_the_same_spec_gives_the_same_file(plan_file: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.plan"
    command = [sys.executable, "-m", "titan.compiler.cli", "plan", QUICKSTART, "-o", str(again)]
    subprocess.run(command, check=True, capture_output=True, env=os.environ | {"PYTHONHASHSEED": "77"})
    assert again.read_bytes() == plan_file.read_bytes()


def test_verify_a_plan_and_its_spec(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for source in (str(plan_file), QUICKSTART):
        code, out, _ = titan(capsys, "verify", source, "--json")
        proofs = json.loads(out)
        assert code == 0 and len(proofs) >= 7
        assert all(proof["ok"] and proof["findings"] == [] and proof["seconds"] >= 0 for proof in proofs.values())


def test_verify_refuses_a_broken_plan(plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from dataclasses import replace

    plan = read_plan(plan_file)
    first, *rest = plan.roles
    blocks = [replace(b, instructions=tuple(i for i in b.instructions if i.opcode != "free")) for b in first.blocks]
    write_plan(replace(plan, roles=(replace(first, blocks=tuple(blocks)), *rest)), tmp_path / "leaks.plan")
    code, out, err = titan(capsys, "verify", str(tmp_path / "leaks.plan"), "--json")
    assert code == 2
    assert json.loads(out)["registers"]["ok"] is False
    assert "error T7" in err and "Traceback" not in err
    assert titan(capsys, "run", str(tmp_path / "leaks.plan"))[0] == 2  # no plan runs unproved


def test_verify_execute_runs_the_small_plan(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = titan(capsys, "verify", str(ROOT / "examples" / "tiny_dp.titan"), "--execute", "--json")
    assert code == 0
    assert json.loads(out)["execute"]["ok"] is True


def test_execute_needs_the_spec(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = titan(capsys, "verify", str(plan_file), "--execute")
    assert code == 2 and "error T605" in err


def rank_list(capsys: pytest.CaptureFixture[str], plan: Path, rank: int) -> list[str]:
    code, out, _ = titan(capsys, "inspect", str(plan), "--rank", str(rank))
    assert code == 0
    return [line for line in out.splitlines() if not line.startswith("#")]


def test_inspected_sends_meet_their_receives(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lists = {rank: rank_list(capsys, plan_file, rank) for rank in range(4)}

    def transfers(rank: int, opcode: str, word: str) -> list[tuple[int, str]]:
        found = []
        for line in lists[rank]:
            words = line.split()
            if words[1] == opcode:
                register = words[words.index("<-") + 1] if opcode == "send" else words[2].rstrip("?")
                assert words[-3:-1] == [word, "rank"]
                found.append((int(words[-1]), register))
        return found

    sent = {(rank, *t) for rank in lists for t in transfers(rank, "send", "to")}
    received = {(peer, rank, register) for rank in lists for peer, register in transfers(rank, "recv", "from")}
    assert sent == received and len(sent) == 4 * 2 * 2  # micro-batches x directions x tensor ranks


def test_inspected_list_is_the_unrolled_program(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = read_plan(plan_file)
    for rank in (0, 3):
        opcodes = [line.split()[1] for line in rank_list(capsys, plan_file, rank)]
        assert opcodes == [i.opcode for *_, i in plan.role_of(rank).instructions()]


def test_inspected_coordinates_are_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = tmp_path / "context.titan"
    text = (ROOT / "examples" / "tiny_dp.titan").read_text()
    spec.write_text(text.replace("data = 4", "data = 2\n    context = 2"))
    for rank in range(4):
        loads = [line for line in rank_list(capsys, spec, rank) if "what=tokens" in line]
        assert loads and {line.rpartition("start=")[2] for line in loads} == {f"{rank % 2 * 32} length=32"}


@pytest.mark.parametrize("arguments", [["--rank", "4"], ["--rank", "0", "--order", "backwards"]])
def test_ranks_and_orders_that_are_not_there(
    arguments: list[str], plan_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = titan(capsys, "inspect", str(plan_file), *arguments)
    assert (code, out) == (2, "") and "error T606" in err


def test_inspected_memory_adds_up(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = titan(capsys, "inspect", str(plan_file), "--memory")
    plan = read_plan(plan_file)
    for role, part in zip(plan.roles, out.split("role ")[1:], strict=True):
        total, *lines = part.splitlines()
        sizes = [int(line.split()[1].replace(",", "")) for line in lines if "highest" not in line]
        assert int(total.split()[1].replace(",", "")) == sum(sizes)
        assert sizes[0] == sum(b.bytes for b in role.buffers if b.kind == "parameters")


def test_inspected_text_is_the_file(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = titan(capsys, "inspect", str(plan_file), "--text")
    stored = gzip.decompress(plan_file.read_bytes()).decode()
    assert out.splitlines()[1:] == stored.splitlines()[1:]


def test_diff(plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert titan(capsys, "diff", str(plan_file), QUICKSTART, "--exit-code")[:2] == (0, "the plans are equal\n")
    other = tmp_path / "other.titan"
    other.write_text(Path(QUICKSTART).read_text().replace("sequence     = 128", "sequence     = 64"))
    code, out, _ = titan(capsys, "diff", str(plan_file), str(other), "--exit-code", "--json")
    differences = {d["place"]: d for d in json.loads(out)["differences"]}
    assert code == 1
    assert (differences["train.sequence"]["first"], differences["train.sequence"]["second"]) == ("128", "64")
    assert differences["train.sequence"]["remark"] == "-50.0%"
    assert "role 0 activations bytes" in differences


def test_a_plan_that_cannot_run_yet_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = tmp_path / "mixture.titan"
    spec.write_text(MIXTURE)
    assert titan(capsys, "check", str(spec))[0] == 0
    code, _, err = titan(capsys, "run", str(spec), "--steps", "1")
    assert code == 2 and "T630" in err and "expert_linear" in err


# --- the small commands


def test_every_code_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    for code, row in CATALOGUE.items():
        status, out, _ = titan(capsys, "explain", code.lower())
        assert status == 0 and row.title in out and row.cure.splitlines()[0] in out


def test_an_unknown_code(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = titan(capsys, "explain", "T999")
    assert code == 2 and "there is no code T999" in err


def test_explain_names_each_choice(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = titan(capsys, "explain", str(plan_file))
    assert code == 0
    assert all(any(line.startswith(axis) for line in out.splitlines()) for axis in ("pipeline", "tensor", "zero"))


def test_why_not_needs_the_spec(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = titan(capsys, "explain", str(plan_file), "--why-not", "tensor=4")
    assert code == 2 and "error T605" in err
