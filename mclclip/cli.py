"""The command line: one sub-command per verb, lazy imports, no logic.

Exit codes: see ``process``.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from mclclip import __version__, process
from mclclip.data import datasets

if TYPE_CHECKING:
    from mclclip.config import Config
    from mclclip.ranks.process_group import Context

_VARIANTS = ["mcl", "ungrouped", "random_groups", "pilot", "pilot_ungrouped"]
# Parsed names that are not arguments of the function that a verb calls.
_COMMON = {"verb", "debug", "config", "overrides", "function", "standalone", "trunk_cache"}
# Flags of export to another library's layout.
_CONVERSION = ("to", "model", "out", "images", "texts", "precision", "push", "public")
# Flags of soup that say what soups are measured on.
_JUDGED = ("held_out", "captions", "suite", "variables", "only", "device")
_SEVERAL: dict[str, Any] = {"action": "append", "default": []}
_FORCE = "make again, and move the old aside"
_REMAKE = "make it again, and move aside what is there; what was begun is resumed"
_VARIABLE = "variable of the suite, such as data=FOLDER"


def _flags(args: argparse.Namespace) -> dict[str, Any]:
    """The flags of a verb by name, which are the arguments of its function."""
    others = _COMMON | ({*_CONVERSION} if args.verb == "export" else set())
    return {name: value for name, value in vars(args).items() if name not in others}


# --- functions of verbs: of (args), or of (config, context, args) where a configuration is read --


def _function(path: str) -> Callable[..., object]:
    """Returns a function that imports and calls ``mclclip.PATH``, with the flags by name."""
    module, _, name = path.rpartition(".")

    def call(*given: Any) -> object:
        *opened, args = given
        return getattr(import_module(f"mclclip.{module}"), name)(*opened, **_flags(args))

    return call


def _export(config: Config, context: Context, args: argparse.Namespace) -> object:
    from mclclip import export

    if args.stage is None:
        return export.join(config, context, variant=args.variant, force=args.force)
    return export.stage(config, context, **_flags(args))


def _eval(config: Config, context: Context, args: argparse.Namespace) -> object:
    from mclclip.eval import run as evaluation

    variables = dict(item.partition("=")[::2] for item in args.variables)
    return evaluation.run(config, context, **_flags(args) | {"variables": variables})


def _run(config: Config, context: Context, args: argparse.Namespace) -> object:
    from mclclip import pilot, pipeline
    from mclclip.eval import results

    run_dir = pipeline.run(config, context, force=args.force)
    if context.is_main and (rows := results.read(run_dir / "results.jsonl")):
        print(results.table(rows))
    reason = pilot.reason_to_stop(config) if context.is_main else None
    if reason is not None:
        print(f"\n{reason}")
    return run_dir if reason is None else process.Ended(reason)


def _convert(args: argparse.Namespace) -> object:
    from mclclip.export import convert

    given = {name: getattr(args, name) for name in _CONVERSION}
    return convert.run(**given, force=args.force)


def _soup(args: argparse.Namespace) -> object:
    from mclclip.eval import run as evaluation
    from mclclip.export import soups

    given = _flags(args)
    judged = {name: given.pop(name) for name in _JUDGED}
    choice = soups.chosen(given["method"], given["alpha"])
    judge = evaluation.judge(**judged, models=given["models"], choice=choice)
    return soups.run(**given, judge=judge)


def _demo(args: argparse.Namespace) -> object:
    from mclclip import demo

    # argparse gives --seeds every word that follows it, overrides too.
    seeds = [word for word in args.seeds if "=" not in word]
    overrides = [word for word in args.seeds if "=" in word] + args.overrides
    if not all(seed.isdigit() for seed in seeds):
        raise ValueError(f"--seeds got {' '.join(seeds)}: wanted numbers from 0 on")
    return demo.run(
        Path(args.out or ("runs/demo_short" if args.short else "runs/demo")),
        seeds=[int(seed) for seed in seeds],
        regimes=demo.REGIMES if args.text == "all" else (args.text,),
        overrides=overrides,
        short=args.short,
    )


def _report(args: argparse.Namespace) -> object:
    from mclclip import report

    folder = args.run_dir and args.run_dir.removeprefix("run_dir=")  # as other verbs name it
    return report.run(folder, config=args.config, out=args.out)


def _config(args: argparse.Namespace) -> object:
    from mclclip import config
    from mclclip.eval import prompts

    options = config.load(args.config, args.overrides)
    prompts.check_suite(options.eval.suite)
    if args.plan:
        from mclclip import plan

        machine = plan.Machine.described(args.nodes, args.gpus_per_node, args.gpu_memory_gib)
        speed = plan.Speed(args.peak_tflops, args.share, args.samples_per_s, args.images_per_s)
        plan.run(options, machine, samples=args.samples, as_json=args.json, speed=speed)
    else:
        print(config.dump(options), end="")
    return None


# --- parser ------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """A parser that also records its errors for the launcher; sub-parsers have this class too."""

    def error(self, message: str) -> NoReturn:
        process.record_mistake(message)
        super().error(message)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Names the nearest choices too; Python 3.14 does so itself."""
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            from mclclip.options import nearest

            near = nearest(str(value), map(str, action.choices or ()))
            error.message += f", nearest: {', '.join(near)}"
            raise


