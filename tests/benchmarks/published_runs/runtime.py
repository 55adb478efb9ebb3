"""What the software of a published run did otherwise than a plan of ours: attention kernel, recomputation, width of
summed gradients, collectives hidden under matrix products. Read from the row; shared by all rows that say the same."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.benchmarks.published_runs.rows import Row

UNFUSED = ("narayanan2021", "korthikanti2022", "mtnlg2022", "bloom", "zerobubble2023", "gptneox20b", "opt175b")
SCATTERED = ("narayanan2021", "korthikanti2022", "mtnlg2022")  # Megatron-LM's scatter/gather between stages
WHOLE_SUM = ("hagemann2023", "bloom")  # DeepSpeed's first stage of ZeRO
VENDOR = ("dgxc-benchmarking", "megatron-bridge", "nemo-docs", "nemo-launcher", "nemo-automodel", "simumax")
ENGINE = ("dgxc-benchmarking", "megatron-bridge", "nemo-docs", "nemo-launcher")  # hide tensor collectives


@dataclass(frozen=True, slots=True)
class Runtime:
    """attention      figure of the attention kernel; empty: scores are formed as tensors
    scores_again      the scores are formed anew in backward
    again             share of a layer's forward that is run again in backward
    layers_again      share of the layers of which that is so
    gradient_bytes    width of the gradients that are summed
    narrow_gradients  they are also kept in that width
    norm              figure of the bytes that a norm moves
    hidden            figure of the share of tensor collectives that runs under matrix products
    fp8               matrix products of layers in 8 bits
    scattered         tensor ranks send their share of an activation to the next stage, which gathers it there
    whole_sum         gradients are summed on every rank though each updates only its shard
    unstated_network  the source does not say how fast nodes are joined
    """

    attention: str
    scores_again: bool = False
    again: float = 0.0
    layers_again: float = 1.0
    gradient_bytes: int = 4
    narrow_gradients: bool = False
    norm: str = ""
    hidden: str = "tensor_hidden"
    fp8: bool = False
    unstated_network: bool = False
    scattered: bool = False
    whole_sum: bool = False


def runtime(row: Row) -> Runtime:
    """The traits of a row's software."""
    attention = _attention(row)
    again, layers_again = _again(row)
    scores = row.text("recompute") == "selective" and "core attention" in row.text("recompute_detail")
    scores = scores or (row.source == "dgxc-benchmarking" and row.text("recompute") == "selective")
    narrow = _narrow(row)
    norm = "" if row.source != "hagemann2023" or "RMS kernel" in row.text("notes") else "norm_passes"
    return Runtime(
        attention,
        scores,
        again,
        layers_again,
        2 if narrow else 4,
        narrow and "fp16" in row.text("precision"),
        norm,
        "engine_hidden" if row.source in ENGINE else "tensor_hidden",
        row.eight_bit,
        _unstated(row),
        row.source in SCATTERED,
        row.source in WHOLE_SUM,
    )


def _unstated(row: Row) -> bool:
    text = row.text("inter_node")
    return row.number("num_gpus") > 8 and not re.search(r"\d+ ?Gb", text) and "Selene" not in text


def _attention(row: Row) -> str:
    kernel = re.search(r"attention kernel: ([^;]*)", row.text("notes"))
    named = kernel[1] if kernel else ""
    if named.startswith(("torch", "fused")) or row.source in UNFUSED:
        return ""
    if "flash_attentionv1" in named:
        return "attention_flash1"
    if row.source in VENDOR or row.text("gpu")[:2] in ("B2", "B3", "GB"):
        return "attention_cudnn"
    if row.source == "llmfoundry" and row.text("gpu").startswith("A100"):
        return "attention_flash1"
    return "attention_flash2"


def _again(row: Row) -> tuple[float, float]:
    """(share of a layer's forward run again, share of layers)."""
    kind, detail = row.text("recompute"), row.text("recompute_detail")
    if kind == "full":
        return 1.0, 1.0
    if kind != "selective" or "core attention" in detail:
        return 0.0, 1.0
    if "every 2nd layer" in detail:
        return 1.0, 0.5
    if row.source == "fms-fsdp":
        return 1.0, 0.5  # the frequency is not given; HFU over MFU speaks for about one layer in two
    if "op" in detail or row.source == "torchtitan":
        return 0.5, 1.0  # every second matrix product, and what lies between
    return 0.0, 1.0


def _narrow(row: Row) -> bool:
    """Whether gradients are summed in 16 bits."""
    notes, precision = row.text("notes"), row.text("precision")
    if "fp32 grad" in precision or "fp32 grad" in row.text("zero_stage"):
        return False
    return precision.startswith("fp16") or "MP mode PURE" in notes or row.source == "fms-fsdp"
