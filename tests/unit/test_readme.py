"""What README and docs name exists: links, files, modules, verbs and flags."""

import contextlib
import io
import re

import pytest

from brigade.__main__ import VERBS
from brigade.__main__ import main as brigade
from brigade.train.recipe import flags
from brigade.train.recipe.files import REPOSITORY, read_yaml
from testing.shipped import shipped

FOLDERS = "accelerate_configs|benchmarks|brigade|docs|ds_configs|hostfiles|recipes|testbed|testing|tests"
PAGES = [
    path
    for pattern in ("*.md", "*/*.md", "benchmarks/*/*.md", "docs/*/*.md")
    for path in REPOSITORY.glob(pattern)
    if path.relative_to(REPOSITORY).parts[0] in (path.name, *FOLDERS.split("|"))
]
by_page = pytest.mark.parametrize("path", sorted(PAGES), ids=lambda path: str(path.relative_to(REPOSITORY)))
OTHERS = {
    "--build-arg",
    "--target",
    "--shm-size",
    "--generation-config",
    "--machine_rank",
    "--nproc_per_node",
    "--rdzv_backend",
    "--exclusive",
    "--no-deps",
    "--num_cpu_threads_per_process",
    "--num_gpus",
    "--kind",
    "--small",
}  # of other programs, and of the fake GPU and the proof that are named without their commands
WRITTEN_ON_A_GPU = "benchmarks/results/gpu.jsonl"


@by_page
def test_no_page_has_a_placeholder_left(path):
    """Words that stand for what was to be written. Braces in code are somebody's configuration."""
    prose = re.sub(r"```.*?```|`[^`]*`|^ {4}.*$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert not re.findall(r"^\s*[A-Z]{4,}\s*$|\b(?:TODO|TBD|FIXME|XXX)\b|\{\w+\}", prose, flags=re.MULTILINE)


def commands(text):
    """Indented lines, without their comments."""
    return [re.sub(r"\s+#.*", "", line).strip() for line in re.findall(r"^ {4}(?! )(\S.*)$", text, re.MULTILINE)]


def code(text):
    """Indented lines and what stands between backticks."""
    return commands(text) + re.findall(r"`([^`]+)`", text)


@pytest.fixture(scope="module")
def helps():
    """What --help prints: of train.py under "train.py", and of each verb."""
    found = {}
    for name in ("train.py", *VERBS):
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            flags.load(["--help", "all"]) if name == "train.py" else brigade([name, "--help"])
        found[name] = set(re.findall(r"--[a-zA-Z][\w-]*", out.getvalue()))
    for passes_on in ("launch", "prepare"):
        found[passes_on] |= found["train.py"]
    return found


@by_page
def test_relative_links_point_to_something(path):
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", path.read_text()):
        file = path.parent / target if target else path
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]


@by_page
def test_files_and_modules_that_a_page_names_are_there(path):
    for text in code(path.read_text()):
        for name in re.findall(rf"(?<![\w/.~-])(?:{FOLDERS})/[\w./-]+[\w/]", text):
            if "my-" not in name and not re.search("[A-Z]{4}", name) and name != WRITTEN_ON_A_GPU:
                assert (REPOSITORY / name).exists(), name
        for name in re.findall(r"-m ((?:benchmarks|brigade|testbed)[\w.]*)", text):
            place = REPOSITORY / name.replace(".", "/")
            assert place.with_suffix(".py").exists() or (place / "__main__.py").exists(), name


@by_page
def test_verbs_and_flags_that_a_page_names_exist(path, helps):
    every = set().union(*helps.values()) | OTHERS
    for text in code(path.read_text()):
        named = re.findall(r"(?<![\w-])--[a-zA-Z][\w-]*", text)
        if verb := re.search(r"python -m brigade (\w+)", text):
            assert verb[1] in VERBS, text
            known = helps[verb[1]]
        elif "train.py" in text:
            named = re.findall(r"(?<![\w-])--[a-zA-Z][\w-]*", text.partition("train.py")[2])
            known = helps["train.py"]
        elif module := re.search(r"python -m (benchmarks\.\w+)", text):
            named = re.findall(r"(?<![\w-])--[a-zA-Z][\w-]*", text[module.start() :])
            place = REPOSITORY / module[1].replace(".", "/")
            source = place / "__main__.py" if place.is_dir() else place.with_suffix(".py")
            known = set(re.findall(r"\"(--[\w-]+)\"", source.read_text()))
        else:
            known = every
            named = named if text.startswith("--") else []
        assert set(named) <= known, (text, set(named) - known)


FAMILIES = {
    "Qwen3, Qwen3-VL": ("qwen3-",), "Qwen3.5": ("qwen3.5-",), "Qwen2.5": ("qwen2.5-",), "Llama 3": ("llama-3",),
    "Gemma 3, Gemma 4": ("gemma-",), "gpt-oss": ("gpt-oss-",), "Mistral, Ministral": ("mistral-", "ministral-"),
    "SmolLM, SmolVLM": ("smol",), "OLMo 3, Phi-4, GLM-4.5": ("olmo-", "phi-", "glm-"),
}  # fmt: skip


def test_the_readmes_table_has_a_cell_for_what_has_recipes():
    rows = re.findall(r"^\| (?!\|)(.+) \|$", (REPOSITORY / "README.md").read_text(), re.M)
    cells = {name: others for name, *others in ([cell.strip() for cell in row.split("|")] for row in rows)}
    assert cells.keys() == FAMILIES.keys()
    recipes = [read_yaml(path) | {"path": path} for path in shipped("recipes/*/*.yaml")]
    for family, beginnings in FAMILIES.items():
        own = [recipe for recipe in recipes if recipe["path"].parent.name.startswith(beginnings)]
        images = [recipe for recipe in own if recipe["data"].get("images")]
        compared = [recipe for recipe in own if recipe["training"].get("objective", "sft") != "sft"]
        texts = [recipe for recipe in own if recipe not in images + compared]
        adapted = [recipe for recipe in texts if recipe["model"].get("use_peft")]
        quantised = [recipe for recipe in adapted if recipe["model"].get("load_in_4bit")]
        full = [recipe for recipe in texts if recipe not in adapted]
        found = (full, [recipe for recipe in adapted if recipe not in quantised], quantised, compared, images)
        assert [bool(cell) for cell in cells[family]] == [bool(kind) for kind in found], family


def test_the_map_of_the_code_names_every_room_and_only_files_that_are_there():
    page = (REPOSITORY / "docs/architecture.md").read_text()
    rooms = {path.parent for path in (REPOSITORY / "brigade").rglob("*.py")}
    assert not [room for room in sorted(rooms) if f"{room.name}/" not in page]
    for line in page.splitlines():
        named = [REPOSITORY / name for name in re.findall(r"`(brigade/[\w/.]+)`", line)]
        folders = {REPOSITORY, REPOSITORY / "brigade/train"}
        folders |= {path if path.is_dir() else path.parent for path in named}
        for name in re.findall(r"`([\w/]+\.(?:py|yaml))`", line):
            assert any((folder / name).exists() for folder in folders), (name, line)
