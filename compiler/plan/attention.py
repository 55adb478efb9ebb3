"""What attention forms beside its results, square by square as the runtime computes it: copies of what a kernel cannot
read in place, and parts until they are merged or added up.

What a first square of all queries gives is what the others are merged into; gradients of a first square of all of an
operand are their sum. Sums of several squares are float32 (float64 in a float64 run). Ranks see other squares: counted
is the rank that holds most.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from titan.compiler.plan.frozen import dataclass
from titan.compiler.plan.mask import Square, squares
from titan.compiler.plan.sequence import visible
from titan.compiler.plan.tensor import DTYPE_BYTES, Attribute, TensorType, statistics_dtype

Attributes = tuple[tuple[str, Attribute], ...]


@lru_cache(1 << 12)
def attention_scratch(
    attributes: Attributes, q: TensorType, keys: TensorType, packed: bool, merged: bool, backward: bool
) -> int:
    """Bytes. `keys` are those of k and of v each, or [2, ...] of both in a ring; `packed`: inside documents, which are
    taken to be one, sample by sample; `merged`: into an earlier partial result."""
    held = _Attention(dict(attributes), q, keys, packed)
    found = (held.backward(seen) if backward else held.forward(seen, merged) for seen in held.ranks())
    return max(found, default=0)


@dataclass
class _Tally:
    live: int = 0
    most: int = 0

    def hold(self, size: int) -> None:
        self.live += size
        self.most = max(self.most, self.live)

    def need(self, size: int) -> None:
        self.most = max(self.most, self.live + size)


@dataclass(frozen=True)
class _Attention:
    attributes: dict[str, Attribute]
    q: TensorType
    keys: TensorType
    packed: bool

    @property
    def ring(self) -> bool:
        return "ring" in self.attributes

    @property
    def size(self) -> int:
        return DTYPE_BYTES[self.q.dtype]

    @property
    def wide(self) -> int:
        return DTYPE_BYTES[statistics_dtype(self.q.dtype)]

    @property
    def samples(self) -> int:
        """Samples that a kernel takes at once."""
        return 1 if self.packed else self.q.shape[0]

    @property
    def whole(self) -> Square:
        return Square(0, self.q.shape[1], 0, self.keys.shape[-2])

    def ranks(self) -> Iterator[tuple[Square, ...]]:
        """The squares of each rank that shares the sequence."""
        given, length, number = self.attributes, self.q.shape[1], self.keys.shape[-2]
        if self.ring:
            for rank in range(int(given["ring"])):
                yield visible({**given, "rank": rank}, length)
        elif not given.get("causal", True):
            yield (self.whole,)
        else:
            start = given.get("start", 0)
            for first in range(0, number, length) if isinstance(start, str) else (int(start),):
                yield tuple(squares((first, length), (0, number), int(given.get("window", 0))))

    def elements(self, square: Square, samples: int) -> tuple[int, int, int]:
        """Of queries, of keys and values together, and of the log-sum-exp."""
        rows, columns = (samples * square.repeats * n for n in (square.queries, square.keys))
        width = self.q.shape[-1]
        return rows * width, 2 * columns * self.keys.shape[-1], rows * (width // int(self.attributes["head_dim"]))

    @property
    def all(self) -> tuple[int, int, int]:
        return self.elements(self.whole, self.q.shape[0])

    def has_all(self, square: Square) -> bool:
        """Whether a square has every query of every sample at once."""
        return square.repeats == 1 and square.queries == self.q.shape[1] and self.samples == self.q.shape[0]

    def copied(self, square: Square) -> bool:
        """Whether a kernel reads copies: turned round, or several pieces of several samples as one batch."""
        return square.late or (square.repeats > 1 and self.samples > 1)

    def forward(self, seen: tuple[Square, ...], merged: bool) -> int:
        (q, _, lse), tally, rest = self.all, _Tally(), seen
        result = self.wide if self.ring and not self.attributes["final"] else self.size
        if seen and not merged and self.has_all(seen[0]):
            rest, made = seen[1:], self.wide if seen[1:] else self.size
            tally.need(self.block(seen[0]))
            tally.need((made > self.size) * (self.size + made) * q)
        else:
            made = self.wide
        tally.hold(made * q + self.wide * lse)
        for square in rest:
            tally.need(self.merging(square))
        tally.hold((made != result) * result * q)
        return tally.most - result * q - self.wide * lse

    def block(self, square: Square) -> int:
        """While its kernel runs."""
        q, kv, lse = self.elements(square, self.samples)
        return self.copied(square) * self.size * (q + kv) + self.size * q + self.wide * lse

    def merging(self, square: Square) -> int:
        """From its kernel until what it gives has been merged."""
        q, _, lse = self.elements(square, self.samples)
        result, sums = self.size * q + self.wide * lse, 2 * self.wide * lse
        widened = (self.size < self.wide) * self.wide * q
        return max(self.block(square), (1 + square.late) * result, result + sums + widened)

    def backward(self, seen: tuple[Square, ...]) -> int:
        (q, kv, _), tally = self.all, _Tally()
        made = self.size if len(seen) == 1 and not self.packed else self.wide
        missing = {"q": q} if self.ring else {"q": q, "kv": kv}
        tally.hold(self.wide * kv if self.ring else 0)
        for square in seen:
            own_q, own_kv, lse = self.elements(square, self.samples)
            parts = self.size * (own_q + own_kv)
            copies = self.copied(square) * self.size * (3 * own_q + own_kv) + square.late * self.wide * lse
            tally.need(self.wide * lse + max(copies + parts, (1 + square.late) * parts))
            tally.hold(parts)
            for name, own in (("q", own_q), ("kv", own_kv)):
                total = missing.pop(name, 0)
                taken = total == own and square.repeats == 1 and made == self.size
                tally.hold(0 if taken else made * total)
                parts -= taken * self.size * own
            tally.live -= parts
        tally.hold(made * sum(missing.values()))
        result = self.wide if self.ring else self.size
        tally.hold((made != result) * result * (q if self.ring else q + kv))
        return max(0, tally.most - result * (q + kv))
