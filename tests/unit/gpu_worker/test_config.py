"""What a worker's configuration refuses by itself."""

import pytest

from gpu_worker.config import WorkerConfig
from plugins.errors import InvalidConfig


@pytest.mark.parametrize(("value", "shown"), [(0.0, "0.0"), (float("inf"), "inf"), (float("nan"), "nan")])
def test_a_cache_of_no_or_endless_memory_is_refused(value: float, shown: str) -> None:
    with pytest.raises(InvalidConfig, match=f"^worker.kv_cache_gib must be a number above 0, is {shown}$"):
        WorkerConfig(kv_cache_gib=value)
