"""The noise: the published vectors, and what a seed and a position mean."""

import numpy as np
import pytest

from gpu_worker.sampling.philox import DRAW_SAMPLE, philox4x32, uniforms


def words(*values: int) -> np.ndarray:
    return np.array([values], dtype=np.uint32)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_the_published_known_answers_come_out(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    output = philox4x32(words(*counter), words(*key))

    assert tuple(output[0].tolist()) == expected


def test_rows_are_encrypted_independently() -> None:
    counters = np.array([[0, 0, 0, 0], [0xFFFFFFFF] * 4], dtype=np.uint32)
    keys = np.array([[0, 0], [0xFFFFFFFF] * 2], dtype=np.uint32)

    output = philox4x32(counters, keys)

    assert output[:, 0].tolist() == [0x6627E8D5, 0x408F276D]


def test_a_uniform_is_the_upper_24_bits_of_the_first_word() -> None:
    drawn = uniforms(np.array([0], dtype=np.uint64), np.array([0]), DRAW_SAMPLE)

    assert drawn.dtype == np.float32
    assert drawn[0] * 2**24 == 0x6627E8


def test_the_low_half_of_the_seed_is_the_first_key_word_and_the_position_the_first_counter_word() -> None:
    seed = (0x299F31D0 << 32) | 0xA4093822
    expected = philox4x32(words(1234, 2, 0, 0), words(0xA4093822, 0x299F31D0))[0, 0] >> 8

    drawn = uniforms(np.array([seed], dtype=np.uint64), np.array([1234]), draw=2)

    assert drawn[0] * 2**24 == expected


def test_seeds_positions_and_draws_give_different_noise() -> None:
    seeds = np.array([7, 8, 7, 7 << 32], dtype=np.uint64)
    positions = np.array([1, 1, 2, 1])

    drawn = {*uniforms(seeds, positions, 0).tolist(), *uniforms(seeds, positions, 1).tolist()}

    assert len(drawn) == 8


def test_uniforms_fill_the_unit_interval_evenly() -> None:
    drawn = uniforms(np.full(20_000, 42, dtype=np.uint64), np.arange(20_000), DRAW_SAMPLE)

    counts = np.histogram(drawn, bins=20, range=(0.0, 1.0))[0]
    assert counts.sum() == 20_000
    assert ((counts - 1000.0) ** 2 / 1000.0).sum() < 43.8  # chi-square, 19 degrees of freedom, p = 0.001


def test_no_rows_give_no_noise() -> None:
    drawn = uniforms(np.zeros(0, dtype=np.uint64), np.zeros(0, dtype=np.int64), DRAW_SAMPLE)

    assert drawn.tolist() == []
