"""Computes what class centers cost: memory of a rank, bytes of each collective, operations, time.

Arithmetic only, so that a million classes over eighty GPUs are counted on any machine.
"""

from __future__ import annotations

import math
from typing import Any

from mclclip.objectives.class_centers.rows import Rule

# What the expected time assumes of a GPU: an A100's fp32 products at two thirds of their peak, its
# memory, and a network of 200 Gbit/s per GPU. Others scale with their own figures.
PRODUCTS_PER_S, MEMORY_BYTES_PER_S, NETWORK_BYTES_PER_S = 13e12, 1.5e12, 20e9
_PASSES = 8  # over a tile of scores, forward and backward: products, maximum, exponential, sums
_FLOAT, _DOUBLE, _INT = 4, 8, 4
_TILE = 8192


def measure(
    batch: int,
    dim: int,
    num_classes: int,
    ranks: int,
    *,
    labels_per_sample: int,
    sample_rate: float,
    rule: Rule,
) -> dict[str, Any]:
    """Sizes in bytes, counts and seconds of one rank's share of a step over ``batch`` samples."""
    labels = labels_per_sample
    rows = math.ceil(num_classes / ranks)
    positives = math.ceil(batch * labels / ranks)
    # Of k classes, B rows with l different ones each leave k (1 - l / k)^B out.
    distinct = num_classes * -math.expm1(batch * math.log1p(-min(labels / num_classes, 0.999999)))
    # Negatives and touched classes of this rank, by the rules of ShardedClassCenters.
    own, drawn = distinct / ranks, rows * sample_rate
    touched = min(rows, math.ceil(drawn + own * (1.0 - sample_rate)))
    if rule == "exclude_positives":
        drawn -= own * sample_rate
    negatives = math.ceil(drawn)
    if rule == "partial_fc":
        negatives = touched = min(rows, math.ceil(max(drawn, own)))
    features = batch * dim * _FLOAT
    tile = min(_TILE, batch) * min(_TILE, max(negatives, 1)) * _FLOAT
    collectives = {
        "all-gather of features": features,
        "all-gather of labels": batch * labels * _INT,
        "all-reduce of P and N": batch * 2 * _DOUBLE,
        "reduce-scatter of gradients": features,
    }
    products = 4 * 2 * batch * negatives * dim + 6 * 2 * positives * dim
    scores = batch * negatives * _FLOAT * _PASSES + touched * dim * _FLOAT * _PASSES
    seconds = {
        "products": products / PRODUCTS_PER_S,
        "memory": scores / MEMORY_BYTES_PER_S,
        "network": sum(collectives.values()) / NETWORK_BYTES_PER_S if ranks > 1 else 0.0,
    }
    return {
        "num_classes": num_classes,
        "rows": rows,
        "negatives": negatives,
        "positives": positives,
        "distinct_positives": round(distinct),
        "parts": {
            "rows": rows * dim * _FLOAT,
            "moments": 2 * rows * dim * _FLOAT + rows * _INT,
            "gradient": touched * dim * _FLOAT,
            # Features whole, scaled, and their gradient; one tile; the labels and their places.
            "step": 3 * features + tile + 3 * batch * labels * 8,
        },
        "checkpoint": 3 * num_classes * dim * _FLOAT + num_classes * _INT,
        "collectives": collectives,
        "operations": products,
        "seconds": seconds,
    }
