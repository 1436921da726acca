"""The one adapter to names that change between versions of transformers, and to torch's less public names.

Importing this module raises UnsupportedVersion where transformers is too old; the other hooks take the names from here.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Final, cast

import torch
import transformers
from huggingface_hub import try_to_load_from_cache
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ..allocator import versions
from ..allocator.errors import ConfigError, UnsupportedVersion
from .cache_argument import CACHE_NAMES

# Where a configuration may give every layer a shape of its own.
_SHAPES: Final = ("num_key_value_heads", "num_attention_heads", "num_kv_heads", "head_dim", "block_configs")
# Configurations' names for a model's longest sequence.
_POSITIONS: Final = ("max_position_embeddings", "n_positions", "max_target_positions", "max_seq_len", "seq_length")


versions.require("transformers", transformers.__version__)

from transformers import cache_utils  # noqa: E402  (older versions lack some of these names)
from transformers.cache_utils import (  # noqa: E402  # noqa: E402
    Cache,
    DynamicCache,
    DynamicLayer,
    EncoderDecoderCache,
    LinearAttentionLayer,
)
from transformers.cache_utils import DummyLayer as NoAttention  # noqa: E402
from transformers.cache_utils import DynamicSlidingWindowLayer as SlidingLayer  # noqa: E402
from transformers.cache_utils import LinearAttentionAndFullAttentionLayer as HybridLayer  # noqa: E402
from transformers.cache_utils import (  # noqa: E402
    LinearAttentionAndSlidingWindowAttentionLayer as HybridSlidingLayer,
)
from transformers.conversion_mapping import get_model_conversion_mapping  # noqa: E402
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key  # noqa: E402
from transformers.generation.configuration_utils import GenerationConfig, GenerationMode  # noqa: E402
from transformers.generation.utils import GenerationMixin  # noqa: E402
from transformers.modeling_outputs import BaseModelOutput  # noqa: E402
from transformers.models.auto import modeling_auto  # noqa: E402
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, AutoConfig  # noqa: E402

__all__ = [
    "PLAIN_MODES",
    "PREPARE_CACHE",
    "Cache",
    "DynamicCache",
    "DynamicLayer",
    "EncoderDecoderCache",
    "GenerationMixin",
    "HybridLayer",
    "HybridSlidingLayer",
    "LinearAttentionLayer",
    "NoAttention",
    "SlidingLayer",
    "StorageWeakRef",
    "TorchDispatchMode",
    "attention_of",
    "builds_dynamic_cache",
    "cache_name",
    "causal_model",
    "checkpoint_folder",
    "computes_whole_prompt",
    "cropped",
    "generating_class",
    "layer_classes",
    "layer_count",
    "layer_types",
    "length_of_positions",
    "load_config",
    "loaded_names",
    "longest_sequence",
    "one_shape",
    "peek_config",
    "plain_attention",
    "position_table",
    "prepared_caches",
    "quantization",
    "reads_all_tokens",
    "run_without_values",
    "settings_of",
    "slices_prompt",
    "takes_positions",
    "tokens_of_prompt",
    "without_modules",
]

LAYER_TYPES: Final = "DYNAMIC_LAYER_TYPE_MAPPING"  # in cache_utils: layer type -> class that DynamicCache makes
_MAPPINGS: Final = (  # from configurations to classes that write text, the usual one first
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING,
    modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
)
# Arguments of `from_pretrained` that say where files are, and hold for a configuration, too
_HUB: Final = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
_PAGED: Final = "paged|"  # how the names of attention in batches begin
PREPARE_CACHE: Final = "_prepare_cache_for_generation"  # the method in which generate() builds its cache


# Ways of choosing tokens in which a prompt is read once, and each token then follows the one before
PLAIN_MODES: Final = frozenset(
    {
        GenerationMode.GREEDY_SEARCH,
        GenerationMode.SAMPLE,
        GenerationMode.BEAM_SEARCH,
        GenerationMode.BEAM_SAMPLE,
    }
)


def slices_prompt(config: GenerationConfig, given: Mapping[str, Any], tokens: int) -> bool:
    """Does `generate()` compute only the part of a prompt of so many tokens that its cache does not hold? `config`,
    `given`: of the method that prepares the cache."""
    return tokens_of_prompt(config, given) == tokens


def tokens_of_prompt(config: GenerationConfig, given: Mapping[str, Any]) -> int:
    """Returns the tokens of the prompt of `generate()`, with padding; -1 where they are not known. `config`, `given`:
    of the method that prepares the cache."""
    mask = given.get("attention_mask")
    return int(getattr(config, "_mask_length", -1) if mask is None else mask.shape[1])


def reads_all_tokens(model: Any, ids: torch.Tensor, cache: Any) -> bool:
    """Does a forward of the model take all tokens of a sequence, also those in `cache`? `ids`: int64[rows, tokens]"""
    prepare = getattr(model, "prepare_inputs_for_generation", None)
    if prepare is None or prepare.__func__ is GenerationMixin.prepare_inputs_for_generation:
        return False
    given = {cache_name(model): cache, "use_cache": True}
    return bool(prepare(ids, next_sequence_length=1, **given)["input_ids"].shape[1] > 1)


@contextmanager
def plain_attention(model: Any) -> Iterator[None]:
    """A `with` block in which a model whose attention is set to that of batches uses that of ordinary forwards."""
    name = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if not isinstance(name, str) or not name.startswith(_PAGED):
        yield
        return
    model.set_attn_implementation(name.removeprefix(_PAGED))
    try:
        yield
    finally:
        model.set_attn_implementation(name)


def keeps_requests_apart(model: Any) -> bool:
    """Does continuous batching give each request of a batch its own tokens? Where attention does not go through
    transformers' AttentionInterface (bloom, falcon, gpt_neo, mpt) it silently attends to those of others, too."""
    return hasattr(model, "init_continuous_batching") and model._can_set_attn_implementation()


