"""The command lines that test_launchers.py runs on one host: words, and what the run says of its ranks and strategy."""

EXPERTS = "accelerate_configs/fsdp2_ep2_1x4.yaml"
MIXTURE = ["--recipe", "recipes/tiny/full.yaml", "--model_name_or_path", "MIXTURE"]  # of experts, tiny

COMMANDS = {
    "python": (["python", "train.py"], "world size 1", "single"),
    "python-zero3": (["python", "train.py", "--ds_config", "ds_configs/zero3.json"], "world size 1", "zero3"),
    "torchrun": (["torchrun", "--nproc_per_node", "2", "train.py"], "world size 2", "ddp"),
    "deepspeed": (
        ["deepspeed", "--num_gpus", "2", "train.py", "--ds_config", "ds_configs/zero3.json"], "world size 2", "zero3"),
    "deepspeed-hostfile": (
        ["deepspeed", "--hostfile", "HOSTFILE", "train.py", "--deepspeed", "ds_configs/zero2.json"],
        "world size 2", "zero2"),
    "accelerate-ddp": (
        ["accelerate", "launch", "--config_file", "accelerate_configs/ddp_1x2.yaml", "train.py", "--recipe",
         "recipes/tiny/full.yaml"], "world size 2", "ddp"),
    "accelerate-fsdp2": (
        ["accelerate", "launch", "--config_file", "accelerate_configs/fsdp2_1x2.yaml", "train.py", "--recipe",
         "recipes/tiny/full.yaml"], "world size 2", "fsdp2"),
    "accelerate-fsdp2-offload": (
        ["accelerate", "launch", "--config_file", "accelerate_configs/fsdp2_offload_1x4.yaml", "--num_processes", "2", "train.py",
         "--recipe", "recipes/tiny/full.yaml"], "world size 2", "fsdp2"),
    "accelerate-zero3": (
        ["accelerate", "launch", "--config_file", "accelerate_configs/zero3_1x2.yaml", "train.py", "--recipe",
         "recipes/tiny/full.yaml"], "world size 2", "zero3"),
    "accelerate-hsdp": (
        ["accelerate", "launch", "--config_file", "accelerate_configs/hsdp_1x4.yaml", "train.py", "--recipe",
         "recipes/tiny/full.yaml"], "world size 4", "hsdp"),
    "python-experts": (["python", "train.py", *MIXTURE], "world size 1", "single"),
    "accelerate-fsdp2-experts": (
        ["accelerate", "launch", "--config_file", EXPERTS, "train.py", "--accelerate_config", EXPERTS, *MIXTURE],
        "world size 4", "fsdp2 x expert 2"),
    "accelerate-fsdp2-tp2": (
        ["accelerate", "launch", "--config_file", "accelerate_configs/fsdp2_tp2_1x4.yaml", "train.py", "--recipe",
         "recipes/tiny/full.yaml"], "world size 4", "fsdp2"),
    "deepspeed-tp2": (
        ["deepspeed", "--num_gpus", "2", "train.py", "--ds_config", "ds_configs/zero1_tp2.json"], "world size 2", "zero1_tp2"),
    "accelerate-fsdp2-sp2": (
        ["accelerate", "launch", "--config_file", "accelerate_configs/fsdp2_sp2_1x2.yaml", "train.py", "--recipe",
         "recipes/tiny/full.yaml"], "world size 2", "fsdp2"),
    "deepspeed-sp2": (
        ["deepspeed", "--num_gpus", "2", "train.py", "--ds_config", "ds_configs/zero3_sp2.json"], "world size 2", "zero3_sp2"),
}  # fmt: skip
