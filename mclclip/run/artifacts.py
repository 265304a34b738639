"""The run directory, and the manifests of what is in it.

Verbs exchange data only through files. Each writes one artifact: a directory whose
``manifest.json`` is written last, by rename. A directory without a manifest is unfinished work, and
no verb reads it. The manifest holds size and SHA-256 of every file. A verb compares the sizes of
what it opens, and ``mclclip doctor RUN`` compares the bytes. ``bad_samples.json`` and
``shard_times.json`` change later and say for themselves what they depend on::

    runs/NAME/
      run.lock  run_state.json  config.yaml
      index/                    samples.arrow  shards.json  bad_samples.json  shard_times.json
                                manifest.json
      stage_0/  embeddings/     00000.npy  00000.json ...   two files per shard of the index
                text_embeddings/  edited_texts/8c1d.../
                image_rows/     00000.npy ... 00000.json ...
                clusters/       centroids.npy  cluster_labels.npy  similarities.npy
                train/          checkpoints/step_00000400/  metrics.jsonl  epochs.jsonl  profile/
                export/         open_clip_config.json  open_clip_model.safetensors
      stage_1/  pseudo_labels/  pseudo_labels.npy
                relocated/      00000.tar ...  locations.npy
                train/          grouped_index/  checkpoints/  metrics.jsonl
                export/  embeddings/  clusters/
      ...
      exports/  concat_raw/  concat_stage_norm/  soup_uniform/
      blindspots/stage_0-stage_2/  pairs.jsonl  near_duplicates.jsonl  weights.npy  gallery.png
                                   benchmark/
      filters/filter/           weights.npy  reasons.npy  scores.npy  left_out.jsonl
      controls/ungrouped/       stage_1/ ... exports/    the same layout again
      controls/random_groups/
                                outcomes/  verdict.json
      results.jsonl             outcomes/  report.html
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from mclclip import __version__
from mclclip.util import files
from mclclip.util.options import brief
from mclclip.util.remake import Remake

MANIFEST = "manifest.json"
INTENT = "in_progress.json"
# The verb that writes a kind of artifact, where the two have different names.
_WRITTEN_BY = {
    "embeddings": "embed",
    "text_embeddings": "embed --text",
    "image_rows": "embed --stage 0 --image-rows",
    "clusters": "cluster",
    "pseudo_labels": "cluster",
    "relocated": "relocate",
    "concat": "export",
    "soup": "export",
    "dataset": "make-dataset",
    "pairs": "make-pairs",
    "shards": "pack",
    "converted": "export --to",
}


# --- manifests -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Manifest:
    """Kind, options and inputs of an artifact; ``digest`` identifies its content."""

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
        """Compares the sizes of files of this artifact, by default of all that were recorded.

        Raises FileNotFoundError or RuntimeError for the first that is missing or has another size;
        they say which verb makes it again. A file that was not recorded is not compared.
        """
        again = f"run 'mclclip {verb_of(self.kind)} --force' to make it again"
        for name in names or self.records:
            if name in self.records:
                files.check_size(Path(directory) / name, self.records[name].size_bytes, again)


def read_manifest(directory: Path, kind: str) -> Manifest:
    """The manifest of the finished artifact in ``directory``.

    Raises FileNotFoundError where there is none (the verb did not run or did not finish) and
    ValueError where it is of another kind, or no manifest.
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
    """The manifest in a file, of any kind. Raises ValueError where it is none."""
    try:
        fields = files.read_json(path)
        records = {name: files.Record(**entry) for name, entry in fields["records"].items()}
        if not all(type(r.size_bytes) is int and type(r.sha256) is str for r in records.values()):
            raise TypeError("records hold a size and a SHA-256 for each file")
        if not isinstance(fields["kind"], str):
            raise TypeError("kind is a text")
        if not all(isinstance(fields[name], dict) for name in ("config", "inputs", "counts")):
            raise TypeError("config, inputs and counts are mappings")
        return Manifest(**(fields | {"records": records}))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{path} is not a manifest ({files.message_of(error)}): make it again with --force, or "
            f"remove {path.parent}"
        ) from error


def damage_of(directory: Path) -> str | None:
    """Describes the damage of a finished artifact: its manifest cannot be read, or a file has
    another size. None where there is none."""
    try:
        parse_manifest(directory / MANIFEST).check(directory)
    except (ValueError, OSError, RuntimeError) as error:
        return str(error)
    return None


def verb_of(kind: str) -> str:
    """The verb that writes artifacts of ``kind``."""
    return _WRITTEN_BY.get(kind, kind)


def is_finished(directory: Path) -> bool:
    """True where a manifest marks the artifact as complete."""
    return (Path(directory) / MANIFEST).exists()


def refuse_foreign(directory: Path, option: str) -> None:
    """Raises ValueError, naming the ``option`` that gave it, where a directory is a file, or holds
    files of which none says that an artifact is or was written there: they would be replaced, or
    mixed with it."""
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"{option} {directory} is a file: give a new folder")
    if directory.is_dir() and not made_of(directory) and any(directory.iterdir()):
        raise ValueError(
            f"{option} {directory} holds files that mclclip did not write: give a new folder"
        )


