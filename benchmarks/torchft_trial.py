"""torchft as the engine of `launch --elastic`: what it does where Brigade's replicas must not fail, tried with real processes.

    python3 -m venv venv-torchft && venv-torchft/bin/pip install -r benchmarks/torchft-requirements.txt
    venv-torchft/bin/python benchmarks/torchft_trial.py

prints the table of docs/evidence/local-training.md, in two minutes. A replica is a process that trains a small layer by torchft's
DiLoCo over gloo. Its weights are compared with those that the same rounds give in one process.
"""

import itertools
import json
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
import urllib.request
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed import TCPStore
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo, LocalSGD

EVERY, STEP, WIDTH = 4, 0.1, 64  # steps of a round, seconds of a step, columns of the layer
OUTER = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
WAIT = timedelta(seconds=20)
RECIPE = {"method": "DiLoCo", "dtype": "float32", "rate": 0.01, "rounds": 4, "dies_in": -1}


# ---- a replica -----------------------------------------------------------------------------------------------------------
def layer(recipe):
    torch.manual_seed(0)
    model = torch.nn.Linear(WIDTH, WIDTH, dtype=getattr(torch, recipe["dtype"]))
    return model, torch.optim.AdamW(model.parameters(), lr=recipe["rate"])


def train(model, optimizer, number, turn):
    """Train on the samples of a replica's round."""
    for step in range(turn * EVERY, (turn + 1) * EVERY):
        batch = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1000 * number + step))
        optimizer.zero_grad()
        model(batch.to(model.weight.dtype)).square().mean().backward()
        time.sleep(STEP)
        optimizer.step()


def managed(name, address, load, state):
    here = socket.gethostname()
    store = TCPStore(here, 0, is_master=True, wait_for_workers=False)
    times = {"timeout": WAIT, "quorum_timeout": WAIT, "quorum_retries": 20}
    where = {"rank": 0, "world_size": 1, "store_addr": here, "store_port": store.port}
    how = {"use_async_quorum": False, "init_sync": False, "min_replica_size": 1}
    group = ProcessGroupGloo(timeout=WAIT)
    manager = Manager(group, load, state, replica_id=name, lighthouse_addr=address, **times, **where, **how)
    manager.served = store  # as long as it lives
    return manager


def replica(folder, number, address, recipe):
    model, optimizer = layer(recipe)

    def load(kept):
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optim"])

    manager = managed(
        f"replica-{number}", address, load, lambda: {"model": model.state_dict(), "optim": optimizer.state_dict()}
    )
    allreduce = manager.allreduce

    def dying(*arguments, **named):
        if manager.current_step() == recipe["dies_in"]:
            os.kill(os.getpid(), signal.SIGKILL)
        return allreduce(*arguments, **named)

    manager.allreduce = dying
    if recipe["method"] == "DiLoCo":
        local = DiLoCo(manager, [model], optimizer, torch.optim.SGD(model.parameters(), **OUTER), EVERY)
    else:
        local = LocalSGD(manager, model, optimizer, EVERY)
    (folder / f"ready-{number}").touch()
    while not (folder / "go").exists():
        time.sleep(0.01)
    with local, (folder / f"{number}.jsonl").open("a", buffering=1) as told:
        for turn in range(100):
            train(model, optimizer, number, turn)
            reached = {"round": manager.current_step(), "members": manager.num_participants(), "turn": turn}
            told.write(json.dumps(reached | {"time": time.time(), "weights": model.weight.tolist()}) + "\n")
            if manager.current_step() >= recipe["rounds"]:
                break
    manager.shutdown(wait=False)
    os._exit(0)


def plain(recipe, rounds):
    """The weights after these rounds in one process, averaged in fp32. rounds: of each, who takes part with which of its turns"""
    replicas = {number: layer(recipe) for members in rounds for number in members}
    ours, _ = layer(recipe | {"dtype": "float32"})
    outer = torch.optim.SGD(ours.parameters(), **OUTER)
    for members in rounds:
        for number in members:
            replicas[number][0].load_state_dict(ours.state_dict())
            model, optimizer = replicas[number]
            train(model, optimizer, number, members[number])
        models = [ours, *(replicas[number][0] for number in members)]
        for parameter, *theirs in zip(*(model.parameters() for model in models), strict=True):
            mean = torch.stack([their.detach().float() for their in theirs]).mean(0)
            parameter.grad = parameter.detach() - mean
            parameter.data = parameter.data if recipe["method"] == "DiLoCo" else mean
        if recipe["method"] == "DiLoCo":
            outer.step()
    return ours.weight.detach()


# ---- trials --------------------------------------------------------------------------------------------------------------
def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def lighthouse(port):
    server = LighthouseServer(f"[::]:{port}", 1, join_timeout_ms=10_000)
    time.sleep(3600)
    server.shutdown()


class Trial:
    """A Lighthouse and replicas, of which each is a process."""

    def __init__(self, *recipes):
        self.folder = Path(tempfile.mkdtemp())
        self.children: dict = {}
        self.address = f"http://{socket.gethostname()}:{free_port()}"
        self.light()
        for number, recipe in enumerate(recipes):
            self.start(number, **recipe)
        self.until(lambda: all((self.folder / f"ready-{number}").exists() for number in self.children))
        (self.folder / "go").touch()

    def light(self):
        self.lighthouse = self.process(lighthouse, self.address.rpartition(":")[2])
        self.until(lambda: self.ask("/status"))

    def process(self, target, *arguments):
        child = multiprocessing.get_context("fork").Process(target=target, args=arguments)  # torch is imported once
        child.start()
        return child

    def start(self, number, **recipe):
        self.children[number] = self.process(replica, self.folder, number, self.address, RECIPE | recipe)

    def ask(self, path, data=None):
        try:
            return urllib.request.urlopen(self.address + path, data, timeout=2).read().decode()
        except OSError:
            return ""

    def lines(self, number=0):
        path = self.folder / f"{number}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def until(self, condition, seconds=100):
        deadline = time.monotonic() + seconds
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.02)
        return bool(condition())

    def end(self, number=0):
        """Wait for a replica's end; its exit code, or None where it does not end."""
        self.children[number].join(100)
        code = self.children[number].exitcode
        for child in (*self.children.values(), self.lighthouse):
            child.kill()
            child.join()
        return code


