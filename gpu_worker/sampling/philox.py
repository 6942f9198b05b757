"""Philox4x32-10: random numbers that are a pure function of a key and a counter, the same on every device.

Gives integers and uniforms for many rows at once; which counter belongs to which token is told by `uniforms`,
what a uniform chooses is the business of `gpu_worker/sampling/sampler.py`.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from typing import Any

import numpy as np

NUM_ROUNDS = 10
DRAW_SAMPLE = 0  # the draw number that samples a token

_WORD_BITS = np.uint64(32)
_WORD_MASK = np.uint64(0xFFFFFFFF)
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)  # of counter words 0 and 2
_KEY_STEPS = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)  # added to key words 0 and 1 after each round
_ROUNDS = np.arange(NUM_ROUNDS, dtype=np.uint64).reshape(NUM_ROUNDS, 1, 1)

Words = np.ndarray[Any, np.dtype[np.uint32]]
Uniforms = np.ndarray[Any, np.dtype[np.float32]]


def philox4x32(counters: Words, keys: Words) -> Words:
    """Encrypt counters. Shapes: counters [R, 4], keys [R, 2], low word first; returns [R, 4].

    All arithmetic is on uint64, where the product of two 32-bit words fits, so every platform gives the same bits.
    """
    round_keys = (keys.T.astype(np.uint64) + _ROUNDS * _KEY_STEPS) & _WORD_MASK  # [rounds, 2, R]
    lanes = counters.T.astype(np.uint64)  # [4, R]
    multiplied, mixed = lanes[0::2], lanes[1::2]  # counter words (0, 2) and (1, 3)
    for round_key in round_keys:
        products = multiplied * _MULTIPLIERS
        multiplied = (products >> _WORD_BITS)[::-1] ^ mixed ^ round_key
        mixed = (products & _WORD_MASK)[::-1]
    return np.stack((multiplied[0], mixed[0], multiplied[1], mixed[1]), axis=1).astype(np.uint32)


def uniforms(seeds: np.ndarray, positions: np.ndarray, draw: int) -> Uniforms:
    """Draw one number in [0, 1) for each row.

    The key is the row's seed (low word first), the counter is (position, draw, 0, 0), and the number is the upper
    24 bits of output word 0 times 2**-24: 24 bits are what float32 holds exactly, so no rounding can reach 1.

    Shapes: seeds [R] uint64; positions [R] int64, the absolute position of the token being sampled; returns [R].
    """
    keys = np.stack((seeds & _WORD_MASK, seeds >> _WORD_BITS), axis=1).astype(np.uint32)
    counters = np.zeros((len(seeds), 4), dtype=np.uint32)
    counters[:, 0] = positions
    counters[:, 1] = draw
    return ((philox4x32(counters, keys)[:, 0] >> np.uint32(8)) * np.float32(2.0**-24)).astype(np.float32)
