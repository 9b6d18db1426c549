"""A model built small from its configuration: the same class, few layers, narrow, random, with its real vocabulary.

While `built_small` is open, `from_pretrained` loads no weights (`simulate.loads`).
"""

import contextlib
import copy
import functools
import importlib.metadata
import importlib.util
import pathlib
import re
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from packaging.version import Version

from failurelab import updates
from failurelab._unwrap import unwrap
from failurelab.failures import release
from failurelab.handles import eval_mode, keep_requires_grad
from failurelab.simulate.loads import FOR_FILES, Call, loaded_by
from failurelab.simulate.no_gpu import Mapped
from failurelab.textbook import without_adapters
from failurelab_preflight.training import Load, TrainedAdapter

LAYERS, WIDTH, HEADS = 2, 64, 4
_SHALLOW = dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "max_window_layers"), LAYERS)
_NARROW = _SHALLOW | {  # names of configurations, to what they are cut
    **dict.fromkeys(("depth", "encoder_layers", "decoder_layers"), LAYERS),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "embed_dim", "hidden_dim"), WIDTH),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "d_ff", "ffn_hidden_size"), 2 * WIDTH),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), WIDTH),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "encoder_attention_heads"), HEADS),
    **dict.fromkeys(("decoder_attention_heads",), HEADS),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    "num_key_value_heads": 2,
    "head_dim": WIDTH // HEADS,
    "num_experts_per_tok": 2,
}
_FEW = 5_000_000  # elements of a model that is small already: its own weights say more


def probe(model: torch.nn.Module) -> torch.Tensor:
    """Return the logits, `(1, 8, vocabulary)`, that a model in eval mode gives to the same eight tokens."""
    ids = torch.arange(1, 9, device=next(model.parameters()).device)[None]
    with torch.no_grad(), eval_mode(model):
        return model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.float().cpu()


def note_given(model: Any, adapters: list[TrainedAdapter]) -> None:
    """Note the adapter of a model that a trainer is about to take: one that is not zero, and was not loaded.

    Such as the script has trained itself. Where the model cannot be asked, nothing is kept of what it says.
    """
    if adapters or not isinstance(model, torch.nn.Module) or not getattr(model, "peft_config", None):
        return
    with_it = without = torch.zeros(1, device="cpu")
    with contextlib.suppress(Exception):  # it is none of the script's: `probe` is asked again when training begins
        with_it = probe(model)
        with adapters_off(model):
            without = probe(model)
        if with_it.shape != without.shape or torch.equal(with_it, without):
            return  # of a prompt that is learned the logits are more
    adapters.append(TrainedAdapter("that the trainer is given", with_it, without))


