"""Small language models: Hugging Face's of several kinds, and plain ones. Wide weights: no two tokens tie."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "head_dim": 8,
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {"sliding_window": 9, "query_pre_attn_scalar": 8},  # a window in every other layer, soft caps
    "gpt_oss": {"sliding_window": 9, "num_local_experts": 4, "rope_scaling": None},  # sinks, experts
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},  # learned positions
}


def hugging_face(kind: str, **more: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SIZES, **KINDS.get(kind, {}), **more})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.3)
    return model


def save_tokenizer(folder: Path) -> None:
    """Byte-level BPE of 97 tokens, learned from a few words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    known = Tokenizer(models.BPE())
    known.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    known.decoder = decoders.ByteLevel()
    text = ["the quick brown fox jumps over the lazy dog"] * 3
    known.train_from_iterator(text, trainers.BpeTrainer(vocab_size=97, show_progress=False))
    known.save(str(folder / "tokenizer.json"))


NANO = """
import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)
        self.mlp = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (part.view(b, t, 4, 8).transpose(1, 2) for part in self.qkv(self.norm(x)).split(32, dim=2))
        {attention}
        x = x + self.out(y.transpose(1, 2).contiguous().view(b, t, c))
        return x + self.mlp(x)


class GPT(nn.Module):
    block_size = 64

    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(61, 32), nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 61, bias=False)
        self.register_buffer("mask", torch.tril(torch.ones(64, 64)).view(1, 1, 64, 64))

    def forward(self, ids, targets=None):
        b, t = ids.size()
        assert t <= self.block_size, "too long"
        x = self.tokens(ids) + {places}
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        {logits}


torch.manual_seed(0)
model = GPT()
for parameter in model.parameters():
    if parameter.dim() > 1:
        nn.init.normal_(parameter, std=0.4)
"""
CAUSAL = "y = F.scaled_dot_product_attention(q, k, v, is_causal=True)"
COUNTED = "self.places(torch.arange(0, t, dtype=torch.long, device=ids.device))"
CUT = "self.places.weight[:t]"
ALL_LOGITS = "return self.head(x)"
LAST_LOGITS = "return self.head(x[:, [-1], :]), None"


def nano(folder: Path, attention: str = CAUSAL, places: str = COUNTED, logits: str = ALL_LOGITS) -> Path:
    """A model file as people write it."""
    path = folder / "nano.py"
    parts = {"{attention}": attention, "{places}": places, "{logits}": logits}
    source = NANO
    for mark, code in parts.items():
        source = source.replace(mark, code)
    path.write_text(source)
    return path
