"""What the tests of images share: a processor without a model, chat templates that write images, and images in bytes."""

import io
from typing import Any

from PIL import Image

IMAGE, BEGIN, END = "<image>", "<s>", "</s>"
PIXELS = 16  # of an image, for each token
# As Qwen's: it reads texts, and lists of parts.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{% set parts = [{'type': 'text', 'text': m.content}] %}"
    "{% else %}{% set parts = m.content %}{% endif %}"
    "{% for part in parts %}{% if part.type == 'image' %}<image>"
    "{% elif m.role == 'assistant' %}{% generation %}{{ part.text }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% if m.role != 'assistant' %}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As SmolVLM's: it reads lists of parts, drops texts without a word, and has no generation marks.
LISTS = (
    "{% for m in messages %}{{ m.role }}:{% for part in m.content %}{% if part['type'] == 'image' %}<image>"
    "{% elif part['type'] == 'text' %} {{ part['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
# As LLaVA-OneVision's: images first, and marks that end before the token that ends a turn.
MARKED_SHORT = (
    "{% for m in messages %}<|im_start|>{{ m.role }} {% for part in m.content | selectattr('type', 'equalto', 'image') %}"
    "<image>\n{% endfor %}{% for part in m.content | selectattr('type', 'equalto', 'text') %}{% if m.role == 'assistant' %}"
    "{% generation %}{{ part['text'] }}{% endgeneration %}{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)


A = {"role": "assistant", "content": "A dog."}
SMALL, WIDE = (8, 8), (16, 8)  # sizes of images, of 4 and 8 tokens


def asked(*parts: Any) -> dict[str, Any]:
    """Return a user's turn: a text, or parts."""
    return {"role": "user", "content": parts[0] if len(parts) == 1 and isinstance(parts[0], str) else list(parts)}


def tokens(width: int, height: int) -> str:
    """Return what stands in a text for an image of this size."""
    return BEGIN + IMAGE * (width * height // PIXELS) + END


class Processor:
    """A processor that makes a token of every PIXELS pixels, between BEGIN and END. tokenizer: one that knows them"""

    image_token, scales = IMAGE, False

    def __init__(self, tokenizer: Any) -> None:
        self.image_token_id = tokenizer.convert_tokens_to_ids(IMAGE)

    def expansion(self, width: int, height: int) -> str:
        return tokens(width, height)

    def identity(self) -> str:
        return "a processor of the tests"


def with_images(tokenizer: Any, template: str = TEMPLATE) -> Any:
    """Return a tokenizer that also knows the processor's tokens. tokenizer: changed in place"""
    tokenizer.add_tokens([IMAGE, BEGIN, END], special_tokens=True)
    tokenizer.chat_template = template
    return tokenizer


def encoded(width: int, height: int, kind: str = "PNG", mode: str = "RGB", colour: Any = 0, **how: Any) -> bytes:
    """Return an image of one colour as the bytes of a file. how: of PIL's save"""
    file = io.BytesIO()
    Image.new(mode, (width, height), colour).save(file, kind, **how)
    return file.getvalue()
