"""The concat: its similarity, its files, and the one loader."""

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

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
    Encoder,
    join_image_features,
    join_query_features,
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
@settings(max_examples=20)
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


def test_a_query_gives_the_weighted_sum_of_cosines() -> None:
    images, texts, weighing = draw(7, 3), draw(8, 3), (0.6, 0.3, 0.1)
    cosines = [
        functional.normalize(z, dim=1) @ functional.normalize(t, dim=1).T
        for z, t in zip(images, texts, strict=True)
    ]
    wanted = sum(w * c for w, c in zip(weighing, cosines, strict=True))
    index = join_image_features(images, "stage_norm")
    torch.testing.assert_close(index @ join_query_features(texts, weighing).T, wanted)
    equal = join_query_features(texts, (1 / 3,) * 3)
    torch.testing.assert_close(index @ equal.T, similarity(images, texts, "stage_norm"))


@pytest.mark.parametrize("own_texts", [False, True])
def test_raw_is_the_authors_similarity_for_a_shared_text_tower_alone(own_texts: bool) -> None:
    """Theirs joins raw texts as it does raw images; a text tower per stage is ours."""
    images = draw(5, 3)
    texts = draw(6, 3) if own_texts else draw(6, 1) * 3
    theirs_images, theirs_texts = (
        functional.normalize(torch.cat(parts, dim=1), dim=1) for parts in (images, texts)
    )
    theirs = theirs_images @ theirs_texts.T
    assert torch.allclose(similarity(images, texts, "raw"), theirs, atol=1e-6) is not own_texts


# --- the files -------------------------------------------------------------------------------


def test_record_and_files(stages: list[Path], tmp_path: Path) -> None:
    record = save_concat(stages, "raw", tmp_path / "c")
    assert json.loads((tmp_path / "c" / "concat.json").read_text()) == record
    assert [stage["name"] for stage in record["stages"]] == ["stage_0", "stage_1", "stage_2"]
    assert record["num_trunk_blocks"] == 2
    assert record["shared_text"] is True
    assert record["embed_dim"] == 3 * 32
    config = weights.read_config(tmp_path / "c")
    assert config == weights.read_config(stages[0])
    # Two more tails, and nothing else twice.
    sizes = record["num_parameters"]
    model = load_towers(stages[0])
    names = model.lock(1, image_norm=True, image_projection=True, text=False, logit_scale=True)
    tail = sum(p.numel() for n, p in model.named_parameters() if n in names)
    assert sizes["concat"] - sizes["one_stage"] == 2 * tail


