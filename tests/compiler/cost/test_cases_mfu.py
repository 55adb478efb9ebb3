"""Utilisation as public runs reported it, by each rule that they used; every test bears the id of its case."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from titan.compiler.cost.mfu import Convention, conventions, model_flops
from titan.compiler.spec.resolve import load_spec
from titan.compiler.spec.schema import Spec

from tests.compiler.spec.writing import resolved, spec_text
from tests.compiler.test_cli import titan

GPT = """model {{
    vocab = {vocab}, hidden = {hidden}, norm = layer_norm, positions = none, max_positions = 2048, tied = true
    attention = gqa {{ heads = 112, bias = true, out_bias = true }}
    layers = {layers} * dense {{ ffn = {ffn}, activation = gelu_tanh, bias = true }}
}}"""


def rules(spec: Spec, recompute: str = "none") -> dict[str, Convention]:
    return {c.key: c for c in conventions(model_flops(spec.model.model_dump(), spec.train.sequence), recompute)}


def library(name: str, sequence: int, tmp_path: Path) -> Spec:
    family = name.partition(".")[0]
    path = tmp_path / "model.titan"
    path.write_text(
        f"import models.{family}\nimport clusters.nvidia\nmodel = {name}\ncluster = nvidia.dgx_a100\n"
        f"train {{\n    sequence = {sequence}\n    global_batch = 8\n    precision = bf16\n}}\n"
    )
    return load_spec(path)


def test_S_MFU_01_one_speed_by_three_conventions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """6 * (8,030,261,248 - 128,256 * 4,096) + 12 * 32 * 4,096 * 8,192 FLOPs per token."""
    found = rules(library("llama.llama3_8b", 8192, tmp_path))
    assert found["full_scores"].per_token == pytest.approx(57_914_000_000, rel=1e-3)
    shares = {key: 100 * 2904 * rule.per_token / 312e12 for key, rule in found.items()}
    assert shares["embedding_counted"] == pytest.approx(56.84, abs=0.1)
    assert shares["full_scores"] == pytest.approx(53.90, abs=0.1)
    assert shares["exact"] == pytest.approx(47.91, abs=0.1)
    arguments = ("--devices", "8", "--peak", "312 TFLOP/s", "--tokens-per-second-per-device", "2904")
    code, out, _ = titan(capsys, "mfu", "--model", "llama.llama3_8b", "--sequence", "8192", *arguments)
    assert code == 0 and "312 TFLOP/s" in out
    for rule, percent in (("embedding counted", "56.84%"), ("without the embedding", "53.90%"), ("causal", "47.91%")):
        assert any(rule in line and percent in line for line in out.splitlines())


def test_S_MFU_02_experts_that_a_token_meets(tmp_path: Path) -> None:
    spec = library("qwen.qwen3_30b_a3b", 8192, tmp_path)
    assert model_flops(spec.model.model_dump(), 8192).met == 3_353_032_704
    assert rules(spec)["full_scores"].per_token == 37_578_559_488


def test_S_MFU_03_more_than_the_peak_is_refused_with_rule_and_peak(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Attention alone would be 189 of 312 TFLOP/s by causal counting, 378 by full scores: here a model whose FLOPs are
    nearly all scores."""
    model = ("--model", "gpt2.gpt2_small", "--sequence", "1024")
    base = ("mfu", *model, "--devices", "1", "--peak", "312 TFLOP/s")
    per_token = json.loads(titan(capsys, *base, "--tokens-per-second", "1", "--json")[1])["flops_per_token"]
    speed = 0.99 * 312e12 / per_token["exact"]  # possible by what was executed, not by full scores
    code, out, err = titan(capsys, *base, "--tokens-per-second", str(speed), "--json")
    assert code == 0 and json.loads(out)["by_rule"]["exact"] == pytest.approx(0.99)
    assert json.loads(out)["by_rule"]["full_scores"] > 1
    assert "T306" in err and "full scores" in err and "312.0 TFLOP/s" in err
    code, out, err = titan(capsys, *base, "--tokens-per-second", str(speed * 1.3))
    assert code == 2 and not out and "T306" in err and "312.0 TFLOP/s" in err


