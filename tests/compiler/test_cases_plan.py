"""Situations from public reports that a spec and its rules decide; each test bears the id of its case."""

from __future__ import annotations

import re

import pytest
from titan.compiler.spec.legality import check_pins, is_legal, legal
from titan.compiler.spec.pins import pinned
from titan.compiler.spec.resolve import resolve
from titan.compiler.spec.vocabulary import padded_vocab
from titan.grammar.diagnostics import Diagnostic
from titan.grammar.parser import parse

from tests.compiler.spec.writing import Layout, codes, errors, only, problems, resolved, spec_text


def told(diagnostic: Diagnostic) -> str:
    """Everything a user reads of it."""
    return " ".join((diagnostic.message, *diagnostic.nearest, *(note.text for note in diagnostic.notes)))


def test_S_DIM_01_a_layout_that_does_not_multiply_out_names_the_axis_that_can_absorb_it() -> None:
    text = spec_text(
        "tensor = 8, context = 16, pipeline = 16, data = 4",
        nodes=2048,
        model="model = llama.llama3_1_405b",
        sequence="128Ki",
    )
    found = only(errors(text))
    assert found.code == "T240" and found.nearest == ("data = 8",)
    assert re.search(r"\b8192\b", told(found)) and re.search(r"\b16384\b", told(found))


def test_S_DIM_02_context_does_not_reuse_the_ranks_of_data() -> None:
    found = only(errors(spec_text("data = 8, context = 8, tensor = 1, pipeline = 1", batch="8", sequence="8192")))
    assert found.code == "T240" and found.nearest == ("data = 1", "context = 1")
    assert "context takes its own factor" in told(found) and "data x context" in told(found)
    assert re.search(r"\b64\b", told(found)) and re.search(r"\b8\b", told(found))


@pytest.mark.parametrize("axis", ["context", "data", "tensor", "pipeline", "region", "expert", "micro_batch"])
@pytest.mark.parametrize("degree", ["0", "-1"])
def test_S_DIM_03_degree_zero_is_refused_with_the_way_to_disable(axis: str, degree: str) -> None:
    found = only(errors(spec_text(f"{axis} = {degree}")))
    assert found.code == "T241" and "use 1 to disable" in found.message and axis in found.message


def test_S_DIM_03_context_over_all_ranks_leaves_one_data_rank() -> None:
    spec = resolved(spec_text("context = 8, micro_batch = 1, tensor = 1, pipeline = 1", sequence="128"))
    assert check_pins(spec) == () and pinned(spec)["data"] == 1
    assert pinned(spec)["data"] * pinned(spec)["micro_batch"] == 1  # samples per micro-step


def test_S_GQA_01_more_tensor_ranks_than_kv_heads_is_legal_when_it_is_a_multiple() -> None:
    spec = resolved(spec_text("tensor = 4, data = 1", devices=4, heads=16, kv_heads=2))
    assert check_pins(spec) == () and is_legal(spec, Layout(tensor=4, stages=(8,)))


def test_S_GQA_02_a_pinned_degree_that_does_not_fit_gets_a_reason_and_the_legal_ones() -> None:
    spec = resolved(spec_text("tensor = 8", heads=32, kv_heads=2))
    assert check_pins(spec) == ()  # replication of key/value heads is supported
    found = only(errors(spec_text("tensor = 4", devices=8, heads=24, kv_heads=6)))
    assert found.code == "T242" and "kv_heads = 6" in found.message and found.nearest == ("2",)


@pytest.mark.parametrize(("context", "fits"), [(8, True), (16, False), (40, False)])
def test_S_GQA_04_head_exchange_is_limited_by_heads_and_gathering_is_offered(context: int, fits: bool) -> None:
    text = spec_text(
        f"context = {context}, context_form = heads, tensor = 1, pipeline = 1",
        devices=context,
        heads=40,
        kv_heads=8,
        sequence="65280",
    )
    found = errors(text)
    if fits:
        assert found == ()
        return
    assert only(found).code == "T245" and "context_form = gathered" in only(found).nearest
    assert "40" in told(only(found)) and str(context) in told(only(found))
    assert errors(text.replace("context_form = heads", "context_form = gathered")) == ()


def test_S_GQA_05_heads_that_do_not_divide_the_width_need_a_head_dim() -> None:
    model = "model = gpt2.gpt2 with { hidden = 1024, attention.heads = 12 }"
    found = only(errors(spec_text("tensor = 2", devices=2, model=model)))
    assert found.code == "T232" and all(word in told(found) for word in ("1024", "12", "head_dim"))
    given = model.replace("heads = 12", "heads = 12, attention.head_dim = 128")
    spec = resolved(spec_text("tensor = 2", devices=2, model=given))
    assert check_pins(spec) == () and spec.model.attention is not None
    assert spec.model.attention.heads * spec.model.attention.head_dim == 1536


