"""Figures and alerts of a real training, read back from what each tracker's real client has written."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ampscope
from ampscope.capture.record import signals
from ampscope.capture.record.alerts import AlertKind, Diagnosing
from ampscope.errors import WatchError
from ampscope.integrations.trackers import MLflow, OpenTelemetry, TensorBoard, WandB
from tests.support.paths import ROOT
from tests.support.training.small_loop import mlp, train
from tests.support.training.twin_runs import Watched, train_both
from tests.unit.integrations.wandb_files import records

STEPS = 12
BAD = 9  #: from here on losses are NaN
FIGURES = {f"ampscope/{name}" for name in ("loss_scale", "grad_norm", "skipped_share", "headroom_bits")}

pytestmark = [
    # The clients' own: of libraries that they use, and files that they leave to be collected.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(autouse=True)
def ample_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that is imported, or a store that is made, on a busy machine; and no second for the diagnosis."""
    monkeypatch.setattr(signals, "CLOSE_S", 100.0)
    monkeypatch.setattr(signals, "CLOSE_WITH_ALERTS_S", 100.0)
    monkeypatch.setattr(Diagnosing, "__call__", lambda _: None)


def loop(watch: Callable[..., Any]) -> Any:
    """A loop that goes well, and then does not."""
    turn = iter(range(STEPS))
    return train(watch, mlp(), lambda m, x, y: m(x).sum() * (float("nan") if next(turn) >= BAD else 1.0), steps=STEPS)


def tracked(tracker: Any, tmp_path: Path, **options: Any) -> Watched:
    """The loop with one tracker, bit for bit as without."""
    run = train_both(loop, tmp_path / "run", log_to=tracker, every=1, overhead=1.0, **options)
    assert run.warnings == []
    return run


def scales(run: Watched, every: int) -> list[tuple[int, float | None]]:
    return [(row.step, row.scale) for row in run.steps if row.step % every == 0]


def norms(run: Watched, every: int) -> list[tuple[int, Any]]:
    """Of those that are finite."""
    rows = [row for row in run.steps if row.step % every == 0 and math.isfinite(row.grad_norm or 0.0)]
    return [(row.step, pytest.approx(row.grad_norm)) for row in rows]


