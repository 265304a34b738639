"""Random damage to a run directory: what verbs read is what was written, or one line says no.

`make test` has a slice of the trials, `make soak` all of them. The damage is not forged: checksums
are not made to fit.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mclclip import cluster, files
from mclclip.checkpoint import CheckpointConfig, Checkpoints
from mclclip.config import Config
from mclclip.data.groups import LabelBlocks, StageGroups
from mclclip.data.index_tables import check_shards
from mclclip.data.labels import ClassLabels, read_pseudo_labels
from mclclip.data.locations import TextFeatures
from mclclip.data.options import DataConfig
from mclclip.data.row_store import left_out
from mclclip.data.sample_index import SampleIndex
from mclclip.models.loading import load_towers
from mclclip.models.weights import digest_tensors
from mclclip.run.artifacts import Layout
from tests import damage, fuzzing
from tests.matrix import fuller_in_soak
from tests.unit.test_checkpoint import IDENTITY, Source

SEED = 12


def index_of(config: Config) -> SampleIndex:
    samples = SampleIndex.open(Layout.of(config).index)
    check_shards(samples.directory, samples.shards, DataConfig())
    return samples


def read_index(config: Config) -> Any:
    """Every column, and which samples are left out."""
    samples = index_of(config)
    names = ("image_offset", "image_size", "text_offset", "text_size", "num_captions", "text_crc32")
    columns = [files.digest_array(getattr(samples, name)) for name in names]
    shards = [shard.to_json() for shard in samples.shards]
    keys = samples.keys(range(len(samples)))
    return samples.digest, columns, shards, keys, samples.bad_ids().tolist()


def read_rows(config: Config) -> Any:
    """What the cluster verb reads."""
    samples, layout = index_of(config), Layout.of(config)
    cluster._open(config, layout, 0, samples, force=False, write=False)
    blocks = cluster._read_rows(config, layout, 0, samples)
    without = left_out(layout.embeddings(0), len(samples.shards)).tolist()
    return [files.digest_array(np.asarray(block)) for block in blocks], without


def read_labels(config: Config) -> Any:
    """What trainings read of clusters."""
    samples, layout = index_of(config), Layout.of(config)
    labels, radices, digest = read_pseudo_labels(layout.pseudo_labels(1), samples)
    classes = ClassLabels(layout.clusters(0), samples, 2, threshold=0.1)
    found = (labels, classes[np.arange(len(samples))], classes.centroids())
    return [files.digest_array(np.asarray(a)) for a in found], radices, digest, classes.digest


def read_texts(config: Config) -> Any:
    samples = index_of(config)
    features = TextFeatures(Layout.of(config).text_embeddings, samples)
    rows = [features.get(i, 0).numpy() for i in np.flatnonzero(samples.num_captions)]
    return files.digest_array(np.stack(rows))


def read_groups(config: Config) -> Any:
    grouped, known_bad = StageGroups(Layout.of(config).train(1) / "grouped_index").read()
    arrays = (grouped.sample_ids, grouped.group_starts, grouped.group_labels)
    return [files.digest_array(np.asarray(a)) for a in arrays], grouped.radices, known_bad.tolist()


def read_checkpoint(config: Config) -> Any:
    target = Source(1)
    directory = Layout.of(config).train(1) / "checkpoints"
    step = Checkpoints(directory, CheckpointConfig(), identity=IDENTITY).resume(target)
    return step, digest_tensors({n: t for n, t in target.state.items() if torch.is_tensor(t)})


def read_export(config: Config) -> Any:
    model = load_towers(Layout.of(config).export(0))
    return digest_tensors(model.exported.state_dict()), json.dumps(model.config, default=str)


READERS: dict[str, tuple[str, Callable[[Config], Any]]] = {
    "index": ("index", read_index),
    "embeddings": ("stage_0/embeddings", read_rows),
    "text_embeddings": ("stage_0/text_embeddings", read_texts),
    "mean": ("stage_0/text_embeddings", read_rows),
    "clusters": ("stage_0/clusters", read_labels),
    "pseudo_labels": ("stage_1/pseudo_labels", read_labels),
    "groups": ("stage_1/train/grouped_index", read_groups),
    "checkpoint": ("stage_1/train/checkpoints", read_checkpoint),
    "export": ("stage_0/export", read_export),
}


@pytest.fixture(scope="module")
def prepared(prepared_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prepared run with groups and a checkpoint of stage 1."""
    root = tmp_path_factory.mktemp("artifacts")
    (root / "data").symlink_to(prepared_run.parent / "data")
    run_dir = shutil.copytree(prepared_run, root / "run")
    train = run_dir / "stage_1/train"
    labels = np.load(run_dir / "stage_1/pseudo_labels/pseudo_labels.npy")[:, 0]
    blocks = LabelBlocks(labels, (3,))
    StageGroups(train / "grouped_index").write(blocks, blocks.sizes(), np.array([5, 9]))
    Checkpoints(train / "checkpoints", CheckpointConfig(), identity=IDENTITY).save(4, Source(4))
    return run_dir


@fuller_in_soak
@pytest.mark.parametrize("kind", READERS)
def test_damage_is_never_read(prepared: Path, tmp_path: Path, kind: str) -> None:
    folder, read = READERS[kind]
    config = damage.copied(prepared, tmp_path)
    whole = Path(config.run_dir) / folder
    kept = shutil.copytree(whole, tmp_path / "kept")
    wanted = read(config)
    names = sorted(str(path.relative_to(kept)) for path in kept.rglob("*") if path.is_file())
    rng, refused = random.Random(f"{SEED} {kind}"), 0
    trials = fuzzing.count(6, 560)
    for number in range(trials):
        name = rng.choice(names)
        _damage(whole, name, rng)
        found = fuzzing.ends_well(lambda: read(config), f"trial {number} of {kind}, {name}")
        assert found in (None, wanted), f"trial {number} of {kind}: damage to {name} was read"
        refused += found is None
        shutil.rmtree(whole)
        shutil.copytree(kept, whole)
    assert refused > trials / 8  # damage shows; not every file is read again


def _damage(whole: Path, name: str, rng: random.Random) -> None:
    """Changes a file, removes it, or puts another one in its place."""
    path = whole / name
    content = path.read_bytes()
    way = rng.randrange(10)
    if way == 0:
        path.unlink()
    elif way == 1:
        others = sorted(p for p in whole.rglob(f"*{path.suffix}") if p.is_file())
        path.write_bytes(rng.choice(others).read_bytes())
    elif way < 6 and path.suffix == ".json":
        path.write_text(json.dumps(fuzzing.damaged_json(json.loads(content), rng)))
    else:
        path.write_bytes(fuzzing.damaged_bytes(content, rng))
