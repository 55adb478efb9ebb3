"""Orders taken apart: what each micro-batch meets, and what blocks are called with."""

from __future__ import annotations

from titan.compiler.plan.program import BlockCall, Role


def role_of(**orders: tuple[BlockCall, ...]) -> Role:
    return Role(0, ((),), (), (), tuple(orders.items()))


def calls(text: str) -> tuple[BlockCall, ...]:
    """`F:0 FB:1,0 end` as calls."""
    parts = (word.partition(":") for word in text.split())
    return tuple(BlockCall(name, tuple(map(int, given.split(","))) if given else ()) for name, _, given in parts)


def test_micro_batches_that_meet_the_same_are_of_one_kind() -> None:
    found = role_of(train=calls("begin F:0 F:1 F:2 B:0 B:1 last:2 end")).threads["train"]
    assert found.kinds == [("F", "B"), ("F", "last")]
    assert found.batches == {0: 0, 1: 0, 2: 1}
    assert found.given == {("begin", 0), ("F", 1), ("B", 1), ("last", 1), ("end", 0)}
    assert found.apart


def test_of_a_block_with_several_it_counts_which_one_is_met() -> None:
    found = role_of(train=calls("F:0 F+B:1,0 B:1")).threads["train"]
    assert found.kinds == [("F", ("F+B", 1)), (("F+B", 0), "B")]
    assert found.given == {("F", 1), ("F+B", 2), ("B", 1)} and found.apart
    assert not role_of(train=calls("F+B:1,1")).threads["train"].apart


def test_every_number_that_a_block_is_called_with_is_given() -> None:
    found = role_of(train=calls("F:0 F F:1,2")).threads["train"]
    assert found.given == {("F", 0), ("F", 1), ("F", 2)}


def test_an_order_that_goes_on_leaves_the_one_before_it_as_it_was() -> None:
    body = calls("F:0 F:1 B:0")
    role = role_of(body=body, train=(*body, *calls("B:1 end")), evaluate=calls("F:0"))
    assert role.legs == [("evaluate", ""), ("body", "evaluate"), ("train", "body")]
    assert role.threads["evaluate"].kinds == [("F",)] and role.threads["evaluate"].given == {("F", 1)}
    assert role.threads["body"].batches == {0: 0, 1: 1} and role.threads["body"].kinds == [("F", "B"), ("F",)]
    assert role.threads["train"].batches == {0: 0, 1: 0} and role.threads["train"].kinds == [("F", "B")]
    assert role.called("train") == ["F", "F", "B", "B", "end"]
