"""The shipped library against published facts, and the examples that use it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from titan.compiler.cost.mfu import model_flops
from titan.compiler.spec.legality import check_pins
from titan.compiler.spec.resolve import load_spec
from titan.compiler.spec.schema import Cluster, Model
from titan.grammar.sources import library_path

from tests.compiler.spec.writing import resolved

ROOT = Path(__file__).parents[3]
FACTS = json.loads((ROOT / "tests/fixtures/public_models.json").read_text())["models"]
MIXTURES = json.loads((ROOT / "tests/fixtures/public_mixtures.json").read_text())["models"]
TINY = ("llama", "gpt2", "exact", "odd_vocab", "local_global")
CLUSTERS = (
    "nvidia.dgx_b200",
    "nvidia.dgx_b300",
    "nvidia.gb200_nvl72",
    "nvidia.gb300_nvl72",
    "nvidia.dgx_h800",
    "nvidia.grand_teton",
    "nvidia.dgx_a100_40gb",
    "nvidia.dgx_h100",
    "nvidia.dgx_a100",
    "nvidia.dgx_h200",
    "nvidia.h200",
    "local.cpu",
)


def model(name: str) -> Model:
    file = name.split(".")[0]
    text = f"import models.{file}\nimport clusters.local\nmodel = {name}\ncluster = local.cpu\n"
    return resolved(f"{text}train {{ sequence = 16, global_batch = 1 }}").model


def cluster(name: str) -> Cluster:
    file = name.split(".")[0]
    text = f"import models.tiny\nimport clusters.{file}\nmodel = tiny.llama\ncluster = {name}\n"
    return resolved(f"{text}train {{ sequence = 16, global_batch = 1 }}").cluster


@pytest.mark.parametrize("facts", FACTS, ids=lambda facts: str(facts["model"]))
def test_models_have_the_published_shape_and_parameters(facts: dict[str, object]) -> None:
    found = model(str(facts["model"]))
    assert found.attention is not None
    shape = (found.hidden, found.layer_count, found.attention.heads, found.attention.kv_heads, found.attention.head_dim)
    assert shape == tuple(facts[key] for key in ("hidden", "layers", "heads", "kv_heads", "head_dim"))
    assert (found.blocks[0].ffn, found.vocab, found.init_std) == (facts["ffn"], facts["vocab"], facts["init_std"])
    assert found.parameter_count() == facts["parameters"]


@pytest.mark.parametrize("facts", MIXTURES, ids=lambda facts: str(facts["model"]))
def test_mixtures_have_the_published_shape_and_parameters(facts: dict[str, Any]) -> None:
    found = model(str(facts["model"]))
    block = next(b for b in found.blocks if b.kind == "moe")
    assert found.attention is not None and found.attention.heads == facts["heads"]
    assert (found.hidden, found.layer_count, found.vocab) == (facts["hidden"], facts["layers"], facts["vocab"])
    assert (block.experts, block.top_k, block.ffn) == (facts["experts"], facts["top_k"], facts["expert_ffn"])
    assert found.parameter_count() == facts["parameters"]
    assert model_flops(found.model_dump(), 4096).parameters == facts["parameters"]


@pytest.mark.parametrize("facts", [f for f in FACTS if f["rope"]], ids=lambda facts: str(facts["model"]))
def test_rotary_positions_are_the_published_ones(facts: dict[str, dict[str, object]]) -> None:
    published = facts["rope"]
    rope = model(str(facts["model"])).rope
    assert rope is not None and rope.theta == published["theta"]
    if "scaling_kind" not in published:
        assert rope.scaling is None
        return
    assert rope.scaling is not None
    assert rope.scaling.factor == published["scaling_factor"]
    assert rope.scaling.original_max_positions == published["original_max_position"]
    assert rope.scaling.low_frequency_factor == published["low_freq_factor"]
    assert rope.scaling.high_frequency_factor == published["high_freq_factor"]


def test_parameter_groups_of_gpt2_agree() -> None:
    gpt2 = model("gpt2.gpt2")
    groups = next(f["groups"] for f in FACTS if f["model"] == "gpt2.gpt2")
    assert gpt2.embedding_count() == groups["embed"] + groups["embed_pos"]
    layers = sum(gpt2.layer_parameter_count(block) for block in gpt2.blocks)
    assert layers == groups["attn"] + groups["mlp"] + groups["norm"] - 2 * gpt2.hidden
    assert gpt2.head_count() == 0


@pytest.mark.parametrize("name", TINY)
def test_tiny_models_are_tiny(name: str) -> None:
    assert 1_000 < model(f"tiny.{name}").parameter_count() < 1_000_000


def test_the_test_models_are_what_they_are_for() -> None:
    exact = model("tiny.exact")
    assert (exact.norm, exact.positions, exact.initializer, exact.attention) == ("none", "none", "power_of_two", None)
    assert all(block.activation == "relu" for block in exact.blocks)
    assert all(model("tiny.odd_vocab").vocab % degree for degree in (2, 3, 4, 8))


def test_windows_of_the_library() -> None:
    assert {block.window for block in model("mistral.mistral_7b").blocks} == {4096}
    assert [block.window for block in model("tiny.local_global").blocks] == [32, None, 32, None]


@pytest.mark.parametrize("name", CLUSTERS)
def test_clusters_are_plausible_and_every_figure_has_a_source(name: str) -> None:
    found = cluster(name)
    assert found.device.memory > found.memory_reserved > 0
    assert found.intra.bandwidth >= found.inter.bandwidth and found.intra.latency <= found.inter.latency
    assert all(len(figure.source) > 10 for figure in found.efficiency.values())


@pytest.mark.parametrize("name", ["nvidia", "local"])
def test_every_number_of_a_cluster_file_says_where_it_is_from(name: str) -> None:
    for line in (library_path() / f"clusters/{name}.titan").read_text().splitlines():
        code, _, comment = line.partition("#")
        measured = any(unit in code for unit in ("FLOP/s", "GB/s", "Gb/s", "TB/s", " us", "GiB", "MiB"))
        if measured and "measured(" not in code:
            assert comment.strip(), line


def test_peaks_of_known_devices() -> None:
    h100, a100 = cluster("nvidia.dgx_h100").device, cluster("nvidia.dgx_a100").device
    assert h100.peak["bf16"] == pytest.approx(989.4e12) and a100.peak["bf16"] == pytest.approx(312e12)
    assert a100.peak["fp32"] == pytest.approx(19.5e12)
    assert cluster("nvidia.dgx_h100").inter.bandwidth == pytest.approx(400e9 / 8)
    assert cluster("nvidia.h200").device.memory > 140e9
    assert cluster("local.cpu").device.peak == {}


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.titan")), ids=lambda path: path.stem)
def test_examples_resolve_without_a_word(path: Path) -> None:
    spec = load_spec(path)
    assert spec.warnings == () and check_pins(spec) == ()


def test_examples_are_what_their_names_say() -> None:
    def example(name: str) -> tuple[int, int]:
        spec = load_spec(ROOT / f"examples/{name}.titan")
        return spec.model.parameter_count(), spec.cluster.world_size

    assert example("llama3_70b_1024gpu") == (70_553_706_496, 1024)
    assert example("llama3_405b_16384gpu") == (405_853_388_800, 16384)
    assert example("quickstart") == (857_216, 4)