def takes_positions(model: Any) -> bool:
    """Does the model take token positions that differ from their columns?"""
    return "position_ids" in inspect.signature(model.forward).parameters


def length_of_positions(model: Any) -> int | None:
    """Returns the longest sequence whose rotary positions do not depend on its length; None for any. In longer ones
    even those of the first tokens do."""
    config = model.config.get_text_config(decoder=True)
    given = getattr(config, "rope_parameters", None)
    settings = [given, *given.values()] if isinstance(given, Mapping) else []  # one, or one for each type of layers
    lengths = []
    for setting in settings:
        kind = str(setting.get("rope_type")) if isinstance(setting, Mapping) else ""
        if "dynamic" in kind:
            lengths.append(config.max_position_embeddings - 1)  # from there on they do not go back
        elif kind == "longrope":
            lengths.append(setting["original_max_position_embeddings"])
    return min(lengths, default=None)


def cache_name(model: Any) -> str:
    """Returns the name of the cache among the arguments of the model's forward, as `generate()` has it where that takes
    any."""
    for takes in (model.forward, GenerationMixin.prepare_inputs_for_generation):
        known = inspect.signature(takes).parameters
        if (name := next((name for name in CACHE_NAMES if name in known), None)) is not None:
            return name
    raise UnsupportedVersion(
        f"transformers {transformers.__version__} gives models their caches under a name that ballonet does not know. "
        "Use an older transformers, or a newer ballonet"
    )


def computes_whole_prompt(cache: Cache) -> bool:
    """Does `generate()` give the model all of a prompt, whatever this cache of it holds? So it is with recurrent states
    alone."""
    return all(
        isinstance(layer, LinearAttentionLayer) and not isinstance(layer, DynamicLayer) for layer in cache.layers
    )


