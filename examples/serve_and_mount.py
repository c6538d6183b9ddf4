"""The HTTP API inside a Starlette program. Run it: uvicorn serve_and_mount:app"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route

from aioengine import AsyncEngine
from aioengine.server import create_app

engine = AsyncEngine("smollm2")


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    async with engine:
        yield


async def home(request: Request) -> PlainTextResponse:
    return PlainTextResponse(f"{engine.stats().num_running_reqs} requests run; the model is at /llm/v1/chat/completions\n")


app = Starlette(routes=[Route("/", home), Mount("/llm", create_app(engine))], lifespan=lifespan)
