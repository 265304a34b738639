"""A model's directory on disk: its configuration and its weights, as safetensors only.

    export/  open_clip_config.json        {"model_cfg": ..., "preprocess_cfg": ..., "base_digest"}
             open_clip_model.safetensors  open_clip's state dict

    export/  config.json                  an image encoder's: its model_cfg has no text_cfg
             model.safetensors            the image tower's part of open_clip's state dict

`base_digest` identifies the weights that a model was fine-tuned from (a base model has its own).
Averages make sense only among models of one base. The last section fetches files of public models,
and keeps libraries from printing to the terminal.
"""

import copy
import hashlib
import logging
import os
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch
from huggingface_hub import constants as hub
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from mclclip.run import artifacts
from mclclip.util import files

CONFIG = "open_clip_config.json"
WEIGHTS = "open_clip_model.safetensors"
IMAGE_CONFIG = "config.json"
IMAGE_WEIGHTS = "model.safetensors"
CONCAT = "concat.json"
CONCAT_WEIGHTS = "concat_model.safetensors"
TOKENIZER_FILES = ("tokenizer", "vocab", "merges", "special_tokens", "added_tokens", "sentence")
_MOST_HEADER_BYTES = 1 << 24  # 10,000 tensors, more than published models have, take 2 MB
_TOKENIZER_DATA = (".json", ".txt", ".model")
_WEIGHTS_DATA = (".safetensors", ".bin", ".pth", ".pt")
SUFFIXES = (*_TOKENIZER_DATA, *_WEIGHTS_DATA)
"""The suffixes of the files that a model is loaded from."""
_KINDS = ("export", "teacher", "concat", "soup")
T = TypeVar("T")


def files_of(directory: Path) -> list[str]:
    """Returns the names of a model's files: configuration, weights, tokenizer."""
    ours = (artifacts.MANIFEST, artifacts.INTENT)
    paths = sorted(path for path in Path(directory).iterdir() if path.is_file())
    return [path.name for path in paths if path.name not in ours and path.name[0] != "."]


def check_recorded(directory: Path, *, load_weights: bool = True) -> None:
    """Raises RuntimeError if a file of an export is not the one that `mclclip export` recorded.

    A directory without such a manifest, for example a stranger's model, is not checked.
    `load_weights=False` leaves out weights files.
    """
    path = Path(directory) / artifacts.MANIFEST
    manifest_json = files.read_json(path) if path.is_file() else None
    kind = manifest_json.get("kind") if isinstance(manifest_json, dict) else None
    if kind not in _KINDS:
        return
    manifest = artifacts.read_manifest(directory, kind)
    names = [n for n in manifest.records if load_weights or not n.endswith(".safetensors")]
    if names:
        manifest.check(directory, *names)


def is_image_encoder(directory: Path) -> bool:
    """Returns True if a directory holds an image encoder: one tower, without a text tower."""
    path = Path(directory) / IMAGE_CONFIG
    if (Path(directory) / CONFIG).is_file() or not path.is_file():
        return False
    config = files.read_model_json(path)
    return isinstance(config, dict) and isinstance(config.get("model_cfg"), dict)


def has_config(directory: Path) -> bool:
    """Returns True if a directory holds an exported model of any kind."""
    return (Path(directory) / CONFIG).is_file() or is_image_encoder(directory)


def refuse_adapter(directory: Path) -> None:
    """Raises ValueError if a folder holds an adapter, as PEFT saves it."""
    if (Path(directory) / "adapter_config.json").exists():
        raise ValueError(
            f"{directory} holds an adapter: merge it into its model (merge_and_unload) and save it"
        )


def read_config(directory: Path) -> dict[str, Any]:
    """Returns the configuration in the directory of an open_clip model or an image encoder.

    Raises FileNotFoundError if there is none, and ValueError if it has no `model_cfg` or holds an
    adapter.
    """
    refuse_adapter(directory)
    path = Path(directory) / (IMAGE_CONFIG if is_image_encoder(directory) else CONFIG)
    if not path.is_file():
        problem = f"{directory} has no {CONFIG}, so it is no exported model"
        advice = "give a directory that an export wrote"
        if not Path(directory).is_dir():
            problem = f"no model directory at {directory}"
        elif (Path(directory) / IMAGE_CONFIG).is_file():
            advice = f"a model of Hugging Face transformers is named hf:{directory}"
        raise FileNotFoundError(f"{problem}: {advice}")
    config = files.read_model_json(path)
    if not isinstance(config, dict) or "model_cfg" not in config:
        raise ValueError(f"{path} has no 'model_cfg', got {type(config).__name__}: export it again")
    return config