def made_of(directory: Path) -> dict[str, Any]:
    """Kind, config and inputs of a begun or finished artifact; empty where there is none."""
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
    """Nested mappings and lists as one mapping from dotted names to plain values."""
    if isinstance(value, Mapping):
        below = {f"{prefix}.{key}" if prefix else str(key): value[key] for key in value}
    elif isinstance(value, list):
        below = {f"{prefix}[{number}]": item for number, item in enumerate(value)}
    else:
        return {prefix: value}
    return {key: leaf for name, item in below.items() for key, leaf in _flatten(name, item).items()}


class _Absent:
    """Stands for the value of a field that is not there."""


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """The first field in which two nested mappings differ, with both values; None if equal."""
    flat = [_flatten("", files.as_json(fields)) for fields in (old, new)]
    for key in sorted(flat[0].keys() | flat[1].keys()):
        before, now = (fields.get(key, _Absent) for fields in flat)
        # The texts are compared too, because nan is not equal to itself.
        if before != now and repr(before) != repr(now):
            shown = ("not given" if value is _Absent else brief(value) for value in (before, now))
            return "{} was {}, now {}".format(key, *shown)
    return None


def _changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """Returns what differs between two records of ``Artifact``: an option with both values, or
    inputs by their names, since their digests tell nobody anything; None if they are equal."""
    if old["kind"] != new["kind"]:
        return f"was made as another kind: {brief(old['kind'])}, now {brief(new['kind'])}"
    if of_option := difference(old["config"], new["config"]):
        return f"was made with other settings: {of_option}"
    before, now = old["inputs"], new["inputs"]
    changes = {
        "more": sorted(now.keys() - before.keys()),
        "less": sorted(before.keys() - now.keys()),
        "changed": sorted(name for name in before.keys() & now.keys() if before[name] != now[name]),
    }
    parts = [_count_names(names, how) for how, names in changes.items() if names]
    return f"was made from other data: {', '.join(parts)}" if parts else None


def _count_names(names: Sequence[str], how: str) -> str:
    """``2 more (a.jpg, b.jpg)``; of many names the first three."""
    shown = ", ".join(files.printable(name) for name in names[:3]) + ", ..." * (len(names) > 3)
    return f"{len(names)} {how} ({shown})"


