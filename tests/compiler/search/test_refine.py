"""The last step of the search: what is near a plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from titan.compiler.search.refine import neighbours
from titan.compiler.search.space import options
from titan.compiler.spec.legality import is_legal
from titan.compiler.strategy import Strategy

from tests.compiler.search.specs import write

LAYERS = 12
ALIKE = Strategy(data=8, zero=3, micro_batches=8, stages=(LAYERS,), recompute="selective")


def test_layers_with_tiers_of_their_own_are_compared_with_none_in_every_way_to_shard(tmp_path: Path) -> None:
    spec = write(tmp_path)
    mixed = replace(ALIKE, recompute="mixed", tiers=("none", *("selective",) * (LAYERS - 1)))
    near = set(neighbours(spec, mixed))
    ways = [way for way in options(spec, mixed) if is_legal(spec, replace(ALIKE, **way))]
    assert len(ways) > 3
    for way in ways:
        assert {replace(mixed, **way), replace(ALIKE, **way, recompute="none")} <= near
    assert all((s.recompute == "mixed") == bool(s.tiers) for s in near)


def test_layers_that_are_alike_are_compared_with_every_tier(tmp_path: Path) -> None:
    spec = write(tmp_path)
    near = set(neighbours(spec, ALIKE))
    assert {replace(ALIKE, recompute=tier) for tier in ("none", "selective", "full")} <= near


def test_what_the_run_decides_stays(tmp_path: Path) -> None:
    spec = write(tmp_path, wishes="recompute = adaptive")
    for tiers in ((), ("none",) * LAYERS):
        adaptive = replace(ALIKE, recompute="adaptive", tiers=tiers)
        assert {(s.recompute, s.tiers) for s in neighbours(spec, adaptive)} == {("adaptive", tiers)}


def test_logits_may_be_kept_where_they_would_be_formed_in_pieces(tmp_path: Path) -> None:
    spec = write(tmp_path)
    pieces = replace(ALIKE, micro_batch=8, micro_batches=1, loss_rows=512)
    near = set(neighbours(spec, pieces))
    assert replace(pieces, loss_rows=0) in near
