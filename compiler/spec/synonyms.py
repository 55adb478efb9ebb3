"""Names that other tools use for our keys, so that an unknown key can be answered with the right one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from titan.compiler.spec.report import similar

SYNONYMS: dict[str, tuple[str, ...]] = {
    "accumulation": ("train.global_batch",),
    "activation_checkpointing": ("parallel.recompute",),
    "batch_size": ("train.global_batch",),
    "context_parallel": ("parallel.context",),
    "cp": ("parallel.context",),
    "d_model": ("model.hidden",),
    "dp": ("parallel.data",),
    "data_parallel": ("parallel.data",),
    "ep": ("parallel.expert",),
    "expert_parallel": ("parallel.expert",),
    "ffn_hidden_size": ("dense.ffn",),
    "gbs": ("train.global_batch",),
    "global_batch_size": ("train.global_batch",),
    "gpus": ("cluster.devices_per_node", "cluster.nodes"),
    "gpus_per_node": ("cluster.devices_per_node",),
    "grad_clip": ("train.clip",),
    "fsdp": ("parallel.zero",),
    "hsdp": ("parallel.shard",),
    "hidden_size": ("model.hidden",),
    "intermediate_size": ("dense.ffn",),
    "layers_per_stage": ("parallel.stages",),
    "lr": ("optimizer.learning_rate",),
    "max_position_embeddings": ("model.max_positions",),
    "mbs": ("parallel.micro_batch",),
    "micro_batch_size": ("parallel.micro_batch",),
    "num_attention_heads": ("attention.heads",),
    "num_heads": ("attention.heads",),
    "num_hidden_layers": ("model.layers",),
    "num_key_value_heads": ("attention.kv_heads",),
    "num_kv_heads": ("attention.kv_heads",),
    "num_layers": ("model.layers",),
    "pipeline_parallel": ("parallel.pipeline",),
    "pp": ("parallel.pipeline",),
    "seq_len": ("train.sequence",),
    "seq_length": ("train.sequence",),
    "sequence_length": ("train.sequence",),
    "sp": ("parallel.sequence_parallel",),
    "tensor_parallel": ("parallel.tensor",),
    "tie_word_embeddings": ("model.tied",),
    "tp": ("parallel.tensor",),
    "ulysses": ("parallel.context_form",),
    "virtual_pipeline": ("parallel.chunks",),
    "virtual_stages": ("parallel.chunks",),
    "vocab_size": ("model.vocab",),
    "reshard_after_forward": ("parallel.gather",),
    "zero_stage": ("parallel.zero",),
}


def right_key(key: str, known: Iterable[str], homes: Mapping[str, str]) -> tuple[str, ...]:
    """What an unknown key should have been: a key here, another tool's name for one, or a key elsewhere."""
    known = list(known)
    here = [name for name in SYNONYMS.get(key, ()) if name.rpartition(".")[2] in known]
    if here:
        return tuple(name.rpartition(".")[2] for name in here)
    elsewhere = (homes[key],) if key in homes else SYNONYMS.get(key, ())
    return elsewhere or similar(key, known)
