"""InfoNCE: each image picks its own caption out of the batch, and each caption its own image.

With unit features v_p of images and t_p of captions, the logit scale s (one over the temperature)
and N_p, the samples that p is compared with, the loss of row p of images against captions is

    L_p = -log( exp(s v_p . t_p) / (exp(s v_p . t_p) + sum over q in N_p of exp(s v_p . t_q)) )

The loss of captions against images exchanges v and t; the result is the mean of both directions
over the rows of the global batch. In CLIP N_p holds all other samples. MCL's mask (Eq. 3) leaves
those in that have p's pseudo label and are not p itself, so batches of one group, mixed batches and
repeated samples are all exact. A row without negatives has loss 0 and gradient 0.

Source: Radford et al., "Learning Transferable Visual Models From Natural Language Supervision"
(CLIP, 2021), Figure 3; van den Oord et al., "Representation Learning with Contrastive Predictive
Coding" (2018), Eq. 4; the mask is Eq. 3 of MCL.

Inputs: ``image_features`` and ``text_features`` [b, D] of this rank, unit length, row i of both one
sample; ``labels`` [b, 1] and ``sample_id`` [b]; ``logit_scale`` [] where no temperature is set.

Use it as the default where samples have captions. Its batch is its supply of negatives: where only
small batches fit, try ``hcl``, or ``sigmoid``, which needs no whole rows.
``equal_captions: masked`` is for data in which captions or pictures repeat, ``hard_captions`` for
models that mix up colours, counts or places.

Relations: ``nt_xent`` is this loss between two views of an image. ``ifm`` adds a second one with
harder positives, ``hcl`` weighs its negatives, ``supcon`` has several positives for a row, and
``sigmoid`` replaces its softmax by one question for each pair. With ``equal_captions: positives``
the loss of a row is ``supcon``'s L_out over the rows with an equal caption.

Its slow reference is ``info_nce`` (with edited captions ``edited``, with equal ones
``info_nce_of_equals``) in tests/objective_loops.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from pydantic.dataclasses import dataclass as checked_dataclass
from torch import Tensor, nn

from mclclip.objectives.base import BatchFields, Features, ObjectiveInputs, Reads
from mclclip.objectives.contrast import (
    Between,
    Contrast,
    ContrastOptions,
    EqualCaptions,
    Temperature,
)
from mclclip.objectives.row_losses import Pairs, count_columns, log_sums, row_losses, sum_columns
from mclclip.util.caption_rules import HardCaptions
from mclclip.util.options import STRICT


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class Options(ContrastOptions):
    """CLIP's contrastive loss with MCL's mask: images against captions."""

    kind: Literal["info_nce"] = "info_nce"
    """Which objective."""
    equal_captions: EqualCaptions = "negatives"  # type: ignore[misc]
    """Role of rows with an equal caption (after open_clip's cleaning) or the same picture for each
    other: ``negatives`` as in open_clip; ``masked``: left out of each other's negatives; or
    ``positives``: the loss is the mean over all positives of a row, which changes nothing where
    the features of equal captions are equal."""
    hard_captions: HardCaptions | None = None
    """Edited captions as further negatives of images, such as ``{rules: [colour, swap], scope:
    global}``; ``{}`` takes all rules (null: none)."""

    between: ClassVar[Between] = "captions"

    @property
    def reads(self) -> Reads:
        """Edited captions too, where there are some."""
        return replace(super().reads, edits=self.hard_captions)

    def build(self, inputs: ObjectiveInputs) -> Contrast:
        """Returns the loss; a trained temperature is its only parameter."""
        return InfoNCE(
            self.between,
            self.new_temperature(inputs),
            hard_captions=self.hard_captions,
            equal_captions=self.equal_captions,
        )


class InfoNCE(Contrast):
    """The contrastive loss in which only samples of one group are each other's negatives.

    With the model's temperature, the default, it has no parameters of its own.

    With ``hard_captions`` samples bring h more texts each. Row p of images against captions then
    has further negatives: the texts of its own sample (``own``), or those of all samples of its
    group, its own among them (``global``; NegCLIP, Yuksekgonul et al., "When and why
    vision-language models behave like bags-of-words", 2023). Captions meet images as before. With
    L the loss of a row without them, s its own logit and S the log-sum-exp of the further logits,
    the loss is log(exp L + exp(S - s)); of a row without any it is L, bit for bit. A text that is
    absent has zeros for its feature, in which nothing else is 0 in all columns.

    Beside the parts of ``Contrast``: ``rows_with_edits``, samples of the global batch that meet
    such a text. ``how``: further arguments of ``Contrast``.
    """

    def __init__(
        self,
        between: Between = "captions",
        temperature: Temperature | None = None,
        *,
        hard_captions: HardCaptions | None = None,
        **how: Any,
    ) -> None:
        super().__init__(between, temperature, **how)
        self.hard_captions = hard_captions
        num = 0 if hard_captions is None else hard_captions.per_caption
        self.names += tuple(f"edited_features_{number}" for number in range(num))

    def features(
        self, model: nn.Module, batch: BatchFields, features: Features
    ) -> dict[str, Tensor]:
        """Adds the features of the edited captions, ``edited_features_0`` and so on [b, D]."""
        features = super().features(model, batch, features)
        if self.hard_captions is None:
            return features
        if (edited := batch.extras.get("edited_features")) is None:
            tokens, present = batch.extras["edited_text"], batch.extras["has_edit"]
            edited = model(text=tokens.flatten(0, 1))["text_features"]
            edited = edited.reshape(*present.shape, -1)
            edited = torch.where(present[:, :, None], edited, torch.zeros_like(edited))
        by_number = enumerate(edited.unbind(dim=1))
        return features | {f"edited_features_{n}": each for n, each in by_number}

    def chance(self, features: Features, batch: BatchFields, parts: Features) -> Tensor:
        """Returns the loss where all features are alike, of the texts that there are."""
        if self.hard_captions is None:
            return super().chance(features, batch, parts)
        compared = {name: features[name] for name in self.names}
        alike = {n: x.ne(0).any(dim=1, keepdim=True).to(x.dtype) for n, x in compared.items()}
        loss: Tensor = self({**features, **alike}, batch)["loss"]
        return loss

    def directions(
        self,
        local: Sequence[Tensor],
        everywhere: Sequence[Tensor],
        marks: Sequence[Tensor],
        all_marks: Sequence[Tensor],
        scale: Tensor,
    ) -> list[tuple[Tensor, Tensor, Pairs]]:
        """Those of ``Contrast``; the keys of images end in the edited captions, h times [B, D]."""
        if self.hard_captions is None:
            return super().directions(local, everywhere, marks, all_marks, scale)
        images, captions = super().directions(local[:2], everywhere[:2], marks, all_marks, scale)
        queries, keys, pairs = images
        return [(queries, torch.cat([keys, *everywhere[2:]]), pairs), captions]

    def rows(
        self, queries: Tensor, keys: Tensor, pairs: Pairs, scale: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Cross-entropy of the own pair among the pairs that its row counts.

        With equal captions as positives it is the mean, over these and the own pair, of their
        cross-entropies among all pairs of the group (SupCon's ``L_out``, `supcon`).
        """
        num, has_positives = len(pairs.all_groups), self.equal_captions == "positives"
        paired, met = keys[:num], replace(pairs, columns="others") if has_positives else pairs
        losses, alone = row_losses(queries, paired, met)
        counted = {"rows_without_negatives": alone}
        if len(keys) > num:
            further = self._further(queries, keys[num:], pairs)
            none = further == float("-inf")
            losses = torch.logaddexp(losses, further - pairs.positive_logits(queries, paired))
            counted = {"rows_without_negatives": alone & none, "rows_with_edits": ~none}
        if has_positives:
            equal = replace(pairs, columns="equal")
            count = count_columns(equal).to(queries.dtype)[:, None]
            # The positives' mean key minus the own one; exactly 0, as its gradient, for no equal
            # pair.
            mean = sum_columns(paired, equal) - count * pairs.positive_keys(paired)
            mean = mean / (count + 1.0)
            losses = losses - (queries * mean).sum(dim=1)
        return losses, counted

    def _further(self, queries: Tensor, edits: Tensor, pairs: Pairs) -> Tensor:
        """The log-sum-exp [b] of each row's logits of edited captions; -inf where it has none.

        ``edits`` are those of all ranks, h times [B, D].
        """
        assert self.hard_captions is not None
        groups, columns = pairs.groups, pairs.all_groups
        if self.hard_captions.scope == "own":  # this rank's edits; every sample is a group
            by_number = edits.reshape(self.hard_captions.per_caption, len(columns), -1)
            edits = by_number[:, pairs.first : pairs.first + len(groups)].flatten(0, 1)
            groups = columns = torch.arange(len(groups), device=groups.device)
        lowest = torch.iinfo(torch.int64).min  # no group's number
        columns = columns.repeat(self.hard_captions.per_caption)
        columns = columns.masked_fill(~edits.ne(0).any(dim=1), lowest)
        nobody = torch.full_like(columns, -1)  # no sample's id
        met = Pairs(groups, pairs.sample_id, columns, nobody, pairs.first, pairs.tile)
        return log_sums(queries, edits, met)[0]
