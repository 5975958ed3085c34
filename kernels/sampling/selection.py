"""What sampling kernels share: masses of a row, and the place in their descending order without sorting them.

Masses are exp((logit - best) / temperature), at most 1, so their bits are integers that order as they do. The token at
which a running sum in descending order passes a target is found digit by digit: ten passes over the row, eight
thresholds at a time. A row stays in the cache meanwhile. Sums are float64 in a fixed order.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from epdserve.kernels.launch import next_power_of_2

_BLOCK: Final = 1024  # tokens at a time
_GOLDEN: Final = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1: Final = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2: Final = tl.constexpr(0x94D049BB133111EB)
_TINY: Final = tl.constexpr(1e-300)
_ONE_BITS: Final = tl.constexpr(0x3F800000)  # mass of the best token


def block_of(vocabulary: int) -> int:
    """Tokens that a program looks at at a time."""
    return min(_BLOCK, next_power_of_2(vocabulary))


@triton.jit
def mixed(bits: tl.tensor) -> tl.tensor:
    """A 64-bit mixing function; see ``uniform_ref``."""
    bits = (bits ^ (bits >> 30)) * _MIX_1
    bits = (bits ^ (bits >> 27)) * _MIX_2
    return bits ^ (bits >> 31)


@triton.jit
def uniform(seed: tl.tensor, position: tl.tensor) -> tl.tensor:
    """Float64 in [0, 1) of (seed, position): the bits of ``uniform_ref``."""
    bits = mixed(seed.to(tl.uint64, bitcast=True) + _GOLDEN)
    bits = mixed(bits + position.to(tl.uint64, bitcast=True) * _GOLDEN)
    return (bits >> 11).to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def best_token(logits_ptr: tl.tensor, V: tl.constexpr, BLOCK: tl.constexpr) -> tl.tuple:
    """Largest logit and the lowest token that has it; NaN counts as minus infinity."""
    lane = tl.arange(0, BLOCK)
    value = tl.full((BLOCK,), float("-inf"), tl.float32)
    place = lane
    for start in range(0, V, BLOCK):
        x = tl.load(logits_ptr + start + lane, mask=start + lane < V, other=float("-inf"))
        place = tl.where(x > value, start + lane, place)
        value = tl.where(x > value, x, value)
    best = tl.max(value, axis=0)
    return best, tl.min(tl.where(value == best, place, V), axis=0)


@triton.jit
def load_mass(
    logits_ptr: tl.tensor, token: tl.tensor, best: tl.tensor, heat: tl.tensor, V: tl.constexpr
) -> tl.tensor:
    """Mass relative to the best token, float32; 0 for what is no number or outside."""
    x = tl.load(logits_ptr + token, mask=token < V, other=float("-inf"))
    mass = tl.exp(tl.div_rn(x - best, heat))
    return tl.where(mass > 0.0, mass, 0.0)


@triton.jit
def mass_from(
    logits_ptr: tl.tensor,
    best: tl.tensor,
    heat: tl.tensor,
    bits: tl.tensor,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Float64 sum of the masses whose bits are at least ``bits``."""
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, V, BLOCK):
        mass = load_mass(logits_ptr, start + tl.arange(0, BLOCK), best, heat, V)
        total += tl.where(mass.to(tl.int32, bitcast=True) >= bits, mass, 0.0).to(tl.float64)
    return tl.sum(total, axis=0)


