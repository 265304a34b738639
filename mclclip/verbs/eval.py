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
from mclclip.config.reading import map_texts
from mclclip.data.options import PlanConfig
from mclclip.data.training_images import Readable, TrainingImages, path_of
from mclclip.eval import results
from mclclip.eval.features import Extractor
from mclclip.eval.identity import data_digest, fields_of_rows, identity_of
from mclclip.eval.protocols import BenchmarkConfig, evaluator, reading_texts
from mclclip.eval.results import Reference, Result
from mclclip.models.encoder import Encoder, load_model
from mclclip.models.encoder_names import RANDOM, split_name
from mclclip.models.loading import has_texts, refuse_without_weights
from mclclip.ranks.collectives import on_main, raise_on_every_rank
from mclclip.ranks.process_group import SINGLE, Context, pick_device
from mclclip.run.artifacts import RunPaths, find_run_dir, is_finished
from mclclip.run.opened import Run, export_digest
from mclclip.util.files import digest_json
from mclclip.util.options import first_problem, prefix_errors, refuse_url, split_named_path
from mclclip.util.remake import Remake

log = logging.getLogger("mclclip")
SUITES = Path(results.__file__).resolve().parent / "suites"


Suite = tuple[dict[str, BenchmarkConfig], list[Reference]]
"""Benchmarks by name, and published figures that the table shows beside the measured ones."""


def load_suite(where: str, variables: Sequence[str] = ()) -> Suite:
    """Loads a shipped suite by its name, such as ``mcl``, or a YAML file.

    ``variables``, such as ``data=/data``, replace ``${data}`` in it; ``${folder}`` is the folder of
    the file. Raises FileNotFoundError for an unknown suite, and ValueError for a variable without a
    value and for a file that is no suite.
    """
    path = Path(where) if where.endswith((".yaml", ".yml")) else SUITES / f"{where}.yaml"
    if not path.is_file():
        shipped = ", ".join(sorted(file.stem for file in SUITES.glob("*.yaml")))
        raise FileNotFoundError(
            f"no suite {where!r}: give a YAML file, such as own.yaml, or one of {shipped}"
        )
    values = {"folder": str(path.absolute().parent)}
    if blank := [item for item in variables if not all(item.partition("=")[::2])]:
        raise ValueError(f"--set got {blank[0]!r}: wanted NAME=VALUE, such as data=/data")
    values |= dict(item.partition("=")[::2] for item in variables)
    used = set[str]()

    def fill(text: str) -> str:
        used.update(string.Template(text).get_identifiers())
        return string.Template(text).substitute(values)

    try:
        tree = map_texts(read_yaml(path), fill)
    except KeyError as error:
        name = error.args[0]
        raise ValueError(
            f"the suite asks for the variable {name!r}: set {name}=VALUE, "
            f"such as --set {name}=/data"
        ) from None
    except ValueError as error:
        hint = '; within braces, write "${NAME}/..." in quotes' * ("${" in path.read_text())
        raise ValueError(f"{error}{hint}") from None
    if unused := [name for name in values if name not in {*used, "folder"}]:
        raise ValueError(
            f"the suite {where} has no variable {unused[0]!r}, which --set sets: it has "
            f"{', '.join(sorted(used)) or 'none'}"
        )
    try:
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


def check(
    benchmarks: Mapping[str, BenchmarkConfig], models: Mapping[str, str | Path] | None = None
) -> None:
    """Checks the options of all benchmarks, then their data, before anything runs.

    Raises ValueError for a wrong option, for data that the evaluator's own check refuses, and for
    one of the ``models`` that lacks the text tower which a benchmark needs; FileNotFoundError for a
    missing folder or file.
    """
    check_options(benchmarks)
    for name, benchmark in benchmarks.items():
        refuse_url(benchmark.path, f"benchmark {name!r}: path")
    present = [name for name, benchmark in benchmarks.items() if Path(benchmark.path).is_dir()]
    if absent := [name for name in benchmarks if name not in present]:
        first = benchmarks[absent[0]]
        others = f"; nor for {', '.join(absent[1:])}" if absent[1:] else ""
        instead = f"; for the others: {' '.join(f'--only {n}' for n in present)}" if present else ""
        raise FileNotFoundError(
            f"benchmark {absent[0]!r}: no folder {first.path}{_needs(first)}{others}{instead}"
        )
    for name, benchmark in benchmarks.items():
        protocol, root = evaluator(benchmark.kind), Path(benchmark.path)
        with prefix_errors(f"benchmark {name!r}"):
            for option in sorted({*protocol.files} & benchmark.options.keys()):
                file = root / str(benchmark.options[option])
                if not file.exists():
                    raise FileNotFoundError(f"{option}: there is no {file}{_needs(benchmark)}")
            if protocol.check is not None:
                protocol.check(root, **benchmark.typed_options)
    reading = reading_texts(benchmarks)
    for model, where in (models or {}).items():
        if reading and not has_texts(split_name(where)[0]):
            raise ValueError(
                f"{model} ({where}) is an image encoder without a text tower, and {reading[0]} "
                "compares images with texts: evaluate it on others alone (--only)"
            )


