"""Reads files of weights that other programs saved, and fits their tensors to a model.

A checkpoint may hold more than a model's tensors; these then lie under one of its keys. If a model
was part of a larger module, its names begin with a prefix, which is removed, and the other tensors
of that module are not read. Parts of names that wrappers add, such as torch.compile, are removed
too. If tensors still do not fit, one error line lists those that the file lacks or has beyond the
model's.
"""

from __future__ import annotations

import logging
import math
import pickle
import re
import zipfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mclclip.models import towers, weights
from mclclip.util import files
from mclclip.util.options import first_few, prefix_errors

log = logging.getLogger("mclclip")

# Keys of checkpoints under which a model's tensors may lie; the first that exists is read. Trained
# weights come before their moving average, which is read only if there is nothing else.
_KEYS = ("state_dict", "model_state_dict", "model", "module", "ema", "model_ema", "state_dict_ema",
         "ema_state_dict")  # fmt: skip
# What torch.compile, FSDP and activation checkpointing add to names, at any place.
_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_CONSTANTS = ("input_resolution", "context_length", "vocab_size")  # beside OpenAI's tensors
_LATE = "positional_embedding_res"  # Long-CLIP's second table of positions
# Errors of torch.load for a file that it cannot read.
_NO_PICKLE = (pickle.UnpicklingError, EOFError, LookupError, ValueError, TypeError, AttributeError)
# Names of positions in an image tower: a ViT's of open_clip and of timm, a ResNet's in its pool.
PICTURE_POSITIONS = {"positional_embedding", "trunk.pos_embed", "attnpool.positional_embedding"}
_MOST_EXTRA_POSITIONS = 8  # class token and registers before the grid of an image tower


def read(file: Path, device: str = "cpu") -> dict[str, Tensor]:
    """Reads a model's tensors, by name, from a safetensors file or a file that torch.save wrote.

    On the device "meta" they have no values. Raises ValueError for TorchScript, pickled code, a
    damaged file, and a file without tensors.
    """
    with open(file, "rb") as stream:
        begins_with_header = stream.read(9)[8:] == b"{"  # behind its length, in safetensors
    if begins_with_header or file.suffix == ".safetensors":
        with weights.open_tensors(file) as opened:
            if device == "meta":
                shapes = {name: opened.get_slice(name).get_shape() for name in opened.keys()}
                saved: Any = {
                    name: torch.empty(shape, device="meta") for name, shape in shapes.items()
                }
            else:
                saved = {name: opened.get_tensor(name) for name in opened.keys()}
    else:
        saved = _unpickle(file, device)
    while isinstance(saved, Mapping) and (
        held := [key for key in _KEYS if isinstance(saved.get(key), Mapping)]
    ):
        saved = saved[held[0]]
        if len(held) > 1 and device != "meta":
            log.info("%s holds %s: %s is read", file, " and ".join(held), held[0])
    is_model = isinstance(saved, Mapping) and all(isinstance(name, str) for name in saved)
    tensors = {n: t for n, t in saved.items() if isinstance(t, Tensor)} if is_model else {}
    if not tensors:
        raise ValueError(
            f"it holds {_describe(saved)} and no tensors of a model by their names: save the "
            "model's state_dict() in a file of its own"
        )
    tensors, others = _without_prefix(tensors)
    if others and device != "meta":
        log.info("%s: not read are %s, beside the model", file, _first_few(others))
    if _LATE in tensors and (first := tensors.get("positional_embedding")) is not None:
        cut = towers.UNCHANGED  # Long-CLIP reads the first table up to here, then the second
        tensors["positional_embedding"] = torch.cat([first[:cut], tensors.pop(_LATE)[cut:]])
    return tensors


def _unpickle(file: Path, device: str) -> Any:
    """Loads what torch.save wrote, without running code. Raises ValueError for all else."""
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            if any(name.endswith("/constants.pkl") for name in archive.namelist()):
                raise ValueError(
                    "it is TorchScript, a program, which mclclip never runs: where you trust it, "
                    f"write its tensors alone with torch.save(torch.jit.load({file.name!r}, "
                    "map_location='cpu').state_dict(), 'weights.pt'), and give weights.pt"
                )
    try:
        return torch.load(file, map_location=device, weights_only=True)
    except _NO_PICKLE as error:  # torch would advise to run the file's code
        if python_object := re.search(r"Unsupported global: GLOBAL (\S+)", str(error)):
            raise ValueError(
                f"it holds {files.printable(python_object[1])}, which only code can read: where "
                f"you trust it, load it with torch.load({file.name!r}, weights_only=False), save "
                "the model's state_dict() in a file of its own with torch.save, and give that"
            ) from error
        raise ValueError(
            "it is neither safetensors nor a plain state dict saved by torch"
        ) from error


def _describe(saved: object) -> str:
    """Describes a file's content for messages, for example "a mapping with epoch, optimizer"."""
    if isinstance(saved, Mapping):
        return f"a mapping with {_first_few([str(key) for key in saved])}"
    return f"a {type(saved).__name__}"


