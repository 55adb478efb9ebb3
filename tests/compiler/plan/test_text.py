from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from titan.compiler.plan.instruction import Instruction
from titan.compiler.plan.opcodes import OPCODES
from titan.compiler.plan.order_text import order_lines, read_calls
from titan.compiler.plan.program import Block, BlockCall, Plan
from titan.compiler.plan.text import PlanFileError, instruction_text, parse_plan, print_plan

from tests.compiler.plan.small_plans import one_f_one_b, two_stages

names = st.from_regex(r"[a-z]{1,3}(\.[a-z0-9]{1,4}){0,2}(:[ij])?\??", fullmatch=True)
values = st.one_of(st.integers(-(2**62), 2**62), st.floats(allow_nan=False), st.booleans(), st.text(max_size=12))
tuples = st.lists(names, max_size=3).map(tuple)


@st.composite
def instructions(draw: st.DrawFn) -> Instruction:
    opcode = draw(st.sampled_from(sorted(OPCODES)))
    return Instruction(
        opcode,
        draw(tuples),
        draw(tuples),
        draw(tuples),
        draw(st.from_regex(r"s[0-9]\.l[0-9]{1,2}", fullmatch=True)) if OPCODES[opcode].unit else "",
        draw(st.sampled_from(("", "tensor", "data*context"))),
        draw(st.sampled_from(("", "act", "tensor.gather"))),
        tuple((key, draw(values)) for key in draw(st.lists(st.sampled_from(("dim", "peer", "mode")), unique=True))),
    )


def with_listing(plan: Plan, listing: tuple[Instruction, ...]) -> Plan:
    role = replace(plan.roles[0], blocks=(Block("x", ("i",), listing),), orders=())
    return replace(plan, roles=(role, *plan.roles[1:]))


def test_round_trip_of_the_hand_written_plan() -> None:
    plan = two_stages()
    assert parse_plan(print_plan(plan)) == plan


@given(st.lists(instructions(), max_size=4).map(tuple))
def test_any_instruction_round_trips(listing: tuple[Instruction, ...]) -> None:
    plan = with_listing(two_stages(), listing)
    again = parse_plan(print_plan(plan, lambda _: "1.5 ms # and more"))
    assert again == plan
    assert [[type(v) for _, v in instruction.attributes] for instruction in again.roles[0].blocks[0].instructions] == [
        [type(v) for _, v in instruction.attributes] for instruction in listing
    ]


calls = st.lists(
    st.builds(
        BlockCall,
        st.sampled_from(("F.c0", "B.c0", "pair", "once")),
        st.lists(st.integers(0, 5), max_size=2).map(tuple),
    ),
    max_size=30,
).map(tuple)


@given(calls)
def test_any_order_round_trips(order: tuple[BlockCall, ...]) -> None:
    assert tuple(call for line in order_lines(order) for call in read_calls(line)) == order


def one_on(before: BlockCall, after: BlockCall) -> bool:
    risen = tuple(a + 1 for a in before.arguments)
    return bool(risen) and after == BlockCall(before.block, risen)


