"""The operator's defaults reach clients: GetModel tells them, and requests that say nothing get them."""

from protos.inference.v1.inference_pb2 import GenerateRequest, GetModelRequest, TokenIds
from tests.end_to_end.cells import serving
from tests.end_to_end.clients import ask

PROMPT = (5, 17, 9, 60)


async def test_a_request_that_says_nothing_gets_what_get_model_tells() -> None:
    """Case B005: what the configuration says follows the rules of a request; top_k=0 keeps all tokens."""
    async with serving("--admission.default-sampling=temperature=0,top_k=0,max_tokens=5,ignore_eos=true") as (
        _,
        client,
    ):
        model = (await client.inference.GetModel(GetModelRequest())).model
        silent = await client.answer(GenerateRequest(tokens=TokenIds(ids=PROMPT)))
        greedy = await client.answer(ask(PROMPT, max_tokens=5))

    told = model.default_sampling
    assert (told.temperature, told.top_k, told.max_tokens, told.ignore_eos) == (0.0, 0, 5, True)
    assert silent == greedy
    assert len(silent.token_ids) == 5
