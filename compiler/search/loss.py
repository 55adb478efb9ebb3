"""Whether logits are kept: on long sequences with large vocabularies they would outgrow everything else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from titan.compiler.graph.build import COMPUTE_DTYPE
from titan.compiler.plan.operators import DTYPE_BYTES

if TYPE_CHECKING:
    from titan.compiler.spec.schema import Spec

SHARE = 1 / 32  # of a device's memory: logits and their gradient beyond it are formed in pieces
PIECE = 1 / 256  # of a device's memory: the most that a piece takes


def loss_rows(spec: Spec, micro_batch: int, context: int, tensor: int) -> int:
    """Tokens whose logits are formed at once; 0 keeps all logits until backward. As wished, or by their size: forming
    them again costs time (two more products of the head), so that is done only where they would be large."""
    wish = spec.parallel.loss_rows
    if wish.fixed:
        return int(wish.value)
    tokens = micro_batch * spec.train.sequence // context
    token = -(-spec.model.vocab // tensor) * DTYPE_BYTES[COMPUTE_DTYPE[spec.train.precision]]
    memory = spec.cluster.device.memory
    if 2 * tokens * token <= SHARE * memory:
        return 0
    return 1 << max(int(PIECE * memory / token).bit_length() - 1, 6)
