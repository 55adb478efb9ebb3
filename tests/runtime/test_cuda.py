"""The same runtime on a CUDA device: operators, layouts, copies to the host, the watermark, and ranks over NCCL.

Whole layouts run on loopback, so one device is enough. NCCL refuses two ranks on one device of one host; here each rank
says that it is a host of its own, and they talk through sockets: slow, but NCCL's own collectives and messages.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from titan.compiler.lower import lower
from titan.compiler.pipeline import compile_spec
from titan.compiler.plan.operators import OPERATORS
from titan.compiler.plan.program import Plan
from titan.compiler.plan.sizes import Sizes, memory_by_component
from titan.runtime.assemble import same_bits
from titan.runtime.data import SyntheticSource
from titan.runtime.interpreter import Executable
from titan.runtime.loopback import LoopbackResult, collect_parameters, run_loopback, run_step
from titan.runtime.operator_table import functions
from titan.runtime.operators.dropout import kept
from titan.runtime.state import allocate
from titan.runtime.transport.loopback import Loopback
from torch import Tensor

from tests.equivalence.comparison import Training, differences, source_of, train_reference
from tests.equivalence.configurations import Configuration, single_strategy, spec_of, strategy_of
from tests.runtime.small_runs import environment, write_spec
from tests.runtime.test_operators import PLACE, Case, _oracle, _roles, _weight_names, cases

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CUDA = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
TOLERANCES = {torch.float64: 1e-10, torch.float32: 2e-3, torch.bfloat16: 8e-2}  # float32 products may use TF32
NARROW = ("peak", "total", "target", "partial", "partial_lse")


@pytest.fixture(autouse=True)
def _own_settings() -> Iterator[None]:
    """Each test alone on the device."""
    gc.collect()
    yield
    torch.cuda.set_sync_debug_mode(0)


@pytest.fixture
def one_order(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sums in one order: attention's backward adds up as its blocks come, unless told otherwise."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


# --- operators


def _operands(case: Case, dtype: torch.dtype) -> tuple[Tensor, ...]:
    statistic = torch.float64 if dtype == torch.float64 else torch.float32
    return tuple(
        x.to(CUDA) if not x.is_floating_point() else x.to(CUDA, statistic if name in NARROW else dtype)
        for name, x in zip(OPERATORS[case.operator].operands, case.operands, strict=True)
    )


@cases
@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
def test_operators_equal_autograd_in_float64(case: Case, dtype: torch.dtype) -> None:
    """Forward, and for differentiable ones both backward functions, which add to what is there."""
    row, module = OPERATORS[case.operator], functions(case.operator)
    exact, given, wanted = _oracle(case)
    names = {torch.float64: "f64", torch.float32: "f32", torch.bfloat16: "bf16"}
    attributes = {key: names[dtype] if key == "dtype" else value for key, value in case.attributes.items()}
    operands, tolerance = _operands(case, dtype), TOLERANCES[dtype]
    results = module.forward(attributes, PLACE, *operands)
    for found, right in zip(results, exact, strict=False):
        _near(found, right, tolerance)
    if not row.differentiable or (row.name == "token_loss" and dtype == torch.bfloat16):
        return
    attributes = {key: True if key == "final" else value for key, value in attributes.items()}
    if attributes != dict(case.attributes) and "final" in attributes:
        results = module.forward(attributes, PLACE, *operands)
    inputs, parameters = _roles(case)
    everything = dict(zip(row.operands + row.results, operands + results, strict=True))
    gradients = tuple(g.to(r) for g, r in zip(given, results, strict=False))
    found_inputs = module.backward_input(attributes, PLACE, {n: everything[n] for n in row.saves}, gradients)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    into = tuple(torch.ones(case.operands[n].shape, dtype=wide, device=CUDA) for n in parameters)
    saved = {n: everything[n] for n in _weight_names(case)}
    module.backward_weight(attributes, PLACE, saved, gradients, into)
    for n, found in zip(inputs + parameters, (*found_inputs, *(x - 1 for x in into)), strict=True):
        _near(found, wanted[n] if wanted[n] is not None else torch.zeros_like(case.operands[n]), tolerance)


def _near(found: Tensor, right: Tensor, tolerance: float) -> None:
    gap, scale = (found.double().cpu() - right).norm(), right.norm()
    assert gap <= tolerance * scale + tolerance, f"off by {gap:.3g} of {scale:.3g}"


def test_random_numbers_are_those_of_the_processor() -> None:
    """Initial values of every kind, and dropout's masks, to the bit."""
    spec = spec_of(Configuration(family="dropout", odd=True), "fp32")
    plan = lower(spec, single_strategy(spec))
    here, there = allocate(plan, 0), allocate(plan, 0, CUDA)
    assert all(same_bits(value, there.buffers[name].cpu()) for name, value in here.buffers.items())
    masks = [kept(PLACE, "ffn", 0.25, ((5, 40), (90, 10)), 33, torch.device(d)).cpu() for d in ("cpu", CUDA)]
    assert torch.equal(*masks) and 0.6 < masks[0].double().mean() < 0.9


