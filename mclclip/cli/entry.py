"""The command line: parses the words and calls the function of a verb, which it imports only then.

``flags`` defines the flags of every verb; ``process`` explains the exit codes.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from mclclip.cli import process
from mclclip.cli.flag_parser import check_paths, print_completion, verbs_of
from mclclip.cli.flags import build_parser
from mclclip.ranks import failures, signals
from mclclip.util import advice

if TYPE_CHECKING:
    from mclclip.config import Config
    from mclclip.ranks.process_group import Context

log = logging.getLogger("mclclip")

# Parsed names that are no arguments of the function of a verb; nor are, of a verb that gets a
# configuration, the words that make it.
_COMMON = {"verb", "debug", "verbose", "function", "standalone", "parser"}
_OF_CONFIG = {"config", "overrides"}
# Verbs that do not import torch.
_QUICK = {"recipes", "completion", "compare"}
# Flags of an export to another library's layout.
_CONVERSION = ("to", "model", "out", "images", "texts", "precision", "width")
# Flags of soup that say on which benchmarks soups are measured.
_JUDGED = ("held_out", "captions", "suite", "variables", "only", "device")


def flags_of(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the flags of a verb by name: the arguments of its function."""
    others = _COMMON if args.standalone else _COMMON | _OF_CONFIG
    others = others | {*_CONVERSION} if args.verb == "export" else others
    return {name: value for name, value in vars(args).items() if name not in others}


# --- what a verb calls: function(args), or function(config, context, args) with a configuration --


def _function(path: str) -> Callable[..., object]:
    """Returns a function that imports and calls ``mclclip.PATH`` with the flags as arguments."""
    module, _, name = path.rpartition(".")

    def call(*arguments: Any) -> object:
        *opened, args = arguments
        return getattr(import_module(f"mclclip.{module}"), name)(*opened, **flags_of(args))

    return call


def _export(config: Config, context: Context, args: argparse.Namespace) -> object:
    from mclclip.verbs import export

    if args.stage is None:
        return export.join(config, context, variant=args.variant, force=args.force)
    return export.stage(config, context, **flags_of(args))


def _train(config: Config, context: Context, args: argparse.Namespace) -> object:
    from mclclip import method
    from mclclip.verbs import train

    evaluate = method.evaluations(config, context, args.stage, args.variant)
    return train.run(config, context, **flags_of(args), evaluate=evaluate)


def _run(config: Config, context: Context, args: argparse.Namespace) -> object:
    from mclclip import method
    from mclclip.eval import results

    run_dir = method.run(config, context, force=args.force)
    if context.is_main and (rows := results.read(run_dir / "results.jsonl")):
        print(results.table(rows))
    command = advice.again(["mclclip", "report"], config.run_dir)
    log.info("for one page of all that this run left: %s", command)
    return run_dir


def _convert(args: argparse.Namespace) -> object:
    from mclclip.export import convert

    flags = {name: getattr(args, name) for name in _CONVERSION}
    return convert.run(**flags, force=args.force)


def _soup(args: argparse.Namespace) -> object:
    from mclclip.verbs import eval as evaluation
    from mclclip.verbs import soup

    flags = flags_of(args)
    judged = {name: flags.pop(name) for name in _JUDGED}
    choice = soup.describe_choice(flags["method"], flags["alpha"])
    judge = evaluation.open_judge(**judged, models=flags["models"], choice=choice)
    return soup.run(**flags, judge=judge)


def _race(args: argparse.Namespace) -> object:
    from mclclip.verbs import race

    entries = args.config, args.remedies, args.seeds, args.only, args.overrides
    entered = race.Race(*entries, force=args.force)
    return process.run(entered.job, "race", entered.run, check=entered.check)


