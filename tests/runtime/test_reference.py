"""The single-process oracle against Hugging Face's models with the same weights; its training step by the rule."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from titan.runtime.operators.dropout import kept
from titan.runtime.place import Place
from titan.runtime.reference import (
    ReferenceTraining,
    learning_rate,
    reference_logits,
    reference_loss,
    reference_step,
)
from torch import Tensor, nn

torch.set_num_threads(1)

HIDDEN, VOCAB, LENGTH = 32, 61, 24
Named = dict[str, Tensor]


def _model(**changes: Any) -> dict[str, Any]:
    """A small Llama in the plan's words."""
    block = {"kind": "dense", "ffn": 48, "activation": "swiglu", "bias": False}
    attention = {"kind": "gqa", "heads": 4, "kv_heads": 2, "head_dim": 8, "bias": False, "out_bias": False}
    return {
        "vocab": VOCAB, "hidden": HIDDEN, "attention": attention, "layers": [{"count": 2, "block": block}],
        "norm": "rms_norm", "norm_eps": 1e-5, "positions": "rope", "rope": {"theta": 1e4, "scaling": None},
        "max_positions": 64, "tied": False, "dropout": 0.0, "residual": True, "loss": "cross_entropy",
    } | changes  # fmt: skip


def _gpt2() -> dict[str, Any]:
    block = {"kind": "dense", "ffn": 48, "activation": "gelu_tanh", "bias": True}
    attention = {"kind": "gqa", "heads": 4, "kv_heads": 4, "head_dim": 8, "bias": True, "out_bias": True}
    return _model(attention=attention, layers=[{"count": 2, "block": block}], norm="layer_norm", positions="learned",
                  rope=None, tied=True)  # fmt: skip


def _batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, VOCAB, (3, LENGTH), generator=generator)
    labels = torch.randint(0, VOCAB, (3, LENGTH), generator=generator)
    labels[0, 3:9] = -100
    return tokens, labels


# --- Hugging Face's models, and the names of their weights as the plan's


def _llama(scaling: dict[str, Any] | None) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    rope = {"rope_type": "default"} if scaling is None else {"rope_type": "llama3", **scaling}
    newer = hasattr(LlamaConfig(), "rope_parameters")
    words = {"rope_parameters": {"rope_theta": 1e4, **rope}} if newer else {"rope_theta": 1e4, "rope_scaling": rope}
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, rms_norm_eps=1e-5, tie_word_embeddings=False,
        initializer_range=0.2, **words,
    )  # fmt: skip
    torch.manual_seed(0)
    return _shaken(LlamaForCausalLM(config))


def _mistral(window: int) -> nn.Module:
    from transformers import MistralConfig, MistralForCausalLM

    newer = hasattr(MistralConfig(), "rope_parameters")
    rope = {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}} if newer else {"rope_theta": 1e4}
    config = MistralConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, rms_norm_eps=1e-5, tie_word_embeddings=False,
        initializer_range=0.2, sliding_window=window, **rope,
    )  # fmt: skip
    torch.manual_seed(0)
    return _shaken(MistralForCausalLM(config))


def _gpt2_peer() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=64, n_embd=HIDDEN, n_layer=2, n_head=4, n_inner=48, layer_norm_epsilon=1e-5,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, initializer_range=0.2,
    )  # fmt: skip
    return _shaken(GPT2LMHeadModel(config))


def _shaken(model: nn.Module) -> nn.Module:
    """Gains and biases away from one and zero, so that a forgotten one is seen."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


class _ExactNorm(nn.Module):
    """Hugging Face's own norm rounds to float32 whatever the model's dtype."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))


class _ExactRotary(nn.Module):
    """Rotary angles in float64 for the same reason."""

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        speeds = 1.0 / 1e4 ** (torch.arange(0, 8, 2, dtype=torch.float64) / 8)
        angles = (position_ids.unsqueeze(-1) * speeds).repeat(1, 1, 2)
        return angles.cos(), angles.sin()


def _made_exact(model: Any) -> None:
    model.model.rotary_emb = _ExactRotary()
    model.model.norm = _ExactNorm(model.model.norm.weight)
    for layer in model.model.layers:
        layer.input_layernorm = _ExactNorm(layer.input_layernorm.weight)
        layer.post_attention_layernorm = _ExactNorm(layer.post_attention_layernorm.weight)


def _llama_names(tensors: Named) -> Named:
    renamed = {
        "model.embed_tokens": "embed", "model.norm": "final_norm", "lm_head": "head", "model.layers": "layers",
        "self_attn": "attn", "o_proj": "out", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
        "mlp": "ffn", "_proj": "",
    }  # fmt: skip
    found = {}
    for name, tensor in tensors.items():
        for theirs, ours in renamed.items():
            name = name.replace(theirs, ours)
        found[name] = tensor
    return found


