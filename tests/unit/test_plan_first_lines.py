"""What `plan` says first: whether it fits and what it takes, and the command to go on with; what limits the answer comes last."""

import json
import re
import shlex

import pytest

from brigade.__main__ import main
from brigade.plan.output.answer import known

pytestmark = pytest.mark.usefixtures("in_the_repository")
WORDS = ["llama-3.1-8b", "--hostfile", "hostfiles/1x8", "--gpu", "H100 80GB"]


@pytest.mark.parametrize("figures, said", [
    ((7923, 5502, 9545), ("7,900", "5,500", "9,500")), ((8546, 6105, 8546), ("8,500", "6,100", "8,500")),
    ((20.61, 17.11, 44.33), ("21", "17", "44")), ((4.06, 4.06, 5.69), ("4.1", "4.1", "5.7")),
    ((768.5, 637.9, 1106.6), ("770", "640", "1,110")), ((0.0123, 0.011, 0.0142), ("0.0123", "0.0110", "0.0142")),
    ((44.9, 37.6, 450.0), ("45", "38", "450")),
    ((3.0, 3.0, 3.0), ("3.00", "3.00", "3.00")), ((0.0, 0.0, 0.0), ("0", "0", "0")),
])  # fmt: skip
def test_figures_have_the_digits_that_their_interval_deserves(figures, said):
    assert known(*figures) == said


def test_the_first_line_is_the_answer_and_the_second_the_command(plan):
    code, text = plan(*WORDS)
    first, second, *_ = text.splitlines()
    assert code == 0
    needs, speed = r"\d+ of 79 GiB of each GPU \(up to \d+\)", r"[\d,]+ tokens/s in all \([\d,]+ to [\d,]+\)"
    assert re.fullmatch(rf"Fits: \S.* on 1 x 8 H100 80GB, {needs}, {speed}\.", first)
    assert second == f"Write it: python -m brigade plan {shlex.join(WORDS)} --write recipes/my-llama-3.1-8b/"


def test_the_second_line_can_be_typed_and_leads_to_the_launch(plan, tmp_path):
    code, text = plan(*WORDS, "--strategy", "fsdp2", "--write", tmp_path)
    assert code == 0 and text.splitlines()[1] == (
        f"Start: python -m brigade launch {tmp_path}/full.yaml --hostfile hostfiles/1x8"
    )
    one = ["--method", "lora", "--lora_r", "8", "--write", tmp_path / "one.yaml"]
    code, text = plan("llama-3.1-8b", "--gpu", "H200", *one)
    assert code == 0 and text.splitlines()[1] == f"Start: python train.py --recipe {tmp_path}/one.yaml"
    words = shlex.split(plan(*WORDS, "--max_length", 2048, "--strategy", "fsdp2", "zero3")[1].splitlines()[1])
    assert words[:5] == ["Write", "it:", "python", "-m", "brigade"]
    assert main([*words[5:-1], str(tmp_path / "again")]) == 0


def test_the_second_line_repeats_every_figure_that_was_typed(plan):
    second = plan(*WORDS, "--strategy", "fsdp2", "--price", 0, "--tokens", 1234567890)[1].splitlines()[1]
    words = shlex.split(second)
    assert float(words[words.index("--price") + 1]) == 0 and float(words[words.index("--tokens") + 1]) == 1234567890


def test_a_price_of_nothing_is_a_price(plan):
    words = [*WORDS, "--strategy", "fsdp2", "--price", "0"]
    assert "0 USD (0 to 0)." in plan(*words)[1].splitlines()[0]
    assert json.loads(plan(*words, "--json")[1])["plans"][0]["usd_per_billion_tokens"] == 0


def test_a_recipe_on_unequal_hosts_is_named_by_all_their_gpus(plan, tmp_path):
    (tmp_path / "hosts").write_text("a slots=8\nb slots=4\n")
    code, text = plan("recipes/qwen3-8b/full.yaml", "--hostfile", tmp_path / "hosts")
    assert code == 0 and " on 12 GPUs on 2 hosts, H100 80GB, " in text.splitlines()[0] and "2 x 8" not in text


def test_what_does_not_fit_is_not_shown_on_a_card_that_is_smaller(plan):
    for gpu, shows in (("RTX 3060", False), ("RTX 4090", True)):
        text = plan("recipes/llama-3.1-8b/lora.yaml", "--gpu", gpu)[1]
        assert ("nvidia-smi shows" in text) == shows