def test_S_VOC_01_the_vocabulary_is_padded_to_blocks_for_each_tensor_rank() -> None:
    assert padded_vocab(65535, 2) == 65536


def test_S_VOC_02_the_padded_vocabulary_divides_by_the_tensor_degree() -> None:
    assert padded_vocab(50257, 2) >= 50258 and padded_vocab(50257, 2) % 2 == 0


def test_S_LAY_01_layers_that_do_not_divide_are_never_lost() -> None:
    spec = resolved(spec_text("pipeline = 4", devices=4, layers=30))
    assert check_pins(spec) == ()
    assert legal(spec, Layout(pipeline=4, stages=(8, 8, 7, 7))) == ()
    assert codes(legal(spec, Layout(pipeline=4, stages=(7, 7, 7, 7)))) == ["T247"]


def test_S_LAY_02_virtual_stages_must_hold_all_layers() -> None:
    found = only(errors(spec_text("pipeline = 16, virtual_stages = 2", devices=16, layers=80)))
    assert found.code == "T211" and found.nearest == ("chunks",)
    text = spec_text(f"pipeline = 16, schedule = interleaved, stages = {[2] * 32}", devices=16, layers=80)
    lost = only(errors(text))
    assert lost.code == "T247" and "64" in lost.message and "80" in lost.message
    assert lost.nearest == (f"stages = {[3] * 16 + [2] * 16}",)
    lost = only(errors(spec_text(f"pipeline = 16, stages = {[4] * 16}", devices=16, layers=80)))
    assert lost.code == "T247" and "64" in lost.message and "80" in lost.message
    assert lost.nearest == (f"stages = {[5] * 16}",)


@pytest.mark.parametrize("stages", [(3, 4), (4, 3)])
def test_S_LAY_03_uneven_stages_are_legal(stages: tuple[int, ...]) -> None:
    spec = resolved(spec_text(f"stages = {list(stages)}", devices=2, layers=7))
    assert check_pins(spec) == () and is_legal(spec, Layout(pipeline=2, stages=stages))


def test_S_IMB_02_the_published_model_has_the_published_parameters() -> None:
    """BLOOM: positions without parameters, a norm behind the embedding that our models do not have, tied embedding."""
    model = """model {
        vocab = 250880, hidden = 14336, positions = none, max_positions = 2048, tied = true, norm = layer_norm
        attention = gqa { heads = 112, bias = true, out_bias = true }
        layers = 70 * dense { ffn = 4 * 14336, activation = gelu_tanh, bias = true }
    }"""
    published = resolved(spec_text(model=model)).model
    assert published.layer_parameter_count(published.blocks[0]) == 2466437120
    assert published.embedding_count() == 3596615680
    assert published.parameter_count() + 2 * 14336 == 176247271424
    stages = [5, *[6] * 10, 5]
    text = spec_text(f"tensor = 4, data = 8, stages = {stages}", nodes=48, model=model, batch="2048", sequence="2048")
    assert errors(text) == ()


def test_S_IMB_03_more_stages_than_layers_are_refused_and_ends_without_layers_must_be_listed() -> None:
    found = only(errors(spec_text("pipeline = 8", layers=4)))
    assert found.code == "T249" and "8" in found.message and "4" in found.message and "stages" in found.message
    unlisted = only(errors(spec_text("pipeline = 8", layers=6)))
    assert "stages = [0, 1, 1, 1, 1, 1, 1, 0]" in told(unlisted)
    assert errors(spec_text("stages = [0, 1, 1, 1, 1, 1, 1, 0]", layers=6)) == ()
    assert only(errors(spec_text("stages = [-1, 1, 1, 1, 1, 1, 1, 1]", layers=6))).code == "T241"


def test_S_IMB_04_no_stage_without_a_layer_unless_it_was_asked_for() -> None:
    spec = resolved(spec_text("tensor = 2, pipeline = 2, data = 2", layers=2))
    empty = Layout(tensor=2, pipeline=2, data=2, stages=(2, 0))
    found = only(legal(spec, empty))
    assert found.code == "T248" and "stage 1" in found.message and found.nearest == ("stages = [1, 1]",)


