"""How texts say where an image stands: <image>, and what other tools and models write instead. Imports no torch."""

import re
from collections.abc import Iterable

from .rows import BadRow

_PART = "pad|patch|soft_token|token|context|content|here|placeholder"
_WORD = "image|img|picture|pic|photo|figure|fig"
# What stands around an image once a template has written it: Qwen's, GLM's, Kimi's, Llama 4's, InternVL's, SmolVLM's, LLaVA's.
_OPENS = r"<\|?(?:(?:vision|image|img|media)_(?:start|begin|bos)|(?:start|begin)_of_(?:image|img)|boi)\|?>|<\|image>"
_CLOSES = r"<\|?(?:(?:vision|image|img|media)_(?:end|eos)|end_of_(?:image|img)|eoi)\|?>|<image\|>|</img>|<im_end>"
_OPENS += "|<img>|<im_start>"
_AROUND = "<fake_token_around_image>"
_ONE = rf"<\|?(?:image|img|im|media)[ _-]?(?:{_PART})\|?>|<\|?image\s?/?\|?>|<\|(?:patch|img)\|>|<global-img>"
_NUMBERED = rf"<\|?\s?(?:{_WORD})[ _:#-]{{0,2}}\d{{1,3}}\s?/?\|?>"
# No code (a[image]), no link of Markdown, and no [IMG]http://...[/IMG] of a forum.
_BRACKETS = rf"(?<![A-Za-z0-9_)!])\[(?:(?:{_WORD})[ _:#-]{{0,2}}\d{{1,3}}|(?:img|image)(?![^\[]*\[/))\](?!\()"
_FILE = r"<(?P<tag>img|image)>(?P<path>[^<>\n]{1,4096})</(?P=tag)>"  # Qwen-VL's
_WHOLE = rf"(?:{_OPENS}|{_AROUND})\s*(?:(?:{_ONE}|{_NUMBERED}|image(?=<))\s*)*(?:{_CLOSES}|{_AROUND})"
_IMAGE = rf"{_FILE}|{_WHOLE}|<start_of_image>|{_NUMBERED}|{_ONE}"
_EMPTY = r"<image(?:[ _:#-]?\d{1,3})?\s?>\s*</image(?:[ _:#-]?\d{1,3})?>"  # a pair of tags around nothing
PLACE = re.compile(rf"{_EMPTY}|{_IMAGE}|{_BRACKETS}", re.IGNORECASE)
_DIGITS = re.compile(r"\d+")
# What may be a place in a spelling that nobody here knows, but for closing tags.
_MAYBE = re.compile(
    r"<\|?(?! )[\w :#-]{0,40}(?:image|img|picture|photo|vision|media)[\w :#-]{0,40}\|?>|\{\{\s*(?:image|img)\w*\s*\}\}|"
    r"\A\s*\{(?:image|img|picture)_?\d*\}|(?<![\w/$\\}'\"`])\{(?:image|img|picture)_?\d*\}\s*\Z|"
    rf"<(?:image|screenshot)[\s:](?![^<>]*\b(?:href|x|y|width|height)\s*=)[^<>]{{0,60}}>|"
    rf"<!--\s*(?:{_WORD}|screenshot)[ _:#-]{{0,2}}\d{{0,3}}\s*-->|"
    rf"(?<![A-Za-z0-9_)!])\[(?:{_WORD}|screenshot)\s*:[^\[\]\n]{{1,80}}\](?!\()|__(?:image|img)_?\d{{0,3}}__|"
    r"[<\[【]\s?(?:图片|图像|照片|截图|图)\s?\d{0,3}\s?[>\]】](?!\()|"
    r"\A\s*\((?:image|img|picture)[ _]?\d{0,3}\)|\n\s*\((?:image|img|picture)[ _]?\d{0,3}\)\s*\Z|"
    r"<\|?(?:boi|im|pic|figure|fig|screenshot|visual|vis_start)(?:[ _:#-]?\d{1,3})?\|?>|"
    r"(?P<around>[$%#])(?:image|img|picture)\w{0,20}(?P=around)|"
    r"&lt;image(?:[ _:#-]?\d{1,3})?&gt;|\b(?:image|img)_placeholder\b",
    re.IGNORECASE,
)
_OTHERS = rf"(?:<\|?vision_start\|?>)?<\|?(?:video|audio)[ _-]?(?:{_PART}|\d{{1,3}})?\|?>(?:<\|?vision_end\|?>)?"
_SPELLED = re.compile(rf"{_IMAGE}|{_OTHERS}", re.IGNORECASE)
# Some are tags of HTML, too: one stands for a picture where a turn begins with it and goes on without a blank, or ends with it on
# a line of its own. An image that is read already (images.MARK) may stand before it.
_PICTURE = re.compile(rf"\A[\s\ue001]*(?P<first>{_SPELLED.pattern})(?! )|\n(?P<last>{_OTHERS}|{_NUMBERED}|{_ONE}|{_WHOLE})\s*\Z",
                      re.IGNORECASE)  # fmt: skip