@dataclass
class Artifact:
    """One verb's output directory: finished (skip), partial (resume) or fresh (start)."""

    directory: Path
    kind: str
    config: dict[str, Any]
    inputs: dict[str, str]
    manifest: Manifest | None = None
    force: Remake = Remake.NOTHING

    @classmethod
    def open(
        cls,
        directory: Path,
        *,
        kind: str,
        config: Mapping[str, Any],
        inputs: Mapping[str, str],
        force: Remake = Remake.NOTHING,
        write: bool = True,
    ) -> Artifact:
        """Opens an artifact for writing, or finds it finished.

        ``config`` holds the configuration fields that change the result, ``inputs`` the digests of
        what it is made from. Where the directory was begun or finished with other values, raises
        ValueError naming the field and both values; ``force`` moves the old directory aside instead
        (``NAME.old-1``, see ``Remake``). A directory that was begun but holds no file yet is taken
        over without an error. Temporary files of a killed writer are removed. With ``write=False``
        nothing on disk is changed. Call it on one rank and send the result to the others.
        """
        directory = Path(directory)
        artifact = cls(directory, kind, dict(config), dict(inputs), force=force)
        finished = is_finished(directory)
        try:
            old = made_of(directory)
        except ValueError:  # a damaged manifest
            if force is Remake.NOTHING:
                raise
            old = {"kind": None, "config": {}, "inputs": {}}  # as no artifact is: it is moved aside
        if old:
            if write and not finished:
                for below in [directory, *filter(Path.is_dir, directory.rglob("*"))]:
                    files.remove_leftovers(below)
            changed = _changed(old, artifact._made_of())
            if changed is None and not (
                finished
                and (
                    force is Remake.ALL
                    or (force is Remake.UNFIT and damage_of(directory) is not None)
                )
            ):
                if finished:
                    artifact.manifest = read_manifest(directory, kind)
                return artifact
            inside = (path for path in directory.rglob("*") if not path.is_dir())
            holds_work = any(path != directory / INTENT for path in inside)
            if holds_work and force is Remake.NOTHING:
                raise ValueError(
                    f"{directory} {changed}. Use another output directory, or --force to "
                    "move the old one aside and make it again"
                )
            if holds_work and write:
                files.move_aside(directory)
        if write:
            directory.mkdir(parents=True, exist_ok=True)
            for path in directory.glob(f".{INTENT}.*.tmp"):  # of one killed while it wrote this
                path.unlink()
            files.write_json(directory / INTENT, artifact._made_of())
        return artifact

    def begin(self) -> Path:
        """Opens the directory for writing, as ``open`` does, and returns it. All ranks call it."""
        from mclclip.ranks import collectives  # seconds, for torch

        collectives.on_main(
            lambda: Artifact.open(
                self.directory, kind=self.kind, config=self.config, inputs=self.inputs,
                force=self.force,
            )
        )  # fmt: skip
        return self.directory

    def _made_of(self) -> dict[str, Any]:
        return {"kind": self.kind, "config": self.config, "inputs": self.inputs}

    @property
    def identity(self) -> str:
        """Digest of all that the result depends on."""
        return files.digest_json(self._made_of())

    def finish(
        self,
        counts: Mapping[str, Any],
        *,
        dtype: str | None = None,
        content_digest: str | None = None,
        records: Mapping[str, files.Record] | None = None,
    ) -> Manifest:
        """Writes the manifest, by rename, which marks the artifact as finished; returns it.

        ``content_digest`` identifies the content for readers. Its default is the digest of kind,
        configuration and inputs, which is enough where the content is a function of them.
        ``records`` of its files, by name, are what the files are compared with later.
        """
        self.manifest = Manifest(
            **self._made_of(),
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


def run_above(artifact: Path) -> Path | None:
    """The run directory that an artifact of a stage lies in, known by its index or its stage 0,
    since verbs that are called one by one leave no configuration there; None for one elsewhere."""
    for folder in artifact.resolve().parents[:4]:  # of a control it is the fourth
        if is_finished(RunPaths(folder).index) or is_finished(RunPaths(folder).export(0)):
            return folder
    return None


class HasRunDir(Protocol):
    """The one field of a configuration that ``RunPaths`` reads."""

    @property
    def run_dir(self) -> str:
        """The run directory."""


class RunPaths:
    """Paths of a run (drawn above).

    variant          ``mcl`` or the name of a control, which shares index, stage 0 and pseudo labels
                     with the run
    index            the sample index
    root             folder of the stages of this variant
    results          results.jsonl, one row per figure
    text_embeddings  text embeddings of the frozen text tower (stage 0's)
    image_rows       what the frozen blocks of stage 0's encoder make of every image
    """

    def __init__(self, run_dir: Path, variant: str = "mcl") -> None:
        self.run_dir, self.variant = run_dir, variant
        self.index = run_dir / "index"
        self.root = run_dir if variant == "mcl" else run_dir / "controls" / variant
        self.results = run_dir / "results.jsonl"
        self.text_embeddings = run_dir / "stage_0" / "text_embeddings"
        self.image_rows = run_dir / "stage_0" / "image_rows"

    @classmethod
    def of(cls, config: HasRunDir, variant: str = "mcl") -> RunPaths:
        """The layout of a configuration's run directory."""
        return cls(Path(config.run_dir), variant)

    def stage(self, stage: int) -> Path:
        """A stage's directory; stage 0 is shared by all variants."""
        return (self.run_dir if stage == 0 else self.root) / f"stage_{stage}"

    def embeddings(self, stage: int) -> Path:
        """Image embeddings of a stage."""
        return self.stage(stage) / "embeddings"

    def edited_texts(self, drawn_by: Sequence[object]) -> Path:
        """Text embeddings of edited captions by the frozen text tower; ``drawn_by`` decides which
        (``HardCaptions.drawn_by``)."""
        return self.run_dir / "stage_0" / "edited_texts" / files.digest_json([*drawn_by])[:12]

    def clusters(self, stage: int) -> Path:
        """k-means of ``stage``'s embeddings; ``pseudo_labels(stage)`` are what it is trained on."""
        return self.stage(stage) / "clusters"

    def pseudo_labels(self, stage: int) -> Path:
        """Labels that ``stage`` is trained on, made from the stages before; controls read MCL's."""
        return self.run_dir / f"stage_{stage}" / "pseudo_labels"

    def relocated(self, stage: int, folder: str | None) -> Path:
        """Copies of the samples in the order of a stage's groups; in a folder elsewhere below the
        run's name, since several runs may use it."""
        if folder is not None:
            return Path(folder).expanduser() / self.run_dir.resolve().name / f"stage_{stage}"
        return self.run_dir / f"stage_{stage}" / "relocated"

    def train(self, stage: int) -> Path:
        """A stage's training: checkpoints, metrics, grouped index."""
        return self.stage(stage) / "train"

    def export(self, stage: int) -> Path:
        """A stage's encoder as an open_clip directory."""
        return self.stage(stage) / "export"

    def joined(self, name: str) -> Path:
        """A joined encoder: ``concat_raw``, ``concat_stage_norm``, ``soup_uniform`` and so on."""
        return self.root / "exports" / name

    def model_name(self, name: str) -> str:
        """The name of a model in results.jsonl: ``stage_1``, ``control_ungrouped_stage_1``."""
        return name if self.variant == "mcl" else f"control_{self.variant}_{name}"
