"""An endpoint of your own that streams. Run it: uvicorn fastapi_app:app, then: curl -N 'localhost:8000/tale?about=ships'"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from aioengine import AsyncEngine, SamplingParams
from aioengine.server import create_app

engine = AsyncEngine("smollm2", max_num_queued_reqs=64)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with engine:
        yield


app = FastAPI(lifespan=lifespan)
app.mount("/llm", create_app(engine))  # and OpenAI's API beside it


@app.get("/tale")
async def tale(about: str, max_tokens: int = 60) -> StreamingResponse:
    messages = [{"role": "user", "content": f"Tell a very short tale about {about}."}]

    async def text() -> AsyncIterator[str]:
        async for output in engine.generate(messages, SamplingParams(max_tokens=max_tokens)):  # a client that leaves ends it
            yield output.text_delta

    return StreamingResponse(text(), media_type="text/plain")
