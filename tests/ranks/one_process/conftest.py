"""What the tests of one process share: its flags, and a finished run."""

import pytest

import train
from testing import runs
from testing.command_line import as_flags


@pytest.fixture(scope="session")
def flags(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    further = as_flags(max_steps=6, save_steps=3, optim="adamw_torch", learning_rate="1e-3", report_to="tensorboard")
    return [*runs.write_inputs(folder), *further]


@pytest.fixture(scope="session")
def done(flags, tmp_path_factory):
    """A finished run: its directory and its log."""
    output = tmp_path_factory.mktemp("runs") / "run"
    return output, train.main([*flags, "--output_dir", str(output)]).state.log_history


@pytest.fixture
def refused(flags, capfd):
    """refused(*further): what train.main says before it leaves with exit code 2."""

    def call(*further):
        with pytest.raises(SystemExit) as left:
            train.main([*flags, *further])
        said = capfd.readouterr().err
        assert left.value.code == 2, said
        return said

    return call


@pytest.fixture
def counted(tmp_path, monkeypatch):
    """counted(owner, method, count): run(name, words), which returns a run's log, and what count says of each call of that method
    with these arguments. Derived files lie in a cache of the test's own, in tmp_path as the runs do."""
    monkeypatch.setenv("BRIGADE_CACHE", str(tmp_path / "cache"))

    def call(owner, method, count):
        found, sound = [], getattr(owner, method)

        def counting(*given):
            result = sound(*given)
            found.append(count(result, *given))
            return result

        monkeypatch.setattr(owner, method, counting)

        def run(name, words):
            found.clear()
            return train.main([*words, "--output_dir", str(tmp_path / name)]).state.log_history, tuple(found)

        return run

    return call


@pytest.fixture(autouse=True)
def environment(no_launcher):
    """No test leaves the next one what train.main has set."""