class TestTensorBoard:
    @staticmethod
    def read(folder: Path) -> Any:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        return EventAccumulator(str(folder)).Reload()

    def test_event_files_are_read_back(self, tmp_path: Path) -> None:
        run = tracked(TensorBoard(tmp_path / "logs", every=3), tmp_path)
        found = self.read(tmp_path / "logs")
        assert set(found.Tags()["scalars"]) >= FIGURES
        assert [(each.step, each.value) for each in found.Scalars("ampscope/loss_scale")] == scales(run, 3)
        assert [(each.step, each.value) for each in found.Scalars("ampscope/grad_norm")] == norms(run, 3)
        (alert,) = found.Tensors(f"ampscope/{AlertKind.INCIDENT}/text_summary")
        assert alert.step == BAD
        assert (
            b"step 9: non-finite loss (replay: exact).  \nLook: ampscope diagnose" in alert.tensor_proto.string_val[0]
        )

    def test_the_loops_own_writer_stays_open(self, tmp_path: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(str(tmp_path / "logs")) as writer:
            tracked(TensorBoard(writer), tmp_path)
            writer.add_scalar("own", 1.0, 0)
        assert {"own", "ampscope/loss_scale"} <= set(self.read(tmp_path / "logs").Tags()["scalars"])

    def test_what_is_no_writer_is_refused(self) -> None:
        with pytest.raises(WatchError, match="TensorBoard takes a SummaryWriter or a folder, not int"):
            TensorBoard(3)


class TestOpenTelemetry:
    def test_instruments_and_events(self, tmp_path: Path) -> None:
        from opentelemetry.sdk._logs import LoggerProvider
        from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, SimpleLogRecordProcessor
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader

        exporter: Any = InMemoryLogRecordExporter()  # type: ignore[no-untyped-call]  # it has no types
        reader, logs = InMemoryMetricReader(), LoggerProvider()
        logs.add_log_record_processor(SimpleLogRecordProcessor(exporter))
        meters = MeterProvider([reader])
        tracker = OpenTelemetry(meters.get_meter("test"), logger=logs.get_logger("test"), every=1)
        run = tracked(tracker, tmp_path)
        measured: Any = reader.get_metrics_data()
        metrics = {
            metric.name: list(metric.data.data_points)
            for resource in measured.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }
        assert metrics["ampscope.loss_scale"][0].value == run.steps[-1].scale
        assert metrics["ampscope.step"][0].value == STEPS - 1
        assert metrics["ampscope.loss_scale"][0].attributes == {"run": "run"}
        (alerts,) = metrics["ampscope.alerts"]
        assert (alerts.value, dict(alerts.attributes)) == (1, {"run": "run", "kind": "incident", "cause": "unknown"})
        (event,) = (each.log_record for each in exporter.get_finished_logs())
        assert (event.event_name, event.attributes["ampscope.step"]) == ("ampscope.incident", BAD)
        assert event.body.startswith("step 9: non-finite loss (replay: exact).")
        meters.shutdown()
        logs.shutdown()

    def test_prometheus_scrapes_them(self, tmp_path: Path) -> None:
        from opentelemetry.exporter.prometheus import PrometheusMetricReader
        from opentelemetry.sdk.metrics import MeterProvider
        from prometheus_client import start_http_server

        meters = MeterProvider([PrometheusMetricReader()])
        server, thread = start_http_server(0, addr="127.0.0.1")
        try:
            run = tracked(OpenTelemetry(meters.get_meter("test"), attributes={"job": "small"}, every=1), tmp_path)
            with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=30) as answer:
                page = answer.read().decode()
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
            meters.shutdown()
        (scale,) = re.findall(r'^ampscope_loss_scale\w*{.*job="small".*} (\S+)$', page, re.MULTILINE)
        assert float(scale) == run.steps[-1].scale
        assert re.search(r'^ampscope_alerts_total{.*kind="incident".*} 1\.0$', page, re.MULTILINE)


