"""Images that cannot be used, or whose places do not fit, are named; and images of other hosts."""

import io
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from PIL import Image

from brigade.train.data.chat_template import ChatTemplates
from brigade.train.data.encode import Encoder, LoadedEncoder
from brigade.train.data.images import ImageRules
from brigade.train.data.layout import TEMPLATES
from testing.images import IMAGE, SMALL, TEMPLATE, A, Processor, asked, encoded


def given(*images, question="<image>"):
    """A row with images in a column, and places for them."""
    return {"messages": [asked(question), A], "images": list(images)}


def part(**keys):
    """A row whose question has such a part."""
    return {"messages": [asked(keys), A]}


def answered(content, **columns):
    """A row with such an answer."""
    return {"messages": [asked("What?"), {"role": "assistant", "content": content}], **columns}


FRAMES = [Image.new("RGB", SMALL, colour) for colour in ("red", "blue")]


def cut_off():
    file = io.BytesIO()
    Image.effect_noise((64, 64), 90).save(file, "PNG")
    return file.getvalue()[:-1000]


def gif():
    file = io.BytesIO()
    FRAMES[0].save(file, "GIF", save_all=True, append_images=FRAMES[1:])
    return file.getvalue()


@pytest.mark.parametrize("row, said", [
    (given("a.png", question="<image><image>"), "an image): 2; images in column 'images': 1"),
    (part(type="image"), "an image): 1; no column has images"),
    (part(type="image", image="a.png") | {"images": ["a.png"]}, "an image): 0; images in column"),
    (answered("<image>", images=["a.png"]), "<image> in a 'assistant' turn is none"),
    (given(question="<image>\nWhat?"), "the row has no column of images"),
    (answered([{"type": "image", "image": "a.png"}]), "an image in a 'assistant' turn"),
    ({"messages": [{"role": "system", "content": [{"type": "image"}]}, asked("a"), A]}, "an image in a 'system' turn"),
    (given("a.png") | {"image": "a.png"}, "both columns 'images' and 'image'"),
    (given(7), "column 'images' holds 7, which is no image"),
    (given(None), "which is no image"),
    (given({"height": 3}), "which is no image"),
    (part(type="image", image="a.png", url="b.png"), "has both 'image' and 'url'"),
    (part(type="image", image="a.png", max_pixels=9), "sets max_pixels"),
    (part(type="image", image=3), "an image is 3"),
    (part(type="video", video="a.mp4"), "'video' is a sound or a video"),
    (part(type="input_audio", input_audio="a"), "'input_audio' is a sound or a video"),
    (given(question="What?") | {"videos": ["a.mp4"]}, "column 'videos' holds"),
    (given("a.png", question="<video>What?"), "<video> stands for"),
    ({"messages": [asked("a") | {"images": ["a.png"]}, A]}, "the key 'images' holds pictures"),
    ({"text": "abc", "images": ["a.png"]}, "it has images, and a text has no place"),
    ({"text": f"abc {IMAGE}"}, f"a text spells {IMAGE} out"),
    (answered(f"It is {IMAGE}."), f"a text spells out {IMAGE}"),
    (given(question="a\ue001"), "U+E001"),
    (given("a.png", question="What?") | {"system": "\ue001"}, "U+E001"),
    (given("a.png", question="What?") | {"system": "Look at <image>."}, "<image> in a 'system' turn is none"),
])  # fmt: skip
def test_places_that_do_not_fit(encode, problem, row, said):
    assert said in problem(encode(row))


@pytest.mark.parametrize("image, said", [
    ("nowhere.png", "the image 'nowhere.png' is missing"),
    ("sub", "the image 'sub' is no file"),
    ("a\0.png", "is missing"),
    ("x" * 300 + ".png", "cannot be read"),
    ("https://example.invalid/a.png", "data.fetch_images is not set"),
    ("data:image/svg+xml,<svg/>", "is no base64"),
    ("data:image/png;base64,%%", "is no base64"),
    ({"bytes": "%%"}, "is no base64"),
    ({"bytes": b"hello"}, "is broken: it is of no format that is read"),
    ({"bytes": b"", "path": "a.png"}, "the image 'a.png' is broken"),
    ({"bytes": encoded(64, 64, "JPEG")[:-300], "path": "b"}, "the image 'b' is broken"),
    ({"bytes": cut_off()}, "is broken: "),
    ({"bytes": gif()}, "has 2 frames"),
    ({"bytes": encoded(*SMALL, "PNG", "I;16")}, "values of more than 8 bits"),
    ({"bytes": encoded(10_000, 10_000, "PNG", "1")}, "is too large"),
    ({"bytes": encoded(*SMALL, "EPS")}, "is of no format that is read"),
])  # fmt: skip
def test_images_that_cannot_be_used(encode, problem, image, said):
    assert said in problem(encode(given(image)))
    assert said in problem(encode(part(type="image", image=image)))