# --- layouts


LAYOUTS = (
    Configuration(family="gpt2", tied=True, odd=True),
    Configuration(data=2, tensor=2, sequence_parallel=True, zero=1, odd=True),
    Configuration(pipeline=4, schedule="zero_bubble_v", tied=True, recompute="full"),
    Configuration(pipeline=4, schedule="dualpipe", stages="even"),
    Configuration(data=4, zero=3, recompute="selective"),
    Configuration(data=4, zero="3-half", tied=True),
    Configuration(context=4, context_form="ring", family="kv_one"),
    Configuration(context=2, tensor=2, context_form="heads", recompute="full"),
    Configuration(context=2, context_form="ring", family="window", filled=True, tensor=2),
    Configuration(data=2, pipeline=2, family="dropout", offload="both", zero=1),
    Configuration(recompute="adaptive", family="dropout"),
)


def _on_device(plan: Plan, spec: Any, steps: int = 2) -> Training:
    states = tuple(allocate(plan, rank, CUDA) for rank in range(plan.mesh.world_size))
    initial = {name: value.cpu() for name, value in collect_parameters(states, plan).items()}
    result = run_loopback(
        plan, steps, source_of(spec), states=states, keep_gradients=True, check=True, device=str(CUDA)
    )
    gradients = tuple({name: value.cpu() for name, value in step.items()} for step in result.gradients)
    parameters = {name: value.cpu() for name, value in collect_parameters(result.states, plan).items()}
    return Training(initial, result.losses, result.norms, gradients, parameters)


@pytest.mark.parametrize("c", LAYOUTS, ids=str)
def test_layouts_equal_one_process(c: Configuration) -> None:
    """Float64 on the device against plain autograd on the processor."""
    spec = spec_of(c)
    plan, single = lower(spec, strategy_of(c)), lower(spec, single_strategy(spec))
    found = _on_device(plan, spec)
    assert differences(found, train_reference(single, spec, found.initial)) == []


def _asks(executable: Executable) -> bool:
    """The norm is looked at, and at the end what is reported."""
    text, last = executable.describe(executable.position), len(executable) - 1
    return text.startswith("optimizer_step") or executable.position == last


def test_nothing_waits_for_the_device_but_the_norm() -> None:
    """A copy that blocks, or a size that depends on data, would let the device run dry between kernels."""
    spec = spec_of(Configuration(pipeline=2, family="dropout", offload="both", recompute="full"), "fp32")
    plan = lower(spec, strategy_of(Configuration(pipeline=2, family="dropout", offload="both", recompute="full")))
    strict = False

    def watch(position: int) -> None:
        """Of whichever rank is about to run it."""
        asks = any(e.position == position and _asks(e) for e in executables)
        torch.cuda.set_sync_debug_mode(2 if strict and not asks else 0)

    world, source = Loopback(str(CUDA)), source_of(spec)
    executables = [
        Executable(plan, r, world.transport(r), allocate(plan, r, CUDA), source, delay=watch) for r in (0, 1)
    ]
    run_step(executables, 0)  # libraries begin
    strict = True
    run_step(executables, 1)


# --- memory


SIZED = """import clusters.nvidia
model = model {{
    vocab = 8192, hidden = 1024, layers = 6 * dense {{ ffn = 2816 }}
    attention = gqa {{ heads = 8, kv_heads = 4 }}, norm = rms_norm
    positions = rope, rope = {{ theta = 10000 }}, max_positions = 4096
}}
cluster = nvidia.dgx_h200 with {{ devices_per_node = 1, host_memory = 64 GiB }}
train {{
    sequence = 1024, global_batch = 8, precision = bf16, steps = 4, clip = 1.0
    optimizer = adamw {{ learning_rate = 1e-4 }}, data = synthetic(8192)
}}
parallel {{ micro_batch = 4, {parallel} }}
"""


def _sized(folder: Path, parallel: str) -> Plan:
    path = folder / "sized.titan"
    path.write_text(SIZED.format(parallel=parallel))
    return compile_spec(path).plan


