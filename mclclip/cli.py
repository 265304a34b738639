"""The command line: one sub-command per verb, lazy imports, no logic.

Exit codes: see ``process``.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from mclclip import __version__, process
from mclclip.data import datasets

if TYPE_CHECKING:
    from mclclip.config import Config
    from mclclip.ranks.process_group import Context

_MODULES = {"analyse": "figures", "filter": "curate.filter", "blindspots": "curate.blindspots"}
_VARIANTS = ["mcl", "ungrouped", "random_groups", "pilot", "pilot_ungrouped"]
# Parsed names that are not arguments of the function that a verb calls.
_COMMON = {"verb", "debug", "config", "overrides", "configured", "standalone", "trunk_cache"}
# Those of export to another library's layout.
_CONVERSION = ("to", "model", "out", "images", "texts", "precision", "push", "public")
# Those of soup that say what soups are measured on.
_JUDGED = ("held_out", "captions", "suite", "variables", "only", "device")


def _flags(args: argparse.Namespace) -> dict[str, Any]:
    """The flags of a verb by name, which are the arguments of its function."""
    others = _COMMON | ({*_CONVERSION} if args.verb == "export" else set())
    return {name: value for name, value in vars(args).items() if name not in others}


# --- verbs that read a configuration -----------------------------------------------------------


def _verb(config: Config, context: Context, args: argparse.Namespace) -> object:
    """Calls ``run`` of the module that has the verb's name, or that ``_MODULES`` has for it."""
    module = _MODULES.get(args.verb, args.verb)
    return import_module(f"mclclip.{module}").run(config, context, **_flags(args))


def _train(config: Config, context: Context, args: argparse.Namespace) -> object:
    from mclclip import pipeline

    return pipeline.train_stage(config, context, **_flags(args))


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


# --- verbs that stand alone --------------------------------------------------------------------


def _pack(args: argparse.Namespace) -> object:
    from mclclip import pack

    return pack.pack(**_flags(args))


def _convert(args: argparse.Namespace) -> object:
    from mclclip.export import convert

    given = {name: getattr(args, name) for name in _CONVERSION}
    return convert.run(**given, force=args.force)


def _alone(args: argparse.Namespace) -> object:
    """Calls ``run`` of the module that has the verb's name, for verbs without a configuration."""
    return import_module(f"mclclip.{args.verb.replace('-', '_')}").run(**_flags(args))


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
    report = import_module("mclclip.report")
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
    _add_standalone(verbs)
    _add_configured(verbs)
    return parser


def _add(verbs: Any, name: str, help_text: str) -> argparse.ArgumentParser:
    verb: argparse.ArgumentParser = verbs.add_parser(name, help=help_text, description=help_text)
    verb.add_argument("--debug", action="store_true", help="show tracebacks")
    return verb


