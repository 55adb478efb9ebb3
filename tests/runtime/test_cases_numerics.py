"""Reported situations in which other trainers computed something else than one process would; a case each.

Ids are those of a collection of public reports. Models are small versions of the reported ones; the layouts are theirs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from titan.compiler.lower import lower
from titan.compiler.plan.program import Plan
from titan.compiler.spec.resolve import resolve
from titan.compiler.spec.schema import Spec
from titan.compiler.spec.vocabulary import padded_vocab
from titan.compiler.strategy import Strategy
from titan.grammar.diagnostics import TitanError
from titan.grammar.parser import parse
from titan.runtime.assemble import same_bits
from titan.runtime.data import IGNORED, SyntheticSource
from titan.runtime.loopback import LoopbackResult, collect_parameters, run_loopback
from titan.runtime.state import allocate
from torch import Tensor

from tests.equivalence.comparison import Repeated, Training, differences, source_of, train_plan, train_reference
from tests.equivalence.configurations import Configuration, single_strategy, spec_of, strategy_of, with_train
from tests.equivalence.processes import train_processes

torch.set_num_threads(1)
CPU = torch.device("cpu")


def model_spec(model: str, train: str, precision: str = "fp64") -> Spec:
    """A spec of a model and training settings written out."""
    text = f"""import models.tiny
import clusters.local
model = {model}
cluster = local.cpu
train {{ precision = {precision}, steps = 100, optimizer = adamw {{ learning_rate = 1e-3 }}, {train} }}
"""
    return resolve(parse(text, "case.titan"), Path())


def layers(spec: Spec) -> int:
    return spec.model.layer_count


def agree(spec: Spec, *strategies: Strategy, steps: int = 2) -> list[Training]:
    """Trains every layout and asserts that each equals plain autograd to 1e-9."""
    single = lower(spec, single_strategy(spec))
    one = train_plan(single, spec, 1)
    oracle = train_reference(single, spec, one.initial, steps)
    found = [train_plan(lower(spec, strategy), spec, steps) for strategy in strategies]
    for training in found:
        assert differences(training, oracle) == []
    return found


def copies(result: LoopbackResult, plan: Plan, name: str) -> list[Tensor]:
    """The local piece of a parameter on every rank that has one."""
    return [state.parameters[name] for state in result.states if name in state.parameters]


# --- vocabulary padding


def test_S_VOC_01_padding_rows_stay_inside() -> None:
    assert padded_vocab(65535, 2) == 65536
    spec = model_spec("tiny.llama with { vocab = 65535, hidden = 16, layers = 1 * dense { ffn = 16 } }", _BATCH)
    plan = lower(spec, Strategy(tensor=2, micro_batch=2, stages=(1,)))
    states = tuple(allocate(plan, rank, CPU) for rank in range(2))
    assert states[1].parameters["embed.weight"].shape[0] == 65536 // 2
    assert collect_parameters(states, plan)["embed.weight"].shape == (65535, 16)


def test_S_VOC_02_a_vocabulary_that_does_not_divide_trains_the_same() -> None:
    """257, like 50,257, does not divide. The trace is in float32; the first step must match at any learning rate."""
    spec = model_spec("tiny.llama with { vocab = 257, hidden = 16, layers = 2 * dense { ffn = 16 } }", _BATCH, "fp32")
    tp2 = Strategy(tensor=2, micro_batch=2, stages=(2,))
    found = [train_plan(lower(spec, s), spec, 100, Repeated(source_of(spec), 8)) for s in (single_strategy(spec), tp2)]
    assert abs(found[0].losses[0] - found[1].losses[0]) < 1e-5
    assert found[1].losses == pytest.approx(found[0].losses, rel=1e-3)
    assert found[0].losses[-1] < found[0].losses[0] - 0.1
    assert all(torch.equal(found[0].initial[name], found[1].initial[name]) for name in found[0].initial)
    for name, gradient in found[0].gradients[0].items():
        torch.testing.assert_close(found[1].gradients[0][name], gradient, rtol=1e-4, atol=1e-6)


def test_S_VOC_02_padding_has_no_gradient_and_no_probability() -> None:
    spec = spec_of(Configuration(tensor=2, odd=True, tied=True))
    plan = lower(spec, Strategy(tensor=2, micro_batch=spec.train.global_batch, stages=(2,)))
    states = tuple(allocate(plan, rank, CPU) for rank in range(2))
    result = run_loopback(plan, 2, source_of(spec), states=states)
    assert spec.model.vocab == 37
    assert torch.count_nonzero(result.states[1].parameters["embed.weight"][18:]) == 0  # row 37 of 38
    agree(spec, Strategy(tensor=2, micro_batch=spec.train.global_batch, stages=(2,)))


_BATCH = "sequence = 16, global_batch = 2, data = synthetic(100)"

# --- layers over stages


def test_S_LAY_04_a_remainder_of_layers_is_trained_too() -> None:
    model = "tiny.llama with { vocab = 32, hidden = 8, layers = 27 * dense { ffn = 8 } }"
    spec = model_spec(model, "sequence = 8, global_batch = 2, data = synthetic(32)")
    for stages in ((13, 14), (14, 13)):
        strategy = Strategy(pipeline=2, micro_batch=1, micro_batches=2, stages=stages)
        plan = lower(spec, strategy)
        assert sum(len(chunk) for role in plan.roles for chunk in role.layers) == 27
        unique = {p.name: math.prod(p.shape) for p in plan.parameters}
        assert sum(unique.values()) == spec.model.parameter_count()
        agree(spec, strategy, steps=1)


# --- tied embeddings


def test_S_TIE_01_copies_on_two_stages_never_drift() -> None:
    spec = with_train(spec_of(Configuration(pipeline=2, tied=True), "fp32"), steps=50)
    plan = lower(spec, strategy_of(Configuration(pipeline=2, tied=True)))
    result = run_loopback(plan, 50, source_of(spec))
    first, last = copies(result, plan, "embed.weight")
    assert same_bits(first, last)
    assert not torch.equal(first, copies(run_loopback(plan, 1, source_of(spec)), plan, "embed.weight")[0])


@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b"])
def test_S_TIE_01_the_two_gradients_are_summed_once_before_clipping(schedule: str) -> None:
    spec = spec_of(Configuration(pipeline=2, tied=True))
    batch = spec.train.global_batch
    strategies = [
        Strategy(pipeline=2, schedule=schedule, micro_batch=m, micro_batches=batch // m, stages=(1, 1)) for m in (1, 2)
    ]
    agree(spec, *strategies)


def test_S_TIE_02_one_stage_has_one_tensor_under_both_uses() -> None:
    """The head reads the embedding: no second matrix exists, and both uses' gradients arrive in it."""
    spec = spec_of(Configuration(tied=True))
    plan = lower(spec, single_strategy(spec))
    names = [p.name for p in plan.parameters]
    assert names.count("embed.weight") == 1 and "head.weight" not in names
    assert sum(math.prod(p.shape) for p in plan.parameters) == spec.model.parameter_count()
    untied = spec.model.model_copy(update={"tied": False})
    assert untied.parameter_count() - spec.model.parameter_count() == spec.model.vocab * spec.model.hidden
    agree(spec, single_strategy(spec))


