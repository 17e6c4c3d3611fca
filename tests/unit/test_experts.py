"""What experts over ranks ask of a strategy and of a model, told before the model is built; and how their figures are counted."""

import json
import re

import pytest
import torch
from accelerate.commands.config import config_args
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from brigade.errors import UserError
from brigade.train.engines.parallel import experts as parallel
from brigade.train.host.cluster import World
from brigade.train.model import experts
from brigade.train.model.location import load_config
from brigade.train.model.tiny import shrink
from brigade.train.recipe import flags
from brigade.train.strategy import accelerate_config, choose
from brigade.train.upstream import experts as in_half
from testing.ranks import REPOSITORY as ROOT

MESH = {"parallelism_config_ep_size": 2}
FSDP2 = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}}
DDP = {"distributed_type": "MULTI_GPU", "parallelism_config": MESH}
HSDP = {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 2}
PLACE = "flag --accelerate_config: parallelism_config_ep_size"


@pytest.fixture
def file(write_json):
    return lambda document: ["--accelerate_config", write_json(document, "a.yaml")]


@pytest.fixture
def settings_of(tmp_path):
    """settings_of("qwen3_moe", num_experts=6): of a run with a tiny such model."""

    def write(name, *words, **changed):
        config = shrink(CONFIG_MAPPING[name]().to_dict()) | {"model_type": name} | changed
        (tmp_path / "config.json").write_text(json.dumps(config))
        return flags.load(["--model_name_or_path", str(tmp_path), *words])

    return write


def chosen(words, size=4, env=None):
    return choose(flags.load(words), World(0, 0, size, size, "host", "torchrun"), env=env or {})


def test_it_is_fsdp2_and_every_rank_has_rows_of_its_own(file):
    strategy = chosen(file(FSDP2 | {"parallelism_config": MESH}))
    assert strategy.kind == "fsdp2" and strategy.label == "fsdp2 x expert 2" and strategy.axes.data(4) == 4
    assert strategy.identity() == chosen(file(FSDP2)).identity()


@pytest.mark.parametrize("document, words, size, said", [
    (FSDP2 | {"parallelism_config": MESH}, [], 3, ["expert 2 needs a multiple of 2 ranks"]),
    (DDP, [], 1, ["expert 2 needs a multiple of 2 ranks, and there are 1"]),
    (DDP, ["--ddp_comm_hook", "bf16"], 4, ["flag --ddp_comm_hook", "where experts are divided FSDP2 reduces gradients"]),
    (DDP, ["--optim", "adamw_8bit"], 4, ["flag --optim", "knows no DTensors"]),
    (FSDP2 | {"parallelism_config": MESH | HSDP}, [], 8, ["dp_replicate_size 2 x dp_shard_size 2 is not"]),
    (FSDP2 | {"parallelism_config": MESH | {"parallelism_config_tp_size": 2, "parallelism_config_pp_size": 2}}, [], 4,
     ["pipeline parallelism does not run under fsdp2"]),
    (FSDP2 | {"parallelism_config": MESH}, ["--torch_compile"], 4, ["flag --torch_compile", "expert"]),
])  # fmt: skip
def test_strategies_that_it_does_not_go_with(file, document, words, size, said, mistake):
    message = mistake(lambda: chosen([*file(document), *words], size))
    assert all(word in message for word in said), message


@pytest.mark.parametrize("document, kind, data", [
    (FSDP2 | {"parallelism_config": MESH | HSDP}, "hsdp", 4),
    (DDP, "ddp", 4),
    (FSDP2 | {"parallelism_config": {**MESH, "parallelism_config_tp_size": 2}}, "fsdp2", 2),
    (DDP | {"parallelism_config": {**MESH, "parallelism_config_pp_size": 2}}, "ddp", 2),
])  # fmt: skip
def test_strategies_that_it_goes_with(file, document, kind, data):
    strategy = chosen(file(document))
    assert (strategy.kind, strategy.axes.experts, strategy.axes.data(4)) == (kind, 2, data)
    assert strategy.writes_in_parts


def test_stages_under_zero1_divide_experts_by_the_ds_config_too(write_json):
    config = {"zero_optimization": {"stage": 1}, "pipeline": {"stages": 2}}
    config["expert_parallel"] = {"enabled": True, "autoep_size": 2}
    assert str(chosen(["--ds_config", write_json(config)]).axes) == "pipeline 2 x expert 2"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeeds_autoep_is_refused_with_its_error(write_json, stage, mistake):
    config = {"zero_optimization": {"stage": stage}, "expert_parallel": {"enabled": True, "autoep_size": 2}}
    message = mistake(chosen, ["--ds_config", write_json(config)])
    assert "takes 2 positional arguments" in message
    assert "expert_parallel.autoep_size" in message and "fsdp2_ep2" in message


