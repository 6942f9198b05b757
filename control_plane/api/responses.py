"""Makes the responses of one output out of what the engine gives of it.

Knows what a response tells and when it is due; how the outputs of a request come together is the business of
`answer.py`.
"""

from control_plane.api.prompt_parts import PromptParts, cut_places, encode_place
from control_plane.engine.streams import Output
from control_plane.text.stream import TextStream
from plugins.errors import DetokenizerFailed
from plugins.types import FinishReason, Request, TokenId, TokenLogprobs
from protos.common.v1 import common_pb2
from protos.inference.v1 import inference_pb2

GenerateResponse = inference_pb2.GenerateResponse


class OutputResponses:
    """The responses of one output, in order. Owned by the task that serves the request.

    Tokens are held back until there are `stream_interval` of them, or the output ends. The text of an output with stop
    strings is made by the engine, which looks for them there.
    """

    def __init__(self, index: int, request: Request, text: TextStream, prompt: PromptParts | None) -> None:
        """`prompt` is None if nothing of the prompt is to be told with this output."""
        self._index = index
        self._text = text
        self._prompt = prompt
        self._makes_text = not text.is_watching
        self._stop_token_ids = frozenset(request.sampling.stop_token_ids)
        self._interval = request.sampling.stream_interval
        self._token_ids: list[TokenId] = []  # that were not sent yet
        self._logprobs: list[TokenLogprobs] = []  # of those, if asked for

    def make(self, output: Output) -> list[GenerateResponse]:
        """Return what there is to send now, maybe nothing. Raises: DetokenizerFailed: the tokens have no text."""
        self._take(output)
        responses: list[GenerateResponse] = []
        if self._prompt is not None and output.error is None:
            parts = self._prompt.take(output.prompt_logprobs)
            responses = [GenerateResponse(index=self._index, prompt=part) for part in parts]
        if output.finish is None and len(self._token_ids) < self._interval:
            return responses
        if self._logprobs:
            responses += self._cut()
        if output.finish is None:
            text, stop_string = self._text.take(), None
        else:
            stop_string = self._text.stop_string  # one that is complete only when the text is closed ended no output
            text = self._text.close()
        response = GenerateResponse(index=self._index, token_ids=self._token_ids, text=text)
        if self._logprobs:
            response.logprobs.extend(map(encode_place, self._logprobs))
            self._logprobs = []
        if output.finish is not None and output.error is None:
            response.finish_reason = common_pb2.FinishReason.ValueType(output.finish)
            if output.finish is FinishReason.STOP:
                self._tell_stop(response, stop_string)
        if self._token_ids or text or response.finish_reason:
            responses.append(response)
        self._token_ids = []
        return responses

    def _take(self, output: Output) -> None:
        self._token_ids += output.token_ids
        if output.logprobs:
            self._logprobs += (place for place in output.logprobs if place is not None)
        if self._makes_text:
            try:
                self._text.push(output.token_ids, output.finish is FinishReason.STOP)
            except Exception as error:  # a decoder is foreign code: what it raises ends this request alone
                raise DetokenizerFailed(error) from error

    def _cut(self) -> list[GenerateResponse]:
        """Make responses of the tokens that are too many for one; the last piece, which is not empty, stays."""
        *pieces, rest = cut_places(self._logprobs)
        responses = []
        for piece in pieces:
            token_ids, self._token_ids = self._token_ids[: len(piece)], self._token_ids[len(piece) :]
            responses.append(
                GenerateResponse(index=self._index, token_ids=token_ids, logprobs=map(encode_place, piece))
            )
        self._logprobs = list(rest)
        return responses

    def _tell_stop(self, response: GenerateResponse, stop_string: str | None) -> None:
        """Tell what ended the output, if the request named it."""
        if stop_string is not None:
            response.stop_string = stop_string
        elif self._token_ids and self._token_ids[-1] in self._stop_token_ids:
            response.stop_token_id = self._token_ids[-1]
