"""The verb ``eval``: evaluates encoders on benchmarks and writes rows of results.jsonl.

A suite is a set of named benchmarks: the run's own (``eval.suite`` of the configuration), or a YAML
file (``suites/*.yaml``) with data folders as variables, and with published figures.
"""

from __future__ import annotations

import logging
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from mclclip.config import Config, load
from mclclip.config.plain_yaml import read_yaml
from mclclip.data.options import PlanConfig
from mclclip.data.training_images import Readable, TrainingImages, path_of
from mclclip.eval import results
from mclclip.eval.features import Extractor
from mclclip.eval.items import STRUCK
from mclclip.eval.prompts import naming_benchmark
from mclclip.eval.protocols import BenchmarkConfig, evaluator
from mclclip.eval.results import Reference, Result
from mclclip.models import transformers_folder
from mclclip.models.encoder import RANDOM, Encoder, load_model, split_name
from mclclip.models.loading import refuse_without_weights
from mclclip.ranks.collectives import on_main, raise_on_every_rank
from mclclip.ranks.process_group import SINGLE, Context, pick_device
from mclclip.run.artifacts import MANIFEST, RunPaths, is_finished, run_above
from mclclip.run.opened import Run
from mclclip.util.files import digest_file, digest_json
from mclclip.util.options import first_problem, refuse_url
from mclclip.util.remake import Remake

log = logging.getLogger("mclclip")

SUITES = Path(results.__file__).resolve().parent / "suites"


Suite = tuple[dict[str, BenchmarkConfig], list[Reference]]
"""Benchmarks by name, and published figures to print beside our own."""


def load_suite(where: str, variables: Sequence[str] = ()) -> Suite:
    """A suite that is shipped (by name, such as ``mcl``) or a YAML file.

    ``variables``, NAME=VALUE, replace ``${NAME}`` in it; ``${folder}`` is the file's own folder.
    FileNotFoundError for an unknown suite; ValueError for a variable without a value or a file that
    is no suite.
    """
    path = Path(where) if where.endswith((".yaml", ".yml")) else SUITES / f"{where}.yaml"
    if not path.is_file():
        shipped = ", ".join(sorted(file.stem for file in SUITES.glob("*.yaml")))
        raise FileNotFoundError(
            f"no suite {where!r}: give a YAML file, such as own.yaml, or one of {shipped}"
        )
    try:
        values = {"folder": str(path.absolute().parent)}
        values |= dict(item.partition("=")[::2] for item in variables)
        tree = _substitute(read_yaml(path), values)
        benchmarks = TypeAdapter(dict[str, BenchmarkConfig]).validate_python(tree["benchmarks"])
        references = results.published(tree)
    except ValidationError as error:
        raise ValueError(f"{path}: benchmark {': '.join(first_problem(error))}") from None
    except (KeyError, TypeError, AttributeError) as error:
        lacks = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(
            f"{path} is not a suite ({lacks}): wanted 'benchmarks:' and below it for each NAME its "
            "kind, path and options, such as 'pets: {kind: zeroshot, path: /data/pets}'"
        ) from None
    return benchmarks, references


def _substitute(value: Any, variables: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _substitute(item, variables) for key, item in value.items()}
    if isinstance(value, list):
        return [_substitute(item, variables) for item in value]
    if not isinstance(value, str):
        return value
    try:
        return string.Template(value).substitute(variables)
    except KeyError as error:
        name = error.args[0]
        raise ValueError(
            f"the suite asks for the variable {name!r}: set {name}=VALUE, "
            f"such as --set {name}=/data"
        ) from None


def check(benchmarks: Mapping[str, BenchmarkConfig]) -> None:
    """Raises, in one line and before anything runs, ValueError for a wrong option and for data that
    the evaluator's own check refuses, and FileNotFoundError for a folder or file that is missing.

    All options are checked first, then all folders.
    """
    check_options(benchmarks)
    for name, benchmark in benchmarks.items():
        refuse_url(benchmark.path, f"benchmark {name!r}: path")
    present = [name for name, benchmark in benchmarks.items() if Path(benchmark.path).is_dir()]
    if absent := [name for name in benchmarks if name not in present]:
        first = benchmarks[absent[0]]
        others = f"; {', '.join(absent[1:])} have none either" if absent[1:] else ""
        instead = f"; for the others: {' '.join(f'--only {n}' for n in present)}" if present else ""
        raise FileNotFoundError(
            f"benchmark {absent[0]!r}: no folder {first.path}{_needs(first)}{others}{instead}"
        )
    for name, benchmark in benchmarks.items():
        protocol, root = evaluator(benchmark.kind), Path(benchmark.path)
        for option in sorted({*protocol.files} & benchmark.options.keys()):
            file = root / str(benchmark.options[option])
            if not file.exists():
                raise FileNotFoundError(
                    f"benchmark {name!r}: {option}: there is no {file}{_needs(benchmark)}"
                )
        if protocol.check is not None:
            with naming_benchmark(name):
                protocol.check(root, **benchmark.options)


