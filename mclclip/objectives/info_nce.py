"""InfoNCE with the group mask of MCL's Eq. 3, over all ranks, and four losses made from it.

A pair is a negative where its group is the row's and its sample is not, which makes pure batches,
mixed batches and repeated samples all exact.

``info_nce``  images against captions (CLIP; Radford et al., 2021); images maybe against captions
              that are wrong for them too (`HardCaptions`)
``nt_xent``   two views of every image (SimCLR; Chen et al., 2020, Eq. 1): the other view of an
              image among both views of all other images, in both directions
``ifm``       implicit feature modification (Robinson et al., "Can contrastive learning avoid
              shortcut solutions?", 2021, Eq. 2): every positive cosine is lowered and every
              negative one raised by epsilon. A common shift does not change the loss, so that is
              InfoNCE with the positive lowered by 2 epsilon. The paper averages it with the plain
              loss as (L + alpha L_eps) / 2, which is a mean at alpha = 1 alone; ``average=mean``
              divides by 1 + alpha.
``hcl``       hard negatives, and a correction for false ones (`HardNegatives`)
``supcon``    the views of all samples of a class are each other's positives
              (`SupervisedContrast`)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from pydantic.dataclasses import dataclass as checked_dataclass
from pydantic.types import NonNegativeFloat
from torch import Tensor, nn

from mclclip.objectives.base import BatchFields, Reads
from mclclip.objectives.contrast import (
    AnyTemperature,
    Between,
    Contrast,
    ContrastOptions,
    Direction,
    EqualCaptions,
    Temperature,
)
from mclclip.objectives.row_losses import (
    Pairs,
    count_kept,
    excess,
    log_sums,
    row_losses,
    sum_kept,
)
from mclclip.ranks import collectives
from mclclip.util.caption_rules import HardCaptions
from mclclip.util.options import STRICT, BelowOne

Average = Literal["paper", "mean"]
Term = Literal["both", "modified"]


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

    def objective(self, temperature: Temperature) -> Contrast:
        """The loss, with its temperature."""
        return InfoNCE(
            self.between,
            temperature,
            hard_captions=self.hard_captions,
            equal_captions=self.equal_captions,
        )


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class ViewOptions(ContrastOptions):
    """SimCLR's loss with MCL's mask; captions are not read."""

    kind: Literal["nt_xent"] = "nt_xent"
    """Which objective."""
    temperature: AnyTemperature = 0.5

    between: ClassVar[Between] = "views"

    def objective(self, temperature: Temperature) -> Contrast:
        """The loss, with its temperature."""
        return InfoNCE(self.between, temperature)


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

    def added_features(self, model: nn.Module, batch: BatchFields) -> dict[str, Tensor]:
        """The features of the edited captions, ``edited_features_0`` and so on [b, D]."""
        if self.hard_captions is None:
            return {}
        if (features := batch.extras.get("edited_features")) is None:
            tokens, present = batch.extras["edited_text"], batch.extras["has_edit"]
            features = model(text=tokens.flatten(0, 1))["text_features"]
            features = features.reshape(*present.shape, -1)
            features = torch.where(present[:, :, None], features, torch.zeros_like(features))
        return {f"edited_features_{n}": each for n, each in enumerate(features.unbind(dim=1))}

    def chance(self, given: Mapping[str, Any], parts: Mapping[str, Tensor]) -> Tensor:
        """The loss where all features are alike, of the texts that there are."""
        if self.hard_captions is None:
            return super().chance(given, parts)
        alike = {n: given[n].ne(0).any(dim=1, keepdim=True).to(given[n].dtype) for n in self.names}
        loss: Tensor = self(**{**given, **alike})["loss"]
        return loss

    def directions(
        self,
        own: Sequence[Tensor],
        every: Sequence[Tensor],
        marks: Sequence[Tensor],
        all_marks: Sequence[Tensor],
        scale: Tensor,
    ) -> list[tuple[Tensor, Tensor, Pairs]]:
        """Those of ``Contrast``; the keys of images end in the edited captions, h times [B, D]."""
        if self.hard_captions is None:
            return super().directions(own, every, marks, all_marks, scale)
        images, captions = super().directions(own[:2], every[:2], marks, all_marks, scale)
        queries, keys, pairs = images
        return [(queries, torch.cat([keys, *every[2:]]), pairs), captions]

    def rows(
        self, queries: Tensor, keys: Tensor, pairs: Pairs, scale: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Cross-entropy of the own pair among its row's kept pairs.

        With equal captions as positives it is the mean, over these and the own pair, of their
        cross-entropies among all pairs of the group (SupCon's ``L_out``, `SupervisedContrast`).
        """
        num, has_positives = len(pairs.all_groups), self.equal_captions == "positives"
        own, met = keys[:num], replace(pairs, kept="others") if has_positives else pairs
        losses, alone = row_losses(queries, own, met)
        counted = {"rows_without_negatives": alone}
        if len(keys) > num:
            further = self._further(queries, keys[num:], pairs)
            none = further == float("-inf")
            losses = torch.logaddexp(losses, further - pairs.own_logits(queries, own))
            counted = {"rows_without_negatives": alone & none, "rows_with_edits": ~none}
        if has_positives:
            equal = replace(pairs, kept="equal")
            count = count_kept(equal).to(queries.dtype)[:, None]
            # The positives' mean key minus the own one; exactly 0, as its gradient, for no equal
            # pair.
            mean = (sum_kept(own, equal) - count * pairs.own(own)) / (count + 1.0)
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


