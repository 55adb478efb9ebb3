"""The training part of a spec: batch, precision, optimizer, length, data."""

# No `annotations` from `__future__`: of texts pydantic compiles each one to know the type.

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, model_validator
from pydantic import Field as Rule
from titan.compiler.spec.kinds import (
    NONE_WORD,
    Count,
    Length,
    Natural,
    NonNegative,
    Part,
    Positive,
    Problem,
    Share,
    quantity,
    refuse,
    whole,
)
from titan.compiler.spec.report import similar
from titan.compiler.spec.values import Applied, Scalar, Text, describe

CORPORA = ("shakespeare", "synthetic")  # data that needs no file


def _described(value: Any) -> Any:
    """`tokens("corpus.tokens")`, a path or a built-in name, as the text that names it to the data loader."""
    if isinstance(value, Applied):
        if value.name not in (*CORPORA, "tokens"):
            raise refuse("T217", f"`{value.name}(...)` names no data", ("tokens(...)", *CORPORA))
        if not all(isinstance(argument, Scalar | Text) for argument in value.arguments):
            raise refuse("T214", f"`{value.name}(...)` takes a text or a number")
        return f"{value.name}({', '.join(describe(argument) for argument in value.arguments)})"
    if isinstance(value, str) and value and value not in CORPORA and not any(sign in value for sign in "./("):
        near = similar(value, CORPORA) or (f'tokens("{value}.tokens")', *CORPORA)
        raise refuse("T217", f"`{value}` names no data", near)
    return value


class AdamW(Part):
    """AdamW with decoupled weight decay; without `min_learning_rate` a cosine ends at a tenth of the peak."""

    KINDS = ("adamw",)
    learning_rate: Positive
    min_learning_rate: Annotated[NonNegative | None, NONE_WORD] = None
    beta1: Share = 0.9
    beta2: Share = 0.95
    eps: Positive = 1e-8
    weight_decay: NonNegative = 0.1


class Validation(Part):
    """Held-out loss: each `every` steps over `batches` global batches of `data` (empty: the held-out part)."""

    KINDS = ("validation",)
    data: Annotated[str, BeforeValidator(_described)] = ""
    every: Count = 100
    batches: Count = 8


class Train(Part):
    """Training settings; `global_batch` in sequences (`4Mi tokens` is divided by `sequence`). With a `separator`, the
    token that ends a document, attention and labels stay inside the documents that share a sequence."""

    KINDS = ("train",)
    sequence: Length
    global_batch: Annotated[int, Rule(gt=0, lt=2**53), quantity("", "sequences")]
    precision: Literal["fp32", "bf16", "fp64", "fp8"] = "fp32"
    optimizer: AdamW = Rule(default_factory=lambda: AdamW(learning_rate=3e-4))
    warmup_steps: Natural = 0
    steps: Annotated[Count | None, NONE_WORD] = None
    total_tokens: Annotated[Annotated[int, Rule(gt=0), quantity("tokens", "")] | None, NONE_WORD] = None
    schedule: Literal["cosine", "constant"] = "cosine"
    clip: Annotated[Positive | None, NONE_WORD] = 1.0
    data: Annotated[str, BeforeValidator(_described)] = ""
    separator: Annotated[Natural | None, NONE_WORD] = None
    validation: Annotated[Validation | None, NONE_WORD] = None
    seed: Natural = 1234

    @model_validator(mode="before")
    @classmethod
    def _sequences(cls, data: Any) -> Any:
        """Tokens per batch become sequences; a batch is never rounded."""
        batch = data.get("global_batch") if isinstance(data, dict) else None
        length = whole(data.get("sequence")) if isinstance(data, dict) else None
        if not isinstance(batch, Scalar) or batch.dimension != "tokens":
            return data
        if not length:
            return data | {"global_batch": 1}  # the sequence is missing or wrong, and that is reported
        count, rest = divmod(batch.value, length)
        if rest:
            near = tuple(f"{k * length} tokens" for k in (count, count + 1) if k)
            text = f"global_batch = {batch.text} is no whole number of sequences of {length} tokens"
            return data | {"global_batch": Problem("T229", text, near)}
        return data | {"global_batch": int(count)}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.steps is not None and self.total_tokens is not None:
            raise refuse("T235", "`steps` and `total_tokens` both say how long to train; give one", at="total_tokens")
        end = self.total_steps
        if end is not None and self.warmup_steps > end:
            text = f"warmup_steps = {self.warmup_steps} is longer than the training of {end} steps"
            raise refuse("T235", text, (f"warmup_steps <= {end}",), at="warmup_steps")
        return self

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.sequence

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps of the whole job (total tokens rounded up to whole steps), None when not said."""
        if self.steps is not None or self.total_tokens is None:
            return self.steps
        return -(-self.total_tokens // self.tokens_per_step)
