"""What trackers have kept of a run on the disk: figures of a name in the order in which they were kept, and one setting."""

import json
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Kept = tuple[list[tuple[int, float]], list[float]]
"""Steps with values, and what each process has said of the setting."""


def places(folder: Path) -> dict[str, str]:
    """Variables that say where trackers keep what they would not keep in the run's directory."""
    return {
        "TRACKIO_DIR": str(folder / "trackio"),
        "CLEARML_CACHE_DIR": str(folder / "clearml"),
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }


def kept(name: str, folder: Path, figure: str) -> Kept:
    """What a tracker has of a figure and the setting of the learning rate."""
    return _READERS[name](folder, figure, "optimizer.lr")


def contents(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Names and contents of all files, and of those inside of archives."""
    for path in folder.rglob("*"):
        if path.is_file():
            yield str(path), path.read_bytes()
            if path.suffix == ".zip":
                with zipfile.ZipFile(path) as archive:
                    for inner in archive.namelist():
                        yield f"{path}/{inner}", archive.read(inner)


def _aim(folder: Path, figure: str, setting: str) -> Kept:
    from aim import Repo

    repo = Repo.from_path(str(folder / "run" / "aim"))
    repo._recreate_index()  # as its UI does by itself
    runs = list(repo.iter_runs())
    rows = [
        row
        for run in runs
        for metric in run.metrics()
        if metric.name == figure
        for row in metric.dataframe()[["step", "value"]].values
    ]
    return sorted((int(step), float(value)) for step, value in rows), [run["hparams"][setting] for run in runs]


def _clearml(folder: Path, figure: str, setting: str) -> Kept:
    rows, settings = [], []
    for path in (folder / "clearml").rglob("metrics.jsonl"):
        rows += [row for line in path.read_text().splitlines() for row in json.loads(line)]
        general = json.loads((path.parent / "task.json").read_text())["configuration"].get("General", {})
        text = general.get("value", "")
        settings += [float(line.partition(" = ")[2]) for line in text.splitlines() if line.startswith(f'"{setting}"')]
    figures = [row for row in rows if figure in (row["metric"], f"{row['metric']}/{row['variant']}")]
    return sorted((row["iter"], row["value"]) for row in figures), settings


def _comet_ml(folder: Path, figure: str, setting: str) -> Kept:
    rows, settings = [], []
    paths = list((folder / "run" / "comet_ml").glob("*.zip"))
    for path in paths:
        with zipfile.ZipFile(path) as archive:
            lines = [json.loads(line)["payload"] for line in archive.read("messages.json").splitlines()]
        rows += [line["metric"] for line in lines if line.get("metric", {}).get("metricName") == figure]
        settings += [float(line["param"]["paramValue"]) for line in lines if setting in _parts(line)]
    assert len({path.name.partition("-")[0] for path in paths}) == 1  # one experiment
    return sorted((row["step"], row["metricValue"]) for row in rows), settings


def _parts(line: dict[str, Any]) -> list[str]:
    name = (line.get("param") or {}).get("paramName") or ""
    return [name, name.rpartition("|")[2]]


def _dvclive(folder: Path, figure: str, setting: str) -> Kept:
    import yaml

    place = folder / "run" / "dvclive"
    lines = (place / "plots" / "metrics" / f"{figure}.tsv").read_text().splitlines()[1:]
    rows = [line.split("\t") for line in lines]
    assert (folder / "run" / "dvc.yaml").read_text().count("params.yaml") == 1
    return [(int(step), float(value)) for step, value in rows], [yaml.safe_load((place / "params.yaml").read_text())[setting]]


def _mlflow(folder: Path, figure: str, setting: str) -> Kept:
    from mlflow import MlflowClient

    client = MlflowClient(places(folder)["MLFLOW_TRACKING_URI"])
    runs = client.search_runs([client.get_experiment_by_name("zeromesh").experiment_id])
    rows = [each for run in runs for each in client.get_metric_history(run.info.run_id, figure)]
    assert {run.info.status for run in runs} == {"FINISHED"}
    return sorted((row.step, row.value) for row in rows), [float(run.data.params[setting]) for run in runs]


def _swanlab(folder: Path, figure: str, setting: str) -> Kept:
    import yaml
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    rows, settings = [], []
    paths = sorted((folder / "run" / "swanlab").glob("run-*/*.swanlab"))
    for path in paths:
        reader = DataStoreReader()
        reader.open(path)
        scalars = [Record.FromString(each).scalar for each in reader]
        reader.close()
        rows += [(each.step, each.value.number) for each in scalars if each.key == figure]
        settings += [yaml.safe_load((path.parent / "files" / "config.yaml").read_text())[setting]["value"]]
        assert "command" not in (path.parent / "files" / "swanlab-metadata.json").read_text()
    assert len({path.name for path in paths}) == 1  # one run
    return rows, settings


def _trackio(folder: Path, figure: str, setting: str) -> Kept:
    import sqlite3

    with sqlite3.connect(folder / "trackio" / "zeromesh.db") as base:
        lines = base.execute("select step, metrics from metrics order by id").fetchall()
        settings = [json.loads(config)[setting] for (config,) in base.execute("select config from configs")]
    rows = [(step, json.loads(values)) for step, values in lines]
    return [(step, values[figure]) for step, values in rows if figure in values], settings


_READERS: dict[str, Callable[[Path, str, str], Kept]] = {
    "aim": _aim,
    "clearml": _clearml,
    "comet_ml": _comet_ml,
    "dvclive": _dvclive,
    "mlflow": _mlflow,
    "swanlab": _swanlab,
    "trackio": _trackio,
}
NAMES = tuple(_READERS)
