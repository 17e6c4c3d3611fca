"""Places for images in the spellings of other tools are read or refused, and never learned as letters."""

import pytest

from testing.images import SMALL, WIDE, A, asked, tokens

PNG = "iVBORw0KGgo" + "A" * 64  # as base64 begins
FIRST, SECOND = tokens(*SMALL), tokens(*WIDE)


def text(words):
    return {"type": "text", "text": words}


def row(question, *images):
    return {"messages": [asked(question), A], "images": list(images)}


def given(question):
    """A row of two images, of which the second is wider."""
    return row(question, "a.png", "sub/b.jpg")


ONE = [
    "<image>", "<Image>", "<IMAGE>", "<image/>", "<image />", "<image_1>", "<image 1>", "<image1>", "<image-1>", "<Image_1>",
    "<image_0>", "<img_1>", "<img 1>", "<picture 1>", "<|image_1|>", "<|image|>", "<|image_pad|>",
    "<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|image_pad|><|image_pad|><|image_pad|><|vision_end|>",
    "<|vision_start|><image><|vision_end|>", "<IMG_CONTEXT>", "<img><IMG_CONTEXT></img>",
    "<img><IMG_CONTEXT><IMG_CONTEXT>\n</img>", "<Img><ImageHere></Img>", "<ImageHere>", "[IMG]", "[image]", "[Image 1]",
    "[IMG_1]", "<start_of_image>", "<start_of_image><image_soft_token><image_soft_token><end_of_image>", "<image_soft_token>",
    "<|begin_of_image|><|image|><|end_of_image|>", "<image_placeholder>", "<image-placeholder>", "<image_token>",
    "<|image_start|><|image|><|image_end|>", "<|media_start|>image<|media_content|><|media_pad|><|media_end|>",
    "<|image_placeholder|>", "<im_start><im_patch><im_patch><im_end>", "<|START_OF_IMG|><|IMG_PATCH|><|END_OF_IMG|>",
    "<|image><|image|><image|>", "<fake_token_around_image><global-img><image><fake_token_around_image>", "<img>a.png</img>",
    "<image>a.png</image>",
]  # fmt: skip


@pytest.mark.parametrize("where", ["{}What?", "What is {}?", "What?\n{}"])
def test_a_place_in_another_spelling(encode, shown, where):
    for mark in ONE:
        found = encode(row(where.format(mark), "a.png"))
        whole, learned, sizes = shown(found)
        assert f"user\n{where.format(FIRST)}<|im_end|>" in whole, mark
        assert learned == "A dog.<|im_end|>" and sizes == [SMALL] and not found.unread[found.samples["unread"][0]]


@pytest.mark.parametrize("question, said", [
    ("Is <image_2> in <image_1>?", "Is {b} in {a}?"), ("<image 1><image 2>So?", "{a}{b}So?"),
    ("<image_1>, <image_0>?", "{b}, {a}?"), ("<|image_2|>\n<|image_1|>\nSo?", "{b}\n{a}\nSo?"),
    ("[Image 2][Image 1]: so?", "{b}{a}: so?"), ("Is <|image_pad|> in <image>?", "Is {a} in {b}?"),
    ("Picture 1: <img>sub/b.jpg</img>\n2: <img>a.png</img>", "Picture 1: {b}\n2: {a}"),
    ("<picture>\n</picture> in <image> or <image>?", "<picture>\n</picture> in {a} or {b}?"),
])  # fmt: skip
def test_numbers_and_paths_say_which_image(encode, shown, question, said):
    assert f"user\n{said.format(a=FIRST, b=SECOND)}<|im_end|>" in shown(encode(given(question)))[0]


def indexed(*parts):
    """A row of two images with parts that have an index, as Hugging Face's sets have them."""
    parts = [part if isinstance(part, str | dict) else {"type": "image", "text": None, "index": part} for part in parts]
    return given(None) | {
        "messages": [asked(*[text(part) | {"index": None} if isinstance(part, str) else part for part in parts]), A]
    }


@pytest.mark.parametrize("content, said", [
    (indexed(1, 0, "So?"), "{b}{a}So?"), (indexed(0, "in", 1), "{a}in{b}"), (indexed(None, None, "?"), "{a}{b}?"),
    (indexed(1.0, 0.0, "?"), "{b}{a}?"), (indexed(1, 0, 1, "?"), "{b}{a}{b}?"),
    (indexed({"type": "image", "image_index": 1}, {"type": "image", "image_index": 0}, "?"), "{b}{a}?"),
])  # fmt: skip
def test_an_index_says_which_image(encode, shown, content, said):
    found = encode(content)
    assert f"user\n{said.format(a=FIRST, b=SECOND)}<|im_end|>" in shown(found)[0]
    assert not found.unread[found.samples["unread"][0]]


