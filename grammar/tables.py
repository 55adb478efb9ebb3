"""The LALR(1) table of `titan.lark`: built by lark, kept as text in `parse_table.py`: no start pays for lark.

`python -m titan.grammar.tables` writes `parse_table.py` anew. When the kept table is not that of `titan.lark` (somebody
just edited the grammar) it is built in memory instead.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any, NamedTuple

END = "$END"


class Rule(NamedTuple):
    """One alternative: `origin`, the `builder` of its node, and per symbol whether its value is kept."""

    origin: str
    builder: str
    keep: tuple[bool, ...]
    transparent: bool  # a single kept value passes through unchanged

    spliced: bool  # its list becomes part of its parent's
    passes: bool  # one symbol, transparent: nothing to do but to go on


class Table(NamedTuple):
    """`actions[state][symbol]`: a state >= 0 to shift or go to, or `~rule` to reduce; state 0 is the start."""

    rules: tuple[Rule, ...]
    actions: tuple[dict[str, int], ...]
    accepting: int


def load_table() -> Table:
    """The table of `titan.lark`, from `parse_table.py` when that is up to date."""
    from titan.grammar import parse_table

    grammar = read_grammar()
    if zlib.crc32(grammar.encode()) != parse_table.GRAMMAR:
        return build_table(grammar)
    return read_table(parse_table.RULES, parse_table.STATES, parse_table.ACCEPTING)


def read_grammar() -> str:
    return Path(__file__).with_name("titan.lark").read_text(encoding="utf-8")


def build_table(grammar: str) -> Table:
    """Let lark build the table; states are renumbered in the order of a walk from the start, so the text is stable."""
    from lark import Lark
    from lark.lexer import Lexer
    from lark.parsers.lalr_analysis import LALR_Analyzer

    class NoLexer(Lexer):
        """The scanner makes the tokens."""

        def __init__(self, conf: Any) -> None: ...

        def lex(self, lexer_state: Any, parser_state: Any) -> Any:
            return iter(())

    lark = Lark(grammar, parser="lalr", lexer=NoLexer, maybe_placeholders=False)
    analysis: Any = LALR_Analyzer(lark.parser.parser_conf)
    analysis.compute_lalr()
    raw = analysis.parse_table
    rules = sorted(
        {action for row in raw.states.values() for kind, action in row.values() if not _is_shift(kind)}, key=str
    )
    return _renumber(raw, rules)


def _is_shift(kind: Any) -> bool:
    return str(kind.name) == "Shift"


def _renumber(raw: Any, rules: list[Any]) -> Table:
    order = [raw.start_states["start"]]
    for state in order:  # grows while we walk
        shifts = sorted((symbol, target) for symbol, (kind, target) in raw.states[state].items() if _is_shift(kind))
        order.extend(dict.fromkeys(target for _, target in shifts if target not in order))
    number = {state: index for index, state in enumerate(order)}
    index_of = {rule: index for index, rule in enumerate(rules)}
    actions = tuple(
        {
            symbol: number[target] if _is_shift(kind) else ~index_of[target]
            for symbol, (kind, target) in sorted(raw.states[state].items())
        }
        for state in order
    )
    return Table(tuple(_rule(rule) for rule in rules), actions, number[raw.end_states["start"]])


def _rule(rule: Any) -> Rule:
    keep = tuple(not (symbol.is_term and symbol.filter_out) for symbol in rule.expansion)
    origin = str(rule.origin.name)
    return make_rule(origin, str(rule.alias or origin), keep, bool(rule.options.expand1) and not rule.alias)


def make_rule(origin: str, builder: str, keep: tuple[bool, ...], transparent: bool) -> Rule:
    return Rule(origin, builder, keep, transparent, origin.startswith("_"), transparent and keep == (True,))


def write_table(table: Table, grammar: str) -> str:
    """The text of `parse_table.py`."""
    rules = "\n".join(
        f"{r.origin} {r.builder} {''.join('+' if kept else '-' for kept in r.keep) or '.'} {int(r.transparent)}"
        for r in table.rules
    )
    states = "\n".join(_write_row(row) for row in table.actions)
    return (
        '"""The LALR(1) table of titan.lark, written by `python -m titan.grammar.tables`; not for editing."""\n\n'
        f"# ruff: noqa: E501\nGRAMMAR = {zlib.crc32(grammar.encode())}\nACCEPTING = {table.accepting}\n\n"
        "# origin, builder, one sign per symbol (+ kept, - dropped), whether a single value passes through\n"
        f'RULES = """\\\n{rules}\n"""\n\n'
        "# one line per state: action, then the symbols that call for it; ~n reduces by rule n\n"
        f'STATES = """\\\n{states}\n"""\n'
    )


def _write_row(row: dict[str, int]) -> str:
    symbols: dict[int, list[str]] = {}
    for symbol, action in row.items():
        symbols.setdefault(action, []).append(symbol)
    return "; ".join(f"{a if a >= 0 else f'~{~a}'} {' '.join(names)}" for a, names in symbols.items()) or "."


def read_table(rules: str, states: str, accepting: int) -> Table:
    """The reverse of `write_table`."""
    return Table(
        tuple(_read_rule(*line.split(" ")) for line in rules.splitlines()),
        tuple(_read_row(line) for line in states.splitlines()),
        accepting,
    )


def _read_rule(origin: str, builder: str, signs: str, transparent: str) -> Rule:
    return make_rule(origin, builder, tuple(s == "+" for s in signs if s != "."), transparent == "1")


def _read_row(line: str) -> dict[str, int]:
    row: dict[str, int] = {}
    for part in line.split("; ") if line != "." else ():
        action, *names = part.split(" ")
        row.update(dict.fromkeys(names, ~int(action[1:]) if action[0] == "~" else int(action)))
    return row


def main() -> None:
    grammar = read_grammar()
    Path(__file__).with_name("parse_table.py").write_text(write_table(build_table(grammar), grammar), encoding="utf-8")


if __name__ == "__main__":
    main()
