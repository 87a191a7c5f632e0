"""The seam into generate(): what passes through, what is refused with the fix, and what goes to the target alone."""

import importlib

import pytest
import torch
from transformers import GenerationConfig, GenerationMixin, StaticCache

import checks
import hf_dspark
import tiny
from hf_dspark.generation import hook

PROMPT = [7, 21, 40]


def test_import_installs_the_hook_once():
    before = {name: vars(GenerationMixin)[name] for name in vars(GenerationMixin) if not name.startswith("__")}
    hook.install()
    importlib.reload(hook).install()
    after = {name: vars(GenerationMixin)[name] for name in vars(GenerationMixin) if not name.startswith("__")}
    assert before == after
    assert callable(GenerationMixin._assisted_decoding.__wrapped__)
    assert not hasattr(GenerationMixin._assisted_decoding.__wrapped__, "__wrapped__")


@pytest.mark.parametrize("sample", [False, True])
def test_other_calls_are_untouched(sample):
    """Prompt lookup, a native assistant and plain calls give what they gave, and are in no record."""
    target, assistant = tiny.random_target(), tiny.random_target(layers=2, seed=3)
    options = {"max_new_tokens": 12, "do_sample": sample}
    calls = [{"assistant_model": assistant}, {"prompt_lookup_num_tokens": 2}, {}, {"num_beams": 2}]
    for call in calls:
        if sample and "num_beams" in call:
            continue
        with hf_dspark.record() as stats:
            torch.manual_seed(4)
            hooked = target.generate(checks.tensor(PROMPT), **options, **call)
        assert stats.calls == 0
        original = {name: vars(GenerationMixin)[name] for name in WRAPPED}
        for name in WRAPPED:
            setattr(GenerationMixin, name, original[name].__wrapped__)
        try:
            torch.manual_seed(4)
            unhooked = target.generate(checks.tensor(PROMPT), **options, **call)
        finally:
            for name, method in original.items():
                setattr(GenerationMixin, name, method)
        assert hooked.tolist() == unhooked.tolist()


WRAPPED = [name for name in vars(GenerationMixin) if getattr(vars(GenerationMixin)[name], "_dspark_hook", False)]


def test_a_subclass_and_a_foreign_copy_of_the_draft_are_recognised():
    """Drafts are recognised by a class attribute; code that travels with a checkpoint is another class."""

    class Other(type(tiny.perm_draft())):
        pass

    draft = tiny.perm_draft()
    draft.__class__ = Other
    _, stats = checks.equal_to_plain(tiny.perm_target(), draft, PROMPT)
    assert stats.num_accepted > 0


REFUSED = {
    "beams": ({"num_beams": 2}, ["num_beams"]),
    "beam sample": ({"num_beams": 3, "do_sample": True}, ["num_beams", "3"]),
    "return sequences": ({"num_return_sequences": 2, "do_sample": True}, ["num_return_sequences", "2"]),
    "assistant tokenizer": ({"assistant_tokenizer": tiny.tokenizer()}, ["assistant_tokenizer"]),
    "two tokenizers": (dict.fromkeys(("tokenizer", "assistant_tokenizer"), tiny.tokenizer()), ["assistant_tokenizer"]),
    "prompt lookup": ({"prompt_lookup_num_tokens": 3}, ["prompt_lookup_num_tokens"]),
    "early exit": ({"assistant_early_exit": 2}, ["assistant_early_exit"]),
    "ensemble": ({"assistant_ensemble_weight": 0.5}, ["assistant_ensemble_weight", "0.5"]),
    "offloaded static": ({"cache_implementation": "offloaded_static"}, ["cache_implementation", "offloaded_static"]),
    "deprecated name of static": ({"cache_implementation": "sliding_window"}, ["tatic"]),
    "other speculation": ({"speculation_type": "dflash"}, ["speculation_type", "dflash"]),
    "heuristic": ({"num_assistant_tokens_schedule": "heuristic"}, ["num_assistant_tokens_schedule", "heuristic"]),
    "penalty alpha": ({"penalty_alpha": 0.6, "top_k": 4}, ["contrastive"]),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honoured_raises_one_sentence_with_the_fix(name):
    options, words = REFUSED[name]
    target, draft = tiny.perm_target(), tiny.perm_draft()
    with checks.CallCounter(target) as calls, pytest.raises(ValueError) as error:
        checks.generate(target, draft, PROMPT, **options)
    message = str(error.value)
    for word in words:
        assert word in message, message
    assert not calls.shapes
    checks.equal_to_plain(target, draft, PROMPT)


def test_a_static_cache_object_is_refused():
    target, draft = tiny.perm_target(), tiny.perm_draft()
    cache = StaticCache(config=target.config, max_cache_len=64)
    with pytest.raises(ValueError, match="(?i)static"):
        checks.generate(target, draft, PROMPT, **{hf_dspark._compat.CACHE_KEY: cache})
    checks.equal_to_plain(target, draft, PROMPT)


def test_encoder_decoder_targets_are_refused():
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 64, "d_kv": 8, "d_ff": 16, "num_layers": 6, "num_heads": 2, "vocab_size": tiny.V}
    target = T5ForConditionalGeneration(T5Config(decoder_start_token_id=0, **sizes)).eval()
    with pytest.raises(ValueError, match="decoder"):
        target.generate(checks.tensor(PROMPT), assistant_model=tiny.perm_draft(), max_new_tokens=4)


