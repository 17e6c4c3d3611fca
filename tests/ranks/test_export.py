"""`python -m brigade export`: from every strategy's checkpoints one directory that from_pretrained loads, with the run's
own held-out loss."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from brigade.__main__ import main
from brigade.train.checkpoint import saved_weights
from brigade.train.data.chat_template import TEMPLATES
from testing import parity, runs
from testing.command_line import as_flags
from testing.exports import FOUR, RUNS
from testing.ranks import REPOSITORY

ALL = RUNS | FOUR


def each(names):
    return [pytest.param(name, marks=ALL[name][2]) for name in names]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory, asked_for):
    """name -> (output directory, held-out losses before, after step 3, after step 6)."""
    folder = tmp_path_factory.mktemp("exported")
    config = json.loads((REPOSITORY / "ds_configs/zero3.json").read_text())
    config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = False
    (folder / "sharded.json").write_text(json.dumps(config))
    strategies = parity.STRATEGIES | {"sharded": ["--ds_config", str(folder / "sharded.json")]}
    strategies["divided"] = ["--accelerate_config", "accelerate_configs/fsdp2_ep2_1x4.yaml"]
    shared = as_flags(max_steps=6, eval_steps=3, save_steps=3, per_device_train_batch_size=4)
    cases = []
    for name in sorted(asked_for("name")):
        strategy, further, _ = ALL[name]
        flags = ["--optim", "sgd", "--learning_rate", "0.6", *further, *strategies[strategy], *shared]
        of = {"ranks": 4 if name in FOUR else 2, "model": name.partition("+")[2]}
        cases.append({"name": name, "flags": flags, **of})
    results = runs.run_each(cases, folder)
    return {name: (folder / "outputs" / name, result["eval_loss"]) for name, result in results.items()}


def _ends_and_template(folder):
    from transformers import AutoTokenizer, GenerationConfig

    tokenizer, ends = AutoTokenizer.from_pretrained(folder), GenerationConfig.from_pretrained(folder).eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in ends
    return ends, tokenizer.chat_template


def export(output, destination, *flags):
    assert main(["export", str(output), str(destination), *flags]) == 0


def loss_of(directory, output, quantized=False):
    """Held-out loss of what from_pretrained makes of the directory: PEFT's for DoRA, whose magnitudes Transformers
    does not load."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    from brigade.train.recipe import flags

    settings = flags.load(["--recipe", str(output / "run.yaml")])
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert tokenizer.chat_template == (TEMPLATES / f"{settings.recipe.data.chat_template}.jinja").read_text()
    four = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    options = {"quantization_config": four} if quantized else {}
    if settings.recipe.model.use_dora and (directory / "adapter_config.json").exists():
        base = json.loads((directory / "adapter_config.json").read_text())["base_model_name_or_path"]
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), directory).eval()
    else:
        model = AutoModelForCausalLM.from_pretrained(directory, **options).eval()
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):  # else bitsandbytes computes in bf16
            module.support_avx512bf16_for_cpu = False
    return _held_out_loss(model, settings, tokenizer)


def _held_out_loss(model, settings, tokenizer):
    from brigade.eval import held_out_loss
    from brigade.train.data.prepare import prepare

    heldout = [row for rows in prepare(settings, tokenizer).heldout.values() for row in rows]
    return held_out_loss(model, heldout, tokenizer.pad_token_id)


@pytest.mark.parametrize("name", each(ALL))
def test_the_export_has_the_runs_held_out_loss(name, outputs, tmp_path):
    output, losses = outputs[name]
    assert losses[2] != pytest.approx(losses[1], rel=3e-4)  # else the wrong step would pass
    for flags, loss in (([], losses[2]), (["--step", "3"], losses[1])):
        destination = tmp_path / f"at{len(flags)}"
        export(output, destination, *flags)
        assert loss_of(destination, output, quantized=name.startswith("qlora")) == pytest.approx(loss, rel=2e-5)
        assert saved_weights.in_hugging_face_format(destination) == name.startswith("full")
        assert _ends_and_template(destination) == _ends_and_template(output), "of adapters alone too"


