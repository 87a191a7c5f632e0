"""Whatever a config.json or a tensor header says, reading it ends in a config or in a ValueError."""

import contextlib
import string

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspec_files import draft, gemma4_files, info
from hf_dspark import DSparkForCausalLM
from hf_dspark.formats import detect, foreign_config, own
from hf_dspark.formats.parts import check_sizes

FILES = [draft(), draft(head="rnn", layers=2), draft(rank=0, confidence=None), gemma4_files()]
KEYS = sorted({key for config, _ in FILES for key in config}) + [
    "rope_theta", "rope_scaling", "partial_rotary_factor", "dflash_config", "text_config", "sample_from_anchor",
    "confidence_temperatures", "target_hidden_size", "per_layer_config", "mrope_section", "is_neox_style", "auto_map",
    "torch_dtype", "use_sliding_window", "sliding_window", "runtime_block_size", "use_confidence_head", "shift_label",
]  # fmt: skip
words = st.sampled_from(["qwen3", "full_attention", "rope_type", "yarn", "factor", "vanilla", "float32", ""])
numbers = st.booleans() | st.integers(-3, 130) | st.integers() | st.floats()
scalars = st.none() | numbers | words | st.text(string.printable, max_size=5)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words | st.sampled_from(KEYS), inner, max_size=3),
    max_leaves=8,
)
changes = st.dictionaries(st.sampled_from(KEYS), values, min_size=1, max_size=3)


def open_raw(config, tensors):
    """What loading a folder does between reading the headers and reading the weights."""
    read, renames = detect(config, tensors).read(config, tensors)
    check_sizes(read, {new: tensors[old].shape for old, new in renames.items()})
    with torch.device("meta"):
        DSparkForCausalLM(read)
    return read


def succeeds_or_raises_value_error(config, tensors):
    try:
        read = open_raw(config, tensors)
    except ValueError as error:
        assert str(error)
        return
    assert foreign_config(read) == foreign_config(open_raw(foreign_config(read), tensors))


@settings(max_examples=500, deadline=None)
@given(st.sampled_from(FILES), changes, st.sets(st.sampled_from(KEYS), max_size=2))
def test_random_keys(files, changed, removed):
    config, tensors = files
    config = {key: value for key, value in (config | changed).items() if key not in removed}
    succeeds_or_raises_value_error(config, info(tensors))


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(FILES), st.data())
def test_random_shapes(files, data):
    config, tensors = files[0], info(files[1])
    name = data.draw(st.sampled_from(sorted(tensors)))
    shape = tuple(data.draw(st.lists(st.integers(0, 100), max_size=3)))
    tensors[name] = tensors[name]._replace(shape=shape)
    if data.draw(st.booleans()):
        del tensors[name]
    succeeds_or_raises_value_error(config, tensors)


@settings(max_examples=150, deadline=None)
@given(changes | st.dictionaries(st.sampled_from(own.FIELDS), values, max_size=3))
def test_random_keys_of_the_packages_own_form(changed):
    config, tensors = FILES[0]
    tensors = info(tensors)
    raw = open_raw(config, tensors).to_dict() | changed | {"model_type": "dspark"}
    with contextlib.suppress(ValueError):
        open_raw(raw, tensors)