def negative(**options):
    return {"guidance_scale": 1.7, "negative_prompt_ids": checks.tensor([5, 6])} | options


def watermark(**options):
    from transformers import SynthIDTextWatermarkingConfig

    config = SynthIDTextWatermarkingConfig(keys=[3, 5, 8], ngram_len=3)
    return {"watermarking_config": config, "do_sample": True, "top_k": 20} | options


ALONE = {
    "guidance": (negative, "Guidance"), "guidance, sampled": (lambda: negative(do_sample=True), "Guidance"),
    "SynthID": (watermark, "SynthID"), "no cache": (lambda: {"use_cache": False}, "cache"),
}  # fmt: skip


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize("as_dict", [False, True])
def test_what_needs_the_target_alone_says_so_and_gives_plain_output(name, as_dict):
    make, word = ALONE[name]
    target = tiny.random_target()
    more = {"return_dict_in_generate": True, "output_scores": True} if as_dict else {}
    torch.manual_seed(1)
    expected = checks.plain(target, PROMPT, **make(), **more)
    torch.manual_seed(1)
    output, stats = checks.generate(target, tiny.random_draft(), PROMPT, **make(), **more)
    assert checks.sequences(output).tolist() == checks.sequences(expected).tolist()
    assert stats.path == "target_only" and word in stats.reason
    assert (stats.num_rounds, stats.num_tokens, stats.calls) == (0, 20, 1)
    if as_dict:
        assert output.speculation.path == "target_only"
        assert torch.equal(torch.cat(output.scores), torch.cat(expected.scores))


def test_watermark_without_state_keeps_the_drafts():
    """The older green-list watermark is a function of the ids; drafts stay in use."""
    from transformers import WatermarkingConfig

    target = tiny.random_target()
    options = {"watermarking_config": WatermarkingConfig(bias=4.0, seeding_scheme="lefthash")}
    text = checks.plain(target, PROMPT, **options)[0].tolist()
    _, stats = checks.equal_to_plain(target, tiny.markov_draft(tiny.text_table(text)), PROMPT, **options)
    assert stats.num_accepted > 0


def test_generation_config_objects_and_defaults_of_the_target_work():
    target, draft = tiny.perm_target(), tiny.perm_draft()
    config = GenerationConfig(max_new_tokens=9, eos_token_id=tiny.chain(40, 6)[-1], do_sample=False)
    new, _ = checks.equal_to_plain(target, draft, PROMPT, generation_config=config, max_new_tokens=9)
    assert len(new) == 6


def test_pipeline():
    from transformers import pipeline

    target, draft, tokenizer = tiny.perm_target(), tiny.perm_draft(), tiny.tokenizer()
    text = tokenizer.decode(PROMPT)
    options = {"max_new_tokens": 12, "do_sample": False, "return_full_text": False}
    plain = pipeline("text-generation", model=target, tokenizer=tokenizer)(text, **options)
    with hf_dspark.record() as stats:
        drafted = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=draft)(text, **options)
    assert drafted == plain
    assert stats.num_accepted > 0
