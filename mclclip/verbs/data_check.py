"""Verb ``doctor --data``: finds errors in the data of a configuration before hours are spent.

It reads some pictures and captions of the run's index, which the seed draws. If there is no index,
it indexes a few shards of each source in a temporary folder. It writes nothing else, and prints
lines as ``doctor`` does.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image
from scipy.stats import hypergeom

from mclclip.config import Config
from mclclip.data import sample_index
from mclclip.data.bytes import BadSample, Bytes, read_excluded
from mclclip.data.decode import DecodeError, as_picture, decode, peculiarity
from mclclip.data.findings import REASONS, Findings
from mclclip.data.locations import PICTURE
from mclclip.data.sample_index import SampleIndex
from mclclip.data.shard_paths import expand_shards
from mclclip.models.loading import model_config, model_tokenizer
from mclclip.ranks.process_group import SINGLE
from mclclip.run.artifacts import RunPaths, is_finished, read_manifest
from mclclip.run.runlog import count_of
from mclclip.util.options import brief
from mclclip.verbs import doctor, index
from mclclip.verbs.doctor import Finding, finding

SHARDS = 4
"""Without an index about this many shards of all sources are read, and at least one of each."""
NUM_PICTURES, PICTURE_BYTES, NUM_CAPTIONS = 1_000, 1 << 27, 20_000
"""Most pictures that are decoded, most bytes of these, and most captions that are read."""
MOST_EQUAL, MOST_LONG, MOST_COPIES = 0.05, 0.05, 0.01
"""If a larger share of samples has equal captions, long captions or copies, that is a warning."""


def run(config: Config) -> int:
    """Prints a line per check of the data; returns 0, or 2 if a check failed.

    Raises the errors of ``mclclip index``.
    """
    with tempfile.TemporaryDirectory(prefix="mclclip-doctor-") as folder:
        return doctor.show(findings(config, Path(folder)))


def findings(config: Config, folder: Path) -> Iterator[Finding]:
    """Runs all checks; yields a line for each. ``folder`` is for a temporary index."""
    samples, total, note = _index(config, folder)
    number = f"{total:,}" if total == len(samples) else f"about {total:,}"
    yield finding("samples", f"{number}{note}")
    recorded = read_manifest(samples.directory, sample_index.KIND).counts["findings"]
    for line in Findings(recorded).lines():
        yield finding("index", line, "see that these may be missing")
    random = np.random.default_rng([config.seed, 0])
    read = Bytes(samples, replace(config.data, verify="captions"))
    yield from _pictures(config, read, random)
    yield from _captions(config, read, random)


def _index(config: Config, folder: Path) -> tuple[SampleIndex, int, str]:
    """Returns an index of all or some shards, the (estimated) number of all samples, and words
    that say how many shards were read."""
    directory = RunPaths.of(config).index
    if is_finished(directory):
        samples = SampleIndex.open(directory)
        return samples, len(samples), f" in {count_of(len(samples.shards), 'shard')}, all indexed"
    sources, number, every = {}, 0, 0
    for name, source in config.data.sources.items():
        option = f"data.sources.{name}.shards"
        paths = expand_shards(source.shards, option, config.data.remote)
        some = paths[:: -(-len(paths) // max(1, SHARDS // len(config.data.sources)))]
        sources[name] = replace(source, shards=some)
        number, every = number + len(some), every + len(paths)
    data = replace(config.data, sources=sources, verify="captions", max_bad_fraction=1.0)
    data = replace(data, index_workers=1)  # starting processes would take longer than the scan
    samples = index.run(replace(config, run_dir=str(folder), data=data), SINGLE)
    total = round(len(samples) * every / number)
    text = f" in {count_of(every, 'shard')}; looked at: {len(samples):,} in {number:,}"
    return samples, total, text


# --- pictures ------------------------------------------------------------------------------------


def _pictures(config: Config, read: Bytes, random: np.random.Generator) -> Iterator[Finding]:
    """Decodes some pictures; reports bad and odd ones, sizes and copies."""
    ids = random.permutation(len(read.index))
    ids = ids[~np.isin(ids, [*read_excluded(read.index, config.data.exclude)])][:NUM_PICTURES]
    fitting = int(np.searchsorted(np.cumsum(read.index.image_size[ids]), PICTURE_BYTES)) + 1
    ids = np.sort(ids[:fitting])
    keys, sizes, contents, bad = [], [], [], dict[int, str]()
    odd: dict[str, list[str]] = {}
    for sample_id, raw in zip(ids.tolist(), read.read(ids, [PICTURE]), strict=True):
        try:
            if isinstance(raw, BadSample):
                raise DecodeError(raw.reason)
            picture = decode(raw.image, config.data.max_image_pixels, reads_arrays=True)
        except DecodeError as error:
            bad[sample_id] = error.reason
            continue
        if not isinstance(picture, Image.Image):
            picture = Image.fromarray(as_picture(picture))
        key = read.index.keys([sample_id])[0]
        if reason := peculiarity(raw.image, config.data.max_image_pixels):
            odd.setdefault(reason, []).append(key)
        keys.append(key)
        sizes.append(picture.size)
        contents.append(hashlib.sha256(raw.image).digest())
    most = config.data.max_bad_fraction
    reasons = Counter(bad.values()).most_common()
    counts = ", ".join(f"{count} {reason}" for reason, count in reasons) or "none"
    text = f"{len(bad):,} of {len(ids):,} cannot be used ({counts})"
    if bad:
        text += f", such as {', '.join(read.index.names([*bad][:3]))}"
    if too_many := len(bad) > most * len(ids):
        text += f": fetch them again, or raise data.max_bad_fraction ({most})"
    yield Finding("FAIL" if too_many else "warn" if bad else "ok", "decoding", text)
    for name, some in sorted(odd.items()):
        text = f"{len(some):,} {REASONS[name]}, e.g. {some[0]}"
        yield finding(name.replace("_", " "), text, "see that they show what their captions say")
    if sizes:
        yield _sizes(config, np.array(sizes))
        yield _copies(keys, contents)


def _sizes(config: Config, sizes: npt.NDArray[np.int64]) -> Finding:
    """Warns if most pictures are smaller than the model's images; ``sizes`` [n, 2] are (width,
    height)."""
    shorter, (width, height) = sizes.min(axis=1), np.median(sizes, axis=0)
    text = f"{width:.0f} x {height:.0f} pixels in the median, shorter sides {shorter.min():,} to "
    text += f"{shorter.max():,}"
    try:
        vision = model_config(config.model.name).get("vision_cfg", {})
        side = config.model.image_size or vision.get("image_size", 224)
    except (ValueError, FileNotFoundError) as error:
        return finding("sizes", text, f"the model cannot be read ({error})")
    share = float((shorter < np.min(side)).mean())
    advice = "take pictures of more pixels, or a model of fewer" if share > 0.5 else ""
    return finding("sizes", f"{text}; {share:.0%} are enlarged to the model's {side}", advice)


def _copies(keys: Sequence[str], contents: Sequence[bytes]) -> Finding:
    """Warns of pictures that are stored more than once; ``contents`` are digests of the files."""
    by_content: dict[bytes, list[str]] = {}
    for key, digest in zip(keys, contents, strict=True):
        by_content.setdefault(digest, []).append(key)
    alike = [same for same in by_content.values() if len(same) > 1]
    copied = sum(map(len, alike))
    text = f"{copied:,} of {len(keys):,} have a copy among these, byte for byte"
    if alike:
        text += f", such as {' and '.join(alike[0][:2])}"
    advice = "keep one of each, or give one of them weight 0 (train.plan.weights)"
    return finding("copies", text, advice if copied > MOST_COPIES * len(keys) else "")


# --- captions ------------------------------------------------------------------------------------


def _captions(config: Config, read: Bytes, random: np.random.Generator) -> Iterator[Finding]:
    """Reads some captions; reports missing, long and equal ones."""
    numbers = read.index.num_captions
    bare = float((numbers == 0).mean())
    text = f"{int(numbers.sum()):,}, {bare:.1%} of the samples have none"
    advice = "name the field in data.sources.NAME.captions"
    yield finding("captions", text, advice if config.reads_captions and bare == 1 else "")
    ids = random.permutation(np.flatnonzero(numbers))[:NUM_CAPTIONS]
    every = read.captions_of(np.sort(ids).tolist())
    drawn = [captions[int(random.integers(len(captions)))] for captions in every]
    if not drawn:
        return
    yield _lengths(config, drawn)
    equal = Counter(" ".join(text.lower().split()) for text in drawn)
    for name, training in config.trainings.items():
        if training.objective.reads.captions:
            share = equal_in_batch([*equal.values()], training.global_batch)
            text = f"{share:.1%} of a random batch of {training.global_batch:,} ({name}) have the "
            text += "caption of another sample; groups have more"
            text += f"; the commonest: {brief(equal.most_common(1)[0][0])}"
            advice = "captions that say more, one sample of a caption, or a smaller batch"
            yield finding("equal captions", text, advice if share > MOST_EQUAL else "")


def equal_in_batch(counts: Sequence[int], batch: int) -> float:
    """Returns the expected share of samples in a random batch that have the caption of another
    sample in it.

    ``counts``: the number of samples of each caption. A batch of B is drawn without replacement. If
    m of n samples have a caption, then one of these meets another of them among its B - 1
    companions with the probability 1 - C(n - m, B - 1) / C(n - 1, B - 1).
    """
    every = np.asarray(counts)
    n = int(every.sum())
    alone = every / n @ hypergeom.pmf(0, max(n - 1, 1), every - 1, min(batch, n) - 1)
    return max(0.0, float(1.0 - alone))


def _lengths(config: Config, texts: Sequence[str]) -> Finding:
    """Warns if many captions are longer than the context of the model."""
    words = np.array([len(text.split()) for text in texts])
    text = f"{np.median(words):.0f} words in the median, at most {words.max():,}"
    if config.model.text_rows:
        return finding("caption length", text)
    try:
        tokenizer = model_tokenizer(config.model.name)
        context = int(tokenizer.context_length)
        # With two places more than the context, a longer text has a token there, not padding.
        tokens = [tokenizer([each[:10_000]], context + 2)[0] for each in texts[:NUM_PICTURES]]
        padding = int(tokenizer([""], context + 2)[0, -1])
    except (ValueError, FileNotFoundError) as error:
        return finding("caption length", text, f"tokens are not counted ({error})")
    share = float(np.mean([int(row[context]) != padding for row in tokens]))
    text += f"; {share:.1%} are longer than the model's {context} tokens, and cut"
    advice = "put what matters first, or cut them into several captions"
    return finding("caption length", text, advice if share > MOST_LONG else "")