def _config(args: argparse.Namespace) -> object:
    from mclclip import config
    from mclclip.config import explaining

    if args.explain is not None:
        print(explaining.explain(args.explain))
        return None
    options = config.load(args.config, args.overrides)
    if args.plan:
        from mclclip.verbs import plan

        machine = plan.Machine.described(args.nodes, args.gpus_per_node, args.gpu_memory_gib)
        speed = plan.Speed(args.peak_tflops, args.share, args.samples_per_s, args.images_per_s)
        plan.run(options, machine, samples=args.samples, as_json=args.json, speed=speed)
    else:
        from mclclip.util.files import printable_lines

        print(printable_lines(config.dump(options)), end="")
    return None


def _doctor(args: argparse.Namespace) -> object:
    if args.versions:
        if args.overrides:
            raise ValueError(f"--versions takes nothing else: leave out {args.overrides[0]}")
        from mclclip.util import shipped

        print(shipped.constraints(), end="")
        return None
    if args.data is None:
        if (words := args.overrides) and (len(words) > 1 or "=" in words[0]):
            raise ValueError(f"{words[-1]} is for --data CONFIG: add that, or leave it out")
        if words:
            from mclclip.verbs import run_check

            return run_check.run(Path(words[0]))
        from mclclip.verbs import doctor

        return doctor.run(args.path)
    from mclclip import config
    from mclclip.verbs import data_check

    return data_check.run(config.load(args.data, args.overrides))


# Of other verbs it is ``run`` in their module.
_FUNCTIONS: dict[str, Callable[..., object]] = {
    "finetune": _function("api.run_verb"),
    "pack": _function("verbs.pack.pack"),
    "soup": _soup,
    "recipes": _function("util.shipped.run"),
    "completion": lambda args: print_completion(build_parser(), args.shell),
    "doctor": _doctor,
    "config": _config,
    "train": _train,
    "export": _export,
    "run": _run,
    "race": _race,
}


