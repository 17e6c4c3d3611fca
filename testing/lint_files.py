"""Files for lint: sound ones with changes over them, and for each rule some that break it."""

import copy
import json

from .ranks import REPOSITORY

ZERO3 = json.loads((REPOSITORY / "ds_configs/zero3.json").read_text())
CHATS = str(REPOSITORY / "brigade/train/data/python_docs/train.jsonl")
RECIPE = {
    "model": {"model_name_or_path": "some/model", "tokenizer_name_or_path": "python-docs"},
    "data": {"dataset_name": "python-docs", "chat_template": "chatml"},
    "training": {"global_batch_size": 32},
}
DDP = {"distributed_type": "MULTI_GPU", "num_machines": 2, "num_processes": 16, "main_process_ip": "node1"}
FSDP = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}}
FILE = {"deepspeed_config_file": "ds_configs/zero3.json"}


def ds(zero=(), **top):
    config = copy.deepcopy(ZERO3)
    config["zero_optimization"].update(zero)
    return config | top


def recipe(**sections):
    document = copy.deepcopy(RECIPE)
    for section, values in sections.items():
        document.setdefault(section, {}).update(values)
    return document


def fsdp(mesh=None, **options):
    more = {"parallelism_config": mesh} if mesh else {}
    return {**FSDP, "fsdp_config": {"fsdp_version": 2, **options}, **more}


def zero(**options):
    return {"distributed_type": "DEEPSPEED", "deepspeed_config": options}


Z = "ds.json:1: zero_optimization"