def _add_standalone(verbs: Any) -> None:
    verb = _add(verbs, "pack", "images + CSV/TSV -> WebDataset shards in img2dataset's layout")
    verb.add_argument("--table", type=Path, required=True, help="CSV or TSV with a header")
    verb.add_argument("--images", type=Path, required=True, help="folder the paths start from")
    root = "another folder in which images may lie, such as the one that a link leads to"
    verb.add_argument(
        "--allow-root", dest="allow_roots", metavar="FOLDER", type=Path, action="append",
        default=[], help=root,
    )  # fmt: skip
    verb.add_argument("--out", type=Path, required=True, help="folder for the shards")
    verb.add_argument("--path-column", default="filepath")
    verb.add_argument("--caption-column", help="default: title, or no captions without that column")
    verb.add_argument("--samples-per-shard", type=int, default=10_000)
    verb.add_argument("--delimiter", default=None, help="default: by suffix (.tsv: tab)")
    verb.add_argument("--key-prefix", default="", help="put before the running number of a key")
    verb.add_argument("--force", action="store_true", help="make again, and move the old aside")
    verb.set_defaults(standalone=_pack)
    _add_make_dataset(verbs)
    _add_soup(verbs)
    _add_compare(verbs)
    _add_report(verbs)
    verb = _add(verbs, "demo", "the whole method on built-in data, on a laptop")
    verb.add_argument("--out", help="run directory (one below it per seed; default: runs/demo)")
    short = "every verb in seconds, to check an installation (default of --out: runs/demo_short)"
    verb.add_argument("--short", action="store_true", help=short)
    verb.add_argument("--seeds", nargs="+", default=["3"], help="more than one: a sweep")
    text = "text tower: trained in every stage; frozen after stage 0; frozen, and trained before "
    text += "on captions that name every attribute; or all three compared"
    regimes = ["trained", "ignorant", "knowing", "all"]
    verb.add_argument("--text", default="trained", choices=regimes, help=text)
    verb.add_argument("overrides", nargs="*", metavar="key.path=value")
    verb.set_defaults(standalone=_demo)
    verb = _add(verbs, "doctor", "versions, devices, disk and file-system checks")
    verb.add_argument("--path", type=Path, default=".", help="where runs will be written")
    verb.set_defaults(standalone=_alone)
    verb = _add(verbs, "config", "check a configuration and print it resolved, or its plan")
    _add_config_options(verb)
    _add_plan(verb)
    verb.set_defaults(standalone=_config)


def _add_plan(verb: argparse.ArgumentParser) -> None:
    group = verb.add_argument_group("plan", "what the run will do and need; uses no GPU")
    group.add_argument("--plan", action="store_true", help="print steps, memory, hours and disk")
    group.add_argument("--nodes", type=int, metavar="N", help="default 1")
    gpus = "default 1; with this or --nodes a too small disk here is a warning"
    group.add_argument("--gpus-per-node", type=int, metavar="G", help=gpus)
    group.add_argument("--gpu-memory-gib", type=float, metavar="M", help="refuse what needs more")
    group.add_argument("--samples", type=int, metavar="N", help="used where there is no index yet")
    group.add_argument("--json", action="store_true", help="sizes in bytes")
    peak = "of a GPU in bf16, dense (default 312, an A100; fp32 is a sixteenth of it)"
    group.add_argument("--peak-tflops", type=float, metavar="P", help=peak)
    share = "of that peak which training and embedding reach (default 0.3)"
    group.add_argument("--share", type=float, metavar="F", help=share)
    rate = "measured in training on one GPU; used for its hours instead of peak and share"
    group.add_argument("--samples-per-s", type=float, metavar="S", help=rate)
    images = "measured in embedding on one GPU, likewise"
    group.add_argument("--images-per-s", type=float, metavar="S", help=images)


def _add_make_dataset(verbs: Any) -> None:
    verb = _add(verbs, "make-dataset", "a built-in or published data set -> shards")
    verb.add_argument("name", choices=["patterns", *datasets.NAMES])
    verb.add_argument("--out", type=Path, required=True)
    verb.add_argument("--seed", type=int, default=0)
    verb.add_argument("--force", action="store_true", help="make again, and move the old aside")
    options = verb.add_argument_group("options of some data sets (default: those of the data set)")
    options.add_argument("--source", action="append", metavar="NAME=FOLDER", help="where files are")
    download = "let torchvision fill the folders of --source first"
    options.add_argument("--download", action="store_true", default=None, help=download)
    options.add_argument("--size", type=int, help="stored pixels (of files: of the shorter side)")
    options.add_argument("--samples-per-shard", type=int)
    options.add_argument("--test-share", type=float, help="trifeature, folder: drawn for testing")
    options.add_argument("--images-per-combination", type=int, help="trifeature")
    options.add_argument("--texture-period", type=float, help="trifeature: pixels of its canvas")
    options.add_argument("--copies", type=int, help="stl_digits: digits on a picture")
    options.add_argument("--subset", help="imagenet_subset: in1p, or a file of WordNet ids")
    options.add_argument("--num-train", type=int, help="attributed_patterns")
    options.add_argument("--num-test", type=int, help="attributed_patterns")
    full = "patterns: name every attribute"
    options.add_argument("--full-captions", action="store_true", default=None, help=full)
    verb.set_defaults(standalone=_alone)


