"""The DSpark draft: a DFlash backbone that denoises a whole block at once, with Markov and confidence heads on top.

One config-driven class covers Qwen3-style and Gemma4-style blocks. Parameter names are DeepSpec's, so its checkpoints
need no renaming. The life of a draft within a round: `append_context` stores keys and values of newly committed tokens,
`forward` runs a block over them, `propose` adds the sequential walk.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationConfig, PreTrainedModel
from transformers import initialization as init
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from .configuration_dspark import DSparkConfig
from .context import Context, Owner
from .heads import MARKOV_HEADS, ConfidenceHead
from .layers import DSparkLayer, DSparkRotaryEmbedding, is_plain
from .target import TargetVocabulary, fit_vocabulary, share_vocabulary

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo

    from .proposal import DraftBlock


@dataclass(frozen=True)
class BackboneOutput:
    """`hidden_states` [B, γ, H] after the final norm and `base_logits` [B, γ, V_draft] (U_k), float32."""

    hidden_states: torch.Tensor
    base_logits: torch.Tensor


class DSparkPreTrainedModel(PreTrainedModel):
    config_class = DSparkConfig
    base_model_prefix = ""
    _no_split_modules = ["DSparkLayer"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True
    # The loader accounts for every tensor of a file by itself.
    _keys_to_ignore_on_load_unexpected = [r".*"]

    @torch.no_grad()
    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, DSparkLayer) and module.sandwich_norms:
            init.ones_(module.layer_scalar)


class DSparkForCausalLM(DSparkPreTrainedModel):
    """A DSpark draft. Pass it to its target: `target.generate(**inputs, assistant_model=draft)`.

    Attributes:
        generation_config (`GenerationConfig`): defaults of `num_assistant_tokens` and `assistant_confidence_threshold`
            for calls that do not set them.
        draft_sample_method (`str`): how drafts are chosen when the target samples; `"probabilistic"` draws them from q,
            `"greedy"` takes the arg max, with a one-hot q. Both are exact.
        scheduler (`PrefixScheduler` or `"auto"`, *optional*): chooses how many drafts are verified; `"auto"` measures
            the costs of the fast path once and schedules by them. `None` verifies whole blocks.
        context_window (`ContextWindow`, *optional*): how much of a long text the draft remembers; `None` means all.
        fast_path (`FastPath`, *optional*): switches of the path with a static cache; `None` for the defaults.
        probe (`bool`): whether the first rounds with a target are checked, to warn of a draft that is read wrongly.
    """

    # The generate hook recognises a draft by this mark, not by `isinstance`: copies of this file that travel with a
    # checkpoint are other classes.
    _dspark_draft = True

    def __init__(self, config: DSparkConfig):
        if not isinstance(config, DSparkConfig):
            raise ValueError(
                f"{type(self).__name__} is built from a `DSparkConfig`, got {type(config).__name__}. "
                "Load a checkpoint with `from_pretrained`."
            )
        super().__init__(config)
        if config.has_embed_tokens:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.fc = nn.Linear(config.context_size, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList([DSparkLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = DSparkRotaryEmbedding(config)
        if config.has_lm_head:
            self.lm_head = nn.Linear(config.hidden_size, config.head_size, bias=False)
        if config.draft_vocab_size is not None:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        self.markov_head = MARKOV_HEADS[config.markov_head_type](config) if config.markov_rank else None
        self.confidence_head = ConfidenceHead(config) if config.enable_confidence_head else None
        self.generation_config = GenerationConfig()
        self.draft_sample_method = "probabilistic"
        self.context_window = None
        self.fast_path = None
        self.scheduler = None
        self.probe = True
        # Marks contexts of this draft on caches that outlive a call.
        self.context_owner = Owner()
        self._vocabulary: TargetVocabulary | None = None
        self._fused: torch.Tensor | None = None
        self.post_init()

    # ---- pairing

    def attach_target(self, target: PreTrainedModel) -> "DSparkForCausalLM":
        """Share the target's embeddings and head when the file has none, and check that the two fit.

        `generate()` does this by itself. The target's modules are referenced, not owned: they are in no state dict and
        do not move with the draft.

        Raises:
            ValueError: for a pair that does not fit, with both numbers.
        """
        width = getattr(self.fc, "in_features", self.config.context_size)
        if width != self.config.context_size:  # the config may have been edited
            raise ValueError(
                f"`target_layer_ids` {self.config.target_layer_ids} of width {self.config.target_hidden_size} make "
                f"{self.config.context_size} features, but the draft's `fc` takes {width}."
            )
        self._vocabulary = share_vocabulary(self.config, target)
        return self

    @property
    def vocabulary(self) -> TargetVocabulary:
        """What is shared with the attached target.

        Raises:
            ValueError: for a draft that needs a target's embeddings or head and has not been given one.
        """
        if self._vocabulary is not None:
            return self._vocabulary
        if not (self.config.has_embed_tokens and self.config.has_lm_head):
            raise ValueError(
                "This draft stores no embeddings or head of its own. Call `draft.attach_target(target)` first, or pass "
                "it to `target.generate(assistant_model=draft)`."
            )
        return TargetVocabulary(None, None, self.config.vocab_size, self.device, self.dtype)

    @property
    def proposable_ids(self) -> torch.Tensor | None:
        """[V_draft] ascending target ids of the rows of the head; `None` where the draft has the whole vocabulary.

        The file stores them as offsets: row i is the token i + d2t[i].
        """
        if self.config.draft_vocab_size is None:
            return None
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    # ---- the two phases of a round

    def append_context(self, context: Context, features: torch.Tensor, positions: torch.Tensor) -> None:
        """Store keys and values of committed tokens in every draft layer.

        Args:
            context: grows by n tokens.
            features: [B, n, n_taps · H_target], see `context_features`.
            positions: [1 or B, n] absolute positions.
        """
        features = features.to(device=self.device, dtype=self.dtype)
        positions = positions.to(self.device)
        hidden = self.hidden_norm(self.fc(features))
        rope = self.rotary_emb(hidden, positions)
        context.append(self.layers, self.project_context(hidden), rope)

    def forward(
        self,
        block_ids: torch.Tensor,
        positions: torch.Tensor,
        context: Context,
        vocabulary: TargetVocabulary | None = None,
    ) -> BackboneOutput:
        """Run the backbone over blocks `[x_0, MASK, ...]` (paper, block-parallel stage).

        Args:
            block_ids: [B, block_size] int64.
            positions: [1 or B, block_size] absolute positions; the anchor's comes first.
            context: tokens before the anchor; it comes back unchanged.
            vocabulary: of the target at hand; by default the attached one.

        Returns:
            the γ slots that are read.
        """
        vocabulary = vocabulary or self.vocabulary
        hidden = self.run_block(block_ids, positions, context, vocabulary)
        return BackboneOutput(hidden, self.base_logits(hidden, vocabulary))

    def run_block(
        self,
        block_ids: torch.Tensor,
        positions: torch.Tensor,
        context: Context,
        vocabulary: TargetVocabulary,
        slots: int | None = None,
    ) -> torch.Tensor:
        """The backbone without the head: hidden states of the last `slots` slots (by default γ) after the final norm,
        [B, slots, H] in the draft's dtype."""
        hidden = self._embed(block_ids.to(self.device), vocabulary)
        rope = self.rotary_emb(hidden, positions.to(self.device))
        for i, layer in enumerate(self.layers):
            hidden = layer(hidden, rope, context.layer(i))
        return self.norm(hidden[:, -(slots or self.config.num_draft_tokens) :])

    def base_logits(self, hidden: torch.Tensor, vocabulary: TargetVocabulary, raw: bool = False) -> torch.Tensor:
        """U_k [..., V_draft] of backbone states [..., H]: float32, or with `raw` as the head gives them if possible."""
        config = self.config
        logits = self.lm_head(hidden) if config.has_lm_head else vocabulary.logits(hidden).to(self.device)
        cap, scale = config.final_logit_softcapping, config.logit_scale
        logits = fit_vocabulary(logits if raw and cap is None and scale == 1 else logits.float(), config.head_size)
        logits = logits if scale == 1 else logits * scale
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def propose(
        self,
        anchor_ids: torch.Tensor,
        target_hidden_states: torch.Tensor,
        *,
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> "DraftBlock":
        """One block of γ drafts from scratch, without state or gradients.

        Args:
            anchor_ids: [B] int64, x_0 of each row.
            target_hidden_states: [B, S, n_taps · H_target], the features of positions 0..S-1 (S may be 0); the anchor
                stands at position S.
            temperature: 0 for arg max, otherwise x_k is drawn from softmax((U_k + B_k) / temperature).
            generator: random stream of the draws, on the draft's device.

        Raises:
            ValueError: for shapes, ids or a temperature that do not fit.
        """
        from .proposal import propose

        return propose(self, anchor_ids, target_hidden_states, temperature=temperature, generator=generator)

    def _embed(self, ids: torch.Tensor, vocabulary: TargetVocabulary) -> torch.Tensor:
        if not self.config.has_embed_tokens:
            embedded = vocabulary.embed(ids, raw=self.config.raw_embeddings).to(device=self.device, dtype=self.dtype)
            return embedded * self.config.embedding_scale if self.config.raw_embeddings else embedded
        embedded = self.embed_tokens(ids.clamp(max=self.config.vocab_size - 1))
        # Gemma rounds the factor to the dtype of the embeddings.
        return embedded * float(torch.tensor(self.config.embedding_scale, dtype=embedded.dtype))

    def project_context(self, hidden: torch.Tensor) -> torch.Tensor:
        """Key and value projections of all layers: one product, unless a layer is more than a plain `nn.Linear`."""
        linears = [linear for layer in self.layers for linear in layer.self_attn.key_value_projections()]
        if all(is_plain(linear) for linear in linears):
            return F.linear(hidden, *self.context_projection(linears))
        return torch.cat([linear(hidden).to(hidden.device) for linear in linears], dim=-1)

    def context_projection(self, linears: list[nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight and bias of the key and value projections of all layers as one matrix.

        The layers' own weights are made views of the matrix, so it costs no memory and follows every in-place change.
        After a move to another device or dtype the views are gone, which the addresses show, and it is built anew.
        """
        weights = [linear.weight for linear in linears]
        bias = torch.cat([linear.bias for linear in linears]) if self.config.attention_bias else None
        if torch.is_grad_enabled() and any(weight.requires_grad for weight in weights):
            return torch.cat(weights), bias
        sizes = [weight.shape[0] for weight in weights]
        if self._fused is None or any(
            weight.data_ptr() != view.data_ptr() for weight, view in zip(weights, self._fused.split(sizes), strict=True)
        ):
            # An inference tensor as a parameter could never be trained again.
            with torch.inference_mode(False), torch.no_grad():
                self._fused = torch.cat([weight.detach() for weight in weights])
                for weight, view in zip(weights, self._fused.split(sizes), strict=True):
                    weight.data = view
        return self._fused, bias

    # ---- files

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        *model_args: Any,
        sample_from_anchor: bool | None = None,
        block_size: int | None = None,
        target_layer_ids: list[int] | None = None,
        mask_token_id: int | None = None,
        config: Any = None,
        **kwargs: Any,
    ) -> "DSparkForCausalLM":
        """Load a draft from a local folder or a hub id, by its keys and tensor names.

        Args:
            pretrained_model_name_or_path: folder or repository id.
            sample_from_anchor: overrules the block layout that the file states or implies.
            block_size, target_layer_ids, mask_token_id: overrule, or add, what the file says; meaning as in
                `DSparkConfig`, whatever the file calls them.
            config: a `DSparkConfig` replaces what the file says; any other config is ignored, the file's own keys
            decide. kwargs: as in transformers (`dtype`, `device_map`, `revision`, `cache_dir`, `token`, ...).

        Raises:
            ValueError: for anything that is not a DSpark checkpoint this version reads, or with missing, unknown,
                misshapen or non-finite tensors; the message names them.
        """
        from .files import load_draft

        overrides = {
            "sample_from_anchor": sample_from_anchor,
            "block_size": block_size,
            "target_layer_ids": target_layer_ids,
            "mask_token_id": mask_token_id,
        }
        return load_draft(
            cls,
            super().from_pretrained,
            pretrained_model_name_or_path,
            overrides,
            config,
            *model_args,
            **kwargs,
        )

    def save_pretrained(
        self,
        save_directory: str | Path,
        *args: Any,
        format: str | None = None,
        include_shared: bool = False,
        **kwargs: Any,
    ) -> None:
        """Write the draft as safetensors, the config in a form that DSpark loaders read, and options set on
        `generation_config`.

        Args:
            format: `None` for the form it was loaded in, `"deepspec"` or `"speculators"` to convert. The latter names
                the target of `config.target_name_or_path`, which vLLM serves it with.
            include_shared: also write the embeddings and head of the attached target.
            kwargs: as in transformers; `push_to_hub=True` also uploads the folder, see `push_to_hub`.
        """
        from .files import save_draft

        save_draft(self, super().save_pretrained, save_directory, format, include_shared, *args, **kwargs)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        max_shard_size: int | str = "50GB",
        format: str | None = None,
        include_shared: bool = False,
        **kwargs: Any,
    ) -> "CommitInfo":
        """Upload the draft to the hub, with a small file that makes `trust_remote_code=True` find this package.

        `hf-dspark card` writes a card with measured numbers; here a new repository gets one without any, and the card
        of an existing repository stays.

        Args:
            repo_id: `"user/name"`.
            max_shard_size, format, include_shared: as in `save_pretrained`.
            kwargs: `commit_message`, `commit_description`, `private`, `token`, `revision`, `create_pr`, `tags`, as in
                transformers.
        """
        from . import hub

        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder, max_shard_size=max_shard_size, format=format, include_shared=include_shared)
            return hub.push(folder, repo_id, **kwargs)


class Qwen3DSparkModel(DSparkForCausalLM):
    """Name under which DeepSpec publishes Qwen3-style DSpark and DFlash drafts."""


class Gemma4DSparkModel(DSparkForCausalLM):
    """Name under which DeepSpec publishes Gemma4-style drafts."""
