"""Verb ``doctor --data``: what is wrong with the data of a configuration, before hours are spent.

It reads a bounded, seeded sample: the index of the run where there is one, else a few shards of
each source, which are indexed in a temporary folder; of these some pictures and captions. Nothing
is written beside that. Lines are those of ``doctor``.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image
from scipy.stats import hypergeom

from mclclip import doctor, index
from mclclip.config import Config
from mclclip.data import sample_index
from mclclip.data.decode import DecodeError, as_picture, decode, peculiarity
from mclclip.data.findings import REASONS, Findings
from mclclip.data.labels import label_space
from mclclip.data.sample_index import SampleIndex
from mclclip.data.samples import BadSample, TarDataset
from mclclip.doctor import Finding, finding
from mclclip.models.loading import model_config, model_tokenizer
from mclclip.options import brief
from mclclip.ranks.process_group import SINGLE
from mclclip.run.artifacts import Layout, is_finished, made_of, read_manifest
from mclclip.run.runlog import count_of

SHARDS = 4
"""Shards of all sources together that are looked at where there is no index; one of each at least.
"""
NUM_PICTURES, PICTURE_BYTES, NUM_CAPTIONS = 1_000, 1 << 27, 20_000
"""Pictures that are decoded, unless they have more bytes together, and captions that are read."""
MOST_EQUAL, MOST_LONG, MOST_COPIES, MOST_CUT = 0.05, 0.05, 0.01, 0.1
"""Shares of the samples above which a line is a warning."""
_NEAR = 2  # bits of 64 in which the hashes of near-copies differ
_SHARDS = "shards"  # the kind of an artifact of pack
_FLAT = 6  # bits that are set at least, or pictures without any structure were copies
# Words by which English captions say what encoders are often blind to.
WORDS = {
    "colours": "black white grey gray red green blue yellow orange brown pink purple beige golden "
    "silver dark bright light colorful colourful",
    "numbers": "one two three four five six seven eight nine ten several many few some couple pair "
    "single group",
    "places": "left right above below under behind front between beside near next around inside "
    "outside top bottom middle center centre corner side over",
    "sizes": "big small large little tiny huge tall short long wide narrow thick thin",
    "materials": "wooden wood metal stone brick glass leather plastic paper concrete grass sand "
    "striped dotted plain",
}
_WORD = re.compile(r"[^\W\d_]+|\d+")


def run(config: Config) -> int:
    """Prints a line per check of the data; returns 0, or 2 where one failed.

    Raises the errors of ``mclclip index``.
    """
    with tempfile.TemporaryDirectory(prefix="mclclip-doctor-") as folder:
        return doctor.show(findings(config, Path(folder)))


def findings(config: Config, folder: Path) -> Iterator[Finding]:
    """All checks, in the order of the report; ``folder`` is for a temporary index."""
    samples, total, note = _index(config, folder)
    number = f"{total:,}" if total == len(samples) else f"about {total:,}"
    yield finding("samples", f"{number}{note}")
    found = read_manifest(samples.directory, sample_index.KIND).counts["findings"]
    for line in Findings(found).lines():
        yield finding("index", line, "see that these may be missing")
    for line in _of_pack(samples).lines():
        yield finding("pack", line, "see that these may be missing")
    random = np.random.default_rng([config.seed, 0])
    read = TarDataset(samples, replace(config.data, verify="captions"))
    yield from _pictures(config, read, random)
    yield from _captions(config, read, random)
    yield from _groups(config, total)


def _of_pack(samples: SampleIndex) -> Findings:
    """Returns what ``pack`` counted when it wrote shards of an index; nothing of other shards."""
    found = Findings()
    folders = dict.fromkeys(Path(shard.path).parent for shard in samples.shards)
    for folder in dict.fromkeys(place for own in folders for place in (own, own.parent)):
        if made_of(folder).get("kind") == _SHARDS and is_finished(folder):
            found.merge(Findings(read_manifest(folder, _SHARDS).counts["findings"]))
    return found


def _index(config: Config, folder: Path) -> tuple[SampleIndex, int, str]:
    """An index of all shards or of some; the number of all samples; and what was looked at."""
    directory = Layout.of(config).index
    if is_finished(directory):
        samples = SampleIndex.open(directory)
        return samples, len(samples), f" in {count_of(len(samples.shards), 'shard')}, all indexed"
    sources, number, every = {}, 0, 0
    for name, source in config.data.sources.items():
        paths = index.expand_shards(
            source.shards, f"data.sources.{name}.shards", config.data.remote
        )
        most = max(1, SHARDS // len(config.data.sources))
        some = paths[:: -(-len(paths) // most)]
        sources[name] = replace(source, shards=some)
        number, every = number + len(some), every + len(paths)
    data = replace(config.data, sources=sources, verify="captions", max_bad_fraction=1.0)
    data = replace(data, index_workers=1)  # to start processes takes longer than to scan
    samples = index.run(replace(config, run_dir=str(folder), data=data), SINGLE)
    total = round(len(samples) * every / number)
    text = f" in {count_of(every, 'shard')}; looked at: {len(samples):,} in {number:,}"
    return samples, total, text


# --- pictures ------------------------------------------------------------------------------------


def _pictures(config: Config, read: TarDataset, random: np.random.Generator) -> Iterator[Finding]:
    ids = random.permutation(len(read))[:NUM_PICTURES]
    fitting = int(np.searchsorted(np.cumsum(read.index.image_size[ids]), PICTURE_BYTES)) + 1
    ids = np.sort(ids[:fitting])
    keys, sizes, hashes, contents, bad = [], [], [], [], dict[int, str]()
    odd: dict[str, list[str]] = {}
    for sample_id, raw in zip(ids.tolist(), read.read_many(ids), strict=True):
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
        pixels = np.asarray(picture.convert("RGB"))
        flat = bool((pixels == pixels[0, 0]).all())
        reason = peculiarity(raw.image, config.data.max_image_pixels)
        for name in filter(None, (reason, "flat" if flat else None)):
            odd.setdefault(name, []).append(key)
        keys.append(key)
        sizes.append(picture.size)
        hashes.append(_hash(picture))
        contents.append(hashlib.sha256(raw.image).digest())
    most = config.data.max_bad_fraction
    reasons = Counter(bad.values()).most_common()
    told = ", ".join(f"{count} {reason}" for reason, count in reasons) or "none"
    text = f"{len(bad):,} of {len(ids):,} cannot be used ({told})"
    if bad:
        text += f", such as {', '.join(read.index.names([*bad][:3]))}"
    if len(bad) > most * len(ids):
        yield Finding(
            "FAIL", "decoding", f"{text}: fetch them again, or raise data.max_bad_fraction ({most})"
        )
    else:
        yield finding("decoding", text)
    for name, some in sorted(odd.items()):
        text = REASONS.get(name, "pictures of one colour, which show nothing")
        advice = "see that they show what their captions say"
        yield finding(name.replace("_", " "), f"{len(some):,} {text}, e.g. {some[0]}", advice)
    if sizes:
        yield from _sizes(config, np.array(sizes))
        yield _copies(keys, np.array(hashes, np.uint64), contents)


def _sizes(config: Config, sizes: npt.NDArray[np.int64]) -> Iterator[Finding]:
    """``sizes``: [n, 2], width and height."""
    shorter, longer = sizes.min(axis=1), sizes.max(axis=1)
    width, height = np.median(sizes, axis=0)
    text = f"{width:.0f} x {height:.0f} pixels in the median, shorter sides {shorter.min():,} to "
    text += f"{shorter.max():,}"
    try:
        own = model_config(config.model.name).get("vision_cfg", {}).get("image_size", 224)
    except (ValueError, FileNotFoundError) as error:
        yield finding("sizes", text, f"the model cannot be read ({error})")
        return
    side = own if isinstance(own, int) else min(own)
    share = float((shorter < side).mean())
    advice = "take pictures of more pixels, or a model of fewer" if share > 0.5 else ""
    yield finding("sizes", f"{text}; {share:.0%} are enlarged to the model's {side}", advice)
    aspect = longer / shorter
    cut = float((aspect > 2).mean())
    text = f"longer side by shorter side {np.median(aspect):.2f} in the median, at most "
    text += f"{aspect.max():.3g}; above 2 are {cut:.0%}, of which crops show less than half"
    advice = "cut or pad them, or see that captions fit the middle" if cut > MOST_CUT else ""
    yield finding("aspect", text, advice)


def _hash(picture: Image.Image) -> int:
    """64 bits: whether each of 8 x 8 places is brighter than its right neighbour."""
    small = np.asarray(picture.convert("L").resize((9, 8), Image.Resampling.BOX), np.int16)
    bits = (small[:, :-1] > small[:, 1:]).reshape(-1)
    return int(np.packbits(bits).view(np.uint64)[0])


def _copies(keys: Sequence[str], hashes: npt.NDArray[np.uint64], contents: list[bytes]) -> Finding:
    number = Counter(contents)
    equal = np.array([number[content] > 1 for content in contents])
    structured = np.bitwise_count(hashes) >= _FLAT
    near = np.bitwise_count(hashes[:, None] ^ hashes) <= _NEAR
    near &= structured[:, None] & structured
    near |= np.array(contents)[:, None] == np.array(contents)
    np.fill_diagonal(near, False)
    has_copy = near.any(axis=1)
    text = f"{int(has_copy.sum()):,} of {len(keys):,} have a near-copy among these, "
    text += f"{int(equal.sum()):,} of them byte for byte"
    if has_copy.any():
        first = int(has_copy.argmax())
        text += f", such as {keys[first]} and {keys[int(near[first].argmax())]}"
    many = has_copy.mean() > MOST_COPIES
    return finding("near-copies", text, "'mclclip filter --near-duplicates 0.95'" if many else "")


# --- captions ------------------------------------------------------------------------------------


def _captions(config: Config, read: TarDataset, random: np.random.Generator) -> Iterator[Finding]:
    numbers = read.index.num_captions
    bare = float((numbers == 0).mean())
    text = f"{int(numbers.sum()):,}, {bare:.1%} of the samples have none"
    missed = config.reads_captions and bare == 1
    advice = "name the field in data.sources.NAME.captions" if missed else ""
    yield finding("captions", text, advice)
    ids = random.permutation(np.flatnonzero(numbers))[:NUM_CAPTIONS]
    every = read.captions_of(np.sort(ids).tolist())
    drawn = [own[int(random.integers(len(own)))] for own in every]
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
    yield _words(drawn)


def equal_in_batch(counts: Sequence[int], batch: int) -> float:
    """Expected share of the samples of a random batch whose caption another one of it has too.

    ``counts``: of the samples by caption. A batch is drawn from them without replacement: with m
    samples of a caption among n, another one is among the B - 1 others with the probability
    1 - C(n - m, B - 1) / C(n - 1, B - 1).
    """
    every = np.asarray(counts)
    n = int(every.sum())
    alone = every / n @ hypergeom.pmf(0, max(n - 1, 1), every - 1, min(batch, n) - 1)
    return max(0.0, float(1.0 - alone))


def _lengths(config: Config, texts: Sequence[str]) -> Finding:
    words = np.array([len(_WORD.findall(text)) for text in texts])
    text = f"{np.median(words):.0f} words in the median, at most {words.max():,}"
    try:
        tokenizer = model_tokenizer(config.model.name)
        context = int(tokenizer.context_length)
        # Two tokens beyond the context are there for its end and for one that is cut off.
        tokens = [tokenizer([each[:10_000]], context + 2)[0] for each in texts[:NUM_PICTURES]]
        padding = int(tokenizer([""], context + 2)[0, -1])
    except (ValueError, FileNotFoundError) as error:
        return finding("caption length", text, f"tokens are not counted ({error})")
    share = float(np.mean([int(row[context]) != padding for row in tokens]))
    text += f"; {share:.1%} are longer than the model's {context} tokens, and cut"
    advice = (
        "put what matters first, or cut them into several captions" if share > MOST_LONG else ""
    )
    return finding("caption length", text, advice)


def _words(texts: Sequence[str]) -> Finding:
    found, classes = Counter[str](), {name: {*words.split()} for name, words in WORDS.items()}
    for text in texts:
        words = {*_WORD.findall(text.lower())}
        named = [name for name, known in classes.items() if words & known]
        named += ["numbers"] if "numbers" not in named and any(map(str.isdigit, words)) else []
        found.update(named or ["none of these"])
    shares = {name: found[name] / len(texts) for name in (*WORDS, "none of these")}
    told = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    rare = [name for name in WORDS if shares[name] < 0.01]
    advice = f"a text tower learns nothing of {' and '.join(rare)} from these" if rare else ""
    return finding("words", f"captions name {told} (English words)", advice)


# --- groups --------------------------------------------------------------------------------------


def _groups(config: Config, total: int) -> Iterator[Finding]:
    if not config.has_stages or not config.train.objective.reads.groups:
        return
    batch = config.train.global_batch
    for stage in range(1, config.num_stages + 1):
        radices: Any = tuple(config.clusters[:stage])
        radices = radices[-1:] if config.cluster.label_mode == "last" else radices
        groups = label_space(radices)
        text = f"stage {stage}: up to {groups:,} (K {' x '.join(map(str, radices))}), of "
        text += f"{total / groups:,.0f} samples in the mean, global batch {batch:,}"
        most = max(1, int((total / batch) ** (1 / len(radices))))
        advice = (
            f"most fill no batch: set cluster.num_clusters to {most} or less"
            if (total < groups * batch)
            else ""
        )
        yield finding("groups", text, advice)