def build_parser() -> argparse.ArgumentParser:
    """The parser of ``mclclip``; needs neither torch nor a configuration."""
    parser = _Parser(
        prog="mclclip",
        description="Fine-tune CLIP at scale so that it sees what it was blind to.",
        epilog="Exit codes: 0 done, 1 internal error, 2 user mistake (one line), "
        "85 pre-empted (run it again), 130 interrupted.",
    )
    parser.add_argument("--version", action="version", version=f"mclclip {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for add in (
        *(_add_pack, _add_make_dataset, _add_soup, _add_compare, _add_report, _add_demo),
        *(_add_checks, _add_stages, _add_figures, _add_blindspots, _add_filter, _add_run),
    ):
        add(verbs)
    return parser


def _add(
    verbs: Any, name: str, function: Callable[..., object], text: str, force: str | None = None
) -> argparse.ArgumentParser:
    """The parser of a new verb; with ``force``, what --force does, the verb reads a configuration.

    Its flags are the arguments of ``function``, in whose module their defaults and units stand.
    """
    verb: argparse.ArgumentParser = verbs.add_parser(name, help=text, description=text)
    verb.set_defaults(function=function, standalone=force is None)
    verb.add_argument("--debug", action="store_true", help="show tracebacks")
    if force is not None:
        _add_config_options(verb)
        verb.add_argument("--force", action="store_true", help=force)
    return verb