# --- implicit feature modification ---------------------------------------------------------------


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class ModifiedOptions(ContrastOptions):
    """InfoNCE beside InfoNCE of implicitly modified features, with MCL's mask."""

    kind: Literal["ifm"] = "ifm"
    """Which objective."""
    between: Between = "captions"  # type: ignore[misc]
    """``captions``: images against captions; ``views``: two views of every image."""
    epsilon: NonNegativeFloat = 0.1
    """How far features are modified, in units of the cosine."""
    alpha: NonNegativeFloat = 1.0
    """Weight of the modified loss beside the plain one."""
    average: Average = "paper"
    """Divisor of the two: 2 (``paper``), or 1 + ``alpha`` (``mean``)."""
    term: Term = "both"
    """``modified``: the modified loss alone, such as a term beside another objective."""
    direction: Direction = "both"
    """Between captions: ``images`` against captions alone, ``texts`` against images, or both."""
    equal_captions: Literal["negatives", "masked"] = "negatives"  # type: ignore[misc]
    """Between captions, what rows with an equal caption (after open_clip's cleaning) or the same
    picture are to each other: ``negatives``, or ``masked``, left out of each other's negatives."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.between == "views" and self.direction != "both":
            raise ValueError(
                f"direction={self.direction} is for between=captions: views have both directions"
            )

    def objective(self, temperature: Temperature) -> Contrast:
        """The loss, with its temperature."""
        return ImplicitModification(self, temperature)


class ImplicitModification(Contrast):
    """The weighted sum of the plain and the modified loss, both of one log-sum-exp of the
    negatives."""

    def __init__(self, options: ModifiedOptions, temperature: Temperature | None = None) -> None:
        super().__init__(
            options.between,
            temperature,
            direction=options.direction,
            equal_captions=options.equal_captions,
        )
        self.epsilon = options.epsilon
        self.weights = weights_of(options.term, options.alpha, options.average)

    def rows(
        self, queries: Tensor, keys: Tensor, pairs: Pairs, scale: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The weighted sum of the plain and the modified loss of every row."""
        (negatives,), positives = log_sums(queries, keys, pairs), pairs.own_logits(queries, keys)
        losses = modified_losses(negatives, positives, self.epsilon * scale, self.weights)
        return losses, {"rows_without_negatives": negatives == float("-inf")}


