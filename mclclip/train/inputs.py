"""A training of one stage: its options, its place in the run, and the files that it reads."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cached_property, reduce
from pathlib import Path

import numpy as np

from mclclip.config import Config, TrainConfig
from mclclip.data.decode import Pixels
from mclclip.data.epoch_plan import EpochPlan
from mclclip.data.extras import BaseFeatures, EqualityDigests, report_edits
from mclclip.data.groups import GroupedIndex
from mclclip.data.index_tables import check_shards
from mclclip.data.labels import AttributeClasses, ClassLabels, SampleWeights
from mclclip.data.locations import Locations
from mclclip.data.row_store import StoredRows, left_out
from mclclip.data.sample_index import SampleIndex
from mclclip.data.samples import Extra
from mclclip.data.text_rows import TextRows, width_of
from mclclip.models.clip import clean_caption
from mclclip.ranks import collectives
from mclclip.ranks.process_group import Context
from mclclip.run.artifacts import RunPaths, read_identity
from mclclip.train.loop import Evaluate
from mclclip.util.caption_rules import HardCaptions

log = logging.getLogger("mclclip")


@dataclass(frozen=True)
class StageTraining:
    """The training of one stage of one variant: its options, its place in the run, its samples.

    ``evaluate`` measures its checkpoints where its options ask for evaluations.
    """

    config: Config
    options: TrainConfig
    context: Context
    layout: RunPaths
    stage: int
    index: SampleIndex
    evaluate: Evaluate | None = None

    @property
    def name(self) -> str:
        """The option that holds its settings: ``base`` for stage 0, else ``train``."""
        return "train" if self.stage else "base"

    @property
    def directory(self) -> Path:
        """The directory of checkpoints, metrics and the grouped index."""
        return self.layout.train(self.stage)

    @property
    def title(self) -> str:
        """The name in log lines: the variant if the objective reads groups, such as
        'random_groups', else the kind of the objective."""
        objective = self.options.objective
        return self.layout.variant if objective.reads.groups and self.stage else objective.kind

    @property
    def reads_groups(self) -> bool:
        """True if each batch is made of samples that share a pseudo label."""
        groups = self.options.objective.reads.groups and self.stage > 0
        return groups and self.layout.variant != "ungrouped"

    @property
    def reads_image_rows(self) -> bool:
        """True if stored outputs of frozen blocks, or of the whole frozen tower, replace images."""
        return self.stage > 0 and self.config.image_rows.enabled

    @property
    def stored_texts(self) -> tuple[HardCaptions | None, ...]:
        """``TrainConfig.stored_texts`` after stage 0, which itself reads captions."""
        return self.options.stored_texts if self.stage > 0 else ()

    @cached_property
    def left_out(self) -> dict[str, np.ndarray]:
        """Returns the ids of the samples that lack what the objective reads, by what they lack:
        'without_caption', 'without_attribute' or 'without_embedding'.

        Raises ValueError where all samples lack what the objective reads.
        """
        reads, reader = self.options.objective.reads, self.options.reader(self.name)
        lacking: dict[str, np.ndarray] = {}
        if reads.captions:
            lacking["without_caption"] = self.index.without_caption(reader)
        if reads.attribute is not None:
            lacking["without_attribute"] = self.index.without_attribute(reads.attribute, reader)
        every = {encoder for encoder, what in reads.encoders if what == "image_features"}
        if every:
            folders = [self.layout.encoder(encoder) / "embeddings" for encoder in every]
            without = [left_out(folder, len(self.index.shards)) for folder in folders]
            lacking["without_embedding"] = reduce(np.union1d, without)
        return lacking

    @cached_property
    def weights(self) -> SampleWeights | None:
        """How often an epoch draws each sample; None: once. Raises the errors of
        ``SampleWeights.open``."""
        plan, option = self.options.plan, f"{self.name}.plan"
        return SampleWeights.open(self.index, self.config.data, plan, option)

    @cached_property
    def classes(self) -> ClassLabels | AttributeClasses | None:
        """The clusters of the stage before, or the values of an attribute, for objectives that
        read them; else None. Reads and compares their files: rank 0 alone asks for it, and all
        ranks are given what it read in ``TrainingInputs``."""
        reads = self.options.objective.reads
        if reads.attribute is not None:
            return AttributeClasses(self.index, reads.attribute)
        if not reads.clusters:
            return None
        directory = self.layout.clusters(self.stage - 1)
        return ClassLabels(directory, self.index, reads.clusters, reads.threshold)

    @cached_property
    def text_rows(self) -> TextRows | None:
        """The user's rows that stand for captions (``model.text_rows``); None where captions or no
        texts are read. Raises the errors of ``TextRows``."""
        files = self.config.model_of(self.name).text_rows
        if not files or not self.options.objective.reads.captions:
            return None
        return TextRows([self.layout.text_rows], width_of(files))

    def read_extras(self) -> list[Extra]:
        """Returns further tensors of every sample, which the objective reads. Raises ValueError
        where the index cannot tell equal pictures, and the errors of ``BaseFeatures``."""
        reads, extras = self.options.objective.reads, list[Extra]()
        if reads.digests:
            pictures = self.index if self.reads_image_rows else None
            extras.append(EqualityDigests(clean_caption, pictures, sorted(reads.digests)))
        edits = next(filter(None, self.stored_texts), None)
        if reads.stored or edits:
            extras.append(BaseFeatures(self.layout, self.index, reads.stored, edits))
        return extras

    @cached_property
    def pixels(self) -> Pixels:
        """How images become pixels: 'exact' or 'fast'. If ``data.pixels`` is ``auto``, a control
        uses the same as the training that it is compared with."""
        if self.config.data.pixels == "auto" and self.layout.variant != "mcl":
            original = read_identity(RunPaths.of(self.config).train(self.stage)).get("config", {})
            taken: Pixels | None = original.get("data", {}).get("pixels")
            if taken is not None:  # it read pictures
                return taken
        return self.config.pixels_of(self.name)

    def plan(self, grouped: GroupedIndex) -> EpochPlan:
        """The plan of the first epoch.

        Without groups no blocks stay together: neighbours in the index may have more in common than
        two samples of a batch by chance.
        """
        options, how = self.options, self.options.plan
        return EpochPlan(
            grouped, options.global_batch, how.policy, how.order, self.config.seed, self.stage,
            epoch=0, block=how.block if self.reads_groups else 1,
        )  # fmt: skip


@dataclass(frozen=True)
class TrainingInputs:
    """The files that a training reads beside its index, as all ranks have opened them."""

    classes: ClassLabels | AttributeClasses | None
    locations: Locations
    extras: list[Extra]
    image_rows: StoredRows | None = None


def read_inputs(training: StageTraining) -> TrainingInputs:
    """Opens and checks the files that a training reads; all ranks call it.

    Rank 0 reads the small ones and sends them to the others; each rank memory-maps the large ones.
    """
    config, index = training.config, training.index

    def check() -> tuple[ClassLabels | AttributeClasses | None, Locations, StoredRows | None]:
        if edits := training.options.objective.reads.edits:
            report_edits(edits, index, config.data, training.name)
        classes, locations, image_rows = training.classes, _open_locations(training), None
        if training.reads_image_rows:
            whole = not config.writes_image_rows
            image_rows = StoredRows.of_images(training.layout, index, whole)
        check_shards(index.directory, index.shards, config.data)
        return classes, locations, image_rows

    extras = collectives.raise_on_every_rank(training.read_extras)
    classes, locations, image_rows = collectives.on_main(check)
    collectives.raise_on_every_rank(lambda: locations.table)  # maps it, in every process
    return TrainingInputs(classes, locations, extras, image_rows)


def _open_locations(training: StageTraining) -> Locations:
    """Returns the places of the samples: in the copies that ``relocate`` wrote for this stage's
    groups if the options ask for them, else in the shards of the index."""
    options, layout = training.config.relocate, training.layout
    if not options.enabled or not training.reads_groups or layout.variant != "mcl":
        return Locations(training.index)
    directory = layout.relocated(training.stage, options.folder)
    url = options.url and f"{options.url.rstrip('/')}/stage_{training.stage}"
    return Locations.open(directory, training.index, url, training.config.data.remote)
