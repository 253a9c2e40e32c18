"""Keyed noise: random numbers as a pure function of (request, position, token id), by a counter-based hash.

They do not depend on the order in which they are asked for, on the batch, or on whether there is a drafter, so the same
seed gives the same text anywhere. One request has several independent streams; the target's own draws use the main one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
NUMBERS_AT_A_TIME = 1 << 18
"""How many numbers a CPU makes at once: the temporary tensors then stay in its cache."""


def _splitmix(x: Tensor) -> Tensor:
    """Finalise int64 words as splitmix64 does; shifts are logical, so the sign bits they pull in are masked."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * (0xBF58476D1CE4E5B9 - (1 << 64))
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * (0x94D049BB133111EB - (1 << 64))
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def _mix(x: Tensor) -> Tensor:
    """Scramble int32 words (a bijection): xor-shift 16, multiply, xor-shift 15, multiply, xor-shift 16."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * (0x846CA68B - (1 << 32))
    return x ^ ((x >> 16) & 0xFFFF)


def _uniform(table: Tensor, words: Tensor) -> Tensor:
    """Hash the table [M] int32 with words [R, 1] int64 to numbers [R, M] fp32 above 0 and below 1."""
    high, low = (words >> 32).to(torch.int32), words.to(torch.int32)
    hashed = _mix(_mix(table ^ high) ^ low) & 0x7FFFFFFF
    # the last factor keeps the number below 1, whose noise of -inf would beat a lone allowed token
    return (hashed.to(torch.float32) + 0.5).mul_(2.0**-31 * (1 - 2.0**-24))


class KeyedNoise:
    """Standard Gumbel noise as a pure function of (request key, position, token id).

    keys [B] long: one per row, see `request_keys`.
    """

    def __init__(self, keys: Tensor, vocab_size: int) -> None:
        self.keys = keys
        ids = torch.arange(vocab_size, dtype=torch.int32, device=keys.device)
        self._table = _mix(ids)

    def __call__(self, positions: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """Return the noise for the tokens at the given positions.

        positions [B] or [B, K] long: position, in its row, of the token to be drawn.
        token_ids [M] long: the ids to make noise for; None means the whole vocabulary.

        Returns [B, M] or [B, K, M] fp32.
        """
        return self.uniform(positions, token_ids).neg_().log1p_().neg_().log_().neg_()

    def uniform(self, positions: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """Return the uniform numbers that the Gumbel noise is made of: above 0, below 1; arguments as above.

        Use one kind of a stream, not both: they are one draw.
        """
        table = self._table if token_ids is None else self._table[token_ids]
        keys = self.keys.view(-1, *[1] * (positions.dim() - 1))
        words = _splitmix(keys + positions * GOLDEN)
        flat = words.view(-1, 1)
        at_once = max(1, NUMBERS_AT_A_TIME // max(len(table), 1))
        size = at_once if flat.device.type == "cpu" else max(len(flat), 1)
        parts = [_uniform(table, part) for part in flat.split(size)]
        return torch.cat(parts).view(*words.shape, len(table))

    def stream(self, number: int) -> KeyedNoise:
        """Return another stream of the same requests, independent of this one and of all other numbers (from 1)."""
        return self._with_keys(_splitmix((self.keys ^ _splitmix(torch.tensor(number)).to(self.keys.device)) + GOLDEN))

    def take_rows(self, rows: Tensor) -> KeyedNoise:
        """Return the noise of the given rows [R] long, in that order."""
        return self._with_keys(self.keys[rows])

    def replace_rows(self, rows: Tensor, other: KeyedNoise) -> KeyedNoise:
        """Return the noise with `rows` [R] long taken over by the other's rows."""
        return self._with_keys(self.keys.index_copy(0, rows, other.keys))

    def _with_keys(self, keys: Tensor) -> KeyedNoise:
        made = object.__new__(KeyedNoise)
        made.keys, made._table = keys, self._table
        return made


def request_keys(seed: int | Sequence[int] | None, batch_size: int, device: torch.device) -> Tensor:
    """Make one noise key a row.

    seed: an int gives row i the request key (seed, i); a sequence gives each row its own, as if it were row 0 of a
    call with that int; None draws an int from torch's global generator.

    Returns [B] long. Raises ValueError when a sequence of seeds does not have one entry a row.
    """
    if seed is None:
        seed = int(torch.randint(2**62, ()).item())
    if isinstance(seed, int):
        seeds, requests = [seed] * batch_size, list(range(batch_size))
    else:
        seeds, requests = [int(s) for s in seed], [0] * batch_size
        if len(seeds) != batch_size:
            raise ValueError(f"seed must be an int or one int a row: found {len(seeds)} seeds for {batch_size} rows")
    wrapped = [(s + (1 << 63)) % (1 << 64) - (1 << 63) for s in seeds]
    first = _splitmix(torch.tensor(wrapped, dtype=torch.long) * GOLDEN + 1)
    return _splitmix(first + torch.tensor(requests, dtype=torch.long) * GOLDEN).to(device)
