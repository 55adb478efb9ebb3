"""Generated sources: each is drawn together with the tree that it must parse to, written by hand as nested tuples."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from titan.grammar import syntax

Pair = tuple[str, Any]  # source text, expected tree

KEYWORDS = {"import", "with", "in", "and", "of", "minimize", "maximize"}
word = st.from_regex(r"[a-z_][a-z0-9_]{0,6}", fullmatch=True).filter(lambda w: w not in KEYWORDS)
dotted = st.lists(word, min_size=1, max_size=3).map(".".join)
gap = st.sampled_from(["", " ", "  ", "\t"])
line_end = st.sampled_from(["\n", "\n\n", "\n\n\n", "  # why\n", "\n# alone\n", "\n\n   # a\n\n# b\n", "\r\n", "\t\n"])


def bare(node: Any) -> Any:
    """A tree as nested tuples, without spans."""
    if isinstance(node, syntax.Name):
        return ("Name", node.dotted)
    if isinstance(node, syntax.Quantity):
        return ("Quantity", node.value, node.dimension)
    if hasattr(node, "span"):
        return (type(node).__name__, *(bare(getattr(node, name)) for name in node._fields if name != "span"))
    return tuple(bare(item) for item in node) if isinstance(node, tuple) else node


def name_tree(text: str) -> Any:
    return ("Name", text)


names = dotted.map(lambda text: (text, name_tree(text)))
ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t"}
strings = st.text('abc #{}=,\\"\n\té東', max_size=8).map(
    lambda value: (
        '"' + "".join(ESCAPES.get(c, c) for c in value) + '"',
        ("String", value),
    )
)
UNITS = {
    "": (1, ""), "Ki": (1024, ""), "k": (1000, ""), " GiB": (2**30, "bytes"), "GB": (10**9, "bytes"),
    " kB": (1000, "bytes"), " GB/s": (10**9, "bytes/s"), " TFLOP/s": (10**12, "flop/s"),
    "Mi tokens": (2**20, "tokens"), " M tokens": (10**6, "tokens"), " h": (3600, "seconds"),
    " USD/h": (1, "money/hour"),
}  # fmt: skip
quantities = st.tuples(st.integers(0, 10**6), st.sampled_from(sorted(UNITS))).map(
    lambda pair: (f"{pair[0]}{pair[1]}", ("Quantity", pair[0] * UNITS[pair[1]][0], UNITS[pair[1]][1]))
)
atoms = st.one_of(names, strings, quantities)


@st.composite
def bracketed(draw: st.DrawFn, values: st.SearchStrategy[Pair]) -> Pair:
    """`[a, b]`, over several lines or not, or `name(a, b)`."""
    items = draw(st.lists(values, max_size=3))
    breaks = draw(st.sampled_from(["", " ", "\n", "\n# inside\n  "]))
    inner = (draw(gap) + ",").join(breaks + text for text, _ in items)
    inner += draw(st.sampled_from(["", ","])) if items else ""
    trees = tuple(tree for _, tree in items)
    if draw(st.booleans()):
        called = draw(dotted)
        return f"{called}{draw(gap)}({inner}{breaks})", ("Call", name_tree(called), trees)
    return f"[{inner}{breaks}]", ("ListOf", trees)


@st.composite
def entries(draw: st.DrawFn, values: st.SearchStrategy[Pair]) -> Pair:
    """`{ ... }` with any mixture of commas and line ends."""
    parts = draw(st.lists(st.tuples(dotted, st.sampled_from(["=", "<=", ">=", "in"]), values), max_size=4))
    text, trees = "{" + draw(st.sampled_from(["", " ", "\n", " # first\n", "\n\n"])), []
    for number, (key, relation, (value, tree)) in enumerate(parts):
        last = number == len(parts) - 1
        separator = draw(st.sampled_from(["\n", ",", ", \n", "\n\n# next\n", " # beside\n"] + [""] * last))
        text += f"{draw(gap)}{key} {relation} {value}{separator}"
        trees.append(("Entry", name_tree(key), relation, tree))
    return text + draw(gap) + "}", tuple(trees)


@st.composite
def blocks(draw: st.DrawFn, values: st.SearchStrategy[Pair]) -> Pair:
    body, trees = draw(entries(values))
    kind = draw(st.sampled_from(["block", "bare", "with"]))
    if kind == "bare":
        return body, ("Block", None, trees)
    name = draw(dotted)
    if kind == "block":
        return f"{name} {body}", ("Block", name_tree(name), trees)
    return f"{name} with {body}", ("With", name_tree(name), trees)


@st.composite
def sums(draw: st.DrawFn, values: st.SearchStrategy[Pair]) -> Pair:
    """Fully known by construction: products bind tighter, both from the left, parentheses are dropped."""
    (a, ta), (b, tb), (c, tc) = draw(st.tuples(values, values, values))
    go_on = draw(st.sampled_from([" ", "\n    ", " # more\n    "]))
    add, times = draw(st.sampled_from("+-")), draw(st.sampled_from("*/"))
    shape = draw(st.integers(0, 3))
    if shape == 0:
        return f"({a}) {add}{go_on}({b}) {times} ({c})", ("Binary", add, ta, ("Binary", times, tb, tc))
    if shape == 1:
        return f"({a}) {times} ({b}){go_on}{add} ({c})", ("Binary", add, ("Binary", times, ta, tb), tc)
    if shape == 2:
        return f"({a} {add} {b}) {times} ({c})", ("Binary", times, ("Binary", add, ta, tb), tc)
    return f"(({a}) {add} ({b}) {add} ({c}))", ("Binary", add, ("Binary", add, ta, tb), tc)


simple = st.one_of(atoms, bracketed(atoms))
expressions = st.recursive(
    atoms, lambda inner: st.one_of(bracketed(inner), blocks(inner), sums(simple)), max_leaves=8
)  # operands of sums are atoms: `1 + a = 2` must not arise


@st.composite
def statements(draw: st.DrawFn) -> Pair:
    kind = draw(st.sampled_from(["import", "entry", "section", "objective"]))
    name = draw(dotted)
    if kind == "import":
        return f"import {name}", ("Import", name_tree(name))
    if kind == "entry":
        value, tree = draw(expressions)
        return f"{name}{draw(gap)}={draw(gap)}{value}", ("Entry", name_tree(name), "=", tree)
    if kind == "section":
        body, trees = draw(entries(expressions))
        return f"{name}{draw(gap)}{body}", ("Section", name_tree(name), trees)
    limits, text = [], f"minimize {name}"
    for number in range(draw(st.integers(0, 3))):
        key, (value, tree), of = draw(dotted), draw(quantities), draw(st.one_of(st.none(), dotted))
        first, further = [" subject to ", "\n    subject to "], [", ", " and ", ",\n  ", "\n  and "]
        joint = draw(st.sampled_from(further if number else first))
        text += f"{joint}{key} <= {value}" + (f" of {of}" if of else "")
        limits.append(("Limit", name_tree(key), "<=", tree, name_tree(of) if of else None))
    return text, ("Objective", "minimize", name_tree(name), tuple(limits))


@st.composite
def sources(draw: st.DrawFn) -> Pair:
    parts = draw(st.lists(st.tuples(statements(), line_end), max_size=5))
    head = draw(st.sampled_from(["", "\n", "# head\n", "\ufeff", "\n\n  \n"]))
    return head + "".join(text + end for (text, _), end in parts), tuple(tree for (_, tree), _ in parts)