def seem_trained(model: torch.nn.Module, std: float) -> None:
    """Give adapters numbers that are not zero, as training would."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=std)


@contextlib.contextmanager
def adapters_off(model: Any) -> Iterator[None]:
    """Inside, adapters do nothing: those of a PeftModel, or of a model with `add_adapter`."""
    off = model.disable_adapter() if hasattr(model, "disable_adapter") else without_adapters(model)
    with keep_requires_grad(model), off:
        yield


# What transformers returns beside a model on demand: a model that is made here lacks nothing of its checkpoint.
_LOADING_INFO = ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")


@contextlib.contextmanager
def built_small(
    loads: list[Load],
    adapters: list[TrainedAdapter],
    by_trainer: Callable[[], bool],
    real: bool,
    too_early: Callable[[], bool],
    mapped: Mapped,
    note: Callable[[str, bool], None] = lambda kind, known: None,
) -> Iterator[None]:
    """Inside, `from_pretrained` of a model builds it small, or, if `real`, loads it; each call is added to `loads`.

    Args:
        loads: gets one Load for each call.
        adapters: gets one entry for each trained adapter that is loaded.
        by_trainer: whether a trainer is being made now.
        real: load the weights, as the script asks for.
        too_early: whether no process of the launch knows its device yet.
        mapped: notes what is put elsewhere, because there is no GPU.
        note: called for each `load` and `adapter`, and with whether the script's own code loads it.
    """

    def load_small(call: Call) -> Any:
        told = call.options.pop("output_loading_info", False)
        return (load_one(call), {name: [] for name in _LOADING_INFO}) if told else load_one(call)

    def load_one(call: Call) -> Any:
        name, options = call.name, dict(call.options)
        if name is None or options.get("state_dict") is not None:
            return call.load()
        config = call.read_config()
        dtype, bits = _dtype(config, options), _bits(config, options)
        load = Load(str(name), options, copy.deepcopy(config), by_trainer(), dtype, bits)
        load.device_map, load.early = options.get("device_map"), too_early()
        load.config._name_or_path = load.name  # which a model's own class leaves out, unlike the Auto classes
        load.small = not (real or is_small(call.cls, config, name))
        loads.append(load)
        note("load", not load.by_trainer)
        mapped.attention(config, call.options)
        if load.device_map is not None and not (load.by_trainer and load.device_map == "auto"):  # trl's own default
            call.options["device_map"] = mapped.device_map(load.device_map)
        if real:
            model = call.load()
            load.model = weakref.ref(model)
            return model
        if not load.small:
            call.arguments, call.config = (), _without_quantization(config)
            # All in one dtype: a reference that trl loads like the policy's parameters would lack its rounding.
            call.options = _attention(options) | _for_files(options) | {dtype_argument(): torch.float32}
            return _marked(call.load().float(), load)
        model = build(call.cls, load.config, **_attention(options))
        if (generation_config := _generation_config(name, options)) is not None:  # a reward model has none
            model.generation_config = generation_config
        return _marked(model, load)

    with contextlib.ExitStack() as stack:
        stack.enter_context(loaded_by(load_small))
        if not real:
            stack.enter_context(_quantization_without_its_library())
            stack.enter_context(_made_small(loads, by_trainer))
            stack.enter_context(_other_weights(mapped))
        stack.enter_context(_text_drawn_alone())
        stack.enter_context(_adapters_noted(adapters, real, note))
        stack.enter_context(_casts_noted(loads))
        yield


_OF_MEDIA = re.compile(r"(image|video|audio|vision|boi|eoi|boa|eoa)_?\w*_token_(id|index)$")


def _text_drawn_alone() -> contextlib.AbstractContextManager:
    """Inside, no model draws the ids that stand for images, videos or sound: a random one draws them like any other.

    Where there are more of them than images, the model's own pass ends in an error, which is none of the script's.
    """
    from transformers import GenerationMixin

    original = GenerationMixin.generate

    @functools.wraps(original)
    def generate(self: Any, *args: Any, **options: Any) -> Any:
        config = getattr(self, "config", None)
        values = {name: value for part in _parts(config) for name, value in vars(part).items()} if config else {}
        media = sorted({value for name, value in values.items() if _OF_MEDIA.match(name) and isinstance(value, int)})
        return original(self, *args, **(options if not media else {"suppress_tokens": media} | options))

    return mock.patch.object(GenerationMixin, "generate", generate)


@contextlib.contextmanager
def _casts_noted(loads: list[Load]) -> Iterator[None]:
    """Inside, a cast of a loaded model to float32 is noted: the cut model is in float32, whatever the load's dtype.

    A cast to 16 bits needs no note: it casts the cut model too.
    """
    apply, to_float32 = torch.nn.Module._apply, updates.to_float32

    def note(model: Any, cast: Callable[[torch.Tensor], Any]) -> None:
        for load in loads:
            if load.model is not None and load.model() is unwrap(model) and load.dtype in ("bfloat16", "float16"):
                after = cast(torch.zeros(1, dtype=getattr(torch, load.dtype), device="cpu"))
                if getattr(after, "dtype", None) == torch.float32:
                    load.dtype = "float32"

    def applied(self: Any, cast: Callable[[torch.Tensor], Any], *rest: Any, **options: Any) -> Any:
        note(self, cast)
        return apply(self, cast, *rest, **options)

    def widened(model: Any) -> list[str]:
        note(model, torch.Tensor.float)
        return to_float32(model)

    with mock.patch.object(torch.nn.Module, "_apply", applied), mock.patch.object(updates, "to_float32", widened):
        yield


def _other_weights(mapped: Mapped) -> contextlib.AbstractContextManager:
    """Inside, a cut model takes weights of the whole one: it gets random ones, other ones than it had.

    The same for the same weights. What fits is loaded, and a name that the whole model has not is an error as before.
    """
    original = torch.nn.Module.load_state_dict

    def load_state_dict(self: Any, state_dict: Any, *args: Any, **options: Any) -> Any:
        own = self.state_dict() if is_cut(self) else {}
        kinds = {_kind(name) for name in own}
        large = {
            name: weight
            for name, weight in (state_dict.items() if own and isinstance(state_dict, Mapping) else ())
            if _kind(name) in kinds and (name not in own or own[name].shape != weight.shape)
        }
        # A matrix whose rows alone are other ones is a vocabulary's, and an error of the script's.
        if all(name in own and own[name].shape[1:] == weight.shape[1:] for name, weight in large.items()):
            return original(self, state_dict, *args, **options)
        mapped.tell(f"load_state_dict, {len(large)} tensors of the whole model's sizes", "random ones")
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(zlib.crc32(str([weight.flatten()[:8].tolist() for weight in large.values()]).encode()))
            for parameter in self.parameters():
                if parameter.ndim > 1 and parameter.is_floating_point():
                    parameter.normal_(std=0.1)
        fitting = {name: weight for name, weight in state_dict.items() if name not in large}
        return original(self, fitting | {name: own[name] for name in large if name in own}, *args, **options)

    return mock.patch.object(torch.nn.Module, "load_state_dict", load_state_dict)


def _kind(name: str) -> str:
    """Return a tensor's name without the number of its layer."""
    return re.sub(r"\d+", "", name)


