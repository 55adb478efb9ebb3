"""What the environment says about a world."""

from __future__ import annotations

import pytest
from titan.grammar.diagnostics import TitanError
from titan.runtime.world import first_host, membership


def test_no_world() -> None:
    assert membership({}) is None
    assert membership({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}) is None  # inside sbatch, outside srun


def test_torchrun() -> None:
    names = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1"}
    found = membership({**names, "MASTER_PORT": "1234", "TORCHELASTIC_RESTART_COUNT": "2"})
    assert found is not None
    assert (found.rank, found.size, found.local_rank, found.local_size) == (5, 8, 1, 4)
    assert (found.address, found.port, found.generation, found.one_machine) == ("10.0.0.1", 1234, 2, False)


def test_slurm() -> None:
    names = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "3", "SLURM_STEP_NUM_NODES": "2"}
    found = membership({**names, "SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"})
    assert found is not None
    assert (found.maker, found.rank, found.size, found.local_rank, found.local_size) == ("SLURM", 3, 8, 3, 4)
    assert found.address == "gpu07" and not found.one_machine


def test_slurm_jobs_on_one_host_meet_at_different_ports() -> None:
    names = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    ports = {membership({**names, "SLURM_JOB_ID": job}).port for job in ("100", "101")}  # type: ignore[union-attr]
    assert len(ports) == 2


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("a1", "a1"), ("a1,b2", "a1"), ("n[3,5-7]", "n3"), ("n[010-012]x,m1", "n010x"), ("m1,n[1-2]", "m1")],
)
def test_first_host(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


@pytest.mark.parametrize("wrong", [{"RANK": "one"}, {"RANK": "2"}, {"WORLD_SIZE": "-1"}, {"MASTER_PORT": "http"}])
def test_nonsense_is_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(TitanError) as refused:
        membership({"RANK": "0", "WORLD_SIZE": "2", **wrong})
    assert refused.value.diagnostics[0].code == "T608"