def check_options(benchmarks: Mapping[str, BenchmarkConfig]) -> None:
    """Raises ValueError for options that an evaluator does not have, or of another type."""
    for name, benchmark in benchmarks.items():
        model = evaluator(benchmark.kind).options
        try:
            model.model_validate(benchmark.options)
        except ValidationError as error:
            raise ValueError(
                f"benchmark {name!r}: option {': '.join(first_problem(error))}; options of "
                f"{benchmark.kind}: {', '.join(model.model_fields)}"
            ) from None


def _needs(benchmark: BenchmarkConfig) -> str:
    """Says which data a benchmark needs and where to get them, by the suite or else by its
    evaluator."""
    needs = evaluator(benchmark.kind).needs
    source = benchmark.source or (needs if isinstance(needs, str) else needs(**benchmark.options))
    return f": it wants {source}; nothing is downloaded"


# --- encoders in memory --------------------------------------------------------------------------


@dataclass
class _Watch:
    """Counts the images of a benchmark that are encoded (``judged``), and those of them that a run
    is trained on (``seen``).

    With a ``folder`` only images below it count. It is called with images on all ranks. If the
    benchmark ``name`` decides a ``choice``, it raises ValueError there for the first seen images.
    """

    name: str
    folder: Path | None
    trained_on: Sequence[TrainingImages]
    choice: str | None
    judged: int = 0
    seen: int = 0

    def __call__(self, images: Sequence[Readable]) -> None:
        folder = self.folder
        measured = [image for image in images if not folder or folder in path_of(image).parents]
        if not measured or not self.trained_on:
            return
        counts = on_main(lambda: [trained.count(measured) for trained in self.trained_on])
        self.seen, self.judged = self.seen + max(counts), self.judged + len(measured)
        if self.seen and self.choice:
            raise results.unfit_benchmark(self.name, self.seen, self.judged, self.choice)


def run_suite(
    encoder: Encoder,
    benchmarks: Mapping[str, BenchmarkConfig],
    results_path: Path,
    model_name: str,
    *,
    context: Context = SINGLE,
    identity: str = "",
    trained_on: Sequence[TrainingImages] = (),
    choices: Mapping[str, str] | None = None,
    **settings: Any,
) -> list[Result]:
    """Evaluates one encoder on every benchmark; returns its rows and adds them to the file.

    Rows of the same model and benchmark are replaced; each benchmark is written when it is done.
    ``identity`` (such as ``identity_of`` the model) lets a later call see that nothing changed. A
    row says how many of the images of its benchmark are among ``trained_on``. ``choices``: the name
    of a benchmark -> what is chosen by its figures, for which none of its images may be trained on.
    ``settings``: batch_size, precision, max_image_pixels, num_workers (see ``Extractor``). All
    ranks of ``context`` take part; the first one writes.
    """
    check(benchmarks)
    extractor = Extractor(encoder, context, **settings)
    rows: list[Result] = []
    for name, benchmark in benchmarks.items():
        log.info("evaluate %s on %s", model_name, name)
        protocol, root = evaluator(benchmark.kind), Path(benchmark.path)
        folder = root / protocol.judged if protocol.judged else None
        watch = _Watch(name, folder, trained_on, (choices or {}).get(name))
        watched = replace(extractor, on_images=watch)
        figures = protocol.evaluate(watched, root, **benchmark.options)
        more: dict[str, Any] = {}
        if watch.seen:
            note = results.trained_on(watch.seen, watch.judged)
            log.warning("benchmark %r: %s: figures are too good", name, note)
            more = {"training_images": watch.seen, "judged_images": watch.judged}
        if identity:
            more["evaluation"] = evaluation_digest(benchmark, identity, extractor.precision)
        figures = [replace(f, protocol=f.protocol | more) for f in figures]
        rows += on_main(partial(results.record, results_path, figures, model_name, name))
    return rows


@dataclass(frozen=True)
class SuiteJudge:
    """Benchmarks that encoders in memory are measured on, by a verb that makes encoders.

    ``benchmarks`` are checked before the first encoder is made. Encoders lie on the device of
    ``context``. ``trained_on``, ``choices``: see ``run_suite``.
    """

    benchmarks: Mapping[str, BenchmarkConfig]
    context: Context = SINGLE
    trained_on: Sequence[TrainingImages] = ()
    choices: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check(self.benchmarks)

    @property
    def read_texts(self) -> list[str]:
        """The benchmarks that compare images with texts."""
        return [name for name, b in self.benchmarks.items() if evaluator(b.kind).reads_text]

    def measure(self, encoder: Encoder, path: Path, model_name: str) -> list[Result]:
        """``run_suite`` of all benchmarks: the encoder's rows, which ``path`` then has too."""
        return run_suite(
            encoder,
            self.benchmarks,
            path,
            model_name,
            context=self.context,
            batch_size=256,
            trained_on=self.trained_on,
            choices=self.choices,
        )


