"""Compact text of a program's order: runs and repeated patterns of block calls.

unshard.l0 unshard.l1           calls
F.c0(0..3)                      the same block with rising micro-batches
12 x F.c0(4) B.c0(0)            the pattern 12 times, every micro-batch one higher each time
"""

from __future__ import annotations

from titan.compiler.plan.program import BlockCall

_LONGEST_PATTERN = 4
_LINE = 100
_MOST_CALLS = 1 << 22


def order_lines(calls: tuple[BlockCall, ...]) -> list[str]:
    """Indented lines of an order; `read_calls` reads each back."""
    lines: list[str] = []
    loose: list[str] = []
    position = 0
    while position < len(calls):
        period, times = _repetition(calls, position)
        if times == 1:
            loose.append(_call_text(calls[position]))
            position += 1
            continue
        lines += _wrap(loose)
        loose = []
        lines.append(_pattern_text(calls[position : position + period], times))
        position += period * times
    return lines + _wrap(loose)


def _repetition(calls: tuple[BlockCall, ...], position: int) -> tuple[int, int]:
    """(period, times) of the pattern that covers most calls from here; times is 1 when nothing repeats."""
    best = (1, 1)
    for period in range(1, _LONGEST_PATTERN + 1):
        if position + period >= len(calls) or not all(c.arguments for c in calls[position : position + period]):
            break
        end = position + period
        while end < len(calls) and _follows(calls[end - period], calls[end]):
            end += 1
        times = (end - position) // period
        if times > 1 and times * period > best[0] * best[1]:
            best = (period, times)
    return best


def _follows(before: BlockCall, after: BlockCall) -> bool:
    if before.block != after.block or not after.arguments or len(before.arguments) != len(after.arguments):
        return False
    return all(b == a + 1 for a, b in zip(before.arguments, after.arguments, strict=True))


def _call_text(call: BlockCall) -> str:
    return str(call) if call.arguments else call.block


def _pattern_text(pattern: tuple[BlockCall, ...], times: int) -> str:
    if len(pattern) == 1 and len(pattern[0].arguments) == 1:
        first = pattern[0].arguments[0]
        return f"  {pattern[0].block}({first}..{first + times - 1})"
    return f"  {times} x {' '.join(map(_call_text, pattern))}"


def _wrap(words: list[str]) -> list[str]:
    lines: list[str] = []
    line = " "
    for piece in words:
        if len(line) + len(piece) >= _LINE:
            lines.append(line)
            line = " "
        line += " " + piece
    return [*lines, line] if words else lines


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
