"""Ring attention trains as one process does: every degree, form and order, beside every other choice."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from titan.compiler.lower import lower
from titan.compiler.plan.sequence import runs
from titan.compiler.spec.resolve import resolve
from titan.compiler.spec.schema import Spec
from titan.compiler.strategy import Strategy
from titan.grammar.parser import parse
from titan.runtime.attention_blocks import attention_block, merge
from titan.runtime.data import TokenSource
from titan.runtime.documents import Documents, squares
from titan.runtime.loopback import collect_parameters
from titan.runtime.positions import positions
from titan.runtime.reference import reference_loss
from titan.runtime.state import allocate

from tests.equivalence.comparison import FLOOR, Training, source_of, train_plan, train_reference, unproven
from tests.equivalence.configurations import single_strategy
from tests.equivalence.processes import train_processes

torch.set_num_threads(1)

GROUPED = "gqa { heads = 8, kv_heads = 4, head_dim = 4 }"
FAMILIES = {
    "llama": f"attention = {GROUPED}, rope = {{ theta = 10000 }}",
    "one_kv": "attention = gqa { heads = 8, kv_heads = 1, head_dim = 4 }, rope = { theta = 10000 }",
    "gpt2": (
        "attention = gqa { heads = 8, kv_heads = 8, head_dim = 4, bias = true, out_bias = true }, norm = layer_norm, "
        "positions = learned, dropout = 0.2"
    ),
}
SEQUENCE = {3: 12, 5: 20, 6: 24, 7: 28}


@cache
def spec(family: str, sequence: int = 32, precision: str = "fp64", batch: int = 4) -> Spec:
    text = f"""
