"""Writes the goldens: what transformers generates, greedily and one sequence at a time, from the same weights.

Run at the root of the repository: `python -m tests.golden.make_goldens`. A prompt whose best and second-best logit
ever come closer than MIN_GAP is refused: two correct programs could disagree about it.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from gpu_worker.config import WorkerConfig
from gpu_worker.loading.open import open_model
from tests.golden.reference_model import transformers_model

GOLDENS = Path(__file__).parent / "smollm2.json"
NUM_TOKENS = 32
MIN_GAP = 1e-3
PROMPTS = (
    "The capital of France is",
    "Water boils at",
    "Once upon a time, in a village by the sea, there lived",
    "def fibonacci(n):\n    ",
    "Dear Sir or Madam, I am writing to you because",
    "In 1969, for the first time,",
    "A good recipe for bread needs flour, water, salt and yeast. First,",
    "List of planets, from the one nearest to the sun: Mercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus, and",
)


@torch.inference_mode()
def generate(model: LlamaForCausalLM, prompt: Sequence[int], num_tokens: int) -> tuple[list[int], float]:
    """Return the output, end-of-sequence tokens ignored, and the smallest gap between best and second-best logit."""
    token_ids, smallest_gap = list(prompt), float("inf")
    for _ in range(num_tokens):
        logits = model(torch.tensor([token_ids]), use_cache=False, logits_to_keep=1).logits[0, -1]
        best, second = logits.topk(2).values.tolist()
        smallest_gap = min(smallest_gap, best - second)
        token_ids.append(int(logits.argmax()))
    return token_ids[len(prompt) :], smallest_gap


def main() -> int:
    torch.set_num_threads(1)
    loader, name = open_model(WorkerConfig())
    tokenizer = Tokenizer.from_buffer(loader.tokenizer().tokenizer_json)
    model = transformers_model(loader)
    goldens = []
    for text in PROMPTS:
        prompt = tokenizer.encode(text).ids
        output, gap = generate(model, prompt, NUM_TOKENS)
        if gap < MIN_GAP:
            sys.stderr.write(f"refused: {text!r} has a gap of {gap:.6f}, below {MIN_GAP}\n")
            return 1
        goldens.append({"text": text, "prompt": prompt, "output": output, "smallest_gap": round(gap, 4)})
        sys.stdout.write(f"gap {gap:.4f}: {text!r} -> {tokenizer.decode(output)!r}\n")
    GOLDENS.write_text(json.dumps({"model": name, "goldens": goldens}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