# rule -> files that break it (name -> text or document), and where it must be found
REVERSE = {"objective": "distill", "teacher": "smollm2-135m", "loss_type": "reverse_kl"}
EXAMPLES = {
    "file-missing": ({"r.yaml": recipe(cluster={"hostfile": "nowhere"})}, "r.yaml:2: cluster.hostfile"),
    "file-unreadable": ({"hosts": b"\xff\xfe"}, "hosts"),
    "file-syntax": ({"r.yaml": "model:\n  - ]\n"}, "r.yaml:2"),
    "file-kind": ({"notes.md": "Dear diary,\ntoday I wrote: a hostfile\n\n    node1 slots=8\n\nand then it rained."}, "notes.md"),
    "file-duplicate-key": ({"ds.json": '{"zero_optimization":\n{"stage": 3},\n"zero_optimization": {"stage": 3}}'}, "ds.json:3"),
    "hostfile-colon": ({"hosts": "node1 slots=8\nnode2: slots=8\n"}, "hosts:2"),
    "hostfile-comment": ({"hosts": "node1 slots=8 # spare\n"}, "hosts:1"),
    "hostfile-slots": ({"hosts": "node1 slots=8\n\nnode2 slot=8\n"}, "hosts:3"),
    "hostfile-duplicate": ({"hosts": "node1 slots=8\nNode1\tslots=4\n"}, "hosts:2"),
    "hostfile-bom": ({"hosts": "\ufeffnode1 slots=8\n"}, "hosts:1"),
    "hostfile-name": ({"hosts": "node1 slots=8\nnode-[2-4] slots=8\n"}, "hosts:2"),
    "hostfile-empty": ({"hosts": "# none yet\n"}, "hosts"),
    "hostfile-localhost": ({"hosts": "node1 slots=8\nlocalhost slots=8\n"}, "hosts:2: localhost"),
    "hostfile-unequal": ({"hosts": "a slots=8\nb slots=8\nc slots=4\n"}, "hosts:3: c"),
    "ds-removed-key": ({"ds.json": ds(elasticity={"enabled": True})}, "ds.json:1: elasticity"),
    "ds-removed-optimizer": ({"ds.json": ds(optimizer={"type": "OneBitAdam"})}, "ds.json:1: optimizer"),
    "ds-unknown-key": ({"ds.json": ds({"stag": 3})}, Z + ".stag"),
    "ds-unread": ({"ds.json": ds(prescale_gradients=True)}, "ds.json:1: prescale_gradients"),
    "ds-writes-elsewhere": (
        {"ds.json": ds(tensorboard={"enabled": True, "output_path": "/srv"})},
        "ds.json:1: tensorboard.output_path",
    ),
    "ds-imports": (
        {"ds.json": ds(torch_autocast={"enabled": True, "lower_precision_safe_modules": ["os.path"]})},
        "ds.json:1: torch_autocast.lower_precision_safe_modules",
    ),
    "ds-not-a-block": ({"ds.json": ds(bf16=True)}, "ds.json:1: bf16"),
    "ds-auto-not-filled": ({"ds.json": ds({"allgather_bucket_size": "auto"})}, Z + ".allgather_bucket_size"),
    "ds-stage": ({"ds.json": ds({"stage": 4})}, Z + ".stage"),
    "ds-offload-stage": ({"ds.json": ds({"stage": 2, "offload_param": {"device": "cpu"}})}, Z + ".offload_param.device"),
    "ds-nvme-path": ({"ds.json": ds({"offload_optimizer": {"device": "nvme"}})}, Z + ".offload_optimizer.device"),
    "ds-accumulation": ({"ds.json": ds(gradient_accumulation_steps=4)}, "ds.json:1: gradient_accumulation_steps"),
    "ds-optimizer": ({"ds.json": ds(optimizer={"type": "AdamW", "params": {"lr": "auto"}})}, "ds.json:1: optimizer"),
    "ds-axis-size": ({"ds.json": ds(sequence_parallel_size=-2)}, "ds.json:1: sequence_parallel_size"),
    "ds-contradicts-recipe": ({"ds.json": ds(bf16={"enabled": True}), "r.yaml": recipe()}, "ds.json:1: bf16.enabled"),
    "ds-owned-by-recipe": ({"ds.json": ds(train_batch_size=32), "r.yaml": recipe()}, "ds.json:1: train_batch_size"),
    "ds-weights-not-gathered": (
        {"ds.json": {"zero_optimization": {"stage": 3}}},
        Z + ".stage3_gather_16bit_weights_on_model_save",
    ),
    "ds-clipping-absent": ({"ds.json": {"zero_optimization": {"stage": 2}}}, "ds.json: gradient_clipping"),
    "ds-deprecated-key": ({"ds.json": ds({"cpu_offload": True})}, Z + ".cpu_offload"),
    "ds-two-spellings": ({"ds.json": ds({"cpu_offload": True, "offload_optimizer": {}})}, Z + ".offload_optimizer"),
    "ds-wrong-value": ({"ds.json": ds({"overlap_comm": "yes please"})}, Z + ".overlap_comm"),
    "ds-unsound": ({"ds.json": ds({"compute_grad_norm": False})}, Z + ".compute_grad_norm"),
    "ds-refused-together": ({"ds.json": ds(bf16={"enabled": True}, fp16={"enabled": True})}, "ds.json:1: fp16.enabled"),
    "ds-other-stage": ({"ds.json": ds({"stage": 2, "zero_hpz_partition_size": 8})}, Z),
    "ds-default-written-out": ({"ds.json": ds({"contiguous_gradients": True})}, "ds.json"),
    "ds-overlap-comm": ({"ds.json": {"zero_optimization": {"stage": 2, "overlap_comm": True}}}, Z + ".overlap_comm"),
    "ds-timers": ({"ds.json": ds(timers={"throughput": {"enabled": True}})}, "ds.json:1: timers.throughput.enabled"),
    "ds-memory-limits": (
        {"ds.json": ds({"max_live_parameters": 0})}, Z + ".stage3_max_live_parameters"),
    "accelerate-variable": ({"a.yaml": DDP | {"num_processes": "$WORLD_SIZE"}}, "a.yaml:4: num_processes"),
    "accelerate-distributed-type": ({"a.yaml": {"num_processes": 8}}, "a.yaml: distributed_type"),
    "accelerate-not-a-table": ({"a.yaml": {**FSDP, "fsdp_config": "FULL_SHARD"}}, "a.yaml:2: fsdp_config"),
    "accelerate-not-a-number": ({"a.yaml": fsdp(fsdp_version="two")}, "a.yaml:3: fsdp_config.fsdp_version"),
    "accelerate-unknown-key": ({"a.yaml": DDP | {"num_process": 16}}, "a.yaml:4: num_process"),
    "accelerate-two-sources": ({"a.yaml": zero(**FILE, zero_stage=3)}, "a.yaml:3: deepspeed_config.zero_stage"),
    "accelerate-fsdp1": ({"a.yaml": {**FSDP, "fsdp_config": {"a": 1}}}, "a.yaml:2: fsdp_config.fsdp_version"),
    "accelerate-fsdp2-value": (
        {"a.yaml": fsdp(fsdp_reshard_after_forward="FULL_SHARD")}, "a.yaml:3: fsdp_config.fsdp_reshard_after_forward"),
    "accelerate-fsdp1-option": (
        {"a.yaml": fsdp(fsdp_sharding_strategy="FULL_SHARD")}, "a.yaml:3: fsdp_config.fsdp_sharding_strategy"),
    "accelerate-full-state-dict": (
        {"a.yaml": fsdp(fsdp_state_dict_type="FULL_STATE_DICT")}, "a.yaml:3: fsdp_config.fsdp_state_dict_type"),
    "accelerate-owned-by-recipe": (
        {"a.yaml": fsdp(fsdp_activation_checkpointing=True)}, "a.yaml:3: fsdp_config.fsdp_activation_checkpointing"),
    "accelerate-unread": ({"a.yaml": DDP | {"dynamo_backend": "INDUCTOR"}}, "a.yaml:2: dynamo_backend"),
    "accelerate-precision": (
        {"a.yaml": {**FSDP, "mixed_precision": "fp16"}, "r.yaml": recipe(training={"bf16": True})}, "a.yaml:4: mixed_precision"),
    "accelerate-parallelism": (
        {"a.yaml": fsdp({"parallelism_config_cp_size": 2})}, "a.yaml:5: parallelism_config.parallelism_config_cp_size"),
    "accelerate-own-key": (
        {"a.yaml": fsdp({"parallelism_config_ep_size": 2})}, "a.yaml:5: parallelism_config.parallelism_config_ep_size"),
    "accelerate-mesh": (
        {"a.yaml": fsdp({"parallelism_config_dp_replicate_size": 2}) | {"num_processes": 8}}, "a.yaml:5: parallelism_config"),
    "accelerate-processes": ({"a.yaml": DDP | {"num_processes": 15}}, "a.yaml:4: num_processes"),
    "accelerate-machine-rank": ({"a.yaml": DDP | {"machine_rank": 1}}, "a.yaml:2: machine_rank"),
    "accelerate-loopback": ({"a.yaml": DDP | {"main_process_ip": "127.0.0.1"}}, "a.yaml:2: main_process_ip"),
    "accelerate-hosts": ({"a.yaml": DDP, "hosts": "node1 slots=8\n"}, "a.yaml:3: num_machines"),
    "accelerate-environment-file": ({"a.yaml": zero(**FILE) | {"num_machines": 2, "num_processes": 16}},
                                    "a.yaml:1: deepspeed_config.deepspeed_multinode_launcher"),
    "recipe-invalid": ({"r.yaml": recipe(training={"learning_rat": 1e-5})}, "r.yaml:9: training.learning_rat"),
    "recipe-strategy": (
        {"r.yaml": recipe(cluster={"ds_config": ZERO3, "accelerate_config": "accelerate_configs/ddp_1x2.yaml"})},
        "r.yaml:1: cluster"),
    "recipe-batch": ({"r.yaml": recipe(), "hosts": "node1 slots=33\n"}, "r.yaml:8: training.global_batch_size"),
    "recipe-filler": ({"r.yaml": recipe(), "hosts": "node1 slots=5\n"}, "r.yaml:8: training.global_batch_size"),
    "recipe-code": ({"r.yaml": recipe(model={"trust_remote_code": True})}, "r.yaml:7: model.trust_remote_code"),
    "recipe-sizes": (
        {"r.yaml": recipe(cluster={"ds_config": "ds_configs/zero3_sp2.json"}), "config.json": {"num_attention_heads": 7}},
        "r.yaml:7: model.model_name_or_path"),
    "recipe-layers": (
        {
            "r.yaml": recipe(model={"model_name_or_path": "recipes/tiny"}),
            "a.yaml": fsdp(fsdp_transformer_layer_cls_to_wrap="ZImageTransformerBlock"),
        },
        "r.yaml: cluster.accelerate_config",
    ),
    "recipe-rows": (
        {"r.yaml": recipe(data={"dataset_name": None, "train_file": CHATS}, training={"objective": "dpo"})},
        "r.yaml:4: data.train_file"),
    "recipe-unread": (
        {"r.yaml": recipe(data={"dataset_name": None, "train_file": "rows.csv"}), "rows.csv": "prompt,completion,topic\na,b,c\n"},
        "r.yaml:4: data.train_file"),
    "recipe-variable": ({"r.yaml": recipe(model={"model_name_or_path": "${MODEL}/base"})}, "r.yaml:5: model.model_name_or_path"),
    "recipe-data": (
        {"r.yaml": recipe(data={"dataset_name": None, "train_file": "nowhere.jsonl"})}, "r.yaml:4: data.train_file"),
    "recipe-output": ({"r.yaml": recipe(model={"model_name_or_path": "./outputs/sft"})}, "r.yaml:5: model.model_name_or_path"),
    "recipe-kept-words": ({"r.yaml": recipe(training=REVERSE | {"teacher_top_k": 8})}, "r.yaml:12: training.teacher_top_k"),
    "recipe-experts": (
        {"r.yaml": recipe(cluster={"accelerate_config": "accelerate_configs/fsdp2_ep2_1x4.yaml"}),
         "config.json": {"model_type": "qwen3_moe", "num_experts": 7}},
        "r.yaml:7: model.model_name_or_path"),
    "env-line": ({".deepspeed_env": "NCCL_DEBUG=INFO\n\nA=1\n"}, ".deepspeed_env:2"),
    "env-value": ({".deepspeed_env": "A=1\nB=\"x y\"\n"}, ".deepspeed_env:2"),
}  # fmt: skip


def names(report):
    return {finding.rule for finding in report.findings}
