"""The method's story in plain sentences: what each stage clustered, trained and gained."""

from __future__ import annotations

from collections.abc import Sequence

from mclclip.compare import Comparison
from mclclip.opened_run import Run, Stage
from mclclip.report.clusters import Clustered
from mclclip.report.scores import Comparisons
from mclclip.report.training import Training, duration
from mclclip.run.artifacts import read_manifest

_STARTS = {
    "base": "It started again from the base's weights",
    "random": "It started from random weights",
    "previous": "It went on from the weights of the stage before",
}


_CONTROLS = {
    "ungrouped": "The control “ungrouped” repeated every training from the same weights, for "
    "as many steps, with batches drawn from all samples: what it gains too is not due to groups.",
    "random_groups": "The control “random_groups” repeated every training with groups of the "
    "same sizes whose members were drawn at random.",
}

_JOINED = {
    "concat_raw": "concat_raw joins the features of all stages.",
    "concat_stage_norm": "concat_stage_norm joins them with each stage's at unit length.",
    "concat_weighted": "concat_weighted joins them by weights fitted on held-out pairs.",
    "soup_uniform": "soup_uniform averages the weights of all stages.",
}


def chapters(
    run: Run,
    trainings: Sequence[Training],
    clusters: Sequence[Clustered],
    comparisons: Comparisons,
) -> list[tuple[str, list[str]]]:
    """A title and sentences for every stage, for the joined encoders and for the controls."""
    trained = {one.stage: one for one in trainings if one.variant == "mcl"}
    of_stage = {one.stage: one for one in clusters}
    parts: list[tuple[str, list[str]]] = []
    for stage in run.stages:
        sentences = _trained(stage, trained.get(stage.number))
        sentences += _gained(comparisons, stage.name)
        if stage.number in of_stage:
            sentences += _clustered(of_stage[stage.number])
        title = "Stage 0, the base" if stage.number == 0 else f"Stage {stage.number}"
        parts.append((title, sentences))
    models, joined = {row.model for row in run.result_rows}, []
    for name, sentence in _JOINED.items():
        if name in models or run.layout.joined(name).is_dir():
            joined += [sentence, *_gained(comparisons, name)]
    if joined:
        parts.append(("All stages joined", joined))
    if run.controls:
        parts.append(("Controls", [_CONTROLS.get(name, f"{name}.") for name in run.controls]))
    return parts


def _trained(stage: Stage, training: Training | None) -> list[str]:
    if training is None:
        return ["It is not trained yet."] if stage.number else [_given(stage.run)]
    options = training.made_of.get("train", {})
    objective = options.get("objective", {}).get("kind")
    start = (
        "It was trained from scratch"
        if stage.number == 0
        else _STARTS.get(options.get("start"), "")
    )
    batches = f" of {options['global_batch']:,} samples" if "global_batch" in options else ""
    by = f" by {objective}" if objective else ""
    begun = f"{start} and was trained" if stage.number and start else start or "It was trained"
    done = "" if training.finished else " so far (it is not finished)"
    sentences = [f"{begun}{by} for {training.steps:,} steps{batches}{done}."]
    if stage.number:
        sentences.append(_groups(stage))
    first, last = training.first_loss, training.last_loss
    if first is not None and last is not None and first != last:
        sentences.append(f"Its recorded loss went from {first:.3f} to {last:.3f}.")
    if training.seconds is not None:
        sentences.append(f"That took {duration(training.seconds)}.")
    return sentences


def _given(run: Run) -> str:
    if run.config is None:
        return "It is the given encoder."
    model = run.config.model
    name = model.name if isinstance(model.name, str) else "a model of its own configuration"
    weights = f"with the weights “{model.pretrained}”" if model.pretrained else "as given"
    return f"It is {name}, {weights}; it was not trained here."


def _groups(stage: Stage) -> str:
    if not stage.has("pseudo_labels"):
        return "Its batches were not drawn from groups."
    manifest = read_manifest(stage.directory("pseudo_labels"), "pseudo_labels")
    counts = manifest.counts
    earlier = len(counts.get("radices", ()))
    of = "the clusters of stage 0" if earlier == 1 else f"the clusters of {earlier} stages combined"
    if manifest.config.get("label_mode") == "last":
        of = "the clusters of the stage before"
    sizes = (int(counts[name]) for name in ("smallest", "largest"))
    return (
        f"Each of its batches came from one group where possible: there are "
        f"{counts['num_groups']:,} groups, which are {of}, with "
        f"{' to '.join(f'{size:,}' for size in sizes)} samples."
    )


def _clustered(clustered: Clustered) -> list[str]:
    sizes, algorithm = clustered.counts["sizes"], clustered.options.get("algorithm", "")
    sentence = (
        f"Its embeddings of {clustered.counts['samples']:,} samples were clustered into "
        f"{clustered.options['num_clusters']:,} clusters ({algorithm} k-means) of "
        f"{sizes['smallest']:,} to {sizes['largest']:,} samples"
    )
    sentences = [f"{sentence}, half of them larger than {sizes['median']:,.0f}."]
    if bad := clustered.counts.get("bad_samples"):
        sentences.append(f"{bad:,} samples could not be used.")
    if words := clustered.words():
        sentences.append(f"Words that tell their captions apart: {', '.join(words)}.")
    return sentences


def _gained(comparisons: Comparisons, model: str) -> list[str]:
    """A sentence per benchmark, of its first metric."""
    first: dict[str, Comparison] = {}
    for one in comparisons.of(model):
        first.setdefault(one.row.benchmark, one)
    return [
        f"On {one.row.benchmark} ({one.row.metric}) it has {own} {one.row.unit.name}, which "
        f"is {change} {one.row.unit.difference} against stage 0: {one.verdict}."
        for one in first.values()
        for own, _, change, *_ in [one.texts()]
    ]
