"""The concat: its similarity, its files, and the one loader."""

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mclclip.util.torchvision_fix  # noqa: F401

# isort: split
import numpy as np
import open_clip
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

import mclclip
from mclclip.models import weights
from mclclip.models.encoder import (
    join_image_features,
    join_text_features,
    load_model,
    save_concat,
)
from mclclip.models.loading import load_towers, model_config
from mclclip.models.memory import load_shapes
from mclclip.models.model import Model
from mclclip.models.options import Variant
from mclclip.models.weights import CONCAT_WEIGHTS
from tests.unit.models.conftest import CONFIGS, tiny_config
from tests.unit.models.stages import save_stages

VARIANTS: tuple[Variant, ...] = ("raw", "stage_norm")


def draw(seed: int, stages: int, rows: int = 4, dim: int = 5) -> list[Tensor]:
    rng = np.random.default_rng(seed)
    scales = rng.uniform(0.2, 5.0, size=stages)
    return [
        torch.tensor(scale * rng.normal(size=(rows, dim)), dtype=torch.float32) for scale in scales
    ]


def similarity(images: list[Tensor], texts: list[Tensor], variant: Variant) -> Tensor:
    return join_image_features(images, variant) @ join_text_features(texts).T


def slow_similarity(images: list[Tensor], texts: list[Tensor], variant: Variant) -> Tensor:
    """The formulas, written out."""
    count = len(images)
    rows, columns = len(images[0]), len(texts[0])
    result = torch.zeros(rows, columns)
    for i in range(rows):
        for j in range(columns):
            cosines = [
                float(functional.cosine_similarity(z[i], t[j], dim=0))
                for z, t in zip(images, texts, strict=True)
            ]
            lengths = [float(z[i].norm()) for z in images]
            if variant == "stage_norm":
                result[i, j] = sum(cosines) / count
            else:
                weighted = sum(n * c for n, c in zip(lengths, cosines, strict=True))
                result[i, j] = weighted / (count * sum(n * n for n in lengths)) ** 0.5
    return result


# --- the similarity --------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=8)
@given(seed=st.integers(0, 10_000), stages=st.integers(1, 4), own_texts=st.booleans())
def test_dot_product_is_the_formula(
    variant: Variant, seed: int, stages: int, own_texts: bool
) -> None:
    images = draw(seed, stages)
    texts = draw(seed + 1, stages) if own_texts else draw(seed + 1, 1) * stages
    found = similarity(images, texts, variant)
    torch.testing.assert_close(found, slow_similarity(images, texts, variant), atol=1e-5, rtol=0)
    assert found.abs().max() <= 1 + 1e-6
    order = list(np.random.default_rng(seed).permutation(stages))
    shuffled = similarity([images[s] for s in order], [texts[s] for s in order], variant)
    torch.testing.assert_close(shuffled, found, atol=1e-6, rtol=0)


def test_raw_is_the_authors_similarity_for_a_shared_text_tower_alone() -> None:
    """Theirs joins raw texts as it does raw images; a text tower per stage is ours."""
    images = draw(5, 3)
    for texts, same in ((draw(6, 1) * 3, True), (draw(6, 3), False)):
        theirs_images, theirs_texts = (
            functional.normalize(torch.cat(parts, dim=1), dim=1) for parts in (images, texts)
        )
        theirs = theirs_images @ theirs_texts.T
        assert torch.allclose(similarity(images, texts, "raw"), theirs, atol=1e-6) is same


# --- the files and the loader ------------------------------------------------------------------


