"""A served model for the tests of admission and API: the small byte-level tokenizer and round numbers."""

import functools

from control_plane.engine.served import ServedModel, ServedModels
from control_plane.text.model import TextModel
from plugins.types import GenerationId, ModelInfo, TokenId, TokenizerBundle, WorkerId, WorkerInfo
from tests.unit.control_plane.text.byte_level import VOCAB_SIZE, bundle


def served_model(
    name: str = "small",
    max_model_len: int = 128,
    num_blocks: int = 64,
    block_size: int = 16,
    tokenizer: TokenizerBundle | None = None,
    generation: str | None = None,
) -> ServedModel:
    """One model: 270 tokens in the vocabulary, 128 in the context, 1024 in the KV cache."""
    model = ModelInfo(
        name=name,
        architecture="LlamaForCausalLM",
        dtype="float32",
        vocab_size=VOCAB_SIZE,
        max_model_len=max_model_len,
        eos_token_ids=(TokenId(2),),
        num_parameters=1000,
    )
    worker = WorkerInfo(
        model=model,
        incarnation="first",
        num_blocks=num_blocks,
        block_size=block_size,
        max_sequences=4,
        max_step_tokens=64,
        kv_cache_dtype="float32",
        kv_bytes=4096,
        tokenizer_sha256="",
        load_s=0.5,
    )
    return ServedModel(worker, _text_model(tokenizer or bundle()), GenerationId(generation or f"{name}-1"))


@functools.cache
def _text_model(tokenizer: TokenizerBundle) -> TextModel:
    return TextModel.from_bundle(tokenizer)


def directory(*models: ServedModel) -> ServedModels:
    """The models that are served."""
    models_by_name = ServedModels()
    for number, model in enumerate(models):
        models_by_name.add(WorkerId(f"10.0.0.{number}:50061"), model)
    return models_by_name