import clusters.local
model = model {{
    vocab = 19, hidden = 16, layers = 2 * dense {{ ffn = 24 }}, max_positions = 64, init_std = 0.3, {FAMILIES[family]}
}}
cluster = local.cpu with {{ devices_per_node = 16 }}
train {{
    sequence = {sequence}, global_batch = {batch}, precision = {precision}, steps = 4, data = synthetic(19), clip = 0.2
    optimizer = adamw {{ learning_rate = 0.01 }}
}}
"""
    return resolve(parse(text, "ring.titan"), Path())


@cache
def oracle(family: str, sequence: int = 32) -> Training:
    """Plain autograd, from the initial values of a plan of one process."""
    found = spec(family, sequence)
    single = lower(found, single_strategy(found))
    return train_reference(single, found, train_plan(single, found, steps=1).initial)


def gap(found: Training, wanted: Training, step: int = 0) -> float:
    """Largest relative difference of loss, norm and gradients of a step."""
    numbers = ((found.losses[step], wanted.losses[step]), (found.norms[step], wanted.norms[step]))
    worst = max(abs(a - b) / abs(b) for a, b in numbers)
    left, right = found.gradients[step], wanted.gradients[step]
    largest = max(float(g.abs().max()) for g in right.values())
    for name, gradient in right.items():
        distance = float((left[name] - gradient).abs().max())
        # key biases shift all scores of a query alike: their gradients are nothing but rounding
        floor = largest if name.endswith("attn.k.bias") else FLOOR * largest
        worst = max(worst, distance / max(floor, float(gradient.abs().max())))
    return worst


def exact(found: Training, wanted: Training) -> bool:
    """The first step to 1e-12; after an update rounding has grown: Adam divides small gradients by their own size."""
    return gap(found, wanted) < 1e-12 and gap(found, wanted, 1) < 1e-9


def strategy(found: Spec, **choices: Any) -> Strategy:
    s = Strategy(**{"context_form": "ring", "micro_batch": 2, **choices})
    chunks = s.pipeline * s.chunks
    stages = choices.get("stages") or tuple(2 // chunks for _ in range(chunks))
    return replace(s, stages=stages, micro_batches=found.train.global_batch // (s.data * s.micro_batch))


@pytest.mark.parametrize("context", [2, 3, 4, 5, 6, 7, 8, 16])
def test_every_degree_is_exact(context: int) -> None:
    found = spec("llama", SEQUENCE.get(context, 32))
    plan = lower(found, strategy(found, context=context, micro_batch=4))
    assert unproven(plan) == []
    assert exact(train_plan(plan, found), oracle("llama", found.train.sequence))


CASES: tuple[dict[str, Any], ...] = (
    {"context": 4, "context_order": "contiguous"},
    {"context": 4, "tensor": 2},
    {"context": 4, "tensor": 2, "sequence_parallel": True, "recompute": "full"},
    {"context": 4, "tensor": 2, "sequence_parallel": True, "family": "one_kv"},
    {"context": 2, "tensor": 4, "sequence_parallel": True, "family": "one_kv"},
    {"context": 2, "data": 2, "zero": 1, "pipeline": 2, "recompute": "full"},
    {"context": 4, "family": "gpt2"},
    {"context": 4, "family": "gpt2", "tensor": 2, "sequence_parallel": True},
    {"context": 4, "family": "gpt2", "recompute": "full", "pipeline": 2},
    {"context": 4, "context_heads": 2},
    {"context": 8, "context_heads": 4, "family": "gpt2"},
    {"context": 4, "context_heads": 2, "tensor": 2, "sequence_parallel": True},
    {"context": 4, "context_heads": 2, "pipeline": 2, "data": 2, "zero": 1, "recompute": "full"},
    {"context": 8, "context_heads": 2, "context_order": "contiguous"},
    {"context": 2, "pipeline": 2, "schedule": "gpipe"},
    {"context": 2, "pipeline": 2, "schedule": "zero_bubble_h1"},
    {"context": 4, "context_heads": 2, "schedule": "zero_bubble_h1", "pipeline": 2},
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(f"{k}_{v}" for k, v in case.items()))
def test_beside_every_other_choice(case: dict[str, Any]) -> None:
    choices = dict(case)
    family = choices.pop("family", "llama")
    found = spec(family)
    plan = lower(found, strategy(found, **choices))
    assert unproven(plan) == []
    assert exact(train_plan(plan, found), oracle(family))


class _Holes:
    """A source whose labels are missing over whole ranks and chunks, and otherwise at random."""

    def __init__(self, inner: TokenSource, first: int, last: int) -> None:
        self.inner, self.first, self.last = inner, first, last

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def load(self, indices: Any, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, labels = self.inner.load(indices, start, stop)
        places = torch.arange(start, stop)
        hidden = (places >= self.first) & (places < self.last)
        rows = torch.tensor([i % 2 == 0 for i in indices])
        return tokens, labels.masked_fill(rows.unsqueeze(1) & hidden, -100)


@pytest.mark.parametrize("choices", [{"context": 4}, {"context": 4, "context_heads": 2, "data": 2}, {"context": 2}])
def test_uneven_numbers_of_labels_change_nothing(choices: dict[str, Any]) -> None:
    """Ranks that have no label at all in some samples: the loss is divided by the labels of the whole step."""
    found = spec("llama")
    single = lower(found, single_strategy(found))
    source = _Holes(source_of(found, 0.1), 8, 24)
    initial = train_plan(single, found, steps=1).initial
    wanted = train_reference(single, found, initial, source=source)
    plan = lower(found, strategy(found, **choices))
    assert exact(train_plan(plan, found, source=source), wanted)


def test_merging_does_not_depend_on_the_order() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 16, 8, generator=generator) for _ in range(3))
    parts = [attention_block(q, k[:, :, i : i + 4], v[:, :, i : i + 4], False) for i in range(0, 16, 4)]
    whole, lse = attention_block(q, k, v, False)
    for order in ((0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)):
        out = (parts[order[0]][0].clone(), parts[order[0]][1].clone())
        for n in order[1:]:
            out = merge(out, parts[n])
        assert float((out[0] - whole).abs().max()) < 1e-6 and float((out[1] - lse).abs().max()) < 1e-6


@pytest.mark.parametrize("context", [2, 4])
def test_bfloat16_is_as_near_as_one_process(context: int) -> None:
    """Both against float64: the ring's float32 sums add no error of their own."""
    narrow = spec("llama", precision="bf16")
    wanted = oracle("llama")
    one = train_plan(lower(narrow, single_strategy(narrow)), narrow, steps=1)
    ring = train_plan(lower(narrow, strategy(narrow, context=context, micro_batch=4)), narrow, steps=1)

    def error(found: Training) -> float:
        pairs = [(found.gradients[0][n].double(), g) for n, g in wanted.gradients[0].items()]
        return sum(float((a - b).norm()) for a, b in pairs) / sum(float(b.norm()) for _, b in pairs)

    assert error(ring) < 1.25 * error(one) + 1e-4