def open_judge(
    *,
    held_out: Path | None = None,
    captions: str = "txt",
    suite: str | None = None,
    variables: Sequence[str] = (),
    only: Sequence[str] = (),
    device: str = "auto",
    models: Sequence[str] = (),
    choice: str = "",
) -> SuiteJudge:
    """The benchmark ``held_out``, which is retrieval on a folder of shards with captions, before
    those of a suite; see ``run`` for ``suite`` and ``only``. ``variables`` are NAME=VALUE.

    ``models``, as ``[NAME=]PATH``: those that the judge is for; where they lie in run directories,
    their training images are known. ``choice``: what is chosen by the benchmarks, if anything.
    Raises the errors of ``load_suite`` and ``check``.
    """
    benchmarks: dict[str, BenchmarkConfig] = {}
    if (variables or only) and not suite:
        raise ValueError("--set and --only are of --suite: give it, or leave them out")
    if captions != "txt" and held_out is None:
        raise ValueError("--captions is of --held-out: give it, or leave it out")
    if held_out is not None:
        if not any(Path(held_out).glob("*.tar")):
            raise FileNotFoundError(
                f"there is no shard in {held_out}: held-out pairs are *.tar files of images with "
                "captions; benchmarks of other layouts are given by a suite"
            )
        options = {"captions": ".", "shard_captions": captions}
        benchmarks["held_out"] = BenchmarkConfig("retrieval", str(held_out), options)
    if suite:
        of_suite = _some_of(load_suite(suite, variables)[0], only)
        if benchmarks.keys() & of_suite.keys():
            raise ValueError(
                f"the suite {suite} has a benchmark held_out, which is the name of --held-out: "
                "call it otherwise"
            )
        benchmarks |= of_suite
    trained_on = _trained_on([_split_name(text)[1] for text in models])
    choices = dict.fromkeys(benchmarks, choice) if choice else {}
    context = Context(device=pick_device(device))
    return SuiteJudge(benchmarks, context, trained_on=trained_on, choices=choices)


def _trained_on(models: Sequence[str | Path], config: Config | None = None) -> list[TrainingImages]:
    """The training images of a configured run, and of the runs in whose folders models lie; if the
    options of a run cannot be read, all images of its index."""
    images = [] if config is None else [TrainingImages.of(config)]
    paths = [Path(str(model).removeprefix("local-dir:")) for model in models]
    runs = dict.fromkeys(run for path in paths if path.exists() and (run := run_above(path)))
    for run_dir in runs:
        if not is_finished(RunPaths(run_dir).index):  # an export that was copied with its folders
            continue
        if config is not None and run_dir == Path(config.run_dir).resolve():
            continue
        try:
            of_run = TrainingImages.of(replace(load(run_dir / "config.yaml"), run_dir=str(run_dir)))
        except (ValueError, OSError):  # the run's configuration is damaged or gone
            of_run = TrainingImages(RunPaths(run_dir).index, {"": PlanConfig()})
        images.append(of_run)
    return [some for some in images if some is not None]


def _some_of(
    benchmarks: Mapping[str, BenchmarkConfig], only: Sequence[str]
) -> dict[str, BenchmarkConfig]:
    """The benchmarks of these names, all without any; ValueError for a name that is not there."""
    if unknown := [name for name in only if name not in benchmarks]:
        raise ValueError(f"no benchmark {unknown[0]!r}: there are {', '.join(benchmarks)}")
    return {name: benchmark for name, benchmark in benchmarks.items() if not only or name in only}


def evaluation_digest(benchmark: BenchmarkConfig, identity: str, precision: str) -> str:
    """Digest of everything that a row depends on; with an equal digest it is not made again.

    It includes the files of a benchmark that may change in place: the manifest of made pairs, and
    the list of items that a person has struck out.
    """
    parts = [benchmark.kind, benchmark.path, dict(benchmark.options), precision, identity]
    if benchmark.options.get("layout") == "pairs":
        changing = [Path(benchmark.path) / name for name in (MANIFEST, STRUCK)]
        parts += [digest_file(path) if path.is_file() else "" for path in changing]
    return digest_json(parts)[:16]