@pytest.mark.parametrize("name", each(name for name in ALL if name.startswith("full") and "+" in name))
def test_names_and_what_was_not_trained_are_the_bases(name, outputs, tmp_path):
    """Also of what the run itself has saved: ZeRO-3 named a multimodal model's weights as no other does."""
    output, _ = outputs[name]
    export(output, tmp_path / "out")
    base, exported, saved = (
        {key: tensor for file in folder.glob("*.safetensors") for key, tensor in load_file(file).items()}
        for folder in (output.parents[1] / name.partition("+")[2], tmp_path / "out", output)
    )
    assert base.keys() == exported.keys() == saved.keys()
    same = {key for key, tensor in base.items() if torch.equal(tensor, exported[key])}
    parts = ("vision_tower", "projector", "layers.61.", "correction_bias")
    untrained = {key for key in base if any(part in key for part in parts)}
    assert untrained <= same and all(".experts." in key for key in same - untrained)  # some are never chosen


@pytest.mark.parametrize("name", each(name for name in ALL if not name.startswith("full")))
def test_merged_adapters_are_a_whole_model_with_the_same_loss(name, outputs, tmp_path):
    output, losses = outputs[name]
    export(output, tmp_path / "merged", "--merge", "--step", "3")
    assert not list((tmp_path / "merged").glob("adapter*"))
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "float32"
    assert loss_of(tmp_path / "merged", output) == pytest.approx(losses[1], rel=2e-5)


@pytest.mark.parametrize("name", each(["full-ddp", "dora-fsdp2", "whole-fsdp2", "qlora-ddp"]))
def test_eval_finds_the_loss_of_a_finished_run(name, outputs, capsys):
    assert main(["eval", str(outputs[name][0]), "--answers", "1"]) == 0
    said = capsys.readouterr().out
    assert "<|im_start|>user" in said.partition("question")[2] and "<|im_end|>" in said.partition("reference")[2]


