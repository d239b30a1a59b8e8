"""Hadamard matrices and the orders of their rows."""

from __future__ import annotations

import pytest
import torch

from hot.hadamard import hadamard_matrix, is_power_of_two, lp_l1_rows, random_signs, sequency_order

SIZES = [2**k for k in range(11)]


def sign_changes(row: torch.Tensor) -> int:
    return int((row[1:] != row[:-1]).sum())


@pytest.mark.parametrize("n", SIZES)
def test_rows_are_orthogonal(n: int) -> None:
    h = hadamard_matrix(n)
    assert torch.equal(h @ h.T, n * torch.eye(n, dtype=torch.float64))


@pytest.mark.parametrize("n", [1, 2, 8, 64])
def test_entries_are_the_parity_of_shared_bits(n: int) -> None:
    expected = [[(-1.0) ** (i & j).bit_count() for j in range(n)] for i in range(n)]
    assert torch.equal(hadamard_matrix(n), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("n", SIZES)
def test_sequency_order_counts_sign_changes(n: int) -> None:
    h = hadamard_matrix(n)[list(sequency_order(n))]
    assert [sign_changes(row) for row in h] == list(range(n))


@pytest.mark.parametrize("n", [2, 16, 128])
def test_lowest_sequencies_span_the_averages_of_neighbours(n: int) -> None:
    for k in range(n.bit_length()):
        kept = hadamard_matrix(n)[list(sequency_order(n)[: 2**k])]
        width = n // 2**k
        averages = torch.eye(2**k, dtype=torch.float64).repeat_interleave(width, 1)
        projector = kept.T @ kept / n
        assert torch.equal(projector, averages.T @ averages / width)


@pytest.mark.parametrize("n", [0, -4, 3, 12, 24, 1000])
def test_only_powers_of_two(n: int) -> None:
    assert not is_power_of_two(n)
    with pytest.raises(ValueError, match=str(n)):
        hadamard_matrix(n)


def test_lp_l1_is_the_published_triangle() -> None:
    order = sequency_order(16)
    # a + b < 4 with (a, b) = divmod(s, 4), b reversed on odd a: the snake 0 1 2 3 / 7 6 5 4 / 8 9 10 11 / 15 14 13 12
    assert lp_l1_rows(16) == tuple(order[s] for s in (0, 1, 2, 3, 5, 6, 7, 8, 9, 15))
    assert [len(lp_l1_rows(n)) for n in (1, 4, 64, 256)] == [1, 3, 36, 136]


@pytest.mark.parametrize("n", [2, 8, 9, 36])
def test_lp_l1_needs_a_power_of_four(n: int) -> None:
    with pytest.raises(ValueError, match="power of four"):
        lp_l1_rows(n)


def test_random_signs_depend_on_size_and_seed_alone() -> None:
    first = random_signs(64, 1)
    torch.manual_seed(99)
    random_signs.cache_clear()
    assert random_signs(64, 1) == first
    assert set(first) == {-1, 1}
    assert random_signs(64, 2) != first


def test_numbers_stay_on_the_cpu_under_another_default_device() -> None:
    random_signs.cache_clear()
    with torch.device("meta"):
        assert hadamard_matrix(4).device.type == "cpu"
        assert len(random_signs(8, 5)) == 8
