"""`Session`: texts that begin alike share the target's cache and the draft's context."""

import copy
import threading
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache, DynamicLayer
from transformers.utils import ModelOutput, logging

from ._compat import CACHE_KEY, CHUNKS_BEHIND_TOKENS, NO_CHUNKS
from .context import common_length
from .generation.options import KEEPS_ROWS
from .modeling_dspark import DSparkForCausalLM

logger = logging.get_logger(__name__)

# Kinds of layers for which keys are all; a dummy stands for a layer that reads the keys of another.
HOLD_KEYS = {"DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer"}
BROUGHT = ("past_key_values", "cache", "inputs_embeds", "assistant_model")


class Session:
    """A conversation, or any texts that begin alike: what an earlier call has computed is not computed again.

    Every call keeps the longest common prefix of its text and the last one, so a history may grow, be edited or be cut
    short. Without a draft it does the same for plain generate(). The weights must stay as they are: after training
    or after switching an adapter call `reset()`.

    A call with `cache_implementation="static"`, or with a batch, runs on the fast path and finds there what the last
    call of the pair has left, row by row; any other call works on a cache of the session's own, in which layers with a
    sliding window are kept whole. Layers that hold a state instead of keys (linear attention, convolutions) cannot go
    back: there a history may only grow, and everything is computed again when it changes.

    ```python
    session = hf_dspark.Session(target, draft, tokenizer)
    session.send("Why is the sky blue?", max_new_tokens=128)
    session.send("And at sunset?", max_new_tokens=128)
    ```

    Args:
        target: the model that writes.
        draft: its draft; `None` for plain generate().
        tokenizer: for `send`; it needs a chat template.

    Attributes:
        messages (`list[dict]`): of the chat, as chat templates take them; may be edited between calls.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        draft: DSparkForCausalLM | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ):
        self.target, self.draft, self.tokenizer = target, draft, tokenizer
        self.messages: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Forget what was computed; `messages` stay."""
        self._cache: Cache | None = None
        self._rolls_back = True
        self._held: list[tuple[int, int]] = []  # id and mask of every column in the cache
        self._fresh = True

    def fork(self) -> "Session":
        """A second session with the same history, for another way to go on; the cache is copied."""
        other = Session(self.target, self.draft, self.tokenizer)
        other.messages = copy.deepcopy(self.messages)
        other._cache, other._rolls_back = copy.deepcopy(self._cache), self._rolls_back
        other._held, other._fresh = list(self._held), self._fresh
        return other

    def generate(self, input_ids: torch.Tensor, **options: Any) -> torch.Tensor | ModelOutput:
        """`target.generate(input_ids, assistant_model=draft, **options)`, with the text of the last call at hand.

        Args:
            input_ids: [B, S] the whole text so far, not only what is new.
            options: of generate(), `attention_mask` included. One sequence without a mask is all text: where generate()
                takes a pad token in it for padding, a session does not, since the token may come from an answer.

        Returns:
            what generate() returns. `num_reused` of its statistics tells how much of the prompt was not computed again.

        Raises:
            ValueError: for ids or a mask that are not [B, S], a cache or embeddings of the caller's, images, several
                texts for a prompt, `use_cache=False`, other kinds of caches than `"static"` and `"dynamic"`, and while
                another call of the session runs.
        """
        self._check(input_ids, options)
        options["use_cache"] = True  # a target that was trained may say False
        if input_ids.shape[0] == 1 and options.get("attention_mask") is None:
            options["attention_mask"] = torch.ones_like(input_ids)
        if not self._lock.acquire(blocking=False):
            raise ValueError("This session is generating already. Use `fork()`, or a session for each conversation.")
        try:
            if input_ids.shape[0] > 1 or self._asks_for_fast_path(options):
                return self._on_fast_path(input_ids, options)
            return self._on_own_cache(input_ids, options)
        finally:
            self._lock.release()

    def _check(self, input_ids: torch.Tensor, options: dict[str, Any]) -> None:
        if not isinstance(input_ids, torch.Tensor) or input_ids.dim() != 2 or not input_ids.numel():
            raise ValueError(f"`input_ids` must be a tensor of token ids [B, S] with S >= 1, got {input_ids!r}.")
        for name, value in options.items():
            brought = name in BROUGHT and value is not None
            if brought or (isinstance(value, torch.Tensor) and name != "attention_mask"):
                raise ValueError(
                    f"A session takes token ids and an attention mask; `{name}` belongs in `target.generate()`."
                )
        mask = options.get("attention_mask")
        if mask is not None and mask.shape != input_ids.shape:
            raise ValueError(
                f"`attention_mask` must have the shape of `input_ids`, {list(input_ids.shape)}, got {list(mask.shape)}."
            )
        for name in ("num_beams", "num_return_sequences"):  # they would leave a cache of several rows
            if (value := self._setting(name, options) or 1) > 1:
                raise ValueError(f"A session goes on with one text for each prompt. Drop `{name}={value}`.")
        if False in (options.get("use_cache"), getattr(options.get("generation_config"), "use_cache", None)):
            raise ValueError("A session lives on its cache. Drop `use_cache=False`, or call `target.generate()`.")

    def _setting(self, name: str, options: dict[str, Any]) -> Any:
        """What generate() will make of an option: the call's, or that of its config, or of the target's."""
        configs = options.get("generation_config"), self.target.generation_config
        given = [options.get(name), *(getattr(config, name, None) for config in configs)]
        return next((value for value in given if value is not None), None)

    def _asks_for_fast_path(self, options: dict[str, Any]) -> bool:
        kind = self._setting("cache_implementation", options) or "dynamic"
        if kind == "static":
            return True
        if kind not in ("dynamic", "hybrid"):  # older configs say "hybrid", which transformers takes for the default
            raise ValueError(
                f'A session has a dynamic cache, or the fast path with "static"; `cache_implementation={kind!r}` is '
                "not supported. Drop it, or call `target.generate()`."
            )
        return False

    def send(self, message: str, **options: Any) -> str:
        """Add a message of the user, generate the answer, add it to `messages` and return it.

        A call that fails or is interrupted leaves `messages` as they were.

        Args:
            message: of the user.
            options: of generate().

        Raises:
            ValueError: without a tokenizer that has a chat template.
        """
        if self.tokenizer is None or self.tokenizer.chat_template is None:
            raise ValueError("`send` needs a tokenizer with a chat template; `generate` takes token ids.")
        messages = [*self.messages, {"role": "user", "content": message}]
        inputs = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).to(self.target.device)
        output = self.generate(**inputs, **options)
        ids = output if isinstance(output, torch.Tensor) else output.sequences
        reply = self.tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        self.messages = [*messages, {"role": "assistant", "content": reply}]
        return reply

    def _on_fast_path(self, input_ids: torch.Tensor, options: dict[str, Any]) -> torch.Tensor | ModelOutput:
        # After `reset` the first call computes everything anew.
        reuse = {} if self._fresh or self.draft is None else {KEEPS_ROWS: True}
        output = self.target.generate(input_ids, assistant_model=self.draft, **reuse, **options)
        self._fresh = False
        return output

    def _on_own_cache(self, input_ids: torch.Tensor, options: dict[str, Any]) -> torch.Tensor | ModelOutput:
        options["cache_implementation"] = None  # of the session's own making, whatever a config says
        ids = input_ids[0].tolist()
        prompt = list(zip(ids, options["attention_mask"][0].tolist(), strict=True))
        self._keep(common_length(self._held, prompt[:-1]))
        is_new = self._cache is None
        if self._cache is None:
            self._cache, self._rolls_back = new_cache(self.target)
        cache = {} if self._cache is None else {CACHE_KEY: self._cache}
        if self._held and not CHUNKS_BEHIND_TOKENS:
            self._drop_chunks(options)
        try:
            output = self.target.generate(input_ids, assistant_model=self.draft, **cache, **options)
        except BaseException:
            # What was generated is not known here. An interrupted forward has reached the first layers only, and in a
            # new cache the others may be missing.
            self._held = prompt
            self._keep(0 if is_new or not self._rolls_back else min(*columns(self._cache), len(prompt)))
            raise
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        text = prompt + [(token, 1) for token in sequences[0, len(ids) :].tolist()]
        self._held = text[: 0 if self._cache is None else self._cache.get_seq_length()]
        return output

    def _drop_chunks(self, options: dict[str, Any]) -> None:
        config = options.get("generation_config") or self.target.generation_config
        if options.get("prefill_chunk_size") or config.prefill_chunk_size:
            logger.warning_once(f"hf_dspark: {NO_CHUNKS}.")
        options["prefill_chunk_size"] = None

    def _keep(self, length: int) -> None:
        """Roll the cache back to `length` columns, or give it up."""
        if self._cache is not None and 0 < length < len(self._held) and not self._rolls_back:
            logger.warning_once(
                f"hf_dspark: the layers of {type(self.target).__name__} cannot be rolled back; a session computes the "
                "whole text again where its history changes."
            )
            length = 0
        if self._cache is None or length == 0:
            self._cache, self._held = None, []
            return
        self._held = self._held[:length]
        if self._rolls_back:
            for layer in self._cache.layers:
                layer.crop(min(0, length - int(layer.get_seq_length())))


def new_cache(target: PreTrainedModel) -> tuple[Cache | None, bool]:
    """A cache for a target, and whether it can be rolled back; none for layers without keys, which know no length."""
    cache = DynamicCache(config=target.config)
    if cache.layers and all(cache.is_linear):
        return None, False
    if {type(layer).__name__ for layer in cache.layers} <= HOLD_KEYS:
        return DynamicCache(), True  # without a config every layer keeps all its keys, those with a window too
    return cache, all(isinstance(layer, DynamicLayer) and not hasattr(layer, "record_past") for layer in cache.layers)


def columns(cache: Cache) -> list[int]:
    """Tokens in every layer that has keys of its own."""
    return [length for layer in cache.layers if (length := int(layer.get_seq_length()))]
