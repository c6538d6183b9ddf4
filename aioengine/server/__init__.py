"""An OpenAI-compatible server over an `AsyncEngine`, in the engine's own event loop (extra `[server]`).

    app = create_app(engine)        # an ordinary ASGI app: serve it, or mount it into a Starlette or FastAPI program

`aioengine serve` is the same with a command line (`aioengine.commands.serve`).
"""

from aioengine.server.app import create_app
from aioengine.server.settings import ServerSettings

__all__ = ["ServerSettings", "create_app"]
