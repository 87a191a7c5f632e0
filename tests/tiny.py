"""Tiny targets and drafts for the tests (CPU, float32).

Drafts are written as DeepSpec folders (config.json + model.safetensors) and read back with the public loader, so the
loader is in the path of every test.

* `perm_target()` (T-perm): greedy continuation of t is `NEXT[t]`, one cycle over 1..62; 0 never comes, 63 is the mask.
* `random_target(family)` (T-rand): random weights, greedy text that does not loop at once.
* `table_target(table)`: the logits after token t are exactly `table[t]`.
* `perm_draft()` (D-full), `bad_draft()` (D-bad), `scripted_draft()` (D-scripted), `slot0_draft()` (D-slot0),
  `random_draft(target)`, `markov_draft(target, table)` (base logits zero, Markov logits after t are `table[t]`).
"""

import functools
import json
import random
import string
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

V = 64
MASK = 63
TAPS = (0, 2, 4)
NEVER = -1e4  # a confidence logit that is sigmoid 0


def cycle(seed: int = 0) -> list[int]:
    """Next-token table: one cycle through 1..62; 0 and the mask map to themselves."""
    order = list(range(1, 63))
    random.Random(seed).shuffle(order)
    table = list(range(V))
    for here, there in zip(order, order[1:] + order[:1], strict=True):
        table[here] = there
    return table


NEXT = cycle()


def chain(token: int, length: int, table: list[int] | None = None) -> list[int]:
    """The `length` tokens that follow `token` in T-perm."""
    tokens = []
    for _ in range(length):
        token = (table or NEXT)[token]
        tokens.append(token)
    return tokens


# ---- targets


SHAPE = {
    "model_type": "qwen3", "vocab_size": V, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512,
    "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
FAMILIES = {
    "qwen3": {},
    "qwen3_sliding": {
        "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 0,
        "layer_types": ("sliding_attention", "full_attention") * 3,
    },
    "llama": {"model_type": "llama"},
    "mistral": {"model_type": "mistral", "sliding_window": 6},
    "gemma2": {"model_type": "gemma2", "sliding_window": 6},
    "gemma3_text": {"model_type": "gemma3_text", "sliding_window": 6},
    "gpt_neox": {"model_type": "gpt_neox"},
    "gpt2": {"model_type": "gpt2"},
    "lfm2": {"model_type": "lfm2", "layer_types": ("conv", "full_attention") * 3, "conv_L_cache": 3},
    "qwen3_next": {
        "model_type": "qwen3_next", "layer_types": ("linear_attention", "full_attention") * 3, "num_experts": 2,
        "num_experts_per_tok": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    },
}  # fmt: skip


def one_hot_table(table: list[int], scale: float = 10.0) -> torch.Tensor:
    """[V, V] logits whose row t is `scale` at `table[t]`."""
    logits = torch.zeros(len(table), len(table))
    logits[torch.arange(len(table)), torch.tensor(table)] = scale
    return logits


def table_target(table: torch.Tensor, *, layers: int = 6, mask: int | None = MASK, **overrides) -> Qwen3ForCausalLM:
    """Target whose logits after token t are `table[t]` ([V, V]) whatever came before. A given `mask` row is zero."""
    size = table.shape[0]
    torch.manual_seed(0)
    shape = {"vocab_size": size, "hidden_size": size, "num_hidden_layers": layers}
    model = Qwen3ForCausalLM(Qwen3Config(**(SHAPE | shape | overrides)))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        if mask is not None:
            model.model.embed_tokens.weight[mask] = 0
        # The final RMS norm turns a one-hot row into sqrt(size) times itself.
        model.lm_head.weight.copy_(table.T / (1 / (1 / size + model.config.rms_norm_eps)) ** 0.5)
    return model.eval()


@functools.cache
def perm_target(layers: int = 6, dtype: torch.dtype = torch.float32) -> Qwen3ForCausalLM:
    """T-perm."""
    table = one_hot_table(NEXT, 80.0)
    table[[0, MASK]] = 0
    return table_target(table, layers=layers).to(dtype)


@functools.cache
def random_target(family: str = "qwen3", *, layers: int = 6, dtype: torch.dtype = torch.float32, seed: int = 0,
                  attention: str | None = None, **extra):  # fmt: skip
    """T-rand of a `FAMILIES` entry with `attention` implementation; `extra` are config fields (hashable)."""
    settings = SHAPE | {"num_hidden_layers": layers} | FAMILIES[family] | extra
    if "layer_types" in settings:
        settings["layer_types"] = list(settings["layer_types"])[:layers]
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings), attn_implementation=attention)
    return randomize(model).to(dtype).eval()


