"""The kinds of field a spec is made of: numbers with units, words, blocks; read from evaluated or Python values."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError
from titan.compiler.plan.frozen import dataclass
from titan.compiler.spec.values import Scalar

KIND, NAME = "<kind>", "<name>"  # what a written block was called, beside its keys

# Kinds and words of later versions: refused by name with the reason instead of as unknown.
LATER: dict[str, str] = {
    "fp16": "half precision needs loss scaling, which is not built yet",
}


def refuse(code: str, message: str, nearest: tuple[str, ...] = (), at: str = "") -> PydanticCustomError:
    """An error with a code of the catalogue; `at` is the offending key below the block (`^key`: beside it)."""
    return PydanticCustomError(code, "{message}", {"message": message, "nearest": nearest, "at": at})


@dataclass(frozen=True, slots=True)
class Problem:
    """Stands for a value that a whole block found wrong, so that its field reports it beside all others."""

    code: str
    message: str
    nearest: tuple[str, ...] = ()
    at: str = ""


def quantity(*dimensions: str) -> BeforeValidator:
    """Accept a number of one of the dimensions ("" is a plain number); give its value in base units."""

    def read(value: Any) -> Any:
        if isinstance(value, Problem):
            raise refuse(value.code, value.message, value.nearest, value.at)
        if isinstance(value, bool | str | dict | list):
            raise refuse("T214", f"here {_wanted(dimensions)} is needed")
        if not isinstance(value, Scalar):
            return value
        if value.dimension not in dimensions:
            raise refuse("T215", _wrong_unit(value, dimensions))
        return value.value

    return BeforeValidator(read)


_UNITS = {
    "": "a plain number",
    "bytes": "bytes (GB, GiB, ...)",
    "bytes/s": "a bandwidth (GB/s, Gb/s, ...)",
    "flops": "operations (FLOP)",
    "flop/s": "a rate (TFLOP/s, ...)",
    "seconds": "a time (us, ms, s, ...)",
    "tokens": "tokens",
    "sequences": "sequences",
    "fraction": "a fraction (0.9 or 90%)",
    "money": "money ($)",
    "money/hour": "money per hour ($/h)",
}


def _wanted(dimensions: tuple[str, ...]) -> str:
    return " or ".join(_UNITS.get(d, d) for d in dimensions)


def _wrong_unit(value: Scalar, dimensions: tuple[str, ...]) -> str:
    return f"{value.text} is {_wanted((value.dimension,))}, but here {_wanted(dimensions)} is needed"


def entries(data: Any) -> Any:
    """The keys of a block without what it was called."""
    return {k: v for k, v in data.items() if k not in (KIND, NAME)} if isinstance(data, dict) else data


def _absent(value: Any) -> Any:
    return None if value == "none" else value


TABLE = BeforeValidator(entries)  # a block whose keys are free names
NONE_WORD = BeforeValidator(_absent)  # `clip = none` is the absence of a value

MOST = 2**31  # of anything that is counted; what is checked against divisors stays quick below it
Count = Annotated[int, Field(gt=0, lt=MOST), quantity("")]
Natural = Annotated[int, Field(ge=0, lt=2**53), quantity("")]
Length = Annotated[int, Field(gt=0, lt=MOST), quantity("", "tokens")]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False), quantity("")]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False), quantity("")]
Share = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False), quantity("", "fraction")]
Bytes = Annotated[int, Field(gt=0), quantity("bytes")]
Reserve = Annotated[int, Field(ge=0), quantity("bytes")]
Bandwidth = Annotated[float, Field(gt=0, allow_inf_nan=False), quantity("bytes/s")]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False), quantity("flop/s")]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False), quantity("seconds")]
Price = Annotated[float, Field(ge=0, allow_inf_nan=False), quantity("money/hour")]
Flag = Annotated[bool, Field(strict=True)]


class Part(BaseModel):
    """A block of the spec. `KINDS` are the names it may be written with; a bare `{ ... }` is always allowed."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=False, protected_namespaces=(), defer_build=True
    )  # deferred: most parts are only validated inside another
    KINDS: ClassVar[tuple[str, ...]] = ()

    @model_validator(mode="before")
    @classmethod
    def _named_rightly(cls, data: Any) -> Any:
        if not isinstance(data, dict) or KIND not in data:
            return data
        if data[KIND] and data[KIND] not in cls.KINDS:
            raise wrong_kind(data[KIND], cls.KINDS)
        if "name" in cls.model_fields and "name" not in data and data[NAME]:
            data = data | {"name": data[NAME]}
        return entries(data)


def wrong_kind(kind: str, kinds: tuple[str, ...]) -> PydanticCustomError:
    """The refusal of `kind { ... }` where only `kinds` may stand."""
    offered = ", ".join(f"`{k}`" for k in kinds)
    if kind in LATER:
        return refuse("T224", f"`{kind}` is not available in this version: {LATER[kind]}; available: {offered}", kinds)
    return refuse("T217", f"`{kind} {{ ... }}` cannot stand here; this is {offered}", kinds)


def whole(value: Any) -> int | None:
    """The value when it is a positive whole number, else None."""
    value = value.value if isinstance(value, Scalar) else value
    return int(value) if isinstance(value, int | float) and value > 0 and value == int(value) else None
