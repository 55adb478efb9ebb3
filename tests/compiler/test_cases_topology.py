"""Situations from public reports about links, shapes and the use of devices; each test bears the id of its case."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
from titan.compiler.cost.predict import Prediction, predict
from titan.compiler.lower import lower
from titan.compiler.plan.file import plan_hash
from titan.compiler.plan.queues import VARIABLE, queues, set_queues
from titan.compiler.report.diff import compare
from titan.compiler.report.summary import warnings
from titan.compiler.search.search import search
from titan.compiler.spec.schema import Spec
from titan.compiler.strategy import Strategy

from tests.compiler.spec.writing import errors, only, problems, resolved, spec_text
from tests.compiler.test_cases_plan import told

PCIE, NVLINK = "25 GB/s", "300 GB/s"
GPT = """model {
    vocab = VOCAB, hidden = HIDDEN, norm = layer_norm, max_positions = 2048, positions = learned, tied = true
    attention = gqa { heads = HEADS, bias = true, out_bias = true }
    layers = LAYERS * dense { ffn = 4 * HIDDEN, activation = gelu_tanh, bias = true }
}"""


def gpt(layers: int, hidden: int, heads: int, vocab: int = 50304) -> str:
    values = {"LAYERS": layers, "HIDDEN": hidden, "HEADS": heads, "VOCAB": vocab}
    text = GPT
    for word, number in values.items():
        text = text.replace(word, str(number))
    return text


def joined_by(link: str, parallel: str = "", batch: int = 32) -> Spec:
    """Llama-2-7B on one node of eight A100 whose links have this bandwidth."""
    model = "model = llama.llama2_7b"
    text = spec_text(parallel, model=model, sequence="2048", batch=str(batch), train="precision = bf16")
    return resolved(
        text.replace(
            "nvidia.dgx_h100 with {", f"nvidia.dgx_a100 with {{ intra = link {{ bandwidth = {link}, latency = 5 us }},"
        )
    )


def test_S_PERF_02_slow_links_inside_a_node_are_named() -> None:
    """ZeRO-1 over eight devices, four micro-batches: 93.5 TFLOP/s over PCIe, 188 over NVLink."""
    layout = Strategy(data=8, zero=1, micro_batches=4, stages=(32,))
    found = {}
    for link in (PCIE, NVLINK):
        spec = joined_by(link)
        found[link] = predict(lower(spec, layout))
        said = [text for text in warnings(spec, layout, found[link]) if text.startswith("T322")]
        assert bool(said) is (link == PCIE)
        assert not said or ("PCIe" in said[0] and "reduce_grad over data" in said[0])
    assert 1.4 < found[NVLINK].used.tflops / found[PCIE].used.tflops < 2.8


def test_S_PERF_02_fewer_tensor_ranks_where_links_are_slow() -> None:
    slow, fast = (search(joined_by(link, "data = 1, context = 1", 8)).strategy.tensor for link in (PCIE, NVLINK))
    assert slow < fast


def test_S_PERF_03_a_plan_says_how_many_hardware_queues_it_wants() -> None:
    """Sharded parameters are gathered beside compute, which one queue would hold back; for tensor ranks alone one is
    right. What the user has set is left alone, and named where it does not suit."""
    gathered = Strategy(data=4, tensor=2, sequence_parallel=True, zero=3, micro_batches=2, stages=(8,))
    spec = resolved(spec_text("data = 4, tensor = 2", heads=16, batch="8", train="precision = bf16"))
    found = predict(lower(spec, gathered))
    assert queues(found.plan).number == 8
    told = [w for w in warnings(spec, gathered, found, {VARIABLE: "1"}) if w.startswith("T323")]
    assert len(told) == 1 and "CUDA_DEVICE_MAX_CONNECTIONS = 1" in told[0] and "unshard over data" in told[0]
    for environment in ({}, {VARIABLE: "8"}, {VARIABLE: "32"}):
        assert not [w for w in warnings(spec, gathered, found, environment) if w.startswith("T323")]
    near = lower(spec, Strategy(tensor=8, sequence_parallel=True, micro_batches=8, stages=(8,)))
    assert queues(near).number == 1 and queues(near).against("1") == ""


def test_S_PERF_03_a_run_sets_the_queues_unless_the_user_has() -> None:
    spec = resolved(spec_text("data = 4, tensor = 2", heads=16, batch="8", train="precision = bf16"))
    plan = lower(spec, Strategy(tensor=8, sequence_parallel=True, micro_batches=8, stages=(8,)))
    fresh, theirs = dict[str, str](), {VARIABLE: "16"}
    assert set_queues(plan, fresh) == "" and fresh == {VARIABLE: "1"}
    assert "16 is set and left alone" in set_queues(plan, theirs) and theirs == {VARIABLE: "16"}


def test_S_PERF_04_a_plan_uses_every_device() -> None:
    spec = resolved(spec_text(layers=6, devices=8))
    found = search(spec)
    s = found.strategy
    assert prod((s.pipeline, s.data, s.context, s.tensor)) == 8 == found.plan.mesh.world_size
    assert sum(s.stages) == 6
    for runner in found.runners_up:
        assert runner.strategy.world_size == 8


@pytest.mark.parametrize(("heads", "width"), [(64, 216), (96, 144), (128, 108)])
def test_S_PERF_05_head_widths_that_waste_the_device_are_warned_about(heads: int, width: int) -> None:
    text = spec_text(
        "tensor = 8, pipeline = 6, data = 8",
        model=gpt(78, 13824, heads),
        nodes=48,
        batch="2048",
        sequence="2048",
        train="precision = bf16",
    ).replace("dgx_h100", "dgx_a100")
    found = [d for d in problems(text) if d.code == "T321"]
    assert bool(found) is (width % 8 > 0)
    for warning in found:
        assert warning.severity == "warning" and f"head_dim = {width}" in warning.message
        assert "head_dim = 128" in warning.nearest


def test_S_PERF_05_a_rank_s_share_of_the_width_is_looked_at_too() -> None:
    text = spec_text("tensor = 4", heads=16, ffn=200, train="precision = bf16")
    found = only(tuple(d for d in problems(text) if d.code == "T321"))
    assert "ffn / tensor 4 = 50" in found.message


def test_S_PERF_06_a_plan_is_of_one_shape_and_says_which() -> None:
    """A plan carries its model, training and cluster in its text, under its hash; another shape is another plan."""
    spec = resolved(spec_text(sequence="32768", batch="16"))
    other = resolved(spec_text(sequence="1024", batch="32"))
    layout = Strategy(data=8, micro_batches=2, stages=(8,))
    saved, wanted = lower(spec, layout), lower(other, replace(layout, micro_batches=4))
    assert saved.setting("train.sequence") == 32768 and saved.setting("train.global_batch") == 16
    assert plan_hash(saved) != plan_hash(wanted)
    said = " ".join(map(str, compare(saved, wanted)))
    assert "32768" in said.replace(",", "") and "1024" in said.replace(",", "")
    figures = [predict(plan).figures for plan in (saved, wanted)]  # from each plan's own settings
    assert figures[0]["step_time_s"] != figures[1]["step_time_s"]


def one_node(layout: Strategy, micro_batches: int) -> Prediction:
    """10B parameters on eight A100 of one node, sequences of 512."""
    batch = str(layout.micro_batch * micro_batches)
    text = spec_text(model=gpt(48, 4096, 32), sequence="512", batch=batch, train="precision = bf16")
    return predict(lower(resolved(text.replace("dgx_h100", "dgx_a100")), replace(layout, micro_batches=micro_batches)))


def test_S_PERF_07_pipelines_may_beat_tensor_ranks_inside_a_node() -> None:
    """With 64 micro-batches by more than 10%, with eight the bubble of 7/15 turns the order."""
    tensor = Strategy(tensor=8, sequence_parallel=True, micro_batch=4, stages=(48,))
    pipeline = Strategy(pipeline=8, micro_batch=4, stages=(6,) * 8)
    many, few = ((one_node(tensor, n).timeline.seconds, one_node(pipeline, n).timeline.seconds) for n in (64, 8))
    assert many[0] / many[1] > 1.1
    assert few[0] / few[1] < 1.05


def test_S_PERF_08_tensor_ranks_beyond_a_node_are_warned_about() -> None:
    wishes = "tensor = 16, pipeline = 1, data = 4, context = 1"
    model = "model = llama.llama3_70b"
    text = spec_text(wishes, nodes=8, model=model, sequence="4096", batch="64", train="precision = bf16")
    found = only(problems(text))
    assert found.code == "T320" and found.severity == "warning" and found.nearest == ("tensor = 8",)
    assert all(word in told(found) for word in ("tensor = 16", "(tp)", "nodes of 8"))
    assert errors(text) == ()


def test_S_PERF_08_left_alone_tensor_ranks_stay_inside_a_node() -> None:
    text = spec_text(nodes=8, model="model = llama.llama3_70b", sequence="4096", batch="64", train="precision = bf16")
    spec = resolved(text)
    found = search(spec)
    assert found.strategy.tensor <= 8
    groups = found.plan.mesh
    assert groups.size("tensor") <= 8  # innermost: tensor ranks are numbered one after another, on one node
    assert not [
        w for w in warnings(spec, found.strategy, predict(found.plan, found.timeline, found.ledger)) if "T320" in w
    ]


def test_S_PERF_08_a_plan_across_nodes_says_so() -> None:
    spec = resolved(spec_text(nodes=2, devices=4, heads=16, batch="8", train="precision = bf16"))
    layout = Strategy(tensor=8, sequence_parallel=True, micro_batches=8, stages=(8,))
    said = [text for text in warnings(spec, layout, predict(lower(spec, layout))) if text.startswith("T320")]
    assert said and "tensor = 8" in said[0] and "nodes of 4" in said[0]