@pytest.mark.parametrize("name", each(["full-ddp"]))
def test_eval_keeps_the_answers_before_and_after_training_and_shows_them_on_the_page(
    name, outputs, tmp_path, monkeypatch, capsys
):
    output = shutil.copytree(outputs[name][0], tmp_path / "run")
    kept = output / "answers.jsonl"
    torch.manual_seed(0)  # six steps change no answer yet
    noisy = {key: tensor + torch.randn_like(tensor) for key, tensor in load_file(output / "model.safetensors").items()}
    save_file(noisy, output / "model.safetensors", {"format": "pt"})
    finished = json.loads((output / "success.json").read_text())
    (output / "success.json").write_text(json.dumps({**finished, "model": {}, "samples": {}}))  # of other weights
    assert main(["eval", str(output), "--answers", "2", "--exact", "0"]) == 1, "its loss is not the run's"
    entries = [json.loads(line) for line in kept.read_text().splitlines()]
    assert [entry["step"] for entry in entries] == [0, 0, 6, 6] and "base" not in entries[0]
    assert entries[0]["question"] == entries[2]["question"] and entries[0]["answer"] != entries[2]["answer"]
    assert main(["report", str(output), "--page_only", "--html", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert page.count("<dt>before training</dt>") == page.count("<dt>step 6</dt>") == 2

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    kept.unlink()
    monkeypatch.setattr("brigade.train.step.sample_answers.store", refuse)
    capsys.readouterr()
    assert main(["eval", str(output), "--answers", "2", "--exact", "0"]) == 1
    told = capsys.readouterr()
    assert "not kept in" in told.err and "Of 13 held-out answers" in told.out and not kept.exists()


@pytest.mark.parametrize("name", each(["full-ddp", "full-sharded", "lora-sharded"]))
def test_chat_answers_as_plain_transformers_does_also_from_a_checkpoint(name, outputs, tmp_path, capsys):
    from transformers import AutoTokenizer

    from brigade.train.checkpoint import reading
    from brigade.train.model.load import weights
    from brigade.train.model.location import load_config
    from brigade.train.recipe import flags

    def said(source, *words):
        assert main(["chat", str(source), "--question", "What is a tuple?", "--max_new_tokens", "12", *words]) == 0
        return capsys.readouterr().out

    output, losses = outputs[name]
    settings = flags.load(["--recipe", str(output / "run.yaml")])
    config, tokenizer = load_config(settings), AutoTokenizer.from_pretrained(output)
    of_step_3 = reading.read_model(settings, config, output / "checkpoint-3").eval()
    assert _held_out_loss(of_step_3, settings, tokenizer) == pytest.approx(losses[1], rel=2e-5)

    export(output, tmp_path / "whole", *([] if name.startswith("full") else ["--merge"]))
    capsys.readouterr()
    answer, before = (_answer(folder, tokenizer) for folder in (tmp_path / "whole", weights(settings, config)))
    assert said(output, "--compare") == f"trained: {answer}base: {before}"
    unfinished = shutil.copytree(output, tmp_path / "run")
    (unfinished / "success.json").unlink()
    assert said(unfinished) == answer


def _answer(folder, tokenizer):
    """What Transformers alone makes of the question: 12 tokens, or up to where the run's chats end."""
    from transformers import AutoModelForCausalLM

    asked = [{"role": "user", "content": "What is a tuple?"}]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")]
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens = model.generate(**prompt, max_new_tokens=12, do_sample=False, eos_token_id=ends, pad_token_id=ends[0])
    answer = tokens[0, prompt["input_ids"].shape[1] :].tolist()
    return tokenizer.decode([token for token in answer if token not in ends]) + "\n"


@pytest.mark.parametrize("name", each(["full-zero1", "full-zero2"]))
def test_zero_checkpoints_are_read_without_their_gathered_copy(name, outputs, tmp_path):
    output, losses = outputs[name]
    copy = tmp_path / "run"
    shutil.copytree(output, copy)
    (copy / "checkpoint-3" / "model.safetensors").unlink()
    export(copy, tmp_path / "out", "--step", "3", "--dtype", "bf16")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert loss_of(tmp_path / "out", output) == pytest.approx(losses[1], rel=1e-2)


@pytest.mark.cases(name="qlora-fsdp2")
def test_it_says_what_it_wrote_and_what_the_adapters_need(outputs, tmp_path, capsys):
    output, _ = outputs["qlora-fsdp2"]
    export(output, tmp_path / "out")
    said = capsys.readouterr().out
    for word in ("adapter_model.safetensors", "MB", "from_pretrained", "cache", "4 bits", "--merge"):
        assert word in said
    base = json.loads((tmp_path / "out" / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert base in said and (Path(base) / "model.safetensors").exists()
    size = (tmp_path / "out" / "adapter_model.safetensors").stat().st_size
    assert size < 0.1 * (Path(base) / "model.safetensors").stat().st_size


@pytest.mark.slow
@pytest.mark.cases(name="full-fsdp2")
def test_mistakes_are_told(outputs, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(outputs["full-fsdp2"][0], run)
    out = tmp_path / "out"

    def told(*words, flags=(), source=run, destination=out):
        assert main(["export", str(source), str(destination), *flags]) == 2
        message = capsys.readouterr().err
        assert all(word in message for word in (*words, "cure:")), message
        assert destination == tmp_path or not list(tmp_path.glob("*out*"))

    told("not empty", destination=tmp_path)
    told("no step 4", "3, 6", flags=["--step", "4"])
    told("--merge", "without adapters", flags=["--merge"])
    told("no such directory", "output directory of a run", source=tmp_path / "nowhere")
    (run / "checkpoint-3" / "trainer_state.json").unlink()
    told("checkpoint-3 is incomplete", "6", flags=["--step", "3"])
    next((run / "checkpoint-6" / "pytorch_model_fsdp_0").glob("*.distcp")).unlink()
    told("checkpoint-6", "cannot be read", flags=["--step", "6"])
    (run / "success.json").unlink()
    shutil.rmtree(run / "checkpoint-6")
    told("not finished", "save_steps")
