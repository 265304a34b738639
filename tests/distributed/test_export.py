"""Exports that several ranks make together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mclclip import config, export, files, index
from mclclip.models.loading import load_towers
from mclclip.ranks.process_group import SINGLE
from mclclip.run import artifacts
from mclclip.run.artifacts import Layout
from tests.distributed.conftest import here
from tests.matrix import in_soak
from tests.unit.test_export import TINY, finish_training, held_out_pairs


def join(tree: dict[str, Any]) -> dict[str, Path]:
    context = here()
    return export.join(config.from_tree(tree), context)


@in_soak
def test_ranks_weigh_the_stages_as_one_process_does(ranks: Any, tmp_path: Path) -> None:
    trained_on, held_out = held_out_pairs(tmp_path / "a", 4), held_out_pairs(tmp_path / "b")
    found = []
    for name, world_size in (("alone", 1), ("together", 2)):
        tree = {
            "run_dir": str(tmp_path / name),
            "num_stages": 1,
            "model": {"name": str(TINY)},
            "data": {"sources": {"own": {"shards": f"{trained_on}/*.tar"}}, "index_workers": 1},
            "export": {
                "concat": ["raw", "weighted"],
                "soup": False,
                "weights": {"held_out": str(held_out)},
            },
        }
        options = config.from_tree(tree)
        layout = Layout.of(options)
        index.run(options, SINGLE)
        export.stage(options, SINGLE, stage=0)
        finish_training(layout.train(1), load_towers(layout.export(0)), seed=1)
        export.stage(options, SINGLE, stage=1)
        joined = ranks(world_size, join, tree)
        assert all(list(paths) == ["concat_raw", "concat_weighted"] for paths in joined)
        manifest = artifacts.read_manifest(joined[0]["concat_weighted"], "concat")
        record = manifest.counts["learned"]
        weights = sorted(joined[0]["concat_weighted"].glob("*.safetensors"))
        found.append((record, [files.digest_file(path) for path in weights]))
        ranks(world_size, join, tree)  # finished: nothing is made, and no rank waits
    assert found[0] == found[1]
