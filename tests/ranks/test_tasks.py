"""Tasks of lm-evaluation-harness: the figures of a run, and of what it saved, are those that the model's own log-likelihoods and
greedy answers give. On two ranks they are the same: each with its share of the samples, or all together under ZeRO-3."""

import importlib.util
import json

import pytest
import torch
import yaml

import train
from brigade.__main__ import main
from testing import parity, run_files, runs

pytestmark = pytest.mark.slow
COLOURS = ["red", "dark green", "the colour of a very old wall"]
QUESTIONS = [
    f"`{name}.{kind}` is a thing of colour" for name in ("ast", "os", "re", "json") for kind in ("py", "pyc", "c")
]


@pytest.fixture(scope="module", autouse=True)
def package():
    if importlib.util.find_spec("lm_eval") is None:
        pytest.fail("lm_eval is missing: run `pip install -r requirements-eval.txt` once (or `make test-all`)")


def write_task(folder, name, rows, **further):
    """A task in a folder of its own, with its data."""
    folder.mkdir(parents=True)
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}}}
    task = {"task": name, **data, "test_split": "test", "doc_to_text": "{{question}}", **further}
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(task))
    return folder / f"{name}.yaml"


@pytest.fixture(scope="module")
def choice(tmp_path_factory):
    rows = [
        {"question": question, "choices": COLOURS, "right": number % 3} for number, question in enumerate(QUESTIONS)
    ]
    metrics = [{"metric": "acc"}, {"metric": "acc_norm"}]
    about = {"output_type": "multiple_choice", "doc_to_choice": "choices", "doc_to_target": "right"}
    return write_task(tmp_path_factory.mktemp("tasks") / "choice", "choice_of_ours", rows, metric_list=metrics, **about)


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    shared = runs.write_inputs(tmp_path_factory.mktemp("inputs"), 4)
    return [*shared, "--optim", "sgd", "--learning_rate", "0.6"]


@pytest.fixture(scope="module")
def output(flags, choice, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "output"
    train.main([*flags, "--eval_tasks", str(choice), "--output_dir", str(folder)])
    return folder


@pytest.fixture(scope="module")
def saved(output):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(output).eval(), AutoTokenizer.from_pretrained(output)


def log_likelihood(saved, prompt, answer):
    """The sum over the tokens of an answer that follows a prompt, in nats."""
    model, tokenizer = saved
    begin, ids = len(tokenizer(prompt).input_ids), tokenizer(f"{prompt} {answer}", return_tensors="pt").input_ids
    with torch.no_grad():
        found = model(ids).logits[0, :-1].log_softmax(-1)
    return float(found.gather(1, ids[0, 1:, None])[begin - 1 :].sum())


def figures(output):
    """(task, metric, whether with the chat template) -> value, of what a run keeps."""
    records = map(json.loads, (output / "task_results.jsonl").read_text().splitlines())
    return {(record["task"], record["metric"], record["chat_template"]): record["value"] for record in records}


def accuracies(saved, asked):
    """acc and acc_norm, which divides by an answer's letters."""
    right = []
    for question in asked:
        found = torch.tensor([log_likelihood(saved, question, colour) for colour in COLOURS])
        norms = found / torch.tensor([float(len(colour)) for colour in COLOURS])
        wanted = len(right) % 3
        right.append([float(found.argmax() == wanted), float(norms.argmax() == wanted)])
    return torch.tensor(right).mean(0).tolist()


def test_a_runs_accuracies_are_those_of_the_saved_models_log_likelihoods(output, saved):
    acc, acc_norm = accuracies(saved, QUESTIONS)
    assert 0 < acc < 1, "else any figure would do"
    kept = figures(output)
    assert kept["choice_of_ours", "acc", False] == pytest.approx(acc)
    assert kept["choice_of_ours", "acc_norm", False] == pytest.approx(acc_norm)
    log = run_files.history(output)
    assert [entry["eval_task_choice_of_ours_acc"] for entry in log if "eval_task_choice_of_ours_acc" in entry] == [
        pytest.approx(acc)
    ]


def test_eval_compares_greedy_answers_of_the_saved_model(output, saved, tmp_path, capsys):
    """Three of eight references are what the model says."""
    model, tokenizer = saved
    rows = []
    for number, question in enumerate(QUESTIONS[:8]):
        ids = tokenizer(question, return_tensors="pt").input_ids
        said = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
        text = tokenizer.decode(said[0, ids.shape[1] :], skip_special_tokens=True).split("\n")[0]
        rows.append({"question": question, "answer": text if number < 3 else f"{text} and more"})
    until = {"until": ["\n"], "max_gen_toks": 6, "do_sample": False}
    about = {"output_type": "generate_until", "doc_to_target": "answer", "generation_kwargs": until}
    path = write_task(tmp_path / "answers", "answers_of_ours", rows, metric_list=[{"metric": "exact_match"}], **about)
    assert main(["eval", str(output), "--tasks", str(path.parent)]) == 0
    assert "without a chat template" in capsys.readouterr().out
    kept = figures(output)
    assert kept["answers_of_ours", "exact_match", False] == pytest.approx(3 / 8)
    assert ("choice_of_ours", "acc", False) in kept, "what the run measured stays"


def test_with_the_chat_template_the_model_reads_chats(output, saved, choice):
    assert main(["eval", str(output), "--tasks", str(choice), "--chat_template"]) == 0
    how = {"tokenize": False, "add_generation_prompt": True}
    chats = [saved[1].apply_chat_template([{"role": "user", "content": text}], **how) for text in QUESTIONS]
    model, tokenizer = saved
    right = []
    for number, chat in enumerate(chats):
        begin, sums = tokenizer(chat, add_special_tokens=False).input_ids, []
        for colour in COLOURS:
            ids = torch.tensor([tokenizer(chat + colour, add_special_tokens=False).input_ids])
            with torch.no_grad():
                found = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])
            sums.append(float(found[len(begin) - 1 :].sum()))
        right.append(sums.index(max(sums)) == number % 3)
    kept = figures(output)
    assert kept["choice_of_ours", "acc", True] == pytest.approx(sum(right) / len(right))
    assert ("choice_of_ours", "acc", False) in kept


def test_a_task_that_does_not_exist_is_told_with_near_ones(output, capsys):
    assert main(["eval", str(output), "--tasks", "helaswag"]) == 2
    said = capsys.readouterr().err
    assert "'helaswag'" in said and "did you mean hellaswag" in said


@pytest.mark.matrix
def test_two_ranks_find_what_one_does(output, choice, tmp_path):
    cases = [
        {"name": name, "flags": [*parity.STRATEGIES[name], "--optim", "sgd", "--learning_rate", "0.6", "--max_steps", "4",
                                 "--eval_steps", "2", "--eval_tasks", str(choice)]}
        for name in ("ddp", "zero3", "fsdp2")
    ]  # fmt: skip
    runs.run_cases(2, cases, tmp_path)
    alone = {key: value for key, value in figures(output).items() if key[0] == "choice_of_ours" and not key[2]}
    for case in cases:
        assert figures(tmp_path / "outputs" / case["name"]) == pytest.approx(alone)
