"""A slow, readable reference of DSpark decoding, to check the fast code against.

Plain torch over a DeepSpec folder's `config.json` dict and tensors. Nothing is cached and nothing is imported from the
package: every round runs the whole target over the whole text and the whole draft context from scratch.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass
class Block:
    """One proposed block: [γ] tokens and confidence logits, [γ, H] hidden states after the norm, [γ, V] logits."""

    tokens: torch.Tensor
    hidden: torch.Tensor
    base_logits: torch.Tensor
    logits: torch.Tensor
    confidence_logits: torch.Tensor | None

    def survival(self, temperatures=None) -> torch.Tensor | None:
        """a_j = c_1 · … · c_j with c_k = σ(logit_k / T_k)."""
        if self.confidence_logits is None:
            return None
        a, product = [], 1.0
        for k, logit in enumerate(self.confidence_logits.tolist()):
            product *= 1 / (1 + math.exp(-logit / (1.0 if temperatures is None else temperatures[k])))
            a.append(product)
        return torch.tensor(a)


@dataclass
class Round:
    """One round: `position` of the anchor, the block, ℓ, how many drafts were accepted, and the target's own token."""

    position: int
    anchor: int
    block: Block
    verified: int
    accepted: int
    next_token: int


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    x = x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    return x if weight is None else x * weight


def rotate(x: torch.Tensor, positions: torch.Tensor, theta: float, factor: float) -> torch.Tensor:
    """Rotary embedding of x [n, heads, dim], halves paired; only the first `factor` of the frequencies turn."""
    dim = x.shape[-1]
    frequencies = [theta ** (-2 * i / dim) if i < int(factor * dim // 2) else 0.0 for i in range(dim // 2)]
    angle = positions[:, None, None].float() * torch.tensor(frequencies)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), dim=-1)