def _trained(plan: Plan, steps: int = 2) -> tuple[LoopbackResult, int]:
    """Two steps on the device, and the most bytes of tensors that were allocated meanwhile."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = run_loopback(plan, steps, SyntheticSource(8192, seed=3), device=str(CUDA))
    return result, torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize(
    "parallel",
    ["recompute = none", "recompute = full", "recompute = selective", "recompute = none, offload = both"],
)
def test_the_predicted_peak_is_what_the_allocator_counts(parallel: str, tmp_path: Path) -> None:
    plan = _sized(tmp_path, parallel)
    _trained(plan, 1)  # libraries' workspaces, which the cluster's `memory_reserved` stands for
    _, peak = _trained(plan)
    predicted = sum(memory_by_component(plan, plan.roles[0], Sizes(plan)).values())
    print(f"{parallel}: predicted {predicted / 2**20:.1f} MiB, allocated {peak / 2**20:.1f} MiB")
    assert abs(peak - predicted) <= 0.02 * predicted


@pytest.mark.usefixtures("one_order")
def test_offload_gives_the_same_bits_and_frees_the_device(tmp_path: Path) -> None:
    plain, most = _trained(_sized(tmp_path, "recompute = none"))
    moved, less = _trained(_sized(tmp_path, "recompute = none, offload = both"))
    assert plain.losses == moved.losses and plain.norms == moved.norms
    for name, value in plain.states[0].buffers.items():
        assert same_bits(value.cpu(), moved.states[0].buffers[name].cpu()), name
    assert less < most - 500 * 2**20  # optimizer state alone: 12 bytes for each of 89 million parameters


@pytest.mark.usefixtures("one_order")
def test_pressure_lowers_tiers_and_nothing_else(tmp_path: Path) -> None:
    """The limit lies below what the run would take without recompute, and another allocation takes more of it: an
    adaptive run ends, with the same bits; the fixed one runs out of the same memory."""
    fixed, adaptive = _sized(tmp_path, "recompute = none"), _sized(tmp_path, "recompute = adaptive")
    plain, most = _trained(fixed)
    _, least = _trained(_sized(tmp_path, "recompute = full"))
    free, total = torch.cuda.mem_get_info()
    outside = total - free - torch.cuda.memory_reserved()  # the context, and whoever else is there
    limit = outside + torch.cuda.memory_allocated() + (most + least) // 2 + (64 << 20)
    adaptive = replace(adaptive, settings=_with_limit(adaptive, limit))
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((limit - outside) / total)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            _trained(fixed)
        found, _ = _trained(adaptive)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert found.losses == plain.losses and found.norms == plain.norms


def _with_limit(plan: Plan, limit: int) -> tuple[tuple[str, str], ...]:
    return tuple((name, str(limit) if name == "memory.limit_bytes" else value) for name, value in plan.settings)


# --- ranks over NCCL


def _world(folder: Path, source: Path, size: int, device: str, name: str) -> list[dict[str, Any]]:
    """Records of rank 0's log: `size` processes join one world, each as a host of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": str(size), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": str(port)}
    shared |= {"MASTER_ADDR": "127.0.0.1", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    log = folder / name
    command = [
        sys.executable,
        "-m",
        "titan.compiler.cli",
        "run",
        str(source),
        "--device",
        device,
        "--log-dir",
        str(log),
    ]
    ranks = [
        subprocess.Popen(
            command,
            env=environment(**shared, RANK=str(rank), NCCL_HOSTID=f"host{rank}"),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(size)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=90)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0] * size, "\n".join(said)
    return [json.loads(line) for line in (log / "log.jsonl").read_text().splitlines()]


OVER_NCCL = {
    "pipeline = 2, schedule = dualpipe": 2,
    "pipeline = 2, schedule = zero_bubble_h2, late_check = true": 2,
    "tensor = 2, sequence_parallel = true": 2,
    "data = 2, zero = 3": 2,
    "context = 2, context_form = ring": 2,
    "pipeline = 2, tensor = 2": 4,
}


@pytest.mark.parametrize("parallel", OVER_NCCL)
def test_ranks_over_nccl_train_as_over_gloo(parallel: str, tmp_path: Path) -> None:
    size = OVER_NCCL[parallel]
    source = write_spec(tmp_path, parallel, ranks=size)
    runs = [_world(tmp_path, source, size, device, device) for device in ("cuda", "cpu")]
    steps = [[r for r in records if r["event"] == "step"] for records in runs]
    assert [len(records) for records in steps] == [6, 6]
    for over_nccl, over_gloo in zip(*steps, strict=True):
        for key in ("loss", "grad_norm"):
            assert over_nccl[key] == pytest.approx(over_gloo[key], rel=1e-3), (key, over_nccl["step"])


def test_nccl_collectives_are_what_they_mean(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.runtime.nccl_collectives", str(rank), "2", str(tmp_path)],
            env=environment(NCCL_HOSTID=f"host{rank}", NCCL_SOCKET_IFNAME="lo", PYTHONPATH=os.pathsep.join(sys.path)),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [process.communicate(timeout=90)[0] for process in ranks]
    assert all((tmp_path / f"passed{rank}").exists() for rank in range(2)), "\n".join(said)
