"""The words of the command line: every verb with its flags, their units and defaults.

It imports nothing heavy, so ``--help`` answers at once. ``entry`` says which function a verb calls.
"""

from __future__ import annotations

import argparse
import re
import textwrap
from functools import partial
from pathlib import Path
from typing import Any

from mclclip import __version__
from mclclip.cli.flag_parser import (
    Parser,
    character,
    parse_named_path,
    parse_path,
    positive,
    whole_number,
)
from mclclip.data import datasets
from mclclip.util import shipped
from mclclip.util.remake import Remake

_COUNT, _POSITIVE = partial(whole_number, 0), partial(whole_number, 1)
_VARIANTS = ["mcl", "ungrouped", "random_groups"]
_VARIANT = f"the method itself, or a control of it: {', '.join(_VARIANTS)}"
_STAGE = "number of the stage; 0 is the base model"
_CAPTIONS = "a table of the folder's pictures and their captions, or a folder of texts"
_SEVERAL: dict[str, Any] = {"action": "append", "default": []}
_SIZE = "pictures whose shorter side has more pixels are stored smaller; 0: all as they are"
_FORCE = "make again, and move the old aside"
_UNFIT = "make again what is of other settings or damaged, and move the old aside"
_REMAKE = "make it again, and move aside what is there; what was begun is resumed"
_VARIABLE = "variable of the suite, such as data=FOLDER"


