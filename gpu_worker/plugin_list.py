"""Names the plug-ins of this environment that can change what a worker computes.

Lists distributions; loading what they provide is the business of whoever uses a hook.
"""

from collections.abc import Iterable
from importlib.metadata import Distribution, distributions
from typing import Final

GROUPS: Final = frozenset(
    f"dihedral.{hook}"
    for hook in (
        "general_plugins",
        "workers",
        "worker_extensions",
        "logits_processors",
        "model_loaders",
        "sleep_backends",
        "kv_cache_dtypes",
    )
)
_OWN: Final = "dihedral"


def worker_plugins(installed: Iterable[Distribution] | None = None) -> tuple[str, ...]:
    """Return every distribution that provides one of the worker's hooks, as name==version, sorted; ours excepted.

    `installed` is what to look at; None: this environment.
    """
    found = {
        f"{distribution.name}=={distribution.version}"
        for distribution in (distributions() if installed is None else installed)
        if distribution.name != _OWN and any(entry.group in GROUPS for entry in distribution.entry_points)
    }
    return tuple(sorted(found))
