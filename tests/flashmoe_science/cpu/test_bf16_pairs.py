"""What stands for the processor's instructions for bf16, held against the manual's description in exact numbers."""

from __future__ import annotations

import ctypes
import itertools
import math
import random
import struct
from fractions import Fraction
from pathlib import Path

import pytest
from matrix_unit import code_of_pairs

from flashmoe_science.cpu.library import SOURCES
from flashmoe_science.jit import host

LANES = 16
LEAST_NORMAL = Fraction(1, 2**126)
EDGES = (
    *(0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x807FFFFF, 0x00800000, 0x80800000),
    *(0x00800001, 0x80FFFFFF, 0x3F800000, 0xBF800000, 0x3F807FFF, 0x3F808000, 0x3F808001, 0x3F818000),
    *(0x3F817FFF, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F7F7FFF, 0x7F7F8000, 0x7F800000, 0xFF800000, 0x7F800001),
    *(0xFF800001, 0x7FC00000, 0x7FC12345, 0xFF812345, 0x34000000, 0x33800000, 0x1F800000, 0x20000000),
)
"""Bits of fp32 numbers at which rounding and flushing change, and special ones."""


@pytest.fixture(scope="module")
def functions() -> ctypes.CDLL:
    instruction_set, macros = code_of_pairs()
    source = Path(__file__).with_name("bf16_pairs.cpp")
    build = host.build(source, "bf16_pairs", instruction_set, macros=macros, include_directories=(SOURCES,))
    return host.load(build)


