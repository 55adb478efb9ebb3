"""One handler per opcode: binds an instruction to an action before the first step."""

from __future__ import annotations

from collections.abc import Callable

from titan.compiler.plan.instruction import Instruction
from titan.runtime.handlers import collective, compute, data, host, memory, parameter, transfer
from titan.runtime.handlers.binding import Action, Binding

Handler = Callable[[Binding, Instruction], Action]

HANDLERS: dict[str, Handler] = {
    "load_batch": data.load_batch,
    "report": data.report,
    "forward": compute.forward,
    "recompute": compute.recompute,
    "backward": compute.backward,
    "backward_input": compute.backward_input,
    "backward_weight": compute.backward_weight,
    "loss": compute.loss,
    "add": compute.add,
    "all_gather": collective.all_gather,
    "reduce_scatter": collective.reduce_scatter,
    "all_reduce": collective.all_reduce,
    "all_to_all": collective.all_to_all,
    "broadcast": collective.broadcast,
    "send": transfer.send,
    "recv": transfer.recv,
    "offload": host.offload,
    "prefetch": host.prefetch,
    "wait": memory.wait,
    "free": memory.free,
    "watermark": memory.watermark,
    "unshard": parameter.unshard,
    "open_grad": parameter.open_grad,
    "reduce_grad": parameter.reduce_grad,
    "grad_norm": parameter.grad_norm,
    "optimizer_step": parameter.optimizer_step,
    "zero_grad": parameter.zero_grad,
}
