"""An epoch of a data loader with one worker, in a process of its own: ours, or open_clip's.

``python -m tests.benchmarks.loader_epoch exact|fast|open_clip JSON`` prints the seconds of an
epoch, the median of three, as its last line. All loaders decode the same files to the crops of
open_clip's training transform, ours with ``data.pixels`` exact or fast, tokenize with its
tokenizer, and hand over batches. An epoch goes before them, so that neither starting the worker nor
a cold file cache is in the figure; the process and its worker share one core.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import mclclip.util.torchvision_fix  # noqa: F401

# isort: split
import numpy as np
import open_clip
import torch
from open_clip.transform import PreprocessCfg, image_transform_v2

from mclclip.data.groups import group_samples
from mclclip.models.tokenizer import WordEncoder
from mclclip.models.transforms import fast_transform
from tests.batches import training_batches

MAX_PIXELS = 100_000_000


def ours(given: dict[str, Any], transform: Any, tokenizer: Any) -> Iterable[Any]:
    """``TrainingBatches`` as training reads them."""
    from mclclip.data.sample_index import SampleIndex

    index = SampleIndex.open(Path(given["index"]))
    batches = training_batches(
        index=index,
        grouped=group_samples(np.zeros(len(index), np.int64), ()),
        transform=transform,
        tokenizer=tokenizer,
        global_batch=given["batch"],
        policy="backoff",
        order="proportional",
        seed=0,
        stage=0,
    )
    steps = range(given["samples"] // given["batch"])
    return torch.utils.data.DataLoader(
        batches, batch_size=None, sampler=steps, num_workers=1, persistent_workers=True
    )


def open_clips(given: dict[str, Any], transform: Any, tokenizer: Any) -> Iterable[Any]:
    """The loader of ``open_clip_train``'s ``--dataset-type webdataset``."""
    from open_clip_train.data import get_wds_dataset

    options = argparse.Namespace(
        train_data="::".join(given["shards"]),
        train_data_upsampling_factors=None,
        train_num_samples=given["samples"],
        dataset_resampled=False,
        batch_size=given["batch"],
        workers=1,
        world_size=1,
        seed=0,
    )
    found: Iterable[Any] = get_wds_dataset(options, transform, True, tokenizer=tokenizer).dataloader
    return found


def main(whose: str, text: str) -> None:
    """Reads four epochs and prints the median of the seconds of the last three."""
    given = json.loads(text)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    transform = image_transform_v2(PreprocessCfg(size=given["image_size"]), is_train=True)
    tokenizer = open_clip.get_tokenizer("ViT-B-32")
    if whose == "open_clip":
        loader = open_clips(given, transform, tokenizer)
    else:
        WordEncoder(tokenizer, "lower")  # as training's own models have it
        loader = ours(given, fast_transform(transform) if whose == "fast" else transform, tokenizer)
    wanted, seconds = given["samples"] // given["batch"], []
    for _ in range(4):
        before = time.perf_counter()
        if (count := sum(1 for _ in loader)) != wanted:
            raise RuntimeError(f"the loader gave {count} batches: wanted {wanted}")
        seconds.append(time.perf_counter() - before)
    print(json.dumps(statistics.median(seconds[1:])))


if __name__ == "__main__":
    main(*sys.argv[1:])
