"""The public reference's values for every variant in `../shared/reference` (see its README, "Conventions")."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM

import checks
import hf_dspark
import oracle

VARIANTS = ("vanilla", "gated", "rnn", "dflash", "conf_hidden", "conf_only", "gemma4")
GAMMA = 7
TOLERANCE = {"atol": 1e-4, "rtol": 0}


class Case:
    """One variant: target, draft (as AutoModel gives it), slow oracle, and its golden files."""

    def __init__(self, folder, variant: str):
        family = "gemma4" if variant == "gemma4" else "qwen3"
        self.target = AutoModelForCausalLM.from_pretrained(folder / f"target_{family}", dtype=torch.float32).eval()
        self.draft = AutoModel.from_pretrained(folder / "drafts" / variant, dtype=torch.float32).eval()
        config = json.loads((folder / "drafts" / variant / "config.json").read_text())
        self.oracle = oracle.Oracle(config, load_file(folder / "drafts" / variant / "model.safetensors"))
        golden = folder / "goldens" / "variants" / variant
        self.prompts = json.loads((folder / "goldens" / family / "prompts.json").read_text())
        self.tensors = load_file(golden / "rounds.safetensors")
        self.rounds = json.loads((golden / "rounds.json").read_text())["rounds"]
        self.generation = json.loads((golden / "generation.json").read_text())

    def features(self, key: str) -> torch.Tensor:
        """Context features [S, n_taps·H] of all positions before the anchor; r1 has only its own."""
        prompt, number = key.split(".")
        before = [self.tensors[f"{prompt}.r{i}.context_features"] for i in range(int(number[1:]) + 1)]
        return torch.cat(before)

    def runs(self):
        """(prompt, run) of every recorded generation, edge cases included."""
        for run in self.generation["runs"]:
            yield self.prompts["prompts"][run["prompt_index"]], run
        for run in self.generation["edge_runs"]:
            yield self.prompts["edge"][run["edge_index"]]["prompt"], run


@pytest.fixture(scope="module", params=VARIANTS)
def case(request, shared_folder):
    return Case(shared_folder / "reference", request.param)


def test_oracle_reproduces_the_reference(case):
    """The slow reference is itself checked: tensors of both stored rounds, and one run of each threshold."""
    for key, info in case.rounds.items():
        block = case.oracle.propose(info["anchor_token"], case.features(key))
        assert block.tokens.tolist() == info["draft_tokens"]
        found = {"block_hidden": block.hidden, "base_logits": block.base_logits, "corrected_logits": block.logits}
        found["confidence_logits"] = block.confidence_logits
        for name, value in found.items():
            if f"{key}.{name}" in case.tensors:
                torch.testing.assert_close(value, case.tensors[f"{key}.{name}"], **TOLERANCE)
    for run in case.generation["runs"][4:8]:
        prompt, limit = case.prompts["prompts"][run["prompt_index"]], run["max_new_tokens"]
        ids, rounds = oracle.greedy(
            case.target, case.oracle, prompt, limit, run["stop_token_ids"], run["confidence_threshold"]
        )
        assert ids == run["output_ids"]
        assert (
            round_counts(prompt, run)
            == [(r.position, r.verified, r.accepted) for r in rounds][: len(round_counts(prompt, run))]
        )


def round_counts(prompt, run) -> list[tuple[int, int, int]]:
    """(position, verified, accepted) of the recorded rounds that begin with room for more than γ tokens.

    The reference runs its last rounds past the limit and cuts the output, so later rounds say nothing. A stop token
    inside a block cuts `proposal_lengths` there but not `rounds[].proposal_length`, which is ℓ of the contract.
    """
    end = len(prompt) + run["max_new_tokens"]
    return [(r["start"], r["proposal_length"], r["accepted"]) for r in run["rounds"] if end - (r["start"] + 1) > GAMMA]


def test_context_projection(case):
    for key, info in case.rounds.items():
        projected = case.draft.hidden_norm(case.draft.fc(case.features(key)))
        own = case.tensors[f"{key}.context_projected"]
        torch.testing.assert_close(projected[-len(own) :], own, **TOLERANCE)
        assert len(projected) == info["start"]


def test_features_come_from_the_target(case):
    """`context_features` of a full forward equals what the reference fed, for prompt rows and for verified rows."""
    for i, prompt in enumerate(case.prompts["prompts"]):
        first, second = case.rounds[f"p{i}.r0"], case.rounds[f"p{i}.r1"]
        run = next(r for r in case.generation["runs"] if r["prompt_index"] == i)
        text = torch.tensor([run["output_ids"][: second["start"]]])
        assert first["start"] == len(prompt)
        with torch.no_grad():
            outputs = case.target(text, output_hidden_states=True)
        features = hf_dspark.context_features(outputs, case.draft.config.target_layer_ids)
        torch.testing.assert_close(features[0], case.features(f"p{i}.r1"), **TOLERANCE)


def test_propose(case):
    for key, info in case.rounds.items():
        block = case.draft.propose(torch.tensor([info["anchor_token"]]), case.features(key)[None])
        assert block.tokens[0].tolist() == info["draft_tokens"]
        golden = {
            "block_hidden": block.hidden_states, "base_logits": block.base_logits, "corrected_logits": block.logits,
            "confidence_logits": block.confidence_logits,
        }  # fmt: skip
        for name, value in golden.items():
            if f"{key}.{name}" in case.tensors:
                torch.testing.assert_close(value[0], case.tensors[f"{key}.{name}"], **TOLERANCE)
        assert (block.confidence_logits is None) == (f"{key}.confidence_logits" not in case.tensors)
        assert (block.survival is None) == (block.confidence_logits is None)


def test_generation(case):
    """Output ids of every run and edge run at every threshold, and the counters wherever the limit is far enough."""
    for prompt, run in case.runs():
        threshold = (
            {"assistant_confidence_threshold": run["confidence_threshold"]} if run["confidence_threshold"] else {}
        )
        output, stats = checks.generate(
            case.target,
            case.draft,
            prompt,
            max_new_tokens=run["max_new_tokens"],
            eos_token_id=run["stop_token_ids"],
            **threshold,
        )
        label = (run.get("kind", run.get("prompt_index")), run["confidence_threshold"])
        assert output[0].tolist() == run["output_ids"], label
        checks.adds_up(stats, run["num_output_tokens"], GAMMA)
        expected = round_counts(prompt, run)
        assert [(r.position, r.verified, r.accepted) for r in stats.rounds][: len(expected)] == expected, label
        for here, golden in zip(stats.rounds, run["rounds"][: len(expected)], strict=False):
            decided = min(here.accepted + 1, here.verified)
            assert here.draft_tokens[:decided] == golden["draft_tokens"][:decided], label
            assert here.next_token == (None if golden["terminated_by_stop_token"] else golden["next_token"]), label


def test_threshold_zero_is_unset(case):
    prompt = case.prompts["prompts"][2]
    _, unset = checks.generate(case.target, case.draft, prompt, max_new_tokens=24)
    _, zero = checks.generate(case.target, case.draft, prompt, max_new_tokens=24, assistant_confidence_threshold=0.0)
    assert [r.verified for r in unset.rounds] == [r.verified for r in zero.rounds]
    assert unset.rounds[0].verified == GAMMA
