"""Pipeline orders in and out as PyTorch's table of actions: a row per rank, cells `[stage][kind][micro-batch]`.

Kinds F, B, I, W as here; a pair is `(0F7;7B3)OVERLAP_F_B`; an empty cell is an idle slot. Only computation is written:
the other side, like this one, derives sends and receives, gathers and sums from it. When reading, such actions are left
out. Two copies of the model cannot be written: a stage is on one rank there.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from itertools import chain

from titan.compiler.plan.program import Plan, Role
from titan.compiler.schedules.order import Element, Order, Pair
from titan.compiler.schedules.timetable import Durations, StalledOrder, timetable
from titan.compiler.schedules.wiring import parts
from titan.grammar.diagnostics import Diagnostic, Note, Span, TitanError

_ACTION = re.compile(r"(\d+)(F|B|I|W)(\d+)")
_OTHERS = re.compile(r"\d+(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)\d*")
_BLOCK = re.compile(r"(F|B|I|W)\.c(\d+)(?:\.|$)")
_PAIR = re.compile(r"\((.+);(.+)\)OVERLAP_F_B")
MOST = 1 << 22  # cells of a table


def write_order(order: Order) -> str:
    """The table of an order of one copy.

    Raises TitanError T411 when there are two copies of the model.
    """
    if order.copies > 1:
        message = f"an order of {order.copies} copies of the model cannot be written as a table of stages"
        notes = (Note("there each stage is on one rank; here stage and mirrored stage would be two"),)
        raise TitanError(Diagnostic("T411", message, nearest=("schedule = dualpipe_v",), notes=notes))
    written = io.StringIO()
    writer = csv.writer(written, lineterminator="\n")
    for items in order.ranks:
        writer.writerow([_cell(item) for item in items])
    return written.getvalue()


def _cell(item: Element | Pair) -> str:
    if isinstance(item, Pair):
        return f"({_cell(item.forward)};{_cell(item.backward)})OVERLAP_F_B"
    return f"{item.chunk}{item.phase}{item.micro_batch}"


def read_order(text: str, path: str = "order.csv") -> Order:
    """The order of a table.

    Raises TitanError T410 with the cell at fault: unknown actions, stages on two ranks or missing, something done twice
    or not at all, ranks that wait for each other.
    """
    rows = list(csv.reader(io.StringIO(text)))
    while rows and not any(cell.strip() for cell in rows[-1]):
        rows.pop()
    if not rows or sum(map(len, rows)) > MOST:
        raise _refused("the table has no action" if not rows else f"the table has more than {MOST} cells", path)
    programs = tuple(tuple(_row(row, number, path)) for number, row in enumerate(rows))
    order = Order(_placement(programs, path), programs)
    _complete(order, path)
    try:
        timetable(order, Durations.unit(len(order.placement)))
    except StalledOrder as stall:
        notes = tuple(Note(f"rank {rank} waits at {element}") for rank, element in stall.waiting[:4])
        raise _refused("the ranks wait for each other: the order cannot run to its end", path, notes=notes) from None
    return order


def _row(row: list[str], number: int, path: str) -> list[Element | Pair]:
    found: list[Element | Pair] = []
    for column, cell in enumerate(row):
        word = cell.strip()
        if not word or _OTHERS.fullmatch(word):
            continue
        paired, single = _PAIR.fullmatch(word), _ACTION.fullmatch(word)
        if single:
            found.append(_element(single))
        elif paired:
            halves = [_ACTION.fullmatch(half.strip()) for half in paired.groups()]
            found.append(_pair([_element(half) for half in halves if half], word, number, column, path))
        else:
            raise _refused(f"`{word[:40]}` is no action of a pipeline", path, number, column)
    return found


def _element(match: re.Match[str]) -> Element:
    stage, phase, micro_batch = match.groups()
    return Element(phase, int(stage), int(micro_batch))


def _pair(halves: list[Element], word: str, row: int, column: int, path: str) -> Pair:
    if len(halves) != 2 or halves[0].phase != "F" or halves[1].phase not in "BI":
        raise _refused(f"`{word[:40]}` is no pair of a forward and a backward", path, row, column)
    return Pair(halves[0], halves[1])


def _placement(programs: tuple[tuple[Element | Pair, ...], ...], path: str) -> tuple[int, ...]:
    """The rank of every stage, from where its actions stand."""
    held: dict[int, int] = {}
    for rank, items in enumerate(programs):
        for element in chain.from_iterable(map(parts, items)):
            if held.setdefault(element.chunk, rank) != rank:
                message = f"stage {element.chunk} is on ranks {held[element.chunk]} and {rank}"
                raise _refused(message, path, rank)
    missing = next((s for s in range(max(held, default=-1) + 2) if s not in held), None)
    if missing is not None and missing <= max(held, default=-1):
        raise _refused(f"stage {missing} of {max(held) + 1} is on no rank", path)
    return tuple(held[stage] for stage in sorted(held))


def _complete(order: Order, path: str) -> None:
    """Every micro-batch goes forward once through every stage, and back once, whole or as inputs and weights."""
    done = Counter(e for rank in range(len(order.ranks)) for e in order.elements(rank))
    twice = next((e for e, times in done.items() if times > 1), None)
    if twice is not None:
        raise _refused(f"{_cell(twice)} is done {done[twice]} times", path, order.placement[twice.chunk])
    micro_batches = 1 + max((e.micro_batch for e in done), default=-1)
    for chunk, rank in enumerate(order.placement):
        for i in range(micro_batches):
            whole, split = Element("B", chunk, i) in done, [Element(p, chunk, i) in done for p in "IW"]
            if Element("F", chunk, i) not in done:
                raise _refused(f"{chunk}F{i} is missing", path, rank)
            if (whole and any(split)) or not (whole or all(split)):
                raise _refused(f"micro-batch {i} goes back through stage {chunk} twice or in part", path, rank)


def _refused(
    message: str, path: str, row: int | None = None, column: int | None = None, notes: tuple[Note, ...] = ()
) -> TitanError:
    line = 1 if row is None else row + 1
    where = Span(path, line, 1, line, 1)
    at = "" if row is None else f"rank {row}" + ("" if column is None else f", cell {column}") + ": "
    return TitanError(Diagnostic("T410", f"{at}{message}", where, notes=notes))


def order_of(plan: Plan) -> Order:
    """The order that a plan's programs follow."""
    programs = tuple(_elements(role) for role in plan.roles)
    held = {
        e.chunk: role.pipeline
        for role, items in zip(plan.roles, programs, strict=True)
        for item in items
        for e in parts(item)
    }
    chunks = len(plan.setting("strategy")["stages"])
    return Order(tuple(held[c] for c in sorted(held)), programs, max(1, len(held) // chunks))


def _elements(role: Role) -> tuple[Element | Pair, ...]:
    """The elements of block calls such as `F.c0(3)`, `B.c1.last(7)` or `F.c0+B.c3(2,5)`."""
    found: list[Element | Pair] = []
    for call in role.order("train"):
        halves = [_half(name, i) for name, i in zip(call.block.split("+"), call.arguments, strict=False)]
        known = [half for half in halves if half is not None]
        if known:
            found.append(Pair(known[0], known[1]) if len(known) == 2 else known[0])
    return tuple(found)


def _half(name: str, micro_batch: int) -> Element | None:
    match = _BLOCK.match(name)
    return Element(match[1], int(match[2]), micro_batch) if match else None