def _gpt2_names(tensors: Named) -> Named:
    found = {}
    for name, tensor in tensors.items():
        name = name.removeprefix("transformer.")
        if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            tensor = tensor.t()
        for theirs, ours in (
            ("wte", "embed"), ("wpe", "positions"), ("ln_f", "final_norm"), ("ln_1", "attn_norm"), ("ln_2", "ffn_norm"),
            ("attn.c_proj", "attn.out"), ("mlp.c_fc", "ffn.up"), ("mlp.c_proj", "ffn.down"), ("h.", "layers."),
        ):  # fmt: skip
            name = name.replace(theirs, ours)
        if "c_attn" in name:
            found |= {name.replace("c_attn", n): part for n, part in zip("qkv", tensor.chunk(3), strict=True)}
        else:
            found[name] = tensor
    return found


def _compared(peer: nn.Module, rename: Callable[[Named], Named], model: dict[str, Any], tolerance: float) -> None:
    tokens, labels = _batch()
    logits = peer(input_ids=tokens).logits
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    loss.backward()
    weights = rename({n: p.detach().clone() for n, p in peer.named_parameters()})
    wanted = rename({n: p.grad for n, p in peer.named_parameters() if p.grad is not None})
    ours = {n: p.requires_grad_() for n, p in weights.items()}
    found, count = reference_loss(model, ours, tokens, labels, (0, 1, 2))
    found.backward()
    assert count == labels.numel() - 6
    torch.testing.assert_close(reference_logits(model, ours, tokens, (0, 1, 2)), logits, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found, loss, rtol=tolerance, atol=tolerance)
    assert set(wanted) == set(ours)
    largest = max(float(w.norm()) for w in wanted.values())  # a key's bias has gradient zero but for rounding
    for name, parameter in ours.items():
        assert parameter.grad is not None
        assert (parameter.grad - wanted[name]).norm() <= tolerance * (wanted[name].norm() + 1e-3 * largest), name


def test_llama_in_float64() -> None:
    peer = _llama(None)
    _made_exact(peer)
    _compared(peer.double(), _llama_names, _model(), 1e-10)


def test_llama_in_float32() -> None:
    _compared(_llama(None), _llama_names, _model(), 2e-4)


def test_scaled_llama_in_float32() -> None:
    theirs = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    ours = {"factor": 8.0, "low_frequency_factor": 1.0, "high_frequency_factor": 4.0, "original_max_positions": 16}
    model = _model(rope={"theta": 1e4, "scaling": ours})
    _compared(_llama(theirs), _llama_names, model, 2e-4)
    with pytest.raises(AssertionError):
        _compared(_llama(theirs), _llama_names, _model(), 2e-4)


@pytest.mark.parametrize("window", [1, 7, LENGTH - 1, LENGTH + 5])
def test_mistral_in_float64(window: int) -> None:
    peer = _mistral(window)
    _made_exact(peer)
    block = {"kind": "dense", "ffn": 48, "activation": "swiglu", "bias": False, "window": window}
    _compared(peer.double(), _llama_names, _model(layers=[{"count": 2, "block": block}]), 1e-10)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 2e-4)])
def test_gpt2(dtype: torch.dtype, tolerance: float) -> None:
    _compared(_gpt2_peer().to(dtype), _gpt2_names, _gpt2(), tolerance)


# --- what Hugging Face's models do not have


def _exact_parameters(model: dict[str, Any]) -> Named:
    generator = torch.Generator().manual_seed(1)
    shapes = {"embed.weight": (VOCAB, HIDDEN), "head.weight": (VOCAB, HIDDEN)}
    for n in range(2):
        shapes |= {f"layers.{n}.ffn.up.weight": (48, HIDDEN), f"layers.{n}.ffn.down.weight": (HIDDEN, 48)}
    return {n: torch.randn(s, dtype=torch.float64, generator=generator) * 0.3 for n, s in shapes.items()}


def test_feed_forward_chain_with_a_linear_loss() -> None:
    block = {"kind": "dense", "ffn": 48, "activation": "relu", "bias": False}
    model = _model(attention=None, norm="none", positions="none", rope=None, residual=False, loss="linear",
                   layers=[{"count": 2, "block": block}])  # fmt: skip
    p = _exact_parameters(model)
    tokens, labels = _batch()
    x = p["embed.weight"][tokens]
    for n in range(2):
        x = (x @ p[f"layers.{n}.ffn.up.weight"].t()).clamp(min=0) @ p[f"layers.{n}.ffn.down.weight"].t()
    rows, valid = p["head.weight"][labels.clamp(min=0)], labels >= 0
    loss, count = reference_loss(model, p, tokens, labels, (0, 1, 2))
    torch.testing.assert_close(loss, -((x * rows).sum(-1) * valid).sum(), rtol=1e-12, atol=1e-12)
    assert count == int(valid.sum())


