"""Typed look-ups in a foreign config.json, and the record of what was decided on the way."""

from collections.abc import Collection
from typing import Any

from transformers.utils import logging

logger = logging.get_logger(__name__)

REQUIRED = object()
# What a caller may set: the keys that published files contradict each other about, or lack.
OVERRIDES = ("sample_from_anchor", "block_size", "target_layer_ids", "mask_token_id")
# Families nest what belongs to the draft in one of these; the backbone's own shape always stands at the top.
NESTS = ("dflash_config", "text_config")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**31


def is_number(value: Any) -> bool:
    """A finite number of ordinary size that is no bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300


KINDS = {
    "size": ("an integer >= 1", lambda value: _is_int(value) and value >= 1),
    "count": ("an integer >= 0", lambda value: _is_int(value) and value >= 0),
    "number": ("a finite number", is_number),
    "flag": ("true or false", lambda value: isinstance(value, bool)),
    "text": ("a string", lambda value: isinstance(value, str)),
    "table": ("an object", lambda value: isinstance(value, dict)),
    "integers": ("a list of integers", lambda value: isinstance(value, list) and all(map(_is_int, value))),
    "numbers": ("a list of numbers", lambda value: isinstance(value, list) and all(map(is_number, value))),
    "texts": ("a list of strings", lambda value: isinstance(value, list) and all(isinstance(v, str) for v in value)),
}


def labels(raw: dict[str, Any]) -> list[Any]:
    """`architectures` of a config.json, an empty list if it is none."""
    found = raw.get("architectures")
    return found if isinstance(found, list) else []


def is_labelled(raw: dict[str, Any], names: Collection[str]) -> bool:
    """Whether one of `names` stands in `architectures`."""
    return any(isinstance(label, str) and label in names for label in labels(raw))


class Keys:
    """A config.json together with `resolution`, the decisions made while reading it (what -> why).

    A key whose value is null counts as absent. What the caller sets (`overrides`) comes before what the file says.
    """

    def __init__(self, raw: dict[str, Any], overrides: dict[str, Any] | None = None, *, quiet: bool = False):
        self.raw = raw
        self.overrides = {name: value for name, value in (overrides or {}).items() if value is not None}
        self.quiet = quiet
        self.resolution: dict[str, str] = {}

    def without_overrides(self) -> "Keys":
        """The file alone, without a record."""
        return Keys(self.raw, quiet=True)

    def note(self, what: str, why: str, *, warn: bool = False) -> None:
        """Record a decision and log it; `warn` for one that the user should check."""
        self.resolution[what] = why
        if not self.quiet:
            (logger.warning if warn else logger.info)(f"{what}: {why}")

    def find(self, name: str, *, nested: bool = False) -> tuple[Any, str | None]:
        """Value and full name of the place it was found at, (None, None) if absent.

        Raises:
            ValueError: two places disagree.
        """
        if name in self.overrides:
            value = self.overrides[name]
            self.note(name, f"{value!r}, set by the caller; the file says {self._stated(name, nested)}", warn=True)
            return value, name
        places = {name: self.raw.get(name)}
        for nest in NESTS if nested else ():
            if isinstance(self.raw.get(nest), dict):
                places[f"{nest}.{name}"] = self.raw[nest].get(name)
        found = [(value, place) for place, value in places.items() if value is not None]
        if not found:
            return None, None
        for value, place in found[1:]:
            if value != found[0][0]:
                raise ValueError(
                    f"config.json contradicts itself: `{found[0][1]}` is {found[0][0]!r} but `{place}` is {value!r}. "
                    "Remove the wrong one."
                )
        return found[0]

    def _stated(self, name: str, nested: bool) -> Any:
        tables = [self.raw, *(self.raw.get(nest) for nest in NESTS if nested)]
        values = [table.get(name) for table in tables if isinstance(table, dict)]
        return next((value for value in values if value is not None), "nothing")

    def get(
        self, name: str, kind: str, default: Any = REQUIRED, *, nested: bool = False, alias: str | None = None
    ) -> Any:
        """Value of a key, checked.

        Args:
            kind: one of `KINDS`.
            default: what an absent key means; without it the key is required.
            nested: whether the key may also stand in one of `NESTS`.
            alias: another spelling of the same key, looked up when the first is absent.

        Raises:
            ValueError: absent although required (with the places searched), of another kind, or contradictory.
        """
        value, place = self.find(name, nested=nested)
        if value is None and alias is not None:
            value, place = self.find(alias, nested=nested)
        if value is None:
            if default is not REQUIRED:
                return default
            places = [name, *(f"{nest}.{name}" for nest in NESTS if nested)]
            fix = f"Add it, or pass `{name}=...` to `from_pretrained`." if name in OVERRIDES else "Add it."
            raise ValueError(f"config.json lacks `{name}` (searched: {', '.join(places)}). {fix}")
        expected, fits = KINDS[kind]
        if not fits(value):
            source = "" if name in self.overrides else " in config.json"
            raise ValueError(f"`{place}`{source} must be {expected}, got {value!r}.")
        return value

    def sizes(self, *names: str) -> dict[str, int]:
        """Several required top-level sizes under their own names."""
        return {name: self.get(name, "size") for name in names}