def exact(**recipe):
    trial = Trial(recipe, recipe)
    trial.end()
    expected = plain(RECIPE | recipe, [{0: turn, 1: turn} for turn in range(4)])
    got = torch.tensor(trial.lines()[-1]["weights"])
    moved = (expected - layer(RECIPE)[0].weight.detach()).abs().max()
    return f"{(got - expected).abs().max():.0e} from the plain computation, of {moved:.2f} that the weights moved"


def goes_on(strike, **recipe):
    """How the first of two replicas goes on after a strike in the third round. recipe: the other's"""
    trial = Trial({"rounds": 6}, {"rounds": 6} | recipe)
    trial.until(lambda: len(trial.lines()) == 2)
    strike(trial)
    code, lines = trial.end(), trial.lines()
    longest = max(after["time"] - before["time"] for before, after in itertools.pairwise(lines))
    lost = len(lines) - lines[-1]["round"]
    return f"exit code {code}; its longest round took {longest:.1f} s of {EVERY * STEP} s, and it lost {lost} of its rounds"


def lighthouse_dies(trial):
    trial.lighthouse.kill()
    trial.lighthouse.join()
    time.sleep(1)
    trial.light()


def joins(**recipe):
    trial = Trial({"rounds": 60})
    trial.until(lambda: trial.lines())
    trial.start(1, rounds=60, **recipe)
    found = trial.until(lambda: any(line["members"] == 2 for line in trial.lines()), 50)
    lines = trial.lines()
    trial.children[0].kill()
    trial.end()
    if not found:
        return "it does not join"
    at = next(place for place, line in enumerate(lines) if line["members"] == 2)
    got = torch.tensor(lines[at]["weights"])
    alone = plain(RECIPE, [{0: turn} for turn in range(at + 1)])
    both = plain(RECIPE | recipe, [{0: turn} for turn in range(at)] + [{0: at, 1: 0}])
    away = [float((got - each).abs().max()) for each in (alone, both)]
    return (
        f"it joins; the weights then are {away[0]:.0e} from those without it, {away[1]:.0e} from those with its round"
    )


def stranger_kills():
    trial = Trial({"rounds": 60})
    trial.until(lambda: trial.lines())
    name = next(word for word in trial.ask("/status").split('"') if word.startswith("/replica/replica-0"))
    trial.ask(name, b"")
    return f"POST {name[:18]}.../kill: exit code {trial.end()}"


class Code:
    """Runs in whoever unpickles it."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def stranger(address, path):
    """Join as a replica that is far ahead: the others take its state over."""
    manager = managed("stranger", address, lambda kept: None, lambda: {"model": Code(str(path)), "optim": {}})
    manager.load_state_dict({"step": 1000, "batches_committed": 0})
    manager.start_quorum()
    time.sleep(30)


def stranger_runs_code():
    trial = Trial({"rounds": 60}, {"rounds": 60})
    trial.until(lambda: trial.lines())
    path = trial.folder / "ran"
    trial.children[2] = trial.process(stranger, trial.address, path)
    ran = trial.until(path.exists, 30)
    trial.children[0].kill()
    trial.end()
    return "its pickle ran in the replicas" if ran else "its pickle did not run"


QUESTIONS = (  # what is asked, the trial, Brigade's answer and the test that shows it
    ("Are the weights right? DiLoCo", exact, "in fp32, the same to the last bit in all replicas"),
    (
        "Local SGD",
        lambda: exact(method="LocalSGD"),
        "the losses of DDP with H = 1, to 1e-5 (tests/ranks/test_local_steps.py)",
    ),
    (
        "A replica is killed while it trains",
        lambda: goes_on(lambda trial: trial.children[1].kill()),
        "known within 4 s; no round is lost",
    ),
    (
        "... in a synchronisation",
        lambda: goes_on(lambda _: None, dies_in=2),
        "the mean is made again without it; no round is lost",
    ),
    ("A replica joins", joins, "at the beginning of a round, which counts"),
    (
        "... with another learning rate",
        lambda: joins(rate=0.02),
        "refused, with the first difference (tests/cluster/test_elastic.py)",
    ),
    (
        "A stranger asks a replica to end",
        stranger_kills,
        "its line is closed: it has no token (test_coordinator_strangers.py)",
    ),
    ("A stranger joins, far ahead", stranger_runs_code, "as above; states are read as tensors only (test_exchange.py)"),
    ("The meeting place is killed", lambda: goes_on(lighthouse_dies), "started again by `launch`; no round is lost"),
)

if __name__ == "__main__":
    torch.set_num_threads(1)
    print("| | torchft | Brigade |\n|---|---|---|", flush=True)
    for asked, trial, ours in QUESTIONS:
        if not sys.argv[1:] or any(word in asked for word in sys.argv[1:]):
            print(f"| {asked} | {trial()} | {ours} |", flush=True)
