"""A made-up run without any training: shards with strangers' captions, clusters, results, records.

Everything lies on disk as the verbs write it; embeddings are written by hand, so that no encoder is
needed and all of it takes a second.
"""

from __future__ import annotations

import io
import json
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from mclclip import config
from mclclip.config import Config
from mclclip.data.row_store import rows_path, write_shard
from mclclip.data.sample_index import SampleIndex
from mclclip.data.shard_writer import PACKED_FROM
from mclclip.eval import results
from mclclip.eval.outcomes import Outcomes
from mclclip.ranks.process_group import SINGLE
from mclclip.run.artifacts import Artifact, RunPaths
from mclclip.util.files import record_of
from mclclip.verbs import blindspots, cluster, index
from mclclip.verbs import filter as filtering
from tests.tars import write_tar

SCRIPT = "<script>alert(1)</script>"
CONTROL = "\x1b[2J\u202e"
LONG = 20_000  # characters at the end of every caption
NUM_SAMPLES, BROKEN = 48, (7, 8)
STEPS = (10, 20, 30)
KINDS = ("colour", f"shape {SCRIPT}")


def picture(red: bool, size: tuple[int, int] = (90, 70)) -> bytes:
    """A JPEG of one colour."""
    sink = io.BytesIO()
    Image.new("RGB", size, (200, 30, 30) if red else (30, 30, 200)).save(sink, "JPEG")
    return sink.getvalue()


def is_red(sample: int) -> bool:
    """Whether a sample shows red; of the others a third are red."""
    return sample % 3 == 0


def write_shards(folder: Path) -> None:
    """Two shards of red and blue pictures, two of them broken, with captions of strangers."""
    for number in range(2):
        members = []
        for sample in range(number * NUM_SAMPLES // 2, (number + 1) * NUM_SAMPLES // 2):
            colour = "scarlet" if is_red(sample) else "azure"
            text = f"a {colour} thing {SCRIPT} {CONTROL}{'x' * LONG}"
            image = picture(is_red(sample))[: 400 if sample in BROKEN else None]
            about = {"colour": colour, "caption": text, PACKED_FROM: f"photos/{sample}{SCRIPT}"}
            parts = ((".jpg", image), (".json", json.dumps(about).encode()))
            members += [(f"{sample:05d}{suffix}", data) for suffix, data in parts]
        write_tar(folder / f"{number:05d}.tar", members)


def write_pairs(folder: Path) -> None:
    """Eight minimal pairs of two Types in MMVP-VLM's layout; one picture of pair 1-2 is broken."""
    lines = ["Question ID,Type,Statement"]
    for pair in range(8):
        kind = "colour" if pair < 4 else "shape"
        for number in (2 * pair + 1, 2 * pair + 2):
            path = folder / "MLLM_VLM Images" / kind / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"no picture" if number == 1 else picture(number % 2 == 0))
            lines.append(f"{number},{kind},statement {number} {SCRIPT}")
    (folder / "Questions.csv").write_text("\n".join(lines) + "\n")


def settings(root: Path) -> Config:
    """The options of the run below ``root``."""
    source = {"shards": f"{root}/shards/*.tar", "captions": "json:caption"}
    return config.from_tree(
        {
            "run_dir": str(root / "run"),
            "num_stages": 2,
            "device": "cpu",
            "data": {
                "sources": {"made": source | {"attributes": ["colour"]}},
                "index_workers": 1,
            },
            "cluster": {"num_clusters": 2, "restarts": 1},
            "controls": ["ungrouped"],
            "eval": {"suite": {"pairs": {"kind": "mmvp", "path": f"{root}/pairs"}}},
        }
    )


def make(root: Path) -> Path:
    """Writes everything below ``root``; returns the run directory."""
    write_shards(root / "shards")
    write_pairs(root / "pairs")
    options = settings(root)
    index.run(options, SINGLE)
    layout = RunPaths.of(options)
    (layout.run_dir / "config.yaml").write_text(config.dump(options))
    samples = SampleIndex.open(layout.index)
    for stage in range(2):
        embed(layout.embeddings(stage), samples, stage)
        cluster.run(options, SINGLE, stage=stage)
    blindspots.run(options, SINGLE, other="1", per_image=1)
    filtering.run(options, SINGLE, name="few", near_duplicates=0.999)
    for variant, stage in (("mcl", 1), ("mcl", 2), ("ungrouped", 1)):
        train(RunPaths.of(options, variant).train(stage), slower=variant != "mcl")
    evaluate(layout.results)
    return layout.run_dir