@pytest.mark.parametrize("width", [32, 31])
def test_dropout_draws_the_masks_of_the_operator(width: int) -> None:
    """Two statements of one definition; rows, positions and layers all matter."""
    from titan.runtime.reference import _dropout, _Random

    x = torch.ones(2, 9, width)
    for layer, site in ((-1, "embedding"), (4, "attention")):
        found = _dropout({"dropout": 0.2}, x, _Random((5, 3), 17, 6, True), layer, site)
        place = Place(17, 6, (5, 3), layer=None if layer < 0 else layer)
        assert torch.equal(found != 0, kept(place, site, 0.2, ((0, 9),), width, x.device))
    assert torch.equal(_dropout({"dropout": 0.2}, x, _Random((5, 3), 17, 6, False), 4, "ffn"), x)


def test_dropout_reaches_every_site_and_only_training() -> None:
    tokens, labels = _batch()
    weights = _llama_names({n: p.detach() for n, p in _llama(None).named_parameters()})
    dropped = _model(dropout=0.3)
    plain, _ = reference_loss(_model(), weights, tokens, labels, (0, 1, 2))
    evaluated, _ = reference_loss(dropped, weights, tokens, labels, (0, 1, 2), training=False)
    places = (((0, 1, 2), 0, 0), ((0, 1, 3), 0, 0), ((0, 1, 2), 1, 0), ((0, 1, 2), 0, 1))
    losses = {float(reference_loss(dropped, weights, tokens, labels, *place)[0]) for place in places}
    assert torch.equal(plain, evaluated) and len(losses) == 4 and float(plain) not in losses


# --- training


SETTINGS: dict[str, Any] = {
    "model": _model(), "train.seed": 1, "train.learning_rate": 1e-2, "train.min_learning_rate": 1e-3,
    "train.warmup_steps": 2, "train.steps": 10, "train.schedule": "cosine", "train.beta1": 0.9, "train.beta2": 0.95,
    "train.eps": 1e-8, "train.weight_decay": 0.1, "train.clip": 1.0,
}  # fmt: skip


def test_learning_rate() -> None:
    rates = [learning_rate(SETTINGS, step) for step in range(12)]
    assert rates[:3] == pytest.approx([0.005, 0.01, 0.01])
    assert rates[6] == pytest.approx((0.01 + 0.001) / 2)
    assert rates[10] == rates[11] == pytest.approx(0.001)
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert learning_rate(SETTINGS | {"train.schedule": "constant"}, 9) == 0.01


def test_two_steps_by_the_written_out_rule() -> None:
    """AdamW spelled out: clipping, bias correction, decoupled decay on matrices only."""
    tokens, labels = _batch()
    weights = _llama_names({n: p.detach().double() for n, p in _llama(None).named_parameters()})
    training, m, v = ReferenceTraining(SETTINGS, weights), {}, {}
    expected = {n: w.clone() for n, w in weights.items()}
    for step in range(2):
        leaves = {n: w.clone().requires_grad_() for n, w in expected.items()}
        total, count = reference_loss(SETTINGS["model"], leaves, tokens, labels, (0, 1, 2), 1, step)
        (total / count).backward()
        gradients = {n: w.grad for n, w in leaves.items() if w.grad is not None}
        norm = math.sqrt(sum(float((g**2).sum()) for g in gradients.values()))
        assert norm > 1
        rate = 0.005 * (step + 1)
        for n, g in gradients.items():
            clipped = g / (norm + 1e-6)
            m[n] = 0.9 * m.get(n, 0) + 0.1 * clipped
            v[n] = 0.95 * v.get(n, 0) + 0.05 * clipped**2
            corrected = m[n] / (1 - 0.9 ** (step + 1)) / ((v[n] / (1 - 0.95 ** (step + 1))).sqrt() + 1e-8)
            expected[n] = expected[n] * (1 - rate * 0.1 * (g.dim() == 2)) - rate * corrected
        found = training.step(tokens, labels, (0, 1, 2), step)
        assert found.loss == pytest.approx(float(total.detach()) / count, rel=1e-12)
        assert found.norm == pytest.approx(norm, rel=1e-12)
        torch.testing.assert_close(found.gradients, gradients, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(found.parameters, expected, rtol=1e-9, atol=1e-11)
        if step == 0:
            alone = reference_step(SETTINGS, weights, tokens, labels, (0, 1, 2))
            assert all(torch.equal(alone.parameters[n], found.parameters[n]) for n in expected)


def test_loss_falls() -> None:
    tokens, labels = _batch()
    weights = _llama_names({n: p.detach() for n, p in _llama(None).named_parameters()})
    training = ReferenceTraining(SETTINGS, weights)
    losses = [training.step(tokens, labels, (0, 1, 2), step).loss for step in range(8)]
    assert losses[-1] < losses[0] - 0.5