def check_options(benchmarks: Mapping[str, BenchmarkConfig]) -> None:
    """Raises ValueError for options that an evaluator does not have or whose type is wrong."""
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
    """Says which data a benchmark needs and where to get them: the suite's ``source``, or else the
    words of its evaluator."""
    needs = evaluator(benchmark.kind).needs
    source = benchmark.source or (needs if isinstance(needs, str) else needs(**benchmark.options))
    return f": it wants {source}; nothing is downloaded"


# --- encoders in memory --------------------------------------------------------------------------


@dataclass
class _Watch:
    """Counts the images of a benchmark that are encoded (``judged``), and those of them that are
    also training images (``seen``). All ranks call it with the images that they encode.

    With a ``folder`` only images below it count. Raises ValueError for the first training images if
    the benchmark ``name`` decides a ``choice``, such as 'alpha': its figures would be too good.
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


@dataclass(frozen=True)
class SuiteJudge:
    """Measures encoders in memory on ``benchmarks``, whose options are checked (``check``).

    context     ranks and device; encoders must be on this device
    trained_on  training images; a row says how many of them its benchmark has
    choices     by the name of a benchmark what its figures choose, such as 'alpha'; then none of
                its images may be trained on
    settings    arguments of ``Extractor``, such as batch_size and precision
    """

    benchmarks: Mapping[str, BenchmarkConfig]
    context: Context = SINGLE
    trained_on: Sequence[TrainingImages] = ()
    choices: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    def measure(
        self,
        encoder: Encoder,
        path: Path,
        model_name: str,
        recorded: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> list[Result]:
        """Evaluates an encoder on every benchmark; returns its rows and adds them to ``path``.

        Each benchmark's rows are written when it is done, and replace earlier rows of the same
        model and benchmark. ``recorded`` has by benchmark what its rows record of what they depend
        on (``fields_of_rows``). All ranks call this; the first one writes.
        """
        extractor = Extractor(encoder, self.context, **self.settings)
        rows: list[Result] = []
        for name, benchmark in self.benchmarks.items():
            log.info("evaluate %s on %s", model_name, name)
            protocol, root = evaluator(benchmark.kind), Path(benchmark.path)
            folder = root / protocol.judged if protocol.judged else None
            watch = _Watch(name, folder, self.trained_on, self.choices.get(name))
            watched = replace(extractor, on_images=watch)
            figures = protocol.evaluate(watched, root, **benchmark.typed_options)
            more: dict[str, Any] = {}
            if watch.seen:
                note = results.trained_on(watch.seen, watch.judged)
                log.warning("benchmark %r: %s: figures are too good", name, note)
                more = {"training_images": watch.seen, "judged_images": watch.judged}
            if recorded:
                more |= {**recorded[name], "stage_dim": encoder.stage_dim}
            figures = [replace(f, protocol=f.protocol | more) for f in figures]
            rows += on_main(partial(results.record, path, figures, model_name, name))
        return rows


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
    """Returns a judge by retrieval on ``held_out``, a folder of shards with captions, and by the
    benchmarks of ``suite`` after it (those named in ``only``, if any).

    ``captions``: of the held-out shards, such as 'txt' or 'json:FIELD'. ``variables``: of the
    suite, such as 'data=/data'. ``models``: the ``[NAME=]PATH`` of the models that will be measured
    or mixed; if they lie in run directories, images that they were trained on are noticed.
    ``choice``: what the figures choose, such as 'alpha'. Raises the errors of ``load_suite`` and
    ``check``, and ValueError for options that need another.
    """
    benchmarks: dict[str, BenchmarkConfig] = {}
    if not suite and (variables or only) or held_out is None and captions != "txt":
        raise ValueError(
            "--set and --only are of --suite, and --captions is of --held-out: give that too, or "
            "leave them out"
        )
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
    check(benchmarks, dict(map(_split_name, models)))
    return SuiteJudge(benchmarks, context, trained_on, choices, {"batch_size": 256})


def _trained_on(models: Sequence[str | Path], config: Config | None = None) -> list[TrainingImages]:
    """Returns the training images of the run of ``config``, and of the runs in whose folders the
    models lie. If a run's configuration cannot be read, all images of its index count."""
    images = [] if config is None else [TrainingImages.of(config)]
    paths = [Path(str(model).removeprefix("local-dir:")) for model in models]
    runs = dict.fromkeys(run for path in paths if path.exists() and (run := find_run_dir(path)))
    for run_dir in runs:
        # An export that was copied together with the folders above it has no index.
        is_own_run = config is not None and run_dir == Path(config.run_dir).resolve()
        if is_own_run or not is_finished(RunPaths(run_dir).index):
            continue
        try:
            of_run = TrainingImages.of(replace(load(run_dir / "config.yaml"), run_dir=str(run_dir)))
        except (ValueError, OSError):  # config.yaml is damaged or gone
            of_run = TrainingImages(RunPaths(run_dir).index, {"": PlanConfig()})
        images.append(of_run)
    return [some for some in images if some is not None]


