"""`launch --elastic` on real hosts: one runs other code and is refused until it does not, another is switched off; both join."""

import json

from brigade.train.run import events
from testbed import strikes
from testing.clusters import launch_words
from testing.patience import PATIENCE, wait_until

EVERY, STEPS = 10, 300
FLAGS = (
    f"--sync_every {EVERY} --max_steps {STEPS} --max_length 64 --global_batch_size 6 --per_device_train_batch_size 2"
)
FLAGS += " --eval_answers 0 --max_eval_samples 16 --eval_steps 300 --save_steps 300 --logging_steps 10 --warmup_steps 5"


def last_step(run):
    return max((event["step"] for event in events.read(run, "step") if event["event"] == "step"), default=0)


def test_a_host_that_is_switched_off_costs_the_others_nothing_and_joins_again(cluster_of_three):
    cluster, folder = cluster_of_three, cluster_of_three.shared / "elastic"
    folder.mkdir()
    run, hostfile = folder / "run", cluster.hostfile(1)
    how = f"--elastic --launcher torchrun --no_check --restart_pause 1 --restarts 20 --silence 8 {FLAGS}"
    command = launch_words(hostfile, folder, *how.split())
    strikes.other_clone(cluster)  # on node2, whose replica is refused until its clone is the others'
    with (folder / "said").open("wb") as out:
        launch = cluster["node1"].popen(command, stdout=out, stderr=out, OMP_NUM_THREADS="1")
    refused, words = "does not run what replica 0 runs: code.train.py", (folder / "said").read_text
    wait_until(lambda: refused in words(), launch, words)
    strikes.same_clone(cluster)
    wait_until(lambda: last_step(run) >= 30, launch, words)
    cluster["node3"].power_off()
    wait_until(lambda: events.read(run, "replica_lost"), launch, words)
    cluster["node3"].boot()
    code, said = launch.wait(PATIENCE), words()
    assert code == 0, said[-3000:]
    state = json.loads((run / "trainer_state.json").read_text())
    losses = [entry["eval_loss"] for entry in state["log_history"] if "eval_loss" in entry]
    assert state["global_step"] > STEPS and losses[-1] < 0.8 * losses[0]
    changes = [
        (event["event"], event["replica"]) for event in events.read(run) if event["event"].startswith("replica_")
    ]
    of_third = [event for event, replica in changes if replica == 2]
    assert of_third in (["replica_lost"], ["replica_lost", "replica_joins"]), changes
    assert set(changes) - {("replica_lost", 2), ("replica_joins", 2)} <= {("replica_joins", 1)}, changes
    assert (run / "model.safetensors").is_file() and f"of {6 * STEPS:,} samples were missed" in said
    assert "still to be trained on" not in said
