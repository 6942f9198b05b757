"""The literals that the unit tests of the runner expect are transformers' answers."""

import torch

from tests.golden.make_goldens import MIN_GAP, generate
from tests.golden.reference_model import transformers_model
from tests.unit.gpu_worker.tiny import OUTPUTS, PROMPTS, TinyLoader


def test_transformers_says_of_the_tiny_model_what_the_unit_tests_expect() -> None:
    torch.set_num_threads(1)
    model = transformers_model(TinyLoader())

    answers = [generate(model, prompt, num_tokens=8) for prompt in PROMPTS]

    assert [tuple(output) for output, _ in answers] == list(OUTPUTS)
    assert min(gap for _, gap in answers) > MIN_GAP