@pytest.mark.slow
class TestMLflow:
    @pytest.fixture(params=["sqlite", "file"])
    def client(self, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
        import mlflow

        before = mlflow.get_tracking_uri()
        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        monkeypatch.chdir(tmp_path)
        stores = {"sqlite": f"sqlite:///{tmp_path / 'mlflow.db'}", "file": (tmp_path / "store").as_uri()}
        mlflow.set_tracking_uri(stores[request.param])
        yield mlflow.MlflowClient()
        if mlflow.active_run():
            mlflow.end_run()
        mlflow.set_tracking_uri(before)

    def check(self, client: Any, run_id: str, run: Watched, every: int) -> None:
        history = client.get_metric_history(run_id, "ampscope/loss_scale")
        assert sorted((each.step, each.value) for each in history) == scales(run, every)
        tags = client.get_run(run_id).data.tags
        assert tags["ampscope.run"] == str(run.run.path)
        assert tags["ampscope.alert"].startswith("step 9: non-finite loss (replay: exact).")
        assert [each.path for each in client.list_artifacts(run_id, "ampscope")] == ["ampscope/incident-9.txt"]

    def test_a_run_of_its_own(self, client: Any, tmp_path: Path) -> None:
        run = tracked(MLflow(every=3), tmp_path)
        experiment = client.get_experiment_by_name("ampscope")
        (made,) = client.search_runs([experiment.experiment_id])
        assert (made.info.run_name, made.info.status) == ("run", "FINISHED")
        self.check(client, made.info.run_id, run, 3)

    def test_a_number_that_mlflow_draws_for_an_experiment_is_not_the_trainings(
        self, client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import mlflow.utils.name_utils

        short = SimpleNamespace(uuid4=lambda: SimpleNamespace(int=7 * 10**18 + 70))  # its first digits are drawn anew
        monkeypatch.setattr(mlflow.utils.name_utils, "uuid", short)
        run = tracked(MLflow(every=3), tmp_path)
        assert len(run.steps) == STEPS
        assert client.get_experiment_by_name("ampscope") is not None

    def test_the_loops_own_run_stays_open(self, client: Any, tmp_path: Path) -> None:
        import mlflow

        with mlflow.start_run() as own:
            run = tracked(MLflow(every=2), tmp_path)
            assert client.get_run(own.info.run_id).info.status == "RUNNING"
        self.check(client, own.info.run_id, run, 2)


@pytest.mark.slow
class TestWandB:
    @pytest.fixture(autouse=True)
    def offline(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        for name, value in {"MODE": "offline", "SILENT": "true", "DIR": str(tmp_path)}.items():
            monkeypatch.setenv(f"WANDB_{name}", value)
        yield
        import wandb

        wandb.teardown()

    @staticmethod
    def records(tmp_path: Path) -> list[Any]:
        """The records of the one run that was written offline; the service writes the last ones when it ends."""
        import wandb

        wandb.teardown()
        (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
        return list(records(file))

    @staticmethod
    def logged(written: list[Any]) -> list[dict[str, Any]]:
        return [_items(each.history) for each in written if each.WhichOneof("record_type") == "history"]

    def test_a_run_of_its_own_is_read_back(self, tmp_path: Path) -> None:
        run = tracked(WandB(every=3, project="small"), tmp_path)
        written = self.records(tmp_path)
        logged = self.logged(written)
        assert [(row["ampscope/step"], row["ampscope/loss_scale"]) for row in logged] == scales(run, 3)
        (alert,) = (record.alert for record in written if record.WhichOneof("record_type") == "alert")
        assert (alert.title, alert.level) == ("step 9: non-finite loss (replay: exact)", "ERROR")
        assert alert.text.endswith(f"Look: ampscope diagnose {tmp_path / 'run'}")

    def test_the_step_of_the_loops_own_run_is_not_moved(self, tmp_path: Path) -> None:
        import wandb

        with wandb.init(project="small") as own:

            def logging_loop(watch: Callable[..., Any]) -> Any:
                state = loop(watch)
                own.log({"own": 1.0}, step=5)
                return state

            Watched.train(logging_loop, tmp_path / "run", log_to=WandB(own, every=1))
            assert own.step == 5
            own.log({"own": 2.0}, step=6)
        logged = [
            _items(each.history) for each in self.records(tmp_path) if each.WhichOneof("record_type") == "history"
        ]
        assert [row["own"] for row in logged if "own" in row] == [1.0, 2.0]
        assert any("ampscope/loss_scale" in row for row in logged)


def _items(history: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in history.item}


@pytest.mark.parametrize(
    ("make", "missing", "extra"),
    [
        (lambda: TensorBoard("logs"), "torch.utils.tensorboard", "tensorboard"),
        (WandB, "wandb", "wandb"),
        (MLflow, "mlflow", "mlflow"),
        (OpenTelemetry, "opentelemetry.metrics", "otel"),
    ],
)
def test_a_library_that_is_missing_names_its_extra(
    make: Callable[[], Any], missing: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(WatchError, match=re.escape(f"pip install 'ampscope[{extra}]'")):
        make()


def test_none_of_them_is_loaded_unless_it_is_made() -> None:
    code = "import sys, ampscope.integrations.trackers; print(*sys.modules, sep='\\n')"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert not {"torch", "wandb", "mlflow", "opentelemetry", "tensorboard"} & set(told.stdout.split())


def test_alerts_name_the_run_and_the_command(tmp_path: Path) -> None:
    heard: list[ampscope.Alert] = []
    tracked(TensorBoard(tmp_path / "logs"), tmp_path, on_incident=heard.append)
    assert [(each.step, each.look) for each in heard] == [(BAD, f"ampscope diagnose {tmp_path / 'run'}")]
