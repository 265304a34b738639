"""Reading samples: order, bounded handles, captions, bad samples, text embeddings."""

from __future__ import annotations

import io
import os
import pickle
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import mclclip.util.torchvision_fix  # noqa: F401

# isort: split
import open_clip

from mclclip.data import samples as samples_module
from mclclip.data.bytes import BadSample, RawSample
from mclclip.data.findings import Findings
from mclclip.data.index_tables import Shard, join_rows, write_tables
from mclclip.data.options import DataConfig
from mclclip.data.remote import StoredFile
from mclclip.data.row_store import StoredRows
from mclclip.data.sample_index import SampleIndex
from mclclip.data.samples import Sample, TarDataset
from mclclip.data.shard_scan import scan_shard
from mclclip.data.shard_writer import PackedSample, write_shards
from tests.tars import write_tar

LIMIT = 1_000_000
NUM_SAMPLES, PER_SHARD = 23, 5


def png(number: int) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (6, 4), (number % 256, 10, 20)).save(stream, "PNG")
    return stream.getvalue()


def captions_of(number: int) -> list[str]:
    return [f"caption {k} of {number}" for k in range(1 + number % 3)]


def packed(number: int, image: bytes | None = None) -> PackedSample:
    return PackedSample(
        f"{number:05d}", png(number) if image is None else image, "png", captions_of(number)
    )


def build_index(
    directory: Path, paths: list[Path], captions: str, pixels: bool = False
) -> SampleIndex:
    directory.mkdir(parents=True, exist_ok=True)
    scans = [
        scan_shard(StoredFile(str(path)), "test", captions, pixels=pixels).rows for path in paths
    ]
    stops = np.cumsum([len(rows) for rows in scans]).tolist()
    shards = [
        Shard(str(path), "test", captions, stop - len(rows), stop, path.stat().st_size)
        for path, rows, stop in zip(paths, scans, stops, strict=True)
    ]
    table, _ = join_rows(None, list(scans), shards, 0, Findings(), DataConfig())
    digest = write_tables(directory, table, shards)
    return SampleIndex(directory, digest)


def make_index(
    directory: Path, bad: dict[int, bytes] | None = None, captions: str = "json:captions"
) -> SampleIndex:
    samples = [packed(number, (bad or {}).get(number)) for number in range(NUM_SAMPLES)]
    paths = write_shards(samples, directory / "shards", PER_SHARD)
    return build_index(directory / "index", paths, captions)


