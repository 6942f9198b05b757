"""Workers that compute nothing, behind the real protocol: a control plane cannot tell them from others.

    python -m benchmarks.fake_worker --ports 50061,50062 --rows 1000

serves one worker on each port. A line on stdin is the time of one step in milliseconds, from then on; 0 at first.
"""

import asyncio
import hashlib
import random
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
from cyclopts import App

from benchmarks.fake_rows import FakeRows
from gpu_worker.config import WorkerConfig
from gpu_worker.loading.open import open_model
from plugins.types import ModelInfo, TokenId, TokenizerBundle, WorkerInfo
from protos.channel import bind, internal_server_options
from protos.codec import PROTOCOL_VERSION, decode_plan, encode_result
from protos.codec_info import encode_tokenizer, encode_worker_info
from protos.worker.v1 import worker_pb2, worker_pb2_grpc

MAX_MODEL_LEN = 8_192
BLOCK_SIZE = 16
BLOCKS_PER_ROW = 256
MAX_STEP_TOKENS = 8_192
NUM_SPECIAL_TOKENS = 256  # left out at the start of the vocabulary, so that every token has text
LEASE_S = 1.0

app = App(name="python -m benchmarks.fake_worker", help="Serve workers that compute nothing.")


class Pace:
    """How long a step takes, for all workers of this process; may change between steps."""

    def __init__(self) -> None:
        self.step_s = 0.0


class FakeWorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """One worker. Takes whoever says Hello last for its owner; carries plans out one after the other."""

    def __init__(self, info: WorkerInfo, tokenizer: TokenizerBundle, pace: Pace) -> None:
        self._info = encode_worker_info(info)
        self._tokenizer = tokenizer
        self._vocab_size = info.model.vocab_size
        self._pace = pace
        self._epoch = 0

    async def Describe(
        self, request: worker_pb2.DescribeRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> worker_pb2.DescribeResponse:
        return worker_pb2.DescribeResponse(worker=self._info)

    async def GetTokenizer(
        self, request: worker_pb2.GetTokenizerRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> AsyncIterator[worker_pb2.GetTokenizerResponse]:
        for message in encode_tokenizer(self._tokenizer):
            yield message

    async def Run(
        self,
        request_iterator: AsyncIterator[worker_pb2.RunRequest],
        context: "grpc.aio.ServicerContext[Any, Any]",
    ) -> AsyncIterator[worker_pb2.RunResponse]:
        self._epoch += 1
        epoch = self._epoch
        rng = random.Random(epoch)
        rows = FakeRows(lambda _request_id, _index: TokenId(rng.randrange(NUM_SPECIAL_TOKENS, self._vocab_size)))
        async for request in request_iterator:
            if request.HasField("hello"):
                ready = worker_pb2.Ready(
                    protocol_version=PROTOCOL_VERSION, epoch=epoch, lease_s=LEASE_S, worker=self._info
                )
                yield worker_pb2.RunResponse(ready=ready)
                continue
            plan, _ = decode_plan(request.plan)
            result, _ = rows.execute(plan)
            if self._pace.step_s:
                await asyncio.sleep(self._pace.step_s)
            yield worker_pb2.RunResponse(result=encode_result(result, epoch))


@app.default
def serve(*, ports: str, rows: int, vocab_size: int = 49_152, model: str | None = None) -> None:
    """Serve until SIGTERM.

    Parameters
    ----------
    ports: of 127.0.0.1, by comma
    rows: sequences that each worker holds at once
    vocab_size: of the model that they claim to have
    model: whose tokenizer they hand over; the embedded model's if left out
    """
    loader, name = open_model(WorkerConfig(model=model))
    asyncio.run(_serve([int(port) for port in ports.split(",")], rows, vocab_size, name, loader.tokenizer()))


def fake_worker_info(name: str, port: int, rows: int, vocab_size: int, tokenizer: TokenizerBundle) -> WorkerInfo:
    """Say what a worker is; all of them but for the incarnation are alike, and so form one pool."""
    return WorkerInfo(
        model=ModelInfo(
            name=name,
            architecture="LlamaForCausalLM",
            dtype="bfloat16",
            vocab_size=vocab_size,
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=(TokenId(2),),
            num_parameters=0,
        ),
        incarnation=f"fake-{port}",
        num_blocks=rows * BLOCKS_PER_ROW,
        block_size=BLOCK_SIZE,
        max_sequences=rows,
        max_step_tokens=MAX_STEP_TOKENS,
        kv_cache_dtype="bfloat16",
        kv_bytes=0,
        tokenizer_sha256=hashlib.sha256(tokenizer.tokenizer_json).hexdigest(),
        load_s=0.0,
        weights_version="fake",
    )


async def _serve(ports: list[int], rows: int, vocab_size: int, name: str, tokenizer: TokenizerBundle) -> None:
    pace, stop = Pace(), asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_reader(sys.stdin.fileno(), _read_pace, pace, stop)
    servers = []
    for port in ports:
        server = grpc.aio.server(options=internal_server_options())
        servicer = FakeWorkerServicer(fake_worker_info(name, port, rows, vocab_size, tokenizer), tokenizer, pace)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server)
        bind(server, "127.0.0.1", port)
        await server.start()
        servers.append(server)
    await stop.wait()
    await asyncio.gather(*(server.stop(0) for server in servers))


def _read_pace(pace: Pace, stop: asyncio.Event) -> None:
    line = sys.stdin.readline()
    if line:
        pace.step_s = float(line) / 1000
    else:  # whoever started us has gone
        asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
        stop.set()


if __name__ == "__main__":
    app()
