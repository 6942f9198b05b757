"""Brings the outputs of one request to its caller: from a stream each into one stream of responses.

Knows their order and how an answer ends; what a response of one output tells is the business of `responses.py`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from control_plane.admission.submission import Admitted
from control_plane.api.meter import RequestMeter
from control_plane.api.prompt_parts import PromptParts
from control_plane.api.reader_watch import ReaderWatch
from control_plane.api.responses import OutputResponses
from control_plane.engine.streams import OutputStream
from plugins.errors import ServingError
from protos.common.v1 import common_pb2
from protos.inference.v1.inference_pb2 import GenerateResponse, PromptPart

Write = Callable[[Sequence[GenerateResponse], ServingError | None], Awaitable[None]]


class Answer:
    """The answer to one request. Owned by the task that serves the request, and told once.

    The first response has the request's id, whichever output it is of. The last response of an output has its finish
    reason, and the last one of all the usage: the prompt and its cached tokens once, the tokens of all outputs.
    """

    def __init__(
        self,
        admitted: Admitted,
        echo: Sequence[PromptPart],
        meter: RequestMeter,
        watch: ReaderWatch,
    ) -> None:
        """`echo` is what is told of the prompt before anything else."""
        model, first = admitted.model, admitted.requests[0]
        texts = model.text.streams([request.sampling for request in admitted.requests])
        prompt = PromptParts(echo) if echo or first.sampling.prompt_logprobs is not None else None
        self._outputs = [
            OutputResponses(index, request, text, None if index else prompt)
            for index, (request, text) in enumerate(zip(admitted.requests, texts, strict=True))
        ]
        self.watchers = texts if texts[0].is_watching else None  # whom the engine asks where each output ends
        self._num_open = len(self._outputs)  # outputs that have not ended
        self._untold_id: str = first.request_id
        self._num_prompt_tokens = len(first.prompt_token_ids)
        self._num_cached_tokens = 0  # of the first output's
        self._is_cut = False  # an output at least has ended with LENGTH
        self._meter = meter
        self._watch = watch
        self._turn = asyncio.Lock()  # whose response is written

    async def tell(self, streams: Sequence[OutputStream]) -> None:
        """Write what comes of all outputs, one stream for each, until the last one has ended.

        Raises: the error of the first output that ends with one, after what that output had; nothing more is written.
        """
        if len(streams) == 1:
            await self._tell(0, streams[0], self._write)
            return
        try:
            async with asyncio.TaskGroup() as group:
                for index, stream in enumerate(streams):
                    group.create_task(self._tell(index, stream, self._write_in_turn))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _tell(self, index: int, stream: OutputStream, write: Write) -> None:
        while True:
            output = await stream.next()
            if index == 0:
                self._num_cached_tokens = output.num_cached_tokens
            await write(self._outputs[index].make(output), output.error)
            if output.finish is not None:
                return

    async def _write_in_turn(self, responses: Sequence[GenerateResponse], error: ServingError | None) -> None:
        async with self._turn:  # those who wait for it get it in the order in which they came
            await self._write(responses, error)

    async def _write(self, responses: Sequence[GenerateResponse], error: ServingError | None) -> None:
        """Write responses of one output, then raise the error that ended it, if one did."""
        for response in responses:
            if self._untold_id:
                response.request_id, self._untold_id = self._untold_id, ""
            self._meter.deliver(len(response.token_ids), response.index)
            if response.finish_reason:
                self._end_output(response)
            await self._watch.write(response)
        if error is not None:
            raise error

    def _end_output(self, response: GenerateResponse) -> None:
        self._num_open -= 1
        self._is_cut |= response.finish_reason == common_pb2.FINISH_REASON_LENGTH
        if self._num_open == 0:
            self._meter.complete("length" if self._is_cut else "stop")  # also if the client hangs up on this message
            response.usage.prompt_tokens = self._num_prompt_tokens
            response.usage.output_tokens = self._meter.num_output_tokens
            response.usage.cached_tokens = self._num_cached_tokens
