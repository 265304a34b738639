"""Figure: AMI of the stages' clusters with each other (MCL, Table 11) and with the attributes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mclclip.data.labels import ami
from mclclip.figures import drawing
from mclclip.figures.inputs import Inputs


def draw(inputs: Inputs, path: Path) -> dict[str, Any]:
    """Draws a table of the adjusted mutual information of every stage's clusters with those of all
    stages and with all attributes, as shades from 0 to 1 with numbers in them. Where no sample has
    both a cluster and a value, a field is empty."""
    stages = {name: np.asarray(clusters.labels[:, 0]) for name, clusters in inputs.clusters.items()}
    others = stages | {name: inputs.run.index.attribute(name)[0] for name in inputs.attributes}
    values = [[ami(labels, other) for other in others.values()] for labels in stages.values()]
    drawing.table(path, "adjusted mutual information", [*stages], [*others], values)
    return {"rows": [*stages], "columns": [*others], "ami": values}