def _add_config_options(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--config", metavar="FILE", help="YAML, or a shipped recipe's name")
    verb.add_argument("overrides", nargs="*", metavar="key.path=value")


# --- flags of verbs that stand alone -----------------------------------------------------------


def _add_pack(verbs: Any) -> None:
    text = "images + CSV/TSV -> WebDataset shards in img2dataset's layout"
    add = _add(verbs, "pack", _function("pack.pack"), text).add_argument
    add("--table", type=Path, required=True, help="CSV or TSV with a header")
    add("--images", type=Path, required=True, help="folder the paths start from")
    root = "another folder in which images may lie, such as the one that a link leads to"
    add("--allow-root", dest="allow_roots", metavar="FOLDER", type=Path, help=root, **_SEVERAL)
    add("--out", type=Path, required=True, help="folder for the shards")
    add("--path-column", default="filepath")
    add("--caption-column", help="default: title, or no captions without that column")
    add("--samples-per-shard", type=int, default=10_000)
    add("--delimiter", default=None, help="default: by suffix (.tsv: tab)")
    add("--key-prefix", default="", help="put before the running number of a key")
    add("--force", action="store_true", help=_FORCE)


def _add_make_dataset(verbs: Any) -> None:
    text = "a built-in or published data set -> shards"
    verb = _add(verbs, "make-dataset", _function("make_dataset.run"), text)
    add = verb.add_argument
    add("name", choices=["patterns", *datasets.NAMES])
    add("--out", type=Path, required=True)
    add("--seed", type=int, default=0)
    add("--force", action="store_true", help=_FORCE)
    title = "options of some data sets (default: those of the data set)"
    add = verb.add_argument_group(title).add_argument
    add("--source", action="append", metavar="NAME=FOLDER", help="where files are")
    download = "let torchvision fill the folders of --source first"
    add("--download", action="store_true", default=None, help=download)
    add("--size", type=int, help="stored pixels (of files: of the shorter side)")
    add("--samples-per-shard", type=int)
    add("--test-share", type=float, help="trifeature, folder: drawn for testing")
    add("--images-per-combination", type=int, help="trifeature")
    add("--texture-period", type=float, help="trifeature: pixels of its canvas")
    add("--copies", type=int, help="stl_digits: digits on a picture")
    add("--subset", help="imagenet_subset: in1p, or a file of WordNet ids")
    add("--num-train", type=int, help="attributed_patterns")
    add("--num-test", type=int, help="attributed_patterns")
    add("--full-captions", action="store_true", default=None, help="patterns: name every attribute")


def _add_soup(verbs: Any) -> None:
    text = "exported models of one base -> one model, an average of weights"
    verb = _add(verbs, "soup", _soup, text)
    add = verb.add_argument
    methods = "equal shares; models that do not lower the score, the best first; the line between "
    add("method", choices=["uniform", "greedy", "wise"], help=f"{methods}two")
    model = "an export, a soup, or an open_clip directory with safetensors; twice or more"
    add("--model", dest="models", metavar="[NAME=]FOLDER", required=True, help=model, **_SEVERAL)
    add("--out", type=Path, required=True, metavar="FOLDER", help="folder to write")
    images = "training images (shards or files), to estimate batch norms on that differ"
    add("--images", type=Path, metavar="FOLDER", help=images)
    base = "models do not record one base, but are known to have one"
    add("--any-base", action="store_true", help=base)
    add("--force", action="store_true", help=_FORCE)
    add = verb.add_argument_group("score").add_argument
    held_out = "shards with captions; the score is retrieval on them, the mean of both R@1"
    add("--held-out", type=Path, metavar="FOLDER", help=held_out)
    add("--captions", default="txt", help="of --held-out: txt (default) or json:FIELD")
    add("--suite", help="benchmarks beside it: a shipped suite or a YAML file")
    add("--set", dest="variables", metavar="NAME=VALUE", help=_VARIABLE, **_SEVERAL)
    add("--only", metavar="BENCHMARK", help="some of the suite", **_SEVERAL)
    metric = "what decides, the mean of several (default: the main ones of the first benchmark)"
    add("--metric", dest="metrics", metavar="BENCHMARK/METRIC", help=metric, **_SEVERAL)
    add("--device", default="auto", choices=["auto", "cpu", "cuda"])
    add = verb.add_argument_group("wise").add_argument
    alpha = "share of the second model; without it the one with the best score is written"
    add("--alpha", type=float, help=alpha)
    places = "where the line is measured (default: 0, 0.1 ... 1)"
    add("--alphas", type=float, nargs="+", metavar="ALPHA", help=places)


def _add_compare(verbs: Any) -> None:
    text = "results of several encoders -> is one really better"
    add = _add(verbs, "compare", _function("compare.run"), text).add_argument
    add("runs", nargs="+", type=Path, metavar="RUN_DIR", help="with results.jsonl")
    model = "a name in results.jsonl, with several runs as RUN:NAME (default: all)"
    add("--model", dest="models", metavar="NAME", help=model, **_SEVERAL)
    add("--against", metavar="NAME", help="default: stage_0, or the first model")
    add("--benchmark", dest="benchmarks", metavar="NAME", help="default: all", **_SEVERAL)
    metric = "default: the main ones of each benchmark"
    add("--metric", dest="metrics", metavar="NAME", help=metric, **_SEVERAL)
    add("--format", default="text", choices=["text", "csv", "markdown", "latex"])
    add("--out", type=Path, metavar="FILE", help="default: the standard output")


def _add_report(verbs: Any) -> None:
    text = "what a run left -> one page to look at, run_dir/report.html"
    add = _add(verbs, "report", _report, text).add_argument
    add("run_dir", nargs="?", metavar="RUN_DIR", help="default: of --config")
    recorded = "YAML, or a shipped recipe's name (default: what the run recorded)"
    add("--config", metavar="FILE", help=recorded)
    add("--out", type=Path, metavar="FILE", help="default: report.html of the run")


def _add_demo(verbs: Any) -> None:
    add = _add(verbs, "demo", _demo, "the whole method on built-in data, on a laptop").add_argument
    add("--out", help="run directory (one below it per seed; default: runs/demo)")
    short = "every verb in seconds, to check an installation (default of --out: runs/demo_short)"
    add("--short", action="store_true", help=short)
    add("--seeds", nargs="+", default=["3"], help="more than one: a sweep")
    text = "text tower: trained in every stage; frozen after stage 0; frozen, and trained before "
    text += "on captions that name every attribute; or all three compared"
    add("--text", default="trained", choices=["trained", "ignorant", "knowing", "all"], help=text)
    add("overrides", nargs="*", metavar="key.path=value")


def _add_checks(verbs: Any) -> None:
    """Of the machine and of a configuration."""
    text = "versions, devices, disk and file-system checks"
    verb = _add(verbs, "doctor", _function("doctor.run"), text)
    verb.add_argument("--path", type=Path, default=".", help="where runs will be written")
    text = "check a configuration and print it resolved, or its plan"
    verb = _add(verbs, "config", _config, text)
    _add_config_options(verb)
    plan = "what the run will do and need; uses no GPU"
    add = verb.add_argument_group("plan", plan).add_argument
    add("--plan", action="store_true", help="print steps, memory, hours and disk")
    add("--nodes", type=int, metavar="N", help="default 1")
    gpus = "default 1; with this or --nodes a too small disk here is a warning"
    add("--gpus-per-node", type=int, metavar="G", help=gpus)
    add("--gpu-memory-gib", type=float, metavar="M", help="refuse what needs more")
    add("--samples", type=int, metavar="N", help="used where there is no index yet")
    add("--json", action="store_true", help="sizes in bytes")
    peak = "of a GPU in bf16, dense (default 312, an A100; fp32 is a sixteenth of it)"
    add("--peak-tflops", type=float, metavar="P", help=peak)
    share = "of that peak which training and embedding reach (default 0.3)"
    add("--share", type=float, metavar="F", help=share)
    rate = "measured in training on one GPU; used for its hours instead of peak and share"
    add("--samples-per-s", type=float, metavar="S", help=rate)
    images = "measured in embedding on one GPU, likewise"
    add("--images-per-s", type=float, metavar="S", help=images)


# --- flags of verbs that read a configuration ----------------------------------------------------


def _add_stages(verbs: Any) -> None:
    """The verbs of a stage, from shards to exported models."""

    def verb(name: str, function: Callable[..., object], text: str) -> argparse.ArgumentParser:
        return _add(verbs, name, function, text, _REMAKE)

    verb("index", _function("index.run"), "tar shards -> sample index")
    add = verb("embed", _function("embed.run"), "index + encoder -> embeddings").add_argument
    add("--stage", type=int, required=True)
    text = "captions too, also where the text tower is trained"
    add("--text", action="store_true", default=None, help=text)
    cache = "from what the frozen blocks make of every image, which stage 0 writes first (the same "
    cache += "as trunk_cache.enabled=true, which later verbs need too)"
    add("--trunk-cache", action="store_true", help=cache)
    text = "embeddings -> cluster labels and pseudo labels"
    add = verb("cluster", _function("cluster.run"), text).add_argument
    add("--stage", type=int, required=True)
    text = "samples + pseudo labels -> shards in the order of the groups"
    add = verb("reshard", _function("reshard.run"), text).add_argument
    add("--stage", type=int, required=True)
    train = verb("train", _function("pipeline.train_stage"), "index + labels -> checkpoints")
    train.add_argument("--stage", type=int, required=True)
    train.add_argument("--variant", default="mcl", choices=_VARIANTS)
    text = "checkpoints -> open_clip models; without --stage: concat and soup; with --to: an "
    text += "exported model -> another library's layout"
    export = verb("export", _export, text)
    export.add_argument("--stage", type=int)
    export.add_argument("--variant", default="mcl", choices=_VARIANTS)
    _add_conversion(export)


def _add_conversion(export: argparse.ArgumentParser) -> None:
    title = "another library's layout; needs no configuration"
    add = export.add_argument_group(title).add_argument
    targets = sorted(p.stem for p in Path(__file__).parent.glob("export/targets/[a-z]*.py"))
    to = "hf: transformers; llava: a vision tower for LLaVA; clip_retrieval: embeddings"
    add("--to", choices=targets, help=to)
    source = "an exported stage, soup or concat; for clip_retrieval a stage's embeddings, or a "
    source += "concat of embedded stages"
    add("--model", type=Path, metavar="FOLDER", help=source)
    add("--out", type=Path, metavar="FOLDER", help="folder to write")
    pictures = "folder of pictures for the certificate (default: drawn ones)"
    add("--images", type=Path, metavar="FOLDER", help=pictures)
    texts = "a text per line for the certificate (default: some that are hard to tokenise)"
    add("--texts", type=Path, metavar="FILE", help=texts)
    precision = "of onnx: numbers in which weights are stored (default: fp32)"
    add("--precision", choices=["fp32", "fp16"], help=precision)
    push = "upload it to this repository of the Hugging Face hub, a private one if it is new"
    add("--push", metavar="ORG/NAME", help=push)
    public = "of --push: a repository that everybody may read"
    add("--public", action="store_true", default=None, help=public)


def _add_figures(verbs: Any) -> None:
    """Of encoders on benchmarks, and of what a run left."""
    add = _add(verbs, "eval", _eval, "encoders -> rows of results.jsonl", _REMAKE).add_argument
    model = "export, concat, open_clip NAME@PRETRAINED (or NAME@random), or hf:FOLDER (or "
    model += "hf:ORG/NAME) of transformers; default: the run's exports"
    add("--model", dest="models", metavar="[NAME=]PATH", help=model, **_SEVERAL)
    add("--suite", help="a shipped suite (mcl) or a YAML file")
    add("--set", dest="variables", metavar="NAME=VALUE", help=_VARIABLE, **_SEVERAL)
    add("--only", metavar="BENCHMARK", **_SEVERAL)
    add("--details", action="store_true", help="show further directions and optimistic figures too")
    text = "what a run left -> figures, as data and as pictures"
    verb = _add(verbs, "analyse", _function("figures.run"), text, _REMAKE)
    figures = "some figures, such as clam; default: all for which no encoder runs"
    verb.add_argument("--figures", metavar="NAME,...", help=figures)


def _add_blindspots(verbs: Any) -> None:
    text = "image pairs that one encoder confuses and another tells apart"
    add = _add(verbs, "blindspots", _function("curate.blindspots.run"), text, _REMAKE).add_argument
    add("--stage", type=int, default=0, help="the stage that confuses them (default: %(default)s)")
    other = "what tells them apart: a stage, or a folder of embeddings (default: the last stage)"
    add("--other", metavar="STAGE|[NAME=]FOLDER", help=other)
    above = "the stage confuses a pair above this cosine (default: %(default)s)"
    add("--above", type=float, metavar="COSINE", default=0.95, help=above)
    below = "the other encoder tells it apart below this one (default: %(default)s)"
    add("--below", type=float, metavar="COSINE", default=0.6, help=below)
    kept = "pairs that are kept of one image (default: %(default)s)"
    add("--per-image", type=int, metavar="N", default=5, help=kept)
    kept = "pairs that are kept of all (default: %(default)s)"
    add("--max-pairs", type=int, metavar="N", default=1000, help=kept)


def _add_filter(verbs: Any) -> None:
    text = "embeddings -> which samples to train on, as weights"
    verb = _add(verbs, "filter", _function("curate.filter.run"), text, _REMAKE)
    add = verb.add_argument
    add("--stage", type=int, default=0, help="whose embeddings (default: %(default)s)")
    add("--name", default="filter", help="folder below filters (default: %(default)s)")
    title = "filters; without any, scores and near pairs are shown"
    add = verb.add_argument_group(title).add_argument
    least = "leave out samples whose image and caption have a lower cosine"
    add("--min-clip-score", type=float, metavar="COSINE", help=least)
    share = "leave out all but this share, those of the highest CLIP scores"
    add("--keep-share", type=float, metavar="SHARE", help=share)
    copies = "of samples above this cosine keep one"
    add("--near-duplicates", type=float, metavar="COSINE", help=copies)
    within = "what is compared for it (default: clusters, where the stage has some)"
    add("--within", choices=["clusters", "all"], help=within)
    sets = "leave out copies of these evaluation images: embeddings by the same encoder, or .npy"
    add("--against", metavar="[NAME=]FOLDER", help=sets, **_SEVERAL)
    add("--against-cosine", type=float, metavar="COSINE", help="above this cosine (default: 0.95)")


def _add_run(verbs: Any) -> None:
    force = "make again what is of other settings or damaged, and move the old aside"
    verb = _add(verbs, "run", _run, "the whole method: every verb, over all stages", force)
    share = "first judge the run by stage 1 on this share of the samples, such as 0.1 (the same as "
    verb.add_argument("--pilot", metavar="SHARE", help=f"{share}pilot.share=0.1)")


# --- main --------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> None:
    """Parses, runs one verb, and ends the process with its exit code (see ``process``)."""
    words = sys.argv[1:] if argv is None else argv
    process.end(lambda: _call(_parse(words)), "--debug" in words)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    """The parsed arguments. Overrides may stand anywhere; argparse alone allows only one place."""
    parser = build_parser()
    args, more = parser.parse_known_args(argv)
    if more and (not hasattr(args, "overrides") or any(word.startswith("-") for word in more)):
        wrong = " ".join(word for word in more if word.startswith("-")) or " ".join(more)
        parser.error(f"unrecognized arguments: {wrong} (see 'mclclip {args.verb} --help')")
    if more:
        args.overrides += more
    if args.verb == "export":
        given = [name for name in _CONVERSION if getattr(args, name) is not None]
        if given and not {"to", "model", "out"} <= {*given}:
            parser.error(
                f"export got --{' --'.join(given)}: wanted --to, --model and --out together"
            )
        if given:
            args.function, args.standalone = _convert, True
    if getattr(args, "pilot", None) is not None:
        args.overrides.append(f"pilot.share={args.pilot}")
    if getattr(args, "trunk_cache", False):
        args.overrides.append("trunk_cache.enabled=true")
    return args


def _call(args: argparse.Namespace) -> int:
    from mclclip.run import runlog

    runlog.setup(int(os.environ.get("RANK", "0")))
    if args.standalone:
        code = args.function(args)
        return code if isinstance(code, int) else process.EXIT_OK
    from mclclip import config as configuration

    config = configuration.load(args.config, args.overrides)
    return process.run(config, args.verb, lambda context: args.function(config, context, args))
