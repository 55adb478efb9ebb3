"""One rank of `test_transport`'s checks, over NCCL: `python -m tests.runtime.nccl_collectives RANK SIZE FOLDER`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from titan.runtime.transport.process_group import ProcessGroupTransport
from torch._C._distributed_c10d import FileStore

from tests.runtime import test_transport as checks

WITHIN = {torch.bfloat16: 2e-2, torch.float32: 1e-6, torch.float64: 1e-13, torch.int64: 0.0}  # sums in NCCL's order


def main(rank: int, size: int, folder: Path) -> None:
    """Leaves `passedRANK` in the folder."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    store = FileStore(str(folder / "store"), size)
    transport = ProcessGroupTransport(checks._group_plan(size), rank, store, device)
    end = transport.communicator(tuple(range(size)), "s")
    for dtype in checks.DTYPES:
        values = [checks.value(r, dtype, (4 * 3, 2, 6)) for r in range(size)]
        for name, issue, expected in checks.CASES:
            found, wanted = checks.settled(issue(end, values[rank].to(device))), expected(values, rank)
            assert found is not None and found.shape == wanted.shape, (name, dtype)
            gap = (found.cpu().double() - wanted.double()).abs().max()
            assert gap <= WITHIN[dtype] * wanted.double().abs().max(), (name, dtype, gap)
        flats = [v.flatten() for v in values]
        results = [checks.settled(h) for h in checks.in_place(end, flats[rank].to(device))]
        checks.check_in_place([r.cpu() for r in results if r is not None], flats, rank)
    if rank < 2:
        channel = transport.channel(0, 1, "act")
        for k in range(3):
            sent = checks.value(k, torch.bfloat16)
            got = checks.settled(
                channel.send(sent.to(device)) if rank == 0 else channel.recv(checks.SHAPE, torch.bfloat16)
            )
            assert rank == 0 or (got is not None and torch.equal(got.cpu(), sent))
    torch.cuda.synchronize()
    (folder / f"passed{rank}").touch()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
