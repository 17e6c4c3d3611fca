"""The keys under a recipe's `training:`, but for those of preferences (objectives.py). This module imports no torch."""

from typing import Annotated, Literal

from pydantic import Field

from .objectives import ObjectiveKeys
from .value_types import (
    AtLeastZero,
    Checkpointing,
    Pairs,
    Positive,
    Profile,
    Rates,
    Recomputation,
    Steps,
    StepsOrShare,
    Table,
    Trackers,
    Words,
    recomputation,
)

# Transformers does not have them so: step/optimizers.py
OWN_OPTIMIZERS = ("lamb", "lars", "muon", "schedule_free_adamw")
COUNT_IN_GROUPS = ("lamb", "lars")  # the steps, of which others keep one number for each parameter


class TrainingSection(ObjectiveKeys):
    """What is learned, the optimizer and its schedule, precision, memory, evaluations, checkpoints and what is logged."""

    global_batch_size: Annotated[int, Field(ge=1, le=1_000_000)]
    """Sequences per optimizer step over all ranks. Accumulation follows: global / (micro-batch x data-parallel size)."""
    reference_batch_size: Positive | None = None
    """The global batch that learning_rate was chosen for; default: global_batch_size of the recipe itself."""
    learning_rate_scaling: Literal["none", "linear", "sqrt"] = "none"
    """How the learning rate follows when the global batch differs from the reference batch."""
    per_device_train_batch_size: Positive | Literal["auto"] = "auto"
    """Micro-batch in sequences; at most a rank's share of the global batch. auto: the largest up to 8 that fits this GPU by the
    planner's count, else 1; the run's table says which."""
    per_device_eval_batch_size: Positive | Literal["auto"] = "auto"
    """auto: the same micro-batch as in training."""
    num_train_epochs: float = Field(1.0, gt=0)
    max_steps: Steps = -1
    """Optimizer steps; -1: num_train_epochs decides. A finished run given more of either goes on from its last checkpoint."""
    learning_rate: float = Field(2e-5, gt=0)
    vision_tower_learning_rate: float | None = Field(None, gt=0)
    """With images: the vision tower's, where that is trained; the schedule scales it as learning_rate. Default: learning_rate."""
    projector_learning_rate: float | None = Field(None, gt=0)
    """With images: the projector's, likewise."""
    learning_rates: Rates = {}
    """Peak learning rates by patterns of parameters' names in the model, regular expressions: `{"embed_tokens|lm_head": 1e-5}`.
    The first pattern that is found in a name counts; learning_rate is that of all others."""
    lr_scheduler_type: Literal[
        "linear", "cosine", "cosine_with_restarts", "cosine_with_min_lr", "cosine_warmup_with_min_lr", "constant",
        "constant_with_warmup", "inverse_sqrt", "polynomial", "warmup_stable_decay"
    ] = "cosine"  # fmt: skip
    lr_scheduler_kwargs: Table = {}
    """The schedule's own arguments, by Transformers' names: `{min_lr_rate: 0.1}`. warmup_stable_decay falls over its last
    num_decay_steps, below 1 a share of all steps; default: 0.1."""
    warmup_steps: StepsOrShare = 0
    """Below 1: a share of all steps."""
    weight_decay: AtLeastZero = 0.0
    max_grad_norm: AtLeastZero = 1.0
    """0: no clipping."""
    optim: Literal[
        "adamw_torch", "adamw_torch_fused", "adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit", "adafactor", "lion_32bit",
        "lion_8bit", "paged_lion_32bit", "paged_lion_8bit", "sgd", "lamb", "lars", "muon", "schedule_free_adamw"
    ] = "adamw_torch_fused"  # fmt: skip
    """auto: the faster form of AdamW in 32 bits that is proven on this run's GPUs; on a CPU the default."""
    optim_args: Pairs | None = None
    """The optimizer's own further arguments: `name=value,name=value`."""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    adam_beta2: float = Field(0.95, ge=0, lt=1)
    adam_epsilon: float = Field(1e-8, gt=0)
    bf16: bool = False
    """Compute in bfloat16. Neither bf16 nor fp16: fp32."""
    fp16: bool = False
    """Compute in float16, with a loss scale."""
    activation_checkpointing: Checkpointing = False
    """Compute activations again in the backward pass instead of keeping them: less memory, about a third more work. auto: only
    where this run's GPUs need it by the planner's count, once for all resumes; true where it cannot tell.
    `{every_n: 2}`: in every second layer; selective: all but attention and every second product; offload: as true, and what each
    layer begins with waits in host memory (docs/training.md)."""
    torch_compile: bool = False
    """Compile the decoder layers and the loss with torch.compile. auto: where that is proven on this run's GPUs and faster."""
    use_liger_kernel: bool = False
    """Liger's Triton kernels for norms, rotary embedding and gated MLPs (GPU); loss: tiled_loss. auto: as torch_compile."""
    router_aux_loss_coef: AtLeastZero | None = None
    """Weight of a mixture's loss that rewards sending tokens to all experts alike, over all tokens of a step
    (docs/experts.md). null: config.json's own where it says output_router_logits, else 0."""
    router_bias_update_rate: AtLeastZero = 0.0
    """By how much, after each step, the bias of a mixture's routers grows for experts that got fewer tokens than the mean, and
    shrinks for those that got more (DeepSeek-V3: 0.001; docs/experts.md). 0: it stays."""
    tiled_loss: Positive | bool | None = None
    """Compute logits and loss so many tokens at a time, and again in the backward pass: whole logits never exist. true: tiles of
    256 MiB (docs/parallelism.md); auto: those, where they train faster or memory needs them, as activation_checkpointing."""
    tiled_mlp: Positive | Literal["auto"] | None = None
    """Compute each MLP so many tokens at a time, and again in the backward pass. auto: as many as the hidden size."""
    padding_free: bool = True
    """Lay the samples of a micro-batch end to end instead of padding them to the longest, where that is less work: attention that
    computes the products between samples too (eager, sdpa) gets many of them padded (docs/data.md)."""
    ddp_comm_hook: Literal["none", "fp16", "bf16", "power_sgd"] = "none"
    """Compress the gradients that DDP sends over the network (docs/network.md). One process sends none."""
    sync_every: Positive | None = None
    """Train replicas independently, and average their weights every so many steps: for slow networks (docs/local-training.md)."""
    sync_replica: Literal["auto", "rank", "host"] = "auto"
    """What trains independently: a rank, or a host whose ranks work together as the strategy says. auto: under HSDP each of its
    groups, else a host where one has several ranks and there are several hosts, else a rank."""
    outer_optim: Literal["average", "nesterov"] = "average"
    """average: Local SGD. nesterov: the mean change is a gradient for SGD with momentum (DiLoCo, arXiv 2311.08105)."""
    outer_learning_rate: float = Field(0.7, gt=0)
    """The learning rate of nesterov."""
    outer_momentum: float = Field(0.9, ge=0, lt=1)
    """The momentum of nesterov."""
    sync_precision: Literal["fp32", "bf16", "int8"] = "fp32"
    """How the changes of weights are sent; int8 has one scale for each 256 values."""
    sync_fragments: Positive = 1
    """Send the layers in so many parts, each at its own step, while the next steps compute (Streaming DiLoCo,
    arXiv 2501.18512)."""
    seed: int = Field(42, ge=0, lt=2**32)
    """Below 2^32, as NumPy's."""
    nonfinite: Literal["stop", "skip", "rollback"] = "stop"
    """What happens at a step whose loss or gradient is NaN or infinite. It changes no weight, and its samples are written
    down. skip: the run goes on without it. rollback: weights go back to the last checkpoint, too (docs/training.md)."""
    nonfinite_limit: Positive = 10
    """How many steps nonfinite and loss_spike may leave out; the next one stops the run."""
    loss_spike: float | None = Field(None, gt=1)
    """Go back to the last checkpoint, and leave out the data since, when a step's loss is more than so many times the median of
    the 64 steps before it."""
    logging_steps: Positive = 1
    """Log a line of figures every so many steps."""
    eval_steps: Positive | None = None
    """Measure the held-out loss every so many steps; always before the first and after the last."""
    eval_answers: Annotated[int, Field(ge=0)] = 3
    """Held-out questions that the model answers at every evaluation but the first; with answer_score, how many are scored."""
    eval_tasks: Words = []
    """Tasks of lm-evaluation-harness that the model is evaluated on after the last step: names (`hellaswag,arc_easy`), or YAML
    files and folders of your own tasks. Needs lm_eval (docs/training.md)."""
    eval_tasks_chat_template: bool = False
    """Lay the prompts of eval_tasks out as the tokenizer's chat template says. false: as they are, which is lm_eval's default."""
    early_stopping_patience: Positive | None = None
    """Stop after so many evaluations in a row without a better held-out loss."""
    load_best_model_at_end: bool = False
    """Save the model of the checkpoint with the lowest held-out loss, not of the last step."""
    save_steps: Positive | Literal["auto"] | None = 500
    """auto: as often as costs least, by what a checkpoint costs and how often a cluster of this size fails
    (docs/checkpoints.md)."""
    save_total_limit: Positive | None = 3
    """How many checkpoints are kept. The newest whole one and the best one always are."""
    async_save: bool = True
    """Copy a checkpoint to host memory, and write it from there while training goes on. false: training waits for the disk."""
    hang_timeout: AtLeastZero | Literal["auto"] = "auto"
    """Seconds without a sign of life within a step after which the run hangs, and ends with a verdict. auto: thirty times the
    longest so far, at least 60. 0: never. Ranks are looked at once a second (docs/troubleshooting.md)."""
    report_to: Trackers = ["tensorboard"]
    """A list, or words with commas between them: `--report_to tensorboard,wandb`. none: no tracker. A tracker
    that needs a package of its own is an error where that is not installed. Where each one writes: docs/report.md."""
    profile: Profile | None = None
    """Trace steps with torch.profiler: `{start: 10, steps: 3, ranks: [0]}` writes those from the tenth of this process on into
    OUTPUT/profile (docs/report.md). `memory: true` also keeps which line allocated what, for the snapshot at out-of-memory."""
    report_page: bool = True
    """Write OUTPUT/report.html, a page of the run for the browser, at evaluations and at the run's end (docs/report.md)."""
    dataloader_num_workers: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    """Processes per rank that fetch and collate micro-batches ahead. auto: 2 beside a GPU; none on a CPU, whose cores compute."""

    @property
    def loss_tiles(self) -> int | bool | None:
        """What tiled_loss says; true beside a teacher, where the logits of a micro-batch are never whole."""
        return self.tiled_loss or bool(self.teacher)

    @property
    def loss_terms(self) -> bool:
        """Whether training sums something else than the cross-entropy of tokens."""
        return bool(self.label_smoothing_factor or self.z_loss_coef or self.token_loss)

    @property
    def recomputation(self) -> Recomputation:
        """What the backward pass computes again, and where that waits."""
        return recomputation(self.activation_checkpointing)

    @property
    def reports_elsewhere(self) -> bool:
        """Whether a tracker may wait for its server. TensorBoard's writes a file."""
        return bool(set(self.report_to) - {"tensorboard"})
