"""Counter-based random numbers: every number is a pure function of a key and a counter, bit for bit on any device.

The bits are SplitMix64 (Steele, Lea, Flood 2014: the state after n steps is key + n * golden, so any element is reached
at once). Normal numbers come from the inverse distribution function AS 241 (Wichura 1988), formed with + - * / and sqrt
only: these are rounded correctly everywhere, whereas a library's log or cosine may differ in the last bit between
devices or between the vector and the scalar part of one loop.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_WORD = 1 << 64
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_LN2 = 0.6931471805599453

# AS 241, highest power first: numerators and denominators of the centre, the near and the far tail.
_CENTRE = (
    (2509.0809287301226727, 33430.575583588128105, 67265.770927008700853, 45921.953931549871457,
     13731.693765509461125, 1971.5909503065514427, 133.14166789178437745, 3.387132872796366608),
    (5226.495278852854561, 28729.085735721942674, 39307.89580009271061, 21213.794301586595867,
     5394.1960214247511077, 687.1870074920579083, 42.313330701600911252, 1.0),
)  # fmt: skip
_NEAR = (
    (7.7454501427834140764e-4, 2.27238449892691845833e-2, 2.4178072517745061177e-1, 1.27045825245236838258,
     3.64784832476320460504, 5.7694972214606914055, 4.6303378461565452959, 1.42343711074968357734),
    (1.05075007164441684324e-9, 5.475938084995344946e-4, 1.51986665636164571966e-2, 1.4810397642748007459e-1,
     6.8976733498510000455e-1, 1.6763848301838038494, 2.05319162663775882187, 1.0),
)  # fmt: skip
_FAR = (
    (2.01033439929228813265e-7, 2.71155556874348757815e-5, 1.2426609473880784386e-3, 2.6532189526576123093e-2,
     2.9656057182850489123e-1, 1.7848265399172913358, 5.4637849111641143699, 6.6579046435011037772),
    (2.04426310338993978564e-15, 1.4215117583164458887e-7, 1.8463183175100546818e-5, 7.868691311456132591e-4,
     1.4875361290850615025e-2, 1.3692988092273580531e-1, 5.9983220655588793769e-1, 1.0),
)  # fmt: skip


def _signed(number: int) -> int:
    """The two's complement value of the low 64 bits."""
    number %= _WORD
    return number - _WORD if number >> 63 else number


def _mix(word: int) -> int:
    word = ((word ^ (word >> 30)) * _FIRST) % _WORD
    word = ((word ^ (word >> 27)) * _SECOND) % _WORD
    return word ^ (word >> 31)


def key(*parts: int | str) -> int:
    """A 64-bit key (signed) from numbers and words, each of which changes all of it."""
    state = 0
    for part in parts:
        if isinstance(part, str):
            part = int.from_bytes(hashlib.sha256(part.encode()).digest()[:8], "little")
        state = _mix((state + _GOLDEN) % _WORD ^ _mix(part % _WORD))
    return _signed(state)


def _shifted(word: Tensor, by: int) -> Tensor:
    """word XOR (word >> by), the shift without sign."""
    return torch.bitwise_right_shift(word, by).bitwise_and_((1 << (64 - by)) - 1).bitwise_xor_(word)


def bits(keys: Tensor | int, counters: Tensor) -> Tensor:
    """64 random bits (int64) for each pair of key and counter; the two broadcast."""
    word = (counters * _signed(_GOLDEN)).add(keys)
    word = _shifted(word, 30).mul_(_signed(_FIRST))
    word = _shifted(word, 27).mul_(_signed(_SECOND))
    return _shifted(word, 31)


def uniform(keys: Tensor | int, counters: Tensor) -> Tensor:
    """Float64 in (0, 1), multiples of 2^-53 that are never 0 or 1."""
    whole = torch.bitwise_right_shift(bits(keys, counters), 12).bitwise_and_((1 << 52) - 1)
    return whole.to(torch.float64).add_(0.5).mul_(2.0**-52)


def normal(keys: Tensor | int, counters: Tensor) -> Tensor:
    """Float64 with mean 0 and standard deviation 1."""
    return inverse_normal(uniform(keys, counters))


def inverse_normal(probability: Tensor) -> Tensor:
    """The quantile of the standard normal distribution for float64 in (0, 1), to about 1e-15."""
    offset = probability - 0.5
    value = _ratio(_CENTRE, 0.180625 - offset * offset).mul_(offset)
    outside = offset.abs() > 0.425
    if bool(outside.any()):
        chosen, side = probability[outside], offset[outside]
        root = _log(torch.minimum(chosen, 1.0 - chosen)).neg_().sqrt_()
        tail = torch.where(root <= 5.0, _ratio(_NEAR, root - 1.6), _ratio(_FAR, root - 5.0))
        value[outside] = torch.where(side < 0, -tail, tail)
    return value


def _polynomial(coefficients: tuple[float, ...], x: Tensor) -> Tensor:
    value = torch.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        value.mul_(x).add_(coefficient)
    return value


def _ratio(pair: tuple[tuple[float, ...], tuple[float, ...]], x: Tensor) -> Tensor:
    return _polynomial(pair[0], x).div_(_polynomial(pair[1], x))


def _log(x: Tensor) -> Tensor:
    """Natural logarithm: x = m 2^e with m near 1, log m = 2 artanh((m - 1) / (m + 1)) by its series."""
    mantissa, exponent = torch.frexp(x)
    low = mantissa < 0.7071067811865476
    mantissa = torch.where(low, mantissa * 2.0, mantissa)
    power = (exponent - low.to(exponent.dtype)).to(x.dtype)
    t = (mantissa - 1.0) / (mantissa + 1.0)
    series = _polynomial(tuple(1.0 / (2 * k + 1) for k in range(11, -1, -1)), t * t)
    return series.mul_(t).mul_(2.0).add_(power.mul_(_LN2))
