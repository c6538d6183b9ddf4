"""Replicas under Ray Serve: `pip install aioengine[server,ray-serve]`, then `serve run ray_serve:app`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig
from starlette.applications import Starlette
from starlette.routing import Mount

from aioengine import AsyncEngine
from aioengine.server import create_app

OPTIONS: dict[str, Any] = {
    "num_replicas": 2,  # or autoscaling_config={"min_replicas": 1, "max_replicas": 4, "target_ongoing_requests": 32}
    "max_ongoing_requests": 256,
    "graceful_shutdown_timeout_s": 60,  # what a replica that is taken away may take for the answers it has begun
    # Requests with the same x-session-id go to the same replica, where the beginning of their chat is cached.
    "request_router_config": RequestRouterConfig(request_router_class="ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"),
}


def serving(engine: AsyncEngine) -> Starlette:
    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with engine:
            yield

    return Starlette(routes=[Mount("/", create_app(engine))], lifespan=lifespan)


def replica() -> Starlette:  # called in each replica
    return serving(AsyncEngine("smollm2"))


app = serve.deployment(serve.ingress(replica)(), **OPTIONS).bind()
