"""Fine-tune a language model as a recipe says, on whatever the launcher starts: one process or a cluster.

    python train.py                                                      # the tiny recipe, one process
    deepspeed --num_gpus 2 train.py --ds_config ds_configs/zero3.json
    deepspeed --hostfile hostfiles/2x8 train.py --recipe recipes/qwen3-8b/full.yaml --learning_rate 1e-5
    accelerate launch --config_file accelerate_configs/fsdp2_2x8.yaml train.py --recipe recipes/qwen3-8b/full.yaml
    torchrun --nproc_per_node 2 train.py --recipe recipes/qwen3-8b/full.yaml --rehearse

Every key of a recipe is also a flag (--help), and a flag wins. The same command again continues where a run stopped.
"""

from brigade import gate  # isort: split

gate.enter("python train.py", "all", "run")  # before the imports that need what it looks for

import sys
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from brigade.offers import offers
from brigade.train import upstream
from brigade.train.checkpoint import remote
from brigade.train.distributed import ranks, read_once, visible
from brigade.train.distributed.process import this_process
from brigade.train.host.cluster import World, world_from_environment
from brigade.train.model import named
from brigade.train.recipe import flags
from brigade.train.recipe.batch import batch_arithmetic
from brigade.train.run import directory as runs
from brigade.train.run.ending import say_finished, succeed
from brigade.train.strategy import choose

if TYPE_CHECKING:
    from pathlib import Path


def main(argv: list[str] | None = None, callbacks: tuple[Any, ...] = ()) -> Any:
    """Train one run, from its command line to its success marker. Return the Trainer, or None if there was nothing to do.

    callbacks: further TrainerCallbacks, for who calls this from Python.

    Raise SystemExit(2) on all ranks for a user's mistake that any of them finds, after one has told it.
    """
    timeline = this_process.timeline  # of what comes before the end of the first step
    timeline.begin("settings")
    ranks.whole_again()  # an earlier run of this process may have divided them
    world = world_from_environment()
    gpus = visible.settle()
    read_once.set_variables(world)

    # 1. What is asked for: a recipe with flags over it, a strategy, the batch arithmetic, an output directory.
    #    Until the model is built, a mistake that one rank finds ends all of them, with one message.
    with ranks.agreed(world):
        visible.check(gpus, world)
        settings = flags.load(sys.argv[1:] if argv is None else argv)
    if settings.rehearse:
        from brigade.train.step.rehearse import rehearse

        return rehearse(settings, world, main)
    remote.bring_records(settings, world)  # what object storage has of this run, if it lies there
    with ranks.agreed(world):
        strategy = choose(settings, world)
        data_parallel_size = strategy.axes.data(world.of_all_replicas)
        batch = batch_arithmetic(settings.recipe.training, data_parallel_size, settings.place("global_batch_size"))
        opened = runs.open_directory(settings, strategy, world)
    if ranks.gather(opened.finished)[0]:  # rank 0's word: the others may not see its directory
        if world.is_main_rank:
            say_finished(settings, opened.directory)
        remote.upload_rest(settings, world)
        return None

    with ranks.agreed(world):
        named.check(settings, world)

    # 2. This host, the model's config, and what the run computes with, the same on all ranks.
    timeline.enter("imports")
    with upstream.quick_imports(this_process.own):  # torch: seconds
        from brigade.train.step import steps
    timeline.enter("this host")
    with ranks.agreed(world):
        steps.check_gpus_are_seen(world)
        steps.prepare_environment(world, strategy)
        ranks.start(world, alone=strategy.kind != "single")
        config = steps.load_config(settings)
        steps.check_host(settings, strategy, world)
    steps.check_gpus_differ(world)
    offered = offers(world)
    timeline.enter("memory")
    settings = steps.settle_memory(settings, strategy, batch, world, config, opened, offered)
    timeline.enter("kernels")
    proofs = steps.prove_kernels(settings, strategy, world, config, offered)
    settings = settings.with_training(**proofs.values)
    with ranks.agreed(world):
        kernels = steps.choose_kernels(settings, strategy, config, proofs)
    timeline.enter("micro-batch")
    batch = steps.settle_batch(batch, settings, strategy, world, kernels, config, opened.directory, offered)
    run = opened.run(settings, strategy, world, batch, kernels, offered)

    # 3. The tokenizer, the data, and where weights and states come from; then the output directory is this run's.
    timeline.enter("tokenizer")
    data = None
    with ranks.agreed(world):
        steps.check_callbacks(callbacks)
        steps.check_run(run, config)
        tokenizer = steps.load_tokenizer(settings, config.get_text_config().vocab_size)
        images = steps.load_processor(settings, tokenizer, config)  # None: rows have none
        timeline.enter("data")
        if world.local_rank == 0:  # tokenise once per host; the others wait, however long it takes
            data = steps.prepare_data(settings, tokenizer, images)
            steps.prepare_tasks(settings)
    with ranks.agreed(world):
        data = data or steps.prepare_data(settings, tokenizer, images)
        runs.check_data(run, data.fingerprint)
        timeline.enter("weights' files")
        weights = steps.find_weights(settings, config)
        own = None if settings.recipe.model.from_scratch else weights
        model_files = steps.digest_model(config, tokenizer, own, steps.find_adapters(settings))
    timeline.enter("output directory")
    remote.bring_checkpoint(run)
    checkpoint, skipped = steps.agree_on_checkpoint(run, data.fingerprint, model_files["weights"])
    with ranks.agreed(world):
        steps.check_steps(run, len(data.train))
        lengthened = steps.how_lengthened(run, len(data.train), checkpoint)
    run = replace(run, skipped=skipped, lengthened=lengthened)
    run = remote.begin(runs.claim(run, data.fingerprint, checkpoint, model_files))
    if strategy.replicas > 1:  # from here on each one is a world of its own (sync_every)
        run = steps.divide_into_replicas(run)
    trainer = train_and_save(run, world, config, data, tokenizer, weights, checkpoint, callbacks)
    remote.finish(run)
    return trainer


