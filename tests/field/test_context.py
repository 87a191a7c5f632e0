"""CONTEXT: positions, windows, rotary scaling and features far out are those computed from scratch, on both paths.

The window that a user gives a draft is in `tests/test_context.py`.
"""

import pytest
import torch

import checks
import hf_dspark
import oracle
import tiny
from hf_dspark._compat import CACHE_KEY
from hf_dspark.generation.engines import engine_of
from hf_dspark.generation.memory import cache_memory

STATIC = {"cache_implementation": "static"}
BOTH_PATHS = pytest.mark.parametrize("path", [{}, STATIC], ids=["plain", "ragged"])


def far_pair(family: str, length: int, **extra):
    target = tiny.random_target(family, layers=2, max_position_embeddings=8192, **extra)
    generator = torch.Generator().manual_seed(3)
    prompt = torch.randint(1, 62, (length,), generator=generator).tolist()
    text = checks.plain(target, prompt, max_new_tokens=8)[0].tolist()
    config, tensors = tiny.guided_files(tiny.text_table(text[-10:]), taps=(-1, 0), max_position_embeddings=8192)
    return target, tiny.load_draft(config, tensors), oracle.Oracle(config, tensors), text, prompt


@pytest.mark.parametrize("family", ["qwen3", "qwen3_sliding"])
def test_context_2_position_5000(family):
    """A prompt of 5000 tokens, alone and beside a short one: proposals equal those from the whole text at once."""
    target, draft, slow, text, prompt = far_pair(family, 5000)
    new, stats, _ = checks.batch_equals_plain(target, draft, [prompt], cache_implementation="static", max_new_tokens=8)
    assert [*prompt, *new[0]] == text and stats.rounds[0].position == 5000
    checks.rounds_match(stats, slow, target, text)
    new, stats, _ = checks.batch_equals_plain(target, draft, [[7, 21, 40], prompt], max_new_tokens=8)
    assert [*prompt, *new[1]] == text
    assert stats.num_accepted > 0
    new, stats = checks.equal_to_plain(target, draft, prompt, max_new_tokens=8, prefill_chunk_size=999)
    assert [*prompt, *new] == text and stats.num_accepted > 0
    checks.rounds_match(stats, slow, target, text)


@pytest.mark.parametrize("family", ["qwen3_sliding", "mistral", "gemma2", "gemma3_text"])
@pytest.mark.parametrize("window", [2, 5, 16])
def test_context_windows_of_the_target_at_every_prompt_length(family, window):
    """Rows shorter than, as long as and longer than the window in one batch; the draft sees features of each."""
    target = tiny.random_target(family, layers=2, sliding_window=window)
    rows = [[(5 * i + j) % 61 + 1 for j in range(length)] for i, length in enumerate((1, window - 1, window, 33))]
    texts = [checks.plain(target, row, max_new_tokens=16)[0].tolist() for row in rows]
    table = torch.zeros(tiny.V, tiny.V)
    for text in texts:
        table += tiny.text_table(text)
    config, tensors = tiny.guided_files(table, taps=(-1, 0))
    draft, slow = tiny.load_draft(config, tensors), oracle.Oracle(config, tensors)
    _, stats, _ = checks.batch_equals_plain(target, draft, rows, max_new_tokens=16)
    for index, text in enumerate(texts):
        checks.rounds_match(OneRow(stats, index), slow, target, text)


class OneRow:
    """The rounds of one row, for checks of single sequences."""

    def __init__(self, stats, row: int):
        self.rounds = [r for r in stats.rounds if r.row == row]


def test_context_left_padding_shifts_no_position():
    """The same row behind no, one and many pad tokens: positions, proposals and confidence stay."""
    target = tiny.random_target("qwen3", layers=3)
    config, tensors = tiny.guided_files(torch.randn(tiny.V, tiny.V), taps=(0, 1))
    draft, slow, row = tiny.load_draft(config, tensors), oracle.Oracle(config, tensors), [7, 21, 40]
    text = checks.plain(target, row)[0].tolist()
    for width in (3, 4, 20):
        _, stats, _ = checks.batch_equals_plain(target, draft, [row, [9] * width])
        assert stats.rounds[0].position == 3
        checks.rounds_match(OneRow(stats, 0), slow, target, text)