def test_a_path_in_the_text_needs_no_column(encode, shown):
    content = {"messages": [asked("Is <img>a.png</img> in <img>sub/b.jpg</img>?"), A]}
    assert f"user\nIs {FIRST} in {SECOND}?<|im_end|>" in shown(encode(content))[0]


@pytest.mark.parametrize("content, said", [
    (given("<image_1> and <image_3>?"), "have the numbers 1, 3; images in column 'images': 2"),
    (given("<image_1> and <image_1>?"), "have the numbers 1, 1; images"), (given("<image_2>?"), "have the numbers 2; images"),
    (given("<image_1> and <image>?"), "have the numbers 1, and 1 others have none"),
    (given("<|image_pad|><|image_pad|><|image_pad|>?"), "part without an image): 3; images in column 'images': 2"),
    (given("[IMG]?"), "an image): 1; images in column 'images': 2"),
    (given("<your_image_here> What?"), "<your_image_here> in a 'user' turn may be the place of an image"),
    (given("{{image}} What?"), "{{image}} in a 'user' turn may be the place"),
    (given("<photo>?"), "<photo> in a 'user' turn may be"),
    (given("What?\n{image_1}"), "{image_1} in a 'user' turn may be the place"),
    *[(given(f"{mark} What?"), "in a 'user' turn may be the place") for mark in
      ("<visual_1>", "<pic>", "<boi>", "$IMAGE$", "#image#", "{image}\n", "IMAGE_PLACEHOLDER",
       "![](a.png)", "<img src='a.png'>", "[img]a.png[/img]")],
    ({"messages": [asked({"type": "image", "src": "a.png"}, text("?")), A]}, "seems to hold its image under 'src'"),
    ({"messages": [asked({"type": "image", "source": {"type": "base64", "data": PNG}}, text("?")), A]}, "'source'"),
    (given("<|vision_start|>What?"), "<|vision_start|> in a 'user' turn may be"),
    (given("<img>?"), "<img> in a 'user' turn may be"), (indexed(0, "?"), "have the indices 0; images in column 'images': 2"),
    (indexed(0, 0, "?"), "have the indices 0, 0; images"),
    (indexed(0, None, "?"), "have the indices 0, and 1 others have none"),
    (indexed(2, 1, "?"), "has the index 2, and images in"), (indexed(-1, 0), "has the index -1"),
    (indexed(True, 0), "has the index True"), (indexed(0.5, 0), "has the index 0.5"),
    (indexed("<image>", 1), "have the indices 1, and 1 others have none"),
    *[(indexed({"type": "image", key: one}, {"type": "image", key: other}, "?"), f"have the {key!r} {said}, which may name")
      for key, one, other, said in [("id", 1, 0, "1, 0"), ("image_id", 2, 1, "2, 1"), ("name", "img_2", "img_1", "2, 1")]],
    *[(row(f"{mark} What?", "a.png"), f"{mark} in a 'user' turn may be")
      for mark in ("<im>", "#image#", "%img_1%", "&lt;image&gt;")],
    (row("<a.png> What?", "a.png"), "<a.png in a 'user' turn may be"),
    ({"messages": [asked({"type": "text", "text": "What?", "image": "a.png"}), A]}, "'image' holds pictures"),
    (row("What?", {"bytes": [1, 2]}), "an image is {"),
    ({"messages": [asked({"type": "image", "index": 0}, text("?")), A]}, "has the index 0, and no column has images"),
    ({"messages": [asked("<img>nowhere.png</img>?"), A]}, "the image 'nowhere.png' is missing"),
    ({"messages": [asked({"type": "image", "image": "a.png"}, text("<image>\nWhat?")), A]}, "<image> stands for a picture"),
    *[(row(f"{mark}What?"), "stands for a picture") for mark in ONE if mark[0] == "<" and ".png" not in mark],
])  # fmt: skip
def test_places_that_do_not_fit(encode, problem, content, said):
    assert said in problem(encode(content))


