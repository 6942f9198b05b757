"""Sorts workers into generations: those that may stand in for one another, because they agree in all that counts.

Pure bookkeeping over what workers say of themselves; whether one of them lives is the business of the fleet.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import Any, Final

from plugins.types import GenerationId, SamplingParams, WorkerId, WorkerInfo

_DIGEST_BYTES: Final = 4
_PLAIN: Final = asdict(SamplingParams())


class Generations:
    """The generations of all known workers. Owned by the worker fleet; called from one event loop.

    A generation is named after its model and a digest of its properties, so that one which was forgotten comes back
    under the same name. Invariant: each generation has at least one member, each member is in one generation.
    """

    def __init__(self) -> None:
        self._members: dict[WorkerId, GenerationId] = {}
        self._properties: dict[GenerationId, Mapping[str, str]] = {}
        self._models: dict[GenerationId, str] = {}
        self._ordinals: dict[GenerationId, int] = {}
        self._num_opened = 0

    def join(self, worker_id: WorkerId, info: WorkerInfo) -> GenerationId:
        """Put a worker into the generation that it belongs to, out of the one that it was in; open it if need be."""
        properties = _properties(info)
        generation = _name(info.model.name, properties)
        if self._members.get(worker_id) == generation:
            return generation
        self.leave(worker_id)
        self._members[worker_id] = generation
        if generation not in self._properties:
            self._num_opened += 1
            self._properties[generation] = properties
            self._models[generation] = info.model.name
            self._ordinals[generation] = self._num_opened
        return generation

    def leave(self, worker_id: WorkerId) -> None:
        """Take a worker out, and forget its generation if it was the last one. One that is in none is ignored."""
        generation = self._members.pop(worker_id, None)
        if generation is None or generation in self._members.values():
            return
        del self._properties[generation], self._models[generation], self._ordinals[generation]

    def generation(self, worker_id: WorkerId) -> GenerationId | None:
        """Return the generation of a worker; None if it was never described."""
        return self._members.get(worker_id)

    def newest(self, model_name: str) -> GenerationId | None:
        """Return the generation of a model that was opened last; None if none of its workers is known."""
        of_model = [generation for generation, name in self._models.items() if name == model_name]
        return max(of_model, key=self.ordinal, default=None)

    def ordinal(self, generation: GenerationId) -> int:
        """Return a number that is higher the later a generation was opened; 0 for an unknown one."""
        return self._ordinals.get(generation, 0)

    def differences(self, old: GenerationId, new: GenerationId) -> tuple[str, ...]:
        """Tell in what a generation differs from another, each as `property: old value -> new value`.

        Empty if they are the same, or one of them is unknown.
        """
        before, after = self._properties.get(old), self._properties.get(new)
        return () if before is None or after is None else _compare(before, after)

    def changes(self, old: GenerationId, info: WorkerInfo) -> tuple[str, ...]:
        """Tell in what a worker, which need not have joined, differs from a generation. Empty if that is unknown."""
        before = self._properties.get(old)
        return () if before is None else _compare(before, _properties(info))


def _compare(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(f"{key}: {before[key]} -> {after[key]}" for key in after if after[key] != before[key])


def _properties(info: WorkerInfo) -> Mapping[str, str]:
    """Everything in which replicas must agree. A request that one of them took must fit into every other."""
    model = info.model
    return {
        "model": model.name,
        "architecture": model.architecture,
        "dtype": model.dtype,
        "num_parameters": str(model.num_parameters),
        "vocab_size": str(model.vocab_size),
        "eos_token_ids": ", ".join(map(str, model.eos_token_ids)) or "none",
        "max_model_len": str(model.max_model_len),
        "weights_version": info.weights_version or "unknown",
        "tokenizer_sha256": info.tokenizer_sha256[:16] or "unknown",
        "kv_cache_dtype": info.kv_cache_dtype,
        "block_size": str(info.block_size),
        "max_sequences": str(info.max_sequences),
        "max_step_tokens": str(info.max_step_tokens),
        "max_request_tokens": str(min(model.max_model_len, info.num_blocks * info.block_size)),
        "plugins": ", ".join(info.plugins) or "none",
        "logits_processors": ", ".join(info.logits_processors) or "none",
        "has_grammars": str(info.has_grammars).lower(),
        "sampling_limits": _told(asdict(info.sampling_limits)),
        "default_sampling": _told(asdict(model.default_sampling), _PLAIN),
    }


def _told(values: Mapping[str, Any], usual: Mapping[str, Any] = MappingProxyType({})) -> str:
    """Tell the values that are not the usual ones."""
    told = [f"{name}={value}" for name, value in values.items() if name not in usual or usual[name] != value]
    return ", ".join(told) or "none"


def _name(model_name: str, properties: Mapping[str, str]) -> GenerationId:
    digest = hashlib.blake2b(repr(tuple(properties.items())).encode(), digest_size=_DIGEST_BYTES)
    return GenerationId(f"{model_name}-{digest.hexdigest()}")
