"""One micro-batch in a role, from its first block to its last: followed, and complete at the end."""

from __future__ import annotations

from titan.compiler.plan.program import Plan, Role
from titan.compiler.verify.flow import Flow
from titan.compiler.verify.piece import Piece
from titan.compiler.verify.rings import bare
from titan.compiler.verify.units import gradient_outputs


def _complete(flow: Flow) -> None:
    """Every segment that ran forward ran backward once; every received value gave its gradient back."""
    for unit in flow.forwards:
        segment = flow.segment(unit)
        wanted = bool(gradient_outputs(segment))
        ran = flow.backwards.pop(unit, [])
        pair = ["backward_input", "backward_weight"] if segment.weight_frame else ["backward_input"]
        if wanted and ran not in (["backward"], pair):
            flow.fail(f"{unit} runs backward {len(ran)} times ({', '.join(ran) or 'never'})", "T740", flow.places[unit])
    for unit in flow.backwards:
        flow.fail(f"{unit} runs backward but never forward", "T740")
    for partial in flow.rings.becomes:
        if flow.edges(partial):
            flow.fail(f"`{partial}` is a partial result, it is read as if it were final")
    for value in flow.received.keys() - flow.returned:
        if flow.edges(value):
            flow.fail(f"the gradient of `{value}` is not given back to where it came from", "T742")


def train_flow(plan: Plan, role: Role, pieces: tuple[Piece, ...]) -> Flow:
    """Forward, recompute and backward of one micro-batch."""
    flow = Flow(plan, role)
    flow.run(pieces)
    _complete(flow)
    _rings(flow)
    return flow


def _rings(flow: Flow) -> None:
    for unit, wrong in flow.rings.steps(flow.forwards, {unit: flow.segment(unit) for unit in flow.forwards}):
        flow.fail(wrong, "T741", flow.places[unit])


def evaluate_flow(plan: Plan, role: Role, pieces: tuple[Piece, ...]) -> Flow:
    """The forward of one micro-batch in an evaluation; nothing may run backward."""
    flow = Flow(plan, role)
    flow.run(pieces)
    _rings(flow)
    for unit in flow.backwards:
        flow.fail(f"{unit} runs backward in an evaluation", "T740")
    return flow


def forward_graph(flow: Flow) -> dict[str, tuple[object, ...]]:
    """What an evaluation and a training step must have in common: producer of every forward value, by register."""
    graph: dict[str, tuple[object, ...]] = {}
    for unit, instruction in flow.forwards.items():
        segment = flow.segment(unit)
        reads = tuple(map(bare, instruction.reads[: len(segment.inputs)]))
        for number, register in enumerate(instruction.writes[: len(segment.outputs)]):
            graph[bare(register)] = (unit, number, reads)
    for result, (source, move) in flow.moves.items():
        graph[result] = (move.opcode, move.group, move.attributes, source)
    return graph
