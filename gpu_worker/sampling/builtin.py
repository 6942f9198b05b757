"""The stages that every worker has, in the order that docs/sampling.md tells.

Custom processors come behind them; who runs them all is the business of `gpu_worker/sampling/processors.py`.
"""

from gpu_worker.sampling.allowed_tokens import AllowedTokens
from gpu_worker.sampling.bad_words import BadWords
from gpu_worker.sampling.logit_bias import LogitBias
from gpu_worker.sampling.min_tokens import MinTokens
from gpu_worker.sampling.penalties import Penalties
from plugins.logits import LogitsProcessor, ProcessorConfig, RequestStates
from plugins.types import SamplingLimits


def builtin_processors(
    config: ProcessorConfig, states: RequestStates, limits: SamplingLimits
) -> tuple[LogitsProcessor, ...]:
    """Build one of each; their buffers hold what the limits say, so that nothing admitted is refused."""
    return (
        AllowedTokens(config, states, limits),
        LogitBias(config, states, limits),
        MinTokens(config, states, limits),
        Penalties(config, states),
        BadWords(config, states, limits),
    )
