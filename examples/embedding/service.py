"""An HTTP service that serves generations from the rollout members of a running job.

    python examples/embedding/service.py --address unix:///…/master --key-file …/key

It joins the job on its own event loop, without threads or signal handlers of rlmesh, and leaves it at its end; the job
continues. `rlmesh ps JOB` shows address and key file.
"""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from rlmesh import RoleGroup, Runtime
from rlmesh.errors import CallTimeout, PeerLost, RemoteError

TIMEOUT_S = 10.0
MAX_WORDS = 1000


async def generate(request: Request) -> JSONResponse:
    """POST {"prompt": text, "words": n, "seed": n}: the least busy rollout member answers."""
    try:
        body = await request.json()
        prompt, words, seed = str(body["prompt"]), int(body.get("words", 20)), body.get("seed")
    except (ValueError, KeyError, TypeError, AttributeError):
        return JSONResponse({"error": 'send {"prompt": text, "words": number}'}, 400)
    if not 0 < words <= MAX_WORDS:
        return JSONResponse({"error": f"words is a number from 1 to {MAX_WORDS}"}, 400)
    rollout = request.app.state.rollout
    try:
        made = await rollout.options(timeout_s=TIMEOUT_S).call_any("generate", prompt, words, seed)
    except RemoteError as error:
        return JSONResponse({"error": error.remote_message}, 500)
    except PeerLost as error:
        return JSONResponse({"error": str(error)}, 503)
    except CallTimeout as error:
        return JSONResponse({"error": str(error)}, 504)
    return JSONResponse(made)


async def health(request: Request) -> JSONResponse:
    """GET: the number of rollout members."""
    return JSONResponse({"rollout_members": len(request.app.state.rollout)})


def make_app(address: str, key_file: str | None) -> Starlette:
    """The service of one job, for any ASGI server."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with Runtime.join(address, key_file, name="http") as runtime:
            app.state.rollout = RoleGroup("ROLLOUT", runtime=runtime)
            yield

    routes = [Route("/generate", generate, methods=["POST"]), Route("/health", health)]
    return Starlette(routes=routes, lifespan=lifespan)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Serve generations of a running job over HTTP.")
    parser.add_argument("--address", required=True, help="of the job's master, as rlmesh ps JOB shows it")
    parser.add_argument("--key-file", help="the job's key (default: the file that RLMESH_KEY_FILE names)")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    uvicorn.run(make_app(options.address, options.key_file), host=options.host, port=options.port)
