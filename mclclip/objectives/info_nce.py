"""InfoNCE: each image picks its own caption out of the batch, and each caption its own image.

Let v_p be the unit features of images, t_p those of their captions, s the logit scale (one over the
temperature), and N_p the samples that p is compared with. Image p has the loss

    L_p = -log( exp(s v_p . t_p) / (exp(s v_p . t_p) + sum over q in N_p of exp(s v_p . t_q)) )

Caption p has the same loss with v and t exchanged. The result is the mean of both directions over
the global batch. In CLIP N_p holds all other samples. In MCL (Eq. 3) it holds the other samples
with p's pseudo label, so that batches may be of one group or of several, and may repeat samples. A
row without negatives has loss 0 and gradient 0.

Source: Radford et al., "Learning Transferable Visual Models From Natural Language Supervision"
(CLIP, ICML 2021), arXiv:2103.00020, Figure 3; van den Oord et al., "Representation Learning with
Contrastive Predictive Coding" (2018), arXiv:1807.03748, Eq. 4. The mask: Zhang et al., "Learning
the Unlearned: Mitigating Feature Suppression in Contrastive Learning" (MCL, 2024),
arXiv:2402.11816, Eq. 3.

Inputs: ``image_features`` and ``text_features`` [b, D] of this rank, unit length, row i of both one
sample; ``group_ids`` [b, 1] and ``sample_id`` [b]; the scalar ``logit_scale`` if no temperature is
set.

Use it as the default for samples with captions. All negatives come from the batch: if only small
batches fit, try ``hcl``, or ``sigmoid``, which needs no whole rows. Set ``near_copies`` if captions
or pictures repeat or are much alike, and ``hard_captions`` if the model mixes up colours, counts or
places.

With ``hard_captions`` each sample brings h further texts, its caption edited so that it is wrong.
An image has those of its own sample (``scope: own``) or of all samples of its group (``global``) as
further negatives; captions are compared with images as before. Source: Yuksekgonul et al., "When
and why vision-language models behave like bags-of-words, and what to do about it?" (NegCLIP, ICLR
2023), arXiv:2210.01936.

Relations: ``nt_xent`` is this loss between two views of an image. ``ifm`` adds a second one with
harder positives, ``hcl`` weighs its negatives, ``supcon`` has several positives for a row, and
``sigmoid`` replaces its softmax by one question for each pair. Near copies as
positives make the loss of a row ``supcon``'s L_out over them, each with its weight.

Example: ``train.objective={kind: info_nce, near_copies: {threshold: 0.95}}``.

Its slow reference is ``info_nce`` (with edited captions ``edited``, with near copies
``info_nce_of_near``) in tests/objective_loops.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from pydantic.dataclasses import dataclass as checked_dataclass
from torch import Tensor, nn

from mclclip.objectives.base import BatchFields, Features, ObjectiveInputs, Reads
from mclclip.objectives.contrast import Between, Contrast, ContrastOptions, Direction
from mclclip.objectives.pairs import Pairs
from mclclip.objectives.row_losses import log_sums, row_losses, sum_columns, sum_weights
from mclclip.ranks import collectives
from mclclip.util.caption_rules import HardCaptions
from mclclip.util.options import STRICT


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class Options(ContrastOptions):
    """CLIP's contrastive loss with MCL's mask: images against captions."""

    kind: Literal["info_nce"] = "info_nce"
    """Which objective."""
    between: ClassVar[Between] = "captions"
    hard_captions: HardCaptions | None = None
    """Edited captions as further negatives of images, such as ``{rules: [colour, swap], scope:
    global}``; ``{}`` takes all rules (null: none)."""
    takes_positives: ClassVar[bool] = True

    @property
    def reads(self) -> Reads:
        """Reads edited captions too, if ``hard_captions`` is set."""
        return replace(super().reads, edits=self.hard_captions)

    def build(self, inputs: ObjectiveInputs) -> Contrast:
        """Returns the loss; a trained temperature is its only parameter."""
        how = self.how(inputs)
        has_positives = self.near is not None and self.near.role == "positives"
        if self.hard_captions is None:
            return InfoNCEWithPositives(**how) if has_positives else InfoNCE(**how)
        edited = InfoNCEWithBoth if has_positives else InfoNCEWithEdits
        return edited(self.hard_captions, **how)


class InfoNCE(Contrast):
    """The contrastive loss in which only samples of one group are each other's negatives.

    With the model's temperature, the default, it has no parameters of its own.
    """

    def loss_per_query(self, direction: Direction) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns L_p of every query p."""
        losses, has_no_negatives = row_losses(direction.queries, direction.keys, direction.pairs)
        return losses, {"rows_without_negatives": has_no_negatives}


