"""Calls of a body that one kernel does together: a product and what is added to it. What stands between the calls of a
chain is never formed, neither by the runtime nor in the ledger of memory."""

from __future__ import annotations

from collections import Counter

from titan.compiler.plan.segment import Call

Chain = tuple[Call, ...]
_NEXT = {("linear",): ("bias", "add"), ("linear", "bias"): ("add",)}  # operators that may follow those of a chain


def chains(body: tuple[Call, ...], made: frozenset[str]) -> tuple[Chain, ...]:
    """The body in order; calls are joined where the next alone reads what the last one makes and nobody wants it
    afterwards (`made`: values that are to be left)."""
    readers = Counter(operand for call in body for operand in call.operands)
    found: list[Chain] = []
    for call in body:
        before = found[-1] if found else ()
        value = before[-1].results[0] if before else ""
        follows = call.operator in _NEXT.get(tuple(c.operator for c in before), ()) and value in call.operands
        if follows and readers[value] == 1 and value not in made:
            found[-1] = (*before, call)
        else:
            found.append((call,))
    return tuple(found)


def chain_operands(chain: Chain) -> tuple[str, ...]:
    """What a chain reads: the operands of its first call, then what each of the others adds."""
    inside = {call.results[0] for call in chain[:-1]}
    return tuple(operand for call in chain for operand in call.operands if operand not in inside)
