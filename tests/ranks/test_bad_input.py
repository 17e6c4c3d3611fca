"""A mistake in flags, files or data is told with one short message, before the model is built."""

import datetime

import pytest

from testing.train_command import free_port

ZERO = '{"zero_optimization": {"stage": 2%s}}'
RECIPE = """
model: {model_name_or_path: recipes/tiny, from_scratch: true, tokenizer_name_or_path: python-docs}
data: {dataset_name: python-docs, chat_template: chatml, max_length: 64}
training: {global_batch_size: 4, warmup_steps: 100}
"""
ON_FILE = ["--dataset_name=", "--train_file", "FILE"]
ON_DS_CONFIG = ["--ds_config", "FILE"]
ON_RECIPE = ["--recipe", "FILE"]

# One of each kind that the steps before the model find; what else they find: test_flag_mistakes.py, test_ds_config.py,
# test_bad_rows.py and test_named.py in tests/unit.
MISTAKES = {
    # name: flags, content of FILE or None, words of the message
    "unknown flag": (["--lerning_rate=3"], None, ["--lerning_rate", "learning_rate"]),
    "recipe that is no YAML": (ON_RECIPE, "model:\n\tx: 1\n", ["FILE, line 2", "not YAML"]),
    "missing ds_config": (["--ds_config", "nowhere.json"], None, ["--ds_config", "'nowhere.json'", "spelling"]),
    "missing accelerate config": (["--accelerate_config", "nowhere.yaml"], None, ["'nowhere.yaml'", "spelling"]),
    "ds_config as accelerate config": (["--accelerate_config", "FILE"], ZERO % "", ["FILE: distributed_type"]),
    "ds_config that is no JSON": (ON_DS_CONFIG, '{\n"bf16": }', ["FILE, line 2", "not JSON"]),
    "key twice in JSON": (ON_DS_CONFIG, ZERO % ', "stage": 3', ["FILE: stage", "twice"]),
    "block that is no table": (ON_DS_CONFIG, ZERO % ', "offload_optimizer": "cpu"',
                               ["FILE: zero_optimization.offload_optimizer", "'cpu'"]),
    "data file that is a directory": (["--dataset_name=", "--train_file", "elsewhere"], None,
                                      ["'elsewhere'", "directory"]),
    "broken data line": (ON_FILE, '\n{"messages": [', ["FILE, line 2", "not JSON", "fix"]),
    "template without marks": (["--chat_template", "FILE"], "{{ messages }}", ["--chat_template", "generation"]),
    "template that breaks": (["--chat_template", "FILE"], "{% generation %}\n{% if %}", ["template, line 2"]),
    "an encoder": (["--model_name_or_path", "encoder"], None, ["--model_name_or_path", "'bert' is an encoder"]),
    "revision of a directory": (["--revision", "main"], None, ["flag --revision", "'main'", "'recipes/tiny'"]),
    "argument that the optimizer lacks": (["--optim_args", "foo=1"], None, ["--optim_args", "adamw", "'foo'"]),
    "argument that is no number": (["--optim", "sgd", "--optim_args", "momentum=much"], None, ["momentum is 'much'"]),
    "more warm-up than steps": (["--warmup_steps", "9", "--max_steps", "8"], None, ["--warmup_steps", "9", "8 steps"]),
    "more warm-up than the steps of a flag": ([*ON_RECIPE, "--max_steps", "8"], RECIPE,
                                              ["FILE: training.warmup_steps", "flag --max_steps", "--warmup_steps 0"]),
    "more warm-up than an epoch has": (["--warmup_steps", "99999"], None, ["--warmup_steps", "99999", "share"]),
    "model without weights": (["--from_scratch", "false"], None,
                              ["model.model_name_or_path", "weights", "from_scratch"]),
    "output directory of something else": (["--output_dir", "."], None, [".", "not a run's", "--fresh", "--output_dir run-2"]),
    "output directory that is a file": (["--output_dir", "good.jsonl"], None, ["good.jsonl", "is a file"]),
    "output directory below a file": (["--output_dir", "good.jsonl/run"], None,
                                      ["good.jsonl/run", "cannot be written"]),
    "checkpoint that is none": (["--resume_from_checkpoint", "elsewhere"], None,
                                ["'elsewhere'", "trainer_state.json"]),
    "flex attention without a GPU": (["--attn_implementation", "flex_attention"], None, ["backward pass", "sdpa"]),
    "quantised ZeRO without a GPU": (["--ds_config", "ds_configs/zeropp.json"], None,
                                    ["--ds_config", "GPU", "zero3_hpz"]),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_told_before_the_model_is_built(name, told, place):
    flags, content, words = MISTAKES[name]
    file = f"bad{'.jinja' if 'template' in name else '.yaml' if flags == ON_RECIPE else '.json'}"
    if content is not None:
        (place / file).write_text(content)
    message = told(*(file if flag == "FILE" else flag for flag in flags))
    for word in words:
        assert word.replace("FILE", file) in message
    assert not (place / "run").exists()


OWN_ROWS = ["--dataset_name=", "--train_file", "good.jsonl"]


@pytest.mark.parametrize("variable, value, flags, words", [
    ("PATH", "/nowhere", ["--torch_compile"], ["flag --torch_compile", "g++"]),
    ("BRIGADE_CACHE", "good.jsonl/cache", OWN_ROWS, ["good.jsonl/cache", "Not a directory", "BRIGADE_CACHE"]),
    ("TORCH_EXTENSIONS_DIR", "FOLDER/good.jsonl/kernels", [*OWN_ROWS, "--ds_config", "ds_configs/zero2_offload.json"],
     ["good.jsonl/kernels", "Not a directory", "TORCH_EXTENSIONS_DIR"]),
], ids=["no compiler", "no cache", "no place for kernels"])  # fmt: skip
def test_a_variable_that_leads_nowhere_is_told(told, monkeypatch, place, variable, value, flags, words):
    monkeypatch.setenv(variable, value.replace("FOLDER", str(place)))
    message = told(*flags)
    assert all(word in message for word in words), message


def test_a_world_size_that_somebody_left_is_told_while_it_waits(main, monkeypatch, capfd):
    for key, value in {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}.items():
        monkeypatch.setenv(key, str(value))
    monkeypatch.setattr("brigade.train.distributed.process_group.PATIENCE", 0.01)
    monkeypatch.setattr("brigade.train.distributed.process_group.RENDEZVOUS_TIMEOUT", datetime.timedelta(seconds=3))
    with pytest.raises(SystemExit):
        main(["--output_dir", "run"])
    waiting, *rest = capfd.readouterr().err.splitlines()
    assert all(word in waiting for word in ("rank 0", "1 other rank", "127.0.0.1:", "unset RANK WORLD_SIZE")), waiting
    assert rest[-1].startswith("  cure: ")