def embed(directory: Path, samples: SampleIndex, stage: int) -> None:
    """Embeddings that part red from blue in stage 0, and halves of the data in stage 1; the broken
    samples have none."""
    ids = range(len(samples))
    side = np.array([is_red(i) if stage == 0 else i >= NUM_SAMPLES // 2 for i in ids])
    noise = np.random.default_rng(stage).random((len(ids), 2))
    rows = np.stack([side, ~side], axis=1) + 0.1 * noise
    rows[[*BROKEN]] = 0.0
    write_embeddings(directory, samples, rows.astype(np.float32), encoder=str(stage), bad=BROKEN)


def write_embeddings(
    directory: Path,
    samples: SampleIndex,
    rows: np.ndarray,
    *,
    encoder: str,
    bad: Collection[int] = (),
    sizes: Sequence[int] | None = None,
    kind: str = "embeddings",
    **options: str,
) -> None:
    """Finished embeddings of the rows [N, D], without those of the samples ``bad``; ``sizes``: how
    many rows each shard has (None: one for each sample)."""
    inputs = {"index": samples.digest, "encoder": encoder}
    artifact = Artifact(directory, kind=kind, config=options, inputs=inputs).compare(write=True)
    records, first = {}, 0
    for number, shard in enumerate(samples.shards):
        ids = range(shard.start, shard.stop)
        stop = first + (len(ids) if sizes is None else sizes[number])
        own = {i: "truncated" for i in bad if i in ids}
        write_shard(
            directory, number, [(rows[first:stop], own)], samples,
            num_rows=stop - first, dtype=rows.dtype,
        )  # fmt: skip
        path, first = rows_path(directory, number), stop
        records[path.name] = record_of(path)
    counts = {"samples": len(samples), "shards": len(samples.shards)}
    artifact.finish(counts, dtype=rows.dtype.name, records=records)


def train(directory: Path, slower: bool) -> None:
    """The records of a finished training, the last row of which is only half written."""
    options = {"global_batch": 8, "objective": {"kind": "info_nce"}, "start": "base"}
    artifact = Artifact(directory, kind="train", config={"train": options}, inputs={}).compare(
        write=True
    )
    rows = [
        {"step": step, "samples_seen": 8 * step, "loss": 5.0 / step, "lr": 1e-3, "seconds": 5.0}
        | {"samples_per_s": 32.0, "samples_per_s_per_rank": 16.0, "memory_gib": 1.5}
        for step in STEPS
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (directory / "metrics.jsonl").write_text(text + '{"step": 40, "lo')
    epoch = rows[-1] | {"seconds": 120.0 if slower else 60.0}
    (directory / "epochs.jsonl").write_text(json.dumps(epoch) + "\n")
    artifact.finish({"steps": STEPS[-1]})


def evaluate(path: Path) -> None:
    """Results of four encoders on the pairs, and of one whose name is a stranger's."""
    names = [f"{n}-{n + 1}" for n in range(1, 17, 2)]
    kinds = [KINDS[n >= 4] for n in range(8)]
    rights = {"stage_0": 0b1, "stage_1": 0b10, "concat_stage_norm": 0b11111110}
    rights |= {"control_ungrouped_concat_stage_norm": 0b11, f"{SCRIPT}{CONTROL}": 0}
    for model, bits in rights.items():
        right = np.array([bool(bits >> n & 1) for n in range(8)])
        protocol = {"name": "mmvp_vlm", "trials": "pairs"}
        figures = [
            results.figure(
                kind, Outcomes(names[at : at + 4], right[at : at + 4]), protocol, level="table"
            )
            for kind, at in zip(KINDS, (0, 4), strict=True)
        ]
        by_type = Outcomes(names, right, strata=kinds)
        figures.append(results.figure("average", by_type, protocol, level="headline"))
        results.record(path, figures, model, "pairs")