@torch.no_grad()
def randomize(model):
    """Weights large enough that the greedy text does not loop at once."""
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, 1.0 if "embed" in name or "wte" in name else 2.0 / parameter.shape[-1] ** 0.5)
        elif "norm" in name or "ln_" in name:
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def llava(vision_layers: int = 1):
    """A multimodal model whose text tower is a tiny Qwen3 of six layers, at `model.language_model`."""
    text = {name: value for name, value in SHAPE.items() if name != "model_type"}
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": vision_layers, "num_attention_heads": 1}
    vision = CLIPVisionConfig(image_size=4, patch_size=2, **sizes)
    torch.manual_seed(0)
    config = LlavaConfig(vision_config=vision, text_config=Qwen3Config(**text), image_token_index=62)
    model = LlavaForConditionalGeneration(config).eval()
    for name, parameter in model.named_parameters():
        if "language_model" in name or "lm_head" in name:
            parameter.data.normal_(1 if "norm" in name else 0, 0.3)
    return model


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """64 tokens without spaces between them: letters, and for ids 52..61 a digit twice."""
    words = [*string.ascii_letters, *(2 * digit for digit in string.digits), "_", "#"]
    model = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="_"))
    model.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    model.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=model)


# ---- drafts: DeepSpec folders


def draft_config(*, gamma: int = 4, layers: int = 1, taps=TAPS, rank: int = 8, head: str = "vanilla",
                 confidence: str | None = "markov", vocab: int = V, hidden: int = 64, mask: int | None = None,
                 **overrides) -> dict:  # fmt: skip
    """config.json of a DeepSpec Qwen3-style draft; `confidence` is "markov", "hidden" or None."""
    config = {
        "architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "dtype": "float32", "vocab_size": vocab,
        "hidden_size": hidden, "intermediate_size": 48, "num_hidden_layers": layers, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_bias": False,
        "max_position_embeddings": 512, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "layer_types": ["full_attention"] * layers, "tie_word_embeddings": False, "num_target_layers": 6,
        "num_anchors": 4, "block_size": gamma, "target_layer_ids": list(taps), "markov_rank": rank,
        "mask_token_id": vocab - 1 if mask is None else mask, "enable_confidence_head": confidence is not None,
    }  # fmt: skip
    if rank:
        config |= {"markov_head_type": head}
    if confidence is not None:
        config["confidence_head_with_markov"] = confidence == "markov"
    return config | overrides


def draft_tensors(
    config: dict, *, target_hidden: int = 64, seed: int = 1, scale: float = 1.0
) -> dict[str, torch.Tensor]:
    """Random tensors with DeepSpec's names and shapes; matrices keep the size of their input times `scale`."""
    h, vocab, rank, dim = config["hidden_size"], config["vocab_size"], config["markov_rank"], config["head_dim"]
    q, kv, mlp = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim, config["intermediate_size"]
    shapes = {
        "embed_tokens.weight": (vocab, h), "lm_head.weight": (vocab, h),
        "fc.weight": (h, len(config["target_layer_ids"]) * target_hidden), "hidden_norm.weight": (h,),
        "norm.weight": (h,),
    }  # fmt: skip
    for i in range(config["num_hidden_layers"]):
        attention, feed_forward = f"layers.{i}.self_attn.", f"layers.{i}.mlp."
        shapes |= {
            f"layers.{i}.input_layernorm.weight": (h,), f"layers.{i}.post_attention_layernorm.weight": (h,),
            attention + "q_proj.weight": (q, h), attention + "o_proj.weight": (h, q),
            attention + "k_proj.weight": (kv, h), attention + "v_proj.weight": (kv, h),
            attention + "q_norm.weight": (dim,), attention + "k_norm.weight": (dim,),
            feed_forward + "gate_proj.weight": (mlp, h), feed_forward + "up_proj.weight": (mlp, h),
            feed_forward + "down_proj.weight": (h, mlp),
        }  # fmt: skip
    if rank:
        shapes |= {"markov_head.markov_w1.weight": (vocab, rank), "markov_head.markov_w2.weight": (vocab, rank)}
        if config["markov_head_type"] == "gated":
            shapes |= {"markov_head.gate_proj.weight": (rank, h + rank), "markov_head.gate_proj.bias": (rank,)}
        if config["markov_head_type"] == "rnn":
            shapes |= {
                "markov_head.joint_proj.weight": (3 * rank, 2 * rank + h),
                "markov_head.joint_proj.bias": (3 * rank,),
            }
    if config["enable_confidence_head"]:
        width = h + (rank if config["confidence_head_with_markov"] else 0)
        shapes |= {"confidence_head.proj.weight": (1, width), "confidence_head.proj.bias": (1,)}
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        value = torch.randn(shape, generator=generator)
        if "norm" in name:
            tensors[name] = 1 + 0.3 * value
        else:
            is_table = name in ("embed_tokens.weight", "markov_head.markov_w1.weight") or len(shape) == 1
            tensors[name] = scale * value / (1.0 if is_table else shape[-1] ** 0.5)
    return tensors