@pytest.fixture(scope="module")
def joined(stages: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A concat of three stages; read only."""
    folder = tmp_path_factory.mktemp("joined") / "c"
    save_concat(stages, "raw", folder)
    return folder


def test_files_hold_every_tensor_once_and_the_trunk_runs_once(
    stages: list[Path], joined: Path, tmp_path: Path, images: Tensor
) -> None:
    record = save_concat(stages, "raw", tmp_path)
    for file in (weights.CONFIG, weights.CONCAT, CONCAT_WEIGHTS):
        assert (tmp_path / file).read_bytes() == (joined / file).read_bytes()
    assert json.loads((joined / "concat.json").read_text()) == record
    assert [stage["name"] for stage in record["stages"]] == ["stage_0", "stage_1", "stage_2"]
    assert (record["num_trunk_blocks"], record["shared_text"]) == (2, True)
    assert record["embed_dim"] == 3 * 32
    assert weights.read_config(joined) == weights.read_config(stages[0])
    sizes, model = record["num_parameters"], load_towers(stages[0])
    names = model.lock(1, image_norm=True, image_projection=True, text=False, logit_scale=True)
    tail = sum(p.numel() for n, p in model.named_parameters() if n in names)
    assert sizes["concat"] - sizes["one_stage"] == 2 * tail
    encoder: Any = mclclip.load_model(f"local-dir:{joined}")
    assert encoder.logit_scale == pytest.approx(1 / 0.07, rel=0.2)
    assert sum(p.numel() for p in encoder.parameters()) == sizes["concat"]
    runs: list[str] = []
    for name, module in encoder.named_modules():
        if name.endswith(("resblocks.0", "resblocks.1", "resblocks.2")):
            module.register_forward_hook(lambda *_, name=name: runs.append(name[-1]))
    encoder.encode_image(images)
    assert (runs.count("0"), runs.count("1"), runs.count("2")) == (1, 1, 3)


def test_a_name_without_weights_is_refused_and_random_ones_are_asked_for() -> None:
    config = CONFIGS / "tiny_vit.json"
    for name, tags in (("ViT-B-32", "openai, .*@random"), ("ViT-B-32@", ""), (config, "none")):
        with pytest.raises(ValueError, match=f"names no weights: .*tags: {tags}"):
            load_model(name)
    wanted = load_towers(config, seed=0).state_dict()
    for encoder in (load_model(f"{config}@random"), load_model(config, "random")):
        found = encoder.stages[0].state_dict()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_what_is_no_such_model_is_refused(
    stages: list[Path], joined: Path, tmp_path: Path, tokens: Tensor
) -> None:
    """A concat's configuration is that of one stage, which could pass for all of them."""
    with pytest.raises(ValueError, match="neither a directory nor an open_clip model"):
        load_model("absent/export")
    for name in (f"{joined}@openai", f"{stages[0]}@random"):
        with pytest.raises(ValueError, match="brings its own weights"):
            load_model(name)
    load_towers(tiny_config(quick_gelu=True)).save(tmp_path / "b")
    with pytest.raises(ValueError, match="has another open_clip_config.json"):
        save_concat([stages[0], tmp_path / "b"], "raw", tmp_path / "c")
    assert not (tmp_path / "c").exists()
    with pytest.raises(RuntimeError, match="Error\\(s\\) in loading state_dict|No checkpoint"):
        open_clip.create_model(f"local-dir:{joined}")
    readers: list[Callable[[str], object]] = [load_towers, model_config, load_shapes]
    readers += [partial(load_towers, text=False), partial(load_shapes, text=False)]
    for read in readers:
        for one in (str(joined), f"local-dir:{joined}"):
            with pytest.raises(ValueError, match="is a joined encoder"):
                read(one)
    encoder = load_model(joined)
    for wrong in (None, (0.5, 0.4), (1.5, -0.5, 0), (1.0,), (), (float("nan"), 1.0, 0)):
        with pytest.raises(ValueError, match="stage_weights"):
            encoder.query_text(tokens, wrong)


# --- weights of stages at query time -----------------------------------------------------------


def test_one_index_serves_all_weights(
    vit: Model, tmp_path: Path, images: torch.Tensor, tokens: torch.Tensor
) -> None:
    """Rows [z_s] / sqrt(S), which are those of `stage_norm`, and queries [w_s t_s] sqrt(S)."""
    folders = save_stages(vit, tmp_path, 3, text=True)
    save_concat(folders, "stage_norm", tmp_path / "index")
    encoder, alone = load_model(tmp_path / "index"), [load_model(folder) for folder in folders]
    index = encoder.encode_image(images)
    cosines = [one.encode_image(images) @ one.encode_text(tokens).T for one in alone]
    for weighing in ((0.6, 0.4, 0.0), (0.2, 0.3, 0.5), (1.0, 0.0, 0.0)):
        wanted = sum(w * c for w, c in zip(weighing, cosines, strict=True))
        query = encoder.query_text(tokens, weighing)
        torch.testing.assert_close(index @ query.T, wanted, atol=1e-6, rtol=0)
        length = math.sqrt(3 * sum(weight**2 for weight in weighing))
        torch.testing.assert_close(query.norm(dim=1), torch.full((len(query),), length))
        among = (one.encode_image(images) for one in alone)
        wanted = sum(w * (z @ z.T) for w, z in zip(weighing, among, strict=True))
        pictures = index @ encoder.query_image(images, weighing).T
        torch.testing.assert_close(pictures, wanted, atol=1e-6, rtol=0)
    equal = index @ encoder.query_text(tokens).T
    wanted = index @ encoder.encode_text(tokens).T
    torch.testing.assert_close(equal, wanted, atol=1e-6, rtol=0)
    apart = (equal - index @ encoder.query_text(tokens, (1.0, 0.0, 0.0)).T).abs().max()
    assert apart > 1e-3  # the weights do something