def pattern_at(order: tuple[BlockCall, ...], start: int) -> tuple[int, int]:
    """(period, times) of the pattern that covers most calls from there, counted one by one."""
    best = (1, 1)
    for period in (1, 2, 3, 4):
        end = start + period
        while end < len(order) and one_on(order[end - period], order[end]):
            end += 1
        best = max(best, (period, (end - start) // period), key=lambda found: found[0] * found[1] * (found[1] > 1))
    return best if best[1] > 1 else (1, 1)


@given(calls, st.integers(1, 6), st.integers(1, 5), calls)
def test_a_line_with_a_pattern_covers_most_calls(
    before: tuple[BlockCall, ...], times: int, period: int, after: tuple[BlockCall, ...]
) -> None:
    once = tuple(BlockCall(c.block, c.arguments or (0,)) for c in after[:period])
    risen = [BlockCall(c.block, tuple(a + n for a in c.arguments)) for n in range(times) for c in once]
    order, position = (*before, *risen, *after), 0
    for line in order_lines(order):
        here = read_calls(line)
        repeated = " x " in line or ".." in line
        for at in range(position, position + len(here)) if not repeated else ():
            assert pattern_at(order, at) == (1, 1)
        if repeated:
            at_once, rounds = pattern_at(order, position)
            assert at_once * rounds == len(here)
        position += len(here)
    assert position == len(order)


def test_one_micro_batch_on_is_a_run_and_two_are_none() -> None:
    assert order_lines(tuple(BlockCall("F", (n,)) for n in (1, 2, 3))) == ["  F(1..3)"]
    assert order_lines(tuple(BlockCall("F", (n,)) for n in (1, 3, 5))) == ["  F(1) F(3) F(5)"]
    assert order_lines((BlockCall("F", (1, 4)), BlockCall("F", (2, 5)))) == ["  2 x F(1,4)"]
    assert order_lines((BlockCall("F", (1, 4)), BlockCall("F", (2, 6)))) == ["  F(1,4) F(2,6)"]
    assert order_lines((BlockCall("F"), BlockCall("F"), BlockCall("F", (1,)))) == ["  F F F(1)"]
    assert order_lines((BlockCall("a", (9,)), BlockCall("b", (0,)))) == ["  a(9) b(0)"]  # numbers of different blocks


def test_schedules_are_a_few_lines() -> None:
    order = one_f_one_b(3, 16, 512)
    lines = order_lines(order)
    assert len(lines) <= 4
    assert tuple(call for line in lines for call in read_calls(line)) == order


def test_line_of_an_instruction() -> None:
    line = instruction_text(
        Instruction("all_gather", ("y:i?",), ("x:i",), group="tensor", stream="tensor.gather", attributes=(("dim", 1),))
    )
    assert line.split() == ["all_gather", "y:i?", "<-", "x:i", "@tensor", "!tensor.gather", "dim=1"]


def test_a_unit_where_none_belongs_is_not_printed() -> None:
    with pytest.raises(ValueError):
        instruction_text(Instruction("free", reads=("x",), unit="s0.l1"))


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ("titan plan 1", "titan plan 2", "T402"),
        ("titan plan 1", "tinat plan 1", "T401"),
        ("zero_grad", "zero_gard", "T403"),
        ("f32[64]", "f31[64]", "T403"),
        ("f32[64]", "f32[" + "9" * 5000 + "]", "T403"),
        ("pipeline=2", "pipeline=0", "T403"),
        ("data=2", "data=99999999999", "T403"),
        ("V0@data", "W0@data", "T403"),
        ("peer=1", "peer=" + "1" * 30, "T403"),
        ("F.c0(0..2)", "F.c0(0..999999999999)", "T403"),
        ("F.c0(0..2)", "F.c0(0..", "T403"),
        ("  h = linear x .w.weight", "  h = linear x", "T403"),
        ("  h = linear", "  h = lineal", "T403"),
        ("set train.sequence 4", "set train.sequence [[[[", "T403"),
        ("set train.sequence 4", "set train.sequence " + "[" * 100_000, "T403"),
        ("mesh ", "mash ", "T403"),
    ],
)
def test_malformed_text_is_refused_with_its_line(old: str, new: str, code: str) -> None:
    text = print_plan(two_stages())
    assert old in text
    with pytest.raises(PlanFileError) as caught:
        parse_plan(text.replace(old, new, 1))
    assert caught.value.code == code
    broken = text.replace(old, new, 1).split("\n")
    assert new.split("\n")[0][:20] in broken[caught.value.line - 1]


def test_damaged_text_never_ends_in_a_traceback() -> None:
    text = print_plan(two_stages())
    chance = random.Random(5)
    refused = 0
    for _ in range(1500):
        start = chance.randrange(len(text))
        length = chance.choice((0, 1, 3, 40))
        junk = "".join(chance.choice('0 1x=@#^!<-\n"\\[](){}é:?.;,') for _ in range(chance.choice((0, 1, 4))))
        try:
            parse_plan(text[:start] + junk + text[start + length :])
        except PlanFileError:
            refused += 1
    assert refused > 300
