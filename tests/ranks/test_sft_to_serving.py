"""The commands of docs/sft-to-serving.md as they stand there, on SmolLM2-135M; only the trainings are shorter. And its losses
are plain Transformers', under every strategy."""

import contextlib
import io
import json
import re
import shlex

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

import train
from brigade.__main__ import main
from brigade.__main__ import main as brigade
from brigade.train.data.prepare import prepare
from brigade.train.data.store import IGNORED
from brigade.train.model.location import location
from brigade.train.recipe import flags
from brigade.train.recipe.objectives import ADAPTERS_OFF, MODEL, reference_of
from testing import marks, parity, run_files, runs
from testing.command_line import as_flags
from testing.ranks import REPOSITORY

pytestmark = pytest.mark.slow
PAGE = (REPOSITORY / "docs/sft-to-serving.md").read_text()
SHORT = as_flags(max_steps=1, save_steps=1, eval_steps=1, warmup_steps=0, global_batch_size=4, max_train_samples=4,
                 max_eval_samples=4, report_page=False, report_to=[])  # fmt: skip
BATCH = torch.arange(40, 60)[None]


@pytest.fixture(scope="module")
def walked(tmp_path_factory):
    """The directory in which all commands ran, in order, and what each printed."""
    folder, said = tmp_path_factory.mktemp("walk"), {}
    for line in re.findall(r"^ {4}(\w.*)$", PAGE, re.MULTILINE):
        program, *words = shlex.split(line)
        with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()) as out:
            if words[0] == "train.py":
                train.main([*words[1:], *SHORT])
            elif program == "python":
                assert words[:2] == ["-m", "brigade"] and brigade(words[2:]) == 0, line
            else:  # which tests/serving/test_vllm.py starts, with such a directory
                assert (program, words) == ("vllm", ["serve", "my-model"])
        said[line] = out.getvalue()
    return folder, said


def logits(model):
    with torch.inference_mode():
        return model.eval()(BATCH).logits


