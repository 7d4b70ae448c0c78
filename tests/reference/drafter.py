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
        scale = 1.0 if config.embedding_scale is None else config.embedding_scale
        block = [scale * self.embedding[token] for token in [anchor] + [config.mask_token_id] * (num_inputs - 1)]
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
        if config.markov_rank:  # slots that only condition change what a recurrent head remembers
            for hidden in hidden_states[: config.first_prediction_slot]:
                _, state = self._transition_bias(weights["markov_head.markov_w1.weight"][anchor], hidden, state)
        for k, hidden in enumerate(predicting):
            base = self.head @ hidden
            if self.head_bias is not None:
                base = base + self.head_bias
            if config.final_logit_softcapping is not None:
                cap = config.final_logit_softcapping
                base = torch.tensor([cap * math.tanh(float(logit) / cap) for logit in base], dtype=torch.float64)
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
        values = [self._values(state, f"{name}.self_attn") for state in context + normed]
        result = []
        for slot, state in enumerate(block):
            position = block_positions[slot]
            queries, gates = self._queries(normed[slot], f"{name}.self_attn", block_positions[slot])
            seen = self._seen(layer, slot, position, key_positions, len(context))
            heads = self._attend(
                queries, keys, values, seen, self.weights.get(f"{name}.self_attn.attention_sink_bias")
            )
            heads = [
                head if gate is None else head / (1 + torch.exp(-gate))
                for head, gate in zip(heads, gates, strict=True)
            ]
            attended = self._linear(torch.cat(heads), f"{name}.self_attn.o_proj")
            if self.config.backbone == "gemma4":
                state = state + self._rms_norm(attended, f"{name}.post_attention_layernorm")
                fed = self._feed_forward(self._rms_norm(state, f"{name}.pre_feedforward_layernorm"), f"{name}.mlp")
                state = state + self._rms_norm(fed, f"{name}.post_feedforward_layernorm")
                result.append(state * self.weights[f"{name}.layer_scalar"])
            else:
                state = state + attended
                read = self._rms_norm(state, f"{name}.post_attention_layernorm")
                result.append(state + self._feed_forward(read, f"{name}.mlp"))
        return result

    def _feed_forward(self, read, name):
        gate = self._linear(read, f"{name}.gate_proj")
        if self.config.hidden_act == "silu":
            gate = gate / (1 + torch.exp(-gate))
        else:  # gelu_pytorch_tanh
            gate = gate / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
        return self._linear(gate * self._linear(read, f"{name}.up_proj"), f"{name}.down_proj")

    def _queries(self, state, name, position):
        """Queries and gates of one slot, a list of heads each; a head's gate lies behind its query."""
        size, both = self.config.head_dim, self._linear(state, f"{name}.q_proj")
        if not self.config.attention_gate:
            return self._shape_heads(both.split(size), f"{name}.q_norm", position), [None] * (len(both) // size)
        parts = both.split(size)
        return self._shape_heads(parts[::2], f"{name}.q_norm", position), list(parts[1::2])

    def _values(self, state, name):
        heads = self._heads(state, f"{name}.{'k_proj' if self.config.attention_k_eq_v else 'v_proj'}")
        if self.config.backbone == "gemma4":
            heads = [head / torch.sqrt((head * head).mean() + self.config.rms_norm_eps) for head in heads]
        return heads

    def _seen(self, layer, slot, position, key_positions, num_context):
        """Indices of the keys that a slot of the block attends to."""
        seen = []
        for key, key_position in enumerate(key_positions):
            later_in_block = key - num_context > slot
            if later_in_block and self.config.layer_types[layer] in self.config.causal_layer_types:
                continue
            sliding = self.config.layer_types[layer] == "sliding_attention"
            if sliding and self.config.window_from_anchor:
                if key < num_context and key_position < key_positions[num_context] - self.config.sliding_window:
                    continue
            elif sliding and position - key_position >= self.config.sliding_window:
                continue
            seen.append(key)
        return seen

    def _attend(self, queries, keys, values, seen, sinks):
        group = len(queries) // len(keys[0])
        outputs = []
        for head, query in enumerate(queries):
            shared = head // group
            scale = 1.0 if self.config.backbone == "gemma4" else 1 / math.sqrt(self.config.head_dim)
            weights = torch.exp(torch.stack([query @ keys[key][shared] for key in seen]) * scale)
            weights = weights / (weights.sum() + (0.0 if sinks is None else torch.exp(sinks[head])))
            outputs.append(sum(weight * values[key][shared] for weight, key in zip(weights, seen, strict=True)))
        return outputs

    def _heads(self, state, projection, norm=None, position=None):
        return self._shape_heads(self._linear(state, projection).split(self.config.head_dim), norm, position)

    def _shape_heads(self, heads, norm, position):
        heads = list(heads)
        if norm is not None and self.config.qk_norm:
            heads = [self._rms_norm(head, norm) for head in heads]
        if position is not None:
            heads = [self._rotate(head, position) for head in heads]
        return heads

    def _rotate(self, head, position):
        rope, size = self.config.rope_parameters, self.config.head_dim
        part = rope.get("partial_rotary_factor", 1.0)
        turned = head.clone()
        # "proportional": the first angles of a whole head; else all angles of a smaller one.
        whole = rope["rope_type"] == "proportional"
        period = size if whole else int(size * part)
        for i in range(int(part * size // 2)):
            angle = position * rope["rope_theta"] ** (-2 * i / period)
            cos, sin = math.cos(angle), math.sin(angle)
            if self.config.rope_interleaved:
                a, b = 2 * i, 2 * i + 1
            else:
                a, b = i, i + period // 2
            turned[a], turned[b] = head[a] * cos - head[b] * sin, head[b] * cos + head[a] * sin
        return turned

    def _linear(self, state, name):
        result = self.weights[f"{name}.weight"] @ state
        bias = self.weights.get(f"{name}.bias")
        return result if bias is None else result + bias

    def _rms_norm(self, state, name):
        scale = torch.sqrt((state * state).mean() + self.config.rms_norm_eps)
        return state / scale * (self.weights[f"{name}.weight"] + (1.0 if self.config.zero_centered_norms else 0.0))
