"""Columns that say which of two answers is better: read where they agree with the pair, else the row is refused."""

import pytest

from brigade.lint.rows import _Unrendered
from brigade.train.data import preferences
from brigade.train.data.rows import BadRow
from brigade.train.recipe.objectives import JUDGED, PAIRS

PLAIN = {"prompt": "How warm?", "chosen": "Very.", "rejected": "Less."}
ONES = {"prompt": "How warm?", "response_0": "Very.", "response_1": "Less."}
LETTERS = {"prompt": "How warm?", "response_a": "Very.", "response_b": "Less."}
FIRST = {"chosen": "response_0", "rejected": "response_1"}
A = {"chosen": "response_a", "rejected": "response_b"}


def read(row, columns=None, rows=PAIRS):
    """The columns that nobody read, or the error's words."""
    try:
        return ", ".join(preferences.convert(row, columns or {}, _Unrendered(), rows)[0].unread)
    except BadRow as error:
        return "\n".join(error.args)


@pytest.mark.parametrize("further, unread", [
    ({"score_chosen": 8.5, "score_rejected": 6.0}, ""), ({"chosen_score": 8, "rejected_score": "6.5"}, ""),
    ({"chosen-rating": 5.0, "rejected-rating": 1}, ""), ({"chosenRating": 5.0, "rejectedRating": 1}, ""),
    ({"rating_chosen": 5, "rating_rejected": None}, "column 'rating_chosen'"), ({"chosen_rank": 1, "rejected_rank": 3}, ""),
    ({"winner_score": 2, "loser_score": 1}, ""), ({"score_preferred": 2, "score_non_preferred": 1}, ""),
    ({"chosen_avg_rating": 4.2, "rejected_avg_rating": 3.9}, ""), ({"reward_chosen": -1.5, "reward_rejected": -2}, ""),
    ({"chosen_length": 3, "rejected_length": 9}, "column 'chosen_length', column 'rejected_length'"),
    ({"chosen_toxicity_score": 0, "rejected_toxicity_score": 1},
     "column 'chosen_toxicity_score', column 'rejected_toxicity_score'"),
    ({"score_chosen": float("nan"), "score_rejected": 1.0}, "column 'score_rejected'"),  # as null
    ({"winner": "chosen"}, ""), ({"preference": "Chosen"}, ""), ({"better": True}, ""), ({"better": "Very."}, ""),
    ({"label": True}, ""), ({"label": 1}, ""), ({"label": "chosen"}, ""), ({"kto_tag": "true"}, ""),
    ({"margin": 2.5}, "column 'margin'"), ({"rating": [9, 8]}, ""), ({"score": 7}, "column 'score'"),
    ({"rating": [8, 9], "order": ["rejected", "chosen"]}, ""), ({"ranks": [1, 2]}, ""),
    ({"rating": [8, 9], "order": ["model_a", "model_b"]}, "column 'order', column 'rating'"),
    ({"rating": [8, 9], "order": "descending"}, "column 'order', column 'rating'"), ({"rank": [2]}, "column 'rank'"),
    ({"status": "unchanged"}, "column 'status'"), ({"status": "swapped", "original_chosen": "Less."}, "column 'original_chosen'"),
    ({"swapped": False, "is_tie": 0}, ""), ({"winner": "model_a", "response_a": "Very.", "response_b": "Less."},
                                            "column 'response_a', column 'response_b'"),
    ({"preference": "because " * 20 + "none says more"}, "column 'preference'"),
    ({"overall_preference": -2, "response1": "Very.", "response2": "Less."}, "column 'response1', column 'response2'"),
    ({"label": "geography"}, "column 'label'"), ({"is_chosen_better": 1}, ""), ({"better": "True"}, ""),
    ({"model": "gpt", "source": "better"}, "column 'model', column 'source'"), ({"scores": {"chosen": 3, "rejected": 1}}, ""),
    ({"choice": "chosen"}, ""), ({"verdict": "correct"}, "column 'verdict'"), ({"labels": 1}, ""),
    ({"better_than_gpt4": True, "preferred_language": "English"}, "column 'better_than_gpt4', column 'preferred_language'"),
    ({"gpt4_score_chosen": 3, "gpt4_score_rejected": 1}, ""), ({"is_chosen_preferred": True}, ""),
], ids=str)  # fmt: skip
def test_what_agrees_with_a_pair_counts_as_read(further, unread):
    assert read(PLAIN | further) == read(PLAIN | further, rows=JUDGED) == unread


@pytest.mark.parametrize("row, columns", [
    (ONES | {"better_response_id": 0, "safer_response_id": 0}, FIRST), (ONES | {"better_response_id": "0"}, FIRST),
    (ONES | {"winner": "response_0"}, FIRST), (ONES | {"label": 0}, FIRST), (ONES | {"preferred": 0.0}, FIRST),
    (ONES | {"winner_index": 0}, FIRST), (ONES | {"choice": 0}, FIRST), (ONES | {"safer_response_id": 0}, FIRST),
    (LETTERS | {"overall_pref": "A-is-slightly-better"}, A), (LETTERS | {"verdict": "[[A]]"}, A),
    (LETTERS | {"a_is_better": True}, A), (LETTERS | {"scores": {"a": 2, "b": 1}}, A),
    (LETTERS | {"winner": "model_a"}, A), (LETTERS | {"winner": "A"}, A), (LETTERS | {"preference": "Response A is better"}, A),
    (LETTERS | {"winner_model_a": 1, "winner_model_b": 0, "winner_tie": 0}, A), (LETTERS | {"score_a": 3, "score_b": 1}, A),
    ({"prompt": "a", "response1": "b", "response2": "c", "overall_preference": -3},
     {"chosen": "response1", "rejected": "response2"}),
    ({"history": None, "human_ref_A": "b", "human_ref_B": "c", "q": "a", "score_A": 9, "score_B": 2},
     {"prompt": "q", "chosen": "human_ref_A", "rejected": "human_ref_B"}),
], ids=str)  # fmt: skip
def test_names_of_the_columns_tell_which_answer_is_meant(row, columns):
    assert read(row, columns) == ""
    other = columns | {"chosen": columns["rejected"], "rejected": columns["chosen"]}
    assert "is the better one" in read(row, other) and "columns: {ignore: " in read(row, other)
    assert "unread" not in read(
        row, columns | {"ignore": [name for name in row if "response" not in name and name != "prompt"]}
    )


