"""`plan --plot`: a PNG or an SVG."""

import xml.etree.ElementTree as ElementTree

import pytest

from brigade.__main__ import main
from brigade.plan.choice.search import candidates, chosen
from brigade.plan.choice.workload import Cluster, Workload
from brigade.plan.output import plot
from brigade.plan.shape.find import named_shape


def draw(path, *more):
    words = [
        *["plan", "recipes/llama-3.1-8b", "--hostfile", "hostfiles/2x8", "--gpu"],
        "H100 80GB",
        "--plot",
        str(path),
        *more,
    ]
    return main(words)


def test_an_svg_says_what_was_planned(tmp_path):
    assert draw(tmp_path / "plan.svg") == 0
    words = " ".join(ElementTree.parse(tmp_path / "plan.svg").getroot().itertext())
    assert "llama-3.1-8b" in words and "2 nodes of 8 x H100 80GB" in words and "full fine-tuning" in words
    assert "does not fit" in words and "Tokens per second and GPU" in words  # of DDP


@pytest.mark.parametrize("name, said", [
    ("plan.pdf", "neither in .png nor in .svg"), ("plan", "neither in .png nor in .svg"),
    ("nowhere/plan.png", "no folder"), ("there.png", "exists already"),
])  # fmt: skip
def test_where_no_picture_can_be_written(tmp_path, capsys, name, said):
    (tmp_path / "there.png").write_text("mine")
    assert draw(tmp_path / name) == 2
    assert said in capsys.readouterr().err
    assert (tmp_path / "there.png").read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 1


def test_parts_add_up_and_more_nodes_are_faster():
    workload, cluster = Workload(named_shape("recipes/llama-3.1-70b")), Cluster("H100 80GB", 8, 2)
    ranked = candidates(workload, cluster)
    for candidate in ranked:
        assert sum(plot.parts(candidate).values()) == pytest.approx(candidate.estimate.device_gib)
    lines = plot.curves(workload, cluster, ranked)
    assert "DDP" not in lines  # 70 billion parameters fit whole on no GPU
    assert min(lines["ZeRO-3"]) > 2  # it fits from more nodes than are planned
    for points in lines.values():
        assert list(points.items()) == sorted(points.items()) and list(points.values()) == sorted(points.values())


def test_ten_bars_are_drawn_the_chosen_one_on_top_and_one_that_does_not_fit():
    ranked = candidates(Workload(named_shape("recipes/llama-3.1-8b")), Cluster("H100 80GB", 8, 2))
    drawn = plot.bars(ranked, winner := chosen(ranked))
    assert len(ranked) > len(drawn) == plot.BARS and drawn[0] is winner and len(set(map(id, drawn))) == plot.BARS
    assert [candidate.fits for candidate in drawn] == [True] * (plot.BARS - 1) + [False]


def test_nothing_fits(tmp_path, mistake):
    workload, cluster = (
        Workload(named_shape("recipes/llama-3.1-405b"), length=65536, batch=8),
        Cluster("RTX 4090", 8, 1),
    )
    ranked = candidates(workload, cluster)
    plot.write(tmp_path / "none.png", workload, cluster, ranked)
    assert (tmp_path / "none.png").read_bytes().startswith(b"\x89PNG")
    assert not plot.curves(workload, cluster, ranked)
    mistake(plot.write, tmp_path / "none.png", workload, cluster, ranked)
