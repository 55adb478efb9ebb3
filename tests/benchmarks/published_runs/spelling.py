"""Cells as their sources spell them, in the words that the rest reads: `True` is true, `8,192` is 8192, `n/a` is
nothing, `H100 SXM5 80GB` is H100-SXM-80GB, recompute `yes` is full. What is not understood stays as it is, and
`rows.skipped` names it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

COUNTS = (
    "num_gpus", "gpus_per_node", "layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab", "seq_len",
    "num_experts", "top_k", "moe_ffn_hidden", "shared_experts", "dense_layers", "tp", "pp", "vpp", "cp", "ep", "etp",
    "zero_stage", "micro_batch", "global_batch_seqs",
)  # fmt: skip
NEVER_0 = ("cp", "ep", "etp", "vpp", "kv_heads", "vocab", "gpus_per_node")  # of these 0 says that there is none
FIGURES = ("iter_time_s", "tokens_per_s_per_gpu", "peak_mem_gb")
UNTOLD = {"", "-", "--", "–", "—", "?", "n/a", "na", "n.a.", "nan", "null", "unknown", "not stated", "not given", "tbd"}
YES, NO = {"1", "1.0", "true", "yes", "y", "on"}, {"0", "0.0", "false", "no", "n", "off", "none", "disabled"}
GATED = {"swiglu", "geglu", "reglu"}
PLAIN = {"gelu", "relu", "relu2", "squared relu", "squared-relu"}
WHOLE = {"full", "all", "block", "uniform"}  # layers are run again; the last two are Megatron's names of how
SHARDED = (  # stages of ZeRO by the words for them, the first that is found
    (2, r"zero-?2|shard_grad_op|no reshard"), (3, r"zero-?3|full.?shard|[fh]sdp"),
    (1, r"zero-?1|distributed optimizer"),
)  # fmt: skip
DEVICES = {
    "A100 80": "A100-SXM-80GB", "A100 40": "A100-SXM-40GB", "A800 80": "A800-80GB", "H100 80": "H100-SXM-80GB",
    "H200 141": "H200-SXM-141GB", "H800 80": "H800", "B200 180": "B200-180GB", "B200 192": "B200-180GB",
    "B300 288": "B300-288GB", "GB200 186": "GB200-186GB", "GB200 192": "GB200-186GB", "GB300 288": "GB300-288GB",
}  # fmt: skip
ONLY = {name.split()[0]: name for name in DEVICES if not name.startswith("A100")}  # where no memory is told
SCHEDULES = (
    (r"1f1b|non.?interleav", "1F1B"), (r"interleav", "interleaved-1F1B"), (r"g-?pipe", "GPipe"),
    (r"dual-?pipe-?v", "DualPipeV"), (r"dual-?pipe", "DualPipe"),
    (r"(zb|zero.?bubble).?(1p|h1)", "ZB-1p"), (r"(zb|zero.?bubble).?(2p|h2)", "ZB-2p"),
    (r"(zb|zero.?bubble).?v", "ZB-V"),
)  # fmt: skip


def plain(cells: Mapping[str | None, object]) -> dict[str, str]:
    """The cells of one line by lower-case names of columns; what the header does not name is left out."""
    found = {n.strip().lower(): text.strip() for n, text in cells.items() if n and isinstance(text, str)}
    found = {name: "" if text.lower() in UNTOLD else text for name, text in found.items()}
    if not found.get("zero_stage"):
        found["zero_stage"] = _stage(found.get("sharding", ""))
    for name in (*COUNTS, *FIGURES):
        found[name] = number(found.get(name, ""), name)
    for name, spelled in SPELLED.items():
        found[name] = spelled(found.get(name, ""))
    found["gpu"] = device(found.get("gpu", ""), found.get("gpu_mem_gb", ""))
    return found


def number(text: str, name: str) -> str:
    """Without separators of thousands; `8k` tokens are 8,192; a stage of ZeRO may have its name before it."""
    text = re.sub(r"(?<=\d)[,_ ](?=\d{3}(?:\D|$))", "", text)
    if name in COUNTS:
        text = re.sub(r"\.0+$", "", text)
        text = "" if text.lower() == "none" or (text == "0" and name in NEVER_0) else text
    if name == "zero_stage":
        return re.sub(r"^zero-?", "", text, flags=re.IGNORECASE)
    if name == "seq_len" and re.fullmatch(r"\d+ ?[kK]i?", text):
        return str(1024 * int(re.sub(r"\D", "", text)))
    return text


def _stage(sharding: str) -> str:
    return next((str(stage) for stage, said in SHARDED if re.search(said, sharding, re.IGNORECASE)), "")


def device(text: str, memory: str) -> str:
    """The table's name of an accelerator on a board with all links; others, on PCIe say, stay as they are."""
    family = re.search(r"\b(G?B[23]00|[AH][128]00)(?![0-9])", text, re.IGNORECASE)
    if family is None or text in DEVICES.values() or re.search(r"pcie|nvl\b|hbm2e", text, re.IGNORECASE):
        return text
    size = re.search(r"(\d+) ?Gi?B", text[family.end() :], re.IGNORECASE) or re.match(r"(\d+)", memory)
    kind = family[1].upper()
    return DEVICES.get(f"{kind} {size[1]}" if size else ONLY.get(kind, ""), text)


def _flag(yes: str, no: str) -> Callable[[str], str]:
    def spelled(text: str) -> str:
        word = text.lower()
        return yes if word in YES | GATED else no if word in NO | PLAIN else text

    return spelled


def _recompute(text: str) -> str:
    """Activation checkpointing that is only said to be on is PyTorch's, of whole layers."""
    first = re.match(r"[\w.]*", text.lower())
    word = first[0] if first else ""
    if word in NO:
        return "none"
    if word in YES | WHOLE:
        return "full"
    return "selective" if word in ("selective", "partial") else text


def _offload(text: str) -> str:
    return "none" if text.lower() in NO else text


def _precision(text: str) -> str:
    words = re.sub("bfloat16", "bf16", text.lower())
    return re.sub("float16", "fp16", words if "fp8" in words else words.replace("float8", "fp8"))


def _schedule(text: str) -> str:
    """One that begins with a known name is that one; what follows in the cell is a remark."""
    return next((name for said, name in SCHEDULES if re.match(said, text, re.IGNORECASE)), text)


def _sharding(text: str) -> str:
    """Names that the software is told by, in their usual letters."""
    for name in ("distributed optimizer", "FSDP", "HSDP", "ZeRO", "Megatron"):
        text = re.sub(name, name, text, flags=re.IGNORECASE)
    return text


SPELLED: dict[str, Callable[[str], str]] = {
    "gated_mlp": _flag("1", "0"),
    "sequence_parallel": _flag("true", "false"),
    "recompute": _recompute,
    "offload": _offload,
    "precision": _precision,
    "schedule": _schedule,
    "sharding": _sharding,
}
