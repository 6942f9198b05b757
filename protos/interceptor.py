"""Ends every call of a server with the status of whatever its handler raised.

An error of ours is an answer; anything else is a bug, which is logged with its traceback and answered without it.
"""

import contextlib
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

import grpc

from plugins.errors import InvariantBroken, ServingError
from protos.status import abort

logger = logging.getLogger(__name__)

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # generic in the stubs alone
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Translates what handlers raise. Stateless; give one to `grpc.aio.server(interceptors=...)`.

    A handler that is an async generator is closed in the task of its call, so that its `finally` has run
    when the call is over.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], "Awaitable[Handler | None]"],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        make, behaviour = {
            (False, False): (grpc.unary_unary_rpc_method_handler, handler.unary_unary),
            (False, True): (grpc.unary_stream_rpc_method_handler, handler.unary_stream),
            (True, False): (grpc.stream_unary_rpc_method_handler, handler.stream_unary),
            (True, True): (grpc.stream_stream_rpc_method_handler, handler.stream_stream),
        }[bool(handler.request_streaming), bool(handler.response_streaming)]
        return make(
            _translating(handler_call_details.method, behaviour),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


def _translating(method: str, behaviour: Any) -> Callable[[Any, Context], Awaitable[Any]]:
    """Wrap one handler, whose argument is a request or an iterator of them."""

    async def stream(request: Any, context: Context) -> None:
        async with _translated(method, context), contextlib.aclosing(behaviour(request, context)) as responses:
            async for response in responses:
                await context.write(response)

    async def call(request: Any, context: Context) -> Any:
        async with _translated(method, context):
            return await behaviour(request, context)

    return stream if inspect.isasyncgenfunction(behaviour) else call


@contextlib.asynccontextmanager
async def _translated(method: str, context: Context) -> AsyncIterator[None]:
    try:
        yield
    except grpc.aio.BaseError:  # the handler has aborted by itself, or the call is over
        raise
    except Exception as error:
        if isinstance(error, ServingError) and not isinstance(error, InvariantBroken):
            await abort(context, error)
        logger.exception("rpc_failed", extra={"method": method})
        await abort(context, ServingError("internal error; the server's log has it with its traceback"))
