"""What holds for every kind of image tower: split, locked, adapted, joined, exported, and read in
channels-last where it consists of convolutions."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import mclclip.util.torchvision_fix  # noqa: F401

# isort: split
import open_clip
import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from mclclip.models.backbones import timm_layout
from mclclip.models.encoder import Encoder, load_model, save_concat
from mclclip.models.loading import load_towers
from mclclip.models.lora import LowRank, add_lora, merge_lora
from mclclip.models.memory import load_shapes
from mclclip.models.model import Model
from mclclip.models.optimizer import build_optimizer
from mclclip.models.patterns import ParameterConfig
from mclclip.models.soup import save_uniform_soup
from mclclip.models.towers import arrange, choose_memory_format
from tests.matrix import in_soak, kept
from tests.unit.models.stages import save_stages
from tests.unit.models.tiny_towers import BLOCKS, TOWERS, config_of, fresh, make

DECAY = [ParameterConfig("*", layer_decay=0.5)]

# Batch norms in their blocks.
NORMED = ("fastvit", "resnet", "rn")
# Of the tower: its last block, its final norm, and what else lies above the blocks.
PARTS: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "vit": (("transformer.resblocks.2.",), ("ln_post.",), ("proj",)),
    "vit_mean": (("transformer.resblocks.2.",), ("ln_post.",), ("proj",)),
    "rn": (("layer4.2.",), (), ("attnpool.",)),
    "token": (("trunk.blocks.5.",), ("trunk.norm.",), ("trunk.head.",)),
    "mean": (("trunk.blocks.5.",), ("trunk.norm.",), ("head.proj.",)),
    "attention": (("trunk.blocks.2.",), ("trunk.norm.",), ("trunk.attn_pool.",)),
    "pe": (("trunk.blocks.2.",), ("trunk.norm.",), ("trunk.attn_pool.", "trunk.head.")),
    "eva": (("trunk.blocks.2.",), ("trunk.norm.",), ("trunk.head.",)),
    "relpos": (("trunk.blocks.2.",), ("trunk.norm.",), ("head.proj.",)),
    "vitamin": (("trunk.blocks.2.",), ("trunk.fc_norm.",), ("head.proj.",)),
    "convnext": (("trunk.stages.3.blocks.1.",), ("trunk.head.norm.",), ("head.mlp.",)),
    "fastvit": (("trunk.stages.3.blocks.1.",), (), ("trunk.final_conv.", "trunk.head.fc.")),
    "swin": (("trunk.layers.1.blocks.1.",), ("trunk.norm.",), ("head.proj.",)),
    "resnet": (("trunk.layer4.",), (), ("head.proj.",)),
}
# Adapted weights of the last block: those of its attention, and all.
ADAPTED = {"vit": (2, 4), "vit_mean": (2, 4), "rn": (0, 3), "token": (2, 4)}
ADAPTED |= {"attention": (2, 4), "pe": (2, 4), "eva": (4, 7), "relpos": (2, 4)}
ADAPTED |= {"vitamin": (2, 5), "mean": (2, 4), "convnext": (0, 2), "swin": (2, 4)}
ADAPTED |= {"fastvit": (2, 4), "resnet": (0, 3)}
KINDS = sorted(TOWERS)
QUICK = ("vit", "rn", "token", "attention", "convnext", "eva", "fastvit")


@pytest.fixture
def images() -> Tensor:
    return torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def named(model: Model, prefixes: tuple[str, ...], norms: bool = True) -> list[str]:
    """Parameters of the image tower below these; without batch norms where not `norms`."""
    normed = {
        f"{name}."
        for name, module in model.visual.named_modules()
        if isinstance(module, _BatchNorm) and not norms
    }
    found = (n for n, _ in model.visual.named_parameters() if n.startswith(prefixes))
    return sorted(f"clip.visual.{n}" for n in found if not n.startswith(tuple(normed) or ("-",)))


def of(*quick: str) -> list[Any]:
    """All kinds, of which most are left to the soak."""
    return kept(KINDS, *map(KINDS.index, quick))


# --- trunk and tail --------------------------------------------------------------------------


def projected(model: Model, pooled: Tensor) -> Any:
    visual = model.visual
    if hasattr(visual, "proj"):
        return pooled @ visual.proj
    projection = visual.head if len(visual.head) else visual.trunk.head
    return getattr(projection, "fc", projection)(pooled)


@pytest.mark.parametrize("kind", of(*QUICK, "pe", "swin"))
def test_trunk_and_tail_are_the_tower(kind: str, images: Tensor) -> None:
    model = fresh(kind)
    assert model.num_blocks == BLOCKS[kind]
    assert len(pickle.dumps(model)) > 1000  # workers are sent it
    before: list[Tensor] = []
    with torch.no_grad():
        whole = model.clip.encode_image(arrange(images, model.memory_format))
        for number in range(model.num_blocks + 1):
            hidden = model.encode_trunk(images, number)
            assert not any(hidden is other for other in before)
            before.append(hidden)
            kept = hidden.clone()
            assert torch.equal(model.encode_tail(hidden, number), whole)
            assert torch.equal(hidden, kept)  # several tails may read it
        if kind == "rn":
            with pytest.raises(ValueError, match="no features before its projection"):
                model.encode_pooled(images)
        else:
            pooled = model.encode_pooled(images)
            assert pooled.shape == (4, model.layout.pooled_dim)
            assert torch.equal(projected(model, pooled) if kind != "attention" else pooled, whole)
    assert whole.std(dim=0).mean() > 0.001  # the tower tells images apart
    with pytest.raises(ValueError, match=f"has {model.num_blocks} blocks"):
        model.encode_trunk(images, model.num_blocks + 1)


def test_a_tower_with_positions_for_images_of_any_size_is_split(images: Tensor) -> None:
    vision = {
        "backbone": "timm:vit_small_patch16_dinov3",
        "image_size": 32,
        "options": {"depth": 2},
    }
    model = load_towers({"vision_cfg": vision}).eval()
    with torch.no_grad():
        for num_blocks in range(3):
            split = model.encode_tail(model.encode_trunk(images, num_blocks), num_blocks)
            assert torch.equal(split, model.encode_image(images))


def test_attention_above_a_chain_is_its_projection(images: Tensor) -> None:
    """`rot_attn` of open_clip pools and projects in one module, like the pool of its ResNets."""
    changes = {"vision_cfg": {**config_of("convnext")["vision_cfg"], "timm_proj": ""}}
    changes["vision_cfg"]["timm_pool"] = "rot_attn"
    model = make("convnext", **changes)
    assert model.lock(image_projection=True) == named(model, ("head.pool.",))
    with torch.no_grad():
        hidden = model.encode_trunk(images, 5)
        whole = model.clip.encode_image(arrange(images, model.memory_format))
        assert torch.equal(model.encode_tail(hidden, 5), whole)
        with pytest.raises(ValueError, match="no features before its projection"):
            model.encode_tail(images, 0, project=False)
    assert model.layout.pooled_dim is None


@pytest.mark.parametrize("kind", of("vit", "rn", "attention", "convnext"))
def test_frozen_trunk_gives_the_whole_towers_gradients(kind: str, images: Tensor) -> None:
    model, images = fresh(kind).double(), images.double()
    model.encode_image(images).pow(2).sum().backward()
    whole = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    names = model.lock(2, image_norm=True, image_projection=True)
    assert model.num_frozen_blocks == BLOCKS[kind] - 2
    model.zero_grad(set_to_none=True)
    model.encode_image(images).pow(2).sum().backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert sorted(found) == names
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, whole[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["token", "convnext", "rn"])
def test_gradient_checkpointing_changes_nothing(kind: str, images: Tensor) -> None:
    model = fresh(kind).train()
    if kind in NORMED:
        with pytest.raises(ValueError, match="would count every batch twice in its batch norms"):
            model.set_grad_checkpointing()
        return
    results, calls = [], [0]
    model.blocks()[0].register_forward_pre_hook(lambda *_: calls.append(calls.pop() + 1))
    for enabled in (False, True):
        model.set_grad_checkpointing(enabled)
        model.zero_grad()
        model.encode_image(images).pow(2).sum().backward()
        results.append([p.grad.clone() for p in model.visual.parameters() if p.grad is not None])
    assert calls == [3]  # once, and twice
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_patch_dropout_of_a_frozen_eva_rests(images: Tensor) -> None:
    config = config_of("eva")
    config["vision_cfg"]["patch_dropout"] = 0.5
    model = load_towers(config).train()
    model.set_grad_checkpointing()
    model.encode_image(images).sum().backward()  # the thinned rotary embedding goes along
    model.lock(1)
    model.train()
    assert model.encode_trunk(images, 2).shape == (4, 17, 32)
    model.encode_image(images).sum().backward()


# --- locks and steps -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", of(*QUICK))
def test_lock_names_exactly_what_it_unlocks_and_a_step_moves_it(kind: str, images: Tensor) -> None:
    model = fresh(kind)
    block, norm, projection = PARTS[kind]
    assert model.lock() == []
    assert model.lock(image_norm=True) == (named(model, norm) if norm else [])
    assert model.lock(image_projection=True) == named(model, projection, norms=False)
    everything = model.lock("all", image_norm=True, image_projection=True)
    assert everything == named(model, ("",))
    without = model.lock(model.num_blocks, image_norm=True, image_projection=True)
    assert (everything != without) == bool(model.layout.embedding)
    assert model.num_frozen_blocks == 0
    for number in (BLOCKS[kind] + 1, -1):
        with pytest.raises(ValueError, match=f"image_blocks is {number}, but the image tower has"):
            model.lock(number)
    names = model.lock(1, image_norm=True)
    assert names == sorted(named(model, block) + (named(model, norm) if norm else []))
    assert model.num_frozen_blocks == BLOCKS[kind] - 1
    before = {name: t.clone() for name, t in model.state_dict().items()}
    optimizer = build_optimizer(model.train(), weight_decay=0.1, lr=0.01, parameters=DECAY)
    model(image=images)["image_features"][:, :5].pow(2).sum().backward()
    optimizer.step()
    moved = {n for n, t in model.state_dict().items() if not torch.equal(t, before[n])}
    assert set(names) <= moved
    trained = tuple(f"clip.visual.{name}" for name in (*block, *norm))
    assert all(name.startswith(trained) for name in moved)  # running statistics of batch norms


@pytest.mark.parametrize("kind", ["token", "convnext", "fastvit"])  # the stem of rn is no module
def test_modules_of_blocks_hold_what_lies_in_blocks(kind: str) -> None:
    model = fresh(kind)
    layout = model.layout
    model.lock(model.num_blocks, image_norm=True)
    inside = {id(p) for block in model.blocks() for p in block.parameters()}
    found = {n for n, p in model.visual.named_parameters() if id(p) in inside}
    names = [name for block in layout.blocks for name in block]
    trained = [n for n, p in model.visual.named_parameters() if p.requires_grad]
    assert found == {n for n in trained if n.startswith(tuple(f"{name}." for name in names))}


# --- LoRA ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", of("vit", "rn", "eva", "convnext", "fastvit"))
def test_adapters_train_alone_and_merge(kind: str, images: Tensor) -> None:
    model = fresh(kind)
    with torch.no_grad():
        plain = model.encode_image(images)
    attention, every = ADAPTED[kind]
    model.lock(1)
    if not attention:
        with pytest.raises(ValueError, match="targets are 'attention', but the unlocked blocks"):
            add_lora(model, rank=2, alpha=4.0, targets="attention")
    for targets, number in (("attention", attention), ("mlp", every - attention)):
        if number:
            other = fresh(kind)
            other.lock(1)
            add_lora(other, rank=2, alpha=4.0, targets=targets)
            assert sum(isinstance(m, LowRank) for m in other.modules()) == number
    model.lock(1, image_projection=True)
    names = add_lora(model, rank=2, alpha=4.0)
    projection = named(model, PARTS[kind][2], norms=False)
    assert sum(isinstance(m, LowRank) for m in model.modules()) == every
    assert set(projection) < set(names) and len(names) == len(projection) + 2 * every
    torch.testing.assert_close(model.encode_image(images).detach(), plain, rtol=1e-5, atol=1e-4)
    optimizer = build_optimizer(model.train(), weight_decay=0.1, lr=0.01)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    for _ in range(2):  # A moves only once B is not zero
        optimizer.zero_grad()
        model(image=images)["image_features"][:, :5].pow(2).sum().backward()
        optimizer.step()
    assert [n for n, t in model.state_dict().items() if not torch.equal(t, before[n])] != []
    assert {n for n, t in model.state_dict().items() if not torch.equal(t, before[n])} == set(names)
    with torch.no_grad():
        adapted = model.eval().encode_image(images)
        merge_lora(model)
        torch.testing.assert_close(model.encode_image(images), adapted, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(adapted, plain, rtol=1e-3, atol=1e-3)
    assert model.state_dict().keys() == fresh(kind).state_dict().keys()


# --- exports, concat, soup -------------------------------------------------------------------


@pytest.mark.parametrize("kind", of("rn", "convnext"))
def test_exports_join(kind: str, images: Tensor, tmp_path: Path) -> None:
    paths = save_stages(fresh(kind), tmp_path, 2, image_blocks=2)
    # torch multiplies by a weight in another way where it requires a gradient.
    models = [load_towers(path).requires_grad_(False) for path in paths]
    expected = [model.encode_image(images) for model in models]
    plain = open_clip.create_model(f"local-dir:{paths[1]}").eval().requires_grad_(False)
    same = arrange(images, models[1].memory_format)
    assert torch.equal(plain.encode_image(same), expected[1])
    assert not torch.allclose(expected[0], expected[1], rtol=1e-3, atol=1e-3)
    record = save_concat(paths, "raw", tmp_path / "concat")
    assert record["num_trunk_blocks"] == BLOCKS[kind] - 2
    encoder = load_model(tmp_path / "concat")
    assert isinstance(encoder, Encoder)
    for found, own in zip(encoder.stage_features(images), expected, strict=True):
        assert torch.equal(found, own)
    save_uniform_soup(paths, tmp_path / "soup")
    other = models[1].clip.state_dict()
    for name, tensor in models[0].clip.state_dict().items():
        if tensor.is_floating_point():
            tensor.copy_((tensor.double() + other[name].double()) / 2)
    soup = load_towers(tmp_path / "soup").requires_grad_(False).encode_image(images)
    assert torch.equal(soup, models[0].encode_image(images))
    assert not torch.allclose(soup, expected[0], rtol=1e-3, atol=1e-3)


# --- channels-last -----------------------------------------------------------------------------
# That results agree is shown on two ranks (tests/distributed/test_engines.py).


def formats(model: Model, images: Tensor) -> list[bool]:
    """Whether the input of each convolution lies in channels-last, in the order of their calls."""
    found: list[bool] = []

    def note(module: nn.Module, given: Any) -> None:
        tensor = given[0]
        if min(tensor.shape[1:]) > 1:  # otherwise both formats have the same strides
            found.append(tensor.is_contiguous(memory_format=torch.channels_last))

    convolutions = [m for m in model.visual.modules() if isinstance(m, nn.Conv2d)]
    hooks = [module.register_forward_pre_hook(note) for module in convolutions]
    model.encode_image(images)
    for hook in hooks:
        hook.remove()
    assert found
    return found


@pytest.mark.parametrize("kind", ["rn", "resnet", "convnext", "small_conv"])
def test_convolutions_read_and_write_channels_last(kind: str, images: Tensor) -> None:
    """Those of the whole tower in both modes, and those of a tail behind a cached trunk."""
    backbone = {"vision_cfg": {"backbone": "mclclip:small_conv", "image_size": 32}}
    model = load_towers(backbone) if kind == "small_conv" else fresh(kind)
    assert model.memory_format == choose_memory_format(model.visual) == "channels_last"
    for training in (True, False):
        assert all(formats(model.train(training), images))
    with torch.no_grad():
        hidden = model.encode_trunk(images, 1)
        model.first_block = 1
        rows = hidden.contiguous()  # as a cache gives them
        torch.testing.assert_close(model.encode_image(rows), model.encode_tail(hidden, 1))
        assert all(formats(model, rows))
    for parameter in model.parameters():  # exports, digests and FSDP read plain rows
        assert parameter.is_contiguous()
    model.first_block, model.memory_format = 0, "contiguous"
    assert not formats(model, images)[0]  # ConvNeXt's norms leave channels-last behind them


def test_transformers_and_few_channels_stay_contiguous(images: Tensor) -> None:
    vit = fresh("vit")
    assert vit.memory_format == choose_memory_format(vit.visual) == "contiguous"
    for width, found in ((8, "contiguous"), (16, "channels_last")):
        options = {"channels": [width] * 4, "layers": [1] * 4}
        config = {"backbone": "timm:resnet18", "image_size": 32, "options": options}
        model = load_towers({"vision_cfg": config})
        assert model.memory_format == found
        assert any(formats(model, images)) == (found == "channels_last")


# --- what is refused -------------------------------------------------------------------------


class _Branches(nn.Module):
    """Two stages whose results are added, which is no chain."""

    default_cfg: dict[str, Any] = {}

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.b = (nn.Conv2d(3, 3, 1) for _ in range(3))

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        return {"stem": r"^stem", "blocks": [(r"^(a)?$", (0,)), (r"^b", (1,))]}

    def forward_head(self, hidden: Tensor) -> Tensor:
        return hidden.mean((2, 3))

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.stem(images)
        return self.forward_head(self.a(hidden) + self.b(hidden))


class _InPlace(_Branches):
    """A chain to the eye, but the tower changes a value between two modules."""

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.stem(images)
        hidden += 1.0
        return self.forward_head(self.b(self.a(hidden)))


def test_a_tower_that_is_no_chain_is_refused_by_name() -> None:
    tower = nn.Module()
    tower.head, tower.image_size = nn.Sequential(), (8, 8)  # type: ignore[assignment]
    for kind in (_Branches, _InPlace):
        tower.trunk = kind()
        with pytest.raises(ValueError, match=f"timm {kind.__name__}, which is no chain") as raised:
            timm_layout(tower)
        assert "\n" not in str(raised.value)


# --- open_clip's own configurations ----------------------------------------------------------


@pytest.mark.parametrize("name", open_clip.list_models())
@in_soak
def test_every_model_of_open_clip_is_understood(name: str) -> None:
    """Without its text tower where that is taken from the hub, or makes captions."""
    config = open_clip.get_model_config(name)
    alone = "multimodal_cfg" in config or "hf_model_name" in config["text_cfg"]
    model = load_shapes(name, text=not alone)
    blocks = model.num_blocks
    assert blocks >= 4 and (alone or len(model.text_layout.blocks) > 1)
    last = model.lock(1, image_norm=True, image_projection=True)
    assert last and model.num_frozen_blocks == blocks - 1
    whole = model.lock("all", image_norm=True, image_projection=True)
    assert model.num_frozen_blocks == 0
    image = {n for n, _ in model.visual.named_parameters()}
    fixed = [n for n, p in model.visual.named_parameters() if not p.requires_grad]
    assert set(last) < set(whole) and len(whole) + len(fixed) == len(image)
    assert set(model.lock(blocks, image_norm=False, image_projection=False)) < set(whole)
    with pytest.raises(ValueError, match=f"has {blocks} blocks"):
        model.lock(blocks + 1, image_norm=True, image_projection=True)
