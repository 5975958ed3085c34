"""The application: chat on raw ASGI, everything small on FastAPI, every error in the API's own body."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from epdserve.services.errors import Internal, InvalidRequest, ServiceError
from epdserve.services.router.anthropic.endpoint import CountTokensEndpoint, MessagesEndpoint
from epdserve.services.router.anthropic.shape import AnthropicErrors
from epdserve.services.router.cluster import Cluster
from epdserve.services.router.config import RouterConfig
from epdserve.services.router.http_errors import (
    ErrorStyle,
    MethodNotAllowed,
    NotFound,
    error_headers,
    status_of,
    unknown_model,
)
from epdserve.services.router.metrics import RouterMetrics
from epdserve.services.router.openai_chat.endpoint import ChatEndpoint
from epdserve.services.router.openai_chat.shape import Dialect
from epdserve.services.router.openai_completions.endpoint import CompletionsEndpoint
from epdserve.services.router.openapi import describe, is_anthropic
from epdserve.services.router.parts import RouterParts, assemble
from epdserve.services.router.responses.endpoint import ResponsesEndpoint
from epdserve.services.router.tenancy.assembly import kept_fresh
from epdserve.services.router.tokenizer import RouterTokenizer
from epdserve.services.router.tokens.endpoint import DetokenizeEndpoint, TokenizeEndpoint
from epdserve.services.types import WorkerRole
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send


class RouterApp(FastAPI):
    """FastAPI with a way past it: the paths in ``direct`` go to their ASGI applications, middleware and all unseen.

    Middleware wraps every ``send``, and a stream would pay for that at each token.
    A HEAD is answered as a GET: the server below leaves the body out, as it knows the method that came.
    """

    direct: dict[str, ASGIApp]

    def openapi(self) -> dict[str, Any]:
        """The description of the whole API, made once."""
        if self.openapi_schema is None:
            self.openapi_schema = describe(super().openapi())
        return self.openapi_schema

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Dispatch."""
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in self.direct:
            await self.direct[scope["path"]](scope, receive, send)
        elif scope["type"] == "http" and scope["method"] == "HEAD":
            await super().__call__({**scope, "method": "GET"}, receive, send)
        else:
            await super().__call__(scope, receive, send)


def create_app(
    config: RouterConfig,
    cluster: Cluster,
    *,
    tokenizer: RouterTokenizer | None = None,
    metrics: RouterMetrics | None = None,
) -> RouterApp:
    """The router's ASGI application; its lifespan starts and closes the cluster.

    Raises:
        FileNotFoundError, ValueError: As ``assemble``.
    """
    parts = assemble(config, cluster, clock=time.monotonic, tokenizer=tokenizer, metrics=metrics)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await cluster.start()
        try:
            async with kept_fresh(parts.gate, refresh_s=config.tenancy.refresh_s):
                yield
        finally:
            await cluster.close()
            parts.grammars.close()
            parts.memo.close()
            await asyncio.to_thread(parts.tracing.close)

    app = RouterApp(
        title="epdserve",
        version=version("epdserve"),
        lifespan=lifespan,
        redirect_slashes=False,
        # These pages load scripts from elsewhere; /openapi.json stays
        docs_url=None,
        redoc_url=None,
    )
    app.state.parts = parts
    app.direct = _direct_endpoints(parts)
    for path, endpoint in app.direct.items():
        # What is not POST learns from the framework which methods there are
        app.router.routes.append(Route(path, endpoint, methods=["POST"]))
    _add_small_routes(app, parts)
    _add_error_handlers(app)
    return app


def _style_of(path: str) -> ErrorStyle:
    return AnthropicErrors() if is_anthropic(path) else ErrorStyle()