def test_hours_and_money_are_on_the_first_line_where_they_are_asked_for(plan):
    first = plan(*WORDS, "--tokens", "5e9", "--price", "2")[1].splitlines()[0]
    between = r"\([\d,.]+ to [\d,.]+\)"
    assert re.search(rf"; 5 billion tokens in [\d.]+ hours {between}, [\d,]+ USD {between}\.$", first)
    first = plan(*WORDS, "--tokens", "5e9", "--deadline", "1")[1].splitlines()[0]
    assert first.startswith("Fits, but is not sure to keep the deadline of 1 h: ")


def test_what_does_not_fit_is_one_line_below_the_table(plan):
    text = plan(*WORDS)[1]
    rows = [line for line in text.splitlines() if line.startswith("│")]
    folded = [line for line in text.splitlines() if line.startswith("Does not fit: ")]
    assert rows and "chosen" in rows[0] and not any("out of memory" in row for row in rows)
    assert len(folded) == 1 and re.search(r"DDP \(\d+ GiB too much\)", folded[0])


def test_where_nothing_fits_the_cure_comes_first(plan):
    code, text = plan("llama-3.1-70b", "--gpu", "L4")
    assert code == 1 and text.startswith("Nothing that train.py runs fits")
    assert any(line.startswith("│") and "out of memory by" in line for line in text.splitlines())


def test_what_limits_the_answer_comes_last(plan):
    text = plan("llama-3.1-8b", "--hostfile", "hostfiles/2x8", "--gpu", "H100", "--network", "10 GbE")[1]
    lines = text.splitlines()
    notes = [number for number, line in enumerate(lines) if line.startswith("note ")]
    (more,) = (number for number, line in enumerate(lines) if line.startswith("More is not faster"))
    (parts,) = (number for number, line in enumerate(lines) if line.startswith("duration "))
    assert notes and notes[-1] == len(lines) - 1 and parts < more < notes[0]
    assert "time unseen" in " ".join(lines[notes[0] :])


@pytest.mark.parametrize("recipe, cluster, said", [
    ("llama-3.1-8b/lora.yaml", [], r"Fits with \d.* to spare; .* tokens/s \("),
    ("llama-3.1-8b/full.yaml", ["--gpu", "L40S"], r"Does not fit: .* GiB are lacking; (?!.*tokens/s)"),
])  # fmt: skip
def test_a_recipe_begins_with_its_verdict_and_its_command(plan, recipe, cluster, said):
    first, second, *rest = plan(f"recipes/{recipe}", *cluster)[1].splitlines()
    assert re.match(said, first) and "GiB of each GPU" in first
    begins = "Start: python " if first.startswith("Fits") else "Plan what fits: python -m brigade plan "
    assert second.startswith(begins) and not any(line.startswith("verdict") for line in rest)


@pytest.mark.parametrize("recipe, more, first", [
    ("qwen3-8b/qlora", ["--gpu", "RTX 4070 Laptop"], "Fits: ZeRO-3 offload param on 1 x 1 RTX 4070 Laptop, "),
    ("qwen3-8b/dpo", ["--gpu", "RTX 4090"], "Fits: FSDP2 on 2 x 8 RTX 4090, "),
])  # fmt: skip
def test_of_a_recipe_that_does_not_fit_the_second_line_leads_to_what_does(plan, recipe, more, first):
    code, text = plan(f"recipes/{recipe}.yaml", *more)
    words = shlex.split(text.splitlines()[1].removeprefix("Plan what fits: "))
    assert code == 1 and words[:4] == ["python", "-m", "brigade", "plan"]
    code, text = plan(*words[4:])
    assert code == 0 and text.startswith(first)


def test_tokens_that_are_asked_for_are_planned_even_if_they_are_the_usual_number(plan):
    for words in (["recipes/llama-3.1-8b/lora.yaml"], [*WORDS, "--strategy", "fsdp2"]):
        assert "; a billion tokens in " in plan(*words, "--tokens", "1e9")[1].splitlines()[0]
    assert "; 2,000 tokens in " in plan(*words, "--tokens", 2000)[1].splitlines()[0]