def _without_prefix(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Removes what precedes ``visual``, which begins the names of an image tower, such as
    ``module.model.``, and the names of wrappers.

    Returns the model's tensors, and the names of those without that prefix. Raises ValueError for
    several models, such as a student and its teacher.
    """
    plain = {
        ".".join(part for part in name.split(".") if part not in _WRAPPERS): tensor
        for name, tensor in tensors.items()
    }
    cuts = [f".{name}".partition(".visual.") for name in plain]
    places = sorted({before[1:] for before, tower, _ in cuts if tower})
    if not places or "" in places:
        return plain, []
    if len(places) > 1:
        raise ValueError(
            f"it holds {len(places)} models, {_first_few(places)}: save the state_dict() of one "
            "in a file of its own"
        )
    prefix = f"{places[0]}."
    inside = {n.removeprefix(prefix): t for n, t in plain.items() if n.startswith(prefix)}
    others = [name for name in plain if not name.startswith(prefix)]
    is_model = not others or "logit_scale" in inside  # else the message lists all names
    return (inside, others) if is_model else (plain, [])


def recorded_quick_gelu(file: Path, names: Collection[str]) -> bool | None:
    """Returns whether weights were trained with quick GELU; None if nothing says it.

    The names of OpenAI's own files, which hold three constants, do, and so do other files:
    ``open_clip_config.json`` beside the weights, or ``params.txt`` of open_clip's training above
    the folder ``checkpoints``.
    """
    if {*_CONSTANTS} <= {*names}:
        return True
    beside, params = file.parent / weights.CONFIG, file.parent.parent / "params.txt"
    if beside.is_file():
        config = weights.read_config(file.parent)["model_cfg"]
        return bool(config.get("quick_gelu")) if isinstance(config, Mapping) else None
    if file.parent.name != "checkpoints" or not params.is_file():
        return None
    text = files.read_bounded(params, 1 << 20).decode(errors="replace")
    lines = dict(line.partition(": ")[::2] for line in text.splitlines())
    model = lines.get("model", "").strip()
    if lines.get("force_quick_gelu") == "True" or model.endswith("-quickgelu"):
        return True
    if lines.get("pretrained", "").strip() != "openai":
        return False
    log.warning(
        "%s was trained from OpenAI's weights as %s: open_clip before version 3 then took quick "
        "GELU all the same, later ones do not; compare %s and %s-quickgelu", file, *3 * [model]
    )  # fmt: skip
    return None


def complete_config(
    model_cfg: Mapping[str, Any], tensors: Mapping[str, Tensor], file: Path
) -> dict[str, Any]:
    """Returns the model config with the fields that the tensors in a file of weights show.

    These are ``custom_text``, if the text tower is a module of its own (open_clip's
    --force-custom-text), ``init_logit_bias``, if there is a logit bias (--siglip), and
    ``context_length``, if Long-CLIP has stretched CLIP's. Logs one line if something is added.
    """
    names = tensors.keys()
    added: dict[str, Any] = {}
    if not model_cfg.get("custom_text") and any(name.startswith("text.") for name in names):
        added["custom_text"] = True
    if "logit_bias" in names and model_cfg.get("init_logit_bias") is None:
        added["init_logit_bias"] = -10.0  # open_clip's; the weights bring the value
    fields, text_cfg = {**added}, model_cfg["text_cfg"]
    positions = tensors.get("positional_embedding", tensors.get("text.positional_embedding"))
    if positions is not None and len(positions) == towers.LONGEST:
        if text_cfg.get("context_length", towers.CONTEXT) == towers.CONTEXT:
            fields["context_length"] = towers.LONGEST
            added["text_cfg"] = {**text_cfg, "context_length": towers.LONGEST}
    if fields:
        shown = ", ".join(f"{name}: {str(value).lower()}" for name, value in fields.items())
        log.info("the tensors in %s complete the model's configuration: %s", file, shown)
    return {**model_cfg, **added}


def fill(model: Any, tensors: dict[str, Tensor], where: str) -> None:
    """Loads tensors into open_clip's module, or the image tower of an image encoder.

    If they have another number of positions, these are resized, with a line in the log. Raises
    ValueError, which lists the tensors that do not fit, and for weights that are not finite.
    ``where`` follows "the weights" in messages, for example "of FOLDER".
    """
    state, tensors = model.state_dict(), dict(tensors)
    if "logit_bias" in state:  # weights of CLIP, for a training with SigLIP's loss, have none
        tensors.setdefault("logit_bias", torch.zeros_like(state["logit_bias"]))
    left_out = ("position_ids", *_CONSTANTS)
    tensors = {n: t for n, t in tensors.items() if n in state or not n.endswith(left_out)}
    try:
        for name in ("logit_scale", "logit_bias"):  # exports hold them 0-dimensional
            if name in state and name in tensors and tensors[name].numel() == state[name].numel():
                tensors[name] = tensors[name].reshape(state[name].shape)
        with prefix_errors(f"the weights {where} do not fit the model"):
            resize_picture_positions(model.visual, tensors, where, "visual.")
            _resize_text_positions(getattr(model, "text", model), tensors, state, where)
            check_names(tensors, state)
        model.load_state_dict(tensors, strict=False)
    except RuntimeError as error:  # such as of sparse tensors, or of ones without values
        raise ValueError(f"the weights {where} do not load ({weights.one_line(error)})") from error
    weights.refuse_not_finite(model, where)


def check_names(
    tensors: Mapping[str, Tensor], state: Mapping[str, Tensor], optional: towers.Names = ()
) -> None:
    """Raises ValueError if a file's tensors have other names, shapes or kinds than the model's.

    The file may lack those in ``optional``, and the batch counts of batch norms.
    """
    both = [name for name in state if name in tensors]
    wrong = {
        f"it lacks {{}} of the model's {len(state)} tensors": [
            name
            for name in state
            if name not in tensors
            and not towers.belongs(name, optional)
            and not name.endswith("num_batches_tracked")
        ],
        "it has {} that the model has not": [name for name in tensors if name not in state],
        "{} have another shape than the model's": [
            f"{name} {[*tensors[name].shape]} for {[*state[name].shape]}"
            for name in both
            if tensors[name].shape != state[name].shape
        ],
        "{} are no floating-point numbers": [
            name
            for name in both
            if state[name].is_floating_point() and not tensors[name].is_floating_point()
        ],
    }
    problems = [f"{what.format(len(n))}: {_first_few(n)}" for what, n in wrong.items() if n]
    if not problems:
        return
    if any("vision_model." in name or "text_model." in name for name in tensors.keys() - state):
        problems.append("transformers' names: give the folder as hf:FOLDER")
    raise ValueError("; ".join(problems))


def _first_few(names: list[str]) -> str:
    """The first three names for a message, and how many more there are."""
    return first_few([files.printable(name)[:100] for name in names], 3) or "nothing"


# --- positions -----------------------------------------------------------------------------------


def _resize_text_positions(
    text: Any, tensors: dict[str, Tensor], state: Mapping[str, Tensor], where: str
) -> None:
    """Changes the number of a text tower's positions in ``tensors`` to that of the model, in place.

    Those of towers that read in both directions are interpolated. A causal tower keeps the first
    ones unchanged, since each position has its own meaning there. Raises ValueError if a causal
    tower needs more positions than the file has.
    """
    for name in ("positional_embedding", "text.positional_embedding"):
        if name not in tensors or name not in state:
            continue
        if not _differ_in_number(tensors[name].shape, state[name].shape):
            continue
        before, after = len(tensors[name]), len(state[name])
        if getattr(text, "attn_mask", None) is None:
            rows = tensors[name].T[None].float()
            rows = functional.interpolate(rows, size=after, mode="linear")[0].T
            tensors[name] = rows.to(tensors[name].dtype)
            log.info("%s: %d positions of texts are resized to %d", where, before, after)
        elif after < before:
            tensors[name] = tensors[name][:after]
            log.info("%s: of %d positions of texts the first %d are read", where, before, after)
        else:
            raise ValueError(
                f"texts have {before} positions, the model's {after}, and a causal text tower "
                f"has none to add: set context_length: {before} in text_cfg of the configuration"
            )


def resize_picture_positions(
    visual: nn.Module, tensors: dict[str, Tensor], where: str, prefix: str = ""
) -> None:
    """Changes the number of an image tower's positions in ``tensors`` to that of ``visual``, in
    place, with a line in the log. ``prefix`` begins the tower's names in ``tensors``."""
    state = visual.state_dict()
    for name in PICTURE_POSITIONS & state.keys():
        saved, ours = tensors.get(prefix + name), state[name]
        if saved is None or not _differ_in_number(saved.shape, ours.shape):
            continue
        if (resized := _resize_grid(saved, ours, visual)) is not None:
            before, after = saved.shape[-2], ours.shape[-2]
            log.info("%s: %d positions of pictures are resized to %d", where, before, after)
            tensors[prefix + name] = resized


def _differ_in_number(saved: Sequence[int], ours: Sequence[int]) -> bool:
    return len(saved) == len(ours) and saved[-2] != ours[-2] and saved[-1] == ours[-1]


def _resize_grid(saved: Tensor, ours: Tensor, visual: nn.Module) -> Tensor | None:
    """Resizes positions [(1,) k + n, D] of a square grid of n patches to those of the model `ours`.

    The k positions that belong to no patch (class token, registers) stay. None if the numbers fit
    no grid.
    """
    rows = saved.reshape(-1, saved.shape[-1]).float()
    side = math.isqrt(len(rows))
    extra, number = len(rows) - side * side, ours.shape[-2]
    grid: Any = getattr(visual, "grid_size", None)
    height, width = grid or 2 * (math.isqrt(max(number - extra, 0)),)
    if extra > _MOST_EXTRA_POSITIONS or height * width + extra != number or not side:
        return None
    resized = towers.resize_positions(rows, (side, side), (height, width))
    return resized.reshape(ours.shape).to(saved.dtype)