def layer_types() -> dict[str, Any]:
    """Returns the table itself: layer type -> class that `DynamicCache` makes. UnsupportedVersion."""
    table: dict[str, Any] | None = getattr(cache_utils, LAYER_TYPES, None)
    if table is None or not hasattr(GenerationMixin, PREPARE_CACHE):
        raise UnsupportedVersion(
            f"transformers {transformers.__version__} builds the cache of generate() in a way that ballonet does not "
            f"know: it looked for cache_utils.{LAYER_TYPES} and GenerationMixin.{PREPARE_CACHE}. Use an older "
            "transformers, or a newer ballonet"
        )
    return table


def builds_dynamic_cache(model_class: type[GenerationMixin]) -> bool:
    """Does `generate()` of this class build a `DynamicCache`?"""
    return bool(cast(Any, model_class)._supports_default_dynamic_cache())


def layer_count(config: Any) -> int:
    """Returns the number of layers of the text part; 0 where `config` does not have it."""
    count = getattr(_text(config), "num_hidden_layers", None)
    return count if isinstance(count, int) else 0


def layer_classes(config: Any) -> list[tuple[str, type | None]]:
    """Returns, of each layer of a `DynamicCache` for `config`, its type and the stock class that is made of it.

    None where that class is not known yet: some are once the file of their model is imported.
    """
    types, _ = cache_utils.get_layer_types_and_kwargs(_text(config))
    table = layer_types()
    return [(kind, inspect.unwrap(table[kind]) if kind in table else None) for kind in types]


def prepared_caches(model: GenerationMixin, tokens: int = 1) -> list[DynamicCache]:
    """Returns the empty caches that `generate()` of that model starts with: one, or an encoder-decoder's two.

    Made by the method that `generate()` calls. Their layers are stock, unless called within a `Building`.
    """
    prepared: dict[str, Any] = {}
    getattr(model, PREPARE_CACHE)(GenerationConfig(), prepared, GenerationMode.GREEDY_SEARCH, 1, tokens)
    for cache in prepared.values():
        if isinstance(cache, EncoderDecoderCache):
            return [cache.self_attention_cache, cache.cross_attention_cache]
        if isinstance(cache, DynamicCache):
            return [cache]
    return []


def without_modules(model_class: type[GenerationMixin], config: Any) -> GenerationMixin:
    """Makes a model of that class with a configuration but no modules."""
    empty: Any = model_class.__new__(model_class)
    torch.nn.Module.__init__(empty)
    empty.config = config
    return cast(GenerationMixin, empty)


def load_config(name: str) -> Any:
    """Loads the configuration of a model: from a folder, by a model type with all its defaults, or from the hub.

    Reads nothing else and runs no code from the hub. ConfigError where there is none.
    """
    try:
        if name in CONFIG_MAPPING and not Path(name).exists():
            return AutoConfig.for_model(name)
        return AutoConfig.from_pretrained(name)
    except Exception as error:  # any error: each configuration checks itself in its own way
        if "trust_remote_code" in str(error):
            raise ConfigError(
                f"the configuration of {name} is code of its own, which this command does not run: give the model type "
                "that it is based on"
            ) from error
        raise ConfigError(
            f"{name!r} is no model whose configuration can be read: it is neither a folder with a config.json, nor a "
            f"model type that transformers {transformers.__version__} knows, nor found on the hub "
            f"({' '.join(str(error).split())})"
        ) from error


def peek_config(name: Any, given: Mapping[str, Any]) -> Any:
    """Returns the configuration that `from_pretrained(name, **given)` will find; runs no code from the hub.

    None where it is not a plain file, or cannot be read: `from_pretrained` raises the reason then.
    """
    config = given.get("config")
    if isinstance(config, transformers.PreTrainedConfig):
        return config
    if given.get("gguf_file") is not None:
        return None
    options = {key: given[key] for key in _HUB if key in given}
    try:
        return AutoConfig.from_pretrained(name if config is None else config, trust_remote_code=False, **options)
    except Exception:  # any error: each configuration checks itself in its own way
        return None


