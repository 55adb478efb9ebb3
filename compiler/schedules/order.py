"""A schedule is an order: per pipeline rank, a list of (phase, chunk, micro-batch). Nothing else.

Chunks are numbered so that chunk c feeds chunk c + 1 within one copy of the model; a bidirectional schedule has two
copies, the second numbered after the first. An element may be a pair whose instructions are to be interleaved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property, lru_cache, partial
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple, cast

from titan.compiler.plan.frozen import dataclass

if TYPE_CHECKING:
    from titan.compiler.schedules.wiring import Wiring


class Element(NamedTuple):
    """`phase` is F (forward), B (full backward), I (backward to inputs), W (backward to weights)."""

    phase: str
    chunk: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.phase}{self.chunk}.{self.micro_batch}"


ELEMENT = partial(tuple.__new__, Element)  # of a triple: half the time of an element by fields, for long orders


class Pair(NamedTuple):
    """A forward and a backward of different micro-batches, so merged that one computes while the other communicates."""

    forward: Element
    backward: Element

    def __str__(self) -> str:
        return f"{self.forward}+{self.backward}"


@dataclass(frozen=True)
class Order:
    """`ranks[r]` is what pipeline rank r does; `placement[c]` the rank that holds chunk c; `copies` of the model."""

    placement: tuple[int, ...]
    ranks: tuple[tuple[Element | Pair, ...], ...]
    copies: int = 1

    @cached_property
    def _hash(self) -> int:
        return hash((self.placement, self.ranks, self.copies))

    def __hash__(self) -> int:
        """Looked at once: what is made from an order is remembered by it, and it is long."""
        return self._hash

    @cached_property
    def chunks_per_copy(self) -> int:
        return len(self.placement) // self.copies

    @cached_property
    def wiring(self) -> Wiring:
        """Its elements numbered, with what each waits for."""
        from titan.compiler.schedules.wiring import Wiring

        return Wiring(self)

    def first(self, chunk: int) -> bool:
        """Whether a chunk is fed by data."""
        return chunk % self.chunks_per_copy == 0

    def last(self, chunk: int) -> bool:
        """Whether a chunk ends in the loss."""
        return chunk % self.chunks_per_copy == self.chunks_per_copy - 1

    @cached_property
    def paired(self) -> bool:
        """Whether any item is a pair."""
        return any(Pair in map(type, items) for items in self.ranks)

    @cached_property
    def splits(self) -> bool:
        """Whether any backward is split into one to inputs and one to weights."""
        return any(element.phase == "W" for rank in range(len(self.ranks)) for element in self.elements(rank))

    @cached_property
    def mirrored(self) -> bool:
        """Whether ranks that hold the same stages, each of another copy, do the same with them in the same order: then
        they may meet in every micro-batch."""
        if self.copies == 1:
            return False
        done: dict[tuple[int, ...], list[tuple[str, int]]] = {}
        for rank in range(len(self.ranks)):
            held = tuple(sorted({c % self.chunks_per_copy for c, place in enumerate(self.placement) if place == rank}))
            program = [(e.phase, e.chunk % self.chunks_per_copy) for e in self.elements(rank)]
            if done.setdefault(held, program) != program:
                return False
        return True

    def elements(self, rank: int) -> Iterable[Element]:
        """The elements of a rank, pairs taken apart (forward first)."""
        items = self.ranks[rank]
        if not self.paired:
            return cast("tuple[Element, ...]", items)
        return chain.from_iterable(item if isinstance(item, Pair) else (item,) for item in items)


@dataclass(frozen=True, slots=True)
class Times:
    """Times of one micro-batch on a rank's whole share of the model (1/D of it)."""

    forward: float
    backward_input: float
    backward_weight: float

    @property
    def backward(self) -> float:
        return self.backward_input + self.backward_weight

    @property
    def total(self) -> float:
        return self.forward + self.backward


Bubble = Callable[[int, Times, int], float]  # (ranks, times, chunks per rank) -> flush bubble
Place = Callable[[int, int], tuple[int, ...]]  # (ranks, chunks per rank) -> rank of every chunk, copies in turn
Frames = Callable[[int, int, int, int], float]  # (ranks, micro-batches, rank, chunks per rank) -> frames at the peak


@dataclass(frozen=True, slots=True)
class Schedule:
    """A row: `make(pipeline ranks, micro-batches)` gives the order; where the chunks are free, `make` takes them too.

    `legal(ranks, micro_batches)` is true where the schedule is defined; `rule` says so in words. A rank holds `chunks`
    chunks, or as many as wished up to `most_chunks`; `copies` of the model; `splits` backward into I and W.
    One that is written out has the `size` (ranks, micro-batches) of its table. It `fills` and drains its ranks with
    whole micro-batches of one chunk; or it `pairs` forwards and backwards, which hide each other's communication.
    `bubble` is the idle time of a step beyond what its micro-batches take in its middle (`steady` for each), with equal
    ranks and enough micro-batches; `frames` are the activations of a rank at their peak, in micro-batches of its whole
    share; `place` says where chunks lie.
    """

    name: str
    make: Callable[..., Order]
    bubble: Bubble
    frames: Frames
    place: Place
    rule: str = "any number of micro-batches"
    legal: Callable[[int, int], bool] = lambda ranks, micro_batches: micro_batches >= 1
    chunks: int = 1
    most_chunks: int = 0
    copies: int = 1
    splits: bool = False
    size: tuple[int, int] | None = None
    fills: bool = False
    pairs: bool = False
    steady: Callable[[Times], float] = attrgetter("total")  # unless phases of unequal length make ranks wait

    def takes(self, chunks: int) -> bool:
        """Whether a rank may hold this many chunks."""
        return self.chunks <= chunks <= max(self.chunks, self.most_chunks)

    def order(self, ranks: int, micro_batches: int, chunks: int = 0) -> Order:
        """The order, with `chunks` per rank (0: as many as usual)."""
        if not self.most_chunks:
            return self.make(ranks, micro_batches)
        return self.make(ranks, micro_batches, chunks or self.chunks)


def straight(ranks: int, chunks: int = 1) -> tuple[int, ...]:
    """One chunk per rank."""
    return tuple(range(ranks))


def both_ends(ranks: int, chunks: int = 1) -> tuple[int, ...]:
    """Two copies, one chunk of each per rank: one runs up the ranks, the other down."""
    return (*range(ranks), *reversed(range(ranks)))


def looped(ranks: int, chunks: int) -> tuple[int, ...]:
    """`chunks` chunks per rank, dealt round-robin."""
    return tuple(range(ranks)) * chunks


def vee(ranks: int, chunks: int = 2) -> tuple[int, ...]:
    """Two chunks per rank: down the ranks and back up, so that a rank holds the first and the last chunk."""
    return (*range(ranks), *reversed(range(ranks)))


@lru_cache(maxsize=8)
def forward_only(order: Order, micro_batches: int) -> Order:
    """The order of an evaluation: forwards of one copy, micro-batch by micro-batch.

    Of two copies each evaluates the micro-batches that it trains on.
    """
    per_copy, share = order.chunks_per_copy, micro_batches // order.copies
    held: list[list[int]] = [[] for _ in range(max(order.placement) + 1)]
    for chunk in sorted(range(len(order.placement)), key=lambda c: (c % per_copy, c)):
        held[order.placement[chunk]].append(chunk)
    programs = (
        tuple([ELEMENT(("F", c, c // per_copy * share + i)) for i in range(share) for c in chunks]) for chunks in held
    )
    return Order(order.placement, tuple(programs), order.copies)