def weights_of(term: Term, alpha: float = 1.0, average: Average = "paper") -> tuple[float, float]:
    """Weights of the plain and of the modified loss of a row."""
    if term == "modified":
        return 0.0, 1.0
    factor = 2.0 if average == "paper" else 1.0 + alpha
    return 1.0 / factor, alpha / factor


def modified_losses(
    negatives: Tensor, positives: Tensor, shift: Tensor | float, weights: tuple[float, float]
) -> Tensor:
    """The sum of the plain and the modified loss of rows, [b], with their ``weights``.

    ``negatives`` [b] are the log-sum-exps of the rows' negatives, ``positives`` [b] the logits of
    their own pairs; ``shift`` is epsilon in units of the logits.
    """
    plain, modified = weights
    losses = modified * excess(negatives, positives - 2.0 * shift)
    return losses + plain * excess(negatives, positives) if plain else losses


# --- hard negatives ------------------------------------------------------------------------------


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class HardOptions(ContrastOptions):
    """InfoNCE in which near negatives weigh more, with MCL's mask."""

    kind: Literal["hcl"] = "hcl"
    """Which objective."""
    between: Between = "captions"  # type: ignore[misc]
    """``captions``: images against captions; ``views``: two views of every image."""
    beta: NonNegativeFloat = 1.0
    """How much more near negatives weigh; 0: all weigh the same."""
    tau_plus: BelowOne = 0.1
    """Share of the negatives that are taken to be of the row's own class."""
    equal_captions: Literal["negatives", "masked"] = "negatives"  # type: ignore[misc]
    """Between captions, what rows with an equal caption (after open_clip's cleaning) or the same
    picture are to each other: ``negatives``, or ``masked``, left out of each other's negatives."""

    def objective(self, temperature: Temperature) -> Contrast:
        """The loss, with its temperature."""
        return HardNegatives(self, temperature)


