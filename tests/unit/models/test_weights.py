"""Bits, digests and files of weights."""

from pathlib import Path

import pytest
import torch

from mclclip.models import transformers_folder, weights
from mclclip.models.loading import load_towers
from mclclip.models.model import Model
from mclclip.models.soup import combine


def test_same_bits() -> None:
    a = torch.tensor([1.0, float("nan"), 0.0])
    assert weights.same_bits(a)
    assert weights.same_bits(a, a.clone(), a.clone())
    assert not weights.same_bits(a, torch.tensor([1.0, float("nan"), -0.0]))
    assert not weights.same_bits(a, a.double())
    assert not weights.same_bits(a, a[None])
    assert weights.same_bits(torch.tensor(3), torch.tensor(3))
    assert weights.same_bits(a.bfloat16(), a.bfloat16())
    assert weights.same_bits(torch.arange(6).reshape(2, 3).T, torch.arange(6).reshape(2, 3).T)


def test_digest_sees_names_shapes_and_values_but_not_order() -> None:
    a, b = torch.ones(2, 3), torch.zeros(2)
    digest = weights.digest_tensors({"a": a, "b": b})
    assert weights.digest_tensors({"b": b.clone(), "a": a.clone()}) == digest
    for other in ({"a": a, "c": b}, {"a": a.T, "b": b}, {"a": a, "b": b + 1}, {"a": a}):
        assert weights.digest_tensors(other) != digest


def test_tensors_round_trip_and_leave_no_temporary_file(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(2, 3).T, "b": torch.tensor(4), "c": torch.randn(2).bfloat16()}
    weights.write_tensors(tmp_path / "sub" / "w.safetensors", tensors)
    found = weights.read_tensors(tmp_path / "sub" / "w.safetensors")
    assert all(weights.same_bits(tensors[name], found[name]) for name in tensors)
    assert [path.name for path in (tmp_path / "sub").iterdir()] == ["w.safetensors"]


def long_header(path: Path) -> None:
    """Writes safetensors with the header of a few hundred thousand empty tensors."""
    one = '"{:07d}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'
    header = "{" + ",".join(map(one.format, range(300_000))) + "}"
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode())


def test_a_header_of_too_many_tensors_is_not_read(vit: Model, tmp_path: Path) -> None:
    vit.save(tmp_path)
    path = tmp_path / weights.WEIGHTS
    long_header(path)
    for load in (
        lambda: weights.read_tensors(path),
        lambda: load_towers(tmp_path),
        lambda: combine([tmp_path]),
        lambda: transformers_folder.check_weights(tmp_path),
    ):
        with pytest.raises(ValueError, match="its header has .* bytes, wanted at most 16,777,216"):
            load()


def test_unreadable_weights(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="w.safetensors"):
        weights.read_tensors(tmp_path / "w.safetensors")
    (tmp_path / "w.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        weights.read_tensors(tmp_path / "w.safetensors")


def test_weights_are_as_readable_as_their_folder_s_other_files(tmp_path: Path) -> None:
    weights.write_tensors(tmp_path / "w.safetensors", {"a": torch.ones(1)})
    (tmp_path / "other").touch()
    modes = {path.stat().st_mode for path in tmp_path.iterdir()}
    assert len(modes) == 1
