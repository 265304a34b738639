"""Verb ``export --to``: converts an exported encoder to another library's layout and compares both.

Each layout is a module of ``targets``, which this file calls.
"""

from __future__ import annotations

import logging
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from mclclip.export import card, certificate, targets
from mclclip.export.certificate import Certificate, Probes
from mclclip.export.targets import Precision, Source
from mclclip.models import weights
from mclclip.run import artifacts
from mclclip.run.artifacts import Artifact
from mclclip.run.steps import Made, Step, make_artifact
from mclclip.util import files
from mclclip.util.remake import Remake

log = logging.getLogger("mclclip")


def run(
    to: str,
    model: Path,
    out: Path,
    *,
    images: Path | None = None,
    texts: Path | None = None,
    precision: Precision | None = None,
    width: int | None = None,
    num_images: int = 64,
    force: Remake = Remake.NOTHING,
) -> Path:
    """Converts the encoder in ``model`` to a folder ``out`` that library ``to`` reads; returns it.

    ``model`` is an export (a stage, a soup, a concat), or for `clip_retrieval` the embeddings of a
    stage in its run directory. ``images`` (a folder of pictures) and ``texts`` (a file with a text
    per line) are what the two encoders are compared on, by default those of `certificate`; the
    differences go into ``certificate.json``. ``width``: the features are cut to their first so many
    numbers. Raises FileNotFoundError if there is no such model, and ValueError if the library
    cannot hold it, ``out`` holds other files, a package is missing or features differ; nothing is
    left behind then.
    """
    source = _open(to, model, precision, width)
    out = out if out.name not in ("", "..") else out.resolve()  # temporary folders use its name
    if out.resolve() == source.directory.resolve():
        raise ValueError(f"--out {out} is the model itself: give a new folder")
    artifacts.refuse_foreign(out, "--out")
    probes = certificate.read_probes(images, texts, num_images)
    pixels = {n: files.digest_array(np.asarray(image)) for n, image in probes.images.items()}
    step = Converted(
        to,
        source.precision,
        images=None if images is None else files.digest_json(pixels),
        texts=None if texts is None else files.digest_json([*probes.texts]),
        width=width,
    )
    make_artifact(step, out, (source, probes), force)
    return out


@dataclass(frozen=True)
class Converted(Step[tuple[Source, Probes]]):
    """A model in another library's layout.

    ``images`` and ``texts`` are digests of the user's probes; None: those of `certificate`.
    ``width``: of the features, where they are cut.
    """

    kind = "converted"
    to: str
    precision: Precision
    images: str | None
    texts: str | None
    width: int | None

    def reads(self, how: tuple[Source, Probes]) -> dict[str, str]:
        """Returns the digests of the model and of what else its target reads."""
        return {"model": how[0].digest} | targets.find(self.to).inputs(how[0])

    def make(self, out: Artifact, how: tuple[Source, Probes]) -> Made:
        """Writes the folder. Raises ValueError, before anything is in it, if features differ."""
        (source, probes), folder = how, out.directory
        proofs = _write(self.to, source, out, probes)
        for number, proof in enumerate(proofs):
            _report(folder, proof, first=number == 0)
        paths = [p for p in sorted(folder.rglob("*")) if p.is_file() and p.name != artifacts.INTENT]
        records = files.records_of(folder, *(str(path.relative_to(folder)) for path in paths))
        counts = {"images": len(probes.images), "texts": len(probes.texts)}
        return Made(counts | {"runtimes": len(proofs)}, records)


def _open(to: str, model: Path, precision: Precision | None, width: int | None) -> Source:
    """Returns the model that is converted.

    Raises ValueError for a precision or a width that the target does not have, and
    FileNotFoundError if it converts models and there is none.
    """
    target = targets.find(to)
    source = Source(Path(str(model).removeprefix("local-dir:")), precision or "fp32", width)
    if width is not None and not target.is_model:
        raise ValueError(f"--width cuts the features of models, and --to {to} takes embeddings")
    if source.precision not in target.precisions:
        several = ", ".join(n for n in targets.names() if precision in targets.find(n).precisions)
        raise ValueError(
            f"--precision {precision} is of --to {several}, and this is --to {to}: leave it out"
        )
    if target.is_model and not (source.is_concat or weights.has_config(source.directory)):
        folder = source.directory
        exports = sorted([*folder.glob("exports/*"), *folder.glob("stage_*/export")])
        advice = f"give one in it, such as {exports[-1]}" if exports else "run 'mclclip export'"
        raise FileNotFoundError(f"no exported model at {folder}: {advice}")
    return source


def _write(to: str, source: Source, artifact: Artifact, probes: Probes) -> list[Certificate]:
    """Writes all files but the manifest into a temporary folder, and then moves them.

    Raises ValueError, and leaves the old folder unchanged, if a certificate does not hold.
    """
    out = artifact.directory
    target, folder = targets.find(to), out.with_name(f".{out.name}.tmp")
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
        artifact.begin()
        for path in sorted(folder.iterdir()):
            if (out / path.name).is_dir():
                shutil.rmtree(out / path.name)
            os.replace(path, out / path.name)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return proofs


def _report(out: Path, proof: Certificate, first: bool) -> None:
    """Logs how far the features of the converted model in one runtime are from the original's, and
    warns of what a user has to know.

    Texts that become other tokens are reported with the ``first`` runtime only, since all runtimes
    share one tokenizer.
    """
    texts = proof.text_features
    log.info(
        "%s: %s on %d images%s: features differ by at most %.1g%s; cosines are %.4f and above",
        out, proof.runtime, proof.num_images,
        "" if texts is None else f" and {proof.num_texts} texts", proof.image_features,
        "" if texts is None else f" (images) and {texts:.1g} (texts)", proof.cosine,
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
