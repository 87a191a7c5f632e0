"""Small drafts that are really trained, in seconds: they learn a few texts of a tiny target by heart.

Unlike drafts made by hand they depend on their block layout, their taps and their mask token, so each can be read the
wrong way.
"""

import functools
import random

import torch
import torch.nn.functional as F

import hf_dspark
import tiny
from hf_dspark import training


@functools.cache
def texts(seed: int = 0, count: int = 16, length: int = 48) -> tuple[list[int], ...]:
    """What T-rand writes greedily after random prompts of six tokens."""
    stream = random.Random(seed)
    prompts = torch.tensor([[stream.randrange(1, 50) for _ in range(6)] for _ in range(count)])
    return tuple(tiny.random_target().generate(prompts, max_new_tokens=length - 6, do_sample=False).tolist())


@functools.cache
def files(anchor_first: bool = True, taps: tuple[int, ...] = (0, 2, 4), steps: int = 160):
    """(config, tensors) of a draft for T-rand that knows `texts()`; in its own layout it is nearly always right."""
    config = tiny.draft_config(taps=taps, rank=0, confidence=None)
    draft = tiny.load_draft(config, tiny.draft_tensors(config), sample_from_anchor=anchor_first)
    ids = torch.tensor(texts())
    with torch.no_grad():
        outputs = tiny.random_target()(ids, output_hidden_states=True)
    features = hf_dspark.context_features(outputs, list(taps))
    anchors = torch.arange(5, ids.shape[1] - 1).expand(len(ids), -1)
    draft.train()
    parameters = [p for name, p in draft.named_parameters() if name not in ("embed_tokens.weight", "lm_head.weight")]
    optimizer = torch.optim.AdamW(parameters, lr=3e-3)
    for _ in range(steps):
        block = training.forward_blocks(
            draft, ids, torch.ones_like(ids), features, anchors, torch.ones_like(anchors, dtype=torch.bool)
        )
        loss = F.cross_entropy(block.draft_logits[block.eval_mask], block.target_ids[block.eval_mask])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return config, {name: tensor.detach().clone() for name, tensor in draft.state_dict().items()}


def draft(anchor_first=True, *, read_anchor_first: bool | None = None, taps=(0, 2, 4), read_taps=None, steps=160):
    """The trained draft, read as it was trained or in another way."""
    config, tensors = files(anchor_first, taps, steps)
    layout = anchor_first if read_anchor_first is None else read_anchor_first
    return tiny.load_draft(config | {"target_layer_ids": list(read_taps or taps)}, tensors, sample_from_anchor=layout)
