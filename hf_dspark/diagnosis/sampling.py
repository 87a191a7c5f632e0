"""Does sampled text follow the target's distribution? A chi-squared test on every token of a few texts.

Each token x_t is drawn from p_t, which one plain forward over the finished text gives. With tokens in the order of
falling probability, the place of x_t on the cumulated scale, drawn uniformly inside its own share, is uniform on [0, 1]
and independent of all others, if and only if the sampler is right (the probability integral transform of a discrete
variable). Drafts that are kept too often come out as too many likely tokens.
"""

import torch
from transformers import PreTrainedModel, set_seed

from ..modeling_dspark import DSparkForCausalLM
from .findings import OK, PROBLEM, Finding

BINS = 20
UNLIKELY = 1e-4  # a right sampler fails once in ten thousand times


def check_sampling(
    target: PreTrainedModel, draft: DSparkForCausalLM, prompts: list[list[int]], max_new_tokens: int, seed: int
) -> tuple[list[Finding], dict[str, float]]:
    """Sample an answer to each prompt at T = 1 without truncation, and test all tokens together."""
    places = []
    for number, prompt in enumerate(prompts):
        set_seed(seed + number)
        ids = torch.tensor([prompt], device=target.device)
        text = target.generate(
            ids, attention_mask=torch.ones_like(ids), assistant_model=draft, max_new_tokens=max_new_tokens,
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0, repetition_penalty=1.0,
        )  # fmt: skip
        places.append(token_places(target, text, len(prompt)))
    p, statistic = uniformity(torch.cat(places))
    count = sum(map(len, places))
    measured = {"chi_squared": statistic, "p_value": p, "num_tokens": count}
    seen = f"chi-squared over {count} sampled tokens: p = {p:.3g}"
    if p >= UNLIKELY:
        return [Finding("sampling", OK, seen)], measured
    fix = "Repeat with another `--seed`; if it stays, report it with the JSON of this command: sampling must be exact."
    return [Finding("sampling", PROBLEM, seen, fix)], measured


@torch.no_grad()
def token_places(target: PreTrainedModel, text: torch.Tensor, prompt_length: int) -> torch.Tensor:
    """Where each new token of `text` [1, n] lies on the scale of its distribution, [new] float64 in [0, 1]."""
    logits = target(input_ids=text, attention_mask=torch.ones_like(text), use_cache=False).logits[0]
    new = text[0, prompt_length:].to(logits.device)
    p = logits[prompt_length - 1 : -1].double().softmax(dim=-1)
    own = p.gather(-1, new[:, None])
    before = torch.where(p > own, p, 0).sum(dim=-1)
    # Of equally likely tokens the lower id comes first.
    ties = (p == own) & (torch.arange(p.shape[-1], device=p.device) < new[:, None])
    before += (ties * own).sum(dim=-1)
    return (before + torch.rand(len(new), dtype=torch.float64).to(p.device) * own[:, 0]).clamp(0, 1).cpu()


def uniformity(places: torch.Tensor) -> tuple[float, float]:
    """p-value and statistic of the chi-squared test that places [N] are uniform on [0, 1]."""
    counts = torch.histc(places, bins=BINS, min=0, max=1)
    expected = len(places) / BINS
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor((BINS - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic.double() / 2)), float(statistic)