class InfoNCEWithEdits(InfoNCE):
    """InfoNCE in which edited captions, h of each sample, are further negatives of images.

    Let L be the loss of an image without them, a its own logit and S the log-sum-exp of the logits
    of its edited captions. The loss is log(exp L + exp(S - a)); of an image without edited captions
    it is L, bit for bit. An edited caption that a sample lacks has zeros for its feature, which no
    other feature has.

    Returns beside the parts of ``InfoNCE``: ``rows_with_edits``, the number of samples of the
    global batch that are compared with an edited caption.
    """

    def __init__(self, hard_captions: HardCaptions, **how: Any) -> None:
        super().__init__(**how)
        self.hard_captions = hard_captions
        self.names += tuple(f"edited_features_{n}" for n in range(hard_captions.per_caption))

    def features(
        self, model: nn.Module, batch: BatchFields, features: Features
    ) -> dict[str, Tensor]:
        """Adds the features of the edited captions, ``edited_features_0`` and so on, [b, D]."""
        features = super().features(model, batch, features)
        if (edited := batch.extras.get("edited_features")) is None:
            tokens, present = batch.extras["edited_text"], batch.extras["has_edit"]
            edited = model(text=tokens.flatten(0, 1))["text_features"]
            edited = edited.reshape(*present.shape, -1)
            edited = torch.where(present[:, :, None], edited, torch.zeros_like(edited))
        by_number = enumerate(edited.unbind(dim=1))
        return features | {f"edited_features_{n}": each for n, each in by_number}

    def directions(self, sides: Sequence[Tensor], pairs: Pairs, scale: Tensor) -> list[Direction]:
        """Adds the edited captions of all ranks to the direction of images, h times [B, D]."""
        images, captions = super().directions(sides[:2], pairs, scale)
        edits = torch.cat([collectives.gather_with_grad(side) for side in sides[2:]])
        return [replace(images, edits=edits), captions]

    def loss_per_query(self, direction: Direction) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns log(exp L + exp(S - s)) of every image, and L of every caption."""
        losses, counted = super().loss_per_query(direction)
        if direction.edits is None:
            return losses, counted
        queries, keys, pairs = direction.queries, direction.keys, direction.pairs
        log_sum = self._log_sum_of_edits(queries, direction.edits, pairs)
        has_none = log_sum == float("-inf")
        losses = torch.logaddexp(losses, log_sum - pairs.positive_logits(queries, keys))
        without = counted["rows_without_negatives"] & has_none
        return losses, {"rows_without_negatives": without, "rows_with_edits": ~has_none}

    def _log_sum_of_edits(self, queries: Tensor, edits: Tensor, pairs: Pairs) -> Tensor:
        """Returns the log-sum-exp of each image's logits of edited captions, [b]; -inf if it is
        compared with none. ``edits`` are those of all ranks, h times [B, D]."""
        per_caption = self.hard_captions.per_caption
        groups, columns = pairs.groups, pairs.all_groups
        if self.hard_captions.scope == "own":  # every sample of this rank is a group of its own
            by_number = edits.reshape(per_caption, len(columns), -1)
            edits = by_number[:, pairs.first : pairs.first + len(groups)].flatten(0, 1)
            groups = columns = torch.arange(len(groups), device=groups.device)
        no_group = torch.iinfo(torch.int64).min
        columns = columns.repeat(per_caption).masked_fill(~edits.ne(0).any(dim=1), no_group)
        no_sample = torch.full_like(columns, -1)
        edited = Pairs(groups, pairs.sample_id, columns, no_sample, pairs.first, pairs.tile)
        return log_sums(queries, edits, edited)[0]


class InfoNCEWithPositives(InfoNCE):
    """InfoNCE in which a row's near copies are its positives too, as a soft target.

    A row's loss is the mean of the cross-entropies of its own pair, of weight 1, and of its near
    copies, weighted by what ``Pairs.weights`` says, among all pairs of its group. With weights of 1
    this is SupCon's ``L_out`` (`supcon`).
    """

    def loss_per_query(self, direction: Direction) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss of the own pair minus q . (mean positive key - own key)."""
        queries, keys, pairs = direction.queries, direction.keys, direction.pairs
        among_all = replace(direction, pairs=replace(pairs, columns="others"))
        losses, counted = super().loss_per_query(among_all)
        near = replace(pairs, columns="near")
        weight = sum_weights(near, queries.dtype)[:, None]
        # Written so that it is exactly 0, and so is its gradient, for a row without near copies.
        difference = (sum_columns(keys, near) - weight * pairs.positive_keys(keys)) / (weight + 1.0)
        return losses - (queries * difference).sum(dim=1), counted


class InfoNCEWithBoth(InfoNCEWithPositives, InfoNCEWithEdits):
    """InfoNCE with both: near copies as positives, edited captions as further negatives."""
