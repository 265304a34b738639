"""The `Encoder`, as which every model is evaluated, and the joining of several stages into one.

MCL joins its stages by concatenating their features. Blocks that were frozen are equal in all
stages, so they are stored and run once. A joined encoder ("concat") on disk:

    concat_raw/  open_clip_config.json    that of one stage
                 concat_model.safetensors `shared.NAME` (equal in all stages) and `stage_S.NAME`
                 concat.json              variant, stages, num_trunk_blocks, digests of the sources

Plain open_clip refuses such a directory, because its weights are not those of one model.
"""

import copy
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mclclip.data.decode import upright_rgb
from mclclip.data.text_rows import TextRows
from mclclip.models import state_dicts, weights
from mclclip.models.encoder_names import resolve_name
from mclclip.models.inputs import (
    Picture,
    batch_of,
    check_tokens,
    pictures_of,
    texts_of,
    transform_picture,
)
from mclclip.models.loading import common_config, load_towers
from mclclip.models.model import NO_TEXT, Model, unit
from mclclip.models.options import Variant
from mclclip.util import files
from mclclip.util.options import brief, first_few, with_prefix


class Encoder(nn.Module):
    """One model, or the stages of a run joined. Dot products of its features are similarities.

        encoder = mclclip.load_model("ViT-B-32-quickgelu@openai")
        cosines = encoder.encode_image(["a.jpg", "b.jpg"]) @ encoder.encode_text(["a dog"]).T

    `encode_image` and `encode_text` take pictures (`inputs.Picture`) and texts, and return numpy
    arrays. Given tensors that `preprocess_val` or `tokenizer` made, on any device, they return
    tensors on the encoder's device. Features are rows of unit length in fp32, without a graph.
    Texts raise ValueError if the model has no text tower. The models are frozen, in eval mode.

    With a `variant` the stages are joined. Let c_s be the cosine and z_s the raw image feature of
    stage s: the similarity of `raw` is sum_s |z_s| c_s / (sqrt(S) sqrt(sum_s |z_s|^2)), and that of
    `stage_norm` is the mean of the c_s, whether the stages share a text tower or not. Images run
    through the first `num_trunk_blocks` blocks once, in the first stage's model; these blocks must
    be equal in all stages. With 0 blocks every stage runs completely. The logit scale is that of
    the first stage.

    `width`: the first so many numbers of each stage's features are its features (`cut`).
    """

    stages: Any

    def __init__(
        self,
        stages: Sequence[Model],
        variant: Variant | None = None,
        *,
        num_trunk_blocks: int = 0,
        shared_text: bool = True,
        width: int | None = None,
    ) -> None:
        super().__init__()
        if variant not in (None, *get_args(Variant)):
            allowed = ", ".join(get_args(Variant))
            raise ValueError(f"variant is {brief(variant)}: give one of {allowed}")
        self.stages = nn.ModuleList(stages).requires_grad_(False)
        self.variant = variant
        self.num_trunk_blocks = num_trunk_blocks
        self.shared_text = shared_text
        self.width = width
        self.embed_dim = sum(stage.embed_dim if width is None else width for stage in stages)
        scale = stages[0].logit_scale()
        self.logit_scale = math.nan if scale.is_meta else scale.item()
        self.tokenizer = stages[0].tokenizer
        transform: Any = stages[0].preprocess_val
        if steps := getattr(transform, "transforms", None):  # open_clip's, which expects RGB
            transform = type(transform)([upright_rgb, *steps])
        self.preprocess_val = transform
        self.eval()

    def __repr__(self) -> str:
        """Describes the encoder in two lines: towers, parameters, device, width of features."""
        size = sum(parameter.numel() for parameter in self.parameters()) / 1e6
        towers = "image and text towers" if self.stages[0].reads_texts else "image tower alone"
        if self.variant is not None:
            towers = f"{len(self.stages)} stages joined as {self.variant}, {towers}"
        scale = f"{self.logit_scale:.4g}"
        return (
            f"Encoder: {towers}, {size:.1f} million parameters, on {self.device}\n"
            f"  features of {self.embed_dim} numbers, of unit length; logit scale {scale}"
        )

    @property
    def device(self) -> torch.device:
        """The device on which the models lie."""
        return next(self.parameters()).device

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Shape of an image that `preprocess_val` makes: C, H, W."""
        shape: tuple[int, int, int] = self.stages[0].image_shape
        return shape

    @property
    def normalization(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of pixels, as `Model.normalization`."""
        both: tuple[Tensor, Tensor] = self.stages[0].normalization
        return both

    @property
    def stage_dim(self) -> int:
        """The number of features of each stage, of the narrowest if they differ, before a cut."""
        dim: int = min(stage.embed_dim for stage in self.stages)
        return dim

    def cut(self, width: int) -> "Encoder":
        """Returns the encoder of the first `width` numbers of each stage's features; the models are
        the same. Raises ValueError for a width that is not from 1 to each stage's.

        `narrow.narrow_encoder` makes models of them, which can be exported.
        """
        dim = self.stage_dim
        if not 0 < width <= dim:
            raise ValueError(f"width={width} is of features of {dim} numbers: wanted 1 to {dim}")
        return self.with_stages([*self.stages], width)

    def with_stages(self, stages: Sequence[Model], width: int | None = None) -> "Encoder":
        """Returns an encoder that joins other stages in the same way."""
        return Encoder(
            stages,
            self.variant,
            num_trunk_blocks=self.num_trunk_blocks,
            shared_text=self.shared_text,
            width=width,
        )

    def _moved(self, rows: Tensor) -> Tensor:
        """Moves a batch to the models' device; floating-point numbers take their dtype too."""
        return rows.to(next(self.parameters()) if rows.is_floating_point() else self.device)

    @torch.no_grad()
    def stage_features(self, images: Tensor) -> list[Tensor]:
        """[B, 3, H, W] -> features [B, D] of each stage, not of unit length. Trunks run once."""
        images, number = self._moved(images), self.num_trunk_blocks
        if not number:
            return [model.encode_image(images)[:, : self.width] for model in self.stages]
        hidden = self.stages[0].encode_trunk(images, number)
        return [model.encode_tail(hidden, number)[:, : self.width] for model in self.stages]

    @torch.no_grad()
    def stage_text_features(self, tokens: Tensor) -> list[Tensor]:
        """[B, context] int64 -> every stage's text features [B, D], not of unit length."""
        tokens = self._moved(tokens)
        if self.shared_text:
            return [self.stages[0].encode_text(tokens)[:, : self.width]] * len(self.stages)
        return [model.encode_text(tokens)[:, : self.width] for model in self.stages]

    @overload
    def encode_image(self, images: Tensor) -> Tensor: ...
    @overload
    def encode_image(
        self, images: Picture | Sequence[Picture | Tensor], batch_size: int = 64
    ) -> NDArray[np.float32]: ...
    @torch.no_grad()
    def encode_image(
        self, images: Tensor | Picture | Sequence[Picture | Tensor], batch_size: int = 64
    ) -> Tensor | NDArray[np.float32]:
        """Encodes pictures, `batch_size` at a time: n pictures -> numpy [n, E] of unit length.

        Pictures are paths, PIL images, arrays uint8 [H, W, 3] (or one [N, H, W, 3]), bytes or open
        files of encoded pictures, and tensors [3, H, W] that `preprocess_val` made. One tensor
        [B, 3, H, W], or [3, H, W], gives a tensor [B, E]. Raises FileNotFoundError for a path that
        is missing, and ValueError for pictures that cannot be used, of which it names at most ten.
        """
        if not isinstance(images, Tensor):
            parts, problems = [], list[str]()
            for part in _parts(pictures_of(images), batch_size):
                pixels = []
                for picture in part:
                    try:
                        pixels.append(transform_picture(picture, self.preprocess_val))
                    except ValueError as error:
                        problems.append(str(error))
                if len(shapes := {tuple(each.shape) for each in pixels}) > 1:
                    problems.append(f"tensors of the shapes {sorted(shapes)}, not of one")
                if not problems:  # after one, pictures are read to find all problems at once
                    parts.append(self.encode_image(torch.stack(pixels)))
            if problems:
                raise ValueError(first_few(problems, 10, "; "))
            return self._joined(parts)
        images = batch_of(images, self.image_shape[0])
        if not len(images):
            return torch.zeros(0, self.embed_dim, device=self.device)
        features = self.stage_features(images)
        if self.variant is None:
            return unit(features[0])
        return join_image_features(features, self.variant)

    @overload
    def encode_text(self, tokens: Tensor) -> Tensor: ...
    @overload
    def encode_text(
        self, tokens: str | Sequence[str], batch_size: int = 256
    ) -> NDArray[np.float32]: ...
    @torch.no_grad()
    def encode_text(
        self, tokens: Tensor | str | Sequence[str], batch_size: int = 256
    ) -> Tensor | NDArray[np.float32]:
        """Encodes texts, `batch_size` at a time: n texts -> numpy [n, E] of unit length.

        Joined stages have their text features side by side; if they share a text tower, its feature
        stands there once for each stage. A tensor of tokens [B, context] int64 gives a tensor
        [B, E]. Raises ValueError if the model has no text tower, and for what is no text.
        """
        if not self.stages[0].reads_texts:
            raise ValueError(NO_TEXT)
        if not isinstance(tokens, Tensor):
            several = _parts(texts_of(tokens), batch_size)
            parts = [self.encode_text(self.tokenizer(texts)) for texts in several]
            return self._joined(parts)
        check_tokens(tokens, are_rows=isinstance(self.tokenizer, TextRows))
        if not len(tokens):
            return torch.zeros(0, self.embed_dim, device=self.device)
        features = self.stage_text_features(tokens)
        if self.variant is None:
            return unit(features[0])
        return join_text_features(features)

    def _joined(self, parts: Sequence[Tensor]) -> NDArray[np.float32]:
        if not parts:
            return np.zeros((0, self.embed_dim), np.float32)
        return np.asarray(torch.cat([*parts]).cpu().numpy(), np.float32)

    @torch.no_grad()
    def encode_pooled(self, images: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, width] of unit length: the features before the projection.

        Raises ValueError for joined stages, and for towers whose attention pool is the projection,
        such as open_clip's ResNets.
        """
        if self.variant is not None:
            raise ValueError("a joined encoder has no pooled features: use feature=projected")
        return unit(self.stages[0].encode_pooled(self._moved(images)))

    def query_text(self, tokens: Tensor, stage_weights: Sequence[float] | None = None) -> Tensor:
        """[B, context] int64 -> queries [B, S*D] for an index of all stages' embeddings, which
        `--to clip_retrieval` writes: its rows are the z_s side by side, divided by sqrt(S).

        The inner product of query and row is the sum of the stages' cosines, each times its weight
        in `stage_weights`; see `join_query_features`. Default: equal weights. Raises ValueError for
        wrong weights, and for the variant `raw` without weights, since it weighs stages by the
        lengths of image features.
        """
        return join_query_features(self.stage_text_features(tokens), self._query(stage_weights))

    def query_image(self, images: Tensor, stage_weights: Sequence[float] | None = None) -> Tensor:
        """[B, 3, H, W] -> queries [B, S*D] for a search by images; else like `query_text`."""
        return join_query_features(self.stage_features(images), self._query(stage_weights))

    def _query(self, stage_weights: Sequence[float] | None) -> Sequence[float]:
        if stage_weights is not None:
            return stage_weights
        if self.variant == "raw":
            raise ValueError(
                "the variant raw weighs stages by the lengths of image features, which no query "
                "knows: give stage_weights, or take stage_norm"
            )
        return [1 / len(self.stages)] * len(self.stages)


def _parts(items: Sequence[Any], size: int) -> list[list[Any]]:
    if size < 1:
        raise ValueError(f"batch_size is {size}: wanted 1 or more")
    return [[*items[start : start + size]] for start in range(0, len(items), size)]


# --- joining ---------------------------------------------------------------------------------


def join_image_features(features: Sequence[Tensor], variant: Variant) -> Tensor:
    """Joins the image features of S stages, [B, D] each -> [B, S*D] of unit length.

    `raw` keeps the lengths of the stages' features, so a stage with longer features weighs more.
    `stage_norm` scales every stage's features to unit length first, so the similarity is the mean
    of the cosines.

    MCL's released evaluation concatenates raw image features, and repeats the text feature of the
    frozen text tower that all stages share. If the stages share their text tower, `raw` gives
    exactly the same similarities. For stages with separate text towers the authors released
    nothing; see `join_text_features`.
    """
    parts = [feature.float() for feature in features]
    if variant != "raw":
        parts = [unit(part) for part in parts]
    return unit(torch.cat(parts, dim=-1))


def join_text_features(features: Sequence[Tensor]) -> Tensor:
    """Joins the text features of S stages, [B, D] each -> [B, S*D] of unit length.

    For a shared text tower they are the same feature S times. Every stage's feature is scaled to
    unit length first, for `raw` too: only the lengths of image features then weigh the stages. With
    raw text features the weight of stage s would be |z_s| |t_s|.
    """
    return unit(torch.cat([unit(f) for f in features], dim=-1))


def join_query_features(features: Sequence[Tensor], stage_weights: Sequence[float]) -> Tensor:
    """Makes queries sqrt(S) [w_1 f_1, ..., w_S f_S], [B, S*D], of S features [B, D] of texts or
    images and the weights w_s.

    An index that serves them has rows [z_1, ..., z_S] / sqrt(S), which `join_image_features` makes
    for `stage_norm`. The inner product of query and row is sum_s w_s c_s, with c_s the cosine of
    stage s, so one index serves all weights. A query's length is sqrt(S sum_s w_s^2), which is 1
    for equal weights only; a search by cosine finds the same rows in the same order, with
    similarities divided by this length. Raises ValueError for weights that are negative or do not
    sum to 1.
    """
    fits = len(stage_weights) == len(features) and all(0 <= w <= 1 for w in stage_weights)
    if not fits or abs(sum(stage_weights) - 1) > 1e-6:
        raise ValueError(
            f"stage_weights is {brief(stage_weights)}: wanted {len(features)} numbers, none below "
            "0, and a sum of 1"
        )
    parts = [w * unit(f) for w, f in zip(stage_weights, features, strict=True)]
    return math.sqrt(len(features)) * torch.cat(parts, dim=-1)


# --- on disk ---------------------------------------------------------------------------------


def save_concat(
    stages: Sequence[Path],
    variant: Variant,
    directory: Path,
    names: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Joins exported stages (open_clip directories, stage 0 first) in `directory`.

    Tensors that are equal in all stages, bit for bit, are stored once; the first blocks that hold
    only such tensors are the trunk. `names` are the stages' names in concat.json (default:
    `stage_0` and so on). Returns what concat.json holds. Raises ValueError if the stages have
    several architectures, or different tensors.
    """
    config = common_config(stages)
    paths = [weights.find_weights(stage) for stage in stages]
    tensors = [weights.read_tensors(file) for file in paths]
    tensor_names = weights.common_names(dict(zip(stages, tensors, strict=True)))
    shared = {n for n in tensor_names if weights.same_bits(*(stage[n] for stage in tensors))}
    layout = load_towers(stages[0], load_weights=False).layout
    image = {n.removeprefix("visual.") for n in tensors[0] if n.startswith("visual.")}
    differing = {name for name in image if f"visual.{name}" not in shared}
    text = {n for n in tensors[0] if not n.startswith(("visual.", "logit_"))}
    names = names or [f"stage_{number}" for number in range(len(stages))]
    dim = int(config["model_cfg"]["embed_dim"])
    joined = {f"shared.{n}": tensors[0][n] for n in tensors[0] if n in shared}
    for number, stage in enumerate(tensors):
        joined |= {f"stage_{number}.{n}": stage[n] for n in stage if n not in shared}
    record = {
        "variant": variant,
        "num_trunk_blocks": layout.count_without(differing),
        "num_blocks": len(layout.blocks),
        "shared_text": text <= shared,
        "stages": [
            {"name": name, "embed_dim": dim, "digest": files.digest_file(file)}
            for name, file in zip(names, paths, strict=True)
        ],
        "embed_dim": dim * len(stages),
        "num_parameters": {
            "one_stage": sum(tensor.numel() for tensor in tensors[0].values()),
            "concat": sum(tensor.numel() for tensor in joined.values()),
        },
    }
    weights.copy_tokenizer(stages[0], directory)
    weights.write_tensors(Path(directory) / weights.CONCAT_WEIGHTS, joined)
    weights.write_config(directory, config)
    files.write_json(Path(directory) / weights.CONCAT, record)
    return record


