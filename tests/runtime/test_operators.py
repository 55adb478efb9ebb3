"""Every operator against autograd in float64, and against the compiler's row: names, shapes, dtypes, saved values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import titan.runtime.operators as package
import torch
import torch.nn.functional as F
from titan.compiler.plan.operators import OPERATORS, TensorType
from titan.runtime.dtypes import DTYPES
from titan.runtime.operator_table import functions
from titan.runtime.operators.dropout import kept
from titan.runtime.place import Place
from torch import Tensor

torch.set_num_threads(1)

NAMES = {dtype: name for name, dtype in DTYPES.items()}
PLACE = Place(seed=7, step=3, samples=(11, 4), layer=2)


@dataclass(frozen=True)
class Case:
    """An operator, attributes, operands and the same function written with torch's differentiable ones."""

    operator: str
    operands: tuple[Tensor, ...]
    oracle: Callable[..., Any]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""

    def __str__(self) -> str:
        return f"{self.operator}{'-' * bool(self.name)}{self.name}"


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def _attend(start: int | None, width: int) -> Callable[..., Tensor]:
    """Plain softmax attention; `start` None sees every key."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.unflatten(-1, (-1, width)).transpose(1, 2) for x in (q, k, v))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = q @ k.transpose(-1, -2) / width**0.5
        if start is not None:
            positions = torch.arange(q.shape[2]).unsqueeze(1) + start
            scores = scores.masked_fill(torch.arange(k.shape[2]) > positions, -torch.inf)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)

    return attend


def _merged(query: int, queries: int, key: int, keys: int) -> Callable[..., Tensor]:
    """Partial attention of which nothing is known but result and log-sum-exp, and some keys more for some queries."""

    def merge(q: Tensor, k: Tensor, v: Tensor, partial: Tensor, partial_lse: Tensor) -> Tensor:
        q, k, v, partial = (x.unflatten(-1, (-1, 8)).transpose(1, 2) for x in (q, k, v, partial))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = (q @ k.transpose(-1, -2) / 8**0.5).exp()
        seen = torch.zeros(q.shape[2], k.shape[2], dtype=torch.float64)
        seen[query : query + queries, key : key + keys] = 1
        weights, before = scores * seen, partial_lse.exp().unsqueeze(-1)
        merged = (weights @ v + before * partial) / (weights.sum(-1, keepdim=True) + before)
        return merged.transpose(1, 2).flatten(2)

    return merge


def _unpacked(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same with keys and values as one tensor."""
    return lambda q, kv, *more: attend(q, *kv, *more)


def _embed(start: int) -> Callable[..., Tensor]:
    def embed(tokens: Tensor, table: Tensor) -> Tensor:
        one_hot = (tokens.unsqueeze(-1) - start == torch.arange(table.shape[0])).double()
        return one_hot @ table

    return embed