def to_tensor(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def tokenize(texts: list[str]) -> torch.Tensor:
    rows = [list(text.encode()[:24].ljust(24)) for text in texts]
    return torch.tensor(rows, dtype=torch.int64)


IMAGES: dict[str, Any] = dict(options=DataConfig(max_image_pixels=LIMIT))
TEXTS: dict[str, Any] = IMAGES | {"tokenizer": tokenize}


def colour(sample: Sample | BadSample) -> int:
    assert isinstance(sample, Sample)
    return int(sample.views[0][0, 0, 0])


# --- reading -----------------------------------------------------------------------------------


def test_samples_come_in_the_order_asked_and_are_read_in_the_order_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = TarDataset(make_index(tmp_path), transform=to_tensor, **TEXTS)
    files: list[tuple[int, int]] = []
    read = dataset.bytes.reader.read

    def recording_read(shard: int, offset: int, size: int) -> bytes:
        files.append((shard, offset))
        return read(shard, offset, size)

    monkeypatch.setattr(dataset.bytes.reader, "read", recording_read)
    ids = np.random.default_rng(0).permutation(NUM_SAMPLES).tolist() + [3, 3]
    samples = dataset.__getitems__(ids)
    assert [colour(sample) for sample in samples] == ids
    assert [sample.sample_id for sample in samples] == ids
    images = [place for place in files if place[1] in set(dataset.index.image_offset.tolist())]
    assert images == sorted(images)
    for sample, number in zip(samples, ids, strict=True):
        assert isinstance(sample, Sample) and sample.text_features is None
        assert sample.text is not None
        assert torch.equal(sample.text, tokenize([f"caption 0 of {number}"])[0])
    for outside in (-1, NUM_SAMPLES):
        with pytest.raises(IndexError, match=f"sample_id {outside}, the index has 0..22"):
            dataset[outside]
    bare = TarDataset(dataset.index, transform=to_tensor, **IMAGES)  # reads no captions
    assert bare.read_many([4]) == [RawSample(4, png(4), b"")]


def test_captions_are_stripped_and_read_by_their_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "00000.tar"
    texts = [" caf\u00e9 \n".encode("utf-16"), b" caf\xc3\xa9", b"caf\xe9"]
    members = [(f"{n}.txt", text) for n, text in enumerate(texts)]
    write_tar(path, [*members, *((f"{n}.png", png(n)) for n in range(3))])
    dataset = TarDataset(build_index(tmp_path / "index", [path], "txt"), transform=None, **IMAGES)
    assert dataset.bytes.captions_of([0, 1, 2]) == [["caf\u00e9"], ["caf\u00e9"], []]
    dataset = TarDataset(make_index(tmp_path / "json", captions="json:caption"), **IMAGES)
    assert dataset.bytes.captions_of([8])[0] == captions_of(8)[:1]


def test_bad_samples_are_returned_with_their_reason(tmp_path: Path) -> None:
    stream = io.BytesIO()
    Image.effect_noise((64, 64), 50).save(stream, "JPEG")
    bad = {2: b"no image at all", 5: stream.getvalue()[:-500], 9: png(9)}
    dataset = TarDataset(make_index(tmp_path, bad), transform=to_tensor, **TEXTS)
    samples = dataset.__getitems__([1, 2, 5, 9])
    assert samples[1] == BadSample(2, "unidentified")
    assert samples[2] == BadSample(5, "truncated")
    assert colour(samples[0]) == 1 and colour(samples[3]) == 9
    tight = TarDataset(
        dataset.index, transform=to_tensor, options=DataConfig(max_image_pixels=6 * 4 - 1)
    )
    assert tight[1] == BadSample(1, "bomb")


def test_a_shard_cut_short_after_indexing(tmp_path: Path) -> None:
    index = make_index(tmp_path)
    last = index.shards[-1]
    victim = last.start
    os.truncate(last.path, int(index.image_offset[victim]) + 10)
    dataset = TarDataset(index, transform=to_tensor, **TEXTS)
    samples = dataset.__getitems__([victim, 0, victim + 1])
    assert samples[0] == BadSample(victim, "truncated")
    assert samples[2] == BadSample(victim + 1, "truncated")
    assert colour(samples[1]) == 0
    with pytest.raises(RuntimeError, match="its shard .*00004.tar has changed"):
        dataset.bytes.captions_of([victim + 1])


def test_captions_overwritten_after_indexing_make_a_bad_sample(tmp_path: Path) -> None:
    index = make_index(tmp_path)
    with open(index.shards[0].path, "r+b") as file:
        file.seek(int(index.text_offset[1]))
        file.write(b"]" * int(index.text_size[1]))
    dataset = TarDataset(index, transform=to_tensor, **TEXTS)
    assert dataset[1] == BadSample(1, "changed")
    with pytest.raises(RuntimeError, match="00001 has 0 readable captions, the index says 2"):
        dataset.bytes.captions_of([1])


def test_a_missing_shard_is_an_error_not_a_bad_sample(tmp_path: Path) -> None:
    index = make_index(tmp_path)
    os.unlink(index.shards[1].path)
    dataset = TarDataset(index, transform=to_tensor, **TEXTS)
    assert colour(dataset[0]) == 0
    with pytest.raises(FileNotFoundError, match="00001.tar is not on disk any more"):
        dataset[PER_SHARD]


# --- file handles ------------------------------------------------------------------------------


def open_tars() -> int:
    links = [Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd")]
    return sum(str(os.path.realpath(link)).endswith(".tar") for link in links)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
def test_open_files_are_bounded_and_closed(tmp_path: Path) -> None:
    index = make_index(tmp_path)
    dataset = TarDataset(index, transform=to_tensor, options=DataConfig(max_open_files=2))
    before = open_tars()
    for _ in range(3):
        for sample_id in range(0, NUM_SAMPLES, PER_SHARD):
            assert colour(dataset[sample_id]) == sample_id
            assert 1 <= open_tars() - before <= 2
    opened = open_tars()
    copy = pickle.loads(pickle.dumps(dataset))  # which leaves them behind
    assert open_tars() == opened and colour(copy[22]) == 22
    del dataset, copy
    assert open_tars() == before


def test_a_forked_child_reads_with_handles_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where another thread is reading at the moment of the fork."""
    reader = TarDataset(make_index(tmp_path), transform=to_tensor, **IMAGES).bytes.reader
    wanted = reader.read(0, 0, 512)
    pread, begun, may_end = os.pread, threading.Event(), threading.Event()

    def read_slowly(*arguments: int) -> bytes:
        begun.set()
        may_end.wait()
        return pread(*arguments)

    monkeypatch.setattr(os, "pread", read_slowly)
    thread = threading.Thread(target=reader.read, args=(0, 0, 512))
    thread.start()
    begun.wait()
    monkeypatch.setattr(os, "pread", pread)
    pid = os.fork()
    if pid == 0:
        os._exit(0 if reader.read(0, 0, 512) == wanted and open_tars() == 1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    may_end.set()
    thread.join()
    assert reader.read(0, 0, 512) == wanted


# --- text embeddings ---------------------------------------------------------------------------


def write_text_features(directory: Path, index: SampleIndex, dtype: str) -> None:
    """Row content: (sample_id, caption number, 1), so that a wrong row shows."""
    directory.mkdir()
    for number, shard in enumerate(index.shards):
        ids = range(shard.start, shard.stop)
        rows = [(i, k, 1) for i in ids for k in range(int(index.num_captions[i]))]
        np.save(directory / f"{number:05d}.npy", np.array(rows, dtype=dtype))


def test_every_caption_finds_its_row(tmp_path: Path) -> None:
    index = make_index(tmp_path)
    write_text_features(tmp_path / "text", index, "float16")
    features = StoredRows(tmp_path / "text", index)
    for sample_id in np.random.default_rng(0).permutation(NUM_SAMPLES).tolist():
        for number in range(len(captions_of(sample_id))):
            row = features.get(sample_id, number)
            assert row.dtype == "float16" and row.tolist() == [sample_id, number, 1]
        with pytest.raises(AssertionError):
            features.get(sample_id, len(captions_of(sample_id)))
    copy = pickle.loads(pickle.dumps(features))
    assert copy.get(8, 2).tolist() == [8, 2, 1]
    assert len(pickle.dumps(features)) < 2_000


def test_text_embeddings_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    index = make_index(tmp_path)
    with pytest.raises(FileNotFoundError, match="'mclclip embed --text'"):
        StoredRows(tmp_path / "text", index)
    write_text_features(tmp_path / "text", index, "float32")
    features = StoredRows(tmp_path / "text", index)
    os.unlink(tmp_path / "text" / "00001.npy")
    with pytest.raises(FileNotFoundError, match="00001.npy"):
        features.get(PER_SHARD, 0)
    for wrong in (np.zeros((2, 4), np.float32), np.zeros((9, 2)), np.zeros(9, np.float32)):
        np.save(tmp_path / "text" / "00000.npy", wrong)
        with pytest.raises(RuntimeError, match="'mclclip embed --text --force'"):
            features.get(0, 0)


# --- what is tokenised -------------------------------------------------------------------------


WORDS = {
    "english": "a photo of two dogs, which play in the park & are happy! 1,024 px".split(),
    "others": "два щенка играют \u4e24\u53ea\u72d7\u5728\u516c\u56ed\u91cc d\u00e9j\u00e0 vu "
    "\U0001f415\U0001f415 \U0001f602\U0001f602\U0001f602 &amp; Donaudampfschifffahrt".split(),
}


class Recording:
    """A tokenizer that notes what it is given."""

    def __init__(self, context_length: int) -> None:
        self.context_length, self.lengths = context_length, list[int]()

    def __call__(self, texts: list[str]) -> torch.Tensor:
        self.lengths += [len(text) for text in texts]
        return torch.zeros(len(texts), self.context_length, dtype=torch.int64)


@pytest.mark.parametrize("context", [77, 600])
@pytest.mark.parametrize("words", WORDS)
def test_long_captions_keep_their_tokens(words: str, context: int) -> None:
    own = open_clip.SimpleTokenizer(context_length=context)
    draw = random.Random(context)
    spaces = [" ", "  ", "\n", "\r\n\t", " " * 40, "\u00a0"]
    texts = [
        "".join(
            part for _ in range(n) for part in draw.choices(WORDS[words]) + draw.choices(spaces)
        )
        for n in (5, 2000)
    ]
    texts.append("x" + " " * 90_000 + texts[-1])
    assert torch.equal(samples_module.tokenize(own, texts), own(texts))


def test_what_a_tokenizer_is_given_is_bounded() -> None:
    texts = ["a" * 10**7, " x" * 5_000_000, "x" + " " * 10**7 + "y", "a" * 4096, "a b " * 1024]
    recording = Recording(77)
    samples_module.tokenize(recording, texts)
    assert recording.lengths == [4096, 8192, 100_000, 4096, 4096]
    recording = Recording(1000)
    samples_module.tokenize(recording, texts)
    assert recording.lengths == [32_000, 64_000, 100_000, 4096, 4096]


def test_a_data_set_cuts_what_it_tokenises(tmp_path: Path) -> None:
    sample = PackedSample("0", png(0), "png", ["a " * 10**6])
    paths = write_shards([sample], tmp_path / "shards", 5)
    index = build_index(tmp_path / "index", paths, "json:captions")
    recording = Recording(77)
    options = DataConfig(max_image_pixels=LIMIT)
    data = TarDataset(index, options, to_tensor, tokenizer=recording)
    assert isinstance(data[0], Sample) and recording.lengths == [8191]
    assert len(data.bytes.captions_of([0])[0][0]) == 2 * 10**6 - 1  # what is not tokenised is whole
