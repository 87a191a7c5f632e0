"""`DSparkCandidateGenerator`: transformers' interface, also inside transformers' own assisted loop."""

import pytest
import torch
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, RepetitionPenaltyLogitsProcessor
from transformers.generation.candidate_generator import CandidateGenerator

import checks
import oracle
import tiny
from hf_dspark import DSparkCandidateGenerator

PROMPT = [7, 21, 40, 3, 9]


def stock_loop(target, draft, monkeypatch, **options):
    """`generate` through transformers' own `_assisted_decoding`, with our generator in the place of its own."""
    generators = []

    def get_candidate_generator(self, *args, generation_config=None, logits_processor=None, **kwargs):
        generators.append(DSparkCandidateGenerator(draft, self, generation_config, logits_processor))
        return generators[-1]

    monkeypatch.setattr(GenerationMixin, "_assisted_decoding", GenerationMixin._assisted_decoding.__wrapped__)
    monkeypatch.setattr(GenerationMixin, "_get_candidate_generator", get_candidate_generator)
    output = target.generate(checks.tensor(PROMPT), assistant_model=draft, **options)
    assert len(generators) == 1
    return output


@pytest.mark.parametrize("kind", ["full", "bad", "led", "random"])
def test_greedy_in_transformers_own_loop(kind, monkeypatch):
    target = tiny.random_target() if kind in ("led", "random") else tiny.perm_target()
    expected = checks.plain(target, PROMPT, max_new_tokens=24)
    draft = {
        "full": tiny.perm_draft, "bad": tiny.bad_draft, "random": tiny.random_draft,
        "led": lambda: tiny.load_draft(*tiny.guided_files(tiny.text_table(expected[0].tolist()))),
    }[kind]()  # fmt: skip
    with checks.CallCounter(target) as calls:
        output = stock_loop(target, draft, monkeypatch, max_new_tokens=24, do_sample=False)
    assert output.tolist() == expected.tolist()
    if kind == "full":
        assert len(calls.shapes) <= 7, "drafts are used, not only tolerated"


def test_sampling_in_transformers_own_loop(monkeypatch):
    """q comes as log-probabilities whose softmax is q; a table of certain outcomes leaves only one text."""
    target, draft = tiny.perm_target(), tiny.perm_draft()
    output = stock_loop(target, draft, monkeypatch, max_new_tokens=20, do_sample=True, temperature=0.5)
    assert output[0].tolist() == PROMPT + tiny.chain(9, 20)


def test_interface():
    target = tiny.random_target()
    config, tensors = tiny.guided_files(tiny.text_table(PROMPT))
    draft, slow = tiny.load_draft(config, tensors), oracle.Oracle(config, tensors)
    generator = DSparkCandidateGenerator(draft, target, GenerationConfig(max_length=40))
    assert isinstance(generator, CandidateGenerator) and generator.requires_model_outputs
    ids = checks.tensor(PROMPT)
    candidates, logits = generator.get_candidates(ids, is_first_iteration=True)
    assert candidates.tolist() == [PROMPT] and logits is None

    with torch.no_grad():
        outputs = target(ids, **generator.model_kwargs_overrides)
    ids = torch.cat((ids, outputs.logits[:, -1:].argmax(-1)), dim=-1)
    candidates, logits = generator.get_candidates(
        ids, model_kwargs={}, model_outputs=outputs, is_first_iteration=False, n_last_matches=0
    )
    with torch.no_grad():
        hidden = target(checks.tensor(PROMPT), output_hidden_states=True).hidden_states
    block = slow.propose(int(ids[0, -1]), oracle.context_features(hidden, config["target_layer_ids"])[0])
    assert candidates[0].tolist() == ids[0].tolist() + block.tokens.tolist()
    assert logits is None, "greedy drafts have no distribution"
    generator.update_candidate_strategy(ids, torch.zeros(1, 1, tiny.V), 0)


def test_room_and_options_limit_the_candidates():
    target, draft = tiny.perm_target(), tiny.perm_draft()
    with torch.no_grad():
        outputs = target(checks.tensor(PROMPT), output_hidden_states=True)
    ids = checks.tensor(PROMPT + tiny.chain(9, 1))
    for max_length, number, expected in ((40, None, 4), (40, 2, 2), (8, None, 1), (7, None, 0), (9, 4, 2)):
        config = GenerationConfig(max_length=max_length, num_assistant_tokens=number)
        generator = DSparkCandidateGenerator(draft, target, config)
        candidates, _ = generator.get_candidates(ids, {}, outputs, is_first_iteration=False, n_last_matches=0)
        assert candidates.shape[1] - ids.shape[1] == expected


def test_sampled_candidates_come_with_the_q_they_were_drawn_from():
    """Processors and temperature are in q; a greedy draft at temperature > 0 has one-hot q."""
    target = tiny.random_target()
    draft = tiny.markov_draft(torch.randn(tiny.V, tiny.V))
    with torch.no_grad():
        outputs = target(checks.tensor(PROMPT), output_hidden_states=True)
    ids = checks.tensor(PROMPT + [50])
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(3.0)])
    config = GenerationConfig(max_length=40, do_sample=True)
    for method in ("probabilistic", "greedy"):
        draft.draft_sample_method = method
        generator = DSparkCandidateGenerator(draft, target, config, processors)
        candidates, logits = generator.get_candidates(ids, {}, outputs, is_first_iteration=False, n_last_matches=0)
        q = logits.float().softmax(-1)[0]
        prefix = ids
        for k, token in enumerate(candidates[0, ids.shape[1] :].tolist()):
            scores = draft.markov_head.markov_w2.weight[:, prefix[0, -1]][None].detach().clone()
            scores = processors(prefix, scores)
            if method == "greedy":
                assert token == int(scores.argmax())
                assert q[k].tolist() == torch.eye(tiny.V)[token].tolist()
            else:
                torch.testing.assert_close(q[k], scores.softmax(-1)[0], atol=1e-5, rtol=1e-4)
            prefix = torch.cat((prefix, torch.tensor([[token]])), dim=-1)


def test_misfits_are_refused_when_it_is_made():
    with pytest.raises(ValueError, match="64"):
        DSparkCandidateGenerator(tiny.perm_draft(), tiny.random_target(hidden_size=32, seed=1), GenerationConfig())
    with pytest.raises(ValueError, match="num_assistant_tokens"):
        DSparkCandidateGenerator(tiny.perm_draft(), tiny.perm_target(), GenerationConfig(num_assistant_tokens=9))
