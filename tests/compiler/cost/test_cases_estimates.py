"""Memory that public reports told of, against ledgers of plans; each test bears the id of its case."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from titan.compiler.cost.memory import MemoryLedger, memory_ledger
from titan.compiler.cost.predict import predict
from titan.compiler.lower import lower
from titan.compiler.plan.segment import Segment
from titan.compiler.plan.sizes import liveness
from titan.compiler.plan.workspace import segment_inside
from titan.compiler.report.summary import warnings
from titan.compiler.schedules.registry import SCHEDULES
from titan.compiler.search.search import search
from titan.compiler.spec.schema import Spec
from titan.compiler.strategy import Strategy
from titan.grammar.diagnostics import TitanError

from tests.compiler.spec.writing import resolved, spec_text
from tests.compiler.test_cases_plan import told

GPT = """model {
    vocab = 250000, hidden = 14400, norm = layer_norm, max_positions = 2048, positions = learned, tied = true
    attention = gqa { heads = 96, bias = true, out_bias = true }
    layers = 80 * dense { ffn = 57600, activation = gelu_tanh, bias = true }
}"""


def spec_of(model: str, parallel: str = "", cluster: str = "", precision: str = "bf16", **values: object) -> Spec:
    text = spec_text(parallel, model=f"model = {model}", train=f"precision = {precision}", **values)  # type: ignore[arg-type]
    text = text.replace("import models.tiny", "import models.tiny\nimport models.qwen")
    return resolved(text.replace("nvidia.dgx_h100", f"nvidia.{cluster or 'dgx_h100'}"))


def ledger(spec: Spec, strategy: Strategy) -> MemoryLedger:
    return memory_ledger(lower(spec, strategy))


def states(parts: Mapping[str, int]) -> float:
    """GB of parameters, gradients and optimizer state."""
    return (parts["parameters"] + parts["gradients"] + parts["optimizer"]) / 1e9


def refusal(spec: Spec) -> str:
    """Everything that the refusal of a spec says."""
    with pytest.raises(TitanError, match="T301") as caught:
        search(spec)
    assert caught.value.exit_code == 3
    return told(caught.value.diagnostics[0])


def test_S_MEM_01_a_short_sequence_does_not_make_states_fit() -> None:
    """Llama-2-7B on 8 x 40 GB: 18 bytes per parameter, of which sharding divides 12."""
    wishes = "tensor = 1, pipeline = 1, data = 8, zero = 0"
    spec = spec_of("llama.llama2_7b", wishes, "dgx_a100_40gb", sequence="64", batch="8")
    assert spec.model.parameter_count() == 6_738_415_616
    layouts = {
        121.3: Strategy(data=8, stages=(32,)),
        50.5: Strategy(data=8, zero=1, stages=(32,)),
        30.3: Strategy(data=4, tensor=2, sequence_parallel=True, zero=1, micro_batches=2, stages=(32,)),
    }
    for gigabytes, layout in layouts.items():
        assert states(ledger(spec, layout).worst.components) == pytest.approx(gigabytes, rel=0.01)
    text = refusal(spec)
    assert "optimizer" in text and "40 GiB" in text
    assert "a shorter sequence does not help" in text and "this would fit: zero = 3" in text


def test_no_number_of_devices_helps_where_the_driver_fills_the_limit() -> None:
    spec = spec_of("tiny.llama", "tensor = 1, pipeline = 1", devices=1, batch="1", sequence="64")
    share = 0.5 * spec.cluster.memory_reserved / spec.cluster.device.memory
    text = refusal(replace(spec, objective=spec.objective.model_copy(update={"memory_fraction": share})))
    assert "libraries take 900 MiB of each device" in text and "they would fit on about" not in text


def test_S_MEM_02_what_is_called_needed_holds_more_than_states() -> None:
    """ZeRO-3 on four devices: the formula of 18 bytes per parameter is what states take, and less than the peak."""
    spec = spec_of("llama.llama2_7b", devices=4, batch="4", sequence="2048")
    layout = Strategy(data=4, zero=3, gather="each", reduce="each", stages=(32,))
    found = ledger(spec, layout).worst
    number, embedding = spec.model.parameter_count(), 32000 * 4096
    assert states(found.components) == pytest.approx(18 * number / 4 / 1e9, rel=0.01)
    parts = ("activations", "workspace", "communicators", "allocator", "reserved")
    assert all(found.components[part] > 0 for part in parts)
    gathered = 2 * embedding  # the largest bucket, whole, in bf16
    assert found.components["activations"] > gathered + 2 * 2048 * 4096 * 32
    formula = 18 * 6.805e9 / 4 / 2**30 + 4 * 131e6 / 2**30
    assert formula == pytest.approx(29.01, abs=0.01) and found.point / 2**30 > formula


def test_S_MEM_03_weights_alone_are_no_estimate() -> None:
    wishes = "zero = 2, data = 2, tensor = 1, pipeline = 1"
    spec = spec_of("llama.llama2_7b with { layers = 31 * dense { ffn = 11008 } }", wishes, devices=2, batch="2")
    spec = with_memory(spec, 16 * 10**9)
    weights = 2 * spec.model.parameter_count() / 2**30
    assert weights == pytest.approx(12.39, rel=0.02)
    text = refusal(spec)
    assert "16 GB" in text
    assert "gradients" in text and "activations" in text


def with_memory(spec: Spec, size: int) -> Spec:
    device = spec.cluster.device.model_copy(update={"memory": size})
    return replace(spec, cluster=spec.cluster.model_copy(update={"device": device}))


def test_S_MEM_06_twice_the_data_ranks_halve_the_optimizer_state() -> None:
    """200B on 8 x 10 ranks: 73 GB on the worst device alone, 51 GB with two data ranks."""
    peaks = []
    for data in (1, 2):
        spec = spec_of("gpt2.gpt2", cluster="dgx_a100", nodes=10 * data, batch="64", sequence="2048")
        spec = with_model(spec)
        layout = Strategy(
            pipeline=10, tensor=8, data=data, zero=1, micro_batches=64 // data, recompute="full", stages=(8,) * 10
        )
        peaks.append(ledger(spec, layout).peak / 1e9)
    assert peaks[0] == pytest.approx(73, rel=0.2) and peaks[1] == pytest.approx(51, rel=0.2)
    assert 15 < peaks[0] - peaks[1] < 25


def with_model(spec: Spec) -> Spec:
    return replace(spec, model=resolved(spec_text(model=GPT, sequence="2048")).model)


def test_S_MEM_07_experts_on_one_rank_each_do_not_share_their_optimizer_state() -> None:
    wishes = "expert = 8, data = 8, zero = 1, tensor = 1, offload = none"
    spec = spec_of("qwen.qwen3_30b_a3b", wishes, sequence="4096", batch="8")
    assert spec.model.parameter_count() == 30_532_122_624
    experts = 48 * 128 * 3 * 2048 * 768
    assert experts == 28_991_029_248
    layout = Strategy(data=8, expert=8, zero=1, stages=(48,), recompute="full")
    assert states(ledger(spec, layout).worst.components) == pytest.approx(76.8, rel=0.01)
    text = refusal(spec)
    assert "optimizer state of the experts is not sharded" in text and "16 devices" in text
    larger = spec_of("qwen.qwen3_30b_a3b", nodes=2, sequence="4096", batch="16")
    wide = Strategy(data=16, expert=16, zero=1, stages=(48,), recompute="full")
    assert states(ledger(larger, wide).worst.components) == pytest.approx(43.0, rel=0.01)


def head_of(precision: str, tensor: int, rows: int, pipeline: int = 1) -> list[Segment]:
    """Segments of the output head, 8,192 tokens and 151,936 words; of all that the plan has."""
    model = "qwen.qwen3_30b_a3b with { layers = 2 * dense { ffn = 512 } }"
    spec = spec_of(model, precision=precision, devices=tensor * pipeline, batch="2", sequence="4096")
    layout = Strategy(
        tensor=tensor, sequence_parallel=tensor > 1, pipeline=pipeline, micro_batch=2, loss_rows=rows,
        stages=(2,) if pipeline == 1 else (1, 1),
    )  # fmt: skip
    plan = lower(spec, layout)
    last = plan.roles[-1]
    names = {i.unit.partition(" ")[0] for block in last.blocks for i in block.instructions if i.unit}
    assert all("head" not in i.unit for r in plan.roles[:-1] for b in r.blocks for i in b.instructions if i.unit)
    assert names
    return [s for s in plan.segments if s.name.startswith("head")]


def test_S_MEM_08_logits_and_their_pieces() -> None:
    def size(precision: str, tensor: int = 1) -> float:
        logits = (s.types["logits"].bytes for s in head_of(precision, tensor, 0) if "logits" in s.types)
        return max(logits) / 2**30

    assert size("fp32") == pytest.approx(4.637, rel=0.01)
    assert size("bf16") == pytest.approx(2.318, rel=0.01)
    assert size("fp32", 2) == pytest.approx(4.637 / 2, rel=0.01)  # vocabulary-parallel

    def workspace(rows: int) -> float:
        pieces = head_of("fp32", 1, rows)
        assert not any("logits" in s.types for s in pieces)
        return max(segment_inside(s, "forward").peak for s in pieces) / 2**30

    assert workspace(1024) - workspace(512) == pytest.approx(0.580, rel=0.01)  # 512 rows of logits and their gradient
    head_of("bf16", 1, 0, pipeline=2)  # the first stage has none of it


@pytest.mark.parametrize(("chunks", "factor"), [(5, 1.15), (10, 1.075)])
def test_S_MEM_10_more_virtual_stages_keep_less_in_flight(chunks: int, factor: float) -> None:
    """1 + (pp - 1) / (pp * v) times the pp micro-batches of a stage that all chunks together keep."""
    frames = SCHEDULES["interleaved"].frames(4, 64, 0, chunks)
    assert frames / 4 == pytest.approx(factor)


def test_S_MEM_11_a_stage_keeps_what_is_in_flight() -> None:
    """1F1B of four ranks keeps 4, 3, 2, 1 micro-batches; the peak covers the optimizer's update too."""
    spec = spec_of("tiny.llama with { layers = 4 * dense { ffn = 512 } }", devices=4, batch="8", sequence="64")
    plan = lower(spec, Strategy(pipeline=4, micro_batches=8, stages=(1, 1, 1, 1)))
    kept = []
    for role in plan.roles:
        live = most = 0
        for call in role.order("train"):
            for phase in call.block.split("+"):
                live += {"F": 1, "B": -1}.get(phase.partition(".")[0], 0)
            most = max(most, live)
        kept.append(most)
        walked = liveness(plan, role)
        stepping = {i.opcode for c in role.order("train") for i in role.block_table[c.block].instructions}
        assert "optimizer_step" in stepping and len(walked.curve) == len(role.order("train"))
    assert kept == [4, 3, 2, 1]
    assert [SCHEDULES["one_f_one_b"].frames(4, 8, rank, 1) for rank in range(4)] == [4, 3, 2, 1]