def quantization(config: Any, given: Mapping[str, Any]) -> bool:
    """Are the weights that `from_pretrained(**given)` loads quantized, by it or in the checkpoint of `config`?"""
    configs = (config, _text(config)) if config is not None else ()
    settings = (given.get("quantization_config"), *(getattr(part, "quantization_config", None) for part in configs))
    return any(setting is not None for setting in settings)


def causal_model(config: Any) -> Any:
    """Returns the default class for `from_pretrained`: the one that the checkpoint of `config` (None: not known) was
    saved from, if transformers has it and it generates text, else AutoModelForCausalLM."""
    of_its_own = getattr(config, "auto_map", None)
    return (None if of_its_own else _named_class(config)) or transformers.AutoModelForCausalLM


def _named_class(config: Any) -> type | None:
    """Returns the class that the weights of `config` were saved from, None where it does not generate text."""
    for name in getattr(config, "architectures", None) or ():
        named = getattr(transformers, name, None)
        if isinstance(named, type) and issubclass(named, GenerationMixin):
            return named
    return None


def settings_of(config: Any) -> dict[str, Any]:
    """Returns the settings of `config` that affect results, without those about its origin."""
    if not isinstance(config, transformers.PreTrainedConfig):
        return {}
    plain: dict[str, Any] = config.to_dict()
    left_out = ("_name_or_path", "_commit_hash", "transformers_version", "architectures")
    return {name: value for name, value in plain.items() if name not in left_out} | {"attention": attention_of(config)}


def attention_of(config: Any) -> str:
    """Returns the implementation of attention; for one of batches, the ordinary one with the same arithmetic."""
    return str(getattr(config, "_attn_implementation", None)).removeprefix(_PAGED)


def checkpoint_folder(model: Any) -> Path | None:
    """Returns the folder that `from_pretrained` loaded the model from, None where it is not known; uses no network."""
    config = getattr(model, "config", None)
    name = getattr(model, "name_or_path", "") or getattr(config, "_name_or_path", "")
    if not isinstance(name, str) or not name:
        return None
    if Path(name).is_dir():
        return Path(name)
    try:
        path = try_to_load_from_cache(name, "config.json", revision=getattr(config, "_commit_hash", None))
    except ValueError:  # no name of the hub's
        return None
    return Path(path).parent if isinstance(path, str) else None


def loaded_names(model: Any, keys: Iterable[str]) -> dict[str, str]:
    """Returns, key of a checkpoint -> the parameter or buffer that `from_pretrained` loads it into, alone or with
    others.

    A loaded model has the renamings that were used; for others those of its class hold. Unused keys are left out.
    """
    transforms = getattr(model, "_weight_conversions", None)
    if transforms is None:
        transforms = get_model_conversion_mapping(model) if isinstance(model, transformers.PreTrainedModel) else ()
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    members = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    known = {name: True for name, _ in members}
    prefix = getattr(model, "base_model_prefix", None)
    names = {}
    for key in keys:
        name, _ = rename_source_key(key, renamings, converters, prefix, known)
        if name not in known:
            name, _ = rename_source_key(key, [], [], prefix, known)
        if name in known:
            names[key] = name
    return names


def generating_class(config: Any) -> type | None:
    """Returns the class that generates text with this configuration, None where transformers has none."""
    if (named := _named_class(config)) is not None:
        return named
    for mapping in reversed(_MAPPINGS) if getattr(config, "is_encoder_decoder", False) else _MAPPINGS:
        if type(config) in mapping:
            classes = mapping[type(config)]
            return classes[0] if isinstance(classes, tuple) else classes
    return None


