"""Keyed randomness without state: a draw depends on its key alone, not on process or order.

`mix` hashes integers to 64 bits; `permute` is a keyed bijection of [0, size) that is evaluated one
position at a time, so that a shuffle of a billion samples costs no memory. Both are plain integer
arithmetic: the same on every machine and in every version of numpy. `mix_tensors` is `mix` on the
device of its words.
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
_ROUNDS = 16  # four mix large domains; sizes 4 and 5 are uniform over all orders from 16 on


@overload
def mix(*words: int) -> np.uint64: ...
@overload
def mix(*words: int | np.integer | npt.NDArray[np.integer]) -> np.uint64 | Keys: ...
def mix(*words: int | np.integer | npt.NDArray[np.integer]) -> np.uint64 | Keys:
    """Hash integers, in their order, to 64 well-mixed bits (splitmix64's finaliser, chained).

    Words are taken modulo 2^64, so they may be negative; arrays broadcast against each other.
    Returns np.uint64 where every word is a scalar, otherwise uint64 of the broadcast shape.
    The number of words counts: mix(1) differs from mix(1, 0).
    """
    state = _scramble(np.array([len(words)], dtype=np.uint64))
    shape: tuple[int, ...] = ()
    for word in words:
        bits = _as_words(word)
        shape = np.broadcast_shapes(shape, bits.shape)
        # The constant keeps a word from cancelling the count it starts from: mix(1) is not mix().
        state = _scramble(state ^ _scramble(np.atleast_1d(bits) ^ _SECOND))
    return state.reshape(shape) if shape else np.uint64(state[0])


def mix_tensors(first: int, *others: Tensor) -> Tensor:
    """The bits of ``mix(first, *others)`` as int64, for int64 tensors that broadcast.

    Torch has no arithmetic of uint64; int64 wraps around in the same way.
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
    """Moves each position as a keyed shuffle of [0, size) does: a bijection for every (size, key).

    position, size and key broadcast, so that one call may serve many shuffles of unequal sizes.
    Returns int64 of the broadcast shape. Memory is proportional to the positions asked for.
    Another number of ``rounds`` gives another shuffle; four are enough for large sizes, and faster.
    It is a Feistel network over a rectangle rows x columns >= size, with additions modulo the
    sides; a result outside [0, size) is permuted again until it is inside (cycle walking, Black and
    Rogaway, 2002). Raises ValueError for a position outside [0, size).
    """
    where, sizes, keys = np.broadcast_arrays(
        np.asarray(position, dtype=np.int64), np.asarray(size, dtype=np.int64), _as_words(key)
    )
    if where.size and bool(((where < 0) | (where >= sizes)).any()):
        raise ValueError(
            f"permute: got positions from {int(where.min())} to {int(where.max())}, "
            f"wanted 0 <= position < size (smallest size {int(sizes.min())})"
        )
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
    """The value modulo 2^64 as uint64, of its own shape."""
    if isinstance(word, int):
        return np.asarray(word & _WORD, dtype=np.uint64)
    return np.asarray(word).astype(np.uint64)


def _scramble(bits: Keys) -> Keys:
    """splitmix64's step and finaliser (Steele, Lea and Flood, 2014): a bijection of 64 bits.

    Takes arrays of at least one dimension: numpy warns of the wanted overflow for scalars only.
    """
    bits = bits + _GOLDEN
    bits = (bits ^ (bits >> np.uint64(30))) * _FIRST
    bits = (bits ^ (bits >> np.uint64(27))) * _SECOND
    return bits ^ (bits >> np.uint64(31))


def _signed(word: np.uint64) -> int:
    """The number below 2^63 that has the same 64 bits."""
    return int(word.astype(np.int64))


def _scramble_tensor(bits: Tensor) -> Tensor:
    """`_scramble` of int64: its right shifts bring in zeros, not copies of the sign."""
    bits = bits + _signed(_GOLDEN)
    bits = (bits ^ _shifted(bits, 30)) * _signed(_FIRST)
    bits = (bits ^ _shifted(bits, 27)) * _signed(_SECOND)
    return bits ^ _shifted(bits, 31)


def _shifted(bits: Tensor, places: int) -> Tensor:
    return (bits >> places) & ((1 << (64 - places)) - 1)


def _round_keys(keys: Keys, rounds: int) -> Keys:
    """One key per Feistel round: [rounds, n]."""
    number = np.arange(1, rounds + 1, dtype=np.uint64)[:, None]
    return _scramble(keys[None, :] ^ _scramble(number))


def _feistel(value: Keys, rows: Keys, columns: Keys, round_keys: Keys) -> Keys:
    """One pass over the rectangle: left in [0, rows), right in [0, columns), changed in turn.

    The sum of a number below 2^63 and a hash shifted to 63 bits cannot overflow, so that the
    addition modulo a side is exact and hence invertible.
    """
    left, right = value // columns, value % columns
    for number, key in enumerate(round_keys):
        if number % 2 == 0:
            left = (left + (_scramble(right ^ key) >> np.uint64(1))) % rows
        else:
            right = (right + (_scramble(left ^ key) >> np.uint64(1))) % columns
    return left * columns + right