def test_S_MEM_12_activations_of_experts_follow_top_k_and_width() -> None:
    """A token goes through top_k experts: 8 of 768 are as wide as a dense layer of 6,144."""

    def activations(top_k: int, ffn: int) -> int:
        layers = f"2 * moe {{ experts = 128, top_k = {top_k}, ffn = {ffn} }}"
        spec = spec_of(f"qwen.qwen3_30b_a3b with {{ layers = {layers} }}", devices=1, batch="1", sequence="4096")
        return ledger(spec, Strategy(stages=(2,))).worst.components["activations"]

    def widths(top_k: int, ffn: int) -> float:
        """Bytes per token and layer of inner width: gate, up and their product, in bf16."""
        return 2 * 4096 * 2 * top_k * ffn

    wide, narrow, thin = activations(8, 768), activations(4, 768), activations(8, 384)
    assert 8 * 768 == 6144
    assert wide - thin >= 2 * (widths(8, 768) - widths(8, 384))
    assert wide - narrow > wide - thin > 0  # fewer experts also exchange fewer tokens


def test_S_MEM_13_the_reserve_is_part_of_the_budget() -> None:
    spec = spec_of("llama.llama2_7b", devices=8, batch="8", sequence="4096")
    strategy = Strategy(data=8, zero=3, gather="each", reduce="each", stages=(32,))
    plan = lower(spec, strategy)
    worst = memory_ledger(plan).worst
    assert min(worst.components[part] for part in ("communicators", "allocator", "reserved")) > 0
    for share, warned in ((0.93, True), (0.90, False)):  # of the device, by the point prediction
        tight = with_memory(spec, round(worst.point / share))
        found = predict(plan, ledger=memory_ledger(plan, limit=tight.cluster.device.memory))
        listed = [text for text in warnings(tight, strategy, found) if text.startswith("T303")]
        assert bool(listed) is warned
        assert not listed or ("reserve" in listed[0] and "margin of 7.0%" in listed[0])