# How a file's name, or its address, ends.
ENDINGS = (".avif", ".bmp", ".gif", ".jpeg", ".jpg", ".jp2", ".png", ".ppm", ".tif", ".tiff", ".webp")


def may_have_places(text: str) -> bool:
    """Whether a text may have a place; false is certain, and known at once."""
    return "<" in text or "[" in text


def place_of(found: re.Match[str]) -> tuple[str, int | None] | None:
    """Return what a match of PLACE says of its image: the path of its file, or "", and the number in a name such as <image_2>.
    None for a match that only looks like a place, as <img>text</img> does."""
    path = (found["path"] or "").strip()
    if path and not is_named_as_image(path):
        return None
    number = None if path else _DIGITS.search(found[0])
    return path, int(number[0]) if number else None


def number_in(value: object) -> int | None:
    """Return a number, or the only one in a text, as in image_2; None for anything else."""
    if isinstance(value, str):
        found = _DIGITS.findall(value)
        return int(found[0]) if len(found) == 1 and len(found[0]) < 10 else None
    return value if isinstance(value, int) else None


def is_named_as_image(text: str) -> bool:
    """Whether a text is an image: a path or an address that ends as those of images do, or a data: URL of one."""
    if text.startswith("data:image/"):
        return True
    return len(text) < 4096 and "\n" not in text and text.partition("?")[0].lower().endswith(ENDINGS)


def unknown_place(text: str, paths: Iterable[str]) -> str:
    """Return what may be an image's place in a spelling that is not known, and is no pair of tags; or where HTML, Markdown or a
    forum's markup shows the image of one of these paths. "": there is none."""
    for path in paths:
        shows = rf"(?:\]\(|\bsrc\s*=\s*[\"']?|\[img\]|<)\s*{re.escape(path)}"
        shown = re.search(shows, text, re.IGNORECASE) if path in text else None
        if shown:
            return shown[0]
    for found in _MAYBE.finditer(text):
        word = re.search(r"\w+", found[0].removeprefix("&lt;"))
        closing = (f"</{word[0]}>", f"&lt;/{word[0]}&gt;") if word else ()
        if text.startswith(closing, found.end()) or (word and not any(tag in text for tag in closing)):
            return found[0]
    return ""


def refuse_pictures(text: str, role: str, images: bool = False) -> set[str]:
    """Return the places for images, videos and sounds that a turn spells out, and which are learned as letters. Raises BadRow
    where one stands for a picture.

    images: whether images are read, and these places are those for which no column of the row has an image
    """
    picture = _PICTURE.search(text) if role == "user" else None
    mark = (picture["first"] or picture["last"]) if picture else ""
    if mark and not _is_markup(mark, text):
        problem = f"{mark} stands for a picture, a sound or a video in a {role!r} turn, "
        problem += "and the row has no column of images" if images else "and only texts are learned"
        raise BadRow(problem, "use rows of texts, or remove the mark")
    return {_DIGITS.sub("1", found[0]) for found in _SPELLED.finditer(text) if not found["path"]}


def _is_markup(mark: str, text: str) -> bool:
    """Whether a mark is a tag of HTML: text has the one that closes it, and no image's name stands between the two."""
    file = re.fullmatch(_FILE, mark, re.IGNORECASE)
    if file:
        return not is_named_as_image(file["path"].strip())
    return any(f"</{word}>" in text.replace(mark, "") for word in re.findall(r"\w+", mark)[:1])
