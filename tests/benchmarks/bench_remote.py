"""Training batches behind a url beside the same on a disk: random samples by two loader workers.

The server is nginx where there is one, behind a proxy that keeps every request back for as long as
a network would; else the tests' own, which waits before every answer and takes more of the
processor. Both sides decode and transform alike, so that the ratio is what a training sees.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import mclclip.torchvision_fix  # noqa: F401

# isort: split
from open_clip.transform import PreprocessCfg, image_transform_v2

from mclclip import index, make_dataset
from mclclip.config import from_tree
from mclclip.data.batches import Batch, Loader, TrainingBatches
from mclclip.data.groups import GroupedIndex
from mclclip.data.options import DataConfig
from mclclip.data.remote import RemoteOptions
from mclclip.ranks.process_group import SINGLE
from tests.batches import training_batches
from tests.benchmarks import timing

BATCH, WORKERS = 64, 2
_SERVER = """
import sys, time
from pathlib import Path
from tests.shard_server import serving
with serving(Path(sys.argv[1])) as server:
    server.latency_s = float(sys.argv[2])
    print(server.url(""), flush=True)
    time.sleep(1e6)
"""
_NGINX = """
daemon off; error_log stderr; pid {work}/nginx.pid; worker_processes 1;
events {{ worker_connections 1024; }}
http {{
  access_log off; sendfile on; keepalive_requests 1000000;
  client_body_temp_path {work}; proxy_temp_path {work}; fastcgi_temp_path {work};
  uwsgi_temp_path {work}; scgi_temp_path {work};
  server {{ listen 127.0.0.1:{port}; root {folder}; }}
}}
"""
_PROXY = """
import asyncio, sys
port, to, latency_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])

async def pump(reader, writer, delay_s):
    while data := await reader.read(1 << 20):
        if delay_s:
            await asyncio.sleep(delay_s)
        writer.write(data)
        await writer.drain()
    writer.close()

async def serve(reader, writer):
    inner = await asyncio.open_connection("127.0.0.1", to)
    await asyncio.gather(pump(reader, inner[1], latency_s), pump(inner[0], writer, 0.0),
                         return_exceptions=True)

async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", port)
    print(f"http://127.0.0.1:{port}/", flush=True)
    await server.serve_forever()

asyncio.run(main())
"""


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def server(folder: Path, work: Path, latency_s: float) -> Iterator[tuple[str, str]]:
    """Serves a folder; yields its url and the name of the server."""
    with contextlib.ExitStack() as stack:
        if (nginx := shutil.which("nginx")) is None:
            name, command = "the tests' server", [_SERVER, str(folder), str(latency_s)]
        else:
            port = free_port()
            settings = _NGINX.format(work=work, port=port, folder=folder)
            (work / "nginx.conf").write_text(settings)
            started = subprocess.Popen([nginx, "-c", str(work / "nginx.conf")])
            stack.callback(started.terminate)
            name, command = "nginx", [_PROXY, str(free_port()), str(port), str(latency_s)]
        process = subprocess.Popen(
            [sys.executable, "-c", *command], stdout=subprocess.PIPE, text=True
        )
        stack.callback(process.kill)
        assert process.stdout is not None
        yield process.stdout.readline().strip(), name


def batches(shards: Sequence[str], work: Path, size: int, remote: RemoteOptions) -> TrainingBatches:
    """One group of all samples of the shards, through an index in ``work``."""
    tree: Any = {"sources": {"bench": {"shards": list(shards)}}, "index_workers": 1}
    found = index.run(from_tree({"run_dir": str(work), "data": tree}), SINGLE)
    return training_batches(
        index=found,
        grouped=GroupedIndex.build(np.zeros(len(found), np.int64), ()),
        transform=image_transform_v2(PreprocessCfg(size=size), is_train=True),
        global_batch=BATCH,
        policy="backoff",
        order="proportional",
        seed=0,
        stage=1,
        options=DataConfig(remote=remote),
    )


def epoch(samples: TrainingBatches) -> None:
    """All samples but fewer than a batch once, in random batches."""
    steps = range(samples.steps_per_epoch)
    loader: Loader[Batch] = Loader(
        samples, steps, num_workers=WORKERS, describe=lambda *_: "a batch"
    )
    assert not any(batch.replaced for batch in loader)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a table."""
    parser = timing.parser(__doc__)
    parser.add_argument("--shards", nargs="*", type=Path, help="(default: rendered pictures)")
    parser.add_argument("--size", type=int, default=224, help="pixels of the transformed image")
    parser.add_argument("--latency-ms", type=float, default=20.0)
    parser.add_argument("--samples", type=int, default=4096, help="of rendered pictures")
    args = timing.parse(parser, arguments, samples=192)
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        shards = [path.resolve() for path in args.shards or ()]
        if not shards:
            make_dataset.run("patterns", work, seed=0, num_samples=args.samples, num_pairs=1)
            shards = sorted((work / "shards").glob("*.tar"))
        with server(shards[0].parent, work, args.latency_ms / 1e3) as (host, served_by):
            urls = [host + path.name for path in shards]
            options = RemoteOptions(in_flight=32)
            sets: dict[str, TrainingBatches] = {
                "disk": batches([str(path) for path in shards], work / "disk", args.size, options),
                "HTTP": batches(urls, work / "http", args.size, options),
                "HTTP, without reading ahead": batches(urls, work / "http", args.size, options),
            }
            sets["HTTP, without reading ahead"]._start_next = lambda *_: None  # type: ignore[method-assign]
            ways: dict[str, Callable[[], None]] = {
                name: lambda samples=samples: epoch(samples) for name, samples in sets.items()
            }
            found = timing.interleave(ways, args.rounds)
        number = BATCH * sets["disk"].steps_per_epoch
        timing.print_table(
            f"{number} samples, {served_by}, {args.latency_ms:g} ms before every answer, "
            f"{WORKERS} workers",
            timing.headers("samples from", "samples"),
            found.rows("disk", number),
        )


if __name__ == "__main__":
    main()
