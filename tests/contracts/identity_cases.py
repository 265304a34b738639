"""Which options are part of an artifact's identity: a change of them is refused, or accepted.

An option of the configuration without a row fails the test, and so does an argument of a verb that
reads none. A row has the overrides that change it, and the artifacts that then refuse.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

BASE, IMAGES, TEXTS = "stage_0/export", "stage_0/embeddings", "stage_0/text_embeddings"
CLUSTERS, LABELS, COPIES = "stage_0/clusters", "stage_1/pseudo_labels", "stage_1/relocated"
TRAIN, EXPORT = "stage_1/train", "stage_1/export"

ELSEWHERE = {
    "run_dir": "says where artifacts lie",
    "num_stages": "names further artifacts, and the inputs of a join: test_export",
    "trained_model": "goes with other objectives alone: test_class_centers",
    "base": "makes stage 0 a training: test_train",
    "model.image_weights": "its file's digest counts: test_image_weights",
    "model.text_rows": "its files' digest counts: test_texts",
    "eval.text_rows": "goes with model.text_rows, and changes no training: test_texts",
    "train.plan.weights": "its file's digest counts: test_weights",
    "image_rows.enabled": "makes further artifacts: test_image_rows",
}
"""Options whose change needs another run than the one of this table, and where they are tested."""

CONFIG: dict[str, tuple[str, set[str]]] = {
    "seed": ("seed=1", {BASE, CLUSTERS, TRAIN}),
    "device": ("device=auto", set()),
    "deterministic": ("deterministic=false", set()),
    "num_threads": ("num_threads=2", set()),
    "wall_time_s": ("wall_time_s=60", set()),
    "peer_timeout_s": ("peer_timeout_s=60", set()),
    "poll_s": ("poll_s=1", set()),
    "data.sources": ("data.sources.patterns.weight=2", {TRAIN}),
    "data.num_workers": ("data.num_workers=1", set()),
    "data.index_workers": ("data.index_workers=2", set()),
    "data.max_image_pixels": ("data.max_image_pixels=50000", set()),
    "data.pixels": ("data.pixels=exact", {TRAIN}),
    "data.max_bad_fraction": ("data.max_bad_fraction=0.5", set()),
    "data.exclude": ("data.exclude={excluded}", set()),
    "data.max_open_files": ("data.max_open_files=2", set()),
    "data.verify": ("data.verify=full", set()),
    "data.remote.retries": ("data.remote.retries=1", set()),
    "data.remote.timeout_s": ("data.remote.timeout_s=1", set()),
    "data.remote.in_flight": ("data.remote.in_flight=1", set()),
    "model.name": ("model.name.embed_dim=4", {BASE, TRAIN}),
    "model.pretrained": ("model.pretrained=tag", {BASE, TRAIN}),
    "model.text": ("model.text=false", {BASE, TRAIN}),
    "model.image_size": ("model.image_size=16", {BASE, TRAIN}),
    "model.long_context": (
        "model.name.text_cfg.context_length=77 model.long_context=true", {BASE, TRAIN},
    ),
    "model.projector": ("model.projector=[4]", {TRAIN}),
    "model.augmentation": ("model.augmentation.scale=[0.5,1.0]", {TRAIN}),
    "embed.batch_size": ("embed.batch_size=10", set()),
    "embed.dtype": ("embed.dtype=float16", {IMAGES, TEXTS}),
    "embed.precision": ("embed.precision=bf16", {IMAGES, TEXTS}),
    "embed.compile": ("embed.compile=model", set()),
    "embed.feature": ("embed.feature=pooled", {IMAGES}),
    "cluster.num_clusters": ("cluster.num_clusters=4", {CLUSTERS}),
    "cluster.algorithm": ("cluster.algorithm=euclidean", {CLUSTERS}),
    "cluster.method": ("cluster.method=two_level", {CLUSTERS}),
    "cluster.num_splits": ("cluster.num_splits=2", {CLUSTERS}),
    "cluster.init": ("cluster.init=random", {CLUSTERS}),
    "cluster.feature": ("cluster.feature=image", {CLUSTERS}),
    "cluster.labels_per_sample": ("cluster.labels_per_sample=1", {CLUSTERS}),
    "cluster.restarts": ("cluster.restarts=2", {CLUSTERS}),
    "cluster.max_iterations": ("cluster.max_iterations=9", {CLUSTERS}),
    "cluster.tolerance": ("cluster.tolerance=0.5", {CLUSTERS}),
    "cluster.init_samples": ("cluster.init_samples=9", {CLUSTERS}),
    "cluster.label_mode": ("cluster.label_mode=last", {LABELS}),
    "relocate.enabled": ("relocate.enabled=true", set()),
    "relocate.folder": ("relocate.folder={folder}", set()),
    "relocate.url": ("relocate.url=s3://bucket/copies", set()),
    "relocate.samples_per_shard": ("relocate.samples_per_shard=40", {COPIES}),
    "image_rows.dtype": ("image_rows.dtype=float32", set()),
    "train.global_batch": ("train.global_batch=12", {TRAIN}),
    "train.epochs": ("train.epochs=3", {TRAIN}),
    "train.steps": ("train.steps=3", {TRAIN}),
    "train.objective": (
        "train.objective.kind=info_nce train.objective.temperature=0.1", {TRAIN},
    ),
    "train.start": ("train.start=previous", {TRAIN}),
    "train.plan.policy": ("train.plan.policy=drop", {TRAIN}),
    "train.plan.order": ("train.plan.order=round_robin", {TRAIN}),
    "train.plan.samples_per_epoch": ("train.plan.samples_per_epoch=50", {TRAIN}),
    "train.plan.block": ("train.plan.block=2", {TRAIN}),
    "train.lock.image_blocks": ("train.lock.image_blocks=1", {TRAIN}),
    "train.lock.image_norm": ("train.lock.image_norm=false", {TRAIN}),
    "train.lock.image_projection": ("train.lock.image_projection=false", {TRAIN}),
    "train.lock.text": ("train.lock.text=true", {TRAIN}),
    "train.lock.text_blocks": ("train.lock.text=true train.lock.text_blocks=1", {TRAIN}),
    "train.lock.logit_scale": ("train.lock.logit_scale=false", {TRAIN}),
    "train.lora": ("train.lora.rank=2", {TRAIN}),
    "train.patch_dropout": ("train.lock.image_blocks=all train.patch_dropout=0.5", {TRAIN}),
    "train.image_size": ('train.image_size=[{{"size":16}}]', {TRAIN}),
    "train.engine.name": ("train.engine.name=fsdp", set()),
    "train.engine.zero_stage": ("train.engine.zero_stage=1", set()),
    "train.engine.shard_ranks": ("train.engine.shard_ranks=1", set()),
    "train.engine.micro_batch": ("train.engine.micro_batch=4", set()),
    "train.engine.grad_checkpointing": ("train.engine.grad_checkpointing=true", set()),
    "train.engine.compile": ("train.engine.compile=model", set()),
    "train.optimizer": ("train.optimizer=lion", {TRAIN}),
    "train.lr": ("train.lr=0.5", {TRAIN}),
    "train.schedule": ("train.schedule=constant", {TRAIN}),
    "train.warmup": ("train.warmup=0.5", {TRAIN}),
    "train.parameters": ('train.parameters=[{{"match":"*","lr_scale":0.5}}]', {TRAIN}),
    "train.weight_decay": ("train.weight_decay=0.5", {TRAIN}),
    "train.start_decay": ("train.start_decay=0.5", {TRAIN}),
    "train.betas": ("train.betas=[0.9,0.9]", {TRAIN}),
    "train.eps": ("train.eps=1e-7", {TRAIN}),
    "train.momentum": ("train.momentum=0.5", {TRAIN}),
    "train.ema_decay": ("train.ema_decay=0.5", {TRAIN, EXPORT}),
    "train.clip_grad_norm": ("train.clip_grad_norm=1", {TRAIN}),
    "train.precision": ("train.precision=bf16", {TRAIN}),
    "train.checkpoint.every": ("train.checkpoint.every=1", set()),
    "train.checkpoint.keep": ("train.checkpoint.keep=1", set()),
    "train.checkpoint.keep_every": ("train.checkpoint.keep_every=1", set()),
    "train.checkpoint.asynchronous": ("train.checkpoint.asynchronous=true", set()),
    "train.checkpoint.mirror": ("train.checkpoint.mirror={folder}", set()),
    # Evaluations count where they decide how long is trained, or which step is exported.
    "train.evaluate.every": ("train.evaluate.every=1", set()),
    "train.evaluate.unit": ("train.evaluate.unit=epochs", set()),
    "train.evaluate.suite": ("train.evaluate.every=1 train.evaluate.suite=[pairs]", set()),
    "train.evaluate.metric": ("{judged}", {TRAIN}),
    "train.evaluate.patience": ("{judged} train.evaluate.patience=1", {TRAIN}),
    "train.evaluate.best": ("{judged} train.evaluate.best=true", {TRAIN}),
    "train.log_every": ("train.log_every=1", set()),
    "train.profile_steps": ("train.profile_steps=[1]", set()),
    "train.cached_text": ("train.cached_text=false", {TRAIN}),
    "train.sentences": ("train.cached_text=false train.sentences.number=1", {TRAIN}),
    "controls": ("controls=[ungrouped]", set()),
    "eval.suite": ("eval.suite.pairs.path={folder}", set()),
    "eval.encoders": ("eval.encoders=[stage_1]", set()),
    "eval.batch_size": ("eval.batch_size=1", set()),
    "eval.precision": ("eval.precision=bf16", set()),
    "export.concat": ("export.concat=[raw]", set()),
    "export.soup": ("export.soup=false", set()),
    "export.ema": ("export.ema=false", set()),
    "track": ("track=[tensorboard]", set()),
}  # fmt: skip
JUDGED = "train.evaluate.every=1 train.evaluate.metric=pairs/average"

# Arguments of verbs that read no configuration, or flags of their own: another value, and whether
# it is refused.
FLAGS: dict[str, dict[str, tuple[Any, bool]]] = {
    "pack": {
        "captions": ("{table}", True),  # of other content; the same content elsewhere is accepted
        "path_column": ("title", True),
        "caption_column": ("filepath", True),
        "samples_per_shard": (3, True),
        "delimiter": (",", False),  # the one that was found
        "key_prefix": ("a", True),
        "allow_roots": ([Path("/tmp")], True),
        "held_out": ({"test": 0.5}, True),
        "size": (2, True),
        "command": (["mclclip"], False),
    },
    "make-dataset": {
        "seed": (2, True),
        "num_samples": (5, True),
        "num_pairs": (2, True),
        "samples_per_shard": (3, True),
    },
    "make-pairs": {
        "captions": ("json:captions", False),  # the texts count, not where they stand
        "rules": (["colour"], True),
        "confused": (None, False),
        "per_rule": (3, True),
        "seed": (1, True),
    },
    "filter": {
        "stage": (1, True),
        "name": ("other", True),  # another folder
        "min_clip_score": (0.1, True),
        "keep_share": (0.5, True),
        "near_duplicates": (0.8, True),
        "within": ("all", True),
        "against": (["set={own}"], True),
        "against_cosine": (None, False),
    },
    "blindspots": {
        "stage": ({"stage": 1, "other": "0"}, True),  # another folder
        "other": ("b={embeddings}", True),  # another name, and so another folder
        "above": (0.9, True),
        "below": (0.5, True),
        "per_image": (4, True),
        "max_pairs": (999, True),
    },
    "soup": {
        "method": ({"method": "wise", "alpha": 0.5}, True),
        "judge": (SimpleNamespace(benchmarks={}, read_texts=[]), False),  # of other benchmarks
        "metrics": ((), False),
        "alpha": ({"method": "wise", "alpha": 0.5}, True),
        "alphas": (None, False),
        "images": ("{folder}", True),
        "any_base": (True, False),
    },
    "convert": {
        "to": ("llava", True),
        "images": ("{pictures}", True),
        "texts": ("{table}", True),
        "precision": ("fp32", False),
        "num_images": (8, False),
        "width": (4, True),
    },
}
