"""FLOPs of models against figures that are published or counted by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from titan.compiler.cost.mfu import model_flops, utilisation
from titan.compiler.spec.resolve import load_spec

SPEC = """
import models.{family}
import clusters.nvidia
model = {family}.{name}
cluster = nvidia.dgx_h100
train {{
    sequence = {sequence}
    global_batch = 8
    precision = bf16
    optimizer = adamw {{ learning_rate = 3e-4 }}
    data = tokens("corpus.tokens")
}}
"""


def loaded(tmp_path: Path, family: str, name: str, sequence: int) -> dict[str, object]:
    path = tmp_path / "model.titan"
    path.write_text(SPEC.format(family=family, name=name, sequence=sequence))
    spec = load_spec(path)
    assert model_flops(spec.model.model_dump(), sequence).parameters == spec.model.parameter_count()
    return spec.model.model_dump()


@pytest.mark.parametrize(
    "family,name,sequence",
    [
        ("llama", "llama3_8b", 8192),
        ("llama", "llama3_405b", 8192),
        ("gpt2", "gpt2_small", 1024),
        ("gpt2", "gpt2_xl", 1024),
    ],
)
def test_parameters_are_those_of_the_spec(tmp_path: Path, family: str, name: str, sequence: int) -> None:
    loaded(tmp_path, family, name, sequence)


def test_llama3_8b_per_token(tmp_path: Path) -> None:
    """8.03 G parameters; matrix products without the embedding 7.50 G; attention 6 * 32 * 8192 * 4096."""
    flops = model_flops(loaded(tmp_path, "llama", "llama3_8b", 8192), 8192)
    assert flops.simple == 6 * 8_030_261_248
    assert flops.exact == 6 * (8_030_261_248 - 128_256 * 4096 - 65 * 4096) + 6 * 32 * 8192 * 4096


def test_published_llama3_70b_rate(tmp_path: Path) -> None:
    """1,024 H100 at 14.80 s for 1,024 sequences on 512 devices is 53.84% by full attention: a published benchmark row;
    causal counting leaves out half of the scores."""
    model = loaded(tmp_path, "llama", "llama3_70b", 8192)
    flops = model_flops(model, 8192)
    full = flops.exact + 6 * 80 * 8192 * 8192
    tokens = 1024 * 8192 / 14.80 / 512
    assert full * tokens / 989e12 == pytest.approx(0.5384, rel=0.01)
    used = utilisation(flops, tokens, 989e12)
    assert used.mfu is not None and 0.48 < used.mfu < 0.5384


def test_unknown_peak_gives_no_share(tmp_path: Path) -> None:
    used = utilisation(model_flops(loaded(tmp_path, "gpt2", "gpt2_small", 1024), 1024), 1000.0, None)
    assert used.mfu is None and used.mfu_simple is None and used.tflops > 0
