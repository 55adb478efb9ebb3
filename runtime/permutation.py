"""A pseudo-random permutation of 0..n-1 that is evaluated at one point: no list of n numbers is ever made.

A Feistel network permutes the integers of k bits, where 2^k is the smallest that holds n; walking along its cycle
until the value is below n restricts it to a permutation of 0..n-1 (Black and Rogaway, "Ciphers with arbitrary
finite domains", 2002). Less than two walks are expected, whatever n.
"""

from __future__ import annotations

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, the increment of splitmix64
ROUNDS = 8


def mix(value: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014): a bijection of 64-bit integers that scatters them."""
    value &= MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def derive_key(*parts: int) -> int:
    """One 64-bit key out of several integers, in which each and their order count."""
    key = 0
    for part in parts:
        key = mix(key + GOLDEN + mix(part & MASK))
    return key


def permute(position: int, count: int, key: int) -> int:
    """Where `position` (0 <= position < count) goes under the permutation that `key` names."""
    if not 0 <= position < count:
        raise ValueError(f"position {position} is not within 0..{count - 1}")
    bits = (count - 1).bit_length()
    while True:
        position = _scramble(position, bits, key)
        if position < count:
            return position


def _scramble(value: int, bits: int, key: int) -> int:
    """A permutation of the integers of `bits` bits: each round changes one half by a hash of the other."""
    low_bits = (bits + 1) // 2
    low_mask, high_mask = (1 << low_bits) - 1, (1 << (bits - low_bits)) - 1
    high, low = value >> low_bits, value & low_mask
    for turn in range(ROUNDS):
        if turn % 2:
            high ^= mix(key + GOLDEN * (turn + 1) + mix(low)) & high_mask
        else:
            low ^= mix(key + GOLDEN * (turn + 1) + mix(high)) & low_mask
    return high << low_bits | low
