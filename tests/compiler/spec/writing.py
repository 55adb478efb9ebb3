"""Specs written in tests: a complete small one with parts replaced, and what its diagnostics are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from titan.compiler.spec.legality import check_pins
from titan.compiler.spec.resolve import resolve
from titan.compiler.spec.schema import Spec
from titan.grammar.diagnostics import Diagnostic, TitanError
from titan.grammar.parser import parse

MODEL = """model {
    vocab = 1024, hidden = 64, max_positions = 64Ki, rope = { theta = 10000 }
    attention = gqa { heads = HEADS, kv_heads = KV, head_dim = 16 }
    layers = LAYERS * dense { ffn = FFN }
}"""


def spec_text(
    parallel: str = "",
    *,
    nodes: int = 1,
    devices: int = 8,
    model: str = "",
    heads: int = 16,
    kv_heads: int = 16,
    layers: int = 8,
    ffn: int = 192,
    sequence: str = "128",
    batch: str = "64",
    train: str = "precision = fp32",
) -> str:
    """A whole spec; everything that is not given is small and divides well."""
    written = MODEL.replace("HEADS", str(heads)).replace("KV", str(kv_heads))
    written = written.replace("LAYERS", str(layers)).replace("FFN", str(ffn))
    batched = f"global_batch = {batch}" if batch else ""
    return f"""import models.llama
import models.gpt2
import models.tiny
import clusters.local
import clusters.nvidia
{model or written}
cluster = nvidia.dgx_h100 with {{ nodes = {nodes}, devices_per_node = {devices} }}
train {{
    sequence = {sequence}
    {batched}
    {train}
}}
parallel {{
    {parallel}
}}
"""


def resolved(text: str, folder: Path | None = None) -> Spec:
    return resolve(parse(text, "test.titan"), folder or Path("."))


def problems(text: str, folder: Path | None = None) -> tuple[Diagnostic, ...]:
    """All diagnostics of a text, warnings too: of reading it, and of the fixed wishes when it could be read."""
    try:
        spec = resolved(text, folder)
    except TitanError as error:
        return error.diagnostics
    return (*spec.warnings, *check_pins(spec))


def errors(text: str, folder: Path | None = None) -> tuple[Diagnostic, ...]:
    return tuple(d for d in problems(text, folder) if d.severity == "error")


def codes(diagnostics: tuple[Diagnostic, ...]) -> list[str]:
    return [d.code for d in diagnostics]


def only(diagnostics: tuple[Diagnostic, ...]) -> Diagnostic:
    """The one diagnostic that there must be."""
    assert len(diagnostics) == 1, [f"{d.code} {d.message}" for d in diagnostics]
    return diagnostics[0]


def pointed_at(diagnostic: Diagnostic, text: str) -> str:
    """The source text under the caret."""
    span = diagnostic.span
    assert span is not None and span.line == span.end_line
    return text.splitlines()[span.line - 1][span.column - 1 : span.end_column - 1]


@dataclass(frozen=True)
class Layout:
    """A strategy written out, for the rules."""

    region: int = 1
    pipeline: int = 1
    data: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1
    expert_tensor: int = 1
    micro_batch: int = 1
    zero: int = 0
    shard: int = 0
    gather: str = "each"
    reduce: str = "each"
    sequence_parallel: bool = False
    context_form: str = "gathered"
    context_heads: int = 1
    context_order: str = "zigzag"
    schedule: str = "one_f_one_b"
    recompute: str = "none"
    offload: str = "none"
    late_check: bool = False
    chunks: int = 1
    stages: tuple[int, ...] = ()
