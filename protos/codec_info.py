"""Turns what a worker is into messages and back: its sizes, its model, its tokenizer in pieces.

Steps travel by `protos/codec.py`.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from typing import Final

from plugins.errors import WorkerLost
from plugins.types import ModelInfo, ProcessorInfo, SamplingLimits, TokenId, TokenizerBundle, WorkerInfo
from protos.admin.v1 import admin_pb2
from protos.codec_sampling import decode_sampling, encode_sampling
from protos.common.v1 import common_pb2
from protos.worker.v1 import worker_pb2

TOKENIZER_CHUNK_BYTES: Final = 256 * 1024


def encode_model_info(model: ModelInfo) -> common_pb2.ModelInfo:
    return common_pb2.ModelInfo(
        name=model.name,
        architecture=model.architecture,
        dtype=model.dtype,
        vocab_size=model.vocab_size,
        max_model_len=model.max_model_len,
        eos_token_ids=model.eos_token_ids,
        num_parameters=model.num_parameters,
        default_sampling=encode_sampling(model.default_sampling),
    )


def decode_model_info(message: common_pb2.ModelInfo) -> ModelInfo:
    return ModelInfo(
        name=message.name,
        architecture=message.architecture,
        dtype=message.dtype,
        vocab_size=message.vocab_size,
        max_model_len=message.max_model_len,
        eos_token_ids=tuple(map(TokenId, message.eos_token_ids)),
        num_parameters=message.num_parameters,
        default_sampling=decode_sampling(message.default_sampling),
    )


def encode_worker_info(info: WorkerInfo) -> worker_pb2.WorkerInfo:
    return worker_pb2.WorkerInfo(
        model=encode_model_info(info.model),
        incarnation=info.incarnation,
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        max_sequences=info.max_sequences,
        max_step_tokens=info.max_step_tokens,
        kv_cache_dtype=info.kv_cache_dtype,
        kv_bytes=info.kv_bytes,
        tokenizer_sha256=info.tokenizer_sha256,
        load_s=info.load_s,
        weights_version=info.weights_version,
        plugins=info.plugins,
        sampling_limits=worker_pb2.SamplingLimits(**asdict(info.sampling_limits)),
        logits_processors=info.logits_processors,
        has_grammars=info.has_grammars,
    )


def decode_worker_info(message: worker_pb2.WorkerInfo) -> WorkerInfo:
    """Read what a worker says it is. Raises: WorkerLost: a size that every worker has is 0."""
    info = WorkerInfo(
        model=decode_model_info(message.model),
        incarnation=message.incarnation,
        num_blocks=message.num_blocks,
        block_size=message.block_size,
        max_sequences=message.max_sequences,
        max_step_tokens=message.max_step_tokens,
        kv_cache_dtype=message.kv_cache_dtype,
        kv_bytes=message.kv_bytes,
        tokenizer_sha256=message.tokenizer_sha256,
        load_s=message.load_s,
        weights_version=message.weights_version,
        plugins=tuple(message.plugins),
        sampling_limits=SamplingLimits(
            **{each.name: getattr(message.sampling_limits, each.name) for each in fields(SamplingLimits)}
        ),
        logits_processors=tuple(message.logits_processors),
        has_grammars=message.has_grammars,
    )
    sizes = ("num_blocks", "block_size", "max_sequences", "max_step_tokens")
    missing = [name for name in sizes if getattr(info, name) == 0]
    missing += [f"model.{name}" for name in ("vocab_size", "max_model_len") if getattr(info.model, name) == 0]
    if missing:
        raise WorkerLost(f"it describes itself with 0 for {', '.join(missing)}")
    return info


def encode_processor_info(info: ProcessorInfo) -> admin_pb2.LogitsProcessorInfo:
    return admin_pb2.LogitsProcessorInfo(
        name=info.name,
        place=info.place,
        distribution=info.distribution,
        extra_arg_names=info.extra_arg_names or (),
        may_read_anything=info.extra_arg_names is None,
        parameter_schema=info.parameter_schema,
    )


def encode_tokenizer(bundle: TokenizerBundle) -> Iterator[worker_pb2.GetTokenizerResponse]:
    """Cut a tokenizer into messages of at most TOKENIZER_CHUNK_BYTES; the first carries the header."""
    data = bundle.tokenizer_json
    header = worker_pb2.TokenizerHeader(
        chat_template=bundle.chat_template,
        bos_token=bundle.bos_token,
        eos_token=bundle.eos_token,
        add_bos=bundle.add_bos,
        sha256=hashlib.sha256(data).hexdigest(),
        num_bytes=len(data),
    )
    yield worker_pb2.GetTokenizerResponse(header=header, data=data[:TOKENIZER_CHUNK_BYTES])
    for start in range(TOKENIZER_CHUNK_BYTES, len(data), TOKENIZER_CHUNK_BYTES):
        yield worker_pb2.GetTokenizerResponse(data=data[start : start + TOKENIZER_CHUNK_BYTES])


def decode_tokenizer(messages: Sequence[worker_pb2.GetTokenizerResponse]) -> TokenizerBundle:
    """Join a tokenizer's messages. Raises: WorkerLost: pieces are missing, or differ from the header's checksum."""
    if not messages or not messages[0].HasField("header"):
        raise WorkerLost("its tokenizer came without a header")
    header = messages[0].header
    data = b"".join(message.data for message in messages)
    if len(data) != header.num_bytes:
        raise WorkerLost(f"its tokenizer came with {len(data)} of {header.num_bytes} bytes")
    sha256 = hashlib.sha256(data).hexdigest()
    if sha256 != header.sha256:
        raise WorkerLost(f"its tokenizer is damaged: sha256 {sha256} instead of {header.sha256}")
    return TokenizerBundle(
        tokenizer_json=data,
        chat_template=header.chat_template,
        bos_token=header.bos_token,
        eos_token=header.eos_token,
        add_bos=header.add_bos,
    )