def _add_soup(verbs: Any) -> None:
    verb = _add(verbs, "soup", "exported models of one base -> one model, an average of weights")
    methods = "equal shares; models that do not lower the score, the best first; the line between "
    verb.add_argument("method", choices=["uniform", "greedy", "wise"], help=f"{methods}two")
    several: dict[str, Any] = {"action": "append", "default": []}
    model = "an export, a soup, or an open_clip directory with safetensors; twice or more"
    verb.add_argument(
        "--model", dest="models", metavar="[NAME=]FOLDER", required=True, help=model, **several
    )
    verb.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="folder to write")
    group = verb.add_argument_group("score")
    held_out = "shards with captions; the score is retrieval on them, the mean of both R@1"
    group.add_argument("--held-out", type=Path, metavar="FOLDER", help=held_out)
    captions = "of --held-out: txt (default) or json:FIELD"
    group.add_argument("--captions", default="txt", help=captions)
    group.add_argument("--suite", help="benchmarks beside it: a shipped suite or a YAML file")
    variable = "variable of the suite, such as data=FOLDER"
    group.add_argument("--set", dest="variables", metavar="NAME=VALUE", help=variable, **several)
    group.add_argument("--only", metavar="BENCHMARK", help="some of the suite", **several)
    metric = "what decides, the mean of several (default: the main ones of the first benchmark)"
    group.add_argument(
        "--metric", dest="metrics", metavar="BENCHMARK/METRIC", help=metric, **several
    )
    group.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    line = verb.add_argument_group("wise")
    alpha = "share of the second model; without it the one with the best score is written"
    line.add_argument("--alpha", type=float, help=alpha)
    places = "where the line is measured (default: 0, 0.1 ... 1)"
    line.add_argument("--alphas", type=float, nargs="+", metavar="ALPHA", help=places)
    images = "training images (shards or files), to estimate batch norms on that differ"
    verb.add_argument("--images", type=Path, metavar="FOLDER", help=images)
    base = "models do not record one base, but are known to have one"
    verb.add_argument("--any-base", action="store_true", help=base)
    verb.add_argument("--force", action="store_true", help="make again, and move the old aside")
    verb.set_defaults(standalone=_soup)


def _add_compare(verbs: Any) -> None:
    verb = _add(verbs, "compare", "results of several encoders -> is one really better")
    several: dict[str, Any] = {"action": "append", "default": []}
    verb.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR", help="with results.jsonl")
    model = "a name in results.jsonl, with several runs as RUN:NAME (default: all)"
    verb.add_argument("--model", dest="models", metavar="NAME", help=model, **several)
    verb.add_argument("--against", metavar="NAME", help="default: stage_0, or the first model")
    verb.add_argument(
        "--benchmark", dest="benchmarks", metavar="NAME", help="default: all", **several
    )
    metric = "default: the main ones of each benchmark"
    verb.add_argument("--metric", dest="metrics", metavar="NAME", help=metric, **several)
    formats = ["text", "csv", "markdown", "latex"]
    verb.add_argument("--format", default="text", choices=formats)
    verb.add_argument("--out", type=Path, metavar="FILE", help="default: the standard output")
    verb.set_defaults(standalone=_alone)


def _add_report(verbs: Any) -> None:
    verb = _add(verbs, "report", "what a run left -> one page to look at, run_dir/report.html")
    verb.add_argument("run_dir", nargs="?", metavar="RUN_DIR", help="default: of --config")
    recorded = "YAML, or a shipped recipe's name (default: what the run recorded)"
    verb.add_argument("--config", metavar="FILE", help=recorded)
    verb.add_argument("--out", type=Path, metavar="FILE", help="default: report.html of the run")
    verb.set_defaults(standalone=_report)


