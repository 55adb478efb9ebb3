"""Counter-based random numbers: published bits, distribution, and independence of how they are asked for."""

from __future__ import annotations

import math

import pytest
import torch
from titan.runtime.operators.dropout import forward, kept
from titan.runtime.place import Place
from titan.runtime.random import bits, inverse_normal, key, normal, uniform
from torch import Tensor

torch.set_num_threads(1)


def test_bits_are_splitmix64() -> None:
    """Reference output of the published generator with seed 1234567 (its state is advanced before each output)."""
    published = (
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    )
    found = [int(word) % 2**64 for word in bits(1234567, torch.arange(1, 6))]
    assert tuple(found) == published


def test_keys_differ_in_every_part() -> None:
    keys = {key(seed, word, step) for seed in range(20) for word in ("a", "b", "ab") for step in (-1, 0, 1, 2**40)}
    assert len(keys) == 20 * 3 * 4
    assert key(1, 2) != key(2, 1) and key(0) != key(0, 0)
    assert all(-(2**63) <= k < 2**63 for k in keys)


def test_uniform_fills_the_open_interval() -> None:
    drawn = uniform(key(5), torch.arange(200_000))
    assert 0 < drawn.min() < 1e-4 and 1 - 1e-4 < drawn.max() < 1
    histogram = torch.histc(drawn, 100, 0, 1)
    chi_squared = ((histogram - 2000) ** 2 / 2000).sum()
    assert abs(chi_squared - 99) < 5 * math.sqrt(2 * 99)


def test_uniform_of_neighbouring_keys_and_counters_is_uncorrelated() -> None:
    keys = torch.tensor([key(1, k) for k in range(300)]).unsqueeze(1)
    drawn = uniform(keys, torch.arange(300)) - 0.5
    for other in (drawn.roll(1, 0), drawn.roll(1, 1), drawn.t()):
        assert abs((drawn * other).mean() * 12) < 5 / 300


def test_inverse_normal_equals_torch() -> None:
    grid = torch.cat((torch.linspace(1e-6, 1 - 1e-6, 20_001, dtype=torch.float64),
                      torch.logspace(-300, -3, 1001, dtype=torch.float64)))  # fmt: skip
    torch.testing.assert_close(inverse_normal(grid), torch.special.ndtri(grid), rtol=1e-13, atol=1e-14)


def test_normal_has_the_moments() -> None:
    drawn = normal(key(9, "x"), torch.arange(400_000))
    for power, moment, spread in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(float((drawn**power).mean()) - moment) < 5 * math.sqrt(spread / 400_000)


def test_normal_does_not_depend_on_the_piece() -> None:
    whole = normal(key(3), torch.arange(1000))
    for start, stop, step in ((0, 1, 1), (17, 18, 1), (3, 1000, 7), (501, 640, 1)):
        assert torch.equal(normal(key(3), torch.arange(start, stop, step)), whole[start:stop:step])


def _mask(samples: tuple[int, ...], start: int, length: int, width: int, **place: int) -> Tensor:
    at = Place(seed=place.get("seed", 1), step=place.get("step", 2), samples=samples, layer=place.get("layer", 3))
    return kept(at, "ffn", 0.3, ((start, length),), width, torch.device("cpu"))


@pytest.mark.parametrize("width", [8, 9])
def test_dropout_masks_do_not_depend_on_the_layout(width: int) -> None:
    whole = _mask((5, 9, 2, 11), 0, 12, width)
    for rows in ((0,), (1, 3), (2, 0)):
        for start, stop in ((0, 6), (6, 12), (4, 5)):
            piece = _mask(tuple((5, 9, 2, 11)[r] for r in rows), start, stop - start, width)
            assert torch.equal(piece, whole[list(rows), start:stop])


def test_dropout_masks_differ_between_places() -> None:
    base = _mask((1, 2), 0, 16, 64)
    others = [_mask((1, 2), 0, 16, 64, **{what: 7}) for what in ("seed", "step", "layer")]
    others += [_mask((3, 4), 0, 16, 64), _mask((1, 2), 16, 16, 64)]
    for other in others:
        agreement = (base == other).double().mean()
        assert abs(agreement - (0.7**2 + 0.3**2)) < 0.06


def test_dropout_keeps_the_share_and_the_mean() -> None:
    x = torch.ones(4, 100, 500)
    out = forward({"p": 0.3, "site": "ffn"}, Place(1, 0, (0, 1, 2, 3), layer=0), x)[0]
    share = float((out != 0).double().mean())
    assert abs(share - 0.7) < 5 * math.sqrt(0.21 / x.numel())
    assert torch.equal(out[out != 0].unique(), torch.tensor([1 / 0.7]))


def test_dropout_is_off_in_evaluation() -> None:
    x = torch.randn(1, 3, 4)
    assert torch.equal(forward({"p": 0.3, "site": "ffn"}, Place(1, 0, (0,), training=False), x)[0], x)
