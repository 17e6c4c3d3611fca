"""An image that is gone or another one in mid-run ends all ranks, with one message that names its row."""

import pytest

from testing import image_rows, image_runs, marks
from testing.image_runs import Case
from testing.ranks import run_ranks

# Name -> strategy, ranks, processes that read ahead, and what the file holds when training has begun (None: it is gone).
CASES = {
    "one process": ("single", 1, 0, None),
    "one process with readers": ("single", 1, 2, "another"),
    "two ranks with readers": ("ddp", 2, 1, None),
    "two ranks of ZeRO-3": ("zero3", 2, 1, "another"),
    "two ranks of FSDP2": ("fsdp2", 2, 0, None),
}
SAID = {None: "it was there when data was prepared, and cannot be read now: No such file or directory"}


@pytest.mark.parametrize(
    "name", marks.cases("two ranks with readers", slow=[each for each in CASES if each != "two ranks with readers"])
)
def test_all_ranks_end_with_one_message(name, tmp_path, monkeypatch):
    strategy, ranks, readers, content = CASES[name]
    rows = image_runs.write_inputs(tmp_path, {"smolvlm"})["train"]
    number = next(n for n, row in enumerate(rows) if image_rows.images_of(row))
    lost = tmp_path / next(part["image"] for part in rows[number]["messages"][0]["content"] if part["type"] == "image")
    monkeypatch.setenv("BRIGADE_TEST_LOST", str(lost) if content is None else f"{lost}={content}")
    case = Case("smolvlm", strategy, ranks).run(tmp_path, "--dataloader_num_workers", str(readers))
    done = run_ranks("testing.losing_images", *case["flags"], ranks=ranks, timeout=100)
    assert done.returncode == 2, done.stderr[-3000:]
    problem = SAID.get(content, "it has changed since data was prepared")
    place = f"{tmp_path}/train.jsonl, line {number + 1}: image {lost}"
    message = f": {place}\n  {problem}\n  cure: put it back as it was; a new run prepares the data again\n"
    assert message in done.stderr and done.stderr.count("cure:") == 1, done.stderr[-3000:]
    assert "Traceback" not in done.stderr and "RuntimeError" not in done.stderr
