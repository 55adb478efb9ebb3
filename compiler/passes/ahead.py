"""Updates that do not wait for the norm: the optimizer steps at once, the check comes while the next step runs.

A norm over all stages joins them: the first would wait for the last to end its step, which is the bubble that split
backwards have just filled. So a step is taken as if its norm neither clips nor is infinite, its old state is kept, and
the norm is looked at after the next step's backwards. Where it does clip, or is not finite, the old state comes back
and the step is done again exactly. Four more orders say it, made of the same blocks:

    body     forwards, backwards and sums of gradients
    check    the norm and the loss: begun before `update`, waited for after the next `body`
    update   the steps ahead of the check, each of which keeps what it changes
    undo     the kept state comes back, gradients and loss are cleared
"""

from __future__ import annotations

from dataclasses import replace

from titan.compiler.passes.update import step_blocks
from titan.compiler.plan.instruction import Instruction
from titan.compiler.plan.operators import DTYPE_BYTES
from titan.compiler.plan.program import BEGUN, Block, BlockCall, Bucket, Buffer

KNOWN = ".known"  # the other half of a block, behind its wait
KEPT = 3  # parameters (or their masters) and two moments
Orders = tuple[tuple[str, tuple[BlockCall, ...]], ...]


def kept(bucket: Bucket, statistic: str, degree: int) -> Buffer:
    """What a rank must keep to take a step back."""
    assert DTYPE_BYTES[statistic] >= 4
    return Buffer(f"k.{bucket.name}", "kept", statistic, KEPT * bucket.local("o", degree))


def ahead(
    buckets: tuple[Bucket, ...], closing: tuple[BlockCall, ...], norm: Block, end: Block
) -> tuple[tuple[Block, ...], Orders]:
    """Blocks and orders of one role, but for its body; `closing` are the calls that end its exact order, `norm` and
    `end` the blocks of it that find the norm and tell the loss."""
    blocks = [*_halves(norm, "all_reduce"), *_halves(end, "broadcast")]
    check = [BlockCall(block.name) for part in (BEGUN, KNOWN) for block in blocks if block.name.endswith(part)]
    for bucket in buckets:
        blocks += [_taken(block, bucket) for block in step_blocks(bucket)]
    tails = [BlockCall(call.block) for call in closing if call.block.startswith("gathered.")]
    update = (*(BlockCall(f"ahead.{b.name}") for b in buckets), *tails)
    undo = (*(BlockCall(f"undo.{b.name}") for b in buckets), *tails)
    undone = [_undone(block, bucket) for bucket in buckets for block in step_blocks(bucket)]
    cleared = tuple(i for i in end.instructions if i.opcode == "zero_grad")  # the next body has added to the loss
    if cleared:
        undone.append(Block("undo.loss", (), cleared))
        undo = (BlockCall("undo.loss"), *undo)
    found = [block for block in (*blocks, *undone) if not block.name.startswith("gathered.")]
    return tuple(found), (("check", (*check, BlockCall("stepped"))), ("update", update), ("undo", undo))


def _halves(block: Block, opcode: str) -> tuple[Block, ...]:
    """A block up to the wait for its last collective of a kind, and from there on; all of it where it has none."""
    issued = [n for n, i in enumerate(block.instructions) if i.opcode == opcode]
    token = block.instructions[issued[-1]].writes if issued else ("",)  # not (): some instructions read nothing
    at = next((n for n, i in enumerate(block.instructions) if i.reads == token), len(block.instructions))
    parts = ((BEGUN, block.instructions[:at]), (KNOWN, block.instructions[at:]))
    return tuple(replace(block, name=block.name + part, instructions=found) for part, found in parts if found)


def _taken(block: Block, bucket: Bucket) -> Block:
    """A step without the norm, which keeps what it changes."""
    name = bucket.name
    step = Instruction(
        "optimizer_step", (), (f"g.{name}",), (f"p.{name}", f"o.{name}", f"k.{name}"), attributes=(("moment", "ahead"),)
    )
    return _with(block, "ahead", step)


def _undone(block: Block, bucket: Bucket) -> Block:
    name = bucket.name
    step = Instruction(
        "optimizer_step", (), (f"k.{name}",), (f"p.{name}", f"o.{name}"), attributes=(("moment", "undo"),)
    )
    return _with(block, "undo", step)


def _with(block: Block, word: str, step: Instruction) -> Block:
    if not block.name.startswith("step."):
        return block
    instructions = tuple(step if i.opcode == "optimizer_step" else i for i in block.instructions)
    return replace(block, name=block.name.replace("step.", f"{word}.", 1), instructions=instructions)
