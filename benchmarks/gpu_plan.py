"""What benchmarks/gpu.py measures: models x methods x options, as flags of train.py over a shared base."""

from typing import NamedTuple

from benchmarks import gpu_attention, gpu_models

Flags = dict[str, str]

MICRO = "per_device_train_batch_size"
# A step is 8 packs of 4,096 tokens. Only torch's own kernels: what everybody has.
BASE: Flags = {
    "max_length": "4096", "packing": "true", "bf16": "true", "global_batch_size": "8", MICRO: "2",
    "per_device_eval_batch_size": "1", "attn_implementation": "varlen", "use_liger_kernel": "false",
    "optim": "adamw_torch_fused", "torch_compile": "false", "activation_checkpointing": "false", "ds_config": "none",
}  # fmt: skip
METHODS: dict[str, Flags] = {"full": {}, "lora": {"use_peft": "true", "lora_r": "16"}}
# What a model needs to fit at all. 8B: 18 bytes per parameter with fp32 Adam (weights, their bf16 copies, gradients, two
# moments) are 147 GB, more than an H200 has; with 8-bit moments 12, 98 GB.
FITTING: dict[tuple[str, str], Flags] = {
    ("qwen3-0.6b", "full"): {MICRO: "4"},
    ("qwen3-0.6b", "lora"): {MICRO: "4"},
    ("qwen3-8b", "full"): {MICRO: "1", "optim": "adamw_8bit", "activation_checkpointing": "true"},
    ("qwen3-8b", "lora"): {MICRO: "1"},
}
TWICE = "twice"  # the micro-batch that the model has otherwise
LIGER_IN_TILES = {"use_liger_kernel": "true", "tiled_loss": "true"}
# Each is one run of every model and method; where two have the same flags, the second is left out.
OPTIONS: dict[str, Flags] = {
    "base": {},
    "liger": {"use_liger_kernel": "true"},
    "liger-twice": LIGER_IN_TILES | {MICRO: TWICE},
    "liger-checkpointing-twice": LIGER_IN_TILES | {"activation_checkpointing": "true", MICRO: TWICE},
    "liger-compile": {"use_liger_kernel": "true", "torch_compile": "true"},
    "liger-flash2-twice": LIGER_IN_TILES | {"attn_implementation": "flash_attention_2", MICRO: TWICE},
    "flash2": {"attn_implementation": "flash_attention_2"},
    "flash3": {"attn_implementation": "flash_attention_3"},
    "sdpa": {"attn_implementation": "sdpa"},
    "flex": {"attn_implementation": "flex_attention"},
    "compile": {"torch_compile": "true"},
    "checkpointing": {"activation_checkpointing": "true"},
    "least": {"activation_checkpointing": "true", MICRO: "1"},  # what a smaller card has room for
    "no-checkpointing": {"activation_checkpointing": "false"},
    "plain-adam": {"optim": "adamw_torch"},
    "fused-adam": {"optim": "adamw_torch_fused"},
    "adam-8bit": {"optim": "adamw_8bit"},
    "zero1": {"ds_config": "ds_configs/zero1.json"},  # bf16 weights with an fp32 copy, instead of fp32 ones and autocast
}  # fmt: skip
TINY: Flags = {"max_length": "128", "global_batch_size": "2", MICRO: "1"}
# Steps that are not measured (kernels are chosen and compiled in them, the allocator grows), and steps that are.
WARM_UP, STEPS = 4, 10


class Job(NamedTuple):
    """One row: a run of train.py, or (method `attention`) a comparison of packed with unpacked samples."""

    model: str
    method: str
    option: str


def flags_of(job: Job, tiny: bool) -> Flags:
    """The flags of a run."""
    flags = BASE | METHODS[job.method] | FITTING.get((job.model, job.method), {}) | (TINY if tiny else {})
    changed = OPTIONS[job.option]
    return flags | changed | ({MICRO: str(2 * int(flags[MICRO]))} if changed.get(MICRO) == TWICE else {})


def plan(only: list[list[str]], tiny: bool) -> list[Job]:
    """All rows that there are to measure, or those of --only. Raises ValueError for a word that names nothing."""
    jobs = [Job(family, "attention", how) for family in gpu_attention.FAMILIES for how in gpu_attention.IMPLEMENTATIONS]
    for model in gpu_models.CONFIGS:
        for method in METHODS:
            seen: list[Flags] = []
            for job in (Job(model, method, option) for option in OPTIONS):
                if (flags := flags_of(job, tiny)) not in seen:
                    jobs.append(job)
                    seen.append(flags)
    for words in only:
        for place, word in enumerate(words):
            known = list(dict.fromkeys(job[place] for job in jobs))
            if word not in ("all", *known):
                raise ValueError(f"--only: no {Job._fields[place]} {word!r}: all, {', '.join(known)}")
        if not any(_matches(job, words) for job in jobs):
            raise ValueError(f"--only {' '.join(words)}: these do not go together; see --list")
    return [job for job in jobs if not only or any(_matches(job, words) for words in only)]


def urgency(job: Job) -> int:
    """For who has little time: attention first, then every model's base, then the options in their order."""
    return -1 if job.method == "attention" else list(OPTIONS).index(job.option)


def _matches(job: Job, words: list[str]) -> bool:
    return all(word in ("all", part) for part, word in zip(job, words, strict=True))
