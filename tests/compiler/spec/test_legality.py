"""The rules of legality, one by one, against arithmetic done here and by brute force."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from titan.compiler.spec.degrees import AXES, tensor_degrees
from titan.compiler.spec.divisors import around, divisors, even_stages, multiples
from titan.compiler.spec.legality import RULES, check_pins, is_legal, legal
from titan.compiler.spec.pins import pinned
from titan.compiler.spec.verdicts import Verdicts
from titan.grammar.catalogue import CATALOGUE

from tests.compiler.spec.writing import Layout, codes, only, pointed_at, problems, resolved, spec_text

GOOD = Layout(pipeline=2, data=2, tensor=2, micro_batch=2, stages=(4, 4))


def test_a_good_layout_is_legal() -> None:
    spec = resolved(spec_text())
    assert legal(spec, GOOD) == () and is_legal(spec, GOOD)


MIXTURE = """model {
    vocab = 1024, hidden = 64, max_positions = 64Ki, rope = { theta = 10000 }
    attention = gqa { heads = 16, kv_heads = 16, head_dim = 16 }
    layers = 8 * moe { experts = 8, top_k = 2, ffn = 192 }
}"""


@pytest.mark.parametrize(
    ("code", "change", "settings_"),
    [
        ("T240", {"data": 1}, {}),
        ("T240", {"tensor": 4}, {}),
        ("T241", {"context": 0}, {}),
        ("T203", {"tensor": 2}, {"heads": 15, "kv_heads": 15}),
        ("T242", {"tensor": 4, "data": 1}, {"heads": 24, "kv_heads": 6}),
        ("T243", {"tensor": 2}, {"ffn": 191}),
        ("T234", {}, {"sequence": "128Ki"}),
        ("T244", {"context": 2, "data": 1}, {"sequence": "127", "model": MIXTURE}),
        ("T244", {"sequence_parallel": True}, {"sequence": "127", "model": MIXTURE}),
        ("T244", {"context": 2, "data": 1}, {"sequence": "1"}),
        ("T245", {"context": 2, "data": 1, "context_form": "heads"}, {"heads": 16, "kv_heads": 2}),
        ("T245", {"context": 2, "data": 1, "context_form": "ring", "context_heads": 2}, {"heads": 16, "kv_heads": 2}),
        ("T245", {"context": 2, "data": 1, "context_form": "ring", "context_heads": 4}, {}),
        ("T244", {"context": 2, "data": 1, "context_form": "ring"}, {"sequence": "126", "model": MIXTURE}),
        ("T258", {}, {"train": "precision = fp32, separator = 1024"}),
        ("T257", {"expert": 2}, {}),
        ("T257", {"expert_tensor": 4}, {}),
        ("T246", {"micro_batch": 3}, {}),
        ("T247", {"stages": (4, 3)}, {}),
        ("T247", {"stages": (4, 2, 2)}, {}),
        ("T248", {"stages": (8, 0)}, {}),
        ("T249", {"pipeline": 8, "data": 1, "tensor": 1, "stages": ()}, {"layers": 7}),
        ("T259", {"offload": "optimizer", "late_check": True}, {}),
        ("T224", {"zero": 4}, {}),
        ("T255", {"zero": 3, "shard": 3}, {}),
        ("T256", {"zero": 2, "reduce": "once"}, {}),
        ("T224", {"region": 2, "data": 1}, {}),
        ("T252", {"schedule": "dualpipe_v"}, {}),
        ("T252", {"chunks": 2}, {}),
        ("T253", {"schedule": "dualpipe"}, {"batch": "12"}),
        ("T249", {"schedule": "zero_bubble_v", "chunks": 2, "stages": ()}, {"layers": 3}),
    ],
)
def test_each_rule_refuses_what_breaks_it(code: str, change: dict[str, object], settings_: dict[str, object]) -> None:
    spec = resolved(spec_text(**settings_))  # type: ignore[arg-type]
    layout = replace(GOOD, **change)  # type: ignore[arg-type]
    found = legal(spec, layout)
    assert code in codes(found) and not is_legal(spec, layout)
    assert all(d.message for d in found)


def test_the_rules_have_codes_with_a_text_and_read_what_they_say() -> None:
    fields = set(Layout.__dataclass_fields__)
    for rule in RULES:
        assert rule.code in CATALOGUE and set(rule.needs) <= fields


def test_rules_read_only_the_choices_they_name() -> None:
    """`titan check` asks a rule as soon as its choices are known; it may look at nothing else."""
    spec = resolved(spec_text())
    for rule in RULES:
        seen: set[str] = set()

        class Watch:
            def __getattr__(self, name: str, seen: set[str] = seen) -> object:
                seen.add(name)
                return getattr(GOOD, name)

        rule.breach(spec, Watch())  # type: ignore[arg-type]
        assert seen <= set(rule.needs), rule.sentence


def test_verdicts_are_those_of_each_rule_asked_alone() -> None:
    """In one row, so that what was said of one strategy would be said of the next."""
    spec = resolved(spec_text())
    verdicts = Verdicts(spec, RULES)
    for degrees in itertools.product((1, 2, 3), repeat=4):
        for schedule, zero in (("one_f_one_b", 1), ("dualpipe", 2), ("interleaved", 4)):
            layout = replace(GOOD, **dict(zip(AXES, degrees)), schedule=schedule, zero=zero, stages=())  # type: ignore[arg-type]
            alone = [rule for rule in RULES if not rule.partial and rule.breach(spec, layout) is not None]
            assert verdicts.broken(layout) == alone


@given(
    heads=st.integers(1, 24),
    kv=st.integers(1, 24),
    ffn=st.integers(1, 60),
    world=st.sampled_from([1, 2, 4, 6, 8, 12, 16, 24]),
)
@settings(max_examples=60, deadline=None)
def test_tensor_degrees_are_exactly_those_that_no_rule_refuses(heads: int, kv: int, ffn: int, world: int) -> None:
    kv = max(k for k in range(1, kv + 1) if heads % k == 0)
    spec = resolved(spec_text(heads=heads, kv_heads=kv, ffn=ffn, devices=world, batch="24"))
    by_rules = [t for t in divisors(world) if is_legal(spec, Layout(tensor=t, data=world // t))]
    assert [t for t in tensor_degrees(spec) if 24 % (world // t) == 0] == by_rules


@given(st.integers(1, 60), st.integers(1, 12), st.integers(1, 12), st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_nearest_global_batches_are_the_nearest_by_search(batch: int, data: int, micro: int, other: int) -> None:
    unit = data * micro
    legal_batches = [b for b in range(1, batch + unit + 1) if b % unit == 0]
    below, above = [b for b in legal_batches if b <= batch], [b for b in legal_batches if b > batch]
    assert list(multiples(batch, unit)) == below[-1:] + above[:1]


def test_divisors_by_brute_force() -> None:
    for number in (1, 2, 12, 97, 360, 1024, 3600):
        assert list(divisors(number)) == [d for d in range(1, number + 1) if number % d == 0]
    assert around((1, 2, 4, 8), 6) == ("4", "8") and around((1, 2), 6) == ("2",) and around((), 6) == ()


def test_pins_decide_the_last_axis_and_the_pipeline() -> None:
    spec = resolved(spec_text("tensor = 2, context = 1, stages = [5, 3]", devices=8))
    assert {axis: pinned(spec)[axis] for axis in AXES} == {"pipeline": 2, "data": 2, "context": 1, "tensor": 2}
    assert check_pins(spec) == ()


@pytest.mark.parametrize(
    ("parallel", "code", "under"),
    [
        ("tensor = 3", "T203", "3"),
        ("tensor in [3, 6]", "T240", "[3, 6]"),
        ("tensor >= 9", "T240", "9"),
        ("pipeline in [4, 8]", "T249", "[4, 8]"),
        ("data = 8, micro_batch = 3", "T246", "3"),
        ("micro_batch = 7", "T246", "7"),
        ("pipeline = 2, data = 8", "T240", "8"),
        ("stages = [1, 1]", "T247", "[1, 1]"),
        ("stages = [1, 0, 1, 1]", "T248", "[1, 0, 1, 1]"),
    ],
)
def test_pins_are_refused_where_the_user_wrote_them(parallel: str, code: str, under: str) -> None:
    text = spec_text(parallel, layers=3)
    found = [d for d in problems(text) if d.severity == "error" and d.code == code]
    assert len(found) == 1, problems(text)
    assert pointed_at(found[0], text) == under


def test_a_wish_that_leaves_a_legal_degree_is_left_to_the_search() -> None:
    assert problems(spec_text("tensor in [3, 4], pipeline <= 100, context in [1, 128]")) == ()


def test_choices_that_change_nothing_are_warned_about() -> None:
    found = problems(spec_text("zero = 1, data = 1, context = 1, tensor = 1, sequence_parallel = true"))
    assert codes(found) == ["T251", "T251"] and {d.severity for d in found} == {"warning"}


def test_the_nearest_shard_degree_divides_data() -> None:
    (found,) = legal(resolved(spec_text()), replace(GOOD, zero=3, shard=3))
    assert (found.code, found.nearest) == ("T255", ("shard = 2",))
    assert legal(resolved(spec_text()), replace(GOOD, zero=3, shard=1)) == ()


@pytest.mark.parametrize(
    ("wishes", "warned"),
    [("zero = 1, gather = once", 1), ("zero = 1, reduce = once, prefetch = 2", 2), ("zero = 3, gather = once", 0)],
)
def test_choices_of_higher_zero_stages_are_warned_about(wishes: str, warned: int) -> None:
    assert codes(problems(spec_text(wishes))) == ["T251"] * warned


def test_case_zpp_02_zero_over_one_data_rank_is_warned_about() -> None:
    """S-ZPP-02: ZeRO-3 with tensor = 4 and dp = 1 is no conflict with a pipeline; it changes nothing, and says so."""
    found = problems(spec_text("zero = 3, data = 1, context = 1, pipeline = 1"))
    assert [(d.code, d.severity) for d in found] == [("T251", "warning")]
    assert "dp" in found[0].message and "1" in found[0].message


def test_even_stages_hold_every_layer_once() -> None:
    for layers in range(1, 131):
        for pipeline in range(1, layers + 1):
            stages = even_stages(layers, pipeline)
            assert len(stages) == pipeline and sum(stages) == layers and max(stages) - min(stages) <= 1


def test_every_legal_mesh_multiplies_to_the_world_and_every_other_is_refused() -> None:
    spec = resolved(spec_text(devices=8, batch="64", sequence="128"))
    for pipeline, data, context, tensor in itertools.product((1, 2, 3, 4, 8), repeat=4):
        layout = Layout(pipeline=pipeline, data=data, context=context, tensor=tensor)
        refused = "T240" in codes(legal(spec, layout))
        assert refused == (pipeline * data * context * tensor != 8)


def test_notes_lead_to_the_line_of_the_model() -> None:
    found = only(
        problems(
            spec_text(
                "tensor = 8", model="model = llama.llama3_8b with { attention.heads = 36, attention.kv_heads = 4 }"
            )
        )
    )
    assert found.code == "T203" and found.nearest == ("4",)
    note = found.notes[0]
    assert note.span is not None and "36" in note.text and note.span.path == "test.titan"
