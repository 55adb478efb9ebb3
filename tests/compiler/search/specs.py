"""Specs for the tests of search: a model, a cluster and wishes, written as a user would."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from titan.compiler.cost.memory import memory_ledger
from titan.compiler.lower import lower
from titan.compiler.search.enumeration import enumerate_space
from titan.compiler.search.search import estimator_of
from titan.compiler.search.space import shardings
from titan.compiler.spec.resolve import load_spec
from titan.compiler.spec.schema import Spec

TEXT = """
import models.llama
import models.tiny
import clusters.nvidia

model = {model}
cluster = {cluster}
train {{
    sequence = {sequence}
    global_batch = {batch}
    precision = bf16
    optimizer = adamw {{ learning_rate = 3e-4 }}
    data = tokens("corpus.tokens")
    {train}
}}
parallel {{
    {wishes}
}}
minimize {goal} subject to memory <= {memory}% of device{limits}
"""

SMALL = """model {
    vocab = 32000  hidden = 1024  max_positions = 4096
    attention = gqa { heads = 16, kv_heads = 4 }
    layers = 12 * dense { ffn = 2816 }
    rope = { theta = 10000 }
}""".replace("  hidden", "\n    hidden").replace("  max", "\n    max")


def write(
    folder: Path,
    wishes: str = "",
    model: str = SMALL,
    nodes: int = 1,
    devices: int = 8,
    sequence: int = 2048,
    batch: int = 64,
    memory: int = 92,
    train: str = "",
    goal: str = "step_time",
    limits: str = "",
    price: float | None = None,
) -> Spec:
    """The spec of such a file; `wishes` are lines of its `parallel` section, `price` in dollars per device-hour."""
    path = folder / "spec.titan"
    priced = "" if price is None else f", price_per_device_hour = {price} USD/h"
    cluster = f"nvidia.dgx_h100 with {{ nodes = {nodes}, devices_per_node = {devices}{priced} }}"
    lines = wishes.replace(";", "\n    ")
    path.write_text(
        TEXT.format(
            model=model,
            cluster=cluster,
            sequence=sequence,
            batch=batch,
            wishes=lines,
            memory=memory,
            train=train,
            goal=goal,
            limits="".join(f", {limit}" for limit in limits.split(";") if limit),
        )
    )
    return load_spec(path)


def least_memory(spec: Spec, **fixed: Any) -> int:
    """Bytes per device of the smallest plan that recomputes all and keeps everything on the device, over all meshes
    and shardings of the space; `fixed` are fields of every strategy."""
    machine = estimator_of(spec).machine
    full = {replace(s, recompute="full", offload="none", **fixed) for s in enumerate_space(spec).candidates}
    tried = {replace(s, **option) for s in full for option in shardings(spec, s)}
    return min(memory_ledger(lower(spec, s), machine).peak for s in tried)
