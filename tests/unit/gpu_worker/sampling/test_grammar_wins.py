"""A bad word that a grammar leaves no way around stays; one that it does is held back."""

import pytest
import torch

from tests.unit.gpu_worker.sampling.tables import Tables, apply, take

INF = float("inf")


@pytest.mark.parametrize(
    ("left_by_the_grammar", "expected"),
    [({4: 1.5}, {4: 1.5}), ({4: 1.5, 6: 0.5}, {6: 0.5})],
    ids=["nothing else", "something else"],
)
def test_a_bad_word_stays_where_a_grammar_leaves_nothing_else(
    left_by_the_grammar: dict[int, float], expected: dict[int, float]
) -> None:
    tables = Tables(vocab_size=8)
    tables.put(3, (1,), ())
    stages = tables.stages()
    take(stages, 3, bad_word_ids=((4,),), grammar="start: /a/")
    scores = torch.full((1, 8), -INF)
    for token, score in left_by_the_grammar.items():
        scores[0, token] = score

    result = apply(stages, scores, tables.context(3))[0].tolist()

    assert {token: score for token, score in enumerate(result) if score > -INF} == expected
