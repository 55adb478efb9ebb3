"""Numbers with units: the table of units, and the way from text to a value in base units and back."""

from __future__ import annotations

import re

DECIMAL = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18}
BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}
SCALES = {**DECIMAL, **BINARY}

_LONGEST = 40  # characters of a number; beyond that nobody counts the digits
_LARGEST_EXPONENT = 40
NUMBER = r"([0-9]+(?:_[0-9]+)*+)(?:\.([0-9]+(?:_[0-9]+)*+))?(?:[eE]([+-]?[0-9]+))?+"
_NUMBER = re.compile(f"(-?){NUMBER}[ \\t]*")


class QuantityProblem(ValueError):
    """What is wrong with a quantity, without its place: the scanner knows that."""

    def __init__(self, code: str, message: str, nearest: tuple[str, ...] = (), label: str = "") -> None:
        self.code, self.message, self.nearest, self.label = code, message, nearest, label
        super().__init__(message)


def _units() -> dict[str, tuple[int, int, str]]:
    """unit -> (numerator, denominator, dimension); one unit is numerator / denominator base units."""
    units: dict[str, tuple[int, int, str]] = {"": (1, 1, ""), "B": (1, 1, "bytes"), "B/s": (1, 1, "bytes/s")}
    units.update({scale: (factor, 1, "") for scale, factor in SCALES.items()})
    for scale, factor in SCALES.items():
        if scale != "E":
            units[f"{scale}B"] = (factor, 1, "bytes")
            units[f"{scale}B/s"] = (factor, 1, "bytes/s")
    for scale, factor in {"": 1, **{s: DECIMAL[s] for s in "kMGT"}}.items():
        units[f"{scale}b/s"] = units[f"{scale}bit/s"] = (factor, 8, "bytes/s")  # networks count bits
    for scale, factor in {"": 1, **{s: DECIMAL[s] for s in "kMGTPE"}, "Z": 10**21, "Y": 10**24}.items():
        units[f"{scale}FLOP"] = (factor, 1, "flops")
        units[f"{scale}FLOP/s"] = units[f"{scale}FLOPS"] = (factor, 1, "flop/s")
    for unit, per_second in {"ns": 10**9, "us": 10**6, "µs": 10**6, "μs": 10**6, "ms": 10**3}.items():
        units[unit] = (1, per_second, "seconds")
    units.update({u: (seconds, 1, "seconds") for u, seconds in {"s": 1, "min": 60, "h": 3600, "d": 86400}.items()})
    for unit, dimension in _COUNTED.items():
        units.update({f"{s} {unit}".strip(): (f, 1, dimension) for s, f in {"": 1, **SCALES}.items()})
    units.update({"%": (1, 100, "fraction"), "$": (1, 1, "money"), "$/h": (1, 1, "money/hour")})
    return units


_COUNTED = {
    "tokens": "tokens",
    "token": "tokens",
    "tokens/s": "tokens/s",
    "sequences": "sequences",
    "USD": "money",
    "USD/h": "money/hour",
}
UNITS = _units()
DIMENSIONS = tuple(dict.fromkeys(dimension for _, _, dimension in UNITS.values()))
_ALIASES = {"token", "FLOPS", "µs", "μs", "$", "$/h"}  # read, but neither written nor suggested
_WHOLE = {"bytes": "a byte", "tokens": "a token", "sequences": "a sequence"}  # no half of these

# what people write for something else, and what it is here
_HINTS = {
    "B tokens": "`B` is bytes; a thousand million is `G`",
    "K": "a thousand is `k`, 1024 is `Ki`",
    **{f"{s}b": "a small `b` is a bit, and sizes are in bytes" for s in ("", *"kMGT")},
    **{f"{s}FLOPs": "a number of operations is `FLOP`, a speed is `FLOP/s`" for s in ("", *"kMGTPE")},
}
_INSTEAD = {
    "K": ("k", "Ki"), "KB": ("kB", "KiB"), "KB/s": ("kB/s", "KiB/s"), "m": ("M", "Mi", "min"), "mb": ("MB", "MiB"),
    "gb": ("GB", "GiB"), "kb": ("kB", "KiB"), "tb": ("TB", "TiB"), "B tokens": ("G tokens",), "b": ("B",),
    "K tokens": ("k tokens", "Ki tokens"), "hours": ("h",), "hour": ("h",), "days": ("d",), "day": ("d",),
    "minutes": ("min",), "sec": ("s",), "seconds": ("s",), "bytes": ("B",), "percent": ("%",), "dollars": ("USD",),
    "USD/hour": ("USD/h",), "$/hour": ("$/h",), "usd": ("USD",),
}  # fmt: skip
_INSTEAD.update({f"{s}b": (f"{s}B", f"{s}iB") for s in "kMGT"} | {f"{s}bps": (f"{s}b/s",) for s in "kMGT"})
_INSTEAD.update({f"{s}FLOPs": (f"{s}FLOP/s", f"{s}FLOP") for s in ("", *"kMGTPE")})


