"""The command lines that test_launchers.py runs on one host: words, and what the run says of its ranks and strategy."""

from brigade.train.distributed.ranks import free_port

EXPERTS = "accelerate_configs/fsdp2_ep2_1x4.yaml"
TINY = ["--recipe", "recipes/tiny/full.yaml"]
MIXTURE = [*TINY, "--model_name_or_path", "MIXTURE"]  # of experts, tiny


def _python(*flags: str) -> list[str]:
    return ["python", "train.py", *flags]


def _deepspeed(config: str) -> list[str]:
    return ["deepspeed", "--num_gpus", "2", "train.py", "--ds_config", f"ds_configs/{config}.json"]


def _accelerate(config: str, *further: str) -> list[str]:
    return ["accelerate", "launch", "--config_file", f"accelerate_configs/{config}.yaml", *further, "train.py", *TINY]


COMMANDS = {
    "python": (_python(), "world size 1", "single"),
    "python-zero3": (_python("--ds_config", "ds_configs/zero3.json"), "world size 1", "zero3"),
    "torchrun": (["torchrun", "--nproc_per_node", "2", "train.py"], "world size 2", "ddp"),
    "deepspeed": (_deepspeed("zero3"), "world size 2", "zero3"),
    "deepspeed-hostfile": (
        ["deepspeed", "--hostfile", "HOSTFILE", "train.py", "--deepspeed", "ds_configs/zero2.json"], "world size 2", "zero2"),
    "accelerate-ddp": (_accelerate("ddp_1x2"), "world size 2", "ddp"),
    "accelerate-fsdp2": (_accelerate("fsdp2_1x2"), "world size 2", "fsdp2"),
    "accelerate-fsdp2-offload": (_accelerate("fsdp2_offload_1x4", "--num_processes", "2"), "world size 2", "fsdp2"),
    "accelerate-zero3": (_accelerate("zero3_1x2"), "world size 2", "zero3"),
    "accelerate-hsdp": (_accelerate("hsdp_1x4"), "world size 4", "hsdp"),
    "python-experts": (_python(*MIXTURE), "world size 1", "single"),
    "accelerate-fsdp2-experts": (
        ["accelerate", "launch", "--config_file", EXPERTS, "train.py", "--accelerate_config", EXPERTS, *MIXTURE],
        "world size 4", "fsdp2 x expert 2"),
    "accelerate-fsdp2-tp2": (_accelerate("fsdp2_tp2_1x4"), "world size 4", "fsdp2"),
    "deepspeed-tp2": (_deepspeed("zero1_tp2"), "world size 2", "zero1_tp2"),
    "accelerate-fsdp2-sp2": (_accelerate("fsdp2_sp2_1x2"), "world size 2", "fsdp2"),
    "deepspeed-sp2": (_deepspeed("zero3_sp2"), "world size 2", "zero3_sp2"),
}  # fmt: skip
PORTS = {"torchrun": "--master_port", "deepspeed": "--master_port", "accelerate": "--main_process_port"}


def with_own_port(words: list[str]) -> list[str]:
    """The words with a port that is free: each launcher's own default is 29500, and other tests launch beside this one."""
    if words[0] not in PORTS:
        return words
    begin = 2 if words[0] == "accelerate" else 1
    return [*words[:begin], PORTS[words[0]], str(free_port()), *words[begin:]]