def test_an_image_of_too_many_bytes(encode, problem, monkeypatch):
    monkeypatch.setattr("brigade.train.data.images.IMAGE_BYTES", 60)
    for image in ("a.png", {"bytes": encoded(*SMALL)}):
        assert "more than" in problem(encode({"messages": [asked("<image>"), A], "image": image}))


def test_pairs_that_are_joined_have_no_place_for_images(encode, problem):
    found = encode({"prompt": "a", "completion": "b", "image": "a.png"}, "")
    assert "joined without a chat template" in problem(found)


def test_a_template_that_writes_no_images_is_named(encode, mistake):
    row = {"messages": [asked("<image>"), A], "image": "a.png"}
    message = mistake(encode, row, (TEMPLATES / "chatml.jinja").read_text())
    assert f"does not write {IMAGE} for an image" in message and "the model's own" in message
    assert not encode({"messages": [asked("Hi."), A]}, (TEMPLATES / "chatml.jinja").read_text()).bad


def test_an_images_tokens_in_an_answer_are_never_learned(encode, problem):
    """A template whose marks for the assistant's part take the images of the question in, too."""
    wrong = TEMPLATE.replace("<image>", "{% generation %}<image>{% endgeneration %}")
    assert "tokens of an image would be learned" in problem(
        encode({"messages": [asked("<image>?"), A], "image": "a.png"}, wrong)
    )


def test_a_tokenizer_without_the_processors_token_is_named(tokenizer, knowing, mistake):
    backend = tokenizer.backend_tokenizer.to_str()
    encoder = Encoder(backend, ChatTemplates(""), {}, 0, 9, True, images=Processor(knowing))
    assert f"writes {IMAGE} for an image" in mistake(LoadedEncoder, encoder)


# ---- fetching ----------------------------------------------------------------------------------------------------
SLOW = {
    "/first": b"HTTP/1.0 200 " + b"O" * 200,
    "/headers": b"HTTP/1.0 200 OK\r\nX: " + b"x" * 200,
    "/body": b"HTTP/1.0 200 OK\r\n\r\n" + b"x" * 200,
}


@pytest.fixture
def server(folder):
    """The address of a host that has a.png, and counts what it is asked for."""
    asked_for = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked_for.append(self.path)
            if self.path in SLOW:  # a byte each 50 ms
                with suppress(OSError):
                    for byte in SLOW[self.path]:
                        self.wfile.write(bytes([byte]))
                        threading.Event().wait(0.05)
                return
            code = {"/a.png": 200, "/busy.png": 503}.get(self.path, 404)
            self.send_response(code)
            self.end_headers()
            self.wfile.write((folder / "a.png").read_bytes() if code == 200 else b"")

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", asked_for
        server.shutdown()


def test_an_image_is_fetched_where_the_recipe_says_so(encode, shown, problem, server, mistake, monkeypatch):
    monkeypatch.setattr("brigade.train.data.images.time.sleep", lambda _: None)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    address, asked_for = server

    def row(name):
        return {"messages": [asked({"type": "image_url", "image_url": {"url": f"{address}/{name}"}}), A]}

    rules = ImageRules(fetch=True)
    found = encode(row("a.png"), rules=rules)
    assert shown(found)[2] == [SMALL] and found.images[0][0].content
    encode(row("a.png"), rules=rules)
    assert asked_for == ["/a.png"]
    assert "404" in problem(encode(row("none.png"), rules=rules))
    assert "503" in mistake(encode, row("busy.png"), rules=rules) and asked_for.count("/busy.png") == 3
    monkeypatch.setattr("brigade.train.data.images.FETCH_WHOLE", 0.1)
    monkeypatch.setattr("brigade.train.data.images.FETCH_TRIES", 1)
    for slow in SLOW:
        assert "longer than 0.1 s" in mistake(encode, row(slow[1:]), rules=rules), slow