_BUILDING: list[type] = []  # models that are being made: their parts are made by `from_config` too


def _made_small(loads: list[Load], by_trainer: Callable[[], bool]) -> contextlib.AbstractContextManager:
    """Inside, `from_config` of a large model makes a small one; random are both."""
    from transformers import PreTrainedModel

    original = PreTrainedModel._from_config.__func__

    def from_config(cls: type, config: Any, **options: Any) -> Any:
        if _BUILDING or is_few(cls, config):
            with _building(cls):
                return original(cls, config, **options)
        dtype = options.get("dtype") or options.get("torch_dtype") or torch.float32
        name = config._name_or_path or f"a configuration of {cls.__name__}"
        loads.append(Load(name, options, copy.deepcopy(config), by_trainer(), dtype=str(dtype).removeprefix("torch.")))
        return build(cls, config, **_attention(options))

    return mock.patch.object(PreTrainedModel, "_from_config", classmethod(from_config))


@contextlib.contextmanager
def _building(cls: type) -> Iterator[None]:
    _BUILDING.append(cls)
    try:
        yield
    finally:
        _BUILDING.pop()


def build(cls: type, config: Any, **options: Any) -> torch.nn.Module:
    """Return a small random model of this class, always the same for one configuration; it has run a forward pass.

    Raises:
        Exception: what the model's class raises at full width too, after a narrow one and one of few layers failed.
    """
    for sizes in (_NARROW, _SHALLOW):
        try:
            return _built(cls, cut(config, sizes), options)
        except Exception:  # a configuration that ties its sizes together in a way of its own
            continue
    return _built(cls, _without_quantization(config), options)


def _built(cls: Any, config: Any, options: dict[str, Any]) -> torch.nn.Module:
    # Policy and reference of one name are the same model, also where they are loaded in different dtypes.
    seed = zlib.crc32(f"{cls.__name__} {config._name_or_path} {getattr(config, 'vocab_size', '')}".encode())
    with torch.random.fork_rng(devices=[]), _building(cls):
        torch.manual_seed(seed)
        model = cls._from_config(config, **options, **{dtype_argument(): torch.float32})
        model.is_cut_by_preflight = True
        model.float().eval()  # a classifier's inner model asks its configuration once more, in transformers 4.56
        if getattr(config, "vocab_size", None) and not getattr(config, "is_encoder_decoder", False):
            with torch.no_grad():
                model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=model.device))
    return model


def cut(config: Any, sizes: dict[str, int]) -> Any:
    """Return a copy of a configuration, with at most these sizes; the vocabulary stays."""
    config = _without_quantization(config)
    for part in _parts(config):
        for name, size in sizes.items():
            if isinstance(getattr(part, name, None), int) and getattr(part, name) > size:
                setattr(part, name, size)
        if sizes is _NARROW and isinstance(getattr(part, "initializer_range", None), float):
            part.initializer_range = 0.1  # with the 0.02 of wide models every token would be about as likely
        for name in ("layer_types", "mlp_layer_types", "no_rope_layers"):
            if isinstance(kinds := getattr(part, name, None), list):
                setattr(part, name, _both_kinds(kinds))
    return config


def _parts(config: Any) -> Iterator[Any]:
    """Yield a configuration and those inside it, as of a model of images and text."""
    from transformers import PretrainedConfig

    yield config
    for value in list(vars(config).values()):
        if isinstance(value, PretrainedConfig):
            yield from _parts(value)


def _both_kinds(kinds: list) -> list:
    """Return as many kinds as there are layers: the last one of a pattern too, where a model mixes kinds."""
    return [kinds[0], next((kind for kind in kinds if kind != kinds[0]), kinds[0])][:LAYERS]


def _without_quantization(config: Any) -> Any:
    config = copy.deepcopy(config)
    vars(config).pop("quantization_config", None)
    return config


