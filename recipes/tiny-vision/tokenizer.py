"""The tokenizer of this folder's model: byte-level BPE, learned from the questions and answers about pictures.

    python recipes/tiny-vision/tokenizer.py     # writes tokenizer.json, tokenizer_config.json and chat_template.jinja beside it

Its special tokens and its template are Qwen's in small: <|image_pad|> is an image's place, and the text between the two marks of
a generation is what the model learns.
"""

import random
from pathlib import Path

FOLDER = Path(__file__).parent
SIZE, SAMPLES = 352, 2000  # tokens, without the special ones; pictures whose texts are read
SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
TEMPLATE = """\
{%- for message in messages -%}
{{ "<|im_start|>" + message.role + "\\n" }}
{%- if message.role == "assistant" -%}
{% generation %}{{ message.content + "<|im_end|>" }}{% endgeneration %}{{ "\\n" }}
{%- elif message.content is string -%}
{{ message.content + "<|im_end|>\\n" }}
{%- else -%}
{%- for part in message.content -%}
{{ "<|vision_start|><|image_pad|><|vision_end|>" if part.type == "image" else part.text }}
{%- endfor -%}
{{ "<|im_end|>\\n" }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ "<|im_start|>assistant\\n" }}{%- endif -%}
"""


def main() -> None:
    from pictures import questions, random_picture
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    draw_from = random.Random(0)
    texts = [text for _ in range(SAMPLES) for pair in questions(random_picture(draw_from)) for text in pair]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=SIZE, special_tokens=[], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["user", "assistant", "system", "\n", *texts], trainer)
    tokenizer.add_special_tokens(SPECIAL)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=SPECIAL[0], eos_token="<|im_end|>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(FOLDER)
    print({token: fast.convert_tokens_to_ids(token) for token in SPECIAL}, len(fast))


if __name__ == "__main__":
    main()
