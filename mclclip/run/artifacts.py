"""The run directory, and the manifests of what is in it.

Verbs exchange data only through files. Each writes one artifact: a directory whose
``manifest.json`` is written last, by rename. A directory without a manifest is unfinished work, and
no verb reads it; ``in_progress.json`` says there which options and inputs the work was begun with.
The manifest holds size and SHA-256 of the files that others read. A verb compares the sizes when it
opens an artifact, and ``mclclip doctor RUN`` compares the bytes. It does not list what may change
later: ``bad_samples.json``, ``shard_times.json``, and checkpoints, which list their own files::

    runs/NAME/
      run.lock  run_state.json  config.yaml
      index/                    samples.arrow  shards.json  bad_samples.json  manifest.json  ...
      stage_0/  embeddings/     00000.npy  00000.json ...   two files per shard of the index
                text_embeddings/  edited_texts/8c1d.../
                image_rows/     00000.npy ... 00000.json ...
                clusters/       centroids.npy  cluster_labels.npy  similarities.npy
                train/          grouped_index/  checkpoints/  evaluations/  metrics.jsonl  ...
                export/         open_clip_config.json  open_clip_model.safetensors
      stage_1/  pseudo_labels/  relocated/  train/  export/  embeddings/  clusters/
      ...
      teachers/ViT-L-14@openai/  export/  embeddings/  text_embeddings/
      exports/  concat_raw/  concat_stage_norm/  soup_uniform/
      blindspots/stage_0-stage_2/  filters/filter/  text_rows/  eval_text_rows/
      controls/ungrouped/       stage_1/ ... exports/    the same layout; random_groups/ likewise
      results.jsonl             outcomes/  report.html  verdict.md
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from mclclip import __version__
from mclclip.util import files
from mclclip.util.options import brief, first_few
from mclclip.util.remake import Remake

MANIFEST = "manifest.json"
INTENT = "in_progress.json"


class Kind(NamedTuple):
    """A kind of artifact: the verb that makes it, and where it lies.

    verb      the verb, such as ``embed --text``
    place     its path in a run directory or in a control's folder, as a regular expression
    by_flags  True if the verb needs flags that the run does not record
    """

    verb: str
    place: str = ""
    by_flags: bool = False


_ENCODER = r"(stage_\d+|teachers/[^/]+)"
KINDS = {
    "index": Kind("index", "index"),
    "text_rows": Kind("texts", "(eval_)?text_rows"),
    "embeddings": Kind("embed", f"{_ENCODER}/embeddings"),
    "text_embeddings": Kind("embed --text", f"{_ENCODER}/(text_embeddings|edited_texts/[^/]+)"),
    "image_rows": Kind("embed --stage 0", r"stage_\d+/image_rows"),
    "clusters": Kind("cluster", r"stage_\d+/clusters"),
    "pseudo_labels": Kind("cluster", r"stage_\d+/pseudo_labels"),
    "relocated": Kind("relocate", r"stage_\d+/relocated"),
    "train": Kind("train", r"stage_\d+/train"),
    "export": Kind("export", r"stage_\d+/export"),
    "teacher": Kind("embed --encoder", r"teachers/[^/]+/export", by_flags=True),
    "concat": Kind("export", r"exports/[^/]+"),
    "soup": Kind("export"),
    "filter": Kind("filter", r"filters/[^/]+", by_flags=True),
    "blindspots": Kind("blindspots", r"blindspots/[^/]+", by_flags=True),
    "finetune": Kind("finetune", "finetune", by_flags=True),
    "dataset": Kind("make-dataset", by_flags=True),
    "pairs": Kind("make-pairs", by_flags=True),
    "shards": Kind("pack", by_flags=True),
    "converted": Kind("export --to", by_flags=True),
}
"""Every kind of artifact, by the ``kind`` of its `Step`."""


# --- manifests -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Manifest:
    """The manifest.json of a finished artifact.

    kind             such as ``clusters``
    config           the options that the content depends on, nested
    inputs           digests of what the artifact was made from, such as ``{"index": "3f..."}``
    counts           figures for readers, such as ``{"samples": 1000}``
    digest           identifies the content
    dtype            number type of its rows, such as ``float16``; None if it has no rows
    package_version  version of mclclip that made it
    finished         time at which it was finished
    records          size and SHA-256 of its files, by name
    """

    kind: str
    config: dict[str, Any]
    inputs: dict[str, str]
    counts: dict[str, Any]
    digest: str
    dtype: str | None = None
    package_version: str = __version__
    finished: str = ""
    records: dict[str, files.Record] = field(default_factory=dict)

    def check(self, directory: Path, *names: str) -> None:
        """Compares the sizes of the files ``names`` in ``directory`` (default: all) with `records`.

        Raises FileNotFoundError for a missing file and RuntimeError for one of another size; the
        message says which verb makes the artifact again. Names without a record are ignored.
        """
        again = f"run 'mclclip {verb_of(self.kind)} --force' to make it again"
        for name in names or self.records:
            if name in self.records:
                files.check_size(Path(directory) / name, self.records[name].size_bytes, again)


def read_manifest(directory: Path, kind: str) -> Manifest:
    """Reads the manifest of the finished artifact in ``directory``, such as of kind ``clusters``.

    Raises FileNotFoundError if there is no manifest (the verb did not run or did not finish), and
    ValueError if the manifest is damaged or of another kind.
    """
    path = Path(directory) / MANIFEST
    if not path.exists():
        raise FileNotFoundError(
            f"no finished {kind} at {directory}: run 'mclclip {verb_of(kind)}' first"
        )
    manifest = parse_manifest(path)
    if manifest.kind != kind:
        raise ValueError(f"{directory} holds {brief(manifest.kind)}, expected {kind!r}")
    return manifest


def parse_manifest(path: Path) -> Manifest:
    """Reads the manifest file ``path``, of any kind. Raises ValueError if it is damaged."""
    try:
        fields = files.read_json(path)
        records = {name: files.Record(**entry) for name, entry in fields["records"].items()}
        types: list[tuple[Any, type]] = [(fields["kind"], str)]
        types += [(fields[name], dict) for name in ("config", "inputs", "counts")]
        types += [(record.size_bytes, int) for record in records.values()]
        types += [(record.sha256, str) for record in records.values()]
        for value, wanted_type in types:
            if type(value) is not wanted_type:
                raise TypeError(f"{brief(value)} is no {wanted_type.__name__}")
        return Manifest(**(fields | {"records": records}))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{path} is not a manifest ({files.message_of(error)}): make it again with --force, or "
            f"remove {path.parent}"
        ) from error


def find_damage(directory: Path) -> str | None:
    """Returns an error message if the manifest of a finished artifact cannot be read, or one of its
    files is missing or has another size than was recorded; else None."""
    try:
        parse_manifest(directory / MANIFEST).check(directory)
    except (ValueError, OSError, RuntimeError) as error:
        return str(error)
    return None


def verb_of(kind: str) -> str:
    """Returns the verb that writes artifacts of ``kind``: 'embed --text' for 'text_embeddings'."""
    return KINDS[kind].verb if kind in KINDS else kind


def is_finished(directory: Path) -> bool:
    """Returns True if ``directory`` has a manifest, so that its artifact is complete."""
    return (Path(directory) / MANIFEST).exists()


def refuse_foreign(directory: Path, option: str) -> None:
    """Raises ValueError if ``directory`` is a file, or holds files but neither manifest.json nor
    in_progress.json: an artifact written there would mix with a stranger's files or replace them.

    ``option``, such as ``--out``, is what the user gave the directory by, for the message.
    """
    if not directory.exists():
        return
    if not directory.is_dir():
        problem = "is a file"
    elif not read_identity(directory) and any(directory.iterdir()):
        problem = "holds files that mclclip did not write"
    else:
        return
    raise ValueError(f"{option} {directory} {problem}: give a new folder")


def read_identity(directory: Path) -> dict[str, Any]:
    """Returns ``{"kind", "config", "inputs"}`` of the artifact in ``directory``, finished or only
    begun; an empty mapping if there is none. Raises ValueError if its JSON file is damaged."""
    if is_finished(directory):
        manifest = parse_manifest(Path(directory) / MANIFEST)
        return {"kind": manifest.kind, "config": manifest.config, "inputs": manifest.inputs}
    path = Path(directory) / INTENT
    if not path.exists():
        return {}
    fields = files.read_json(path)
    try:
        return {key: fields[key] for key in ("kind", "config", "inputs")}
    except (TypeError, KeyError) as error:
        raise ValueError(f"{path} is damaged ({error!r}): remove {directory}") from error


def _flatten(prefix: str, value: Any) -> dict[str, Any]:
    """Flattens mappings and lists: ``{"a": {"b": [1]}}`` becomes ``{"a.b[0]": 1}``."""
    if isinstance(value, Mapping):
        below = {f"{prefix}.{key}" if prefix else str(key): value[key] for key in value}
    elif isinstance(value, list):
        below = {f"{prefix}[{number}]": item for number, item in enumerate(value)}
    else:
        return {prefix: value}
    return {key: leaf for name, item in below.items() for key, leaf in _flatten(name, item).items()}


class _Absent:
    """The value of a field that one of two compared mappings lacks; `None` is a value of JSON."""


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """Names the first field in which two nested mappings differ, with both values, for example
    'cluster.seed was 1, now 2'. Returns None if they are equal."""
    flat = [_flatten("", files.as_json(fields)) for fields in (old, new)]
    for key in sorted(flat[0].keys() | flat[1].keys()):
        before, now = (fields.get(key, _Absent) for fields in flat)
        # The texts are compared too, because nan is not equal to itself.
        if before != now and repr(before) != repr(now):
            shown = ("not given" if value is _Absent else brief(value) for value in (before, now))
            return "{} was {}, now {}".format(key, *shown)
    return None


def _describe_change(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """Says how two identities (see `read_identity`) differ; returns None if they are equal.

    The text names the first option that differs with both values. If only inputs differ, it names
    them without values, since a digest tells a user nothing.
    """
    if old["kind"] != new["kind"]:
        return f"was made as another kind: {brief(old['kind'])}, now {brief(new['kind'])}"
    if of_option := difference(old["config"], new["config"]):
        return f"was made with other settings: {of_option}"
    before, now = old["inputs"], new["inputs"]
    names = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    return f"was made from other data: {first_few(names, 3)}" if names else None


@dataclass
class Artifact:
    """The directory that a step writes, in one of three states: empty, begun, or finished.

    kind, config, inputs  its identity, see `Manifest`; another identity in the directory is refused
    manifest              the manifest if `compare` has found it finished, else None
    force                 what may be moved aside: finished ones too, as `Remake` says
    """

    directory: Path
    kind: str
    config: dict[str, Any]
    inputs: dict[str, str]
    manifest: Manifest | None = None
    force: Remake = Remake.NOTHING

    def compare(self, *, write: bool = False) -> Artifact:
        """Compares the directory with the identity; returns this artifact, which then has a
        ``manifest`` if the directory holds a finished artifact of this identity.

        If the directory holds work of another identity, raises ValueError with the first field that
        differs and both values, unless ``force`` allows to move it aside. With ``write`` it does
        that, to ``NAME.old-1``, removes the temporary files of a killed writer, and writes the
        identity to in_progress.json; begun work of this identity stays, to be resumed.

        Touches the disk: call it on one rank and send the result to the others (`begin` does).
        """
        directory, force = self.directory, self.force
        finished = is_finished(directory)
        try:
            old = read_identity(directory)
        except ValueError:  # its manifest is damaged
            if force is Remake.NOTHING:
                raise
            old = {"kind": None, "config": {}, "inputs": {}}  # differs from every identity
        if old:
            if write and not finished:
                for below in [directory, *filter(Path.is_dir, directory.rglob("*"))]:
                    files.remove_leftovers(below)
            change = _describe_change(old, self._identity_fields())
            damaged = force is Remake.UNFIT and find_damage(directory) is not None
            remake = change is not None or (finished and (force is Remake.ALL or damaged))
            if not remake:
                if finished:
                    self.manifest = read_manifest(directory, self.kind)
                return self
            paths = (path for path in directory.rglob("*") if not path.is_dir())
            holds_work = any(path != directory / INTENT for path in paths)
            if holds_work and force is Remake.NOTHING:
                raise ValueError(
                    f"{directory} {change}. Use another output directory, or --force to "
                    "move the old one aside and make it again"
                )
            if holds_work and write:
                files.move_aside(directory)
        if write:
            directory.mkdir(parents=True, exist_ok=True)
            for path in directory.glob(f".{INTENT}.*.tmp"):  # left by a killed writer of this file
                path.unlink()
            files.write_json(directory / INTENT, self._identity_fields())
        return self

    def begin(self) -> Path:
        """Makes the directory ready for writing and returns it; all ranks call it together.

        Before this call nothing on disk has changed. Rank 0 calls `compare` with ``write``.
        """
        from mclclip.ranks import collectives  # seconds, for torch

        collectives.on_main(lambda: self.compare(write=True))
        return self.directory

    def _identity_fields(self) -> dict[str, Any]:
        return {"kind": self.kind, "config": self.config, "inputs": self.inputs}

    @property
    def identity(self) -> str:
        """Digest of kind, config and inputs, which are all that the content depends on."""
        return files.digest_json(self._identity_fields())

    def finish(
        self,
        counts: Mapping[str, Any],
        *,
        dtype: str | None = None,
        content_digest: str | None = None,
        records: Mapping[str, files.Record] | None = None,
    ) -> Manifest:
        """Writes the manifest by rename, which marks the artifact as finished, and returns it.

        Call it on one rank, after the last file is written. ``counts``, ``dtype`` and ``records``
        are stored as they are (see `Manifest`). ``content_digest`` is stored as the manifest's
        ``digest``; its default is `identity`, which is right if equal options and inputs always
        give equal content.
        """
        self.manifest = Manifest(
            **self._identity_fields(),
            counts=dict(counts),
            digest=content_digest or self.identity,
            dtype=dtype,
            finished=files.now(),
            records=dict(records or {}),
        )
        files.write_json(self.directory / MANIFEST, dataclasses.asdict(self.manifest))
        (self.directory / INTENT).unlink(missing_ok=True)
        return self.manifest


# --- paths ----------------------------------------------------------------------------------------


def find_run_dir(artifact: Path) -> Path | None:
    """Returns the run directory above an artifact: ``runs/a`` for ``runs/a/stage_1/embeddings``.

    None if it lies in no run. A finished index or stage 0 makes a run; not all have a config.yaml.
    """
    for folder in artifact.resolve().parents[:4]:  # RUN/controls/NAME/stage_1/export has four
        if is_finished(RunPaths(folder).index) or is_finished(RunPaths(folder).export(0)):
            return folder
    return None


class HasRunDir(Protocol):
    """A configuration with the one field that `RunPaths` reads."""

    @property
    def run_dir(self) -> str:
        """The run directory."""


class RunPaths:
    """The paths in a run directory; the module's docstring draws them.

    variant          ``mcl``, or the name of a control such as ``ungrouped``. A control shares
                     index, stage 0 and pseudo labels with its run
    index, text_rows the sample index, and copies of ``model.text_rows``
    root             folder of this variant's stages: the run directory, or the control's folder
    text_embeddings  caption embeddings by stage 0's text tower, for trainings that freeze it
    image_rows       outputs of stage 0's frozen image blocks, a row per sample
    """

    def __init__(self, run_dir: Path, variant: str = "mcl") -> None:
        self.run_dir, self.variant = run_dir, variant
        self.index, self.text_rows = run_dir / "index", run_dir / "text_rows"
        self.root = run_dir if variant == "mcl" else run_dir / "controls" / variant
        self.results = run_dir / "results.jsonl"
        self.text_embeddings = run_dir / "stage_0" / "text_embeddings"
        self.image_rows = run_dir / "stage_0" / "image_rows"

    @classmethod
    def of(cls, config: HasRunDir, variant: str = "mcl") -> RunPaths:
        """Returns the paths of the run directory that ``config`` names."""
        return cls(Path(config.run_dir), variant)

    def stage(self, stage: int) -> Path:
        """The folder of a stage; all variants share that of stage 0."""
        return (self.run_dir if stage == 0 else self.root) / f"stage_{stage}"

    def encoder(self, name: str | None) -> Path:
        """The folder with a teacher's export and embeddings; of None that of stage 0."""
        if name is None:
            return self.run_dir / "stage_0"
        mark = f"-{files.digest_json(name)[:6]}" if "/" in name else ""  # a_b is not a/b
        return self.run_dir / "teachers" / f"{name.replace('/', '_')[-100:]}{mark}"

    def embeddings(self, stage: int) -> Path:
        """Image embeddings of a stage."""
        return self.stage(stage) / "embeddings"

    def edited_texts(self, drawn_by: Sequence[object]) -> Path:
        """Embeddings of edited captions by stage 0's text tower. ``drawn_by`` holds all that the
        edits depend on (``HardCaptions.drawn_by``); its digest names the folder."""
        return self.run_dir / "stage_0" / "edited_texts" / files.digest_json([*drawn_by])[:12]

    def clusters(self, stage: int) -> Path:
        """k-means clusters of the stage's own embeddings."""
        return self.stage(stage) / "clusters"

    def pseudo_labels(self, stage: int) -> Path:
        """Labels that the stage is trained on: the clusters of all stages before it, combined.
        Controls read those of ``mcl``."""
        return self.run_dir / f"stage_{stage}" / "pseudo_labels"

    def relocated(self, stage: int, folder: str | None) -> Path:
        """Copies of the samples in the order of the stage's groups.

        ``folder`` is the option ``relocate.folder``; the copies lie in FOLDER/RUN-1f2e3d/stage_1
        there, since several runs may use one folder: the run's name and a digest of its whole path,
        without which the runs of a race would share a name. None: they lie in the run directory.
        """
        if folder is not None:
            whole = self.run_dir.resolve()
            name = f"{whole.name}-{files.digest_json(str(whole))[:6]}"
            return Path(folder).expanduser() / name / f"stage_{stage}"
        return self.run_dir / f"stage_{stage}" / "relocated"

    def train(self, stage: int) -> Path:
        """A stage's training: checkpoints, metrics, grouped index."""
        return self.stage(stage) / "train"

    def export(self, stage: int) -> Path:
        """A stage's encoder as an open_clip directory."""
        return self.stage(stage) / "export"

    def joined(self, name: str) -> Path:
        """An encoder joined from the stages, such as ``concat_raw`` or ``soup_uniform``."""
        return self.root / "exports" / name

    def model_name(self, name: str) -> str:
        """The name in results.jsonl of the model ``name``, such as ``stage_1``; for the control
        ``ungrouped`` it is ``control_ungrouped_stage_1``."""
        return name if self.variant == "mcl" else f"control_{self.variant}_{name}"
