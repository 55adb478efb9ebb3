"""What a mask leaves of attention, against the mask itself, position by position."""

from __future__ import annotations

from itertools import product

import pytest
from titan.compiler.plan.mask import band_pairs, sees, squares
from titan.compiler.plan.sequence import held, needed_steps

RUNS = tuple(product((0, 1, 5, 9), (1, 2, 4, 7, 19)))


def visible(queries: tuple[int, int], keys: tuple[int, int], window: int) -> list[tuple[int, int]]:
    """Pairs of position that a causal mask with a window leaves."""
    pairs = product(range(queries[0], sum(queries)), range(keys[0], sum(keys)))
    return sorted((q, k) for q, k in pairs if k <= q and (not window or q - k < window))


@pytest.mark.parametrize("window", [0, 1, 2, 3, 4, 6, 30])
def test_squares_are_the_band(window: int) -> None:
    for queries, keys in product(RUNS, RUNS):
        found = []
        for s in squares(queries, keys, window):
            on = (s.repeats - 1) * s.stride
            assert s.query >= 0 and s.query + on + s.queries <= queries[1]
            assert s.key >= 0 and s.key + on + s.keys <= keys[1]
            for n, i, j in product(range(s.repeats), range(s.queries), range(s.keys)):
                if (not s.causal or j <= i) and (not s.late or j >= i):
                    found.append((queries[0] + s.query + n * s.stride + i, keys[0] + s.key + n * s.stride + j))
        assert sorted(found) == visible(queries, keys, window)
        assert len(tuple(squares(queries, keys, window))) <= 9  # kernels do not grow with the sequence
        assert sees(queries, keys, window) == bool(found)


@pytest.mark.parametrize("window", [0, 1, 8, 64, 100])
def test_pairs_of_the_pieces_are_those_of_the_whole(window: int) -> None:
    """S W - W^2 / 2 with a window, S^2 / 2 without: diagonals count half."""
    length, part = 96, 16
    pieces = [(start, part) for start in range(0, length, part)]
    total = sum(band_pairs(q, k, window) for q, k in product(pieces, pieces))
    reach = min(window or length, length)
    assert total == length * reach - reach**2 / 2
    exact = len(visible((0, length), (0, length), window))
    assert abs(total - exact) <= length / 2


@pytest.mark.parametrize("ring", [2, 3, 4, 8])
@pytest.mark.parametrize("zigzag", [False, True])
def test_needed_steps_are_those_in_which_a_rank_sees_a_key(ring: int, zigzag: bool) -> None:
    length = 4
    blocks = [held(rank, ring, zigzag, length) for rank in range(ring)]
    for window in range(ring * length + 1):
        near = {
            (a - b) % ring
            for a, b in product(range(ring), range(ring))
            if any(visible(q, k, window) for q in blocks[a] for k in blocks[b])
        }
        wanted = sorted(near) if window else list(range(ring))
        assert list(needed_steps(ring, zigzag, length, window)) == wanted
