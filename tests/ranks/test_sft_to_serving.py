"""The commands of docs/sft-to-serving.md as they stand there, on SmolLM2-135M; only the trainings are shorter."""

import contextlib
import io
import json
import re
import shlex

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

import train
from brigade.__main__ import main as brigade
from brigade.train.recipe import flags
from brigade.train.recipe.objectives import ADAPTERS_OFF, MODEL, reference_of
from testing import run_files
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
