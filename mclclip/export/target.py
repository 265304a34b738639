"""The interface of a target: another library's layout, which `mclclip export --to NAME` writes.

A target is one module of this folder, `to_NAME.py`, with the two functions of `Target`, and a test.
It may have a third, `inputs(source)`: digests by name of what is read beside the source's files.
`convert` does the rest: it finds the source, writes into a folder of its own and moves all of it in
place once every certificate holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from PIL import Image

from mclclip import files
from mclclip.export.certificate import Certificate
from mclclip.models import weights
from mclclip.models.encoder import Encoder, load_model
from mclclip.models.model import Model
from mclclip.run import artifacts
from mclclip.run.layout import Layout, folders_above

Precision = Literal["fp32", "fp16"]


@dataclass(frozen=True)
class Source:
    """The encoder that is converted, by its folder, and the number format that is written.

    directory  an export (a stage, a soup, a concat), or what else a target reads
    precision  number format of the weights that are written, where a target has several
    """

    directory: Path
    precision: Precision = "fp32"

    @cached_property
    def encoder(self) -> Encoder:
        """The encoder in the directory, on the CPU. Raises the errors of `load_model`."""
        return load_model(self.directory)

    @property
    def is_concat(self) -> bool:
        """Whether the directory holds several stages, joined."""
        return (self.directory / weights.CONCAT).is_file()

    @property
    def stages(self) -> list[Model]:
        """The models that the encoder consists of: one, or the stages of a concat."""
        return self.encoder.models

    @property
    def reads_texts(self) -> bool:
        """Whether there is a text tower."""
        return self.stages[0].reads_texts

    def single(self, library: str) -> Model:
        """The only model, with its text tower. Raises ValueError for a concat or an image encoder,
        which `library` cannot hold."""
        if self.is_concat:
            raise ValueError(
                f"{self.directory} is a joined encoder, which {library} cannot hold: convert the "
                "soup or a stage"
            )
        model = self.stages[0]
        if not model.reads_texts:
            raise ValueError(f"{self.directory} has no text tower, which {library} has")
        return model

    @property
    def run_dir(self) -> Path | None:
        """The run directory that the export lies in, known by its index or its stage 0, since verbs
        that are called one by one leave no configuration there; None for a folder elsewhere."""
        return next(filter(_is_run, folders_above(self.directory)), None)

    @property
    def name(self) -> str:
        """Its name in the run: `stage_1`, `soup_uniform`."""
        path = self.directory.resolve()
        return path.parent.name if path.name in ("export", "embeddings") else path.name

    @property
    def digest(self) -> str:
        """Digest of weights and configuration, or of a run's embeddings. Raises FileNotFoundError
        where the directory holds neither."""
        if self.is_concat:
            described = self.directory / weights.CONCAT
        elif weights.has_config(self.directory):
            described = self.directory / (
                weights.IMAGE_CONFIG if weights.is_image_encoder(self.directory) else weights.CONFIG
            )
        else:
            return artifacts.read_manifest(self.directory, "embeddings").digest
        return files.digest_json([files.digest_file(described), files.digest_file(self.weights)])

    @property
    def weights(self) -> Path:
        """The file of the weights."""
        if self.is_concat:
            return self.directory / weights.CONCAT_WEIGHTS
        return weights.find_weights(self.directory)


def _is_run(path: Path) -> bool:
    layout = Layout(path)
    return artifacts.is_finished(layout.index) or artifacts.is_finished(layout.export(0))


@dataclass(frozen=True)
class Material:
    """Pictures by name, and texts, on which an export is held against its source."""

    images: dict[str, Image.Image]
    texts: Sequence[str]

    @property
    def digest_of_images(self) -> str:
        """Digest of the names and the pixels."""
        pixels = {n: files.digest_array(np.asarray(image)) for n, image in self.images.items()}
        return files.digest_json(pixels)

    @property
    def digest_of_texts(self) -> str:
        """Digest of the texts in their order."""
        return files.digest_json([*self.texts])


class Target(Protocol):
    """A library's layout, as the module `to_NAME` gives it."""

    def write(self, source: Source, out: Path) -> None:
        """Writes all files into the empty folder `out`.

        Raises ValueError, in one line, where the library cannot hold the source or a package that
        writes the layout is missing.
        """

    def certify(self, source: Source, out: Path, material: Material) -> list[Certificate]:
        """Runs the files in `out` by each installed runtime beside the source, on the material;
        returns a certificate per runtime."""
