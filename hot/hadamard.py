"""Hadamard matrices and the orders of their rows. Pure numbers: no policy, no backend."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor


def is_power_of_two(n: int) -> bool:
    """Whether n is 1, 2, 4, 8, …"""
    return n > 0 and n & (n - 1) == 0


def hadamard_matrix(n: int) -> Tensor:
    """Sylvester's Hadamard matrix in natural order: (n, n) of ±1, float64, on the CPU; ``H @ H.T == n * I``.

    Entry (i, j) is (-1)^popcount(i & j). Raises ValueError unless n is a power of two.
    """
    if not is_power_of_two(n):
        raise ValueError(f"a Hadamard matrix of size {n} was asked for; the size must be a power of two")
    h = torch.ones(1, 1, dtype=torch.float64, device="cpu")  # whatever the default device is
    while h.shape[0] < n:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h


@lru_cache(maxsize=64)
def sequency_order(n: int) -> tuple[int, ...]:
    """Natural row indices from the lowest sequency (number of sign changes along the row) to the highest.

    n is a power of two. The row of sequency s stands at the bit-reversed Gray code of s: J. L. Shanks, "Computation of
    the fast Walsh-Fourier transform", IEEE Trans. Comput. C-18 (1969).
    """
    bits = n.bit_length() - 1

    def natural(s: int) -> int:
        gray = s ^ (s >> 1)
        return int(f"{gray:0{bits}b}"[::-1], 2) if bits else 0

    return tuple(natural(s) for s in range(n))


def lp_l1_rows(n: int) -> tuple[int, ...]:
    """The rows that the published low-pass keeps, as natural indices in sequency order.

    Sequency s is written as a pair (a, b) in base m = √n along a snake (a = s // m; b = s % m on even a, m − 1 − s % m
    on odd a), and the triangle a + b < m is kept: m(m + 1)/2 of n rows. Raises ValueError unless n is a power of four.
    """
    m = math.isqrt(n)
    if m * m != n or not is_power_of_two(n):
        raise ValueError(f"order lp_l1 needs a block that is a power of four (4, 16, 64, 256), not {n}")

    def kept(s: int) -> bool:
        a, b = divmod(s, m)
        return a + (b if a % 2 == 0 else m - 1 - b) < m

    return tuple(row for s, row in enumerate(sequency_order(n)) if kept(s))


@lru_cache(maxsize=64)
def random_signs(n: int, seed: int) -> tuple[int, ...]:
    """n signs ±1 drawn with their own generator: the same on every machine for one (n, seed)."""
    draw = torch.randint(0, 2, (n,), generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
    return tuple((2 * draw - 1).tolist())
