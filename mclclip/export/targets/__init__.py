"""The seam of ``mclclip export --to NAME``: another library's layout is one module of this folder.

`names` lists them, `find` imports one. A target writes its layout into a folder, and compares what
it wrote with its source. `convert` does the rest: it finds the source, gives the target a temporary
folder, and moves the files to their place once every certificate holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Literal

from mclclip.data.text_rows import TextRows
from mclclip.export.certificate import Certificate, Probes
from mclclip.models import weights
from mclclip.models.encoder import Encoder, load_model
from mclclip.models.model import Model
from mclclip.models.narrow import narrow_encoder
from mclclip.run import artifacts
from mclclip.util import files, shipped

Precision = Literal["fp32", "fp16", "int8"]


@dataclass(frozen=True)
class Source:
    """The encoder that is converted.

    directory  an export (a stage, a soup, a concat); for clip_retrieval also a stage's embeddings
    precision  number format of the weights that are written
    width      how many numbers of the features are kept, the first ones; None: all
    """

    directory: Path
    precision: Precision = "fp32"
    width: int | None = None

    @cached_property
    def encoder(self) -> Encoder:
        """The encoder in the directory, on the CPU. Raises the errors of `load_model` and
        `narrow`."""
        whole = load_model(self.directory)
        return whole if self.width is None else narrow_encoder(whole, self.width)

    @property
    def is_concat(self) -> bool:
        """True if the directory holds several joined stages."""
        return (self.directory / weights.CONCAT).is_file()

    def single(self, library: str, *, rows: bool = False) -> Model:
        """Returns the encoder's only model.

        Raises ValueError, which names the `library`, for a concat, for a model without a text
        tower, and, without `rows`, for one that reads text rows.
        """
        if self.is_concat:
            raise ValueError(
                f"{self.directory} is a joined encoder, which {library} cannot hold: convert the "
                "soup or a stage"
            )
        model: Model = self.encoder.stages[0]
        if not model.reads_texts:
            raise ValueError(f"{self.directory} has no text tower, which {library} has")
        if not rows and isinstance(model.tokenizer, TextRows):
            raise ValueError(
                f"{self.directory} reads rows of another encoder in the place of texts, which "
                f"{library} cannot hold: convert it --to onnx"
            )
        return model

    @property
    def run_dir(self) -> Path | None:
        """The run directory that the export lies in; None for a folder elsewhere."""
        return artifacts.find_run_dir(self.directory)

    @property
    def name(self) -> str:
        """The encoder's name in the run, for example `stage_1` or `soup_uniform`."""
        path = self.directory.resolve()
        return path.parent.name if path.name in ("export", "embeddings") else path.name

    @property
    def digest(self) -> str:
        """Digest of weights and configuration, or of a run's embeddings.

        Raises FileNotFoundError if the directory holds neither.
        """
        if self.is_concat:
            described, tensors = weights.CONCAT, self.directory / weights.CONCAT_WEIGHTS
        elif weights.has_config(self.directory):
            alone = weights.is_image_encoder(self.directory)
            described = weights.IMAGE_CONFIG if alone else weights.CONFIG
            tensors = weights.find_weights(self.directory)
        else:
            return artifacts.read_manifest(self.directory, "embeddings").digest
        paths = (self.directory / described, tensors)
        return files.digest_json([files.digest_file(path) for path in paths])


@dataclass(frozen=True)
class ExportTarget:
    """How encoders are written for another library.

    write       ``write(source, out)`` writes all files into the empty folder ``out``. Raises
                ValueError, in one line, if the library cannot hold the source or a package that
                writes the layout is missing
    certify     ``certify(source, out, probes)`` runs the files in ``out`` by each installed runtime
                beside the source, on the probes; returns a certificate per runtime, of
                `certificate.compare`
    card        front matter of its model cards; ``pipeline_tag`` is for models that read texts
    is_model    True if it is made from an exported model, False if from a run's embeddings
    precisions  the number formats that it writes
    inputs      ``inputs(source)`` returns digests, by name, of what it reads beside the source
    usage       ``usage(source)`` returns how the export is loaded, for its card
    """

    write: Callable[[Source, Path], None]
    certify: Callable[[Source, Path, Probes], list[Certificate]]
    card: Mapping[str, str] = field(default_factory=dict)
    is_model: bool = True
    precisions: Sequence[Precision] = ("fp32",)
    inputs: Callable[[Source], dict[str, str]] = lambda _: {}
    usage: Callable[[Source], str] | None = None


def names() -> tuple[str, ...]:
    """Returns the names of all targets, which are those of the modules in this folder."""
    return shipped.plugins("export/targets")


def find(name: str) -> ExportTarget:
    """Imports a target, for example "onnx", which its module declares as ``TARGET``."""
    target: ExportTarget = import_module(f"{__name__}.{name}").TARGET
    return target