def test_equal_stages_give_equal_files(stages: list[Path], tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_concat(stages, "raw", tmp_path / name)
    for file in (weights.CONFIG, weights.CONCAT, CONCAT_WEIGHTS):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_plain_open_clip_refuses_a_concat(stages: list[Path], tmp_path: Path) -> None:
    """It would otherwise be one stage that passes for all of them."""
    save_concat(stages, "raw", tmp_path / "c")
    with pytest.raises(RuntimeError, match="Error\\(s\\) in loading state_dict|No checkpoint"):
        open_clip.create_model(f"local-dir:{tmp_path / 'c'}")


def test_equal_tensors_share_memory(stages: list[Path], tmp_path: Path) -> None:
    save_concat(stages, "raw", tmp_path / "c")
    encoder = load_model(tmp_path / "c")
    assert isinstance(encoder, Encoder)
    record = json.loads((tmp_path / "c" / "concat.json").read_text())
    held = sum(p.numel() for p in encoder.parameters())
    assert held == record["num_parameters"]["concat"]


def test_trunk_runs_once(stages: list[Path], tmp_path: Path, images: Tensor) -> None:
    save_concat(stages, "raw", tmp_path / "c")
    encoder = load_model(tmp_path / "c")
    assert isinstance(encoder, Encoder)
    runs: list[str] = []
    for name, module in encoder.named_modules():
        if name.endswith(("resblocks.0", "resblocks.1", "resblocks.2")):
            module.register_forward_hook(lambda *_, name=name: runs.append(name[-1]))
    encoder.encode_image(images)
    assert (runs.count("0"), runs.count("1"), runs.count("2")) == (1, 1, 3)


def test_stages_that_do_not_fit(vit: Model, tmp_path: Path) -> None:
    vit.save(tmp_path / "a")
    load_towers(tiny_config(quick_gelu=True)).save(tmp_path / "b")
    with pytest.raises(ValueError, match="has another open_clip_config.json"):
        save_concat([tmp_path / "a", tmp_path / "b"], "raw", tmp_path / "c")
    assert not (tmp_path / "c").exists()


# --- the loader ------------------------------------------------------------------------------


def test_public_loader_returns_encoders(stages: list[Path], tmp_path: Path) -> None:
    save_concat(stages, "stage_norm", tmp_path / "c")
    for name in (tmp_path / "c", f"local-dir:{tmp_path / 'c'}", stages[0], str(stages[1])):
        encoder = mclclip.load_model(name)
        assert isinstance(encoder, Encoder)
        assert encoder.logit_scale == pytest.approx(1 / 0.07, rel=0.2)
        tokens = encoder.tokenizer(["one", "two"])
        features = encoder.encode_text(tokens)
        assert features.shape == (2, encoder.embed_dim)
        assert not features.requires_grad
        torch.testing.assert_close(features.norm(dim=1), torch.ones(2))


def test_a_name_without_weights_is_refused_and_random_ones_are_asked_for() -> None:
    with pytest.raises(ValueError, match=r"ViT-B-32 names no weights: .*tags: openai, .*@random"):
        load_model("ViT-B-32")
    with pytest.raises(ValueError, match=r"ViT-B-32 names no weights"):
        load_model("ViT-B-32@")  # the tag was in a variable that is not set
    config = CONFIGS / "tiny_vit.json"
    with pytest.raises(ValueError, match=r"tiny_vit.json names no weights: .*tags: none"):
        load_model(config)
    wanted = load_towers(config, seed=0).state_dict()
    for encoder in (load_model(f"{config}@random"), load_model(config, "random")):
        assert encoder.variant is None
        found = encoder.stages[0].state_dict()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_single_encoder_is_the_model(vit: Model, images: Tensor, tokens: Tensor) -> None:
    encoder = Encoder([vit])
    with torch.no_grad():
        assert torch.equal(encoder.encode_image(images), vit.encode_image(images, normalize=True))
        assert torch.equal(encoder.encode_text(tokens), vit.encode_text(tokens, normalize=True))
    assert encoder.encode_pooled(images).shape == (3, 64)


def test_foreign_directories(stages: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="neither a directory nor an open_clip model"):
        load_model("absent/export")
    save_concat(stages, "raw", tmp_path / "c")
    with pytest.raises(ValueError, match="brings its own weights"):
        load_model(tmp_path / "c", "openai")
    with pytest.raises(ValueError, match="brings its own weights: leave it out"):
        load_model(f"{stages[0]}@random")


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


def test_weights_of_a_query_are_checked(vit: Model, tmp_path: Path, tokens: torch.Tensor) -> None:
    save_concat(save_stages(vit, tmp_path, 2), "raw", tmp_path / "c")
    encoder = load_model(tmp_path / "c")
    with pytest.raises(ValueError, match="stage_weights"):
        encoder.query_text(tokens)
    for wrong in ((0.5, 0.4), (1.5, -0.5), (1.0,), (), (float("nan"), 1.0)):
        with pytest.raises(ValueError, match="stage_weights"):
            encoder.query_text(tokens, wrong)
    assert encoder.query_text(tokens, (0.5, 0.5)).shape == (len(tokens), encoder.embed_dim)


def test_what_wants_one_model_refuses_a_joined_encoder(vit: Model, tmp_path: Path) -> None:
    """Its configuration is that of one stage: nothing may go on with that, and without weights."""
    save_concat(save_stages(vit, tmp_path, 2), "raw", tmp_path / "c")
    readers: list[Callable[[str], object]] = [load_towers, model_config, load_shapes]
    readers += [partial(load_towers, text=False), partial(load_shapes, text=False)]
    for read in readers:
        for name in (str(tmp_path / "c"), f"local-dir:{tmp_path / 'c'}"):
            with pytest.raises(ValueError, match="is a joined encoder"):
                read(name)