def _turned(
    start: int, theta: float, width: int, scaling: tuple[float, ...] | None = None
) -> Callable[[Tensor], Tensor]:
    """Rotary embedding by complex multiplication."""

    def turn(x: Tensor) -> Tensor:
        pairs = x.unflatten(-1, (-1, 2, width // 2))
        z = torch.complex(pairs[..., 0, :], pairs[..., 1, :])
        speed = torch.tensor(
            [_speed(theta ** (-2 * d / width), scaling) for d in range(width // 2)], dtype=torch.float64
        )
        angle = torch.arange(start, start + x.shape[1]).double().unsqueeze(1) * speed
        z = z * torch.polar(torch.ones_like(angle), angle).unsqueeze(1)
        return torch.stack((z.real, z.imag), -2).flatten(2)

    return turn


def _speed(speed: float, scaling: tuple[float, ...] | None) -> float:
    """Llama-3 frequency scaling, case by case as published."""
    if scaling is None:
        return speed
    factor, low, high, original = scaling
    wave = 2 * torch.pi / speed
    if wave < original / high:
        return speed
    if wave > original / low:
        return speed / factor
    smooth = (original / wave - low) / (high - low)
    return (1 - smooth) * speed / factor + smooth * speed


def _dropped(x: Tensor) -> Tensor:
    return x * kept(PLACE, "ffn", 0.25, ((5, x.shape[1]),), x.shape[2], x.device) / 0.75


def _sums(start: int, vocab: int) -> Callable[..., tuple[Tensor, Tensor]]:
    def sums(logits: Tensor, labels: Tensor, peak: Tensor) -> tuple[Tensor, Tensor]:
        columns = torch.arange(start, start + logits.shape[-1])
        real = columns < vocab
        total = (logits.sub(peak.unsqueeze(-1)).exp() * real).sum(-1)
        return total, (logits * ((labels.unsqueeze(-1) == columns) & real)).sum(-1)

    return sums


def _loss(kind: str) -> Callable[..., Tensor]:
    def loss(peak: Tensor, total: Tensor, target: Tensor, labels: Tensor, count: Tensor) -> Tensor:
        each = -target if kind == "linear" else total.log() + peak - target
        return (each * (labels != -100)).sum() / count

    return loss


def _logits_summed(start: int, vocab: int) -> Callable[..., tuple[Tensor, Tensor]]:
    def sums(x: Tensor, weight: Tensor, labels: Tensor, peak: Tensor) -> tuple[Tensor, Tensor]:
        return _sums(start, vocab)(x @ weight.T, labels, peak)

    return sums


def _attend_documents(start: int) -> Callable[..., Tensor]:
    """Plain softmax attention from each query's first key on."""

    def attend(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Tensor:
        q, k, v = (x.unflatten(-1, (-1, 8)).transpose(1, 2) for x in (q, k, v))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        places, keys = torch.arange(q.shape[2]).unsqueeze(1) + start, torch.arange(k.shape[2])
        hidden = ((keys > places) | (keys < starts.unsqueeze(2))).unsqueeze(1)
        scores = (q @ k.transpose(-1, -2) / 8**0.5).masked_fill(hidden, -torch.inf)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)

    return attend


STARTS = torch.tensor([[0, 0, 2, 2, 2, 5], [0, 1, 1, 1, 1, 1]])
LABELS = torch.tensor([[0, 3, -100, 9, 6], [5, 11, 7, -100, 2]])
TOKENS = torch.tensor([[0, 3, 5, 9, 6], [5, 11, 7, 3, 3]])
SCALING = {"factor": 8.0, "low": 1.0, "high": 4.0, "original": 64}


def _attention(q: int, k: int, heads: int, kv_heads: int, **attributes: Any) -> Case:
    operands = (_normal(2, q, heads * 8), _normal(2, k, kv_heads * 8) + 0.1, _normal(2, k, kv_heads * 8) - 0.1)
    start = attributes.get("start", 0) if attributes.get("causal", True) else None
    name = f"{q}x{k}x{heads}x{kv_heads}-{start}"
    return Case("attention", operands, _attend(start, 8), {"head_dim": 8, "causal": True, **attributes}, name)


def _step(step: int, rank: int, zigzag: bool, seen: tuple[int, int, int, int], **attributes: Any) -> Case:
    """A step of a ring of four ranks with six tokens each."""
    operands = (_normal(2, 6, 32), _normal(2, 2, 6, 16) + 0.1)
    place = {"step": step, "ring": 4, "rank": rank, "zigzag": zigzag, "final": step == 3}
    given = {"head_dim": 8, "causal": True, **place, **attributes}
    if step:
        operands = (*operands, _normal(2, 6, 32) * 0.3, _normal(2, 4, 6) + 1)
        name = f"{step}-{rank}-{zigzag}-{given['causal']}"
        return Case("attention_merge", operands, _unpacked(_merged(*seen)), given, name)
    attend = _unpacked(_attend(0 if given["causal"] else None, 8))
    return Case("attention_block", operands, attend, given, str(given["causal"]))


CASES = (
    Case("pack_keys", (_normal(2, 5, 6), _normal(2, 5, 6) + 1), lambda k, v: torch.stack((k, v)), {"dtype": "f64"}),
    Case("wide_gradient", (_normal(2, 5, 6),), lambda x: x * 1, {"dtype": "f64"}),
    _step(0, 2, True, (0, 6, 0, 6)),
    _step(0, 2, True, (0, 6, 0, 6), causal=False),
    _step(1, 2, True, (0, 6, 0, 3)),
    _step(3, 2, True, (3, 3, 0, 6)),
    _step(1, 2, False, (0, 6, 0, 6)),
    _step(3, 2, False, (0, 0, 0, 0)),
    _step(3, 2, False, (0, 6, 0, 6), causal=False),
    Case("embedding", (TOKENS, _normal(12, 6)), _embed(0)),
    Case("embedding", (TOKENS, _normal(4, 6)), _embed(4), {"start": 4}, "shard"),
    Case("add_positions", (_normal(2, 5, 6), _normal(9, 6)), lambda x, t: x + t[3:8], {"start": 3}),
    Case("linear", (_normal(2, 5, 6), _normal(7, 6)), F.linear),
    Case("bias", (_normal(2, 5, 6), _normal(6)), torch.add),
    Case("rms_norm", (_normal(2, 5, 6), _normal(6)), lambda x, g: F.rms_norm(x, (6,), g, 1e-3), {"eps": 1e-3}),
    Case("layer_norm", (_normal(2, 5, 6), _normal(6), _normal(6) + 1),
         lambda x, g, b: F.layer_norm(x, (6,), g, b, 1e-3), {"eps": 1e-3}),
    Case("rope", (_normal(2, 5, 24),), _turned(0, 1e4, 8), {"theta": 1e4, "head_dim": 8}),
    Case("rope", (_normal(2, 5, 24),), _turned(1000, 5e5, 8, tuple(SCALING.values())),
         {"theta": 5e5, "head_dim": 8, "start": 1000, **SCALING}, "scaled"),
    _attention(5, 5, 2, 2),
    _attention(37, 37, 4, 2),
    _attention(5, 5, 4, 1, causal=False),
    _attention(5, 12, 4, 2, causal=False),
    _attention(4, 12, 4, 2, start=4),
    _attention(4, 12, 4, 4, start=8),
    _attention(4, 12, 2, 2, start=0),
    *(
        Case("attention_documents",
             (_normal(2, 6, 32), _normal(2, keys, 16) + 0.1, _normal(2, keys, 16) - 0.1, starts),
             _attend_documents(first), {"head_dim": 8, "causal": True, "start": first}, str(first))
        for first, keys, starts in ((0, 6, STARTS), (4, 12, STARTS + 2))
    ),
    Case("attention_block_documents", (_normal(2, 6, 32), _normal(2, 2, 6, 16), STARTS),
         _unpacked(_attend_documents(0)),
         {"head_dim": 8, "causal": True, "step": 0, "ring": 2, "rank": 0, "zigzag": False, "final": False}),
    Case("attention_merge_documents",
         (_normal(2, 6, 32), _normal(2, 2, 6, 16), torch.tensor([[0] * 6, [6] * 6]),
          _normal(2, 6, 32) * 0.3, _normal(2, 4, 6) + 1),
         lambda q, kv, s, o, lse: torch.cat((_merged(0, 6, 0, 6)(q[:1], *kv[:, :1], o[:1], lse[:1]), o[1:])),
         {"head_dim": 8, "causal": True, "step": 1, "ring": 2, "rank": 1, "zigzag": False, "final": True}),
    Case("add_positions_documents", (_normal(2, 6, 6), _normal(9, 6), STARTS + 2),
         lambda x, t, s: x + F.embedding(torch.arange(4, 10) - s, t), {"start": 4}),
    Case("swiglu", (_normal(2, 5, 6), _normal(2, 5, 6) + 1), lambda g, u: F.silu(g) * u),
    Case("gelu", (_normal(2, 5, 6),), F.gelu, {"approximate": "none"}),
    Case("gelu", (_normal(2, 5, 6),), lambda x: F.gelu(x, approximate="tanh"), {"approximate": "tanh"}, "tanh"),
    Case("relu", (_normal(2, 5, 6),), F.relu),
    Case("add", (_normal(2, 5, 6), _normal(2, 5, 6) + 1), torch.add),
    Case("dropout", (_normal(2, 5, 6),), _dropped, {"p": 0.25, "site": "ffn", "start": 5}),
    Case("dropout", (_normal(2, 5, 7),), _dropped, {"p": 0.25, "site": "ffn", "start": 5}, "odd"),
    Case("vocab_max", (_normal(2, 5, 6),), lambda x: x[..., :4].amax(-1), {"start": 8, "vocab": 12}),
    Case("vocab_sum", (_normal(2, 5, 12), LABELS, _normal(2, 5)), _sums(0, 12), {"vocab": 12}),
    Case("vocab_sum", (_normal(2, 5, 8), LABELS, _normal(2, 5)), _sums(4, 10), {"start": 4, "vocab": 10}, "padded"),
    Case("vocab_sum", (_normal(2, 5, 8), LABELS, _normal(2, 5)), _sums(16, 12), {"start": 16, "vocab": 12}, "empty"),
    Case("linear_vocab_max", (_normal(2, 5, 6), _normal(8, 6)), lambda x, w: (x @ w.T)[..., :4].amax(-1),
         {"start": 8, "vocab": 12, "rows": 3}),
    Case("linear_vocab_sum", (_normal(2, 5, 6), _normal(8, 6), LABELS, _normal(2, 5)), _logits_summed(4, 10),
         {"start": 4, "vocab": 10, "rows": 3}),
    Case("linear_vocab_sum", (_normal(2, 5, 6), _normal(12, 6), LABELS, _normal(2, 5)), _logits_summed(0, 12),
         {"vocab": 12, "rows": 100}, "whole"),
    *(
        Case("token_loss", (_normal(2, 5), _normal(2, 5).exp(), _normal(2, 5), LABELS, torch.tensor(8.0).double()),
             _loss(kind), {"kind": kind}, kind)
        for kind in ("cross_entropy", "linear")
    ),
)  # fmt: skip

cases = pytest.mark.parametrize("case", CASES, ids=str)


def _roles(case: Case) -> tuple[list[int], list[int]]:
    """Positions of the operands that get an input gradient, and of the parameters."""
    row = OPERATORS[case.operator]
    names = list(enumerate(row.operands))
    parameters = [n for n, name in names if name in row.parameters]
    return [n for n, name in names if name not in row.data and n not in parameters], parameters


def _oracle(case: Case) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], list[Tensor | None]]:
    """Results, gradients given to them, gradients of every operand by autograd."""
    inputs, parameters = _roles(case)
    differentiable = inputs + parameters
    operands = [x.clone().requires_grad_(n in differentiable) for n, x in enumerate(case.operands)]
    results = case.oracle(*operands)
    results = results if isinstance(results, tuple) else (results,)
    given = tuple(_normal(*r.shape) + 0.5 for r in results)
    if OPERATORS[case.operator].differentiable:
        reached = [(r, g) for r, g in zip(results, given, strict=True) if r.requires_grad]
        torch.autograd.backward([r for r, _ in reached], [g for _, g in reached])
    return tuple(r.detach() for r in results), given, [x.grad for x in operands]


def _saved(case: Case, results: tuple[Tensor, ...], names: tuple[str, ...]) -> dict[str, Tensor]:
    row = OPERATORS[case.operator]
    everything = dict(zip(row.operands + row.results, case.operands + results, strict=True))
    return {name: everything[name] for name in names}


def _weight_names(case: Case) -> tuple[str, ...]:
    row = OPERATORS[case.operator]
    return row.saves if row.weight_with_input else row.saves_weight


def test_one_file_for_each_row() -> None:
    files = {path.stem for path in Path(package.__path__[0]).glob("*.py")} - {"__init__"}
    run = {name for name, row in OPERATORS.items() if not row.plan_only}
    assert files == run == {case.operator for case in CASES}


@cases
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_results_are_typed_as_the_row_says(case: Case, dtype: torch.dtype) -> None:
    row, statistic = OPERATORS[case.operator], torch.float64 if dtype == torch.float64 else torch.float32
    statistics = ("peak", "total", "target", "count", "partial", "partial_lse")
    operands = tuple(
        x if not x.is_floating_point() else x.to(statistic if name in statistics else dtype)
        for name, x in zip(row.operands, case.operands, strict=True)
    )
    expected = row.typing(case.attributes, tuple(TensorType(NAMES[x.dtype], tuple(x.shape)) for x in operands))
    before = [x.clone() for x in operands]
    results = functions(case.operator).forward(case.attributes, PLACE, *operands)
    assert [(NAMES[r.dtype], tuple(r.shape)) for r in results] == list(expected)
    assert all(torch.equal(x, y) for x, y in zip(operands, before, strict=True))
    exact, _, _ = _oracle(case)
    tolerance = {torch.float64: 1e-11, torch.float32: 1e-4, torch.bfloat16: 8e-2}[dtype]
    for found, wanted in zip(results, exact, strict=False):
        torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)


@cases
def test_forward_and_gradients_equal_autograd(case: Case) -> None:
    module, (inputs, parameters) = functions(case.operator), _roles(case)
    exact, given, wanted = _oracle(case)
    results = module.forward(case.attributes, PLACE, *case.operands)
    for found, right in zip(results, exact, strict=False):
        torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)
    if not OPERATORS[case.operator].differentiable:
        return
    saved = _saved(case, results, OPERATORS[case.operator].saves)
    found_inputs = module.backward_input(case.attributes, PLACE, saved, given)
    into = tuple(torch.ones_like(case.operands[n]) for n in parameters)
    module.backward_weight(case.attributes, PLACE, _saved(case, results, _weight_names(case)), given, into)
    for n, found in zip(inputs, found_inputs, strict=True):
        right = wanted[n] if wanted[n] is not None else torch.zeros_like(case.operands[n])
        torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-10)
    for n, found in zip(parameters, into, strict=True):
        torch.testing.assert_close(found - 1, wanted[n], rtol=1e-10, atol=1e-10)


