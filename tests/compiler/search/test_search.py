"""The search against compiling everything; its refusals, reasons and answers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from titan.compiler.cost.mfu import model_flops
from titan.compiler.cost.predict import predict
from titan.compiler.cost.simulate import simulate
from titan.compiler.lower import lower
from titan.compiler.plan.text import print_plan
from titan.compiler.report.explain import explain_lines, explain_why_not
from titan.compiler.report.summary import plan_json, print_summary
from titan.compiler.search.candidates import price, with_stages
from titan.compiler.search.enumeration import enumerate_space
from titan.compiler.search.search import estimator_of, memory_limit, search
from titan.compiler.search.why_not import parse_question, why_not
from titan.compiler.spec.legality import legal
from titan.compiler.spec.resolve import load_spec
from titan.compiler.spec.wishes import Wish
from titan.compiler.strategy import Strategy
from titan.grammar.diagnostics import TitanError

from tests.compiler.search.specs import write

EXAMPLES = Path(__file__).parents[3] / "examples"


def test_nothing_compiled_is_faster(tmp_path: Path) -> None:
    """All layouts of a small space compiled and simulated: the choice is within 2% of the best."""
    spec = write(tmp_path, "micro_batch in [1, 2]", devices=4, batch=16)
    estimator, limit = estimator_of(spec), memory_limit(spec)
    fitting = price(spec, estimator, enumerate_space(spec), limit).fitting
    best = min(simulate(lower(spec, with_stages(c, estimator, limit))).step for c in fitting)
    assert search(spec).timeline.step <= 1.02 * best


def test_is_deterministic_and_legal(tmp_path: Path) -> None:
    spec = write(tmp_path, nodes=2, batch=64)
    first, second = search(spec), search(spec)
    assert print_plan(first.plan) == print_plan(second.plan)
    assert not legal(spec, first.strategy)
    assert sum(first.strategy.stages) == 12


@pytest.mark.parametrize(
    "wishes", ["tensor = 2; pipeline = 2", "data = 8", "recompute = full; zero = 0", "stages = [4, 8]"]
)
def test_pins_are_kept(tmp_path: Path, wishes: str) -> None:
    spec = write(tmp_path, wishes)
    strategy = search(spec).strategy
    reasons = {key: origin for key, origin, _ in strategy.reasons}
    for key, wish in spec.parallel.items():
        if wish.fixed:
            assert wish.allows(getattr(strategy, key))
            assert reasons[key] == "user"


def test_every_choice_has_a_reason(tmp_path: Path) -> None:
    result = search(write(tmp_path, "tensor <= 4"))
    reasons = {key: (origin, text) for key, origin, text in result.strategy.reasons}
    for key in ("pipeline", "data", "context", "tensor", "zero", "schedule", "recompute", "micro_batch", "stages"):
        assert reasons[key][1]
    assert result.plan.setting("strategy")["reasons"] == [list(r) for r in result.strategy.reasons]
    assert len(list(explain_lines(result.plan, result))) > len(reasons)


def test_memory_decides(tmp_path: Path) -> None:
    """13B parameters in bf16 with gradients take 78 GB: they do not fit one device whole, so something is sharded."""
    result = search(write(tmp_path, model="llama.llama2_13b", batch=32, sequence=4096))
    assert result.strategy.tensor * result.strategy.pipeline > 1 or result.strategy.zero > 1
    assert result.ledger.peak <= result.ledger.limit


def test_nothing_fits(tmp_path: Path) -> None:
    with pytest.raises(TitanError) as caught:
        search(write(tmp_path, model="llama.llama3_405b"))
    assert caught.value.exit_code == 3
    found = caught.value.diagnostics[0]
    assert found.code == "T301" and "GiB" in found.message
    assert any("closest: pipeline=" in note.text for note in found.notes)
    assert any("optimizer" in note.text and "GiB" in note.text for note in found.notes)


def test_nothing_legal(tmp_path: Path) -> None:
    """Seven devices and a batch of 64: no degree but 1 divides both."""
    with pytest.raises(TitanError) as caught:
        search(write(tmp_path, "pipeline = 1; context = 1", devices=7))
    assert caught.value.exit_code == 2
    assert caught.value.diagnostics[0].code == "T302"
    with pytest.raises(TitanError, match="T302"):
        search(write(tmp_path, "tensor = 4; pipeline = 4", devices=8))


def test_why_not(tmp_path: Path) -> None:
    spec = write(tmp_path, "tensor <= 2")
    chosen = search(spec)
    other = why_not(spec, "tensor=8")
    assert other.lifted == ("tensor <= 2",)
    assert other.result is not None and other.result.strategy.tensor == 8
    assert other.result.timeline.step >= chosen.timeline.step
    assert "slower" in " ".join(explain_why_not(spec, chosen, "tensor=8"))
    refused = why_not(spec, "tensor=3")
    assert refused.result is None and refused.error is not None
    assert "T203" in " ".join(explain_why_not(spec, chosen, "tensor=3"))
    for key in ("pipeline", "data"):
        value = getattr(chosen.strategy, key)
        assert "is what was chosen" in " ".join(explain_why_not(spec, chosen, f"{key}={value}"))


@pytest.mark.parametrize(
    "question", ["tensr=8", "tensor", "tensor=x", "tensor=0", "sequence_parallel=7", "", "stages=3"]
)
def test_a_question_that_is_none(question: str) -> None:
    with pytest.raises(TitanError, match="T304"):
        parse_question(question)


def test_json_has_the_keys_of_the_contract(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = write(tmp_path, train="total_tokens = 1G tokens")
    result = search(spec)
    found = json.loads(json.dumps(plan_json(spec, result, {}), allow_nan=False))
    for key in ("world_size", "micro_batch", "micro_batches", "schedule", "chunks", "zero", "recompute", "warnings"):
        assert key in found
    assert set(found["mesh"]) == {"region", "pipeline", "data", "context", "tensor", "expert"}
    figures = found["predicted"]
    for key in ("step_time_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu", "hfu", "lower_bound_step_time_s"):
        assert figures[key] > 0
    for key in ("bubble_fraction", "exposed_comm_fraction"):
        assert 0 <= figures[key] < 1
    assert figures["lower_bound_step_time_s"] <= figures["step_time_s"]
    assert figures["peak_memory_bytes"] <= figures["peak_memory_upper_bytes"]
    assert figures["mfu"] <= figures["hfu"]
    for role in found["memory"]:
        parts = {k: v for k, v in role.items() if k not in ("pipeline", "upper")}
        assert sum(parts.values()) <= figures["peak_memory_bytes"]
    assert {"candidates", "seconds"} <= set(found["search"])
    job = found["job"]
    assert job["steps"] == -(-1_000_000_000 // (64 * 2048))
    assert job["device_hours"] == pytest.approx(job["steps"] * figures["step_time_s"] * 8 / 3600)
    print_summary(spec, result)
    shown = capsys.readouterr().err
    assert "lower bound" in shown and "whole job" in shown and "runner-up" in shown


def test_predictions_are_plausible_at_scale() -> None:
    """Published: 405B on 16,384 H100 with 8-way tensor and 16-way pipeline reaches about 400 TFLOP/s per device with an
    interleaved schedule. 1F1B has more bubble there, so its share is taken out before comparing."""
    spec = load_spec(EXAMPLES / "llama3_405b_16384gpu.titan")
    strategy = Strategy(
        pipeline=16, data=128, tensor=8, sequence_parallel=True, zero=1, micro_batches=16, stages=(7, *(8,) * 14, 7)
    )
    found = predict(lower(spec, strategy))
    interleaved = found.used.tflops / (1 - found.timeline.bubble_fraction) * 16 / (16 + 15 / 8)
    assert 340 < interleaved < 560
    assert found.timeline.bubble_fraction == pytest.approx(15 / 31, abs=0.05)
    assert found.ledger.verdict == "does not fit"  # 16 micro-batches of eight layers without recompute


def test_a_70b_plan_is_plausible() -> None:
    """Published runs of the 70B class on H100 reach 36 to 52% of the peak, with a whole sequence or with a half one for
    each device. What is free to shard parameters too is no slower."""
    free = load_spec(EXAMPLES / "llama3_70b_1024gpu.titan")
    spec = replace(free, parallel=replace(free.parallel, zero=Wish("<=", (1,))))
    result = search(spec)
    freest = search(free)
    assert freest.timeline.seconds <= result.timeline.seconds
    for one in (freest, result):
        found = predict(one.plan, one.timeline, one.ledger)
        assert found.used.mfu is not None and 0.36 < found.used.mfu < 0.52
    tokens = spec.train.tokens_per_step / result.timeline.seconds / 1024
    assert found.used.tflops == pytest.approx(model_flops(spec.model.model_dump(), 8192).exact * tokens / 1e12)