def is_small(cls: type, config: Any, name: Any) -> bool:
    """Whether a checkpoint is a local one that is as cheap as a cut one: then its own weights are taken."""
    folder = pathlib.Path(str(name))
    return folder.is_dir() and any(folder.glob("*.safetensors")) and is_few(cls, config)


def is_cut(model: Any) -> bool:
    """Whether a model, or the one that it is a copy of, was built small; a wrapper is none."""
    return "is_cut_by_preflight" in vars(model)


def is_few(cls: type, config: Any) -> bool:
    """Whether a model of this configuration is as cheap as a cut one."""
    with contextlib.suppress(Exception), torch.device("meta"):
        return cls(copy.deepcopy(config)).num_parameters() <= _FEW
    return False


def _for_files(options: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key in FOR_FILES}


def _attention(options: dict[str, Any]) -> dict[str, str]:
    """Return the attention asked for, where a CPU has it."""
    attention = options.get("attn_implementation")
    return {"attn_implementation": attention} if attention in ("eager", "sdpa") else {}


def dtype_argument() -> str:
    """Return what this transformers calls the dtype of a load and of a configuration."""
    import transformers

    return "dtype" if release(transformers.__version__) >= Version("4.56") else "torch_dtype"


def _dtype(config: Any, options: dict[str, Any]) -> str:
    """Return the dtype of the weights that this call gives with the weights there."""
    import transformers

    dtype = options.get("dtype", options.get("torch_dtype"))
    own = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
    if dtype is None and release(transformers.__version__) < Version("5"):
        dtype = torch.float32
    if dtype is None or dtype == "auto":
        dtype = own or torch.float32
    return str(dtype).removeprefix("torch.")


def _bits(config: Any, options: dict[str, Any]) -> int:
    own = options.get("quantization_config") or getattr(config, "quantization_config", None) or {}
    read = own.get if isinstance(own, dict) else lambda name, default=None: getattr(own, name, default)
    for bits in (4, 8):
        if options.get(f"load_in_{bits}bit") or read(f"load_in_{bits}bit"):
            return bits
    return int(read("bits") or 0)


def _generation_config(name: Any, options: dict[str, Any]) -> Any:
    from transformers import GenerationConfig

    with contextlib.suppress(Exception):  # most checkpoints have one; without it the model's own stands
        return GenerationConfig.from_pretrained(name, **_for_files(options))


def _marked(model: Any, load: Load) -> Any:
    """Return the model as it looks after that load to trl and peft: its name, and what a quantized one freezes."""
    model.name_or_path = model.config._name_or_path = load.name
    load.model = weakref.ref(model)
    if load.bits:
        setattr(model, f"is_loaded_in_{load.bits}bit", True)
        head = model.get_output_embeddings()
        for module in model.modules():
            if isinstance(module, torch.nn.Linear) and module is not head:
                module.weight.requires_grad_(False)
    return model


def _quantization_without_its_library() -> contextlib.AbstractContextManager:
    """A BitsAndBytesConfig asks for the release of bitsandbytes when it is made; the cut model needs none."""
    from transformers import BitsAndBytesConfig

    original = BitsAndBytesConfig.post_init

    def post_init(self: Any) -> None:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError, ImportError):
            original(self)

    return mock.patch.object(BitsAndBytesConfig, "post_init", post_init)


def _adapters_noted(
    adapters: list[TrainedAdapter], real: bool, note: Callable[[str, bool], None]
) -> contextlib.AbstractContextManager:
    """A trained adapter's weights do not fit a cut model: it is made from its configuration, and is not zero."""
    if importlib.util.find_spec("peft") is None:
        return contextlib.nullcontext()
    from peft import PeftConfig, PeftModel, get_peft_model

    original = PeftModel.from_pretrained.__func__

    def from_pretrained(
        cls: type, model: Any, model_id: Any, adapter_name: str = "default", is_trainable: bool = False, **options: Any
    ) -> Any:
        if real:
            wrapped = original(cls, model, model_id, adapter_name, is_trainable, **options)
        else:
            config = options.get("config") or PeftConfig.from_pretrained(model_id, **_for_files(options))
            config.inference_mode = not is_trainable
            wrapped = get_peft_model(model, config, adapter_name=adapter_name)
            seem_trained(wrapped, std=0.1)
        with adapters_off(wrapped):
            base = probe(wrapped)
        adapters.append(TrainedAdapter(str(model_id), probe(wrapped), base, is_trainable))
        note("adapter", True)
        return wrapped

    return mock.patch.object(PeftModel, "from_pretrained", classmethod(from_pretrained))