@cases
def test_gradients_are_tensors_of_their_own_unless_the_row_says(case: Case) -> None:
    """Others are added to them in place."""
    row, module = OPERATORS[case.operator], functions(case.operator)
    if not row.differentiable:
        pytest.skip("no gradient")
    results = module.forward(case.attributes, PLACE, *case.operands)
    given = tuple(_normal(*r.shape) for r in results[: len(row.main_results)])
    saved = _saved(case, results, row.saves)
    found = module.backward_input(case.attributes, PLACE, saved, given)
    inputs, _ = _roles(case)
    seen = {x.untyped_storage().data_ptr() for x in (*case.operands, *results, *given)}
    for n, gradient in zip(inputs, found, strict=True):
        storage = gradient.untyped_storage().data_ptr()
        assert row.operands[n] in row.hands_on or storage not in seen
        seen.add(storage)


@cases
def test_both_gradients_at_once_are_the_two_apart(case: Case) -> None:
    module, (_, parameters) = functions(case.operator), _roles(case)
    both = getattr(module, "backward", None)
    if both is None:
        pytest.skip("this operator has no combined backward")
    results = module.forward(case.attributes, PLACE, *case.operands)
    given = tuple(_normal(*r.shape) for r in results[: len(OPERATORS[case.operator].main_results)])
    saved = _saved(case, results, OPERATORS[case.operator].saves)
    apart, together = (tuple(torch.zeros_like(case.operands[n]) for n in parameters) for _ in range(2))
    inputs = module.backward_input(case.attributes, PLACE, saved, given)
    module.backward_weight(case.attributes, PLACE, saved, given, apart)
    for found, right in zip(both(case.attributes, PLACE, saved, given, together), inputs, strict=True):
        assert torch.equal(found, right)
    assert all(torch.equal(a, b) for a, b in zip(apart, together, strict=True))