LONG = 32768


def test_context_32k_by_chunks_takes_the_memory_that_was_computed(monkeypatch):
    """The text of plain generate, features of one chunk at a time, and caches as large as the configs say."""
    target = tiny.random_target("llama", layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
                                max_position_embeddings=40000)  # fmt: skip
    prompt = torch.randint(1, 62, (1, LONG), generator=torch.Generator().manual_seed(3))
    chunks = {"prefill_chunk_size": 4096, "max_new_tokens": 12}
    text = checks.plain(target, prompt, **chunks)[0].tolist()
    config, tensors = tiny.guided_files(tiny.text_table(text[-14:]), taps=(-1, 0), max_position_embeddings=40000)
    draft, slow = tiny.load_draft(config, tensors), oracle.Oracle(config, tensors)
    sizes, append = [], type(draft).append_context
    monkeypatch.setattr(
        type(draft), "append_context", lambda self, c, f, p: sizes.append(f.shape[1]) or append(self, c, f, p)
    )
    output, stats = checks.generate(target, draft, prompt, return_dict_in_generate=True, **chunks)
    assert output.sequences[0].tolist() == text and stats.num_accepted > 0
    assert sizes[:8] == [4096] * 8 and max(sizes[8:]) <= 5
    checks.rounds_match(stats, slow, target, text)

    memory, cache = cache_memory(target.config, draft.config), output[CACHE_KEY]
    held = LONG + 11
    assert sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values)) == held * memory.target
    context = cache._dspark_context[1]
    assert context.length == held and context.keys.nbytes + context.values.nbytes == 33024 * memory.draft

    draft.context_window = hf_dspark.ContextWindow(4, 500)
    output, stats = checks.generate(target, draft, prompt, return_dict_in_generate=True, **chunks)
    assert output.sequences[0].tolist() == text
    checks.rounds_match(stats, oracle.Oracle(config, tensors, (4, 500)), target, text)
    context = output[CACHE_KEY]._dspark_context[1]
    assert context.keys.nbytes + context.values.nbytes == 512 * memory.draft

    draft.context_window = None
    found, stats = checks.generate(target, draft, prompt, **chunks, **STATIC)
    assert found[0].tolist() == text and stats.path == "ragged"
    assert engine_of(target, draft).num_bytes == memory.num_bytes(1, LONG + 12 + 4 + 2)


ROPE = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 16},
}  # fmt: skip


class FromScratch:
    """The draft itself, asked for each block with the whole context: an oracle for what rounds have gathered."""

    def __init__(self, draft):
        self.draft, self.config = draft, {"target_layer_ids": draft.config.target_layer_ids}

    def propose(self, anchor: int, features: torch.Tensor) -> oracle.Block:
        block = self.draft.propose(torch.tensor([anchor]), features[None])
        parts = block.tokens, block.hidden_states, block.base_logits, block.logits, block.confidence_logits
        return oracle.Block(*(part[0] for part in parts))


@BOTH_PATHS
@pytest.mark.parametrize("of_draft", [None, *ROPE])
@pytest.mark.parametrize("of_target", [None, *ROPE])
def test_context_rotary_scaling_of_either_model(of_target, of_draft, path):
    """Texts past the trained length; each model turns by its own tables."""
    scaled = lambda kind: {"rope_theta": 10000.0, **(ROPE[kind] if kind else {"rope_type": "default"})}  # noqa: E731
    target = tiny.random_target.__wrapped__("llama", layers=3, rope_parameters=scaled(of_target))
    text = checks.plain(target, [7, 21, 40], max_new_tokens=40)[0].tolist()
    config, tensors = tiny.guided_files(tiny.text_table(text), taps=(0, 1), rope_parameters=scaled(of_draft))
    draft = tiny.load_draft(config, tensors)
    found, stats = checks.generate(target, draft, [7, 21, 40], max_new_tokens=40, **path)
    assert found[0].tolist() == text and stats.num_accepted > 0 and (stats.path == "ragged") == bool(path)
    checks.rounds_match(stats, FromScratch(draft), target, text)
    if of_draft in (None, "linear"):
        checks.rounds_match(stats, oracle.Oracle(config, tensors), target, text)