def _some_of(
    benchmarks: Mapping[str, BenchmarkConfig], only: Sequence[str]
) -> dict[str, BenchmarkConfig]:
    """Returns the benchmarks named in ``only``, or all if it is empty; ValueError for others."""
    if unknown := [name for name in only if name not in benchmarks]:
        raise ValueError(f"no benchmark {unknown[0]!r}: there are {', '.join(benchmarks)}")
    return {name: benchmark for name, benchmark in benchmarks.items() if not only or name in only}


def evaluate(
    config: Config,
    context: Context,
    models: Mapping[str, str | Path],
    *,
    benchmarks: Mapping[str, BenchmarkConfig] | None = None,
    path: Path | None = None,
    force: Remake = Remake.NOTHING,
    choices: Mapping[str, str] | None = None,
    widths: Sequence[int] = (),
) -> list[Result]:
    """Evaluates ``models`` and returns the new rows.

    ``models``: by name a directory, NAME@PRETRAINED of open_clip, or NAME@random for random
    weights. ``benchmarks``: default is ``eval.suite``. ``path``: where rows are kept (default: the
    run's results.jsonl). A benchmark is skipped if ``path`` has its rows for the same model files,
    options and precision, unless ``force`` is ``ALL``. ``SuiteJudge`` explains ``choices``. Every
    model is evaluated at each of the ``widths`` too, as ``NAME:WIDTH``, by the first so many
    numbers of its features; widths that its features do not exceed are left out.
    """
    benchmarks = config.eval.suite if benchmarks is None else benchmarks
    on_main(partial(check, benchmarks, models))
    path, precision = path or RunPaths.of(config).results, config.eval.precision
    settings: dict[str, Any] = {
        "batch_size": config.eval.batch_size,
        "precision": precision,
        "max_image_pixels": config.data.max_image_pixels,
        "num_workers": config.data.num_workers,
        "timeout_s": config.peer_timeout_s,
    }
    rows: list[Result] = []
    data = on_main(lambda: {title: data_digest(b) for title, b in benchmarks.items()})
    for name, where in models.items():
        location, pretrained = split_name(where)
        whole = on_main(partial(identity_of, location, pretrained))
        identities = {None: whole} | {width: digest_json([whole, width]) for width in widths}
        export = on_main(partial(export_digest, Path(str(location).removeprefix("local-dir:"))))
        record = partial(_fields_of, benchmarks, data, precision, export)
        recorded = {width: record(identity) for width, identity in identities.items()}
        earlier = [] if force is Remake.ALL else on_main(partial(results.read, path))
        pending = {
            w: _pending(benchmarks, earlier, name_at(name, w), recorded[w]) for w in identities
        }
        if benchmarks and not pending[None]:  # then the earlier rows are of this encoder
            rows_of_whole = (r for r in earlier if r.model == name and r.benchmark in benchmarks)
            pending = _up_to(next(rows_of_whole).protocol["stage_dim"], pending, name)
        if not any(pending.values()):
            if benchmarks:
                log.info("%s is evaluated already", name)
            continue
        encoder = raise_on_every_rank(
            partial(load_model, location, pretrained, device=str(context.device))
        )
        trained_on = on_main(partial(_trained_on, [location], config))
        pending = _up_to(encoder.stage_dim, pending, name)
        for width in [width for width, some in pending.items() if some]:
            measured = encoder if width is None else encoder.cut(width)
            judge = SuiteJudge(pending[width], context, trained_on, choices or {}, settings)
            rows += judge.measure(measured, path, name_at(name, width), recorded[width])
    return rows


