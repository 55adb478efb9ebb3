"""The oracle: the same training written as a plain single-process PyTorch model with autograd and `torch.optim.AdamW`.

Nothing here is shared with the operators of the runtime, so that agreement means something. Parameters are whole: not
sharded, without padding rows. The model is described by the `model` setting of a plan, parameters are called as there.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from titan.runtime.random import bits, key
from torch import Tensor

Model = Mapping[str, Any]
Parameters = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class _Random:
    """What dropout depends on."""

    samples: Sequence[int]
    seed: int
    step: int
    training: bool


def reference_loss(
    model: Model,
    parameters: Parameters,
    tokens: Tensor,
    labels: Tensor,
    samples: Sequence[int],
    seed: int = 0,
    step: int = 0,
    training: bool = True,
) -> tuple[Tensor, int]:
    """(sum of the token losses, number of labels that are not -100) of tokens and labels, int64 [batch, sequence].

    `samples` are the global sample indices of the rows; only dropout depends on them, on seed and on step.
    """
    logits = reference_logits(model, parameters, tokens, samples, seed, step, training).flatten(0, 1)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    flat, valid = labels.flatten(), labels.flatten() != -100
    if model.get("loss", "cross_entropy") == "linear":
        chosen = logits.gather(1, flat.clamp(min=0).unsqueeze(1)).squeeze(1)
        return -(chosen * valid).sum(), int(valid.sum())
    return F.cross_entropy(logits, flat, ignore_index=-100, reduction="sum"), int(valid.sum())


def reference_logits(
    model: Model,
    parameters: Parameters,
    tokens: Tensor,
    samples: Sequence[int],
    seed: int = 0,
    step: int = 0,
    training: bool = True,
) -> Tensor:
    """Logits [batch, sequence, vocab]."""
    random = _Random(samples, seed, step, training)
    x = F.embedding(tokens, parameters["embed.weight"])
    if model["positions"] == "learned":
        x = x + parameters["positions.weight"][: tokens.shape[1]]
    x = _dropout(model, x, random, -1, "embedding")
    number = 0
    for group in model["layers"]:
        for _ in range(group["count"]):
            x = _layer(model, group["block"], parameters, x, number, random)
            number += 1
    x = _norm(model, parameters, "final_norm", x)
    head = parameters["embed.weight" if model["tied"] else "head.weight"]
    return F.linear(x, head)


def _layer(model: Model, block: Model, parameters: Parameters, x: Tensor, number: int, random: _Random) -> Tensor:
    name = f"layers.{number}"
    if model["attention"] is not None:
        normed = _norm(model, parameters, f"{name}.attn_norm", x)
        branch = _attention(model, parameters, f"{name}.attn", normed, block.get("window"))
        branch = _dropout(model, branch, random, number, "attention")
        x = x + branch if model["residual"] else branch
    branch = _ffn(block, parameters, f"{name}.ffn", _norm(model, parameters, f"{name}.ffn_norm", x))
    branch = _dropout(model, branch, random, number, "ffn")
    return x + branch if model["residual"] else branch


def _linear(parameters: Parameters, name: str, x: Tensor) -> Tensor:
    return F.linear(x, parameters[f"{name}.weight"], parameters.get(f"{name}.bias"))


def _norm(model: Model, parameters: Parameters, name: str, x: Tensor) -> Tensor:
    if model["norm"] == "none":
        return x
    gain, size = parameters[f"{name}.weight"], x.shape[-1:]
    if model["norm"] == "layer_norm":
        return F.layer_norm(x, size, gain, parameters[f"{name}.bias"], model["norm_eps"])
    return F.rms_norm(x, size, gain, model["norm_eps"])


def _attention(model: Model, parameters: Parameters, name: str, x: Tensor, window: int | None) -> Tensor:
    shape = model["attention"]
    batch, length, _ = x.shape
    q, k, v = (_linear(parameters, f"{name}.{n}", x).view(batch, length, -1, shape["head_dim"]) for n in "qkv")
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    if model["positions"] == "rope":
        q, k = _rotated(model["rope"], q), _rotated(model["rope"], k)
    repeats = shape["heads"] // shape["kv_heads"]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = q @ k.transpose(-1, -2) / math.sqrt(shape["head_dim"])
    hidden = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
    if window is not None:
        hidden |= torch.ones_like(hidden).tril(-window)
    scores = scores.masked_fill(hidden, -math.inf)
    mixed: Tensor = scores.softmax(-1) @ v
    return _linear(parameters, f"{name}.out", mixed.transpose(1, 2).reshape(batch, length, -1))


def _rotated(rope: Model, x: Tensor) -> Tensor:
    """x cos + rotate_half(x) sin over [batch, heads, sequence, head_dim]."""
    width = x.shape[-1]
    speeds = torch.tensor([_speed(rope, 2 * d / width) for d in range(width // 2)], dtype=torch.float64)
    angles = torch.outer(torch.arange(x.shape[2], dtype=torch.float64), speeds).repeat(1, 2)
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    cosine, sine = (t.to(device=x.device, dtype=dtype) for t in (angles.cos(), angles.sin()))
    left, right = x.chunk(2, -1)
    turned: Tensor = x * cosine + torch.cat((-right, left), -1) * sine
    return turned.to(x.dtype)


def _speed(rope: Model, exponent: float) -> float:
    """Radians per position; with scaling long waves are slowed down, short ones kept, between them blended."""
    speed = math.pow(float(rope["theta"]), -exponent)
    scaling = rope.get("scaling")
    if scaling is None:
        return speed
    turns = float(scaling["original_max_positions"]) * speed / (2 * math.pi)
    low, high = float(scaling["low_frequency_factor"]), float(scaling["high_frequency_factor"])
    slow = speed / float(scaling["factor"])
    if turns > high:
        return speed
    if turns < low:
        return slow
    blend = (turns - low) / (high - low)
    return blend * speed + (1 - blend) * slow


def _ffn(block: Model, parameters: Parameters, name: str, x: Tensor) -> Tensor:
    up = _linear(parameters, f"{name}.up", x)
    if block["activation"] == "swiglu":
        inner = F.silu(_linear(parameters, f"{name}.gate", x)) * up
    elif block["activation"] == "relu":
        inner = F.relu(up)
    else:
        inner = F.gelu(up, approximate="tanh" if block["activation"] == "gelu_tanh" else "none")
    return _linear(parameters, f"{name}.down", inner)


def _dropout(model: Model, x: Tensor, random: _Random, layer: int, site: str) -> Tensor:
    """Element (sample, position, h) draws half h % 2 (low half first) of word position * ceil(hidden / 2) + h // 2."""
    p = float(model["dropout"])
    if p == 0 or not random.training:
        return x
    _, length, width = x.shape
    h = torch.arange(width, device=x.device)
    word = torch.arange(length, device=x.device).unsqueeze(1) * ((width + 1) // 2) + h // 2
    threshold, masks = round(p * 2**32) - 2**31, []
    for sample in random.samples:
        drawn = bits(key(random.seed, "dropout", random.step, sample, layer, site), word)
        half = torch.where(h % 2 == 1, drawn >> 32, ((drawn + 2**31) % 2**32) - 2**31)  # both signed
        masks.append(half >= threshold)
    dropped: Tensor = x * torch.stack(masks) / (1 - p)
    return dropped


@dataclass(frozen=True, slots=True)
class ReferenceStep:
    """Mean loss per valid label, gradients before clipping, their norm, and the parameters after the update."""

    loss: float
    gradients: dict[str, Tensor]
    norm: float
    parameters: dict[str, Tensor]


class ReferenceTraining:
    """Trains copies of the parameters; `settings` are the plan's (`model`, `train.*`).

    `decay` names the parameters with weight decay, by default all with two dims.
    """

    def __init__(
        self, settings: Mapping[str, Any], parameters: Parameters, decay: Collection[str] | None = None
    ) -> None:
        self.settings = settings
        self.parameters = {n: p.detach().clone().requires_grad_() for n, p in parameters.items()}
        chosen = {n for n, p in parameters.items() if p.dim() >= 2} if decay is None else set(decay)
        groups = [
            {"params": [p for n, p in self.parameters.items() if (n in chosen) == yes], "weight_decay": yes * rate}
            for yes, rate in ((True, float(settings["train.weight_decay"])), (False, 0.0))
        ]
        self._optimizer = torch.optim.AdamW(
            [g for g in groups if g["params"]],
            lr=float(settings["train.learning_rate"]),
            betas=(float(settings["train.beta1"]), float(settings["train.beta2"])),
            eps=float(settings["train.eps"]),
        )

    def step(self, tokens: Tensor, labels: Tensor, samples: Sequence[int], step: int) -> ReferenceStep:
        """One update on a whole global batch: loss per valid label, norm over all gradients."""
        self._optimizer.zero_grad(set_to_none=True)
        seed = int(self.settings["train.seed"])
        total, count = reference_loss(self.settings["model"], self.parameters, tokens, labels, samples, seed, step)
        loss = total / max(1, count)
        loss.backward()  # type: ignore[no-untyped-call]
        used = {n: p for n, p in self.parameters.items() if p.grad is not None}
        gradients = {n: p.grad.clone() for n, p in used.items() if p.grad is not None}
        limit = self.settings["train.clip"]
        norm = torch.nn.utils.clip_grad_norm_(used.values(), math.inf if limit is None else float(limit))
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(self.settings, step)
        if math.isfinite(float(norm)):
            self._optimizer.step()
        after = {n: p.detach().clone() for n, p in self.parameters.items()}
        return ReferenceStep(float(loss.detach()), gradients, float(norm), after)


def reference_step(
    settings: Mapping[str, Any], parameters: Parameters, tokens: Tensor, labels: Tensor, samples: Sequence[int]
) -> ReferenceStep:
    """The first step of a training that starts from these parameters."""
    return ReferenceTraining(settings, parameters).step(tokens, labels, samples, 0)


def learning_rate(settings: Mapping[str, Any], step: int) -> float:
    """Of the step counted from 0: rises linearly over the warm-up, then stays or falls as half a cosine wave."""
    peak, warmup = float(settings["train.learning_rate"]), int(settings.get("train.warmup_steps") or 0)
    if step < warmup:
        return peak * (step + 1) / warmup
    if settings["train.schedule"] == "constant":
        return peak
    low = float(settings.get("train.min_learning_rate") or 0.0)
    share = (step - warmup) / max(1, int(settings["train.steps"]) - warmup)
    return low + (peak - low) * (1 + math.cos(math.pi * min(1.0, share))) / 2
