"""Pictures of coloured shapes and questions about them: how many there are, of which colour and shape, and where.

    python recipes/tiny-vision/pictures.py     # writes train.parquet and heldout.parquet beside this file

A picture has one to four equal shapes on a white ground, all of them in one corner. What it shows is drawn at random, and no
picture stands in both files. A row has columns `messages` and `images`, as the datasets library stores pictures: PNG in Parquet.
"""

import io
import random
from pathlib import Path
from typing import Any, NamedTuple

SEED = 11
TRAIN, HELDOUT = 1600, 60
SIDE, SHAPE = 32, 7  # pixels of a picture and of a shape
COLOURS = {"red": (220, 30, 30), "green": (20, 160, 60), "blue": (30, 70, 220), "yellow": (240, 200, 20)}
SHAPES = ("circle", "square", "triangle")
CORNERS = {"top left": (0, 0), "top right": (1, 0), "bottom left": (0, 1), "bottom right": (1, 1)}  # column and row
NUMBERS = ("one", "two", "three", "four")
FOLDER = Path(__file__).parent


class Picture(NamedTuple):
    """What a picture shows. shape, colour, corner: of SHAPES, COLOURS and CORNERS

    cells: where in that corner the shapes lie: number of a cell, of two by two, and pixels to the right and down in it
    """

    shape: str
    colour: str
    corner: str
    cells: tuple[tuple[int, int, int], ...]


def draw(picture: Picture) -> bytes:
    """Return a picture as a PNG file of SIDE x SIDE pixels."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (SIDE, SIDE), "white")
    canvas, cell = ImageDraw.Draw(image), SIDE // 4
    column, row = CORNERS[picture.corner]
    fill = COLOURS[picture.colour]
    for number, right, down in picture.cells:
        x, y = (2 * column + number % 2) * cell + right, (2 * row + number // 2) * cell + down
        box = (x, y, x + SHAPE - 1, y + SHAPE - 1)
        if picture.shape == "circle":
            canvas.ellipse(box, fill)
        elif picture.shape == "square":
            canvas.rectangle(box, fill)
        else:
            canvas.polygon([(x + SHAPE // 2, y), (x + SHAPE - 1, y + SHAPE - 1), (x, y + SHAPE - 1)], fill)
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def questions(picture: Picture) -> list[tuple[str, str]]:
    """Return the four questions about a picture, each with its answer. None tells of another's answer."""
    return [
        ("How many are there?", NUMBERS[len(picture.cells) - 1]),
        ("Which colour?", picture.colour),
        ("Which shape?", picture.shape),
        ("Where?", picture.corner),
    ]


def random_picture(draw_from: random.Random) -> Picture:
    """Return a picture that is drawn at random."""
    numbers = sorted(draw_from.sample(range(4), draw_from.randint(1, 4)))
    cells = tuple((number, draw_from.randint(0, 1), draw_from.randint(0, 1)) for number in numbers)
    return Picture(draw_from.choice(SHAPES), draw_from.choice(list(COLOURS)), draw_from.choice(list(CORNERS)), cells)


def rows(count: int, draw_from: random.Random, seen: set[Picture]) -> list[dict[str, Any]]:
    """Return `count` rows, each a picture that is not in `seen`, which they join, and a chat of all questions about it."""
    made = []
    while len(made) < count:
        picture = random_picture(draw_from)
        if picture in seen:
            continue
        seen.add(picture)
        messages: list[dict[str, str]] = []
        for asked, answer in draw_from.sample(every := questions(picture), len(every)):
            mark = "" if messages else "<image>"
            messages += [{"role": "user", "content": mark + asked}, {"role": "assistant", "content": answer}]
        made.append({"messages": messages, "images": [{"bytes": draw(picture), "path": None}]})
    return made


def main() -> None:
    import pyarrow
    import pyarrow.parquet

    draw_from, seen = random.Random(SEED), set[Picture]()
    for name, count in (("heldout", HELDOUT), ("train", TRAIN)):
        table = pyarrow.Table.from_pylist(rows(count, draw_from, seen))
        pyarrow.parquet.write_table(table, FOLDER / f"{name}.parquet", compression="zstd")


if __name__ == "__main__":
    main()
