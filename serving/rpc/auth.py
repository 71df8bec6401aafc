"""A bearer token for every call but those of the health service."""

import hmac
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

_OPEN_TO_ALL = "/grpc.health.v1."


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls whose metadata lack `authorization: Bearer <token>`."""

    def __init__(self, token: str):
        self._expected = f"Bearer {token}".encode()
        self._refusal = grpc.unary_unary_rpc_method_handler(_refuse)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        if not handler_call_details.method.startswith(_OPEN_TO_ALL):
            given = dict(handler_call_details.invocation_metadata).get("authorization", "")
            given = given.encode() if isinstance(given, str) else given
            if not hmac.compare_digest(given, self._expected):
                return self._refusal
        return await continuation(handler_call_details)


async def _refuse(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "metadata 'authorization: Bearer <token>' needed")