@pytest.mark.parametrize(
    ("choices", "precision"),
    [
        ({"context": 4}, "fp32"),
        ({"context": 4, "context_heads": 2}, "fp32"),
        ({"context": 2, "pipeline": 2, "recompute": "full"}, "fp32"),
        ({"context": 4}, "bf16"),
    ],
)
def test_processes_give_what_loopback_gives(choices: dict[str, Any], precision: str, tmp_path: Path) -> None:
    found = spec("llama", precision=precision)
    plan = lower(found, strategy(found, **choices))
    assert gap(train_processes(plan, source_of(found), 2, tmp_path), train_plan(plan, found)) < 1e-5


SEPARATOR = 5
PACKED: tuple[dict[str, Any], ...] = (
    {"context_form": "gathered"},
    {"context": 2, "context_form": "gathered"},
    {"context": 2, "context_form": "heads"},
    {"context": 4},
    {"context": 4, "context_order": "contiguous"},
    {"context": 4, "context_heads": 2},
    {"context": 2, "tensor": 2, "sequence_parallel": True, "pipeline": 2, "recompute": "full"},
)


@cache
def one_by_one(family: str) -> tuple[float, dict[str, torch.Tensor]]:
    return documents_alone(packed(family))


def documents_alone(found: Spec, length: int = 32) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the documents of a batch, each run alone through plain autograd."""
    single = lower(found, single_strategy(found))
    state = (allocate(single, 0),)
    parameters = {n: p.clone().requires_grad_() for n, p in collect_parameters(state, single).items()}
    tokens, labels = Documents(source_of(found), SEPARATOR).load(range(4), 0, length)
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row in range(4):
        first = 0
        for end in [p + 1 for p in range(length) if tokens[row, p] == SEPARATOR] + [length]:
            if end > first:
                piece = (tokens[row : row + 1, first:end], labels[row : row + 1, first:end])
                loss, number = reference_loss(single.setting("model"), parameters, *piece, [row])
                total, count = total + loss, count + number
            first = end
    (total / count).backward()
    return float(total / count), {n: p.grad for n, p in parameters.items() if p.grad is not None}


def packed(family: str) -> Spec:
    found = spec(family)
    changed = found.model.model_copy(update={"dropout": 0.0})
    return replace(found, train=found.train.model_copy(update={"separator": SEPARATOR}), model=changed)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("choices", PACKED, ids=lambda c: "-".join(f"{k}_{v}" for k, v in c.items()))
def test_packed_documents_equal_documents_run_one_by_one(choices: dict[str, Any], family: str) -> None:
    found = packed(family)
    plan = lower(found, strategy(found, **choices))
    assert unproven(plan) == []
    equal(train_plan(plan, found, steps=1), *one_by_one(family))


def equal(trained: Training, loss: float, gradients: dict[str, torch.Tensor]) -> None:
    """Loss and gradients of the first step."""
    assert trained.losses[0] == pytest.approx(loss, rel=1e-13)
    largest = max(float(g.abs().max()) for g in gradients.values())
    for name, gradient in gradients.items():
        floor = largest if name.endswith("attn.k.bias") else FLOOR * largest
        assert float((trained.gradients[0][name] - gradient).abs().max()) < 1e-12 * max(
            floor, float(gradient.abs().max())
        ), name


def test_squares_are_the_mask_of_the_documents() -> None:
    """Against the mask itself: a key is seen from its document's start up to the query."""
    generator = torch.Generator().manual_seed(1)
    length, ring = 8, 4
    for zigzag in (0, ring):
        ends = torch.rand(ring * length, generator=generator) < 0.15
        begins = [max([p + 1 for p in range(q) if ends[p]], default=0) for q in range(ring * length)]
        seen = []
        for rank in range(ring):
            own = runs(rank * length, length, zigzag, length // 2)
            places = positions(own)
            starts = torch.tensor([begins[p] for p in places.tolist()])
            for other in range(ring):
                visiting = runs(other * length, length, zigzag, length // 2)
                keys = positions(visiting)
                for s in squares(own, visiting, starts):
                    for i in range(s.queries):
                        last = i + 1 if s.causal else s.keys
                        seen += [(int(places[s.query + i]), int(keys[s.key + j])) for j in range(last)]
        assert sorted(seen) == [(q, k) for q in range(ring * length) for k in range(begins[q], q + 1)]
