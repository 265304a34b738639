"""Arrays as image members: decoded, refused, and read beside pictures."""

from __future__ import annotations

import io
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mclclip.data.bytes import BadSample
from mclclip.data.decode import DecodeError, decode_array, is_array
from mclclip.data.options import DataConfig
from mclclip.data.picture_transform import PictureTransform
from mclclip.data.remote import StoredFile
from mclclip.data.sample_index import SampleIndex
from mclclip.data.samples import Sample, TarDataset
from mclclip.data.shard_scan import scan_shard
from mclclip.data.shard_writer import PackedSample, write_shards
from mclclip.models.transforms import PixelFormat, PlainTransform
from tests.tars import write_tar
from tests.unit.data.datasets.fakes import png
from tests.unit.data.test_samples import build_index

LIMIT = 10_000


class Pixels(PictureTransform):
    """A transform that takes pictures and arrays."""

    reads_arrays = True

    def __call__(self, image: Any) -> torch.Tensor:
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255


def npy(array: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, **options)
    return buffer.getvalue()


def pixels(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 7])
def test_an_array_comes_back(channels: int) -> None:
    array = pixels(5, 6, channels)
    for stored in (array, np.asfortranarray(array)):
        found = decode_array(npy(stored), LIMIT)
        assert found.dtype == np.uint8 and found.flags.c_contiguous and found.flags.writeable
        np.testing.assert_array_equal(found, array)


def header(text: str, version: bytes = b"\x01\x00") -> bytes:
    data = text.encode() + b"\n"
    size = struct.pack("<H" if version[0] == 1 else "<I", len(data))
    return b"\x93NUMPY" + version + size + data


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\x93NUMPY", "broken"),
        (npy(np.array([{"a": print}]), allow_pickle=True), "unsupported"),
        (npy(pixels(4, 4, 4).astype(np.float32)), "unsupported"),
        (npy(pixels(4, 4)), "unsupported"),
        (npy(pixels(0, 4, 4)), "broken"),
        (npy(pixels(101, 100, 4)), "bomb"),
        (npy(pixels(4, 4, 4))[:-1], "truncated"),
        (npy(pixels(4, 4, 4)) + b"x", "broken"),
        (header("{'descr': '|u1', 'fortran_order': False, 'shape': (99999999, 9999, 4)}"), "bomb"),
        (header("{'descr': '|u1', 'fortran_order': False, 'shape': (1, 1, 10**9)}"), "broken"),
        (
            header("{'descr': '|u1', 'fortran_order': False, 'shape': (1, 1, 999999999)}"),
            "truncated",
        ),
        (header(" " * 60_000), "broken"),
        (header("__import__('os').getcwd()"), "broken"),
        (header("{'descr': '|u1'}", b"\x03\x00"), "unsupported"),
        (header("{}", b"\x02\x00"), "broken"),
    ],
)
def test_what_is_wrong_has_a_reason(data: bytes, reason: str) -> None:
    with pytest.raises(DecodeError) as raised:
        decode_array(data, LIMIT)
    assert raised.value.reason == reason


def test_every_damage_gives_pixels_or_a_reason() -> None:
    whole, random = npy(pixels(4, 4, 4)), np.random.default_rng(1)
    for _ in range(300):
        damaged = bytearray(whole)
        damaged[random.integers(len(damaged))] = random.integers(256)
        try:
            assert decode_array(bytes(damaged), LIMIT).dtype == np.uint8
        except DecodeError as error:
            assert error.reason


# --- in shards ---------------------------------------------------------------------------------


def make_index(root: Path, samples: list[PackedSample]) -> SampleIndex:
    return build_index(root / "index", write_shards(samples, root / "shards", 100), "txt")


def test_arrays_and_pictures_of_one_shard(tmp_path: Path) -> None:
    four, rgba = pixels(8, 8, 4), pixels(8, 8, 4)
    samples = [
        PackedSample("a", npy(four), "npy", []),
        PackedSample("b", png(rgba), "png", []),  # stays RGB
        PackedSample("c", npy(four)[:-9], "npy", []),
    ]
    index = make_index(tmp_path, samples)
    data = TarDataset(index, DataConfig(max_image_pixels=LIMIT), Pixels())
    first, second, third = data.__getitems__([0, 1, 2])
    assert isinstance(first, Sample) and isinstance(second, Sample)
    assert torch.equal(first.views[0] * 255, torch.from_numpy(four.transpose(2, 0, 1)).float())
    assert second.views[0].shape == (3, 8, 8)
    assert third == BadSample(2, "truncated")
    pictures_only = TarDataset(
        index, DataConfig(max_image_pixels=99), lambda image: torch.zeros(3, *image.size)
    )
    assert isinstance(pictures_only[1], Sample)
    assert pictures_only[0] == BadSample(0, "unsuitable")
    with pytest.raises(ValueError, match="sample test/a: it is an array of 4 channels"):
        pictures_only.check()
    plain = PlainTransform(PixelFormat((8, 8), [0.5], [0.5], channels=4))
    four_only = TarDataset(index, DataConfig(max_image_pixels=LIMIT), plain)
    four_only.check()
    assert four_only[1] == BadSample(1, "unsuitable")


def test_an_array_beside_a_picture_is_no_image(tmp_path: Path) -> None:
    """Embeddings are often stored so."""
    samples = [PackedSample("a", b"image", "jpg", []), PackedSample("b", b"image", "jpg", [])]
    (path,) = write_shards(samples, tmp_path, 100)
    write_tar(path, [("a.npy", b"array"), ("c.npy", b"array")], mode="a")
    found = scan_shard(StoredFile(str(path)), "s", "txt")
    assert found.rows["key"].to_pylist() == ["s/a", "s/b", "s/c"]
    data, rows = path.read_bytes(), found.rows.to_pylist()
    contents = [data[r["image_offset"] :][: r["image_size"]] for r in rows]
    assert contents == [b"image", b"image", b"array"]
    assert "several_images" not in found.findings.to_json()
    assert is_array(npy(pixels(1, 1, 1))) and not is_array(b"array")
