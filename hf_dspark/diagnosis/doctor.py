"""`diagnose`: every examination of a pair, in order, and what follows from them."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..evaluation import ChatFormat, Prompt, Settings, dspark_methods, plain_methods
from ..evaluation.methods import PLAIN
from ..evaluation.records import Records
from ..evaluation.report import quality_report
from ..evaluation.runner import Runner, plan_prompts
from ..evaluation.speed import default_prompts
from ..generation.record import Round, SpeculationStats
from ..modeling_dspark import DSparkForCausalLM
from .acceptance import check_acceptance
from .alternatives import check_formats, check_readings
from .findings import NOTE, OK, PROBLEM, Diagnosis, Finding
from .pairing import check_configs, check_copies, check_lengths, check_models
from .sampling import check_sampling

DSPARK = "dspark"
Progress = Callable[[Iterable[Any], int], Iterable[Any]]


def diagnose(
    target: PreTrainedModel,
    draft: DSparkForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt] | None = None,
    *,
    max_new_tokens: int = 64,
    chat_template: bool | None = None,
    thinking: bool | None = None,
    cache_implementation: str | None = None,
    chi_squared: bool = False,
    seed: int = 0,
    progress: Progress = lambda iterable, total: iterable,
) -> Diagnosis:
    """Examine a pair: does it fit, is its text the target's own, and if little is accepted, why.

    Answers of the target alone are compared with those of the pair; on them, block layouts, neighbouring taps and other
    mask tokens are scored; first questions are asked again in other prompt formats.

    Args:
        target, draft, tokenizer: the pair. In float32 texts are equal token for token; in half precision differences at
            near ties are told apart.
        prompts: from `evaluation.load_prompts`; by default three short questions. First turns only.
        max_new_tokens: longest answer.
        chat_template, thinking: see `evaluation.ChatFormat`.
        cache_implementation: `"static"` examines the fast path.
        chi_squared: also test that sampled text follows the target's distribution.
        seed: of sampling.
        progress: wraps an iterable of known length.

    Raises:
        ValueError: prompts that are too long, or options that have no effect.
    """
    findings = check_configs(target.config, draft.config)
    if any(finding.level == PROBLEM for finding in findings):
        return Diagnosis(findings)
    findings += check_models(target, draft)
    chat = ChatFormat(tokenizer, chat_template=chat_template, thinking=thinking)
    prompts = [Prompt(p.set, p.index, p.turns[:1], p.category) for p in prompts or default_prompts()]
    play = Play(target, draft, prompts, Settings(max_new_tokens, seed=seed), cache_implementation, progress)
    with _no_probe(draft):
        records = play(chat, PLAIN, DSPARK)
        exactness, differences = play.exactness(records)
        found, measured = check_acceptance(_rounds(records), draft.config.num_draft_tokens)
        findings += [exactness, *found]
        texts = [
            (chat.encode(list(prompt.turns)), record["turns"][0]["calls"][PLAIN]["ids"][0])
            for prompt, record in zip(prompts, records, strict=True)
        ]
        found, measured["readings"] = check_readings(target, draft, tokenizer, texts)
        findings += found
        findings += check_copies(target, draft, low=any(f.level == PROBLEM for f in findings))
        taus = {str(chat): measured["mean_acceptance_length"]}
        taus |= {str(other): _tau(play(other, DSPARK)) for other in _other_formats(chat)}
        findings += check_formats(str(chat), taus)
        findings += check_lengths(max(len(prompt) + len(answer) for prompt, answer in texts), target, draft)
        if chi_squared:
            length = 4 * max_new_tokens
            found, measured["sampling"] = check_sampling(target, draft, [prompt for prompt, _ in texts], length, seed)
            findings += found
    measured |= {"formats": taus, "differences": differences, "dtype": str(target.dtype)}
    return Diagnosis(findings, measured)


class Play:
    """Questions of one diagnosis, asked in different ways; each call returns a record of every prompt."""

    def __init__(
        self,
        target: PreTrainedModel,
        draft: DSparkForCausalLM,
        prompts: Sequence[Prompt],
        settings: Settings,
        cache_implementation: str | None,
        progress: Progress,
    ):
        drafting = dspark_methods({DSPARK: draft}, cache_implementation=cache_implementation)
        self._methods = {method.name: method for method in [*plain_methods(compiled=False), *drafting]}
        self._target, self._prompts, self._settings, self._progress = target, prompts, settings, progress

    def __call__(self, chat: ChatFormat, *methods: str) -> list[dict[str, Any]]:
        runner = Runner(self._target, chat, [self._methods[name] for name in methods], self._settings)
        units = plan_prompts(self._prompts)
        runner.check_lengths(units)
        return list(self._progress(runner.run(units, Records(None, {})), len(units)))

    def exactness(self, records: Sequence[dict[str, Any]]) -> tuple[Finding, list[dict[str, Any]]]:
        """Whether the texts of both methods are equal, and where they are not."""
        methods = list(self._methods.values())
        report = quality_report(records, self._prompts, methods, str(self._target.dtype))
        return _exactness(report, records), report["differences"]


@contextmanager
def _no_probe(draft: DSparkForCausalLM):
    """The doctor looks closer than the probe does."""
    before, draft.probe = draft.probe, False
    try:
        yield
    finally:
        draft.probe = before


def _rounds(records: Iterable[dict[str, Any]]) -> list[Round]:
    calls = (turn["calls"][DSPARK] for record in records for turn in record["turns"])
    return [Round(**values) for call in calls for values in call["rounds"]]


def _tau(records: Iterable[dict[str, Any]]) -> float:
    return SpeculationStats(rounds=_rounds(records)).mean_acceptance_length


def _other_formats(chat: ChatFormat) -> list[ChatFormat]:
    """Other ways to write the same question, as far as the tokenizer knows any."""
    template = chat.tokenizer.chat_template
    ways: list[dict[str, Any]] = [{"chat_template": False}]
    if template is not None:
        switches = "enable_thinking" in str(template)
        ways += [{"thinking": on} for on in (True, False)] if switches else [{}]
    formats = [ChatFormat(chat.tokenizer, **way) for way in ways]
    return [other for other in formats if str(other) != str(chat)]


def _exactness(report: dict[str, Any], records: Sequence[dict[str, Any]]) -> Finding:
    call = records[0]["turns"][0]["calls"][DSPARK]
    how = f"{len(records)} greedy texts on the {call['path']} path"
    gaps = [d["logit_gap"] for d in report["differences"] if d["logit_gap"] is not None]
    if call["path"] == "target_only":
        fix = "Read the reason: drafts were not used, so nothing could be accepted."
        return Finding("exactness", NOTE, f"{how}: {call['reason']}", fix)
    if report["outputs"] == "identical":
        return Finding("exactness", OK, f"{how} equal those of the target alone")
    seen = f"{len(report['differences'])} of {how} differ from the target alone"
    if report["outputs"] == "near ties":
        seen = f"{seen}, all of them where two logits are {max(gaps):.3g} or less apart"
        return Finding("exactness", OK, seen, "`--dtype float32` shows exact equality.")
    fix = "Repeat with `--dtype float32`; if texts differ there too, report it with the JSON of this command."
    return Finding("exactness", PROBLEM, seen, fix)