def test_S_MFU_03_a_causal_kernel_is_counted_by_half_the_scores() -> None:
    """Of 12 * sequence * width per token and layer of the full matrix, 6 are executed: 378 TFLOP/s read as 189."""
    spec = resolved(spec_text(sequence="16384", train="precision = bf16"))
    flops = model_flops(spec.model.model_dump(), 16384)
    width, layers = 16 * 16, 8
    assert flops.scores == 6 * 16384 * width * layers
    by_causal = 100 * 189e12 / 312e12
    by_full = by_causal * (12 * 16384 * width * layers / flops.scores)
    assert by_causal == pytest.approx(60.6, abs=0.1) and by_full == pytest.approx(121.2, abs=0.1)


def test_S_MFU_04_without_a_peak_there_is_no_utilisation(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--parameters", "8G", "--devices", "8", "--tokens-per-second", "90000")
    code, out, _ = titan(capsys, "mfu", *arguments)
    assert code == 0 and "peak unknown" in out and "%" not in out
    assert json.loads(titan(capsys, "mfu", *arguments, "--json")[1])["mfu_simple"] is None


def test_S_MFU_04_the_peak_is_dense_and_of_the_precision(tmp_path: Path) -> None:
    """989 TFLOP/s of bf16, not the 494.5 of TF32 nor the 1,979 of sparse products."""
    spec = resolved(spec_text(train="precision = bf16"))
    assert spec.cluster.device.peak[spec.train.precision] == pytest.approx(989e12, rel=0.01)
    unmeasured = resolved(spec_text(train="precision = bf16").replace("nvidia.dgx_h100", "local.cpu"))
    assert "bf16" not in unmeasured.cluster.device.peak


def test_S_MFU_05_hardware_and_model_flops_of_the_176b_run() -> None:
    """102.03 s for 2,048 sequences of 2,048 on 384 devices; every layer was recomputed."""
    spec = resolved(spec_text(model=GPT.format(vocab=250880, hidden=14336, layers=70, ffn=4 * 14336), sequence="2048"))
    found = rules(spec, "full")
    speed = 2048 * 2048 / 102.03 / 384
    assert found["full_scores"].kind == "MFU" and found["hardware"].kind == "HFU"
    assert speed * found["full_scores"].per_token / 1e12 == pytest.approx(115.84, rel=0.002)
    assert speed * found["hardware"].per_token / 1e12 == pytest.approx(153.68, rel=0.002)
    assert 100 * speed * found["full_scores"].per_token / 312e12 == pytest.approx(37.1, abs=0.08)


def test_S_MFU_06_mixtral_s_parameters(tmp_path: Path) -> None:
    """32 layers of attention 41,943,040, router 32,768, 8 or 2 experts of 3 * 4,096 * 14,336, norms 8,192."""
    spec = library("mixtral.mixtral_8x7b", 4096, tmp_path)
    flops = model_flops(spec.model.model_dump(), 4096)
    assert flops.parameters == spec.model.parameter_count() == 46_702_792_704
    assert flops.met == 12_879_925_248 and flops.simple == 6 * flops.met


def test_the_simple_rule_without_a_spec(capsys: pytest.CaptureFixture[str]) -> None:
    """6 * 70e9 * 24,000 / (16 * 1e15) = 63.0%."""
    arguments = ("--parameters", "70e9", "--devices", "16", "--peak", "1000 TFLOP/s", "--tokens-per-second", "24000")
    code, out, _ = titan(capsys, "mfu", *arguments)
    assert code == 0 and "MFU 63.00%" in out and "6N" in out
    found = json.loads(titan(capsys, "mfu", *arguments, "--json")[1])
    assert found["mfu_simple"] == pytest.approx(0.63) and found["mfu"] is None


@pytest.mark.parametrize(
    "arguments",
    [
        ["--tokens-per-second", "1"],
        ["--parameters", "70G", "--tokens-per-second", "1"],
        ["--parameters", "70 GB", "--devices", "1", "--tokens-per-second", "1"],
        ["--parameters", "70G", "--devices", "1", "--step-time", "1"],
        ["--parameters", "70G", "--devices", "1", "--peak", "5 TB", "--tokens-per-second", "1"],
        ["--parameters", "70G", "--devices", "1", "--peak", "0", "--tokens-per-second", "1"],
        ["--model", "llama.llama3_8b", "--devices", "1", "--tokens-per-second", "1"],
        ["--model", "llama", "--sequence", "8", "--devices", "1", "--tokens-per-second", "1"],
        ["--model", "llama.no", "--sequence", "8", "--devices", "1", "--tokens-per-second", "1"],
    ],
)
def test_what_a_measure_lacks_is_a_coded_error(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = titan(capsys, "mfu", *arguments)
    assert code == 2 and not out and "error T" in err