def load_concat(directory: Path, *, load_weights: bool = True) -> Encoder:
    """Loads what `save_concat` wrote; tensors that the stages share are in memory once.

    `load_weights=False` leaves the weights as they are drawn, and reads only the names of the
    tensors. Raises ValueError if concat.json and the weights do not belong together.
    """
    weights.check_recorded(directory, load_weights=load_weights)
    path, file = (Path(directory) / name for name in (weights.CONCAT, weights.CONCAT_WEIGHTS))
    record = files.read_model_json(path)
    listed = record.get("stages") if isinstance(record, dict) else None
    if not isinstance(listed, list) or not listed:
        raise ValueError(f"{path} names no stages: export it again")
    with weights.open_tensors(file) as tensors:
        names = {*tensors.keys()}
    held = {name.partition(".")[0] for name in names} - {"shared"}
    if not held <= {f"stage_{number}" for number in range(len(listed))}:
        raise ValueError(f"{path} names {len(listed)} stages, its weights hold more: export again")
    first = load_towers(directory, load_weights=False)
    parameters = first.exported.named_parameters()
    shared = {id(item): item for name, item in parameters if f"shared.{name}" in names}
    # The memo of deepcopy makes the copies share these parameters.
    stages = [first, *(copy.deepcopy(first, {**shared}) for _ in listed[1:])]
    if load_weights:
        values = weights.read_tensors(file)
        for n, stage in enumerate(stages):
            of_stage = with_prefix(values, "shared.") | with_prefix(values, f"stage_{n}.")
            state_dicts.fill(stage.exported, of_stage, f"of {directory}")
    unshared = {name.partition(".")[2] for name in names if not name.startswith("shared.")}
    image = {name.removeprefix("visual.") for name in unshared if name.startswith("visual.")}
    return Encoder(
        stages,
        record.get("variant"),
        num_trunk_blocks=first.layout.count_without(image),
        shared_text=all(name.startswith(("visual.", "logit_")) for name in unshared),
    )