# --- KV heads


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_S_GQA_03_replicated_kv_heads_stay_equal_and_train_like_one_process(sequence_parallel: bool) -> None:
    spec = spec_of(Configuration(tensor=2, family="kv_one"))
    strategy = Strategy(tensor=2, sequence_parallel=sequence_parallel, micro_batch=spec.train.global_batch, stages=(2,))
    agree(spec, strategy)
    narrow = with_train(spec_of(Configuration(tensor=2, family="kv_one"), "fp32"), steps=100)
    plan = lower(narrow, strategy)
    result = run_loopback(plan, 100, Repeated(source_of(narrow), 8))
    for layer in range(2):
        for projection in "kv":
            left, right = copies(result, plan, f"layers.{layer}.attn.{projection}.weight")
            assert left.shape == (4, 16) and same_bits(left, right)
    assert result.losses[-1] < result.losses[0] - 0.5


# --- loss and gradient scale


def test_S_LOSS_01_accumulation_is_a_sum() -> None:
    """Twelve micro-batches on one stage, and on two stages; the first four weigh the same when eight follow."""
    spec = with_train(spec_of(Configuration(pipeline=2)), global_batch=12)
    one = Strategy(micro_batch=1, micro_batches=12, stages=(2,))
    two = Strategy(pipeline=2, micro_batch=1, micro_batches=12, stages=(1, 1))
    agree(spec, one, two, replace(two, schedule="gpipe"))
    first = with_train(spec, global_batch=4)
    alone = train_plan(lower(first, replace(two, micro_batches=4)), first, 1)
    source = _First(source_of(spec), 4)
    followed = train_plan(lower(spec, two), spec, 1, source)
    for name, gradient in alone.gradients[0].items():
        torch.testing.assert_close(followed.gradients[0][name], gradient, rtol=1e-9, atol=1e-12)


