"""The service under load: a server in one process, fifty clients in this one.

    python benchmarks/service_load.py --json out/service_load.json

Every answer is compared with the direct prediction of the same photo. Requests that are told to come back (429) do;
none may be lost. Half of them bring their examples along, half use a stored set. The memory of the server is read
after a warm-up and at the end. The network is tiny, so that what is measured is the service and not the network;
`--model` takes another.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image

import vat
from vat.predict.masks import from_rle

PHOTOS, SIDE = 16, 96
WARM_UP = 200
CLIENT_TIMEOUT = 60


def picture(seed: int) -> bytes:
    """A PNG of coloured noise."""
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    return as_png(Image.fromarray(coarse).resize((SIDE, SIDE), Image.Resampling.BICUBIC))


def as_png(image: Image.Image) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()


def middle() -> bytes:
    inside = np.zeros((SIDE, SIDE), np.uint8)
    inside[SIDE // 4 : -SIDE // 4, SIDE // 4 : -SIDE // 4] = 255
    return as_png(Image.fromarray(inside))


@dataclass
class Load:
    """What the clients share and what they found."""

    url: str
    expected: list[np.ndarray]
    requests: int
    until: float
    pid: int
    seconds: list[float] = field(default_factory=list)
    begun: int = 0
    wrong: int = 0
    retried: int = 0
    failed: list[str] = field(default_factory=list)
    warm_rss: int = 0

    async def run(self, clients: int) -> None:
        async with httpx.AsyncClient(base_url=self.url, timeout=CLIENT_TIMEOUT) as http:
            examples = [("support", ("a.png", picture(0))), ("mask", ("a_mask.png", middle()))]
            stored = (await http.post("/v1/supports", files=examples)).json()["id"]
            await asyncio.gather(*(self._client(http, examples, stored) for _ in range(clients)))

    async def _client(self, http: httpx.AsyncClient, examples: list[Any], stored: str) -> None:
        while self.begun < self.requests and time.perf_counter() < self.until:
            number = self.begun
            self.begun += 1
            query = ("query", ("photo.png", picture(1 + number % PHOTOS)))
            if number % 2:
                await self._ask(http, number, {"files": [*examples, query]})
            else:
                await self._ask(http, number, {"files": [query], "data": {"support_set": stored}})

    async def _ask(self, http: httpx.AsyncClient, number: int, request: dict[str, Any]) -> None:
        started = time.perf_counter()
        try:
            while (answer := await http.post("/v1/segment", **request)).status_code == 429:
                self.retried += 1
                await asyncio.sleep(int(answer.headers["Retry-After"]))
            answer.raise_for_status()
        except httpx.HTTPError as error:
            self.failed.append(f"{type(error).__name__}: {error}")
            return
        self.seconds.append(time.perf_counter() - started)
        [found] = answer.json()["results"][0]["masks"]
        self.wrong += not np.array_equal(from_rle(found["rle"]), self.expected[number % PHOTOS])
        if len(self.seconds) == WARM_UP:
            self.warm_rss = resident(self.pid)


def resident(pid: int) -> int:
    """Bytes of memory that a process holds."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]


def tiny_model(folder: Path) -> Path:
    network = vat.create_model("prototype", backbone="test_resnet", levels=(2,), image_size=SIDE)
    vat.save(network.eval(), folder / "tiny.safetensors")
    return folder / "tiny.safetensors"


def address(server: subprocess.Popen[str]) -> str:
    """Where a server that has just been started listens, once it does."""
    assert server.stderr is not None
    said = server.stderr.readline()
    url = re.search(r"http://[\w.:]+", said)
    if url is None:
        raise SystemExit(f"The server did not start: {said}")
    return url[0]


def measure(model: Path, clients: int, requests: int, bound: float) -> dict[str, Any]:
    """Start the server, load it, end it."""
    segmenter = vat.Segmenter(model, "cpu").fit([picture(0)], [middle()])
    expected = [segmenter.predict(picture(1 + i)).mask for i in range(PHOTOS)]
    options = ["--port", "0", "--no-page", "--match-model", "none", "--model", str(model), "--device", "cpu"]
    command = [str(Path(sys.executable).parent / "vat"), "serve", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            url = address(server)
            started = time.perf_counter()
            load = Load(url, expected, requests, started + bound, server.pid)
            asyncio.run(load.run(clients))
            took, rss = time.perf_counter() - started, resident(server.pid)
        finally:
            server.terminate()
    times = np.array(load.seconds) if load.seconds else np.zeros(1)
    return {
        "clients": clients,
        "requests": load.begun,
        "answered": len(load.seconds),
        "wrong": load.wrong,
        "lost": load.begun - len(load.seconds),
        "told_to_come_back": load.retried,
        "seconds": round(took, 1),
        "requests_per_second": round(len(load.seconds) / took, 1),
        "p50_ms": round(1000 * float(np.percentile(times, 50)), 1),
        "p95_ms": round(1000 * float(np.percentile(times, 95)), 1),
        "rss_mib_warm": round(load.warm_rss / 2**20, 1),
        "rss_mib_end": round(rss / 2**20, 1),
        "failures": load.failed[:5],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=60, help="stop to begin new requests after this long")
    parser.add_argument("--model", type=Path, help="a checkpoint of a segmentation network, instead of a tiny one")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or tiny_model(Path(folder))
        figures = measure(model, arguments.clients, arguments.requests, arguments.seconds)
    print(json.dumps(figures, indent=1))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    if figures["wrong"] or figures["lost"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