# --- the loader ------------------------------------------------------------------------------


def load_model(
    name: str | Path, pretrained: str | None = None, device: str | torch.device = "cpu"
) -> Encoder:
    """Loads any encoder: an exported stage, a soup, a concat, or a public model.

    `name` is one of these:

    - a directory, `PATH` or `local-dir:PATH`, also that of an image encoder
    - an open_clip name or a JSON model config, with `pretrained` a tag of weights, a file or
      `random`; or both as `NAME@PRETRAINED`
    - `hf-hub:ORG/NAME`, a model of open_clip on the hub
    - `hf:FOLDER` or `hf:ORG/NAME`, a CLIP or SigLIP model of transformers

    Raises FileNotFoundError if the directory is missing or holds no model, and ValueError if name,
    configuration and weights do not fit each other or no weights are named.
    """
    encoder = resolve_name(name, pretrained)
    if encoder.concat is not None:
        return load_concat(encoder.concat).to(device)
    return Encoder([load_towers(encoder.where, encoder.pretrained)]).to(device)


def counts_of(encoder: Encoder) -> dict[str, Any]:
    """Returns what an export's manifest says of its encoder: the number of ``parameters``, the
    ``width`` of its features, and its ``logit_scale``, None without a text tower."""
    return {
        "parameters": sum(p.numel() for p in encoder.parameters()),
        "width": encoder.embed_dim,
        "logit_scale": encoder.logit_scale if encoder.stages[0].reads_texts else None,
    }
