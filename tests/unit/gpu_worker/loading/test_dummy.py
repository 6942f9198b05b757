"""The model without a file: same seed, same weights; a tokenizer whose tokens are the bytes."""

import torch
from tokenizers import Tokenizer

from gpu_worker.config import WorkerConfig
from gpu_worker.loading.open import open_model


def test_the_dummy_model_needs_no_file_and_is_called_dummy() -> None:
    loader, name = open_model(WorkerConfig(load_format="dummy"))

    weights = dict(loader.weights())

    assert name == "dummy"
    assert loader.num_tensors() == len(weights) == 21
    assert weights["model.embed_tokens.weight"].shape == (272, 64)
    assert weights["model.layers.1.self_attn.k_proj.weight"].shape == (32, 64)
    assert weights["lm_head.weight"].shape == (272, 64)


def test_the_same_seed_gives_the_same_weights_and_another_seed_others() -> None:
    first, again, other = (open_model(WorkerConfig(load_format="dummy", seed=seed))[0] for seed in (7, 7, 8))

    matrices = [dict(loader.weights())["model.layers.0.mlp.up_proj.weight"] for loader in (first, again, other)]

    assert torch.equal(matrices[0], matrices[1])
    assert not torch.equal(matrices[0], matrices[2])


def test_a_dummy_token_is_a_byte_or_a_special_token() -> None:
    loader, _ = open_model(WorkerConfig(load_format="dummy"))
    tokenizer = Tokenizer.from_buffer(loader.tokenizer().tokenizer_json)

    ids = tokenizer.encode("é 5\n<|im_end|>").ids

    assert ids == [0xC3, 0xA9, 0x20, 0x35, 0x0A, 257]
    assert tokenizer.decode(ids) == "é 5\n"
    assert loader.config().eos_token_ids == (257,)
