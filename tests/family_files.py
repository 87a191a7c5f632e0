"""Tiny checkpoints of other families, made from DeepSpec files as their formats are described, never by our writers."""

import torch

from tiny import V

LAYER_KEYS = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "attention_bias", "max_position_embeddings",
    "rope_parameters", "layer_types",
)  # fmt: skip
HEAD_KEYS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
SHARED = ("embed_tokens.weight", "lm_head.weight")


def without(table, *names):
    return {key: value for key, value in table.items() if key not in names}


def some_ids(count: int = 24, seed: int = 3) -> torch.Tensor:
    """Ascending token ids, not the first ones."""
    return torch.randperm(V, generator=torch.Generator().manual_seed(seed))[:count].sort().values


def speculators_files(config, tensors, ids=None, layers=None, **keys):
    """The speculators form: blocks in a nest, taps as entries of `hidden_states`, `ids` [V_draft] of a small head.

    layers: further keys of the nest. A key given as None is left out.
    """
    kind = "dspark" if config["markov_rank"] else "dflash"
    gamma = config["block_size"]
    raw = {
        "architectures": ["DSparkDraftModel" if kind == "dspark" else "DFlashDraftModel"],
        "speculators_model_type": kind, "speculators_version": "0.5.0",
        "transformer_layer_config": {key: config[key] for key in LAYER_KEYS} | (layers or {}),
        "aux_hidden_state_layer_ids": [i + 1 for i in config["target_layer_ids"]],
        "block_size": gamma, "mask_token_id": config["mask_token_id"], "sample_from_anchor": True,
        "draft_vocab_size": config["vocab_size"], "target_hidden_size": None, "dtype": "float32",
        "speculators_config": {
            "algorithm": kind, "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": gamma}],
            "verifier": {"name_or_path": "some/target", "architectures": ["Qwen3ForCausalLM"]},
        },
    } | {key: config[key] for key in HEAD_KEYS if key in config}  # fmt: skip
    tensors = dict(tensors)
    if ids is not None:
        raw["draft_vocab_size"] = len(ids)
        for name in ("lm_head.weight", "markov_head.markov_w2.weight"):
            if name in tensors:
                tensors[name] = tensors[name][ids].contiguous()
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(config["vocab_size"], dtype=torch.bool).index_fill(0, ids, True)
    return {key: value for key, value in (raw | keys).items() if value is not None}, tensors


NESTED = ("mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type", "enable_confidence_head",
          "confidence_head_with_markov")  # fmt: skip
CODE = {"auto_map": {"AutoModel": "dflash.DFlashDraftModel"}}


def zlab_files(config, tensors, nested_block_size=False, nest=None, **keys):
    """z-lab's form: taps and mask in `dflash_config`, `block_size` at the top or there, no embeddings and head."""
    table = {"mask_token_id": config["mask_token_id"], "target_layer_ids": config["target_layer_ids"]} | (nest or {})
    raw = without(config, *NESTED, "num_anchors", "block_size") | CODE | {"architectures": ["DFlashDraftModel"]}
    (table if nested_block_size else raw)["block_size"] = config["block_size"]
    raw["dflash_config"] = {key: value for key, value in table.items() if value is not None}
    return {key: value for key, value in (raw | keys).items() if value is not None}, without(tensors, *SHARED)


def specforge_files(config, tensors, nest=None, prefix="", **keys):
    """SpecForge's form: heads and taps in `dflash_config`, `block_size` at the top, no embeddings and head."""
    table = {"projector_type": "dspark", "attention_mode": "full", "confidence_head_alpha": 1.0}
    table |= {key: config[key] for key in NESTED if key in config} | (nest or {})
    raw = without(config, *NESTED, "num_anchors") | {"architectures": ["DSparkDraftModel"]}
    raw |= {"auto_map": {"AutoModel": "dspark.DSparkDraftModel"}, "dflash_config": table}
    renamed = {(prefix if "head." in name and "lm_head" not in name else "") + name: t for name, t in tensors.items()}
    return {key: value for key, value in (raw | keys).items() if value is not None}, without(renamed, *SHARED)


TORCHSPEC_NAMES = {"fc.": "context_proj.", "hidden_norm.": "context_norm.", "norm.": "final_norm.",
                   "layers.0.": "midlayer."}  # fmt: skip


def torchspec_files(config, tensors, internal=False, **keys):
    """TorchSpec's form: flat, no block size, `num_target_layers` counts taps; tensors perhaps by internal names."""
    raw = without(config, "block_size", "num_anchors") | {
        "architectures": ["DFlashDraftModel"], "model_type": "dflash", "target_hidden_size": 64,
        "num_target_layers": len(config["target_layer_ids"]), "target_num_hidden_layers": config["num_target_layers"],
    }  # fmt: skip
    if "markov_head_type" in raw:
        raw["markov_head_type"] = {"vanilla": "classical"}.get(raw["markov_head_type"], raw["markov_head_type"])
    names = {name: name for name in tensors}
    for ours, theirs in TORCHSPEC_NAMES.items() if internal else ():
        names |= {name: theirs + name.removeprefix(ours) for name in tensors if name.startswith(ours)}
    tensors = {names[name]: tensor for name, tensor in tensors.items()}
    return {key: value for key, value in (raw | keys).items() if value is not None}, without(tensors, "lm_head.weight")


def muse_files(config, tensors, **keys):
    """transformers' own form: `encoder.*`, no key of the vocabulary's size, sliding layers by default."""
    kept = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
            "head_dim", "hidden_act", "rms_norm_eps", "max_position_embeddings", "rope_parameters", "block_size",
            "mask_token_id", "target_layer_ids", "dtype")  # fmt: skip
    raw = {key: config[key] for key in kept} | {
        "architectures": ["MuseGlimmerAssistantModel"], "model_type": "muse_glimmer_assistant",
        "layer_types": ["sliding_attention"] * config["num_hidden_layers"], "sliding_window": 2048,
    }  # fmt: skip
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    tensors = {names.get(name, name): tensor for name, tensor in without(tensors, *SHARED).items()}
    return {key: value for key, value in (raw | keys).items() if value is not None}, tensors


def interleave_heads(config, tensors):
    """The same draft for rotary pairs (2i, 2i+1): rows of queries, keys and their norms in another order."""
    half, dim = config["head_dim"] // 2, config["head_dim"]
    order = torch.arange(dim).view(2, half).T.flatten()  # entry 2i was i, entry 2i + 1 was i + half
    moved = dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            moved[name] = tensor.view(-1, dim, tensor.shape[1])[:, order].reshape(tensor.shape).contiguous()
        elif name.endswith(("q_norm.weight", "k_norm.weight")):
            moved[name] = tensor[order].contiguous()
    return moved
