"""Bound segments against autograd: forward, whole and split backward, frames, fan-out, lifetimes."""

from __future__ import annotations

import weakref
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from titan.compiler.plan.mesh import Mesh
from titan.compiler.plan.operators import TensorType
from titan.compiler.plan.segment import Call, Segment
from titan.runtime.dtypes import DTYPES
from titan.runtime.place import Place
from titan.runtime.segments import BoundSegment
from torch import Tensor

torch.set_num_threads(1)

MESH = Mesh((("pipeline", 1), ("context", 2), ("tensor", 1)))
PLACE = Place(seed=1, step=0, samples=(4, 7))
HIDDEN, WIDTH = 12, 6


def _segment(inputs: dict[str, TensorType], parameters: dict[str, tuple[int, ...]], outputs: tuple[str, ...],
             *calls: Call, dtype: str = "f64") -> Segment:  # fmt: skip
    """Types of the results follow from the rows."""
    types = inputs | {name: TensorType(dtype, shape) for name, shape in parameters.items()}
    for call in calls:
        found = call.row.typing(dict(call.attributes), tuple(types[o] for o in call.operands))
        types |= {name: TensorType(*t) for name, t in zip(call.results, found, strict=True)}
    return Segment("s", tuple(inputs), tuple(parameters), outputs, calls, tuple(types.items()))


def _call(operator: str, results: str, operands: str, **attributes: Any) -> Call:
    return Call(operator, tuple(results.split()), tuple(operands.split()), tuple(attributes.items()))


def _layer(dtype: str = "f64") -> Segment:
    """Norm, attention with biased queries, residual; the normed value leaves the segment too."""
    x = TensorType(dtype, (2, 4, HIDDEN))
    past = TensorType(dtype, (2, 8, WIDTH))
    weights = {f".{n}.weight": (WIDTH, HIDDEN) for n in ("k",)} | {".q.weight": (HIDDEN, HIDDEN), ".q.bias": (HIDDEN,)}
    weights |= {".norm.weight": (HIDDEN,), ".out.weight": (HIDDEN, HIDDEN)}
    return _segment(
        {"x": x, "v": past, "keys": past},
        weights,
        ("normed", "k", "y"),
        _call("rms_norm", "normed rstd", "x .norm.weight", eps=1e-5),
        _call("linear", "product", "normed .q.weight"),
        _call("bias", "q", "product .q.bias"),
        _call("linear", "k", "normed .k.weight"),
        _call("attention", "mixed lse", "q keys v", head_dim=WIDTH, causal=True, start="@context*4"),
        _call("linear", "out", "mixed .out.weight"),
        _call("dropout", "dropped", "out", p=0.5, site="attention", start="@context*4"),
        _call("add", "y", "x dropped"),
        dtype=dtype,
    )