def _add_config_options(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--config", metavar="FILE", help="YAML, or a shipped recipe's name")
    verb.add_argument("overrides", nargs="*", metavar="key.path=value")


def _add_configured(verbs: Any) -> None:
    def add(name: str, help_text: str, function: Any = _verb) -> argparse.ArgumentParser:
        verb = _add(verbs, name, help_text)
        _add_config_options(verb)
        force = "make it again, and move aside what is there; what was begun is resumed"
        if name == "run":
            force = "make again what is of other settings or damaged, and move the old aside"
        verb.add_argument("--force", action="store_true", help=force)
        verb.set_defaults(configured=function)
        return verb

    add("index", "tar shards -> sample index")
    embed = add("embed", "index + encoder -> embeddings")
    cluster = add("cluster", "embeddings -> cluster labels and pseudo labels")
    reshard = add("reshard", "samples + pseudo labels -> shards in the order of the groups")
    train = add("train", "index + labels -> checkpoints", _train)
    joins = "checkpoints -> open_clip models; without --stage: concat and soup; with --to: an "
    export = add("export", f"{joins}exported model -> another library's layout", _export)
    _add_conversion(export)
    for verb in (embed, cluster, reshard, train, export):
        verb.add_argument("--stage", type=int, required=verb is not export)
    text = "captions too, also where the text tower is trained"
    embed.add_argument("--text", action="store_true", default=None, help=text)
    cache = "from what the frozen blocks make of every image, which stage 0 writes first (the same "
    cache += "as trunk_cache.enabled=true, which later verbs need too)"
    embed.add_argument("--trunk-cache", action="store_true", help=cache)
    for verb in (train, export):
        verb.add_argument("--variant", default="mcl", choices=_VARIANTS)
    evaluate = add("eval", "encoders -> rows of results.jsonl", _eval)
    model = "export, concat, open_clip NAME@PRETRAINED (or NAME@random), or hf:FOLDER (or "
    model += "hf:ORG/NAME) of transformers; default: the run's exports"
    several: dict[str, Any] = {"action": "append", "default": []}
    evaluate.add_argument("--model", dest="models", metavar="[NAME=]PATH", help=model, **several)
    evaluate.add_argument("--suite", help="a shipped suite (mcl) or a YAML file")
    variable = "variable of the suite, such as data=FOLDER"
    evaluate.add_argument("--set", dest="variables", metavar="NAME=VALUE", help=variable, **several)
    evaluate.add_argument("--only", metavar="BENCHMARK", **several)
    details = "show further directions and optimistic figures too"
    evaluate.add_argument("--details", action="store_true", help=details)
    analyse = add("analyse", "what a run left -> figures, as data and as pictures")
    figures = "some figures, such as clam; default: all for which no encoder runs"
    analyse.add_argument("--figures", metavar="NAME,...", help=figures)
    pairs = "image pairs that one encoder confuses and another tells apart"
    _add_blindspots(add("blindspots", pairs))
    _add_filter(add("filter", "embeddings -> which samples to train on, as weights"))
    run = add("run", "the whole method: every verb, over all stages", _run)
    share = "first judge the run by stage 1 on this share of the samples, such as 0.1 (the same as "
    run.add_argument("--pilot", metavar="SHARE", help=f"{share}pilot.share=0.1)")


def _add_blindspots(verb: argparse.ArgumentParser) -> None:
    stage = "the stage that confuses them (default: %(default)s)"
    verb.add_argument("--stage", type=int, default=0, help=stage)
    other = "what tells them apart: a stage, or a folder of embeddings (default: the last stage)"
    verb.add_argument("--other", metavar="STAGE|[NAME=]FOLDER", help=other)
    above = "the stage confuses a pair above this cosine (default: %(default)s)"
    verb.add_argument("--above", type=float, metavar="COSINE", default=0.95, help=above)
    below = "the other encoder tells it apart below this one (default: %(default)s)"
    verb.add_argument("--below", type=float, metavar="COSINE", default=0.6, help=below)
    kept = "pairs that are kept of one image (default: %(default)s)"
    verb.add_argument("--per-image", type=int, metavar="N", default=5, help=kept)
    kept = "pairs that are kept of all (default: %(default)s)"
    verb.add_argument("--max-pairs", type=int, metavar="N", default=1000, help=kept)


def _add_filter(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--stage", type=int, default=0, help="whose embeddings (default: %(default)s)"
    )
    name = "folder below filters (default: %(default)s)"
    verb.add_argument("--name", default="filter", help=name)
    group = verb.add_argument_group("filters; without any, scores and near pairs are shown")
    least = "leave out samples whose image and caption have a lower cosine"
    group.add_argument("--min-clip-score", type=float, metavar="COSINE", help=least)
    share = "leave out all but this share, those of the highest CLIP scores"
    group.add_argument("--keep-share", type=float, metavar="SHARE", help=share)
    copies = "of samples above this cosine keep one"
    group.add_argument("--near-duplicates", type=float, metavar="COSINE", help=copies)
    within = "what is compared for it (default: clusters, where the stage has some)"
    group.add_argument("--within", choices=["clusters", "all"], help=within)
    sets = "leave out copies of these evaluation images: embeddings by the same encoder, or .npy"
    group.add_argument("--against", action="append", default=[], metavar="[NAME=]FOLDER", help=sets)
    near = "above this cosine (default: 0.95)"
    group.add_argument("--against-cosine", type=float, metavar="COSINE", help=near)


def _add_conversion(export: argparse.ArgumentParser) -> None:
    group = export.add_argument_group("another library's layout; needs no configuration")
    targets = sorted(p.stem for p in Path(__file__).parent.glob("export/targets/[a-z]*.py"))
    to = "hf: transformers; llava: a vision tower for LLaVA; clip_retrieval: embeddings"
    group.add_argument("--to", choices=targets, help=to)
    export_ = "an exported stage, soup or concat; for clip_retrieval a stage's embeddings, or a "
    export_ += "concat of embedded stages"
    group.add_argument("--model", type=Path, metavar="FOLDER", help=export_)
    group.add_argument("--out", type=Path, metavar="FOLDER", help="folder to write")
    pictures = "folder of pictures for the certificate (default: drawn ones)"
    group.add_argument("--images", type=Path, metavar="FOLDER", help=pictures)
    texts = "a text per line for the certificate (default: some that are hard to tokenise)"
    group.add_argument("--texts", type=Path, metavar="FILE", help=texts)
    precision = "of onnx: numbers in which weights are stored (default: fp32)"
    group.add_argument("--precision", choices=["fp32", "fp16"], help=precision)
    push = "upload it to this repository of the Hugging Face hub, a private one if it is new"
    group.add_argument("--push", metavar="ORG/NAME", help=push)
    public = "of --push: a repository that everybody may read"
    group.add_argument("--public", action="store_true", default=None, help=public)


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
            args.standalone = _convert
    if getattr(args, "pilot", None) is not None:
        args.overrides.append(f"pilot.share={args.pilot}")
    if getattr(args, "trunk_cache", False):
        args.overrides.append("trunk_cache.enabled=true")
    return args


def _call(args: argparse.Namespace) -> int:
    from mclclip.run import runlog

    runlog.setup(int(os.environ.get("RANK", "0")))
    if hasattr(args, "standalone"):
        code = args.standalone(args)
        return code if isinstance(code, int) else process.EXIT_OK
    from mclclip import config as configuration

    config = configuration.load(args.config, args.overrides)
    return process.run(config, args.verb, lambda context: args.configured(config, context, args))