@cases
def test_bfloat16_gradients_are_accumulated_in_float32(case: Case) -> None:
    module, (inputs, parameters) = functions(case.operator), _roles(case)
    row = OPERATORS[case.operator]
    if not row.differentiable or row.name == "token_loss":
        pytest.skip("no bfloat16 gradient")
    _, given, wanted = _oracle(case)
    narrow = {"peak", "total", "target", "partial", "partial_lse"}
    changes = {"dtype": "bf16", "final": True}  # backward works from the final result, whatever the part
    attributes = {key: changes.get(key, value) for key, value in case.attributes.items()}
    operands = tuple(
        x.float() if n in narrow else x.bfloat16() if x.is_floating_point() else x
        for n, x in zip(row.operands, case.operands, strict=True)
    )
    results = module.forward(attributes, PLACE, *operands)
    gradients = tuple(g.to(r.dtype) for g, r in zip(given, results, strict=False))
    everything = dict(zip(row.operands + row.results, operands + results, strict=True))
    found = module.backward_input(attributes, PLACE, {n: everything[n] for n in row.saves}, gradients)
    into = tuple(torch.zeros(case.operands[n].shape) for n in parameters)
    module.backward_weight(case.attributes, PLACE, {n: everything[n] for n in _weight_names(case)}, gradients, into)
    for n, gradient in zip(inputs, found, strict=True):
        assert gradient.dtype == (torch.float32 if row.operands[n] in row.wide else operands[n].dtype)
    for n, gradient in zip(inputs + parameters, (*found, *into), strict=True):
        right = wanted[n] if wanted[n] is not None else torch.zeros_like(case.operands[n])
        assert (gradient.double() - right).norm() <= 0.03 * right.norm() + 1e-6