@dataclass(frozen=True)
class _First(Repeated):
    """Only the first samples of a source have labels."""

    def load(self, indices: Sequence[int], start: int, stop: int) -> tuple[Tensor, Tensor]:
        tokens, labels = self.inner.load(indices, start, stop)
        counted = torch.tensor([[i < self.period] for i in indices])
        return tokens, torch.where(counted, labels, IGNORED)


def test_S_LOSS_02_the_norm_does_not_know_how_the_batch_was_cut() -> None:
    spec = with_train(spec_of(Configuration(pipeline=2)), global_batch=32)
    cuts = [Strategy(pipeline=2, micro_batch=m, micro_batches=32 // m, stages=(1, 1)) for m in (8, 2)]
    few, many = agree(spec, *cuts, steps=1)
    assert many.norms[0] / few.norms[0] == pytest.approx(1.0, rel=1e-9)


@dataclass(frozen=True)
class _Counted(Repeated):
    """Sample i has as many labels as `counts` says, at its beginning."""

    counts: tuple[int, ...] = ()

    def load(self, indices: Sequence[int], start: int, stop: int) -> tuple[Tensor, Tensor]:
        tokens, labels = self.inner.load(indices, start, stop)
        valid = torch.tensor([self.counts[i % len(self.counts)] for i in indices]).unsqueeze(1)
        return tokens, torch.where(torch.arange(start, stop) < valid, labels, IGNORED)


def test_S_LOSS_03_every_label_weighs_the_same_wherever_it_falls() -> None:
    spec = model_spec(
        "tiny.llama with { hidden = 16, layers = 1 * dense { ffn = 16 } }",
        "sequence = 96, global_batch = 4, data = synthetic(256)",
    )
    source = _Counted(source_of(spec, ignored=0.0), 4, (10, 90, 50, 30))
    plan = lower(spec, Strategy(data=2, micro_batch=1, micro_batches=2, stages=(1,)))
    found = train_plan(plan, spec, 1, source)
    single = lower(spec, single_strategy(spec))
    oracle = train_reference(single, spec, found.initial, 1, source)
    assert differences(found, oracle) == []
    shares = []
    for sample in range(4):
        one = with_train(spec, global_batch=1)
        alone = _Counted(_Shifted(source.inner, sample), 4, (source.counts[sample],))
        shares.append(train_reference(lower(one, single_strategy(one)), one, found.initial, 1, alone).losses[0])
    weighted = sum(loss * count for loss, count in zip(shares, source.counts, strict=True)) / 180
    assert found.losses[0] == pytest.approx(weighted, rel=1e-9)
    assert abs(sum(shares) / 4 - weighted) > 1e-5  # the mean of means is something else


@dataclass(frozen=True)
class _Shifted(Repeated):
    """The source from sample `period` on."""

    def load(self, indices: Sequence[int], start: int, stop: int) -> tuple[Tensor, Tensor]:
        return self.inner.load([i + self.period for i in indices], start, stop)


def test_S_LOSS_04_data_and_context_ranks_share_one_loss_on_real_processes(tmp_path: Path) -> None:
    spec = with_train(spec_of(Configuration(context=4)), global_batch=8)
    found = [train_plan(lower(spec, single_strategy(spec)), spec)]
    for data, context in ((4, 1), (2, 2), (1, 4)):
        strategy = Strategy(data=data, context=context, micro_batch=2, micro_batches=4 // data, stages=(2,))
        folder = tmp_path / f"{data}x{context}"
        found.append(train_processes(lower(spec, strategy), source_of(spec), 2, folder))
    assert all(differences(training, found[0]) == [] for training in found[1:])


@pytest.mark.parametrize("pipeline", [1, 2])
def test_S_LOSS_07_evaluation_is_not_divided_again(pipeline: int) -> None:
    """On the training batch, before any update, it gives the training loss."""
    spec = with_train(spec_of(Configuration(pipeline=2)), global_batch=8)
    strategy = Strategy(pipeline=pipeline, micro_batch=2, micro_batches=4, stages=(1, 1) if pipeline == 2 else (2,))
    plan = lower(spec, strategy)
    evaluated = run_loopback(plan, 1, source_of(spec), "evaluate")
    trained = run_loopback(plan, 1, source_of(spec))
    assert evaluated.losses[0] == pytest.approx(trained.losses[0], rel=1e-12)
    again = run_loopback(plan, 1, source_of(spec), "evaluate", states=evaluated.states)
    assert again.losses == evaluated.losses  # evaluating changes nothing


def test_S_LOSS_08_label_smoothing_is_refused_by_name() -> None:
    with pytest.raises(TitanError) as caught:
        model_spec("tiny.llama", f"{_BATCH}, label_smoothing = 0.1")
    assert "label_smoothing" in caught.value.diagnostics[0].message


# --- the norm


def test_S_NORM_01_all_stages_clip_by_one_norm() -> None:
    spec = with_train(spec_of(Configuration(pipeline=2, data=2)), clip=1e-3)
    strategy = strategy_of(Configuration(pipeline=2, data=2))
    (found,) = agree(spec, strategy)
    assert found.norms[0] > 1e-3
    result = run_loopback(lower(spec, strategy), 1, source_of(spec))
    assert {report.grad_norm for report in result.reports[0]} == {found.norms[0]}


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("family", ["kv_one", "gpt2"])
def test_S_NORM_02_replicated_parameters_count_once(family: str, sequence_parallel: bool) -> None:
    """Norms, biases and the single KV head lie on every tensor rank."""
    spec = spec_of(Configuration(tensor=8, family=family))
    batch = spec.train.global_batch
    strategies = [
        Strategy(tensor=t, sequence_parallel=sequence_parallel and t > 1, micro_batch=batch, stages=(2,))
        for t in (1, 2, 4, 8)
    ]
    assert agree(spec, *strategies, steps=1)


# --- precision


def test_S_PREC_02_bf16_gradients_are_accumulated_in_float32() -> None:
    """64 micro-batches: the float32 sum stays as good as one micro-batch, a bf16 sum would not."""
    model = "tiny.llama with { vocab = 64, hidden = 16, layers = 1 * dense { ffn = 16 } }"
    spec = model_spec(model, "sequence = 8, global_batch = 64, data = synthetic(64)", "bf16")
    plan = lower(spec, Strategy(micro_batch=1, micro_batches=64, stages=(1,)))
    kinds = {(b.kind, b.dtype) for b in plan.roles[0].buffers}
    assert kinds >= {("parameters", "bf16"), ("gradients", "f32"), ("optimizer", "f32")}
    assert sum(b.bytes for b in plan.roles[0].buffers if b.kind == "gradients") >= 4 * spec.model.parameter_count()
    source = source_of(spec, ignored=0.0)
    found = train_plan(plan, spec, 1, source)
    wide = {name: value.double() for name, value in found.initial.items()}
    single = lower(spec, single_strategy(spec))
    exact = train_reference(single, spec, wide, 1, source).gradients[0]
    narrow = _summed_in_bf16(spec, source)
    ours, theirs = (_error(gradients, exact) for gradients in (found.gradients[0], narrow))
    assert ours < 0.02 and theirs > 2 * ours


def _summed_in_bf16(spec: Spec, source: SyntheticSource) -> dict[str, Tensor]:
    one = with_train(spec, global_batch=1)
    plan = lower(one, single_strategy(one))
    total: dict[str, Tensor] = {}
    for sample in range(64):
        gradients = train_plan(plan, one, 1, _Shifted(source, sample)).gradients[0]
        for name, gradient in gradients.items():
            share = (gradient / 64).bfloat16()
            total[name] = total[name] + share if name in total else share
    return total


def _error(found: dict[str, Tensor] | object, exact: object) -> float:
    """Relative error over all gradients together."""
    assert isinstance(found, dict) and isinstance(exact, dict)
    gap = sum(float((found[name].double() - exact[name]).square().sum()) for name in exact)
    return math.sqrt(gap / sum(float(g.square().sum()) for g in exact.values()))


# --- random numbers


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_S_RNG_01_dropout_under_sequence_parallelism_and_recompute(recompute: str) -> None:
    spec = spec_of(Configuration(tensor=2, family="dropout"))
    strategy = Strategy(
        tensor=2, sequence_parallel=True, recompute=recompute, micro_batch=spec.train.global_batch, stages=(2,)
    )
    agree(spec, strategy)


def test_S_RNG_02_no_random_state_exists_that_could_go_out_of_step() -> None:
    """Dropout draws by counter: torch's generator is never advanced, and replicated parameters stay equal."""
    spec = with_train(spec_of(Configuration(tensor=2, family="dropout"), "fp32"), steps=100)
    plan = lower(spec, Strategy(tensor=2, micro_batch=spec.train.global_batch, stages=(2,)))
    before = torch.get_rng_state()
    result = run_loopback(plan, 100, source_of(spec))
    assert torch.equal(torch.get_rng_state(), before)
    for name in ("layers.0.attn_norm.weight", "layers.1.attn.out.bias", "positions.weight"):
        left, right = copies(result, plan, name)
        assert same_bits(left, right)