def test_deepspeeds_autoep_still_fails_so():
    """When this fails, the row of strategy/refused.yaml may go."""
    import inspect

    from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

    with pytest.raises(TypeError, match=re.escape("get() takes 2 positional arguments but 3 were given")):
        _CAN_RECORD_REGISTRY.get("name", None)
    presets = pytest.importorskip("deepspeed.module_inject.auto_ep_presets.base")
    assert "registry.get(registry_key, _MISSING" in inspect.getsource(presets)


def test_accelerate_launch_hands_nothing_of_it_on_and_that_is_told(mistake):
    """What its launcher puts into the environment for accelerate_configs/fsdp2_ep2_1x4.yaml."""
    env = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    sizes = {f"PARALLELISM_CONFIG_{name}_SIZE": "1" for name in ("DP_REPLICATE", "DP_SHARD", "TP", "CP", "SP")}
    env |= {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_CP_BACKEND": "torch", **sizes}
    message = mistake(chosen, [], env=env)
    assert "hands no size" in message and "--accelerate_config" in message
    named = ["--accelerate_config", "accelerate_configs/fsdp2_ep2_1x4.yaml"]
    assert chosen(named, env=env).axes.experts == 2
    assert chosen([], env=env | {"PARALLELISM_CONFIG_DP_SHARD_SIZE": "4"}).axes.experts == 1


@pytest.mark.parametrize("sizes, lost", [
    ({"tp_size": 2, "pp_size": 2}, "pp_size"),
    ({"tp_size": 2, "pp_size": 2, "pp_virtual_stages": 2, "pp_schedule": "interleaved1f1b"}, "pp_size and pp_virtual_stages"),
    ({"dp_replicate_size": 2, "pp_size": 2}, "pp_size"),
    ({"sp_size": 2, "ep_size": 2}, "ep_size"),
    ({"tp_size": 2, "pp_size": 2, "ep_size": 4}, "pp_size and ep_size"),
])  # fmt: skip
def test_what_accelerate_launch_drops_beside_a_size_that_it_hands_on_is_told(sizes, lost, tmp_path, monkeypatch):
    """It hands tp_size on, and a run would be divided by that alone. The command line of its launcher names the file, or the
    launcher has read its default one."""
    monkeypatch.setattr(config_args, "default_config_file", tmp_path / "a.yaml")
    mesh = {f"parallelism_config_{key}": value for key, value in sizes.items()}
    zero = {"deepspeed_config_file": str(ROOT / "ds_configs" / "zero1.json")}
    document = {"distributed_type": "DEEPSPEED", "deepspeed_config": zero, "parallelism_config": mesh}
    (tmp_path / "a.yaml").write_text(json.dumps(document))
    env = {"ACCELERATE_MIXED_PRECISION": "no", "PARALLELISM_CONFIG_TP_SIZE": "2"}
    env |= dict.fromkeys(("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_PARALLELISM_CONFIG"), "true")
    env["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = zero["deepspeed_config_file"]
    for words in (
        ["accelerate", "launch", "--config_file", "a.yaml", "train.py"],
        ["x", f"--config_file={tmp_path}/a.yaml"],
        ["/usr/bin/python", "/usr/bin/accelerate", "launch", "train.py"],
    ):
        monkeypatch.setattr(accelerate_config, "launcher", lambda words=words: (words, tmp_path))
        with pytest.raises(UserError, match="does not hand on") as told:
            chosen([], env=env)
        assert f"hand on {lost} of" in told.value.problem and "--accelerate_config" in told.value.cure
    monkeypatch.setattr(accelerate_config, "launcher", lambda: (["python", "launcher.py", "train.py"], tmp_path))
    assert chosen([], env=env).axes.tensor == 2  # another launcher than accelerate's reads no such file


@pytest.mark.parametrize("model, changed, words, size, ranks, said", [
    ("llama", {}, [], 2, 4, ["has no experts"]),
    ("doge", {}, [], 2, 4, ["no plan"]),
    ("qwen3_moe", {"num_experts": 6, "num_local_experts": 6}, [], 4, 8, ["6 experts do not divide over 4 ranks", "one of: 2"]),
    ("qwen3_moe", {"moe_intermediate_size": 33}, [], 2, 8, ["4 ranks hold the same experts", "66 rows", "gate_up_proj"]),
])  # fmt: skip
def test_models_whose_experts_do_not_divide(settings_of, model, changed, words, size, ranks, said, mistake):
    settings = settings_of(model, *words, **changed)
    message = mistake(lambda: experts.check(settings, load_config(settings), size, ranks, ranks, PLACE))
    assert all(word in message for word in said), message


@pytest.mark.parametrize("model", ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"])
def test_models_whose_experts_do(settings_of, model):
    settings = settings_of(model)
    config = load_config(settings)
    assert experts.count(config) == 4
    experts.check(settings, config, 2, 4, 4, PLACE)


def test_rows_that_do_not_divide_do_not_matter_where_nobody_shards_them(settings_of):
    """HSDP's copies of two ranks, with a group of two in each."""
    settings = settings_of("qwen3_moe", moe_intermediate_size=33)
    experts.check(settings, load_config(settings), 2, 2, 8, PLACE)


def test_ranks_that_shard_the_same_experts():
    """(ranks of a group, ranks that share a copy of all else): the larger has to be a multiple of the other, or nobody shards."""
    found = {(size, ranks): experts.shards(size, ranks) for size in (2, 4) for ranks in (1, 2, 4, 6, 8)}
    assert [found[2, ranks] for ranks in (1, 2, 4, 6, 8)] == [1, 1, 2, 3, 4]
    assert [found[4, ranks] for ranks in (1, 2, 4, 6, 8)] == [1, 1, 1, 1, 2]


# ---- what they compute in --------------------------------------------------------------------------------------------
@pytest.fixture
def products(monkeypatch):
    """The dtypes of what torch's grouped product is given."""
    seen, multiply = set(), torch.nn.functional.grouped_mm
    taken = lambda one, other, **options: seen.update((one.dtype, other.dtype)) or multiply(one, other, **options)  # noqa: E731
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", taken)
    return seen


def mixture(name="qwen3_moe"):
    torch.manual_seed(0)
    config = CONFIG_MAPPING[name](**shrink(CONFIG_MAPPING[name]().to_dict()), experts_implementation="grouped_mm")
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def trained(model, half=None):
    """The loss, and the gradients of the experts' weights."""
    tokens = torch.arange(32).view(2, 16)
    with torch.autocast("cpu", half or torch.bfloat16, enabled=half is not None):
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return loss.detach(), {name: value.grad for name, value in model.named_parameters() if ".experts." in name}


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])  # without biases, and with them
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_experts_compute_in_half_precision_where_autocast_does(name, half, products):
    """torch's grouped product is no autocast operation: DDP, one process and stages computed their experts in fp32."""
    in_half.compute_as_autocast_says()
    whole, gradients = trained(mixture(name))
    assert products == {torch.float32}
    products.clear()
    rounded, of_rounded = trained(mixture(name), half)
    assert products == {half}
    assert 0 < abs(rounded - whole) < 0.01
    for key, gradient in of_rounded.items():
        assert gradient.dtype == torch.float32
        assert (gradient - gradients[key]).norm() < 0.3 * gradients[key].norm()


def test_without_autocast_experts_compute_what_transformers_does(monkeypatch):
    from transformers.integrations import moe

    in_half.compute_as_autocast_says()
    ours = trained(mixture())
    monkeypatch.setitem(moe.ALL_EXPERTS_FUNCTIONS, "grouped_mm", moe.grouped_mm_experts_forward)
    theirs = trained(mixture())
    assert ours[0] == theirs[0] and all(torch.equal(ours[1][key], theirs[1][key]) for key in theirs[1])


@pytest.mark.parametrize("half", [None, torch.bfloat16])
def test_tokens_travel_to_experts_in_the_type_that_these_compute_in(half, monkeypatch, products):
    from transformers.distributed import expert_parallel

    sent, send = set(), expert_parallel.all_to_all_single_autograd
    taken = lambda tensor, *args: sent.add(tensor.dtype) or send(tensor, *args)  # noqa: E731
    monkeypatch.setattr(expert_parallel, "all_to_all_single_autograd", taken)
    in_half.compute_as_autocast_says()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        expected, model = trained(mixture(), half), mixture()
        divided = list(parallel.divide(model, experts.plan(model.config), parallel.groups("cpu", 1, 1, 1)))
        loss, _ = trained(model, half)
    finally:
        torch.distributed.destroy_process_group()
    assert divided and sent == products == {half or torch.float32}
    torch.testing.assert_close(loss, expected[0], rtol=0, atol=1e-3 if half else 1e-6)