class HardNegatives(Contrast):
    """Contrastive learning with hard negatives, and with a correction for false ones.

    Source: Robinson et al., "Contrastive Learning with Hard Negative Samples" (2021), as in their
    code (their pseudo-code has slips). With e = exp(logit), e+ that of the own pair, N the number
    of a row's negatives and averages over them, hard negatives weigh e^beta / mean(e^beta):

        N_g = max((sum of weighted e - tau_plus N e+) / (1 - tau_plus), N exp(-scale))
        loss = -log(e+ / (e+ + N_g))

    N counts the negatives that the group mask keeps; without a mask between views it is 2B - 2. The
    weighted sum is N times the ratio of the sums of e^(1 + beta) and e^beta, whose log-sum-exps are
    computed together in tiles: memory is linear in the batch.
    """

    def __init__(self, options: HardOptions, temperature: Temperature | None = None) -> None:
        super().__init__(options.between, temperature, equal_captions=options.equal_captions)
        self.beta, self.tau_plus = options.beta, options.tau_plus

    def rows(
        self, queries: Tensor, keys: Tensor, pairs: Pairs, scale: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """-log(e+ / (e+ + N_g)) of every row; 0 where it has no negatives."""
        count, positives = count_kept(pairs), pairs.own_logits(queries, keys)
        alone = count == 0
        log_count = count.clamp_min(1).to(positives.dtype).log()
        # Logs of the sums of e^beta and of e^(1 + beta) over each row's negatives.
        if self.beta == 0.0:
            sums = (log_count, *log_sums(queries, keys, pairs))
        else:
            sums = tuple(log_sums(queries, keys, pairs, (self.beta, 1.0 + self.beta)))
        weights, weighted = (torch.where(alone, 0.0, each) for each in sums)
        negatives = self._corrected(log_count + weighted - weights, log_count + positives)
        negatives = torch.maximum(negatives, log_count - scale)
        losses = excess(negatives, positives)
        return torch.where(alone, torch.zeros_like(losses), losses), {
            "rows_without_negatives": alone
        }

    def _corrected(self, weighted: Tensor, positives: Tensor) -> Tensor:
        """log((R - tau_plus P) / (1 - tau_plus)) of R and P given by their logs, [b].

        -inf, with gradient 0, where the difference is not positive.
        """
        if self.tau_plus == 0.0:
            return weighted
        share = positives + math.log(self.tau_plus) - weighted
        left = torch.where(share < 0.0, share, -1.0)  # -1: any for which the next line is finite
        corrected = weighted + (-torch.expm1(left)).log() - math.log1p(-self.tau_plus)
        return torch.where(share < 0.0, corrected, float("-inf"))


# --- supervised contrast -------------------------------------------------------------------------


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class SupervisedOptions(ContrastOptions):
    """The supervised contrastive loss with MCL's mask; captions are not read."""

    kind: Literal["supcon"] = "supcon"
    """Which objective."""
    temperature: AnyTemperature = 0.1
    attribute: str | None = None
    """Attribute of the samples that is their class; null: their cluster at the stage before."""
    groups: bool = True
    """Compare only within groups of samples with one pseudo label, as MCL does. Where the classes
    are the clusters that made the groups, a group has one class and no negatives: then false."""
    num_views: Literal[1, 2] = 2  # type: ignore[misc]
    """Views of every image. With one, rows that meet nobody of their class are left out."""

    between: ClassVar[Between] = "views"

    @property
    def controls(self) -> tuple[str, ...]:  # type: ignore[override]
        """Those of groups, where there are groups."""
        return ContrastOptions.controls if self.groups else ()

    @property
    def reads(self) -> Reads:
        """Groups, and the attribute or the nearest cluster."""
        clusters = 1 if self.attribute is None else 0
        return Reads(groups=self.groups, clusters=clusters, attribute=self.attribute)

    def objective(self, temperature: Temperature) -> Contrast:
        """The loss, with its temperature."""
        return SupervisedContrast(temperature, self.num_views)


class SupervisedContrast(Contrast):
    """The mean over a row's positives of their cross-entropy among all that the row meets.

    Source: Khosla et al., "Supervised Contrastive Learning" (2020), Eq. 2 (``L_out``): the mean
    over a row's positives is outside of the logarithm, and all positives stay in the denominator.
    With the mask the row meets samples of its own group alone. A sample that is repeated in a batch
    is met once, as in the other losses: only its own pair is a positive.

    Beside the parts of ``Contrast``: ``rows_without_positives``, samples of the global batch that
    are left out of the mean because no other sample of their group has their class. With two views
    there are none.
    """

    reads_classes = True

    def __init__(self, temperature: Temperature | None = None, num_views: int = 2) -> None:
        super().__init__("views", temperature)
        self.names = self.names[:num_views]

    def rows(
        self, queries: Tensor, keys: Tensor, pairs: Pairs, scale: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of every row; with one view 0, and more for the others, where it is left out."""
        same = pairs.same_class()
        count = count_kept(same).to(queries.dtype)
        others = sum_kept(keys, same)
        if len(self.names) == 2:
            losses, alone = row_losses(queries, keys, pairs)
            own = pairs.own(keys)
            mean = (own + others) / (count + 1.0)[:, None]
            losses = losses + (queries * (own - mean)).sum(dim=1)
            left_out = torch.zeros_like(alone)
        else:
            left_out, (negatives,) = count == 0, log_sums(queries, keys, pairs)
            alone = negatives == float("-inf")
            mean = others / count.clamp_min(1.0)[:, None]
            losses = torch.where(left_out, 0.0, negatives - (queries * mean).sum(dim=1))
            num_rows = len(count) * collectives.world_size()
            kept = num_rows - collectives.all_reduce_sum(left_out.sum())
            # The mean over all rows divides by their number again.
            losses = losses * (num_rows / kept.clamp_min(1).to(losses.dtype))
        return losses, {"rows_without_negatives": alone, "rows_without_positives": left_out}