def test_S_MEM_04_sharded_states_over_8_and_128_devices() -> None:
    """Llama-3.1-8B, selective recompute, two sequences of 8,192 per device: 82.4 and 67.0 GiB were measured."""
    peaks = []
    for nodes in (1, 16):
        spec = spec_of("llama.llama3_8b", cluster="grand_teton", nodes=nodes, batch=str(16 * nodes), sequence="8192")
        assert spec.model.parameter_count() == 8_030_261_248
        layout = Strategy(data=8 * nodes, zero=3, micro_batch=2, recompute="selective", stages=(32,))
        peaks.append(ledger(spec, layout).peak / 2**30)
    assert peaks[0] == pytest.approx(82.4, rel=0.15) and peaks[1] == pytest.approx(67.0, rel=0.15)
    assert peaks[0] - peaks[1] == pytest.approx(15.4, rel=0.15)


def test_S_MEM_05_memory_is_flat_where_context_grows_with_the_sequence() -> None:
    """Llama-3.1-8B on 8 devices, 32,768 tokens on each: 83.9 to 84.5 GiB, of which one float32 copy of the logits that
    we do not form; speed fell from row to row."""
    peaks, speeds = [], []
    for context in (1, 2, 4, 8):
        model = "llama.llama3_8b with { max_positions = 256Ki }"
        spec = spec_of(model, cluster="grand_teton", batch=str(8 // context), sequence=str(32768 * context))
        layout = Strategy(data=8 // context, context=context, zero=3, recompute="full", stages=(32,))
        found = predict(lower(spec, layout))
        states_only = found.ledger.worst.components
        assert states(states_only) == pytest.approx(18 * 8.03 / 8, rel=0.01)  # sharded over data x context
        peaks.append((found.ledger.peak + 4 * 32768 * 128256) / 2**30)
        speeds.append(found.used.tokens_per_second)
    assert max(peaks) / min(peaks) < 1.03
    for peak, measured in zip(peaks, (83.9, 84.2, 84.0, 84.5)):
        assert peak == pytest.approx(measured, rel=0.15)
    assert speeds == sorted(speeds, reverse=True)