def _oracle(x: Tensor, v: Tensor, keys: Tensor, p: dict[str, Tensor], mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same with start = 4: queries 0..3 see keys 0..4+i."""
    normed = F.rms_norm(x, (HIDDEN,), p["layers.3.norm.weight"], 1e-5)
    q = F.linear(normed, p["layers.3.q.weight"], p["layers.3.q.bias"])
    q = q.unflatten(-1, (2, WIDTH)).transpose(1, 2)
    visible = torch.arange(8) <= torch.arange(4).unsqueeze(1) + 4
    mixed = F.scaled_dot_product_attention(q, keys.unsqueeze(1), v.unsqueeze(1), attn_mask=visible, enable_gqa=True)
    out = F.linear(mixed.transpose(1, 2).flatten(2), p["layers.3.out.weight"])
    return normed, F.linear(normed, p["layers.3.k.weight"]), x + out * mask


class _Bound:
    """A bound layer with random parameters and inputs, and everything autograd says about it."""

    def __init__(self, dtype: str = "f64") -> None:
        torch.manual_seed(0)
        segment, exact = _layer(dtype), torch.float64 if dtype == "f64" else torch.float32
        self.parameters = {
            f"layers.3{n}": torch.randn(segment.types[n].shape).to(DTYPES[dtype]) for n in segment.parameters
        }
        self.gradients = {n: torch.zeros(t.shape, dtype=exact) for n, t in self.parameters.items()}
        coordinates = {"pipeline": 0, "context": 1, "tensor": 0}
        self.bound = BoundSegment(segment, 3, self.parameters, self.gradients, MESH, coordinates)
        self.inputs = [torch.randn(segment.types[n].shape).to(DTYPES[dtype]) for n in segment.inputs]
        self.given = [torch.randn(segment.types[n].shape).to(DTYPES[dtype]) for n in segment.outputs]
        self.segment = segment

    def kept(self, outputs: tuple[Tensor, ...]) -> tuple[list[Tensor], list[Tensor]]:
        named = dict(zip(self.segment.inputs + self.segment.outputs, (*self.inputs, *outputs), strict=True))
        return [named[n] for n in self.segment.kept_inputs], [named[n] for n in self.segment.kept_outputs]

    def expected(self, mask: Tensor) -> tuple[tuple[Tensor, ...], list[Tensor], dict[str, Tensor]]:
        inputs = [x.double().requires_grad_() for x in self.inputs]
        parameters = {n: t.double().requires_grad_() for n, t in self.parameters.items()}
        outputs = _oracle(*inputs, parameters, mask)
        torch.autograd.backward(outputs, [g.double() for g in self.given])
        grads = {n: t.grad for n, t in parameters.items() if t.grad is not None}
        return outputs, [x.grad for x in inputs if x.grad is not None], grads


def _mask() -> Tensor:
    from titan.runtime.operators.dropout import kept

    place = Place(seed=1, step=0, samples=(4, 7), layer=3)
    return kept(place, "attention", 0.5, ((4, 4),), HIDDEN, torch.device("cpu")).double() * 2


@pytest.mark.parametrize("split", [False, True])
def test_gradients_equal_autograd(split: bool) -> None:
    b = _Bound()
    expected, input_gradients, weight_gradients = b.expected(_mask())
    outputs, frame = b.bound.forward(b.inputs, PLACE, True)
    torch.testing.assert_close(outputs, expected, rtol=1e-12, atol=1e-12)
    inputs, kept = b.kept(outputs)
    if split:
        found, weight_frame = b.bound.backward_input(b.given, {}, inputs, kept, frame, PLACE)
        late = {n for n in b.gradients if not n.endswith(("norm.weight", "bias"))}
        assert {n for n, g in b.gradients.items() if not g.any()} == late
        assert len(weight_frame) == len(b.segment.weight_frame)
        for name, tensor in zip(b.segment.weight_frame, weight_frame, strict=True):
            assert tuple(tensor.shape) == b.segment.types[name.removeprefix("d.")].shape
        b.bound.backward_weight(weight_frame, PLACE)
    else:
        found = b.bound.backward(b.given, {}, inputs, kept, frame, PLACE)
    torch.testing.assert_close(list(found), input_gradients, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(b.gradients, weight_gradients, rtol=1e-10, atol=1e-10)


def test_the_frame_is_what_the_template_says() -> None:
    b = _Bound()
    outputs, frame = b.bound.forward(b.inputs, PLACE, True)
    assert set(b.segment.frame) == {"rstd", "q", "mixed", "lse"} and b.segment.kept_outputs == ("normed",)
    for name, tensor in zip(b.segment.frame, frame, strict=True):
        assert tuple(tensor.shape) == b.segment.types[name].shape
    again, nothing = b.bound.forward(b.inputs, PLACE, False)
    assert nothing == () and all(torch.equal(x, y) for x, y in zip(outputs, again, strict=True))


def test_carried_gradients_are_added() -> None:
    b = _Bound()
    outputs, frame = b.bound.forward(b.inputs, PLACE, True)
    plain = b.bound.backward(b.given, {}, *b.kept(outputs), frame, PLACE)
    carried = {"keys": torch.randn(2, 8, WIDTH).double()}
    found = b.bound.backward(b.given, carried, *b.kept(outputs), frame, PLACE)
    split, _ = b.bound.backward_input(b.given, carried, *b.kept(outputs), frame, PLACE)
    for result in (found, split):
        assert torch.equal(result[0], plain[0]) and torch.equal(result[1], plain[1])
        assert torch.equal(result[2], plain[2] + carried["keys"])


def test_weight_gradients_accumulate_over_calls() -> None:
    b = _Bound()
    outputs, frame = b.bound.forward(b.inputs, PLACE, True)
    b.bound.backward(b.given, {}, *b.kept(outputs), frame, PLACE)
    once = {n: g.clone() for n, g in b.gradients.items()}
    b.bound.backward(b.given, {}, *b.kept(outputs), frame, PLACE)
    torch.testing.assert_close(b.gradients, {n: 2 * g for n, g in once.items()}, rtol=1e-12, atol=1e-12)


def test_bfloat16_gradients_stand_in_float32() -> None:
    b = _Bound("bf16")
    _, input_gradients, weight_gradients = b.expected(_mask())
    outputs, frame = b.bound.forward(b.inputs, PLACE, True)
    found = b.bound.backward(b.given, {}, *b.kept(outputs), frame, PLACE)
    assert {x.dtype for x in (*outputs, *found)} == {torch.bfloat16}
    pairs = [*zip(found, input_gradients, strict=True)]
    pairs += [(b.gradients[n], weight_gradients[n]) for n in b.gradients]
    for gradient, right in pairs:
        assert (gradient.double() - right).norm() < 0.05 * right.norm()


def test_nothing_is_remembered() -> None:
    """Intermediates die with the call, the frame with its holder."""
    b = _Bound()
    outputs, frame = b.bound.forward(b.inputs, PLACE, True)
    gradients = b.bound.backward(b.given, {}, *b.kept(outputs), frame, PLACE)
    split, weight_frame = b.bound.backward_input(b.given, {}, *b.kept(outputs), frame, PLACE)
    b.bound.backward_weight(weight_frame, PLACE)
    watched = [weakref.ref(t) for t in (*outputs, *frame, *gradients, *split, *weight_frame, *b.inputs, *b.given)]
    del outputs, frame, gradients, split, weight_frame
    b.inputs.clear()
    b.given.clear()
    assert [w for w in watched if w() is not None] == []


def test_intermediates_are_dropped_after_their_last_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a chain of n operators never more than operand and result are held, whatever n."""
    from titan.runtime.operators import gelu

    x = TensorType("f64", (2, 3, 4))
    names = ["x", *(f"v{n}" for n in range(6))]
    calls = [_call("gelu", b, a, approximate="none") for a, b in pairwise(names)]
    segment = _segment({"x": x}, {}, (names[-1],), *calls)
    made: list[weakref.ref[Tensor]] = []
    most = [0, 0]
    plain, plain_backward = gelu.forward, gelu.backward_input

    def counted(attributes: Any, place: Place, operand: Tensor) -> tuple[Tensor, ...]:
        result = plain(attributes, place, operand)
        made.append(weakref.ref(result[0]))
        most[0] = max(most[0], sum(r() is not None for r in made))
        return result

    def counted_backward(*operands: Any) -> tuple[Tensor, ...]:
        result = plain_backward(*operands)
        made.append(weakref.ref(result[0]))
        most[1] = max(most[1], sum(r() is not None for r in made))
        return result

    monkeypatch.setattr(gelu, "forward", counted)
    monkeypatch.setattr(gelu, "backward_input", counted_backward)
    bound = BoundSegment(segment, None, {}, {}, MESH, {"pipeline": 0, "context": 0, "tensor": 0})
    inputs = [torch.randn(2, 3, 4).double()]
    bound.forward(inputs, PLACE, False)
    assert most[0] == 2
    _, frame = bound.forward(inputs, PLACE, True)
    made.clear()
    for split in (False, True):
        most[1] = 0
        transpose = bound.backward_input if split else bound.backward
        transpose([torch.ones(2, 3, 4).double()], {}, inputs, (), frame, PLACE)
        assert most[1] == 2


def test_a_loss_is_differentiated_through_its_statistics() -> None:
    """Head: two results of one call, one of which another segment may leave without a gradient."""
    f64, i64 = TensorType("f64", (2, 3, 8)), TensorType("i64", (2, 3))
    scalar = TensorType("f64", ())
    head = _segment(
        {"x": f64, "labels": i64, "count": scalar},
        {"head.weight": (12, 8)},
        ("loss",),
        _call("linear", "logits", "x head.weight"),
        _call("vocab_max", "peak", "logits", vocab=11),
        _call("vocab_sum", "total target", "logits labels peak", vocab=11),
        _call("token_loss", "loss", "peak total target labels count", kind="cross_entropy"),
    )
    weight, x = torch.randn(12, 8).double(), torch.randn(2, 3, 8).double()
    labels = torch.tensor([[1, -100, 10], [0, 3, 4]])
    gradients = {"head.weight": torch.zeros(12, 8).double()}
    coordinates = {"pipeline": 0, "context": 0, "tensor": 0}
    bound = BoundSegment(head, None, {"head.weight": weight}, gradients, MESH, coordinates)
    inputs = [x, labels, torch.tensor(5.0).double()]
    (loss,), frame = bound.forward(inputs, PLACE, True)
    named = dict(zip(head.inputs, inputs, strict=True))
    kept = [named[n] for n in head.kept_inputs]
    (dx,) = bound.backward([torch.ones(()).double()], {}, kept, (), frame, PLACE)
    weight.requires_grad_()
    x.requires_grad_()
    expected = F.cross_entropy((x @ weight.t())[..., :11].flatten(0, 1), labels.flatten(), reduction="sum") / 5
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(dx, x.grad, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(gradients["head.weight"], weight.grad, rtol=1e-10, atol=1e-10)
    assert not gradients["head.weight"][11].any()