def test_S_TIE_02_a_tied_model_counts_its_matrix_once() -> None:
    shape = """model {
        vocab = 151936, hidden = 1024, max_positions = 40960, rope = { theta = 1000000 }, tied = TIED
        attention = gqa { heads = 16, kv_heads = 8, head_dim = 128 }
        layers = 28 * dense { ffn = 3072 }
    }"""
    query_key_norms = 28 * 2 * 128  # of the published model; ours has none
    tied = resolved(spec_text(model=shape.replace("TIED", "true"))).model.parameter_count()
    untied = resolved(spec_text(model=shape.replace("TIED", "false"))).model.parameter_count()
    assert tied + query_key_norms == 596049920 and untied + query_key_norms == 751632384


def test_S_BAT_01_a_micro_batch_alone_gives_the_batch_of_one_step() -> None:
    text = spec_text("micro_batch = 2, tensor = 1, pipeline = 1, context = 1", devices=4, sequence="2048", batch="")
    spec = resolved(text)
    assert pinned(spec)["data"] == 4
    assert spec.train.global_batch == 8 and spec.train.tokens_per_step == 16384


def test_S_BAT_02_the_world_size_is_that_of_the_cluster() -> None:
    text = spec_text("micro_batch = 2, tensor = 1, pipeline = 1, context = 1", devices=4, batch="8")
    spec = resolved(text)
    assert check_pins(spec) == () and pinned(spec)["data"] == 4 and spec.cluster.world_size == 4


def test_S_BAT_03_a_batch_that_does_not_divide_shows_the_equation_and_its_neighbours() -> None:
    found = only(errors(spec_text("data = 7, micro_batch = 2", devices=7, batch="256")))
    assert found.code == "T246" and found.nearest == ("global_batch = 252", "global_batch = 266")
    assert "256" in found.message and "14" in found.message


def test_S_BAT_04_a_batch_is_never_truncated() -> None:
    found = only(errors(spec_text("data = 16, micro_batch = 4", devices=16, batch="1000")))
    assert found.code == "T246" and found.nearest == ("global_batch = 960", "global_batch = 1024")
    assert "1000" in found.message and "16" in found.message


@pytest.mark.parametrize(("layout", "batch"), [("data = 2, tensor = 1", 32), ("data = 1, tensor = 2", 16)])
def test_S_BAT_05_a_batch_that_depends_on_the_layout_is_warned_about(layout: str, batch: int) -> None:
    text = spec_text(f"{layout}, micro_batch = 16", devices=2, batch="")
    spec = resolved(text)
    warning = only(spec.warnings)
    assert warning.code == "T230" and "global batch" in warning.message and str(batch) in warning.message
    assert spec.train.global_batch == batch


def test_S_PREC_01_float32_on_a_device_with_bf16_units_is_warned_about() -> None:
    text = spec_text(
        "tensor = 8, pipeline = 2, data = 1", nodes=2, model="model = llama.llama3_70b", sequence="4096", train=""
    ).replace("nvidia.dgx_h100", "nvidia.dgx_a100")
    spec = resolved(text)
    warning = only(spec.warnings)
    assert warning.code == "T227" and "float32" in warning.message and spec.train.precision == "fp32"
    assert spec.cluster.device.peak["fp32"] == 19.5e12 and spec.cluster.device.peak["bf16"] == 312e12
    assert only(problems(text.replace("sequence = 4096", "sequence = 4096, precision = fp16"))).code == "T224"


def test_S_PREC_02_precisions_without_float32_accumulation_are_refused() -> None:
    found = only(errors(spec_text(train="precision = fp16")))
    assert found.code == "T224" and "fp16" in found.message and "bf16" in found.nearest


def test_S_CFG_01_misspelt_and_misplaced_keys_are_refused_with_the_right_one() -> None:
    found = errors(spec_text("zero_stage = 1", train="precision = fp32, globl_batch = 3"))
    assert [(d.code, d.nearest[0]) for d in found] == [("T211", "global_batch"), ("T211", "zero")]
    assert "globl_batch" in found[0].message and "zero_stage" in found[1].message


def test_S_CFG_02_no_key_is_read_and_then_left_unused() -> None:
    """Whatever the spec says about recompute and offload is built, or refused by name."""
    assert only(errors(spec_text("offload = true"))).code == "T217"
    small = spec_text("offload = optimizer").replace("devices_per_node = 8", "devices_per_node = 8, host_memory = none")
    refused = only(errors(small))
    assert refused.code == "T259" and "no host_memory" in refused.message
    assert resolved(spec_text("recompute = full")).parallel.recompute.value == "full"
    tree = parse(spec_text("activation_checkpointing = full"), "test.titan")
    with pytest.raises(Exception, match="T211"):
        resolve(tree)
