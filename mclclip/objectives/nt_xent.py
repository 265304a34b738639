"""NT-Xent: each view of an image picks the image's other view out of all views of the batch.

With unit features x_p of the first views and y_p of the second, and the temperature tau, row p of
the first views has the loss

    L_p = -log( exp(x_p . y_p / tau) / (exp(x_p . y_p / tau) + sum over q in N_p of
                (exp(x_p . y_q / tau) + exp(x_p . x_q / tau))) )

The rows of the second views exchange x and y. The result is the mean over all 2B rows of a global
batch of B images. In SimCLR N_p holds all other images, so that a row has 2B - 2 negatives. With
MCL's mask (its Eq. 3) N_p holds those with p's pseudo label.

Source: Chen et al., "A Simple Framework for Contrastive Learning of Visual Representations"
(SimCLR, ICML 2020), arXiv:2002.05709, Eq. 1. The mask: Zhang et al., "Learning the Unlearned:
Mitigating Feature Suppression in Contrastive Learning" (MCL, 2024), arXiv:2402.11816.

Inputs: ``image_features`` and ``image_features_1`` [b, D] of this rank, unit length, two views of
one image in row i; ``group_ids`` [b, 1] and ``sample_id`` [b]. Captions are not read.

Use it for pictures without captions, with an augmentation that changes what should not matter. It
needs large batches; if they do not fit, ``moco`` takes its negatives from a queue.

Relations: it is ``info_nce`` between views instead of captions. ``ifm`` and ``hcl`` with
``between: views`` change its rows as they change those of ``info_nce``. In ``feature_dropout`` an
adversary changes its views. ``supcon`` adds positives of the same class.

Example: ``train.objective={kind: nt_xent, temperature: 0.2}``.

Its slow reference is ``nt_xent`` in tests/objective_loops.py.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic.dataclasses import dataclass as checked_dataclass

from mclclip.objectives.base import ObjectiveInputs
from mclclip.objectives.contrast import AnyTemperature, Between, Contrast, ContrastOptions
from mclclip.objectives.info_nce import InfoNCE
from mclclip.util.options import STRICT


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class Options(ContrastOptions):
    """SimCLR's loss with MCL's mask; captions are not read."""

    kind: Literal["nt_xent"] = "nt_xent"
    """Which objective."""
    between: ClassVar[Between] = "views"
    temperature: AnyTemperature = 0.5

    def build(self, inputs: ObjectiveInputs) -> Contrast:
        """Returns the loss; a trained temperature is its only parameter."""
        return InfoNCE(self.between, **self.how(inputs))
