"""Initial values: every layout, padding and dtype starts from the same numbers."""

from __future__ import annotations

import pytest
import torch
from titan.compiler.plan.layout import Layout
from titan.compiler.plan.mesh import Mesh
from titan.compiler.plan.operators import TensorType
from titan.compiler.plan.program import Parameter
from titan.runtime.initial import initial_value
from torch import Tensor

torch.set_num_threads(1)

WHOLE = Mesh((("data", 1), ("tensor", 1)))
SPLIT = Mesh((("data", 2), ("context", 2), ("tensor.kv", 2), ("tensor.rep", 3)))


def _parameter(
    shape: tuple[int, ...], local: tuple[int, ...], layout: Layout, rows: int | None, kind: str, dtype: str
) -> Parameter:
    tensor = TensorType(dtype, local, layout)
    return Parameter("layers.3.x.weight", shape, shape[0] if rows is None else rows, tensor, "l3", 0, True, kind)


def _whole(shape: tuple[int, ...], kind: str, rows: int | None = None, dtype: str = "f64", seed: int = 4) -> Tensor:
    return initial_value(_parameter(shape, shape, (), rows, kind, dtype), WHOLE, {"data": 0, "tensor": 0}, seed)


LAYOUTS: tuple[tuple[Layout, tuple[int, ...]], ...] = (
    ((("tensor.kv", "V0"), ("tensor.rep", "V0")), (2, 12)),
    ((("tensor.kv", "V1"), ("tensor.rep", "R")), (12, 6)),
    ((("data", "V0"), ("tensor.kv", "V1"), ("tensor.rep", "V0")), (2, 6)),
    ((("context", "R"), ("tensor.kv", "R")), (12, 12)),
)


@pytest.mark.parametrize("kind", ["normal:0.02", "power_of_two"])
@pytest.mark.parametrize(("layout", "local"), LAYOUTS)
def test_pieces_are_cut_from_the_whole(layout: Layout, local: tuple[int, ...], kind: str) -> None:
    whole = _whole((12, 12), kind)
    assert len(whole.unique()) > 3
    for rank in range(SPLIT.world_size):
        coordinates = SPLIT.coordinates(rank)
        piece = initial_value(_parameter((12, 12), local, layout, None, kind, "f64"), SPLIT, coordinates, 4)
        expected = whole
        for dim in (0, 1):
            for factor, state in layout:  # outer factors first: each halves what the one before left
                if state == f"V{dim}":
                    expected = expected.chunk(SPLIT.size(factor), dim)[coordinates[factor]]
        assert torch.equal(piece, expected)


def test_padding_rows_are_zero_and_change_nothing_else() -> None:
    whole, padded = _whole((10, 4), "normal:1"), _whole((16, 4), "normal:1", rows=10)
    assert torch.equal(padded[:10], whole) and not padded[10:].any()
    mesh = Mesh((("tensor", 4),))
    for rank in range(4):
        parameter = _parameter((16, 4), (4, 4), (("tensor", "V0"),), 10, "normal:1", "f64")
        assert torch.equal(initial_value(parameter, mesh, {"tensor": rank}, 4), padded[4 * rank : 4 * rank + 4])
    assert torch.equal(_whole((16, 4), "ones", rows=10).sum(), torch.tensor(40.0).double())


def test_narrow_dtypes_are_rounded_from_the_same_draws() -> None:
    exact = _whole((30, 7), "normal:0.5")
    assert torch.equal(_whole((30, 7), "normal:0.5", dtype="f32"), exact.float())
    assert torch.equal(_whole((30, 7), "normal:0.5", dtype="bf16"), exact.bfloat16())


def test_normal_has_the_standard_deviation_across_chunks() -> None:
    drawn = _whole((600, 1000), "normal:0.02")
    assert abs(float(drawn.std()) / 0.02 - 1) < 5e-3 and abs(float(drawn.mean())) < 2e-4
    assert len(drawn.unique()) == drawn.numel()


def test_seed_and_name_give_other_numbers() -> None:
    assert not torch.equal(_whole((4, 4), "normal:1"), _whole((4, 4), "normal:1", seed=5))


def test_powers_of_two_are_exact_in_every_dtype() -> None:
    assert set(_whole((40, 40), "power_of_two", dtype="bf16").unique().tolist()) == {-1.0, -0.5, 0.5, 1.0}
    assert set(_whole((40, 40), "power_of_two:0.25").unique().tolist()) == {-0.25, -0.125, 0.125, 0.25}


def test_constants() -> None:
    assert torch.equal(_whole((5,), "ones"), torch.ones(5).double())
    assert not _whole((5,), "zeros").any()


def test_unknown_initializer_is_named() -> None:
    with pytest.raises(ValueError, match=r"layers\.3\.x\.weight has the initializer xavier"):
        _whole((5,), "xavier")
