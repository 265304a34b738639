"""The method's story in plain sentences: what each stage clustered, trained and gained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mclclip.compare import Comparison
from mclclip.report.clusters import Clustered
from mclclip.report.material import Material
from mclclip.report.scores import Verdicts
from mclclip.report.training import Training, duration

_STARTS = {
    "base": "It started again from the base's weights",
    "random": "It started from random weights",
    "previous": "It went on from the weights of the stage before",
}


@dataclass(frozen=True)
class Chapter:
    """A stage's part of the story: a title and sentences."""

    title: str
    sentences: Sequence[str]


def chapters(
    material: Material,
    trainings: Sequence[Training],
    clusters: Sequence[Clustered],
    verdicts: Verdicts,
) -> list[Chapter]:
    """A chapter for every stage, one for the joined encoders and one for the controls."""
    trained = {found.stage: found for found in trainings if found.variant == "mcl"}
    of_stage = {found.stage: found for found in clusters}
    found = []
    for stage in material.stages:
        sentences = _trained(material, stage, trained.get(stage))
        sentences += _gained(verdicts, f"stage_{stage}")
        if stage in of_stage:
            sentences += _clustered(of_stage[stage])
        title = "Stage 0, the base" if stage == 0 else f"Stage {stage}"
        found.append(Chapter(title, sentences))
    if joined := _joined(material, verdicts):
        found.append(Chapter("All stages joined", joined))
    if controls := [name for name in material.variants if name != "mcl"]:
        found.append(Chapter("Controls", [_CONTROLS.get(name, f"{name}.") for name in controls]))
    return found


_CONTROLS = {
    "ungrouped": "The control “ungrouped” repeated every training from the same weights, for "
    "as many steps, with batches drawn from all samples: what it gains too is not due to groups.",
    "random_groups": "The control “random_groups” repeated every training with groups of the "
    "same sizes whose members were drawn at random.",
}


def _trained(material: Material, stage: int, training: Training | None) -> list[str]:
    if training is None:
        return [_given(material)] if stage == 0 else ["It is not trained yet."]
    options = training.made_of.get("train", {})
    objective = options.get("objective", {}).get("kind")
    start = "It was trained from scratch" if stage == 0 else _STARTS.get(options.get("start"), "")
    batches = f" of {options['global_batch']:,} samples" if "global_batch" in options else ""
    by = f" by {objective}" if objective else ""
    begun = f"{start} and was trained" if stage and start else start or "It was trained"
    done = "" if training.finished else " so far (it is not finished)"
    sentences = [f"{begun}{by} for {training.steps:,} steps{batches}{done}."]
    if stage:
        sentences += _groups(material, stage)
    first, last = training.first_loss, training.last_loss
    if first is not None and last is not None and first != last:
        sentences.append(f"Its recorded loss went from {first:.3f} to {last:.3f}.")
    if training.seconds is not None:
        sentences.append(f"That took {duration(training.seconds)}.")
    return sentences


def _given(material: Material) -> str:
    if material.config is None:
        return "It is the given encoder."
    model = material.config.model
    name = model.name if isinstance(model.name, str) else "a model of its own configuration"
    weights = f"with the weights “{model.pretrained}”" if model.pretrained else "as given"
    return f"It is {name}, {weights}; it was not trained here."


def _groups(material: Material, stage: int) -> list[str]:
    manifest = material.manifest(material.layout.pseudo_labels(stage), "pseudo_labels")
    if manifest is None:
        return ["Its batches were not drawn from groups."]
    counts: Mapping[str, Any] = manifest.counts
    earlier = len(counts.get("radices", ()))
    of = "the clusters of stage 0" if earlier == 1 else f"the clusters of {earlier} stages combined"
    if manifest.config.get("label_mode") == "last":
        of = "the clusters of the stage before"
    sizes = (int(counts[name]) for name in ("smallest", "largest"))
    return [
        f"Each of its batches came from one group where possible: there are "
        f"{counts['num_groups']:,} groups, which are {of}, with "
        f"{' to '.join(f'{size:,}' for size in sizes)} samples."
    ]


def _clustered(found: Clustered) -> list[str]:
    sizes, algorithm = found.counts["sizes"], found.options.get("algorithm", "")
    sentence = (
        f"Its embeddings of {found.counts['samples']:,} samples were clustered into "
        f"{found.options['num_clusters']:,} clusters ({algorithm} k-means) of "
        f"{sizes['smallest']:,} to {sizes['largest']:,} samples"
    )
    sentences = [f"{sentence}, half of them larger than {sizes['median']:,.0f}."]
    if bad := found.counts.get("bad_samples"):
        sentences.append(f"{bad:,} samples could not be used.")
    if words := found.words():
        sentences.append(f"Words that tell their captions apart: {', '.join(words)}.")
    return sentences


def _gained(verdicts: Verdicts, model: str) -> list[str]:
    """A sentence per benchmark, of its first metric."""
    first: dict[str, Comparison] = {}
    for found in verdicts.of(model):
        first.setdefault(found.row.benchmark, found)
    return [
        f"On {found.row.benchmark} ({found.row.metric}) it has {own} {found.row.unit.name}, which "
        f"is {change} {found.row.unit.difference} against stage 0: {found.verdict}."
        for found in first.values()
        for own, _, change, *_ in [found.texts()]
    ]


def _joined(material: Material, verdicts: Verdicts) -> list[str]:
    kinds = {
        "concat_raw": "concat_raw joins the features of all stages.",
        "concat_stage_norm": "concat_stage_norm joins them with each stage's at unit length.",
        "concat_weighted": "concat_weighted joins them by weights fitted on held-out pairs.",
        "soup_uniform": "soup_uniform averages the weights of all stages.",
    }
    models = {row.model for row in material.rows}
    sentences = []
    for name, sentence in kinds.items():
        if name in models or material.layout.joined(name).is_dir():
            sentences += [sentence, *_gained(verdicts, name)]
    return sentences
