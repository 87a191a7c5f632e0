"""What happens to a family: every form of a call is compared with plain generate, and the path it took is noted."""

from typing import Any

import torch
from transformers import PreTrainedModel

import checks
import hf_dspark
import tiny
from targets import FAMILIES, LAYERS, PROMPT, ROWS, VOCAB, target_of

GAMMA, NEW, PATTERN = 4, 24, (1, 4, 0, 2, 3)
# Every token at most once: then the draft's table can lead along the text, and every count of accepted drafts occurs.
DISTINCT = {"no_repeat_ngram_size": 1}


def forms(name: str) -> dict[str, dict[str, Any]]:
    """Arguments of the calls that people make, by the columns of docs/targets.md."""
    one, inputs = checks.batch([PROMPT]), FAMILIES[name].inputs
    found = {"one": one | DISTINCT, "static": one | {"cache_implementation": "static"}, "batch": checks.batch(ROWS)}
    return found if inputs is None else found | {"image": inputs() | DISTINCT}


def new_tokens(target: PreTrainedModel, call: dict[str, Any], **more: Any) -> torch.Tensor:
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    return target.generate(**call, **options, **more)[:, call["input_ids"].shape[1] :]


def scripted(target: PreTrainedModel, calls: dict[str, dict[str, Any]], texts: dict[str, torch.Tensor]):
    """A draft whose rounds accept about `PATTERN` drafts in turn along the first row of each text."""
    table = torch.zeros(VOCAB, VOCAB)
    for form, call in reversed(calls.items()):
        text = [int(call["input_ids"][0, -1]), *texts[form][0].tolist()]
        own, anchor = tiny.text_table(text, vocab=VOCAB), 1
        for accepted in PATTERN * NEW:
            if accepted < GAMMA and anchor + accepted < len(text):
                row = text[anchor + accepted]
                own[row] = own[row].roll(1)
            anchor += accepted + 1
        table = torch.where(own.any(-1, keepdim=True), own, table)
    hidden = target.config.get_text_config(decoder=True).hidden_size
    settings = {"vocab": VOCAB, "mask": VOCAB - 1, "hidden": 64, "target_hidden": hidden, "taps": (-1, 1, LAYERS - 2)}
    return tiny.load_draft(*tiny.guided_files(table, gamma=GAMMA, confidence=None, **settings))


def run(name: str) -> dict[str, Any]:
    """All forms of a family. Raises `AssertionError` where a text is not that of plain generate.

    Returns the path and the reason of each form, or the refusal, and `accepted`: the counts that occurred.
    """
    target, calls = target_of(name), forms(name)
    texts = {form: new_tokens(target, {k: v for k, v in call.items() if k != "cache_implementation"})
             for form, call in calls.items()}  # fmt: skip
    draft = scripted(target, calls, texts)
    draft.probe = False  # its hints depend on the script, not on the family
    row: dict[str, Any] = {"class": type(target).__name__}
    accepted: set[int] = set()
    for form, call in calls.items():
        with hf_dspark.record() as stats, checks.CallCounter(target) as forwards:
            try:
                found = new_tokens(target, call, assistant_model=draft)
            except ValueError as error:
                assert not forwards.shapes, f"{name}, {form}: refused after a forward ({error})"
                row[form] = {"path": "refused", "reason": str(error)}
                continue
        assert found.tolist() == texts[form].tolist(), f"{name}, {form}: not the text of plain generate"
        assert stats.reason
        if stats.path != "target_only":
            assert stats.num_rounds > 0 and stats.num_tokens == found.numel(), "every token comes from a round"
        accepted |= {r.accepted for r in stats.rounds}
        row[form] = {"path": stats.path, "reason": stats.reason}
    return row | {"accepted": sorted(accepted)}
