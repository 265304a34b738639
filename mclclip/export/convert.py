"""Verb ``export --to``: an exported encoder -> another library's layout, with certificates.

A layout is a module of ``targets``; this file drives it.
"""

from __future__ import annotations

import glob
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np

from mclclip.export import card, certificate, targets
from mclclip.export.certificate import Certificate, Probes
from mclclip.export.targets import Precision, Source
from mclclip.models import weights
from mclclip.run import artifacts
from mclclip.run.artifacts import Artifact, Force
from mclclip.run.lock import start_of_process
from mclclip.util import files

log = logging.getLogger("mclclip")


def run(
    to: str,
    model: Path,
    out: Path,
    *,
    images: Path | None = None,
    texts: Path | None = None,
    precision: Precision | None = None,
    num_images: int = 64,
    force: Force = False,
) -> Path:
    """Writes the encoder in ``model`` (an export: a stage, a soup, a concat; for `clip_retrieval` a
    stage's embeddings in its run directory) as a folder that library ``to`` reads; returns it.

    ``images``, ``texts``: a folder of pictures and a file with a text per line, on which the two
    are compared (default: drawn ones); the differences are in ``certificate.json``. Raises
    FileNotFoundError where there is no such model, and ValueError where the other library cannot
    hold it, ``out`` holds other files, a package is missing or features differ; nothing is left
    then.
    """
    target, source = _open(to, model, precision)
    out = out if out.name not in ("", "..") else out.resolve()  # a name is needed beside it
    if out.resolve() == source.directory.resolve():
        raise ValueError(f"--out {out} is the model itself: give a new folder")
    artifacts.refuse_foreign(out, "--out")
    probes = certificate.read_probes(images, texts, num_images)
    pixels = {n: files.digest_array(np.asarray(image)) for n, image in probes.images.items()}
    fields = {
        "to": to,
        "precision": source.precision,
        "images": None if images is None else files.digest_json(pixels),
        "texts": None if texts is None else files.digest_json([*probes.texts]),
    }
    inputs = {"model": source.digest}
    if read_beside := getattr(target, "inputs", None):
        inputs |= read_beside(source)
    open_ = partial(Artifact.open, out, kind="converted", config=fields, inputs=inputs, force=force)
    if not force and open_(write=False).finished:
        log.info("%s is finished: skipped", out)
        return out
    proofs, artifact = _write(to, source, out, probes, open_)
    paths = [p for p in sorted(out.rglob("*")) if p.is_file() and p.name != artifacts.INTENT]
    records = files.records_of(out, *(str(path.relative_to(out)) for path in paths))
    counts = {"images": len(probes.images), "texts": len(probes.texts)}
    artifact.finish(counts | {"runtimes": len(proofs)}, records=records)
    for number, proof in enumerate(proofs):
        _report(out, proof, first=number == 0)
    return out


def _open(to: str, model: Path, precision: Precision | None) -> tuple[targets.ExportTarget, Source]:
    """The target and the source. Raises ValueError for a precision that the target has not, and
    FileNotFoundError where it wants a model and there is none."""
    target = targets.find(to)
    source = Source(Path(str(model).removeprefix("local-dir:")), precision or "fp32")
    if source.precision not in getattr(target, "PRECISIONS", ("fp32",)):
        formats_of = {
            name: getattr(targets.find(name), "PRECISIONS", ()) for name in targets.names()
        }
        several = ", ".join(name for name, formats in formats_of.items() if precision in formats)
        raise ValueError(
            f"--precision {precision} is of --to {several}, and this is --to {to}: leave it out"
        )
    if target.IS_MODEL and not (source.is_concat or weights.has_config(source.directory)):
        raise FileNotFoundError(
            f"no exported model at {source.directory}: run 'mclclip export' first"
        )
    return target, source


def _write(
    to: str, source: Source, out: Path, probes: Probes, open_: Callable[[], Artifact]
) -> tuple[list[Certificate], Artifact]:
    """Writes all files but the manifest. Nothing is in `out` before all certificates hold, and an
    old folder stays where they do not: ValueError."""
    for path in out.parent.glob(f".{glob.escape(out.name)}.*.tmp"):  # of conversions killed before
        number = path.name.removesuffix(".tmp").removeprefix(f".{out.name}.")
        if number.isdecimal() and start_of_process(int(number)) is None:
            shutil.rmtree(path, ignore_errors=True)
    target, folder = targets.find(to), out.with_name(f".{out.name}.{os.getpid()}.tmp")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        target.write(source, folder)
        proofs = target.certify(source, folder, probes)
        assert proofs, "a target without a runtime certifies nothing"
        for proof in proofs:
            if not proof.holds:
                raise ValueError(
                    f"{source.directory} is not converted: {proof.difference()}; the model has a "
                    "part that the other library has not, or runs otherwise"
                )
        record = {"runtimes": [asdict(proof) for proof in proofs]}
        files.write_json(folder / "certificate.json", record)
        card.write_card(folder, to, source, proofs)
        artifact = open_()
        for path in sorted(folder.iterdir()):
            if (out / path.name).is_dir():
                shutil.rmtree(out / path.name)
            os.replace(path, out / path.name)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return proofs, artifact


def _report(out: Path, proof: Certificate, first: bool) -> None:
    """Logs the differences of a runtime, and warns of what a user has to know. Texts are reported
    with the first runtime only, since all runtimes share one tokenizer."""
    texts = proof.text_features
    log.info(
        "%s: %s on %d images%s: features differ by at most %.1g%s",
        out, proof.runtime, proof.num_images,
        "" if texts is None else f" and {proof.num_texts} texts", proof.image_features,
        "" if texts is None else f" (images) and {texts:.1g} (texts)",
    )  # fmt: skip
    for note in proof.notes:
        log.warning("%s", note)
    if proof.pixels is not None and proof.pixels >= 1.0:
        log.warning(
            "its image processor differs from open_clip's transform by up to %.1f of 255 shades "
            "(%s), and features by up to %.2g with it",
            proof.pixels, ", ".join(proof.pixels_of[:3]) or "nowhere by 2",
            proof.image_features_own_pixels,
        )  # fmt: skip
    if proof.tokens and first:
        log.warning(
            "%d texts become other tokens there, such as %r", proof.tokens, proof.tokens_of[0]
        )