@BOTH_PATHS
@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3_sliding"])
@pytest.mark.parametrize("length", [31, 32, 33, 40])
def test_context_prompts_at_and_past_the_targets_limit(family, length, path):
    """The text, or the error, of plain generate; and the pair works on."""
    target = tiny.random_target(family, layers=3, max_position_embeddings=32)
    prompt = [1 + i % 60 for i in range(length)]
    draft = tiny.random_draft(taps=(0, 1))
    for new in (1, 2, 9):
        try:
            expected = checks.plain(target, prompt, max_new_tokens=new).tolist()
        except (IndexError, ValueError) as error:
            with pytest.raises(type(error)) as found:
                checks.generate(target, draft, prompt, max_new_tokens=new, **path)
            assert str(found.value) == str(error)
        else:
            assert checks.generate(target, draft, prompt, max_new_tokens=new, **path)[0].tolist() == expected
    found, _ = checks.generate(target, draft, prompt[:5], max_new_tokens=9, **path)
    assert found.tolist() == checks.plain(target, prompt[:5], max_new_tokens=9).tolist()


@BOTH_PATHS
@pytest.mark.parametrize("is_causal", [None, False, True])
@pytest.mark.parametrize("kinds", [("sliding", "full"), ("sliding", "sliding"), ("full", "full")])
@pytest.mark.parametrize("window", [1, 3, 8])
def test_context_4_a_window_in_the_drafts_file(kinds, window, is_causal, path):
    """Mixed layers and both causal flags, against masks made by hand, from within the window to far past it."""
    keys = {"layer_types": [f"{kind}_attention" for kind in kinds], "sliding_window": window}
    keys |= {} if is_causal is None else {"is_causal": is_causal}
    target = tiny.random_target("llama", layers=3)
    text = checks.plain(target, [7, 21, 40], max_new_tokens=24)[0].tolist()
    config, tensors = tiny.guided_files(tiny.text_table(text), taps=(0, 1), layers=2, **keys)
    draft = tiny.load_draft(config, tensors)
    found, stats = checks.generate(target, draft, [7, 21, 40], max_new_tokens=24, **path)
    assert found[0].tolist() == text and stats.num_accepted > 0
    checks.rounds_match(stats, oracle.Oracle(config, tensors), target, text)


def test_context_4_no_second_window():
    """A window of the user's on a draft whose layers have their own is refused."""
    keys = {"layer_types": ["sliding_attention"], "sliding_window": 8}
    draft = tiny.load_draft(*tiny.guided_files(torch.zeros(tiny.V, tiny.V), taps=(0, 1), **keys))
    draft.context_window = hf_dspark.ContextWindow(4, 8)
    for path in ({}, STATIC):
        with pytest.raises(ValueError, match="context_window.*full attention"):
            checks.generate(tiny.random_target("llama", layers=3), draft, [7, 21, 40], **path)


def test_context_4_a_window_that_is_not_stated_in_full_is_refused_by_name():
    config = tiny.draft_config(layers=2)
    for keys, name in (
        ({"layer_types": ["sliding_attention", "full_attention"]}, "sliding_window"),
        ({"layer_types": None, "use_sliding_window": True, "sliding_window": 8}, "use_sliding_window"),
    ):
        with pytest.raises(ValueError, match=name):
            tiny.load_draft(config | keys, tiny.draft_tensors(config))
