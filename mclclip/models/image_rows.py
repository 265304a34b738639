"""Makes a model start from rows on disk in the place of images (`StoredRows.of_images`)."""

from __future__ import annotations

from mclclip.data.row_store import IMAGE_ROWS, StoredRows
from mclclip.models.model import Model
from mclclip.run.artifacts import read_manifest, verb_of


def start_from_rows(model: Model, rows: StoredRows) -> None:
    """Makes ``model`` start behind the blocks that made ``rows``, of embeddings behind its tower.

    Raises RuntimeError where other weights made the rows, and ValueError where a model that is
    trained trains blocks that made them.
    """
    manifest = read_manifest(rows.directory, rows.kind)
    if rows.kind != IMAGE_ROWS:
        model.first_block = model.num_blocks + 1
        return
    blocks, again = manifest.config["blocks"], f"run 'mclclip {verb_of(IMAGE_ROWS)} --force'"
    if model.trunk_digest(blocks) != manifest.inputs["trunk"]:
        raise RuntimeError(
            f"{rows.directory} was made by other weights than the first {blocks} blocks of this "
            f"model, or from other pixels: {again}"
        )
    if model.training and blocks > model.num_frozen_blocks:
        raise ValueError(
            f"the image rows have passed {blocks} blocks, and train.lock freezes "
            f"{model.num_frozen_blocks}: lower train.lock.image_blocks, or {again}"
        )
    model.first_block = blocks
