"""Raw clients of one server: what they read, token by token, and load that goes on while things happen to it."""

import asyncio
import random
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import grpc
from grpc_health.v1 import health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from protos.admin.v1 import admin_pb2, admin_pb2_grpc
from protos.channel import MIB, channel_options
from protos.common.v1 import common_pb2
from protos.inference.v1 import inference_pb2, inference_pb2_grpc


@dataclass(frozen=True, slots=True)
class Answer:
    """All that one stream said."""

    token_ids: tuple[int, ...]
    text: str
    finish: str  # of common_pb2.FinishReason
    num_finals: int
    cached_tokens: int = field(compare=False)  # depends on who asked before


class Client:
    """A channel to one server."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.aio.insecure_channel(address, options=channel_options(64 * MIB))
        self.inference = inference_pb2_grpc.InferenceServiceStub(self.channel)
        self.admin = admin_pb2_grpc.AdminServiceStub(self.channel)
        self.health = health_pb2_grpc.HealthStub(self.channel)

    async def answer(
        self,
        request: inference_pb2.GenerateRequest,
        on_tokens: Callable[[], object] = lambda: None,
        timeout_s: float | None = None,
    ) -> Answer:
        """Read a whole stream. Raises: grpc.aio.AioRpcError: it ended with another status than OK."""
        token_ids: list[int] = []
        text, finish, num_finals, cached_tokens = "", "", 0, 0
        async for response in self.inference.Generate(request, timeout=timeout_s):
            token_ids += response.token_ids
            text += response.text
            if response.finish_reason:
                num_finals += 1
                finish = common_pb2.FinishReason.Name(response.finish_reason)
                cached_tokens = response.usage.cached_tokens
            on_tokens()
        return Answer(tuple(token_ids), text, finish, num_finals, cached_tokens)

    async def code(self, request: inference_pb2.GenerateRequest, timeout_s: float | None = None) -> grpc.StatusCode:
        """Read a whole stream, and tell its status."""
        try:
            answer = await self.answer(request, timeout_s=timeout_s)
        except grpc.aio.AioRpcError as error:
            return error.code()
        assert answer.num_finals == 1, "a stream that is OK has said how it ended"
        return grpc.StatusCode.OK

    async def workers(self) -> list[admin_pb2.Worker]:
        """List the workers, sorted by address."""
        return list((await self.admin.ListWorkers(admin_pb2.ListWorkersRequest())).workers)

    async def idle_workers(self) -> list[admin_pb2.Worker]:
        """Wait until the server holds no request, and list its workers."""
        await self.holds(num_running=0, num_waiting=0)
        return await self.workers()

    async def holds(self, num_running: int, num_waiting: int) -> None:
        """Wait until the server holds so many requests."""
        while True:
            info = await self.admin.GetServerInfo(admin_pb2.GetServerInfoRequest())
            if (info.num_running, info.num_waiting) == (num_running, num_waiting):
                return
            await asyncio.sleep(0.02)


def outcomes(metrics_url: str) -> dict[str, float]:
    """Read how many requests ended in which way. Waits: call it in a thread."""
    return scrape(metrics_url, "dihedral_requests", "outcome")


def scrape(metrics_url: str, family_name: str, label: str) -> dict[str, float]:
    """Read one family of metrics, by one of its labels. Waits: call it in a thread."""
    with urllib.request.urlopen(metrics_url) as page:
        text = page.read().decode()
    return {
        sample.labels.get(label, ""): sample.value
        for family in text_string_to_metric_families(text)
        if family.name == family_name
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[Client]:
    """A client, while it is needed."""
    client = Client(address)
    try:
        yield client
    finally:
        await client.channel.close()


def ask(
    prompt: Sequence[int], max_tokens: int, temperature: float = 0.0, seed: int | None = None
) -> inference_pb2.GenerateRequest:
    """A request for so many tokens, no fewer."""
    sampling = common_pb2.SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed, ignore_eos=True)
    return inference_pb2.GenerateRequest(tokens=inference_pb2.TokenIds(ids=prompt), sampling=sampling)


def questions(num: int, max_tokens: int, vocab_size: int = 256) -> list[inference_pb2.GenerateRequest]:
    """Requests that differ in all they can; most are sampled with a seed, so that no two tokens in a row are alike."""
    draw = random.Random(1)
    return [
        ask(
            [draw.randrange(3, vocab_size) for _ in range(draw.randint(2, 150))],
            max_tokens,
            temperature=0.0 if number % 4 == 0 else 1.0,
            seed=number,
        )
        for number in range(num)
    ]


class Load:
    """Clients that ask the same again and again, and insist on the answer that they got when nothing happened."""

    def __init__(self, client: Client, answers: Sequence[Answer]) -> None:
        self.answers = list(answers)  # one for each client
        self.num_answers = 0
        self.longest_pause_s = 0.0  # between two responses of one stream
        self._client = client
        self._read_at_s = [0.0] * len(answers)
        self._unmoved: set[int] = set()
        self._has_moved = asyncio.Event()
        self._is_over = False

    async def ask(self, index: int, request: inference_pb2.GenerateRequest) -> None:
        """Be one of the clients, until `end`."""
        while not self._is_over:
            self._read_at_s[index] = time.monotonic()
            answer = await self._client.answer(request, partial(self._note, index))
            expected = self.answers[index]
            assert answer.token_ids == expected.token_ids, f"client {index} read other tokens"
            assert answer == expected, f"client {index} read another text, or end"
            self.num_answers += 1

    async def moved(self) -> None:
        """Wait until every client has read something that came after this call. One may wait at a time."""
        self._unmoved = set(range(len(self._read_at_s)))
        self._has_moved.clear()
        await self._has_moved.wait()

    def end(self) -> None:
        """Let every client read its answer to the end, and ask no more."""
        self._is_over = True

    def _note(self, index: int) -> None:
        now_s = time.monotonic()
        self.longest_pause_s = max(self.longest_pause_s, now_s - self._read_at_s[index])
        self._read_at_s[index] = now_s
        self._unmoved.discard(index)
        if not self._unmoved:
            self._has_moved.set()


@asynccontextmanager
async def load(client: Client, requests: Sequence[inference_pb2.GenerateRequest]) -> AsyncIterator[Load]:
    """Learn what each answer is, then ask for all of them, over and over. Every stream is read to its end."""
    answers = await asyncio.gather(*(client.answer(request) for request in requests))
    clients = Load(client, answers)
    async with asyncio.TaskGroup() as tasks:
        for index, request in enumerate(requests):
            tasks.create_task(clients.ask(index, request))
        await clients.moved()
        yield clients
        clients.end()
