"""Which `Engine` serves a pair: made at the first call, kept at the draft, released."""

import threading
import weakref

import torch
from transformers import PreTrainedModel

from ..modeling_dspark import DSparkForCausalLM
from .engine import Engine, FastPath
from .graphs import current
from .pair import why_not_now, why_not_pair


class Engines:
    """The engines of one draft, by target. Copies of the draft start without any."""

    _all: "weakref.WeakSet[Engines]" = weakref.WeakSet()
    # Building and releasing move weights that several engines may share.
    _building = threading.RLock()

    def __init__(self) -> None:
        self.of_target: dict[int, Engine] = {}
        Engines._all.add(self)

    def __deepcopy__(self, memo: dict) -> "Engines":
        return Engines()

    def __reduce__(self) -> tuple:
        return Engines, ()

    @torch.no_grad()
    def get(self, target: PreTrainedModel, draft: DSparkForCausalLM) -> "Engine":
        """The engine of the pair; a new one when the modules of either have been exchanged.

        Raises:
            NotImplementedError: for a pair that has no ragged path; the message says why.
        """
        options = draft.fast_path or FastPath()
        if why_not := why_not_now(target):
            raise NotImplementedError(why_not)
        with Engines._building:
            engine = self.of_target.get(id(target))
            if engine is not None and engine.fits(target, draft, options):
                return engine
            if engine is not None:
                engine.close()  # it stays until there is another, for `release` to undo what it fused
            if why_not := why_not_pair(target, draft):
                raise NotImplementedError(why_not)
            is_first = engine is None
            with current(draft.device):
                engine = self.of_target[id(target)] = Engine(target, draft, options)
            if is_first:
                weakref.finalize(target, Engines._forget, weakref.ref(self), id(target))
            return engine

    @staticmethod
    def _forget(reference: "weakref.ref[Engines]", target_id: int) -> None:
        if (engines := reference()) is not None:
            engines.of_target.pop(target_id, None)

    def release(self, target: PreTrainedModel | None) -> None:
        with Engines._building:
            keys = list(self.of_target) if target is None else [id(target)] * (id(target) in self.of_target)
            for key in keys:
                engine = self.of_target.pop(key)
                engine.close()
                engine.unfuse()


def engine_of(target: PreTrainedModel, draft: DSparkForCausalLM) -> "Engine":
    """The engine of a pair, kept at the draft and gone with it or with the target.

    Raises:
        NotImplementedError: as `Engines.get`.
    """
    if "_engines" not in vars(draft):
        draft._engines = Engines()
    return draft._engines.get(target, draft)


def release(target: PreTrainedModel | None = None) -> None:
    """Free the caches and graphs of the fast path: of one target's pairs, or of all. The next call builds them anew."""
    for engines in list(Engines._all):
        engines.release(target)
