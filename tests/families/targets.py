"""Families of targets as tiny random models, and what people feed them: `FAMILIES` by the name in docs/targets.md."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

import tiny

VOCAB, LAYERS, IMAGE, START, END = 256, 4, 250, 251, 252
PROMPT = [5, 9, 111, 3, 8, 121, 33, 77, 200]
ROWS = [PROMPT, [7, 40], [3, 30, 131, 17, 202]]
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
    "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
PATCHES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


@dataclass(frozen=True)
class Family:
    """`settings` of the config on top of `SHAPE`; an image family has settings for its towers and makes `inputs`."""

    model_type: str
    settings: dict[str, Any] = field(default_factory=dict)
    inputs: Callable[[], dict[str, Any]] | None = None
    without: tuple[str, ...] = ()  # keys of SHAPE that the config does not take

    def build(self) -> PreTrainedModel:
        torch.manual_seed(0)
        settings = dict(self.settings)
        if self.inputs is None:
            shape = {name: value for name, value in SHAPE.items() if name not in self.without}
            config = AutoConfig.for_model(self.model_type, **(shape | settings))
            model = AutoModelForCausalLM.from_config(config)
        else:
            config = AutoConfig.for_model(self.model_type, **settings)
            model = AutoModelForImageTextToText.from_config(config)
        return tiny.randomize(model).float().eval()


def cycle(*kinds: str) -> list[str]:
    return [kinds[i % len(kinds)] for i in range(LAYERS)]


SLIDING = {"sliding_window": 6, "layer_types": cycle("sliding_attention", "full_attention")}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
MLA = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
       "head_dim": 8, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
       "topk_group": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1}  # fmt: skip
MAMBA2 = {"mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_expand": 2,
          "mamba_chunk_size": 8}  # fmt: skip
HYBRID = {"layer_types": cycle("linear_attention", "full_attention"), **DELTA}

TEXT = {
    "Llama": Family("llama"),
    "Mistral, sliding window": Family("mistral", {"sliding_window": 6}),
    "Ministral": Family("ministral", SLIDING),
    "Mixtral": Family("mixtral", {"num_local_experts": 4}),
    "Qwen2": Family("qwen2"),
    "Qwen2-MoE": Family("qwen2_moe", EXPERTS | {"shared_expert_intermediate_size": 16}),
    "Qwen3": Family("qwen3"),
    "Qwen3, sliding window": Family("qwen3", {"use_sliding_window": True, "max_window_layers": 0} | SLIDING),
    "Qwen3-MoE": Family("qwen3_moe", EXPERTS),
    "Qwen3-Next": Family("qwen3_next", EXPERTS | {"shared_expert_intermediate_size": 16} | HYBRID),
    "Qwen3.5": Family("qwen3_5_text", HYBRID),
    "Qwen3.5-MoE": Family("qwen3_5_moe_text", EXPERTS | {"shared_expert_intermediate_size": 16} | HYBRID),
    "Gemma": Family("gemma"),
    "Gemma 2, soft-cap": Family("gemma2", SLIDING | {"query_pre_attn_scalar": 16}),
    "Gemma 3": Family("gemma3_text", SLIDING | {"query_pre_attn_scalar": 16}),
    "Gemma 3n": Family("gemma3n_text", SLIDING | {
        "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0,
        "laurel_rank": 8, "activation_sparsity_pattern": [0.0] * LAYERS}),
    "Gemma 4, mixed windows": Family("gemma4_text", SLIDING | {
        "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8, "global_head_dim": 16}),
    "Gemma 4, shared keys and values": Family("gemma4_text", SLIDING | {
        "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8, "global_head_dim": 16,
        "num_kv_shared_layers": 2}),
    "Phi": Family("phi", {"partial_rotary_factor": 0.5}, without=("head_dim",)),
    "Phi-3": Family("phi3", {"pad_token_id": 0}),
    "Phi-MoE": Family("phimoe", {"num_local_experts": 4}),
    "OLMo": Family("olmo"),
    "OLMo 2": Family("olmo2"),
    "OLMo 3": Family("olmo3", SLIDING),
    "OLMoE": Family("olmoe", EXPERTS),
    "OLMo-Hybrid": Family("olmo_hybrid", HYBRID),
    "GPT-NeoX": Family("gpt_neox"),
    "GPT-2": Family("gpt2"),
    "GPT-J": Family("gptj", {"rotary_dim": 8}),
    "OPT": Family("opt", {"ffn_dim": 32, "word_embed_proj_dim": 64}),
    "Bloom": Family("bloom"),
    "MPT": Family("mpt", {"d_model": 64, "n_heads": 4, "n_layers": LAYERS}),
    "Falcon, rotary": Family("falcon", {"alibi": False}, without=("head_dim",)),
    "Falcon, ALiBi": Family("falcon", {"alibi": True}, without=("head_dim",)),
    "StableLM": Family("stablelm"),
    "StarCoder 2": Family("starcoder2", {"sliding_window": 6}),
    "Granite": Family("granite"),
    "Granite-MoE": Family("granitemoe", {"num_local_experts": 4}),
    "Granite-MoE-Hybrid": Family("granitemoehybrid", MAMBA2 | {
        "num_local_experts": 4, "layer_types": cycle("mamba", "attention"), "shared_intermediate_size": 16}),
    "Cohere": Family("cohere"),
    "Cohere 2": Family("cohere2", SLIDING),
    "SmolLM3": Family("smollm3"),
    "GLM": Family("glm"),
    "GLM-4": Family("glm4"),
    "GLM-4-MoE": Family("glm4_moe", {k: v for k, v in MLA.items() if "lora" not in k}),
    "DeepSeek-V2": Family("deepseek_v2", MLA),
    "DeepSeek-V3": Family("deepseek_v3", MLA),
    "DeepSeek-V4": Family("deepseek_v4", {"n_routed_experts": 4, "num_experts_per_tok": 2, "qk_rope_head_dim": 8}),
    "Kimi-Linear": Family("kimi_linear", MLA | {
        "num_experts": 4, "layer_types": cycle("linear_attention", "full_attention")}),
    "gpt-oss, attention sinks": Family("gpt_oss", SLIDING | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "Exaone 4": Family("exaone4", SLIDING),
    "Ernie 4.5": Family("ernie4_5"),
    "Hunyuan": Family("hunyuan_v1_dense"),
    "Seed-OSS": Family("seed_oss"),
    "Apertus": Family("apertus"),
    "Nemotron": Family("nemotron"),
    "Nemotron-H": Family("nemotron_h", MAMBA2 | {
        "layers_block_type": cycle("mamba", "attention"), "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 1,
        "ssm_state_size": 8, "chunk_size": 8}),
    "Llama 4": Family("llama4_text", {
        "num_local_experts": 2, "intermediate_size_mlp": 32, "attention_chunk_size": 8,
        "layer_types": cycle("chunked_attention", "full_attention")}),
    "LFM2": Family("lfm2", {"layer_types": cycle("conv", "full_attention"), "conv_L_cache": 3}),
    "MiniMax-M2": Family("minimax_m2", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "MiniMax-Text": Family("minimax", {"num_local_experts": 4, "block_size": 8}),
    "Jamba": Family("jamba", {
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
        "num_experts": 2, "num_experts_per_tok": 1, "mamba_d_state": 8, "mamba_dt_rank": 4,
        "use_mamba_kernels": False}, without=("head_dim",)),
    "Bamba": Family("bamba", MAMBA2 | {"attn_layer_indices": [1, 3]}),
    "Falcon-H1": Family("falcon_h1", MAMBA2 | {"mamba_d_ssm": 128}),
    "Zamba2": Family("zamba2", {
        "layers_block_type": ["linear_attention", "hybrid"] * 2, "mamba_d_state": 8, "mamba_ngroups": 1,
        "n_mamba_heads": 8, "mamba_headdim": 16, "num_mem_blocks": 1, "use_mem_rope": True, "chunk_size": 8,
        "hybrid_layer_ids": [1, 3], "attention_head_dim": 32}, without=("head_dim",)),
    "RecurrentGemma": Family("recurrent_gemma", {"lru_width": 64, "attention_window_size": 6,
                                                 "block_types": ["recurrent", "attention"]}),
    "Mamba": Family("mamba", {"state_size": 8, "time_step_rank": 4}, without=("head_dim",)),
    "Mamba 2": Family("mamba2", {"state_size": 8, "num_heads": 8, "head_dim": 16, "n_groups": 1, "chunk_size": 8}),
    "RWKV": Family("rwkv", {"attention_hidden_size": 64}),
    "BERT as a decoder": Family("bert", {"is_decoder": True, "pad_token_id": 0}),
    "BERT": Family("bert", {"pad_token_id": 0}),
    "RoBERTa as a decoder": Family("roberta", {"is_decoder": True, "pad_token_id": 1}),
    "ERNIE": Family("ernie", {"pad_token_id": 0}),
    "ERNIE as a decoder": Family("ernie", {"is_decoder": True, "pad_token_id": 0}),
    "RemBERT": Family("rembert", {"input_embedding_size": 64, "output_embedding_size": 64}),
    "RemBERT as a decoder": Family("rembert", {
        "is_decoder": True, "input_embedding_size": 64, "output_embedding_size": 64}),
    "RoFormer": Family("roformer", {"embedding_size": 64}),
    "RoFormer as a decoder": Family("roformer", {"is_decoder": True, "embedding_size": 64}),
    "Moshi": Family("moshi", {"sliding_window": 6, "ffn_dim": 32, "audio_vocab_size": 8}),
}  # fmt: skip


# ---- with an image


def text_of(model_type: str, **settings: Any) -> dict[str, Any]:
    return {"model_type": model_type, **SHAPE, **settings}


def prompt_with(tokens: list[int], kinds: bool = False, **more: Any) -> dict[str, Any]:
    """`PROMPT` with the tokens of an image in it."""
    ids = torch.tensor([[*PROMPT[:3], *tokens, *PROMPT[3:]]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **more}
    return inputs | ({"mm_token_type_ids": (ids == IMAGE).int()} if kinds else {})


def pixels(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.long)


def qwen_image() -> dict[str, Any]:
    """One image of 4 × 6 patches, merged to 2 × 3 tokens: positions jump behind it."""
    grid = torch.tensor([[1, 4, 6]])
    tokens = [START, *[IMAGE] * 6, END]
    return prompt_with(tokens, kinds=True, pixel_values=pixels(24, 3 * 2 * 4 * 4), image_grid_thw=grid)


def qwen_vision(**more: Any) -> dict[str, Any]:
    return {"depth": 2, "num_heads": 2, "patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2, **more}


def qwen_ids() -> dict[str, int]:
    return {"image_token_id": IMAGE, "video_token_id": 249, "vision_start_token_id": START,
            "vision_end_token_id": END, "tie_word_embeddings": False}  # fmt: skip


def mrope(*section: int) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(section)}}


IMAGES = {
    "Qwen2-VL": Family("qwen2_vl", {
        "text_config": text_of("qwen2_vl_text", **mrope(2, 3, 3)),
        "vision_config": qwen_vision(embed_dim=32, hidden_size=64), **qwen_ids()}, qwen_image),
    "Qwen2.5-VL": Family("qwen2_5_vl", {
        "text_config": text_of("qwen2_5_vl_text", **mrope(2, 3, 3)),
        "vision_config": qwen_vision(hidden_size=32, intermediate_size=32, out_hidden_size=64,
                                     fullatt_block_indexes=[1], window_size=16), **qwen_ids()}, qwen_image),
    "Qwen3-VL": Family("qwen3_vl", {
        "text_config": text_of("qwen3_vl_text", **mrope(2, 3, 3)),
        "vision_config": qwen_vision(hidden_size=32, intermediate_size=32, out_hidden_size=64,
                                     num_position_embeddings=64, deepstack_visual_indexes=[0, 1]),
        **qwen_ids()}, qwen_image),
    "Qwen3.5, with a vision tower": Family("qwen3_5", {
        "text_config": text_of("qwen3_5_text", **HYBRID, **mrope(1, 1, 0)),
        "vision_config": qwen_vision(hidden_size=32, intermediate_size=32, out_hidden_size=64,
                                     num_position_embeddings=64, deepstack_visual_indexes=[]),
        **qwen_ids()}, qwen_image),
    "LLaVA": Family("llava", {
        "text_config": text_of("llama"), "image_token_index": IMAGE,
        "vision_config": {"model_type": "clip_vision_model", "image_size": 8, "patch_size": 4, **PATCHES}},
        lambda: prompt_with([IMAGE] * 4, pixel_values=pixels(1, 3, 8, 8))),
    "Gemma 3, with a vision tower": Family("gemma3", {
        "text_config": text_of("gemma3_text", **SLIDING, query_pre_attn_scalar=16), "image_token_index": IMAGE,
        "boi_token_index": START, "eoi_token_index": END, "mm_tokens_per_image": 4,
        "vision_config": {"model_type": "siglip_vision_model", "image_size": 16, "patch_size": 4, **PATCHES}},
        lambda: prompt_with([START, *[IMAGE] * 4, END], pixel_values=pixels(1, 3, 16, 16),
                            token_type_ids=torch.tensor([[0] * 4 + [1] * 4 + [0] * 7]))),
    "PaliGemma": Family("paligemma", {
        "text_config": text_of("gemma"), "image_token_index": IMAGE, "projection_dim": 64, "hidden_size": 64,
        "vision_config": {"model_type": "siglip_vision_model", "image_size": 8, "patch_size": 4, **PATCHES}},
        lambda: prompt_with([IMAGE] * 4, pixel_values=pixels(1, 3, 8, 8),
                            token_type_ids=torch.zeros(1, len(PROMPT) + 4, dtype=torch.long))),
    "InternVL": Family("internvl", {
        "text_config": text_of("qwen2"), "image_token_id": IMAGE, "image_seq_length": 4, "downsample_ratio": 0.5,
        "vision_config": {"model_type": "internvl_vision", "image_size": [16, 16], "patch_size": [4, 4], **PATCHES}},
        lambda: prompt_with([IMAGE] * 4, pixel_values=pixels(1, 3, 16, 16))),
    "SmolVLM": Family("smolvlm", {
        "text_config": text_of("llama", pad_token_id=0), "image_token_id": IMAGE, "scale_factor": 2,
        "vision_config": {"model_type": "smolvlm_vision", "image_size": 16, "patch_size": 4, **PATCHES}},
        lambda: prompt_with([IMAGE] * 4, pixel_values=pixels(1, 1, 3, 16, 16))),
    "Mistral 3": Family("mistral3", {
        "text_config": text_of("mistral", sliding_window=None), "image_token_index": IMAGE, "spatial_merge_size": 2,
        "vision_config": {"model_type": "pixtral", "image_size": 16, "patch_size": 4, "head_dim": 16, **PATCHES}},
        lambda: prompt_with([IMAGE] * 4, pixel_values=pixels(1, 3, 16, 16), image_sizes=torch.tensor([[16, 16]]))),
    "Mllama": Family("mllama", {
        "text_config": text_of("mllama_text_model", cross_attention_layers=[1], vocab_size=VOCAB - 8, pad_token_id=0,
                               bos_token_id=0, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}),
        "vision_config": {"model_type": "mllama_vision_model", "image_size": 8, "patch_size": 4, "hidden_size": 32,
                          "intermediate_size": 32, "num_hidden_layers": 2, "attention_heads": 2, "num_global_layers": 1,
                          "vision_output_dim": 64, "intermediate_layers_indices": [0], "max_num_tiles": 1,
                          "supported_aspect_ratios": [[1, 1]]},
        "image_token_index": VOCAB - 8},
        lambda: prompt_with([], pixel_values=pixels(1, 1, 1, 3, 8, 8), aspect_ratio_ids=ones(1, 1),
                            aspect_ratio_mask=ones(1, 1, 1), cross_attention_mask=ones(1, len(PROMPT), 1, 1))),
}  # fmt: skip
FAMILIES = TEXT | IMAGES


@functools.cache
def target_of(name: str) -> PreTrainedModel:
    return FAMILIES[name].build()