# The text of --help: groups of verbs, and for each verb what it does and an example.
_VERBS = """\
begin:
  finetune      captioned pictures -> a better encoder: settings, training,
                control, verdict
                $ mclclip finetune photos --base RN50@openai --out runs/mine
  demo          the whole method on built-in data, on a laptop
                $ mclclip demo --short
  config        check a configuration and print it resolved, or its plan
                $ mclclip config --explain train.lr
  recipes       list the recipes, or copy them out with the launch scripts
                $ mclclip recipes --copy .
  doctor        checks of the machine, of a run's files, or (--data) of pictures
                $ mclclip doctor runs/mine
  completion    a script by which bash or zsh completes verbs, flags and recipes
                $ mclclip completion bash >> ~/.bash_completion

data:
  pack          pictures with captions -> WebDataset shards in img2dataset's
                layout
                $ mclclip pack photos --captions captions.csv --out shards
  make-dataset  a built-in or published data set -> shards
                $ mclclip make-dataset patterns --out data/patterns
  make-pairs    captioned shards -> minimal pairs, a benchmark of one's own
                $ mclclip make-pairs --shards shards/test --out pairs

the method, as a whole and verb by verb:
  run           the whole method: every verb, over all stages
                $ mclclip run --config ucm run_dir=runs/mine
  race          one base, several remedies of equal cost -> which one helps
                $ mclclip race --config ucm --remedies mcl ifm run_dir=runs/race
  index         tar shards -> sample index
                $ mclclip index --config ucm
  texts         text embeddings of another encoder -> rows by text or key, which
                stand for the text tower
                $ mclclip texts --config llm model.text_rows=[rows.parquet]
  embed         index + encoder -> embeddings
                $ mclclip embed --config ucm --stage 0
  cluster       embeddings -> cluster labels and pseudo labels
                $ mclclip cluster --config ucm --stage 0
  relocate      samples + pseudo labels -> shards in the order of the groups
                $ mclclip relocate --config ucm --stage 1 relocate.enabled=true
  train         index + labels -> checkpoints
                $ mclclip train --config ucm --stage 1
  export        checkpoints -> open_clip models; without --stage: concat and
                soup; with --to: an exported model -> another library's layout
                $ mclclip export --config ucm --stage 1

encoders:
  eval          encoders -> rows of results.jsonl
                $ mclclip eval --config ucm --model ViT-B-32@openai
  compare       results of several encoders -> is one really better
                $ mclclip compare runs/mine --against stage_0
  soup          exported models of one base -> one model, an average of weights
                $ mclclip soup uniform --model runs/a --model runs/b --out soup
  report        what a run left -> one page to look at, run_dir/report.html
                $ mclclip report runs/mine

what a run shows:
  analyse       what a run left -> figures, as data and as pictures
                $ mclclip analyse --config ucm --figures tsne
  blindspots    image pairs that one encoder confuses and another tells apart
                $ mclclip blindspots --config ucm --stage 0 --other 1
  filter        embeddings -> which samples to train on, as weights
                $ mclclip filter --config ucm --keep-share 0.3
"""


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of ``mclclip``; needs neither torch nor a configuration."""
    parser = Parser(
        prog="mclclip",
        usage="mclclip VERB [FLAGS]    (mclclip VERB --help: its flags)",
        description="Fine-tune CLIP at scale so that it sees what it was blind to.",
        epilog=f"{_VERBS}\nExit codes: 0 done, 1 internal error, 2 user mistake (one line),\n"
        "85 asked to leave and saved (run it again), 130 interrupted.",
    )
    parser.add_argument("--version", action="version", version=f"mclclip {__version__}")
    hidden: Any = argparse.SUPPRESS
    verbs = parser.add_subparsers(
        dest="verb", required=True, metavar="VERB", prog="mclclip", help=hidden
    )
    alone = (_add_finetune, _add_pack, _add_make_dataset, _add_make_pairs, _add_soup, _add_compare)
    others = (_add_checks, _add_stages, _add_figures, _add_blindspots, _add_filter, _add_run)
    for add in (*alone, _add_report, _add_demo, *others, _add_race):
        add(verbs)
    return parser


def _add(verbs: Any, name: str, force: str = "", *, alone: bool = False) -> argparse.ArgumentParser:
    """Returns the parser of a verb, whose flags are the arguments of its function.

    ``force`` is the help of its flag --force, or empty if it has no such flag. A verb that stands
    ``alone`` reads no configuration.
    """
    entry = re.search(rf"^  {name} +(.*?)\n +\$ (.*?)$", _VERBS, re.M | re.S)
    assert entry, f"the verb {name} has no entry with an example in _VERBS"
    text, example = entry.groups()
    text = " ".join(text.split())
    words = {"description": textwrap.fill(text, 80), "epilog": f"example: {example}"}
    verb: argparse.ArgumentParser = verbs.add_parser(name, help=text, **words)
    verb.set_defaults(standalone=alone, parser=verb)
    verb.add_argument("--debug", action="store_true", help="show tracebacks")
    verb.add_argument("--verbose", action="store_true", help="more lines in the log")
    if not alone:
        verb.add_argument("--config", metavar="FILE", help="YAML, or a shipped recipe's name")
        _add_overrides(verb)
    if force:
        remade: dict[str, Any] = {"const": Remake.UNFIT if force == _UNFIT else Remake.ALL}
        remade |= {"action": "store_const", "default": Remake.NOTHING, "help": force}
        verb.add_argument("--force", **remade)
    return verb


def _add_overrides(verb: argparse.ArgumentParser) -> None:
    text = "options of the configuration ('mclclip config --explain' has them all)"
    verb.add_argument("overrides", nargs="*", default=[], metavar="key.path=value", help=text)


# --- flags of verbs that stand alone -----------------------------------------------------------


def _add_finetune(verbs: Any) -> None:
    verb = _add(verbs, "finetune", alone=True)
    add = verb.add_argument
    add("images", type=parse_path, metavar="IMAGES", help="what 'mclclip pack' packs")
    add("--captions", type=parse_path, metavar="PATH", help=_CAPTIONS)
    base: dict[str, Any] = {"type": parse_named_path, "required": True}
    add("--base", help="open_clip NAME@TAG, NAME@random, or a folder", **base)
    add("--out", type=Path, required=True, metavar="FOLDER", help="folder of the run")
    share = "pictures to choose the best encoder by, and as many to report on"
    column = "of the table, where common names do not say it"
    add("--path-column", metavar="NAME", help=f"pictures: a column {column}")
    several = f"captions: a column {column}; several, or COLUMN.FIELD of a list"
    add("--caption-column", metavar="NAME", help=several, action="append")
    add("--delimiter", type=character, metavar="CHAR", help="default: by suffix and header")
    root = "another folder in which pictures may lie, such as the one that a link leads to"
    add(
        "--allow-root", dest="allow_roots", metavar="FOLDER", type=parse_path, help=root, **_SEVERAL
    )
    add("--held-out", type=float, default=0.1, metavar="SHARE", help=share)
    add("--seed", type=_COUNT, default=0, help="of weights, data order and clusters")
    add("--size", type=_COUNT, default=512, metavar="N", help=_SIZE)
    add("--force", action="store_true", help="choose settings anew, and move the old aside")
    setting = "a setting in the place of the chosen one, such as train.lr=1e-5"
    add("overrides", nargs="*", default=[], metavar="key.path=value", help=setting)
    add = verb.add_argument_group("settings alone").add_argument
    add("--dry-run", action="store_true", help="print the settings; writes nothing")
    gpu = "of --dry-run: choose for a GPU of this memory, which need not be here"
    add("--gpu-gib", type=positive, metavar="M", help=gpu)
    samples = "of --dry-run: how many pictures there will be (default: counted)"
    add("--samples", type=_POSITIVE, metavar="N", help=samples)


def _add_pack(verbs: Any) -> None:
    add = _add(verbs, "pack", _FORCE, alone=True).add_argument
    source = "folder of pictures (a.jpg, a.txt), CSV, TSV, JSONL, Parquet, saved data set, shards, "
    source += "or hf://datasets/ORG/NAME of the Hugging Face hub"
    add("source", metavar="SOURCE", type=parse_path, help=source)
    add("--captions", metavar="PATH", type=parse_path, help=_CAPTIONS)
    add("--out", type=Path, required=True, help="folder for the shards")
    root = "another folder in which images may lie, such as the one that a link leads to"
    add(
        "--allow-root", dest="allow_roots", metavar="FOLDER", type=parse_path, help=root, **_SEVERAL
    )
    add("--path-column", help="column of image paths or images; default: found by its name")
    text = "default: found by its name; none: no captions; several, or COLUMN.FIELD of a list"
    add("--caption-column", metavar="NAME", help=text, action="append")
    add("--samples-per-shard", type=_POSITIVE, default=10_000, help="images of a tar")
    add("--delimiter", type=character, help="default: by suffix (.tsv: tab) and header")
    add("--key-prefix", default="", help="put before the running number of a key")
    add("--size", type=_COUNT, default=0, metavar="N", help=_SIZE)


def _add_make_dataset(verbs: Any) -> None:
    verb = _add(verbs, "make-dataset", _FORCE, alone=True)
    add = verb.add_argument
    names = datasets.NAMES
    add("name", choices=names, metavar="NAME", help=f"one of {', '.join(names)}")
    add("--out", type=Path, required=True, metavar="FOLDER", help="folder for the shards")
    add("--seed", type=_COUNT, default=0, help="of what is drawn")
    add = verb.add_argument_group("options of some data sets").add_argument
    add("--source", action="append", metavar="NAME=FOLDER", help="where files are")
    shards: dict[str, Any] = {"dest": "source", "action": "append", "metavar": "FOLDER"}
    text = "shortcut: captioned pictures; short for --source shards=FOLDER"
    add("--shards", type="shards={}".format, help=text, **shards)
    download = "let torchvision fill the folders of --source first"
    add("--download", action="store_true", default=None, help=download)
    for flag, kind, text in (
        ("--size", int, "stored pixels (of files: of the shorter side)"),
        ("--samples-per-shard", int, "images of a tar"),
        ("--test-share", float, "trifeature, folder, shortcut: drawn for testing"),
        ("--images-per-combination", int, "trifeature"),
        ("--texture-period", float, "trifeature: pixels of its canvas"),
        ("--digits", int, "cifar_mnist: different ones"),
        ("--copies", int, "stl_digits: digits on a picture"),
        ("--subset", str, "imagenet_subset: in1p, or a file of WordNet ids"),
        ("--kind", str, "shortcut: bar, frame, number or watermark"),
        ("--values", int, "shortcut: different ones"),
        ("--probability", float, "shortcut: of a caption to name it"),
        ("--template", str, "shortcut: of captions, with {shortcut} and {caption}"),
        ("--num-samples", int, "patterns: pictures for training"),
        ("--num-pairs", int, "patterns: minimal pairs of each attribute"),
        ("--num-train", int, "attributed_patterns: pictures for training"),
        ("--num-test", int, "attributed_patterns: pictures for testing"),
    ):
        add(flag, type=kind, help=f"{text} (default: the data set's)")


def _add_make_pairs(verbs: Any) -> None:
    add = _add(verbs, "make-pairs", _FORCE, alone=True).add_argument
    shards = "whose *.tar are read; of pictures that no training reads"
    add("--shards", type=parse_path, required=True, metavar="FOLDER", help=shards)
    add("--captions", default="txt", help="of the shards: txt (default), lines or json:FIELD")
    add("--out", type=Path, required=True, metavar="FOLDER", help="folder of the benchmark")
    add("--rules", nargs="+", default=[], metavar="RULE", help="such as colour (default: all)")
    add("--confused", type=Path, metavar="FOLDER", help="blind spots of a run on these shards")
    add("--per-rule", type=_POSITIVE, default=200, metavar="N", help="items of a rule at most")
    add("--seed", type=_COUNT, default=0, help="of what is drawn")


def _add_soup(verbs: Any) -> None:
    verb = _add(verbs, "soup", _FORCE, alone=True)
    add = verb.add_argument
    methods = "equal shares; models that do not lower the score, the best first; the line between "
    add("method", choices=["uniform", "greedy", "wise"], help=f"{methods}two")
    model = "an export, a soup, or an open_clip directory with safetensors; twice or more"
    options: dict[str, Any] = {
        "metavar": "[NAME=]FOLDER",
        "type": parse_named_path,
        "required": True,
    }
    add("--model", dest="models", help=model, **options, **_SEVERAL)
    add("--out", type=Path, required=True, metavar="FOLDER", help="folder to write")
    images = "training images (shards or files), to estimate batch norms on that differ"
    add("--images", type=parse_path, metavar="FOLDER", help=images)
    base = "models do not record one base, but are known to have one"
    add("--any-base", action="store_true", help=base)
    add = verb.add_argument_group("score").add_argument
    held_out = "shards with captions; the score is retrieval on them, the mean of both R@1"
    add("--held-out", type=parse_path, metavar="FOLDER", help=held_out)
    add("--captions", default="txt", help="of --held-out: txt (default), lines or json:FIELD")
    add("--suite", help="benchmarks beside it: a shipped suite or a YAML file")
    add("--set", dest="variables", metavar="NAME=VALUE", help=_VARIABLE, **_SEVERAL)
    add("--only", metavar="BENCHMARK", help="some of the suite (default: all)", **_SEVERAL)
    metric = "what decides, the mean of several (default: the main ones of the first benchmark)"
    add("--metric", dest="metrics", metavar="BENCHMARK/METRIC", help=metric, **_SEVERAL)
    add("--device", default="auto", choices=["auto", "cpu", "cuda"], help="auto: a GPU if any")
    add = verb.add_argument_group("wise").add_argument
    alpha = "share of the second model; without it the one with the best score is written"
    add("--alpha", type=float, help=alpha)
    places = "where the line is measured (default: 0, 0.1 ... 1)"
    add("--alphas", type=float, nargs="+", metavar="ALPHA", help=places)


def _add_compare(verbs: Any) -> None:
    add = _add(verbs, "compare", alone=True).add_argument
    add("runs", nargs="+", type=parse_path, metavar="RUN_DIR", help="with results.jsonl")
    model = "a name in results.jsonl, with several runs as RUN:NAME (default: all)"
    add("--model", dest="models", metavar="NAME", help=model, **_SEVERAL)
    add("--against", metavar="NAME", help="default: stage_0, or the first model")
    add("--benchmark", dest="benchmarks", metavar="NAME", help="default: all", **_SEVERAL)
    metric = "default: the main ones of each benchmark"
    add("--metric", dest="metrics", metavar="NAME", help=metric, **_SEVERAL)
    forms = ["text", "csv", "markdown", "latex"]
    add("--format", default="text", choices=forms, help="of the table")
    add("--out", type=Path, metavar="FILE", help="default: the standard output")


def _add_report(verbs: Any) -> None:
    add = _add(verbs, "report", alone=True).add_argument
    add("run_dir", nargs="?", type=parse_path, metavar="RUN_DIR", help="default: of --config")
    recorded = "YAML, or a shipped recipe's name (default: what the run recorded)"
    add("--config", metavar="FILE", help=recorded)
    add("--out", type=Path, metavar="FILE", help="default: report.html of the run")


def _add_demo(verbs: Any) -> None:
    verb = _add(verbs, "demo", alone=True)
    add = verb.add_argument
    out = "run directory (one below it per seed; default: runs/demo)"
    add("--out", type=Path, metavar="FOLDER", help=out)
    short = "every verb in seconds, to check an installation (default of --out: runs/demo_short)"
    add("--short", action="store_true", help=short)
    add("--seeds", nargs="+", default=["3"], help="more than one: a sweep")
    _add_overrides(verb)


def _add_checks(verbs: Any) -> None:
    """Adds the verbs that check the machine, a run or a configuration."""
    copy = "write launch/ and slurm/ with all recipes and scripts into this folder"
    recipes = _add(verbs, "recipes", alone=True)
    recipes.add_argument("--copy", type=Path, metavar="FOLDER", help=copy)
    verb = _add(verbs, "completion", alone=True)
    verb.add_argument("shell", choices=["bash", "zsh"], help="whose script to print")
    verb = _add(verbs, "doctor", alone=True)
    verb.add_argument("--path", type=Path, default=".", help="where runs will be written")
    data = "check the data of this configuration instead (YAML, or a shipped recipe's name): "
    data += "copies, lengths, sizes, what cannot be decoded, groups"
    verb.add_argument("--data", metavar="CONFIG", help=data)
    versions = "print the versions that are known to work together, for pip install --constraint"
    verb.add_argument("--versions", action="store_true", help=versions)
    text = "a run, whose files are compared with what was written; with --data: options"
    verb.add_argument("overrides", nargs="*", default=[], metavar="RUN | KEY=VALUE", help=text)
    verb = _add(verbs, "config")
    verb.set_defaults(standalone=True)
    explain = "print text, type, default and allowed values of the option KEY, or of all that "
    explain += "begin with it"
    verb.add_argument("--explain", nargs="?", const="", metavar="KEY", help=explain)
    plan = "what the run will do and need; uses no GPU"
    add = verb.add_argument_group("plan", plan).add_argument
    add("--plan", action="store_true", help="print steps, memory, hours and disk")
    add("--nodes", type=_POSITIVE, metavar="N", help="default 1")
    gpus = "default 1; with this or --nodes a too small disk here is a warning"
    add("--gpus-per-node", type=_POSITIVE, metavar="G", help=gpus)
    add("--gpu-memory-gib", type=positive, metavar="M", help="refuse what needs more")
    add("--samples", type=_POSITIVE, metavar="N", help="used where there is no index yet")
    add("--json", action="store_true", help="sizes in bytes")
    peak = "of a GPU in bf16, dense (default 312, an A100; fp32 is a sixteenth of it)"
    add("--peak-tflops", type=positive, metavar="P", help=peak)
    share = "of that peak which is reached (default 0.3)"
    add("--share", type=partial(positive, most=1), metavar="F", help=share)
    rate = "measured in training on one GPU; used for its hours instead of peak and share"
    add("--samples-per-s", type=positive, metavar="S", help=rate)
    images = "measured in embedding on one GPU, likewise"
    add("--images-per-s", type=positive, metavar="S", help=images)


# --- flags of verbs that read a configuration ----------------------------------------------------


def _add_stages(verbs: Any) -> None:
    """Adds the verbs of a stage, from shards to exported models."""
    _add(verbs, "index", _REMAKE)
    add = _add(verbs, "texts", _REMAKE).add_argument
    missing = "lists, as JSONL, the captions and texts of benchmarks that have no row yet"
    add("--missing", type=Path, metavar="FILE", help=missing)
    verb = _add(verbs, "embed", _REMAKE)
    add = verb.add_mutually_exclusive_group(required=True).add_argument
    add("--stage", type=_COUNT, help=_STAGE)
    teacher = "a teacher of the objective distill: NAME@TAG, or a folder with an encoder"
    add("--encoder", metavar="ENCODER", help=teacher)
    add = verb.add_argument
    text = "captions too, also where the text tower is trained"
    add("--text", action="store_true", default=None, help=text)
    add = _add(verbs, "cluster", _REMAKE).add_argument
    add("--stage", type=_COUNT, required=True, help=_STAGE)
    add = _add(verbs, "relocate", _REMAKE).add_argument
    add("--stage", type=_COUNT, required=True, help=_STAGE)
    train = _add(verbs, "train", _REMAKE)
    train.add_argument("--stage", type=_COUNT, required=True, help=_STAGE)
    variant: dict[str, Any] = {"default": "mcl", "metavar": "NAME", "choices": _VARIANTS}
    variant["help"] = _VARIANT
    train.add_argument("--variant", **variant)
    export = _add(verbs, "export", _REMAKE)
    export.add_argument("--stage", type=_COUNT, help=f"{_STAGE} (default: join all)")
    export.add_argument("--variant", **variant)
    _add_conversion(export)


def _add_conversion(export: argparse.ArgumentParser) -> None:
    title = "another library's layout; needs no configuration"
    add = export.add_argument_group(title).add_argument
    targets = shipped.plugins("export/targets")
    of_rows = ", ".join(shipped.plugins("export/targets", "is_model=False"))
    several = ", ".join(shipped.plugins("export/targets", "precisions="))
    to = f"one of {', '.join(targets)}: models, but for {of_rows}, which takes embeddings"
    add("--to", choices=targets, metavar="LAYOUT", help=to)
    source = f"an exported stage, soup or concat; for {of_rows} a stage's embeddings, or a "
    source += "concat of embedded stages"
    add("--model", type=parse_path, metavar="FOLDER", help=source)
    add("--out", type=Path, metavar="FOLDER", help="folder to write")
    pictures = "folder of pictures for the certificate (default: drawn ones)"
    add("--images", type=parse_path, metavar="FOLDER", help=pictures)
    texts = "a text per line for the certificate (default: some that are hard to tokenise)"
    add("--texts", type=parse_path, metavar="FILE", help=texts)
    add("--width", type=_POSITIVE, help="keep the first so many numbers of features (default: all)")
    precision = f"of {several}: numbers in which weights are stored (default: fp32)"
    add("--precision", choices=["fp32", "fp16", "int8"], help=precision)


def _add_figures(verbs: Any) -> None:
    """Adds the verbs that show figures of encoders and of a run."""
    add = _add(verbs, "eval", _REMAKE).add_argument
    model = "export, concat, open_clip NAME@PRETRAINED (or NAME@random), or hf:FOLDER (or "
    model += "hf:ORG/NAME) of transformers; default: the run's exports"
    options: dict[str, Any] = {"metavar": "[NAME=]PATH", "type": parse_named_path}
    add("--model", dest="models", help=model, **options, **_SEVERAL)
    add("--suite", help="a shipped suite (mcl) or a YAML file")
    add("--set", dest="variables", metavar="NAME=VALUE", help=_VARIABLE, **_SEVERAL)
    add("--only", metavar="BENCHMARK", help="some of the suite (default: all)", **_SEVERAL)
    widths = "the first so many numbers of features too (default: those that were trained)"
    add("--widths", type=_POSITIVE, help=widths, **_SEVERAL)
    add("--details", action="store_true", help="show further directions and optimistic figures too")
    verb = _add(verbs, "analyse")
    figures = "some figures, such as tsne; default: all that the run has data for"
    verb.add_argument("--figures", metavar="NAME,...", help=figures)


def _add_blindspots(verbs: Any) -> None:
    add = _add(verbs, "blindspots", _REMAKE).add_argument
    add(
        "--stage",
        type=_COUNT,
        default=0,
        help="the stage that confuses them (default: %(default)s)",
    )
    other = "what tells them apart: a stage, or a folder of embeddings (default: the last stage)"
    add("--other", metavar="STAGE|[NAME=]FOLDER", type=parse_named_path, help=other)
    above = "the stage confuses a pair above this cosine (default: %(default)s)"
    add("--above", type=float, metavar="COSINE", default=0.95, help=above)
    below = "the other encoder tells it apart below this one (default: %(default)s)"
    add("--below", type=float, metavar="COSINE", default=0.6, help=below)
    most = "pairs that are kept of one image (default: %(default)s)"
    add("--per-image", type=_POSITIVE, metavar="N", default=5, help=most)
    most = "pairs that are kept of all (default: %(default)s)"
    add("--max-pairs", type=_POSITIVE, metavar="N", default=1000, help=most)


def _add_filter(verbs: Any) -> None:
    verb = _add(verbs, "filter", _REMAKE)
    add = verb.add_argument
    add("--stage", type=_COUNT, default=0, help="whose embeddings (default: %(default)s)")
    add("--name", default="filter", help="folder below filters (default: %(default)s)")
    title = "filters; without any, scores and near pairs are shown"
    add = verb.add_argument_group(title).add_argument
    least = "leave out samples whose image and caption have a lower cosine"
    add("--min-clip-score", type=float, metavar="COSINE", help=least)
    share = "leave out all but this share, those of the highest CLIP scores"
    add("--keep-share", type=float, metavar="SHARE", help=share)
    copies = "of samples above this cosine keep one"
    add("--near-duplicates", type=float, metavar="COSINE", help=copies)
    add("--within", choices=["clusters", "all"], help="default: clusters, where there are some")
    sets = "leave out copies of these evaluation images: embeddings by the same encoder, or .npy"
    options: dict[str, Any] = {"metavar": "[NAME=]FOLDER", "type": parse_named_path}
    add("--against", help=sets, **options, **_SEVERAL)
    add("--against-cosine", type=float, metavar="COSINE", help="above this cosine (default: 0.95)")


def _add_race(verbs: Any) -> None:
    verb = _add(verbs, "race", _UNFIT)
    verb.set_defaults(standalone=True)
    add = verb.add_argument
    words: dict[str, Any] = {"nargs": "+", "default": []}
    remedies = "by name ('mclclip race --remedies x' lists them), or sweep files of your own"
    add("--remedies", metavar="NAME|FILE", help=remedies, **words)
    seeds = "of all that is drawn; what is shown is the mean over them (default: that of seed)"
    add("--seeds", metavar="SEED", help=seeds, **words)
    only = "train one remedy, by name or by its number from 1 on, or base; makes no table"
    add("--only", metavar="NAME|NUMBER", help=only)


def _add_run(verbs: Any) -> None:
    _add(verbs, "run", _UNFIT)
