"""The endpoint of agents: latency that it adds to the engine's first token, and requests per second.

python benchmarks/endpoint.py [--requests 4000] [--clients 16] [--streams 200]

Added latency: a transformers engine with a small model samples one token at a time. In turns, the first token is
awaited at the engine itself, and as the first piece of a streamed chat completion; the figure is the difference of the
medians.
Requests per second: an engine that answers at once, and clients that keep their connections, each with one request at
a time. Clients and endpoint are processes of their own; with fewer than two free cores they take time from each other,
so the CPU time of the endpoint per request is told too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from rlmesh.rl.engines.rollout import OnTokens, Sample, SamplingParams
from rlmesh.rl.rollout.endpoint.server import Endpoint

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples" / "agents"))
from tiny import make_model, make_tokenizer  # type: ignore[import-not-found]

MESSAGES = [{"role": "user", "content": "12*34"}]


class InstantEngine:
    """Answers at once, with eight tokens."""

    def submit(
        self, prompt: Sequence[int], params: SamplingParams, *, timeout_s: float = 600.0,
        on_tokens: OnTokens | None = None,
    ) -> Future[Sample]:  # fmt: skip
        future: Future[Sample] = Future()
        future.set_result(Sample.of(prompt, [3, 4, 5, 6, 7, 8, 9, 1], [-0.5] * 8, 0))
        return future


def serve(kind: str, pipe: Connection) -> None:
    """Serve until the pipe says otherwise. Sends the port and the key, and for the model the engine's own latencies."""
    tokenizer = make_tokenizer()
    if kind == "instant":
        engine: Any = InstantEngine()
    else:
        import torch

        from rlmesh.rl.engines.transformers import TransformersEngine

        torch.set_num_threads(1)
        engine = TransformersEngine(make_model(len(tokenizer)).eval(), version=0, stop_token_ids=[])

    async def run() -> None:
        loop = asyncio.get_running_loop()
        async with Endpoint(engine, tokenizer, max_tokens=16) as endpoint:
            pipe.send((endpoint.base_url, endpoint.api_key))
            while (asked := await loop.run_in_executor(None, pipe.recv)) is not None:
                if asked == "cpu":
                    pipe.send(time.process_time())
                    continue
                pipe.send(await loop.run_in_executor(None, first_token, engine, tokenizer, asked))

    asyncio.run(run())
    if kind != "instant":
        engine.close()


def first_token(engine: Any, tokenizer: Any, seed: int) -> float:
    """Seconds from a request at the engine itself to its first token."""
    ids = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=True)["input_ids"]
    seen: list[float] = []
    began = time.perf_counter()
    future = engine.submit(
        list(ids), SamplingParams(16, seed=seed), on_tokens=lambda *_: seen.append(time.perf_counter())
    )
    future.result(60)
    return seen[0] - began


class Client:
    """A connection that is kept: the least that a client can cost."""

    def __init__(self, base_url: str, key: str) -> None:
        address, _, path = base_url.removeprefix("http://").partition("/")
        self.host, _, port = address.partition(":")
        self.port, self.path, self.key = int(port), f"/{path}/chat/completions", key

    async def open(self) -> None:
        self.reader, self.writer = await asyncio.open_connection(self.host, self.port)

    def send(self, body: dict[str, Any]) -> None:
        data = json.dumps({"model": "policy", "messages": MESSAGES, **body}).encode()
        head = (
            f"POST {self.path} HTTP/1.1\r\nHost: {self.host}\r\nAuthorization: Bearer {self.key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        self.writer.write(head.encode() + data)

    async def head(self) -> dict[str, str]:
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        assert " 200 " in lines[0], lines
        return dict(line.lower().split(": ", 1) for line in lines[1:] if line)

    async def whole(self) -> dict[str, Any]:
        self.send({})
        size = int((await self.head())["content-length"])
        found: dict[str, Any] = json.loads(await self.reader.readexactly(size))
        return found

    async def first_piece(self, seed: int) -> float:
        """Seconds from a request to the first piece of its stream."""
        began = time.perf_counter()
        self.send({"stream": True, "seed": seed})
        await self.head()
        await self.reader.readuntil(b"data: ")
        took = time.perf_counter() - began
        await self.reader.readuntil(b"[DONE]\n\n\r\n0\r\n\r\n")
        return took


def cpu_of(pipe: Connection) -> float:
    """Seconds of CPU time that the endpoint's process used so far."""
    pipe.send("cpu")
    found: float = pipe.recv()
    return found


async def throughput(
    base_url: str, key: str, requests: int, count: int, pipe: Connection
) -> tuple[float, list[float], float]:
    """Requests per second, seconds of each request, and seconds of the endpoint's CPU time per request."""
    clients = [Client(base_url, key) for _ in range(count)]
    took: list[float] = []

    async def ask(client: Client, number: int) -> None:
        await client.open()
        for _ in range(number):
            began = time.perf_counter()
            await client.whole()
            took.append(time.perf_counter() - began)

    await asyncio.gather(*(ask(client, 20) for client in clients))
    took.clear()
    used, began = cpu_of(pipe), time.perf_counter()
    await asyncio.gather(*(ask(client, requests // count) for client in clients))
    rate = len(took) / (time.perf_counter() - began)
    return rate, took, (cpu_of(pipe) - used) / len(took)


async def added(base_url: str, key: str, pipe: Connection, streams: int) -> tuple[list[float], list[float]]:
    client = Client(base_url, key)
    await client.open()
    own, through = [], []
    for seed in range(streams + 10):
        pipe.send(seed)
        direct = pipe.recv()
        streamed = await client.first_piece(seed)
        if seed >= 10:
            own.append(direct)
            through.append(streamed)
    return own, through


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--streams", type=int, default=200)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    for kind in ("instant", "model"):
        here, there = context.Pipe()
        process = context.Process(target=serve, args=(kind, there), daemon=True)
        process.start()
        base_url, key = here.recv()
        if kind == "instant":
            for count in (options.clients, 1):
                number = options.requests if count > 1 else options.requests // 8
                rate, took, cpu = asyncio.run(throughput(base_url, key, number, count, here))
                print(
                    f"engine that answers at once, {count} clients: {rate:.0f} requests/s, median "
                    f"{median(took) * 1e3:.2f} ms, p99 {quantiles(took, n=100)[98] * 1e3:.1f} ms, CPU time of the "
                    f"endpoint {cpu * 1e3:.2f} ms a request ({1 / cpu:.0f} requests per second of CPU)"
                )
        else:
            own, through = asyncio.run(added(base_url, key, here, options.streams))
            print(f"first token of the engine: median {median(own) * 1e3:.2f} ms", end="; ")
            print(f"first piece of a stream: median {median(through) * 1e3:.2f} ms", end="; ")
            print(f"added: {(median(through) - median(own)) * 1e3:.2f} ms")
        here.send(None)
        process.join(10)


if __name__ == "__main__":
    main()