def float_of(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def flushed(bits: int) -> int:
    """A number below the normal ones is zero with its sign."""
    return bits if bits & 0x7F800000 else bits & 0x80000000


def rounded(exact: Fraction, negative: bool) -> int:
    """The bits of the nearest fp32 number, ties to even, after which a number below the normal ones is zero."""
    sign = 0x80000000 if negative else 0
    size = abs(exact)
    if not size:
        return sign
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= size < Fraction(2) ** exponent
    nearest = round(size / Fraction(2) ** (exponent - 23)) * Fraction(2) ** (exponent - 23)
    if nearest < LEAST_NORMAL:
        return sign
    if nearest >= 2**128:
        return sign | 0x7F800000
    return sign | int(struct.unpack("<I", struct.pack("<f", float(nearest)))[0])


def fused(a: int, b: int, c: int) -> int:
    """The bits of a * b + c of fp32 numbers; of any NaN the same."""
    a, b, c = (flushed(each) for each in (a, b, c))
    x, y, z = (float_of(each) for each in (a, b, c))
    if not all(map(math.isfinite, (x, y, z))):
        special = x * y + z if math.isfinite(z) or not math.isfinite(x * y) else z
        return 0x7FC00000 if math.isnan(special) else 0xFF800000 if special < 0 else 0x7F800000
    exact = Fraction(x) * Fraction(y) + Fraction(z)
    if exact:
        return rounded(exact, exact < 0)
    return 0x80000000 if (a ^ b) & c & 0x80000000 else 0


def dot(acc: int, a: int, b: int) -> int:
    """The upper numbers of the pairs come first, each sum is rounded once."""
    acc = fused(a & 0xFFFF0000, b & 0xFFFF0000, acc)
    return fused(a << 16 & 0xFFFF0000, b << 16 & 0xFFFF0000, acc)


def to_bf16(bits: int) -> int:
    if math.isnan(float_of(bits)):
        return bits >> 16 | 0x40
    bits = flushed(bits)
    return bits + 0x7FFF + (bits >> 16 & 1) >> 16


def words(values: list[int]) -> ctypes.Array[ctypes.c_uint32]:
    assert len(values) % LANES == 0
    return (ctypes.c_uint32 * len(values))(*values)


def near(generator: random.Random, exponent: int) -> int:
    """Bits of a number of this exponent, give or take two; a few of its digits are often all there are."""
    digits = generator.choice([generator.getrandbits(23), generator.getrandbits(3) << 20, 0x7FFFFF, 0])
    biased = min(max(exponent + 127 + generator.randint(-2, 2), 0), 255)
    return generator.getrandbits(1) << 31 | biased << 23 | digits


def pair(high: int, low: int) -> int:
    return high & 0xFFFF0000 | low >> 16


def cases(exponents: tuple[int, int, int], seed: int, count: int) -> list[tuple[int, int, int]]:
    """Sums and pairs of numbers of about these exponents."""
    generator = random.Random(seed)

    def some(exponent: int) -> int:
        return near(generator, exponent)

    of_sum, of_a, of_b = exponents
    return [(some(of_sum), pair(some(of_a), some(of_a)), pair(some(of_b), some(of_b))) for _ in range(count)]


def products(functions: ctypes.CDLL, problems: list[tuple[int, int, int]]) -> list[int]:
    sums, a, b = (words(list(each)) for each in zip(*problems, strict=True))
    functions.dot_pairs_of(sums, a, b, ctypes.c_int64(len(problems) // LANES))
    return list(sums)


def assert_right(functions: ctypes.CDLL, problems: list[tuple[int, int, int]]) -> None:
    for problem, got in zip(problems, products(functions, problems), strict=True):
        expected = dot(*problem)
        if math.isnan(float_of(expected)):
            assert got & 0x7FC00000 == 0x7FC00000, [f"{each:08x}" for each in problem]
        else:
            assert got == expected, [f"{each:08x}" for each in (*problem, got, expected)]


@pytest.mark.parametrize(
    "exponents",
    [
        *((0, 0, 0), (0, -12, -12), (20, 0, 0), (-24, 0, 0)),
        *((-126, -63, -63), (-126, -70, -76), (-125, -100, -27), (0, -126, 0), (-126, -126, -126)),
        *((127, 63, 64), (127, 127, 0), (0, 127, 127), (103, 127, -24)),
    ],
    ids=str,
)
def test_dot_products_of_pairs(functions: ctypes.CDLL, exponents: tuple[int, int, int]) -> None:
    """Of usual numbers, of those about the smallest normal one and of those about the largest."""
    assert_right(functions, cases(exponents, 0, 3200))


def test_dot_products_of_edges(functions: ctypes.CDLL) -> None:
    generator = random.Random(1)
    of_pairs = [(pair(x, generator.choice(EDGES)), y) for x, y in itertools.product(EDGES, EDGES)]
    assert_right(
        functions,
        [
            (acc, a, pair(b, generator.choice(EDGES)))
            for acc in generator.sample(EDGES, 8)
            for a, b in of_pairs
        ],
    )


def test_a_sum_that_rounds_to_the_least_normal_number_is_not_flushed(functions: ctypes.CDLL) -> None:
    """Rounded as if exponents had no bounds: 2^-126 less 2^-151 becomes 2^-126, and less 2^-150 it is below."""
    least = 0x00800000
    to_151, to_150, factor = (exponent + 127 << 23 for exponent in (-75, -74, -76))
    problems = [(least, each, factor | 1 << 31) for each in (to_151, to_150)] * (LANES // 2)
    assert products(functions, problems)[:2] == [least, 0]
    assert_right(functions, problems)


def test_the_upper_numbers_are_added_first(functions: ctypes.CDLL) -> None:
    """The largest number and the same negative: what comes between them is lost."""
    one, large = 0x3F800000, 0x7F000000
    assert products(functions, [(large | 1 << 31, pair(large, one), pair(one, one))] * LANES)[0] == one
    assert products(functions, [(large | 1 << 31, pair(one, large), pair(one, one))] * LANES)[0] == 0


def rounding_cases() -> list[int]:
    generator = random.Random(2)
    return [*EDGES, *(generator.getrandbits(32) for _ in range(6400))]


def test_rounding(functions: ctypes.CDLL) -> None:
    numbers = rounding_cases()
    to = (ctypes.c_uint16 * len(numbers))()
    functions.round_each(to, words(numbers), ctypes.c_int64(len(numbers) // LANES))
    assert list(to) == [to_bf16(each) for each in numbers]


def test_rounding_of_pairs(functions: ctypes.CDLL) -> None:
    low = rounding_cases()
    high = low[1:] + low[:1]
    to = words([0] * len(low))
    functions.round_pairs(to, words(low), words(high), ctypes.c_int64(len(low) // LANES))
    assert list(to) == [to_bf16(upper) << 16 | to_bf16(lower) for lower, upper in zip(low, high, strict=True)]
