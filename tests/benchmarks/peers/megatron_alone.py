"""Megatron-core's GPT model and schedules on CPU with gloo.

Megatron-core asks torch.cuda for the current device, streams and random state; this launcher answers with CPU
stand-ins before importing it. Nothing of Megatron-core is changed. TP and PP come from the environment, data parallel
is what is left of the world; its gradient sum, and the clipping by the global norm that all peers do, are written out
here.
"""

from __future__ import annotations

import contextlib
import os
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from gate import serve
from torch import Tensor

SIZES = ("LAYERS", "DIM", "HEADS", "FFN", "VOCAB", "SEQ", "MB", "NMB")
LAYERS, DIM, HEADS, FFN, VOCAB, SEQ, MB, NMB = (int(os.environ[name]) for name in SIZES)
CLIP = 1.0
CPU = torch.device("cpu")


def stand_in() -> None:
    """CPU answers where CUDA is asked for; a function of its own for each name, because torch keeps tables of them."""
    cuda: Any = torch.cuda
    stream = types.SimpleNamespace(wait_stream=lambda *a: None, synchronize=lambda: None)
    cuda.current_device = lambda: CPU
    cuda.synchronize = lambda *a, **k: None
    cuda.set_device = lambda *a, **k: None
    cuda.current_stream = cuda.default_stream = lambda *a, **k: stream
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *a, **k: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, *a, **k: torch.set_rng_state(state)
    cuda.manual_seed = lambda seed: torch.manual_seed(seed)
    cuda.stream = lambda *a, **k: contextlib.nullcontext()
    torch.Tensor.cuda = lambda self, *a, **k: self  # type: ignore[method-assign,assignment]
    for name in ("zeros", "ones", "empty", "tensor", "full", "arange"):
        setattr(torch, name, on_cpu(getattr(torch, name)))
    for name in ("range_push", "range_pop", "mark"):
        setattr(cuda.nvtx, name, lambda *a, **k: None)


def on_cpu(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def made(*a: Any, device: Any = None, **k: Any) -> Tensor:
        return make(*a, device=CPU if str(device).startswith("cuda") else device, **k)

    return made


def build(tp: int, pp: int) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=DIM,
        num_attention_heads=HEADS,
        use_cpu_initialization=True,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        pipeline_dtype=torch.float32,
        params_dtype=torch.float32,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        ffn_hidden_size=FFN,
        normalization="RMSNorm",
        variable_seq_lengths=False,
        batch_p2p_comm=True,
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=VOCAB,
        max_sequence_length=SEQ,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    while True:
        drawn = torch.randint(0, VOCAB, (MB, SEQ + 1), generator=generator)
        yield drawn[:, :-1], drawn[:, 1:]


def clip(model: Any, first_of_tensor: bool, group: Any) -> None:
    """By the norm of the whole model's gradient, each parameter counted once."""
    squares = torch.zeros(())
    for p in model.parameters():
        if getattr(p, "tensor_model_parallel", False) or first_of_tensor:
            squares += p.grad.norm() ** 2
    dist.all_reduce(squares, group=group)
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), CLIP, squares.sqrt(), foreach=True)


def main() -> None:
    torch.set_num_threads(1)
    stand_in()
    tp, pp = int(os.environ.get("TP", "1")), int(os.environ.get("PP", "1"))
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method="file://" + os.environ["MEET"], rank=rank, world_size=world)
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(1)
    replicas = parallel_state.get_data_parallel_world_size()
    model = build(tp, pp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-4, foreach=True)
    positions = torch.arange(SEQ)[None].expand(MB, SEQ)
    mask = torch.triu(torch.ones(1, 1, SEQ, SEQ, dtype=torch.bool), 1)
    first_of_tensor = parallel_state.get_tensor_model_parallel_rank() == 0
    data = batches()
    schedule = get_forward_backward_func()

    def forward(iterator: Iterator[tuple[Tensor, Tensor]], part: Any) -> Any:
        tokens, labels = next(iterator)
        out = part(tokens, positions, mask, labels=labels)
        return out, lambda o: (o.mean(), {"loss": o.mean().detach()})

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        schedule(
            forward_step_func=forward,
            data_iterator=data,
            model=[model],
            num_microbatches=NMB,
            seq_length=SEQ,
            micro_batch_size=MB,
            forward_only=False,
        )
        if replicas > 1:
            flat = torch.cat([p.grad.flatten() for p in model.parameters()])
            dist.all_reduce(flat, group=parallel_state.get_data_parallel_group())
            flat.div_(replicas)
            for p, part in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()])):
                p.grad.copy_(part.view_as(p))
        clip(model, first_of_tensor, parallel_state.get_model_parallel_group())
        optimizer.step()

    serve(step, dist.barrier, tokens=NMB * MB * SEQ * replicas, parameters=sum(p.numel() for p in model.parameters()))


if __name__ == "__main__":
    main()
