"""Goldens are only prompts about which two correct programs cannot disagree."""

import json
from pathlib import Path

import pytest

from tests.golden import make_goldens


def test_there_are_eight_goldens_of_32_tokens_and_none_is_nearly_a_tie() -> None:
    goldens = json.loads(make_goldens.GOLDENS.read_text())["goldens"]

    assert [len(golden["output"]) for golden in goldens] == [32] * 8
    assert min(golden["smallest_gap"] for golden in goldens) >= 1e-3


@pytest.mark.parametrize(("gap", "code"), [(0.0009, 1), (0.001, 0)])
def test_a_prompt_whose_best_two_tokens_come_too_close_is_refused(
    gap: float, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(make_goldens, "GOLDENS", tmp_path / "goldens.json")
    monkeypatch.setattr(make_goldens, "transformers_model", lambda loader: None)
    monkeypatch.setattr(make_goldens, "generate", lambda model, prompt, num_tokens: ([7], gap))

    assert make_goldens.main() == code
    assert (tmp_path / "goldens.json").exists() == (code == 0)
