"""`--report_to` with each tracker: our figures arrive in it, by Transformers' own callback. A stand-in of the few functions that
the callback calls records them; where the package itself is installed, it takes them, too."""

import importlib.machinery
import importlib.util
import sys
from types import ModuleType, SimpleNamespace

import pytest

import train
from testing import runs

FIGURES = {"loss", "grad_norm", "learning_rate", "tokens_per_second", "seconds_forward", "tokens", "peak_memory_gib"}
TRACKERS = ("mlflow", "trackio", "swanlab")
INSTALLED = [name for name in TRACKERS if importlib.util.find_spec(name)]


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    shared = runs.write_inputs(tmp_path_factory.mktemp("inputs"))
    return [*shared, "--max_steps", "2", "--logging_steps", "1", "--eval_steps", "2"]


@pytest.fixture(autouse=True)
def environment(no_launcher, monkeypatch):
    for key in ("MLFLOW_TRACKING_URI", "SWANLAB_LOG_DIR"):
        monkeypatch.setenv(key, "")
        monkeypatch.delenv(key)


class Recorder(dict):
    """A stand-in of a tracker's module: what was logged by name, and the settings that it was begun with."""

    def __init__(self):
        self.figures, self.begun = {}, {}

    def begin(self, **settings):
        self.begun |= settings

    def log(self, figures, step=None, **_):
        for name, value in figures.items():
            self.figures.setdefault(name.removeprefix("train/"), []).append(value)


def stand_in(name, recorder):
    """The module that Transformers' callback of this tracker talks to."""
    module, nothing = ModuleType(name), lambda *_, **__: None
    module.__spec__, module.__version__ = importlib.machinery.ModuleSpec(name, None), "9.0.0"
    if name == "mlflow":
        run = SimpleNamespace(info=SimpleNamespace(run_id="1"))
        limits = SimpleNamespace(MAX_PARAM_VAL_LENGTH=500, MAX_PARAMS_TAGS_PER_BATCH=100)
        module.utils = SimpleNamespace(validation=limits)
        module.is_tracking_uri_set = lambda: False
        module.active_run = lambda: run if recorder.begun.get("begun") else None
        module.set_tracking_uri = lambda uri: recorder.begin(uri=uri)
        module.start_run = lambda run_name, nested: recorder.begin(name=run_name, begun=True)
        module.log_params, module.end_run = nothing, lambda: recorder.begin(begun=False)
        module.log_metrics = lambda metrics, step, synchronous: recorder.log(metrics, step)
        return module
    module.init = lambda **settings: recorder.begin(name=settings.get("name") or settings.get("experiment_name"))
    module.config, module.log, module.finish, module.get_run = _Config(), recorder.log, nothing, _no_run
    module.context_vars = SimpleNamespace(current_space_id=SimpleNamespace(get=nothing))
    return module


def _no_run():
    """As SwanLab 0.10.3 answers where there is none."""
    raise RuntimeError("No active Run. Call swanlab.init() first.")


class _Config(dict):
    def update(self, values, **_):
        super().update(values)


@pytest.mark.parametrize("name", TRACKERS)
def test_our_figures_arrive(name, flags, tmp_path, monkeypatch):
    recorder = Recorder()
    monkeypatch.setitem(sys.modules, name, stand_in(name, recorder))
    output = tmp_path / "my-run"
    train.main([*flags, "--report_to", name, "--output_dir", str(output)])
    assert set(recorder.figures) >= FIGURES, sorted(recorder.figures)
    assert len(recorder.figures["loss"]) == 2 and {"eval_loss", "eval/loss"} & set(recorder.figures)
    assert recorder.begun["name"] == "my-run"
    if name == "mlflow":
        assert recorder.begun["uri"] == f"sqlite:///{output}/mlflow.db"


def takes(name, flags, tmp_path, monkeypatch):
    monkeypatch.setenv("SWANLAB_MODE", "local")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    output = tmp_path / "my-run"
    train.main([*flags, "--report_to", name, "--output_dir", str(output)])
    if name == "mlflow":
        import mlflow

        (run,) = mlflow.tracking.MlflowClient(f"sqlite:///{output}/mlflow.db").search_runs(["0"])
        assert set(run.data.metrics) >= FIGURES and run.info.run_name == "my-run"
    elif name == "trackio":
        assert list((tmp_path / "trackio").iterdir())
    else:
        assert list((output / "swanlab").glob("run-*"))


if INSTALLED:  # Brigade needs none of them, so there may be no such test
    test_the_real_package_takes_them = pytest.mark.parametrize("name", INSTALLED)(takes)


@pytest.mark.parametrize("name", ["wandb", *TRACKERS])
def test_a_package_that_is_not_installed_is_told_before_the_model_is_built(name, told, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda module, *rest: None if module == name else find(module, *rest)
    )
    said = told("--report_to", name)
    assert f"'{name}' is not installed on this host" in said and f"pip install {name}" in said