def identity_of(model: str | Path, pretrained: str | None = None) -> str:
    """Digest of a model's files, or of its name where it is no directory."""
    if str(model).startswith(transformers_folder.PREFIX):
        return transformers_folder.digest(str(model))
    directory = Path(str(model).removeprefix("local-dir:"))
    if not directory.is_dir():
        files = [Path(name) for name in (str(model), pretrained) if name]
        return digest_json([digest_file(f) if f.is_file() else str(f) for f in files])
    members = [p for p in directory.rglob("*") if p.suffix in (".json", ".safetensors")]
    # Manifests are left out, since they hold the time of writing.
    members = sorted(path for path in members if path.stem != "manifest")
    return digest_json([(path.relative_to(directory), digest_file(path)) for path in members])


def evaluate(
    config: Config,
    context: Context,
    models: Mapping[str, str | Path],
    *,
    benchmarks: Mapping[str, BenchmarkConfig] | None = None,
    path: Path | None = None,
    force: Remake = Remake.NOTHING,
    choices: Mapping[str, str] | None = None,
) -> list[Result]:
    """Evaluates models (name -> directory, NAME@PRETRAINED, or NAME@random for random weights).

    Benchmarks are those of ``eval.suite`` unless given. Those that ``path`` (default: the run's
    results.jsonl) already has for the same model files, options and precision are skipped, unless
    ``force``. ``choices``: see ``run_suite``. Returns the new rows.
    """
    benchmarks = config.eval.suite if benchmarks is None else benchmarks
    raise_on_every_rank(partial(check, benchmarks))
    path, precision = path or RunPaths.of(config).results, config.eval.precision
    rows: list[Result] = []
    for name, where in models.items():
        location, pretrained = split_name(where)
        identity = on_main(partial(identity_of, location, pretrained))
        earlier = [] if force is Remake.ALL else on_main(partial(results.read, path))
        digests = {
            row.benchmark: row.protocol.get("evaluation") for row in earlier if row.model == name
        }
        pending = {
            title: benchmark
            for title, benchmark in benchmarks.items()
            if digests.get(title) != evaluation_digest(benchmark, identity, precision)
        }
        if not pending:
            if benchmarks:
                log.info("%s is evaluated already", name)
            continue
        encoder = raise_on_every_rank(
            partial(load_model, location, pretrained, device=str(context.device))
        )
        rows += run_suite(
            encoder,
            pending,
            path,
            name,
            context=context,
            identity=identity,
            trained_on=on_main(partial(_trained_on, [location], config)),
            choices=choices,
            batch_size=config.eval.batch_size,
            precision=precision,
            max_image_pixels=config.data.max_image_pixels,
            num_workers=config.data.num_workers,
            timeout_s=config.peer_timeout_s,
        )
    return rows


def run(
    config: Config,
    context: Context,
    *,
    models: Sequence[str] = (),
    suite: str | None = None,
    variables: Sequence[str] = (),
    only: Sequence[str] = (),
    details: bool = False,
    force: Remake = Remake.NOTHING,
) -> list[Result]:
    """Evaluates models given as ``[NAME=]PATH`` (default: all exports of the run).

    ``suite``: a shipped suite or a YAML file instead of ``eval.suite``, with ``variables`` for its
    data folders; ``only``: some of its benchmarks. Logs the table, with details on request
    (``details``), and returns the new rows.
    """
    every, references = load_suite(suite, variables) if suite else (config.eval.suite, [])
    benchmarks = _some_of(every, only)
    if not benchmarks:
        raise ValueError(
            "there is nothing to evaluate on: set eval.suite or give a suite, such as "
            "--suite mcl --set data=/data"
        )
    encoders = dict(map(_split_name, models)) if models else Run.of(config).exports()
    if len(encoders) < len(models):
        raise ValueError("two models have one name: give each its own, as NAME=PATH")
    if not encoders:
        raise FileNotFoundError(
            f"{config.run_dir} has no exports: run 'mclclip export' first, or name a model, "
            "such as --model ViT-B-32@openai"
        )
    rows = evaluate(config, context, encoders, benchmarks=benchmarks, force=force)
    if context.is_main:
        shown = [row for row in results.read(RunPaths.of(config).results) if row.model in encoders]
        print(results.table(shown, references, details=details))
    return rows


def _split_name(text: str) -> tuple[str, str | Path]:
    """Splits ``NAME=PATH``; without a name the path is the name. The name of a model with random
    weights gets "(random weights)". Raises ValueError for an architecture without weights."""
    name, equals, where = text.partition("=")
    if not equals or Path(text).exists():
        name = where = text
    location, pretrained = split_name(where)
    if pretrained is None:
        refuse_without_weights(location)  # before another model is evaluated for an hour
    if pretrained == RANDOM:
        name = f"{location if name == where else name} (random weights)"
    return name, where
