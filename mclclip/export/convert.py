"""Verb ``export --to``: an exported encoder -> another library's layout, with certificates.

What a layout is, a module ``to_NAME`` says (see ``target``); this file drives it.
"""

from __future__ import annotations

import glob
import logging
import os
import shutil
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, cast, get_args

from mclclip import files
from mclclip.data.decode import MAX_IMAGE_PIXELS
from mclclip.export import certificate, model_card
from mclclip.export.push import open_repository
from mclclip.export.target import Material, Precision, Source, Target
from mclclip.models import weights
from mclclip.run import artifacts
from mclclip.run.artifacts import Artifact, Force
from mclclip.run.lock import start_of_process

log = logging.getLogger("mclclip")

To = Literal["hf", "onnx", "timm", "llava", "open_clip", "clip_retrieval"]
CERTIFICATE = "certificate.json"


def run(
    to: To,
    model: Path,
    out: Path,
    *,
    images: Path | None = None,
    texts: Path | None = None,
    precision: Precision | None = None,
    num_images: int = 64,
    push: str | None = None,
    public: bool | None = None,
    hub: Any = None,
    force: Force = False,
) -> Path:
    """Writes the encoder in ``model`` (an export: a stage, a soup, a concat; for `clip_retrieval` a
    stage's embeddings in its run directory) as a folder that library ``to`` reads; returns it.

    ``images``, ``texts``: a folder of pictures and a file with a text per line, on which the two
    are compared (default: drawn ones); what was found is in ``certificate.json``. ``push``: a
    repository ORG/NAME that gets the finished export, by the client ``hub``; everybody may read it
    if ``public``. Raises FileNotFoundError where there is no such model, ValueError where the other
    library cannot hold it, ``out`` holds other files, a package is missing or features differ, and
    before all work the errors of ``open_repository``; nothing is left then.
    """
    target = cast(Target, import_module(f"mclclip.export.to_{to}"))
    source = _source(to, model, precision)
    out = out if out.name not in ("", "..") else out.resolve()  # a name is needed beside it
    _check_place(out, source)
    if public and push is None:
        raise ValueError("--public is of --push ORG/NAME: give that too, or leave it out")
    material = _material(images, texts, num_images)
    pictures = material.digest_of_images if images is not None else None
    lines = material.digest_of_texts if texts is not None else None
    fields = {"to": to, "precision": source.precision, "images": pictures, "texts": lines}
    further = getattr(target, "inputs", None)
    inputs = {"model": source.digest} | (further(source) if further is not None else {})
    opened = partial(
        Artifact.open, out, kind="converted", config=fields, inputs=inputs, force=force
    )
    finished = not force and opened(write=False).finished
    repository = None
    if push is not None:
        repository = open_repository(to, push, public=bool(public), api=hub)
    if finished:
        log.info("%s is finished: skipped", out)
    else:
        _write(to, target, source, out, material, opened)
    if repository is not None:
        repository.upload(out)
    return out


def _write(
    to: To,
    target: Target,
    source: Source,
    out: Path,
    material: Material,
    opened: Callable[[], Artifact],
) -> None:
    # Nothing is in `out` before all certificates hold, and an old folder stays where they do not.
    _remove_leftovers(out)
    begun = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    shutil.rmtree(begun, ignore_errors=True)
    begun.mkdir(parents=True)
    try:
        target.write(source, begun)
        found = target.certify(source, begun, material)
        _check(source, to, found)
        files.write_json(begun / CERTIFICATE, {"runtimes": [proof.as_dict() for proof in found]})
        files.write_bytes(begun / model_card.FILE, model_card.text(to, source, found).encode())
        artifact = opened()
        for path in sorted(begun.iterdir()):
            if (out / path.name).is_dir():
                shutil.rmtree(out / path.name)
            os.replace(path, out / path.name)
    finally:
        shutil.rmtree(begun, ignore_errors=True)
    written = [p for p in sorted(out.rglob("*")) if p.is_file() and p.name != artifacts.INTENT]
    records = files.records_of(out, *(str(path.relative_to(out)) for path in written))
    counts = {"images": len(material.images), "texts": len(material.texts)}
    artifact.finish(counts | {"runtimes": len(found)}, records=records)
    for proof in found:
        _tell(out, proof)


def _check_place(out: Path, source: Source) -> None:
    """Raises ValueError where `out` holds what this verb would overwrite."""
    if out.resolve() == source.directory.resolve():
        raise ValueError(f"--out {out} is the model itself: give a new folder")
    artifacts.refuse_foreign(out, "--out")


def _remove_leftovers(out: Path) -> None:
    """Removes what conversions to `out` that were killed have left beside it."""
    for path in out.parent.glob(f".{glob.escape(out.name)}.*.tmp"):
        number = path.name.removesuffix(".tmp").removeprefix(f".{out.name}.")
        if number.isdecimal() and start_of_process(int(number)) is None:
            shutil.rmtree(path, ignore_errors=True)


def _source(to: To, model: Path, precision: Precision | None) -> Source:
    source = Source(Path(str(model).removeprefix("local-dir:")), precision or "fp32")
    if precision == "fp16" and to != "onnx":
        raise ValueError(f"--precision fp16 is of --to onnx, and this is --to {to}: leave it out")
    if to == "clip_retrieval" or source.is_concat or weights.has_config(source.directory):
        return source
    raise FileNotFoundError(f"no exported model at {source.directory}: run 'mclclip export' first")


def _material(images: Path | None, texts: Path | None, num_images: int) -> Material:
    pictures = (
        certificate.read_images(images, num_images, MAX_IMAGE_PIXELS)
        if images is not None
        else certificate.drawn_images()
    )
    return Material(pictures, _lines(texts) if texts is not None else certificate.TEXTS)


def _lines(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from None
    if not lines:
        raise ValueError(f"{path} is empty: give a text per line")
    return lines


def _check(source: Source, to: To, found: list[certificate.Certificate]) -> None:
    """Raises ValueError where features differ in a runtime, or no runtime ran."""
    assert to in get_args(To) and found, "a target without a runtime certifies nothing"
    for proof in found:
        if not proof.holds:
            scale = proof.logit_scale
            scales = "" if scale is None else f" (and logit scales by {scale:.2g} of their value)"
            raise ValueError(
                f"{source.directory} is not converted: features in {proof.runtime} differ by "
                f"{proof.largest:.2g}{scales}, wanted at most {proof.bound:g}"
                f"{scales and f' ({certificate.BOUND:g})'}; the model has a part that "
                "the other library has not, or runs otherwise"
            )


def _tell(out: Path, found: certificate.Certificate) -> None:
    texts = found.text_features
    log.info(
        "%s: %s on %d images%s: features differ by at most %.1g%s",
        out, found.runtime, found.num_images,
        "" if texts is None else f" and {found.num_texts} texts", found.image_features,
        "" if texts is None else f" (images) and {texts:.1g} (texts)",
    )  # fmt: skip
    for note in found.notes:
        log.warning("%s", note)
    if found.pixels is not None and found.pixels >= 1.0:
        log.warning(
            "its image processor differs from open_clip's transform by up to %.1f of 255 shades "
            "(%s), and features by up to %.2g with it",
            found.pixels, ", ".join(found.pixels_of[:3]) or "nowhere by 2",
            found.image_features_own_pixels,
        )  # fmt: skip
    if found.tokens:
        first = found.tokens_of[0]
        log.warning("%d texts become other tokens there, such as %r", found.tokens, first)
