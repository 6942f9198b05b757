"""Numbers of threads for one test: where threads part the work must change nothing that it leads to."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Compute with so many meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.fixture
def two_threads() -> Iterator[None]:
    with threads(2):
        yield


@pytest.fixture
def five_threads() -> Iterator[None]:
    with threads(5):
        yield
