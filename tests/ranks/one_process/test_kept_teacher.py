"""What a run keeps of its teacher beside the prepared data: each supervised token is asked for once."""

import json
import re

import numpy as np
import pytest
import torch

from brigade.__main__ import main as brigade
from brigade.train.loss.distillation import Distillation
from testing import distilling
from testing.distilling import Case
from testing.run_files import history, losses


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return distilling.write_inputs(tmp_path_factory.mktemp("distilling"))


@pytest.fixture
def run(folder, counted):
    """run(name, *flags): its losses, and how many supervised tokens the teacher was asked for."""
    train = counted(Distillation, "_look", lambda rows, *_: len(rows))

    def call(name, *flags):
        log, asked = train(name, [*Case("few").run(folder)["flags"], *flags])
        return losses(log), sum(asked)

    return call


def kept(tmp_path):
    return sorted((tmp_path / "cache").rglob("*-teacher-*.npy"))


def test_a_teacher_reads_once_and_goes_on_where_it_was_interrupted(run, tmp_path, capsys):
    first, asked = run("first")
    (file,) = kept(tmp_path)
    whole = np.load(file)
    assert asked == len(whole) and whole["values"].shape == (asked, 8 + 1)
    assert "8 words of each token are kept beside the prepared data" in " ".join(capsys.readouterr().out.split())
    assert run("second") == (first, 0) and run("shorter", "--max_steps", "1") == (first[:1], 0)
    known = whole.copy()
    known[-1] = np.zeros((), known.dtype)  # never computed; and one token's is damaged
    known["values"][0, -1] += 1
    np.save(file, known)
    third, asked = run("third")
    assert 0 < asked < len(whole) and third == pytest.approx(first, rel=1e-6)
    assert np.load(file)["values"][:, -1] == pytest.approx(whole["values"][:, -1], abs=1e-5)
    assert "1 tokens' words are not what was written: computed anew" in capsys.readouterr().err


def test_what_another_teacher_would_say_or_of_other_samples_has_a_file_of_its_own(run, folder, tmp_path):
    found, all_samples = [run("own")], 3
    for number, other in enumerate((
        ["--teacher", str(folder / distilling.MODEL)], ["--kd_temperature", "2"], ["--teacher_top_k", "9"],
        ["--max_train_samples", "16"], ["--chat_template", "chatml"],
    )):  # fmt: skip
        found.append(run(f"other {number}", *other))
        assert found[-1][1] and len(kept(tmp_path)) == number + 2
        assert (found[-1][1] == found[0][1]) == (number < all_samples)
    assert len({tuple(each) for each, _ in found}) == len(found)


def test_a_saved_model_is_judged_by_the_words_that_were_kept(run, tmp_path, capsys):
    run("own")
    logged = [entry["eval_divergence"] for entry in history(tmp_path / "own") if "eval_divergence" in entry][-1]
    capsys.readouterr()
    assert brigade(["eval", str(tmp_path / "own"), "--answers", "0"]) == 0
    assert float(re.search(r"divergence from the teacher +([\d.]+)", capsys.readouterr().out)[1]) == pytest.approx(
        logged, abs=6e-5
    )


def test_the_least_divergence_tells_the_best_checkpoint_and_stops_the_run(run, monkeypatch, tmp_path, capsys):
    """It rises after step 2 while the loss falls on."""
    apart = iter([4.0, 3.0, 2.0, 3.0, 2.0])

    def held_out(_):  # at the end of the model that is saved, too
        return torch.tensor([next(apart, 2.0), 1.0], dtype=torch.float64)

    monkeypatch.setattr(Distillation, "take_held_out", held_out)
    flags = ["--eval_steps", "1", "--save_steps", "1", "--load_best_model_at_end", "true", "--max_steps", "6"]
    found, _ = run("best", *flags, "--metric_for_best_model", "eval_divergence", "--early_stopping_patience", "2")
    assert len(found) == 4  # 2 once more is no better
    of_steps = {entry["step"]: entry["eval_loss"] for entry in history(tmp_path / "best") if "eval_loss" in entry}
    success = json.loads((tmp_path / "best/success.json").read_text())
    assert success["saved_step"] == 2 and success["held_out_loss"] == pytest.approx(of_steps[2], rel=1e-5)
    said = capsys.readouterr().out
    assert "no held-out divergence below 2.0000 in 2 evaluations" in said
    assert "Best held-out divergence of a checkpoint: 2.0000 at step 2" in said


def test_more_words_than_there_are_keep_and_count_no_more(run, folder, tmp_path, capsys):
    """And `prepare` says the same before any run."""
    every = ["--teacher_top_k", "99999"]
    words = [*Case("few").run(folder)["flags"], *every]
    assert words[0] == "--recipe" and brigade(["prepare", *words[1:]]) == 0
    before = capsys.readouterr().out
    run("own", *every)
    (file,) = kept(tmp_path)
    said = f"4,096 words of each token are kept beside the prepared data, {file.stat().st_size / 2**30:.2g} GiB"
    assert said in before and said in " ".join(capsys.readouterr().out.split())
    few = "; they leave out much of reverse_kl"
    for words, doubted in (([], False), (["--loss_type", "reverse_kl"], True)):
        assert brigade(["prepare", *Case("few").run(folder)["flags"][1:], *words]) == 0
        assert (few in " ".join(capsys.readouterr().out.split())) == doubted


def test_a_stream_is_refused(run, capsys):
    with pytest.raises(SystemExit):
        run("stream", "--streaming", "true")
    assert "needs all rows before training begins" in capsys.readouterr().err
