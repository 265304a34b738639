"""Logs to MLflow: the server or store of MLFLOW_TRACKING_URI, or else MLflow's own default.

The experiment is that of MLFLOW_EXPERIMENT_NAME, or else 'mclclip'. The package ``mlflow-skinny``
is enough for a server; a store on the local disk needs ``mlflow``.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import mlflow  # type: ignore[import-not-found, unused-ignore]
from mlflow.entities import Metric, Param  # type: ignore[import-not-found, unused-ignore]

from mclclip.run.trackers import Tracker, numbers_of, read_or_write_id

_MOST_PARAMS, _LONGEST_PARAM = 100, 500  # of one request; of one value in all versions


class MLflow(Tracker):
    """A run of MLflow; files become artifacts."""

    def __init__(self, client: Any, run_id: str) -> None:
        self.client, self.run_id = client, run_id

    def write(self, step: int, row: Mapping[str, Any]) -> None:
        """Logs every number of a row as a metric. MLflow's names have no '@', so '_' stands for
        it."""
        now = round(1000 * time.time())
        metrics = [
            Metric(re.sub(r"[^\w .:/-]", "_", name), value, now, step)
            for name, value in numbers_of(row).items()
        ]
        self.client.log_batch(self.run_id, metrics)

    def attach(self, path: Path) -> None:
        """Logs a file, in the place of an earlier one of its name."""
        self.client.log_artifact(self.run_id, str(path))

    def close(self) -> None:
        """Ends the run, which counts as finished until a resumed process goes on."""
        self.client.set_terminated(self.run_id)


def open_tracker(directory: Path, *, name: str, config: Mapping[str, Any]) -> MLflow:
    """Begins a run of MLflow whose parameters are the options, or goes on in it."""
    # By default a server that is not there is asked for four minutes before an error is raised.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
    client: Any = mlflow.MlflowClient()
    run_id = read_or_write_id(directory, lambda: _begin(client, name, config))
    client.update_run(run_id, status="RUNNING")
    return MLflow(client, run_id)


def _begin(client: Any, name: str, config: Mapping[str, Any]) -> str:
    title = os.environ.get("MLFLOW_EXPERIMENT_NAME", "mclclip")
    experiment = client.get_experiment_by_name(title)
    experiment_id = experiment.experiment_id if experiment else client.create_experiment(title)
    run_id: str = client.create_run(experiment_id, run_name=name).info.run_id
    params = [Param(key, str(value)[:_LONGEST_PARAM]) for key, value in _flatten(config)]
    for start in range(0, len(params), _MOST_PARAMS):
        client.log_batch(run_id, params=params[start : start + _MOST_PARAMS])
    return run_id


def _flatten(options: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted name, value) of all options."""
    for name, value in options.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield re.sub(r"[^\w .:/-]", "_", f"{prefix}{name}"), value
