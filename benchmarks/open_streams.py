"""Keeps many streams open at once, or many short requests coming, and counts what arrives.

A client of the control plane in a process of its own; what the server spends on it is measured elsewhere.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType

import grpc

from plugins.errors import ServingError
from protos.common.v1 import common_pb2
from protos.inference.v1 import inference_pb2
from protos.inference.v1.inference_pb2_grpc import InferenceServiceStub

MAX_OPENING = 256  # streams whose first token is awaited at once: fewer than the server lets wait
ENDLESS = 1 << 20  # output tokens; the server takes it for as many as fit


@dataclass(slots=True)
class Count:
    """What has arrived so far."""

    num_messages: int = 0  # with tokens
    num_tokens: int = 0
    num_requests: int = 0  # that have ended


class OpenStreams:
    """So many streams that never end while the context lasts; entered when each has had its first token."""

    def __init__(self, channels: Sequence[grpc.aio.Channel], prompts: Sequence[str]) -> None:
        self.count = Count()
        self._stubs = [InferenceServiceStub(channel) for channel in channels]
        self._prompts = prompts
        self._opening = asyncio.Semaphore(MAX_OPENING)
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "OpenStreams":
        opened = [asyncio.Event() for _ in self._prompts]
        self._tasks = [
            asyncio.create_task(self._read(index, prompt, opened[index])) for index, prompt in enumerate(self._prompts)
        ]
        all_opened = asyncio.create_task(_all_set(opened))
        await asyncio.wait((all_opened, *self._tasks), return_when=asyncio.FIRST_COMPLETED)
        if not all_opened.done():  # a stream has ended, which none should
            all_opened.cancel()
            await self.__aexit__(None, None, None)
            raise ServingError("a stream ended before it was measured")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _read(self, index: int, prompt: str, opened: asyncio.Event) -> None:
        stub = self._stubs[index % len(self._stubs)]
        async with self._opening:
            responses = aiter(stub.Generate(generate_request(prompt, ENDLESS)))
            self._note(await anext(responses))
            opened.set()
        async for response in responses:
            self._note(response)

    def _note(self, response: inference_pb2.GenerateResponse) -> None:
        if response.token_ids:
            self.count.num_messages += 1
            self.count.num_tokens += len(response.token_ids)


@asynccontextmanager
async def short_requests(
    channels: Sequence[grpc.aio.Channel], prompts: Sequence[str], num_clients: int, count: Count
) -> AsyncIterator[None]:
    """Send one request for one token after the other from so many clients, while the context lasts.

    Raises: grpc.aio.AioRpcError: a request failed meanwhile.
    """

    async def client(number: int) -> None:
        stub = InferenceServiceStub(channels[number % len(channels)])
        index = number
        while True:
            request = generate_request(prompts[index % len(prompts)], 1)
            async for response in stub.Generate(request):
                count.num_messages += bool(response.token_ids)
                count.num_tokens += len(response.token_ids)
            count.num_requests += 1
            index += num_clients

    clients = [asyncio.create_task(client(number)) for number in range(num_clients)]
    yield
    failed = [task for task in clients if task.done()]
    for task in clients:
        task.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    for task in failed:
        task.result()


def generate_request(prompt: str, max_tokens: int) -> inference_pb2.GenerateRequest:
    """Ask for so many greedy tokens."""
    sampling = common_pb2.SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return inference_pb2.GenerateRequest(text=prompt, sampling=sampling)


async def _all_set(events: Sequence[asyncio.Event]) -> None:
    for event in events:
        await event.wait()
