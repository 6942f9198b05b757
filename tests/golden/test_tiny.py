"""The literals that the unit tests of the runner expect are transformers' answers."""

import pytest
import torch

from tests.golden.make_goldens import MIN_GAP, generate
from tests.golden.reference_model import transformers_model
from tests.unit.gpu_worker.tiny import FIRST_TOKEN_LOGPROBS, OUTPUTS, PROMPT_LOGPROBS, PROMPTS, TinyLoader


def test_transformers_says_of_the_tiny_model_what_the_unit_tests_expect() -> None:
    torch.set_num_threads(1)
    model = transformers_model(TinyLoader())

    answers = [generate(model, prompt, num_tokens=8) for prompt in PROMPTS]

    assert [tuple(output) for output, _ in answers] == list(OUTPUTS)
    assert min(gap for _, gap in answers) > MIN_GAP


def test_transformers_gives_the_tokens_of_the_tiny_models_prompt_the_log_probabilities_that_the_unit_tests_expect() -> (
    None
):
    torch.set_num_threads(1)
    model = transformers_model(TinyLoader())

    with torch.inference_mode():
        logprobs_PV = model(torch.tensor([PROMPTS[0]])).logits[0].log_softmax(-1)

    for logprobs_V, (token_ids, logprobs, ranks) in zip(
        logprobs_PV, (*PROMPT_LOGPROBS, FIRST_TOKEN_LOGPROBS), strict=True
    ):
        assert logprobs_V[list(token_ids)].tolist() == pytest.approx(logprobs, abs=1e-4)
        assert [int((logprobs_V > logprobs_V[token_id]).sum()) + 1 for token_id in token_ids] == list(ranks)