class Oracle:
    """The draft. `config` is the DeepSpec config.json, `tensors` its state dict; anchor-first layout.

    `window` is (sinks, recent): the context tokens that it remembers, `None` for all.
    """

    def __init__(self, config: dict, tensors: dict[str, torch.Tensor], window: tuple[int, int] | None = None):
        self.config, self.window = config, window
        self.tensors = {name: tensor.float() for name, tensor in tensors.items()}
        self.gemma = config["model_type"].startswith("gemma4")
        self.gamma = config["block_size"]
        self.eps = config["rms_norm_eps"]
        self.head_dim = config["global_head_dim"] if self.gemma else config["head_dim"]
        rope = config["rope_parameters"]
        rope = rope["full_attention"] if self.gemma else rope
        self.theta, self.factor = rope["rope_theta"], rope.get("partial_rotary_factor", 1.0)
        self.stretch = rope["factor"] if rope.get("rope_type") == "linear" else 1.0

    def weight(self, name: str) -> torch.Tensor | None:
        return self.tensors.get(name + ".weight")

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return rms_norm(x, self.tensors[name + ".weight"], self.eps)

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, self.tensors[name + ".weight"], self.tensors.get(name + ".bias"))

    def context(self, features: torch.Tensor) -> torch.Tensor:
        """Concatenated taps [S, n_taps·H_target] -> [S, H]."""
        return self.norm(self.linear(features, "fc"), "hidden_norm")

    def keys_and_values(self, x: torch.Tensor, positions: torch.Tensor, layer: str):
        """[n, H] -> keys and values [n, kv heads, head_dim]."""
        key = self.linear(x, layer + "k_proj").unflatten(-1, (-1, self.head_dim))
        has_value = self.weight(layer + "v_proj") is not None
        value = self.linear(x, layer + "v_proj").unflatten(-1, (-1, self.head_dim)) if has_value else key
        if self.gemma:
            value = rms_norm(value, None, self.eps)
        return rotate(self.norm(key, layer + "k_norm"), positions / self.stretch, self.theta, self.factor), value

    def seen(self, length: int) -> torch.Tensor:
        """Positions of the context that a block behind `length` tokens sees."""
        sinks, recent = self.window or (0, length)
        return torch.tensor([i for i in range(length) if i < sinks or i >= length - recent], dtype=torch.long)

    def blocked(self, layer: int, slots: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """[γ, keys] of one layer: what a slot does not see, by the positions of both."""
        kinds = self.config.get("layer_types") or ["full_attention"] * (layer + 1)
        slides, causal = kinds[layer] == "sliding_attention", self.config.get("is_causal")
        ahead = keys[None] - slots[:, None]
        blocked = (ahead > 0) & torch.tensor(slides if causal is None else causal)
        return blocked | (ahead.abs() >= self.config["sliding_window"]) if slides else blocked

    def attention(self, x: torch.Tensor, context: torch.Tensor, layer: str) -> torch.Tensor:
        """Block [γ, H] over context [S, H] at positions 0..S-1 and over all of itself at S..S+γ-1."""
        start, seen = len(context), self.seen(len(context))
        positions = torch.arange(start, start + len(x))
        query = self.linear(x, layer + "q_proj").unflatten(-1, (-1, self.head_dim))
        query = rotate(self.norm(query, layer + "q_norm"), positions / self.stretch, self.theta, self.factor)
        context_key, context_value = self.keys_and_values(context[seen], seen, layer)
        block_key, block_value = self.keys_and_values(x, positions, layer)
        key, value = torch.cat((context_key, block_key)), torch.cat((context_value, block_value))
        groups = query.shape[1] // key.shape[1]
        scale = 1.0 if self.gemma else self.head_dim**-0.5
        heads, blocked = [], self.blocked(int(layer.split(".")[1]), positions, torch.cat((seen, positions)))
        for head in range(query.shape[1]):
            scores = query[:, head] @ key[:, head // groups].T * scale
            weights = scores.masked_fill(blocked, float("-inf")).softmax(-1)
            heads.append(weights @ value[:, head // groups])
        return self.linear(torch.cat(heads, dim=-1), layer + "o_proj")

    def mlp(self, x: torch.Tensor, layer: str) -> torch.Tensor:
        gate = self.linear(x, layer + "gate_proj")
        gate = F.gelu(gate, approximate="tanh") if self.gemma else F.silu(gate)
        return self.linear(gate * self.linear(x, layer + "up_proj"), layer + "down_proj")

    def block_hidden(self, anchor: int, features: torch.Tensor) -> torch.Tensor:
        """Hidden states [γ, H] of `[anchor, mask, …]` behind context features [S, n_taps·H_target], after the norm."""
        ids = torch.tensor([anchor] + [self.config["mask_token_id"]] * (self.gamma - 1))
        x = self.tensors["embed_tokens.weight"][ids]
        if self.gemma:
            x = x * self.config["hidden_size"] ** 0.5
        context = self.context(features)
        for i in range(self.config["num_hidden_layers"]):
            name = f"layers.{i}."
            y = self.attention(self.norm(x, name + "input_layernorm"), context, name + "self_attn.")
            if not self.gemma:
                x = x + y
                x = x + self.mlp(self.norm(x, name + "post_attention_layernorm"), name + "mlp.")
                continue
            x = x + self.norm(y, name + "post_attention_layernorm")
            y = self.mlp(self.norm(x, name + "pre_feedforward_layernorm"), name + "mlp.")
            x = (x + self.norm(y, name + "post_feedforward_layernorm")) * self.tensors[name + "layer_scalar"]
        return self.norm(x, "norm")

    def markov_step(self, prev: int, hidden: torch.Tensor, state: torch.Tensor):
        """Bias [V] of one slot and the next recurrent state."""
        kind, e = self.config["markov_head_type"], self.tensors["markov_head.markov_w1.weight"][prev]
        if kind == "vanilla":
            u = e
        elif kind == "gated":
            u = self.linear(torch.cat((hidden, e)), "markov_head.gate_proj").sigmoid() * e
        else:
            gate, candidate, out = self.linear(torch.cat((state, e, hidden)), "markov_head.joint_proj").chunk(3)
            u, state = out.tanh(), gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh()
        return self.linear(u, "markov_head.markov_w2"), state

    def propose(self, anchor: int, features: torch.Tensor, choose=lambda k, logits: int(logits.argmax())) -> Block:
        """One block; `choose(k, logits)` picks x_{k+1}, the arg max unless said otherwise."""
        hidden = self.block_hidden(anchor, features)
        base = self.linear(hidden, "lm_head")
        cap = self.config.get("final_logit_softcapping") if self.gemma else None
        if cap is not None:
            base = cap * (base / cap).tanh()
        tokens, logits, confidence = [], [], []
        prev, state = anchor, torch.zeros(max(self.config["markov_rank"], 1))
        for k in range(self.gamma):
            bias = 0
            if self.config["markov_rank"]:
                bias, state = self.markov_step(prev, hidden[k], state)
            logits.append(base[k] + bias)
            if self.config["enable_confidence_head"]:
                with_markov = self.config["confidence_head_with_markov"]
                e = [self.tensors["markov_head.markov_w1.weight"][prev]] if with_markov else []
                confidence.append(self.linear(torch.cat([hidden[k], *e]), "confidence_head.proj")[0])
            prev = choose(k, logits[-1])
            tokens.append(prev)
        confidence = torch.stack(confidence) if confidence else None
        return Block(torch.tensor(tokens), hidden, base, torch.stack(logits), confidence)


def context_features(hidden_states, taps) -> torch.Tensor:
    """hidden_states of a forward -> [B, S, n_taps·H]; tap i is entry i + 1, tap -1 the embeddings."""
    return torch.cat([hidden_states[i + 1] for i in taps], dim=-1)


def truncate(confidence_logits: torch.Tensor | None, threshold: float, gamma: int) -> int:
    """ℓ: the slots before the first whose conditional confidence is below the threshold."""
    if confidence_logits is not None:
        for k, logit in enumerate(confidence_logits.tolist()):
            if 1 / (1 + math.exp(-logit)) < threshold:
                return k
    return gamma


@torch.no_grad()
def greedy(target, draft: Oracle, prompt: list[int], max_new_tokens: int, eos=(), threshold: float = 0.0,
           num_drafts: int | None = None) -> tuple[list[int], list[Round]]:  # fmt: skip
    """Greedy DSpark decoding. Returns the text (prompt included) and the rounds, with the contract's own definitions:

    ℓ leaves room for the target's token inside the limit, and `accepted` counts drafts that were returned.
    """
    limit = len(prompt) + max_new_tokens
    ids = [*prompt, int(target(torch.tensor([prompt])).logits[0, -1].argmax())]
    rounds = []
    while len(ids) < limit and ids[-1] not in eos:
        outputs = target(torch.tensor([ids]), output_hidden_states=True)
        features = context_features(outputs.hidden_states, draft.config["target_layer_ids"])[0, :-1]
        block = draft.propose(ids[-1], features)
        kept = truncate(block.confidence_logits, threshold, draft.gamma)
        kept = min(kept, num_drafts or draft.gamma, limit - len(ids) - 1)
        answers = (
            target(torch.tensor([ids + block.tokens[:kept].tolist()])).logits[0, len(ids) - 1 :].argmax(-1).tolist()
        )
        round_ = Round(len(ids) - 1, ids[-1], block, kept, 0, -1)
        for token, answer in zip(block.tokens[:kept].tolist() + [None], answers, strict=True):
            ids.append(answer)
            if token != answer:
                round_.next_token = answer
                break
            round_.accepted += 1
            if answer in eos:
                break
        rounds.append(round_)
    return ids, rounds


def accept(tokens, q, p, uniform) -> int:
    """Accepted prefix of one row: tokens [n], q and p [n, V], uniform [n]."""
    for k, token in enumerate(tokens.tolist()):
        if not uniform[k] * q[k, token] < p[k, token]:
            return k
    return len(tokens)


def residual(p, q) -> torch.Tensor:
    """norm(max(p - q, 0)) of one row [V]; p where nothing is left."""
    left = torch.stack([max(a - b, torch.zeros(())) for a, b in zip(p, q, strict=True)])
    return left / left.sum() if left.sum() > 0 else p
