"""The five workloads: how many clients, how long the prompts, how long the answers.

Each stresses one thing; what is sent is the business of `benchmarks/prompts.py`, how of `benchmarks/load.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Workload:
    """A closed loop: so many clients, each sending its next request when its last one has ended."""

    name: str
    num_clients: int
    num_prefix_tokens: int  # at the start of every prompt, the same in all requests of a run
    num_distinct_tokens: int  # after them, different in each request
    num_output_tokens: int  # forced: end-of-sequence tokens end nothing
    what: str  # what it stresses

    @property
    def num_prompt_tokens(self) -> int:
        return self.num_prefix_tokens + self.num_distinct_tokens

    @property
    def min_waves(self) -> int:
        """Requests per client at the least: a prefix needs later waves that may find it cached."""
        return 6 if self.num_prefix_tokens else 2


WORKLOADS: Mapping[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload("W1", 1, 0, 128, 128, "one stream"),
        Workload("W2", 8, 0, 128, 128, "a few streams"),
        Workload("W3", 32, 0, 128, 128, "many streams"),
        Workload("W4", 8, 512, 32, 64, "a prefix in common"),
        Workload("W5", 1, 0, 1024, 16, "a long prompt"),
    )
}
