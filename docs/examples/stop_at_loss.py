"""A callback of one's own: it ends a run, whose model is then saved, once the training loss is low enough."""

from transformers import TrainerCallback

from brigade import train


class StopAtLoss(TrainerCallback):
    """Every rank sees the same logs, and so all of them decide the same. If only one stopped, the others would wait for it."""

    def __init__(self, limit):
        self.limit = limit

    def on_log(self, args, state, control, logs=None, **_):
        if "loss" in logs and logs["loss"] < self.limit:
            control.should_training_stop = True
            if state.is_world_process_zero:
                print(f"loss {logs['loss']:.3f} at step {state.global_step}: that is enough")


if __name__ == "__main__":
    train.main(callbacks=[StopAtLoss(2.0)])
