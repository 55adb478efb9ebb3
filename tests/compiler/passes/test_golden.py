"""What each pass makes, as text under review; every plan shown is also verified and trained against autograd."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from titan.compiler.graph.build import build
from titan.compiler.graph.model_graph import ModelGraph
from titan.compiler.graph.printer import print_graph
from titan.compiler.lower import lower
from titan.compiler.passes.registry import GRAPH_PASSES, Pass, run
from titan.compiler.plan.instruction import Instruction
from titan.compiler.plan.program import Block, Plan, Role
from titan.compiler.plan.text import instruction_text, print_plan

from tests.conftest import GOLDEN
from tests.equivalence.comparison import mismatches, unproven
from tests.equivalence.configurations import Configuration, spec_of, strategy_of

torch.set_num_threads(1)
PLAN_PASSES = {"transpose", "liveness", "transfers", "update", "buckets", "zero", "overlap", "offload"}
LONGEST = 40  # lines of a golden file: what a reviewer reads

MEGATRON = Configuration(data=2, tensor=2, sequence_parallel=True)
KV_REPLICAS = Configuration(tensor=4, sequence_parallel=True, family="kv_few")
GPT2 = Configuration(tensor=2, family="gpt2", tied=True, odd=True)
GATHERED = Configuration(data=2, context=2)
EXCHANGE = Configuration(context=2, context_form="heads")
STAGES = Configuration(tensor=2, pipeline=3, stages="ends", sequence_parallel=True)
RECOMPUTE = Configuration(tensor=2, pipeline=3, stages="ends", sequence_parallel=True, recompute="full")
SELECTIVE = Configuration(pipeline=3, stages="ends", recompute="selective")
ADAPTIVE = Configuration(pipeline=3, stages="ends", recompute="adaptive")
GRADIENTS = Configuration(data=2, pipeline=3, stages="ends", zero=2)
SHARDS = Configuration(data=2, pipeline=3, stages="ends", zero=3)
SPLIT = Configuration(pipeline=3, stages="ends", schedule="zero_bubble_h1", family="gpt2")
KV_ONE = Configuration(tensor=2, pipeline=3, stages="ends", sequence_parallel=True, family="kv_one")
TIED = Configuration(data=2, pipeline=2, tied=True, zero=1)

AWAY = Configuration(pipeline=3, stages="ends", offload="both", recompute="full")
RING = Configuration(context=2, context_form="ring")

GRAPHS: dict[str, tuple[str, Configuration, str]] = {  # golden file -> (pass, configuration, part)
    "data/layer": ("data", MEGATRON, "s"),
    "context/gathered": ("context", GATHERED, "s"),
    "context/heads": ("context", EXCHANGE, "s"),
    "tensor/layer": ("tensor", MEGATRON, "s"),
    "tensor/kv_replicas": ("tensor", KV_REPLICAS, "s"),
    "tensor/head": ("tensor", GPT2, "head"),
    "sequence/layer": ("sequence", MEGATRON, "s"),
    "layouts/layer": ("layouts", MEGATRON, "s"),
    "layouts/kv_replicas": ("layouts", KV_REPLICAS, "s"),
    "layouts/head": ("layouts", GPT2, "head"),
    "layouts/gathered": ("layouts", GATHERED, "s"),
    "layouts/heads": ("layouts", EXCHANGE, "s"),
    "ring/layer": ("ring", RING, "s"),
    "layouts/ring": ("layouts", RING, "s"),
    "recompute/notes": ("recompute", Configuration(recompute="full"), "s"),
    "segments/layer": ("segments", MEGATRON, "s"),
    "segments/gpt2": ("segments", GPT2, "s"),
}


@dataclass(frozen=True)
class Shown:
    """A piece of a plan: of one role the blocks that are chosen, and which of their instructions."""

    configuration: Configuration
    text: Callable[[Plan], str]


def _blocks(role: Role, wanted: tuple[str, ...], leave_out: tuple[str, ...] = ()) -> str:
    """Blocks whose name starts with one of the words."""
    chosen = [block for block in role.blocks if block.name.startswith(wanted)]
    return "\n".join(_block(block, leave_out) for block in chosen)


def _block(block: Block, leave_out: tuple[str, ...]) -> str:
    shown = [_line(index, i) for index, i in enumerate(block.instructions) if i.opcode not in leave_out]
    return "\n".join((f"block {block.name}({', '.join(block.parameters)})", *shown))


def _line(index: int, instruction: Instruction) -> str:
    return f"{index:4}  {instruction_text(instruction)}"


def _calls(role: Role, order: str) -> str:
    return f"order {order}\n  " + "\n  ".join(map(str, role.order(order)))


def _updates(plan: Plan) -> str:
    names = ("reduce.embed", "reduced.embed", "norm", "step.embed", "stepped", "gathered.embed", "end")
    return _blocks(plan.roles[0], names)


def _buckets(plan: Plan) -> str:
    return "\n".join(x for x in print_plan(plan).splitlines() if x.startswith(("bucket ", "parameter ")))


PLANS = {
    "transpose/layer": Shown(STAGES, lambda plan: _blocks(plan.roles[1], ("B.",), ("free",))),
    "transpose/recompute": Shown(RECOMPUTE, lambda plan: _blocks(plan.roles[1], ("B.",), ("free",))),
    "transpose/split": Shown(SPLIT, lambda plan: _blocks(plan.roles[1], ("I.", "W."), ("free",))),
    "transpose/kv_one": Shown(KV_ONE, lambda plan: _blocks(plan.roles[1], ("B.",), ("free",))),
    "transpose/heads": Shown(EXCHANGE, lambda plan: _blocks(plan.roles[0], ("B.c0.last",), ("free",))),
    "liveness/embedding": Shown(STAGES, lambda plan: _blocks(plan.roles[0], ("F.", "begin"))),
    "liveness/head": Shown(STAGES, lambda plan: _blocks(plan.roles[2], ("F.", "begin"))),
    "liveness/forward": Shown(STAGES, lambda plan: _blocks(plan.roles[1], ("F.",))),
    "liveness/evaluate": Shown(STAGES, lambda plan: _blocks(plan.roles[1], ("E.",))),
    "transfers/middle": Shown(STAGES, lambda plan: _blocks(plan.roles[1], ("recv.", "sent."))),
    "transfers/order": Shown(STAGES, lambda plan: _calls(plan.roles[1], "train")),
    "recompute/selective": Shown(SELECTIVE, lambda plan: _blocks(plan.roles[1], ("F.", "B."))),
    "recompute/adaptive": Shown(ADAPTIVE, lambda plan: _blocks(plan.roles[1], ("F.", "B."))),
    "zero/gradients": Shown(GRADIENTS, lambda plan: _blocks(plan.roles[1], ("F.", "B.", "reduce", "step.", "gather"))),
    "zero/parameters": Shown(
        SHARDS, lambda plan: _blocks(plan.roles[1], ("F.c1.to_B", "B.c1.to_F", "reduce", "step."))
    ),
    "overlap/forward": Shown(SHARDS, lambda plan: _blocks(plan.roles[1], ("gather.", "F.", "E."), ("wait", "free"))),
    "overlap/order": Shown(SHARDS, lambda plan: _calls(plan.roles[1], "train")),
    "offload/activations": Shown(AWAY, lambda plan: _blocks(plan.roles[1], ("F.c1.to_B", "B.c1.to_B", "stow.c"))),
    "offload/optimizer": Shown(AWAY, lambda plan: _blocks(plan.roles[0], ("fetch", "step.", "stow"))),
    "offload/order": Shown(AWAY, lambda plan: _calls(plan.roles[1], "train")),
    "update/tied_zero": Shown(TIED, _updates),
    "buckets/tied_zero": Shown(TIED, _buckets),
    "buckets/kv_replicas": Shown(KV_REPLICAS, _buckets),
}


@cache
def sound(configuration: Configuration) -> bool:
    """The plan of a configuration passes all proofs and trains like one process."""
    assert unproven(lower(spec_of(configuration), strategy_of(configuration))) == []
    assert mismatches(configuration) == []
    return True


def after(configuration: Configuration, name: str) -> ModelGraph:
    """The graph right after a pass."""
    spec, strategy = spec_of(configuration), strategy_of(configuration)
    attention = spec.model.attention
    kept: dict[str, ModelGraph] = {}

    def keep(step: Pass, before: ModelGraph, now: ModelGraph) -> None:
        kept[step.__name__] = now

    run(build(spec, strategy, strategy.mesh(attention.kv_heads if attention else 1)), strategy, watch=keep)
    return kept[name]


@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_after_a_pass(name: str, golden: Callable[[str], Callable[[str], None]]) -> None:
    step, configuration, part = GRAPHS[name]
    text = print_graph(after(configuration, step), step, (part,))
    assert len(text.splitlines()) <= LONGEST
    golden(f"passes/{name}.expect")(text)
    assert sound(configuration)


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_after_a_pass(name: str, golden: Callable[[str], Callable[[str], None]]) -> None:
    shown = PLANS[name]
    text = shown.text(lower(spec_of(shown.configuration), strategy_of(shown.configuration)))
    assert 0 < len(text.splitlines()) <= LONGEST
    golden(f"passes/{name}.expect")(text)
    assert sound(shown.configuration)


ELSEWHERE = ("expert/exchange",)  # of plans that are proved but not run yet: `test_expert.py`


def test_every_pass_has_a_golden_folder() -> None:
    passes = {step.__name__ for step in GRAPH_PASSES} | PLAN_PASSES
    assert {name.split("/")[0] for name in (*GRAPHS, *PLANS, *ELSEWHERE)} == passes
    assert {folder.name for folder in (GOLDEN / "passes").iterdir()} == passes


def test_no_golden_file_is_left_over() -> None:
    written = {str(file.relative_to(GOLDEN / "passes")) for file in (GOLDEN / "passes").rglob("*.expect")}
    assert written == {f"{name}.expect" for name in (*GRAPHS, *PLANS, *ELSEWHERE)}
