"""Pipeline ranks that do the same in other layers: what one of them runs is written once, and renamed for the others.

Of inner ranks the chunks are alike but for the numbers of their layers. What is written of a rank depends on nothing
else of it than what `Kind` holds, with layers counted from the rank's first; of ranks of one kind the first is written.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import TYPE_CHECKING

from titan.compiler.passes.ahead import Orders
from titan.compiler.passes.buckets import parameter_names
from titan.compiler.passes.draft import Likeness
from titan.compiler.passes.offload import Away
from titan.compiler.plan.frozen import dataclass
from titan.compiler.plan.listing import Renamed, Renaming
from titan.compiler.plan.program import Block, BlockCall, Bucket

if TYPE_CHECKING:
    from titan.compiler.passes.blocks import BlockWriter, Chunk
    from titan.compiler.passes.zero import Sharding


@dataclass(frozen=True)
class Kind:
    """What the instructions of a rank depend on beside the numbers of its layers.

    numbers   of the layers that its chunks name, in order, each by the place where it comes first
    chunks    neighbours, phases and layers of each chunk: part, tier, whether on the host, bucket of each parameter
    buckets   names, homes where there are several, and all else that is known of them but how large they are
    """

    numbers: tuple[int, ...]
    chunks: tuple[object, ...]
    buckets: tuple[tuple[object, ...], ...]


_REST = attrgetter(*(f.name for f in fields(Bucket) if f.name not in ("name", "homes", "elements")))


def phases_of(chunk: Chunk, called: Collection[str]) -> frozenset[str]:
    """The phases of a chunk that elements called `F.c0`, `B.c0` have."""
    return frozenset(phase for phase in "FBIW" if f"{phase}.c{chunk.number}" in called)


def layers_named(chunks: Sequence[Chunk]) -> list[int]:
    """Layers that the instructions of chunks name, chunk by chunk: the one after the last is what it leaves."""
    return [layer for chunk in chunks for layer in range(chunk.first, chunk.last + 1)]


def renaming(here: Sequence[Chunk], there: Sequence[Chunk]) -> Renaming:
    """From the layers of chunks to those of others of the same kind."""
    return Renaming(dict(zip(layers_named(here), layers_named(there), strict=True)).__getitem__)


@dataclass(frozen=True)
class Closing:
    """What a rank runs behind its micro-batches: blocks, their calls in a training step, and further orders of them.
    `chunks` are the rank's."""

    chunks: tuple[Chunk, ...]
    blocks: tuple[Block, ...]
    calls: tuple[BlockCall, ...]
    orders: Orders

    def renamed(self, chunks: tuple[Chunk, ...]) -> Closing:
        """The same of another rank of the kind."""
        here = renaming(self.chunks, chunks)
        name = here.name

        def called(calls: tuple[BlockCall, ...]) -> tuple[BlockCall, ...]:
            return tuple(BlockCall(name(call.block), call.arguments) for call in calls)

        blocks = tuple(
            Block(name(block.name), block.parameters, Renamed(tuple(block.instructions), here)) for block in self.blocks
        )
        return Closing(chunks, blocks, called(self.calls), tuple((word, called(calls)) for word, calls in self.orders))


@dataclass(frozen=True)
class Model:
    """A rank that is written: its chunks, the blocks of its transfers, its drafts with what is offloaded, and what
    finishes them."""

    chunks: tuple[Chunk, ...]
    transfers: tuple[Block, ...]
    away: Away
    sharding: Sharding

    def of(self, chunks: tuple[Chunk, ...]) -> tuple[tuple[Block, ...], Away]:
        """The transfers, and the drafts with what is offloaded, in the chunks of another rank of the kind."""
        like = Likeness(renaming(self.chunks, chunks), renaming(chunks, self.chunks))
        word = {f"c{one.number}": f"c{other.number}" for one, other in zip(self.chunks, chunks, strict=True)}

        def name(old: str) -> str:
            phase, _, chunk = old.rpartition(".")
            return f"{phase}.{word[chunk]}"

        def renamed(blocks: tuple[Block, ...]) -> tuple[Block, ...]:
            texts = (like.instructions(tuple(block.instructions)) for block in blocks)
            return tuple(Block(name(b.name), b.parameters, t) for b, t in zip(blocks, texts, strict=True))

        drafts = tuple(like.draft(draft, name(draft.name)) for draft in self.away.drafts)
        return renamed(self.transfers), Away(drafts, renamed(self.away.blocks))


def kind(
    chunks: Sequence[Chunk], called: Collection[str], buckets: Sequence[Bucket], writer: BlockWriter
) -> Kind | None:
    """Of a rank that runs the elements `called`. None where it has no twin: it holds more than layers, or one twice."""
    links = [link for chunk in chunks for link in chunk.chain]
    if any(layer is None for _, layer in links) or len({layer for _, layer in links}) < len(links):
        return None
    named = layers_named(chunks)
    numbers = {layer: named.index(layer) for layer in named}
    name = Renaming(numbers.__getitem__).name
    strategy, parts = writer.strategy, writer.graph.parts
    found = []
    for chunk in chunks:
        layers = tuple(
            (
                index,
                strategy.tier(layer),
                strategy.layer_on_host(layer),
                tuple(name(f"p.{writer.bucket_of[formal]}") for formal in parameter_names(parts[index], layer)),
            )
            for index, layer in chunk.chain
            if layer is not None
        )
        found.append((chunk.before, chunk.after, phases_of(chunk, called), layers))
    known = tuple((name(f"p.{b.name}"), b.homes if len(b.homes) > 1 else (), _REST(b)) for b in buckets)
    return Kind(tuple(numbers[layer] for layer in named), tuple(found), known)
