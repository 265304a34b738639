"""What the tests of exports share."""

from __future__ import annotations

from pathlib import Path

import pytest

import mclclip.util.torchvision_fix  # noqa: F401

# isort: split
import open_clip.timm_model
import timm

from mclclip.export import convert
from tests.unit.export.models import joined


@pytest.fixture
def narrow_siglip(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives SigLIP's architecture in timm two narrow blocks."""
    create = timm.create_model
    small = {"embed_dim": 32, "depth": 2, "num_heads": 2}
    monkeypatch.setattr(
        open_clip.timm_model.timm, "create_model",
        lambda name, *args, **given: create(
            name, *args, **(small if "siglip" in str(name) else {}) | given
        ),
    )  # fmt: skip


@pytest.fixture(scope="session")
def joined_hf(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A joined encoder, and its conversion for transformers; read only."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("joined")
    source = joined(folder)
    return source, convert.run("hf", source, folder / "hf")
