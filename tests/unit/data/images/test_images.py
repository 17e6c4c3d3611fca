"""Rows with images, in each form that other tools write: where the images' tokens stand, and what is learned."""

import base64
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from brigade.train.data.images import ImageRules, ImageSource
from testing.images import BEGIN, END, IMAGE, LISTS, PIXELS, SMALL, TEMPLATE, WIDE, A, asked, encoded, tokens
from testing.ranks import REPOSITORY

BASE64 = base64.b64encode(encoded(*SMALL)).decode()


def text(words):
    return {"type": "text", "text": words}


STRUCT = {"bytes": encoded(*SMALL), "path": "dog.png"}  # as the datasets library stores a PIL image
FORMS = {
    "OpenAI, base64": {"messages": [asked(
        text("What is "), {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{BASE64}"}}, text("?")), A]},
    "OpenAI, a text as image_url": {"messages": [asked(
        text("What is "), {"type": "image_url", "image_url": f"data:image/png;base64,{BASE64}"}, text("?")), A]},
    "a part with a path": {"messages": [asked(text("What is "), {"type": "image", "image": "a.png"}, text("?")), A]},
    "Transformers' path": {"messages": [asked(text("What is "), {"type": "image", "path": "a.png"}, text("?")), A]},
    "a part with base64": {"messages": [asked(text("What is "), {"type": "image", "base64": BASE64}, text("?")), A]},
    "a part with bytes": {"messages": [asked(text("What is "), {"type": "image", "image": STRUCT}, text("?")), A]},
    "TRL": {"prompt": [asked(text("What is "), {"type": "image"}, text("?"))],
            "completion": [{"role": "assistant", "content": [text("A dog.")]}], "images": [STRUCT]},
    "LLaVA": {"id": "0", "image": "a.png", "conversations": [
        {"from": "human", "value": "What is <image>?"}, {"from": "gpt", "value": "A dog."}]},
    "LLaMA-Factory": {"conversations": [{"from": "human", "value": "What is <image>?"}, {"from": "gpt", "value": "A dog."}],
                      "images": ["a.png"]},
    "ms-swift": {"messages": [asked("What is <image>?"), A], "images": [{"path": "a.png"}]},
    "ms-swift, base64": {"messages": [asked("What is <image>?"), A], "images": [BASE64]},
    "two texts": {"prompt": "What is <image>?", "completion": "A dog.", "image": {"path": "a.png"}},
    "JSON in a text": {"messages": json.dumps([asked("What is <image>?"), A]), "images": '["a.png"]'},
}  # fmt: skip


@pytest.mark.parametrize("template", [TEMPLATE, LISTS], ids=["texts or lists", "lists only"])
@pytest.mark.parametrize("form", FORMS)
def test_a_form_of_another_tool(encode, shown, form, template):
    row = FORMS[form]
    found = encode(row, template, {"messages": "conversations"} if "conversations" in row else {})
    whole, learned, sizes = shown(found)
    assert f"What is {tokens(*SMALL)}?" in whole.replace("  ", " ").replace(" ?", "?").replace(f" {BEGIN}", f" {BEGIN}")
    assert learned.strip() == "A dog.<|im_end|>" and sizes == [SMALL]
    assert set(found.unread[found.samples["unread"][0]]) <= {"column 'id'"}


def test_the_rows_of_the_page(encode, shown, folder):
    """docs/images.md shows a row of each form."""
    (folder / "b.png").write_bytes(encoded(*SMALL))
    cells = re.findall(r"^\|[^|`]+\| `(\{.*\})` \|$", (REPOSITORY / "docs/images.md").read_text(), re.MULTILINE)
    assert len(cells) == 6
    for cell in cells:
        whole, learned, sizes = shown(encode(json.loads(cell.replace("BASE64", BASE64))))
        assert sizes in ([SMALL], [SMALL, SMALL]) and tokens(*SMALL) in whole
        assert learned in ("A dog.<|im_end|>", "No.<|im_end|>")


def test_several_images_in_the_order_of_their_places(encode, shown):
    row = {
        "messages": [asked("<image>Which is wider, <image> or <image>?"), A, asked(text("And "), {"type": "image"}), A],
        "images": ["a.png", "sub/b.jpg", STRUCT, "sub/b.jpg"],
    }
    whole, learned, sizes = shown(encode(row))
    assert sizes == [SMALL, WIDE, SMALL, WIDE] and learned == "A dog.<|im_end|>" * 2
    assert f"user\n{tokens(*SMALL)}Which is wider, {tokens(*WIDE)} or {tokens(*SMALL)}?<|im_end|>" in whole
    assert f"user\nAnd {tokens(*WIDE)}<|im_end|>" in whole


def test_without_places_all_images_come_before_the_first_question(encode, shown):
    system = {"role": "system", "content": "Be brief."}
    row = {"messages": [system, asked("What?"), A, asked("Why?"), A], "images": ["a.png", "sub/b.jpg"]}
    whole, _, sizes = shown(encode(row))
    assert f"user\n{tokens(*SMALL)}{tokens(*WIDE)}What?" in whole and sizes == [SMALL, WIDE]
    row = {"prompt": "What?", "completion": "A dog.", "system": "Be brief.", "history": [["a", "b"]], "image": "a.png"}
    assert f"user\n{tokens(*SMALL)}a<|im_end|>" in shown(encode(row))[0]


def test_a_tool_may_answer_with_an_image(encode, shown):
    call = {"function": {"name": "f", "arguments": {}}}
    turns = [
        asked("Draw."),
        A | {"tool_calls": [call]},
        {"role": "tool", "content": [{"type": "image", "image": "a.png"}]},
        A,
    ]
    template = TEMPLATE.replace("{{ m.role }}\n", "{{ m.role }}\n{{ m.tool_calls or '' }}")
    assert f"tool\n{tokens(*SMALL)}" in shown(encode({"messages": turns}, template))[0]


@pytest.mark.parametrize("template", [TEMPLATE, LISTS], ids=["texts or lists", "lists only"])
def test_rows_of_text_among_them(encode, shown, template):
    whole, learned, sizes = shown(encode({"messages": [asked("How are you?"), A], "images": []}, template))
    assert "How are you?" in whole and learned.strip() == "A dog.<|im_end|>" and not sizes
    text, learned, _ = shown(encode({"text": "All of it."}, template))
    assert text == learned == "All of it.<|im_end|>" or text.startswith("All of it.")


def test_what_a_user_spells_out_is_no_image(encode, shown, knowing):
    """Tokens of the letters stand for it, so that the model counts as many features as it is given."""
    for spelled, row in (
        (IMAGE, {"messages": [asked(f"What is {IMAGE} in HTML?"), A]}),
        (END, {"messages": [asked(f"<image> and {END}"), A], "image": "a.png"}),
    ):
        found = encode(row)
        assert spelled in shown(found)[0]
        wanted = sum(image.width * image.height // PIXELS for image in found.images[0])
        assert (found.tokens == knowing.convert_tokens_to_ids(IMAGE)).sum() == wanted
        assert (found.tokens == knowing.convert_tokens_to_ids(END)).sum() == len(found.images[0])
        assert found.samples["plain"][0] == 1


def test_no_token_of_an_image_has_a_label(encode, knowing):
    found = encode({"messages": [asked("<image>?"), A, asked("<image><image>"), A], "images": ["a.png"] * 3})
    ids = knowing.convert_tokens_to_ids([BEGIN, IMAGE, END])
    assert not found.supervised[np.isin(found.tokens, ids)].any()


# ---- cuts --------------------------------------------------------------------------------------------------------
def test_a_cut_falls_before_the_first_image_that_does_not_fit(encode, knowing):
    row = {"messages": [asked("<image>?"), A, asked("So <image>."), A], "images": ["a.png", "sub/b.jpg"]}
    whole = encode(row)
    ids = whole.tokens.tolist()
    begin, end = knowing.convert_tokens_to_ids([BEGIN, END])
    second, after = (len(ids) - 1 - ids[::-1].index(token) for token in (begin, end))
    for length in range(1, len(ids) + 1):
        found = encode(row, max_length=length)
        kept = len(found.tokens)
        if not kept:
            assert not whole.supervised[: length if length > ids.index(end) else 0].any() and len(found.dropped) == 1
            continue
        assert kept == (second if second < length <= after else length)
        assert found.tokens.tolist() == ids[:kept] and len(found.images[0]) == (2 if length > after else 1)
    assert len(encode(row, max_length=after + 1).images[0]) == 2


def test_the_tokens_that_open_an_image_are_cut_with_it(encode, knowing):
    """Qwen's <|vision_start|> is the template's, and an image is what stands behind it."""
    template = TEMPLATE.replace("<image>", f"{END}<image>")
    row = {"messages": [asked("Hi."), A, asked("So <image>."), A], "image": "a.png"}
    ids = encode(row, template).tokens.tolist()
    found = encode(row, template, max_length=ids.index(knowing.convert_tokens_to_ids(IMAGE)) + 1)
    assert knowing.decode(found.tokens).endswith("So ") and not found.images[0]


def test_without_truncation_a_longer_row_is_refused(encode, problem):
    row = {"messages": [asked("<image>?"), A], "image": "a.png"}
    assert "truncation is off" in problem(encode(row, max_length=8, truncation=False))


# ---- sizes -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("size, rules, scaled", [
    ((100, 50), (None, None), (100, 50)), ((100, 50), (1250, None), (50, 25)), ((100, 50), (5000, 5000), (100, 50)),
    ((10, 5), (None, 5000), (100, 50)), ((1000, 1), (100, None), (100, 1)), ((1, 9), (2, None), (1, 2)),
    ((101, 67), (2000, None), None), ((7, 3), (None, 2000), None),
])  # fmt: skip
def test_an_image_is_scaled_to_so_many_pixels(size, rules, scaled):
    width, height = ImageRules(*rules).scaled(*size)
    assert scaled is None or (width, height) == scaled
    most, fewest = rules
    assert width * height <= (most or 10**9) and width * height >= min(fewest or 0, 10**9)
    if scaled is None:
        assert width / height == pytest.approx(size[0] / size[1], rel=0.05)


def test_what_the_processor_gets(encode, folder):
    """Rotated as EXIF says, in RGB, and scaled: the same pixels as Transformers' load_image."""
    image = Image.effect_noise((24, 16), 90).convert("RGB")
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(folder / "turned.jpg", exif=exif)
    row = {"messages": [asked("<image>?"), A], "image": "turned.jpg"}
    ((source,),) = encode(row).images
    assert (source.width, source.height) == (16, 24) and source.content is None and Path(source.path).is_absolute()
    from transformers.image_utils import load_image

    whole = load_image(str(folder / "turned.jpg"))
    assert np.array_equal(np.asarray(source.open()), np.asarray(whole))
    ((smaller,),) = encode(row, rules=ImageRules(max_pixels=96)).images
    assert (smaller.width, smaller.height) == (8, 12)
    assert np.array_equal(np.asarray(smaller.open()), np.asarray(whole.resize((8, 12), Image.Resampling.BICUBIC)))


def drawn(mode, kind="PNG", turned=False, **how):
    """A picture of noise as the bytes of a file, half of it transparent where the mode can say so. how: of PIL's save"""
    noise = Image.effect_noise((24, 16), 90)
    alpha = noise.point(lambda value: 0 if value < 128 else value)
    image = noise.convert("P").convert("PA") if mode == "PA" else noise.convert(mode)
    if mode.endswith("A"):
        image.putalpha(alpha)
    file = io.BytesIO()
    if turned:
        how["exif"] = Image.Exif()
        how["exif"][0x0112] = 6
    image.save(file, kind, **how)
    return file.getvalue()


@pytest.mark.parametrize("content", [
    drawn("RGBA"), drawn("RGBA", "WEBP", lossless=True), drawn("RGBA", "TIFF"), drawn("RGBA", turned=True), drawn("LA"),
    drawn("P", transparency=3), drawn("P", transparency=bytes(range(256))), drawn("P", "GIF", transparency=3),
    drawn("PA", "TIFF"),
    drawn("RGB", transparency=(9, 9, 9)), drawn("L", transparency=128), drawn("1", transparency=0),
    drawn("RGB"), drawn("L", "WEBP"), drawn("1"), drawn("P"), drawn("CMYK", "JPEG"), drawn("RGB", "JPEG", turned=True),
])  # fmt: skip
def test_other_modes_become_rgb_as_in_transformers(encode, content):
    """What is transparent is laid on white: palettes' and a colour's transparency, too."""
    from transformers.image_transforms import convert_to_rgb

    ((source,),) = encode({"messages": [asked("?"), A], "image": {"bytes": content}}).images
    wanted = convert_to_rgb(ImageOps.exif_transpose(Image.open(io.BytesIO(content))), return_numpy=True)
    found = source.open()
    assert isinstance(source, ImageSource) and source.content == content and found.mode == "RGB"
    assert np.array_equal(np.asarray(found), wanted)


def test_black_on_clear_is_black_on_white(encode, folder):
    image = Image.new("RGBA", SMALL, (0, 0, 0, 0))
    image.putpixel((2, 3), (0, 0, 0, 255))
    image.save(folder / "clear.png")
    ((source,),) = encode({"messages": [asked("?"), A], "image": "clear.png"}).images
    assert sorted(source.open().getcolors()) == [(1, (0, 0, 0)), (63, (255, 255, 255))]


def test_where_relative_paths_begin(encode, shown, problem, folder):
    row = {"messages": [asked("<image>"), A], "image": "b.jpg"}
    assert shown(encode(row, image_folder=str(folder / "sub")))[2] == [WIDE]
    assert shown(encode(row | {"image": str(folder / "a.png")}, image_folder=str(folder / "sub")))[2] == [SMALL]
    assert shown(encode(row | {"image": f"file://{folder}/a.png"}))[2] == [SMALL]
    assert f"'b.jpg' is missing (relative paths begin at {folder};" in problem(encode(row))
