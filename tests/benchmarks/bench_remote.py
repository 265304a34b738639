"""Samples behind a url beside the same samples on a disk: random batches by two loader workers.

The server runs in a process of its own on the same machine and waits before every answer, as a
network would. Both sides decode and transform alike, so that the ratio is what a training sees.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import mclclip.torchvision_fix  # noqa: F401

# isort: split
from open_clip.transform import PreprocessCfg, image_transform_v2

from mclclip import index, make_dataset
from mclclip.config import from_tree
from mclclip.data.loader import Loader
from mclclip.data.remote import RemoteOptions
from mclclip.data.samples import Sample, TarDataset
from mclclip.ranks.process_group import SINGLE
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


def dataset(shards: Sequence[str], work: Path, size: int, remote: RemoteOptions) -> TarDataset:
    """The samples of the shards, through an index in ``work``."""
    tree: Any = {"sources": {"bench": {"shards": list(shards)}}, "index_workers": 1}
    found = index.run(from_tree({"run_dir": str(work), "data": tree}), SINGLE)
    transform = image_transform_v2(PreprocessCfg(size=size), is_train=True)
    return TarDataset(found, transform, reads_captions=False, max_image_pixels=10**8, remote=remote)


def epoch(samples: TarDataset) -> None:
    """All samples once, in random batches."""
    ids = np.random.default_rng(0).permutation(len(samples))
    cuts = [ids[start : start + BATCH].tolist() for start in range(0, len(ids), BATCH)]
    loader: Loader[list[Any]] = Loader(
        samples, cuts, num_workers=WORKERS, describe=lambda *_: "a batch", batched=True
    )
    assert all(isinstance(sample, Sample) for batch in loader for sample in batch)


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
        command = [sys.executable, "-c", _SERVER, str(shards[0].parent), str(args.latency_ms / 1e3)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            host = server.stdout.readline().strip()
            urls = [host + path.name for path in shards]
            local = [str(path) for path in shards]
            few, many = RemoteOptions(in_flight=4), RemoteOptions(in_flight=32)
            sets: dict[str, TarDataset] = {
                "disk": dataset(local, work / "disk", args.size, many),
                "HTTP, 32 requests in flight": dataset(urls, work / "http", args.size, many),
                "HTTP, 4 requests in flight": dataset(urls, work / "http", args.size, few),
            }
            ways: dict[str, Callable[[], None]] = {
                name: lambda samples=samples: epoch(samples) for name, samples in sets.items()
            }
            found = timing.interleave(ways, args.rounds)
            server.kill()
        number = len(sets["disk"])
        timing.print_table(
            f"{number} samples, {args.latency_ms:g} ms before every answer, {WORKERS} workers",
            timing.headers("samples from", "samples"),
            found.rows("disk", number),
        )


if __name__ == "__main__":
    main()
