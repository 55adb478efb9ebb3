"""Products done together with what is added to them, and large products: against plain formulas in float64."""

from __future__ import annotations

import pytest
import torch
from titan.compiler.plan.chains import chains
from titan.compiler.plan.operators import TensorType
from titan.compiler.plan.segment import Call
from titan.compiler.plan.workspace import segment_inside
from titan.runtime.matrix import rows_by, rows_by_transpose
from titan.runtime.operators import bias
from titan.runtime.place import Place
from titan.runtime.segments import BoundSegment
from torch import Tensor

from tests.runtime.test_segments import MESH, PLACE, _call, _segment

WIDTH = 8
LARGE = (2, 128, 256)  # rows and columns of a product that oneDNN gets


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _body() -> tuple[Call, ...]:
    return (
        _call("linear", "a", "x .w"),
        _call("bias", "b", "a .b"),
        _call("add", "c", "x b"),
        _call("linear", "d", "c .w"),
        _call("bias", "e", "d .b"),
        _call("add", "f", "e d"),
        _call("linear", "g", "f .w"),
        _call("add", "y", "g f"),
    )


def test_calls_are_joined_where_nobody_else_wants_what_is_between() -> None:
    """`d` is read twice, so that its bias stays a call of its own."""
    found = chains(_body(), frozenset({"y"}))
    assert [[c.results[0] for c in chain] for chain in found] == [["a", "b", "c"], ["d"], ["e"], ["f"], ["g", "y"]]
    kept = chains(_body(), frozenset({"y", "b"}))
    assert [[c.results[0] for c in chain] for chain in kept][:2] == [["a", "b"], ["c"]]


def test_a_chain_is_what_its_calls_are() -> None:
    x = TensorType("f64", (2, 3, WIDTH))
    weights: dict[str, tuple[int, ...]] = {".w": (WIDTH, WIDTH), ".b": (WIDTH,)}
    segment = _segment({"x": x}, weights, ("y",), *_body())
    parameters = {"layers.0.w": _random(WIDTH, WIDTH).double(), "layers.0.b": _random(WIDTH).double()}
    gradients = {name: torch.zeros_like(value) for name, value in parameters.items()}
    given = [_random(2, 3, WIDTH).double()]
    results = []
    for chained in (True, False):
        bound = BoundSegment(
            segment, 0, parameters, gradients, MESH, {"pipeline": 0, "context": 0, "tensor": 0}, chained
        )
        results.append(bound.forward(given, PLACE, True))
    torch.testing.assert_close(results[0], results[1], rtol=1e-13, atol=1e-13)
    w, b = parameters["layers.0.w"], parameters["layers.0.b"]
    c = given[0] + given[0] @ w.t() + b
    f = 2 * (c @ w.t()) + b
    torch.testing.assert_close(results[0][0][0], f @ w.t() + f, rtol=1e-12, atol=1e-12)


def test_the_ledger_knows_what_a_chain_does_not_form() -> None:
    """The result alone; a product, its bias and their sum would be three tensors, two of them alive at once."""
    size = TensorType("f32", (2, 3, WIDTH)).bytes
    weights: dict[str, tuple[int, ...]] = {".w": (WIDTH, WIDTH), ".b": (WIDTH,)}
    segment = _segment({"x": TensorType("f32", (2, 3, WIDTH))}, weights, ("c",), *_body()[:3], dtype="f32")
    assert segment_inside(segment, "forward").peak == size


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("shape", [(2, 3, WIDTH), LARGE])
def test_products_with_what_is_added(shape: tuple[int, ...], summed: bool, biased: bool) -> None:
    k = shape[-1]
    x, flat, out = _random(*shape), _random(1 + k * k), _random(k)
    weight = flat[1:].view(k, k)  # as parameters lie in a bucket: anywhere
    added = _random(*shape[:-1], k)
    found = rows_by_transpose(x, weight, out if biased else None, added if summed else None)
    right = x.double() @ weight.double().t() + (out.double() if biased else 0) + (added.double() if summed else 0)
    torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=1e-4)
    found = rows_by(x, weight, added if summed else None)
    right = x.double() @ weight.double() + (added.double() if summed else 0)
    torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=1e-4)
    assert torch.equal(added, _random(*shape[:-1], k)), "what is added is left as it is"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gradients_of_a_bias_are_sums_over_rows(dtype: torch.dtype) -> None:
    dy = _random(3, 1000, 24).to(dtype)
    into = torch.ones(24, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    bias.backward_weight({}, Place(0, 0, (0,)), {}, (dy,), (into,))
    torch.testing.assert_close(into.double(), 1 + dy.double().sum((0, 1)), rtol=1e-5, atol=1e-4)
