"""Ways in which files break: cut short, bits flipped, blocks copied, numbers blown up, two files spliced."""

import re

import numpy as np

HUGE = (b"0", b"-1", b"65536", b"4294967295", b"99999999999999999999", b"1e999", b"NaN")
BYTES = (0x00, 0x01, 0x7F, 0x80, 0xFF)


def cut(data: bytes, rng: np.random.Generator) -> bytes:
    return data[: int(rng.integers(0, len(data) + 1))]


def flip(data: bytes, rng: np.random.Generator) -> bytes:
    changed = bytearray(data)
    for _ in range(int(rng.integers(1, 9))):
        place = int(rng.integers(len(changed)))
        changed[place] = int(rng.choice(BYTES)) if rng.random() < 0.5 else changed[place] ^ (1 << int(rng.integers(8)))
    return bytes(changed)


def flip_header(data: bytes, rng: np.random.Generator) -> bytes:
    """Most of what a reader trusts stands at the beginning."""
    return flip(data[:64], rng) + data[64:]


def repeat(data: bytes, rng: np.random.Generator) -> bytes:
    start, end = sorted(int(i) for i in rng.integers(0, len(data) + 1, 2))
    return data[:end] + data[start:end] * int(rng.integers(1, 4)) + data[end:]


def drop(data: bytes, rng: np.random.Generator) -> bytes:
    start, end = sorted(int(i) for i in rng.integers(0, len(data) + 1, 2))
    return data[:start] + data[end:]


def blow_up(data: bytes, rng: np.random.Generator) -> bytes:
    """Another number in place of one that stands in a text."""
    numbers = list(re.finditer(rb"-?\d+(\.\d+)?", data))
    if not numbers:
        return flip(data, rng)
    found = numbers[int(rng.integers(len(numbers)))]
    return data[: found.start()] + HUGE[int(rng.integers(len(HUGE)))] + data[found.end() :]


def retype(data: bytes, rng: np.random.Generator) -> bytes:
    """Another kind of value in place of a quoted text or a number: what a schema would forbid."""
    values = list(re.finditer(rb'"[^"]*"|-?\d+(\.\d+)?', data))
    if not values:
        return flip(data, rng)
    found = values[int(rng.integers(len(values)))]
    other = (b"null", b"[]", b"{}", b'"x"', b"true", b"[[[[1]]]]", b"-7")
    return data[: found.start()] + other[int(rng.integers(len(other)))] + data[found.end() :]


def noise(data: bytes, rng: np.random.Generator) -> bytes:
    return bytes(rng.integers(0, 256, int(rng.integers(0, 400)), dtype=np.uint8))


MUTATIONS = (cut, flip, flip_header, repeat, drop, blow_up, retype, noise)


def mutate(data: bytes, others: list[bytes], rng: np.random.Generator) -> bytes:
    """One to three mutations, now and then after another file's end was put to this one's beginning."""
    if rng.random() < 0.1:
        other = others[int(rng.integers(len(others)))]
        data = data[: int(rng.integers(len(data) + 1))] + other[int(rng.integers(len(other) + 1)) :]
    for _ in range(int(rng.integers(1, 4))):
        if data:
            data = MUTATIONS[int(rng.integers(len(MUTATIONS)))](data, rng)
    return data
