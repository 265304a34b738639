"""Reading the batches of groups from the shards of the index and from the copies of ``relocate``.

Nothing is decoded, so that the ratio is that of reading alone. Disks are read cold where this
process may tell the system to forget what it has read (it has to be root); else that is said.
Stores are nginx, where there is one, behind a proxy that keeps every answer back for 20 ms; else
the tests' own server, which takes more of the processor. A plan in blocks draws other batches than
one without, of as many samples.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mclclip.config import Config, from_tree
from mclclip.data.bytes import Bytes
from mclclip.data.epoch_plan import EpochPlan
from mclclip.data.groups import group_samples
from mclclip.data.labels import read_pseudo_labels
from mclclip.data.locations import Locations
from mclclip.data.options import DataConfig
from mclclip.data.remote import RemoteOptions
from mclclip.data.sample_index import SampleIndex
from mclclip.ranks.process_group import SINGLE
from mclclip.run.artifacts import Artifact, RunPaths
from mclclip.util.remake import Remake
from mclclip.verbs import index, relocate
from tests.benchmarks import memory, timing

_PER_SHARD, _GROUPS, _FORGET = 1000, 10, Path("/proc/sys/vm/drop_caches")


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


def write_shards(folder: Path, count: int, image_bytes: int) -> None:
    """Tars of samples with random bytes of about this length as images, and captions."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    for start in range(0, count, _PER_SHARD):
        with tarfile.open(folder / f"{start // _PER_SHARD:05d}.tar", "w") as tar:
            for number in range(start, min(start + _PER_SHARD, count)):
                size = int(rng.integers(image_bytes // 2, 3 * image_bytes // 2))
                members = {"jpg": rng.bytes(size), "txt": f"caption {number}".encode()}
                for extension, data in members.items():
                    member = tarfile.TarInfo(f"{number:09d}.{extension}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))


def prepare(work: Path, shards: Sequence[str], name: str) -> Config:
    """An index over the shards, and random pseudo labels."""
    tree: Any = {"sources": {"bench": {"shards": list(shards)}}, "index_workers": 1}
    config = from_tree({"run_dir": str(work / name), "data": tree})
    samples = index.run(config, SINGLE)
    folder = RunPaths.of(config).pseudo_labels(1)
    inputs = {"index": samples.digest}
    artifact = Artifact(folder, kind="pseudo_labels", config={}, inputs=inputs).compare(write=True)
    labels = np.random.default_rng(1).integers(0, _GROUPS, (len(samples), 1))
    np.save(folder / "pseudo_labels.npy", labels)
    artifact.finish({"radices": [_GROUPS]})
    return config


def reader(
    config: Config, batch: int, steps: int, block: int, copies: Path | None, url: str | None
) -> Callable[[], None]:
    """Reads the first batches of an epoch: from copies, or (None) from the shards of the index."""
    layout, remote = RunPaths.of(config), RemoteOptions(in_flight=32)
    samples = SampleIndex.open(layout.index)
    labels, radices, _ = read_pseudo_labels(layout.pseudo_labels(1), samples)
    plan = EpochPlan(
        group_samples(labels, radices), batch, "backoff", "proportional", 0, 1, 0, block
    )  # fmt: skip
    found = None if copies is None else Locations.open(copies, samples, url, remote)
    samples_read = Bytes(samples, DataConfig(remote=remote), found)
    return lambda: _read(samples_read, plan, steps)


def _read(samples: Bytes, plan: EpochPlan, steps: int) -> None:
    for step in range(min(steps, plan.steps_per_epoch)):
        raws = samples.read(plan.batch(step).ids)
        assert all(len(raw.image) for raw in raws)  # type: ignore[union-attr]


def cold(read: Callable[[], None]) -> Callable[[], timing.Spent]:
    """The same, after the system has forgotten the files."""

    def run() -> timing.Spent:
        if os.access(_FORGET, os.W_OK):
            os.sync()
            _FORGET.write_text("3")
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        read()
        return timing.Spent(time.perf_counter() - wall_s, time.process_time() - cpu_s)

    return run


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints tables."""
    parser = timing.parser(__doc__)
    parser.add_argument("--samples", type=int, default=40_000)
    parser.add_argument("--image-bytes", type=int, default=40_000)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--steps", type=int, default=8, help="batches that are read in a round")
    parser.add_argument("--latency-ms", type=float, default=20.0)
    parser.add_argument("--folder", type=Path, help="on the disk to measure (default: /tmp)")
    args = timing.parse(parser, arguments, samples=400, batch=32, steps=2, image_bytes=1000)
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        work = Path(name)
        write_shards(work / "shards", args.samples, args.image_bytes)
        paths = sorted((work / "shards").glob("*.tar"))
        config = prepare(work, [str(path) for path in paths], "disk")
        _print_copying(config, args.rounds)
        copies = RunPaths.of(config).relocated(1, None)
        with server(work, work, args.latency_ms / 1e3) as (host, served_by):
            urls = [f"{host}shards/{path.name}" for path in paths]
            remote = prepare(work, urls, "http")
            _print_reading(args, config, copies, None, "disk, cold" if _may() else "disk, warm")
            relocate.run(remote, SINGLE, stage=1)
            of_urls = RunPaths.of(remote).relocated(1, None)
            url = host + str(of_urls.relative_to(work))
            how = f"{served_by}, {args.latency_ms:g} ms before every answer"
            _print_reading(args, remote, of_urls, url, how)


def _may() -> bool:
    return os.access(_FORGET, os.W_OK)


def _print_copying(config: Config, rounds: int) -> None:
    peaks: list[float] = []

    def copy() -> None:
        peaks.append(
            memory.peak_mib(lambda: relocate.run(config, SINGLE, stage=1, force=Remake.ALL))
        )

    relocate.run(config, SINGLE, stage=1)
    found = timing.interleave({"relocate": cold(copy)}, min(rounds, 3), warm_ups=0)
    folder = RunPaths.of(config).relocated(1, None)
    mib = sum(path.stat().st_size for path in folder.glob("*.tar")) / 2**20
    number = len(SampleIndex.open(RunPaths.of(config).index))
    wall, cpu = found.wall_s("relocate"), found.cpu_s("relocate")
    timing.print_table(
        f"Copying {number:,} samples of {mib:,.0f} MiB in {_GROUPS} groups, one process",
        ["what", "wall s", "CPU s", "MiB per s", "samples per CPU s", "peak MiB above the start"],
        [["relocate", *map(timing.number, (wall, cpu, mib / wall, number / cpu, max(peaks)))]],
    )


def _print_reading(args: Any, config: Config, copies: Path, url: str | None, where: str) -> None:
    common = config, args.batch, args.steps
    ways = {"index": cold(reader(*common, 1, None, None))}
    ways |= {"index, blocks of 64": cold(reader(*common, 64, None, None))}
    for block in (1, 16, 64):
        ways[f"copies, blocks of {block}"] = cold(reader(*common, block, copies, url))
    found = timing.interleave(ways, args.rounds)
    timing.print_table(
        f"{args.steps} batches of {args.batch}, each of one of {_GROUPS} groups, from {where}",
        timing.headers("read from", "samples"),
        found.rows("index", args.batch * args.steps),
    )


if __name__ == "__main__":
    main()