def run_without_values(model_class: type[GenerationMixin], config: Any) -> list[DynamicCache]:
    """Runs one token on the meta device and returns the caches: their shapes are right, but they have no values.

    Raises the model's errors where it cannot run so.
    """
    config = copy.deepcopy(config)
    config._experts_implementation = "batched_mm"  # the one that does not depend on values
    with torch.device("meta"), torch.no_grad():
        model: Any = cast(Any, model_class)(config).eval()
        token = torch.zeros((1, 1), dtype=torch.int64)
        caches = prepared_caches(model, 2)
        given: dict[str, Any] = {"use_cache": True}
        if len(caches) == 2:
            given |= {cache_name(model): EncoderDecoderCache(*caches), "decoder_input_ids": token}
            given |= _encoded(model, token)
        else:
            given |= {cache_name(model): caches[0], "input_ids": token}
        with without_values():
            model(**given)
    return caches


def _encoded(model: Any, token: torch.Tensor) -> dict[str, Any]:
    """Returns the inputs for the encoder, or where it reads no tokens its output."""
    if model.main_input_name == "input_ids":
        return {"input_ids": token}
    config = getattr(model.config, "encoder", model.config)
    return {"encoder_outputs": BaseModelOutput(last_hidden_state=torch.zeros(1, 1, config.hidden_size))}


def without_values() -> AbstractContextManager[Any]:
    """A `with` block in which models run on the meta device: what reads a value gets an arbitrary one."""
    return _AnyAnswer()  # type: ignore[no-untyped-call]


class _AnyAnswer(TorchDispatchMode):
    """Gives a model that reads a missing value an answer: a number is 1, and one element is not zero."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default:
            return 1
        if function is torch.ops.aten.nonzero.default:
            return torch.zeros((1, args[0].dim()), dtype=torch.int64, device="meta")
        return function(*args, **(kwargs or {}))


def one_shape(config: Any) -> bool:
    """Do the keys and values of all layers have one shape, as far as `config` tells?"""
    text = _text(config)
    if getattr(text, "is_heterogeneous", False):  # reading one of these would be an error
        return False
    return not any(isinstance(getattr(text, name, None), list | tuple) for name in _SHAPES)


def longest_sequence(config: Any) -> int:
    """Returns the tokens of the model's longest sequence; 0 where its configuration does not have it."""
    lengths = (getattr(_text(config), name, None) for name in _POSITIONS)
    return max((value for value in lengths if isinstance(value, int)), default=0)


def position_table(model: torch.nn.Module) -> int | None:
    """Returns the number of learned position embeddings, beyond which the model fails; None where it computes them."""
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if isinstance(module, torch.nn.Embedding) and (last == "wpe" or "position" in last):
            return module.num_embeddings - int(getattr(module, "offset", 0))
    return None


def cropped(length: int, tokens_to_remove: int) -> int:
    """Returns the tokens that are left of `length` after `crop(tokens_to_remove)`, which is negative.

    A positive argument once was the length to keep; whether that works, warns or raises is left to transformers.
    """
    if tokens_to_remove <= 0:
        return max(0, length + tokens_to_remove)
    stock = DynamicLayer()
    tokens = torch.empty((1, 1, length, 1), device="meta")
    stock.update(tokens, tokens)
    stock.crop(tokens_to_remove)
    return stock.get_seq_length()


def _text(config: Any) -> Any:
    return config.get_text_config(decoder=True)


def eager(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Are these two plain tensors, computed eagerly: with no compiler, tracer or CUDA graph capture, no gradients, no
    tangents and no transform of `torch.func`?"""
    return not (
        is_dynamo_compiling()
        or torch.compiler._is_compiling_flag  # `is_compiling`, in one call
        or type(first) is not torch.Tensor
        or type(second) is not torch.Tensor
        or _is_tracing()
        or (torch.is_grad_enabled() and (first.requires_grad or second.requires_grad))
        or _transformed(first)
        or _transformed(second)
        or (forward_ad._current_level >= 0 and _has_tangents(first, second))
        or (first.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def _has_tangents(*tensors: torch.Tensor) -> bool:
    return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)


_is_tracing = torch._C._is_tracing
_transformed = torch._C._functorch.is_functorch_wrapped_tensor