def _direct_endpoints(parts: RouterParts) -> dict[str, ASGIApp]:
    """What goes past the framework; ``openapi.py`` describes the same paths."""
    openai, deepseek = ChatEndpoint(parts, Dialect.OPENAI), ChatEndpoint(parts, Dialect.DEEPSEEK)
    completions, deepseek_completions = (
        CompletionsEndpoint(parts),
        CompletionsEndpoint(parts, usage_last=True),
    )
    messages, count = MessagesEndpoint(parts), CountTokensEndpoint(parts)
    responses = ResponsesEndpoint(parts)
    tokenize, detokenize = TokenizeEndpoint(parts), DetokenizeEndpoint(parts)
    return {
        "/v1/chat/completions": openai,
        "/chat/completions": deepseek,
        "/beta/chat/completions": deepseek,
        "/v1/completions": completions,
        "/completions": deepseek_completions,
        "/beta/completions": deepseek_completions,
        "/v1/messages": messages,
        "/anthropic/v1/messages": messages,
        "/v1/messages/count_tokens": count,
        "/anthropic/v1/messages/count_tokens": count,
        "/v1/responses": responses,
        "/responses": responses,
        "/tokenize": tokenize,
        "/v1/tokenize": tokenize,
        "/detokenize": detokenize,
        "/v1/detokenize": detokenize,
    }


def _add_small_routes(app: FastAPI, parts: RouterParts) -> None:
    started_at = int(time.time())

    @app.get("/v1/models")
    @app.get("/models")
    async def models(request: Request) -> dict[str, Any]:
        """The names this server answers to."""
        _authenticate(request, parts)
        return {"object": "list", "data": [_model(name, started_at, parts) for name in parts.model_names]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str, request: Request) -> dict[str, Any]:
        """One of them."""
        _authenticate(request, parts)
        if name not in parts.model_names:
            raise unknown_model(name, parts.model_names)
        return _model(name, started_at, parts)

    @app.get("/health")
    async def health() -> dict[str, str]:
        """The process lives."""
        return {"status": "ok"}

    @app.get("/ready")
    async def ready(response: Response) -> dict[str, Any]:
        """A request would find workers."""
        counts = {
            role.value: len(parts.placer.ready(role)) for role in (WorkerRole.PREFILL, WorkerRole.DECODE)
        }
        status = "draining" if parts.gate.draining else "ready" if all(counts.values()) else "waiting"
        if status != "ready":
            response.status_code = 503
        return {"status": status, "ready_workers": counts}

    @app.get("/version")
    async def version_() -> dict[str, str]:
        """What runs here."""
        return {"version": version("epdserve"), "model": parts.config.model_name}

    @app.get("/metrics", include_in_schema=False)
    async def metrics() -> Response:
        """Prometheus text."""
        return Response(generate_latest(parts.metrics.registry), media_type=CONTENT_TYPE_LATEST)


def _model(name: str, created: int, parts: RouterParts) -> dict[str, Any]:
    context = parts.placer.max_context_tokens() or parts.config.max_context_tokens
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "epdserve",
        "max_model_len": min(context, parts.config.max_context_tokens),
    }


def _authenticate(request: Request, parts: RouterParts) -> None:
    parts.gate.authenticate(
        authorization=request.headers.get("authorization", ""), api_key=request.headers.get("x-api-key", "")
    )


def _add_error_handlers(app: FastAPI) -> None:
    def answer(request: Request, error: ServiceError) -> Response:
        headers = {name.decode(): value.decode() for name, value in error_headers(error)}
        body = _style_of(request.url.path).body(error, "")
        return Response(body, status_of(error), headers, "application/json")

    async def on_service_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ServiceError)
        return answer(request, error)

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 404:
            return answer(request, NotFound("no such path"))
        if error.status_code == 405:
            response = answer(request, MethodNotAllowed("the path does not take this method"))
            response.headers.update(error.headers or {})
            if response.headers.get("allow") == "GET":
                response.headers["allow"] = "GET, HEAD"
            return response
        return answer(request, InvalidRequest(error.detail))

    async def on_invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return answer(request, InvalidRequest("a parameter of the request is invalid"))

    async def on_bug(request: Request, error: Exception) -> Response:
        return answer(request, Internal("the server failed"))

    app.add_exception_handler(ServiceError, on_service_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(Exception, on_bug)