def whole(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def by_peft(run):
    """The logits with a run's adapters on the base that they name."""
    base = json.loads((run / "adapter_config.json").read_text())["base_model_name_or_path"]
    return logits(PeftModel.from_pretrained(whole(base), run))


@pytest.mark.parametrize("merged, run, begins_with, reference", [
    ("my-model", "outputs/dpo", "smollm2-135m", MODEL),
    ("my-other-model", "outputs/dpo-on-merged", "sft-merged", ADAPTERS_OFF),
])  # fmt: skip
def test_preferences_begin_with_what_sft_has_taught_and_one_merge_has_both(merged, run, begins_with, reference, walked):
    folder, _ = walked
    recipe = flags.of_run(folder / run, False).recipe
    assert (recipe.model.model_name_or_path, reference_of(recipe)) == (begins_with, reference)
    first, last = run_files.figures(run_files.history(folder / run))["eval_loss"]
    assert first == 1.0 and last < 0.99  # apo_zero's of a model that is its own reference
    after_sft, after_both = logits(whole(folder / "sft-merged")), logits(whole(folder / merged))
    torch.testing.assert_close(by_peft(folder / "outputs/sft"), after_sft, rtol=0, atol=1e-3)
    torch.testing.assert_close(by_peft(folder / run), after_both, rtol=0, atol=1e-3)
    assert (after_both - after_sft).abs().max() > 0.1


def test_distillation_begins_with_the_same_adapters_and_one_merge_has_both(walked):
    folder, _ = walked
    recipe = flags.of_run(folder / "outputs/distilled", False).recipe
    assert (recipe.model.model_name_or_path, recipe.training.teacher) == ("smollm2-135m", "my-model")
    first, last = (
        [entry for entry in run_files.history(folder / run) if "eval_loss" in entry]
        for run in ("outputs/distilled", "outputs/sft")
    )
    assert first[0]["eval_loss"] == pytest.approx(last[-1]["eval_loss"], rel=1e-5)
    assert first[0]["eval_divergence"] > 1e-4  # from a teacher that DPO has taken a step away from these adapters
    after = logits(whole(folder / "my-distilled-model"))
    torch.testing.assert_close(by_peft(folder / "outputs/distilled"), after, rtol=0, atol=1e-3)
    assert (after - logits(whole(folder / "sft-merged"))).abs().max() > 0.1


def test_what_the_commands_say(walked):
    _, said = walked
    (second,), (answer,) = (
        [text for line, text in said.items() if words in line] for words in ("sft --output_dir outputs/dpo", " chat ")
    )
    assert re.search(r"adapters +begin as outputs/sft *$", second, re.MULTILINE) and len(answer.split()) > 5


# ---- a published model -----------------------------------------------------------------------------------------------
RECIPE = REPOSITORY / "recipes/smollm2-135m/lora.yaml"
HELDOUT = REPOSITORY / "recipes/smollm2-135m/tool_calls/heldout.jsonl"
SAMPLES = 6
FEW = (
    f"--recipe {RECIPE} --train_file {HELDOUT.with_name('train.jsonl')} --validation_file {HELDOUT} --max_train_samples 16 "
    f"--max_eval_samples {SAMPLES} --global_batch_size 8 --max_steps 2 --eval_steps 2 --save_steps null --optim sgd "
    "--lr_scheduler_type constant --warmup_steps 0 --learning_rate 1 --logging_steps 1 --report_page false --report_to []"
).split()
QLORA = ["--load_in_4bit", "true"]
UNDER = {
    **{name: parity.STRATEGIES[name] for name in ("ddp", "zero2", "zero3", "fsdp2")},
    "ddp-qlora": [*parity.DDP, *QLORA],
    "fsdp2-qlora": [*parity.STRATEGIES["fsdp2"], *QLORA],
}


def case(name, micro, more):
    return {"name": name, "flags": [*FEW, *more, "--per_device_train_batch_size", str(micro)]}


@pytest.fixture(scope="module")
def reference(folder, asked_for):
    """By one process: of LoRA, and of QLoRA where a test asks for it."""
    quantised = [case("qlora", 8, QLORA)] if any("qlora" in name for name in asked_for("strategy")) else []
    return runs.run_cases(1, [case("lora", 8, []), *quantised], folder)


@pytest.fixture(scope="module")
def results(tmp_path_factory, asked_for):
    asked = [case(name, 4, more) for name, more in UNDER.items() if name in asked_for("strategy")]
    return runs.run_cases(2, asked, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def model_folder():
    return location(flags.load(FEW))


@pytest.fixture(scope="module")
def tokenizer(model_folder):
    return AutoTokenizer.from_pretrained(model_folder)


def chats():
    return [json.loads(line)["messages"] for line in HELDOUT.read_text().splitlines()]


def plain_loss(model, tokenizer):
    """The loss as a reader would compute it: of what the model has to say, in its own template, one chat after the other."""
    total = tokens = 0
    for messages in chats()[:SAMPLES]:
        told = {"tokenize": True, "return_tensors": "pt", "return_dict": True}
        prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, **told)["input_ids"].shape[1]
        ids = tokenizer.apply_chat_template(messages, **told)["input_ids"][
            :, :-1
        ]  # the line break after the last <|im_end|>
        with torch.inference_mode():
            logits = model(ids).logits[0, prompt - 1 : -1].float()
        total += torch.nn.functional.cross_entropy(logits, ids[0, prompt:], reduction="sum").item()
        tokens += ids.shape[1] - prompt
    return total / tokens


def test_the_first_held_out_loss_is_plain_transformers_and_the_last_that_of_the_merged_export(
    reference, folder, model_folder, tokenizer, tmp_path
):
    first, last = reference["lora"]["eval_loss"]
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    assert plain_loss(base, tokenizer) == pytest.approx(first, rel=1e-5)
    assert main(["export", str(folder / "outputs/lora"), str(tmp_path / "whole"), "--merge"]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.float32)
    assert last < 0.99 * first and plain_loss(merged, tokenizer) == pytest.approx(last, rel=1e-5)


@pytest.mark.matrix
def test_its_preferences_are_those_of_the_model_that_was_saved(tmp_path):
    pairs = RECIPE.with_name("one_sentence")
    named = {RECIPE: RECIPE.with_name("dpo.yaml"), HELDOUT.with_name("train.jsonl"): pairs / "train.jsonl"}
    swap = {str(old): str(new) for old, new in (named | {HELDOUT: pairs / "heldout.jsonl"}).items()}
    preferring = {"name": "dpo", "flags": [swap.get(word, word) for word in [*FEW, "--learning_rate", "0.1"]]}
    first, last = runs.run_cases(1, [preferring], tmp_path)["dpo"]["eval_loss"]
    assert first == 1.0 and last < 0.99  # apo_zero's of a model that is its own reference
    assert main(["eval", str(tmp_path / "outputs/dpo"), "--answers", "0"]) == 0


@pytest.mark.parametrize("strategy", marks.cases(matrix=list(UNDER)))
def test_a_strategy_has_the_losses_of_one_process(strategy, reference, results):
    alone = reference["qlora" if "qlora" in strategy else "lora"]
    parity.assert_equal(results[strategy], alone)


def test_samples_are_what_the_models_own_template_writes_and_end_though_padding_is_the_same_token(tokenizer):
    assert tokenizer.pad_token_id == tokenizer.eos_token_id and "{% generation %}" not in tokenizer.chat_template
    (samples,) = prepare(flags.load(FEW), tokenizer).heldout.values()
    for messages, sample in zip(chats()[:SAMPLES], samples, strict=True):
        assert tokenizer.decode(sample["input_ids"]) == tokenizer.apply_chat_template(messages, tokenize=False)
        supervised = [int(label) for label in sample["labels"] if label != IGNORED]
        assert tokenizer.decode(supervised) == messages[-1]["content"] + tokenizer.eos_token
