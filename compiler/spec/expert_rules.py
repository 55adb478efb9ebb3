"""Rules about experts and the ranks that share them."""

from __future__ import annotations

from math import gcd

from titan.compiler.spec.breach import Breach, Choices
from titan.compiler.spec.divisors import around, divisors
from titan.compiler.spec.schema import Spec
from titan.compiler.strategy import expert_parts


def whole_experts(spec: Spec, s: Choices) -> Breach | None:
    if s.expert == 1:
        return None
    experts = spec.model.experts
    if not experts:
        return Breach(f"expert = {s.expert} shares out experts, and the model has none", "expert", ("expert = 1",))
    if experts % s.expert:
        near = tuple(f"expert = {e}" for e in around(divisors(experts), s.expert))
        message = f"expert = {s.expert} does not divide {experts} experts"
        return Breach(message, "expert", near, ((f"experts = {experts}", "model.layers"),))
    return None


def among_ranks(spec: Spec, s: Choices) -> Breach | None:
    """Experts never multiply the ranks of the mesh: they are shared by ranks that are there."""
    room = s.data * s.context * s.tensor
    if s.expert == 1 or room % s.expert == 0:
        return None
    near = tuple(f"expert = {e}" for e in around(divisors(gcd(room, spec.model.experts or room)), s.expert))
    degrees = f"data {s.data} x context {s.context} x tensor {s.tensor} = {room}"
    message = f"expert = {s.expert} does not divide {degrees}: ranks that share experts (ep) are taken from these"
    return Breach(message, "expert", near)


def shared_by_tensor(spec: Spec, s: Choices) -> Breach | None:
    if s.expert == 1:
        return None
    if s.expert_tensor == 1 and s.tensor > 1 and (s.expert % s.tensor or not s.sequence_parallel):
        facts = ((f"experts = {spec.model.experts}", "model.layers"),)
        message = f"with expert_tensor = 1 the {s.tensor} tensor ranks share experts, so expert = {s.expert} must be a"
        message += " multiple of tensor, and sequence_parallel true"
        return Breach(message, "expert", (f"expert = {s.tensor}", f"expert_tensor = {s.tensor}"), facts)
    return None


def experts(spec: Spec, s: Choices) -> Breach | None:
    if s.expert == 1:
        return None
    breach = whole_experts(spec, s) or among_ranks(spec, s) or shared_by_tensor(spec, s)
    if breach is not None:
        return breach
    width, among = (
        (s.shard if s.zero and 1 <= s.shard < s.data else s.data),
        expert_parts(s.expert, s.expert_tensor, s.context, s.tensor)[0],
    )
    if width % among:
        message = f"expert = {s.expert} leaves {among} of its ranks to the data axis, which do not divide {width}"
        near = tuple(f"expert = {s.expert // among * d}" for d in around(divisors(width), among))
        facts = ((f"experts = {spec.model.experts}", "model.layers"),)
        return Breach(message, "expert", near, facts)
    return None


def expert_tensor(spec: Spec, s: Choices) -> Breach | None:
    if s.expert_tensor not in (1, s.tensor):
        near = ("expert_tensor = 1", f"expert_tensor = {s.tensor}")
        return Breach(f"expert_tensor = {s.expert_tensor} must be 1 or tensor = {s.tensor}", "expert_tensor", near)
    for group in spec.model.layers:
        if group.block.kind == "moe" and group.block.ffn % s.expert_tensor:
            message = f"expert_tensor = {s.expert_tensor} does not divide the experts' width {group.block.ffn}"
            return Breach(message, "expert_tensor", ("expert_tensor = 1",))
    return None