@pytest.mark.parametrize("question, unread", [
    ("Write <picture><img></picture> as HTML.", set()), ("What does <img>text</img> show?", set()),
    ("See [IMG]http://a.invalid/a.png[/IMG].", set()), ("Is a < b, and b[1] > c?", set()),
    ("<svg><image>x</image></svg>?", set()), ("Say <image_7> and <image_8>.", {"<image_1>"}),
    ("Say <|vision_start|><|image_pad|><|vision_end|>.", {"<|vision_start|><|image_pad|><|vision_end|>"}),
    ("<|im_start|> is ChatML's.", set()),
])  # fmt: skip
def test_what_is_no_place_stays_as_it_is(encode, shown, question, unread):
    found = encode(row(question))
    assert question in shown(found)[0]
    assert set(found.unread[found.samples["unread"][0]]) == {f"{mark} in texts, read as letters" for mark in unread}


def test_a_number_of_thousands_of_digits_is_no_place(encode, shown):
    part = {"type": "image", "id": "1" * 5000}
    assert (
        f"user\n{FIRST}What?<" in shown(encode({"messages": [asked(part, text("What?")), A], "images": ["a.png"]}))[0]
    )


def test_images_of_a_whole_chat_that_is_a_completion_are_counted_once(encode, shown):
    chat = {"prompt": [asked("<image>What?")], "completion": [asked("<image>What?"), A], "images": ["a.png"]}
    assert shown(encode(chat))[0].count(FIRST) == 1


@pytest.mark.parametrize("question", [
    "Which line calls GET /v2/images/{image_id}", r"What does \includegraphics{image}", "Why print(f'{img}",
    "Write &lt;img&gt; in HTML.", "&lt;image&gt;x&lt;/image&gt;?", "Run x[image] and f(a)[img][0].",
    "See [image](a.html) and ![image 1](b.html).", "Why is {img} empty, and a < image?",
    "[IMG]a.invalid[/IMG]", "Is a.png the topic of <topic>?",
])  # fmt: skip
def test_code_and_links_are_no_places(encode, shown, question):
    assert f"user\n{FIRST}{question}<|im_end|>" in shown(encode(row(question, "a.png")))[0]


def test_an_answer_may_name_an_image(encode, shown):
    content = given("Is <image_1> in <image_2>?")
    content["messages"][1] = {"role": "assistant", "content": "[Image 1] is in <image_2>."}
    found = encode(content)
    assert shown(found)[1] == "[Image 1] is in <image_2>.<|im_end|>"
    assert found.unread[found.samples["unread"][0]] == ("<image_1> in texts, read as letters",)


# ---- rows without an image ---------------------------------------------------------------------------------------
PLAIN = {"messages": [asked("What?"), A]}
STRUCT = {"bytes": b"x", "path": None}


@pytest.mark.parametrize("columns", [
    {"image_path": "a.png"}, {"img": "000123"}, {"image_url": "https://a.invalid/1"}, {"jpg": b"abc"}, {"file_name": "a.JPG"},
    {"image_1": STRUCT, "image_2": STRUCT}, {"picture": "x"}, {"photo": STRUCT}, {"image_paths": ["a.png"]}, {"image_file": "a"},
    {"url": "https://a.invalid/a.png?size=3"}, {"screenshot": "sub/b.webp"}, {"file": ["a.tiff"]}, {"input_image": {"path": "a"}},
    {"picture_b64": "data:image/png;base64,AAAA"}, {"source.png": "abc"}, {"imgs": [STRUCT]}, {"meta": {"url": "a.png"}},
    {"image": None, "image_path": "a.png"}, {"images": [], "screenshot": {"bytes": b"x"}}, {"Image": STRUCT}, {"img-url": "a"},
    {"scan": b"\x89PNG..."}, {"scan": PNG}, {"media": {"image": "a.png"}}, {"multi_modal_data": {"image": ["a.png"]}},
])  # fmt: skip
def test_a_column_that_seems_to_hold_an_image(encode, problem, shown, columns):
    """It is named where none was found in the row; it may be left out on purpose."""
    name = next(name for name, value in columns.items() if value)
    kinds = (PLAIN, {"prompt": "What?", "completion": "A dog."}, {"text": "A dog."})
    for content in (kind | columns for kind in kinds):
        found = encode(content)
        assert f"column {name!r} seems to hold one" in problem(found)
        cure = "a column images" if name in ("media", "multi_modal_data") else f"columns: {{images: {name}}}"
        assert cure in found.bad[0][1].args[1]
    assert shown(encode(PLAIN | columns, columns={"ignore": list(columns)}))[2] == []


