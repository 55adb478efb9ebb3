"""Compact text of a program's order: runs and repeated patterns of block calls.

unshard.l0 unshard.l1           calls
F.c0(0..3)                      the same block with rising micro-batches
12 x F.c0(4) B.c0(0)            the pattern 12 times, every micro-batch one higher each time
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import add, sub

from titan.compiler.plan.program import BlockCall

_LONGEST_PATTERN = 4
_LINE = 100
_INDENT = "  "
_MOST_CALLS = 1 << 22


def order_lines(calls: tuple[BlockCall, ...]) -> list[str]:
    """Indented lines of an order; `read_calls` reads each back."""
    lines: list[str] = []
    position = 0
    for start, period, times in _repetitions(calls):
        lines += _wrap(calls[position:start])
        position = start + period * times
        lines.append(_pattern_text(calls[start : start + period], times))
    return lines + _wrap(calls[position:])


def _repetitions(calls: tuple[BlockCall, ...]) -> Iterator[tuple[int, int, int]]:
    """(start, period, times) of every repeated pattern, one after the other: from where the first starts the one that
    covers most calls, of equal ones the shortest."""
    numbers, periods = _numbers(calls), range(1, _LONGEST_PATTERN + 1)
    # by period: whether the call that stands so much later is the same one micro-batch on
    follows = [bytes(map((1).__eq__, map(sub, numbers[period:], numbers))) for period in periods]
    position, starts = 0, [0] * len(periods)
    while True:
        for n, period in enumerate(periods):
            if starts[n] <= position:
                found = follows[n].find(b"\1" * period, position)
                starts[n] = found if found >= 0 else len(calls)
        start = min(starts)
        if start == len(calls):
            return
        best = (1, 1)
        for n, period in enumerate(periods):
            if starts[n] == start:
                end = follows[n].find(b"\0", start)
                times = ((end if end >= 0 else len(follows[n])) - start) // period + 1
                if times * period > best[0] * best[1]:
                    best = (period, times)
        yield start, *best
        position = start + best[0] * best[1]


def _numbers(calls: tuple[BlockCall, ...]) -> list[int]:
    """A number for each call: one more for the same block with all its micro-batches one higher, for no other."""
    kinds = [c.block if len(c.arguments) == 1 else _kind(c) for c in calls]
    firsts = [c.arguments[0] if c.arguments else 0 for c in calls]
    apart = 2 + 2 * max(map(abs, firsts), default=0)
    table = {kind: number * apart for number, kind in enumerate(dict.fromkeys(kinds))}
    return list(map(add, map(table.__getitem__, kinds), firsts))


def _kind(call: BlockCall) -> tuple[object, ...]:
    """What calls that follow each other have in common: the block, and how far its micro-batches are apart."""
    return (call.block, *(a - call.arguments[0] for a in call.arguments))


def _call_text(call: BlockCall) -> str:
    arguments = call.arguments
    if len(arguments) == 1:  # nearly all
        return f"{call.block}({arguments[0]})"
    return str(call) if arguments else call.block


def _pattern_text(pattern: tuple[BlockCall, ...], times: int) -> str:
    if len(pattern) == 1 and len(pattern[0].arguments) == 1:
        first = pattern[0].arguments[0]
        return f"  {pattern[0].block}({first}..{first + times - 1})"
    return f"  {times} x {' '.join(map(_call_text, pattern))}"


def _wrap(calls: tuple[BlockCall, ...]) -> list[str]:
    """Lines of calls that stand alone, as many in each as it has room for."""
    text = " ".join(map(_call_text, calls))
    lines, start, room = [], 0, _LINE - len(_INDENT)
    while len(text) - start > room:
        end = text.rfind(" ", start, start + room + 1)
        end = end if end >= 0 else text.find(" ", start)  # one call that is longer than a line
        if end < 0:
            break
        lines.append(_INDENT + text[start:end])
        start = end + 1
    return [*lines, _INDENT + text[start:]] if text else lines


def read_calls(line: str) -> list[BlockCall]:
    """Block calls of one line. Raises ValueError on anything else."""
    words = line.split()
    if len(words) > 2 and words[1] == "x":
        times, pattern = int(words[0]), [call for piece in words[2:] for call in _read_call(piece)]
        if not 0 < times * len(pattern) <= _MOST_CALLS:
            raise ValueError(f"a pattern repeated {times} times")
        return [BlockCall(c.block, tuple(a + n for a in c.arguments)) for n in range(times) for c in pattern]
    return [call for piece in words for call in _read_call(piece)]


def _read_call(piece: str) -> list[BlockCall]:
    block, mark, inside = piece.partition("(")
    if not mark:
        return [BlockCall(block)]
    if not inside.endswith(")") or not block:
        raise ValueError(f"not a block call: {piece}")
    first, dots, last = inside[:-1].partition("..")
    if not dots:
        return [BlockCall(block, tuple(map(int, first.split(","))))]
    if not 0 <= int(last) - int(first) < _MOST_CALLS:
        raise ValueError(f"not a range of micro-batches: {piece}")
    return [BlockCall(block, (n,)) for n in range(int(first), int(last) + 1)]
