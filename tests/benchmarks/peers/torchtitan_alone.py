"""torchtitan's own training program on CPU with gloo, one step at a time.

torchtitan picks the accelerator with torch's private device probe and falls back to "cuda" where there is none. This
launcher answers "cpu" to that probe and gives torch.cpu the handful of memory-statistics calls that torchtitan's
monitor makes; nothing of torchtitan is changed but that its training step waits for the gate. All arguments go to
torchtitan.train.
"""

from __future__ import annotations

import os
import resource
import types
from typing import Any

import torch
import torch._utils
import torch.distributed as dist
from gate import Gate, say


def resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def stand_in() -> None:
    """CPU answers where a device is asked for; gloo has no PREMUL_SUM, which FSDP2 picks for a divisor: SUM then."""
    private: Any = torch._utils
    private._get_available_device_type = lambda: "cpu"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cpu: Any = torch.cpu
    cpu.get_device_name = lambda *a: "cpu"
    cpu.get_device_properties = lambda *a: types.SimpleNamespace(total_memory=memory, name="cpu")
    cpu.reset_peak_memory_stats = cpu.set_device = lambda *a: None
    cpu.empty_cache = lambda: None
    cpu.memory_stats = lambda *a: {"active_bytes.all.peak": resident(), "reserved_bytes.all.peak": resident()}
    cpu.get_device_capability = lambda *a: (0, 0)
    from torch.distributed.fsdp import FSDPModule

    divide: Any = FSDPModule.set_gradient_divide_factor

    def divided(self: Any, factor: float) -> None:
        divide(self, factor)
        self.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = divided  # type: ignore[method-assign]


def main() -> None:
    torch.set_num_threads(1)
    stand_in()
    import torchtitan.distributed.utils as utils
    import torchtitan.train as train

    utils.set_pg_timeouts = lambda *a, **k: None  # asks for a barrier on a numbered device, which gloo has not
    step = train.Trainer.train_step
    gates: list[Gate] = []

    def gated(self: Any, iterator: Any) -> None:
        if not gates:
            gates.append(Gate(dist.barrier))
            training = self.job_config.training
            whole = training.global_batch_size * training.seq_len
            say(ready=True, tokens=whole, parameters=sum(p.numel() for m in self.model_parts for p in m.parameters()))
        if not gates[0].enter():
            os._exit(0)
        step(self, iterator)
        gates[0].leave()

    train.Trainer.train_step = gated
    train.main(train.Trainer)


if __name__ == "__main__":
    main()
