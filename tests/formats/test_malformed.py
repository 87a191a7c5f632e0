"""Whatever a config.json or a tensor header says, reading it ends in a config or in a ValueError."""

import contextlib
import functools
import json
import string
import tempfile
from pathlib import Path

import torch
from family_files import muse_files, some_ids, specforge_files, speculators_files, torchspec_files, zlab_files
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from deepspec_files import draft, gemma4_files, info
from hf_dspark import DSparkForCausalLM
from hf_dspark.formats import detect, foreign_config, own, speculators
from hf_dspark.formats.parts import check_sizes

FILES = [draft(), draft(head="rnn", layers=2), draft(rank=0, confidence=None), gemma4_files()]
DFLASH = draft(rank=0, confidence=None)
FOREIGN = [
    speculators_files(*draft(), some_ids()), zlab_files(*DFLASH), specforge_files(*draft()), muse_files(*DFLASH),
    torchspec_files(*draft(), block_size=4),
]  # fmt: skip
FOREIGN_KEYS = sorted({key for config, _ in FOREIGN for key in config}) + ["layer_types", "is_causal", "sliding_window"]
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


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(FOREIGN),
    st.dictionaries(st.sampled_from(FOREIGN_KEYS), values, max_size=3),
    st.sampled_from([*speculators.DRAFT_KEYS, "hidden_size", "layer_types", "rope_parameters", "model_type"]),
    values,
)
def test_random_keys_of_other_families(files, changed, key, value):
    config, tensors = files
    config = config | changed
    for nest in ("transformer_layer_config", "dflash_config"):
        if isinstance(config.get(nest), dict):
            config[nest] = config[nest] | {key: value}
    succeeds_or_raises_value_error(config, info(tensors))


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(FILES + FOREIGN), st.data())
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


# ---- whole folders, through the public loader


@functools.cache
def folder_bytes() -> tuple[bytes, bytes]:
    """config.json and model.safetensors of a small draft."""
    config = tiny.draft_config()
    with tempfile.TemporaryDirectory() as folder:
        tiny.write_draft(folder, config, tiny.draft_tensors(config))
        return tuple((Path(folder) / name).read_bytes() for name in ("config.json", "model.safetensors"))


def loads_or_raises_value_error(files: dict[str, bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            (Path(folder) / name).write_bytes(content)
        with contextlib.suppress(ValueError):
            draft = DSparkForCausalLM.from_pretrained(folder)
            assert all(parameter.device.type == "cpu" for parameter in draft.parameters())


def damaged(data, content: bytes, within: int) -> bytes:
    """`content` with a few of its first `within` bytes changed, cut out or doubled, or cut short."""
    for _ in range(data.draw(st.integers(1, 3))):
        at, count = data.draw(st.integers(0, within - 1)), data.draw(st.integers(0, 8))
        way, new = data.draw(st.sampled_from(["change", "cut", "double", "end"])), data.draw(st.binary(max_size=8))
        content = {
            "change": content[:at] + new + content[at + len(new) :],
            "cut": content[:at] + content[at + count :],
            "double": content[: at + count] + content[at:],
            "end": content[:at],
        }[way]
    return content


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_damaged_files(data):
    config, tensors = folder_bytes()
    if data.draw(st.booleans()):
        config = damaged(data, config, len(config))
    else:
        header = 8 + int.from_bytes(tensors[:8], "little")
        tensors = damaged(data, tensors, data.draw(st.sampled_from([8, header, len(tensors)])))
    loads_or_raises_value_error({"config.json": config, "model.safetensors": tensors})


entries = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "F16", "BF16", "I8", "I64", "F8_E4M3", "BOOL", "?"]) | scalars,
        "shape": st.lists(st.integers(-1, 80), max_size=3) | scalars,
        "data_offsets": st.lists(st.integers(-1, 2**40), max_size=3) | scalars,
    },
)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_headers_that_say_something_else(data):
    config, tensors = folder_bytes()
    end = 8 + int.from_bytes(tensors[:8], "little")
    header = json.loads(tensors[8:end])
    name = data.draw(st.sampled_from(sorted(header)))
    header[name] = data.draw(entries.map(lambda entry: header[name] | entry) | values)
    if data.draw(st.booleans()):
        header[data.draw(st.sampled_from(["fc.weight", "stranger.weight", "", "__metadata__"]))] = header.pop(name)
    text = json.dumps(header).encode()
    tensors = len(text).to_bytes(8, "little") + text + tensors[end:]
    loads_or_raises_value_error({"config.json": config, "model.safetensors": tensors})


shards = st.sampled_from(["a.safetensors", "../a.safetensors", "/a.safetensors", "b.safetensors", ""]) | values
maps = st.dictionaries(st.sampled_from(["fc.weight", "norm.weight", "x"]), shards)


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.sampled_from(["weight_map", "metadata"]), values | maps))
def test_indexes_of_shards(index):
    config, tensors = folder_bytes()
    index_file = {"model.safetensors.index.json": json.dumps(index).encode()}
    loads_or_raises_value_error({"config.json": config, "a.safetensors": tensors, **index_file})