def read_quantity(text: str) -> tuple[int | float, str]:
    """`80 GiB` -> (85899345920, "bytes"). The value is an int whenever it is whole; raises `QuantityProblem`."""
    match = _NUMBER.match(text)
    if match is None:
        raise QuantityProblem("T113", f"`{_shorten(text)}` is not a number")
    sign, digits, decimals, power = match[1], match[2], match[3] or "", match[4] or "0"
    if len(match[0]) > _LONGEST or len(power) > 4 or abs(int(power)) > _LARGEST_EXPONENT:
        raise QuantityProblem(
            "T112", f"the number {_shorten(match[0])} is too long or out of range", label="up to 1e40"
        )
    unit = " ".join(text[match.end() :].split())
    if unit not in UNITS:
        raise _unknown_unit(match[0].strip(), unit)
    numerator, denominator, dimension = UNITS[unit]
    mantissa, exponent = int(sign + digits + decimals), int(power) - len(decimals.replace("_", ""))
    numerator, denominator = (
        (mantissa * numerator * 10**exponent, denominator)
        if exponent >= 0
        else (mantissa * numerator, denominator * 10**-exponent)
    )
    if abs(numerator) > denominator * 10**_LARGEST_EXPONENT:
        raise QuantityProblem("T112", f"{text} is out of range", label="up to 1e40")
    if numerator % denominator == 0:
        return numerator // denominator, dimension
    if dimension in _WHOLE:
        raise _not_whole(text, numerator, denominator, dimension)
    return numerator / denominator, dimension


def _not_whole(text: str, numerator: int, denominator: int, dimension: str) -> QuantityProblem:
    below = numerator // denominator
    exact = f"{numerator / denominator:.10g} {dimension}"
    message = f"{text}{'' if text == exact else f' = {exact}'}: there is no part of {_WHOLE[dimension]}"
    return QuantityProblem("T111", message, (write_quantity(below, dimension), write_quantity(below + 1, dimension)))


def _unknown_unit(number: str, unit: str) -> QuantityProblem:
    if any(character.isdigit() for character in unit):
        message = f"`{_shorten(number + unit)}` is neither a number nor a name"
        return QuantityProblem("T113", message, label="a name begins with a letter")
    first, _, rest = unit.partition("/")
    if rest and first in UNITS:
        return QuantityProblem("T110", f"`{_shorten(unit)}` is not a unit", label="to divide, put spaces around `/`")
    nearest = _INSTEAD.get(unit) or _similar_units(unit)
    legal = tuple(_with_unit(number, near) for near in nearest)
    return QuantityProblem("T110", f"`{_shorten(unit)}` is not a unit", legal, _HINTS.get(unit, ""))


def _similar_units(unit: str) -> tuple[str, ...]:
    from titan.grammar.suggestions import nearest_names

    scale = unit.partition(" ")[0] + " "
    scaled = " " in unit and scale.strip() in SCALES
    candidates = [u for u in UNITS if u and not _is_alias(u) and u.startswith(scale if scaled else "")]
    return nearest_names(unit, (u for u in candidates if len(unit) <= 2 or u not in SCALES))


def _shorten(text: str) -> str:
    return text if len(text) <= 30 else f"{text[:12]}...{text[-6:]}"


