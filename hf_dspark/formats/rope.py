"""Rotary parameters: four spellings of one thing in, transformers' flat `rope_parameters` out."""

from typing import Any

from .keys import Keys, is_number

# Types whose frequencies are fixed once the config is known. The others follow the sequence length, which a draft with
# cached context keys cannot.
FIXED_TYPES = ("default", "linear", "yarn", "llama3", "proportional")
NEEDS_FACTOR = ("linear", "yarn", "llama3")
MULTI_AXIS = ("mrope_section", "mrope_interleaved")
DEFAULTS = {
    "qwen3": {"rope_type": "default", "rope_theta": 10000.0},
    "gemma4": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
}


def read_rope(keys: Keys, style: str) -> dict[str, Any]:
    """Rotary parameters of a draft as one flat dict with `rope_type` and `rope_theta`.

    Qwen3-style drafts rotate whole heads at plain positions: keys that the target's config leaked (partial rotation,
    multi-axis sections) are left out, as in the reference.

    Raises:
        ValueError: contradictory bases, a type that is unknown or follows the sequence length.
    """
    rope = _one_table(keys)
    theta = keys.get("rope_theta", "number", None)
    stated = rope.get("rope_theta")
    if theta is not None and stated is not None and theta != stated:
        raise ValueError(
            f"config.json contradicts itself: `rope_theta` is {theta} at the top level and {stated} in the rotary "
            "parameters. Remove the wrong one."
        )
    if stated is None and theta is None:
        default = DEFAULTS[style]["rope_theta"]
        keys.note("rope_theta", f"{default}: the {style} default, because config.json states none", warn=True)
        rope = {**(DEFAULTS[style] if not rope else {}), **rope, "rope_theta": default}
    elif stated is None:
        rope["rope_theta"] = theta
    rope.setdefault("rope_type", "default")
    if style == "qwen3":
        _drop_leaked(keys, rope)
    check_rope(rope)
    return rope


def interleaved(keys: Keys) -> bool:
    """Whether rotary pairs are neighbours instead of halves."""
    for name in ("rope_is_neox_style", "is_neox_style"):
        if keys.get(name, "flag", True, nested=True) is False:
            keys.note("rope", f"pairs of neighbours: the file says `{name}: false`")
            return True
    return False


def _one_table(keys: Keys) -> dict[str, Any]:
    """`rope_parameters` or `rope_scaling`, flattened and in the current spelling of its keys."""
    tables = {}
    for name in ("rope_parameters", "rope_scaling"):
        table = dict(keys.get(name, "table", {}))
        if isinstance(table.get("full_attention"), dict):
            table = dict(table["full_attention"])
        if "type" in table:
            table.setdefault("rope_type", table["type"])
            del table["type"]
        tables[name] = {key: value for key, value in table.items() if value is not None}
    new, old = tables.values()
    shared = new.keys() & old.keys()
    different = sorted(key for key in shared if new[key] != old[key])
    if different:
        key = different[0]
        raise ValueError(
            f"config.json contradicts itself: `rope_parameters.{key}` is {new[key]!r} but `rope_scaling.{key}` is "
            f"{old[key]!r}. Remove the wrong one."
        )
    return {**old, **new}


def _drop_leaked(keys: Keys, rope: dict[str, Any]) -> None:
    if rope["rope_type"] == "mrope":
        rope["rope_type"] = "default"
    factors = [rope.pop("partial_rotary_factor", None), keys.get("partial_rotary_factor", "number", None)]
    factor = next((factor for factor in factors if factor not in (None, 1.0)), None)
    if factor is not None and rope["rope_type"] != "default":
        raise ValueError(
            f"`partial_rotary_factor` {factor} with `rope_type` {rope['rope_type']!r} has no reference for Qwen3-style "
            "drafts. Remove the key if it was copied from the target."
        )
    if factor is not None:
        keys.note("partial_rotary_factor", f"{factor} ignored: Qwen3-style drafts rotate whole heads", warn=True)
    for name in MULTI_AXIS:
        top = keys.find(name)[0]
        if rope.pop(name, None) is not None or top is not None:
            keys.note(name, "ignored: drafts use plain positions", warn=True)


def check_rope(rope: dict[str, Any]) -> None:
    """Raise ValueError for flat rotary parameters that cannot be computed from."""
    if rope.get("rope_type") not in FIXED_TYPES:
        known = ", ".join(FIXED_TYPES)
        raise ValueError(f"`rope_type` {rope.get('rope_type')!r} is not supported in a draft; known: {known}.")
    positive = ["rope_theta"] + (["factor"] if rope["rope_type"] in NEEDS_FACTOR else [])
    if rope["rope_type"] == "llama3":
        positive += ["low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
    positive += [key for key in ("factor", "partial_rotary_factor", "original_max_position_embeddings") if key in rope]
    for key in positive:
        value: Any = rope.get(key)
        if not is_number(value) or value <= 0:
            raise ValueError(
                f"`{key}` of the rotary parameters must be a positive number for {rope['rope_type']!r}, got {value!r}."
            )
    other = [key for key, value in rope.items() if key != "rope_type" and not isinstance(value, (int, float))]
    if other:
        raise ValueError(f"`{other[0]}` of the rotary parameters must be a number, got {rope[other[0]]!r}.")
    if rope.get("partial_rotary_factor", 1.0) > 1:
        raise ValueError(f"`partial_rotary_factor` must be at most 1, got {rope['partial_rotary_factor']}.")