def _fields_of(
    benchmarks: Mapping[str, BenchmarkConfig],
    data: Mapping[str, str],
    precision: str,
    export: str | None,
    identity: str,
) -> dict[str, dict[str, Any]]:
    """Returns by benchmark the ``fields_of_rows``, with the digest of the model's ``export``."""
    more = {} if export is None else {"export": export}
    return {
        title: fields_of_rows(benchmark, data[title], identity, precision) | more
        for title, benchmark in benchmarks.items()
    }


def name_at(name: str, width: int | None) -> str:
    """Returns the name of a model's rows at a width of its features, such as 'stage_1:64'."""
    return name if width is None else f"{name}:{width}"


def _up_to(
    dim: int, pending: Mapping[int | None, dict[str, BenchmarkConfig]], name: str
) -> dict[int | None, dict[str, BenchmarkConfig]]:
    """Returns those whose widths features of ``dim`` numbers exceed; warns of larger widths."""
    for width in (width for width in pending if width is not None and width > dim):
        log.warning("%s has features of %d numbers: no width %d of them", name, dim, width)
    return {width: some for width, some in pending.items() if width is None or width < dim}


def _pending(
    benchmarks: Mapping[str, BenchmarkConfig],
    earlier: Sequence[Result],
    name: str,
    recorded: Mapping[str, Mapping[str, Any]],
) -> dict[str, BenchmarkConfig]:
    """Returns the benchmarks of which ``earlier`` has no rows of the model that record the same."""
    own = [row for row in earlier if row.model == name]
    digests = {row.benchmark: row.protocol.get("evaluation") for row in own}
    return {
        title: benchmark
        for title, benchmark in benchmarks.items()
        if digests.get(title) != recorded[title]["evaluation"]
    }


def run(
    config: Config,
    context: Context,
    *,
    models: Sequence[str] = (),
    suite: str | None = None,
    variables: Sequence[str] = (),
    only: Sequence[str] = (),
    widths: Sequence[int] = (),
    details: bool = False,
    force: Remake = Remake.NOTHING,
) -> list[Result]:
    """Evaluates models given as ``[NAME=]PATH`` (default: all exports of the run), prints a table
    of their figures, and returns the new rows.

    ``suite``: a shipped suite or a YAML file instead of ``eval.suite``; ``variables``, such as
    'data=/data', say where its data are, and ``only`` names some of its benchmarks. ``widths`` are
    those of ``evaluate``, by default those that the run has trained. ``details`` shows further
    directions and optimistic figures too.
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
    widths = sorted({*widths} or config.widths)
    rows = evaluate(config, context, encoders, benchmarks=benchmarks, force=force, widths=widths)
    if context.is_main:
        names = {name_at(name, width) for name in encoders for width in (None, *widths)}
        shown = [row for row in results.read(RunPaths.of(config).results) if row.model in names]
        print(results.table(shown, references, details=details))
    return rows


def _split_name(text: str) -> tuple[str, str | Path]:
    """Splits ``NAME=PATH``; without NAME the path is the name.

    The name of a model with random weights ends with '(random weights)'. Raises ValueError for an
    architecture that is named without weights.
    """
    name, where = split_named_path(text)
    name = where if name is None else name
    location, pretrained = split_name(where)
    if pretrained is None:
        refuse_without_weights(location)  # now, before other models are evaluated for hours
    if pretrained == RANDOM:
        path = Path(location)  # of a shipped architecture: its name alone
        location = path.stem if path.suffix == ".json" and path.is_file() else location
        name = f"{location if name == where else name} (random weights)"
    return name, where
