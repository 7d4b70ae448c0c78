"""The drafter written a second time: one query, one head and one token after another, float64, no cache, no masks.

Only the numbers of a config and the tensors of a state dict come from the library; how they are used is written down
here from the paper (arXiv 2607.05147, section 3.1). Everything is about one row: batches, padding and caches must not be
seen in the result.
"""

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ReferenceDraft:
    """Tokens `(K,)`, base logits `(K, V_d)`, draft logits `(K, V)` and confidence logits `(K,)` of one block."""

    tokens: list[int]
    base_logits: torch.Tensor
    draft_logits: torch.Tensor
    confidence_logits: torch.Tensor | None


class ReferenceDrafter:
    """A drafter for one row.

    Args:
        weights: State dict of a drafter.
        config: Its config; only fields are read.
        embedding: `(V, D)`, where the state dict has none.
        head: `(V, D)`, where the state dict has none; its rows are chosen here when the vocabulary is reduced.
        head_bias: `(V,)`, with `head`.
    """

    def __init__(self, weights, config, embedding=None, head=None, head_bias=None):
        self.config = config
        self.weights = {name: tensor.double() for name, tensor in weights.items()}
        self.kept = list(range(config.vocab_size))
        if "d2t" in weights:
            self.kept = [draft_id + int(shift) for draft_id, shift in enumerate(weights["d2t"])]
        self.embedding = self.weights["embed_tokens.weight"] if embedding is None else embedding.double()
        if head is None:
            self.head, self.head_bias = self.weights["lm_head.weight"], None
        else:
            self.head = torch.stack([head[token].double() for token in self.kept])
            self.head_bias = None if head_bias is None else head_bias.double()[self.kept]

    def block_hidden_states(self, taps, anchor, positions=None):
        """h of every input slot, from the taps `(T, len(ids) * D_target)` of all tokens before the anchor.

        `positions` are those of the taps, by default 0 to T - 1; the anchor's is the next one.
        """
        config = self.config
        positions = list(range(len(taps))) if positions is None else positions
        context = [self._rms_norm(self.weights["fc.weight"] @ tap.double(), "hidden_norm") for tap in taps]
        num_inputs = config.block_size + config.first_prediction_slot
        block = [self.embedding[anchor]] + [self.embedding[config.mask_token_id]] * (num_inputs - 1)
        block_positions = [positions[-1] + 1 + slot for slot in range(num_inputs)]
        for layer in range(config.num_hidden_layers):
            block = self._layer(layer, block, block_positions, context, positions)
        return torch.stack([self._rms_norm(state, "norm") for state in block])

    def draft(self, hidden_states, anchor, tokens=None):
        """The sequential stage; draws greedily, or follows `tokens`."""
        config, weights = self.config, self.weights
        predicting = hidden_states[config.first_prediction_slot :]
        drafted, all_base, all_logits, all_confidences = [], [], [], []
        previous, state = anchor, torch.zeros(config.markov_rank, dtype=torch.float64)
        for k, hidden in enumerate(predicting):
            base = self.head @ hidden
            if self.head_bias is not None:
                base = base + self.head_bias
            features = weights["markov_head.markov_w1.weight"][previous] if config.markov_rank else None
            bias, state = self._transition_bias(features, hidden, state)
            logits = torch.full((config.vocab_size,), -math.inf, dtype=torch.float64)
            for draft_id, token in enumerate(self.kept):
                logits[token] = (base + bias)[draft_id]
            if config.enable_confidence_head:
                read = torch.cat([hidden, features]) if config.confidence_head_with_markov else hidden
                projected = weights["confidence_head.proj.weight"] @ read + weights["confidence_head.proj.bias"]
                all_confidences.append(projected[0])
            previous = int(logits.argmax()) if tokens is None else int(tokens[k])
            drafted.append(previous)
            all_base.append(base)
            all_logits.append(logits)
        confidences = torch.stack(all_confidences) if all_confidences else None
        return ReferenceDraft(drafted, torch.stack(all_base), torch.stack(all_logits), confidences)

    def _transition_bias(self, features, hidden, state):
        config, weights = self.config, self.weights
        if config.markov_rank == 0:
            return torch.zeros(len(self.kept), dtype=torch.float64), state
        out = weights["markov_head.markov_w2.weight"]
        if config.markov_head_type == "vanilla":
            return out @ features, state
        if config.markov_head_type == "gated":
            read = torch.cat([hidden, features])
            gate = weights["markov_head.gate_proj.weight"] @ read + weights["markov_head.gate_proj.bias"]
            return out @ (features / (1 + torch.exp(-gate))), state
        read = torch.cat([state, features, hidden])
        joint = weights["markov_head.joint_proj.weight"] @ read + weights["markov_head.joint_proj.bias"]
        rank = config.markov_rank
        keep = 1 / (1 + torch.exp(-joint[:rank]))
        state = keep * state + (1 - keep) * torch.tanh(joint[rank : 2 * rank])
        return out @ torch.tanh(joint[2 * rank :]), state

    def _layer(self, layer, block, block_positions, context, positions):
        name = f"layers.{layer}"
        normed = [self._rms_norm(state, f"{name}.input_layernorm") for state in block]
        key_positions = positions + block_positions
        keys = [
            self._heads(state, f"{name}.self_attn.k_proj", f"{name}.self_attn.k_norm", position)
            for state, position in zip(context + normed, key_positions, strict=True)
        ]  # [key][head] -> (head_dim,)
        values = [self._heads(state, f"{name}.self_attn.v_proj") for state in context + normed]
        result = []
        for slot, state in enumerate(block):
            position = block_positions[slot]
            queries = self._heads(
                normed[slot], f"{name}.self_attn.q_proj", f"{name}.self_attn.q_norm", block_positions[slot]
            )
            seen = self._seen(layer, slot, position, key_positions, len(context))
            attended = self._linear(self._attend(queries, keys, values, seen), f"{name}.self_attn.o_proj")
            state = state + attended
            read = self._rms_norm(state, f"{name}.post_attention_layernorm")
            gate = self._linear(read, f"{name}.mlp.gate_proj")
            inner = gate / (1 + torch.exp(-gate)) * self._linear(read, f"{name}.mlp.up_proj")
            result.append(state + self._linear(inner, f"{name}.mlp.down_proj"))
        return result

    def _seen(self, layer, slot, position, key_positions, num_context):
        """Indices of the keys that a slot of the block attends to."""
        seen = []
        for key, key_position in enumerate(key_positions):
            later_in_block = key - num_context > slot
            if later_in_block and self.config.block_is_causal:
                continue
            sliding = self.config.layer_types[layer] == "sliding_attention"
            if sliding and position - key_position >= self.config.sliding_window:
                continue
            seen.append(key)
        return seen

    def _attend(self, queries, keys, values, seen):
        group = len(queries) // len(keys[0])
        outputs = []
        for head, query in enumerate(queries):
            shared = head // group
            scores = torch.stack([query @ keys[key][shared] for key in seen]) / math.sqrt(self.config.head_dim)
            weights = torch.exp(scores - scores.max())
            weights = weights / weights.sum()
            outputs.append(sum(weight * values[key][shared] for weight, key in zip(weights, seen, strict=True)))
        return torch.cat(outputs)

    def _heads(self, state, projection, norm=None, position=None):
        heads = list(self._linear(state, projection).split(self.config.head_dim))
        if norm is not None and self.config.qk_norm:
            heads = [self._rms_norm(head, norm) for head in heads]
        if position is not None:
            heads = [self._rotate(head, position) for head in heads]
        return heads

    def _rotate(self, head, position):
        half = self.config.head_dim // 2
        theta = self.config.rope_parameters["rope_theta"]
        angles = torch.tensor(
            [position * theta ** (-2 * i / self.config.head_dim) for i in range(half)], dtype=torch.float64
        )
        cos, sin = torch.cos(angles), torch.sin(angles)
        first, second = head[:half], head[half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin])

    def _linear(self, state, name):
        result = self.weights[f"{name}.weight"] @ state
        bias = self.weights.get(f"{name}.bias")
        return result if bias is None else result + bias

    def _rms_norm(self, state, name):
        scale = torch.sqrt((state * state).mean() + self.config.rms_norm_eps)
        return state / scale * self.weights[f"{name}.weight"]
