"""Whole tensors from the ranks' pieces, with every copy compared bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from titan.compiler.plan.program import Bucket, Parameter, Plan
from titan.grammar.diagnostics import Diagnostic, TitanError
from titan.runtime.initial import first_elements
from titan.runtime.state import held_range, shard_range, views
from torch import Tensor

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def assemble(plan: Plan, pieces: Iterable[tuple[int, Mapping[str, Tensor]]]) -> dict[str, Tensor]:
    """(rank, local tensors by parameter name) of all ranks -> whole tensors without padding rows.

    Raises TitanError T613 naming parameter and ranks when two ranks' copies of one piece differ, or a piece is missing.
    """
    found: dict[str, dict[tuple[int, ...], tuple[int, Tensor]]] = {}
    for rank, tensors in pieces:
        coordinates = plan.mesh.coordinates(rank)
        for name, piece in tensors.items():
            starts = first_elements(plan.parameter_table[name], plan.mesh, coordinates)
            first, seen = found.setdefault(name, {}).setdefault(starts, (rank, piece))
            if not same_bits(seen, piece):
                gap = (seen.double() - piece.double()).abs().max().item()
                raise _error(f"{name}: the copies on ranks {first} and {rank} differ by up to {gap:.3g}")
    return {name: _join(plan.parameter_table[name], parts) for name, parts in found.items()}


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Equal to the bit, so that NaN equals NaN and zeros differ by sign."""
    word = _WORDS[left.element_size()]
    return torch.equal(left.contiguous().view(word), right.contiguous().view(word))


def _join(parameter: Parameter, parts: dict[tuple[int, ...], tuple[int, Tensor]]) -> Tensor:
    sample = next(iter(parts.values()))[1]
    whole = torch.zeros(parameter.shape, dtype=sample.dtype, device=sample.device)
    filled = 0
    for starts, (_, piece) in parts.items():
        whole[tuple(slice(a, a + n) for a, n in zip(starts, piece.shape, strict=True))] = piece
        filled += piece.numel()
    if filled != whole.numel():
        raise _error(f"{parameter.name}: {filled} of {whole.numel()} elements were found")
    return whole[: parameter.rows]


class Gradients:
    """Captures each rank's part of the summed gradients and puts the shards of a bucket together."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._flats: dict[tuple[int, str], Tensor] = {}

    def capture(self, rank: int) -> Callable[[str, Tensor], None]:
        def keep(bucket: str, flat: Tensor) -> None:
            self._flats[rank, bucket] = flat.clone()

        return keep

    def pieces(self) -> list[tuple[int, dict[str, Tensor]]]:
        """(rank, gradients by parameter name) of the last step, as `assemble` wants them; forgets them."""
        flats, self._flats = self._flats, {}
        found = []
        for rank, name in flats:
            bucket = self._plan.bucket_table[name]
            members = self._plan.group_members(rank, bucket.shards) if bucket.sharded else (rank,)
            held = {member: flats[member, name] for member in members}
            found.append((rank, views(self._plan, bucket, whole_bucket(self._plan, bucket, held, "g"))))
        return found


def whole_bucket(plan: Plan, bucket: Bucket, held: Mapping[int, Tensor], kind: str) -> Tensor:
    """The flat bucket of one shard group from what its members' buffers `kind` hold (of gradients only the own shards
    count, whether the buffers are whole or not); `held` is by rank."""
    if not bucket.sharded:
        (flat,) = held.values()
        return flat
    whole = next(iter(held.values())).new_empty(bucket.elements)
    for rank, flat in held.items():
        coordinates = plan.mesh.coordinates(rank)
        start, stop = shard_range(plan, bucket, coordinates)
        first, _ = held_range(plan, bucket, coordinates, kind)
        whole[start:stop] = flat[start - first : stop - first]
    return whole


def _error(message: str) -> TitanError:
    return TitanError(Diagnostic("T613", message), exit_code=1)
