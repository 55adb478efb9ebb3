"""Situations from public reports about sharing experts over ranks; each test bears the id of its case."""

from __future__ import annotations

import pytest
from titan.compiler.lower import lower
from titan.compiler.plan.program import Plan
from titan.compiler.spec.legality import check_pins, legal
from titan.compiler.spec.schema import Spec
from titan.compiler.strategy import Strategy

from tests.compiler.spec.writing import errors, only, problems, resolved, spec_text
from tests.compiler.test_cases_plan import told


def mixture(experts: int, layers: int = 2, ffn: int = 64) -> str:
    block = f"moe {{ experts = {experts}, top_k = 4, ffn = {ffn} }}"
    return f"model = qwen.qwen3_30b_a3b with {{ layers = {layers} * {block} }}"


def text_of(wishes: str, devices: int, model: str, batch: str = "8") -> str:
    text = spec_text(wishes, devices=devices, model=model, sequence="4096", batch=batch, train="precision = bf16")
    return text.replace("import models.tiny", "import models.qwen")


def shares(spec: Spec, strategy: Strategy) -> tuple[int, int]:
    """(experts on a rank, ranks that hold copies of them) of a legal plan, as its parameters and buckets say."""
    assert legal(spec, strategy) == ()
    plan: Plan = lower(spec, strategy)
    weight = next(p for p in plan.parameters if ".experts." in p.name)
    bucket = plan.bucket_table[weight.bucket]
    return weight.tensor.shape[0], plan.group_size(bucket.replicas) if bucket.replicas else 1


def test_S_MOE_01_experts_reuse_the_tensor_ranks() -> None:
    """128 experts over the four tensor ranks: 32 on each, no copies, no data ranks."""
    wishes = "tensor = 4, pipeline = 1, expert = 4, expert_tensor = 1"
    text = text_of(wishes, 4, mixture(128))
    spec = resolved(text)
    assert check_pins(spec) == ()
    layout = Strategy(tensor=4, expert=4, sequence_parallel=True, micro_batches=8, stages=(2,))
    assert shares(spec, layout) == (32, 1)
    found = only(errors(text.replace("expert_tensor = 1", "expert_tensor = 1, sequence_parallel = false")))
    assert found.code == "T257" and "sequence_parallel" in found.message


@pytest.mark.parametrize(("expert", "held", "copies"), [(16, 16, 2), (32, 8, 1)])
def test_S_MOE_02_experts_are_shared_beyond_the_data_ranks(expert: int, held: int, copies: int) -> None:
    wishes = f"tensor = 1, pipeline = 1, context = 16, data = 2, expert = {expert}"
    spec = resolved(text_of(wishes, 32, mixture(256)))
    assert check_pins(spec) == ()
    layout = Strategy(data=2, context=16, expert=expert, micro_batches=4, stages=(2,))
    assert shares(spec, layout) == (held, copies)


@pytest.mark.parametrize(("expert", "accepted"), [(3, False), (4, True), (8, True), (16, False)])
def test_S_MOE_03_the_rule_is_said_in_words(expert: int, accepted: bool) -> None:
    """Ranks that share experts divide tensor x context x data = 8 and the 16 experts."""
    found = errors(text_of(f"tensor = 2, context = 2, data = 2, pipeline = 1, expert = {expert}", 8, mixture(16)))
    assert (found == ()) is accepted
    if expert == 3:
        assert only(found).code == "T257" and "does not divide 16 experts" in only(found).message
    if expert == 16:
        assert only(found).code == "T257" and "expert = 8" in only(found).nearest
        assert "data 2 x context 2 x tensor 2 = 8" in told(only(found)) and "(ep)" in told(only(found))


def test_S_MOE_04_more_experts_than_ranks() -> None:
    text = text_of("expert = 8, data = 8", 8, mixture(64))
    spec = resolved(text)
    assert check_pins(spec) == ()
    assert shares(spec, Strategy(data=8, expert=8, stages=(2,))) == (8, 1)
    found = only(errors(text.replace("expert = 8", "expert = 6")))
    assert found.code == "T257" and "6" in found.message and "64" in found.message


def test_S_MOE_05_sequence_parallelism_is_asked_of_experts_only() -> None:
    dense = text_of("tensor = 2, sequence_parallel = false", 8, "model = llama.llama3_8b")
    assert problems(dense) == ()
    wishes = "tensor = 2, expert = 2, expert_tensor = 1, sequence_parallel = false"
    refused = only(errors(text_of(wishes, 8, mixture(16))))
    assert refused.code == "T257" and "sequence_parallel" in refused.message
    idle = only(problems(text_of("tensor = 1, expert = 2, sequence_parallel = true", 8, mixture(16))))
    assert idle.severity == "warning" and "sequence_parallel" in idle.message and "changes nothing" in idle.message
