"""Random numbers without state: a draw depends only on its key, not on process or order.

`mix` hashes integers to 64 bits. `permute` shuffles [0, size) under a key; it can be evaluated for
a single position, so that a shuffle of a billion samples costs no memory. Both are plain integer
arithmetic: the same on every machine and in every version of numpy. `mix_tensors` is `mix` for
tensors on any device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, overload

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:  # torch takes seconds to import, and nothing here calls its functions
    from torch import Tensor

Integers = npt.NDArray[np.int64]
Keys = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_WORD = (1 << 64) - 1
_ROUNDS = 16  # four rounds mix large sizes well; sizes 4 and 5 need 16 for uniform orders


@overload
def mix(*words: int) -> np.uint64: ...
@overload
def mix(*words: int | np.integer | npt.NDArray[np.integer]) -> np.uint64 | Keys: ...
def mix(*words: int | np.integer | npt.NDArray[np.integer]) -> np.uint64 | Keys:
    """Hashes integers, in their order, to 64 well-mixed bits (splitmix64's finaliser, chained).

    Words are taken modulo 2^64, so they may be negative; arrays broadcast against each other.
    Returns np.uint64 if every word is a scalar, otherwise uint64 of the broadcast shape. The number
    of words counts: mix(1) differs from mix(1, 0).
    """
    state = _scramble(np.array([len(words)], dtype=np.uint64))
    shape: tuple[int, ...] = ()
    for word in words:
        bits = _as_words(word)
        shape = np.broadcast_shapes(shape, bits.shape)
        # Without the constant a word could cancel the number of words: mix(1) would equal mix().
        state = _scramble(state ^ _scramble(np.atleast_1d(bits) ^ _SECOND))
    return state.reshape(shape) if shape else np.uint64(state[0])


def mix_tensors(first: int, *others: Tensor) -> Tensor:
    """Returns the bits of ``mix(first, *others)`` as int64; ``others`` are int64 tensors that
    broadcast.

    Torch cannot compute with uint64; int64 wraps around in the same way.
    """
    count = _scramble(np.array([1 + len(others)], dtype=np.uint64))
    head = _scramble(count ^ _scramble(_as_words(first)[None] ^ _SECOND))
    state: int | Tensor = _signed(head[0])
    for word in others:
        state = _scramble_tensor(_scramble_tensor(word ^ _signed(_SECOND)) ^ state)
    assert not isinstance(state, int)
    return state


def permute(
    position: npt.NDArray[np.integer] | int,
    size: npt.NDArray[np.integer] | int,
    key: np.uint64 | Keys | int,
    rounds: int = _ROUNDS,
) -> Integers:
    """Returns where a shuffle of [0, size) moves each position; every (size, key) is one shuffle.

    position, size and key broadcast, so that one call can serve many shuffles of different sizes.
    Returns int64 of the broadcast shape. Memory is proportional to the number of positions. Another
    number of ``rounds`` gives another shuffle; four are enough for large sizes, and faster.

    It is a Feistel network over a rectangle rows x columns >= size, with additions modulo the
    sides. A result outside [0, size) is permuted again until it is inside (cycle walking, Black and
    Rogaway, 2002).
    """
    where, sizes, keys = np.broadcast_arrays(
        np.asarray(position, dtype=np.int64), np.asarray(size, dtype=np.int64), _as_words(key)
    )
    assert bool(((where >= 0) & (where < sizes)).all()), "positions are outside of [0, size)"
    value, limit = where.ravel().astype(np.uint64), sizes.ravel().astype(np.uint64)
    round_keys = _round_keys(keys.ravel(), rounds)
    rows = (np.sqrt(limit.astype(np.float64)).astype(np.uint64)) + np.uint64(1)
    columns = (limit + rows - np.uint64(1)) // rows
    value = _feistel(value, rows, columns, round_keys)
    outside = np.flatnonzero(value >= limit)
    while outside.size:
        value[outside] = _feistel(
            value[outside], rows[outside], columns[outside], round_keys[:, outside]
        )
        outside = outside[value[outside] >= limit[outside]]
    return value.astype(np.int64).reshape(where.shape)


def _as_words(word: int | np.integer | npt.NDArray[np.integer]) -> Keys:
    """Returns the value modulo 2^64 as uint64; the shape stays."""
    if isinstance(word, int):
        return np.asarray(word & _WORD, dtype=np.uint64)
    return np.asarray(word).astype(np.uint64)


def _scramble(bits: Keys) -> Keys:
    """splitmix64's step and finaliser (Steele, Lea and Flood, 2014): a bijection of 64 bits.

    ``bits`` must have at least one dimension: of scalars that overflow, as they do here by design,
    numpy would warn.
    """
    bits = bits + _GOLDEN
    bits = (bits ^ (bits >> np.uint64(30))) * _FIRST
    bits = (bits ^ (bits >> np.uint64(27))) * _SECOND
    return bits ^ (bits >> np.uint64(31))


def _signed(word: np.uint64) -> int:
    """The number below 2^63 that has the same 64 bits."""
    return int(word.astype(np.int64))


def _scramble_tensor(bits: Tensor) -> Tensor:
    """`_scramble` for int64 tensors."""
    bits = bits + _signed(_GOLDEN)
    bits = (bits ^ _shift_right(bits, 30)) * _signed(_FIRST)
    bits = (bits ^ _shift_right(bits, 27)) * _signed(_SECOND)
    return bits ^ _shift_right(bits, 31)


def _shift_right(bits: Tensor, places: int) -> Tensor:
    """Shifts int64 to the right as if it were uint64: zeros come in, not copies of the sign."""
    return (bits >> places) & ((1 << (64 - places)) - 1)


def _round_keys(keys: Keys, rounds: int) -> Keys:
    """One key per Feistel round: [rounds, n]."""
    number = np.arange(1, rounds + 1, dtype=np.uint64)[:, None]
    return _scramble(keys[None, :] ^ _scramble(number))


def _feistel(value: Keys, rows: Keys, columns: Keys, round_keys: Keys) -> Keys:
    """Applies all rounds once: splits the value into left [0, rows) and right [0, columns), and
    changes them in turn.

    The sum of a number below 2^63 and a hash of 63 bits cannot overflow, so the addition modulo a
    side is exact and hence invertible.
    """
    left, right = value // columns, value % columns
    for number, key in enumerate(round_keys):
        if number % 2 == 0:
            left = (left + (_scramble(right ^ key) >> np.uint64(1))) % rows
        else:
            right = (right + (_scramble(left ^ key) >> np.uint64(1))) % columns
    return left * columns + right