def format_quantity(value: int | float, dimension: str) -> str:
    """For people: three digits, and both ways where two are in use (`80 GiB = 85.9 GB`, `400 Gb/s = 50 GB/s`)."""
    if dimension == "bytes":
        return " = ".join(dict.fromkeys((_scaled(value, _BINARY_BYTES), _scaled(value, _DECIMAL_BYTES))))
    if dimension == "bytes/s":
        return f"{_scaled(value * 8, _BITS)} = {_scaled(value, _BYTE_RATES)}"
    if dimension in ("tokens", "sequences"):
        return _format_count(value, dimension)
    if dimension == "fraction":
        return f"{value * 100:.6g}%"
    if dimension in _LADDERS:
        return _scaled(value, _LADDERS[dimension])
    return str(value) if isinstance(value, int) else f"{value:g}"


def _ladder(scales: dict[str, int], unit: str) -> tuple[tuple[str, float], ...]:
    return ((unit, 1.0), *((scale + unit, float(factor)) for scale, factor in scales.items()))


_BINARY_BYTES = _ladder(BINARY, "B")
_DECIMAL_BYTES = _ladder({s: DECIMAL[s] for s in "kMGTP"}, "B")
_BITS = _ladder({s: DECIMAL[s] for s in "kMGT"}, "b/s")
_BYTE_RATES = _ladder({s: DECIMAL[s] for s in "kMGTP"}, "B/s")
_LADDERS = {
    "flops": _ladder(DECIMAL | {"Z": 10**21, "Y": 10**24}, "FLOP"),
    "flop/s": _ladder(DECIMAL, "FLOP/s"),
    "seconds": (("ns", 1e-9), ("us", 1e-6), ("ms", 1e-3), ("s", 1.0), ("min", 60.0), ("h", 3600.0), ("d", 86400.0)),
    "tokens/s": _ladder({s: DECIMAL[s] for s in "kMGT"}, " tokens/s"),
    "money": (("USD", 1.0),),
    "money/hour": (("USD/h", 1.0),),
}


def _scaled(value: int | float, ladder: tuple[tuple[str, float], ...]) -> str:
    unit, factor = ladder[0]
    for name, size in ladder:
        if abs(value) >= size:
            unit, factor = name, size
    return f"{_three_digits(value / factor)} {unit.strip()}"


def _three_digits(value: float) -> str:
    size = abs(value)
    text = f"{value:.{0 if size >= 100 else 1 if size >= 10 else 2}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _format_count(value: int | float, unit: str) -> str:
    if abs(value) < 100_000:
        return f"{value:g} {unit}"
    decimal = _scaled(value, _ladder({s: DECIMAL[s] for s in "kMGT"}, "")).replace(" ", "")
    exact = write_quantity(value, unit) if isinstance(value, int) and value % 1024 == 0 else ""
    return f"{exact} = {decimal} {unit}" if "i" in exact.split(" ")[0] else f"{decimal} {unit}"


def write_quantity(value: int | float, dimension: str) -> str:
    """For `.titan` files: `read_quantity` gives exactly `value` back. The shortest form, binary before decimal."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e30:
        value = int(value)  # its shortest decimal form would be read as another whole number
    if isinstance(value, int):
        forms = []
        for unit, (numerator, denominator, kind) in UNITS.items():
            if kind == dimension and not _is_alias(unit) and value * denominator % numerator == 0:
                forms.append(_with_unit(str(value * denominator // numerator), unit))
        if value and forms:
            return min(forms, key=lambda form: (len(form.split(" ")[0].rstrip("kMGTPEi")), "i" not in form, len(form)))
    base = {"bytes": "B", "bytes/s": "B/s", "flops": "FLOP", "flop/s": "FLOP/s", "seconds": "s", "fraction": "%"}
    unit = base.get(dimension) or ({"money": "USD", "money/hour": "USD/h"}.get(dimension, dimension))
    if dimension != "fraction":
        return _with_unit(repr(value), unit)
    exact = (text for digits in (6, 15, 16, 17) if read_quantity(text := f"{value * 100:.{digits}g}%")[0] == value)
    return next(exact, f"{value * 100:.17g}%")


def _is_alias(unit: str) -> bool:
    return unit.split(" ")[-1] in _ALIASES or "bit" in unit or unit.endswith("FLOPS")


def _with_unit(number: str, unit: str) -> str:
    if unit in SCALES or unit in ("", "%") or unit.split(" ")[0] in SCALES:
        return number + unit
    return f"{number} {unit}"
