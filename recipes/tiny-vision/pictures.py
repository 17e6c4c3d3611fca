"""Pictures of coloured shapes and questions about them: how many there are, of which colour and shape, and where.

    python recipes/tiny-vision/pictures.py     # writes train.parquet and heldout.parquet beside this file

A picture has one to four shapes, each in a quarter of its own, on a white ground. What it shows is drawn at random, and no
picture stands in both files. A row has columns `messages` and `images`, as the datasets library stores pictures: PNG in Parquet.
"""

import io
import random
from pathlib import Path
from typing import Any, NamedTuple

SEED = 11
TRAIN, HELDOUT = 3000, 60
SIDE = 32  # pixels of a picture
COLOURS = {"red": (220, 30, 30), "green": (20, 160, 60), "blue": (30, 70, 220), "yellow": (240, 200, 20)}
SHAPES = ("circle", "square", "triangle")
PLACES = {"top left": (0, 0), "top right": (1, 0), "bottom left": (0, 1), "bottom right": (1, 1)}  # column and row
NUMBERS = ("one", "two", "three", "four")
FOLDER = Path(__file__).parent


class Shape(NamedTuple):
    """One shape of a picture. shape, colour, place: of SHAPES, COLOURS and PLACES"""

    shape: str
    colour: str
    place: str


Picture = tuple[Shape, ...]


def draw(picture: Picture) -> bytes:
    """Return a picture as a PNG file of SIDE x SIDE pixels."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (SIDE, SIDE), "white")
    canvas, half, edge = ImageDraw.Draw(image), SIDE // 2, SIDE // 16
    for shape in picture:
        column, row = PLACES[shape.place]
        left, top = column * half + edge, row * half + edge
        right, bottom = left + half - 2 * edge - 1, top + half - 2 * edge - 1
        fill = COLOURS[shape.colour]
        if shape.shape == "circle":
            canvas.ellipse((left, top, right, bottom), fill)
        elif shape.shape == "square":
            canvas.rectangle((left, top, right, bottom), fill)
        else:
            canvas.polygon([((left + right) // 2, top), (right, bottom), (left, bottom)], fill)
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def questions(picture: Picture) -> list[tuple[str, str]]:
    """Return all questions about a picture that have one answer, each with it."""
    shapes = "shape" if len(picture) == 1 else "shapes"
    found = [("How many shapes are there?", f"{NUMBERS[len(picture) - 1]} {shapes}")]
    for shape in picture:
        found.append((f"What is in the {shape.place}?", f"a {shape.colour} {shape.shape}"))
        if sum(other[:2] == shape[:2] for other in picture) == 1:
            found.append((f"Where is the {shape.colour} {shape.shape}?", f"in the {shape.place}"))
    return found


def random_picture(draw_from: random.Random) -> Picture:
    """Return a picture whose shapes are drawn at random."""
    places = sorted(draw_from.sample(list(PLACES), draw_from.randint(1, len(PLACES))))
    return tuple(Shape(draw_from.choice(SHAPES), draw_from.choice(list(COLOURS)), place) for place in places)


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
