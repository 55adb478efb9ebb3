"""The opcodes: one row each. Every reader of a plan (verifier, simulator, printer, interpreter) goes by this table."""

from __future__ import annotations

from titan.compiler.plan.frozen import dataclass


@dataclass(frozen=True, slots=True)
class Opcode:
    """`kind` is compute, collective, transfer, host, parameter, memory or data; `asynchronous` ones write a pending
    register and complete at a `wait`; `unit` says that a segment is named; `copies`: what is read is copied at once,
    so that nothing stays borrowed until the wait."""

    name: str
    kind: str
    meaning: str
    asynchronous: bool = False
    unit: bool = False
    copies: bool = False


_ROWS = (
    Opcode(
        "load_batch", "data",
        "read this rank's slice of the micro-batch: what=tokens|labels, or what=count: valid labels of the whole step",
    ),
    Opcode(
        "forward", "compute",
        "outputs, frame <- inputs, parameters: run the segment; no frame written, none saved", unit=True,
    ),
    Opcode(
        "recompute", "compute",
        "dropped values <- stored ones, parameters: run what the tier says of the segment again", unit=True,
    ),
    Opcode(
        "backward", "compute",
        "input gradients <- output gradients, kept values, frame; adds weight gradients in place", unit=True,
    ),
    Opcode(
        "backward_input", "compute",
        "input gradients, weight frame <- output gradients, kept values, frame (dgrad)", unit=True,
    ),
    Opcode("backward_weight", "compute", "adds weight gradients in place <- weight frame (wgrad)", unit=True),
    Opcode("loss", "compute", "adds the micro-batch's share of the loss to the step's loss buffer"),
    Opcode("add", "compute", "sum <- two gradients of one value"),
    Opcode("all_gather", "collective", "whole <- shards along dim", asynchronous=True),
    Opcode("reduce_scatter", "collective", "shard along dim <- sum of partial values", asynchronous=True),
    Opcode("all_reduce", "collective", "sum or maximum <- partial values", asynchronous=True),
    Opcode("all_to_all", "collective", "sharded along concat dim -> sharded along split dim", asynchronous=True),
    Opcode("broadcast", "collective", "the value of member `root`", asynchronous=True, copies=True),
    Opcode(
        "send", "transfer",
        "to the rank `peer` further on the axis; the value is borrowed until the wait", asynchronous=True,
    ),
    Opcode("recv", "transfer", "from the rank `peer` further on the axis", asynchronous=True),
    Opcode(
        "offload", "host",
        "host copy <- register, or optimizer state back into its buffer on the host; borrowed until the wait",
        asynchronous=True,
    ),
    Opcode("prefetch", "host", "register <- host copy, or a buffer on the host", asynchronous=True),
    Opcode(
        "wait", "memory",
        "turns a pending register into a value; of a send or an in-place collective: ends the borrowing",
    ),
    Opcode("free", "memory", "ends the life of registers"),
    Opcode(
        "watermark", "memory",
        "chooses the recompute tier of a layer's frame by the memory that is free; begin: the one to begin with",
    ),
    Opcode(
        "unshard", "parameter",
        "all-gathers a parameter bucket: in place, or from the shard in its buffer into a register",
        asynchronous=True,
    ),
    Opcode("open_grad", "parameter", "a whole gradient bucket of zeros, for what one micro-batch adds"),
    Opcode(
        "reduce_grad", "parameter",
        "sums a gradient bucket: in place (mode=all_reduce, reduce_scatter into the own shard, or all_reduce_shard "
        "of the own shard), or scatters the sum of whole gradients and adds it to the shard in the buffer",
        asynchronous=True,
    ),
    Opcode("report", "data", "hands a scalar register to the log under `name`"),
    Opcode("grad_norm", "parameter", "sum of squares of the gradients that this rank counts"),
    Opcode("optimizer_step", "parameter", "clips by the norm and updates parameters and optimizer state of a bucket"),
    Opcode("zero_grad", "parameter", "sets a gradient bucket to zero"),
)  # fmt: skip

OPCODES: dict[str, Opcode] = {row.name: row for row in _ROWS}
ASYNCHRONOUS = frozenset(row.name for row in _ROWS if row.asynchronous)