@triton.jit
def descend(
    logits_ptr: tl.tensor,
    best: tl.tensor,
    heat: tl.tensor,
    target: tl.tensor,
    COUNT: tl.constexpr,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tuple:
    """Mass bits of the token at which the running weight in descending order passes ``target``; weight of heavier ones.

    The weight of a token is 1 (COUNT) or its mass.
    """
    digit = tl.arange(0, 8)
    bits = tl.cast(0, tl.int32)
    heavier = tl.cast(0.0, tl.float64)
    for step in range(10):  # 30 bits: a mass is at most 1
        shift = 27 - 3 * step
        threshold = bits + (digit << shift)
        weight = tl.zeros((8,), tl.float64)
        for start in range(0, V, BLOCK):
            token = start + tl.arange(0, BLOCK)
            mass = load_mass(logits_ptr, token, best, heat, V)
            own = tl.where(token < V, 1.0, 0.0) if COUNT else mass
            over = mass.to(tl.int32, bitcast=True)[None, :] >= threshold[:, None]
            weight += tl.sum(tl.where(over, own[None, :], 0.0).to(tl.float64), axis=1)
        passed = weight > target
        heavier = tl.maximum(heavier, tl.max(tl.where(passed, 0.0, weight), axis=0))
        bits += tl.maximum(tl.sum(passed.to(tl.int32), axis=0) - 1, 0) << shift
    return bits, heavier


@triton.jit
def before(x: tl.tensor) -> tl.tensor:
    """The next smaller float64 of a positive one: passing it is reaching ``x``."""
    x = tl.maximum(x, _TINY)
    return (x.to(tl.int64, bitcast=True) - 1).to(tl.float64, bitcast=True)


@triton.jit
def cutoff(
    logits_ptr: tl.tensor,
    best: tl.tensor,
    heat: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tuple:
    """What the filters leave, in descending order: all masses above ``bits``, the first ``ties`` of those equal to it.

    Every filter leaves a run from the best token on; the shortest of them is kept. Third: the mass of it, float64.
    """
    bits = tl.cast(0, tl.int32)
    ties = tl.cast(V, tl.int32)
    mass = mass_from(logits_ptr, best, heat, bits, V, BLOCK)
    if (top_k > 0) & (top_k < V):
        bits, count = descend(logits_ptr, best, heat, (top_k - 1).to(tl.float64), True, V, BLOCK)
        ties = (top_k - count.to(tl.int64)).to(tl.int32)
        own = bits.to(tl.float32, bitcast=True).to(tl.float64)
        mass = mass_from(logits_ptr, best, heat, bits + 1, V, BLOCK) + own * ties.to(tl.float64)
    if top_p < 1.0:
        wanted = top_p * mass
        last, heavier = descend(logits_ptr, best, heat, before(wanted), False, V, BLOCK)
        own = last.to(tl.float32, bitcast=True).to(tl.float64)
        needed = tl.maximum(tl.ceil((wanted - heavier) / own), 1.0)
        shorter = (last > bits) | ((last == bits) & (needed < ties.to(tl.float64)))
        bits = tl.where(shorter, last, bits)
        ties = tl.where(shorter, needed.to(tl.int32), ties)
        mass = tl.where(shorter, heavier + needed * own, mass)
    if min_p > 0.0:
        least = min_p.to(tl.float32)
        least_bits = least.to(tl.int32, bitcast=True) + (least.to(tl.float64) < min_p).to(tl.int32)
        if least_bits > _ONE_BITS:  # the best token always stays
            bits = tl.cast(_ONE_BITS, tl.int32)
            ties = tl.cast(1, tl.int32)
            mass = tl.cast(1.0, tl.float64)
        elif least_bits > bits:
            bits = least_bits - 1
            ties = tl.cast(0, tl.int32)
            mass = mass_from(logits_ptr, best, heat, least_bits, V, BLOCK)
    return bits, ties, mass


@triton.jit
def nth_equal(
    logits_ptr: tl.tensor,
    best: tl.tensor,
    heat: tl.tensor,
    bits: tl.tensor,
    rank: tl.tensor,
    otherwise: tl.tensor,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Token number ``rank`` (from 0, lower tokens first) of those whose mass has these bits."""
    found = otherwise
    seen = tl.cast(0, tl.int32)
    for start in range(0, V, BLOCK):
        token = start + tl.arange(0, BLOCK)
        mass = load_mass(logits_ptr, token, best, heat, V)
        same = ((mass.to(tl.int32, bitcast=True) == bits) & (token < V)).to(tl.int32)
        hit = (same == 1) & (tl.cumsum(same, axis=0) + seen == rank + 1)
        here = tl.max(tl.where(hit, token, -1), axis=0)
        found = tl.where(here >= 0, here, found)
        seen += tl.sum(same, axis=0)
    return found
