"""What a teacher's k most likely words leave out of a divergence and its gradient: SmolLM2-135M and half of its layers.

    python train.py --recipe recipes/smollm2-81m/distill.yaml
    python -m benchmarks.kept_words                               # -> docs/evidence/distillation.md

The model is compared as recipes/smollm2-81m/smaller.py makes it, and as the run has left it; on held-out rows of which half are
tool calls and half sentences about everyday things. Each is read by itself, in fp32.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.pages import EVIDENCE, REPOSITORY, command_line, markdown, where, write
from brigade.train.loss import divergence
from brigade.train.loss.divergence import Options
from brigade.train.model import gguf_file, packaged
from brigade.train.recipe import flags

KEPT = (8, 16, 64, 256)
FORMS = ("forward_kl", "reverse_kl", "jsd")
ROWS = 4  # of each kind
TAUGHT = Path("outputs/smollm2-81m-distill-single")  # by recipes/smollm2-81m/distill.yaml, in one process
DATA = REPOSITORY / "recipes/smollm2-135m"
HEAD = ["model", "divergence", "of all words", *(f"k = {k}" for k in KEPT)]


def samples(tokenizer: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield token ids, and targets that are IGNORED before the answer: (1, tokens), (tokens - 1,)."""
    for kind, answer in (("tool_calls", "completion"), ("one_sentence", "chosen")):
        for line in (DATA / kind / "heldout.jsonl").read_text().splitlines()[:ROWS]:
            row = json.loads(line)
            chat = row.get("messages") or [*_turns(row["prompt"], "user"), *_turns(row[answer], "assistant")]
            whole = tokenizer.apply_chat_template(chat, tokenize=False)
            before = tokenizer.apply_chat_template(chat[:-1], tokenize=False, add_generation_prompt=True)
            ids = torch.tensor([tokenizer(whole, add_special_tokens=False)["input_ids"]])
            first = len(tokenizer(before, add_special_tokens=False)["input_ids"])
            targets = ids[0, 1:].clone()
            targets[: first - 1] = divergence.IGNORED
            yield ids, targets


def _turns(said: Any, role: str) -> list[dict[str, Any]]:
    return said if isinstance(said, list) else [{"role": role, "content": said}]


def measure(student: Any, teacher: Any, given: list[tuple[Tensor, Tensor]], form: str) -> list[tuple[float, Tensor]]:
    """Return of all words, and of each of KEPT: the mean divergence, and its gradient for all of the student's weights."""
    options, weights = Options(form, 0.5, 1.0, 1.0), list(student.parameters())
    sums = [0.0] * (1 + len(KEPT))
    slopes = [torch.zeros(sum(each.numel() for each in weights)) for _ in sums]
    tokens = sum(int((targets != divergence.IGNORED).sum()) for _, targets in given)
    for ids, targets in given:
        with torch.no_grad():
            known = teacher(input_ids=ids).logits[0, :-1].log_softmax(-1)
        own = student(input_ids=ids).logits[0, :-1]
        for number, k in enumerate((None, *KEPT)):
            apart = divergence.sums(options, own, targets, None, *divergence.few_of(known, k))[1] / tokens
            found = torch.autograd.grad(apart, weights, retain_graph=k != KEPT[-1])
            sums[number] += float(apart.detach())
            slopes[number] += torch.cat([each.flatten() for each in found])
    return list(zip(sums, slopes, strict=True))


def left_out(teacher: Any, given: list[tuple[Tensor, Tensor]]) -> list[float]:
    """Return which share of the teacher's probability is not that of its k most likely words, as a mean over tokens."""
    shares = []
    with torch.no_grad():
        for ids, targets in given:
            likely = teacher(input_ids=ids).logits[0, :-1][targets != divergence.IGNORED].softmax(-1)
            likely = likely.sort(-1, descending=True).values.double().cumsum(-1)
            shares.append(1 - likely[:, [k - 1 for k in KEPT]])
    return torch.cat(shares).mean(0).tolist()


def rows(name: str, student: Any, teacher: Any, given: list[tuple[Tensor, Tensor]]) -> Iterator[list[str]]:
    for form in FORMS:
        (whole, slope), *few = measure(student, teacher, given, form)
        shown = [f"{apart / whole - 1:+.1e} / {float((each - slope).norm() / slope.norm()):.1e}" for apart, each in few]
        yield [name, form, f"{whole:.4f}", *shown]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("taught", type=Path, nargs="?", default=TAUGHT, help="what a run of that recipe has left")
    taught: Path = parser.parse_args().taught
    untaught = Path(flags.of_run(taught, False).recipe.model.model_name_or_path)
    folder = gguf_file.as_folder(packaged.file_of("smollm2-135m", __file__), __file__)
    given = list(samples(AutoTokenizer.from_pretrained(folder)))
    teacher = _load(folder).requires_grad_(False)
    lines = [["the teacher's share outside", "", "", *(f"{share:.1e}" for share in left_out(teacher, given))]]
    for name, folder in (("as it is cut", untaught), ("as it was taught", taught)):
        lines += rows(name, _load(folder), teacher, given)
    table = markdown(HEAD, lines)
    print(table)
    write(EVIDENCE / "distillation.md", {"kept-words": f"{table}\n\nVersions: {where()['versions']}."})


def _load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


if __name__ == "__main__":
    main()