@pytest.mark.parametrize("columns", [
    {"id": "000123"}, {"source": "coco/train2017"}, {"num_images": 0}, {"image_id": "1"}, {"has_image": False},
    {"image_path": ""}, {"image_caption": "a dog"}, {"note": "The file is a.png"}, {"url": "https://a.invalid/page.html"},
    {"file_name": "a.txt"}, {"img": None}, {"hash": b"abc"}, {"meta": {"n": 3}}, {"image_size": [3, 4]}, {"imagery": "rich"},
])  # fmt: skip
def test_columns_that_hold_none(encode, shown, columns):
    assert shown(encode(PLAIN | columns))[2] == []


def test_a_row_with_images_may_name_them_elsewhere_too(encode, shown):
    assert shown(encode(PLAIN | {"images": ["a.png"], "image_path": "a.png", "file_name": "a.png"}))[2] == [SMALL]


def test_a_turn_that_seems_to_hold_an_image(encode, problem):
    content = {"messages": [asked("What?") | {"image_path": "a.png"}, A]}
    assert "the key 'image_path' of a 'user' turn seems to hold one" in problem(encode(content))


# ---- boxes -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("words, there", [
    ("It is at [10, 20, 300, 400].", True), ("(10,20),(300,400)", True), ("<|box_start|>(1,2),(3,4)<|box_end|>", True),
    ("<box>[[1]]", True), ("<loc0123><loc0456> dog", True), ('{"bbox_2d": [1, 2, 3, 4]}', True), ('{"bbox": "x"}', True),
    ("[0.1, 0.2, 0.35, 0.4]", True), ('<point x="1.5" y="2">', True), ("<patch_index_0044>", True), ("[1, 2, 3]", False),
    ("a box of 3", False), ("f(1, 2)", False),
])  # fmt: skip
def test_boxes_in_texts_are_counted(encode, words, there):
    content = [row("<image>Where?", "a.png"), row("Where?"), row(f"<image>Is it {words}?", "a.png")]
    content[0]["messages"][1] = content[1]["messages"][1] = {"role": "assistant", "content": words}
    said = [any("boxes" in name for name in found.unread[found.samples["unread"][0]]) for found in map(encode, content)]
    assert said == [there, False, there]


@pytest.mark.parametrize("question, said", [
    ("比较[image2]和[image1]的不同", "比较{b}和{a}的不同"), ("<image1></image1>和<image2></image2>", "{a}和{b}"),
    ("<image></image>what, <image>\n</image>", "{a}what, {b}"),
])  # fmt: skip
def test_places_behind_letters_and_with_closing_tags(encode, shown, question, said):
    assert f"user\n{said.format(a=FIRST, b=SECOND)}<|im_end|>" in shown(encode(given(question)))[0]


@pytest.mark.parametrize("mark", [
    '<image id="1">', "<image index=0/>", "<image:red.png>", "[Image: red.png]", "<!-- image -->", "(image)", "__IMAGE__",
    "[图片]", "【图1】", "[图2]", "<图片>", "<figure>", "<screenshot>", '<image id="1"></image>',
])  # fmt: skip
def test_what_may_be_a_place_is_refused_unless_the_images_have_theirs(encode, shown, mark):
    (error,) = (bad for bad in encode(row(f"{mark} What?", "a.png")).bad)
    assert "may be the place of an image" in str(error[1].args)
    assert f"{FIRST}Is {mark} code?" in shown(encode(row(f"<image>Is {mark} code?", "a.png")))[0]


@pytest.mark.parametrize("question", [
    '<svg><image href="a.png" x="0"/></svg>', "The car in the picture (image)",
    "a[image1] = <figure>x</figure>", "<!-- image slider --> [Image: x](y)", "See 图1 (image) here", "List<int> [x: y]",
])  # fmt: skip
def test_ordinary_text_is_no_place(encode, shown, question):
    assert f"{FIRST}{question}<|im_end|>" in shown(encode(row(question, "a.png")))[0]


@pytest.mark.parametrize("content", ["<image>\nWhat?", "What is <image>?", [{"type": "image"}, text("What?")]])
@pytest.mark.parametrize("name", ["image_path", "image_0"])
def test_a_column_of_another_name_is_named_wherever_the_place_stands(encode, content, name):
    question = {"role": "user", "content": content}
    (bad,) = encode({"messages": [question, A], name: "a.png"}).bad
    assert f"columns: {{images: {name}}}" in bad[1].args[1]


def test_images_within_an_object_are_to_be_a_column_of_their_own(encode):
    (bad,) = encode({"messages": [asked("<image>What?"), A], "media": {"image": ["a.png"]}}).bad
    assert "'media' seems to hold one" in bad[1].args[0] and "a column images" in bad[1].args[1]