def write_draft(folder, config: dict, tensors: dict[str, torch.Tensor]) -> Path:
    """Write a DeepSpec folder and return its path."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def load_draft(config: dict, tensors: dict[str, torch.Tensor], **kwargs):
    """The draft as `DSparkForCausalLM.from_pretrained` gives it for a temporary folder with these contents."""
    from hf_dspark import DSparkForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        return DSparkForCausalLM.from_pretrained(write_draft(folder, config, tensors), **kwargs).eval()


def random_draft(target=None, *, seed: int = 1, scale: float = 1.0, **settings):
    """A random draft that fits `target` (default T-perm's shape)."""
    width, vocab = (64, V) if target is None else (target.config.hidden_size, target.config.vocab_size)
    config = draft_config(**({"vocab": vocab} | settings))
    return load_draft(config, draft_tensors(config, target_hidden=width, seed=seed, scale=scale))


def markov_tensors(config: dict, table: torch.Tensor, confidence: torch.Tensor | None = None, **shape):
    """Tensors of a draft with zero hidden states whose logits after token t are exactly `table[t]` ([V, V])."""
    tensors = draft_tensors(config, **shape)
    vocab = table.shape[0]
    tensors["norm.weight"].zero_()
    tensors["lm_head.weight"].zero_()
    tensors["markov_head.markov_w1.weight"] = torch.eye(vocab)
    tensors["markov_head.markov_w2.weight"] = table.T.clone()
    if confidence is not None:
        tensors["confidence_head.proj.weight"] = torch.cat((torch.zeros(config["hidden_size"]), confidence))[None]
        tensors["confidence_head.proj.bias"] = torch.zeros(1)
    return tensors


def markov_draft(table: torch.Tensor, *, confidence: torch.Tensor | None = None, gamma: int = 4,
                 target_hidden: int = 64, **settings):  # fmt: skip
    """Draft with q(· | t) = softmax(table[t]) and, if given, confidence logit `confidence[t]` ([V]) after token t."""
    vocab = table.shape[0]
    kind = None if confidence is None else "markov"
    config = draft_config(
        gamma=gamma, vocab=vocab, rank=vocab, confidence=kind, hidden=settings.pop("hidden", target_hidden), **settings
    )
    return load_draft(config, markov_tensors(config, table, confidence, target_hidden=target_hidden))


def guided_files(table: torch.Tensor, *, gamma: int = 4, seed: int = 1, target_hidden: int = 64, **settings):
    """(config, tensors) of a random draft led by a Markov table: accepted, yet dependent on context."""
    vocab = table.shape[0]
    config = draft_config(**({"vocab": vocab, "rank": vocab, "gamma": gamma} | settings))
    tensors = draft_tensors(config, seed=seed, target_hidden=target_hidden)
    tensors["markov_head.markov_w1.weight"] = torch.eye(vocab)
    tensors["markov_head.markov_w2.weight"] = table.T.clone()
    return config, tensors


def text_table(text: list[int], scale: float = 40.0, vocab: int = V) -> torch.Tensor:
    """[V, V] logits that lead from each token of `text` to the one that followed it last."""
    table = torch.zeros(vocab, vocab)
    for here, there in zip(text, text[1:], strict=False):
        table[here] = 0
        table[here, there] = scale
    return table


def set_table(draft, table: torch.Tensor) -> None:
    """Give a `markov_draft` other proposals without going through a file again."""
    with torch.no_grad():
        draft.markov_head.markov_w2.weight.copy_(table.T)


def perm_draft(gamma: int = 4, **settings):
    """D-full: proposes T-perm's whole chain."""
    return markov_draft(one_hot_table(NEXT), gamma=gamma, **settings)


def bad_draft(gamma: int = 4, **settings):
    """D-bad: another cycle without a common edge, every draft rejected."""
    return markov_draft(one_hot_table(wrong_table()), gamma=gamma, **settings)


def wrong_table() -> list[int]:
    """A next-token table that differs from `NEXT` at every token."""
    return [NEXT[NEXT[t]] if t not in (0, MASK) else 1 for t in range(V)]


def scripted_table(pattern: list[int], anchor: int, gamma: int = 4) -> list[int]:
    """T-perm's table, damaged so that rounds from `anchor` on accept exactly `pattern` (entries 0..gamma) drafts."""
    table = list(NEXT)
    for accepted in pattern:
        walk = [anchor, *chain(anchor, gamma + 1)]
        if accepted < gamma:
            table[walk[accepted]] = wrong_table()[walk[accepted]]
        anchor = walk[accepted + 1]
    return table


def scripted_draft(pattern: list[int], anchor: int, gamma: int = 4, **settings):
    """D-scripted: walking T-perm's cycle from `anchor`, rounds accept `pattern` drafts in turn."""
    return markov_draft(one_hot_table(scripted_table(pattern, anchor, gamma)), gamma=gamma, **settings)


def slot0_files(gamma: int = 4) -> tuple[dict, dict[str, torch.Tensor]]:
    """D-slot0 as (config, tensors): the anchor's own slot proposes T-perm's next token, mask slots propose 0."""
    config = draft_config(gamma=gamma, rank=0, confidence=None)
    tensors = draft_tensors(config)
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name].zero_()
    target = perm_target()
    tensors["embed_tokens.weight"] = target.model.embed_tokens.weight.detach().clone()
    tensors["lm_head.weight"] = target.lm_head.weight.detach().clone()
    tensors["norm.weight"] = torch.ones(64)
    return config, tensors


def slot0_draft(gamma: int = 4, **kwargs):
    """D-slot0: anchor-first read-out accepts exactly one draft a round, 1+N accepts none."""
    return load_draft(*slot0_files(gamma), **kwargs)
