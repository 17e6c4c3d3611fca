"""Each Chinese page says what its English twin says: the same sections, code, keys, figures and links."""

import itertools
import re
from pathlib import Path
from typing import Any

import pytest

from brigade.train.recipe.files import REPOSITORY

ENGLISH = {path: REPOSITORY / "docs" / path.name for path in sorted(REPOSITORY.glob("docs/zh/*.md"))}
ENGLISH[REPOSITORY / "README.zh-CN.md"] = REPOSITORY / "README.md"
by_page = pytest.mark.parametrize("chinese", ENGLISH, ids=lambda path: str(path.relative_to(REPOSITORY)))
LANGUAGES = re.compile(r"^\[English\]\((.+?)\) · \[中文\]\((.+?)\)$", re.MULTILINE)
HEADING = re.compile(r"^#+ ", re.MULTILINE)
PLANNER = {"plan"}  # "the planner" has no other short name in Chinese
GUIDES = {"first-hour.md", "training.md", "launching.md", "parallelism.md", "troubleshooting.md", "data.md", "methods.md",
          "preferences.md", "distillation.md", "serving.md"}  # fmt: skip


def split(page: Path) -> list[str]:
    """Sections of a page, each with its heading, without the line that names both languages."""
    text = LANGUAGES.sub("", page.read_text())
    starts = [found.start() for found in HEADING.finditer(text)]
    return [text[start:end] for start, end in zip(starts, [*starts[1:], None], strict=True)]


def targets(section: str) -> list[str]:
    return re.findall(r"\]\(([^)]+)\)", section)


def place(page: Path, target: str) -> str:
    """The English file a link leads to, and the number of the heading in it; web addresses as they are."""
    if "://" in target:
        return target
    name, _, anchor = target.partition("#")
    file = (page.parent / name).resolve() if name else page
    headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE) if anchor else []
    anchors = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
    assert not anchor or anchor in anchors, f"{page.relative_to(REPOSITORY)}: {target} has no such heading"
    return f"{ENGLISH.get(file, file).relative_to(REPOSITORY)}#{anchors.index(anchor) if anchor else ''}"


def facts(page: Path, section: str) -> dict[str, Any]:
    """What a translation keeps."""
    lines = section.splitlines()
    prose = "\n".join(line for line in lines if not line.startswith("    "))
    return {
        "level of the heading": len(lines[0]) - len(lines[0].lstrip("#")),
        "code": [re.sub(r"\s+#.*", "", line) for line in lines if line.startswith("    ")],
        "rows of tables": sum(line.startswith("|") for line in lines),
        "items of lists": sum(bool(re.match(r"- |\d+\. ", line)) for line in lines),
        "words in backticks": {" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)} - PLANNER,
        "links": {place(page, target) for target in targets(section)},
    }


def figures(section: str) -> set[str]:
    """Numbers in digits outside of code. Chinese has more of them: it writes some that English spells out."""
    prose = re.sub(r"`[^`]+`|\]\([^)]+\)|^ {4}.*$", "", section, flags=re.MULTILINE)
    return set(re.findall(r"\d+(?:[.,]\d+)*", prose))


def test_guides_that_users_open_first_are_there():
    assert {path.name for path in ENGLISH} >= GUIDES | {"README.md", "README.zh-CN.md"}


@by_page
def test_both_pages_name_each_other_below_the_title(chinese):
    for page in (chinese, ENGLISH[chinese]):
        found = LANGUAGES.fullmatch(page.read_text().split("\n")[2])
        assert found, page
        assert [(page.parent / target).resolve() for target in found.groups()] == [ENGLISH[chinese], chinese]


@by_page
def test_a_chinese_page_keeps_what_the_english_one_says(chinese):
    """The remedy is to bring the Chinese section up to date, not to weaken the comparison."""
    english = ENGLISH[chinese]
    ours, theirs = split(chinese), split(english)
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        section = f"{other.splitlines()[0]} / {mine.splitlines()[0]}"
        here, there = facts(chinese, mine), facts(english, other)
        for what, value in there.items():
            assert here[what] == value, (section, what)
        assert figures(other) <= figures(mine), (section, figures(other) - figures(mine))


@by_page
def test_links_of_a_chinese_page_lead_to_chinese_pages_where_there_are_some(chinese):
    for target in targets("".join(split(chinese))):
        name = target.partition("#")[0]
        assert not name or (chinese.parent / name).resolve() not in ENGLISH.values(), target


@by_page
def test_a_paragraph_in_chinese_is_one_line(chinese):
    """A line break shows as a gap between two characters."""
    lines = chinese.read_text().splitlines()
    for above, below in itertools.pairwise(lines):
        assert not (above and re.match(r"[^\s|#<-]", below) and not re.match(r"\d+\. ", below)), below
