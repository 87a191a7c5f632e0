"""`DSparkConfig`: the only vocabulary the package uses for a draft, whatever its checkpoint called things.

`formats/` translates foreign `config.json` files into these fields; everything else reads only this class.
"""

import math
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

MARKOV_HEAD_TYPES = ("vanilla", "gated", "rnn")
LAYER_TYPES = ("full_attention", "sliding_attention")
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "target_hidden_size",
)


@strict
class DSparkConfig(PreTrainedConfig):
    """Configuration of a DSpark (or DFlash) draft.

    > Backbone

    Args:
        vocab_size (`int`): rows of the target's vocabulary V, padding rows included; 0 where the file neither states
            nor stores anything of that size, so that the target's counts.
        draft_vocab_size (`int`, *optional*): tokens that the draft can propose, where these are fewer than V. The head
            and W2 have that many rows, the buffer `d2t` says which tokens they are.
        hidden_size (`int`): width H of the draft.
        intermediate_size (`int`): width of the MLP.
        num_hidden_layers (`int`): draft layers.
        num_attention_heads (`int`), num_key_value_heads (`int`), head_dim (`int`): attention shape; `head_dim` is read
            from the file, never derived.
        hidden_act (`str`): activation of the MLP.
        rms_norm_eps (`float`): epsilon of every RMS norm.
        max_position_embeddings (`int`): positions the draft was configured for.
        rope_parameters (`dict`): rotary parameters in transformers' form, one flat dict.
        rope_interleaved (`bool`): rotary pairs are neighbours (2i, 2i+1) instead of halves (i, i + head_dim / 2).
        layer_types (`list[str]`, *optional*): `"full_attention"` or `"sliding_attention"` for each layer; `None` is
            full attention everywhere.
        sliding_window (`int`, *optional*): W of sliding layers: a slot at position p sees positions above p - W.
        window_from_anchor (`bool`): the window of all slots of a block counts back from the anchor instead.
        causal_layers (`list[bool]`, *optional*): layers in which a slot sees no later slot of its block.
        attention_bias (`bool`): biases on q, k, v and o projections.
        attention_scale (`float`, *optional*): softmax scale; `None` means `head_dim ** -0.5`.
        value_from_key (`bool`): values are the key projection before norm and rotary (Gemma4 `attention_k_eq_v`).
        value_norm (`bool`): values pass an RMS norm without weight (Gemma4).
        sandwich_norms (`bool`): norms after attention and around the MLP, and a scalar on each layer's output (Gemma4).
        embedding_scale (`float`): factor on the draft's *own* embeddings (Gemma4: sqrt(H)), and on raw ones. A shared
            embedding module otherwise applies its family's factor.
        raw_embeddings (`bool`): of a shared embedding module the bare rows are read, without its factor or norm.
        logit_scale (`float`): factor on the head's output.
        final_logit_softcapping (`float`, *optional*): cap on the base logits, applied before the Markov bias.

    > Target side

        target_hidden_size (`int`): width of one tapped hidden state.
        target_layer_ids (`list[int]`): taps; id i means `hidden_states[i + 1]`, -1 the embedding output.
        num_target_layers (`int`, *optional*): depth of the target as the file states it; informative only.
        target_name_or_path (`str`, *optional*): the target that the file names; informative only.
        mask_token_id (`int`): row of the embedding that stands for an undecided slot.
        has_embed_tokens, has_lm_head (`bool`): whether the checkpoint stores them; otherwise the target's are shared.

    > Block and heads

        block_size (`int`): slots as stored in the file.
        sample_from_anchor (`bool`): `True`, all slots are read and γ = `block_size` (anchor-first); `False`, slot 0 is
            not read and γ = `block_size - 1` (1+N).
        markov_rank (`int`): rank r of the Markov pair; 0 means no Markov head (DFlash).
        markov_head_type (`str`): `"vanilla"`, `"gated"` or `"rnn"`.
        enable_confidence_head (`bool`), confidence_head_with_markov (`bool`), confidence_head_bias (`bool`).
        confidence_temperatures (`list[float]`, *optional*): γ positive STS temperatures T_k.

    > Origin

        source_format (`str`): the family the file was read as.
        resolution (`dict`): what was decided for the user, and why.
        foreign (`dict`): the file's own keys, kept so that saving gives them back.

    Raises:
        ValueError: for values that cannot work together; the message names the value and the fix.
    """

    model_type = "dspark"

    vocab_size: int = 151936
    draft_vocab_size: int | None = None
    hidden_size: int = 4096
    intermediate_size: int = 12288
    num_hidden_layers: int = 5
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 40960
    rope_parameters: dict | None = None
    rope_interleaved: bool = False
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    window_from_anchor: bool = False
    causal_layers: list[bool] | None = None
    attention_bias: bool = False
    attention_scale: float | None = None
    value_from_key: bool = False
    value_norm: bool = False
    sandwich_norms: bool = False
    embedding_scale: float = 1.0
    raw_embeddings: bool = False
    logit_scale: float = 1.0
    final_logit_softcapping: float | None = None
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    # Of the target; transformers' pipelines compare them to see that a pair shares its tokenizer.
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    target_hidden_size: int = 4096
    target_layer_ids: list[int] | tuple[int, ...] = (1, 9, 17, 25, 33)
    num_target_layers: int | None = None
    target_name_or_path: str | None = None
    mask_token_id: int = 151669
    has_embed_tokens: bool = False
    has_lm_head: bool = False

    block_size: int = 7
    sample_from_anchor: bool = True
    markov_rank: int = 256
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
    confidence_head_bias: bool = True
    confidence_temperatures: list[float] | None = None

    source_format: str = "dspark"
    resolution: dict[str, Any] | None = None
    foreign: dict[str, Any] | None = None

    def __post_init__(self, **kwargs):
        self.resolution = dict(self.resolution or {})
        self.target_layer_ids = list(self.target_layer_ids)
        if self.rope_parameters is None:
            self.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
        super().__post_init__(**kwargs)
        self._check_sizes()
        self._check_vocabulary()
        self._check_attention()
        self._check_block()
        self._check_taps()
        self._check_heads()

    @property
    def num_draft_tokens(self) -> int:
        """γ, the drafts proposed each round."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def context_size(self) -> int:
        """Width of the concatenated taps, `n_taps * target_hidden_size`."""
        return len(self.target_layer_ids) * self.target_hidden_size

    @property
    def head_size(self) -> int:
        """Rows of the head and of W2: the tokens that the draft can propose."""
        return self.draft_vocab_size or self.vocab_size

    def _check_sizes(self):
        for name in SIZES:
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)}.")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"`num_attention_heads` {self.num_attention_heads} is not a multiple of "
                f"`num_key_value_heads` {self.num_key_value_heads}."
            )

    def _check_vocabulary(self):
        if self.vocab_size < 1 and (self.vocab_size or self.has_embed_tokens or self.has_lm_head or self.markov_rank):
            raise ValueError(f"`vocab_size` must be at least 1, got {self.vocab_size}.")
        size = self.draft_vocab_size
        if size is not None and not (1 <= size < self.vocab_size and self.has_lm_head):
            raise ValueError(
                f"`draft_vocab_size` {size} must be less than `vocab_size` {self.vocab_size} and needs an own head "
                f"(`has_lm_head` is {self.has_lm_head}). Set it to None for a draft of the whole vocabulary."
            )

    def _check_attention(self):
        for name in ("layer_types", "causal_layers"):
            values = getattr(self, name)
            if values is not None and len(values) != self.num_hidden_layers:
                raise ValueError(f"`{name}` {values} must have one entry for each of {self.num_hidden_layers} layers.")
        unknown = sorted(set(self.layer_types or ()) - set(LAYER_TYPES))
        if unknown:
            raise ValueError(f"`layer_types` holds {', '.join(unknown)}; known: {', '.join(LAYER_TYPES)}.")
        slides = "sliding_attention" in (self.layer_types or ())
        if slides and (self.sliding_window is None or self.sliding_window < 1):
            raise ValueError(f"`sliding_attention` layers need a `sliding_window` >= 1, got {self.sliding_window}.")
        if self.rope_interleaved and self.value_from_key:
            raise ValueError("`rope_interleaved` with `value_from_key` is not supported; no draft is made that way.")

    def _check_block(self):
        if self.num_draft_tokens < 1:
            layout = "anchor-first" if self.sample_from_anchor else "1+N"
            raise ValueError(
                f"`block_size` {self.block_size} leaves no draft in the {layout} layout. "
                "Give the number of slots the draft was trained with."
            )
        if self.mask_token_id < 0 or (self.vocab_size and self.mask_token_id >= self.vocab_size):
            raise ValueError(
                f"`mask_token_id` {self.mask_token_id} is not a row of the vocabulary ({self.vocab_size} rows). "
                "Set it to the id the draft was trained with."
            )

    def _check_taps(self):
        ids = self.target_layer_ids
        if not ids or any(i < -1 for i in ids) or len(set(ids)) != len(ids):
            raise ValueError(f"`target_layer_ids` {ids} must be distinct layer numbers, -1 (embeddings) or more.")

    def _check_heads(self):
        if self.markov_rank < 0:
            raise ValueError(
                f"`markov_rank` must be >= 0, got {self.markov_rank}. Use 0 for a draft without Markov head."
            )
        if self.markov_rank and self.markov_head_type not in MARKOV_HEAD_TYPES:
            raise ValueError(
                f"`markov_head_type` {self.markov_head_type!r} is unknown; known: {', '.join(MARKOV_HEAD_TYPES)}."
            )
        if self.enable_confidence_head and self.confidence_head_with_markov and not self.markov_rank:
            raise ValueError(
                "`confidence_head_with_markov` needs a Markov head, but `markov_rank` is 0. "
                "Set `confidence_head_with_markov=False`."
            )
        self.check_temperatures()

    def check_temperatures(self):
        """Raise for `confidence_temperatures` that are not γ positive numbers; they may be edited after loading."""
        temperatures = self.confidence_temperatures
        if temperatures is not None:
            bad = len(temperatures) != self.num_draft_tokens or any(
                not (t > 0 and math.isfinite(t)) for t in temperatures
            )
            if bad:
                raise ValueError(
                    f"`confidence_temperatures` must be {self.num_draft_tokens} positive numbers, got {temperatures}."
                )