def test_an_aspect_may_differ_where_the_answer_that_is_better_is_known():
    row = ONES | {"better_response_id": 0, "safer_response_id": 1}
    assert read(row, FIRST) == "column 'safer_response_id'"
    assert "is the better one" in read(ONES | {"safer_response_id": 1}, FIRST)


@pytest.mark.parametrize("further, said", [
    ({"score_chosen": 6.0, "score_rejected": 8.5}, "column 'score_chosen' is 6.0 and 'score_rejected' is 8.5, so the answer"),
    ({"chosen-rating": 1, "rejected-rating": 5}, "{ignore: [chosen-rating, rejected-rating]}"),
    ({"chosen_rank": 2, "rejected_rank": 1}, "in column 'rejected' is the better one"),
    ({"score_chosen": 7, "score_rejected": 7.0}, "neither answer is the better one"),
    ({"winner": "tie"}, "neither answer is the better one"), ({"winner": "tie (bothbad)"}, "neither"),
    ({"winner_tie": 1, "winner_model_a": 0}, "neither"), ({"is_tie": True}, "neither"), ({"status": "tie"}, "neither"),
    ({"winner": "rejected"}, "is the better one"), ({"preferred": "Less."}, "is the better one"),
    ({"status": "swapped"}, "is the better one"), ({"swapped": 1}, "is the better one"), ({"margin": -0.5}, "is the better one"),
    ({"label": False}, "column 'label' is False, so the answer in column 'rejected'"), ({"label": "rejected"}, "better one"),
    ({"kto_tag": 0}, "is the better one"), ({"better": False}, "is the better one"), ({"rating": [8, 9]}, "is the better one"),
    ({"rating": [9, 8], "order": ["rejected", "chosen"]}, "is the better one"), ({"ranks": [2, 1]}, "is the better one"),
    ({"ranking": [1, 1]}, "neither answer is the better one"),
    ({"winner": "model_b", "answer_a": "Very.", "answer_b": "Less."}, "is the better one"),
    ({"winner": "model_a"}, "nothing tells which of 'chosen' and 'rejected' it means"),
    ({"better_response_id": 1}, "nothing tells"), ({"overall_preference": -2}, "nothing tells"),
    ({"label": "model_b"}, "nothing"),
    ({"label": 0.5}, "nothing tells"), ({"is_chosen_better": 0}, "is the better one"),
    ({"overall_preference": 0}, "neither"), ({"reward_gap": -1.5}, "is the better one"), ({"labels": 0}, "is the better one"),
    ({"scores": {"chosen": 3, "rejected": 8}}, "is the better one"), ({"ratings": "[1, 5]"}, "is the better one"),
    ({"rating": "[9, 8]", "order": '["rejected", "chosen"]'}, "is the better one"), ({"choice": "rejected"}, "is the better one"),
    ({"preference": 1.4}, "nothing tells"), ({"judgment": "[[B]]"}, "nothing tells"),
    ({"gpt4_score_chosen": 1, "gpt4_score_rejected": 3}, "is the better one"), ({"human_choice": "rejected"}, "better one"),
    ({"chosen_elo": 900, "rejected_elo": 1000}, "is the better one"), ({"is_reversed": True}, "is the better one"),
    ({"is_chosen_preferred": False}, "is the better one"), ({"chosen_tools": [{"a": 1}]}, "tools of one of two answers"),
], ids=str)  # fmt: skip
def test_what_contradicts_a_pair_is_refused(further, said):
    for rows in (PAIRS, JUDGED):
        assert said in read(PLAIN | further, rows=rows)
    said = read(PLAIN | further, {"ignore": list(further)})
    assert said in ("", "column 'answer_a', column 'answer_b'", "column 'order'")


@pytest.mark.parametrize("key, ours, theirs, agrees", [
    ("score", 5, 1.0, True), ("score", 1, 5.0, False), ("overall_score", 5, 5, False), ("rank", 1, 2, True), ("rank", 3, 1, 0),
    ("honesty_score", 1, 5, True), ("score", None, 5, True), ("id", 1, 5, True), ("rating", "2", "4", False),
])  # fmt: skip
def test_a_score_within_the_answers_turns(key, ours, theirs, agrees):
    sides = {"chosen": ("Very.", ours), "rejected": ("Less.", theirs)}
    row = {name: {"role": "assistant", "content": text, key: value} for name, (text, value) in sides.items()}
    for spelled in (row, {name: [turn] for name, turn in row.items()}):
        assert ("is not the better answer" in read(PLAIN | spelled)) != agrees, read(PLAIN | spelled)


@pytest.mark.parametrize("row", [
    ONES | {"better_response_id": 1}, LETTERS | {"winner": "model_b"}, LETTERS | {"winner_model_a": 0, "winner_model_b": 1},
    {"context": "a", "response1": "b", "response2": "c", "overall_preference": 2},
], ids=str)  # fmt: skip
def test_two_answers_and_a_verdict_are_told_how_they_become_a_pair(row):
    said = read(row)
    assert "no better and worse answer here" in said and "into a column chosen" in said and "skip_bad_rows" in said
