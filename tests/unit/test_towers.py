"""Models of images and texts whose decoder train.py trains: loaded from the files that they are published as, tower included."""

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING

from brigade.plan.shape.find import described
from brigade.train.model.config_json import read_config
from brigade.train.model.load import load_base, weights
from brigade.train.model.location import load_config
from brigade.train.model.sizes import beyond_texts, parameter_count
from brigade.train.model.tiny import shrink
from brigade.train.upstream.llama4_images import correct_model
from testing.shipped import shipped
from testing.vision_models import write_vision_model

# The class of the decoder without its tower, and where its weights lie in the published model.
DECODERS = {"mistral3": "Ministral3ForCausalLM", "gemma4": "Gemma4ForCausalLM"}
CONFIGS = [path for path in shipped("recipes/*/config.json") if read_config(path)["model_type"] in DECODERS]


@pytest.fixture(params=CONFIGS, ids=[path.parent.name for path in CONFIGS])
def published(request, tmp_path):
    """(folder, model): a tiny one, saved under the names that its maker's files have."""
    document = shrink(read_config(request.param))
    config = CONFIG_MAPPING[document["model_type"]].from_dict(document)
    torch.manual_seed(0)
    model = getattr(transformers, document["architectures"][0])(config).float().eval()
    model.save_pretrained(tmp_path)
    text = config.text_config
    if shared := getattr(text, "num_kv_shared_layers", 0):  # Gemma 4's files hold keys and values that no layer reads
        tensors = load_file(tmp_path / "model.safetensors")
        for layer in range(text.num_hidden_layers - shared, text.num_hidden_layers):
            place = f"model.language_model.layers.{layer}.self_attn"
            tensors |= {f"{place}.{name}_proj.weight": torch.ones(4, 4) for name in "kv"}
            tensors[f"{place}.k_norm.weight"] = torch.ones(4)
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path, model


def test_its_decoder_computes_what_the_text_model_by_itself_does(published, load):
    folder, model = published
    settings = load("--model_name_or_path", str(folder))
    config = load_config(settings)
    loaded = load_base(settings, weights(settings, config), torch.float32).eval()
    decoder = getattr(transformers, DECODERS[config.model_type])(config.text_config).float().eval()
    states = model.state_dict()
    own = [name for name in states if "language_model" in name or "lm_head" in name]
    decoder.load_state_dict({name.replace("model.language_model", "model"): states[name] for name in own})
    ids = torch.randint(3, 1000, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = loaded(input_ids=ids).logits
        assert torch.equal(logits, decoder(input_ids=ids).logits) and logits.std() > 0
    trained = parameter_count(loaded, trained=True)
    assert trained == parameter_count(decoder) == parameter_count(loaded) - beside(loaded)


def test_what_it_carries_besides_is_counted_apart(published):
    folder, model = published
    document = read_config(folder)
    shape = described(document, "x")
    assert shape.parameters == parameter_count(model) and shape.other == beside(model) > 0
    assert 0 < shape.final_norm <= 4 * shape.hidden or shape.final_norm < shape.embedding


def beside(model):
    return sum(parameter_count(part) for part in beyond_texts(model).values())


def test_a_language_model_of_files_that_hold_a_tower(load, mistake, tmp_path):
    """Llama 4's, which Transformers builds without it; nothing else may be left over."""
    folder = write_vision_model(tmp_path / "model", "llama4")
    settings = load("--model_name_or_path", str(folder))
    loaded = load_base(settings, weights(settings, load_config(settings)), torch.float32).eval()
    whole = transformers.AutoModelForImageTextToText.from_pretrained(folder)
    correct_model()  # Transformers 5.24.0's own cannot be called without
    ids = torch.arange(3, 33)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, whole(ids).logits)
    assert parameter_count(loaded, trained=True) == parameter_count(loaded) == parameter_count(whole) - beside(whole)
    tensors = load_file(folder / "model.safetensors") | {"language_model.stray": torch.ones(2)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert "none of the model's (1): language_model.stray" in mistake(weights, settings, load_config(settings))
