"""Verb ``export --to``: an exported encoder -> another library's layout, with a certificate."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal

from mclclip import files
from mclclip.export import certificate, transformers_layout
from mclclip.models import config_check, transformers_encoder, weights
from mclclip.models.clip_model import ClipModel
from mclclip.models.encoder import SingleEncoder
from mclclip.models.loading import load_any
from mclclip.run.artifacts import Artifact

log = logging.getLogger("mclclip")

To = Literal["hf"]
CERTIFICATE = "certificate.json"
_MAX_IMAGE_PIXELS = 100_000_000


def run(
    to: To,
    model: Path,
    out: Path,
    *,
    images: Path | None = None,
    texts: Path | None = None,
    num_images: int = 64,
    force: bool = False,
) -> Path:
    """Writes the encoder in ``model`` (an export: a stage, a soup) as a folder that transformers
    loads, and ``certificate.json`` beside it; returns the folder.

    ``images``, ``texts``: a folder of pictures and a file with a text per line, on which the two
    are compared (default: drawn ones). Raises FileNotFoundError where there is no such model, and
    ValueError where the other library cannot hold it or its features differ; nothing is left then.
    """
    source = _source(model)
    transformers = config_check.library()
    pictures = (
        certificate.read_images(images, num_images, _MAX_IMAGE_PIXELS)
        if images is not None
        else certificate.drawn_images()
    )
    lines = _lines(texts) if texts is not None else [*certificate.TEXTS]
    own = load_any(source)
    if not isinstance(own, ClipModel):
        raise ValueError(f"{source} has no text tower, which transformers' CLIPModel has")
    converted = transformers_layout.convert(source, own.config, own.tokenizer)
    inputs = {"model": files.digest_file(weights.find_weights(source))}
    artifact = Artifact.open(out, kind="converted", config={"to": to}, inputs=inputs, force=force)
    if artifact.finished:
        log.info("%s is finished: skipped", out)
        return out
    try:
        converted.write(out)
        other = transformers_encoder.load(f"{transformers_encoder.PREFIX}{out}")
        runtime = f"transformers {transformers.__version__}"
        found = certificate.compare(SingleEncoder(own), other, runtime, pictures, lines)
        if not found.holds:
            largest = max(found.image_features, found.text_features)
            raise ValueError(
                f"{source} is not converted: features in {runtime} differ by {largest:.2g}, wanted "
                f"at most {found.bound:g}; the model has a part that CLIPModel has not"
            )
    except BaseException:
        (out / transformers_layout.WEIGHTS).unlink(missing_ok=True)  # must not look finished
        raise
    files.write_json(out / CERTIFICATE, found.as_dict())
    written = [path.name for path in sorted(out.iterdir()) if path.is_file()]
    records = files.records_of(out, *written)
    artifact.finish({"images": len(pictures), "texts": len(lines)}, records=records)
    _tell(out, found)
    return out


def _source(model: Path) -> Path:
    source = Path(str(model).removeprefix("local-dir:"))
    if (source / weights.CONCAT).is_file():
        raise ValueError(
            f"{source} is a joined encoder, which transformers' CLIPModel cannot hold: convert the "
            "soup or a stage"
        )
    if not weights.has_config(source):
        raise FileNotFoundError(f"no exported model at {source}: run 'mclclip export' first")
    return source


def _lines(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from None
    if not lines:
        raise ValueError(f"{path} is empty: give a text per line")
    return lines


def _tell(out: Path, found: certificate.Certificate) -> None:
    log.info(
        "%s: %s on %d images and %d texts: features differ by at most %.1g (images) and %.1g "
        "(texts), logits by %.1g",
        *(out, found.runtime, found.num_images, found.num_texts),
        *(found.image_features, found.text_features, found.logits),
    )
    if found.pixels >= 1.0:
        log.warning(
            "its image processor differs from open_clip's transform by up to %.1f of 255 shades "
            "(%s), and features by up to %.2g with it",
            found.pixels, ", ".join(found.pixels_of[:3]) or "nowhere by 2",
            found.image_features_own_pixels,
        )  # fmt: skip
    if found.tokens:
        first = found.tokens_of[0]
        log.warning("%d texts become other tokens there, such as %r", found.tokens, first)