def train_and_save(
    run: runs.Run,
    world: World,
    config: Any,
    data: Any,
    tokenizer: Any,
    weights: str,
    checkpoint: "Path | None",
    callbacks: tuple[Any, ...],
) -> Any:
    """Build the model with its Trainer; train, evaluating at the end, and also before the first step of a new run; save; and
    only then call it a success.

    A rank that fails from here on stops at once, and says so if it is the first; its launcher stops the others.
    """
    from brigade.train.step import steps

    with steps.watched(run):
        try:
            trainer = steps.build_trainer(run, data, tokenizer, weights, checkpoint, callbacks)
            this_process.signals.describe_by(lambda: steps.how_to_continue(run, trainer.state))  # if it is interrupted
            if run.world.is_main_rank:
                steps.print_summary(run, trainer, data, checkpoint)
            generation = getattr(trainer.model, "generation_config", None)  # a reward model has none
            data.chat_format.record(tokenizer, generation)  # what is saved says how it was trained

            trainer.train_from(checkpoint)
            if trainer.stopping.by:  # it was asked to stop, and saved a checkpoint: the same command does the rest
                data.close()
                trainer.stopping.leave(trainer.state)
                return trainer
            held_out_loss = trainer.final_evaluation()
            trainer.save_model()
            trainer.save_state()
            steps.compare_images(run, data, tokenizer)
            data.close()
            ranks.wait_for_all()  # the first may have to write the whole model
            succeed(run, trainer.state, held_out_loss)
            return trainer
        except BaseException as error:  # torch's CheckpointException is no Exception
            explain = partial(steps.explain, run, config, data, checkpoint is not None)
            ranks.fail(error, world, run.directory, run.note_failure, explain)


if __name__ == "__main__":
    ranks.run_to_the_end(main)