# --- main --------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb inside a program that goes on, and returns the exit code (see ``process``).

    Afterwards signals are handled as before, and messages no longer offer this command.
    """
    words = sys.argv[1:] if argv is None else argv
    try:
        with signals.restore_handlers():
            return process.answer(lambda: run_verb(parse_words(words)), "--debug" in words)
    finally:
        advice.remember("", ())


def command() -> NoReturn:
    """Runs the command ``mclclip`` and ends the process with the exit code."""
    words = sys.argv[1:]
    process.end(lambda: run_verb(parse_words(words)), "--debug" in words)


def parse_words(argv: Sequence[str]) -> argparse.Namespace:
    """Parses the words. Overrides may be anywhere, while argparse allows them in one place only."""
    parser = build_parser()
    for number, word in enumerate(argv):
        if not word or re.fullmatch(r"--[a-z-]+=", word):
            parser.error(
                f"word {number + 1} ({word!r}) is blank: set the variable, or leave it out"
            )
    args, more = parser.parse_known_args(argv)
    module = args.verb.replace("-", "_")
    args.function = _FUNCTIONS.get(args.verb) or _function(f"verbs.{module}.run")
    if more and (not hasattr(args, "overrides") or any(word.startswith("-") for word in more)):
        parser.error(_unknown(args, more))
    if more:
        args.overrides += more
    for name in ("remedies", "seeds"):  # these flags have taken the overrides after them too
        if not (words := getattr(args, name, None)):
            continue
        args.overrides += [word for word in words if "=" in word]
        setattr(args, name, [word for word in words if "=" not in word])
    if seeds := getattr(args, "seeds", []):
        if not all(seed.isdecimal() for seed in seeds) or len({*map(int, seeds)}) < len(seeds):
            raise ValueError(
                f"--seeds got {' '.join(seeds)}: wanted numbers from 0 on, each of them once"
            )
        args.seeds = [*map(int, seeds)]
    if args.verb == "export":
        conversion = [name for name in _CONVERSION if getattr(args, name) is not None]
        if conversion and not {"to", "model", "out"} <= {*conversion}:
            parser.error(
                f"export got --{' --'.join(conversion)}: wanted --to, --model and --out together"
            )
        if conversion:
            args.function, args.standalone = _convert, True
            of_run = [
                f"--{name}"
                for name in ("config", "stage", "variant")
                if getattr(args, name) != args.parser.get_default(name)
            ]
            if without_effect := [*of_run, *args.overrides]:
                parser.error(
                    "export --to converts the folder of --model and reads no configuration: leave "
                    f"out {' '.join(without_effect)}"
                )
    if getattr(args, "explain", None) is not None and args.overrides:
        parser.error(f"config --explain takes one option: leave out {' '.join(args.overrides)}")
    verbs = verbs_of(parser).items()
    readers = [name for name, verb in verbs if not verb.get_default("standalone")]
    advice.remember(args.verb, argv, run=_words_of_run(args), readers=readers)
    return args


def _unknown(args: argparse.Namespace, words: Sequence[str]) -> str:
    """Returns the message for words of a command that are neither flags nor overrides."""
    wrong = " ".join(word for word in words if word.startswith("-")) or " ".join(words)
    see = f"'mclclip {args.verb} --help' lists the flags"
    how = ", and options of the configuration are key.path=value"
    if (flag := wrong.partition(" ")[0].partition("=")[0]).startswith("-"):
        from mclclip.util.options import nearest

        flags = args.parser._option_string_actions.keys() - {"-h", "--help"}
        if near := nearest(flag, flags, cutoff=0.6):
            see = f"nearest: {', '.join(near)}; {see}"
        how += f": 'mclclip config --explain {flag.strip('-').replace('-', '_')}' looks for it"
    how = how if hasattr(args, "overrides") else ""
    return f"unrecognized arguments: {wrong} ({see}{how})"


def _words_of_run(args: argparse.Namespace) -> list[str]:
    """Returns the words by which another verb finds the run of this command, such as
    ['--config', 'runs/mine/config.yaml'], for messages that offer a command."""
    folder = {"finetune": "out", "report": "run_dir"}.get(args.verb)
    if folder is not None and (run := getattr(args, folder)):
        return ["--config", f"{run}/config.yaml"]
    if args.verb == "doctor" and len(args.overrides) == 1 and args.data is None:
        recorded = Path(args.overrides[0]) / "config.yaml"
        return ["--config", str(recorded)] * recorded.is_file()
    if args.verb == "compare":
        recorded = Path(args.runs[0]) / "config.yaml"
        return ["--config", str(recorded)] if recorded.is_file() else [f"run_dir={args.runs[0]}"]
    if args.verb == "race":  # run_dir is the folder of several runs
        return []
    config = getattr(args, "config", None) or getattr(args, "data", None)
    return ["--config", str(config)] * bool(config) + getattr(args, "overrides", [])


def run_verb(args: argparse.Namespace) -> int:
    """Checks paths and names, sets up the log, and runs the verb; returns its exit code."""
    check_paths(args)
    recipe = getattr(args, "config", None) or getattr(args, "data", None)
    if recipe is not None:
        from mclclip.util import shipped

        shipped.find_recipe(recipe)
    if args.verb == "race":
        from mclclip.util import remedies

        args.remedies = remedies.choose_remedies(args.remedies)
        if recipe is None or not args.remedies:
            raise ValueError(
                "wanted a base configuration and remedies, such as 'mclclip race --config ucm "
                "--remedies mcl ifm'"
            )
    from mclclip.run import runlog

    runlog.setup(failures.number_of("RANK", 0), "DEBUG" if args.verbose else "INFO")
    needs_torch = args.verb not in _QUICK and not getattr(args, "versions", False)
    if needs_torch and "torch" not in sys.modules:
        runlog.log.info("loading torch")
    if args.standalone:
        code = args.function(args)
        return code if isinstance(code, int) else process.EXIT_OK
    from mclclip import config as configuration

    config = configuration.load(args.config, args.overrides)
    return process.run(config, args.verb, lambda context: args.function(config, context, args))
