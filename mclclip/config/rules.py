"""All rules between options of different rooms, as one table, and the function that checks them.

The type and the range of a single option stand with the option. Rules about objectives look at what
an objective reads (``objective.reads``), not at its kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from mclclip.config.conditions import TRAINING, Needs, Rule, Subject, excludes
from mclclip.config.options import Config
from mclclip.engines import gradient_cache
from mclclip.eval.protocols import reading_texts
from mclclip.models.options import ModelConfig, architecture_of, more_than_crops, num_blocks
from mclclip.util.options import protocol_of

# --- lines of rows that take more than an expression ---------------------------------------------


def _image_blocks(at: Subject) -> object:
    """Refuses more trained blocks than the image tower has, if that number is known."""
    number, blocks = at.options.lock.image_blocks, None
    if isinstance(number, int) and number:  # `num_blocks` may have to build a tower
        blocks = num_blocks(at.model)
    if not isinstance(number, int) or blocks is None or number <= blocks:
        return None
    is_resnet = isinstance(architecture_of(at.model)[1].get("layers"), list)
    of = f" (the stem and {blocks - 1} residual blocks)" if is_resnet else ""
    name = repr(at.model.name) if isinstance(at.model.name, str) else "the model"
    return (
        f"{at.training}.lock.image_blocks={number}, and the image tower of {name} has {blocks} "
        f"blocks{of}: give 0 to {blocks}, or 'all'"
    )


def _layers(at: Subject) -> object:
    """Refuses locks, adapters and other options that the layers of an image tower do not allow.

    If its configuration is known, the tower is built without weights and prepared for training.
    """
    from mclclip.models.memory import load_shapes
    from mclclip.models.preparing import prepare_model  # seconds, for torch

    if num_blocks(at.model) is None:
        return None

    arguments = at.options.model_arguments() | {"precision": "fp32"}
    try:
        # Patterns name parameters of all parts.
        text = at.model.text and bool(at.options.parameters)
        rows = at.model.text_rows if text else ()
        model = load_shapes(at.model.name, text=text, projector=at.model.projector, text_rows=rows)
        prepare_model(model, **arguments, seed=at.config.seed)
        if at.options.engine.micro_batch is not None:
            gradient_cache.check(model)
    except ValueError as error:
        return f"{at.training}: {error}"
    return None


def _patch_dropout(at: Subject) -> object:
    """Refuses to drop patches in a tower that is no vision transformer of open_clip's own, or whose
    first blocks are locked, since these always see whole pictures."""
    share, vision = at.options.patch_dropout, architecture_of(at.model)[1]
    if not share or not vision:
        return None
    layers, trained = vision.get("layers", 12), at.options.lock.image_blocks
    other = vision.get("timm_model_name") or vision.get("backbone")
    begins = f"{at.training}.patch_dropout={share}"
    if other or isinstance(layers, list):
        return (
            f"{begins}, and the image tower is {other or 'an open_clip ResNet'}: patches are "
            "dropped in open_clip's own vision transformers alone; leave it out"
        )
    locked = layers - trained if isinstance(layers, int) and isinstance(trained, int) else 0
    return locked > 0 and (
        f"{begins}, and {at.training}.lock.image_blocks={trained} locks the first {locked} of "
        f"{layers} blocks, which see whole pictures: set {at.training}.lock.image_blocks=all, or "
        "leave patch_dropout out"
    )


def _long_context(at: Subject, option: str) -> object:
    """Refuses a text tower that cannot be stretched, if the configuration is known.

    ``option`` is "model" or "trained_model". The loader of models refuses the others.
    """
    model: ModelConfig | None = getattr(at.config, option)
    if model is None or not model.long_context or not (architecture := architecture_of(model)[0]):
        return None
    from mclclip.models.towers import longer_config  # seconds, for torch

    return _refusal(lambda: longer_config(architecture), f"{option}.")


def _image_size(at: Subject, option: str) -> object:
    """Refuses an image size that the image tower does not take, if its configuration is known.

    ``option`` is "model" or "trained_model".
    """
    model: ModelConfig | None = getattr(at.config, option)
    if model is None or model.image_size is None or not architecture_of(model)[0]:
        return None
    from mclclip.models.memory import load_shapes  # seconds, for torch

    shaped = replace(model, text=False, long_context=False, text_rows=[])
    return _refusal(lambda: load_shapes(model.name, **shaped.tower_arguments), f"{option}.")


def _image_sizes(at: Subject) -> object:
    """Refuses image sizes that a training would never come to."""
    options, sizes = at.options, at.options.image_size
    epochs = [math.inf if part.epochs is None else part.epochs for part in sizes]
    if math.isinf(sum(epochs[:-1])):
        return (
            f"{at.training}.image_size has sizes after one without epochs, which lasts to the end: "
            "give epochs to all but the last"
        )
    lasting = sum(epoch for epoch in epochs if not math.isinf(epoch))
    never = lasting >= options.epochs if epochs[-1:] == [math.inf] else lasting > options.epochs
    return (
        options.steps is None
        and never
        and (
            f"{at.training}.image_size lists {lasting:g} epochs, and {at.training}.epochs="
            f"{options.epochs:g}: give fewer, or leave the last one's epochs out"
        )
    )


def _refusal(accept: Callable[[], object], prefix: str = "") -> str:
    """Returns the message of the ValueError that ``accept`` raises, after ``prefix``; else ""."""
    try:
        accept()
    except ValueError as error:
        return f"{prefix}{error}"
    return ""


def _reads_texts(model: ModelConfig) -> bool:
    from mclclip.models.loading import has_texts  # seconds, for torch

    return bool(model.text and (model.text_rows or has_texts(model.name)))


def _width(model: ModelConfig) -> int:
    """Returns the width of the features that an objective gets of a model; reads no weights."""
    from mclclip.models.loading import has_texts, model_config
    from mclclip.models.memory import load_shapes

    if model.projector:
        return model.projector[-1]
    if has_texts(model.name):
        width: int = model_config(model.name)["embed_dim"]
        return width
    return load_shapes(model.name, text=False).embed_dim


def _centroids(at: Subject) -> object:
    """Refuses centroids as class centers of features of another width."""
    clustered, trained = at.config.model, at.config.trained_model
    if trained is None or not at.options.objective.reads.centroids:
        return None
    # Embeddings, of which centroids are means, lie before the projector.
    widths = _width(replace(clustered, projector=[])), _width(trained)
    return widths[0] != widths[1] and (
        f"trained_model has features of {widths[1]} dimensions, and centroids of {widths[0]} "
        f"cannot start the class centers of {at.objective}: set {at.training}.objective.centers="
        "normal"
    )


def _architectures(at: Subject) -> object:
    """Refuses to join stages with a base of another architecture."""
    from mclclip.models.loading import model_config

    base, trained, export = at.config.model, at.config.trained_model, at.config.export
    if trained is None or not (export.concat or export.soup):
        return None
    equal = model_config(base.name) == model_config(trained.name)
    shapes = [(m.long_context, m.image_size, m.text_rows) for m in (base, trained)]
    return not (equal and shapes[0] == shapes[1]) and (
        "trained_model has another architecture than model, and only stages of one architecture "
        "can be joined: set export.concat=[] and export.soup=false"
    )


def _global_batch(at: Subject) -> object:
    """Refuses a batch that the ranks do not divide, and names numbers of ranks that do."""
    batch, ranks = at.options.global_batch, at.num_ranks
    fits = [n for n in range(1, min(max(2 * ranks, 128), batch) + 1) if batch % n == 0]
    return batch % ranks and (
        f"{at.training}.global_batch={batch} cannot be cut over {ranks} ranks: use one of {fits} "
        f"ranks, or a multiple of {ranks} as {at.training}.global_batch"
    )


def _optimizer(at: Subject) -> object:
    """Refuses an optimizer that does not exist, or that DeepSpeed does not run."""
    from mclclip.models.optimizer import is_elementwise  # seconds, for torch

    if missing := _refusal(lambda: is_elementwise(at.options.optimizer), f"{at.training}."):
        return missing
    if at.num_ranks == 1 or at.options.engine.name != "deepspeed":
        return None
    return not is_elementwise(at.options.optimizer) and (
        f"{at.training}.optimizer={at.options.optimizer} looks at whole parameters, as LARS and "
        f"LAMB do, which {at.training}.engine.name=deepspeed does not run: take another "
        "optimizer, or engine.name=ddp or fsdp"
    )


def _mirror(at: Subject) -> object:
    """Refuses a mirror of checkpoints inside the run directory, with which it would be lost."""
    mirror, run_dir = at.options.checkpoint.mirror, Path(at.config.run_dir).resolve()
    if mirror is None or protocol_of(mirror) is not None:
        return None
    return Path(mirror).expanduser().resolve().is_relative_to(run_dir) and (
        f"{at.training}.checkpoint.mirror={mirror!r} lies in the run directory {run_dir}, with "
        "which it would be lost: give a folder outside of it, on another disk"
    )


def _metric(at: Subject) -> object:
    """Refuses to evaluate a training on a benchmark that ``eval.suite`` does not have."""
    suite, how = at.config.eval.suite, at.options.evaluate
    lacking = [name for name in how.suite if name not in suite]
    names = how.suite or list(suite)
    if how.every is not None and not names:
        return f"{at.training}.evaluate.every={how.every}, and eval.suite has no benchmark: set it"
    option, among = ("suite", list(suite)) if lacking else ("metric", names)
    if not lacking and how.metric is not None:
        lacking = [name for name in [how.metric.partition("/")[0]] if name not in names]
    return lacking and (
        f"{at.training}.evaluate.{option} names the benchmark {lacking[0]!r}: wanted one of "
        f"{', '.join(among) or 'eval.suite, which is empty'}"
    )


# --- the table -----------------------------------------------------------------------------------

_ROWS = "image_rows.enabled=true"
_WHOLE_TOWER = (
    "train.lock.image_blocks=0", "train.lock.image_norm=false", "train.lock.image_projection=false",
)  # fmt: skip
_NEAR_START = "train.objective.reads" + ".near_start=true"  # a property, no option
_HOLDS = "the objective holds the model near stage 0, and"

RULES: tuple[Rule, ...] = (
    # --- where stages start
    excludes("base.start!=base", because="it says where later stages start: set train.start"),
    excludes("train.start!=base", "trained_model",
             because="both say where stages start: leave one out"),
    excludes("train.start=random", "export.soup=true", "num_stages>0",
             because="every stage has weights of its own, and a soup averages models of one base "
             "only: set export.soup=false"),
    excludes("trained_model", "train.lock.text=false", "train.cached_text=true",
             "train.objective.reads.captions=true",
             because="text embeddings are stored of another text tower than it has: set "
             "train.cached_text=false, or train.lock.text=true"),
    Rule("trained_model", _architectures, "run"),
    # --- what objectives read
    excludes("base.objective.reads.clusters>0",
             because="it needs the clusters of a stage before: set it in train.objective"),
    excludes("base.objective.reads.needs_stage_0=true",
             because="it reads what stage 0 has, which it makes: set it in train.objective, or "
             "name a teacher"),
    Rule("TRAINING.objective.labels_per_sample", lambda at: (
        (number := at.options.objective.reads.clusters) > at.config.cluster.labels_per_sample
        and f"{at.training}.objective.labels_per_sample={number} is more than "
        f"cluster.labels_per_sample={at.config.cluster.labels_per_sample}, what is stored: raise "
        "the latter")),
    Rule("TRAINING.objective", lambda at: (
        at.options.objective.reads.captions and not _reads_texts(at.model)
        and f"{at.objective} reads captions, and the model has no text tower: take an objective "
        "of views, such as nt_xent, or a CLIP model"), "run"),
    Rule("TRAINING.objective.centers", _centroids, "run"),
    Rule("TRAINING.objective.sample_rate", lambda at: (
        (rate := at.options.objective.reads.drawn)
        and round(rate * (fewest := at.config.cluster.fewest)) == 0
        and f"cluster.num_clusters={fewest}, of which {at.training}.objective.sample_rate={rate} "
        "draws none: raise one")),
    Rule("TRAINING.objective.queue_size", lambda at: (
        0 < (queued := at.options.objective.reads.queue_size) < at.options.global_batch
        and f"{at.training}.global_batch={at.options.global_batch} and {at.training}.objective."
        f"queue_size={queued}, which has to hold the keys of a batch: raise queue_size")),
    excludes("TRAINING.engine.zero_stage=3", "TRAINING.engine.name=deepspeed",
             "TRAINING.objective.reads.follows_weights=true",
             because="a momentum copy follows parameters, which are shared out at this stage: set "
             "engine.zero_stage to 1 or 2, or engine.name=fsdp"),
    excludes("TRAINING.engine.micro_batch", "TRAINING.precision=fp16",
             "TRAINING.objective.reads.changes_pixels=true",
             because="the gradient of an adversary, which changes pixels, would be multiplied by "
             "the loss scale: set precision=bf16, or leave micro_batch out"),
    excludes("TRAINING.sentences", "TRAINING.objective.reads.captions=false",
             because="it draws sentences of captions, and the objective reads none: leave it out"),
    excludes("train.sentences", "train.lock.text=false", "train.cached_text=true",
             "train.objective.reads.captions=true",
             because="it draws other texts in every epoch, and text embeddings are stored once: "
             "set train.cached_text=false, which runs the text tower, or leave train.sentences "
             "out"),
    Rule("TRAINING.objective.widths", lambda at: (
        at.options.objective.reads.widths and at.model.projector
        and f"{at.training}.objective.widths are those of model.projector={at.model.projector}, "
        "which exports leave behind: leave one out")),
    Rule("TRAINING.objective.widths", lambda at: (
        (widths := at.options.objective.reads.widths) and max(widths) > (dim := _width(at.model))
        and f"{at.training}.objective.widths={sorted(widths)}, and features have {dim} numbers: "
        "give widths up to it"), "run"),
    # --- objectives that read other encoders
    excludes(_NEAR_START, "train.start!=base",
             because=f"{_HOLDS} stages then have other weights than stage 0: leave it out"),
    excludes(_NEAR_START, "trained_model",
             because=f"{_HOLDS} stages then start from another encoder: take kind=distill"),
    excludes(_NEAR_START, "model.projector",
             because=f"{_HOLDS} it stands between the encoder and the objective: leave it out"),
    excludes("train.objective.reads.of_stage_0=image_features", "embed.feature=pooled",
             because="the objective reads stored features of stage 0, and these are not those of "
             "training: set embed.feature=projected, or exact: true in the objective"),
    excludes("TRAINING.objective.reads.of_encoders=text_features", "TRAINING.sentences",
             because="whole captions are stored, of which it trains on parts: leave it out"),
    excludes("train.objective.reads.of_encoders=model", _ROWS,
             because="the teacher sees crops, in whose place are rows: leave exact out of the "
             "objective"),
    # --- the image tower
    Rule("TRAINING.lock.image_blocks", _image_blocks),
    Rule("TRAINING.patch_dropout", _patch_dropout),
    Rule("TRAINING.lock", _layers, "run"),
    Rule("TRAINING.image_size", _image_sizes),
    Rule("image_rows.enabled", lambda at: (
        at.config.image_rows.enabled and at.config.train.image_size
        and f"{_ROWS} and train.image_size: stored rows are of pictures of the model's own size: "
        "leave one out")),
    *(Rule(f"{option}.image_size", partial(_image_size, option=option), "run")
      for option in ("model", "trained_model")),
    Rule("data.pixels", lambda at: (
        at.config.data.pixels == "fast" and at.training in at.config.trainings
        and (more := more_than_crops(at.model))
        and "data.pixels=fast only crops and resizes, and the augmentation asks for "
        f"{', '.join(more)}: set data.pixels=exact, or leave that out of model.augmentation")),
    excludes(_ROWS, "train.objective.reads.num_views>1",
             because="all views of an image would be equal: take an objective of one view"),
    Rule("image_rows.enabled", lambda at: (
        at.config.image_rows.enabled
        and (blocks := at.config.train.lock.image_blocks) in ("all", num_blocks(at.config.model))
        and f"{_ROWS} and train.lock.image_blocks={blocks}, which freezes no block: give the "
        "number of the last blocks that are trained, fewer than there are")),
    excludes(_ROWS, "train.start=random",
             because="stages have other first blocks than stage 0: leave one out"),
    excludes(_ROWS, "trained_model",
             because="it has other first blocks than stage 0 has: leave one out"),
    Rule("image_rows.enabled", lambda at: (
        at.config.image_rows.enabled
        and (augmentation := at.config.model.augmentation) not in ({}, {"kind": "none"})
        and f"{_ROWS} and model.augmentation={augmentation}, which would have no effect, since "
        "every epoch has the same crops: leave it out")),
    excludes(_ROWS, "relocate.enabled=true",
             because="it copies images, which are not read then: leave one out"),
    excludes(_ROWS, *_WHOLE_TOWER, "embed.feature=pooled",
             because="embeddings stand for images, and these are not those of training: set "
             "embed.feature=projected"),
    excludes(_ROWS, *_WHOLE_TOWER, "model.projector",
             because="embeddings stand for images, and lie before it: leave it out"),
    # --- the text tower
    *(rule for option in ("model", "trained_model") for rule in (
        excludes(f"{option}.long_context=true", f"{option}.text=false",
                 because="the former stretches the text tower: leave one out"),
        Rule(f"{option}.long_context", partial(_long_context, option=option)),
    )),
    Rule("TRAINING.objective", lambda at: at.model.text_rows
         and (at.options.sentences or at.options.objective.reads.edits)
         and f"{at.training}.sentences and objective.hard_captions make other texts of captions, "
         "and model.text_rows has rows of whole captions: leave them or the rows out"),
    Rule("trained_model.text_rows", lambda at: (
        (trained := at.config.trained_model) and trained.text_rows and at.config.model.text_rows
        and trained.text_rows != at.config.model.text_rows
        and "trained_model.text_rows and model.text_rows name different files, and a run has one "
        "folder of rows: give both the same")),
    # --- stages, controls and what is measured
    Rule("cluster.num_clusters", lambda at: (
        isinstance(numbers := at.config.cluster.num_clusters, list)
        and len(numbers) < at.config.num_stages
        and f"cluster.num_clusters={numbers} is for {len(numbers)} clusterings, and num_stages="
        f"{at.config.num_stages} has one for each stage: give as many, or one number for all")),
    Rule("controls", lambda at: (
        at.config.controls and not at.config.train.objective.reads.groups
        and f"controls={at.config.controls} do not apply to {at.objective}, which reads no groups: "
        "leave them out")),
    Rule("controls", lambda at: (
        at.config.controls and at.config.train.evaluate.patience is not None
        and f"controls={at.config.controls} take as many steps as the training they control, and "
        "train.evaluate.patience may end either of them early: leave out controls or patience")),
    Rule("eval.encoders", lambda at: (
        (absent := [n for n in at.config.eval.encoders or [] if n not in at.config.encoders])
        and f"eval.encoders names {absent[0]!r}, which the run does not make: wanted some of "
        f"{', '.join(at.config.encoders)}, without the prefix of a control")),
    Rule("eval.suite", lambda at: (
        at.config.has_stages and at.config.export.concat
        and (pooled := [name for name, benchmark in at.config.eval.suite.items()
                        if benchmark.options.get("feature") == "pooled"])
        and f"eval.suite.{pooled[0]}.options.feature=pooled, which the joined encoders of "
        f"export.concat={at.config.export.concat} do not have: set export.concat=[], or "
        "feature=projected")),
    Rule("eval.suite", lambda at: (
        (names := reading_texts(at.config.eval.suite)) and not _reads_texts(at.config.model)
        and f"eval.suite.{names[0]} compares images with texts, and the model has no text tower: "
        "leave it out, or take a CLIP model"), "run"),
    Rule("eval.text_rows", lambda at: at.config.eval.text_rows and not at.config.text_rows
         and "eval.text_rows goes with model.text_rows, which names no file: set that too"),
    Rule("TRAINING.checkpoint.mirror", _mirror),
    Rule("TRAINING.evaluate", _metric),
    excludes("relocate.url", "relocate.enabled=true", "num_stages>0", needs="run",
             because="copies are uploaded there between the verbs 'relocate' and 'train', and "
             "'run' would train before that: leave it out, or call the verbs"),
    # --- ranks
    Rule("TRAINING.global_batch", _global_batch, "ranks"),
    Rule("TRAINING.engine.shard_ranks", lambda at: (
        at.num_ranks > 1 and at.options.engine.name == "fsdp"
        and at.num_ranks % (at.options.engine.shard_ranks or 1)
        and f"{at.training}.engine.shard_ranks={at.options.engine.shard_ranks} does not divide the "
        f"{at.num_ranks} ranks: give a divisor, such as the number of GPUs of a node"), "ranks"),
    Rule("TRAINING.optimizer", _optimizer, "ranks"),
    excludes("TRAINING.engine.name=deepspeed", "TRAINING.precision=float64", "num_ranks>1",
             needs="ranks", because="DeepSpeed trains float32 parameters: set engine.name=ddp or "
             "fsdp"),
)  # fmt: skip


def check(
    config: Config,
    *,
    num_ranks: int | None = None,
    run: bool = False,
    training: str | None = None,
) -> None:
    """Raises ValueError for the first broken rule, with the lines of the others as its notes.

    Rules on options alone are checked first. If all are kept, those on the number of ranks are
    checked if ``num_ranks`` is given, and then those on a whole run if ``run`` is set. ``training``
    checks the rules of this training ("base" or "train") alone.
    """
    phases: dict[Needs, object] = {"options": True, "ranks": num_ranks, "run": run}
    for needs in [needs for needs, is_known in phases.items() if is_known]:
        lines = [
            str(line)
            for rule in RULES
            for name in (config.trainings if TRAINING in rule.option else ["train"])
            if rule.needs == needs and training in (None, name)
            if (line := rule.line(Subject(config, name, num_ranks or 1)))
        ]
        if lines:
            error = ValueError(lines[0])
            for line in lines[1:]:
                error.add_note(line)
            raise error
