"""Write the model that distill.yaml teaches: SmolLM2-135M-Instruct with every second of its layers, and its tokenizer.

python recipes/smollm2-81m/smaller.py          # -> outputs/smollm2-81m-untaught
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.append(str(Path(__file__).parents[2]))
from brigade.train.model import gguf_file, packaged

TEACHER, TO = "smollm2-135m", Path("outputs/smollm2-81m-untaught")
KEPT = slice(None, None, 2)


def main(to: Path = TO) -> None:
    whole = gguf_file.as_folder(packaged.file_of(TEACHER, __file__), __file__)
    model = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32)
    model.model.layers = model.model.layers[KEPT]
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = number
    model.config.num_hidden_layers = len(model.model.layers)
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[KEPT]
    model.save_pretrained(to)
    AutoTokenizer.from_pretrained(whole).save_pretrained(to)
    print(f"{to}: {json.dumps({'layers': model.config.num_hidden_layers, 'parameters': model.num_parameters()})}")


if __name__ == "__main__":
    main()