def write_config(directory: Path, config: Mapping[str, Any]) -> None:
    """Writes a model's configuration into its directory, by temporary name and rename."""
    name = CONFIG if "text_cfg" in config["model_cfg"] else IMAGE_CONFIG
    files.write_json(Path(directory) / name, config)


def write_model(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Writes a model's configuration and weights."""
    write_config(directory, config)
    name = WEIGHTS if "text_cfg" in config["model_cfg"] else IMAGE_WEIGHTS
    write_tensors(Path(directory) / name, tensors)


def read_model_config(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """Returns `{"model_cfg": ...}` of a model config, which is a JSON file or a mapping.

    It may also be a whole `open_clip_config.json`, which is returned with its other fields. Raises
    FileNotFoundError for a missing file, and ValueError if the config lacks a part.
    """
    if isinstance(source, Mapping):
        config, where = copy.deepcopy(dict(source)), "the model config"
    else:
        if not Path(source).is_file():
            raise FileNotFoundError(f"no model config at {source}")
        config, where = files.read_model_json(Path(source)), str(source)
    model_cfg = config.get("model_cfg", config) if isinstance(config, dict) else {}
    model_cfg = model_cfg if isinstance(model_cfg, Mapping) else {}
    vision = model_cfg.get("vision_cfg")
    brings_dim = isinstance(vision, Mapping) and "backbone" in vision  # config_check.BACKBONE
    required = ("vision_cfg",) if brings_dim else ("embed_dim", "vision_cfg")
    if missing := [key for key in required if key not in model_cfg]:
        raise ValueError(
            f"{where} lacks {', '.join(missing)}: it must be an open_clip model config"
        )
    return config if "model_cfg" in config else {"model_cfg": config}


def copy_tokenizer(source: Path, directory: Path) -> None:
    """Copies the files of a Hugging Face tokenizer from one model's directory to another's.

    CLIP's own tokenizer has no files.
    """
    for path in sorted(Path(source).glob("*")):
        if path.name.startswith(TOKENIZER_FILES) and path.suffix in _TOKENIZER_DATA:
            files.write_bytes(Path(directory) / path.name, path.read_bytes())


def refuse_joined(name: object) -> None:
    """Raises ValueError if a model's `name` is the directory of a concat (several joined stages).

    Its configuration is that of one stage, so the other stages would be lost.
    """
    if not isinstance(name, str | Path):
        return
    directory = Path(str(name).removeprefix("local-dir:"))
    if (directory / CONCAT).is_file():
        raise ValueError(
            f"{directory} is a joined encoder, which can be evaluated and converted, but is no one "
            "model to train, embed or average: give one of its stages or the soup "
            "(mclclip.load_model loads it in Python)"
        )


def find_weights(directory: Path) -> Path:
    """Returns the weights file in a model's directory; one of open_clip's name is preferred, since
    a folder of the hub may also hold transformers' weights, and then safetensors.

    Raises FileNotFoundError if there is none, and ValueError if several could be meant, or the
    directory is a concat.
    """
    directory = Path(directory)
    refuse_joined(directory)
    for pattern in (WEIGHTS, *(f"open_clip_*{s}" for s in _WEIGHTS_DATA), IMAGE_WEIGHTS):
        if weight_files := sorted(directory.glob(pattern)):
            return weight_files[0]
    for suffix in _WEIGHTS_DATA:
        weight_files = sorted(directory.glob(f"*{suffix}"))
        if len(weight_files) > 1:
            raise ValueError(
                f"{directory} has {len(weight_files)} files of weights, {weight_files[0].name} and "
                f"others: leave one, or call the right one open_clip_model{suffix}"
            )
        if weight_files:
            return weight_files[0]
    raise FileNotFoundError(f"{directory} has {CONFIG} but no weights: export the model again")


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes tensors as safetensors by temporary name, fsync and rename.

    Equal tensors give equal bytes: names are sorted, and the metadata has a single key, since
    safetensors writes several in random order.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    plain = {name: tensors[name].detach().cpu().contiguous() for name in sorted(tensors)}
    try:
        with files.with_path_in_errors(path):
            try:
                save_file(plain, temporary, metadata={"format": "pt"})
            except SafetensorError as error:  # only its text has the number of the system's error
                if (number := re.search(r"os error (\d+)", str(error))) is None:
                    raise
                raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
        # safetensors makes files that only the owner can read; these get the usual permissions.
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    files.fsync_directory(path.parent)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Returns the tensors of a safetensors file. Raises the errors of `open_tensors`."""
    with open_tensors(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}


@contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """Opens a safetensors file, by safetensors' `safe_open`.

    Raises FileNotFoundError if there is none, and ValueError if it cannot be read.
    """
    check_header(path)
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(f"{path} is not a readable safetensors file ({error})") from error


def check_header(path: Path) -> None:
    """Raises ValueError if the header of a safetensors file is longer than any model's, and
    FileNotFoundError if there is no file.

    It lists the tensors; one of a million tensors would take half a minute to read.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is no file: give a safetensors file")
    with open(path, "rb") as file:
        size_bytes = int.from_bytes(file.read(8), "little")
    if size_bytes > _MOST_HEADER_BYTES:
        raise ValueError(
            f"{path} is not a readable safetensors file (its header has {size_bytes:,} bytes, "
            f"wanted at most {_MOST_HEADER_BYTES:,})"
        )


def refuse_not_finite(model: nn.Module, where: str) -> None:
    """Raises ValueError if a weight is NaN or infinite, since every feature would be too."""
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise ValueError(
                f"the weights {where} are not finite, such as {name}: the file is damaged, or "
                "its training has diverged"
            )


def digest_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Returns a digest of names, dtypes, shapes and values; their order does not matter."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def base_digest(directory: Path) -> str:
    """Returns the digest of the base that an export was fine-tuned from, or, if none is recorded,
    that of its own weights."""
    recorded: str | None = read_config(directory).get("base_digest")
    return recorded or files.digest_file(find_weights(directory))


def same_bits(first: Tensor, *others: Tensor) -> bool:
    """Returns True if tensors agree in dtype, shape and every bit.

    So NaNs may be equal, and 0.0 and -0.0 are not.
    """
    bits = first.contiguous().reshape(-1).view(torch.uint8)
    return all(
        other.dtype == first.dtype
        and other.shape == first.shape
        and torch.equal(other.contiguous().reshape(-1).view(torch.uint8), bits)
        for other in others
    )


# --- fetching ----------------------------------------------------------------------------------


def fetch_quietly(what: str, fetch: Callable[[], T]) -> T:
    """Returns what ``fetch`` returns, and keeps the hub client from printing.

    Raises FileNotFoundError, one line about ``what`` (for example "the weights of 'ViT-B-32'"), if
    it fails.
    """
    try:
        with quiet(), _offline_where_unreachable():
            return fetch()
    except Exception as error:  # the hub client raises dozens of kinds of errors
        raise FileNotFoundError(
            f"{what} are neither cached nor reachable ({one_line(error)}): fetch them once on a "
            "machine with a network, or give the path of a copy"
        ) from error


@contextmanager
def _offline_where_unreachable() -> Iterator[None]:
    """Within the block, the hub client uses its cache alone if the hub's host name is not resolved.

    Otherwise it would retry for most of a minute and print a line for every attempt.
    """
    before = hub.HF_HUB_OFFLINE
    proxies = ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")  # these resolve names
    if not any(os.environ.get(name) for name in proxies):
        try:
            socket.getaddrinfo(urlsplit(hub.ENDPOINT).hostname, 443)
        except OSError:
            hub.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        hub.HF_HUB_OFFLINE = before


def one_line(error: BaseException) -> str:
    """Returns the type of an error and the beginning of its message, in one line."""
    return f"{type(error).__name__}: {files.message_of(error)}"


@contextmanager
def quiet() -> Iterator[None]:
    """Drops open_clip's records of the root logger, and keeps it from adding a handler there."""
    root, null = logging.getLogger(), logging.NullHandler()
    drop_all = logging.Filter("no logger of this name")  # lets pass what such a logger logs
    root.addHandler(null)
    root.addFilter(drop_all)
    try:
        yield
    finally:
        root.removeFilter(drop_all)
        root.removeHandler(null)


def common_names(names: Mapping[Path, Iterable[str]]) -> list[str]:
    """Returns the sorted names of the tensors of models by path. Raises ValueError if they
    differ."""
    (first, expected), *others = ((path, set(of_one)) for path, of_one in names.items())
    for path, theirs in others:
        if strange := sorted(theirs ^ expected):
            owner = path if strange[0] in theirs else first
            raise ValueError(
                f"{path} and {first} hold different tensors: only {owner} has {strange[0]}"
            )
    return sorted(expected)
