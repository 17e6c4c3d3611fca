"""Boxes and points of an image that a text names: they are not scaled with the image. Imports no torch."""

import re

SAID = "boxes or points in texts, which are not scaled where their images are"
_NUMBER = r"\s*-?\d+(?:\.\d+)?\s*"
# Qwen's <|box_start|> and bbox_2d, InternVL's <box>, PaliGemma's <loc0123>, Kosmos' <patch_index_0044>, Molmo's <point x=...>.
_MARKS = (
    r"<\|?(?:bbox|box|quad|point)(?:_start)?\|?>|<loc_?\d+>|<patch_index_\d+>|<points? x\d*=|bbox_2d|point_2d|\bbbox\b"
)
_FOUR = rf"[\[(]{_NUMBER}(?:,{_NUMBER}){{3}}[\])]"
_PAIRS = rf"\({_NUMBER},{_NUMBER}\)\s*,\s*\({_NUMBER},{_NUMBER}\)"
_BOX = re.compile(rf"{_MARKS}|{_FOUR}|{_PAIRS}")


def has_boxes(text: str) -> bool:
    """Whether a text seems to name places in an image."""
    return _BOX.search(text) is not None
