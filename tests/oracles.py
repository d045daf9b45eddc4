"""Independent references for the decoder, written from raw weights, and tiny checkpoints to try them on.

Nothing here uses ``paged.kernels`` or ``paged.model``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

# What a family's tiny checkpoints have beside the sizes that all share.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 32},
    "mistral": {"sliding_window": None, "rope_theta": 1e6},
    "llama": {"rms_norm_eps": 1e-5, "rope_theta": 5e5},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 48},
}


def random_qwen3_folder(folder: Path, **options: Any) -> Path:
    """``random_folder`` of a Qwen3."""
    return random_folder("qwen3", folder, **options)


def random_folder(
    family: str,
    folder: Path,
    *,
    seed: int = 0,
    dtype: str = "float32",
    max_shard_size: str | None = None,
    fused_experts: bool = False,
    eos_token_ids: Sequence[int] = (),
    **overrides: Any,
) -> Path:
    """Save a random tiny model by transformers itself, with norm weights away from 1, and return its folder.

    ``overrides`` are fields of the family's config; ``max_shard_size`` splits the weights and writes an index;
    ``fused_experts`` keeps the names of transformers' own modules instead of the Hub's.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    sizes: dict[str, Any] = {
        "vocab_size": 131,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.1,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    sizes |= FAMILIES[family] | overrides
    if "rope_theta" in sizes:
        sizes["rope_parameters"] = {"rope_type": "default", "rope_theta": sizes.pop("rope_theta")}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() == 1:
                    offset = 1.0 if name.endswith("norm.weight") else 0.0
                    parameter.copy_(offset + 0.2 * torch.randn_like(parameter))
        model.to(getattr(torch, dtype))
        if eos_token_ids:
            model.generation_config = GenerationConfig(eos_token_id=list(eos_token_ids))
        extra: dict[str, Any] = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
        model.save_pretrained(folder, save_original_format=not fused_experts, **extra)
    return folder


def read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """``config.json`` and all tensors of a checkpoint folder."""
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights.update(load_file(file))
    return json.loads((folder / "config.json").read_text()), weights


class ContiguousDecoder:
    """A decoder with one growing key and value tensor a layer: no blocks, no batch, no tiles.

    What a family has follows from its weights' names (norms of queries and keys, a router) and from ``config``.
    ``feed`` takes the next tokens of the text and gives their logits.
    """

    def __init__(self, config: dict[str, Any], weights: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
        self.config = config
        self.weights = {name: tensor.to(dtype) for name, tensor in weights.items()}
        self.dtype = dtype
        self.keys: list[torch.Tensor | None] = [None] * config["num_hidden_layers"]
        self.values: list[torch.Tensor | None] = [None] * config["num_hidden_layers"]
        self.length = 0

    def feed(self, token_ids: Iterable[int]) -> torch.Tensor:
        """Logits [tokens, vocab] of the next tokens."""
        config, w = self.config, self.weights
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        size = config.get("head_dim") or config["hidden_size"] // heads
        ids = torch.tensor(list(token_ids))
        count = len(ids)
        positions = torch.arange(self.length, self.length + count)
        self.length += count
        x = w["model.embed_tokens.weight"][ids]
        for layer in range(config["num_hidden_layers"]):
            p = f"model.layers.{layer}."
            h = self._norm(x, w[p + "input_layernorm.weight"])
            q = self._project(h, p + "self_attn.q_proj").view(count, heads, size)
            k = self._project(h, p + "self_attn.k_proj").view(count, kv_heads, size)
            v = self._project(h, p + "self_attn.v_proj").view(count, kv_heads, size)
            if p + "self_attn.q_norm.weight" in w:
                # A weight as wide as all heads norms them together.
                q_norm, k_norm = w[p + "self_attn.q_norm.weight"], w[p + "self_attn.k_norm.weight"]
                q = self._norm(q.reshape(count, -1, len(q_norm)), q_norm).view(count, heads, size)
                k = self._norm(k.reshape(count, -1, len(k_norm)), k_norm).view(count, kv_heads, size)
            if config.get("clip_qkv") is not None:
                q, k, v = (x.clip(-config["clip_qkv"], config["clip_qkv"]) for x in (q, k, v))
            q, k = self._rotate(q, positions), self._rotate(k, positions)
            old_k, old_v = self.keys[layer], self.values[layer]
            self.keys[layer] = k = k if old_k is None else torch.cat((old_k, k))
            self.values[layer] = v = v if old_v is None else torch.cat((old_v, v))
            out = torch.empty_like(q)
            for head in range(heads):
                shared = head // (heads // kv_heads)
                scores = q[:, head] @ k[:, shared].T / math.sqrt(size)
                later = torch.arange(self.length)[None] > positions[:, None]
                out[:, head] = scores.masked_fill(later, float("-inf")).softmax(-1) @ v[:, shared]
            x = x + self._project(out.reshape(count, heads * size), p + "self_attn.o_proj")
            h = self._norm(x, w[p + "post_attention_layernorm.weight"])
            x = x + (self._experts(h, p + "mlp.") if p + "mlp.gate.weight" in w else self._mlp(h, p + "mlp."))
        x = self._norm(x, w["model.norm.weight"])
        tied = config.get("tie_word_embeddings", False)
        return x @ w["model.embed_tokens.weight" if tied else "lm_head.weight"].T

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """The ``count`` likeliest next tokens, one after the other."""
        tokens = [int(self.feed(prompt)[-1].argmax())]
        while len(tokens) < count:
            tokens.append(int(self.feed(tokens[-1:])[-1].argmax()))
        return tokens

    def _mlp(self, x: torch.Tensor, p: str) -> torch.Tensor:
        gate = self._project(x, p + "gate_proj")
        return self._project(gate * torch.sigmoid(gate) * self._project(x, p + "up_proj"), p + "down_proj")

    def _experts(self, x: torch.Tensor, p: str) -> torch.Tensor:
        """Row by row. The router's probabilities are fp32 by definition."""
        out = torch.zeros_like(x)
        for row, logits in enumerate(self._project(x, p + "gate")):
            probs = logits.float().softmax(-1)
            chosen = sorted(range(len(probs)), key=lambda e: (-float(probs[e]), e))[
                : self.config["num_experts_per_tok"]
            ]
            total = probs[chosen].sum() if self.config["norm_topk_prob"] else 1.0
            for expert in chosen:
                weight = (probs[expert] / total).to(self.dtype)
                out[row] += weight * self._mlp(x[row : row + 1], f"{p}experts.{expert}.")[0]
        return out

    def _project(self, x: torch.Tensor, name: str) -> torch.Tensor:
        out = x @ self.weights[name + ".weight"].T
        bias = self.weights.get(name + ".bias")
        return out if bias is None else out + bias

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.config["rms_norm_eps"]) * weight

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate pairs (i, i + size / 2). Angles are fp32 by definition, cosine and sine their fp32 roundings."""
        parameters = self.config.get("rope_parameters") or self.config
        size = x.shape[-1]
        exponent = torch.arange(0, size, 2, dtype=torch.float32) / size
        angles = positions.float()[:, None] * (1.0 / parameters["rope_theta"] ** exponent)
        cos = angles.double().cos().float().to(self.dtype)[:, None]
        sin = angles.double().sin().float().to(self.dtype)[:, None]
        left, right = x[..., : size // 2], x[..., size // 2 :]
        return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)


def raw_logits(config: dict[str, Any], weights: dict[str, torch.Tensor], token_ids: Sequence[int]) -> torch.Tensor:
    """Logits [tokens, vocab] of the whole text at once in fp64: all heads and all experts in one einsum, no cache.

    Shares nothing with ``ContiguousDecoder``, so that a mistake in one of them is not in both.
    """
    w = {name: tensor.double() for name, tensor in weights.items()}
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    eps, clip = config["rms_norm_eps"], config.get("clip_qkv")
    x = torch.nn.functional.embedding(torch.tensor(list(token_ids)), w["model.embed_tokens.weight"])
    num_tokens = len(x)
    theta = (config.get("rope_parameters") or config)["rope_theta"]
    # The angles are fp32 by definition, and so are the sines and cosines.
    inverse = torch.pow(theta, torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim).reciprocal()
    angle = torch.outer(torch.arange(num_tokens, dtype=torch.float32), inverse).double()
    turn = torch.complex(angle.cos().float().double(), angle.sin().float().double())
    causal = torch.full((num_tokens, num_tokens), float("-inf"), dtype=torch.float64).triu(1)

    def rms_norm(y: torch.Tensor, name: str) -> torch.Tensor:
        return y * (y.square().mean(-1, keepdim=True) + eps).rsqrt() * w[name]

    def affine(y: torch.Tensor, name: str) -> torch.Tensor:
        return torch.nn.functional.linear(y, w[f"{name}.weight"], w.get(f"{name}.bias"))

    def heads(y: torch.Tensor, name: str, count: int, norm: str | None) -> torch.Tensor:
        """One of query, key and value as [tokens, heads, size], normed if there is a weight, and clipped."""
        y = affine(y, name)
        if norm in w:
            each = w[norm].numel() == head_dim
            y = rms_norm(y.unflatten(-1, (count, head_dim)), norm).flatten(-2) if each else rms_norm(y, norm)
        y = y if clip is None else y.clamp(-clip, clip)
        return y.unflatten(-1, (count, head_dim))

    def rotated(y: torch.Tensor) -> torch.Tensor:
        """Component i and component i + size / 2 are the two parts of one complex number."""
        turned = torch.complex(*y.chunk(2, -1)) * turn[:, None]
        return torch.cat((turned.real, turned.imag), -1)

    def experts(y: torch.Tensor, p: str) -> torch.Tensor:
        probs = torch.softmax(affine(y, f"{p}gate").float(), -1)
        number = probs.shape[-1]
        kept = torch.zeros_like(probs)
        first = probs.argsort(stable=True, dim=-1, descending=True)[:, : config["num_experts_per_tok"]]
        kept.scatter_(-1, first, probs.gather(-1, first))
        share = (kept / kept.sum(-1, keepdim=True) if config["norm_topk_prob"] else kept).double()
        gate, up, down = (
            torch.stack([w[f"{p}experts.{e}.{kind}_proj.weight"] for e in range(number)])
            for kind in ("gate", "up", "down")
        )
        inner = torch.nn.functional.silu(torch.einsum("td,eid->tei", y, gate)) * torch.einsum("td,eid->tei", y, up)
        return torch.einsum("te,tei,edi->td", share, inner, down)

    for layer in range(config["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        h = rms_norm(x, f"{p}input_layernorm.weight")
        q = rotated(heads(h, f"{p}self_attn.q_proj", num_heads, f"{p}self_attn.q_norm.weight"))
        k = rotated(heads(h, f"{p}self_attn.k_proj", num_kv_heads, f"{p}self_attn.k_norm.weight"))
        v = heads(h, f"{p}self_attn.v_proj", num_kv_heads, None)
        grouped = q.unflatten(1, (num_kv_heads, -1))
        scores = torch.einsum("qkgd,skd->kgqs", grouped, k) * head_dim**-0.5 + causal
        mixed = torch.einsum("kgqs,skd->qkgd", torch.softmax(scores, -1), v)
        x = x + affine(mixed.flatten(1), f"{p}self_attn.o_proj")
        h = rms_norm(x, f"{p}post_attention_layernorm.weight")
        if f"{p}mlp.gate.weight" in w:
            x = x + experts(h, f"{p}mlp.")
        else:
            inner = torch.nn.functional.silu(affine(h, f"{p}mlp.gate_proj")) * affine(h, f"{p}mlp.up_proj")
            x = x + affine(inner, f"{p}mlp.down_proj")
    head = "model.embed_tokens" if config.get("tie_word_embeddings", False) else "lm_head"
    return torch.einsum("td,vd->tv", rms_norm(x, "model.norm.weight"), w[f"{head}.weight"])


def raw_greedy(
    config: dict[str, Any], weights: dict[str, torch.Tensor], prompt: Sequence[int], count: int
) -> list[int]:
    """Greedy tokens by naive full recomputation in fp64 for every token."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(raw_logits(config, weights, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def dense_attention(q_THD: torch.Tensor, k_LKD: torch.Tensor, v_LKD: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention in fp64 of the last T of L positions, head by head."""
    num_rows, num_heads, _ = q_THD.shape
    length, num_kv_heads, _ = k_LKD.shape
    later = torch.arange(length)[None] > torch.arange(length - num_rows, length)[:, None]
    out = torch.empty(q_THD.shape, dtype=torch.float64)
    for head in range(num_heads):
        shared = head // (num_heads // num_kv_heads)
        scores = q_THD[:, head].double() @ k_LKD[:, shared].double().T * scale
        out[:, head] = scores.masked_fill(later, float("-inf")).softmax(-1) @ v_LKD[:, shared].double()
    return out
