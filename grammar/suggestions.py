"""Did you mean: the names of a scope that are nearest to a misspelt one."""

from __future__ import annotations

from collections.abc import Iterable


def nearest_names(word: str, candidates: Iterable[str], limit: int = 3) -> tuple[str, ...]:
    """Up to `limit` candidates, best first: the same but for case, then by similarity; empty if nothing is near."""
    from difflib import SequenceMatcher, get_close_matches

    names = list(dict.fromkeys(candidates))
    word = word[:80]  # the cost is quadratic, and nobody misspells more than that
    plain = word.lower()
    same = [name for name in names if name.lower() == plain and name != word]
    close = get_close_matches(plain, list(dict.fromkeys(name.lower() for name in names)), n=limit + 2, cutoff=0.6)
    ranked = sorted(
        (name for name in names if name.lower() in close and name not in same and name != word),
        key=lambda name: -SequenceMatcher(None, plain, name.lower()).ratio(),
    )
    return tuple((same + ranked)[:limit])
